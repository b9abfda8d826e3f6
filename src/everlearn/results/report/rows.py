"""Results as plain data for pages, spreadsheets and plots: one dict per run, with its metrics."""

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

METRICS = {  # attribute of a result -> title in reports
    "average_accuracy": "average",
    "overall_accuracy": "overall",
    "forgetting": "forgetting",
    "learning_accuracy": "learning",
    "average_incremental_accuracy": "incremental",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}
CSV_COLUMNS = [
    *("stream", "scenario", "method", "seed", "score"),
    *METRICS.values(),
    *("seconds", "parameters", "state bytes"),
]
MARKDOWN_METRICS = ["average", "overall", "forgetting", "learning"]
MARKDOWN_COLUMNS = ["method", "seeds", *MARKDOWN_METRICS, "seconds", "parameters", "state KB"]
MAX_TASKS = 30  # a page shows this many tasks of a longer stream, or a hundred runs would need gigabytes

Row = dict[str, Any]


def run_rows(results: Iterable[Result]) -> list[Row]:
    """Return one dict per run: names, metrics, the matrix, costs and configuration; None for missing numbers."""
    return [_run_row(result, *names) for result, names in named_runs(list(results))]


def _run_row(result: Result, stream: str, scenario: str, method: str) -> Row:
    cost = result.cost
    seconds = cost.get("seconds", {})

    # Joint training has a single row, which is always shown.
    num_rows, num_tasks = result.accuracy.shape
    tasks = evenly_spaced(num_tasks)
    rows = [0]
    if num_rows > 1:
        rows = [i for i in tasks if i < num_rows]
    old_task_accuracy = math.nan
    if num_tasks > 1:
        old_task_accuracy = float(np.mean(result.accuracy[-1, :-1]))
    return {
        "stream": stream,
        "scenario": scenario,
        "method": method,
        "seed": result.config.get("seed"),
        "score": printable(str(result.config.get("score", "accuracy"))),
        **{title: _finite(getattr(result, metric)) for metric, title in METRICS.items()},
        "old tasks": _finite(old_task_accuracy),
        "seconds": round(result.seconds, 3),
        "train seconds": round(seconds.get("train", 0.0), 3),
        "consolidate seconds": round(seconds.get("consolidate", 0.0), 3),
        "parameters": (cost.get("parameters") or [None])[-1],
        "state bytes": (cost.get("state_bytes") or [None])[-1],
        "peak bytes": cost.get("peak_memory"),
        "tasks": [t + 1 for t in tasks],
        "matrix": [[_finite(value) for value in row] for row in result.accuracy[np.ix_(rows, tasks)].tolist()],
        "diagnostics": [values for t, values in enumerate(result.diagnostics) if t in rows],
        "config": result.config,
        "provenance": result.provenance,
    }


def evenly_spaced(count: int, limit: int = MAX_TASKS) -> list[int]:
    """Select at most ``limit`` of the numbers below ``count``, evenly spaced, including the first and the last.

    >>> evenly_spaced(3), evenly_spaced(9, limit=5)
    ([0, 1, 2], [0, 2, 4, 6, 8])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


def _finite(value: float) -> float | None:
    if math.isfinite(value):
        return round(float(value), 5)
    return None


def as_csv(results: Iterable[Result]) -> str:
    """Format a line per run for a spreadsheet; cells that could be read as formulas are quoted."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in run_rows(results):
        writer.writerow([spreadsheet(row[column]) for column in CSV_COLUMNS])
    return text.getvalue()


def as_markdown(results: Iterable[Result]) -> str:
    """Format a Markdown table per stream and scenario, mean ± standard deviation over seeds."""
    by_setting: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in run_rows(results):
        setting = (row["stream"], row["scenario"])
        by_setting.setdefault(setting, {}).setdefault(row["method"], []).append(row)

    tables = []
    for (stream, scenario), by_method in by_setting.items():
        lines = [MARKDOWN_COLUMNS, ["---"] * len(MARKDOWN_COLUMNS)]
        lines += [_markdown_cells(method, runs) for method, runs in by_method.items()]
        tables.append(
            f"## {markdown(stream)}, {markdown(scenario)}-incremental\n\n"
            + "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
            + "\n\nAverage: mean over tasks. Overall: over all test examples."
        )
    return "\n\n".join(tables) + "\n"


def _markdown_cells(method: str, runs: Sequence[Row]) -> list[str]:
    scale = 100 if runs[0]["score"] == "accuracy" else 1
    metrics = [
        mean_and_std([scale * row[title] for row in runs if row[title] is not None]) for title in MARKDOWN_METRICS
    ]
    seconds = np.mean([row["seconds"] for row in runs])
    sizes = [row["parameters"] for row in runs if row["parameters"]]
    parameters = "–"
    if sizes:
        parameters = f"{np.mean(sizes):,.0f}"
    state_kilobytes = np.mean([(row["state bytes"] or 0) / 1024 for row in runs])
    return [markdown(method), str(len(runs)), *metrics, f"{seconds:.1f}", parameters, f"{state_kilobytes:.0f}"]


def mean_and_std(values: Sequence[float]) -> str:
    """Format mean ± standard deviation, or a dash without values.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([])
    ('2.0 ± 1.4', '–')
    """
    if not values:
        return "–"
    mean = f"{np.mean(values):.1f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1):.1f}"
