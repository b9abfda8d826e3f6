"""Gradients of replayed examples, which A-GEM and GEM compare with the gradient of the current batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.parameters import accumulate_dtype, refuse_sharded
from everlearn.methods.replay.base import replay_loss
from everlearn.runtime import distributed
from everlearn.surgery.freezing import FrozenEntries


def reference_gradient(model: nn.Module, parameters: list[nn.Parameter], batch: Batch | None) -> list[Tensor] | None:
    """Compute the gradient of the mean loss of replayed examples, at least in float32.

    With several processes this is the gradient of the mean over the labels of all processes. Running statistics are
    restored: they belong to the batches of the current task.

    Args:
        model: in training mode.
        parameters: those to differentiate by; the gradient is zero where the loss does not depend on them.
        batch: the replayed examples of this process, or None.

    Returns:
        A tensor per parameter; None if no process has any examples.
    """
    refuse_sharded(model, "The gradient of remembered examples")

    # Every stored example has a label that counts: counting labels would only wait for the device.
    if distributed.world_size() == 1:
        if batch is None:
            return None
        return _local_gradient(model, parameters, batch)

    num_labels = 0.0 if batch is None else batch.weight
    total_labels = distributed.sum_across(num_labels)
    if not total_labels:
        return None

    if batch is None or not num_labels:
        gradient = [torch.zeros_like(p, dtype=accumulate_dtype(p)) for p in parameters]
    else:
        gradient = [g * (num_labels / total_labels) for g in _local_gradient(model, parameters, batch)]
    distributed.all_reduce_(gradient)
    return gradient


def parameters_with_gradient(model: nn.Module) -> list[nn.Parameter]:
    """List the trainable parameters that have a gradient: those that a projection may edit."""
    return [p for p in model.parameters() if p.requires_grad and p.grad is not None]


def dense_gradient(p: nn.Parameter) -> Tensor:
    """Return a parameter's gradient as a dense tensor, at least in float32; embeddings may have sparse ones."""
    if p.grad is None:
        raise ValueError("This parameter has no gradient.")
    return _to_dense(p.grad).to(accumulate_dtype(p))


def write_gradient(parameters: list[nn.Parameter], gradient: list[Tensor]) -> None:
    """Set ``p.grad``; a sparse gradient stays sparse, since optimizers such as SparseAdam accept no other."""
    for p, g in zip(parameters, gradient, strict=True):
        old_gradient = p.grad
        g = g.to(p.dtype)
        if old_gradient is not None and old_gradient.is_sparse:
            g = g.to_sparse(old_gradient.sparse_dim())
        p.grad = g


def _to_dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient


def _local_gradient(model: nn.Module, parameters: list[nn.Parameter], batch: Batch) -> list[Tensor]:
    """Compute the gradient of this process's examples; buffers keep their values."""
    frozen = FrozenEntries("reference gradients")
    frozen.lock_buffers(model, evaluate=False)
    with torch.enable_grad():
        gradients = torch.autograd.grad(replay_loss(model, batch), parameters, allow_unused=True)
    frozen.restore_buffers(model)

    result = []
    for p, g in zip(parameters, gradients, strict=True):
        g = torch.zeros_like(p) if g is None else _to_dense(g)
        result.append(g.to(accumulate_dtype(p)))
    return result
