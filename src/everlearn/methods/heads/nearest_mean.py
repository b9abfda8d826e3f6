"""Nearest class mean of frozen features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from everlearn.core.hyperparameters import Range
from everlearn.core.traits import Traits
from everlearn.methods.heads.base import NEEDS_FEATURES, FrozenHead


@dataclass(eq=False)
class NearestMean(FrozenHead):
    """Nearest class mean (SimpleCIL, Zhou et al. 2024; iCaRL's classifier): the class mean of the smallest angle.

        μ_c = s_c / n_c,   logit_c = scale · cos(φ(x), μ_c)

    It is written into the model's own output layer as W_c = scale · μ_c/‖μ_c‖, whose logits are the cosines times ‖φ‖:
    the same predictions, and a model of the same layers.

    Args:
        scale: factor of the cosines; it changes probabilities, not predictions.
    """

    traits = Traits(
        family="heads",
        pro="nothing to tune, little to store; any order of tasks",
        con="needs good features; ignores correlations",
        step=0.0,
        copies=(0.0, 0.003),
        copies_scale=False,
        needs_pretrained=NEEDS_FEATURES,
        without_boundaries={"online": True},
    )

    is_scale_free = True

    scale: Annotated[float, Range(1e-6)] = 1.0

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the scaled directions of the class means, and no bias."""
        weight = self.scale * F.normalize(self.statistics["sums"], dim=1)
        return weight, weight.new_zeros(len(weight))
