"""Likelihood of real-valued targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from everlearn.core.likelihood.base import Likelihood, random_signs


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real-valued targets with known noise: squared error divided by twice the noise variance.

        -log p(y | outputs) = ‖y - outputs‖² / (2 variance) + constant

    Args:
        variance: variance of the noise of each target.

    >>> Gaussian().loss(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(1.5000)
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.variance < float("inf"):
            raise ValueError(f"Gaussian.variance must be a finite number above 0, got {self.variance}.")

    @property
    def score_name(self) -> str:
        """Name of the score, which is at most 0."""
        return "minus squared error"

    def loss(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Squared error summed over outputs, divided by twice the variance, averaged over examples."""
        return self._squared_errors(outputs, y).sum() / (2 * self.variance * len(outputs))

    def score(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Minus the squared error, averaged over outputs."""
        return -self._squared_errors(outputs, y).flatten(1).mean(1)

    def _squared_errors(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Squared error of each output."""
        if outputs.shape != y.shape:
            raise ValueError(
                f"The model gives outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(y.shape)}."
            )
        return (outputs - y) ** 2

    def labels(self, y: Tensor) -> Tensor:
        """Convert targets to floating point, one row per example."""
        if not y.is_floating_point():
            y = y.to(torch.get_default_dtype())
        if y.dim() == 1:
            y = y[:, None]
        return y

    def outputs(self, y: Tensor) -> int:
        """Number of targets per example."""
        return y.shape[1]

    def residual(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """(outputs - y) / variance."""
        return (outputs - y) / self.variance

    def sample(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw targets from N(outputs, variance)."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype).to(outputs.device)
        return outputs + noise * math.sqrt(self.variance)

    def predicted(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Raise ValueError: the most likely target is the output, whose residual is zero."""
        raise ValueError("A Gaussian's most likely target is the output itself, with no gradient: use labels='exact'.")

    def factor(self, outputs: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """Yield a column per output: F_out = I / variance."""
        for k in range(outputs[0].numel()):
            s = torch.zeros_like(outputs)
            s.view(len(outputs), -1)[:, k] = 1 / math.sqrt(self.variance)
            yield s

    def signs(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw random signs divided by the standard deviation."""
        return random_signs(outputs, generator) / math.sqrt(self.variance)
