"""Results as text tables: one per stream and scenario, or one overview of all scenarios."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from everlearn.results.result import Result
from everlearn.runtime.escaping import printable

Group = dict[str, list[Result]]  # a method's results, one per seed


def table(results: Iterable[Result]) -> str:
    """For each stream and scenario a table of methods and metrics, mean ± standard deviation over seeds."""
    return "\n\n".join(
        f"{stream}, {scenario}-incremental ({_unit(group)}, mean ± std over seeds; average: over tasks, overall: over all test "
        "examples)\n" + _metrics(group)
        for (stream, scenario), group in _groups(results).items()
    )


def overview(results: Iterable[Result]) -> str:
    """Methods against scenarios: average accuracy after the last task and, in brackets, forgetting."""
    groups = _groups(results)
    methods = list(dict.fromkeys(m for group in groups.values() for m in group))
    titles = ["method", *(f"{scenario}-incremental" for _, scenario in groups), "seconds"]
    lines = []
    for m in methods:
        mine = [group.get(m, []) for group in groups.values()]
        seconds = np.mean([r.seconds for rs in mine for r in rs])
        lines.append([m, *(_cell(rs) for rs in mine), f"{seconds:.1f}"])
    streams = ", ".join(dict.fromkeys(stream for stream, _ in groups))
    seeds = max(len(rs) for group in groups.values() for rs in group.values())
    unit = _unit(next(iter(groups.values())))
    note = f"{streams}: average {unit} after the last task (forgetting in brackets), {seeds} seed{'s' * (seeds > 1)}"
    return note + "\n" + columns([titles, *lines])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words as aligned columns, the first row over a line; the first column to the left, others to the right.

    >>> print(columns([["method", "accuracy"], ["joint", "98.1"]]))
    method  accuracy
    ----------------
    joint       98.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            word.ljust(w) if i == 0 else word.rjust(w) for i, (word, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def named_runs(results: Iterable[Result]) -> list[tuple[Result, tuple[str, str, str]]]:
    """Every result with its stream, its scenario and its method, whose name tells whatever differs besides the seed."""
    by_setting: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for r in results:
        by_setting[r.config.get("stream", {}).get("name", "?"), r.config.get("scenario", "?")].append(r)
    return [
        (r, (printable(setting[0]), printable(setting[1]), printable(", ".join([r.config["method"], *variant]))))
        for setting, rs in by_setting.items()
        for r, variant in zip(rs, _variants(rs), strict=True)
    ]


def _groups(results: Iterable[Result]) -> dict[tuple[str, str], Group]:
    """By stream and scenario, then by method, the best first; seeds are averaged."""
    groups: dict[tuple[str, str], Group] = {}
    for r, (stream, scenario, method) in named_runs(results):
        groups.setdefault((stream, scenario), {}).setdefault(method, []).append(r)
    return {
        setting: dict(sorted(group.items(), key=lambda item: -np.mean([r.average_accuracy for r in item[1]])))
        for setting, group in groups.items()
    }


def _variants(results: Sequence[Result]) -> list[list[str]]:
    """For each result the facts in which these results differ, beyond method and seed."""
    facts = [_facts(r) for r in results]
    same = [(r.config["method"], r.config.get("seed"), repr(f)) for r, f in zip(results, facts, strict=True)]
    if len(set(same)) < len(same):  # one seed twice: the data or first weights were others
        facts = [
            {**f, "data": hashlib.blake2b(repr(r.config.get("fingerprints")).encode(), digest_size=2).hexdigest()}
            for r, f in zip(results, facts, strict=True)
        ]
    varied = [k for k in dict.fromkeys(k for f in facts for k in f) if len({repr(f.get(k)) for f in facts}) > 1]
    return [[f"{k}={f.get(k)}" for k in varied] for f in facts]


def _facts(result: Result) -> dict[str, Any]:
    """What all seeds of one setting have in common, joint training on the same stream included."""
    training = dict(result.config.get("training", {}))
    groups = training.pop("groups", [{}])
    stream = dict(result.config.get("stream", {}))
    joint = stream.pop("joint", False)
    merged = stream.pop("merged", stream.get("tasks", 1) if joint else 1)
    if steps := training.get("iterations"):  # joint training's are those of all its tasks
        training["iterations"] = steps / merged if steps % merged else steps // merged
    stream = {k: v for k, v in stream.items() if k not in ("seed", "class_order")}
    text = str(result.config.get("model"))
    model = f"{text.split('(')[0]}-{hashlib.blake2b(text.encode(), digest_size=2).hexdigest()}"
    return {**training, **(groups[0] if len(groups) == 1 else {"groups": groups}), **stream, "model": model}


def _metrics(group: Group) -> str:
    """Tables narrow enough for a terminal: what was reached, what it cost, and how that grew where it did."""
    joint = {_setting(r): r for rs in group.values() for r in rs if r.config["method"] == "joint"}
    reached = [
        [
            "method",
            "seeds",
            "average",
            "overall",
            "forgetting",
            "learning",
            "incremental",
            "backward",
            "forward",
            "intransigence",
        ]
    ]
    told = list(dict.fromkeys(name for rs in group.values() for r in rs for name in _told(r)))
    spent = [["method", "train s", "consolidate s", "evaluate s", "peak MB", "parameters", "state KB", *told]]
    for method, rs in group.items():
        name, against = _score(rs), [r.intransigence(j) for r in rs if (j := _joint_of(r, joint)) is not None]
        reached.append([
            method, str(len({r.config.get("seed") for r in rs})),
            *(_spread([getattr(r, metric) for r in rs], name) for metric in (
                "average_accuracy", "overall_accuracy", "forgetting", "learning_accuracy", "average_incremental_accuracy",
                "backward_transfer", "forward_transfer")),
            _spread(against, name),
        ])  # fmt: skip
        spent.append([
            method,
            *(_number([r.cost.get("seconds", {}).get(k) for r in rs], "{:.2f}") for k in ("train", "consolidate", "evaluate")),
            _number([r.cost.get("peak_memory", 0) / 2**20 for r in rs], "{:.0f}"),
            _number([(r.cost.get("parameters") or [None])[-1] for r in rs], "{:,.0f}"),
            _number([(r.cost.get("state_bytes") or [0])[-1] / 1024 for r in rs], "{:,.0f}"),
            *(_short([_told(r).get(name) for r in rs]) for name in told),
        ])  # fmt: skip
    return "\n\n".join(columns(rows) for rows in (reached, spent, _course(group)) if len(rows) > 1)


def _joint_of(result: Result, joint: dict[tuple[Any, str], Result]) -> Result | None:
    """Joint training in the setting of a result, on as many tasks; None where there is none, or it is the result itself."""
    found = joint.get(_setting(result))
    if found is None or found is result or found.accuracy.shape[1] != result.accuracy.shape[1]:
        return None
    return found


def _told(result: Result) -> dict[str, float]:
    """What the method told of itself after the last task; how importances are distributed is for pictures."""
    facts: list[dict[str, float]] = result.cost.get("facts") or [{}]
    return {printable(name): value for name, value in facts[-1].items() if not name.startswith("importance")}


def _course(group: Group, most: int = 10) -> list[list[str]]:
    """What methods told of themselves task by task, where it changed; of many tasks some, the last among them."""
    told = {m: [facts for r in rs if (facts := r.diagnostics)] for m, rs in group.items()}
    tasks = max((len(facts) for runs in told.values() for facts in runs), default=0)
    shown = [t for t in range(tasks) if (tasks - 1 - t) % -(-tasks // most) == 0]
    rows = [["growth", *(f"task {t + 1}" for t in shown)]]
    for method, runs in told.items():
        for name in dict.fromkeys(name for facts in runs for after in facts for name in after):
            if not name.startswith("importance") and any(
                len({after.get(name) for after in facts}) > 1 for facts in runs
            ):
                known = [[facts[t].get(name) for facts in runs if t < len(facts)] for t in shown]
                rows.append([f"{method}: {printable(name)}", *(_short(values) for values in known)])
    return rows


def _setting(result: Result) -> tuple[Any, str]:
    return result.config.get("seed"), repr(_facts(result))


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "–"
    forgot = np.mean([r.forgetting for r in results])
    name = _score(results)
    lost = "" if np.isnan(forgot) else f" ({_spread([float(forgot)], name):>4})"
    return _spread([r.average_accuracy for r in results], name) + (lost or "       ")


def _score(results: Sequence[Result]) -> str:
    return printable(str(results[0].config.get("score", "accuracy")))


def _unit(group: Group) -> str:
    name = _score(next(iter(group.values())))
    return "accuracy in %" if name == "accuracy" else name


def _spread(values: Sequence[float], name: str) -> str:
    """Mean ± standard deviation; accuracies in per cent, other scores as they are."""
    scale, form = (100, "{:.1f}") if name == "accuracy" else (1, "{:.4g}")
    known = [scale * v for v in values if not np.isnan(v)]
    if not known:
        return "–"
    return form.format(np.mean(known)) + (f" ± {form.format(np.std(known, ddof=1))}" if len(known) > 1 else "")


def _number(values: Sequence[Any], form: str) -> str:
    known = [v for v in values if v is not None]
    return form.format(np.mean(known)) if known else "–"


def _short(values: Sequence[Any]) -> str:
    """Four digits, and large counts in full."""
    large = any(v is not None and abs(v) >= 1000 for v in values)
    return _number(values, "{:,.0f}" if large else "{:,.4g}")
