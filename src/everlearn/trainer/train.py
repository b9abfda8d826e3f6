"""Training on one task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from everlearn.core.batch import Batch
from everlearn.core.check import refuse_problems
from everlearn.core.data_source import Batches
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating, has_sharded_parameters
from everlearn.core.task import Task, as_task
from everlearn.curvature.progress import show_progress
from everlearn.runtime import distributed
from everlearn.runtime.fingerprint import fingerprint
from everlearn.runtime.randomness import restore_random_states, unpack_random_states
from everlearn.trainer.cost import Clock
from everlearn.trainer.losses import PendingLosses
from everlearn.trainer.serialization import load_model, rebuild_optimizer
from everlearn.trainer.settings import (
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    Training,
    adam,
    device_of,
    hide_bar,
)
from everlearn.trainer.validation import check_first_batch, check_num_epochs, check_task, explain_error, explain_loss


@dataclass
class TrainResult:
    """The outcome of training on one task, besides the model.

    Args:
        optimizer: the optimizer after the last step, for reuse in the next task; None if the method takes no steps.
        steps: optimizer steps taken.
        loss: the last training loss.
        seconds: seconds spent, by purpose ("train", "consolidate").
    """

    optimizer: Optimizer | None
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
) -> TrainResult:
    """Train a model on one task with a continual-learning method.

    Args:
        model: any module; it is trained in place.
        method: the continual-learning method.
        task: a ``Task``, or a pair (x, y), a Dataset, a DataLoader or an iterable of batches.
        optimizer: a function from parameters to an optimizer, or an existing optimizer to continue with. Only
            parameters that the method creates are added to an existing optimizer.
        epochs: passes over the task's data; 0 only for methods that take no gradient steps.
        iterations: optimizer steps, instead of epochs.
        batch_size: examples per step; ignored for a DataLoader, which has its own.
        seed: seed for the order of the examples.
        scheduler: a function (optimizer, planned steps) that returns a scheduler; it steps after every optimizer step.
        clip: maximum norm of the gradient, applied after the method has edited it.
        accumulate: number of micro-batches per step. The step equals that of the full batch, except with layers that
            use statistics of the batch, such as BatchNorm.
        precision: "bfloat16" runs the forward pass under autocast.
        device: device to train on; by default the model's.
        progress: whether to show a progress bar; by default only on a terminal.

    Returns:
        The optimizer, the number of steps, the last loss and the seconds spent.
    """
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if device is not None:
        model.to(device)

    task_training = TaskTraining(model, method, as_task(task), training, optimizer)
    for _ in task_training.steps():
        pass

    with task_training.clock("consolidate"), show_progress(progress):
        method.end_task(model, task_training.task)

    seconds = dict(task_training.clock.seconds)
    return TrainResult(task_training.optimizer, task_training.step, task_training.loss, seconds)


class TaskTraining:
    """The training loop of one task, step by step. The caller calls the method's ``end_task``.

    Args:
        model: trained in place.
        method: the continual-learning method.
        task: the task to train on; ``begin_task`` is called here.
        training: the training settings.
        optimizer: a function from parameters to an optimizer, or an existing optimizer.
        resumed: the state within this task that ``StreamTraining`` saved in an earlier process. Model and method must
            be as they were at the start of the task, and ``optimizer`` must be the function.
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
        check_num_epochs(method, training.epochs, training.iterations)
        if has_sharded_parameters(model):
            raise ValueError(
                "These parameters are sharded (FSDP) and average their own gradients, so this loop would average them "
                "twice: call the method's hooks in your own training loop, or attach the method."
            )

        self.model = model
        self.method = method
        self.task = task
        self.training = training
        self.clock = Clock()
        self.step = 0
        self.losses = PendingLosses(device_of(model))

        self._initial_params = list(model.parameters())
        task.steps = task.planned_steps(training.batch_size, training.epochs, training.iterations)
        model.train()

        # A method may compute statistics in begin_task, so all processes need equal weights before it.
        if resumed is None:
            distributed.broadcast_([*model.parameters(), *model.buffers()])
        with self.clock("consolidate"):
            method.begin_task(model, task)
        if resumed is not None:
            load_model(model, resumed["model"])
            method.load_state_dict(resumed["method"])

            # The second call restores hooks and caches. What else a method may change there is loaded again.
            method.begin_task(model, task)
            load_model(model, resumed["model"])
            if fingerprint(method.state_dict()) != fingerprint(resumed["method"]):
                method.load_state_dict(resumed["method"])

        # A method that only collects statistics needs no optimizer, and may have a model without trainable parameters.
        self._trainable_params = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
        self.optimizer: Optimizer | None = None
        self.schedule: LRScheduler | None = None
        if method.trains:
            if resumed is None or isinstance(optimizer, Optimizer):
                self.optimizer = _prepare_optimizer(optimizer, self._trainable_params, self._initial_params)
            else:
                self.optimizer = rebuild_optimizer(resumed["optimizer"], optimizer, model, method)
            self.schedule = _make_scheduler(training.scheduler, self.optimizer, task.steps)
        if resumed is not None:
            self._resume(resumed)

        refuse_problems(method.check(model))
        self._device = device_of(model)
        self._moves_batches = self._device.type != "cpu"
        # begin_task may have created parameters, with other random values in each process.
        if resumed is None:
            distributed.broadcast_([*model.parameters(), *model.buffers(), *method.parameters()])
        self._optimized_params: list[nn.Parameter] = []
        if self.optimizer is not None:
            self._optimized_params = [p for group in self.optimizer.param_groups for p in group["params"]]

    def _resume(self, resumed: dict[str, Any]) -> None:
        """Restore the step, the learning rates and the random states of a checkpoint within the task."""
        self.step = resumed["step"]

        # The constructor of the scheduler has overwritten the learning rates, so the optimizer is loaded after it.
        if self.optimizer is not None:
            self.optimizer.load_state_dict(resumed["optimizer"]["state"])
        if self.schedule is not None:
            self.schedule.load_state_dict(resumed["schedule"])
        restore_random_states(unpack_random_states(resumed["random"], device_of(self.model)))

    @property
    def loss(self) -> float:
        """The last loss that was read; on an accelerator it may be that of an earlier step."""
        return self.losses.last

    def steps(self) -> Iterator[None]:
        """Take the remaining steps and yield after each.

        On an accelerator, losses are read every few steps: a loss that is not finite raises later than its step. Call
        ``check_losses`` before the weights are saved.
        """
        # A method that neither trains nor observes collects its statistics in end_task.
        if not self.method.trains and not self.method.changes("observe"):
            return

        settings = self.training
        batches = self.task.batches(
            settings.batch_size, settings.epochs, settings.iterations, settings.seed, start=self.step
        )
        with _progress_bar(self.task, settings.progress, self.step) as bar:
            while True:
                with self.clock("train"):
                    batch = next(batches, None)
                    if batch is None:
                        self.check_losses()
                        self._average_buffers()
                        return
                    if self.method.trains:
                        self._train_step(batch)
                    else:
                        self._observe(batch)

                if bar is not None:
                    bar.update()
                    if self.method.trains and self.step % 20 == 0:
                        bar.set_postfix(epoch=batch.epoch + 1, loss=f"{self.loss:.3f}", refresh=False)
                yield

    def check_losses(self, batch: Batch | None = None) -> None:
        """Read the losses of the last steps; raise FloatingPointError if one is not finite.

        Args:
            batch: the batch of the current step, if its weights are not updated yet.
        """
        for step, loss in self.losses.read():
            if not math.isfinite(loss):
                is_current = step == self.step
                loss_batch = batch if is_current else self._repeat_batch(step)
                message = explain_loss(loss, self.task, step + 1, loss_batch, self.model, self.step - step)
                raise FloatingPointError(message)

    def _repeat_batch(self, step: int) -> Batch | None:
        """Read the batch of an earlier step again; None if the data are an iterable of batches."""
        if isinstance(self.task.train, Batches):
            return None
        settings = self.training
        batches = self.task.batches(
            settings.batch_size, settings.epochs, settings.iterations, settings.seed, start=step
        )
        return next(batches, None)

    def _average_buffers(self) -> None:
        """Average running statistics over processes, since each process has seen its own share of the data."""
        if distributed.world_size() == 1:
            return
        float_buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        distributed.all_reduce_(float_buffers)
        for buffer in float_buffers:
            buffer.div_(distributed.world_size())

    @torch.no_grad()
    def _observe(self, batch: Batch) -> None:
        """Show a batch to a method that only collects statistics."""
        if self._moves_batches:
            batch = batch.to(self._device)
        with evaluating(self.model):
            outputs = batch.forward(self.model)
        self.method.observe(batch, outputs)
        self.step += 1

    def _train_step(self, batch: Batch) -> None:
        """Take one optimizer step on a batch, with the method's hooks around it."""
        is_first_step = self.step == 0
        if is_first_step:
            check_first_batch(self.task, batch, self._initial_params)

        # Includes parameters that the optimizer does not have: otherwise their gradients would add up over steps.
        for p in self._trainable_params:
            p.grad = None

        if self._moves_batches:
            batch = batch.to(self._device)
        try:
            loss = self._compute_gradient(batch)
        except (RuntimeError, ValueError) as error:
            raise explain_error(error, self.task, batch, first=is_first_step) from error

        if distributed.world_size() > 1:
            mean_loss = distributed.average_gradients(self._trainable_params, batch.weight, loss.item())
            loss = torch.tensor(mean_loss, dtype=torch.float64)

        self.losses.add(self.step, loss)
        if self.losses.is_full():
            self.check_losses(batch)

        self.method.before_step(self.model)
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(self._optimized_params, self.training.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        self.method.after_step(self.model)

        if self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def _compute_gradient(self, batch: Batch) -> Tensor:
        """Accumulate the gradient of the batch's loss in ``p.grad``, micro-batch by micro-batch; return the loss."""
        autocast = self.training.cast(self._device)
        accumulate = self.training.accumulate
        if accumulate == 1:
            with autocast:
                loss = self.method.loss(self.model, batch)
            loss.backward()
            return loss.detach()

        # A batch without labels has a NaN mean loss, as it has without accumulation.
        batch_weight = batch.weight
        if not batch_weight:
            return torch.full((), math.nan, device=self._device)

        loss_sum = torch.zeros((), device=self._device)
        for micro_batch in batch.chunk(accumulate):
            fraction = micro_batch.weight / batch_weight
            if fraction:
                with autocast:
                    loss = self.method.loss(self.model, micro_batch) * fraction
                loss.backward()
                loss_sum = loss_sum + loss.detach()
        return loss_sum


def _prepare_optimizer(
    optimizer: OptimizerFactory | Optimizer,
    trainable_params: list[nn.Parameter],
    initial_params: list[nn.Parameter],
) -> Optimizer:
    """Create an optimizer, or add the parameters created by ``begin_task`` to an existing one.

    Args:
        optimizer: a function from parameters to an optimizer, or an existing optimizer.
        trainable_params: the parameters of model and method that require gradients.
        initial_params: the model's parameters before ``begin_task``.
    """
    if not trainable_params:
        raise ValueError("There is nothing to train: every parameter of the model is frozen.")

    if not isinstance(optimizer, Optimizer):
        new_optimizer = optimizer(trainable_params)
        if isinstance(new_optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the model several times per step: use it in your own training loop.")
        return new_optimizer

    initial_ids = {id(p) for p in initial_params}
    created_params = [p for p in trainable_params if id(p) not in initial_ids]
    if created_params:
        optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimizer.add_param_group({"params": [p for p in created_params if id(p) not in optimized_ids]})
    return optimizer


def _make_scheduler(factory: SchedulerFactory | None, optimizer: Optimizer, steps: int | None) -> LRScheduler | None:
    """Create the scheduler of one task, starting from the initial learning rates."""
    if factory is None:
        return None
    if steps is None:
        raise ValueError("A scheduler needs the number of steps, which is unknown for these data: give iterations.")

    # A kept optimizer ends each task at that task's final learning rate.
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    return factory(optimizer, steps)


def _progress_bar(task: Task, progress: bool | None, steps_done: int) -> AbstractContextManager[tqdm[Any] | None]:
    """Create a progress bar over the task's steps; a null context if disabled, since updates cost time."""
    if progress is False:
        return nullcontext()
    return tqdm(
        total=task.steps,
        initial=steps_done,
        desc=str(task),
        unit="step",
        leave=False,
        disable=hide_bar(progress),
    )
