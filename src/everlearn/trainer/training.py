"""Learning one task."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from everlearn.batch import Batch
from everlearn.checks import check_first_batch, check_settings, check_task, explain_error, explain_loss
from everlearn.cost import Clock
from everlearn.method import Method
from everlearn.stream import Task, as_task
from everlearn.trainer.tracking import Journal

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]
Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    """The default optimizer: Adam with learning rate 0.001."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)  # one kernel: on the CPU a third off the whole step


@dataclass(frozen=True)
class Training:
    """How a task is trained; ``train`` and ``run`` document the fields."""

    epochs: int = 1
    iterations: int | None = None
    batch_size: int = 128
    seed: int = 0
    scheduler: SchedulerFactory | None = None
    clip: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    progress: bool | None = None

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
    trained, clock = practise(model, method, task := as_task(task), training, optimizer, Journal()), Clock()
    with clock("consolidate"):
        method.end_task(model, task)
    clock.add(trained.seconds)
    return replace(trained, seconds=dict(clock.seconds))


def practise(
    model: nn.Module,
    method: Method,
    task: Task,
    training: Training,
    optimizer: OptimizerFactory | Optimizer,
    journal: Journal,
) -> Trained:
    """Begin a task and take its steps; the method's ``end_task`` is left to the caller."""
    check_task(task)
    size, clock, before = training.batch_size, Clock(), list(model.parameters())
    task.steps = task.planned_steps(size, training.epochs, training.iterations)
    model.train()
    with clock("consolidate"):
        method.begin_task(model, task)
    parameters = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
    device = parameters[0].device if parameters else torch.device("cpu")
    live = _ready(optimizer, parameters, before)
    schedule = _schedule(training.scheduler, live, task.steps)
    stepped = [p for group in live.param_groups for p in group["params"]]
    cast, step, loss = training.cast(device), 0, math.nan
    with clock("train"), _bar(task, training.progress) as bar:
        for step, batch in enumerate(task.batches(size, training.epochs, training.iterations, training.seed), 1):
            if step == 1:
                check_first_batch(task, batch, before)
            for p in parameters:  # also those the optimizer does not have, or their gradients would pile up
                p.grad = None
            batch = batch if device.type == "cpu" else batch.to(device)
            try:
                loss = _gradient(model, method, batch, training.accumulate, cast)
            except (RuntimeError, ValueError) as error:
                raise explain_error(error, task, batch, first=step == 1) from error
            if not math.isfinite(loss):
                raise FloatingPointError(explain_loss(loss, task, step, batch, model))
            method.pull(model)
            method.before_step(model)
            if training.clip is not None:
                nn.utils.clip_grad_norm_(stepped, training.clip)
            live.step()
            method.after_step(model)
            if schedule is not None:
                schedule.step()
            journal.stepped(loss)
            if bar is not None:
                bar.update()
                if step % 20 == 0:
                    bar.set_postfix(epoch=batch.epoch + 1, loss=f"{loss:.3f}", refresh=False)
    return Trained(live, step, loss, dict(clock.seconds))


def _gradient(
    model: nn.Module, method: Method, batch: Batch, accumulate: int, cast: AbstractContextManager[Any]
) -> float:
    """Leave the gradient of the batch's loss in ``p.grad``, micro-batch by micro-batch, and return the loss."""
    if accumulate == 1:
        with cast:
            loss = method.loss(model, batch, pulled=True)
        loss.backward()
        return loss.item()
    total, whole = 0.0, batch.weight
    for part in batch.chunk(accumulate):
        if share := part.weight / whole:
            with cast:
                loss = method.loss(model, part, pulled=True) * share
            loss.backward()
            total += loss.item()
    return total


def _ready(
    optimizer: OptimizerFactory | Optimizer, learning: list[nn.Parameter], before: list[nn.Parameter]
) -> Optimizer:
    """A new optimizer, or the live one with the parameters that did not exist before the task."""
    if not learning:
        raise ValueError("There is nothing to train: every parameter of the model is frozen.")
    if not isinstance(optimizer, Optimizer):
        made = optimizer(learning)
        if isinstance(made, torch.optim.LBFGS):
            raise TypeError("LBFGS calls the model itself, many times a step: use it in your own loop.")
        return made
    old = {id(p) for p in before}
    if new := [p for p in learning if id(p) not in old]:
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


def device_of(model: nn.Module) -> torch.device:
    """Where the model is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _bar(task: Task, progress: bool | None) -> AbstractContextManager[tqdm[Any] | None]:
    """A progress bar over the task's steps; None where it would only cost time."""
    if progress is False:
        return nullcontext()
    return tqdm(total=task.steps, desc=str(task), unit="step", leave=False, disable=hide_bar(progress))


def hide_bar(progress: bool | None) -> bool | None:
    """A wish for progress bars in tqdm's words."""
    return None if progress is None else not progress  # tqdm's None: hidden unless on a terminal
