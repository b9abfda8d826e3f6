"""What somebody else's loop has done before a step: how much of which loss is in the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everlearn import distributed
from everlearn.batch import Batch


@dataclass(eq=False)
class Seen:
    """A micro-batch of the step under way, and what the model has said to it."""

    batch: Batch
    passed: bool = False
    out: Tensor | None = None
    pull: Tensor | None = None  # the gradient of the loop's loss in these outputs, or in those of the first examples
    waits: bool = False  # for the loop's backward pass
    backward: int = -1  # which of the loop's backward passes it was
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

    def arrived(gradients: tuple[Tensor, ...]) -> None:
        if gradients[index] is not None:
            tell(gradients[index])

    original.register_prehook(arrived)


def share_left(came: tuple[nn.Parameter, Tensor] | None) -> float:
    """How much of the gradient that a backward pass has left is there now: a scaler divides it, a clipping shortens it."""
    if came is None or came[0].grad is None or distributed.world() > 1:  # several processes have averaged it since
        return 1.0
    now, then = came[0].grad.detach().double().flatten(), came[1].double().flatten()
    return float(now @ then / (then @ then))


def weights_of(seen: list[Seen], left: float, method: str | None) -> list[float]:
    """How much of each micro-batch's L_task is in the gradients; where nobody can tell, its share of the examples.

    Args:
        seen: the micro-batches.
        left: how much there is of what came by the loop's backward passes.
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
        counts.append(one.batch.weight / whole if count is None or apart else count * left)
    if distributed.world() > 1 and (times := sum(counts)) > 1.5:  # the scaler's factor, which is a power of two
        counts = [count / 2 ** round(math.log2(times)) for count in counts]
    return counts


def _multiple(one: Seen) -> tuple[float | None, bool]:
    """Which multiple of L_task the loop's loss is, None where that cannot be seen, and whether it is none at all."""
    if one.out is None or one.pull is None or one.batch.y is None:
        return None, False
    some, out = one.batch[: len(one.pull)], one.out[: len(one.pull)]
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


def rows_compared(out: Tensor) -> int:
    """Of how many examples outputs are compared: a language model's are large."""
    return max(1, 2**20 // max(1, out[0].numel()))
