"""What every likelihood answers about outputs and labels.

Outputs ``out`` and labels ``y`` have one row per example; ``allowed`` (rows × outputs, boolean, or None for everything)
says which outputs may be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Likelihood(ABC):
    """p(y | out): the loss is its negative logarithm, averaged over examples."""

    @abstractmethod
    def loss(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Mean over examples of -log p(y | out), up to a constant."""

    @abstractmethod
    def score(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """How good each example's output is, higher is better; the mean is what the accuracy matrix holds."""

    def check_outputs(self, out: Tensor) -> None:  # noqa: B027 - most take any
        """Say so where outputs are evidently not what this likelihood takes them for."""

    @property
    def score_name(self) -> str:
        """What the score is called."""
        return "accuracy"

    def weight(self, y: Tensor) -> int:
        """How many labels the loss of a batch with these is a mean over."""
        return len(y)

    def label_count(self, out: Tensor, y: Tensor | None = None) -> int:
        """How many labels the loss of these outputs is a mean over; without labels, as many as they could have."""
        return len(out) if y is None else self.weight(y)

    @abstractmethod
    def labels(self, y: Tensor) -> Tensor:
        """The labels in the dtype this likelihood needs, or an error that says what they should be."""

    @abstractmethod
    def outputs(self, y: Tensor) -> int:
        """How many outputs a model needs for these labels."""

    # What the Fisher information is made of. F_out is the Fisher information of one example's outputs,
    # E[r rᵀ] over labels y from p(y | out), with r the residual.

    @abstractmethod
    def residual(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """R = ∂(-log p(y | out)) / ∂out, an example a row."""

    @abstractmethod
    def sample(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Labels drawn from p(y | out)."""

    @abstractmethod
    def predicted(self, out: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The most likely labels."""

    @abstractmethod
    def factor(self, out: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """Columns s, each shaped like the outputs, with Σ s sᵀ = F_out for every example."""

    @abstractmethod
    def signs(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """One random s with E[s sᵀ] = F_out: the factor times a vector of random signs."""

    def counted(self, y: Tensor | None) -> Tensor | None:
        """Which parts of the outputs count at all, shaped to multiply them; None for all."""
        return None


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """+1 or -1 with equal chance, drawn on the CPU so that all devices see the same."""
    return (2 * torch.randint(2, like.shape, generator=generator) - 1).to(like)
