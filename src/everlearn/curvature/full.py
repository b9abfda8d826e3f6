"""Full quadratic form: all pairs of parameters, for small models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everlearn.core.parameters import Params
from everlearn.curvature.diagonal import merge_dicts, to_device_of

Shapes = dict[str, tuple[int, ...]]


@dataclass(eq=False, repr=False)
class Full:
    """Full form over all pairs of parameters: δᵀ F δ with F = RᵀR.

    R has a row per example and output direction. While it has fewer rows than columns, R is stored and everything is
    computed in the space of its rows. Otherwise F itself is stored.

    Args:
        shapes: of the parameters, by name, in the order of the columns.
        rows: R, or None.
        matrix: F, or None.

    >>> F = Full({"w": (2,)}, rows=torch.tensor([[1.0, 2.0]]))
    >>> F.quad({"w": torch.tensor([1.0, 1.0])}), F.trace()
    (tensor(9.), 5.0)
    """

    shapes: Shapes = field(default_factory=dict)
    rows: Tensor | None = None
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.rows
        if rows is not None and len(rows) >= rows.shape[1]:
            self.rows = None
            self.matrix = rows.t() @ rows

    def dense(self) -> Tensor:
        """Return F as a matrix."""
        if self.matrix is not None:
            return self.matrix
        rows = self._require_rows()
        return rows.t() @ rows

    def __repr__(self) -> str:
        if self.rows is not None:
            storage = f"{len(self.rows)} rows"
        elif self.matrix is not None:
            storage = "matrix"
        else:
            storage = ""
        return f"Full({', '.join(f'{name} {shape}' for name, shape in self.shapes.items())}; {storage})"

    @property
    def names(self) -> set[str]:
        """Names of the parameters in the form."""
        return set(self.shapes)

    def times(self, vector: Params) -> Params:
        """Compute F v; parameters missing from v count as zero."""
        v = self._flatten(vector)
        if self.matrix is not None:
            product = to_device_of(self.matrix, v) @ v.to(self.matrix.dtype)
        else:
            rows = to_device_of(self._require_rows(), v)
            product = rows.t() @ (rows @ v.to(rows.dtype))

        named_product = self._unflatten(product)
        return {name: named_product[name] for name in vector if name in named_product}

    def quad(self, delta: Params) -> Tensor:
        """Compute δᵀ F δ; parameters missing from δ count as zero."""
        if not self.shapes:
            return torch.zeros(())
        v = self._flatten(delta)
        if self.matrix is not None:
            return v @ to_device_of(self.matrix, v) @ v
        return (to_device_of(self._require_rows(), v) @ v).square().sum()

    def solve(self, vector: Params, damping: float = 0.0) -> Params:
        """Compute (F + damping)⁻¹ v by Cholesky, in the space of the rows (Woodbury) where that is smaller."""
        v = self._flatten(vector)
        if self.matrix is not None:
            return self._unflatten(_solve_damped(self.matrix, damping, v))
        if damping <= 0:
            raise ValueError(
                "This Fisher information has fewer rows than parameters, so it needs damping > 0 to be solved."
            )

        # Woodbury: (RᵀR + λ)⁻¹ v = (v - Rᵀ (R Rᵀ + λ)⁻¹ R v) / λ
        rows = self._require_rows()
        row_solution = _solve_damped(rows @ rows.t(), damping, rows @ v)
        return self._unflatten((v - rows.t() @ row_solution) / damping)

    def diagonal(self) -> Params:
        """Return the diagonal by parameter name."""
        if self.matrix is not None:
            return self._unflatten(self.matrix.diagonal())
        return self._unflatten(self._require_rows().square().sum(0))

    def trace(self) -> float:
        """Compute the sum of the diagonal."""
        if self.matrix is not None:
            return float(self.matrix.trace())
        return float(self._require_rows().square().sum())

    def weighted(self, weights: Mapping[str, float]) -> Full:
        """Compute √W F √W with a weight per parameter; parameters without a weight become zero."""
        storage = self._storage()
        roots = []
        for name, shape in self.shapes.items():
            size = torch.Size(shape).numel()
            roots.append(storage.new_full((size,), weights.get(name, 0.0) ** 0.5))
        root = torch.cat(roots)

        if self.matrix is not None:
            return Full(self.shapes, None, root[:, None] * self.matrix * root)
        return Full(self.shapes, self._require_rows() * root)

    def damped(self, value: float) -> Full:
        """Compute F + value · I."""
        matrix = self.dense()
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return Full(self.shapes, None, matrix + value * identity)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """Move the form to a device or convert it to a dtype."""
        rows = self.rows
        matrix = self.matrix
        if rows is not None:
            rows = rows.to(device, dtype)
        if matrix is not None:
            matrix = matrix.to(device, dtype)
        return Full(self.shapes, rows, matrix)

    def _with_shapes(self, shapes: Shapes) -> Full:
        """Rearrange the columns for other parameter shapes; new parameters and entries are zero."""
        # Compared as lists: equal dicts may have different orders of columns.
        if list(shapes.items()) == list(self.shapes.items()):
            return self

        # Map every old column to its new position.
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        columns = torch.arange(sum(sizes))
        columns_by_name = dict(zip(shapes, columns.split(sizes), strict=True))
        old_columns = []
        for name, old_shape in self.shapes.items():
            leading_block = tuple(slice(length) for length in old_shape)
            old_columns.append(columns_by_name[name].view(shapes[name])[leading_block].flatten())
        positions = torch.cat(old_columns)

        if self.matrix is not None:
            matrix = self.matrix.new_zeros(len(columns), len(columns))
            matrix[positions[:, None], positions] = self.matrix
            return Full(shapes, None, matrix)
        old_rows = self._require_rows()
        rows = old_rows.new_zeros(len(old_rows), len(columns))
        rows[:, positions] = old_rows
        return Full(shapes, rows)

    def __add__(self, summand: Full) -> Full:
        if not isinstance(summand, Full):
            return NotImplemented
        if not self.shapes:
            return summand
        if not summand.shapes:
            return self

        shapes = merge_dicts(self.shapes, summand.shapes, lambda a, b: tuple(map(max, a, b)))
        first = self._with_shapes(shapes)
        second = summand._with_shapes(shapes)
        if first.matrix is None and second.matrix is None:
            return Full(shapes, torch.cat([first._require_rows(), second._require_rows()]))
        return Full(shapes, None, first.dense() + second.dense())

    def __mul__(self, scale: float) -> Full:
        if self.matrix is not None:
            return Full(self.shapes, None, self.matrix * scale)
        if self.rows is not None:
            return Full(self.shapes, self.rows * scale**0.5)
        return Full(self.shapes)

    __rmul__ = __mul__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for saving."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"shapes": shapes, "rows": self.rows, "matrix": self.matrix}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self.shapes = {name: tuple(shape) for name, shape in state["shapes"].items()}
        self.rows = state["rows"]
        self.matrix = state["matrix"]

    def _require_rows(self) -> Tensor:
        """Return R; raise if the form is empty."""
        if self.rows is None:
            raise ValueError("An empty form has no rows.")
        return self.rows

    def _storage(self) -> Tensor:
        """Return the stored tensor, F or R."""
        if self.matrix is not None:
            return self.matrix
        return self._require_rows()

    def _flatten(self, values: Params) -> Tensor:
        """Concatenate parameters into a vector in the order of the columns; missing ones are zero."""
        storage = self._storage()
        device = next((value.device for value in values.values()), storage.device)
        parts = []
        for name, shape in self.shapes.items():
            if name in values:
                parts.append(values[name].reshape(-1))
            else:
                parts.append(storage.new_zeros(torch.Size(shape).numel(), device=device))
        return torch.cat(parts)

    def _unflatten(self, vector: Tensor) -> Params:
        """Split a vector into parameters by name."""
        parts = vector.split([torch.Size(shape).numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def _solve_damped(matrix: Tensor, damping: float, v: Tensor) -> Tensor:
    """Compute (matrix + damping)⁻¹ v by Cholesky; raise if the damped matrix is singular."""
    identity = torch.eye(len(matrix), dtype=v.dtype, device=v.device)
    factor, error_code = torch.linalg.cholesky_ex(matrix + damping * identity)
    if error_code:
        raise ValueError(f"The Fisher information is singular with damping {damping}: use a larger one.")
    return torch.cholesky_solve(v[:, None], factor)[:, 0]
