"""Warm-up of LwF: train only the outputs that are new in a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import trainable_parameters
from everlearn.methods.regularization.teacher import Teacher, refuse_added_layers
from everlearn.surgery.freezing import FrozenEntries
from everlearn.surgery.heads import output_layer


def lock_all_but_new_outputs(
    frozen: FrozenEntries, model: nn.Module, task: Any, teacher: Teacher, output: str | None
) -> bool:
    """Lock all parameters and buffers except the outputs that are new in a task.

    Args:
        frozen: locks them; layers with running statistics normalize by those of each batch.
        model: the model.
        task: the task that begins.
        teacher: knows the old outputs.
        output: name of the output layer; by default the last ``nn.Linear``.

    Returns:
        Whether there are new outputs; otherwise nothing is locked.
    """
    refuse_added_layers(model, teacher)
    name, layer = output_layer(model, output)
    is_old = _find_old_outputs(layer, name, task, teacher)
    if is_old.all():
        return False

    layer_ids = {id(p) for p in layer.parameters()}
    masks = {}
    for parameter_name, p in trainable_parameters(model).items():
        rows = torch.ones((), dtype=torch.bool)
        if id(p) in layer_ids:
            rows = is_old.view(-1, *[1] * (p.dim() - 1))
        masks[parameter_name] = rows.to(p.device).expand_as(p)
    frozen.lock(model, masks)
    frozen.lock_buffers(model, evaluate=False)
    return True


def _find_old_outputs(layer: nn.Linear, name: str, task: Any, teacher: Teacher) -> Tensor:
    """Return a mask of the outputs that are not new: by rows added to the layer, and by the task's allowed outputs."""
    old_weight = teacher["state"].get(f"{name}.weight", layer.weight)  # a frozen layer is not in the teacher's state
    is_old = torch.arange(layer.out_features) < len(old_weight)
    allowed = getattr(task, "allowed", None)
    if allowed is not None and teacher["rows"] is not None:
        is_new = allowed[task.id] & ~teacher["rows"].any(0)
        is_old[: len(is_new)] &= ~is_new
    return is_old
