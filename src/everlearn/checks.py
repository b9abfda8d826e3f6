"""Bad input, refused in one sentence that says what to do, before or where it does harm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everlearn.data import Arrays
from everlearn.likelihood import Categorical
from everlearn.stream import Batch, Task


def check_training(
    task: Task, epochs: int, iterations: int | None, batch_size: int, accumulate: int, precision: str
) -> None:
    """Refuse settings and data no training can come of."""
    if iterations is None and epochs < 1:
        raise ValueError(
            f"epochs must be at least 1, got {epochs}; to test a model without training it use evaluate()."
        )
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}.")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision: got {precision!r}, allowed: 'float32', 'bfloat16'.")
    if isinstance(task.train, Arrays):
        _check_arrays(task, task.train)


def _check_arrays(task: Task, data: Arrays) -> None:
    if not len(data):
        raise ValueError(f"{task} has no examples to train on: leave it out of the stream.")
    for x in tree_leaves(data.x):
        if x.is_floating_point() and not x.sum().isfinite() and not x.isfinite().all():  # the sum is much faster
            rows = (~x.isfinite()).flatten(1).any(1) if x.dim() > 1 else ~x.isfinite()
            raise ValueError(
                f"{task} has NaN or infinite inputs in {int(rows.sum())} of {len(x)} examples (first: example "
                f"{int(rows.nonzero()[0])}): drop or fill them in."
            )
    if isinstance(task.likelihood, Categorical) and data.y is not None and data.y.dim() == 1:
        _check_classes(task, data.y)


def _check_classes(task: Task, y: Tensor) -> None:
    if int(y.min()) < 0:
        raise ValueError(f"{task} has the label {int(y.min())}: classes are numbered from 0.")
    if task.allowed is None or task.id is None:
        return
    named = set(y.unique().tolist())
    may = set(task.allowed[task.id].nonzero().flatten().tolist())
    if wrong := sorted(named - may):
        raise ValueError(
            f"{task} has labels {wrong} that its scenario does not allow: the table allows it {sorted(may)}."
        )


def check_batch(task: Task, batch: Batch, model: nn.Module) -> None:
    """Refuse inputs of another dtype than the model's weights, once per task."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for x in tree_leaves(batch.x):
        if isinstance(x, Tensor) and x.is_floating_point() and weights and x.dtype not in weights:
            kind, own = str(x.dtype).removeprefix("torch."), str(min(weights, key=str)).removeprefix("torch.")
            raise TypeError(
                f"{task} gives {kind} inputs but the model's weights are {own}: convert the inputs with "
                f"x.to(torch.{own}) or the model with model.to(torch.{kind})."
            )


def explain_loss(value: float, task: Task, step: int, batch: Batch) -> str:
    """Say where the loss stopped being a number, and what is likely to blame; epochs count from 0, steps from 1."""
    broken = any(x.is_floating_point() and not torch.isfinite(x).all() for x in tree_leaves(batch.x))
    cure = (
        "the batch has NaN or infinite inputs: clean the data"
        if broken
        else "lower the learning rate, or clip gradients"
    )
    return f"The loss is {value} in {task}, epoch {batch.epoch}, step {step}: {cure}. The weights are those before this step."
