"""What somebody else's loop has done before a step: how much of which loss is in the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from everlearn.batch import Batch


@dataclass(eq=False)
class Seen:
    """A micro-batch of the step under way, and what the model has said to it."""

    batch: Batch
    passed: bool = False
    out: Tensor | None = None
    pull: Tensor | None = None  # the gradient of the loop's loss in the outputs of some examples ...
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
    return [(p, few.clone()) for p in parameters if (few := _few(p)) is not None and few.any()]


def left_of(came: Came) -> float | None:
    """How much of the gradients that a backward pass has left is there now: a scaler divides them, a clipping shortens them.

    None where they have not all changed by one factor. Gradients that were taken away do not count.
    """
    there = [(then.double(), now.double()) for p, then in came if (now := _few(p)) is not None and now.any()]
    if not there:
        return 1.0 if not came else None
    shares = torch.stack([now @ then / (then @ then) for then, now in there])
    left = float(shares.median())
    then, now = (torch.cat(parts) for parts in zip(*there, strict=True))
    return left if left > 0 and (now - left * then).norm() <= 0.05 * now.norm() else None


def _few(p: nn.Parameter, most: int = 16) -> Tensor | None:
    """Some entries of a parameter's gradient, from all over it."""
    if not p.requires_grad or p.grad is None or p.grad.is_sparse:
        return None
    whole = p.grad.detach().reshape(-1)
    return whole[:: max(1, len(whole) // most)]


def weights_of(seen: list[Seen], left: float | None, method: str | None) -> list[float]:
    """How much of each micro-batch's L_task is in the gradients; where nobody can tell, its share of the examples.

    Args:
        seen: the micro-batches.
        left: how much there is of what came by the loop's backward passes, None where nobody can tell.
        method: that cannot be served where the loop's loss is no multiple of L_task.
    """
    whole, counts = sum(one.batch.weight for one in seen), []
    for one in seen:
        count, apart = _multiple(one)
        if method is not None and apart:
            raise ValueError(
                f"{method} weighs the loss of new examples against that of old ones by {one.batch.likelihood}, and the loop's loss is "
                "another one, not a multiple of it: give attach(…, likelihood=…) what the loop's loss is, or take the loss from "
                "method.loss(model, batch)."
            )
        if method is not None and count is not None and (left is None or one.left is None):
            raise ValueError(
                f"{method} takes the place of a part of the loss, and between backward() and the step gradients were changed by more than "
                "a common factor: add regularisers to the loss, clip by the norm of all gradients, or take the loss from "
                "method.loss(model, batch)."
            )
        known = count is not None and not apart and left is not None and one.left is not None
        counts.append(count * left * one.left if known else one.batch.weight / whole)  # type: ignore[operator]
    return counts


def _multiple(one: Seen) -> tuple[float | None, bool]:
    """Which multiple of L_task the loop's loss is, None where that cannot be seen, and whether it is none at all."""
    if one.out is None or one.pull is None or one.batch.y is None:
        return None, False
    some, out = one.batch[one.rows], one.out[one.rows]
    out = (out.float() if out.dtype in (torch.float16, torch.bfloat16) else out).clone().requires_grad_()
    if not some.weight:
        return None, False
    (gradient,) = torch.autograd.grad(some.loss(out) * (some.weight / one.batch.weight), out)
    ours, theirs = gradient.flatten().double(), one.pull.flatten().double()
    if not ours.any() or not theirs.isfinite().all():
        return None, False
    count = float(ours @ theirs / (ours @ ours))
    rounding = max(0.05, 8 * torch.finfo(one.pull.dtype).eps)
    return count, bool((theirs - count * ours).norm() > rounding * theirs.norm())


def rows_compared(batch: Batch, out: Tensor) -> Tensor | slice:
    """Of which examples outputs are compared: a language model's are large, and some have no label."""
    most = max(1, 2**20 // max(1, out[:1].numel()))
    if most >= len(out):
        return slice(None)
    counted = batch.likelihood.counted(batch.y)
    if counted is None:
        return slice(most)
    return counted.reshape(len(out), -1).any(1).nonzero().flatten()[:most]
