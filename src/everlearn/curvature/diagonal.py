"""Diagonal quadratic form: one number per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everlearn.core.parameters import Params, grown, is_sharded, on_shares, squared_size


@dataclass(eq=False, repr=False)
class Diagonal:
    """Diagonal form with a real number per parameter: δᵀ F δ = Σᵢ Fᵢ ``|δᵢ|²``.

    Args:
        values: the diagonal of F, by parameter name.

    >>> F = Diagonal({"w": torch.tensor([1.0, 3.0])})
    >>> F.quad({"w": torch.tensor([2.0, 1.0])})
    tensor(7.)
    >>> (2 * F + F).values["w"], F.trace()
    (tensor([3., 9.]), 4.0)
    """

    values: Params = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Diagonal({format_shapes(self.values)})"

    @property
    def names(self) -> set[str]:
        """Names of the parameters in the form."""
        return set(self.values)

    def times(self, vector: Params) -> Params:
        """Compute F v for the parameters present in both."""
        names = [name for name in vector if name in self.values]
        if not names:
            return {}

        entries = [vector[name] for name in names]
        diagonal = [to_device_of(self.values[name], vector[name]) for name in names]
        products = torch._foreach_mul(diagonal, entries)
        return dict(zip(names, products, strict=True))

    def quad(self, delta: Params) -> Tensor:
        """Compute δᵀ F δ over the parameters present in both."""
        terms = [(self.values[name] * squared_size(d)).sum() for name, d in delta.items() if name in self.values]
        if not terms:
            return torch.zeros(())
        return torch.stack(terms).sum()

    def solve(self, vector: Params, damping: float = 0.0) -> Params:
        """Compute (F + damping)⁻¹ v."""
        solution = {name: v / (self.values[name] + damping) for name, v in vector.items()}
        return check_solution(solution, damping)

    def diagonal(self) -> Params:
        """Return the diagonal by parameter name."""
        return dict(self.values)

    def trace(self) -> float:
        """Compute Σᵢ Fᵢ."""
        return float(sum(value.sum().item() for value in self.values.values()))

    def weighted(self, weights: Mapping[str, float]) -> Diagonal:
        """Compute √W F √W with a weight per parameter; parameters without a weight are dropped."""
        return Diagonal({name: value * weights[name] for name, value in self.values.items() if name in weights})

    def damped(self, value: float) -> Diagonal:
        """Compute F + value · I."""
        return Diagonal({name: entries + value for name, entries in self.values.items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagonal:
        """Move the form to a device or convert it to a dtype."""
        return Diagonal({name: value.to(device, dtype) for name, value in self.values.items()})

    def halved(self, seed: int) -> Diagonal:
        """Convert to bfloat16 by stochastic rounding.

        Each number is rounded up or down at random, and its expectation is the number itself. A running sum of many
        small importances therefore keeps growing, where rounding to nearest would stop it.

        Args:
            seed: of the random rounding.
        """
        rounded = {}
        for index, (name, value) in enumerate(self.values.items()):
            rounded[name] = _round_stochastically(value, (seed << 20) + index)
        return Diagonal(rounded)

    def __add__(self, summand: Diagonal) -> Diagonal:
        if not isinstance(summand, Diagonal):
            return NotImplemented
        return Diagonal(merge_dicts(self.values, summand.values, grown_sum))

    def __mul__(self, scale: float) -> Diagonal:
        return Diagonal({name: value * scale for name, value in self.values.items()})

    __rmul__ = __mul__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for saving."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self.values = dict(state)


def check_solution(solution: Params, damping: float) -> Params:
    """Return the solution of a linear system; raise if it is not finite."""
    if damping < 0:
        raise ValueError(f"damping must be 0 or more, got {damping}.")
    if not all(value.isfinite().all() for value in solution.values()):
        raise ValueError(f"The form is singular with damping {damping}: use a larger one.")
    return solution


def to_device_of(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return the tensor on the device of the reference."""
    if tensor.device == reference.device:
        return tensor
    return tensor.to(reference.device)


def grown_sum(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors, each padded with zeros to the larger size along every axis.

    Shapes differ where a layer was widened between two importances.
    """
    if a.shape == b.shape:
        return a + b
    shape = [max(lengths) for lengths in zip(a.shape, b.shape, strict=True)]
    return grown(a, shape) + grown(b, shape)


def format_shapes(values: Params) -> str:
    """Format names and shapes for ``repr``, without the numbers."""
    return ", ".join(f"{name} {'×'.join(map(str, value.shape)) or 'scalar'}" for name, value in values.items())


def _round_stochastically(value: Tensor, seed: int) -> Tensor:
    """Round to bfloat16, up or down with probabilities that keep the expectation.

    bfloat16 is the upper half of a float32. Uniform noise below the lowest kept bit is added before the lower half is
    cut off.
    """
    if is_sharded(value):
        return on_shares(lambda share: _round_stochastically(share, seed), value)

    bits = value.float().view(torch.int32)
    generator = torch.Generator(bits.device).manual_seed(seed)
    noise = torch.randint(2**16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    return noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def merge_dicts(a: dict[str, Any], b: dict[str, Any], combine: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Merge two dicts; values whose key is in both are combined."""
    merged = {**a, **b}
    for name in merged:
        if name in a and name in b:
            merged[name] = combine(a[name], b[name])
    return merged
