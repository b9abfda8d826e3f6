"""Statistics of per-example gradients, accumulated over examples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everlearn.core.parameters import Params, accumulate_dtype, squared_size
from everlearn.curvature.per_example.operations import ExampleTensors, Operation
from everlearn.runtime import distributed


class Use(NamedTuple):
    """A use of a parameter in a forward pass, with what its gradient is computed from.

    Args:
        operation: that uses the parameter.
        role: of the parameter in it, "weight" or "bias".
        tensors: usually input and output gradient, with the examples on the first axis.
    """

    operation: Operation
    role: str
    tensors: ExampleTensors


class Statistic(Protocol):
    """Accumulator of per-example gradients, one parameter at a time.

    ``counts_uses`` is whether the result depends on how many uses of a parameter a gradient is a sum over.
    """

    counts_uses: bool

    def begin_run(self, kronecker_layers: dict[str, str | None]) -> None:
        """Begin a backward pass of one forward pass; the argument maps its weights with factors to their biases."""

    def add_uses(self, name: str, uses: list[Use]) -> None:
        """Add all uses of a parameter in one backward pass, for all examples of the forward pass."""

    def add(self, name: str, gradients: Tensor) -> None:
        """Add gradients [examples, *shape], which may be overwritten."""

    def end_backward(self) -> None:
        """End a backward pass of the chunk."""

    def end_chunk(self) -> None:
        """End the chunk, after its last backward pass."""

    def all_reduce_(self) -> None:
        """Sum over all processes, after the last chunk."""


class Elementwise:
    """Sum over examples of f(gradient), elementwise, where f is the square or the absolute value.

    Both are multiplicative, f(a b) = f(a) f(b), so a linear layer with one position needs no per-example gradients:
    Σₙ f(dₙ xₙᵀ) = f(D)ᵀ f(X). With several backward passes f(D) is summed first. For complex gradients f is |g|² or
    |g|.

    Args:
        parameters: by name.
        squared: whether f is the square.
    """

    counts_uses = False

    def __init__(self, parameters: Params, squared: bool = True) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=accumulate_dtype(p).to_real()) for name, p in parameters.items()}
        self._squared = squared
        self._f = squared_size if squared else torch.abs
        self._f_in_place = torch.square_ if squared else torch.abs_

        # Sum of f(D), X and whether the weight is transposed, until the chunk ends. The key has the operation as well
        # as the name, because a chunk may have several forward passes.
        self._pending: dict[tuple[str, int], tuple[Tensor, Tensor, bool]] = {}

    def begin_run(self, kronecker_layers: dict[str, str | None]) -> None:
        """Do nothing."""

    def add_uses(self, name: str, uses: list[Use]) -> None:
        """Add the uses of a parameter in the cheapest form that the operation has."""
        operation, role, tensors = uses[0]
        if len(uses) == 1:
            outer_factors = operation.outer_factors(role, tensors)
            if outer_factors is not None:
                self._add_outer(name, operation, *outer_factors)
                return
            nonzero_rows = operation.nonzero_rows(role, tensors)
            if nonzero_rows is not None:
                indices, rows = nonzero_rows
                self.sums[name].index_add_(0, indices, self._f(rows.to(accumulate_dtype(rows))))
                return

        for gradients in iterate_gradients(uses, self.sums[name]):
            self.add(name, gradients)

    def _add_outer(self, name: str, operation: Operation, d: Tensor, x: Tensor, transposed: bool) -> None:
        """Add f(d) to the factors that are multiplied at the end of the chunk."""
        f_d = self._f(d.to(accumulate_dtype(d)))
        key = name, id(operation)
        if key in self._pending:
            self._pending[key][0].add_(f_d)
        else:
            self._pending[key] = f_d, x, transposed

    def add(self, name: str, gradients: Tensor) -> None:
        """Add f(gradients)."""
        gradients = gradients.to(accumulate_dtype(gradients))
        if gradients.is_complex():
            self.sums[name].add_(self._f(gradients).sum(0))
        elif len(gradients) != 1:
            self.sums[name].add_(self._f_in_place(gradients).sum(0))
        elif self._squared:
            self.sums[name].addcmul_(gradients[0], gradients[0])
        else:
            self.sums[name].addcmul_(gradients[0], gradients[0].sign())

    def end_backward(self) -> None:
        """Do nothing."""

    def end_chunk(self) -> None:
        """Compute the pending products f(D)ᵀ f(X)."""
        for (name, _), (f_d, x, transposed) in self._pending.items():
            target = self.sums[name]
            if transposed:
                target = target.t()
            target.addmm_(f_d.t(), self._f(x.to(accumulate_dtype(x))).to(f_d.dtype))
        self._pending.clear()

    def all_reduce_(self) -> None:
        """Sum over all processes."""
        distributed.all_reduce_(self.sums.values())


class TermMagnitudes(Elementwise):
    """Sum over examples of (Σ over positions of |term|)², where a gradient is the sum of the terms.

    A multiple of the rounding unit times its root bounds the error of a gradient. Only the given parameters count.
    """

    def add_uses(self, name: str, uses: list[Use]) -> None:
        """Add the uses of a parameter, with absolute values in place of input and output gradient."""
        if name in self.sums:
            super().add_uses(name, [use._replace(tensors=tuple(t.abs() for t in use.tensors)) for use in uses])


class OuterProducts:
    """Sum over examples of the full outer product g gᵀ, for small models.

    The gradients are stored as rows R while they are fewer than the parameters, then as the matrix RᵀR.
    """

    counts_uses = False

    def __init__(self, parameters: Params) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.rows: Tensor | None = None
        self.matrix: Tensor | None = None
        self._gradient_parts: dict[str, list[Tensor]] = {}

    def begin_run(self, kronecker_layers: dict[str, str | None]) -> None:
        """Do nothing."""

    def add_uses(self, name: str, uses: list[Use]) -> None:
        """Add the uses of a parameter."""
        self.add(name, torch.cat(list(iterate_gradients(uses))))

    def add(self, name: str, gradients: Tensor) -> None:
        """Store gradients until the backward pass ends."""
        flat = gradients.reshape(len(gradients), -1).to(accumulate_dtype(gradients))
        self._gradient_parts.setdefault(name, []).append(flat)

    def end_backward(self) -> None:
        """Join the gradients into a row per example; parameters that were not used are zero."""
        gradients = {name: torch.cat(parts) for name, parts in self._gradient_parts.items()}
        self._gradient_parts.clear()
        if not gradients:
            return

        reference = next(iter(gradients.values()))
        columns = []
        for name, shape in self.shapes.items():
            if name in gradients:
                columns.append(gradients[name])
            else:
                columns.append(reference.new_zeros(len(reference), math.prod(shape)))
        self._add_rows(torch.cat(columns, 1))

    def _add_rows(self, rows: Tensor) -> None:
        """Add rows; switch to the matrix as soon as it is not larger."""
        if self.matrix is not None:
            self.matrix.addmm_(rows.t(), rows)
            return
        if self.rows is not None:
            rows = torch.cat([self.rows, rows])
        if len(rows) >= rows.shape[1]:
            self.rows = None
            self.matrix = rows.t() @ rows
        else:
            self.rows = rows

    def end_chunk(self) -> None:
        """Do nothing."""

    def all_reduce_(self) -> None:
        """Sum over all processes, as matrices, because rows cannot be added."""
        if distributed.world_size() == 1:
            return
        if self.matrix is None:
            rows = self.rows
            if rows is None:
                rows = torch.zeros(0, sum(math.prod(shape) for shape in self.shapes.values()))
            self.rows = None
            self.matrix = rows.t() @ rows
        distributed.all_reduce_([self.matrix])


# A weight and its bias, or None.
LayerKey = tuple[str, str | None]


class KroneckerFactors:
    """Kronecker factors of linear and convolutional layers; squared gradients for all other parameters.

        F ≈ G ⊗ A,   A = mean over examples and positions of a aᵀ,   G = (1/N) Σ over examples and positions of d dᵀ

    a is an input, with a 1 appended if the layer has a bias, d an output gradient, and N the number of labels.
    Positions within an example count as separate examples ("expand").

    A is a mean over the examples that use the layer: it has no input for others, such as those routed to another
    expert. Each example counts as it does when it is run alone, so a parameter may have factors from some examples and
    squares from others.

    Args:
        parameters: by name.
    """

    counts_uses = True

    def __init__(self, parameters: Params) -> None:
        self.inputs: dict[LayerKey, Tensor] = {}
        self.outputs: dict[LayerKey, Tensor] = {}
        self.num_users: dict[LayerKey, int] = {}  # examples that use the layer
        self.rest = Elementwise(parameters)
        self.squared_names: set[str] = set()  # parameters with squares
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._kronecker_layers: dict[str, str | None] = {}
        self._added_operations: set[int] = set()

    def begin_run(self, kronecker_layers: dict[str, str | None]) -> None:
        """Set which weights of the following backward pass have factors."""
        self._kronecker_layers = kronecker_layers

    def add_uses(self, name: str, uses: list[Use]) -> None:
        """Add factors for a weight, which include its bias, and squares for other parameters."""
        if name in self._kronecker_layers.values():
            return
        if name not in self._kronecker_layers:
            self.squared_names.add(name)
            self.rest.add_uses(name, uses)
            return

        key = name, self._kronecker_layers[name]
        d = torch.cat([use.operation.output_rows(use.tensors) for use in uses])
        d = d.to(accumulate_dtype(d))
        self.outputs[key] = self.outputs.get(key, 0) + d.t() @ d

        # The inputs are the same in every backward pass of a chunk.
        operation_id = id(uses[0].operation)
        if operation_id not in self._added_operations:
            self._added_operations.add(operation_id)
            self._add_inputs(key, uses)

    def _add_inputs(self, key: LayerKey, uses: list[Use]) -> None:
        """Add Σ a aᵀ, with a 1 appended to a if the layer has a bias."""
        operation = uses[0].operation
        num_examples = len(uses[0].tensors[0])
        num_features = operation.num_features
        has_bias = key[1] is not None
        if key not in self.inputs:
            size = num_features + has_bias
            self.inputs[key] = operation.x.new_zeros(size, size, dtype=accumulate_dtype(operation.x))
        self.num_users[key] = self.num_users.get(key, 0) + num_examples

        input_sum = self.inputs[key]
        num_positions = sum(use.operation.num_positions(use.tensors) for use in uses)
        for use in uses:
            for rows in use.operation.input_rows(use.tensors):
                a = rows.to(input_sum.dtype)
                input_sum[:num_features, :num_features].addmm_(a.t(), a, alpha=1 / num_positions)
                if has_bias:
                    input_sum[num_features, :num_features].add_(a.sum(0), alpha=1 / num_positions)
        if has_bias:
            input_sum[:num_features, num_features] = input_sum[num_features, :num_features]
            input_sum[num_features, num_features] += num_examples

    def add(self, name: str, gradients: Tensor) -> None:
        """Add squares for a parameter whose uses are not recognized."""
        self.squared_names.add(name)
        self.rest.add(name, gradients)

    def end_backward(self) -> None:
        """Do nothing."""

    def end_chunk(self) -> None:
        """Forget the operations of the chunk; the next one has other inputs."""
        self._added_operations.clear()
        self.rest.end_chunk()

    def all_reduce_(self) -> None:
        """Sum over all processes, each of which may have used other layers."""
        sizes = {key: (len(inputs), len(self.outputs[key])) for key, inputs in self.inputs.items()}
        user_counts = Counter[LayerKey]()
        local_state = sizes, self.num_users, self.squared_names
        for process_sizes, process_users, squared_names in distributed.all_gather_object(local_state):
            user_counts.update(process_users)
            self.squared_names |= squared_names
            for key, (input_size, output_size) in process_sizes.items():
                if key not in self.inputs:
                    reference = self.rest.sums[key[0]]
                    self.inputs[key] = reference.new_zeros(input_size, input_size)
                    self.outputs[key] = reference.new_zeros(output_size, output_size)
        self.num_users = dict(user_counts)

        # Sorted, so that all processes have the same order.
        keys = sorted(self.inputs, key=str)
        distributed.all_reduce_([*(self.inputs[key] for key in keys), *(self.outputs[key] for key in keys)])
        self.rest.all_reduce_()


def iterate_gradients(uses: list[Use], reference: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the gradients of a block of examples at a time, summed over the uses.

    Args:
        uses: of one parameter.
        reference: a tensor of its shape, which determines the block size; without it all examples are one block.
    """
    block_size = len(uses[0].tensors[0])
    if reference is not None:
        block_size = uses[0].operation.block_size(reference.shape, uses[0].tensors)
    blocks_per_use = [use.operation.gradient_blocks(use.role, use.tensors, block_size) for use in uses]
    for first, *further_blocks in zip(*blocks_per_use, strict=True):
        yield sum(further_blocks, first)
