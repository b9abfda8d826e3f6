"""Importances that are not finite, and what in the data or the model is to blame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everlearn.curvature.quadratic import Form
from everlearn.data import Arrays
from everlearn.stream import Task


def check_finite(form: Form, model: nn.Module, task: Task) -> None:
    """Refuse an importance with NaN or infinite entries; it is looked at once, after the pass over the data."""
    if all(bool(value.isfinite().all()) for value in form.diagonal().values()):
        return
    raise FloatingPointError(
        f"The importance of the model's parameters on {task} is not finite: {_explain(model, task)}."
    )


def _explain(model: nn.Module, task: Task) -> str:
    """What is to blame, and what to do."""
    if any(not p.isfinite().all() for p in model.parameters()):
        return (
            "the model's weights hold NaN or infinite numbers: train it with a lower learning rate, or clip gradients"
        )
    if isinstance(task.train, Arrays):
        for kind, values in (("inputs", task.train.x), ("targets", task.train.y)):
            if found := _count_broken(values):
                return f"{found} NaN or infinite {kind}: leave these examples out, or put numbers in their place"
    return (
        "look for NaN or infinite numbers in the inputs and in targets, and for operations of the model with an infinite "
        "gradient (a square root or a logarithm at 0)"
    )


def _count_broken(values: Any) -> str:
    """How many rows hold a number that is not finite, and the first of them; empty where none does."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())]
    if not tensors:
        return ""
    broken = torch.stack([~v.isfinite().reshape(len(v), -1).all(1) for v in tensors]).any(0)
    if not broken.any():
        return ""
    return f"{int(broken.sum())} of {len(broken)} examples (first: example {int(broken.nonzero()[0])}) have"
