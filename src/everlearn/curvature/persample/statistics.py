"""What is kept of the per-example gradients, summed over examples as they arrive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everlearn import distributed
from everlearn.curvature.persample.operations import Operation, Pieces
from everlearn.params import Params, squared_size, wide


class Use(NamedTuple):
    """A parameter's part in an operation, with what arrived there."""

    operation: Operation
    role: str
    pieces: Pieces


class Statistic(Protocol):
    """Takes per-example gradients, a parameter at a time.

    ``counts_uses`` says whether it matters by how many uses of a parameter a gradient came about.
    """

    counts_uses: bool

    def begin_run(self, pairs: dict[str, str | None]) -> None:
        """What arrives now is of one forward pass; ``pairs`` are its weights with Kronecker factors, and the biases with them."""

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
    all: Σₙ f(dₙ xₙᵀ) = f(D)ᵀ f(X). Over several backward passes f(D) is summed first. Of complex gradients |g|² is taken.
    """

    counts_uses = False

    def __init__(self, parameters: Params, squared: bool = True) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=wide(p).to_real()) for name, p in parameters.items()}
        self._squared = squared
        self._f = squared_size if squared else torch.abs
        self._in_place = torch.square_ if squared else torch.abs_
        self._waiting: dict[
            tuple[str, int], tuple[Tensor, Tensor, bool]
        ] = {}  # by name and operation: there are several runs

    def begin_run(self, pairs: dict[str, str | None]) -> None:
        """Nothing to do."""

    def arrive(self, name: str, uses: list[Use]) -> None:
        """By the cheapest way the operation offers."""
        operation, role, pieces = uses[0]
        if len(uses) == 1 and (outer := operation.outer(role, pieces)) is not None:
            d, x, transposed = outer[0].to(wide(outer[0])), *outer[1:]
            key = name, id(operation)
            if key in self._waiting:
                self._waiting[key][0].add_(self._f(d))
            else:
                self._waiting[key] = self._f(d), x, transposed
        elif len(uses) == 1 and (sparse := operation.sparse(role, pieces)) is not None:
            self.sums[name].index_add_(0, sparse[0], self._f(sparse[1].to(wide(sparse[1]))))
        else:
            for gradients in blocks(uses, self.sums[name]):
                self.add(name, gradients)

    def add(self, name: str, gradients: Tensor) -> None:
        """Sum what is given in full."""
        gradients = gradients.to(wide(gradients))
        if gradients.is_complex():
            self.sums[name].add_(self._f(gradients).sum(0))
        elif len(gradients) == 1:
            g = gradients[0]
            self.sums[name].addcmul_(g, g if self._squared else g.sign())
        else:
            self.sums[name].add_(self._in_place(gradients).sum(0))

    def end_backward(self) -> None:
        """Nothing waits for it."""

    def end_chunk(self) -> None:
        """The one product per linear layer that was put off."""
        for (name, _), (d, x, transposed) in self._waiting.items():
            target = self.sums[name].t() if transposed else self.sums[name]
            target.addmm_(d.t(), self._f(x.to(wide(x))).to(d.dtype))
        self._waiting.clear()

    def add_up(self) -> None:
        """Of all processes."""
        distributed.add_up(self.sums.values())


class InFull:
    """All products of two gradients, for models small enough: the gradients as rows while these are fewer than the
    parameters, their sum of products from then on.
    """

    counts_uses = False

    def __init__(self, parameters: Params) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.rows: Tensor | None = None
        self.matrix: Tensor | None = None
        self._parts: dict[str, list[Tensor]] = {}

    def begin_run(self, pairs: dict[str, str | None]) -> None:
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


Key = tuple[str, str | None]  # a weight, and the bias that goes with it


class KroneckerFactors:
    """Σ of a aᵀ over the inputs and Σ of d dᵀ over the output gradients of linear and convolutional layers; squares for
    all other parameters. Positions within an example count as examples of their own ("expand").

        F ≈ G ⊗ A,   A = mean over examples and positions of a aᵀ,   G = (1/N) Σ over examples and positions of d dᵀ

    N is the number of labels. a has a 1 appended where the layer has a bias. A is a mean over the examples that use the layer: to
    those that do not, such as those that go to another expert, it has no input. Each example counts as it does alone, so a
    parameter may have factors by some examples and squares by others.
    """

    counts_uses = True

    def __init__(self, parameters: Params) -> None:
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.users: dict[Key, int] = {}  # examples that use the layer
        self.rest = Elementwise(parameters)
        self.squared: set[str] = set()  # what has squares
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._pairs: dict[str, str | None] = {}
        self._seen: set[int] = set()

    def begin_run(self, pairs: dict[str, str | None]) -> None:
        """Which weights have factors."""
        self._pairs = pairs

    def arrive(self, name: str, uses: list[Use]) -> None:
        """Factors for a weight, which cover its bias; squares for the rest."""
        if name in self._pairs.values():
            return
        if name not in self._pairs:
            self.squared.add(name)
            self.rest.arrive(name, uses)
            return
        key = name, self._pairs[name]
        d = torch.cat([use.operation.output_rows(use.pieces) for use in uses])
        d = d.to(wide(d))
        self.outputs[key] = self.outputs.get(key, 0) + d.t() @ d
        if id(uses[0].operation) not in self._seen:  # the inputs are the same in every backward pass
            self._seen.add(id(uses[0].operation))
            self._add_inputs(key, uses)

    def _add_inputs(self, key: Key, uses: list[Use]) -> None:
        operation, examples = uses[0].operation, len(uses[0].pieces[0])
        features, bias = operation.features, key[1]
        if key not in self.inputs:
            size = features + (bias is not None)
            self.inputs[key] = operation.x.new_zeros(size, size, dtype=wide(operation.x))
        self.users[key] = self.users.get(key, 0) + examples
        total = self.inputs[key]
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
        self.squared.add(name)
        self.rest.add(name, gradients)

    def end_backward(self) -> None:
        """Nothing waits for it."""

    def end_chunk(self) -> None:
        """The next chunk has other inputs."""
        self._seen.clear()
        self.rest.end_chunk()

    def add_up(self) -> None:
        """Of all processes, each of which may have met other layers."""
        sizes = {key: (len(a), len(self.outputs[key])) for key, a in self.inputs.items()}
        users = Counter[Key]()
        for known, met, squared in distributed.every((sizes, self.users, self.squared)):
            users.update(met)
            self.squared |= squared
            for key, (inputs, outputs) in known.items():
                if key not in self.inputs:
                    like = self.rest.sums[key[0]]
                    self.inputs[key] = like.new_zeros(inputs, inputs)
                    self.outputs[key] = like.new_zeros(outputs, outputs)
        self.users = dict(users)
        keys = sorted(self.inputs, key=str)  # in one order everywhere
        distributed.add_up([*(self.inputs[key] for key in keys), *(self.outputs[key] for key in keys)])
        self.rest.add_up()


def blocks(uses: list[Use], like: Tensor | None = None) -> Iterator[Tensor]:
    """The gradients of some examples at a time, summed over uses; without ``like`` those of all examples."""
    examples = len(uses[0].pieces[0])
    size = examples
    if like is not None:
        size = uses[0].operation.block(like.shape, uses[0].pieces)
    for first, *others in zip(*(use.operation.gradients(use.role, use.pieces, size) for use in uses), strict=True):
        yield sum(others, first)
