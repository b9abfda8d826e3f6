"""Linear discriminant analysis of random Fourier features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from everlearn.core.hyperparameters import Range, Search
from everlearn.core.traits import Traits
from everlearn.methods.heads.base import NEEDS_FEATURES, FrozenHead
from everlearn.methods.heads.streaming_lda import linear_discriminants
from everlearn.runtime.randomness import generator
from everlearn.surgery.feature_head import RandomFourier


@dataclass(eq=False)
class KLDA(FrozenHead):
    """Kernel LDA (Momeni et al., AAAI 2025): linear discriminants of random Fourier features.

        h = √(2/D) cos(ωφ + b),   ω ~ N(0, 2σ),   b ~ U[0, 2π)      random Fourier features of an RBF kernel
        W, b as in ``StreamingLDA``, on h

    The scale σ depends on that of the features: 1 with raw features of MiniLM gives chance level. Normalized features
    have distances of at most 2, for which σ = 0.1 is a good start.

    Args:
        dimension: D, the number of random features.
        sigma: σ, the variance of ω is 2σ.
        shrinkage: ε of the covariance; small, because h has a variance of about 1/D.
        seed: of the random features; they are part of the model, and must not change.
    """

    traits = Traits(
        family="heads",
        pro="classes need not be linearly separable; any order of tasks",
        con="needs good features; σ depends on their scale",
        step=0.0,
        copies=(105.0,),
        copies_scale=False,
        needs_pretrained=NEEDS_FEATURES,
        without_boundaries={"online": True},
    )

    dimension: Annotated[int, Range(1)] = 5000
    sigma: Annotated[float, Range(1e-9), Search(1e-3, 10)] = 0.1
    shrinkage: Annotated[float, Range(0, 1), Search(1e-9, 0.1)] = 1e-6
    seed: int = 0

    def statistics_settings(self) -> dict[str, Any]:
        """Return the fields that the statistics depend on."""
        settings = {"dimension": self.dimension, "sigma": self.sigma, "seed": self.seed}
        return {**super().statistics_settings(), **settings}

    def make_random_features(self, num_features: int) -> RandomFourier:
        """Draw ω and b."""
        random = generator(self.seed, "KLDA")
        frequencies = math.sqrt(2 * self.sigma) * torch.randn(self.dimension, num_features, generator=random)
        phases = 2 * math.pi * torch.rand(self.dimension, generator=random)
        return RandomFourier(frequencies, phases)

    def add(self, h: Tensor, y: Tensor, sign: float) -> None:
        """Add n, s and Σ hhᵀ."""
        super().add(h, y, sign)
        products = self._statistic("products", h, h.shape[1], h.shape[1])
        products.addmm_(h.T, h, alpha=sign)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the discriminants of the shared covariance."""
        return linear_discriminants(self.statistics, self.shrinkage)
