"""Convolutions: per-example gradients by the fastest of three algorithms for the given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everlearn.curvature.per_example.operations import ExampleTensors, Operation, count_fitting_cache


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

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Compute Σ over output positions of d times the input patch.

        The sum is a product with the unfolded patches, or a backward pass of torch for one example or for several
        examples as groups.
        """
        x, d = tensors
        num_dims = self.weight.dim() - 2
        if role == "bias":  # the channels come before the spatial axes
            return d.movedim(-1 - num_dims, 1).flatten(2).sum(2)
        if self._prefers_unfold and x.dim() == 4:
            return torch.bmm(d.flatten(2), self._unfold(x).mT).view(-1, *self.weight.shape)
        if len(x) == 1:
            return self._backward_single(x, d)[None]
        if self._prefers_grouped(d) and x.dim() == 4:
            return self._backward_grouped(x, d)

        example_pairs = zip(x.split(1), d.split(1), strict=True)
        return torch.stack([self._backward_single(x_i, d_i) for x_i, d_i in example_pairs])

    def block_size(self, shape: Sequence[int], tensors: ExampleTensors) -> int:
        """Number of examples at a time; 1 where the backward pass takes them one by one anyway."""
        if self._prefers_unfold:
            num_positions = tensors[1].shape[2:].numel()
            return self._patches_fitting_cache(num_positions)
        if self._prefers_grouped(tensors[1]):
            return 8
        return 1

    def _patches_fitting_cache(self, num_positions: int) -> int:
        """Number of examples whose unfolded patches fit the cache."""
        return count_fitting_cache((self.num_features, num_positions), self.x.element_size(), cache_bytes=2**20)

    @property
    def _prefers_unfold(self) -> bool:
        """Whether unfolding is faster, as measured.

        The backward pass of torch for a single example is well tuned only for 3×3 kernels over several channels.
        """
        return self.has_factors and (tuple(self.weight.shape[2:]) != (3, 3) or self.weight.shape[1] == 1)

    def _unfold(self, x: Tensor) -> Tensor:
        """Extract the input patch of every output position: [examples, features, positions]."""
        return F.unfold(x, *map(tuple, (self.weight.shape[2:], self.dilation, self.padding, self.stride)))

    def _prefers_grouped(self, d: Tensor) -> bool:
        """Whether examples as groups of one convolution are faster, as measured: middle-sized maps, few channels."""
        return self.has_factors and self.weight.shape[1] <= 64 and 64 <= d.shape[-2:].numel() <= 256

    def _backward_grouped(self, x: Tensor, d: Tensor) -> Tensor:
        """Compute the gradients of several examples as groups of one convolution."""
        n = len(x)
        grad: Tensor = torch.ops.aten.convolution_backward(
            d.reshape(1, -1, *d.shape[2:]), x.reshape(1, -1, *x.shape[2:]), self.weight.repeat(n, 1, 1, 1), None,
            self.stride, self.padding, self.dilation, False, self.output_padding, n, [False, True, False],
        )[1]  # fmt: skip
        return grad.view(n, *self.weight.shape)

    def _backward_single(self, x: Tensor, d: Tensor) -> Tensor:
        """Compute the gradient of one example with the backward pass of torch."""
        if x.dim() > self.weight.dim():  # several rows of one example
            x = x[0]
            d = d[0]
        grad: Tensor = torch.ops.aten.convolution_backward(
            d, x, self.weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding,
            self.groups, [False, True, False],
        )[1]  # fmt: skip
        return grad

    @property
    def has_factors(self) -> bool:
        """Whether it is a real convolution in two dimensions without groups."""
        is_plain = self.groups == 1 and not self.transposed and not self.weight.is_complex()
        return "weight" in self.names and self.weight.dim() == 4 and is_plain

    @property
    def num_features(self) -> int:
        """Number of values in an input patch."""
        return self.weight[0].numel()

    def num_positions(self, tensors: ExampleTensors) -> int:
        """Number of output positions."""
        d = tensors[1]
        num_positions = d.shape[-2:].numel()
        if d.dim() == 5:  # several rows per example
            num_positions *= d.shape[1]
        return num_positions

    def input_rows(self, tensors: ExampleTensors) -> Iterator[Tensor]:
        """Yield the patches of as many examples at a time as fit the cache."""
        num_positions = tensors[1].shape[-2:].numel()
        for x in self.x.split(self._patches_fitting_cache(num_positions)):
            yield self._unfold(x).mT.reshape(-1, self.num_features)

    def output_rows(self, tensors: ExampleTensors) -> Tensor:
        """Return the output gradients with the channels last."""
        return tensors[1].movedim(-3, -1).flatten(0, -2)


def expand_size(value: Any, num_dims: int) -> list[int]:
    """Return a size per dimension, given one for all or one for each."""
    if isinstance(value, int):
        return [value] * num_dims
    return list(value)


def same_padding(dilation: Sequence[int], kernel_size: Sequence[int]) -> list[int] | None:
    """Return the numbers that ``padding="same"`` stands for, or None if the two sides differ."""
    total = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    if any(amount % 2 for amount in total):
        return None
    return [amount // 2 for amount in total]
