"""Classes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.likelihood.base import Likelihood, random_signs
from everlearn.params import wide


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

    def check_outputs(self, out: Tensor) -> None:
        """Warn of a model that ends in a softmax: a second one is taken of its outputs, which flattens them.

        Loss and Fisher information are then those of another, nearly uniform distribution. After ``LogSoftmax`` a second softmax
        changes nothing.
        """
        if out.shape[-1] < 2 or not out.numel() or not out.is_floating_point():
            return
        tolerance = 1e-4 if out.dtype == wide(out) else 1e-2
        out = out.detach().to(wide(out))
        if (out >= 0).all() and ((out.sum(-1) - 1).abs() < tolerance).all():
            warnings.warn(
                "The model's outputs are probabilities (no row has a negative one and all sum to 1), and Categorical() takes a softmax of "
                "them once more: the loss hardly tells classes apart, and importances come out far too small. Leave out the Softmax at "
                "the end of the model, or put LogSoftmax in its place.",
                UserWarning,
                stacklevel=1,  # one place, so that it is said once, whether the loss or the Fisher information meets it first
            )

    def loss(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Cross-entropy, averaged over examples (and tokens)."""
        logits = self.logits(out, allowed)
        if y.shape != out.shape[:-1]:
            raise ValueError(_shapes(out, y))
        if y.dtype != torch.long:
            y = self.labels(y)
        try:
            return F.cross_entropy(logits if logits.dim() == 2 else logits.flatten(0, -2), y.flatten())
        except IndexError:
            raise ValueError(_out_of_range(out, y)) from None

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
        """Labels, of examples or of tokens, that are not ignored."""
        return int((y != -100).sum())

    def label_count(self, out: Tensor, y: Tensor | None = None) -> int:
        """A label for every row of outputs, or those that are not ignored."""
        return out[..., 0].numel() if y is None else self.weight(y)

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

    def check(self, out: Tensor, y: Tensor) -> None:
        """Refuse labels that do not belong to these outputs."""
        if y.shape != out.shape[:-1]:
            raise ValueError(_shapes(out, y))
        if y.numel() and (((y < 0) & (y != -100)).any() or y.max() >= out.shape[-1]):
            raise ValueError(_out_of_range(out, y))

    def residual(self, out: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The probabilities minus e_y; zero for labels that are ignored (-100)."""
        self.check(out, y)
        p = self.logits(out, allowed).softmax(-1)
        r = p.scatter_add(-1, y.clamp(min=0)[..., None], -torch.ones_like(p[..., :1]))
        return r * (y != -100)[..., None]

    def sample(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """A class each: the first whose cumulated probability reaches a number drawn from (0, 1]."""
        dtype = wide(out)
        reached = self.logits(out, allowed).softmax(-1, dtype=dtype).cumsum(-1)
        drawn = 1 - torch.rand(*out.shape[:-1], 1, generator=generator, dtype=dtype)
        return (reached < drawn.to(out.device) * reached[..., -1:]).sum(-1)

    def predicted(self, out: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The class with the highest output."""
        return self.logits(out, allowed).argmax(-1)

    def factor(self, out: Tensor, allowed: Tensor | None = None) -> Iterator[Tensor]:
        """C - 1 columns for C classes that some example may be given, per token if there are tokens.

        F_out = diag(p) - p pᵀ. With r = √p, j = argmax p and a = r_j / (1 + r_j), for every class k but j:

            s_k = r_k (e_k - (1 - a) p - a e_j)

        It is the C-column factor r_c (e_c - p) after the Householder reflection that sends its null vector r to e_j. No
        nearly equal numbers are subtracted, so it stays accurate for very confident predictions.
        """
        used = torch.arange(out.shape[-1], device=out.device)
        if allowed is not None:
            used = used[: allowed.shape[-1]][allowed.any(0)]
        logits = self.logits(out, allowed)[..., used]
        r = (0.5 * logits.log_softmax(-1)).exp()
        j = r.argmax(-1, keepdim=True)
        a = r.gather(-1, j)
        a = a / (1 + a)
        base = ((a - 1) * r.square()).scatter_add(-1, j, -a)
        for k in range(len(used) - 1):
            column = k + (k >= j).long()  # the classes but j
            s = base.scatter_add(-1, column, torch.ones_like(a)) * r.gather(-1, column)
            full = out.new_zeros(out.shape).index_copy(-1, used, s)
            yield from [full] if out.dim() == 2 else _token_by_token(full)

    def signs(self, out: Tensor, generator: torch.Generator, allowed: Tensor | None = None) -> Tensor:
        """r∘e - p (r·e), with r = √p and e random signs."""
        p = self.logits(out, allowed).softmax(-1)
        signed = p.sqrt() * random_signs(p, generator)
        return signed - p * signed.sum(-1, keepdim=True)

    def counted(self, y: Tensor | None) -> Tensor | None:
        """Labels that are not ignored."""
        return None if y is None else (y != -100)[..., None]


def _token_by_token(s: Tensor) -> Iterator[Tensor]:
    flat = s.flatten(1, -2)
    for token in range(flat.shape[1]):
        one = torch.zeros_like(flat)
        one[:, token] = flat[:, token]
        yield one.view_as(s)


def _shapes(out: Tensor, y: Tensor) -> str:
    hint = "use y.squeeze(1)" if y.shape == (*out.shape[:-1], 1) else "give one class number per row of outputs"
    return f"The model gives outputs of shape {tuple(out.shape)} for labels of shape {tuple(y.shape)}: {hint}."


def _out_of_range(out: Tensor, y: Tensor) -> str:
    counted = y[y != -100]
    low, high, outputs = int(counted.min()), int(counted.max()), out.shape[-1]
    if high < outputs:
        cure = "number the labels from 0, and give -100 to those that are to be ignored"
    else:
        cure = "build it with more outputs, or renumber the labels from 0"
    only = "only " if high >= outputs else ""
    return f"Labels run from {low} to {high} but the model has {only}{outputs} outputs (classes 0 to {outputs - 1}): {cure}."


def _per_token(allowed: Tensor, out: Tensor) -> Tensor:
    return allowed if out.dim() == 2 else allowed.reshape(len(allowed), *[1] * (out.dim() - 2), -1)
