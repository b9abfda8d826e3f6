"""Results as plain data for pages, spreadsheets and pictures: one dict per run, with its metrics."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from everlearn.results.report.table import named_runs
from everlearn.results.result import Result
from everlearn.runtime.escaping import markdown, printable, spreadsheet

METRICS = {  # attribute of a result -> what people call it
    "average_accuracy": "average",
    "overall_accuracy": "overall",
    "forgetting": "forgetting",
    "learning_accuracy": "learning",
    "average_incremental_accuracy": "incremental",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}
MOST_TASKS = 30  # of a longer stream a page shows some, or a hundred runs would be gigabytes

Run = dict[str, Any]


def runs(results: Iterable[Result]) -> list[Run]:
    """One dict per run: names, metrics, the matrix, costs and configuration; what is not a number is None."""
    return [_run(result, *names) for result, names in named_runs(list(results))]


def _run(result: Result, stream: str, scenario: str, method: str) -> Run:
    seconds, cost = result.cost.get("seconds", {}), result.cost
    shown = some(len(result.accuracy.T))
    rows = [i for i in shown if i < len(result.accuracy)] if len(result.accuracy) > 1 else [0]
    return {
        "stream": stream,
        "scenario": scenario,
        "method": method,
        "seed": result.config.get("seed"),
        "score": printable(str(result.config.get("score", "accuracy"))),
        **{name: _number(getattr(result, metric)) for metric, name in METRICS.items()},
        "old tasks": _number(float(np.mean(result.accuracy[-1, :-1])) if result.accuracy.shape[1] > 1 else math.nan),
        "seconds": round(result.seconds, 3),
        "train seconds": round(seconds.get("train", 0.0), 3),
        "consolidate seconds": round(seconds.get("consolidate", 0.0), 3),
        "parameters": (cost.get("parameters") or [None])[-1],
        "state bytes": (cost.get("state_bytes") or [None])[-1],
        "peak bytes": cost.get("peak_memory"),
        "tasks": [t + 1 for t in shown],
        "matrix": [[_number(v) for v in row] for row in result.accuracy[np.ix_(rows, shown)].tolist()],
        "facts": [facts for t, facts in enumerate(result.diagnostics) if t in rows],
        "config": result.config,
        "made": result.provenance,
    }


def some(count: int, most: int = MOST_TASKS) -> list[int]:
    """At most so many of the first numbers, evenly spread, both ends among them.

    >>> some(3), some(9, most=5)
    ([0, 1, 2], [0, 2, 4, 6, 8])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _number(value: float) -> float | None:
    return round(float(value), 5) if math.isfinite(value) else None


def as_csv(results: Iterable[Result]) -> str:
    """A line per run, for a spreadsheet; a cell that a spreadsheet might take for a formula is quoted."""
    columns = [
        "stream",
        "scenario",
        "method",
        "seed",
        "score",
        *METRICS.values(),
        "seconds",
        "parameters",
        "state bytes",
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for run in runs(results):
        writer.writerow([spreadsheet(run[c]) for c in columns])
    return text.getvalue()


def as_markdown(results: Iterable[Result]) -> str:
    """A table per stream and scenario, mean ± standard deviation over seeds."""
    parts = []
    every = runs(results)
    for place in dict.fromkeys((r["stream"], r["scenario"]) for r in every):
        here = [r for r in every if (r["stream"], r["scenario"]) == place]
        titles = [
            "method",
            "seeds",
            "average",
            "overall",
            "forgetting",
            "learning",
            "seconds",
            "parameters",
            "state KB",
        ]
        rows = [titles, ["---"] * len(titles)]
        for method in dict.fromkeys(r["method"] for r in here):
            mine = [r for r in here if r["method"] == method]
            scale = 100 if mine[0]["score"] == "accuracy" else 1
            numbers = [spread([scale * r[m] for r in mine if r[m] is not None]) for m in titles[2:6]]
            costs = [
                f"{np.mean([r['seconds'] for r in mine]):.1f}",
                f"{np.mean(sizes):,.0f}" if (sizes := [r["parameters"] for r in mine if r["parameters"]]) else "–",
                f"{np.mean([(r['state bytes'] or 0) / 1024 for r in mine]):.0f}",
            ]
            rows.append([markdown(method), str(len(mine)), *numbers, *costs])
        parts.append(
            f"## {markdown(place[0])}, {markdown(place[1])}-incremental\n\n"
            + "\n".join("| " + " | ".join(r) + " |" for r in rows)
            + "\n\nAverage: mean over tasks. Overall: over all test examples."
        )
    return "\n\n".join(parts) + "\n"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, or a dash.

    >>> spread([1.0, 3.0]), spread([])
    ('2.0 ± 1.4', '–')
    """
    if not values:
        return "–"
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")
