"""Check a training loop of any origin: a loop that omits a call would silently prevent the network from growing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import evaluating, unwrap
from everlearn.core.task import Task

# A value of an accelerator is read after this many steps, because a read waits for it.
STEPS_BETWEEN_READS = 50


class LoopGuard:
    """Checks of the training loop of one task.

    Args:
        method: name of the method, for messages.
        planned_steps: number of steps of the task, if known.
        from_first_step: whether the task is followed from its first step, not from a checkpoint.
        may_grow: whether the network may grow in this task.
    """

    def __init__(self, method: str, planned_steps: int | None, from_first_step: bool, may_grow: bool) -> None:
        self.method = method
        self.planned_steps = planned_steps
        self.from_first_step = from_first_step
        self.may_grow = may_grow
        self.has_compared_loss = False  # whether the loss was compared with the threshold
        self.num_losses = 0  # calls of ``observe``
        self._is_unmoved = may_grow  # whether no step is known to have moved the method's parameters
        self._probes: list[tuple[Tensor, Tensor]] = []  # parameters that a step may move, and their values before
        # Whether the method's parameters had a gradient and whether they moved: on their device, and read rarely.
        self._had_gradient = torch.tensor(False)
        self._has_moved = torch.tensor(False)
        self._num_steps = 0

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the method's parameters that have a gradient, until they are known to move."""
        self._probes = []
        if not self._is_unmoved:
            return
        for p in parameters:
            if p.grad is not None:
                self._had_gradient = self._had_gradient.to(p.device) | p.grad.any()
                self._probes.append((p, p.detach().clone()))

    def after_step(self) -> None:
        """Compare the parameters with their copies. Fused optimizers do not raise a tensor's version: values count."""
        for p, value in self._probes:
            self._has_moved = self._has_moved.to(p.device) | p.detach().ne(value).any()
        self._probes = []
        self._num_steps += 1
        if self._is_unmoved and self._num_steps % STEPS_BETWEEN_READS == 0:
            self._is_unmoved = not bool(self._has_moved)

    def check(self, task: Task, steps: int, grow_call: str) -> None:
        """Raise or warn at the end of a task if the loop omitted a call or had another length than planned.

        Args:
            task: the task that ends.
            steps: how many steps were taken.
            grow_call: the call that makes the network grow, for messages.
        """
        if self.num_losses and not steps:
            raise ValueError(
                f"{self.method}.after_step was not called: without it nothing grows. Call it after optimizer.step()."
            )
        if not self.may_grow:
            return
        if self._is_unmoved and bool(self._had_gradient) and not bool(self._has_moved):
            raise ValueError(
                f"The optimizer does not train the parameters of {self.method}: create it after "
                "begin_task(model, task), with [*model.parameters(), *method.parameters()]."
            )
        if self.from_first_step and steps:
            self._check_length(task, steps, grow_call)

    def _check_length(self, task: Task, steps: int, grow_call: str) -> None:
        """Raise or warn if the loss was never compared with the threshold, or at the wrong time."""
        if self.planned_steps is None and not self.has_compared_loss:
            raise ValueError(
                f"{self.method} has never decided whether to grow, since it does not know the length of the task: set "
                f"task.steps before begin_task(model, task), or call {grow_call} yourself."
            )
        if self.planned_steps and not 0.8 <= steps / self.planned_steps <= 1.25:
            warnings.warn(
                f"{task} was trained for {steps} steps, but task.steps gave {self.method} {self.planned_steps}: the "
                "network has grown at the wrong time, or not at all.",
                stacklevel=5,
            )
        elif not self.has_compared_loss and steps > 1:  # a single step leaves no time to grow
            warnings.warn(
                f"{self.method} has never decided whether to grow in the {steps} steps of {task}: train for longer, or "
                "let it decide earlier.",
                stacklevel=5,
            )


def has_validation_data(task: Task | None) -> bool:
    """Whether a task has validation data. Data of unknown length count as present."""
    if task is None or task.valid is None:
        return False
    try:
        return len(task.valid) > 0
    except TypeError:
        return True


@torch.no_grad()
def validation_loss(model: nn.Module, task: Task) -> float:
    """Compute the mean loss on at most about 2,000 validation examples of a task, in evaluation mode."""
    device = next(unwrap(model).parameters()).device
    loss_sum = 0.0
    num_examples = 0
    with evaluating(model):
        for cpu_batch in task.examples(256, "valid", max_examples=2048):
            batch = cpu_batch.to(device)
            loss_sum += float(batch.loss(forward(model, batch.x))) * len(batch)
            num_examples += len(batch)
    if not num_examples:
        raise ValueError(f"The validation data of {task} hold no examples: give some, or valid=None.")
    return loss_sum / num_examples
