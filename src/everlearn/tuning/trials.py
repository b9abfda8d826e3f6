"""Trials of a study: propose values, train with them, and record the scores."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean, quantiles
from typing import Any

from everlearn.core.method import Method
from everlearn.experiments.executors import WorkerLost, local_outcomes
from everlearn.results.result import Result
from everlearn.tuning.search_space import Dimension, Value, with_values
from everlearn.tuning.start import Start, TrialPruned
from everlearn.tuning.storage import ENDED_STATES

RemoteRuns = Callable[[Sequence[tuple[Method, int]]], Iterable[tuple[int, Result | Exception]]]
"""Runs (method, seed) pairs on validation data; yields (index, result or error) as each ends."""
TrialOutcome = dict[str, Any] | WorkerLost

# Names of attributes in the study file.
PRUNED_STEP_KEY = "given up at step"
FAILURE_KEY = "why"


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and mean scores on validation data; None if the trial was pruned or failed.

    Args:
        values: values by field name.
        score: mean over all tasks after the last task; this is maximized.
        old: mean over all tasks but the last, after the last task.
        new: mean over tasks, each right after its training.
        failure: why the trial has no score; empty if it has one.
    """

    values: dict[str, Value]
    score: float | None
    old: float | None = None
    new: float | None = None
    failure: str = ""

    def __str__(self) -> str:
        values = ", ".join(
            f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
            for name, value in self.values.items()
        )
        if self.score is None:
            return f"{values}: {self.failure or 'pruned'}"
        return f"{values}: {self.score:.4f}"


@dataclass
class TrialRun:
    """Run of a trial on this machine, for an executor.

    Args:
        starts: one per seed.
        dimensions: the fields that are tuned.
        values: their values.
        report: called with a score and its step, in the process of the study; returns whether to prune the trial.
    """

    starts: Sequence[Start]
    dimensions: Sequence[Dimension]
    values: Sequence[Value]
    report: Callable[[float, int], bool]

    def run(self, force: bool) -> dict[str, Any]:
        """Train with the values, once per seed; returns the scores or the failure. Existing results are reused."""
        results: list[Result] = []
        num_tasks = self.starts[0].num_tasks
        # Rows are passed again after each part of a task, and after resuming: report each step once.
        reported_steps: set[int] = set()

        def on_rows(rows: Sequence[Sequence[float]]) -> None:
            for tasks_learned, row in enumerate(rows[: num_tasks - 1], 1):
                step = len(results) * num_tasks + tasks_learned
                if step not in reported_steps and self.report(fmean(row[:tasks_learned]), step):
                    raise TrialPruned(f"pruned after task {tasks_learned}")
                reported_steps.add(step)

        try:
            with_values(self.starts[0].method, self.dimensions, self.values)
        except ValueError as error:
            # The method does not accept these values together.
            return {FAILURE_KEY: str(error)}
        try:
            for start in self.starts:
                results.append(start.train_trial(self.values, on_rows))
        except (TrialPruned, FloatingPointError) as error:
            # A large strength can make the loss infinite.
            return {FAILURE_KEY: str(error)}
        return _mean_scores(results)


@dataclass
class StudyRunner:
    """Runs the trials of an Optuna study.

    Args:
        study: the Optuna study.
        optuna: the package.
        dimensions: the fields that are tuned.
        starts: one per seed.
        prune: whether to stop trials that are worse than most.
        trials: number of trials.
    """

    study: Any
    optuna: Any
    dimensions: Sequence[Dimension]
    starts: Sequence[Start]
    prune: bool
    trials: int

    def __post_init__(self) -> None:
        self.lost_workers: list[WorkerLost] = []
        # Trials that were running when an earlier process was stopped.
        self._interrupted = deque(trial for trial in self.study.trials if trial.state.name == "RUNNING")

    def ended_trials(self) -> list[Trial]:
        """Trials that have ended, in earlier processes too."""
        return [_read_trial(trial) for trial in self.study.trials if trial.state.name in ENDED_STATES]

    def run_trials(self, workers: int, run_remotely: RemoteRuns | None) -> Iterator[Trial]:
        """Yield each trial as it ends; a trial whose worker is lost stays open, and a later call resumes it."""
        if run_remotely is None:
            trial_outcomes = self._run_locally(workers)
        else:
            trial_outcomes = self._run_in_rounds(workers, run_remotely)
        for trial, outcome in trial_outcomes:
            if isinstance(outcome, WorkerLost):
                self.lost_workers.append(outcome)
            else:
                yield self._record(trial, outcome)

    def _run_locally(self, workers: int) -> Iterator[tuple[Any, TrialOutcome]]:
        """Run trials in this process, or in processes that are forked after the first task, so that they share it."""
        trials = []

        def trial_runs() -> Iterator[TrialRun]:
            for trial, values in iter(self._propose, None):
                trials.append(trial)
                if workers > 1:
                    for start in self.starts:
                        start.prepare()
                yield TrialRun(self.starts, self.dimensions, values, partial(self._should_prune, trial))

        for index, outcome in local_outcomes(trial_runs(), workers, fork=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, WorkerLost):
                raise outcome
            yield trials[index], outcome

    def _run_in_rounds(self, workers: int, run_remotely: RemoteRuns) -> Iterator[tuple[Any, TrialOutcome]]:
        """Run ``workers`` trials at a time remotely; the next round starts when all have ended."""
        seeds = [start.seed for start in self.starts]
        while True:
            proposed = list(islice(iter(self._propose, None), workers))
            if not proposed:
                return

            runs: list[tuple[Any, Method, int]] = []
            for trial, values in proposed:
                try:
                    runs += [(trial, with_values(self.starts[0].method, self.dimensions, values), s) for s in seeds]
                except ValueError as error:
                    # The method does not accept these values together.
                    yield trial, {FAILURE_KEY: str(error)}
            if not runs:
                continue

            # A trial has ended when all its seeds have.
            received: dict[int, dict[int, Result | Exception]] = defaultdict(dict)
            for index, outcome in run_remotely([(method, seed) for _, method, seed in runs]):
                trial, _, seed = runs[index]
                trial_outcomes = received[trial.number]
                trial_outcomes[seed] = outcome
                if len(trial_outcomes) == len(seeds):
                    yield trial, _combine_outcomes([trial_outcomes[s] for s in seeds])

    def _propose(self) -> tuple[Any, list[Value]] | None:
        """Propose a trial and its values; None when there are enough trials."""
        trials = self.study.trials
        ended = self.ended_trials()
        running_values = [trial.params for trial in trials if trial.state.name == "RUNNING"]

        # Interrupted trials come first, so that pruning compares them with the same trials as before the interruption.
        num_active = len(ended) + len(running_values)
        if self._interrupted and num_active - len(self._interrupted) < self.trials:
            return self._suggest_values(self.optuna.trial.Trial(self.study, self._interrupted.popleft()._trial_id))
        if num_active >= self.trials:
            return None

        if not any(trial.state.name == "WAITING" for trial in trials):
            # If all machines are lost, no score is known: better choose the next value in a later call.
            if self.lost_workers and not ended:
                return None
            self._enqueue_refinement(ended, running_values)
        return self._suggest_values(self.study.ask())

    def _enqueue_refinement(self, ended: Sequence[Trial], running_values: Sequence[dict[str, Value]]) -> None:
        """Enqueue the next value if a single real number is tuned; scores of running trials are interpolated."""
        if len(self.dimensions) != 1 or not self.dimensions[0].is_continuous:
            return
        dimension = self.dimensions[0]
        scores = [(float(trial.values[dimension.name]), trial.score) for trial in ended]
        running = [float(values[dimension.name]) for values in running_values if dimension.name in values]
        next_value = dimension.refine(dimension.interpolate_running(scores, running))
        self.study.enqueue_trial({dimension.name: next_value})

    def _suggest_values(self, trial: Any) -> tuple[Any, list[Value]]:
        return trial, [dimension.suggest(trial) for dimension in self.dimensions]

    def _should_prune(self, trial: Any, score: float, step: int) -> bool:
        """Record the score at a step and decide on pruning; a resumed trial gets the recorded decision."""
        stored_trial = next(stored for stored in self.study.trials if stored.number == trial.number)
        if step in stored_trial.intermediate_values:
            return bool(stored_trial.user_attrs.get(PRUNED_STEP_KEY) == step)
        is_pruned = self.prune and _is_hopeless(self.study, trial.number, score, step)
        # The decision is written before the score, so that a killed process never leaves a score without it.
        if is_pruned:
            trial.set_user_attr(PRUNED_STEP_KEY, step)
        trial.report(score, step)
        return is_pruned

    def _record(self, trial: Any, outcome: dict[str, Any]) -> Trial:
        """Write the outcome of a trial to the study."""
        score = outcome.pop("score", None)
        for key, value in outcome.items():
            trial.set_user_attr(key, value)
        if score is None:
            return _read_trial(self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED))
        return _read_trial(self.study.tell(trial, score))


def _mean_scores(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "old": fmean(float(result.accuracy[-1, :-1].mean()) for result in results),
        "new": fmean(result.learning_accuracy for result in results),
        "score": fmean(result.average_accuracy for result in results),
    }


def _combine_outcomes(run_outcomes: Sequence[Result | Exception]) -> TrialOutcome:
    """Outcome of a trial from those of its seeds: an infinite loss fails the trial, a lost worker leaves it open."""
    for outcome in run_outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, (FloatingPointError, WorkerLost)):
            raise outcome
    for outcome in run_outcomes:
        if isinstance(outcome, FloatingPointError):
            return {FAILURE_KEY: str(outcome)}
    for outcome in run_outcomes:
        if isinstance(outcome, WorkerLost):
            return outcome
    return _mean_scores([outcome for outcome in run_outcomes if isinstance(outcome, Result)])


def _is_hopeless(study: Any, number: int, score: float, step: int) -> bool:
    """Whether three quarters of the other trials were better at this step.

    Optuna's pruners compare the best score of a trial over its steps, which, as tasks are forgotten, is always the
    first.
    """
    # Failed trials are left out: they are tried again.
    other_scores = [
        trial.intermediate_values[step]
        for trial in study.trials
        if trial.number != number and trial.state.name != "FAIL" and step in trial.intermediate_values
    ]
    return len(other_scores) >= 4 and score < quantiles(other_scores, n=4)[0]


def _read_trial(stored_trial: Any) -> Trial:
    """Read a trial from the study."""
    attributes = stored_trial.user_attrs
    score = stored_trial.value if stored_trial.state.name == "COMPLETE" else None
    return Trial(
        dict(stored_trial.params),
        score,
        attributes.get("old"),
        attributes.get("new"),
        attributes.get(FAILURE_KEY, ""),
    )
