"""Operations that use parameters, and the gradient of each example for their parameters.

An operation y = op(x; weight, bias) computes the parameter gradients of every example from its input x and the gradient
d = ∂L/∂y of its output. ``split_examples`` arranges both with the examples on the first axis, and ``gradient`` turns a
slice of them into the gradients of those examples. Two kinds of gradient have a cheaper form: one *outer product* per
example (a linear layer), and a few nonzero *rows* per example (an embedding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# What an operation needs for its gradients, usually input and output gradient, with the examples on the first axis.
ExampleTensors = tuple[Tensor, ...]


class Layout(NamedTuple):
    """Position of the examples in a tensor.

    Args:
        axis: the axis of the examples.
        example_major: where the axis has several rows per example, whether the rows of an example are adjacent;
            otherwise all first rows come before all second rows.
        is_shared: whether the tensor has no examples but is the same for all of them, such as position ids.
    """

    axis: int
    example_major: bool = True
    is_shared: bool = False

    def move_first(self, tensor: Tensor, num_examples: int) -> Tensor:
        """Move the examples to the first axis and their rows, if there are several, to the second."""
        tensor = tensor.movedim(self.axis, 0)
        if len(tensor) == num_examples:
            return tensor
        if self.example_major:
            return tensor.reshape(num_examples, -1, *tensor.shape[1:])
        return tensor.reshape(-1, num_examples, *tensor.shape[1:]).transpose(0, 1)


@dataclass(eq=False)
class Operation:
    """A use of one or two parameters.

    Args:
        names: parameter names by role, "weight" and "bias".
        x: the input.
        layout: of the examples in input and output, found by the probe.
    """

    names: dict[str, str]
    x: Tensor
    layout: Layout = field(default=Layout(0), kw_only=True)

    def supports_layout(self, layout: Layout) -> bool:
        """Whether gradients per example can be computed with this layout."""
        return layout.axis == 0

    def split_examples(self, d: Tensor, num_examples: int) -> ExampleTensors:
        """Arrange input and output gradient with the examples on the first axis."""
        return self.layout.move_first(self.x, num_examples), self.layout.move_first(d, num_examples)

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Compute the gradients [examples, *parameter shape]; the caller may overwrite them."""
        raise NotImplementedError

    def gradient_blocks(self, role: str, tensors: ExampleTensors, block_size: int) -> Iterator[Tensor]:
        """Yield the gradients of ``block_size`` examples at a time."""
        for block in zip(*(tensor.split(block_size) for tensor in tensors), strict=True):
            yield self.gradient(role, block)

    def block_size(self, shape: Sequence[int], tensors: ExampleTensors) -> int:
        """Number of examples whose gradients of this shape fit the cache."""
        return count_fitting_cache(shape, tensors[-1].element_size())

    def outer_factors(self, role: str, tensors: ExampleTensors) -> tuple[Tensor, Tensor, bool] | None:
        """Return (d, x, transposed) if each example's gradient is d xᵀ, or its transpose; otherwise None."""
        return None

    def nonzero_rows(self, role: str, tensors: ExampleTensors) -> tuple[Tensor, Tensor] | None:
        """Return (row indices, rows), an entry per example and row, if few rows are nonzero; otherwise None."""
        return None

    def signature(self, num_examples: int) -> tuple[tuple[tuple[str, str], ...], int]:
        """Return the parameter names and the number of input values per example."""
        return tuple(self.names.items()), self.x.numel() // num_examples

    # The members below are for Kronecker factors, and only for operations that have them.

    @property
    def has_factors(self) -> bool:
        """Whether the weight's gradient is a sum over positions of outer products d aᵀ."""
        return False

    @property
    def num_features(self) -> int:
        """Length of a."""
        raise NotImplementedError

    def num_positions(self, tensors: ExampleTensors) -> int:
        """Number of outer products per example."""
        raise NotImplementedError

    def input_rows(self, tensors: ExampleTensors) -> Iterator[Tensor]:
        """Yield all a as rows, a block at a time."""
        raise NotImplementedError

    def output_rows(self, tensors: ExampleTensors) -> Tensor:
        """Return all d as rows."""
        raise NotImplementedError


@dataclass(eq=False)
class Linear(Operation):
    """Linear layer y = x Wᵀ + b, or y = x W if the weight is transposed, with any number of positions per example."""

    transposed: bool = False

    def supports_layout(self, layout: Layout) -> bool:
        """Support any axis but the features."""
        return layout.axis < self.x.dim() - 1

    def split_examples(self, d: Tensor, num_examples: int) -> ExampleTensors:
        """Arrange both as [examples, positions, features]."""
        x = self.layout.move_first(self.x, num_examples).reshape(num_examples, -1, self.x.shape[-1])
        return x, self.layout.move_first(d, num_examples).reshape(num_examples, -1, d.shape[-1])

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Compute Σ over positions of d xᵀ."""
        x, d = tensors
        if role == "bias":
            return d.sum(1)
        if self.transposed:
            return torch.bmm(x.mT, d)
        return torch.bmm(d.mT, x)

    def outer_factors(self, role: str, tensors: ExampleTensors) -> tuple[Tensor, Tensor, bool] | None:
        """Return the factors of a weight with a single position."""
        x, d = tensors
        if role != "weight" or x.shape[1] != 1:
            return None
        return d[:, 0], x[:, 0], self.transposed

    @property
    def has_factors(self) -> bool:
        """Exclude transposed weights, which swap inputs and outputs, and complex ones."""
        return "weight" in self.names and not self.transposed and not self.x.is_complex()

    @property
    def num_features(self) -> int:
        """Number of input features."""
        return self.x.shape[-1]

    def num_positions(self, tensors: ExampleTensors) -> int:
        """Number of positions of the input."""
        return tensors[0].shape[1]

    def input_rows(self, tensors: ExampleTensors) -> Iterator[Tensor]:
        """Yield the inputs."""
        yield tensors[0].flatten(0, 1)

    def output_rows(self, tensors: ExampleTensors) -> Tensor:
        """Return the output gradients."""
        return tensors[1].flatten(0, 1)


@dataclass(eq=False)
class Norm(Operation):
    """Normalization followed by weight and bias.

    Args:
        names: parameter names by role.
        x: the input.
        normalize: the same normalization without weight and bias.
        shape: of the parameters.
        per_channel: whether the parameters are per channel (batch and group norm) or over the last axes (layer norm).
    """

    normalize: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    per_channel: bool

    def supports_layout(self, layout: Layout) -> bool:
        """Support any axis that the parameters do not cover."""
        if self.per_channel:
            return layout.axis == 0
        return layout.axis < self.x.dim() - len(self.shape)

    def block_size(self, shape: Sequence[int], tensors: ExampleTensors) -> int:
        """Number of examples whose inputs fit the cache."""
        return count_fitting_cache(tensors[0].shape[1:], tensors[0].element_size())

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Compute Σ over positions of d · x̂ (weight) or d (bias)."""
        x, d = tensors
        num_row_axes = d.dim() - self.x.dim()  # rows of an example, between the examples and the channels
        product = d
        if role == "weight":
            flat_x = x
            if self.per_channel:
                flat_x = x.flatten(0, num_row_axes)
            product = d * self.normalize(flat_x).view_as(x)

        if not self.per_channel:
            return product.reshape(len(d), -1, *self.shape).sum(1)
        channels_second = product.movedim(1 + num_row_axes, 1)
        return channels_second.reshape(*product.shape[:1], *self.shape, -1).sum(-1)


@dataclass(eq=False)
class Embedding(Operation):
    """Lookup of rows in a table.

    Args:
        names: parameter names by role.
        x: the indices.
        num_embeddings: rows of the table.
        padding_idx: the row without a gradient, or None.
        is_constant: whether the indices are independent of the data.
    """

    num_embeddings: int
    padding_idx: int | None
    is_constant: bool

    def split_examples(self, d: Tensor, num_examples: int) -> ExampleTensors:
        """Arrange indices [examples, positions] and gradients [examples, positions, features]."""
        indices = self.layout.move_first(self.x, num_examples).reshape(num_examples, -1)
        d = self.layout.move_first(d, num_examples).reshape(*indices.shape, d.shape[-1])
        if self.padding_idx is not None:
            d = d * (indices != self.padding_idx)[..., None]
        return indices, d

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Compute a dense table per example, mostly zeros."""
        indices, d = tensors
        table = d.new_zeros(len(d), self.num_embeddings, d.shape[-1])
        return table.scatter_add_(1, indices[..., None].expand_as(d), d)

    def nonzero_rows(self, role: str, tensors: ExampleTensors) -> tuple[Tensor, Tensor] | None:
        """Return the rows that each example looked up, summed over its positions."""
        indices, d = tensors
        example_offsets = self.num_embeddings * torch.arange(len(d), device=d.device)[:, None]
        unique_keys, inverse = torch.unique(indices + example_offsets, return_inverse=True)
        row_sums = d.new_zeros(len(unique_keys), d.shape[-1])
        row_sums.index_add_(0, inverse.flatten(), d.flatten(0, 1))
        return unique_keys % self.num_embeddings, row_sums


@dataclass(eq=False)
class Broadcast(Operation):
    """Elementwise arithmetic that broadcasts a parameter over the examples.

    The parameter is replaced by a copy per example, whose gradients are those of the examples.

    Args:
        names: parameter names by role.
        x: the other operand.
        shape: of the parameter.
        arg_index: position of the parameter among the arguments.
    """

    shape: tuple[int, ...]
    arg_index: int

    def copy_per_example(self, parameter: Tensor, num_examples: int) -> Tensor:
        """Copy the parameter for each example, in a shape that broadcasts as before."""
        full_shape = (1,) * (self.x.dim() - len(self.shape)) + self.shape
        return parameter.detach().reshape(full_shape).expand(num_examples, *full_shape[1:]).clone()

    def split_examples(self, d: Tensor, num_examples: int) -> ExampleTensors:
        """Return the gradient of the copies."""
        return (d,)

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Return the gradient of the copies in the parameter's shape."""
        return tensors[0].reshape(-1, *self.shape).clone()


@dataclass(eq=False)
class Expansion(Operation):
    """``parameter.expand(examples, …)``, whose output has a copy for every example."""

    shape: tuple[int, ...]

    def split_examples(self, d: Tensor, num_examples: int) -> ExampleTensors:
        """Return the output's gradient, summed where the parameter is repeated within an example."""
        example_shape = self.shape
        if d.dim() == len(self.shape):  # its first axis, of length 1, became that of the examples
            example_shape = self.shape[1:]
        return (d.sum_to_size(num_examples, *example_shape),)

    def gradient(self, role: str, tensors: ExampleTensors) -> Tensor:
        """Return the gradient of the copies in the parameter's shape."""
        return tensors[0].reshape(-1, *self.shape).clone()


def repeat_per_example(shared: Tensor, indices: Tensor, num_examples: int) -> Tensor:
    """Repeat what all examples share, on a first axis where broadcasting with examples would put it.

    Args:
        shared: the rows looked up by the indices, or the indices themselves.
        indices: [positions] or [1, positions].
        num_examples: how often.
    """
    if indices.dim() > 1 and len(indices) == 1:
        shared = shared[0]
    return shared.expand(num_examples, *shared.shape)


def count_fitting_cache(shape: Sequence[int], element_size: int, cache_bytes: int = 512 * 1024) -> int:
    """Number of tensors of this shape that fit a processor's cache, at least 1."""
    return max(1, cache_bytes // max(1, math.prod(shape) * element_size))
