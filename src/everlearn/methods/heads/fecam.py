"""FeCAM: a Gaussian for each class of frozen features."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.method import Method
from everlearn.core.traits import Traits
from everlearn.methods.heads.base import NEEDS_FEATURES, UNSEEN_LOGIT, FrozenHead
from everlearn.methods.heads.statistics import add_products, as_float64, mean_and_covariance
from everlearn.surgery.heads import output_layer


@dataclass(eq=False)
class FeCAM(FrozenHead):
    """FeCAM (Goswami et al., NeurIPS 2023): the nearest class, by a covariance for each class.

        h = |φ|^power · sign φ,   μ_c and Σ_c: mean and covariance of h in class c
        Σ_c ← Σ_c + α₁ v̄ I + α₂ c̄ (1 - I),   v̄: mean of the variances, c̄: mean of the covariances
        R_c = Σ_c / (σσᵀ),   σ² = diag Σ_c
        logit_c = -(h/‖h‖ - μ_c/‖μ_c‖)ᵀ R_c⁻¹ (h/‖h‖ - μ_c/‖μ_c‖)

    Each class has its own covariance, shrunk and normalized to correlations, so that distances to different classes
    are comparable. The logits are not linear in the features: ``predict`` computes them, and the model's output layer
    is not written.

    Args:
        power: exponent of Tukey's transform, which makes skewed features, such as those after a ReLU, more like a
            Gaussian; 1 for none.
        alpha1: α₁.
        alpha2: α₂.
    """

    traits = Traits(
        family="heads",
        pro="a covariance for each class; any order of tasks",
        con="needs good features, and many examples of each class",
        step=0.0,
        copies=(0.0, 1.34),
        copies_scale=False,
        needs_pretrained=NEEDS_FEATURES,
        grows=True,
        without_boundaries={"online": True},
    )

    deployable = False

    power: Annotated[float, Range(1e-3, 1)] = 0.5
    alpha1: NonNegative = 1.0
    alpha2: NonNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._metrics: dict[int, Tensor] = {}  # R_c⁻¹ of the classes whose statistics have not changed since
        self._metric_alphas = (self.alpha1, self.alpha2)

    def statistics_settings(self) -> dict[str, Any]:
        """Return the fields that the statistics depend on; features are normalized later."""
        return {"method": "FeCAM", "power": self.power}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a head with the same settings."""
        super().load_state_dict(state)
        self._metrics = {}

    def represent(self, features: Tensor) -> Tensor:
        """Return Tukey's transform of the features, in float64."""
        h = as_float64(features)
        return h.abs().pow(self.power) * h.sign()

    def add(self, h: Tensor, y: Tensor, sign: float) -> None:
        """Add n, s and Σ hhᵀ of each class."""
        super().add(h, y, sign)
        add_products(self.statistics, "FeCAM", h, y, sign)
        for c in y.unique().tolist():
            self._metrics.pop(c, None)

    def write_head(self, model: nn.Module) -> None:
        """Compute R_c⁻¹ of each class; the model is not changed."""
        counts = self.statistics["counts"]
        scarce = ((counts > 0.5) & (counts < 1.5)).nonzero().flatten().tolist()
        if scarce:
            warnings.warn(
                f"FeCAM has one example of class {scarce[0]} ({len(scarce)} such classes), which has no covariance: "
                "correlations are taken as zero. Give more examples, or use StreamingLDA, whose classes share one.",
                UserWarning,
                stacklevel=3,
            )
        if self._metric_alphas != (self.alpha1, self.alpha2):
            self._metrics = {}
        self._metric_alphas = (self.alpha1, self.alpha2)
        changed = [c for c in range(len(counts)) if c not in self._metrics]
        self._metrics |= {c: self._invert_correlations(c) for c in changed}
        self.is_stale = False

    def _invert_correlations(self, c: int) -> Tensor:
        """Return R_c⁻¹."""
        count = self.statistics["counts"][c]
        identity = torch.eye(self.statistics["sums"].shape[1]).to(count)
        if count < 1.5:
            return identity
        mean, covariance = mean_and_covariance(self.statistics, c)

        variance = covariance.diagonal().mean()
        num_pairs = max(1, len(covariance) * (len(covariance) - 1))
        mean_covariance = (covariance.sum() - covariance.diagonal().sum()) / num_pairs
        covariance = covariance + self.alpha1 * variance * identity + self.alpha2 * mean_covariance * (1 - identity)

        deviations = covariance.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        correlations = covariance / deviations.outer(deviations)
        factor, failure = torch.linalg.cholesky_ex(correlations)
        if failure:
            raise ValueError(
                f"FeCAM cannot invert the correlations of class {c} ({int(count)} examples of {len(mean)} features): "
                f"raise alpha1, which is {self.alpha1:g}."
            )
        return torch.cholesky_inverse(factor)

    @torch.no_grad()
    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Return minus the squared distance to the mean of each class."""
        if not self.statistics:
            return Method.predict(self, model, x, task)
        if len(self._metrics) < len(self.statistics["counts"]):
            self.write_head(model)

        features = self.compute_features(model, x)
        h = self._normalized(self.represent(features.flatten(0, -2)))
        counts = self.statistics["counts"]
        means = self._normalized(self.statistics["sums"])
        _, layer = output_layer(model, self.output)
        num_outputs = max(len(counts), layer.out_features)
        outputs = h.new_full((len(h), num_outputs), UNSEEN_LOGIT)
        for c in (counts > 0.5).nonzero().flatten().tolist():
            difference = h - means[c]
            outputs[:, c] = -((difference @ self._metrics[c]) * difference).sum(1)
        return outputs.view(*features.shape[:-1], num_outputs)

    def _normalized(self, h: Tensor) -> Tensor:
        if self.normalize:
            return F.normalize(h, dim=-1)
        return h
