"""Where a memory's rows lie: on the CPU, on a device, or mapped from files."""

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


class Columns:
    """Where the rows lie: places for so many, in one tensor for each tensor that the columns are made of."""

    def __init__(
        self, capacity: int, growing: tuple[str, ...], device: torch.device | str | None, folder: str | Path | None
    ) -> None:
        self.capacity, self.growing, self.device, self.folder = capacity, growing, device or "cpu", folder
        self.filled = 0
        self.order: list[str] = []  # of the columns
        self.names: list[str] = []  # of the tensors in them
        self.spec: TreeSpec | None = None
        self.tensors: list[Tensor | None] = []

    def __getitem__(self, name: str) -> Any:
        if not self.filled or name not in self.order:
            known = ", ".join(self.order) if self.filled else "none before rows come"
            raise KeyError(f"No column {name!r} in this memory; there are: {known}.")
        if name in self.names and (tensor := self.tensors[self.names.index(name)]) is not None:
            return tensor[: self.filled]  # nearly always: no need to put all columns together
        return self.tree(lambda tensor: tensor[: self.filled])[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all places, filled or not."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def tree(self, part: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """A part of every tensor, in the structure the columns came in; nothing while there are no rows."""
        if self.spec is None or not self.filled:
            return {}
        parts = [None if tensor is None else part(tensor) for tensor in self.tensors]
        if self.names == self.order:  # nearly always: every column a plain tensor
            return dict(zip(self.order, parts, strict=True))
        return tree_unflatten(parts, self.spec)  # type: ignore[no-any-return]

    def at(self, index: Tensor) -> dict[str, Any]:
        """A copy of the rows at these places, nothing if there are none."""
        return self.tree(lambda tensor: tensor.index_select(0, index.to(tensor.device))) if len(index) else {}

    def fitting(self, columns: dict[str, Any]) -> tuple[list[Tensor | None], int]:
        """The tensors in these columns, which must be like those that came first, and the number of rows."""
        if not self.filled:
            paths, self.spec = tree_flatten_with_path(columns)
            self.names = [keystr(path[:1])[2:-2] + keystr(path[1:]) for path, _ in paths]
            self.order = list(columns)
        if columns.keys() != set(self.order):
            raise ValueError(f"Got columns {', '.join(columns) or 'none'}; rows here have {', '.join(self.order)}.")
        leaves = [columns[name] for name in self.order]
        if self.names != self.order:  # some column is not a plain tensor
            leaves, spec = tree_flatten({name: columns[name] for name in self.order})
            if spec != self.spec:
                raise ValueError("A column is not the dict or tuple it was at first: give it in the same structure.")
        count = self._count(leaves)
        if not self.filled:
            self.tensors = [None if v is None else self._room(tuple(v.shape[1:]), v.dtype) for v in leaves]
        for i, (leaf, tensor) in enumerate(zip(leaves, self.tensors, strict=True)):
            if leaf is None or tensor is None:
                if leaf is not tensor:
                    raise ValueError(f"{self.names[i]} is None for some rows only: keep it for all or for none.")
            elif leaf.dtype != tensor.dtype or leaf.shape[1:] != tensor.shape[1:]:
                self.tensors[i] = self._widened(self.names[i], tensor, leaf)
        return leaves, count

    def write(self, leaves: list[Tensor | None], rows: Integers, places: Integers) -> None:
        """Copy these of the rows to these places; what is refused changes nothing."""
        if not len(rows):
            return
        source, target, new = torch.from_numpy(rows), torch.from_numpy(places), []
        for name, tensor, leaf in zip(self.names, self.tensors, leaves, strict=True):
            if tensor is None or leaf is None:
                continue
            chosen = leaf.detach().index_select(0, source.to(leaf.device)).to(tensor.device)
            if chosen.is_floating_point() and math.isnan(chosen.sum()) and chosen.isnan().any():  # the sum is quicker
                raise ValueError(f"{name} has NaN: a row that is kept would spoil every later step; leave it out.")
            if chosen.shape[1:] != tensor.shape[1:]:
                chosen = F.pad(chosen, (0, tensor.shape[-1] - chosen.shape[-1]), value=math.nan)
            new.append((tensor, chosen))
        for tensor, chosen in new:
            tensor.index_copy_(0, target.to(tensor.device), chosen)
        self.filled = max(self.filled, int(places.max()) + 1)

    def state_dict(self) -> dict[str, Any]:
        """The rows; a copy, if they are not in a folder."""
        return self.tree(lambda tensor: (torch.clone if self.folder is None else _alone)(tensor[: self.filled]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy these rows to the first places."""
        if state:
            leaves, count = self.fitting(state)
            for tensor, leaf in zip(self.tensors, leaves, strict=True):
                if tensor is not None and leaf is not None:
                    tensor[:count] = leaf
            self.filled = count

    def _count(self, leaves: list[Any]) -> int:
        counts = set()
        for name, leaf in zip(self.names, leaves, strict=True):
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

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = (self.capacity, *shape)
        size = math.prod(whole) * dtype.itemsize
        if self.folder is None:
            on_cpu = torch.device(self.device).type == "cpu"
            if on_cpu and size > _machine_memory():  # the system may promise it, and end the process once it is used
                raise ValueError(self._too_large(size))
            try:
                return torch.empty(whole, dtype=dtype, device=self.device)
            except RuntimeError as error:
                raise ValueError(self._too_large(size)) from error
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)  # or a full disk would kill the process at some later write
            mapped = np.memmap(file, np.uint8, "r+", shape=(max(size, 1),))
        return torch.from_numpy(mapped)[:size].view(dtype).view(whole)

    def _too_large(self, size: int) -> str:
        return (
            f"A memory of {self.capacity:,} rows such as these needs {size / 2**30:,.1f} GB on {self.device}, more than there is: "
            "lower its capacity; Memory(folder=…) keeps rows in files."
        )

    def _widened(self, name: str, tensor: Tensor, leaf: Tensor) -> Tensor:
        """Room for longer rows, where they may become longer."""
        grows = name in self.growing and leaf.dim() > 1 and leaf.shape[1:-1] == tensor.shape[1:-1]
        if not grows or leaf.dtype != tensor.dtype or not leaf.is_floating_point():
            raise ValueError(
                f"{name} has rows of shape {tuple(leaf.shape[1:])} and {leaf.dtype}, at first they were "
                f"{tuple(tensor.shape[1:])} and {tensor.dtype}: give all rows one shape (sentences: pad all to one length); only floating columns in "
                "Memory.growing may get longer."
            )
        if leaf.shape[-1] <= tensor.shape[-1]:
            return tensor
        wider = self._room(tuple(leaf.shape[1:]), leaf.dtype)
        wider[: self.filled] = math.nan
        wider[: self.filled, ..., : tensor.shape[-1]] = tensor[: self.filled]
        return wider


def _machine_memory() -> float:
    """Bytes of memory that the machine has, infinity where it does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def _alone(part: Tensor) -> Tensor:
    """A part of a mapped file as a tensor that ends where the part does: torch saves and copies whole storages."""
    return torch.from_numpy(part.flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)
