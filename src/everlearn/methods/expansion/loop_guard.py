"""Check a training loop of any origin: a loop that omits a call would silently prevent the network from growing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import evaluating, unwrap
from everlearn.core.task import Task


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
        self._is_unmoved = may_grow  # whether no step has moved the method's parameters
        self._probe: tuple[Tensor, Tensor] | None = None  # a parameter that a step should move, and its value before

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy one of the method's parameters that has a gradient."""
        if not self._is_unmoved:
            return
        self._probe = None
        for p in parameters:
            if p.grad is not None and p.grad.any():
                self._probe = (p, p.detach().clone())
                break

    def after_step(self) -> None:
        """Compare that parameter with its copy. Fused optimizers do not raise a tensor's version, so values count."""
        if self._is_unmoved and self._probe is not None:
            self._is_unmoved = torch.equal(*self._probe)

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
        if self._is_unmoved and self._probe is not None:
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
