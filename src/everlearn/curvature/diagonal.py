"""The diagonal quadratic form: one number per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everlearn.params import Params, grown, is_sharded, on_shares, squared_size


@dataclass(eq=False, repr=False)
class Diagonal:
    """δᵀ F δ = Σᵢ Fᵢ ``|δᵢ|²``, a real number per parameter.

    Args:
        values: by parameter name.

    >>> F = Diagonal({"w": torch.tensor([1.0, 3.0])})
    >>> F.quad({"w": torch.tensor([2.0, 1.0])})
    tensor(7.)
    >>> (2 * F + F).values["w"], F.trace()
    (tensor([3., 9.]), 4.0)
    """

    values: Params = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Diagonal({sizes(self.values)})"

    @property
    def names(self) -> set[str]:
        """The parameters it knows."""
        return set(self.values)

    def times(self, vector: Params) -> Params:
        """F v, as far as both know a parameter."""
        known = [n for n in vector if n in self.values]
        if not known:
            return {}
        v = [vector[n] for n in known]
        product = torch._foreach_mul([on(self.values[n], v[i]) for i, n in enumerate(known)], v)
        return dict(zip(known, product, strict=True))

    def quad(self, delta: Params) -> Tensor:
        """δᵀ F δ over the parameters both know."""
        parts = [(self.values[n] * squared_size(d)).sum() for n, d in delta.items() if n in self.values]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def solve(self, vector: Params, damping: float = 0.0) -> Params:
        """(F + damping)⁻¹ v."""
        return finite({n: v / (self.values[n] + damping) for n, v in vector.items()}, damping)

    def diagonal(self) -> Params:
        """Itself, as plain tensors."""
        return dict(self.values)

    def trace(self) -> float:
        """Σᵢ Fᵢ."""
        return float(sum(v.sum().item() for v in self.values.values()))

    def weighted(self, weights: Mapping[str, float]) -> Diagonal:
        """√W F √W with a weight per parameter; parameters without one are left out."""
        return Diagonal({n: v * weights[n] for n, v in self.values.items() if n in weights})

    def damped(self, value: float) -> Diagonal:
        """F + value · 1."""
        return Diagonal({n: v + value for n, v in self.values.items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagonal:
        """Kept elsewhere, or in another precision."""
        return Diagonal({n: v.to(device, dtype) for n, v in self.values.items()})

    def halved(self, seed: int) -> Diagonal:
        """In bfloat16, each number up or down at random so that on average it is itself: a sum of many small ones goes on growing."""
        return Diagonal({n: _halved(v, (seed << 20) + i) for i, (n, v) in enumerate(self.values.items())})

    def __add__(self, other: Diagonal) -> Diagonal:
        if not isinstance(other, Diagonal):
            return NotImplemented
        return Diagonal(merged(self.values, other.values, grown_sum))

    def __mul__(self, scale: float) -> Diagonal:
        return Diagonal({n: v * scale for n, v in self.values.items()})

    __rmul__ = __mul__

    def state_dict(self) -> dict[str, Any]:
        """For saving."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        self.values = dict(state)


def finite(solved: Params, damping: float) -> Params:
    """What was solved, or an error that asks for damping."""
    if damping < 0:
        raise ValueError(f"damping must be 0 or more, got {damping}.")
    if not all(v.isfinite().all() for v in solved.values()):
        raise ValueError(f"The form is singular with damping {damping}: use a larger one.")
    return solved


def on(own: Tensor, other: Tensor) -> Tensor:
    """A tensor where the other is."""
    return own if own.device == other.device else own.to(other.device)


def grown_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum; a layer that has grown in between counts as zero where it was not."""
    if a.shape == b.shape:
        return a + b
    shape = [max(pair) for pair in zip(a.shape, b.shape, strict=True)]
    return grown(a, shape) + grown(b, shape)


def sizes(values: Params) -> str:
    """Shapes for people, instead of thousands of numbers."""
    return ", ".join(f"{n} {'×'.join(map(str, v.shape)) or 'scalar'}" for n, v in values.items())


def _halved(value: Tensor, seed: int) -> Tensor:
    """The upper half of the bits, after a number below the lower half's end was added to it: stochastic rounding."""
    if is_sharded(value):
        return on_shares(lambda share: _halved(share, seed), value)
    bits = value.float().view(torch.int32)
    draw = torch.Generator(bits.device).manual_seed(seed)
    noise = torch.randint(2**16, bits.shape, generator=draw, device=bits.device, dtype=torch.int32)
    return noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def merged(a: dict[str, Any], b: dict[str, Any], join: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Both dicts as one; what both have, joined."""
    return {n: join(a[n], b[n]) if n in a and n in b else a.get(n, b.get(n)) for n in {**a, **b}}
