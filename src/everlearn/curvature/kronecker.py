"""The Kronecker-factored quadratic form: a pair of small matrices per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from everlearn.curvature.diagonal import Diagonal, finite, merged, on, sizes
from everlearn.params import Params, grown

Damping = Literal["eigenbasis", "factored"]


class Pair(NamedTuple):
    """The factors of one layer: F ≈ G ⊗ A in the order of ``weight.flatten()``, the bias as a last column of A's side."""

    inputs: Tensor  # A
    outputs: Tensor  # G


@dataclass(eq=False, repr=False)
class Kronecker:
    """δᵀ F δ = Σ over layers of tr(Δᵀ G Δ A), with Δ the layer's δ as a matrix [outputs, inputs (+ 1 for the bias)].

    A sum of such forms keeps a list of pairs per layer, because a sum of Kronecker products is not one; parameters outside
    linear and convolutional layers have a diagonal.

    Args:
        layers: a list of pairs for each weight.
        biases: the name of the bias that goes with a weight.
        rest: all other parameters.
        shapes: of weights that are not matrices.
    """

    layers: dict[str, list[Pair]] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    rest: Diagonal = field(default_factory=Diagonal)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        pairs = (f"{w} {len(p)} × ({len(p[0].outputs)}² ⊗ {len(p[0].inputs)}²)" for w, p in self.layers.items())
        return f"Kronecker({', '.join([*pairs, *filter(None, [sizes(self.rest.values)])])})"

    @property
    def names(self) -> set[str]:
        """The parameters it knows."""
        return {*self.layers, *self.biases.values(), *self.rest.values}

    def times(self, vector: Params) -> Params:
        """F v, as far as both know a parameter."""
        product = self.rest.times(vector)
        for weight, pairs in self.layers.items():
            if weight in vector or self.biases.get(weight) in vector:
                v = self._matrix(weight, vector).to(pairs[0].inputs.dtype)
                found = torch.stack([on(g, v) @ v @ on(a, v) for a, g in pairs]).sum(0)
                product = merged(product, self._params(weight, found), torch.add)  # a bias may have been frozen once
        return {n: product[n] for n in vector if n in product}

    def quad(self, delta: Params) -> Tensor:
        """δᵀ F δ over the parameters both know."""
        parts = [(delta[n].conj() * f).real.sum() for n, f in self.times(delta).items()]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def solve(self, vector: Params, damping: float = 0.0, manner: Damping = "eigenbasis") -> Params:
        """(F + damping)⁻¹ v.

        Args:
            vector: by parameter name.
            damping: added to F.
            manner: "eigenbasis" is exact; "factored" damps A and G apart (Martens & Grosse, 2015), which is cheaper where
                factors change often and is another matrix. A sum of several pairs, or of a pair and a diagonal, is solved by
                conjugate gradients.
        """
        if manner not in ("eigenbasis", "factored"):
            raise ValueError(f"manner: got {manner!r}, allowed: 'eigenbasis', 'factored'.")
        alone = self.rest.names - {*self.layers, *self.biases.values()}
        solved = self.rest.solve({n: v for n, v in vector.items() if n in alone}, damping)
        for weight, pairs in self.layers.items():
            if weight not in vector and self.biases.get(weight) not in vector:
                continue
            v = self._matrix(weight, vector)
            own = {n: self.rest.values[n] for n in (weight, self.biases.get(weight, "")) if n in self.rest.values}
            if len(pairs) > 1 or own:
                x = _conjugate_gradients(pairs, v, self._matrix(weight, own) + damping if own else damping)
            else:
                x = _factored(pairs[0], v, damping) if manner == "factored" else _eigenbasis(pairs[0], v, damping)
            solved |= self._params(weight, x)
        return finite({n: solved[n] for n in vector}, damping)

    def diagonal(self) -> Params:
        """The diagonal by name."""
        values = dict(self.rest.values)
        for weight, pairs in self.layers.items():
            d = torch.stack([torch.outer(g.diagonal(), a.diagonal()) for a, g in pairs]).sum(0)
            values = merged(values, self._params(weight, d), torch.add)
        return values

    def trace(self) -> float:
        """tr(A ⊗ G) = tr A · tr G, summed."""
        return self.rest.trace() + float(sum(a.trace() * g.trace() for pairs in self.layers.values() for a, g in pairs))

    def weighted(self, weights: Mapping[str, float]) -> Kronecker:
        """√W F √W with a weight per parameter; parameters without one count nothing."""
        layers = {}
        for weight, pairs in self.layers.items():
            own, bias = weights.get(weight, 0.0), weights.get(self.biases.get(weight, ""), 0.0)
            if own or bias:
                root = pairs[0].inputs.new_full((len(pairs[0].inputs),), own**0.5)
                root[len(root) - (weight in self.biases) :] = bias**0.5
                layers[weight] = [Pair(root[:, None] * a * root, g) for a, g in pairs]
        biases = {w: b for w, b in self.biases.items() if w in layers}
        return Kronecker(layers, biases, self.rest.weighted(weights), self.shapes)

    def damped(self, value: float) -> Kronecker:
        """F + value · 1, as another pair per layer."""
        layers = {w: [*p, Pair(_eye(p[0].inputs), value * _eye(p[0].outputs))] for w, p in self.layers.items()}
        return Kronecker(layers, self.biases, self.rest.damped(value), self.shapes)

    def compact(self, most: int) -> Kronecker:
        """At most so many pairs per layer: the oldest two become one, again and again.

            G₁ ⊗ A₁ + G₂ ⊗ A₂  ≈  (G₁ + G₂) ⊗ (tr G₁ · A₁ + tr G₂ · A₂) / (tr G₁ + tr G₂)

        One factor is summed, the other averaged by weight, so that the trace stays and T equal pairs make T times the one;
        adding both factors would make it T².
        """

        def few(pairs: list[Pair]) -> list[Pair]:
            while len(pairs) > most:
                (a, g), (b, h), *rest = pairs
                share = g.trace() / (g.trace() + h.trace()).clamp(min=torch.finfo(g.dtype).tiny)
                pairs = [Pair(share * a + (1 - share) * b, g + h), *rest]
            return pairs

        return Kronecker({w: few(p) for w, p in self.layers.items()}, self.biases, self.rest, self.shapes)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kronecker:
        """Kept elsewhere, or in another precision."""
        layers = {w: [Pair(a.to(device, dtype), g.to(device, dtype)) for a, g in p] for w, p in self.layers.items()}
        return Kronecker(layers, self.biases, self.rest.to(device, dtype), self.shapes)

    def __add__(self, other: Kronecker) -> Kronecker:
        if not isinstance(other, Kronecker):
            return NotImplemented
        biases = {**self.biases, **other.biases}
        shapes = merged(self.shapes, other.shapes, lambda a, b: tuple(map(max, a, b)))
        layers = {**self.layers, **other.layers}
        for weight in self.layers.keys() & other.layers.keys():
            widths = [len(f.layers[weight][0].inputs) - (weight in f.biases) for f in (self, other)]
            outputs = max(len(f.layers[weight][0].outputs) for f in (self, other))
            layers[weight] = [
                _grown(pair, width, weight in form.biases, max(widths), weight in biases, outputs)
                for form, width in zip((self, other), widths, strict=True)
                for pair in form.layers[weight]
            ]
        return Kronecker(layers, biases, self.rest + other.rest, shapes)

    def __mul__(self, scale: float) -> Kronecker:
        layers = {w: [Pair(a, g * scale) for a, g in pairs] for w, pairs in self.layers.items()}
        return Kronecker(layers, self.biases, self.rest * scale, self.shapes)

    __rmul__ = __mul__

    def mixed(self, other: Kronecker, decay: float) -> Kronecker:
        """The running average of the factors, decay · own + (1 - decay) · other, which stays one pair per layer.

        Of a layer that only one of them has met the inputs' factor, a mean over the examples that met it, stays; the outputs'
        factor, a mean over all, counts as zero in the other.
        """
        both = self + other
        layers: dict[str, list[Pair]] = {}
        for weight, pairs in both.layers.items():
            if weight in self.layers and weight in other.layers:
                own, new = pairs
                layers[weight] = [Pair(*(decay * a + (1 - decay) * b for a, b in zip(own, new, strict=True)))]
            else:
                share = decay if weight in self.layers else 1 - decay
                layers[weight] = [Pair(pairs[0].inputs, share * pairs[0].outputs)]
        rest = self.rest * decay + other.rest * (1 - decay)
        return Kronecker(layers, both.biases, rest, both.shapes)

    def state_dict(self) -> dict[str, Any]:
        """For saving."""
        return {
            "layers": {w: [list(pair) for pair in pairs] for w, pairs in self.layers.items()},
            "biases": dict(self.biases),
            "rest": self.rest.state_dict(),
            "shapes": {w: list(s) for w, s in self.shapes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        self.layers = {w: [Pair(*pair) for pair in pairs] for w, pairs in state["layers"].items()}
        self.biases = dict(state["biases"])
        self.rest.load_state_dict(state["rest"])
        self.shapes = {w: tuple(s) for w, s in state["shapes"].items()}

    def _matrix(self, weight: str, values: Params) -> Tensor:
        """A layer's values as [outputs, inputs], with the bias as the last column; what is not given is zero."""
        inputs, outputs = self.layers[weight][0]
        width = len(inputs) - (weight in self.biases)
        if weight in values:
            d = values[weight].reshape(len(outputs), -1)
        else:
            d = values[self.biases[weight]].new_zeros(len(outputs), width)
        if weight not in self.biases:
            return d
        bias = values.get(self.biases[weight])
        return torch.cat([d, (d.new_zeros(len(d)) if bias is None else bias)[:, None]], 1)

    def _params(self, weight: str, matrix: Tensor) -> Params:
        """The parameters of such a matrix."""
        width = matrix.shape[1] - (weight in self.biases)
        own = matrix[:, :width]
        found = {weight: own.reshape(self.shapes[weight]) if weight in self.shapes else own}
        return found | ({self.biases[weight]: matrix[:, -1]} if weight in self.biases else {})


def _grown(pair: Pair, width: int, biased: bool, new_width: int, new_biased: bool, outputs: int) -> Pair:
    """A pair in the size of a layer that has grown in between, zero where it was not; the bias stays the last of A's rows."""
    size = new_width + new_biased
    if len(pair.inputs) == size and len(pair.outputs) == outputs:
        return pair
    where = torch.tensor([*range(width), *([size - 1] if biased else [])], device=pair.inputs.device)
    inputs = pair.inputs.new_zeros(size, size)
    inputs[where[:, None], where] = pair.inputs
    return Pair(inputs, grown(pair.outputs, (outputs, outputs)))


def _eye(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def _eigenbasis(pair: Pair, v: Tensor, damping: float) -> Tensor:
    """Exact: in the eigenbasis of G ⊗ A the damped form is diagonal."""
    (da, qa), (dg, qg) = torch.linalg.eigh(pair.inputs), torch.linalg.eigh(pair.outputs)
    scale = torch.outer(dg.clamp(min=0), da.clamp(min=0)) + damping
    solved: Tensor = qg @ ((qg.t() @ v @ qa) / scale) @ qa.t()
    return solved


def _factored(pair: Pair, v: Tensor, damping: float) -> Tensor:
    """(A + π√λ)⁻¹ and (G + √λ/π)⁻¹ with π² = (tr A / dim A) / (tr G / dim G)."""
    a, g = pair
    pi = ((a.trace() / len(a)) / (g.trace() / len(g)).clamp(min=1e-30)).clamp(min=1e-30).sqrt()
    root = damping**0.5
    left = torch.linalg.cholesky(g + root / pi * torch.eye(len(g), dtype=g.dtype, device=g.device))
    right = torch.linalg.cholesky(a + root * pi * torch.eye(len(a), dtype=a.dtype, device=a.device))
    solved: Tensor = torch.cholesky_solve(torch.cholesky_solve(v, left).t(), right).t()
    return solved


def _conjugate_gradients(pairs: list[Pair], v: Tensor, damping: float | Tensor, steps: int = 1000) -> Tensor:
    """(Σ G_k ⊗ A_k + damping) x = v, to the precision of the dtype; the damping may be another for each number."""

    def times(x: Tensor) -> Tensor:
        return damping * x + torch.stack([g @ x @ a for a, g in pairs]).sum(0)

    x, r = torch.zeros_like(v), v.clone()
    p, rr = r.clone(), r.square().sum()
    enough = rr * torch.finfo(v.dtype).eps ** 2
    for _ in range(steps):
        if rr <= enough:
            break
        fp = times(p)
        alpha = rr / (p * fp).sum()
        x, r = x + alpha * p, r - alpha * fp
        rr, before = r.square().sum(), rr
        p = r + rr / before * p
    return x
