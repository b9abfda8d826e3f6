"""Memory: a bounded number of rows kept to be seen again, and the policies that choose which."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from everlearn.memory.quotas import Groups, Integers, herding_order
from everlearn.memory.storage import Columns
from everlearn.runtime.randomness import generator

Policy = Literal["reservoir", "balanced", "ring", "herding"]
GROUPED_BY: dict[str, tuple[str, ...]] = {"reservoir": (), "balanced": ("y",), "ring": ("t",), "herding": ("y",)}

__all__ = ["Memory", "herding_order"]


@dataclass(eq=False)
class Memory:
    """Rows of named tensors, at most ``capacity`` of them, copied when they are added.

    A column is a tensor with one entry per row, a dict or tuple of such tensors, or None where there is nothing to
    keep. Names, shapes and dtypes are those of the first rows. Every call of ``add`` counts its rows as new: an
    example that is added in every epoch is seen as often, and may be kept more than once. Draws come from a generator of the
    memory's own.

        reservoir   every row seen is here with the same probability, capacity / seen (Vitter, 1985): row n, counted
                    from 0, draws j from {0 … n} and takes place j if there is one; the first rows lie in order
        balanced    equal shares for all groups; of its group every row seen is here with the same probability
        ring        equal shares for all groups; of its group the last rows seen
        herding     equal shares for all groups; of its group the rows whose mean follows the group's, ``herding_order``

    Room that a group does not need serves the others until it does. What equal shares leave over goes to groups drawn
    by lot; so do all places where there are more groups than rows.

    Args:
        capacity: the most rows.
        policy: which rows stay.
        by: the column of integers whose values make the groups, or several: ``("t", "y")`` for each task's classes.
            By default ``"t"`` for ring and ``"y"`` for balanced and herding.
        each: the most rows of one group; by default as many as there is room for.
        growing: columns whose rows may become longer in the last dimension, as logits do with a growing head. Where a
            row was shorter it is NaN: ``logits.isfinite()`` tells what was stored.
        seed: of the memory's draws.
        device: where rows are kept; by default the CPU.
        folder: keep rows memory-mapped in files here, for more than fits in RAM. The files have no names and vanish
            with the memory; ``state_dict`` is what lasts.

    >>> memory = Memory(capacity=3)
    >>> memory.add(x=torch.rand(10, 2), y=torch.arange(10))
    >>> len(memory), memory.seen, memory.nbytes
    (3, 10, 48)
    >>> {name: tuple(rows.shape) for name, rows in memory.sample(2).items()}
    {'x': (2, 2), 'y': (2,)}
    """

    capacity: int
    policy: Policy = "reservoir"
    by: str | tuple[str, ...] | None = None
    each: int | None = None
    growing: tuple[str, ...] = ("logits",)
    seed: int = 0
    device: torch.device | str | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        self._check()
        self.seen = 0
        self._columns = Columns(self.capacity, self.growing, self.device, self.folder)
        self._generator = generator(self.seed, "memory")
        by = GROUPED_BY[self.policy] if self.by is None else (self.by,) if isinstance(self.by, str) else tuple(self.by)
        each = self.capacity if self.each is None else min(self.each, self.capacity)
        try:
            self._groups = Groups(by, self.capacity, each, self.seed) if by else None
        except MemoryError as error:
            raise ValueError(
                f"Memory.capacity: got {self.capacity:,}, and there is no room for the numbers of so many rows: lower it."
            ) from error

    def _check(self) -> None:
        for name, value in (("capacity", self.capacity), ("each", 1 if self.each is None else self.each)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"Memory.{name}: got {value!r}, allowed: a whole number of rows, 1 or more.")
        if self.policy not in get_args(Policy):
            raise ValueError(f"Memory.policy: got {self.policy!r}, allowed: {', '.join(get_args(Policy))}.")
        if self.policy == "reservoir" and (self.by is not None or self.each is not None):
            raise ValueError("A reservoir has no groups: leave out Memory.by and Memory.each, or choose 'balanced'.")
        if self.folder is not None and torch.device(self.device or "cpu").type != "cpu":
            raise ValueError(f"Rows lie on {self.device} or in a folder, not both: leave out one of the two.")

    def __len__(self) -> int:
        return self._columns.filled

    def __getitem__(self, name: str) -> Any:
        """One column, the rows themselves and not a copy: to compare and count, not to write into."""
        return self._columns[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all places, filled or not, from the first rows on; more only if a column grows."""
        return self._columns.nbytes + (0 if self._groups is None else self._groups.nbytes)

    def add(self, *, features: Tensor | None = None, **columns: Any) -> None:
        """Rows that are new; the policy decides which are kept and which make room for them.

        Args:
            features: for herding: what the model makes of each row. They are not kept. Give all rows of a group at
                once; of two calls the first choices of both go before their second.
            columns: the rows, by name; always the same names.
        """
        if (features is None) == (self.policy == "herding"):
            raise ValueError("Features are for policy='herding', which needs them: add(features=…, x=…, y=…).")
        leaves, count = self._columns.fitting(columns)
        if not count:
            return
        if self._groups is None:
            rows, places = self._reservoir(count)
            self._columns.write(leaves, rows, places)
        else:
            groups, quota = self._groups.find(columns, count)
            rows, places = self._groups.choose(groups, self._ranks(groups, quota, features), quota, len(self))
            self._columns.write(leaves, rows, places)  # may refuse: then nothing is to be entered
            self._groups.commit()
        self.seen += count

    def sample(self, n: int, where: Tensor | None = None) -> dict[str, Any]:
        """So many different rows drawn at random, or all if there are fewer; an empty dict if there are none.

        Two calls are independent draws. What is returned is a copy, on the memory's device.

        Args:
            n: how many.
            where: draw among these rows only: a mask such as ``memory["t"] != 3``.
        """
        if n < 1:
            raise ValueError(f"sample: got n={n}, allowed: 1 or more.")
        among = None if where is None else self._indices(where)
        size = len(self) if among is None else len(among)
        drawn = _distinct(min(n, size), size, self._generator)
        return self._columns.at(drawn if among is None else among[drawn])

    def rows(self, where: Tensor | None = None) -> dict[str, Any]:
        """A copy of all rows, or of those a mask selects, as they lie; an empty dict if there are none."""
        return self._columns.at(torch.arange(len(self)) if where is None else self._indices(where))

    def _indices(self, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.shape != (len(self),):
            raise ValueError(
                f"where: got {mask.dtype} of shape {tuple(mask.shape)}, allowed: a mask, torch.bool with one entry for "
                f"each of the {len(self)} rows."
            )
        return mask.nonzero().flatten()

    def state_dict(self) -> dict[str, Any]:
        """Rows, counters and random state, as ``torch.load(weights_only=True)`` reads them.

        A copy; but not of rows in a folder, which may not fit in RAM: save those before adding more.
        """
        groups = {} if self._groups is None else self._groups.state_dict(len(self))
        rows, source = self._columns.state_dict(), self._generator.get_state()
        return {**self._settings(), "seen": self.seen, "generator": source, "rows": rows, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a copy of the rows, counters and random state of a memory of the same capacity and policy."""
        for name, own in self._settings().items():
            if state.get(name) != own:
                raise ValueError(f"This state is of a memory with {name}={state.get(name)!r}, this one has {own!r}.")
        self.__post_init__()
        self.seen = int(state["seen"])
        self._generator.set_state(state["generator"].cpu())
        self._columns.load_state_dict(state["rows"])
        if self._groups is not None:
            self._groups.load_state_dict(state["groups"])

    def _settings(self) -> dict[str, Any]:
        by, each = ((), self.capacity) if self._groups is None else (self._groups.by, self._groups.each)
        return {"capacity": int(self.capacity), "policy": self.policy, "by": list(by), "each": int(each)}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: two memories never share a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for f in fields(self):
            setattr(self, f.name, state[f.name])
        self.__post_init__()
        self.load_state_dict(state["state"])

    def _reservoir(self, count: int) -> tuple[Integers, Integers]:
        """Of so many new rows those that are kept, and their places."""
        filled = len(self)
        first = min(count, self.capacity - filled)
        numbers = np.arange(self.seen + first, self.seen + count)
        drawn = _draws(len(numbers), self._generator) % (numbers + 1)
        rows = (drawn < self.capacity).nonzero()[0]
        places = drawn[rows]
        if first:
            rows = np.concatenate([np.arange(first), first + rows])
            places = np.concatenate([np.arange(filled, filled + first), places])
        if len(rows) > 1:
            places, last = np.unique(places[::-1], return_index=True)  # of two rows for one place the later one
            rows = rows[::-1][last]
        return rows, places

    def _ranks(self, groups: Integers, quota: Integers, features: Tensor | None) -> Integers:
        """How firmly each new row is to stay; of its group the highest do."""
        if self.policy == "balanced":
            return _draws(len(groups), self._generator)
        if features is None:
            return np.arange(self.seen, self.seen + len(groups))
        if len(features) != len(groups):
            raise ValueError(f"Got features of {len(features)} rows for {len(groups)} rows: give those of each.")
        ranks = np.full(len(groups), -self.capacity)
        for g in np.unique(groups):
            own = (groups == g).nonzero()[0]
            order = herding_order(features[torch.from_numpy(own).to(features.device)], int(quota[g]))
            ranks[own[order.numpy()]] = -np.arange(len(order))
        return ranks


def _draws(count: int, source: torch.Generator) -> Integers:
    """Integers below 2⁶³, one after another, so that it makes no difference how a stream is cut into batches."""
    drawn: Integers = torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=source).numpy()
    return drawn


def _distinct(n: int, size: int, source: torch.Generator) -> Tensor:
    """So many different numbers below size, in random order."""
    if size <= max(1000, 4 * n):
        return torch.randperm(size, generator=source, device="cpu")[:n]
    found: dict[int, None] = {}  # of a large memory few rows are wanted: draw until there are enough different ones
    while len(found) < n:
        found.update(dict.fromkeys(torch.randint(size, (n,), generator=source, device="cpu").tolist()))
    return torch.tensor(list(found)[:n], device="cpu")
