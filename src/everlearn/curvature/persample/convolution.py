"""Convolutions: the gradient of every example, by whichever of three ways is fastest for its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.curvature.persample.operations import Operation, Pieces, cache_block


@dataclass(eq=False)
class Convolution(Operation):
    """A convolution in one, two or three dimensions, or its transpose."""

    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool
    output_padding: list[int]

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """Σ over places of d times the patch it saw; by torch's own backward pass, example by example, where that is faster."""
        x, d = pieces
        space = self.weight.dim() - 2
        if role == "bias":  # the channels stand before the places
            return d.movedim(-1 - space, 1).flatten(2).sum(2)
        if self._by_patches and x.dim() == 4:
            return torch.bmm(d.flatten(2), self._patches(x).mT).view(-1, *self.weight.shape)
        if len(x) == 1:
            return self._backward(x, d)[None]
        if self._side_by_side(d) and x.dim() == 4:
            return self._backward_side_by_side(x, d)
        return torch.stack([self._backward(one, grad) for one, grad in zip(x.split(1), d.split(1), strict=True)])

    def block(self, shape: Sequence[int], pieces: Pieces) -> int:
        """One where the backward pass goes example by example anyway."""
        if self._by_patches:
            places = pieces[1].shape[2:].numel()
            return cache_block((self.features, places), self.x.element_size(), cache=2**20)
        return 8 if self._side_by_side(pieces[1]) else 1

    @property
    def _by_patches(self) -> bool:
        """Measured: torch's backward pass of a single example is well tuned for 3×3 kernels over several channels only."""
        return self.factorable and (tuple(self.weight.shape[2:]) != (3, 3) or self.weight.shape[1] == 1)

    def _patches(self, x: Tensor) -> Tensor:
        return F.unfold(x, *map(tuple, (self.weight.shape[2:], self.dilation, self.padding, self.stride)))

    def _side_by_side(self, d: Tensor) -> bool:
        """Measured: examples as groups of one convolution pay on middle-sized maps of not too many channels."""
        return self.factorable and self.weight.shape[1] <= 64 and 64 <= d.shape[-2:].numel() <= 256

    def _backward_side_by_side(self, x: Tensor, d: Tensor) -> Tensor:
        n = len(x)
        grad: Tensor = torch.ops.aten.convolution_backward(
            d.reshape(1, -1, *d.shape[2:]), x.reshape(1, -1, *x.shape[2:]), self.weight.repeat(n, 1, 1, 1), None,
            self.stride, self.padding, self.dilation, False, self.output_padding, n, [False, True, False],
        )[1]  # fmt: skip
        return grad.view(n, *self.weight.shape)

    def _backward(self, x: Tensor, d: Tensor) -> Tensor:
        if x.dim() > self.weight.dim():  # rows of one example
            x, d = x[0], d[0]
        grad: Tensor = torch.ops.aten.convolution_backward(
            d, x, self.weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding,
            self.groups, [False, True, False],
        )[1]  # fmt: skip
        return grad

    @property
    def factorable(self) -> bool:
        """In two dimensions, without groups, of real numbers."""
        plain = self.groups == 1 and not self.transposed and not self.weight.is_complex()
        return "weight" in self.names and self.weight.dim() == 4 and plain

    @property
    def features(self) -> int:
        """What one output place sees."""
        return self.weight[0].numel()

    def positions(self, pieces: Pieces) -> int:
        """Output places."""
        return pieces[1].shape[-2:].numel() * (pieces[1].shape[1] if pieces[1].dim() == 5 else 1)

    def input_rows(self, pieces: Pieces) -> Iterator[Tensor]:
        """The patches, of as many examples at a time as fit the cache."""
        places = pieces[1].shape[-2:].numel()
        size = cache_block((self.features, places), self.x.element_size(), cache=2**20)
        for x in self.x.split(size):
            yield self._patches(x).mT.reshape(-1, self.features)

    def output_rows(self, pieces: Pieces) -> Tensor:
        """The output gradients, channels last."""
        return pieces[1].movedim(-3, -1).flatten(0, -2)


def spread(value: Any, dimensions: int) -> list[int]:
    """A size given once for all dimensions, or for each."""
    return [value] * dimensions if isinstance(value, int) else list(value)


def same_padding(dilation: Sequence[int], kernel: Sequence[int]) -> list[int] | None:
    """What ``padding="same"`` means, None where it is not the same on both sides."""
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return None if any(t % 2 for t in total) else [t // 2 for t in total]
