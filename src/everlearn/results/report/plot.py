"""Plot the main figures as one PNG, for slides and papers."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from everlearn.results.report.rows import Row, run_rows
from everlearn.results.result import Result
from everlearn.runtime.escaping import plot_label
from everlearn.runtime.optional_imports import import_optional

MARKERS = "os^DPvX*"
LINE_STYLES = ("-", "--", ":", "-.")
NUM_COLORS = 10  # of matplotlib's default cycle
MIN_AXIS_SPAN = 5  # percentage points; otherwise differences of a thousandth would fill the axis
LEGEND_CHARACTERS = 120  # that fit in a line of the legend
LEGEND_LINE_HEIGHT = 0.22  # inches


def png(results: Sequence[Result]) -> bytes:
    """Plot for each stream and scenario stability against plasticity, and the average accuracy over the stream."""
    rows = []
    for row in run_rows(results):
        labels = {key: plot_label(row[key]) for key in ("stream", "scenario", "method")}
        rows.append({**row, **labels})
    settings = list(dict.fromkeys((row["stream"], row["scenario"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))

    # The figure grows with the legend, so that many methods do not squeeze the axes.
    longest_name = max(map(len, methods), default=0)
    legend_columns = max(1, min(len(methods), LEGEND_CHARACTERS // (6 + longest_name)))
    legend_height = LEGEND_LINE_HEIGHT * math.ceil(len(methods) / legend_columns)
    figure = import_optional("matplotlib.figure", "plot", "A plot").Figure(
        figsize=(11, 4 * len(settings) + legend_height), dpi=120, layout="constrained"
    )
    axes = figure.subplots(len(settings), 2, squeeze=False)
    for (trade_off_axis, average_axis), setting in zip(axes, settings, strict=True):
        setting_rows = [row for row in rows if (row["stream"], row["scenario"]) == setting]
        _plot_setting(trade_off_axis, average_axis, setting_rows, methods)

    handles = _legend_handles(axes, methods)
    if handles:
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=legend_columns,
            fontsize="small",
            frameon=False,
        )
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def style(i: int) -> dict[str, Any]:
    """Return the style of the i-th method; the styles of forty methods are distinct.

    Colors repeat after ten methods. Then the line style changes, and every second ten have hollow markers.
    """
    color = f"C{i % NUM_COLORS}"
    is_hollow = i // NUM_COLORS % 2 == 1
    return {
        "color": color,
        "marker": MARKERS[i % len(MARKERS)],
        "markerfacecolor": "white" if is_hollow else color,
        "linestyle": LINE_STYLES[i // NUM_COLORS % len(LINE_STYLES)],
    }


def _plot_setting(trade_off_axis: Any, average_axis: Any, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Plot the runs of one stream and scenario."""
    score = rows[0]["score"]
    is_percent = score == "accuracy"
    factor = 1
    unit = ""
    if is_percent:
        factor = 100
        unit = " (%)"
    for i, method in enumerate(methods):
        method_rows = [row for row in rows if row["method"] == method]
        _plot_trade_off(trade_off_axis, method_rows, method, i, factor)
        _plot_average(average_axis, method_rows, method, i, factor)

    trade_off_axis.set(
        title=f"{rows[0]['stream']}, {rows[0]['scenario']}-incremental",
        xlabel=f"{plot_label(score)} on new tasks{unit}",
        ylabel=f"{plot_label(score)} on old tasks{unit}",
    )
    average_axis.set(xlabel="tasks learned", ylabel=f"average over tasks so far{unit}")
    if is_percent:
        trade_off_axis.set(xlim=_widen_limits(trade_off_axis.get_xlim()), ylim=_widen_limits(trade_off_axis.get_ylim()))
        average_axis.set(ylim=_widen_limits(average_axis.get_ylim()))
    average_axis.xaxis.get_major_locator().set_params(integer=True)


def _legend_handles(axes: Any, methods: Sequence[str]) -> dict[str, Any]:
    """Return the legend entry of each plotted method; lines show more of the style than points and take precedence."""
    handle_of: dict[str, Any] = {}
    for axis in (*axes[:, 0], *axes[:, 1]):
        handles, labels = axis.get_legend_handles_labels()
        handle_of.update(zip(labels, handles, strict=True))
    return {method: handle_of[method] for method in methods if method in handle_of}


def _plot_trade_off(axis: Any, rows: Sequence[Row], method: str, i: int, factor: int) -> None:
    """Plot the accuracy on old tasks against that on new ones, a point per run."""
    points = []
    for row in rows:
        if row["learning"] is not None and row["old tasks"] is not None:
            points.append((factor * row["learning"], factor * row["old tasks"]))
    if points:
        axis.plot(*zip(*points, strict=True), label=method, **{**style(i), "linestyle": ""})


def _plot_average(axis: Any, rows: Sequence[Row], method: str, i: int, factor: int) -> None:
    """Plot the average accuracy over the tasks so far, mean over seeds."""
    complete = [row for row in rows if len(row["matrix"]) > 1 and len(row["matrix"]) == len(rows[0]["matrix"])]
    if not complete:
        return
    averages = []
    for row in complete:
        averages.append([factor * _mean(accuracies[: t + 1]) for t, accuracies in enumerate(row["matrix"])])
    mean_over_seeds = [sum(values) / len(values) for values in zip(*averages, strict=True)]
    axis.plot(complete[0]["tasks"][: len(mean_over_seeds)], mean_over_seeds, label=method, **style(i))


def _widen_limits(limits: tuple[float, float]) -> tuple[float, float]:
    """Widen the limits of an axis to at least ``MIN_AXIS_SPAN`` points around the same center.

    >>> _widen_limits((90.0, 90.5)), _widen_limits((20.0, 80.0))
    ((87.75, 92.75), (20.0, 80.0))
    """
    low, high = limits
    margin = max(0.0, MIN_AXIS_SPAN - (high - low)) / 2
    return low - margin, high + margin


def _mean(accuracies: Sequence[float | None]) -> float:
    """Return the mean of the measured tasks; NaN, which is not drawn, if there are none."""
    measured = [accuracy for accuracy in accuracies if accuracy is not None]
    if measured:
        return sum(measured) / len(measured)
    return math.nan
