"""RanPAC and ACIL: ridge regression on random features of frozen features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.traits import Traits
from everlearn.methods.heads.base import NEEDS_FEATURES, FrozenHead
from everlearn.methods.heads.statistics import Statistics
from everlearn.runtime.randomness import generator
from everlearn.surgery.feature_head import RandomReLU

# λ is selected on this many of the random features: it hardly depends on M, and a small system is quick to solve.
SELECTION_DIMENSION = 1000

# Largest share of the examples that may be degrees of freedom.
MAX_FREEDOM = 0.95

# Multiples of the mean square of a random feature.
RIDGE_GRID = tuple(10.0 ** (tenth / 10) for tenth in range(-80, 41))


@dataclass(eq=False)
class RanPAC(FrozenHead):
    """RanPAC (McDonnell et al., NeurIPS 2023) and ACIL (Zhuang et al. 2022): ridge regression on random features.

        h = ReLU(P φ),   P ~ N(0, 1) of shape (M, features)
        G = Σ hhᵀ,   C = Σ h yᵀ (y one-hot),   W = (G + λ I)⁻¹ C

    W is the ridge regression of one-hot labels on all examples of all tasks. ``recursive=True`` also keeps the inverse
    R = (G + λ I)⁻¹, as ACIL does, and updates it by the rows H of a batch: a class is added in a fraction of the time,
    with twice the memory. Both give the same W for the same λ, up to rounding. Rows are forgotten in G, and R is
    computed anew: taking them out of R would amplify its rounding errors.

        R ← R - RHᵀ (I + HRHᵀ)⁻¹ HR,   W = R C

    λ: a number; or "gcv", the λ of the smallest generalized cross-validation error N·SSE(λ)/(N - tr((G + λI)⁻¹G))²,
    which needs only the sums, so that the order of tasks does not matter. It is computed on the first thousand random
    features. The authors hold out a fifth of the current task instead, so that λ depends on the last task.

    Args:
        dimension: M, the number of random features; the authors use 10,000. 0 for the features themselves.
        ridge: λ; a number with ``recursive``.
        recursive: whether to keep the inverse.
        seed: of the random features; they are part of the model, and must not change.
    """

    traits = Traits(
        family="heads",
        pro="the best head on MiniLM features; any order of tasks",
        con="needs good features; keeps M² numbers",
        step=0.0,
        copies=(105.0,),
        copies_scale=False,
        needs_pretrained=NEEDS_FEATURES,
        without_boundaries={"online": True},
    )

    dimension: Annotated[int, Range(0)] = 5000
    ridge: NonNegative | Literal["gcv"] = "gcv"
    recursive: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recursive and (self.ridge == "gcv" or not self.ridge):
            raise ValueError(
                f"RanPAC.ridge: got {self.ridge!r}, but the inverse is of one λ above 0: give a number, as in "
                "RanPAC(ridge=100.0, recursive=True)."
            )

    @property
    def is_additive(self) -> bool:  # type: ignore[override]
        """Whether statistics can be added: inverses cannot."""
        return not self.recursive

    def statistics_settings(self) -> dict[str, Any]:
        """Return the fields that the statistics depend on; the inverse also depends on λ."""
        settings = {**super().statistics_settings(), "recursive": self.recursive}
        settings |= {"dimension": self.dimension, "seed": self.seed}
        if self.recursive:
            settings["ridge"] = self.ridge
        return settings

    def make_random_features(self, num_features: int) -> RandomReLU | None:
        """Draw P."""
        if not self.dimension:
            return None
        return RandomReLU(torch.randn(self.dimension, num_features, generator=generator(self.seed, "RanPAC")))

    def add(self, h: Tensor, y: Tensor, sign: float) -> None:
        """Add n, C and G, and update the inverse."""
        super().add(h, y, sign)
        products = self._statistic("products", h, h.shape[1], h.shape[1])
        if self.recursive and sign > 0:
            # R - RHᵀ (I + HRHᵀ)⁻¹ HR
            inverse = self._inverse(products)
            projected = h @ inverse
            system = projected @ h.T
            system.diagonal().add_(1)
            inverse.addmm_(projected.T, torch.linalg.solve(system, projected), alpha=-1)
        else:
            self.statistics.pop("inverse", None)
        products.addmm_(h.T, h, alpha=sign)

    def _inverse(self, products: Tensor) -> Tensor:
        """Return R, computed from G if examples were forgotten since."""
        if "inverse" not in self.statistics:
            inverse = self._statistic("inverse", products, *products.shape)
            inverse.diagonal().fill_(1 / float(self.ridge))
            if products.any():
                self.statistics["inverse"] = torch.cholesky_inverse(_factorize(products, float(self.ridge)))
        return self.statistics["inverse"]

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the ridge regression, and no bias."""
        sums = self.statistics["sums"]
        if self.recursive:
            weight = sums @ self._inverse(self.statistics["products"])
        else:
            ridge = select_ridge(self.statistics) if self.ridge == "gcv" else float(self.ridge)
            weight = solve_ridge(self.statistics["products"], sums, ridge)
        return weight, weight.new_zeros(len(weight))


def solve_ridge(products: Tensor, sums: Tensor, ridge: float) -> Tensor:
    """Return ((G + λI)⁻¹ C)ᵀ, a row for each class.

    Args:
        products: G.
        sums: Cᵀ.
        ridge: λ.
    """
    return torch.cholesky_solve(sums.T, _factorize(products, ridge)).T


def select_ridge(statistics: Statistics) -> float:
    """Return the λ of the smallest generalized cross-validation error, from the sums alone.

        G = U diag(s) Uᵀ,   q_j = ‖u_jᵀ C‖²
        SSE(λ) = N - Σ_j q_j (s_j + 2λ)/(s_j + λ)²,   tr((G + λI)⁻¹G) = Σ_j s_j/(s_j + λ)

    Args:
        statistics: counts, sums and products.
    """
    num_examples = float(statistics["counts"].sum())
    num_selected = min(SELECTION_DIMENSION, len(statistics["products"]))
    eigenvalues, eigenvectors = torch.linalg.eigh(statistics["products"][:num_selected, :num_selected])
    s = eigenvalues.clamp(min=0)
    q = (statistics["sums"][:, :num_selected] @ eigenvectors).square().sum(0)

    ridges = float(s.mean()) * torch.tensor(RIDGE_GRID, dtype=torch.float64, device=s.device)[:, None]
    squared_errors = num_examples - (q * (s + 2 * ridges) / (s + ridges).square()).sum(1)
    freedom = (s / (s + ridges)).sum(1)
    errors = num_examples * squared_errors / (num_examples - freedom).square()

    # With fewer examples than features, a small λ fits all of them, and its error is 0/0.
    errors[freedom > MAX_FREEDOM * num_examples] = torch.inf
    return float(ridges[errors.argmin()])


def _factorize(products: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of G + λI."""
    system = products.clone()
    system.diagonal().add_(ridge)
    factor: Tensor
    factor, failure = torch.linalg.cholesky_ex(system)
    if failure:
        raise ValueError(
            f"RanPAC cannot solve for {len(products)} random features with λ = {ridge:g}: there are fewer examples "
            'than features, and λ is too small. Give ridge="gcv" or a larger number.'
        )
    return factor
