"""The full quadratic form: all pairs of parameters, for models small enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everlearn.curvature.diagonal import merged, on
from everlearn.params import Params


@dataclass(eq=False, repr=False)
class Full:
    """δᵀ F δ with F = RᵀR, all pairs of parameters.

    R has a row per example and output direction. While it has fewer rows than columns it is kept as it is and everything
    is computed in the space of the rows; otherwise F itself is kept.

    Args:
        shapes: of the parameters, by name, in the order of the columns.
        rows: R, or None.
        matrix: F, or None.

    >>> F = Full({"w": (2,)}, rows=torch.tensor([[1.0, 2.0]]))
    >>> F.quad({"w": torch.tensor([1.0, 1.0])}), F.trace()
    (tensor(9.), 5.0)
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Tensor | None = None
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        if (rows := self.rows) is not None and len(rows) >= rows.shape[1]:
            self.rows, self.matrix = None, rows.t() @ rows

    def dense(self) -> Tensor:
        """F as a matrix."""
        if self.matrix is not None:
            return self.matrix
        return self._rows().t() @ self._rows()

    def __repr__(self) -> str:
        kept = (
            ""
            if self.matrix is None and self.rows is None
            else "matrix"
            if self.rows is None
            else f"{len(self.rows)} rows"
        )
        return f"Full({', '.join(f'{n} {s}' for n, s in self.shapes.items())}; {kept})"

    @property
    def names(self) -> set[str]:
        """The parameters it knows."""
        return set(self.shapes)

    def times(self, vector: Params) -> Params:
        """F v; a parameter that v leaves out is zero in it."""
        v = self._vector(vector)
        if self.matrix is not None:
            return self._params(on(self.matrix, v) @ v.to(self.matrix.dtype), vector)
        rows = on(self._rows(), v)
        v = v.to(rows.dtype)
        return self._params(rows.t() @ (rows @ v), vector)

    def quad(self, delta: Params) -> Tensor:
        """δᵀ F δ; a parameter that δ leaves out has not moved."""
        if not self.shapes:
            return torch.zeros(())
        v = self._vector(delta)
        return v @ on(self.matrix, v) @ v if self.matrix is not None else (on(self._rows(), v) @ v).square().sum()

    def solve(self, vector: Params, damping: float = 0.0) -> Params:
        """(F + damping)⁻¹ v, by Cholesky; in the space of the rows (Woodbury) where that is smaller."""
        v = self._vector(vector)
        if self.matrix is not None:
            return self._params(_cholesky_solve(self.matrix, damping, v))
        if damping <= 0:
            raise ValueError(
                "This Fisher information has fewer rows than parameters, so it needs damping > 0 to be solved."
            )
        rows = self._rows()
        inner = _cholesky_solve(rows @ rows.t(), damping, rows @ v)
        return self._params((v - rows.t() @ inner) / damping)

    def diagonal(self) -> Params:
        """The diagonal by name."""
        squares = self.matrix.diagonal() if self.matrix is not None else self._rows().square().sum(0)
        return self._params(squares)

    def trace(self) -> float:
        """Sum of the diagonal."""
        return float(self.matrix.trace() if self.matrix is not None else self._rows().square().sum())

    def weighted(self, weights: Mapping[str, float]) -> Full:
        """√W F √W with a weight per parameter; parameters without one count nothing."""
        like = self.matrix if self.matrix is not None else self._rows()
        roots = [like.new_full((torch.Size(s).numel(),), weights.get(n, 0.0) ** 0.5) for n, s in self.shapes.items()]
        root = torch.cat(roots)
        if self.matrix is not None:
            return Full(self.shapes, None, root[:, None] * self.matrix * root)
        return Full(self.shapes, self._rows() * root)

    def damped(self, value: float) -> Full:
        """F + value · 1."""
        matrix = self.dense()
        return Full(
            self.shapes, None, matrix + value * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """Kept elsewhere, or in another precision."""
        parts = [None if part is None else part.to(device, dtype) for part in (self.rows, self.matrix)]
        return Full(self.shapes, *parts)

    def _in(self, shapes: dict[str, tuple[int, ...]]) -> Full:
        """The same form with these parameters in this order, more or larger ones too, zero where there was none."""
        if list(shapes.items()) == list(self.shapes.items()):  # equal dicts may have another order of columns
            return self
        numbers = torch.arange(sum(torch.Size(s).numel() for s in shapes.values()))
        places = dict(zip(shapes, numbers.split([torch.Size(s).numel() for s in shapes.values()]), strict=True))
        old = [
            places[n].view(shapes[n])[tuple(slice(length) for length in s)].flatten() for n, s in self.shapes.items()
        ]
        where = torch.cat(old)
        if self.matrix is not None:
            matrix = self.matrix.new_zeros(len(numbers), len(numbers))
            matrix[where[:, None], where] = self.matrix
            return Full(shapes, None, matrix)
        rows = self._rows().new_zeros(len(self._rows()), len(numbers))
        rows[:, where] = self._rows()
        return Full(shapes, rows)

    def __add__(self, other: Full) -> Full:
        if not isinstance(other, Full):
            return NotImplemented
        if not self.shapes or not other.shapes:
            return self if self.shapes else other
        shapes = merged(self.shapes, other.shapes, lambda a, b: tuple(map(max, a, b)))
        one, two = self._in(shapes), other._in(shapes)
        if one.matrix is None and two.matrix is None:
            return Full(shapes, torch.cat([one._rows(), two._rows()]))
        return Full(shapes, None, one.dense() + two.dense())

    def __mul__(self, scale: float) -> Full:
        if self.matrix is not None:
            return Full(self.shapes, None, self.matrix * scale)
        return Full(self.shapes, None if self.rows is None else self.rows * scale**0.5)

    __rmul__ = __mul__

    def state_dict(self) -> dict[str, Any]:
        """For saving."""
        return {"shapes": {n: list(s) for n, s in self.shapes.items()}, "rows": self.rows, "matrix": self.matrix}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        self.shapes = {n: tuple(s) for n, s in state["shapes"].items()}
        self.rows, self.matrix = state["rows"], state["matrix"]

    def _rows(self) -> Tensor:
        if self.rows is None:
            raise ValueError("An empty form has no rows.")
        return self.rows

    def _vector(self, values: Params) -> Tensor:
        like = self.matrix if self.matrix is not None else self._rows()
        where = next((v.device for v in values.values()), like.device)
        return torch.cat([
            values[n].reshape(-1) if n in values else like.new_zeros(torch.Size(s).numel(), device=where) for n, s in self.shapes.items()
        ])  # fmt: skip

    def _params(self, vector: Tensor, only: Params | None = None) -> Params:
        parts = vector.split([torch.Size(s).numel() for s in self.shapes.values()])
        named = {n: part.view(s) for (n, s), part in zip(self.shapes.items(), parts, strict=True)}
        return named if only is None else {n: named[n] for n in only if n in named}


def _cholesky_solve(matrix: Tensor, damping: float, v: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix + damping * torch.eye(len(matrix), dtype=v.dtype, device=v.device))
    if failed:
        raise ValueError(f"The Fisher information is singular with damping {damping}: use a larger one.")
    return torch.cholesky_solve(v[:, None], factor)[:, 0]
