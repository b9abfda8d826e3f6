"""Records of the rows that updates have learned, so that they can be forgotten."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from torch import Tensor

from everlearn.core.method import Method
from everlearn.updating.held_out_sets import example_digests

Pair = tuple[Tensor, Tensor]
Row = tuple[bytes, int]  # digest of the inputs, and the label
RowCounts = dict[Row, int]  # how often each row was learned; 0 if it was given, and neither learned nor stored

RECORD = struct.Struct("<16siI")


def can_forget(method: Method) -> bool:
    """Return whether a method can take learned rows out again."""
    return hasattr(method, "forget")


def identify_rows(pair: Pair) -> list[Row]:
    """Identify each row by a digest of its inputs, and its label."""
    x, y = pair
    return list(zip(example_digests(x), y.tolist(), strict=True))


def count_rows(learned: Pair, given: Iterable[Pair]) -> RowCounts:
    """Count how often each of the given rows was learned.

    >>> import torch
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> list(count_rows((x[[0, 0, 1]], y[[0, 0, 1]]), [(x, y)]).values())
    [2, 1, 0]

    Args:
        learned: the rows that were learned.
        given: all rows that were given.
    """
    counts = {row: 0 for pair in given for row in identify_rows(pair)}
    for row in identify_rows(learned):
        counts[row] = counts.get(row, 0) + 1
    return counts


def total_count(row: Row, row_counts: Mapping[int, RowCounts]) -> int:
    """Return how often a row was learned in all updates.

    Args:
        row: the row.
        row_counts: for the number of each update, its counts.
    """
    return sum(counts.get(row, 0) for counts in row_counts.values())


def learned_digests(counts: RowCounts) -> set[bytes]:
    """Return the digests of the inputs that were learned, with any label."""
    return {digest for (digest, _), count in counts.items() if count}


def serialize_rows(counts: RowCounts) -> bytes:
    """Return the content of a file with these counts.

    >>> import torch
    >>> counts = count_rows((torch.eye(2), torch.arange(2)), [])
    >>> deserialize_rows(serialize_rows(counts)) == counts
    True
    """
    return b"".join(RECORD.pack(digest, label, count) for (digest, label), count in sorted(counts.items()))


def deserialize_rows(content: bytes) -> RowCounts:
    """Read what ``serialize_rows`` returned."""
    return {(digest, label): count for digest, label, count in RECORD.iter_unpack(content)}
