"""Likelihood of several binary labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.core.likelihood.base import Likelihood, random_signs


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Several independent binary labels: binary cross-entropy with logits, summed over the allowed labels.

        p(y | outputs) = ∏_k σ(outputs_k)^y_k (1 - σ(outputs_k))^(1 - y_k)

    >>> Bernoulli().loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).exp()
    tensor(4.)
    """

    def loss(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Binary cross-entropy summed over the allowed labels, averaged over examples."""
        losses = F.binary_cross_entropy_with_logits(outputs, y, reduction="none")
        return _mask(losses, allowed).sum() / len(outputs)

    def score(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Fraction of the allowed labels that are predicted correctly."""
        is_correct = (outputs > 0) == (y > 0.5)
        if allowed is None:
            return is_correct.float().mean(1)
        return (is_correct & allowed).sum(1) / allowed.sum(1).clamp(min=1)

    def labels(self, y: Tensor) -> Tensor:
        """Convert labels, a row of zeros and ones per example, to floating point."""
        if y.dim() != 2:
            raise TypeError(
                f"Bernoulli needs a row of zeros and ones per example, got labels of shape {tuple(y.shape)}: "
                "use y[:, None] for a single label, or Categorical() for class numbers."
            )
        if y.numel() and (y.min() < 0 or y.max() > 1):
            raise ValueError(f"Bernoulli needs labels from 0 to 1, got some from {y.min().item()} to {y.max().item()}.")
        return y.to(torch.get_default_dtype())

    def outputs(self, y: Tensor) -> int:
        """Number of labels per example."""
        return y.shape[1]

    def residual(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """σ(outputs) - y for allowed labels, 0 for others."""
        return _mask(outputs.sigmoid() - y, allowed)

    def sample(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw a row of zeros and ones for each example."""
        return torch.bernoulli(outputs.sigmoid().cpu(), generator=generator).to(outputs.device)

    def predicted(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """1 for labels with p > 0.5, else 0."""
        return (outputs > 0).to(outputs.dtype)

    def factor(self, outputs: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """Yield a column per label: F_out = diag(p (1 - p))."""
        std = _mask(_standard_deviation(outputs), allowed)
        for k in range(outputs.shape[1]):
            s = torch.zeros_like(outputs)
            s[:, k] = std[:, k]
            yield s

    def signs(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw random signs times √(p (1 - p))."""
        return _mask(_standard_deviation(outputs) * random_signs(outputs, generator), allowed)


def _standard_deviation(outputs: Tensor) -> Tensor:
    """√(p (1 - p)) with p = σ(outputs), computed from logarithms for accuracy."""
    return (F.logsigmoid(outputs) + F.logsigmoid(-outputs)).mul(0.5).exp()


def _mask(values: Tensor, allowed: Tensor | None) -> Tensor:
    """Set values of outputs that are not allowed to zero."""
    if allowed is None:
        return values

    # The model may have outputs that no task uses yet.
    return values * F.pad(allowed, (0, values.shape[-1] - allowed.shape[-1]))
