"""Training on a stream of tasks, with tests, checkpoints and costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from everlearn.core.method import Method, count_parameters
from everlearn.core.stream import Stream
from everlearn.core.task import Split, Task
from everlearn.curvature.progress import show_progress
from everlearn.results.result import Result
from everlearn.runtime import distributed
from everlearn.runtime.randomness import (
    get_random_states,
    pack_random_states,
    restore_random_states,
    unpack_random_states,
)
from everlearn.trainer.checkpoints import Checkpoints, State
from everlearn.trainer.cost import Clock, peak_memory, reset_peak_memory, state_bytes
from everlearn.trainer.evaluate import evaluate_and_count
from everlearn.trainer.serialization import load_model, model_state, optimizer_state, rebuild_optimizer
from everlearn.trainer.settings import OptimizerFactory, Training, device_of
from everlearn.trainer.trackers import Trackers
from everlearn.trainer.train import TaskTraining


class StreamTraining:
    """The training of a model on a stream, task by task, with its measurements.

    Each task is trained by ``train`` and then consolidated and tested by ``close``. Consecutive tasks with equal ids
    are parts of one task and are tested together, after the last part.

    Args:
        model: trained in place.
        method: the continual-learning method; it collects state.
        stream: the tasks.
        training: the training settings of a task.
        optimizer: a function from parameters to an optimizer.
        keep_optimizer: continue with the same optimizer instead of a new one per task.
        split: the data to test on.
        trackers: the loggers of the run.
        checkpoints: the checkpoints of the run; training resumes from the newest one. A checkpoint that does not fit
            raises ``Unusable``. Model and method are then partly loaded: create new ones and try again, which resumes
            from an earlier checkpoint.
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
        trackers: Trackers,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        if training.scheduler is not None and stream.single_pass:
            raise ValueError("An online stream's chunks are too short for a scheduler: set the learning rate instead.")

        self.model = model
        self.method = method
        self.stream = stream
        self.training = training
        self.optimizer = optimizer
        self.keep_optimizer = keep_optimizer
        self.split = split
        self.trackers = trackers

        self.task_index = 0  # of the task to train next, or of the one trained but not closed
        self.rows: list[list[float]] = []  # of the accuracy matrix
        self.examples: list[int] = []  # test examples of each task
        self.resumed_from = ""  # a description such as "task 2, step 11"

        self._device = device_of(model)
        self._clock = Clock()
        self._initial_memory = reset_peak_memory(self._device)
        self._cost_by_task: dict[str, list[Any]] = {"parameters": [], "state_bytes": [], "diagnostics": []}
        self._current_optimizer: OptimizerFactory | Optimizer = optimizer
        self._num_initial_groups = 0  # parameter groups that the optimizer's factory created
        self._checkpoints = checkpoints
        self._task_state: State | None = None  # checkpoint within the next task

        newest = None
        if checkpoints is not None:
            newest = checkpoints.newest()
        if checkpoints is not None and newest is not None:
            self._resume(checkpoints, *newest)
        else:
            distributed.broadcast_([*model.parameters(), *model.buffers()])
            self.initial_accuracy = self._test(stream[0])

    def train(self) -> None:
        """Train on the next task."""
        resumed = self._task_state
        self._task_state = None
        task_training = self._begin_task(self.stream[self.task_index], resumed)

        # Groups that a method adds later are told apart by their index when the optimizer is rebuilt.
        if task_training.optimizer is not None and not isinstance(self._current_optimizer, Optimizer):
            if resumed is None:
                self._num_initial_groups = len(task_training.optimizer.param_groups)
            else:
                self._num_initial_groups = resumed["optimizer"]["num_initial_groups"]
        if task_training.optimizer is not None:
            self._current_optimizer = task_training.optimizer

        # A network that has grown within its task cannot be restored from the start of the task.
        initial_shapes = _state_shapes(self.model)
        checkpoints = self._checkpoints
        for _ in task_training.steps():
            is_due = (
                checkpoints is not None
                and checkpoints.is_due()
                and checkpoints.has_task_start(self.task_index)
                and _state_shapes(self.model) == initial_shapes
            )
            # A checkpoint must not hold weights from after a loss that was not finite, and it counts logged steps.
            if is_due:
                task_training.check_losses()
            self._log_losses(task_training)
            if is_due and checkpoints is not None:
                checkpoints.write(self.task_index, task_training.step, self._state_within_task(task_training))
        self._log_losses(task_training)
        self._clock.add(task_training.clock.seconds)

    def _log_losses(self, task_training: TaskTraining) -> None:
        """Report the losses that were read since the last call to the trackers, in the order of the steps."""
        for loss in task_training.losses.take_unreported():
            self.trackers.record_step(loss)

    def _begin_task(self, task: Task, resumed: State | None) -> TaskTraining:
        """Create the training loop of a task, at the step of a checkpoint if there is one."""
        if resumed is None or self._checkpoints is None:
            return TaskTraining(self.model, self.method, task, self.training, self._current_optimizer, resumed)
        with _reject_on_error(self._checkpoints, within_task=True):
            return TaskTraining(self.model, self.method, task, self.training, self._current_optimizer, resumed)

    def close(self) -> None:
        """Consolidate the trained task and, unless the next one continues it, test on all tasks."""
        task = self.stream[self.task_index]
        later_tasks = self.stream.tasks[self.task_index + 1 :]
        with self._clock("consolidate"), show_progress(self.training.progress):
            self.method.end_task(self.model, task)

        is_continued = bool(later_tasks) and task.id is not None and later_tasks[0].id == task.id
        if not (self.keep_optimizer or is_continued):
            self._current_optimizer = self.optimizer
        self.task_index += 1

        if is_continued:
            if self._checkpoints is not None and self._checkpoints.is_due():
                self._checkpoints.write(self.task_index, 0, self._state())
            return

        self.rows.append(self._test(task))
        self.trackers.record_task(self.rows[-1], self.learned)
        self._cost_by_task["parameters"].append(count_parameters(self.model, self.method))
        self._cost_by_task["state_bytes"].append(state_bytes(self.method.state_dict()))
        self._cost_by_task["diagnostics"].append(self.method.diagnostics())
        if self._checkpoints is not None and later_tasks:
            self._checkpoints.write(self.task_index, 0, self._state())

    def _state(self, task_training: TaskTraining | None = None) -> State:
        """Collect all that another process needs to resume, as tensors, numbers and lists of them."""
        clock = copy.deepcopy(self._clock)
        if task_training is not None:
            clock.add(task_training.clock.seconds)

        optimizer = None
        if isinstance(self._current_optimizer, Optimizer):
            optimizer = optimizer_state(self._current_optimizer, self._num_initial_groups, self.model, self.method)

        return {
            "task_index": self.task_index,
            "rows": self.rows,
            "cost_by_task": self._cost_by_task,
            "initial": self.initial_accuracy,
            "examples": self.examples,
            "seconds": dict(clock.seconds),
            "tracker_step": self.trackers.step,
            "model": model_state(self.model),
            "method": self.method.state_dict(),
            "optimizer": optimizer,
            "random": pack_random_states(get_random_states(self._device)),
        }

    def _state_within_task(self, task_training: TaskTraining) -> State:
        """Collect the state at a step of the current task."""
        schedule = None
        if task_training.schedule is not None:
            schedule = task_training.schedule.state_dict()
        return {**self._state(task_training), "step": task_training.step, "schedule": schedule}

    def _resume(self, checkpoints: Checkpoints, task_start: State | None, task_state: State | None) -> None:
        """Restore the state at the start of a task; the state within the task is loaded when it is trained.

        Args:
            checkpoints: rejects a state that does not fit.
            task_start: the state before the task; None for the first task.
            task_state: the state at a step of the task; None if the task has not begun.
        """
        if task_start is not None:
            with _reject_on_error(checkpoints, within_task=False):
                self._load(task_start)
        if task_state is not None:
            self._task_state = task_state
            self._current_optimizer = self.optimizer

        with _reject_on_error(checkpoints, within_task=task_state is not None):
            checkpoint = task_state or task_start or {}
            self.task_index = checkpoint["task_index"]
            self.rows = checkpoint["rows"]
            self._cost_by_task = checkpoint["cost_by_task"]
            self.initial_accuracy = checkpoint["initial"]
            self.examples = checkpoint.get("examples", [])  # older checkpoints have none; every test sets it
            self.resumed_from = f"task {self.task_index + 1}"
            if task_state is not None:
                self.resumed_from += f", step {task_state['step'] + 1}"
            self.trackers.step = checkpoint["tracker_step"]
            self._clock.add(checkpoint["seconds"])

    def _load(self, task_start: State) -> None:
        """Load model, method, optimizer and random states."""
        load_model(self.model, task_start["model"])
        self.method.load_state_dict(task_start["method"])
        if task_start["optimizer"] is not None:
            self._num_initial_groups = task_start["optimizer"]["num_initial_groups"]
            self._current_optimizer = rebuild_optimizer(
                task_start["optimizer"], self.optimizer, self.model, self.method
            )
        restore_random_states(unpack_random_states(task_start["random"], self._device))

    @property
    def learned(self) -> int:
        """Number of tested tasks that are learned."""
        # Joint training has one task that is tested as all of its parts.
        if len(self.stream) > 1:
            return len(self.rows)
        return len(self.stream.test_tasks) * len(self.rows)

    @property
    def average_so_far(self) -> float:
        """Mean score on the learned tasks."""
        return float(np.mean(self.rows[-1][: self.learned]))

    def fork(self, checkpoints: Checkpoints | None = None) -> StreamTraining:
        """Copy this training at its current state; the stream, its data and the settings are shared.

        Args:
            checkpoints: the checkpoints of the copy.
        """
        shared = [self.stream, self.training, self.trackers, *self.stream.tasks, *self.stream.test_tasks]
        shared += [source for task in self.stream.tasks for source in (task.train, task.valid, task.test)]
        memo = {id(item): item for item in shared}

        copied = copy.copy(self)
        copied._checkpoints = checkpoints

        # Model, method and optimizer refer to the same tensors, so they are copied in one call.
        references = (self.model, self.method, self._current_optimizer)
        copied.model, copied.method, copied._current_optimizer = copy.deepcopy(references, memo)
        copied.rows = copy.deepcopy(self.rows)
        copied._cost_by_task = copy.deepcopy(self._cost_by_task)
        copied._clock = copy.deepcopy(self._clock)
        return copied

    def result(self, config: dict[str, Any], provenance: dict[str, Any]) -> Result:
        """Create the result from the measurements.

        Args:
            config: the configuration of the run.
            provenance: versions, time and machine of the run.
        """
        peak = max(0, peak_memory(self._device) - self._initial_memory)
        cost = {"seconds": dict(self._clock.seconds), "peak_memory": peak, **self._cost_by_task}
        return Result(np.array(self.rows), config, self.initial_accuracy, cost, provenance, self.examples)

    def _test(self, task: Task) -> list[float]:
        """Compute the score on each task of the stream, with the classes allowed after ``task``."""
        with self._clock("evaluate"):
            scores_and_counts = evaluate_and_count(
                self.model, self.method, self.stream.test_tasks, allowed=task.allowed, split=self.split
            )
        self.examples = [count for _, count in scores_and_counts]
        return [score for score, _ in scores_and_counts]


@contextmanager
def _reject_on_error(checkpoints: Checkpoints, within_task: bool) -> Iterator[None]:
    """Reject the loaded checkpoint if the code inside fails in any process.

    Args:
        checkpoints: where the checkpoint is from.
        within_task: whether the state within the task is loaded, rather than that before the task.
    """
    failure: Exception | None = None
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise  # the checkpoint may be good on a larger machine
    except Exception as error:  # noqa: BLE001 - the user's model and method may raise anything
        failure = error
    if not all(distributed.all_gather_object(failure is None)):
        raise checkpoints.reject(within_task, failure) from failure


def _state_shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    """List the names and shapes of the state dict."""
    return [(name, value.shape) for name, value in model.state_dict().items()]
