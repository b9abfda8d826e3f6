"""Results as text tables: one per stream and scenario, or one overview of all scenarios."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from everlearn.results import Result

Group = dict[str, list[Result]]  # a method's results, one per seed


def table(results: Iterable[Result]) -> str:
    """For each stream and scenario a table of methods and metrics, mean ± standard deviation over seeds."""
    return "\n\n".join(
        f"{stream}, {scenario}-incremental (accuracies in %, mean ± std over seeds)\n" + _metrics(group)
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
    note = f"{streams}: average accuracy in % after the last task (forgetting in brackets), {seeds} seed{'s' * (seeds > 1)}"
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


def _groups(results: Iterable[Result]) -> dict[tuple[str, str], Group]:
    """By stream and scenario, then by method; seeds are averaged, whatever else differs is told apart by name."""
    by_setting: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for r in results:
        by_setting[r.config.get("stream", {}).get("name", "?"), r.config.get("scenario", "?")].append(r)
    groups: dict[tuple[str, str], Group] = {}
    for setting, rs in by_setting.items():
        facts = [_facts(r) for r in rs]
        varied = [k for k in dict.fromkeys(k for f in facts for k in f) if len({repr(f.get(k)) for f in facts}) > 1]
        group: Group = defaultdict(list)
        for r, f in zip(rs, facts, strict=True):
            group[", ".join([r.config["method"], *(f"{k}={f.get(k)}" for k in varied)])].append(r)
        groups[setting] = dict(sorted(group.items(), key=lambda item: -np.mean([r.average_accuracy for r in item[1]])))
    return groups


def _facts(result: Result) -> dict[str, Any]:
    """What is the same for all seeds of one setting."""
    training = result.config.get("training", {})
    optimizer = training.get("optimizer") or {}
    return {
        **{k: v for k, v in training.items() if k != "optimizer"},
        **{"optimizer" if k == "name" else k: v for k, v in optimizer.items()},
        "model": hashlib.blake2b(repr(result.config.get("model")).encode(), digest_size=2).hexdigest(),
    }


def _metrics(group: Group) -> str:
    titles = ["method", "seeds", "average", "incremental", "learning", "forgetting", "backward", "forward",
              "intransigence", "train s", "consol. s", "eval s", "peak MB", "params", "state KB"]  # fmt: skip
    joint = {r.config.get("seed"): r for r in group.get("joint", [])}
    lines = []
    for method, rs in group.items():
        against = [r.intransigence(joint[s]) for r in rs if (s := r.config.get("seed")) in joint and method != "joint"]
        lines.append([
            method, str(len(rs)),
            *(_percent([getattr(r, name) for r in rs]) for name in (
                "average_accuracy", "average_incremental_accuracy", "learning_accuracy", "forgetting",
                "backward_transfer", "forward_transfer")),
            _percent(against),
            *(_number([r.cost.get("seconds", {}).get(k) for r in rs], "{:.2f}") for k in ("train", "consolidate", "evaluate")),
            _number([r.cost.get("peak_memory", 0) / 2**20 for r in rs], "{:.0f}"),
            _number([(r.cost.get("parameters") or [None])[-1] for r in rs], "{:,.0f}"),
            _number([(r.cost.get("state_bytes") or [0])[-1] / 1024 for r in rs], "{:,.0f}"),
        ])  # fmt: skip
    return columns([titles, *lines])


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "–"
    forgot = np.mean([r.forgetting for r in results])
    return _percent([r.average_accuracy for r in results]) + (
        "       " if np.isnan(forgot) else f" ({100 * forgot:4.1f})"
    )


def _percent(values: Sequence[float]) -> str:
    known = [100 * v for v in values if not np.isnan(v)]
    if not known:
        return "–"
    return f"{np.mean(known):.1f}" + (f" ± {np.std(known, ddof=1):.1f}" if len(known) > 1 else "")


def _number(values: Sequence[Any], form: str) -> str:
    known = [v for v in values if v is not None]
    return form.format(np.mean(known)) if known else "–"
