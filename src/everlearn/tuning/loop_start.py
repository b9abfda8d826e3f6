"""Starting point of trials in a training loop of the user: the first task, trained once where trials agree on it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from everlearn.core.attachment_checks import list_parts
from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating
from everlearn.core.stream import Stream
from everlearn.core.task import Task
from everlearn.results.format import json_settings
from everlearn.results.provenance import provenance, version
from everlearn.results.result import Result, file_name
from everlearn.runtime.fingerprint import fingerprint, fingerprint_model
from everlearn.runtime.randomness import (
    RandomStates,
    get_random_states,
    pack_random_states,
    restore_random_states,
    seeded,
    unpack_random_states,
)
from everlearn.trainer.checkpoints import Checkpoints, State
from everlearn.trainer.config import data_of
from everlearn.trainer.cost import Clock
from everlearn.trainer.evaluate import evaluate as evaluate_tasks
from everlearn.trainer.serialization import load_model, model_state
from everlearn.trainer.settings import device_of
from everlearn.tuning.search_space import Dimension, Value, set_values, with_values
from everlearn.tuning.start import OnRows, Start

TrainFunction = Callable[[nn.Module, Method, Any], object]
EvaluateFunction = Callable[[nn.Module, Method, Any], float]
OnEndTask = Callable[[str, BoundArguments, Callable[[], None]], None]
"""Called in place of ``end_task`` with the hook's name, its arguments (method, model, data), and what runs it."""


@dataclass
class LoopRun:
    """A run in progress.

    Args:
        model: the model, trained in place.
        method: the method in training.
        task_index: index of the task to train next.
        rows: scores on each task after each task; NaN for tasks that are not learned yet.
        clock: seconds by purpose.
    """

    model: nn.Module
    method: Method
    task_index: int = 0
    rows: list[list[float]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)


@dataclass
class FirstTask:
    """State of the first task right before its ``end_task``, the first moment at which a late field acts.

    Args:
        model: copy of the model.
        method: copy of the method.
        data: the arguments of ``end_task`` after the model.
        random_states: global random states, and those of the tasks' own generators.
        seconds: time of the training.
    """

    model: nn.Module
    method: Method
    data: Sequence[Any]
    random_states: tuple[RandomStates, list[torch.Tensor]]
    seconds: float = 0.0


@dataclass
class LoopStart(Start):
    """Starting point of trials that a function of the user trains.

    The random states are those after ``torch.manual_seed(seed)``, and the same for ``numpy`` and ``random``, when the
    model is made. ``evaluate`` does not change them. A trial that was killed resumes after its last task.

    Args:
        train: trains the model on one task and calls ``method.end_task``.
        evaluate: score on one task, higher is better; None for that of ``everlearn.evaluate`` on validation data.
    """

    train: TrainFunction
    evaluate: EvaluateFunction | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(not self._is_continued(index) for index in range(len(self.stream))) != self.num_tasks:
            raise ValueError(
                f"{self.stream.name} is tested on other tasks than it has: give a stream that is not joint."
            )
        if any(isinstance(task, Iterator) for task in self.stream):
            raise TypeError(
                "Every trial reads each task, and a generator can be read once only: give lists or loaders."
            )
        if self.evaluate is None:
            for number, task in enumerate(self.stream.test_tasks, 1):
                if not isinstance(task, Task) or task.valid is None:
                    raise ValueError(
                        f"Tuning needs validation data, and task {number} has none: make the stream with valid=0.1, or "
                        "give evaluate=, a function of (model, method, task) that returns the score on held-out data."
                    )
        self._generators = _find_generators(self.stream.tasks)
        self._initial_generator_states = [g.get_state() for g in self._generators]

    def prepare(self) -> None:
        """Train what all trials share, before processes are forked."""
        _ = self._first_task

    def config(self, method: Method) -> dict[str, Any]:
        """Configuration of the run with a method."""
        score_name = "score"
        if self.evaluate is None:
            score_name = self.stream.test_tasks[0].likelihood.score_name
        return {
            "stream": json_settings({"name": self.stream.name, **self.stream.settings, "tasks": self.num_tasks}),
            "scenario": self.stream.scenario,
            "score": score_name,
            "method": label(method),
            "fields": repr(method),
            "model": repr(self._initial_model),
            "training": {"loop": getattr(self.train, "__qualname__", type(self.train).__name__)},
            "seed": self.seed,
            "everlearn": version(),
            "fingerprints": {**self._fingerprints, "method": fingerprint(method)},
        }

    @cached_property
    def _fingerprints(self) -> dict[str, str | None]:
        """Hashes of data, model and functions, before any of them is used."""
        are_everlearn_tasks = all(isinstance(task, Task) for task in self.stream)
        return {
            "data": data_of(self.stream) if are_everlearn_tasks else fingerprint(self.stream.tasks),
            "model": fingerprint_model(self._initial_model),
            "loop": fingerprint([self.train, self.evaluate]),
        }

    @cached_property
    def _initial_model(self) -> nn.Module:
        with seeded(self.seed, self.device):
            return self._build_model()

    def _make_checkpoints(self, folder: Path, config: dict[str, Any]) -> Checkpoints | None:
        if self.checkpoint_every is None or None in config["fingerprints"].values():
            return None
        return Checkpoints(folder / f"{Path(file_name(config)).stem}.checkpoints", self.checkpoint_every)

    def _train_stream(
        self,
        method: Method,
        values: Sequence[Value],
        config: dict[str, Any],
        checkpoints: Checkpoints | None,
        on_rows: OnRows,
    ) -> Result:
        run_provenance = provenance()
        with self._seeded():
            run = self._resume(method, checkpoints)
            if run is None and self._first_task is not None:
                run = self._fork(self._first_task, values)
                self._close_task(run, checkpoints)
            if run is None:
                run = LoopRun(self._build_model(), method)

            while True:
                # The callback may draw random numbers.
                with self._preserve_random_states():
                    on_rows(run.rows)
                if run.task_index == len(self.stream):
                    cost = {"seconds": dict(run.clock.seconds)}
                    return Result(np.array(run.rows), config, cost=cost, provenance=run_provenance)
                self._train_task(run)
                self._close_task(run, checkpoints)

    def _train_task(self, run: LoopRun, on_end_task: OnEndTask | None = None) -> None:
        """Call the user's function for the next task, and check that it has trained the model and ended the task."""
        number = run.task_index + 1
        has_ended = False

        def note_end(hook: str, call: BoundArguments, run_hook: Callable[[], None]) -> None:
            nonlocal has_ended
            has_ended = True
            if on_end_task is None:
                run_hook()
            else:
                on_end_task(hook, call, run_hook)

        # Gradients are no part of a checkpoint.
        for p in _parameters(run.model, run.method):
            p.grad = None
        initial_digest = _weights_digest(run.model, run.method)
        with run.clock("train"), _watch_end_task(run.method, note_end):
            self.train(run.model, run.method, self.stream[run.task_index])

        if not has_ended and run.method.changes("end_task"):
            raise ValueError(
                f"train has returned from task {number} without a call of method.end_task(model, data): without it "
                f"{label(run.method)} does not protect the task. Call it at the end of train."
            )
        if run.method.trains and _weights_digest(run.model, run.method) == initial_digest:
            raise ValueError(
                f"train has not changed the model that it got for task {number}. It must train this model in place: "
                "create the optimizer in train, from model.parameters(), since every trial has another model."
            )

    def _close_task(self, run: LoopRun, checkpoints: Checkpoints | None) -> None:
        """Score the learned tasks after one is trained, unless the next one continues it, and write a checkpoint."""
        task = self.stream[run.task_index]
        is_continued = self._is_continued(run.task_index)
        run.task_index += 1
        if is_continued:
            return

        with run.clock("evaluate"), self._preserve_random_states():
            run.rows.append(self._score_tasks(run, task))
        if checkpoints is not None and run.task_index < len(self.stream) and self._is_restorable(run.model):
            checkpoints.write(run.task_index, 0, self._state(run))

    def _score_tasks(self, run: LoopRun, task: Any) -> list[float]:
        """Score on every task learned so far, in evaluation mode; NaN for the others."""
        num_learned = len(run.rows) + 1
        scores = [math.nan] * self.num_tasks
        modes = _modes(run.model)
        for index, test_task in enumerate(self.stream.test_tasks[:num_learned]):
            with evaluating(run.model):
                if self.evaluate is None:
                    (scores[index],) = evaluate_tasks(
                        run.model, run.method, [test_task], allowed=task.allowed, split="valid"
                    )
                else:
                    scores[index] = _as_number(self.evaluate(run.model, run.method, test_task))
            _set_modes(run.model, modes)
            if not math.isfinite(scores[index]):
                raise FloatingPointError(
                    f"evaluate has returned {scores[index]} for task {index + 1} after task {num_learned}: the values "
                    "may be too large for the loop, or the score is not defined on these data."
                )
        return scores

    def _is_continued(self, task_index: int) -> bool:
        """Whether the next task is a part of the same one, as in ``streams.online``."""
        task_ids = [getattr(task, "id", None) for task in self.stream.tasks[task_index : task_index + 2]]
        return len(task_ids) == 2 and task_ids[0] is not None and task_ids[0] == task_ids[1]

    @cached_property
    def _first_task(self) -> FirstTask | None:
        """The trained first task; None if trials differ in it or it cannot be continued exactly, with a warning."""
        if not all(dimension.search.late for dimension in self.dimensions):
            return None
        first_task: FirstTask | None = None
        end_digest: str | None = None
        problem = "train does not call method.end_task with the model that it gets."

        def copy_and_end(hook: str, call: BoundArguments, run_hook: Callable[[], None]) -> None:
            nonlocal first_task, end_digest, problem
            if hook == "end_task" and call.args[:2] == (run.method, run.model) and not call.kwargs:
                first_task, problem = self._copy_first_task(run, call.args[2:])
            run_hook()
            end_digest = self._digest(run.model, run.method)

        with self._seeded():
            run = LoopRun(self._build_model(), _with_lowest_values(self.method, self.dimensions))
            self._train_task(run, copy_and_end)
            is_unchanged = end_digest is not None and end_digest == self._digest(run.model, run.method)
        if first_task is not None and is_unchanged:
            first_task.seconds = run.clock.seconds["train"]
            return first_task

        if first_task is not None:
            problem = "train changes the model, the method or a random state after method.end_task: call it last."
        warnings.warn(f"Trials do not share the first task: {problem}", stacklevel=2)
        return None

    def _copy_first_task(self, run: LoopRun, data: Sequence[Any]) -> tuple[FirstTask | None, str]:
        """Copy the state before ``end_task``; returns None and the reason if the copy would not continue equally."""
        try:
            model, method = self._copy(run.model, run.method)
        except (RuntimeError, TypeError) as error:
            return None, f"the model or the method cannot be copied ({error})."
        # References of the copy to the original give another hash.
        digest = self._digest(run.model, run.method)
        if digest is None or digest != self._digest(model, method):
            return None, "a copy of the model is not equal to it, or still refers to it, as hooks with closures do."
        return FirstTask(model, method, data, self._random_states()), ""

    def _fork(self, first_task: FirstTask, values: Sequence[Value]) -> LoopRun:
        """Continue a copy of the first task with these values, up to the end of the task."""
        run = LoopRun(*self._copy(first_task.model, first_task.method))
        run.clock.add({"train": first_task.seconds})
        self._restore_random_states(first_task.random_states)
        set_values(run.method, self.dimensions, values)
        run.method.end_task(run.model, *first_task.data)
        return run

    def _copy(self, model: nn.Module, method: Method) -> tuple[nn.Module, Method]:
        """Copy model and method with their gradients; the tasks and their data are shared."""
        shared = [self.stream, *self.stream.tasks, *self.stream.test_tasks]
        shared += [part for task in self.stream.tasks for part in getattr(task, "__dict__", {}).values()]
        memo = {id(item): item for item in shared}
        # Model and method may refer to the same tensors, so they are copied in one call.
        model_copy, method_copy = copy.deepcopy((model, method), memo)
        copied_parameters = _parameters(model_copy, method_copy)
        for p, p_copy in zip(_parameters(model, method), copied_parameters, strict=True):
            p_copy.grad = None if p.grad is None else p.grad.clone()
        return model_copy, method_copy

    def _digest(self, model: nn.Module, method: Method) -> str | None:
        """Hash everything that decides how a run continues; None if it cannot be hashed."""
        return fingerprint([model, _modes(model), method.state_dict(), self._random_states()])

    def _state(self, run: LoopRun) -> State:
        """Collect what another process needs to resume, as tensors, numbers and lists of them."""
        random_states, generator_states = self._random_states()
        return {
            "task_index": run.task_index,
            "rows": run.rows,
            "seconds": dict(run.clock.seconds),
            "model": model_state(run.model),
            "modes": _modes(run.model),
            "method": run.method.state_dict(),
            "random": pack_random_states(random_states),
            "generators": generator_states,
        }

    def _is_restorable(self, model: nn.Module) -> bool:
        """Whether a new model with the same state dict is equal; hooks and added units are not in a state dict."""
        restored_model = copy.deepcopy(self._initial_model)
        try:
            load_model(restored_model, model_state(model))
        except (RuntimeError, KeyError, AttributeError):
            return False
        return fingerprint_model(restored_model) == fingerprint_model(model)

    def _resume(self, method: Method, checkpoints: Checkpoints | None) -> LoopRun | None:
        """Run from its last checkpoint; None without one."""
        newest = None if checkpoints is None else checkpoints.newest()
        if checkpoints is None or newest is None or newest[0] is None:
            return None
        state = newest[0]
        run = LoopRun(copy.deepcopy(self._initial_model), copy.deepcopy(method), state["task_index"], state["rows"])
        try:
            load_model(run.model, state["model"])
            _set_modes(run.model, state["modes"])
            run.method.load_state_dict(state["method"])
        except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
            warnings.warn(str(checkpoints.reject(within_task=False, error=error)), stacklevel=2)
            return None
        run.clock.add(state["seconds"])
        self._restore_random_states((unpack_random_states(state["random"], self._device), state["generators"]))
        return run

    @property
    def _device(self) -> torch.device:
        return device_of(self._initial_model)

    def _random_states(self) -> tuple[RandomStates, list[torch.Tensor]]:
        return get_random_states(self._device), [g.get_state() for g in self._generators]

    def _restore_random_states(self, saved: tuple[RandomStates, list[torch.Tensor]]) -> None:
        random_states, generator_states = saved
        restore_random_states(random_states)
        for generator, state in zip(self._generators, generator_states, strict=True):
            generator.set_state(state)

    @contextmanager
    def _preserve_random_states(self) -> Iterator[None]:
        saved = self._random_states()
        try:
            yield
        finally:
            self._restore_random_states(saved)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Run code with the random states at the start of a trial, then restore the previous ones."""
        with self._preserve_random_states(), seeded(self.seed, self._device):
            for generator, state in zip(self._generators, self._initial_generator_states, strict=True):
                generator.set_state(state)
            yield


def as_stream(tasks: Any) -> Stream:
    """Convert a list of tasks of any type to a stream; a stream is returned unchanged."""
    if isinstance(tasks, Stream):
        return tasks
    if not isinstance(tasks, (list, tuple)) or not tasks:
        raise TypeError(f"Give a Stream, or a list of the tasks that train gets one by one, got {tasks!r}.")
    return Stream(list(tasks), scenario="", name="tasks")  # type: ignore[arg-type] # the scenario is the user's


@contextmanager
def _watch_end_task(method: Method, on_end_task: OnEndTask) -> Iterator[None]:
    """Call a function in place of the first ``end_task``, or ``consolidate``, of a method or of a part of a chain.

    The classes are changed until then, not the method, whose attributes are its state.
    """
    parts = list_parts(method)
    original_hooks: list[tuple[type, str, Any]] = []  # None if inherited

    def watch(cls: type, hook: str) -> None:
        original = getattr(cls, hook)

        @wraps(original)
        def watched(self: Method, *args: Any, **kwargs: Any) -> None:
            call = signature(original).bind(self, *args, **kwargs)
            run_hook = partial(original, *call.args, **call.kwargs)
            if any(self is part for part in parts):
                restore()
                on_end_task(hook, call, run_hook)
            else:
                run_hook()

        original_hooks.append((cls, hook, vars(cls).get(hook)))
        setattr(cls, hook, watched)

    def restore() -> None:
        while original_hooks:
            cls, hook, original = original_hooks.pop()
            if original is None:
                delattr(cls, hook)
            else:
                setattr(cls, hook, original)

    try:
        for cls in {type(part) for part in parts}:
            for hook in ("end_task", "consolidate"):
                if hasattr(cls, hook):
                    watch(cls, hook)
        yield
    finally:
        restore()


def _with_lowest_values(method: Method, dimensions: Sequence[Dimension]) -> Method:
    """Method for the first task, which late values do not affect, in place of a default that may act in it."""
    try:
        return with_values(method, dimensions, [dimension.search.low for dimension in dimensions])
    except ValueError:
        # The method does not accept these values together.
        return with_values(method, [], [])


def _find_generators(tasks: Sequence[Any]) -> list[torch.Generator]:
    """Random generators of loaders: the tasks themselves, or in tuples, dicts or attributes of the tasks."""
    generators: dict[int, torch.Generator] = {}
    for leaf in tree_leaves([getattr(task, "__dict__", task) for task in tasks]):
        loader = getattr(leaf, "iterable", leaf)  # of the data of a Task
        sampler = getattr(loader, "sampler", None)
        for candidate in (loader, getattr(loader, "generator", None), getattr(sampler, "generator", None)):
            if isinstance(candidate, torch.Generator):
                generators[id(candidate)] = candidate
    return list(generators.values())


def _parameters(model: nn.Module, method: Method) -> list[nn.Parameter]:
    return [*model.parameters(), *method.parameters()]


def _weights_digest(model: nn.Module, method: Method) -> str | None:
    return fingerprint([*_parameters(model, method), *model.buffers()])


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    for module, is_training in zip(model.modules(), modes, strict=True):
        module.training = is_training


def _as_number(score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"evaluate must return a number, higher is better; it has returned {score!r}.") from None
