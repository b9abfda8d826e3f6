"""Streaming linear discriminant analysis on frozen features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from everlearn.core.hyperparameters import Range, Search
from everlearn.core.traits import Traits
from everlearn.methods.heads.base import NEEDS_FEATURES, FrozenHead
from everlearn.methods.heads.statistics import Statistics


@dataclass(eq=False)
class StreamingLDA(FrozenHead):
    """Streaming LDA (Hayes & Kanan, CVPR Workshops 2020): linear discriminants of class means and one covariance.

        μ_c = s_c/n_c,   Σ = (Σ hhᵀ - Σ_c n_c μ_c μ_cᵀ)/N,   Λ = ((1-ε) Σ + ε I)⁻¹
        W_c = Λ μ_c,   b_c = -½ μ_cᵀ Λ μ_c

    Σ is the covariance within classes. The authors update it example by example, with the mean at that moment, which
    depends on the order; the sums give the covariance around the final means in any order.

    Args:
        shrinkage: ε.
    """

    traits = Traits(
        family="heads",
        pro="knows how features are correlated; any order of tasks",
        con="needs good features; a single covariance",
        step=0.0,
        copies=(0.67,),
        copies_scale=False,
        needs_pretrained=NEEDS_FEATURES,
        without_boundaries={"online": True},
    )

    shrinkage: Annotated[float, Range(0, 1), Search(1e-6, 0.5)] = 1e-4

    def add(self, h: Tensor, y: Tensor, sign: float) -> None:
        """Add n, s and Σ hhᵀ."""
        super().add(h, y, sign)
        products = self._statistic("products", h, h.shape[1], h.shape[1])
        products.addmm_(h.T, h, alpha=sign)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the discriminants of the shared covariance."""
        return linear_discriminants(self.statistics, self.shrinkage)


def linear_discriminants(statistics: Statistics, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return W and b of classes with a shared covariance.

    Args:
        statistics: counts, sums and products.
        shrinkage: ε.
    """
    counts = statistics["counts"]
    means = statistics["sums"] / counts.clamp(min=1)[:, None]
    covariance = (statistics["products"] - means.T @ (counts[:, None] * means)) / counts.sum()
    covariance = (1 - shrinkage) * covariance
    covariance.diagonal().add_(shrinkage)

    factor, failure = torch.linalg.cholesky_ex(covariance)
    if failure:
        raise ValueError(
            f"The covariance of {len(covariance)} features within classes is singular ({int(counts.sum())} examples): "
            f"raise the shrinkage, which is {shrinkage:g}, to 1e-4 or more."
        )
    weight = torch.cholesky_solve(means.T, factor).T
    bias = -0.5 * (weight * means).sum(1)
    return weight, bias
