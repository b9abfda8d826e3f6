"""The main pictures as one PNG, for slides and papers."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from everlearn.results.report.rows import Run, runs
from everlearn.results.result import Result
from everlearn.runtime.escaping import plot_label
from everlearn.runtime.optional_imports import import_optional

MARKS = "os^DPvX*"
LINES = ("-", "--", ":", "-.")
COLORS = 10  # of matplotlib's own cycle; after them styles change
LEAST = 5  # points of accuracy that an axis spans, or differences of a thousandth would fill it
LETTERS = 120  # that fit beside each other in the legend


def png(results: Sequence[Result]) -> bytes:
    """For each stream and scenario: stability against plasticity, and the average over the stream."""
    every = [{**r, **{key: plot_label(r[key]) for key in ("stream", "scenario", "method")}} for r in runs(results)]
    places = list(dict.fromkeys((r["stream"], r["scenario"]) for r in every))
    methods = list(dict.fromkeys(r["method"] for r in every))
    columns = max(1, min(len(methods), LETTERS // (6 + max(map(len, methods), default=0))))
    legend = 0.22 * -(-len(methods) // columns)  # inches
    figure = import_optional("matplotlib.figure", "plot", "A picture").Figure(
        figsize=(11, 4 * len(places) + legend), dpi=120, layout="constrained"
    )
    axes = figure.subplots(len(places), 2, squeeze=False)
    for (left, right), place in zip(axes, places, strict=True):
        here = [r for r in every if (r["stream"], r["scenario"]) == place]
        score = here[0]["score"]
        percent = score == "accuracy"
        factor = 100 if percent else 1
        unit = " (%)" if percent else ""
        for i, method in enumerate(methods):
            mine = [r for r in here if r["method"] == method]
            _points(left, mine, method, i, factor)
            _course(right, mine, method, i, factor)
        left.set(
            title=f"{place[0]}, {place[1]}-incremental",
            xlabel=f"{plot_label(score)} on new tasks{unit}",
            ylabel=f"{plot_label(score)} on old tasks{unit}",
        )
        right.set(xlabel="tasks learned", ylabel=f"average over tasks so far{unit}")
        if percent:
            left.set(xlim=_wide_enough(left.get_xlim()), ylim=_wide_enough(left.get_ylim()))
            right.set(ylim=_wide_enough(right.get_ylim()))
        right.xaxis.get_major_locator().set_params(integer=True)
    if drawn := _legend(axes, methods):
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def style(i: int) -> dict[str, Any]:
    """How the i-th method is drawn: no two of forty look alike, and every second ten is hollow."""
    color = f"C{i % COLORS}"
    hollow = i // COLORS % 2
    return {
        "color": color,
        "marker": MARKS[i % len(MARKS)],
        "markerfacecolor": "white" if hollow else color,
        "linestyle": LINES[i // COLORS % len(LINES)],
    }


def _legend(axes: Any, methods: Sequence[str]) -> dict[str, Any]:
    """What stands for each method that is drawn anywhere; lines show more of its style than points do."""
    found: dict[str, Any] = {}
    for axis in (*axes[:, 0], *axes[:, 1]):
        found.update(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    return {method: found[method] for method in methods if method in found}


def _points(axis: Any, mine: Sequence[Run], method: str, i: int, factor: int) -> None:
    pairs = [(r["learning"], r["old tasks"]) for r in mine if None not in (r["learning"], r["old tasks"])]
    if pairs:
        sides = ([factor * v for v in side] for side in zip(*pairs, strict=True))
        axis.plot(*sides, label=method, **{**style(i), "linestyle": ""})


def _course(axis: Any, mine: Sequence[Run], method: str, i: int, factor: int) -> None:
    whole = [r for r in mine if len(r["matrix"]) > 1 and len(r["matrix"]) == len(mine[0]["matrix"])]
    if not whole:
        return
    sofar = [[factor * _mean(row[: t + 1]) for t, row in enumerate(r["matrix"])] for r in whole]
    mean = [sum(values) / len(values) for values in zip(*sofar, strict=True)]
    axis.plot(whole[0]["tasks"][: len(mean)], mean, label=method, **style(i))


def _wide_enough(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits of an axis that spans at least ``LEAST`` points, about the same middle.

    >>> _wide_enough((90.0, 90.5)), _wide_enough((20.0, 80.0))
    ((87.75, 92.75), (20.0, 80.0))
    """
    low, high = limits
    missing = max(0.0, LEAST - (high - low)) / 2
    return low - missing, high + missing


def _mean(row: Sequence[float | None]) -> float:
    """Of the tasks that were measured; nan, which is not drawn, where none was."""
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known else math.nan
