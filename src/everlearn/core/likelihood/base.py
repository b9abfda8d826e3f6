"""The interface of likelihoods.

Outputs and labels ``y`` have one row per example. ``allowed`` (rows × outputs, boolean, or None for all) masks
the outputs that may be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Label that losses ignore, as in torch.nn.functional.cross_entropy.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Likelihood(ABC):
    """Likelihood p(y | outputs); the loss is its negative logarithm, averaged over examples."""

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Mean over examples of -log p(y | outputs), up to a constant."""

    @abstractmethod
    def score(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Score of each example's output, higher is better; the accuracy matrix contains the means."""

    def check_outputs(self, outputs: Tensor) -> None:  # noqa: B027 - optional
        """Warn if the outputs are evidently not parameters of this likelihood."""

    @property
    def score_name(self) -> str:
        """Name of the score."""
        return "accuracy"

    def weight(self, y: Tensor) -> int:
        """Number of labels that the loss averages over."""
        return len(y)

    def label_count(self, outputs: Tensor, y: Tensor | None = None) -> int:
        """Number of labels that the loss of these outputs averages over; without labels, the largest possible."""
        if y is None:
            return len(outputs)
        return self.weight(y)

    @abstractmethod
    def labels(self, y: Tensor) -> Tensor:
        """Convert labels to the dtype of this likelihood; raise TypeError or ValueError if they do not fit."""

    @abstractmethod
    def outputs(self, y: Tensor) -> int:
        """Number of outputs that a model needs for these labels."""

    # The Fisher information of one example's outputs is F_out = E[r rᵀ] over labels y ~ p(y | outputs),
    # with r the residual.

    @abstractmethod
    def residual(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Compute r = ∂(-log p(y | outputs)) / ∂outputs, one row per example."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw labels from p(y | outputs)."""

    @abstractmethod
    def predicted(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Most likely labels."""

    @abstractmethod
    def factor(self, outputs: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the columns s of a factor of F_out, each shaped like the outputs: Σ s sᵀ = F_out for every example."""

    @abstractmethod
    def signs(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw a random s with E[s sᵀ] = F_out: the factor times a vector of random signs."""

    def counted(self, y: Tensor | None) -> Tensor | None:
        """Mask of the outputs whose labels are not ignored, broadcastable to them; None for all."""
        return None


def random_signs(reference: Tensor, generator: torch.Generator) -> Tensor:
    """Draw +1 or -1 with equal probability for each entry, on the CPU so that all devices get the same signs."""
    return (2 * torch.randint(2, reference.shape, generator=generator) - 1).to(reference)
