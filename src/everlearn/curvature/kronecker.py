"""Kronecker-factored quadratic form: a pair of small matrices per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from everlearn.core.parameters import Params, grown
from everlearn.curvature.diagonal import Diagonal, check_solution, format_shapes, merge_dicts, to_device_of

SolveMethod = Literal["eigenbasis", "factored"]


class Pair(NamedTuple):
    """Kronecker factors of a layer: F ≈ G ⊗ A in the order of ``weight.flatten()``.

    Args:
        inputs: A, with the bias as its last row and column.
        outputs: G.
    """

    inputs: Tensor
    outputs: Tensor


@dataclass(eq=False, repr=False)
class Kronecker:
    """Kronecker-factored form: δᵀ F δ = Σ over layers of tr(Δᵀ G Δ A).

    Δ is the layer's δ as a matrix [outputs, inputs (+ 1 for the bias)]. A sum of such forms stores a list of pairs per
    layer, because a sum of Kronecker products is not a Kronecker product. Parameters outside linear and convolutional
    layers have a diagonal.

    Args:
        layers: a list of pairs for each weight.
        biases: the name of the bias that belongs to a weight.
        rest: the diagonal of all other parameters.
        shapes: of weights that are not matrices.
    """

    layers: dict[str, list[Pair]] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    rest: Diagonal = field(default_factory=Diagonal)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        parts = []
        for weight, pairs in self.layers.items():
            parts.append(f"{weight} {len(pairs)} × ({len(pairs[0].outputs)}² ⊗ {len(pairs[0].inputs)}²)")
        if self.rest.values:
            parts.append(format_shapes(self.rest.values))
        return f"Kronecker({', '.join(parts)})"

    @property
    def names(self) -> set[str]:
        """Names of the parameters in the form."""
        return {*self.layers, *self.biases.values(), *self.rest.values}

    def times(self, vector: Params) -> Params:
        """Compute F v for the parameters present in both."""
        product = self.rest.times(vector)
        for weight, pairs in self.layers.items():
            if weight not in vector and self.biases.get(weight) not in vector:
                continue
            v = self._to_matrix(weight, vector).to(pairs[0].inputs.dtype)
            terms = [to_device_of(g, v) @ v @ to_device_of(a, v) for a, g in pairs]
            layer_product = self._to_params(weight, torch.stack(terms).sum(0))

            # Added, not assigned: a bias that was frozen for a while is in the layer and in the rest.
            product = merge_dicts(product, layer_product, torch.add)
        return {name: product[name] for name in vector if name in product}

    def quad(self, delta: Params) -> Tensor:
        """Compute δᵀ F δ over the parameters present in both."""
        terms = [(delta[name].conj() * product).real.sum() for name, product in self.times(delta).items()]
        if not terms:
            return torch.zeros(())
        return torch.stack(terms).sum()

    def solve(self, vector: Params, damping: float = 0.0, method: SolveMethod = "eigenbasis") -> Params:
        """Compute (F + damping)⁻¹ v.

        A layer with several pairs, or with a pair and a diagonal, is solved by conjugate gradients.

        Args:
            vector: v, by parameter name.
            damping: added to F.
            method: "eigenbasis" is exact. "factored" damps A and G separately (Martens & Grosse, 2015), which is
                cheaper where factors change often, and approximates the damped matrix.
        """
        if method not in ("eigenbasis", "factored"):
            raise ValueError(f"method: got {method!r}, allowed: 'eigenbasis', 'factored'.")
        only_diagonal = self.rest.names - {*self.layers, *self.biases.values()}
        solution = self.rest.solve({name: v for name, v in vector.items() if name in only_diagonal}, damping)

        for weight, pairs in self.layers.items():
            layer_names = (weight, self.biases.get(weight, ""))
            if not any(name in vector for name in layer_names):
                continue
            v = self._to_matrix(weight, vector)
            layer_diagonal = {name: self.rest.values[name] for name in layer_names if name in self.rest.values}

            if layer_diagonal:
                x = _solve_conjugate_gradients(pairs, v, self._to_matrix(weight, layer_diagonal) + damping)
            elif len(pairs) > 1:
                x = _solve_conjugate_gradients(pairs, v, damping)
            elif method == "factored":
                x = _solve_factored(pairs[0], v, damping)
            else:
                x = _solve_eigenbasis(pairs[0], v, damping)
            solution |= self._to_params(weight, x)

        return check_solution({name: solution[name] for name in vector}, damping)

    def diagonal(self) -> Params:
        """Return the diagonal by parameter name."""
        values = dict(self.rest.values)
        for weight, pairs in self.layers.items():
            terms = [torch.outer(g.diagonal(), a.diagonal()) for a, g in pairs]
            values = merge_dicts(values, self._to_params(weight, torch.stack(terms).sum(0)), torch.add)
        return values

    def trace(self) -> float:
        """Compute the trace, by tr(G ⊗ A) = tr G · tr A."""
        layer_traces = [a.trace() * g.trace() for pairs in self.layers.values() for a, g in pairs]
        return self.rest.trace() + float(sum(layer_traces))

    def weighted(self, weights: Mapping[str, float]) -> Kronecker:
        """Compute √W F √W with a weight per parameter; parameters without a weight become zero."""
        layers = {}
        for weight, pairs in self.layers.items():
            weight_scale = weights.get(weight, 0.0)
            bias_scale = weights.get(self.biases.get(weight, ""), 0.0)
            if not weight_scale and not bias_scale:
                continue

            # √W acts on the inputs' side, where the bias is the last column.
            size = len(pairs[0].inputs)
            root = pairs[0].inputs.new_full((size,), weight_scale**0.5)
            if weight in self.biases:
                root[size - 1 :] = bias_scale**0.5
            layers[weight] = [Pair(root[:, None] * a * root, g) for a, g in pairs]

        biases = {weight: bias for weight, bias in self.biases.items() if weight in layers}
        return Kronecker(layers, biases, self.rest.weighted(weights), self.shapes)

    def damped(self, value: float) -> Kronecker:
        """Compute F + value · I, as another pair per layer."""
        layers = {}
        for weight, pairs in self.layers.items():
            identity_pair = Pair(_eye_like(pairs[0].inputs), value * _eye_like(pairs[0].outputs))
            layers[weight] = [*pairs, identity_pair]
        return Kronecker(layers, self.biases, self.rest.damped(value), self.shapes)

    def compact(self, max_pairs: int) -> Kronecker:
        """Merge the two oldest pairs of each layer until at most ``max_pairs`` remain.

            G₁ ⊗ A₁ + G₂ ⊗ A₂  ≈  (G₁ + G₂) ⊗ (tr G₁ · A₁ + tr G₂ · A₂) / (tr G₁ + tr G₂)

        One factor is summed, the other is a weighted mean. The trace is preserved, and T equal pairs give T times one
        of them; summing both factors would give T² times.
        """
        layers = {weight: _merge_oldest(pairs, max_pairs) for weight, pairs in self.layers.items()}
        return Kronecker(layers, self.biases, self.rest, self.shapes)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kronecker:
        """Move the form to a device or convert it to a dtype."""
        layers = {}
        for weight, pairs in self.layers.items():
            layers[weight] = [Pair(a.to(device, dtype), g.to(device, dtype)) for a, g in pairs]
        return Kronecker(layers, self.biases, self.rest.to(device, dtype), self.shapes)

    def __add__(self, summand: Kronecker) -> Kronecker:
        if not isinstance(summand, Kronecker):
            return NotImplemented
        biases = {**self.biases, **summand.biases}
        shapes = merge_dicts(self.shapes, summand.shapes, lambda a, b: tuple(map(max, a, b)))
        layers = {**self.layers, **summand.layers}

        # A layer that was widened between the two forms takes the larger size.
        for weight in self.layers.keys() & summand.layers.keys():
            input_sizes = [form._num_inputs(weight) for form in (self, summand)]
            num_outputs = max(len(form.layers[weight][0].outputs) for form in (self, summand))
            layers[weight] = [
                _pad_pair(pair, input_size, weight in form.biases, max(input_sizes), weight in biases, num_outputs)
                for form, input_size in zip((self, summand), input_sizes, strict=True)
                for pair in form.layers[weight]
            ]
        return Kronecker(layers, biases, self.rest + summand.rest, shapes)

    def __mul__(self, scale: float) -> Kronecker:
        layers = {weight: [Pair(a, g * scale) for a, g in pairs] for weight, pairs in self.layers.items()}
        return Kronecker(layers, self.biases, self.rest * scale, self.shapes)

    __rmul__ = __mul__

    def average_with(self, update: Kronecker, decay: float) -> Kronecker:
        """Compute the running average of the factors, decay · self + (1 - decay) · update, with one pair per layer.

        A layer may be in only one of the two forms. Its factor A, a mean over the examples that use the layer, is then
        kept. Its factor G, a mean over all examples, counts as zero in the form without it.
        """
        joint = self + update
        layers: dict[str, list[Pair]] = {}
        for weight, pairs in joint.layers.items():
            if weight in self.layers and weight in update.layers:
                old, new = pairs
                inputs = decay * old.inputs + (1 - decay) * new.inputs
                outputs = decay * old.outputs + (1 - decay) * new.outputs
                layers[weight] = [Pair(inputs, outputs)]
            elif weight in self.layers:
                layers[weight] = [Pair(pairs[0].inputs, decay * pairs[0].outputs)]
            else:
                layers[weight] = [Pair(pairs[0].inputs, (1 - decay) * pairs[0].outputs)]

        rest = self.rest * decay + update.rest * (1 - decay)
        return Kronecker(layers, joint.biases, rest, joint.shapes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for saving."""
        return {
            "layers": {weight: [list(pair) for pair in pairs] for weight, pairs in self.layers.items()},
            "biases": dict(self.biases),
            "rest": self.rest.state_dict(),
            "shapes": {weight: list(shape) for weight, shape in self.shapes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self.layers = {weight: [Pair(*pair) for pair in pairs] for weight, pairs in state["layers"].items()}
        self.biases = dict(state["biases"])
        self.rest.load_state_dict(state["rest"])
        self.shapes = {weight: tuple(shape) for weight, shape in state["shapes"].items()}

    def _num_inputs(self, weight: str) -> int:
        """Number of columns of a weight, without the bias."""
        return len(self.layers[weight][0].inputs) - (weight in self.biases)

    def _to_matrix(self, weight: str, values: Params) -> Tensor:
        """Arrange a layer's values as [outputs, inputs (+ 1 for the bias)]; missing ones are zero."""
        num_outputs = len(self.layers[weight][0].outputs)
        if weight in values:
            matrix = values[weight].reshape(num_outputs, -1)
        else:
            matrix = values[self.biases[weight]].new_zeros(num_outputs, self._num_inputs(weight))

        if weight not in self.biases:
            return matrix
        bias = values.get(self.biases[weight])
        if bias is None:
            bias = matrix.new_zeros(num_outputs)
        return torch.cat([matrix, bias[:, None]], 1)

    def _to_params(self, weight: str, matrix: Tensor) -> Params:
        """Split such a matrix into weight and bias."""
        num_inputs = matrix.shape[1] - (weight in self.biases)
        values = matrix[:, :num_inputs]
        if weight in self.shapes:
            values = values.reshape(self.shapes[weight])
        params = {weight: values}
        if weight in self.biases:
            params[self.biases[weight]] = matrix[:, -1]
        return params


def _merge_oldest(pairs: list[Pair], max_pairs: int) -> list[Pair]:
    """Merge the first two pairs until at most ``max_pairs`` remain."""
    while len(pairs) > max_pairs:
        (a1, g1), (a2, g2), *newer = pairs
        trace_sum = (g1.trace() + g2.trace()).clamp(min=torch.finfo(g1.dtype).tiny)
        fraction = g1.trace() / trace_sum
        pairs = [Pair(fraction * a1 + (1 - fraction) * a2, g1 + g2), *newer]
    return pairs


def _pad_pair(
    pair: Pair, num_inputs: int, has_bias: bool, new_num_inputs: int, new_has_bias: bool, num_outputs: int
) -> Pair:
    """Pad a pair with zeros to the size of a widened layer; the bias stays the last row and column of A."""
    size = new_num_inputs + new_has_bias
    if len(pair.inputs) == size and len(pair.outputs) == num_outputs:
        return pair

    positions = list(range(num_inputs))
    if has_bias:
        positions.append(size - 1)
    index = torch.tensor(positions, device=pair.inputs.device)
    inputs = pair.inputs.new_zeros(size, size)
    inputs[index[:, None], index] = pair.inputs
    return Pair(inputs, grown(pair.outputs, (num_outputs, num_outputs)))


def _eye_like(matrix: Tensor) -> Tensor:
    """Return the identity with size, dtype and device of a matrix."""
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _solve_eigenbasis(pair: Pair, v: Tensor, damping: float) -> Tensor:
    """Solve exactly: in the eigenbasis of G ⊗ A the damped form is diagonal."""
    eigenvalues_a, q_a = torch.linalg.eigh(pair.inputs)
    eigenvalues_g, q_g = torch.linalg.eigh(pair.outputs)

    # Rounding can make the eigenvalues of a singular factor slightly negative.
    eigenvalues = torch.outer(eigenvalues_g.clamp(min=0), eigenvalues_a.clamp(min=0)) + damping
    solution: Tensor = q_g @ ((q_g.t() @ v @ q_a) / eigenvalues) @ q_a.t()
    return solution


def _solve_factored(pair: Pair, v: Tensor, damping: float) -> Tensor:
    """Solve with damped factors, (A + π√λ)⁻¹ and (G + √λ/π)⁻¹, where π² = (tr A / dim A) / (tr G / dim G)."""
    a, g = pair
    mean_a = a.trace() / len(a)
    mean_g = (g.trace() / len(g)).clamp(min=1e-30)
    pi = (mean_a / mean_g).clamp(min=1e-30).sqrt()
    root = damping**0.5

    cholesky_g = torch.linalg.cholesky(g + root / pi * _eye_like(g))
    cholesky_a = torch.linalg.cholesky(a + root * pi * _eye_like(a))
    solution: Tensor = torch.cholesky_solve(torch.cholesky_solve(v, cholesky_g).t(), cholesky_a).t()
    return solution


def _solve_conjugate_gradients(pairs: list[Pair], v: Tensor, damping: float | Tensor, max_steps: int = 1000) -> Tensor:
    """Solve (Σₖ Gₖ ⊗ Aₖ + damping) x = v to the precision of the dtype.

    Args:
        pairs: of the layer.
        v: the right-hand side.
        damping: a number, or one per entry.
        max_steps: at most so many iterations.
    """
    x = torch.zeros_like(v)
    residual = v.clone()
    direction = residual.clone()
    squared_norm = residual.square().sum()
    tolerance = squared_norm * torch.finfo(v.dtype).eps ** 2

    for _ in range(max_steps):
        if squared_norm <= tolerance:
            break
        product = damping * direction + torch.stack([g @ direction @ a for a, g in pairs]).sum(0)
        alpha = squared_norm / (direction * product).sum()
        x = x + alpha * direction
        residual = residual - alpha * product

        previous_squared_norm = squared_norm
        squared_norm = residual.square().sum()
        direction = residual + squared_norm / previous_squared_norm * direction
    return x
