"""A-GEM: project the gradient so that a step does not increase the average loss on earlier tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import Range
from everlearn.core.parameters import inner
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay
from everlearn.methods.replay.reference_gradients import (
    dense_gradient,
    parameters_with_gradient,
    reference_gradient,
    write_gradient,
)


@dataclass(eq=False)
class AGEM(Replay):
    """Averaged GEM (Chaudhry et al., ICLR 2019): project gradients that raise the average old loss.

        g̃ = g                                   if g·g_ref ≥ 0
        g̃ = g - (g·g_ref / g_ref·g_ref) g_ref   otherwise

    g_ref is the gradient on stored examples of earlier tasks, at the current parameters. Examples of the current task
    are stored at once and used from the next task on. The guarantee is about the gradient: momentum and weight decay
    may turn the optimizer's step in another direction.

    Args:
        capacity: number of stored examples.
        size: number of examples in g_ref; None for as many as the current batch has.
    """

    traits = Traits(
        family="replay",
        pro="no step increases the average old loss, to first order",
        con="weak with new classes; holds for plain SGD only",
        step=3.2,
        copies=(0.0,),
        keeps_examples=True,
    )

    size: Annotated[int, Range(1)] | None = 256
    policy: Literal["reservoir", "balanced", "ring"] = field(default="ring", kw_only=True)

    def before_step(self, model: nn.Module) -> None:
        """Project the gradient if it points against that of earlier tasks."""
        self._gradients_edited = True
        parameters = parameters_with_gradient(model)
        g_ref = reference_gradient(model, parameters, self._draw_earlier())
        if g_ref is None:
            return

        g = [dense_gradient(p) for p in parameters]
        write_gradient(parameters, project(g, g_ref))

    def _draw_earlier(self) -> Batch | None:
        """Draw examples of earlier tasks; None if there are none."""
        if self._current_batch is None:
            return None
        drawn = self.draw(self._current_batch, self.earlier_task_rows(self._current_batch))
        if drawn is None:
            return None
        replayed, _ = drawn
        return replayed


def project(g: list[Tensor], g_ref: list[Tensor]) -> list[Tensor]:
    """Return the vector nearest to g whose inner product with g_ref is not negative; equal to g if that holds."""
    # A condition on the device, because reading the product would wait for the backward pass.
    product = _dot(g, g_ref)
    coefficient = torch.where(product >= 0, 0, product / _dot(g_ref, g_ref))
    return [torch.addcmul(a, b, coefficient, value=-1) for a, b in zip(g, g_ref, strict=True)]


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([inner(x, y) for x, y in zip(a, b, strict=True)]).sum()
