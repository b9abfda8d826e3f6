"""Several yes/no labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.likelihood.base import Likelihood, random_signs


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Several independent yes/no labels: binary cross-entropy with logits, summed over the allowed labels.

        p(y | out) = ∏_k σ(out_k)^y_k (1 - σ(out_k))^(1 - y_k)

    >>> Bernoulli().loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).exp()
    tensor(4.)
    """

    def loss(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Binary cross-entropy summed over the allowed labels, averaged over examples."""
        each = F.binary_cross_entropy_with_logits(out, y, reduction="none")
        return _only(each, allowed).sum() / len(out)

    def score(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Share of the allowed labels that are right."""
        hit = (out > 0) == (y > 0.5)
        return hit.float().mean(1) if allowed is None else (hit & allowed).sum(1) / allowed.sum(1).clamp(min=1)

    def labels(self, y: Tensor) -> Tensor:
        """A row of zeros and ones per example, as floating point."""
        if y.dim() != 2:
            raise TypeError(
                f"Bernoulli needs a row of zeros and ones per example, got labels of shape {tuple(y.shape)}: "
                "use y[:, None] for a single label, or Categorical() for class numbers."
            )
        if y.numel() and (y.min() < 0 or y.max() > 1):
            raise ValueError(f"Bernoulli needs labels from 0 to 1, got some from {y.min().item()} to {y.max().item()}.")
        return y.to(torch.get_default_dtype())

    def outputs(self, y: Tensor) -> int:
        """One per label."""
        return y.shape[1]

    def residual(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """σ(out) - y where a label is allowed."""
        return _only(out.sigmoid() - y, allowed)

    def sample(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """A row of zeros and ones each."""
        return torch.bernoulli(out.sigmoid().cpu(), generator=generator).to(out.device)

    def predicted(self, out: Tensor, allowed: Tensor | None = None) -> Tensor:
        """1 where that is more likely than 0."""
        return (out > 0).to(out.dtype)

    def factor(self, out: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """F_out = diag(p (1 - p)): a column per label."""
        deviation = _only((F.logsigmoid(out) + F.logsigmoid(-out)).mul(0.5).exp(), allowed)
        for k in range(out.shape[1]):
            s = torch.zeros_like(out)
            s[:, k] = deviation[:, k]
            yield s

    def signs(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Random signs times √(p (1 - p))."""
        deviation = (F.logsigmoid(out) + F.logsigmoid(-out)).mul(0.5).exp()
        return _only(deviation * random_signs(out, generator), allowed)


def _only(values: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return values
    return values * F.pad(allowed, (0, values.shape[-1] - allowed.shape[-1]))  # outputs no task uses yet have no part
