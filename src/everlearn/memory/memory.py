"""Memory: a bounded number of rows for replay, and the policies that select them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from everlearn.memory.quotas import GroupQuotas, Integers, herding_order
from everlearn.memory.storage import RowStorage
from everlearn.runtime.randomness import generator

Policy = Literal["reservoir", "balanced", "ring", "herding"]
GROUPED_BY: dict[str, tuple[str, ...]] = {"reservoir": (), "balanced": ("y",), "ring": ("t",), "herding": ("y",)}

__all__ = ["Memory", "herding_order"]


@dataclass(eq=False)
class Memory:
    """Replay buffer: at most ``capacity`` rows of named tensors, which are copied when they are added.

    A column is a tensor with one entry per row, a dict or tuple of such tensors, or None. Names, shapes and dtypes are
    those of the first rows. Every call of ``add`` counts its rows as new: an example that is added in every epoch
    counts every time and may be stored more than once. Random draws come from the memory's own generator.

        reservoir   every row seen is stored with equal probability, capacity / seen (Vitter, 1985): row n, counted
                    from 0, draws j from {0 … n} and is stored at position j if j < capacity; the first rows in order
        balanced    equal quotas for all groups; within a group every row seen is stored with equal probability
        ring        equal quotas for all groups; within a group the most recent rows are stored
        herding     equal quotas for all groups; within a group the first rows of ``herding_order`` are stored

    Capacity that a group does not fill is available to the others until it does. The remainder of the division goes to
    groups drawn at random; so does the entire capacity if there are more groups than rows.

    Args:
        capacity: maximum number of rows.
        policy: which rows are stored.
        group_by: the integer column whose values define the groups, or several: ``("t", "y")`` for each task's classes.
            By default ``"t"`` for ring and ``"y"`` for balanced and herding.
        max_per_group: maximum number of rows per group; by default limited by the capacity alone.
        growing: columns whose rows may become longer in the last dimension, as logits do with a growing head. Shorter
            rows are padded with NaN: ``logits.isfinite()`` marks what was stored.
        seed: seed of the random draws.
        device: where rows are stored; by default the CPU, and growing columns of up to 256 MB the device of their
            first rows.
        folder: store rows in memory-mapped files in this folder, for more than fits in RAM. The files have no names
            and are deleted together with the memory; ``state_dict`` saves their content.

    >>> memory = Memory(capacity=3)
    >>> memory.add(x=torch.rand(10, 2), y=torch.arange(10))
    >>> len(memory), memory.num_seen, memory.nbytes
    (3, 10, 48)
    >>> {name: tuple(rows.shape) for name, rows in memory.sample(2).items()}
    {'x': (2, 2), 'y': (2,)}
    """

    capacity: int
    policy: Policy = "reservoir"
    group_by: str | tuple[str, ...] | None = None
    max_per_group: int | None = None
    growing: tuple[str, ...] = ("logits",)
    seed: int = 0
    device: torch.device | str | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        self._check_settings()
        self.num_seen = 0
        self._storage = RowStorage(self.capacity, self.growing, self.device, self.folder)
        self._generator = generator(self.seed, "memory")
        self._quotas = self._make_quotas()

    def _check_settings(self) -> None:
        counts = {"capacity": self.capacity}
        if self.max_per_group is not None:
            counts["max_per_group"] = self.max_per_group
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"Memory.{name}: got {value!r}, allowed: a whole number of rows, 1 or more.")

        if self.policy not in get_args(Policy):
            raise ValueError(f"Memory.policy: got {self.policy!r}, allowed: {', '.join(get_args(Policy))}.")
        if self.policy == "reservoir" and (self.group_by is not None or self.max_per_group is not None):
            raise ValueError(
                "A reservoir has no groups: leave out Memory.group_by and Memory.max_per_group, or choose 'balanced'."
            )
        if self.folder is not None and torch.device(self.device or "cpu").type != "cpu":
            raise ValueError(
                "Memory stores rows on a device or in a folder, not both: got "
                f"device={self.device} and folder={self.folder}; leave one out."
            )

    def _make_quotas(self) -> GroupQuotas | None:
        """Create the quotas of the groups; None for a reservoir, which has no groups."""
        group_columns = GROUPED_BY[self.policy]
        if isinstance(self.group_by, str):
            group_columns = (self.group_by,)
        elif self.group_by is not None:
            group_columns = tuple(self.group_by)
        if not group_columns:
            return None

        max_per_group = self.capacity
        if self.max_per_group is not None:
            max_per_group = min(self.max_per_group, self.capacity)
        try:
            return GroupQuotas(group_columns, self.capacity, max_per_group, self.seed)
        except MemoryError as error:
            raise ValueError(
                f"Memory.capacity: got {self.capacity:,}, more rows than this machine can index: lower it."
            ) from error

    def __len__(self) -> int:
        return self._storage.num_rows

    def __getitem__(self, name: str) -> Any:
        """Return a column without copying it: to compare and count, not to write into."""
        return self._storage[name]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all positions, filled or not; constant from the first rows on unless a column grows."""
        if self._quotas is None:
            return self._storage.nbytes
        return self._storage.nbytes + self._quotas.nbytes

    def add(self, *, features: Tensor | None = None, **columns: Any) -> None:
        """Offer new rows; the policy decides which are stored and which rows they replace.

        Args:
            features: the model's features of each row, for herding; not stored. Give all rows of a group at once: with
                two calls, the first choices of both have precedence over the second choices.
            columns: the rows, by name; always the same names.
        """
        if (features is None) == (self.policy == "herding"):
            raise ValueError("Features are for policy='herding', which needs them: add(features=…, x=…, y=…).")
        leaves, count = self._storage.match_columns(columns)
        if not count:
            return

        if self._quotas is None:
            rows, positions = self._select_reservoir(count)
            self._storage.write(leaves, rows, positions)
        else:
            groups, num_seen = self._quotas.assign_groups(columns, count)
            quotas = self._quotas.compute_quotas(num_seen)
            ranks = self._rank_rows(groups, quotas, features)
            selection = self._quotas.select(groups, ranks, quotas, len(self))

            # Writing may raise: the quotas are updated only after it.
            self._storage.write(leaves, selection.rows, selection.positions)
            self._quotas.commit(selection, num_seen)
        self.num_seen += count

    def sample(self, n: int, mask: Tensor | None = None) -> dict[str, Any]:
        """Draw rows at random without replacement.

        Two calls are independent draws.

        Args:
            n: number of rows; all if there are fewer.
            mask: draw only among these rows: a mask such as ``memory["t"] != 3``.

        Returns:
            A copy of the columns on the memory's device; an empty dict if there are no rows.
        """
        if n < 1:
            raise ValueError(f"sample: got n={n}, allowed: 1 or more.")
        if mask is None:
            size = len(self)
            return self._storage.select(_sample_indices(min(n, size), size, self._generator))

        candidates = self._indices(mask)
        size = len(candidates)
        return self._storage.select(candidates[_sample_indices(min(n, size), size, self._generator)])

    def rows(self, mask: Tensor | None = None) -> dict[str, Any]:
        """Copy all rows, or those that a mask selects, in storage order; an empty dict if there are none."""
        if mask is None:
            return self._storage.select(torch.arange(len(self)))
        return self._storage.select(self._indices(mask))

    def _indices(self, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.shape != (len(self),):
            raise ValueError(
                f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, allowed: a mask, torch.bool with one entry for "
                f"each of the {len(self)} rows."
            )
        return mask.nonzero().flatten()

    def state_dict(self) -> dict[str, Any]:
        """Return rows, counters and random state, as ``torch.load(weights_only=True)`` reads them.

        Rows are copied, except those in a folder, which may not fit in RAM: save these before adding more.
        """
        groups = {}
        if self._quotas is not None:
            groups = self._quotas.state_dict(len(self))
        return {
            **self._settings(),
            "num_seen": self.num_seen,
            "generator": self._generator.get_state(),
            "rows": self._storage.state_dict(),
            "groups": groups,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of the rows, counters and random state of a memory of the same capacity and policy."""
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ValueError(f"This state is of a memory with {name}={state.get(name)!r}, this one has {value!r}.")

        self.__post_init__()
        self.num_seen = int(state["num_seen"])
        self._generator.set_state(state["generator"].cpu())
        self._storage.load_state_dict(state["rows"])
        if self._quotas is not None:
            self._quotas.load_state_dict(state["groups"])

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a state must share, with defaults filled in."""
        group_columns: list[str] = []
        max_per_group = self.capacity
        if self._quotas is not None:
            group_columns = list(self._quotas.group_columns)
            max_per_group = self._quotas.max_per_group
        return {
            "capacity": int(self.capacity),
            "policy": self.policy,
            "group_by": group_columns,
            "max_per_group": int(max_per_group),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy: copies never share a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for f in fields(self):
            setattr(self, f.name, state[f.name])
        self.__post_init__()
        self.load_state_dict(state["state"])

    def _select_reservoir(self, count: int) -> tuple[Integers, Integers]:
        """Apply the reservoir rule to new rows: return the indices of those to store, and their positions."""
        num_rows = len(self)
        num_appended = min(count, self.capacity - num_rows)

        # Row n draws j from {0 … n} and is stored at position j if j < capacity.
        row_numbers = np.arange(self.num_seen + num_appended, self.num_seen + count)
        draws = _draw_integers(len(row_numbers), self._generator) % (row_numbers + 1)
        rows = (draws < self.capacity).nonzero()[0]
        positions = draws[rows]

        # The first rows fill empty positions in order.
        if num_appended:
            rows = np.concatenate([np.arange(num_appended), num_appended + rows])
            positions = np.concatenate([np.arange(num_rows, num_rows + num_appended), positions])

        # If several rows are stored at one position, the last one remains.
        if len(rows) > 1:
            positions, last_indices = np.unique(positions[::-1], return_index=True)
            rows = rows[::-1][last_indices]
        return rows, positions

    def _rank_rows(self, groups: Integers, quotas: Integers, features: Tensor | None) -> Integers:
        """Rank new rows: of each group, the rows with the highest ranks are stored."""
        if self.policy == "balanced":
            return _draw_integers(len(groups), self._generator)
        if features is None:
            # A ring stores the most recent rows.
            return np.arange(self.num_seen, self.num_seen + len(groups))

        if len(features) != len(groups):
            raise ValueError(f"Got features of {len(features)} rows for {len(groups)} rows: give those of each.")
        ranks = np.full(len(groups), -self.capacity)
        for group in np.unique(groups):
            members = (groups == group).nonzero()[0]
            member_features = features[torch.from_numpy(members).to(features.device)]
            order = herding_order(member_features, int(quotas[group]))
            ranks[members[order.numpy()]] = -np.arange(len(order))
        return ranks


def _draw_integers(count: int, source: torch.Generator) -> Integers:
    """Draw integers below 2⁶³ one by one, so that the result does not depend on the batch size."""
    draws: Integers = torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=source).numpy()
    return draws


def _sample_indices(n: int, size: int, source: torch.Generator) -> Tensor:
    """Draw n different indices below ``size``, in random order."""
    if size <= max(1000, 4 * n):
        return torch.randperm(size, generator=source, device="cpu")[:n]

    # A few of many: draw until enough indices differ, instead of permuting all.
    indices: dict[int, None] = {}
    while len(indices) < n:
        indices.update(dict.fromkeys(torch.randint(size, (n,), generator=source, device="cpu").tolist()))
    return torch.tensor(list(indices)[:n], device="cpu")
