"""The trainer: the loop of ``Method``'s docstring as functions, and nothing a method could not do without."""

from __future__ import annotations

import copy
import inspect
import math
import operator
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.checks import (
    check_first_batch,
    check_outputs,
    check_run,
    check_settings,
    check_task,
    explain_error,
    explain_loss,
)
from everlearn.cost import Clock, peak_memory, reset_peak_memory, state_bytes
from everlearn.data import Arrays, as_source
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.metrics import Matrix
from everlearn.results import Result, file_name, provenance, version
from everlearn.seeds import derive, seeded
from everlearn.stream import Batch, Split, Stream, Task, as_task

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]
Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    """The default optimizer: Adam with learning rate 0.001."""
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Training:
    """How a task is trained; ``train`` and ``run`` document the fields."""

    epochs: int
    iterations: int | None
    batch_size: int
    seed: int
    scheduler: SchedulerFactory | None
    clip: float | None
    accumulate: int
    precision: Precision
    progress: bool | None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("epochs", "iterations", "batch_size", "accumulate")}
        check_settings(counts, self.clip, self.precision)

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()


@dataclass
class Trained:
    """What training a task leaves besides the model: the optimizer, the steps taken, the last loss, the seconds."""

    optimizer: Optimizer
    steps: int
    loss: float
    seconds: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module,
    method: Method,
    task: Any,
    *,
    optimizer: OptimizerFactory | Optimizer = adam,
    epochs: int = 1,
    iterations: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "float32",
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Trained:
    """Learn one task.

    Args:
        model: any module; it is trained in place.
        method: what protects the earlier tasks.
        task: a ``Task``, or a pair (x, y), a Dataset, a DataLoader or an iterable of batches.
        optimizer: a function of the parameters that makes one, or a live one to go on with; to a live one only
            parameters that the method adds are added.
        epochs: passes over the task's data.
        iterations: optimizer steps, instead of epochs.
        batch_size: examples per step; a DataLoader's own stands.
        seed: of the order of the examples.
        scheduler: a function (optimizer, planned steps) that makes one; it steps after every optimizer step.
        clip: largest norm of the whole gradient, after the method has edited it.
        accumulate: cut each batch into so many micro-batches; the step is that of the whole batch, unless a layer
            such as BatchNorm looks at the batch as a whole.
        precision: "bfloat16" runs the forward pass under autocast.
        device: where to train; by default where the model is.
        progress: a progress bar; by default only on a terminal.
    """
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if device is not None:
        model.to(device)
    return _train(model, method, as_task(task), training, optimizer)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    method: Method,
    tasks: Any,
    *,
    allowed: Tensor | None = None,
    split: Split = "test",
    batch_size: int = 1024,
) -> list[float]:
    """Mean score (accuracy) on each task.

    Args:
        model: in whatever mode; it is tested in eval mode and put back.
        method: whose ``predict`` answers.
        tasks: to be tested on: a list such as ``stream.exams``, or test data as ``train`` takes them.
        allowed: which class may be named now (see ``allowed_classes``); by default whatever one of the tasks allows.
        split: which of the task's data.
        batch_size: examples per forward pass.
    """
    exams = _exams(tasks)
    if allowed is None and (tables := [t.allowed for t in exams if t.allowed is not None]):
        allowed = reduce(torch.logical_or, tables)
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        return [_score(model, method, task, allowed, split, batch_size) for task in exams]
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream,
    *,
    optimizer: OptimizerFactory = adam,
    epochs: int = 1,
    iterations: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "float32",
    keep_optimizer: bool = False,
    split: Split = "test",
    device: str | torch.device | None = None,
    progress: bool | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Result:
    """Learn a whole stream and test on all tasks after each.

    One seed gives one result, bit for bit; your random state, your method and your model stay as they were.

    Args:
        make_model: a function of (inputs, outputs), the shape of one input and the number of outputs, such as
            ``nets.mlp``; or one without arguments; or a module, which is copied.
        method: what protects the earlier tasks.
        stream: what is learned, in order.
        optimizer: a function of the parameters that makes one.
        epochs: passes over each task's data.
        iterations: optimizer steps per task, instead of epochs.
        batch_size: examples per step.
        seed: of the model's first weights and of the order of the examples.
        scheduler: a function (optimizer, planned steps) that makes one, per task.
        clip: largest norm of the whole gradient.
        accumulate: micro-batches per step.
        precision: "bfloat16" runs the forward pass under autocast.
        keep_optimizer: go on with the same optimizer, its momenta included, instead of a fresh one per task.
        split: which data to test on; "valid" to choose hyper-parameters.
        device: where to train; by default where the model is.
        progress: progress bars; by default only on a terminal.
        out: a folder for the result; a run that is there already is read instead of done again ...
        force: ... unless you force it. A run on what cannot be told apart (a generator) is always done.

    >>> from everlearn import nets, streams
    >>> result = run(nets.mlp, Method(), streams.digits(scenario="class"), epochs=5)
    >>> result.accuracy.shape, result.average_accuracy < 0.25
    ((5, 5), True)
    """
    check_run(method, stream, optimizer, seed, split)
    folder, seed = None if out is None else atomic.writable_folder(out), operator.index(seed)
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if scheduler is not None and stream.once:
        raise ValueError("An online stream's chunks are too short for a scheduler: set the learning rate instead.")
    with seeded(derive(seed, "model"), None if device is None else torch.device(device)):
        model, method = _build(make_model, stream).to(device), copy.deepcopy(method)
        config = _config(stream, method, model, training, optimizer, keep_optimizer, split)
        if folder is not None and not force and (done := _whole(folder / file_name(config))) is not None:
            return done
        made = provenance()
        accuracy, initial, cost = _learn(model, method, stream, training, optimizer, keep_optimizer, split)
    result = Result(accuracy, config, initial, cost, made)
    if folder is not None:
        result.save(folder)
    return result


def _train(
    model: nn.Module, method: Method, task: Task, training: Training, optimizer: OptimizerFactory | Optimizer
) -> Trained:
    check_task(task)
    device, size, clock = _device(model), training.batch_size, Clock()
    task.steps = task.planned_steps(size, training.epochs, training.iterations)
    model.train()
    known = {id(p) for p in model.parameters()}
    with clock("consolidate"):
        method.begin_task(model, task)
    parameters = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
    live = _ready(optimizer, parameters, known)
    schedule = _schedule(training.scheduler, live, task.steps)
    stepped = [p for group in live.param_groups for p in group["params"]]
    cast, step, loss, hidden = training.cast(device), 0, math.nan, _hidden(training.progress)
    with clock("train"), tqdm(total=task.steps, desc=str(task), leave=False, disable=hidden) as bar:
        for step, batch in enumerate(task.batches(size, training.epochs, training.iterations, training.seed), 1):
            if step == 1:
                check_first_batch(task, batch, model)
            for p in parameters:  # also those the optimizer does not have, or their gradients would pile up
                p.grad = None
            batch = batch if device.type == "cpu" else batch.to(device)
            try:
                loss = _gradient(model, method, batch, training.accumulate, cast)
            except (RuntimeError, ValueError) as error:
                raise explain_error(error, task, batch, first=step == 1) from error
            if not math.isfinite(loss):
                raise FloatingPointError(explain_loss(loss, task, step, batch, model))
            method.before_step(model)
            if training.clip is not None:
                nn.utils.clip_grad_norm_(stepped, training.clip)
            live.step()
            method.after_step(model)
            if schedule is not None:
                schedule.step()
            bar.update()
            if not bar.disable and step % 20 == 0:
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    with clock("consolidate"):
        method.end_task(model, task)
    return Trained(live, step, loss, dict(clock.seconds))


def _learn(
    model: nn.Module,
    method: Method,
    stream: Stream,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
) -> tuple[Matrix, list[float], dict[str, Any]]:
    """Task after task, each followed by the tests; consecutive tasks with one id count as one."""
    device, clock = _device(model), Clock()
    test = partial(evaluate, model, method, stream.exams, split=split)
    before = reset_peak_memory(device)
    with clock("evaluate"):
        initial = test(allowed=stream[0].allowed)
    rows: list[list[float]] = []
    parameters: list[int] = []
    held: list[int] = []
    current: OptimizerFactory | Optimizer = optimizer
    for i, task in enumerate(tqdm(stream.tasks, desc=label(method), leave=False, disable=_hidden(training.progress))):
        trained = _train(model, method, task, training, current)
        clock.add(trained.seconds)
        goes_on = i + 1 < len(stream) and task.id is not None and stream[i + 1].id == task.id
        current = trained.optimizer if keep_optimizer or goes_on else optimizer
        if not goes_on:
            with clock("evaluate"):
                rows.append(test(allowed=task.allowed))
            parameters.append(sum(p.numel() for p in model.parameters()))
            held.append(state_bytes(method.state_dict()))
    cost = {
        "seconds": dict(clock.seconds),
        "peak_memory": max(0, peak_memory(device) - before),
        "parameters": parameters,
        "state_bytes": held,
    }
    return np.array(rows), initial, cost


def _gradient(
    model: nn.Module, method: Method, batch: Batch, accumulate: int, cast: AbstractContextManager[Any]
) -> float:
    """Leave the gradient of the batch's loss in ``p.grad``, micro-batch by micro-batch, and return the loss."""
    if accumulate == 1:
        with cast:
            loss = method.loss(model, batch)
        loss.backward()
        return loss.item()
    total, whole = 0.0, batch.weight
    for part in batch.chunk(accumulate):
        if share := part.weight / whole:
            with cast:
                loss = method.loss(model, part) * share
            loss.backward()
            total += loss.item()
    return total


def _score(
    model: nn.Module, method: Method, task: Task, allowed: Tensor | None, split: Split, batch_size: int
) -> float:
    total, count, device = 0.0, 0, _device(model)
    for batch in task.examples(batch_size, split):
        here = Batch(batch.x, batch.y, batch.t, allowed, batch.likelihood).to(device)
        if not count:
            check_first_batch(task, here, model)
        try:
            out = method.predict(model, here.x, here.t if task.identity else None)
        except RuntimeError as error:
            raise explain_error(error, task, here, first=not count) from error
        check_outputs(task, here, out)
        total += here.score(out).sum().item()
        count += len(here)
    if not count:
        raise ValueError(
            f"{task} has no {split} examples, or a generator that was read already: give a list or a loader."
        )
    if not math.isfinite(total):
        raise FloatingPointError(f"The score on {task} is {total}: its {split} targets are not all finite numbers.")
    return total / count


def _exams(tasks: Any) -> list[Task]:
    """What is to be tested on as tasks; a pair of arrays, a Dataset, a loader count as one."""
    several = isinstance(tasks, (list, tuple)) and not isinstance(as_source(tasks), Arrays)
    return [t if isinstance(t, Task) else Task(test=t) for t in (tasks if several else [tasks])]


def _ready(optimizer: OptimizerFactory | Optimizer, learning: list[nn.Parameter], known: set[int]) -> Optimizer:
    """A new optimizer, or the live one with the parameters that did not exist before the task."""
    if not learning:
        raise ValueError("There is nothing to train: every parameter of the model is frozen.")
    if not isinstance(optimizer, Optimizer):
        made = optimizer(learning)
        if isinstance(made, torch.optim.LBFGS):
            raise TypeError("LBFGS calls the model itself, many times a step: use it in your own loop.")
        return made
    if new := [p for p in learning if id(p) not in known]:
        have = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimizer.add_param_group({"params": [p for p in new if id(p) not in have]})
    return optimizer


def _schedule(factory: SchedulerFactory | None, optimizer: Optimizer, steps: int | None) -> LRScheduler | None:
    if factory is None:
        return None
    if steps is None:
        raise ValueError("A scheduler must know the number of steps, which these data do not tell: give iterations.")
    for group in optimizer.param_groups:  # a kept optimizer ends a task at the last task's final rate
        group["lr"] = group.get("initial_lr", group["lr"])
    return factory(optimizer, steps)


def _build(make_model: Callable[..., nn.Module] | nn.Module, stream: Stream) -> nn.Module:
    if isinstance(make_model, nn.Module):
        return copy.deepcopy(make_model)
    needed = [
        p.name
        for p in inspect.signature(make_model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise TypeError(
            f"{_name(make_model)} needs {', '.join(needed)}: give a function of (inputs, outputs), one without "
            "arguments, or a module; 'lambda: Net(...)' makes any model such a function."
        )
    if needed and not stream.inputs:
        raise ValueError(
            "This stream does not tell the shape of its inputs: give a function without arguments or a module."
        )
    model = make_model(stream.inputs, stream.outputs) if needed else make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_name(make_model)} must make a torch.nn.Module, it made a {type(model).__name__}.")
    return model


def _config(
    stream: Stream,
    method: Method,
    model: nn.Module,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
) -> dict[str, Any]:
    """Everything that decides the result, readable where it can be, as fingerprints where it cannot."""
    joint = stream.settings.get("joint", False)
    settings = {f.name: getattr(training, f.name) for f in fields(training) if f.name not in ("seed", "progress")}
    settings |= {"scheduler": _name(training.scheduler), "epochs": None if training.iterations else training.epochs}
    made = optimizer(list(model.parameters()))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    return {
        "stream": {"name": stream.name, **stream.settings, "tasks": len(stream.exams)},
        "scenario": stream.scenario,
        "score": stream.exams[0].likelihood.score_name,
        "method": "joint" if joint and type(method) is Method else label(method) + (" on joint" if joint else ""),
        "fields": repr(method),
        "model": repr(model),
        "training": {
            **settings,
            "keep_optimizer": keep_optimizer,
            "split": split,
            "optimizer": type(made).__name__,
            "groups": [{k: v for k, v in group.items() if isinstance(v, (int, float, tuple))} for group in groups],
        },
        "seed": training.seed,
        "everlearn": version(),
        "fingerprints": {
            "data": fingerprint([_content(t) for t in [*stream.tasks, *stream.exams]]),
            "model": fingerprint([[type(m) for m in model.modules()], model.state_dict()]),
            "method": fingerprint(method),
            "scheduler": fingerprint(training.scheduler),
        },
    }


def _content(task: Task) -> dict[str, Any]:
    """What a task is made of; the planned steps are the trainer's."""
    return {f.name: getattr(task, f.name) for f in fields(task) if f.name != "steps"}


def _whole(path: Path) -> Result | None:
    """The result of a run done before; None where there is none, where it is torn, or where nobody can tell."""
    try:
        result = Result.load(path) if path.exists() else None
    except ValueError:
        return None  # a torn or foreign file under this run's name: the run is done again and replaces it
    return None if result is None or None in result.config["fingerprints"].values() else result


def _name(thing: Any) -> str | None:
    return None if thing is None else getattr(thing, "__qualname__", type(thing).__name__)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress  # tqdm's None: hidden unless on a terminal
