"""Groups with equal shares of a memory, and which of their rows stay."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everlearn.runtime.randomness import derive

Integers = npt.NDArray[np.int64]


class Groups:
    """Which row belongs to which group and how firmly it stays: the books of a memory whose groups have equal shares.

    A group's share never grows again once rows of it had to go, so the rows kept are always the highest ranks of all
    that were ever seen of it.
    """

    def __init__(self, by: tuple[str, ...], capacity: int, each: int, seed: int) -> None:
        self.by, self.capacity, self.each, self.seed = by, capacity, each, seed
        self.number: defaultdict[tuple[int, ...], int] = defaultdict()  # of a group, by what its rows have in common
        self.number.default_factory = self.number.__len__
        self.lots: list[int] = []
        self.order = np.zeros(0, np.int64)  # by lot
        self.seen = np.zeros(0, np.int64)
        self.floor = np.zeros(0, np.int64)  # where a group has let rows go, its lowest rank: a row below need not try
        self.group = np.zeros(capacity, np.int64)
        self.rank = np.zeros(capacity, np.int64)
        self._next: tuple[Integers, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the books."""
        return self.group.nbytes + self.rank.nbytes

    def find(self, columns: dict[str, Any], count: int) -> tuple[Integers, Integers]:
        """The group of each new row, and how many rows each group may have once they have come."""
        keys = [_integers(name, columns.get(name)) for name in self.by]
        groups = np.fromiter(map(self.number.__getitem__, zip(*keys, strict=True)), np.int64, count)
        if len(self.number) > len(self.lots):
            self._draw_lots()
        seen = np.bincount(groups, minlength=len(self.number))
        seen[: len(self.seen)] += self.seen
        self._next = (seen,)
        return groups, shares(np.minimum(seen, self.each), self.capacity, self.order)

    def choose(self, groups: Integers, ranks: Integers, quota: Integers, filled: int) -> tuple[Integers, Integers]:
        """Of the new rows those that are kept, and their places: of rows that go, or not filled before."""
        new = (ranks > self.floor[groups]).nonzero()[0]
        if not len(new):
            self._next = (*self._next, new, new, new, self.floor)
            return new, new
        stored = self.group[:filled]
        over = np.bincount(stored, minlength=len(quota)) + np.bincount(groups[new], minlength=len(quota)) > quota
        old = over[stored].nonzero()[0]  # in a group with room for all nothing needs to be compared
        group, rank = np.concatenate([stored[old], groups[new]]), np.concatenate([self.rank[old], ranks[new]])
        order = np.lexsort((-rank, group))
        group, rank = group[order], rank[order]
        above = np.arange(len(order)) - np.searchsorted(group, group)  # how many of its group stay before it
        stays = np.zeros(len(order), bool)
        stays[order[above < quota[group]]] = True
        rows, freed = new[stays[len(old) :]], old[~stays[: len(old)]]
        places = np.concatenate([freed, np.arange(filled, filled + len(rows) - len(freed))])
        floor, lowest = self.floor.copy(), over[group] & (above == quota[group] - 1)
        floor[group[lowest]] = rank[lowest]
        self._next = (*self._next, places, groups[rows], ranks[rows], floor)
        return rows, places

    def _draw_lots(self) -> None:
        """A group's lot depends on its key alone, so it is the same whenever the group comes."""
        self.lots += [derive(self.seed, "lot", *key) for key in list(self.number)[len(self.lots) :]]
        self.order = np.argsort(self.lots)
        self.floor = np.append(self.floor, np.full(len(self.lots) - len(self.floor), np.iinfo(np.int64).min))

    def commit(self) -> None:
        """Enter into the books what was chosen last."""
        self.seen, places, groups, ranks, self.floor = self._next
        self.group[places], self.rank[places] = groups, ranks

    def state_dict(self, filled: int) -> dict[str, Any]:
        """The books as tensors."""
        books = {"seen": self.seen, "group": self.group[:filled], "rank": self.rank[:filled]}
        keys = torch.tensor(list(self.number)).reshape(-1, len(self.by))[: len(self.seen)]
        return {"seed": self.seed, "keys": keys, **{name: torch.tensor(book) for name, book in books.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the books of a memory of the same settings."""
        self.seed = int(state["seed"])  # or the lots would be others
        self.number.update({tuple(key): i for i, key in enumerate(state["keys"].tolist())})
        self._draw_lots()
        self.seen = state["seen"].cpu().numpy().copy()
        for book, name in ((self.group, "group"), (self.rank, "rank")):
            book[: len(state[name])] = state[name].cpu().numpy()


def shares(wanted: Integers, capacity: int, order: Integers) -> Integers:
    """Equal shares of the capacity, none larger than wanted; what is left over goes to the first in the order.

    >>> shares(np.array([9, 1, 9]), 8, order=np.array([2, 1, 0]))
    array([3, 1, 4])
    """
    if wanted.sum() <= capacity:
        return wanted
    ascending = np.sort(wanted)
    left = capacity - (np.cumsum(ascending) - ascending)  # for those who want as much or more, if the others get all
    levels = left // np.arange(len(wanted), 0, -1)
    level = int(levels[np.argmax(levels < ascending)])
    quota = np.minimum(wanted, level)
    quota[order[wanted[order] > level][: capacity - quota.sum()]] += 1
    return quota


def herding_order(features: Tensor, most: int) -> Tensor:
    """Rows whose running mean stays nearest the mean of all, chosen greedily (iCaRL; Rebuffi et al., CVPR 2017).

        pₖ = argminᵢ ‖ μ - (φᵢ + φ_p₁ + … + φ_pₖ₋₁) / k ‖,   each row once

    Features are taken as they are; iCaRL gives them length 1 first.

    Args:
        features: φ, one per row.
        most: how many rows to choose.

    >>> herding_order(torch.tensor([[0.0], [4.0], [5.0], [11.0]]), most=2)  # the mean is 5
    tensor([2, 1])
    """
    rows = features.detach().cpu().flatten(1).double()
    if not rows.isfinite().all():
        raise ValueError("The features hold NaN or infinite numbers: no row is nearest their mean.")
    mean, total, squares = rows.mean(0), torch.zeros_like(rows[0]), rows.square().sum(1)
    chosen: list[int] = []
    for k in range(1, min(most, len(rows)) + 1):
        i = int((squares - 2 * (rows @ (k * mean - total))).argmin())  # k² ‖…‖², less what is the same for all
        chosen.append(i)
        total += rows[i]
        squares[i] = math.inf
    return torch.tensor(chosen, dtype=torch.int64)


def _integers(name: str, column: Any) -> list[int]:
    if isinstance(column, Tensor) and column.dim() == 1 and not column.is_floating_point():
        return column.long().tolist()
    kind = f"{column.dtype} of shape {tuple(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
    raise ValueError(f"Rows are grouped by {name}, which needs one integer per row; got {kind}. Choose Memory.by.")
