"""What is kept of the per-example gradients, summed over examples as they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everlearn import distributed
from everlearn.curvature.persample.operations import Operation, Pieces
from everlearn.params import Params, wide


class Use(NamedTuple):
    """A parameter's part in an operation, with what arrived there."""

    operation: Operation
    role: str
    pieces: Pieces


class Statistic(Protocol):
    """Takes per-example gradients, a parameter at a time."""

    def begin_chunk(self, pairs: dict[str, str | None]) -> None:
        """A chunk begins; ``pairs`` are the weights that have Kronecker factors, with the biases that go with them."""

    def arrive(self, name: str, uses: list[Use]) -> None:
        """All uses of a parameter in one backward pass, of all examples of a chunk."""

    def add(self, name: str, gradients: Tensor) -> None:
        """The gradients [examples, *shape] themselves, which may be overwritten."""

    def end_backward(self) -> None:
        """One backward pass of the chunk is over."""

    def end_chunk(self) -> None:
        """All backward passes of the chunk are over."""

    def add_up(self) -> None:
        """All chunks are over: the sums become those of all processes."""


class Elementwise:
    """Σ over examples of f(gradient), element by element, where f is the square or the absolute value.

    Both are multiplicative, f(a b) = f(a) f(b), so a linear layer with one position needs no gradient per example at
    all: Σₙ f(dₙ xₙᵀ) = f(D)ᵀ f(X). Over several backward passes f(D) is summed first.
    """

    def __init__(self, parameters: Params, squared: bool = True) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=wide(p)) for name, p in parameters.items()}
        self._squared = squared
        self._f = torch.square if squared else torch.abs
        self._in_place = torch.square_ if squared else torch.abs_
        self._waiting: dict[str, tuple[Tensor, Tensor, bool]] = {}

    def begin_chunk(self, pairs: dict[str, str | None]) -> None:
        """Nothing to do."""

    def arrive(self, name: str, uses: list[Use]) -> None:
        """By the cheapest way the operation offers."""
        operation, role, pieces = uses[0]
        if len(uses) == 1 and (outer := operation.outer(role, pieces)) is not None:
            d, x, transposed = outer[0].to(wide(outer[0])), *outer[1:]
            if name in self._waiting:
                self._waiting[name][0].add_(self._f(d))
            else:
                self._waiting[name] = self._f(d), x, transposed
        elif len(uses) == 1 and (sparse := operation.sparse(role, pieces)) is not None:
            self.sums[name].index_add_(0, sparse[0], self._f(sparse[1].to(wide(sparse[1]))))
        else:
            for gradients in blocks(uses, self.sums[name]):
                self.add(name, gradients)

    def add(self, name: str, gradients: Tensor) -> None:
        """Sum what is given in full."""
        gradients = gradients.to(wide(gradients))
        if len(gradients) == 1:
            g = gradients[0]
            self.sums[name].addcmul_(g, g if self._squared else g.sign())
        else:
            self.sums[name].add_(self._in_place(gradients).sum(0))

    def end_backward(self) -> None:
        """Nothing waits for it."""

    def end_chunk(self) -> None:
        """The one product per linear layer that was put off."""
        for name, (d, x, transposed) in self._waiting.items():
            target = self.sums[name].t() if transposed else self.sums[name]
            target.addmm_(d.t(), self._f(x.to(d.dtype)))
        self._waiting.clear()

    def add_up(self) -> None:
        """Of all processes."""
        distributed.add_up(self.sums.values())


class InFull:
    """All products of two gradients, for models small enough: the gradients as rows while these are fewer than the
    parameters, their sum of products from then on.
    """

    def __init__(self, parameters: Params) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.rows: Tensor | None = None
        self.matrix: Tensor | None = None
        self._parts: dict[str, list[Tensor]] = {}

    def begin_chunk(self, pairs: dict[str, str | None]) -> None:
        """Nothing to do."""

    def arrive(self, name: str, uses: list[Use]) -> None:
        """All of them at once."""
        self.add(name, torch.cat(list(blocks(uses))))

    def add(self, name: str, gradients: Tensor) -> None:
        """Keep them until the pass is over."""
        self._parts.setdefault(name, []).append(gradients.reshape(len(gradients), -1).to(wide(gradients)))

    def end_backward(self) -> None:
        """One row per example over all parameters, zeros for those that took no part."""
        whole = {name: torch.cat(parts) for name, parts in self._parts.items()}
        if whole:
            like = next(iter(whole.values()))
            parts = [whole.get(n, like.new_zeros(len(like), math.prod(s))) for n, s in self.shapes.items()]
            self._take(torch.cat(parts, 1))
        self._parts.clear()

    def _take(self, rows: Tensor) -> None:
        if self.matrix is None:
            rows = rows if self.rows is None else torch.cat([self.rows, rows])
            enough = len(rows) >= rows.shape[1]
            self.rows, self.matrix = (None, rows.t() @ rows) if enough else (rows, None)
        else:
            self.matrix.addmm_(rows.t(), rows)

    def end_chunk(self) -> None:
        """Nothing waits for it."""

    def add_up(self) -> None:
        """Of all processes, as products, which can be added."""
        if distributed.world() == 1:
            return
        size = sum(math.prod(shape) for shape in self.shapes.values())
        if self.matrix is None:
            rows = torch.zeros(0, size) if self.rows is None else self.rows
            self.rows, self.matrix = None, rows.t() @ rows
        distributed.add_up([self.matrix])


class KroneckerFactors:
    """Σ of a aᵀ over the inputs and Σ of d dᵀ over the output gradients of linear and convolutional layers; squares for
    all other parameters. Positions within an example count as examples of their own ("expand").

        F ≈ G ⊗ A,   A = mean over examples and positions of a aᵀ,   G = (1/N) Σ over examples and positions of d dᵀ

    N is the number of labels. a has a 1 appended where the layer has a bias.
    """

    def __init__(self, parameters: Params) -> None:
        self.inputs: Params = {}
        self.outputs: Params = {}
        self.biases: dict[str, str] = {}
        self.rest = Elementwise(parameters)
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._pairs: dict[str, str | None] = {}
        self._seen: set[str] = set()

    def begin_chunk(self, pairs: dict[str, str | None]) -> None:
        """Which weights have factors."""
        self._pairs = pairs

    def arrive(self, name: str, uses: list[Use]) -> None:
        """Factors for a weight, which cover its bias; squares for the rest."""
        if name in self._pairs.values():
            return
        if name not in self._pairs:
            self.rest.arrive(name, uses)
        else:
            d = torch.cat([use.operation.output_rows(use.pieces) for use in uses])
            d = d.to(wide(d))
            self.outputs[name] = self.outputs.get(name, 0) + d.t() @ d
            if name not in self._seen:  # the inputs are the same in every backward pass
                self._seen.add(name)
                self._add_inputs(name, uses)

    def _add_inputs(self, name: str, uses: list[Use]) -> None:
        operation, examples = uses[0].operation, len(uses[0].pieces[0])
        features, bias = operation.features, self._pairs[name]
        if name not in self.inputs:
            size = features + (bias is not None)
            self.inputs[name] = operation.x.new_zeros(size, size, dtype=wide(operation.x))
            if bias is not None:
                self.biases[name] = bias
        total = self.inputs[name]
        positions = sum(use.operation.positions(use.pieces) for use in uses)
        for use in uses:
            for rows in use.operation.input_rows(use.pieces):
                a = rows.to(total.dtype)
                total[:features, :features].addmm_(a.t(), a, alpha=1 / positions)
                if bias is not None:
                    total[features, :features].add_(a.sum(0), alpha=1 / positions)
        if bias is not None:
            total[:features, features] = total[features, :features]
            total[features, features] += examples

    def add(self, name: str, gradients: Tensor) -> None:
        """Parameters whose uses are not recognised have squares."""
        self.rest.add(name, gradients)

    def end_backward(self) -> None:
        """Nothing waits for it."""

    def end_chunk(self) -> None:
        """The next chunk has other inputs."""
        self._seen.clear()
        self.rest.end_chunk()

    def add_up(self) -> None:
        """Of all processes."""
        distributed.add_up([*self.inputs.values(), *self.outputs.values()])
        self.rest.add_up()


def blocks(uses: list[Use], like: Tensor | None = None) -> Iterator[Tensor]:
    """The gradients of some examples at a time, summed over uses; without ``like`` those of all examples."""
    examples = len(uses[0].pieces[0])
    size = examples
    if like is not None:
        size = uses[0].operation.block(like.shape, uses[0].pieces)
    for first, *others in zip(*(use.operation.gradients(use.role, use.pieces, size) for use in uses), strict=True):
        yield sum(others, first)
