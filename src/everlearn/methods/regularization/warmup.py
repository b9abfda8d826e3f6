"""Warm-up of LwF: train only the outputs that are new in a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.methods.regularization.teacher import Teacher, check_same_parameters
from everlearn.surgery.heads import output_layer


class Warmup:
    """Steps in which only new outputs learn; all else stays bit-identical under any optimizer."""

    def __init__(self) -> None:
        self.steps_left = 0
        self.frozen: list[nn.Parameter] = []
        # The parameters of the output layer, with masks of their old rows.
        self.old_rows: list[tuple[nn.Parameter, Tensor]] = []
        # What is restored after a step: the tensor, the mask of its rows (None for all), and the value.
        self.saved_values: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def begin(self, model: nn.Module, task: Any, teacher: Teacher, steps: int, output: str | None) -> None:
        """Freeze all but the new outputs for a number of steps; does nothing if there are no new outputs.

        Args:
            model: without wrappers.
            task: the task that begins.
            teacher: knows the old outputs.
            steps: length of the warm-up.
            output: name of the output layer; by default the last ``nn.Linear``.
        """
        check_same_parameters(model, teacher)
        name, layer = output_layer(model, output)

        # New outputs are rows by which the layer has grown, and those that only the new task allows.
        is_old = torch.arange(layer.out_features) < len(teacher["state"][f"{name}.weight"])
        allowed = getattr(task, "allowed", None)
        if allowed is not None and teacher["rows"] is not None:
            is_new = allowed[task.id] & ~teacher["rows"].any(0)
            is_old[: len(is_new)] &= ~is_new
        if is_old.all():
            return

        layer_ids = {id(p) for p in layer.parameters()}
        self.steps_left = steps
        self.frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in layer_ids]
        self.old_rows = [(p, is_old.to(p.device)) for p in layer.parameters() if p.requires_grad]
        self.saved_values = [(v, None, v.detach().clone()) for v in [*self.frozen, *model.buffers()]]
        self.saved_values += [(p, rows, p.detach()[rows].clone()) for p, rows in self.old_rows]

    def before_step(self) -> None:
        """Remove the gradients of frozen parameters and zero those of old rows."""
        if not self.steps_left:
            return
        for p in self.frozen:
            p.grad = None
        for p, rows in self.old_rows:
            if p.grad is not None:
                p.grad[rows] = 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore running statistics, and rows that momentum or weight decay have moved."""
        if not self.steps_left:
            return
        for tensor, rows, value in self.saved_values:
            if rows is None:
                tensor.copy_(value)
            else:
                tensor[rows] = value
        self.steps_left -= 1
