"""Operations that use parameters: what each example contributed to a parameter's gradient.

An operation y = op(x; weight, bias) knows, from its input x and the gradient d = ∂L/∂y that arrives at its output, the
gradient of every example apart. Both come as *pieces* with the examples on the first axis; ``gradient`` turns a slice
of the pieces into the gradients of those examples. Two kinds of gradient are cheaper than that in full: an *outer*
product per example (a linear layer), and a few *rows* per example (an embedding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Pieces = tuple[Tensor, ...]


class Layout(NamedTuple):
    """Where the examples are in a tensor: on which axis and, where that axis holds several rows per example, in which
    order, all rows of an example together (``major``) or all first rows before all second ones. A ``shared`` tensor has no
    examples in it: it is the same for all, as the numbers of places are whose vectors are added to every sentence.
    """

    axis: int
    major: bool = True
    shared: bool = False

    def first(self, tensor: Tensor, examples: int) -> Tensor:
        """The tensor with examples on the first axis and, if there are several, their rows on the second."""
        tensor = tensor.movedim(self.axis, 0)
        if len(tensor) == examples:
            return tensor
        if self.major:
            return tensor.reshape(examples, -1, *tensor.shape[1:])
        return tensor.reshape(-1, examples, *tensor.shape[1:]).transpose(0, 1)


@dataclass(eq=False)
class Operation:
    """One use of one or two parameters.

    Args:
        names: the parameters by role, "weight" and "bias".
        x: the input.
        layout: where the examples are in input and output; the probe finds it.
    """

    names: dict[str, str]
    x: Tensor
    layout: Layout = field(default=Layout(0), kw_only=True)

    def fits(self, layout: Layout) -> bool:
        """Whether the examples are where this operation can take them apart."""
        return layout.axis == 0

    def pieces(self, d: Tensor, examples: int) -> Pieces:
        """Input and output gradient with the examples on the first axis."""
        return self.layout.first(self.x, examples), self.layout.first(d, examples)

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """The gradients [examples, *shape of the parameter] of the examples in these pieces, for the caller to overwrite."""
        raise NotImplementedError

    def gradients(self, role: str, pieces: Pieces, size: int) -> Iterator[Tensor]:
        """The gradients of so many examples at a time."""
        for some in zip(*(piece.split(size) for piece in pieces), strict=True):
            yield self.gradient(role, some)

    def block(self, shape: Sequence[int], pieces: Pieces) -> int:
        """For how many examples gradients of this shape are best formed at once: as many as fit the cache."""
        return cache_block(shape, pieces[-1].element_size())

    def outer(self, role: str, pieces: Pieces) -> tuple[Tensor, Tensor, bool] | None:
        """(d, x, transposed) where each example's gradient is d xᵀ (or its transpose); None where it is not."""
        return None

    def sparse(self, role: str, pieces: Pieces) -> tuple[Tensor, Tensor] | None:
        """(places, values) where an example's gradient is zero but for a few rows, one entry per example and row."""
        return None

    def met(self, examples: int) -> tuple[tuple[tuple[str, str], ...], int]:
        """What an example met: the names, and how many numbers came in."""
        return tuple(self.names.items()), self.x.numel() // examples

    # What Kronecker factors are made of; only for operations that are factorable.

    @property
    def factorable(self) -> bool:
        """Whether the weight's gradient is a sum of products d aᵀ over positions."""
        return False

    @property
    def features(self) -> int:
        """Length of a."""
        raise NotImplementedError

    def positions(self, pieces: Pieces) -> int:
        """Products per example."""
        raise NotImplementedError

    def input_rows(self, pieces: Pieces) -> Iterator[Tensor]:
        """All a, a block of rows at a time."""
        raise NotImplementedError

    def output_rows(self, pieces: Pieces) -> Tensor:
        """All d, a row each."""
        raise NotImplementedError


@dataclass(eq=False)
class Linear(Operation):
    """y = x Wᵀ + b, or y = x W where the weight comes transposed, over any number of positions per example."""

    transposed: bool = False

    def fits(self, layout: Layout) -> bool:
        """Anywhere but on the features."""
        return layout.axis < self.x.dim() - 1

    def pieces(self, d: Tensor, examples: int) -> Pieces:
        """[examples, positions, features] each."""
        x = self.layout.first(self.x, examples).reshape(examples, -1, self.x.shape[-1])
        return x, self.layout.first(d, examples).reshape(examples, -1, d.shape[-1])

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """Σ over positions of d xᵀ."""
        x, d = pieces
        if role == "bias":
            return d.sum(1)
        return torch.bmm(x.mT, d) if self.transposed else torch.bmm(d.mT, x)

    def outer(self, role: str, pieces: Pieces) -> tuple[Tensor, Tensor, bool] | None:
        """With a single position."""
        x, d = pieces
        return (d[:, 0], x[:, 0], self.transposed) if role == "weight" and x.shape[1] == 1 else None

    @property
    def factorable(self) -> bool:
        """Unless transposed, where inputs and outputs would change places, or complex, where a product is no outer product."""
        return "weight" in self.names and not self.transposed and not self.x.is_complex()

    @property
    def features(self) -> int:
        """The input's."""
        return self.x.shape[-1]

    def positions(self, pieces: Pieces) -> int:
        """Those of the input."""
        return pieces[0].shape[1]

    def input_rows(self, pieces: Pieces) -> Iterator[Tensor]:
        """The inputs."""
        yield pieces[0].flatten(0, 1)

    def output_rows(self, pieces: Pieces) -> Tensor:
        """The output gradients."""
        return pieces[1].flatten(0, 1)


@dataclass(eq=False)
class Norm(Operation):
    """A normalisation followed by weight and bias, over the last axes (layer norm) or per channel (the others)."""

    normalise: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    per_channel: bool

    def fits(self, layout: Layout) -> bool:
        """Not on the axes the parameters stand for."""
        return layout.axis == 0 if self.per_channel else layout.axis < self.x.dim() - len(self.shape)

    def block(self, shape: Sequence[int], pieces: Pieces) -> int:
        """As many examples as fit the cache with all their places."""
        return cache_block(pieces[0].shape[1:], pieces[0].element_size())

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """Σ of d · x̂ (weight) or d (bias) over all places a parameter acts on."""
        x, d = pieces
        several = d.dim() - self.x.dim()  # rows per example come between the examples and the channels
        product = d
        if role == "weight":
            product = d * self.normalise(x.flatten(0, several) if self.per_channel else x).view_as(x)
        if not self.per_channel:
            return product.reshape(len(d), -1, *self.shape).sum(1)
        return product.movedim(1 + several, 1).reshape(*product.shape[:1], *self.shape, -1).sum(-1)


@dataclass(eq=False)
class Embedding(Operation):
    """Rows of a table, by number."""

    entries: int
    padding: int | None
    constant: bool  # whether the numbers are the same whatever the data are

    def pieces(self, d: Tensor, examples: int) -> Pieces:
        """Numbers [examples, positions] and gradients [examples, positions, features]; padding has none."""
        numbers = self.layout.first(self.x, examples).reshape(examples, -1)
        d = self.layout.first(d, examples).reshape(*numbers.shape, d.shape[-1])
        return numbers, d if self.padding is None else d * (numbers != self.padding)[..., None]

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """The whole table per example, mostly zeros."""
        numbers, d = pieces
        table = d.new_zeros(len(d), self.entries, d.shape[-1])
        return table.scatter_add_(1, numbers[..., None].expand_as(d), d)

    def sparse(self, role: str, pieces: Pieces) -> tuple[Tensor, Tensor] | None:
        """The rows each example met, each once."""
        numbers, d = pieces
        example = torch.arange(len(d), device=d.device)[:, None]
        met, back = torch.unique(numbers + self.entries * example, return_inverse=True)
        return met % self.entries, d.new_zeros(len(met), d.shape[-1]).index_add_(0, back.flatten(), d.flatten(0, 1))


@dataclass(eq=False)
class Broadcast(Operation):
    """Elementwise arithmetic that repeats a parameter for every example; ``copies`` gives each one of its own."""

    shape: tuple[int, ...]
    place: int  # which argument the parameter is

    def copies(self, parameter: Tensor, examples: int) -> Tensor:
        """The parameter once per example, shaped so that the arithmetic stays the same."""
        full = (1,) * (self.x.dim() - len(self.shape)) + self.shape
        return parameter.detach().reshape(full).expand(examples, *full[1:]).clone()

    def pieces(self, d: Tensor, examples: int) -> Pieces:
        """The gradient of the copies is what is wanted."""
        return (d,)

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """As it arrives."""
        return pieces[0].reshape(-1, *self.shape).clone()


@dataclass(eq=False)
class Expansion(Operation):
    """``parameter.expand(examples, …)``: the output holds a copy for every example."""

    shape: tuple[int, ...]

    def pieces(self, d: Tensor, examples: int) -> Pieces:
        """The output's gradient, summed where the parameter was repeated within an example."""
        own = self.shape if d.dim() > len(self.shape) else self.shape[1:]
        return (d.sum_to_size(examples, *own),)

    def gradient(self, role: str, pieces: Pieces) -> Tensor:
        """As it arrives."""
        return pieces[0].reshape(-1, *self.shape).clone()


def repeated(shared: Tensor, numbers: Tensor, examples: int) -> Tensor:
    """What is the same for all examples, once for each, on a first axis that arithmetic with examples would have given it.

    Args:
        shared: looked up by numbers, or these.
        numbers: [places] or [1, places].
        examples: how many.
    """
    own = shared[0] if numbers.dim() > 1 and len(numbers) == 1 else shared
    return own.expand(examples, *own.shape)


def cache_block(shape: Sequence[int], bytes_each: int, cache: int = 512 * 1024) -> int:
    """How many per-example gradients of this shape fit a processor's cache."""
    return max(1, cache // max(1, math.prod(shape) * bytes_each))
