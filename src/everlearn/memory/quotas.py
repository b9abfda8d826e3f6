"""Equal quotas for groups of rows in a memory, and the selection of rows within a group."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everlearn.runtime.randomness import derive

Integers = npt.NDArray[np.int64]


class Selection(NamedTuple):
    """New rows to store."""

    rows: Integers  # indices into the new rows
    positions: Integers  # where in the memory they are stored
    groups: Integers  # the group of each
    ranks: Integers  # the rank of each
    rank_limits: Integers  # of all groups, see GroupQuotas


class GroupQuotas:
    """Group and rank of every stored row, for a memory whose groups have equal quotas.

    A quota never grows again once rows of its group were discarded. Therefore the stored rows of a group always have
    the highest ranks of all its rows seen.

    Args:
        group_columns: names of the integer columns whose values define the groups.
        capacity: number of rows in the memory.
        max_per_group: maximum number of rows per group.
        seed: seed of the random order in which groups receive the remainder of the division.
    """

    def __init__(self, group_columns: tuple[str, ...], capacity: int, max_per_group: int, seed: int) -> None:
        self.group_columns = group_columns
        self.capacity = capacity
        self.max_per_group = max_per_group
        self.seed = seed

        # A key of column values that is looked up for the first time gets the next index.
        self.group_indices: defaultdict[tuple[int, ...], int] = defaultdict()
        self.group_indices.default_factory = self.group_indices.__len__

        # Per group. The rank limit is the lowest stored rank if rows were discarded: lower ranks cannot be stored.
        self.tie_breakers: list[int] = []
        self.tie_order = np.zeros(0, np.int64)
        self.num_seen = np.zeros(0, np.int64)
        self.rank_limits = np.zeros(0, np.int64)

        # Per stored row.
        self.row_groups = np.zeros(capacity, np.int64)
        self.row_ranks = np.zeros(capacity, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the groups and ranks of rows."""
        return self.row_groups.nbytes + self.row_ranks.nbytes

    def assign_groups(self, columns: dict[str, Any], count: int) -> tuple[Integers, Integers]:
        """Find the group of each new row.

        Returns:
            The index of the group of each new row, and the number of rows seen per group including the new ones.
        """
        keys = [_integer_column(name, columns.get(name)) for name in self.group_columns]
        groups = np.fromiter(map(self.group_indices.__getitem__, zip(*keys, strict=True)), np.int64, count)
        if len(self.group_indices) > len(self.tie_breakers):
            self._register_groups()

        num_seen = np.bincount(groups, minlength=len(self.group_indices))
        num_seen[: len(self.num_seen)] += self.num_seen
        return groups, num_seen

    def compute_quotas(self, num_seen: Integers) -> Integers:
        """Compute how many rows each group may store, given the number of rows seen per group."""
        return divide_capacity(np.minimum(num_seen, self.max_per_group), self.capacity, self.tie_order)

    def select(self, groups: Integers, ranks: Integers, quotas: Integers, num_rows: int) -> Selection:
        """Select the new rows to store, at the positions of discarded rows or after the last row.

        Args:
            groups: group of each new row.
            ranks: rank of each new row.
            quotas: maximum number of rows per group.
            num_rows: number of rows stored so far.
        """
        candidates = (ranks > self.rank_limits[groups]).nonzero()[0]
        if not len(candidates):
            return Selection(candidates, candidates, candidates, candidates, self.rank_limits)

        # Only groups that exceed their quota are compared; in the others all rows fit.
        stored_groups = self.row_groups[:num_rows]
        num_stored = np.bincount(stored_groups, minlength=len(quotas))
        num_candidates = np.bincount(groups[candidates], minlength=len(quotas))
        exceeds_quota = num_stored + num_candidates > quotas
        compared = exceeds_quota[stored_groups].nonzero()[0]

        # Sort stored and new rows by group and, within a group, by descending rank.
        joint_groups = np.concatenate([stored_groups[compared], groups[candidates]])
        joint_ranks = np.concatenate([self.row_ranks[compared], ranks[candidates]])
        order = np.lexsort((-joint_ranks, joint_groups))
        joint_groups = joint_groups[order]
        joint_ranks = joint_ranks[order]

        # A row is stored if fewer rows of its group rank higher than the quota.
        num_higher = np.arange(len(order)) - np.searchsorted(joint_groups, joint_groups)
        is_stored = np.zeros(len(order), bool)
        is_stored[order[num_higher < quotas[joint_groups]]] = True
        rows = candidates[is_stored[len(compared) :]]
        freed_positions = compared[~is_stored[: len(compared)]]
        new_positions = np.arange(num_rows, num_rows + len(rows) - len(freed_positions))
        positions = np.concatenate([freed_positions, new_positions])

        rank_limits = self.rank_limits.copy()
        is_lowest = exceeds_quota[joint_groups] & (num_higher == quotas[joint_groups] - 1)
        rank_limits[joint_groups[is_lowest]] = joint_ranks[is_lowest]
        return Selection(rows, positions, groups[rows], ranks[rows], rank_limits)

    def commit(self, selection: Selection, num_seen: Integers) -> None:
        """Record the rows of a selection, after they have been written."""
        self.num_seen = num_seen
        self.rank_limits = selection.rank_limits
        self.row_groups[selection.positions] = selection.groups
        self.row_ranks[selection.positions] = selection.ranks

    def _register_groups(self) -> None:
        """Extend the arrays per group to new groups.

        The tie-breaker of a group depends on its key alone, not on when the group is first seen.
        """
        new_keys = list(self.group_indices)[len(self.tie_breakers) :]
        self.tie_breakers += [derive(self.seed, "lot", *key) for key in new_keys]
        self.tie_order = np.argsort(self.tie_breakers)
        no_limits = np.full(len(self.tie_breakers) - len(self.rank_limits), np.iinfo(np.int64).min)
        self.rank_limits = np.append(self.rank_limits, no_limits)

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """Return groups and ranks as tensors."""
        # Groups of rows that were refused have an index, but no count.
        keys = torch.tensor(list(self.group_indices)).reshape(-1, len(self.group_columns))[: len(self.num_seen)]
        return {
            "seed": self.seed,
            "keys": keys,
            "seen": torch.tensor(self.num_seen),
            "group": torch.tensor(self.row_groups[:num_rows]),
            "rank": torch.tensor(self.row_ranks[:num_rows]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the groups and ranks of a memory with the same settings."""
        # Another seed would break ties differently.
        self.seed = int(state["seed"])
        self.group_indices.update({tuple(key): i for i, key in enumerate(state["keys"].tolist())})
        self._register_groups()
        self.num_seen = state["seen"].cpu().numpy().copy()
        self.row_groups[: len(state["group"])] = state["group"].cpu().numpy()
        self.row_ranks[: len(state["rank"])] = state["rank"].cpu().numpy()


def divide_capacity(wanted: Integers, capacity: int, tie_order: Integers) -> Integers:
    """Divide a capacity into equal quotas, none larger than wanted.

    Args:
        wanted: upper limit of each quota.
        capacity: sum of the quotas, unless less is wanted.
        tie_order: the order in which groups receive the remainder.

    >>> divide_capacity(np.array([9, 1, 9]), 8, tie_order=np.array([2, 1, 0]))
    array([3, 1, 4])
    """
    if wanted.sum() <= capacity:
        return wanted

    # The level is the quota of all groups that want more: what the smaller groups leave, divided equally.
    ascending = np.sort(wanted)
    remaining_capacity = capacity - (np.cumsum(ascending) - ascending)
    levels = remaining_capacity // np.arange(len(wanted), 0, -1)
    level = int(levels[np.argmax(levels < ascending)])
    quotas = np.minimum(wanted, level)

    remainder = capacity - quotas.sum()
    unsatisfied = tie_order[wanted[tie_order] > level]
    quotas[unsatisfied[:remainder]] += 1
    return quotas


def herding_order(features: Tensor, count: int) -> Tensor:
    """Select rows greedily whose running mean is nearest to the mean of all (iCaRL; Rebuffi et al., CVPR 2017).

        pₖ = argminᵢ ‖ μ - (φᵢ + φ_p₁ + … + φ_pₖ₋₁) / k ‖,   each row once

    Features are used as given; iCaRL normalizes them to length 1 first.

    Args:
        features: φ, one per row.
        count: maximum number of rows to select.

    Returns:
        The indices p₁, p₂, … of the rows.

    >>> herding_order(torch.tensor([[0.0], [4.0], [5.0], [11.0]]), count=2)  # the mean is 5
    tensor([2, 1])
    """
    phi = features.detach().cpu().flatten(1).double()
    if not phi.isfinite().all():
        raise ValueError("The features hold NaN or infinite numbers: no row is nearest their mean.")

    mu = phi.mean(0)
    selected_sum = torch.zeros_like(phi[0])
    squared_norms = phi.square().sum(1)
    selected: list[int] = []
    for k in range(1, min(count, len(phi)) + 1):
        # k² ‖ μ - (φᵢ + sum) / k ‖² without the terms that are equal for all i.
        distances = squared_norms - 2 * (phi @ (k * mu - selected_sum))
        i = int(distances.argmin())
        selected.append(i)
        selected_sum += phi[i]
        squared_norms[i] = math.inf
    return torch.tensor(selected, dtype=torch.int64)


def _integer_column(name: str, column: Any) -> list[int]:
    """Read a column as a list of integers, one per row."""
    if not isinstance(column, Tensor):
        description = type(column).__name__
    elif column.dim() == 1 and not column.is_floating_point():
        return column.long().tolist()
    else:
        description = f"{column.dtype} of shape {tuple(column.shape)}"
    raise ValueError(
        f"Rows are grouped by {name}, which needs one integer per row; got {description}. Choose Memory.group_by."
    )
