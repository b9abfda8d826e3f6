"""Dark experience replay: remember what the model said, not only what was right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.forward import forward
from everlearn.core.hyperparameters import NonNegative, Search
from everlearn.core.likelihood import Likelihood
from everlearn.core.parameters import accumulate_dtype
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, Rows, loss_on


def _stored_outputs(likelihood: Likelihood, out: Tensor, rows: Rows) -> Tensor:
    """Mean squared difference from the stored outputs; of a head that has grown since, and at ignored labels, outputs are free."""
    z: Tensor = rows["logits"]
    out = out[..., : z.shape[-1]].to(z.dtype)
    known = z.isfinite() & out.isfinite()
    counted = likelihood.counted(rows["y"])
    if counted is not None:
        known &= counted
    apart = torch.where(known, out, 0.0) - torch.where(known, z, 0.0)
    return apart.square().sum() / known.sum().clamp(min=1)


@dataclass(eq=False)
class DER(Replay):
    """Dark experience replay (Buzzega et al., NeurIPS 2020).

        L = L_task + alpha · mean over (x′, z′) from the memory and over outputs of (f(x′) - z′)²

    z′ are the outputs at the presentation of x′ that is kept, in training mode, before that step. Presentations of every epoch
    are offered to the memory, as in the authors' code, so that over several epochs most z′ are those of a trained model. The
    mean runs over examples *and* outputs, as there; the paper writes a squared norm per example.

    Args:
        capacity: how many examples are kept.
        size: how many are replayed at a step; by default as many as the current batch has.
        alpha: weight of the remembered outputs.
    """

    traits = Traits(
        family="replay",
        pro="keeps what the model said, which at small capacities is worth more than labels",
        con="what it keeps is as good as the model was then: DER++ keeps the labels too",
        step=2.1,
        keeps_examples=True,
        without_boundaries={},
    )

    alpha: Annotated[NonNegative, Search(0.05, 5)] = 0.5

    def row_fields(self, batch: Batch, out: Tensor) -> Rows:
        """The outputs too."""
        return {**super().row_fields(batch, out), "logits": out.to(accumulate_dtype(out))}

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """How far the outputs have moved from what they were."""
        if batch is None or not self.alpha or (drawn := self.draw(batch)) is None:
            return 0.0
        replayed, rows = drawn
        return self.alpha * _stored_outputs(batch.likelihood, forward(model, replayed.x), rows)


@dataclass(eq=False)
class DERpp(Replay):
    """Dark experience replay++ (Buzzega et al., NeurIPS 2020): DER and, on a second draw, the labels.

        L = L_task + alpha · mean of (f(x′) - z′)² + beta · L(f(x″), y″)

    (x′, z′) and (x″, y″) are drawn independently.

    Args:
        capacity: how many examples are kept.
        size: how many are replayed at a step, twice; by default as many as the current batch has.
        alpha: weight of the remembered outputs.
        beta: weight of the remembered labels.
    """

    traits = Traits(
        family="replay",
        pro="keeps what the model said and what was right: strong at small capacities",
        con="two more passes a step, and two weights to choose",
        step=2.9,
        keeps_examples=True,
        without_boundaries={},
    )

    alpha: Annotated[NonNegative, Search(0.05, 5)] = 0.5
    beta: Annotated[NonNegative, Search(0.05, 5)] = 0.5

    def row_fields(self, batch: Batch, out: Tensor) -> Rows:
        """The outputs too."""
        return {**super().row_fields(batch, out), "logits": out.to(accumulate_dtype(out))}

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """Outputs of one draw, labels of another."""
        total: Tensor | float = 0.0
        if batch is None or not len(self.memory):
            return total
        if self.alpha and (drawn := self.draw(batch)) is not None:
            total = self.alpha * _stored_outputs(batch.likelihood, forward(model, drawn[0].x), drawn[1])
        if self.beta and (drawn := self.draw(batch)) is not None:
            total = total + self.beta * loss_on(model, drawn[0])
        return total
