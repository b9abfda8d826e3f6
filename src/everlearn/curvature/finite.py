"""Check that importances are finite, and explain where NaN or infinite values come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everlearn.core.data_source import Arrays
from everlearn.core.task import Task
from everlearn.curvature.quadratic import Form


def check_finite(form: Form, model: nn.Module, task: Task) -> None:
    """Raise if an importance has NaN or infinite entries.

    Called once, after the pass over the data, so that a step pays nothing for it.
    """
    if all(bool(value.isfinite().all()) for value in form.diagonal().values()):
        return
    raise FloatingPointError(
        f"The importance of the model's parameters on {task} is not finite: {_explain(model, task)}."
    )


def _explain(model: nn.Module, task: Task) -> str:
    """Describe the cause and the remedy."""
    if any(not p.isfinite().all() for p in model.parameters()):
        return (
            "the model's weights hold NaN or infinite numbers: train it with a lower learning rate, or clip gradients"
        )

    if isinstance(task.train, Arrays):
        for kind, values in (("inputs", task.train.x), ("targets", task.train.y)):
            summary = _summarize_nonfinite_rows(values)
            if summary:
                return f"{summary} NaN or infinite {kind}: remove these examples, or replace the values"

    return (
        "look for NaN or infinite numbers in the inputs and in targets, and for operations of the model with an "
        "infinite gradient (a square root or a logarithm at 0)"
    )


def _summarize_nonfinite_rows(values: Any) -> str:
    """Count the rows with a NaN or infinite number and name the first; empty if there are none."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    if not tensors:
        return ""

    flags_per_tensor = [~tensor.isfinite().reshape(len(tensor), -1).all(1) for tensor in tensors]
    nonfinite_rows = torch.stack(flags_per_tensor).any(0)
    if not nonfinite_rows.any():
        return ""

    first_row = int(nonfinite_rows.nonzero()[0])
    return f"{int(nonfinite_rows.sum())} of {len(nonfinite_rows)} examples (first: example {first_row}) have"
