"""Watching a training loop, which may be anybody's: what it forgets is told, or else a network would silently not grow."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import evaluating, unwrap
from everlearn.core.task import Task


class Watch:
    """Of the loop that learns one task.

    Args:
        name: of the method.
        planned: steps, where somebody has told.
        whole: whether the task is seen from its first step on, and not from a checkpoint.
        grows: whether the network may grow in this task.
    """

    def __init__(self, name: str, planned: int | None, whole: bool, grows: bool) -> None:
        self.name, self.planned, self.whole, self.grows = name, planned, whole, grows
        self.looked = False  # whether somebody has asked for the loss
        self.seen = 0  # losses taken
        self._still = grows  # whether nothing has moved the method's own parameters
        self._probe: tuple[Tensor, Tensor] | None = None  # one of them that should move, and where a step began

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Which of the method's own parameters should move."""
        if self._still:  # by value: fused optimizers make no new version of a tensor
            learning = next((p for p in parameters if p.grad is not None and p.grad.any()), None)
            self._probe = None if learning is None else (learning, learning.detach().clone())

    def after_step(self) -> None:
        """Whether they have."""
        if self._still and self._probe is not None:
            self._still = torch.equal(*self._probe)

    def check(self, task: Task, steps: int, grow: str) -> None:
        """Tell of a loop that has forgotten something, or planned otherwise than it did."""
        if self.seen and not steps:
            raise ValueError(
                f"{self.name}.after_step was not called: without it nothing grows. It follows optimizer.step()."
            )
        if not self.grows:
            return
        if self._still and self._probe is not None:
            raise ValueError(
                f"The optimizer does not move {self.name}'s own parameters: make it after begin_task(model, task), of "
                "[*model.parameters(), *method.parameters()]."
            )
        if not self.whole or not steps:
            return
        if self.planned is None and not self.looked:
            raise ValueError(
                f"{self.name} has not looked whether to grow, since it does not know how long a task is learned: set task.steps "
                f"before begin_task(model, task), or call {grow} yourself."
            )
        if self.planned and not 0.8 <= steps / self.planned <= 1.25:
            warnings.warn(
                f"{task} was learned for {steps} steps, but {self.name} had been told {self.planned} (task.steps): it has "
                "grown at the wrong time, or not at all.",
                stacklevel=4,
            )
        elif not self.looked and steps > 1:  # a single step leaves no time to grow anyway
            warnings.warn(
                f"{self.name} never came to look whether to grow in the {steps} steps of {task}: learn it for longer, or have it "
                "look earlier.",
                stacklevel=4,
            )


def has_validation(task: Task | None) -> bool:
    """Whether a task has validation data; where nobody knows how many, it has."""
    if task is None or task.valid is None:
        return False
    try:
        return len(task.valid) > 0
    except TypeError:
        return True


@torch.no_grad()
def validation_loss(model: nn.Module, task: Task) -> float:
    """The mean loss on a task's validation data, or on some two thousand of them, in evaluation mode."""
    total, device = [], next(unwrap(model).parameters()).device
    with evaluating(model):
        for batch in task.examples(256, "valid", most=2048):
            total.append((float((b := batch.to(device)).loss(forward(model, b.x))) * len(b), len(b)))
    if not total:
        raise ValueError(f"The validation data of {task} hold no examples: give some, or valid=None.")
    return sum(loss for loss, _ in total) / sum(n for _, n in total)
