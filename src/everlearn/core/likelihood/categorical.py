"""Likelihood of class labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.core.likelihood.base import IGNORED_LABEL, Likelihood, random_signs
from everlearn.core.parameters import accumulate_dtype


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One class of several: cross-entropy over the allowed classes.

        p(y | outputs) = softmax(outputs)_y,  the softmax taken over the allowed classes only

    Also per token: outputs (examples, tokens, classes) with labels (examples, tokens). The label -100 is ignored.

    >>> Categorical().loss(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor(4.)
    >>> two_of_four = torch.tensor([[False, False, True, True]])
    >>> Categorical().loss(torch.zeros(1, 4), torch.tensor([2]), two_of_four).exp()
    tensor(2.)
    """

    def logits(self, outputs: Tensor, allowed: Tensor | None) -> Tensor:
        """Set the outputs of classes that are not allowed to minus infinity."""
        if allowed is None:
            return outputs
        num_outputs = outputs.shape[-1]
        num_classes = allowed.shape[-1]
        if num_outputs < num_classes:
            raise ValueError(
                f"The model gives {num_outputs} outputs but the stream has {num_classes} classes: build it with "
                f"outputs={num_classes}, or widen it with "
                f"everlearn.surgery.heads.grow_output(model, {num_classes})."
            )

        # The model may have outputs that no task uses yet.
        if num_outputs > num_classes:
            allowed = F.pad(allowed, (0, num_outputs - num_classes))
        return outputs.masked_fill(~_broadcast_over_tokens(allowed, outputs), float("-inf"))

    def check_outputs(self, outputs: Tensor) -> None:
        """Warn if the outputs are probabilities, because the likelihood applies a second softmax to them.

        Loss and Fisher information would be those of a nearly uniform distribution. Outputs of ``LogSoftmax`` are
        fine: a second softmax does not change them.
        """
        if outputs.shape[-1] < 2 or not outputs.numel() or not outputs.is_floating_point():
            return

        dtype = accumulate_dtype(outputs)
        tolerance = 1e-4 if outputs.dtype == dtype else 1e-2
        outputs = outputs.detach().to(dtype)
        if (outputs >= 0).all() and ((outputs.sum(-1) - 1).abs() < tolerance).all():
            # A constant stacklevel: Python shows the warning once, whether the loss or the Fisher information gives it.
            warnings.warn(
                "The model's outputs are probabilities (no row has a negative one and all sum to 1), and Categorical() "
                "applies another softmax to them: the loss hardly distinguishes classes, and importances are far too "
                "small. Remove the Softmax at the end of the model, or replace it by LogSoftmax.",
                UserWarning,
                stacklevel=1,
            )

    def loss(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Cross-entropy, averaged over examples (and tokens)."""
        logits = self.logits(outputs, allowed)
        if y.shape != outputs.shape[:-1]:
            raise ValueError(_shape_message(outputs, y))
        if y.dtype != torch.long:
            y = self.labels(y)

        if logits.dim() != 2:
            logits = logits.flatten(0, -2)
        try:
            return F.cross_entropy(logits, y.flatten())
        except IndexError:
            raise ValueError(_range_message(outputs, y)) from None

    def score(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """1 if the most likely allowed class is the label, else 0; for tokens the fraction of correct ones."""
        if y.shape != outputs.shape[:-1]:
            raise ValueError(_shape_message(outputs, y))
        is_correct = self.logits(outputs, allowed).argmax(-1) == y
        if y.dim() == 1:
            return is_correct.float()

        is_counted = y != IGNORED_LABEL
        num_correct = (is_correct & is_counted).flatten(1).sum(1)
        num_counted = is_counted.flatten(1).sum(1)
        return num_correct / num_counted.clamp(min=1)

    def weight(self, y: Tensor) -> int:
        """Number of labels, of examples or tokens, that are not ignored."""
        return int((y != IGNORED_LABEL).sum())

    def label_count(self, outputs: Tensor, y: Tensor | None = None) -> int:
        """Number of labels that are not ignored; without labels, one for every row of outputs."""
        if y is None:
            return outputs[..., 0].numel()
        return self.weight(y)

    def labels(self, y: Tensor) -> Tensor:
        """Convert class indices to int64."""
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, got {y.dtype}: use y.long(), or a likelihood that fits such targets, "
                "Gaussian() for regression or Bernoulli() for several yes/no labels."
            )
        return y.long()

    def outputs(self, y: Tensor) -> int:
        """Highest class index plus one."""
        return int(y.max()) + 1

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Raise ValueError if labels do not match the outputs in shape or range."""
        if y.shape != outputs.shape[:-1]:
            raise ValueError(_shape_message(outputs, y))
        if y.numel() and (((y < 0) & (y != IGNORED_LABEL)).any() or y.max() >= outputs.shape[-1]):
            raise ValueError(_range_message(outputs, y))

    def residual(self, outputs: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """R = p - e_y; zero for ignored labels (-100)."""
        self.check(outputs, y)
        p = self.logits(outputs, allowed).softmax(-1)
        r = p.scatter_add(-1, y.clamp(min=0)[..., None], -torch.ones_like(p[..., :1]))
        return r * (y != IGNORED_LABEL)[..., None]

    def sample(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw a class each: the first whose cumulative probability reaches a uniform number from (0, 1]."""
        dtype = accumulate_dtype(outputs)
        cumulative = self.logits(outputs, allowed).softmax(-1, dtype=dtype).cumsum(-1)
        threshold = 1 - torch.rand(*outputs.shape[:-1], 1, generator=generator, dtype=dtype)
        return (cumulative < threshold.to(outputs.device) * cumulative[..., -1:]).sum(-1)

    def predicted(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Allowed class with the highest output."""
        return self.logits(outputs, allowed).argmax(-1)

    def factor(self, outputs: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """Yield C - 1 columns, with C the number of classes allowed for any example; for each token, if there are.

        F_out = diag(p) - p pᵀ. With r = √p, j = argmax p and a = r_j / (1 + r_j), for every class k but j:

            s_k = r_k (e_k - (1 - a) p - a e_j)

        This is the C-column factor r_c (e_c - p) after the Householder reflection that maps its null vector r to e_j.
        No nearly equal numbers are subtracted, so it is accurate for very confident predictions.
        """
        used_classes = torch.arange(outputs.shape[-1], device=outputs.device)
        if allowed is not None:
            used_classes = used_classes[: allowed.shape[-1]][allowed.any(0)]

        logits = self.logits(outputs, allowed)[..., used_classes]
        r = (0.5 * logits.log_softmax(-1)).exp()
        j = r.argmax(-1, keepdim=True)
        r_j = r.gather(-1, j)
        a = r_j / (1 + r_j)

        # The part that all columns share: -(1 - a) p - a e_j.
        shared = ((a - 1) * r.square()).scatter_add(-1, j, -a)
        for i in range(len(used_classes) - 1):
            # The i-th class other than j.
            k = i + (i >= j).long()
            s_k = shared.scatter_add(-1, k, torch.ones_like(a)) * r.gather(-1, k)
            column = outputs.new_zeros(outputs.shape).index_copy(-1, used_classes, s_k)
            if outputs.dim() == 2:
                yield column
            else:
                yield from _split_tokens(column)

    def signs(self, outputs: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """Draw s = r∘e - p (r·e), with r = √p and e random signs."""
        p = self.logits(outputs, allowed).softmax(-1)
        signed_r = p.sqrt() * random_signs(p, generator)
        return signed_r - p * signed_r.sum(-1, keepdim=True)

    def counted(self, y: Tensor | None) -> Tensor | None:
        """Mask of the labels that are not ignored."""
        if y is None:
            return None
        return (y != IGNORED_LABEL)[..., None]


def _split_tokens(s: Tensor) -> Iterator[Tensor]:
    """Yield for each token a copy that is zero for all other tokens."""
    flat = s.flatten(1, -2)
    for token in range(flat.shape[1]):
        token_only = torch.zeros_like(flat)
        token_only[:, token] = flat[:, token]
        yield token_only.view_as(s)


def _shape_message(outputs: Tensor, y: Tensor) -> str:
    """Explain that the shapes of outputs and labels do not match."""
    hint = "give one class number per row of outputs"
    if y.shape == (*outputs.shape[:-1], 1):
        hint = "use y.squeeze(1)"
    return f"The model gives outputs of shape {tuple(outputs.shape)} for labels of shape {tuple(y.shape)}: {hint}."


def _range_message(outputs: Tensor, y: Tensor) -> str:
    """Explain that labels are not between 0 and the number of outputs."""
    counted = y[y != IGNORED_LABEL]
    low = int(counted.min())
    high = int(counted.max())
    num_outputs = outputs.shape[-1]

    if high < num_outputs:
        quantity = f"{num_outputs} outputs"
        hint = "number the labels from 0, and give -100 to those that are to be ignored"
    else:
        quantity = f"only {num_outputs} outputs"
        hint = "build it with more outputs, or renumber the labels from 0"
    return f"Labels run from {low} to {high} but the model has {quantity} (classes 0 to {num_outputs - 1}): {hint}."


def _broadcast_over_tokens(allowed: Tensor, outputs: Tensor) -> Tensor:
    """Reshape a mask (examples × classes) so that it broadcasts to outputs per token."""
    if outputs.dim() == 2:
        return allowed
    token_dims = [1] * (outputs.dim() - 2)
    return allowed.reshape(len(allowed), *token_dims, -1)
