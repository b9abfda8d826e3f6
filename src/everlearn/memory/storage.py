"""Storage of a memory's rows: on the CPU, on a device, or in memory-mapped files."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from everlearn.memory.quotas import Integers

MAX_DEVICE_BYTES = 2**28  # size up to which a growing column stays on the device of its first rows


class RowStorage:
    """A fixed number of positions for rows, in one tensor for each tensor that the columns consist of.

    Args:
        capacity: number of positions.
        growing: columns whose rows may become longer in the last dimension.
        device: where the tensors are allocated; by default the CPU, but growing columns of moderate size on the device
            of their first rows, because copying a model's outputs to the CPU would wait for its device.
        folder: allocate them in memory-mapped files in this folder instead.
    """

    def __init__(
        self, capacity: int, growing: tuple[str, ...], device: torch.device | str | None, folder: str | Path | None
    ) -> None:
        self.capacity = capacity
        self.growing = growing
        self.device = device
        self.folder = folder
        self.num_rows = 0

        # A column is a tensor, or a dict or tuple of tensors, which are its leaves.
        self.column_names: list[str] = []
        self.leaf_names: list[str] = []
        self.spec: TreeSpec | None = None
        self.tensors: list[Tensor | None] = []

    def __getitem__(self, name: str) -> Any:
        if not self.num_rows or name not in self.column_names:
            available = "none before the first rows are added"
            if self.num_rows:
                available = ", ".join(self.column_names)
            raise KeyError(f"No column {name!r} in this memory; its columns: {available}.")

        # A column that is a plain tensor, as nearly all are, needs no other column to be rebuilt.
        if name in self.leaf_names:
            tensor = self.tensors[self.leaf_names.index(name)]
            if tensor is not None:
                return tensor[: self.num_rows]
        return self.map_columns(lambda tensor: tensor[: self.num_rows])[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all positions, filled or not."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def map_columns(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Apply a function to every tensor; return the results in the structure of the columns, {} without rows."""
        if self.spec is None or not self.num_rows:
            return {}

        results: list[Tensor | None] = []
        for tensor in self.tensors:
            results.append(None if tensor is None else function(tensor))
        if self._has_plain_columns():
            return dict(zip(self.column_names, results, strict=True))
        return tree_unflatten(results, self.spec)  # type: ignore[no-any-return]

    def select(self, positions: Tensor) -> dict[str, Any]:
        """Copy the rows at these positions; {} if there are none."""
        if not len(positions):
            return {}
        return self.map_columns(lambda tensor: tensor.index_select(0, _move_indices(positions, tensor)))

    def match_columns(self, columns: dict[str, Any]) -> tuple[list[Tensor | None], int]:
        """Check that columns are like those of the first rows, which define names, structure, shapes and dtypes.

        Returns:
            The tensors that the columns consist of, and the number of rows.
        """
        if not self.num_rows:
            self._define_columns(columns)
        leaves = self._flatten(columns)
        count = self._count_rows(leaves)
        if not self.num_rows:
            self.tensors = []
            for name, leaf in zip(self.leaf_names, leaves, strict=True):
                self.tensors.append(None if leaf is None else self._allocate(name, leaf))

        for i, (leaf, tensor) in enumerate(zip(leaves, self.tensors, strict=True)):
            if leaf is None or tensor is None:
                if leaf is not tensor:
                    name = self.leaf_names[i]
                    raise ValueError(f"{name} is None for some rows only: give it for all rows or for none.")
            elif leaf.dtype != tensor.dtype or leaf.shape[1:] != tensor.shape[1:]:
                self.tensors[i] = self._widen(self.leaf_names[i], tensor, leaf)
        return leaves, count

    def write(self, leaves: list[Tensor | None], rows: Integers, positions: Integers) -> None:
        """Copy rows to positions; if a row is refused, nothing is written.

        Args:
            leaves: the tensors of ``match_columns``.
            rows: indices of the rows to copy.
            positions: where each is stored.
        """
        if not len(rows):
            return
        row_indices = torch.from_numpy(rows)
        position_indices = torch.from_numpy(positions)

        writes = []
        for name, tensor, leaf in zip(self.leaf_names, self.tensors, leaves, strict=True):
            if tensor is None or leaf is None:
                continue
            values = leaf.detach().index_select(0, _move_indices(row_indices, leaf)).to(tensor.device)
            _refuse_nan(name, values)
            if values.shape[1:] != tensor.shape[1:]:
                values = F.pad(values, (0, tensor.shape[-1] - values.shape[-1]), value=math.nan)
            writes.append((tensor, values))

        for tensor, values in writes:
            tensor.index_copy_(0, _move_indices(position_indices, tensor), values)
        self.num_rows = max(self.num_rows, int(positions.max()) + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows: a copy, unless they are in a folder."""
        if self.folder is None:
            return self.map_columns(lambda tensor: tensor[: self.num_rows].clone())
        return self.map_columns(lambda tensor: _trim_storage(tensor[: self.num_rows]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the rows of a state to the first positions."""
        if not state:
            return
        leaves, count = self.match_columns(state)
        for tensor, leaf in zip(self.tensors, leaves, strict=True):
            if tensor is not None and leaf is not None:
                tensor[:count] = leaf
        self.num_rows = count

    def _define_columns(self, columns: dict[str, Any]) -> None:
        """Store the names and the structure of the columns."""
        paths, self.spec = tree_flatten_with_path(columns)
        self.column_names = list(columns)

        # keystr writes "['x']['image']": the first key loses its brackets and quotes, as in "x['image']".
        self.leaf_names = [keystr(path[:1])[2:-2] + keystr(path[1:]) for path, _ in paths]

    def _has_plain_columns(self) -> bool:
        """Whether every column is a tensor or None, not a dict or tuple."""
        return self.leaf_names == self.column_names

    def _flatten(self, columns: dict[str, Any]) -> list[Any]:
        """List the leaves of the columns; raises ValueError if names or structure differ from the first rows'."""
        if columns.keys() != set(self.column_names):
            raise ValueError(
                f"Got columns {', '.join(columns) or 'none'}; this memory has {', '.join(self.column_names)}: give the "
                "same ones."
            )
        if self._has_plain_columns():
            return [columns[name] for name in self.column_names]

        leaves, spec = tree_flatten({name: columns[name] for name in self.column_names})
        if spec != self.spec:
            raise ValueError("A column is another dict or tuple than in the first rows: give it in the same structure.")
        return leaves

    def _count_rows(self, leaves: list[Any]) -> int:
        counts = set()
        for name, leaf in zip(self.leaf_names, leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.dim():
                counts.add(len(leaf))
            elif leaf is not None:
                raise TypeError(
                    f"{name} must be a tensor with one entry per row, or from the first rows on a dict or tuple of "
                    f"them; got {leaf!r:.60}."
                )
        if not counts:
            raise ValueError("A row needs a column that is not None: add(x=…, y=…).")
        if len(counts) > 1:
            raise ValueError(f"Columns differ in length: {sorted(counts)}; give one entry per row in each.")
        return counts.pop()

    def _allocate(self, name: str, leaf: Tensor) -> Tensor:
        """Allocate a tensor for all positions of a column.

        Args:
            name: name of the column.
            leaf: rows of it, which define shape and dtype.
        """
        shape = (self.capacity, *leaf.shape[1:])
        size = math.prod(shape) * leaf.dtype.itemsize
        if self.folder is not None:
            return self._allocate_file(Path(self.folder), shape, size, leaf.dtype)

        device = self.device or "cpu"
        if self.device is None and name in self.growing and size <= MAX_DEVICE_BYTES:
            device = leaf.device

        # The system may grant more memory than it has, and kill the process once it is used.
        is_on_cpu = torch.device(device).type == "cpu"
        if is_on_cpu and size > _machine_memory():
            raise ValueError(self._too_large_message(size, device))
        try:
            return torch.empty(shape, dtype=leaf.dtype, device=device)
        except RuntimeError as error:
            raise ValueError(self._too_large_message(size, device)) from error

    def _allocate_file(self, folder: Path, shape: tuple[int, ...], size: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor in a memory-mapped temporary file."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserve the disk space: otherwise a full disk would kill the process at a later write.
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)
            mapped_bytes = np.memmap(file, np.uint8, "r+", shape=(max(size, 1),))
        return torch.from_numpy(mapped_bytes)[:size].view(dtype).view(shape)

    def _too_large_message(self, size: int, device: torch.device | str) -> str:
        return (
            f"A memory of {self.capacity:,} rows of this shape needs {size / 2**30:,.1f} GB on {device}, more "
            "than is available: lower its capacity, or store rows in files with Memory(folder=…)."
        )

    def _widen(self, name: str, tensor: Tensor, leaf: Tensor) -> Tensor:
        """Return a tensor with positions for longer rows, if the column may grow."""
        grows = name in self.growing and leaf.dim() > 1 and leaf.shape[1:-1] == tensor.shape[1:-1]
        if not grows or leaf.dtype != tensor.dtype or not leaf.is_floating_point():
            raise ValueError(
                f"{name} has rows of shape {tuple(leaf.shape[1:])} and {leaf.dtype}, the first rows had "
                f"{tuple(tensor.shape[1:])} and {tensor.dtype}: give all rows the same shape (pad sentences to the "
                "same length). Only floating-point columns in Memory.growing may become longer."
            )
        if leaf.shape[-1] <= tensor.shape[-1]:
            return tensor

        widened = self._allocate(name, leaf)
        widened[: self.num_rows] = math.nan
        widened[: self.num_rows, ..., : tensor.shape[-1]] = tensor[: self.num_rows]
        return widened


def _move_indices(indices: Tensor, tensor: Tensor) -> Tensor:
    """Copy indices to the device of a tensor, without waiting for it."""
    if tensor.device.type == "cpu":
        return indices
    return indices.to(tensor.device, non_blocking=True)


def _refuse_nan(name: str, values: Tensor) -> None:
    """Raise ValueError for rows with NaN entries; rows on an accelerator are not read, which would wait for it."""
    if values.device.type != "cpu" or not values.is_floating_point():
        return
    # A sum without NaN rules out NaN entries, and is faster than a mask.
    if math.isnan(values.sum()) and values.isnan().any():
        raise ValueError(f"{name} has NaN entries: replaying such a row would make every loss NaN; leave it out.")


def _machine_memory() -> float:
    """Return the machine's memory in bytes; infinity if the system does not report it."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def _trim_storage(rows: Tensor) -> Tensor:
    """View rows of a mapped file as a tensor whose storage ends with them: torch saves and copies entire storages."""
    return torch.from_numpy(rows.flatten().view(torch.uint8).numpy()).view(rows.dtype).view(rows.shape)
