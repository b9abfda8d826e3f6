"""What somebody else's loop has done before a step: how much of which loss is in the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.likelihood import Bernoulli, Categorical
from everlearn.params import is_sharded

COMPARED = 2**20  # the most outputs that are compared at a step


@dataclass(eq=False)
class Seen:
    """A micro-batch of the step under way, and what the model has said to it."""

    batch: Batch
    passed: bool = False
    out: Tensor | None = None
    pull: Tensor | None = None  # the gradient of the loop's loss in the outputs of some examples ...
    labels: Tensor | None = None  # those of all examples that the gradient gives away, where nobody told of them
    rows: Tensor | slice = field(default_factory=lambda: slice(None))  # ... these
    waits: bool = False  # for the loop's backward pass
    backward: int = -1  # which of the loop's backward passes it was
    left: float | None = 1.0  # how much of what that pass brought was there when the next one began
    precision: torch.dtype | None = None  # of autocast


def on_gradient(out: Tensor, tell: Callable[[Tensor], None]) -> None:
    """Tell of the gradient that comes to outputs; if they are a copy in another precision, as Accelerate makes, to the original.

    A model that takes its loss itself does so from the original.
    """
    node = out.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        out.register_hook(tell)
        return
    original, index = node.next_functions[0]
    if original is None:
        return

    def come(gradients: tuple[Tensor, ...]) -> None:
        if gradients[index] is not None:
            tell(gradients[index])

    original.register_prehook(come)


Came = list[tuple[nn.Parameter, Tensor]]  # parameters, and a few entries of their gradients after a backward pass


def arrived(parameters: Iterable[nn.Parameter]) -> Came:
    """Where gradients are after a backward pass: a few entries of each."""
    return [(p, few.clone()) for p in parameters if (few := few_entries(p)) is not None and few.any()]


def left_of(came: Came) -> float | None:
    """How much of the gradients that a backward pass has left is there now: a scaler divides them, a clipping shortens them.

    None where they have not all changed by one factor. Gradients that were taken away do not count.
    """
    there = [(then.double(), now.double()) for p, then in came if (now := few_entries(p)) is not None and now.any()]
    if not there:
        return 1.0 if not came else None
    shares = torch.stack([now @ then / (then @ then) for then, now in there])
    left = float(shares.median())
    then, now = (torch.cat(parts) for parts in zip(*there, strict=True))
    return left if left > 0 and (now - left * then).norm() <= 0.05 * now.norm() else None


def few_entries(p: nn.Parameter, most: int = 16) -> Tensor | None:
    """Some entries of a parameter's gradient, from all over it."""
    if not p.requires_grad or p.grad is None or p.grad.is_sparse:
        return None
    gradient = p.grad.detach()
    own_share = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    whole = own_share.reshape(-1)
    return whole[:: max(1, len(whole) // most)]


def weights_of(seen: list[Seen], left: float | None, method: str | None) -> list[tuple[float, str]]:
    """How much of each micro-batch's L_task is in the gradients, and, where nobody can tell, why.

    A loss that is no multiple of L_task counts as a mean over its examples.

    Args:
        seen: the micro-batches.
        left: how much there is of what came by the loop's backward passes, None where nobody can tell.
        method: that cannot be served where the loop's loss is no multiple of L_task.
    """
    whole = sum(one.batch.weight for one in seen)
    return [_weight(one, one.batch.weight / whole, left, method) for one in seen]


def _weight(one: Seen, share: float, left: float | None, method: str | None) -> tuple[float, str]:
    count, apart = _multiple(one, share)
    if count is None:
        return 0.0, NO_GRADIENT if one.pull is None else NO_LABELS
    if method is not None and apart:
        raise ValueError(
            f"{method} weighs the loss of new examples against that of old ones by {one.batch.likelihood}, and the loop's loss is "
            "another one, not a multiple of it: give attach(…, likelihood=…) what the loop's loss is, or take the loss from "
            "method.loss(model, batch)."
        )
    if left is None or one.left is None:
        return 0.0, CHANGED
    kept = left * one.left
    if not apart:
        return count * kept, ""
    return share, ANOTHER_LOSS if is_clipped(kept) else ""


def is_clipped(left: float | None) -> bool:
    """Whether gradients were changed by another factor than a scaler's, which is a power of two."""
    power = math.log2(left or 1.0)
    return abs(power - round(power)) > 1e-5


NO_GRADIENT = "no gradient came to the outputs of model(x): call the model itself, not its layers, and take the loss of what it returns"
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


def _multiple(one: Seen, share: float) -> tuple[float | None, bool]:
    """Which multiple of L_task the loop's loss is, None where that cannot be seen, and whether it is none at all."""
    if one.out is None or one.pull is None:
        return None, False
    labels = one.labels if one.batch.y is None else one.batch.y
    if labels is None or _are_unsure(one):
        return None, False
    every, labels = labels, labels[one.rows]
    some, out = replace(one.batch, y=None)[one.rows], one.out[one.rows]
    some = replace(some, y=labels)
    out = (out.float() if out.dtype in (torch.float16, torch.bfloat16) else out).clone().requires_grad_()
    if not some.weight:
        return share, False
    part = some.weight / some.likelihood.weight(every)
    (gradient,) = torch.autograd.grad(some.loss(out) * part, out)
    ours, theirs = gradient.flatten().double(), one.pull.flatten().double()
    if not ours.any() or not theirs.isfinite().all():
        return share, False  # nothing has come, or the scaler will not step
    count = float(ours @ theirs / (ours @ ours))
    rounding = max(0.05, 8 * torch.finfo(one.pull.dtype).eps)
    return count, bool((theirs - count * ours).norm() > rounding * theirs.norm())


def read_labels(one: Seen, gradient: Tensor) -> None:
    """Where nobody told of labels, note those that the gradient in the outputs gives away.

    That of a cross-entropy, softmax(out) - e_y, is negative for the label alone, and zero where the label is ignored; that of
    yes/no labels is negative for every yes. What is read off wrongly from another loss is no multiple of it, and is found out.
    """
    if one.batch.y is not None or gradient.dim() < 2:
        return
    if isinstance(one.batch.likelihood, Categorical):
        found = torch.where(gradient.any(-1), gradient.argmin(-1), -100)
        one.labels = found if one.labels is None else torch.where(one.labels == -100, found, one.labels)
    elif isinstance(one.batch.likelihood, Bernoulli):
        one.labels = (gradient < 0).to(gradient.dtype)


def _are_unsure(one: Seen) -> bool:
    """Whether some labels were read as ignored though a model that is sure of them would have no gradient either."""
    if one.labels is None or one.out is None or one.pull is None or not isinstance(one.batch.likelihood, Categorical):
        return False
    silent = one.labels == -100
    if not silent.any():
        return False
    doubt = -torch.expm1(one.out[silent].double().log_softmax(-1).amax(-1))
    tiny = torch.finfo(one.pull.dtype).smallest_normal
    return bool((doubt * one.pull.abs().max() < tiny).any())


def rows_compared(one: Seen, out: Tensor) -> Tensor | slice:
    """Of which examples outputs are compared: a language model's are large, and some have no label."""
    most = max(1, COMPARED // max(1, out[:1].numel()))
    if most >= len(out):
        return slice(None)
    counted = one.batch.likelihood.counted(one.labels if one.batch.y is None else one.batch.y)
    if counted is None:
        return slice(most)
    return counted.reshape(len(out), -1).any(1).nonzero().flatten()[:most]
