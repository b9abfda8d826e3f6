"""Trials of one method, resumable, the first task trained once for all of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.checks import check_settings
from everlearn.extras import needs
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.results import Result
from everlearn.stream import Stream
from everlearn.trainer.checkpoints import Every
from everlearn.trainer.training import OptimizerFactory, Training, adam, hide_bar
from everlearn.tuning import archive
from everlearn.tuning.archive import ENDED
from everlearn.tuning.side_by_side import Report, side_by_side
from everlearn.tuning.space import Dimension, Given, Value, changed, check_values, dimensions
from everlearn.tuning.start import GivenUp, Start

Runs = Callable[[Sequence[tuple[Method, int]]], Iterable[tuple[int, Result | Exception]]]
"""From methods and seeds the runs on validation data: which has ended, and what came of it."""


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and mean scores on validation data; None where the trial was given up.

    Args:
        values: by the fields' names.
        score: over all tasks at the end, which is what counts.
        old: over all tasks but the last, at the end.
        new: over tasks just learned.
        why: it was given up.
    """

    values: dict[str, Value]
    score: float | None
    old: float | None = None
    new: float | None = None
    why: str = ""

    def __str__(self) -> str:
        values = ", ".join(
            f"{name} = {v:.4g}" if isinstance(v, float) else f"{name} = {v}" for name, v in self.values.items()
        )
        return f"{values}: {self.why or 'given up' if self.score is None else f'{self.score:.4f}'}"


@dataclass(frozen=True)
class Tuned:
    """What came of it: the best method, fresh, the fields that were tuned, and all trials."""

    method: Method
    at: list[Dimension]
    best: Trial
    trials: list[Trial]


def tune(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream | Callable[[int], Stream],
    *,
    fields: Mapping[str, Given] | None = None,
    trials: int = 16,
    seeds: int = 1,
    prune: bool = True,
    training: Training = Training(),  # noqa: B008 - frozen
    optimizer: OptimizerFactory = adam,
    keep_optimizer: bool = False,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] = "runs/tune",
    workers: int = 1,
    elsewhere: Runs | None = None,
    checkpoint: Every | None = Every(),  # noqa: B008 - frozen
    told: Callable[[int, int, Trial], None] | None = None,
) -> Tuned:
    """Find the values of a method's fields with which it does best on validation data, after the last task.

    Half of the trials of a single number are spread evenly over its range, each of the others halves the most promising gap
    between those before; of fields that name their values, or few whole numbers, all are tried; values of several fields are proposed by
    Optuna (TPE). Trials whose fields act only after the first task (``Search.late``) share it: it is trained once, and every
    trial goes on from a copy, to the result that a run of its own would have. A trial is given up after a task where it is worse
    than three quarters of those before it.

    Args:
        make_model: as for ``run``.
        method: its other fields stay as they are.
        stream: with a validation share in every task (``valid=0.1``), or a function of the seed that makes one;
            ``stream.first(3)`` to choose on the first three tasks alone.
        fields: which, and where to look; see ``space.dimensions``.
        trials: how many values to try.
        seeds: runs per trial, counted from that of the training, whose mean counts.
        prune: give up hopeless trials.
        training: how tasks are learned.
        optimizer: a function of the parameters that makes one.
        keep_optimizer: between tasks.
        device: where to train.
        out: a folder for the study and the results of all trials; the same call goes on where it was stopped.
        workers: trials side by side, in processes of one thread each; which values are proposed then depends on who is ready first.
        elsewhere: who does runs on other machines; there so many trials as workers are proposed at a time, each is a run of its
            own from the first task on, and none is given up.
        checkpoint: how often a trial writes down where it is; one that was killed goes on from there.
        told: who is told of every trial: its number, how many there are, and what came of it.
    """
    check_settings({"trials": trials, "seeds": seeds, "workers": workers}, None, "float32")
    at, optuna = dimensions(method, fields), needs("optuna", "tune", "Tuning")
    check_values(method, at)
    _check_fresh(method)
    place = torch.device(device) if device is not None else None
    each = [replace(training, seed=training.seed + s) for s in range(seeds)]
    folder = Path(out)
    made = [stream(t.seed) if callable(stream) else stream for t in each]
    starts = [
        Start(make_model, method, at, s, t, optimizer, keep_optimizer, place, folder, checkpoint)
        for s, t in zip(made, each, strict=True)
    ]
    with archive.study(optuna, atomic.writable_folder(folder) / "study.db", at, starts, trials) as study:
        seen = [_trial(t) for t in study.trials if t.state.name in ENDED]
        trials = min(trials, archive.most(at, trials))
        hidden = hide_bar(training.progress)
        with tqdm(total=trials, initial=len(seen), desc=f"tune {label(method)}", leave=False, disable=hidden) as bar:
            asked = Asked(study, optuna, at, starts, prune, trials)
            for trial in asked.ended(workers, elsewhere):
                seen.append(trial)
                if told is not None:
                    told(len(seen), trials, seen[-1])
                bar.update()
                bar.set_postfix_str(f"best so far {_best(seen)}")
        for start in starts:
            start.close()
    best = _best(seen)
    if best.score is None:
        raise ValueError(f"Every trial has failed, the last one because of this: {seen[-1].why}")
    return Tuned(changed(method, at, [best.values[d.name] for d in at]), at, best, seen)


def _check_fresh(method: Method) -> None:
    if fingerprint(method.state_dict()) != fingerprint(changed(method, [], []).state_dict()):
        raise ValueError(
            "This method has learned already, and a strength counts for tasks that end under it: give a fresh one, and the "
            "stream from its first task on."
        )


@dataclass
class Asked:
    """A study at work.

    Args:
        study: of Optuna.
        optuna: the package.
        at: the fields.
        starts: a seed each.
        prune: give up hopeless trials.
        trials: how many there shall be.
    """

    study: Any
    optuna: Any
    at: Sequence[Dimension]
    starts: Sequence[Start]
    prune: bool
    trials: int

    def ended(self, workers: int, elsewhere: Runs | None) -> Iterator[Trial]:
        """Each trial when it has ended: one after the other, side by side, or elsewhere."""
        if elsewhere is not None:
            yield from self._in_rounds(workers, elsewhere)
        elif workers > 1:
            for start in self.starts:
                start.prepare()  # once, before processes are made
            for trial, outcome in side_by_side(self._propose, self._learn, self._is_hopeless, workers):
                yield self._note(trial, outcome)
        else:
            for trial, values in iter(self._propose, None):
                yield self._note(trial, self._learn(values, partial(self._is_hopeless, trial)))

    def _in_rounds(self, workers: int, elsewhere: Runs) -> Iterator[Trial]:
        """So many at a time; the next when all have ended."""
        seeds = [start.training.seed for start in self.starts]
        while proposed := list(islice(iter(self._propose, None), workers)):
            runs: list[tuple[Any, Method, int]] = []
            for trial, values in proposed:
                try:
                    runs += [(trial, changed(self.starts[0].method, self.at, values), seed) for seed in seeds]
                except ValueError as error:  # fields that do not go together
                    yield self._note(trial, {"why": str(error)})
            came: dict[int, dict[int, Result | Exception]] = defaultdict(dict)
            for i, outcome in elsewhere([(method, seed) for _, method, seed in runs]):
                trial, _, seed = runs[i]
                came[trial.number][seed] = outcome
                if len(came[trial.number]) == len(seeds):
                    yield self._note(trial, _outcome([came[trial.number][s] for s in seeds]))

    def _propose(self) -> tuple[Any, list[Value]] | None:
        """Values to try; among them those that are being tried count as what lies between their neighbours."""
        known = [_trial(t) for t in self.study.trials if t.state.name in ENDED]
        running = [t.params for t in self.study.trials if t.state.name == "RUNNING"]
        if len(known) + len(running) >= self.trials:
            return None
        waiting = any(t.state.name == "WAITING" for t in self.study.trials)
        if len(self.at) == 1 and self.at[0].measured and not waiting:
            name = self.at[0].name
            scores = [(float(t.values[name]), t.score) for t in known]
            going = [float(params[name]) for params in running if name in params]
            self.study.enqueue_trial({name: self.at[0].between(self.at[0].with_running(scores, going))})
        trial = self.study.ask()
        values = [d.suggest(trial) for d in self.at]
        return trial, values

    def _learn(self, values: Sequence[Value], hopeless: Report) -> dict[str, Any]:
        """What comes of these values, over all seeds."""
        results: list[Result] = []
        told_of: set[int] = set()  # a part of a task may have ended, or a process that was killed have told of it

        def told(rows: Sequence[Sequence[float]]) -> None:
            tasks = len(self.starts[0].stream.exams)
            for learned, row in enumerate(rows[: tasks - 1], 1):
                step = len(results) * tasks + learned
                if step not in told_of and hopeless(fmean(row[:learned]), step):
                    raise GivenUp(f"given up after task {learned}")
                told_of.add(step)

        try:
            changed(self.starts[0].method, self.at, values)
        except ValueError as error:  # fields that do not go together
            return {"why": str(error)}
        try:
            for start in self.starts:
                results.append(start.learn(values, told))
        except (GivenUp, FloatingPointError) as error:  # a strength can be too much for the optimizer
            return {"why": str(error)}
        return _scores(results)

    def _is_hopeless(self, trial: Any, score: float, step: int) -> bool:
        trial.report(score, step)
        return self.prune and _hopeless(self.study, trial.number, score, step)

    def _note(self, trial: Any, outcome: dict[str, Any]) -> Trial:
        score = outcome.pop("score", None)
        for name, fact in outcome.items():
            trial.set_user_attr(name, fact)
        if score is None:
            return _trial(self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED))
        return _trial(self.study.tell(trial, score))


def _scores(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "old": fmean(float(r.accuracy[-1, :-1].mean()) for r in results),
        "new": fmean(r.learning_accuracy for r in results),
        "score": fmean(r.average_accuracy for r in results),
    }


def _outcome(came: Sequence[Result | Exception]) -> dict[str, Any]:
    """What came of a trial's runs; what says that the trial was wrong, or its machine, is noted, any other error raised."""
    for error in came:
        if isinstance(error, (FloatingPointError, RuntimeError)):
            return {"why": str(error)}
        if isinstance(error, Exception):
            raise error
    return _scores([one for one in came if isinstance(one, Result)])


def _hopeless(study: Any, number: int, score: float, step: int) -> bool:
    """Whether three quarters of the trials before were better at this step.

    Optuna's own pruners take a trial's best step instead, which while forgetting is always the first.
    """
    others = [
        t.intermediate_values[step]
        for t in study.trials
        if t.number != number and t.state.name != "FAIL" and step in t.intermediate_values  # failed, it is tried again
    ]
    return len(others) >= 4 and score < quantiles(others, n=4)[0]


def _trial(frozen: Any) -> Trial:
    whole = frozen.state.name == "COMPLETE"
    return Trial(dict(frozen.params), frozen.value if whole else None, **frozen.user_attrs)


def _best(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda t: float("-inf") if t.score is None else t.score)
