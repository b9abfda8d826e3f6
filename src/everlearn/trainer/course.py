"""A stream being learned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from everlearn import distributed
from everlearn.cost import Clock, peak_memory, reset_peak_memory, state_bytes
from everlearn.method import Method, count_parameters
from everlearn.results import Result
from everlearn.seeds import pack, restore, states, unpack
from everlearn.stream import Split, Stream, Task
from everlearn.trainer.checkpoints import Checkpoints, State
from everlearn.trainer.evaluation import evaluate_and_count
from everlearn.trainer.lesson import Lesson
from everlearn.trainer.tracking import Journal
from everlearn.trainer.training import OptimizerFactory, Training, device_of
from everlearn.trainer.written import load_model, model_state, rebuilt, written


class Course:
    """A stream being learned, task by task: what learns, and what was measured on the way.

    Every task is trained and then closed: consolidated and tested. Consecutive tasks with one id are tested as one.

    Args:
        model: trained in place.
        method: what protects the earlier tasks; it learns too.
        stream: what is learned.
        training: how.
        optimizer: a function of the parameters that makes one.
        keep_optimizer: go on with the same optimizer instead of a fresh one per task.
        split: which data to test on.
        journal: who is told.
        checkpoints: where it is written down how far the course has come; it goes on from there. One that does not fit
            raises ``Unusable``, with model and method in no state to be used: made anew, they go on from an earlier one.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        stream: Stream,
        training: Training,
        optimizer: OptimizerFactory,
        keep_optimizer: bool,
        split: Split,
        journal: Journal,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        if training.scheduler is not None and stream.once:
            raise ValueError("An online stream's chunks are too short for a scheduler: set the learning rate instead.")
        self.model, self.method, self.stream, self.training = model, method, stream, training
        self.optimizer, self.keep_optimizer, self.split, self.journal = optimizer, keep_optimizer, split, journal
        self.at = 0  # the task that is trained next, or is trained and not closed
        self.rows: list[list[float]] = []
        self.examples: list[int] = []  # tested on, of each task
        self._clock, self._device = Clock(), device_of(model)
        self._before = reset_peak_memory(self._device)
        self._current: OptimizerFactory | Optimizer = optimizer
        self._made = 0  # groups of the optimizer that its function has made
        self._each: dict[str, list[Any]] = {"parameters": [], "state_bytes": [], "facts": []}
        self._checkpoints = checkpoints
        self._within: State | None = None  # where in the next task an earlier process was
        self.gone_on_from = ""  # for people
        if checkpoints is not None and (found := checkpoints.newest()) is not None:
            self._go_on(checkpoints, *found)
        else:
            distributed.same([*model.parameters(), *model.buffers()])
            self.initial = self._test(stream[0])

    def train(self) -> None:
        """Train the next task."""
        task, resumed, self._within = self.stream[self.at], self._within, None
        lesson = self._lesson(task, resumed)
        if not isinstance(self._current, Optimizer):
            self._made = len(lesson.optimizer.param_groups) if resumed is None else resumed["optimizer"]["made"]
        self._current = lesson.optimizer
        shapes = _shapes(self.model)
        for loss in lesson.steps():
            self.journal.stepped(loss)
            saver = self._checkpoints
            if saver is not None and saver.due() and saver.within(self.at) and _shapes(self.model) == shapes:
                schedule = None if lesson.schedule is None else lesson.schedule.state_dict()
                saver.write(self.at, lesson.step, {**self._state(lesson), "step": lesson.step, "schedule": schedule})
        self._clock.add(lesson.clock.seconds)

    def _lesson(self, task: Task, resumed: State | None) -> Lesson:
        """A task in training, from where an earlier process was in it."""
        if resumed is None or self._checkpoints is None:
            return Lesson(self.model, self.method, task, self.training, self._current, resumed)
        with _rejecting(self._checkpoints, within=True):
            return Lesson(self.model, self.method, task, self.training, self._current, resumed)

    def close(self) -> None:
        """Consolidate what was trained and, where its task is over, test on all tasks."""
        task, after = self.stream[self.at], self.stream.tasks[self.at + 1 :]
        with self._clock("consolidate"):
            self.method.end_task(self.model, task)
        goes_on = bool(after) and task.id is not None and after[0].id == task.id
        if not (self.keep_optimizer or goes_on):
            self._current = self.optimizer
        self.at += 1
        if goes_on:
            if self._checkpoints is not None and self._checkpoints.due():
                self._checkpoints.write(self.at, 0, self._state())
            return
        self.rows.append(self._test(task))
        self.journal.learned(self.rows[-1], self.learned)
        self._each["parameters"].append(count_parameters(self.model, self.method))
        self._each["state_bytes"].append(state_bytes(self.method.state_dict()))
        self._each["facts"].append(self.method.facts())
        if self._checkpoints is not None and after:
            self._checkpoints.write(self.at, 0, self._state())

    def _state(self, lesson: Lesson | None = None) -> State:
        """All that another process needs to go on, as tensors, numbers and lists of them."""
        live = self._current if isinstance(self._current, Optimizer) else None
        clock = copy.deepcopy(self._clock)
        if lesson is not None:
            clock.add(lesson.clock.seconds)
        return {
            "at": self.at,
            "rows": self.rows,
            "each": self._each,
            "initial": self.initial,
            "examples": self.examples,
            "seconds": dict(clock.seconds),
            "told": self.journal.step,
            "model": model_state(self.model),
            "method": self.method.state_dict(),
            "optimizer": None if live is None else written(live, self._made, self.model, self.method),
            "random": pack(states(self._device)),
        }

    def _go_on(self, saver: Checkpoints, start: State | None, within: State | None) -> None:
        """As the task found the course; what was learned of it comes when it is trained."""
        if start is not None:
            with _rejecting(saver, within=False):
                self._load(start)
        if within is not None:
            self._within, self._current = within, self.optimizer
        with _rejecting(saver, within=within is not None):
            last = within or start or {}
            self.at, self.rows, self._each, self.initial = last["at"], last["rows"], last["each"], last["initial"]
            self.examples = last.get("examples", [])  # older checkpoints have none; every test counts anew
            self.gone_on_from = f"task {self.at + 1}" + (f", step {within['step'] + 1}" if within is not None else "")
            self.journal.step = last["told"]
            self._clock.add(last["seconds"])

    def _load(self, start: State) -> None:
        load_model(self.model, start["model"])
        self.method.load_state_dict(start["method"])
        if start["optimizer"] is not None:
            self._made = start["optimizer"]["made"]
            self._current = rebuilt(start["optimizer"], self.optimizer, self.model, self.method)
        restore(unpack(start["random"], self._device))

    @property
    def learned(self) -> int:
        """How many of the tasks that are tested are learned."""
        return len(self.rows) if len(self.stream) > 1 else len(self.stream.exams) * len(self.rows)

    @property
    def so_far(self) -> float:
        """The mean score on the tasks learned."""
        return float(np.mean(self.rows[-1][: self.learned]))

    def fork(self, checkpoints: Checkpoints | None = None) -> Course:
        """Another course that has come as far; the two share what no course changes, the stream above all.

        Args:
            checkpoints: of the other.
        """
        shared = [self.stream, self.training, self.journal, *self.stream.tasks, *self.stream.exams]
        shared += [source for task in self.stream.tasks for source in (task.train, task.valid, task.test)]
        other = copy.copy(self)
        other._checkpoints = checkpoints
        other.model, other.method, other._current = copy.deepcopy(  # together: they hold each other's tensors
            (self.model, self.method, self._current), {id(thing): thing for thing in shared}
        )
        other.rows, other._each, other._clock = copy.deepcopy((self.rows, self._each, self._clock))
        return other

    def result(self, config: dict[str, Any], made: dict[str, Any]) -> Result:
        """What was measured, with the facts that made it."""
        peak = max(0, peak_memory(self._device) - self._before)
        cost = {"seconds": dict(self._clock.seconds), "peak_memory": peak, **self._each}
        return Result(np.array(self.rows), config, self.initial, cost, made, self.examples)

    def _test(self, task: Task) -> list[float]:
        with self._clock("evaluate"):
            counted = evaluate_and_count(
                self.model, self.method, self.stream.exams, allowed=task.allowed, split=self.split
            )
        self.examples = [count for _, count in counted]
        return [score for score, _ in counted]


@contextmanager
def _rejecting(checkpoints: Checkpoints, within: bool) -> Iterator[None]:
    """Inside, a checkpoint is loaded: whatever goes wrong is its fault, in all processes if in one."""
    failure: Exception | None = None
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise  # the checkpoint may be good on a larger machine
    except Exception as error:  # noqa: BLE001 - the model and the method are the user's, and may fail in any way
        failure = error
    if not all(distributed.every(failure is None)):
        raise checkpoints.reject(within, failure) from failure


def _shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    """A network that has grown within its task is no place to go on from: its task begins anew."""
    return [(name, value.shape) for name, value in model.state_dict().items()]
