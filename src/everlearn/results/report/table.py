"""Text tables of results, one per stream and scenario."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from everlearn.results.result import Result
from everlearn.runtime.escaping import printable

Group = dict[str, list[Result]]  # results of each method, one per seed

METRICS = {  # title of a column -> attribute of a result
    "average": "average_accuracy",
    "overall": "overall_accuracy",
    "forgetting": "forgetting",
    "learning": "learning_accuracy",
    "incremental": "average_incremental_accuracy",
    "backward": "backward_transfer",
    "forward": "forward_transfer",
}
MAX_TASK_COLUMNS = 10  # of a longer stream, evenly spaced tasks are shown


def table(results: Iterable[Result]) -> str:
    """Format a table of methods and metrics for each stream and scenario, mean ± standard deviation over seeds."""
    tables = []
    for (stream, scenario), group in group_results(results).items():
        explanation = f"{unit(group)}, mean ± std over seeds; average: over tasks, overall: over all test examples"
        tables.append(f"{stream}, {scenario}-incremental ({explanation})\n" + _format_group(group))
    return "\n\n".join(tables)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns, the first to the left and the others to the right, with a line below the first row.

    >>> print(align_columns([["method", "accuracy"], ["joint", "98.1"]]))
    method  accuracy
    ----------------
    joint       98.1
    """
    first_width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first_cell, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([first_cell.ljust(first_width), *aligned]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def named_runs(results: Iterable[Result]) -> list[tuple[Result, tuple[str, str, str]]]:
    """Pair each result with its stream, scenario and method; the method's name includes settings that differ."""
    by_setting: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        stream = result.config.get("stream", {}).get("name", "?")
        by_setting[stream, result.config.get("scenario", "?")].append(result)

    named = []
    for (stream, scenario), runs in by_setting.items():
        for result, variant in zip(runs, _differing_settings(runs), strict=True):
            method = ", ".join([result.config["method"], *variant])
            named.append((result, (printable(stream), printable(scenario), printable(method))))
    return named


def group_results(results: Iterable[Result]) -> dict[tuple[str, str], Group]:
    """Group results by stream and scenario, then by method, the best first."""
    groups: dict[tuple[str, str], Group] = {}
    for result, (stream, scenario, method) in named_runs(results):
        groups.setdefault((stream, scenario), {}).setdefault(method, []).append(result)

    def mean_accuracy(item: tuple[str, list[Result]]) -> float:
        return float(np.mean([result.average_accuracy for result in item[1]]))

    for setting, group in groups.items():
        groups[setting] = dict(sorted(group.items(), key=lambda item: -mean_accuracy(item)))
    return groups


def _differing_settings(results: Sequence[Result]) -> list[list[str]]:
    """List for each result the settings in which these results differ, besides method and seed."""
    settings = [_settings(result) for result in results]
    keys = [
        (result.config["method"], result.config.get("seed"), repr(values))
        for result, values in zip(results, settings, strict=True)
    ]
    # If a seed occurs twice in one setting, the data or the initial weights were different.
    if len(set(keys)) < len(keys):
        for result, values in zip(results, settings, strict=True):
            values["data"] = _short_digest(repr(result.config.get("fingerprints")))

    names = dict.fromkeys(name for values in settings for name in values)
    differing = [name for name in names if len({repr(values.get(name)) for values in settings}) > 1]
    return [[f"{name}={values.get(name)}" for name in differing] for values in settings]


def _settings(result: Result) -> dict[str, Any]:
    """Return the settings that all seeds of an experiment share, and joint training on the same stream with them."""
    training = dict(result.config.get("training", {}))
    groups = training.pop("groups", [{}])
    group_settings = {"groups": groups}
    if len(groups) == 1:
        group_settings = groups[0]

    # Joint training merges all tasks into one, so its iterations are divided by their number.
    stream = dict(result.config.get("stream", {}))
    is_joint = stream.pop("joint", False)
    default_merged = 1
    if is_joint:
        default_merged = stream.get("tasks", 1)
    num_merged = stream.pop("merged", default_merged)
    iterations = training.get("iterations")
    if iterations:
        is_divisible = iterations % num_merged == 0
        training["iterations"] = iterations // num_merged if is_divisible else iterations / num_merged

    stream = {name: value for name, value in stream.items() if name not in ("seed", "class_order")}
    model_text = str(result.config.get("model"))
    model = f"{model_text.split('(')[0]}-{_short_digest(model_text)}"
    return {**training, **group_settings, **stream, "model": model}


def _short_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=2).hexdigest()


def _format_group(group: Group) -> str:
    """Format tables narrow enough for a terminal: metrics, costs, and diagnostics that change over tasks."""
    tables = (_metrics_table(group), _cost_table(group), _growth_table(group))
    return "\n\n".join(align_columns(rows) for rows in tables if len(rows) > 1)


def _metrics_table(group: Group) -> list[list[str]]:
    joint_runs = {}
    for runs in group.values():
        for result in runs:
            if result.config["method"] == "joint":
                joint_runs[_setting_key(result)] = result

    rows = [["method", "seeds", *METRICS, "intransigence"]]
    for method, runs in group.items():
        score = score_name(runs)
        seeds = {result.config.get("seed") for result in runs}
        cells = [mean_and_std([getattr(result, metric) for result in runs], score) for metric in METRICS.values()]
        intransigence = []
        for result in runs:
            joint = _matching_joint_run(result, joint_runs)
            if joint is not None:
                intransigence.append(result.intransigence(joint))
        rows.append([method, str(len(seeds)), *cells, mean_and_std(intransigence, score)])
    return rows


def _cost_table(group: Group) -> list[list[str]]:
    diagnostic_names = list(
        dict.fromkeys(name for runs in group.values() for result in runs for name in _final_diagnostics(result))
    )
    purposes = ("train", "consolidate", "evaluate")
    rows = [["method", *(f"{p} s" for p in purposes), "peak MB", "parameters", "state KB", *diagnostic_names]]
    for method, runs in group.items():
        costs = [result.cost for result in runs]
        diagnostics = [_final_diagnostics(result) for result in runs]
        rows.append(
            [
                method,
                *(_mean([cost.get("seconds", {}).get(p) for cost in costs], "{:.2f}") for p in purposes),
                _mean([cost.get("peak_memory", 0) / 2**20 for cost in costs], "{:.0f}"),
                _mean([(cost.get("parameters") or [None])[-1] for cost in costs], "{:,.0f}"),
                _mean([(cost.get("state_bytes") or [0])[-1] / 1024 for cost in costs], "{:,.0f}"),
                *(_short_mean([values.get(name) for values in diagnostics]) for name in diagnostic_names),
            ]
        )
    return rows


def _growth_table(group: Group) -> list[list[str]]:
    """List the diagnostics that change from task to task; of many tasks some, including the last."""
    by_method = {
        method: [result.diagnostics for result in runs if result.diagnostics] for method, runs in group.items()
    }
    num_tasks = max((len(diagnostics) for runs in by_method.values() for diagnostics in runs), default=0)
    stride = -(-num_tasks // MAX_TASK_COLUMNS)
    tasks = [t for t in range(num_tasks) if (num_tasks - 1 - t) % stride == 0]

    rows = [["growth", *(f"task {t + 1}" for t in tasks)]]
    for method, runs in by_method.items():
        names = dict.fromkeys(name for diagnostics in runs for values in diagnostics for name in values)
        for name in names:
            if name.startswith("importance") or not any(_changes(diagnostics, name) for diagnostics in runs):
                continue
            cells = []
            for t in tasks:
                cells.append(_short_mean([diagnostics[t].get(name) for diagnostics in runs if t < len(diagnostics)]))
            rows.append([f"{method}: {printable(name)}", *cells])
    return rows


def _changes(diagnostics: Sequence[Mapping[str, float]], name: str) -> bool:
    return len({values.get(name) for values in diagnostics}) > 1


def _matching_joint_run(result: Result, joint_runs: dict[tuple[Any, str], Result]) -> Result | None:
    """Return joint training in the setting of a result, on as many tasks; None for joint training itself."""
    joint = joint_runs.get(_setting_key(result))
    if joint is None or joint is result or joint.accuracy.shape[1] != result.accuracy.shape[1]:
        return None
    return joint


def _final_diagnostics(result: Result) -> dict[str, float]:
    """Return the diagnostics after the last task, without distributions of importances, which plots show."""
    diagnostics: list[dict[str, float]] = result.cost.get("diagnostics") or [{}]
    return {printable(name): value for name, value in diagnostics[-1].items() if not name.startswith("importance")}


def _setting_key(result: Result) -> tuple[Any, str]:
    return result.config.get("seed"), repr(_settings(result))


def score_name(results: Sequence[Result]) -> str:
    """Return the name of the score of these results, as they record it."""
    return printable(str(results[0].config.get("score", "accuracy")))


def unit(group: Group) -> str:
    """Return what the numbers of a group are: accuracies in percent, or another score."""
    score = score_name(next(iter(group.values())))
    if score == "accuracy":
        return "accuracy in %"
    return score


def mean_and_std(values: Sequence[float], score: str) -> str:
    """Format mean ± standard deviation, accuracies in percent and other scores as plain numbers."""
    scale = 1
    number_format = "{:.4g}"
    if score == "accuracy":
        scale = 100
        number_format = "{:.1f}"
    scaled = [scale * value for value in values if not np.isnan(value)]
    if not scaled:
        return "–"
    mean = number_format.format(np.mean(scaled))
    if len(scaled) == 1:
        return mean
    return f"{mean} ± {number_format.format(np.std(scaled, ddof=1))}"


def _mean(values: Sequence[Any], number_format: str) -> str:
    """Format the mean of the values that are not None."""
    numbers = [value for value in values if value is not None]
    if numbers:
        return number_format.format(np.mean(numbers))
    return "–"


def _short_mean(values: Sequence[Any]) -> str:
    """Format the mean with four digits, but large counts in full."""
    is_large = any(value is not None and abs(value) >= 1000 for value in values)
    return _mean(values, "{:,.0f}" if is_large else "{:,.4g}")
