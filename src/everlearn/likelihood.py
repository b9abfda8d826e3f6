"""What the model's output means: a probability of the label, from which loss and score follow.

Every likelihood answers the same questions about outputs ``out`` and labels ``y``, one row per example; ``allowed``
(rows × outputs, boolean, or None for everything) says which outputs may be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

    @property
    def score_name(self) -> str:
        """What the score is called."""
        return "accuracy"

    def weight(self, y: Tensor) -> int:
        """How many labels the loss of a batch with these is a mean over."""
        return len(y)

    @abstractmethod
    def labels(self, y: Tensor) -> Tensor:
        """The labels in the dtype this likelihood needs, or an error that says what they should be."""

    @abstractmethod
    def outputs(self, y: Tensor) -> int:
        """How many outputs a model needs for these labels."""


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One class out of several: cross-entropy over the allowed classes.

        p(y | out) = softmax(out)_y,  the softmax taken over the allowed classes only

    Works per token as well: outputs (examples, tokens, classes) with labels (examples, tokens), -100 to ignore one.

    >>> Categorical().loss(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor(4.)
    >>> two_of_four = torch.tensor([[False, False, True, True]])
    >>> Categorical().loss(torch.zeros(1, 4), torch.tensor([2]), two_of_four).exp()
    tensor(2.)
    """

    def logits(self, out: Tensor, allowed: Tensor | None) -> Tensor:
        """The outputs, minus infinity where a class is not allowed."""
        if allowed is None:
            return out
        if out.shape[-1] < allowed.shape[-1]:
            raise ValueError(
                f"The model gives {out.shape[-1]} outputs but the stream has {allowed.shape[-1]} classes: build it with "
                f"outputs={allowed.shape[-1]}, or widen it with everlearn.heads.grow_output(model, {allowed.shape[-1]})."
            )
        if out.shape[-1] > allowed.shape[-1]:  # a model may have outputs that no task uses yet
            allowed = F.pad(allowed, (0, out.shape[-1] - allowed.shape[-1]))
        return out.masked_fill(~_per_token(allowed, out), float("-inf"))

    def loss(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Cross-entropy, averaged over examples (and tokens)."""
        logits = self.logits(out, allowed)
        if y.shape != out.shape[:-1]:
            raise ValueError(_shapes(out, y))
        try:
            return F.cross_entropy(logits if logits.dim() == 2 else logits.flatten(0, -2), y.flatten())
        except IndexError:
            raise ValueError(
                f"Labels run from {int(y.min())} to {int(y.max())} but the model has only {out.shape[-1]} outputs "
                f"(classes 0 to {out.shape[-1] - 1}): build it with more outputs, or renumber the labels from 0."
            ) from None

    def score(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """1 where the most likely allowed class is the label, else 0; the share of right tokens for token labels."""
        if y.shape != out.shape[:-1]:
            raise ValueError(_shapes(out, y))
        hit = self.logits(out, allowed).argmax(-1) == y
        if y.dim() == 1:
            return hit.float()
        counted = y != -100
        return (hit & counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    def weight(self, y: Tensor) -> int:
        """Examples, or tokens that are not ignored."""
        return len(y) if y.dim() == 1 else int((y != -100).sum())

    def labels(self, y: Tensor) -> Tensor:
        """Class numbers as int64."""
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, got {y.dtype}: use y.long(), or a likelihood that fits such targets, "
                "Gaussian() for regression or Bernoulli() for several yes/no labels."
            )
        return y.long()

    def outputs(self, y: Tensor) -> int:
        """The highest class number plus one."""
        return int(y.max()) + 1


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real-valued targets with known noise: half the squared error over the noise variance.

        -log p(y | out) = ‖y - out‖² / (2 variance) + constant

    Args:
        variance: of the noise of each target.

    >>> Gaussian().loss(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(1.5000)
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.variance < float("inf"):
            raise ValueError(f"Gaussian.variance must be a finite number above 0, got {self.variance}.")

    @property
    def score_name(self) -> str:
        """A score of 0 is perfect."""
        return "minus squared error"

    def loss(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Half the squared error summed over outputs, over the variance, averaged over examples."""
        return self._squares(out, y).sum() / (2 * self.variance * len(out))

    def score(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Minus the squared error, averaged over outputs."""
        return -self._squares(out, y).flatten(1).mean(1)

    def _squares(self, out: Tensor, y: Tensor) -> Tensor:
        if out.shape != y.shape:
            raise ValueError(
                f"The model gives outputs of shape {tuple(out.shape)} for targets of shape {tuple(y.shape)}."
            )
        return (out - y) ** 2

    def labels(self, y: Tensor) -> Tensor:
        """Targets as floating point, one row per example."""
        y = y if y.is_floating_point() else y.to(torch.get_default_dtype())
        return y[:, None] if y.dim() == 1 else y

    def outputs(self, y: Tensor) -> int:
        """One per target."""
        return y.shape[1]


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
        return (each if allowed is None else each * allowed).sum() / len(out)

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


def _shapes(out: Tensor, y: Tensor) -> str:
    hint = "use y.squeeze(1)" if y.shape == (*out.shape[:-1], 1) else "give one class number per row of outputs"
    return f"The model gives outputs of shape {tuple(out.shape)} for labels of shape {tuple(y.shape)}: {hint}."


def _per_token(allowed: Tensor, out: Tensor) -> Tensor:
    return allowed if out.dim() == 2 else allowed.reshape(len(allowed), *[1] * (out.dim() - 2), -1)
