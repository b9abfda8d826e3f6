"""Trials: asked for, learned, and what came of each noted."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean, quantiles
from typing import Any

from everlearn.method import Method
from everlearn.results import Result
from everlearn.tuning.archive import ENDED
from everlearn.tuning.side_by_side import Lost, Report, side_by_side
from everlearn.tuning.space import Dimension, Value, changed
from everlearn.tuning.start import GivenUp, Start

Runs = Callable[[Sequence[tuple[Method, int]]], Iterable[tuple[int, Result | Exception]]]
"""From methods and seeds the runs on validation data: which has ended, and what came of it."""
Outcome = dict[str, Any] | Lost
GIVEN_UP = "given up at step"


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

    def __post_init__(self) -> None:
        self.lost: list[Lost] = []
        self._left = deque(t for t in self.study.trials if t.state.name == "RUNNING")  # by a process that was stopped

    def known(self) -> list[Trial]:
        """Those that have ended."""
        return [_trial(t) for t in self.study.trials if t.state.name in ENDED]

    def ended(self, workers: int, elsewhere: Runs | None) -> Iterator[Trial]:
        """Each trial when it has ended; one that is lost is left as it is, for a later call to go on with."""
        for trial, outcome in self._outcomes(workers, elsewhere):
            if isinstance(outcome, Lost):
                self.lost.append(outcome)
            else:
                yield self._note(trial, outcome)

    def _outcomes(self, workers: int, elsewhere: Runs | None) -> Iterator[tuple[Any, Outcome]]:
        """One after the other, side by side, or elsewhere."""
        if elsewhere is not None:
            yield from self._in_rounds(workers, elsewhere)
        elif workers > 1:
            for start in self.starts:
                start.prepare()  # once, before processes are made
            yield from side_by_side(self._propose, self._learn, self._is_hopeless, workers)
        else:
            for trial, values in iter(self._propose, None):
                yield trial, self._learn(values, partial(self._is_hopeless, trial))

    def _in_rounds(self, workers: int, elsewhere: Runs) -> Iterator[tuple[Any, Outcome]]:
        """So many at a time; the next when all have ended."""
        seeds = [start.training.seed for start in self.starts]
        while proposed := list(islice(iter(self._propose, None), workers)):
            runs: list[tuple[Any, Method, int]] = []
            for trial, values in proposed:
                try:
                    runs += [(trial, changed(self.starts[0].method, self.at, values), seed) for seed in seeds]
                except ValueError as error:  # fields that do not go together
                    yield trial, {"why": str(error)}
            came: dict[int, dict[int, Result | Exception]] = defaultdict(dict)
            for i, outcome in elsewhere([(method, seed) for _, method, seed in runs]) if runs else ():
                trial, _, seed = runs[i]
                came[trial.number][seed] = outcome
                if len(came[trial.number]) == len(seeds):
                    yield trial, _outcome([came[trial.number][s] for s in seeds])

    def _propose(self) -> tuple[Any, list[Value]] | None:
        """Values to try: first those of trials that were stopped, which so meet the others that they would have met."""
        trials = self.study.trials
        known, running = self.known(), [t.params for t in trials if t.state.name == "RUNNING"]
        if self._left and len(known) + len(running) - len(self._left) < self.trials:
            return self._with_values(self.optuna.trial.Trial(self.study, self._left.popleft()._trial_id))
        if len(known) + len(running) >= self.trials:
            return None
        if not any(t.state.name == "WAITING" for t in trials):
            if self.lost and not known:
                return None  # of machines that are gone nothing is learned: what to try next is better asked later
            self._choose(known, running)
        return self._with_values(self.study.ask())

    def _choose(self, known: Sequence[Trial], running: Sequence[dict[str, Value]]) -> None:
        """The next value of a single number; values that are being tried count as what lies between their neighbours."""
        if len(self.at) == 1 and self.at[0].measured:
            name = self.at[0].name
            scores = [(float(t.values[name]), t.score) for t in known]
            going = [float(params[name]) for params in running if name in params]
            self.study.enqueue_trial({name: self.at[0].between(self.at[0].with_running(scores, going))})

    def _with_values(self, trial: Any) -> tuple[Any, list[Value]]:
        return trial, [d.suggest(trial) for d in self.at]

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
        """Whether a trial is given up; once said it stays, for one whose process was killed and that comes to the step again."""
        before = next(t for t in self.study.trials if t.number == trial.number)
        if step in before.intermediate_values:
            return bool(before.user_attrs.get(GIVEN_UP) == step)
        hopeless = self.prune and _hopeless(self.study, trial.number, score, step)
        if hopeless:
            trial.set_user_attr(GIVEN_UP, step)
        trial.report(score, step)
        return hopeless

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


def _outcome(came: Sequence[Result | Exception]) -> Outcome:
    """What came of a trial's runs: a loss that is no number is the trial's end, a lost machine is not, any other error is raised."""
    for error in came:
        if isinstance(error, Exception) and not isinstance(error, (FloatingPointError, Lost)):
            raise error
    for error in came:
        if isinstance(error, FloatingPointError):
            return {"why": str(error)}
    lost = next((error for error in came if isinstance(error, Lost)), None)
    return lost or _scores([one for one in came if isinstance(one, Result)])


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
    score = frozen.value if frozen.state.name == "COMPLETE" else None
    facts = {name: fact for name, fact in frozen.user_attrs.items() if name != GIVEN_UP}
    return Trial(dict(frozen.params), score, **facts)
