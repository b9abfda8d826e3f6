"""What a source gives: a training and a test pair, and what is known of the classes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Any, Tensor]


class Data(tuple[Pair, Pair]):
    """The pair ((x, y), (x_test, y_test)), with what is known of the classes beside it.

    Args:
        train: inputs and labels to learn from.
        test: inputs and labels to be tested on.
        names: of the classes, by their number; empty where nobody named them.
        groups: the classes that belong together, by the name of the group (a domain, an alphabet).
        times: for every training and every test example, which period it is from (drifting data only).
        features: the names of the columns that the inputs are made of (tables only).

    >>> data = Data((torch.zeros(4, 2), torch.arange(4)), (torch.zeros(1, 2), torch.zeros(1)), names=list("abcd"))
    >>> (x, y), (x_test, y_test) = data
    >>> x.shape, data.names[3]
    (torch.Size([4, 2]), 'd')
    """

    names: list[str]
    groups: dict[str, list[int]]
    times: tuple[Tensor, Tensor] | None
    features: list[str]

    def __new__(
        cls,
        train: Pair,
        test: Pair,
        *,
        names: Iterable[str] = (),
        groups: Mapping[str, Sequence[int]] | None = None,
        times: tuple[Tensor, Tensor] | None = None,
        features: Iterable[str] = (),
    ) -> Self:
        """A tuple is made here, before there is anything to initialise."""
        _must_match(*train)
        _must_match(*test)
        self = super().__new__(cls, (train, test))
        self.names = [str(name) for name in names]
        self.groups = {group: list(classes) for group, classes in (groups or {}).items()}
        self.times, self.features = times, list(features)
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Pair, Pair], dict[str, Any]]:
        return (self[0], self[1]), dict(vars(self))

    def copy(self) -> Data:
        """A copy of its own whose images are numbers from 0 to 1."""
        (x, y), (x_test, y_test) = self
        times = None if self.times is None else (self.times[0].clone(), self.times[1].clone())
        train, test = (_own(x), y.clone()), (_own(x_test), y_test.clone())
        return Data(train, test, names=self.names, groups=self.groups, times=times, features=self.features)


def _own(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return list(x)
    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x.clone()


def hold_back(
    x: Any,
    y: Tensor,
    share: float = 0.2,
    *,
    names: Iterable[str] = (),
    groups: Mapping[str, Sequence[int]] | None = None,
    features: Iterable[str] = (),
) -> Data:
    """Data without a published test set, cut in two: of each class, examples at equal distances are for tests.

    Identical images are one example here: all of them are to learn from, or all for tests.

    >>> (x, y), (x_test, y_test) = hold_back(torch.arange(10.0), torch.zeros(10, dtype=torch.long))
    >>> x_test
    tensor([4., 9.])
    """
    _must_match(x, y)
    first = _first(x)
    own, test = first.unique(), torch.zeros(len(y), dtype=torch.bool)
    test[own] = held_back(y[own], share)
    for label in y.unique() if _are_classes(y) else ():
        if test[same := first[y == label]].all():  # its images are all another class's, too: one must be learned from
            test[same[0]] = False
    test = test[first]
    train, held = (_some(x, ~test), y[~test]), (_some(x, test), y[test])
    return Data(train, held, names=names, groups=groups, features=features)


def _first(x: Any) -> Tensor:
    """For every example, the number of the first that is identical; only among images, as numbers and words may recur."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return torch.arange(len(x))
    seen: dict[bytes, int] = {}
    pixels = x.contiguous().numpy()
    first = [seen.setdefault(hashlib.sha256(image).digest(), i) for i, image in enumerate(pixels)]
    return torch.tensor(first, dtype=torch.long)


def _are_classes(y: Tensor) -> bool:
    return not y.is_floating_point() and y.dim() == 1


def _must_match(x: Any, y: Tensor) -> None:
    if len(x) != len(y):
        raise ValueError(f"There are {len(x):,} inputs but {len(y):,} labels: one is needed for each.")


def _some(x: Any, rows: Tensor) -> Any:
    return x[rows] if isinstance(x, Tensor) else [x[i] for i in rows.nonzero().flatten().tolist()]


def held_back(y: Tensor, share: float = 0.2) -> Tensor:
    """Which examples are for tests: with a share of 0.2 every fifth of each class, and one where there are two to four."""
    if not 0 < share < 1:
        raise ValueError(f"The share of examples for tests lies between 0 and 1, got {share}.")
    groups = y.unique() if _are_classes(y) else [None]
    test = torch.zeros(len(y), dtype=torch.bool)
    for group in groups:
        rows = torch.arange(len(y)) if group is None else (y == group).nonzero().flatten()
        passed = (torch.arange(len(rows) + 1, dtype=torch.float64) * share + 1e-9).floor()
        test[rows] = passed[1:] > passed[:-1]
        if len(rows) > 1 and not test[rows].any():
            test[rows[-1]] = True
    return test


def first_few(names: Sequence[object], limit: int = 5, *, last: int = 0) -> str:
    """The first names of a list that may be long, for a message, and the last ones where asked for.

    >>> first_few([f"p{i}" for i in range(784)], 3)
    'p0, p1, p2, … (784 in all)'
    >>> first_few([*(f"p{i}" for i in range(784)), "label"], 3, last=2)
    'p0, p1, p2, …, p783, label (785 in all)'
    """
    if len(names) <= limit + last:
        return ", ".join(map(str, names))
    return ", ".join([*map(str, names[:limit]), "…", *map(str, names[len(names) - last :])]) + f" ({len(names)} in all)"


def images(raw: np.ndarray) -> Tensor:
    """Images as torch has them, (examples, channels, height, width), from grey ones or from channels that come last.

    >>> images(np.zeros((5, 8, 8, 3), np.uint8)).shape
    torch.Size([5, 3, 8, 8])
    """
    if raw.ndim == 3:
        raw = raw[:, None]
    elif raw.ndim == 4 and raw.shape[-1] in (1, 3, 4) and raw.shape[1] not in (1, 3):
        raw = np.moveaxis(raw, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(raw))


def numbered(labels: Any) -> tuple[Tensor, list[str]]:
    """Labels as numbers, and their names: whole numbers from 0 stay, others are fractions to predict, words are counted.

    >>> numbered(["dog", "cat", "dog"])
    (tensor([1, 0, 1]), ['cat', 'dog'])
    """
    values = np.asarray(labels)
    if values.dtype.kind in "iub" and (not values.size or values.min() >= 0):
        return torch.from_numpy(values.astype(np.int64)), []
    if values.dtype.kind == "f":
        y = torch.from_numpy(in_float32(values))
        if lost := int((~y.isfinite()).sum()):
            raise ValueError(f"{lost:,} of {y.numel():,} labels are not finite numbers: fill them or leave them out.")
        return y, []
    names, counted = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
    return torch.from_numpy(counted.astype(np.int64)), [str(name) for name in names]


def in_float32(values: np.ndarray) -> np.ndarray:
    """Numbers as torch learns from them; what is too large becomes infinite, which the caller looks for."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def renumbered(y: Tensor, own: Sequence[str], names: Sequence[str]) -> Tensor:
    """Labels that count their own names, made to count all the names.

    >>> renumbered(torch.tensor([0, 1]), ["a", "c"], ["a", "b", "c"])
    tensor([0, 2])
    """
    return torch.tensor([names.index(name) for name in own])[y] if names else y
