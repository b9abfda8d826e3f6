"""A-GEM: a step that does not raise the average loss on old examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from everlearn.core.hyperparameters import Range
from everlearn.core.parameters import inner
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, dense_gradient, gradient_on, with_gradient, write_gradient


@dataclass(eq=False)
class AGEM(Replay):
    """Averaged gradient episodic memory (Chaudhry et al., ICLR 2019).

        g̃ = g                                   where g·g_ref ≥ 0
        g̃ = g - (g·g_ref / g_ref·g_ref) g_ref   otherwise

    g_ref is the gradient on examples of earlier tasks, at the same weights; those of the current task enter the memory now and
    serve from the next task on. The promise is about the gradient: momentum and weight decay may make another step of it.

    Args:
        capacity: how many examples are kept.
        size: how many make up the reference; None for as many as the current batch has.
    """

    traits = Traits(
        family="replay",
        pro="takes no step that raises the average loss on old examples, to first order",
        con="weak where new classes come; the promise is about the gradient, not the optimizer's step",
        step=2.8,
        keeps_examples=True,
    )

    size: Annotated[int, Range(1)] | None = 256
    policy: Literal["reservoir", "balanced", "ring"] = field(default="ring", kw_only=True)

    def before_step(self, model: nn.Module) -> None:
        """Take away from the gradient what would undo the old tasks."""
        self._edited = True
        drawn = None if self._now is None else self.draw(self._now, self.earlier(self._now))
        parameters = with_gradient(model)
        reference = gradient_on(model, parameters, None if drawn is None else drawn[0])
        if reference is None:
            return
        gradient = [dense_gradient(p) for p in parameters]
        projected = project(gradient, reference)
        if projected is not gradient:
            write_gradient(parameters, projected)


def project(g: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
    """The gradient nearest to g that does not point against the reference; g itself where it does not."""
    product = _dot(g, reference)
    if product >= 0:
        return g
    share = product / _dot(reference, reference)
    return [torch.addcmul(a, b, share, value=-1) for a, b in zip(g, reference, strict=True)]


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([inner(x, y) for x, y in zip(a, b, strict=True)]).sum()
