"""The full quadratic form: all pairs of parameters, for models small enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everlearn.params import Params


@dataclass(eq=False)
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

    def quad(self, delta: Params) -> Tensor:
        """δᵀ F δ; a parameter that δ leaves out has not moved."""
        if not self.shapes:
            return torch.zeros(())
        v = self._vector(delta)
        return v @ self.matrix @ v if self.matrix is not None else (self._rows() @ v).square().sum()

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

    def __add__(self, other: Full) -> Full:
        if not self.shapes or not other.shapes:
            return self if self.shapes else other
        if self.shapes != other.shapes:
            raise ValueError("Full forms of different parameters cannot be added.")
        if self.matrix is None and other.matrix is None:
            return Full(self.shapes, torch.cat([self._rows(), other._rows()]))
        return Full(self.shapes, None, self.dense() + other.dense())

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
        return torch.cat([
            values[n].reshape(-1) if n in values else like.new_zeros(torch.Size(s).numel()) for n, s in self.shapes.items()
        ])  # fmt: skip

    def _params(self, vector: Tensor) -> Params:
        parts = vector.split([torch.Size(s).numel() for s in self.shapes.values()])
        return {n: part.view(s) for (n, s), part in zip(self.shapes.items(), parts, strict=True)}


def _cholesky_solve(matrix: Tensor, damping: float, v: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix + damping * torch.eye(len(matrix), dtype=v.dtype, device=v.device))
    if failed:
        raise ValueError(f"The Fisher information is singular with damping {damping}: use a larger one.")
    return torch.cholesky_solve(v[:, None], factor)[:, 0]
