"""Learning one task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from everlearn import distributed
from everlearn.batch import Batch
from everlearn.checks import check_first_batch, check_task, explain_error, explain_loss
from everlearn.cost import Clock
from everlearn.method import Method
from everlearn.params import is_sharded
from everlearn.seeds import restore, unpack
from everlearn.stream import Task, as_task
from everlearn.trainer.training import (
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    Training,
    adam,
    device_of,
    hide_bar,
)
from everlearn.trainer.written import load_model, rebuilt


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
    lesson = Lesson(model, method, as_task(task), training, optimizer)
    for _ in lesson.steps():
        pass
    with lesson.clock("consolidate"):
        method.end_task(model, lesson.task)
    return Trained(lesson.optimizer, lesson.step, lesson.loss, dict(lesson.clock.seconds))


class Lesson:
    """A task being trained, step by step; the method's ``end_task`` is left to the caller.

    Args:
        model: trained in place.
        method: what protects the earlier tasks.
        task: what is learned; it begins here.
        training: how.
        optimizer: a function of the parameters that makes one, or a live one.
        resumed: where an earlier process was in this task, as ``Course`` has written it; model and method are as the task found
            them, and the optimizer is the function.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        task: Task,
        training: Training,
        optimizer: OptimizerFactory | Optimizer,
        resumed: dict[str, Any] | None = None,
    ) -> None:
        check_task(task)
        if any(map(is_sharded, model.parameters())):
            raise ValueError(
                "These parameters are sharded (FSDP) and average their own gradients, so that this loop would do it twice: speak the "
                "method's verbs in a loop of your own, or attach it."
            )
        self.model, self.method, self.task, self.training = model, method, task, training
        self.clock, self.step, self.loss = Clock(), 0, math.nan
        self._before = list(model.parameters())
        task.steps = task.planned_steps(training.batch_size, training.epochs, training.iterations)
        model.train()
        if resumed is None:
            distributed.same([*model.parameters(), *model.buffers()])  # before a method looks at them
        with self.clock("consolidate"):
            method.begin_task(model, task)
        if resumed is not None:
            load_model(model, resumed["model"])
            method.load_state_dict(resumed["method"])
            method.resume(model, task)
        self._learning = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
        self.optimizer = (
            _ready(optimizer, self._learning, self._before)
            if resumed is None or isinstance(optimizer, Optimizer)
            else rebuilt(resumed["optimizer"], optimizer, model, method)
        )
        self.schedule = _schedule(training.scheduler, self.optimizer, task.steps)
        if resumed is not None:
            self._go_on(resumed)
        self._device = self._learning[0].device
        if resumed is None:
            distributed.same([*model.parameters(), *model.buffers(), *method.parameters()])
        self._stepped = [p for group in self.optimizer.param_groups for p in group["params"]]

    def _go_on(self, resumed: dict[str, Any]) -> None:
        """From that step, with the rates and random numbers of then; a new schedule has set rates of its own."""
        self.step = resumed["step"]
        self.optimizer.load_state_dict(resumed["optimizer"]["state"])
        if self.schedule is not None:
            self.schedule.load_state_dict(resumed["schedule"])
        restore(unpack(resumed["random"], device_of(self.model)))

    def steps(self) -> Iterator[float]:
        """Take the steps that are left; after each its loss."""
        t = self.training
        batches = self.task.batches(t.batch_size, t.epochs, t.iterations, t.seed, start=self.step)
        with _bar(self.task, t.progress, self.step) as bar:
            while True:
                with self.clock("train"):
                    if (batch := next(batches, None)) is None:
                        self._settle()
                        return
                    self._take(batch)
                if bar is not None:
                    bar.update()
                    if self.step % 20 == 0:
                        bar.set_postfix(epoch=batch.epoch + 1, loss=f"{self.loss:.3f}", refresh=False)
                yield self.loss

    def _settle(self) -> None:
        """Running statistics are of what each process has seen: their mean stands for all."""
        moving = [b for b in self.model.buffers() if b.is_floating_point()] if distributed.world() > 1 else []
        distributed.add_up(moving)
        for buffer in moving:
            buffer.div_(distributed.world())

    def _take(self, batch: Batch) -> None:
        model, method, first = self.model, self.method, self.step == 0
        if first:
            check_first_batch(self.task, batch, self._before)
        for p in self._learning:  # also those the optimizer does not have, or their gradients would pile up
            p.grad = None
        batch = batch if self._device.type == "cpu" else batch.to(self._device)
        try:
            self.loss = self._gradient(batch)
        except (RuntimeError, ValueError) as error:
            raise explain_error(error, self.task, batch, first=first) from error
        if distributed.world() > 1:
            self.loss = distributed.average_gradients(self._learning, batch.weight, self.loss)
        if not math.isfinite(self.loss):
            raise FloatingPointError(explain_loss(self.loss, self.task, self.step + 1, batch, model))
        method.pull(model)
        method.before_step(model)
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(self._stepped, self.training.clip)
        self.optimizer.step()
        method.after_step(model)
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def _gradient(self, batch: Batch) -> float:
        """Leave the gradient of the batch's loss in ``p.grad``, micro-batch by micro-batch, and return the loss."""
        cast, accumulate = self.training.cast(self._device), self.training.accumulate
        if accumulate == 1:
            with cast:
                loss = self.method.loss(self.model, batch, pulled=True)
            loss.backward()
            return loss.item()
        total, whole = 0.0, batch.weight
        if not whole:
            return math.nan  # the mean over no labels, as without accumulation
        for part in batch.chunk(accumulate):
            if share := part.weight / whole:
                with cast:
                    loss = self.method.loss(self.model, part, pulled=True) * share
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


def _bar(task: Task, progress: bool | None, done: int) -> AbstractContextManager[tqdm[Any] | None]:
    """A progress bar over the task's steps; None where it would only cost time."""
    if progress is False:
        return nullcontext()
    return tqdm(total=task.steps, initial=done, desc=str(task), unit="step", leave=False, disable=hide_bar(progress))
