"""Infer how an external training loop scaled its loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Bernoulli, Categorical
from everlearn.core.parameters import is_sharded

COMPARED = 2**20  # the most outputs that are compared at a step


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch of the current step, with the model's outputs and their gradient."""

    batch: Batch
    passed: bool = False
    out: Tensor | None = None
    output_grad: Tensor | None = None  # gradient of the loop's loss in the outputs of ``rows``
    labels: Tensor | None = None  # inferred from the gradient
    rows: Tensor | slice = field(default_factory=lambda: slice(None))  # the examples that are compared
    waits: bool = False  # no backward pass yet
    backward: int = -1  # index of its backward pass
    grad_scale: float | None = 1.0  # change of its gradients up to the next backward pass
    precision: torch.dtype | None = None  # of autocast


def on_gradient(out: Tensor, callback: Callable[[Tensor], None]) -> None:
    """Call back with the gradient of the outputs, or of the original where they are a copy in another precision.

    Accelerate converts outputs to float32; a model that computes its loss itself uses the original.
    """
    node = out.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        out.register_hook(callback)
        return
    original, index = node.next_functions[0]
    if original is None:
        return

    def on_gradients(gradients: tuple[Tensor, ...]) -> None:
        if gradients[index] is not None:
            callback(gradients[index])

    original.register_prehook(on_gradients)


GradSamples = list[
    tuple[nn.Parameter, Tensor]
]  # parameters, and a few entries of their gradients after a backward pass


def sample_gradients(parameters: Iterable[nn.Parameter]) -> GradSamples:
    """Sample a few entries of every gradient."""
    return [(p, entries.clone()) for p in parameters if (entries := sample_entries(p)) is not None and entries.any()]


def gradient_scale_since(grad_samples: GradSamples) -> float | None:
    """Return the ratio of the current gradients to those right after backward(), or None if it is not uniform."""
    grad_scale, residual = common_factor(grad_samples)
    return grad_scale if residual <= 0.05 else None


def common_factor(grad_samples: GradSamples) -> tuple[float, float]:
    """Return the factor by which gradients changed since backward(), and the relative deviation from it.

    A gradient scaler and clipping change gradients. Removed gradients do not count.
    """
    sample_pairs = [
        (earlier.double(), current.double())
        for p, earlier in grad_samples
        if (current := sample_entries(p)) is not None and current.any()
    ]
    if not sample_pairs:
        return 1.0, math.inf if grad_samples else 0.0
    shares = torch.stack([current @ earlier / (earlier @ earlier) for earlier, current in sample_pairs])
    grad_scale = float(shares.median())
    earlier, current = (torch.cat(parts) for parts in zip(*sample_pairs, strict=True))
    residual = float((current - grad_scale * earlier).norm() / current.norm())
    return (grad_scale, residual) if grad_scale > 0 and math.isfinite(residual) else (1.0, math.inf)


def sample_entries(p: nn.Parameter, limit: int = 16) -> Tensor | None:
    """Return evenly spaced entries of a parameter's gradient."""
    if not p.requires_grad or p.grad is None or p.grad.is_sparse:
        return None
    gradient = p.grad.detach()
    local_gradient = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    flat_gradient = local_gradient.reshape(-1)
    return flat_gradient[:: max(1, len(flat_gradient) // limit)]


def loss_weights(
    micro_batches: list[MicroBatch], grad_scale: float | None, method: str | None
) -> list[tuple[float, str]]:
    """Return the factor of each micro-batch's L_task in the gradients, and a reason where it is unknown.

    A loss that is no multiple of L_task counts as a mean over its examples.

    Args:
        micro_batches: those of the step.
        grad_scale: change of the gradients since the backward passes, None where it is unknown.
        method: the name of a method that requires the loop's loss to be a multiple of L_task.
    """
    total_weight = sum(micro_batch.batch.weight for micro_batch in micro_batches)
    return [
        _weight(micro_batch, micro_batch.batch.weight / total_weight, grad_scale, method)
        for micro_batch in micro_batches
    ]


def _weight(micro_batch: MicroBatch, share: float, grad_scale: float | None, method: str | None) -> tuple[float, str]:
    count, residual = _multiple(micro_batch, share)
    if count is None:
        return 0.0, NO_GRADIENT if micro_batch.output_grad is None else NO_LABELS
    if method is not None and residual:
        raise ValueError(
            f"{method} weighs the loss of new examples against that of old ones by {micro_batch.batch.likelihood}, and the loop's loss is "
            "another one, not a multiple of it: give attach(…, likelihood=…) what the loop's loss is, or take the loss from "
            "method.loss(model, batch)."
        )
    if grad_scale is None or micro_batch.grad_scale is None:
        return 0.0, CHANGED
    kept = grad_scale * micro_batch.grad_scale
    if not residual:
        return count * kept, ""
    return share, ANOTHER_LOSS if is_clipped(kept) else ""


def is_clipped(grad_scale: float | None) -> bool:
    """Return whether the factor is no power of two, unlike that of a gradient scaler."""
    power = math.log2(grad_scale or 1.0)
    return abs(power - round(power)) > 1e-5


NO_GRADIENT = (
    "no gradient came to the outputs of model(x): call the model itself, not its layers, and take the loss of what it "
    "returns"
)
NO_LABELS = (
    "how much of its own loss the loop has put into the gradients (a sum, a mean, a share) cannot be seen without labels: "
    "call attachment.see(x, y) before the model"
)
CHANGED = (
    "between backward() and the step gradients were changed by more than a common factor: add regularizers to the loss, or "
    "clip by the norm of all gradients"
)
ANOTHER_LOSS = (
    "the loop's loss is no multiple of the one that likelihood means, and its gradients were clipped after "
    "backward(), so that its factor cannot be seen: give attach(…, likelihood=…) what the loop's loss is"
)


def _multiple(micro_batch: MicroBatch, share: float) -> tuple[float | None, bool]:
    """Return the factor of L_task in the loop's loss, None if unknown, and whether the loss is no multiple of it."""
    if micro_batch.out is None or micro_batch.output_grad is None:
        return None, False
    labels = micro_batch.labels if micro_batch.batch.y is None else micro_batch.batch.y
    if labels is None or _are_unsure(micro_batch):
        return None, False
    all_labels, labels = labels, labels[micro_batch.rows]
    sampled_batch, out = replace(micro_batch.batch, y=None)[micro_batch.rows], micro_batch.out[micro_batch.rows]
    sampled_batch = replace(sampled_batch, y=labels)
    out = (out.float() if out.dtype in (torch.float16, torch.bfloat16) else out).clone().requires_grad_()
    if not sampled_batch.weight:
        return share, False
    part = sampled_batch.weight / sampled_batch.likelihood.weight(all_labels)
    (gradient,) = torch.autograd.grad(sampled_batch.loss(out) * part, out)
    task_grad, loop_grad = gradient.flatten().double(), micro_batch.output_grad.flatten().double()
    if not task_grad.any() or not loop_grad.isfinite().all():
        return share, False  # no gradient, or the scaler will skip the step
    count = float(task_grad @ loop_grad / (task_grad @ task_grad))
    rounding = max(0.05, 8 * torch.finfo(micro_batch.output_grad.dtype).eps)
    return count, bool((loop_grad - count * task_grad).norm() > rounding * loop_grad.norm())


def infer_labels(micro_batch: MicroBatch, gradient: Tensor) -> None:
    """Infer labels that were not announced from the gradient in the outputs.

    The gradient of a cross-entropy, softmax(out) - e_y, is negative only at the label, and zero for ignored labels; that of
    a binary cross-entropy is negative for positive labels. Labels inferred from another loss are detected later, since
    the loss is then no multiple of L_task.
    """
    if micro_batch.batch.y is not None or gradient.dim() < 2:
        return
    if isinstance(micro_batch.batch.likelihood, Categorical):
        inferred = torch.where(gradient.any(-1), gradient.argmin(-1), -100)
        micro_batch.labels = (
            inferred
            if micro_batch.labels is None
            else torch.where(micro_batch.labels == -100, inferred, micro_batch.labels)
        )
    elif isinstance(micro_batch.batch.likelihood, Bernoulli):
        micro_batch.labels = (gradient < 0).to(gradient.dtype)


def _are_unsure(micro_batch: MicroBatch) -> bool:
    """Return whether labels inferred as ignored may belong to examples of which the model is certain."""
    if (
        micro_batch.labels is None
        or micro_batch.out is None
        or micro_batch.output_grad is None
        or not isinstance(micro_batch.batch.likelihood, Categorical)
    ):
        return False
    is_ignored = micro_batch.labels == -100
    if not is_ignored.any():
        return False
    doubt = -torch.expm1(micro_batch.out[is_ignored].double().log_softmax(-1).amax(-1))
    tiny = torch.finfo(micro_batch.output_grad.dtype).smallest_normal
    return bool((doubt * micro_batch.output_grad.abs().max() < tiny).any())


def compared_rows(micro_batch: MicroBatch, out: Tensor) -> Tensor | slice:
    """Select examples whose outputs are compared: language models have many outputs, and some have no label."""
    limit = max(1, COMPARED // max(1, out[:1].numel()))
    if limit >= len(out):
        return slice(None)
    counted = micro_batch.batch.likelihood.counted(
        micro_batch.labels if micro_batch.batch.y is None else micro_batch.batch.y
    )
    if counted is None:
        return slice(limit)
    return counted.reshape(len(out), -1).any(1).nonzero().flatten()[:limit]
