"""``everlearn tune``: a study per stream, scenario and method, and what came of each as a file that can be run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from everlearn import atomic
from everlearn.cli.names import UsageError, look_up, parse_settings, words
from everlearn.cli.plan import Cell, Plan, cells, optimizer
from everlearn.cli.workers import Outcome, outcomes
from everlearn.method import Method, label, parts
from everlearn.methods import METHODS
from everlearn.report.table import columns
from everlearn.results import amount, readable
from everlearn.stream import Stream
from everlearn.trainer import Every
from everlearn.trainer.training import Training
from everlearn.tuning import Lost, Trial, Tuned, tune
from everlearn.tuning.picture import png
from everlearn.tuning.space import Given


class Tuning(BaseModel):
    """The options of ``everlearn tune`` beside those of ``everlearn run``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fields: str = Field(
        "",
        description="What to tune, as in ewc.strength=1:1e9,ewc.decay; without a range the one that 'everlearn show' tells. "
        "By default the first field that has one.",
    )
    trials: int = Field(16, ge=1, description="Values to try; a larger number later goes on with the same study.")
    first: int | None = Field(None, ge=2, description="Choose on so many first tasks alone; by default on all.")
    prune: bool = Field(
        True, description="Give up a trial that is worse than three quarters of those before, after any task."
    )


class Trials(Plan):
    """What ``everlearn run`` would be told, with the defaults of tuning."""

    methods: str = Field("ewc", description="Methods, separated by commas, a study each; 'ewc+lwf' chains two.")
    valid: float = Field(
        0.1, gt=0, lt=1, description="Share of training examples held back, which the choice is made on."
    )
    out: Path = Field(Path("runs/tune"), description="Folder of the studies.")


def tuned(plan: Trials, options: Tuning) -> None:
    """A study for every stream, scenario and method of the plan; seeds are averaged."""
    if plan.track:
        raise UsageError("Trials are not tracked: leave --track out.")
    if plan.cluster and plan.workers == 1:
        raise UsageError("Say how many trials shall run on the cluster at a time, as in --workers 8.")
    todo, wanted = [cell for cell in cells(plan) if cell.seed == 0], _fields(options.fields)
    if any(cell.joint for cell in todo):
        raise UsageError("'joint' has no strength to tune: name methods, as in --methods ewc,si.")
    if strange := set(wanted) - {type(m).__name__ for cell in todo for m in parts(cell.method)}:
        raise UsageError(
            f"--fields names {', '.join(sorted(strange))}, which is not among the methods ({plan.methods})."
        )
    lost = []
    for cell in todo:
        cell = replace(cell, first=options.first)
        streams = [replace(cell, seed=seed).made() for seed in range(plan.seeds)]
        folder = plan.out / readable(cell.stream, cell.scenario, label(cell.method))
        try:
            found = _study(cell, streams, options, wanted, folder)
        except Lost as error:  # the other studies may be luckier
            lost.append(f"{_name(cell)}: {error}")
            continue
        _show(cell, found, streams[0].exams[0].likelihood.score_name, folder)
    if lost:
        raise Lost("\n".join(lost))


def _show(cell: Cell, found: Tuned, score: str, folder: Path) -> None:
    """What came of a study, in files and on paper."""
    best, picture, data = folder / "best.yaml", folder / "trade-off.png", cell.plan.data
    atomic.write(best, _file(cell, found).encode())
    atomic.write(picture, png(found))
    print(f"{_name(cell)}: averages on validation data, the best first")
    print(_table(found, score))
    print(f"\nThe trade-off is drawn in {picture}, runs are in {folder / 'trials'}.")
    for d in found.at:
        if not d.words and found.best.values[d.name] in (d.search.low, d.search.high):
            print(f"The best {d.name} is at an end of its range: look beyond it with --fields.")
    print(f"On test data: everlearn run {best}{'' if data is None else f' --data {data}'}\n")


def _name(cell: Cell) -> str:
    return f"{cell.stream}, {cell.scenario}-incremental, {label(cell.method)}"


def _study(
    cell: Cell, streams: list[Stream], options: Tuning, wanted: dict[str, dict[str, Given]], folder: Path
) -> Tuned:
    p = cell.plan
    fields = {
        f"{kind}.{name}": given
        for kind in dict.fromkeys(type(m).__name__ for m in parts(cell.method))
        for name, given in wanted.get(kind, {}).items()
    }
    training = Training(
        p.passes(streams[0]), p.iterations, p.batch_size, 0, None, p.clip, p.accumulate, p.precision, None
    )
    return tune(
        p.net_maker, cell.method, streams.__getitem__, fields=fields or None, trials=options.trials, seeds=p.seeds,
        prune=options.prune, training=training, optimizer=optimizer(p), keep_optimizer=p.keep_optimizer, device=p.device,
        out=folder, workers=p.workers, elsewhere=None if p.cluster is None else partial(_on_cluster, cell, folder / "trials"),
        checkpoint=Every(p.checkpoint_steps, p.checkpoint_minutes), told=None if sys.stderr.isatty() else _line,
    )  # fmt: skip


def _on_cluster(cell: Cell, folder: Path, runs: Sequence[tuple[Method, int]]) -> Iterator[tuple[int, Outcome]]:
    plan = cell.plan.model_copy(update={"out": folder})
    todo = [replace(cell, plan=plan, method=method, seed=seed) for method, seed in runs]
    return outcomes(todo, plan.workers, plan.threads, cluster=plan.cluster)


def _line(number: int, trials: int, trial: Trial) -> None:
    """A log, where there is no terminal for a bar."""
    print(f"trial {number} of {trials}: {trial}", file=sys.stderr, flush=True)


def _fields(text: str) -> dict[str, dict[str, Given]]:
    """What was typed, by the classes' names."""
    wanted: dict[str, dict[str, Given]] = {}
    for word in words(text):
        path, equals, ends = word.partition("=")
        if "." not in path:
            raise UsageError(f"A field is named METHOD.FIELD, as in ewc.strength; got {path!r}.")
        parse_settings([f"{path}=0"])  # refuses what is no field
        name, _, field = path.strip().partition(".")
        low, _, high = ends.partition(":")
        try:
            given = (float(low), float(high)) if equals else None
        except ValueError:
            raise UsageError(f"A range reads LOW:HIGH, as in ewc.strength=1:1e9; got {word!r}.") from None
        wanted.setdefault(look_up("method", name, METHODS).__name__, {})[field] = given
    return wanted


def _file(cell: Cell, found: Tuned) -> str:
    """The configuration that was found, for 'everlearn run': all of it but where this search looked and what it kept back."""
    p, names = cell.plan, {kind: name for name, kind in METHODS.items()}
    ours = p.model_dump(
        mode="json",
        exclude={
            "stream",
            "scenario",
            "set",
            "valid",
            "out",
            "data",
            "workers",
            "cluster",
            "time_limit",
            "partition",
            "track",
            "seeds",
        },
    )
    methods = parts(found.method)
    settings = {names[type(m)]: own for m in methods if (own := _own(m))}
    chosen = {
        "stream": cell.stream,
        "scenario": cell.scenario,
        **ours,
        "methods": "+".join(names[type(m)] for m in methods),
    }
    head = f"# Found by everlearn tune: {found.best}, on validation data.\n"
    return head + yaml.safe_dump(
        {**{k: v for k, v in chosen.items() if v is not None}, "set": settings}, sort_keys=False
    )


def _own(method: Method) -> dict[str, Any]:
    """The fields that are not at their default."""
    return {f.name: v for f in fields(method) if (v := getattr(method, f.name)) != f.default}


def _table(found: Tuned, score: str) -> str:
    names = list(found.best.values)
    rows = [[*names, f"average {score}", "old tasks", "new tasks", ""]]
    for trial in sorted(found.trials, key=lambda t: (t.score is None, -(t.score or 0))):
        values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in trial.values.values()]
        numbers = ["–" if v is None else amount(v, score) for v in (trial.score, trial.old, trial.new)]
        rows.append([*values, *numbers, trial.why.split(":")[0]])
    return columns(rows)
