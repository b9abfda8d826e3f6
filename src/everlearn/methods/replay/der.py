"""Dark experience replay: store the model's outputs with the examples, and distill them."""

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
from everlearn.methods.replay.base import Replay, Rows, replay_loss


@dataclass(eq=False)
class DER(Replay):
    """Dark experience replay (Buzzega et al., NeurIPS 2020): match the stored logits of stored examples.

        L = L_task + alpha · mean of (f(x′) - z′)²,   (x′, z′) from the memory

    z′ are the outputs for x′ when it was stored: in training mode, before the optimizer step. Presentations of every
    epoch are offered to the memory, as in the authors' code, so that over several epochs most z′ are those of a trained
    model. The mean is over examples *and* outputs, as in that code; the paper writes a squared norm per example.

    Args:
        capacity: number of stored examples.
        size: number of replayed examples per step; by default as many as the current batch has.
        alpha: weight of the stored outputs.
    """

    traits = Traits(
        family="replay",
        pro="stores outputs, which at small capacities are worth more than labels",
        con="stored outputs may be wrong",
        step=2.2,
        copies=(0.0,),
        keeps_examples=True,
        without_boundaries={},
    )

    alpha: Annotated[NonNegative, Search(0.05, 5)] = 0.5

    def row_fields(self, batch: Batch, outputs: Tensor) -> Rows:
        """Store the outputs too."""
        return {**super().row_fields(batch, outputs), "logits": outputs.to(accumulate_dtype(outputs))}

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Return alpha · mean of (f(x′) - z′)²."""
        self._check_later_statistics(model)
        if batch is None or not self.alpha:
            return 0.0
        drawn = self.draw(batch)
        if drawn is None:
            return 0.0
        replayed, rows = drawn
        return self.alpha * _output_mse(batch.likelihood, forward(model, replayed.x), rows)


@dataclass(eq=False)
class DERpp(DER):
    """Dark experience replay++ (Buzzega et al., NeurIPS 2020): DER, and the labels of stored examples too.

        L = L_task + alpha · mean of (f(x′) - z′)² + beta · L(f(x″), y″)

    (x′, z′) and (x″, y″) are drawn independently.

    Args:
        capacity: number of stored examples.
        size: number of replayed examples per draw, of which there are two; by default as many as the current batch has.
        alpha: weight of the stored outputs.
        beta: weight of the stored labels.
    """

    traits = Traits(
        family="replay",
        pro="stores outputs and labels: strong at small capacities",
        con="two more passes per step, two weights to choose",
        step=3.2,
        copies=(0.0,),
        keeps_examples=True,
        without_boundaries={},
    )

    beta: Annotated[NonNegative, Search(0.05, 5)] = 1.0

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Return alpha · mean of (f(x′) - z′)² + beta · L(f(x″), y″)."""
        output_term = super().penalty(model, batch, outputs)
        if batch is None or not self.beta:
            return output_term
        drawn = self.draw(batch)
        if drawn is None:
            return output_term
        replayed, _ = drawn
        return output_term + self.beta * replay_loss(model, replayed)


def _output_mse(likelihood: Likelihood, outputs: Tensor, rows: Rows) -> Tensor:
    """Compute the mean of (f(x′) - z′)² over stored outputs; added outputs and ignored labels do not count."""
    z: Tensor = rows["logits"]
    f = outputs[..., : z.shape[-1]].to(z.dtype)
    is_compared = z.isfinite() & f.isfinite()
    counted = likelihood.counted(rows["y"])
    if counted is not None:
        is_compared &= counted
    # Masked before the difference: ∞ - ∞ would make the gradient NaN.
    difference = torch.where(is_compared, f, 0.0) - torch.where(is_compared, z, 0.0)
    return difference.square().sum() / is_compared.sum().clamp(min=1)
