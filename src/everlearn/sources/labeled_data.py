"""Labeled data with a training part, a test part and class names, as every source returns it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Any, Tensor]


class Data(tuple[Pair, Pair]):
    """Tuple ((x, y), (x_test, y_test)) with attributes that describe the classes.

    Args:
        train: training inputs and labels.
        test: test inputs and labels.
        names: class names, indexed by label; empty if the classes have no names.
        groups: labels of the classes in each group (a domain, an alphabet), by the name of the group.
        times: period of each training and each test example (drifting data only).
        features: names of the input columns (tables only).

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
        """Create the tuple; tuples are immutable, so ``__init__`` would be too late."""
        _check_lengths(*train)
        _check_lengths(*test)

        self = super().__new__(cls, (train, test))
        self.names = [str(name) for name in names]
        self.groups = {group: list(labels) for group, labels in (groups or {}).items()}
        self.times = times
        self.features = list(features)
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Pair, Pair], dict[str, Any]]:
        return (self[0], self[1]), dict(vars(self))

    def copy(self) -> Data:
        """Copy all data; images in bytes become float32 in [0, 1]."""
        (x, y), (x_test, y_test) = self
        train = (_copy_inputs(x), y.clone())
        test = (_copy_inputs(x_test), y_test.clone())

        times = None
        if self.times is not None:
            times = (self.times[0].clone(), self.times[1].clone())

        return Data(train, test, names=self.names, groups=self.groups, times=times, features=self.features)


def _copy_inputs(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return list(x)
    if x.dtype == torch.uint8:
        return x.to(torch.float32) / 255
    return x.clone()


def hold_back(
    x: Any,
    y: Tensor,
    share: float = 0.2,
    *,
    names: Iterable[str] = (),
    groups: Mapping[str, Sequence[int]] | None = None,
    features: Iterable[str] = (),
) -> Data:
    """Split data without a published test set: every (1 / share)-th example of each class is for testing.

    Duplicate images stay together: all copies are training examples, or all are test examples.

    >>> (x, y), (x_test, y_test) = hold_back(torch.arange(10.0), torch.zeros(10, dtype=torch.long))
    >>> x_test
    tensor([4., 9.])
    """
    _check_lengths(x, y)

    # Choose among the distinct examples only; every duplicate follows its first occurrence.
    first_occurrence = _first_occurrences(x)
    distinct = first_occurrence.unique()
    is_test = torch.zeros(len(y), dtype=torch.bool)
    is_test[distinct] = select_test_examples(y[distinct], share)

    # A class whose images all also occur in other classes may be left without training examples: keep one.
    if _are_class_labels(y):
        for label in y.unique():
            class_rows = first_occurrence[y == label]
            if is_test[class_rows].all():
                is_test[class_rows[0]] = False

    is_test = is_test[first_occurrence]
    train = (_select_rows(x, ~is_test), y[~is_test])
    test = (_select_rows(x, is_test), y[is_test])
    return Data(train, test, names=names, groups=groups, features=features)


def _first_occurrences(x: Any) -> Tensor:
    """Return for each example the index of the first identical one; only images count as duplicates.

    Rows of numbers and texts may recur by chance, so each of them is an example of its own.
    """
    if not isinstance(x, Tensor) or x.dim() < 3:
        return torch.arange(len(x))

    index_by_digest: dict[bytes, int] = {}
    pixels = x.contiguous().numpy()
    first_occurrence = [index_by_digest.setdefault(hashlib.sha256(image).digest(), i) for i, image in enumerate(pixels)]
    return torch.tensor(first_occurrence, dtype=torch.long)


def _are_class_labels(y: Tensor) -> bool:
    return not y.is_floating_point() and y.dim() == 1


def _check_lengths(x: Any, y: Tensor) -> None:
    if len(x) != len(y):
        raise ValueError(f"There are {len(x):,} inputs but {len(y):,} labels: give one label for each input.")


def _select_rows(x: Any, mask: Tensor) -> Any:
    if isinstance(x, Tensor):
        return x[mask]
    return [x[i] for i in mask.nonzero().flatten().tolist()]


def select_test_examples(y: Tensor, share: float = 0.2) -> Tensor:
    """Return a mask of test examples: with share 0.2 every fifth of each class, at least one of two or more.

    Args:
        y: class labels; other targets are treated as one class.
        share: fraction of test examples, between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"The share of examples for tests must lie between 0 and 1, got {share}.")

    if _are_class_labels(y):
        class_rows = [(y == label).nonzero().flatten() for label in y.unique()]
    else:
        class_rows = [torch.arange(len(y))]

    is_test = torch.zeros(len(y), dtype=torch.bool)
    for rows in class_rows:
        # An example is for testing where the running total k * share passes the next integer.
        test_count = (torch.arange(len(rows) + 1, dtype=torch.float64) * share + 1e-9).floor()
        is_test[rows] = test_count[1:] > test_count[:-1]
        if len(rows) > 1 and not is_test[rows].any():
            is_test[rows[-1]] = True
    return is_test


def first_few(names: Sequence[object], limit: int = 5, *, last: int = 0) -> str:
    """Format a list of names for a message: the first ``limit``, the last ``last``, and the total count.

    >>> first_few([f"p{i}" for i in range(784)], 3)
    'p0, p1, p2, … (784 in all)'
    >>> first_few([*(f"p{i}" for i in range(784)), "label"], 3, last=2)
    'p0, p1, p2, …, p783, label (785 in all)'
    """
    if len(names) <= limit + last:
        return ", ".join(map(str, names))

    head = [str(name) for name in names[:limit]]
    tail = [str(name) for name in names[len(names) - last :]]
    return ", ".join([*head, "…", *tail]) + f" ({len(names)} in all)"


def channels_first(pixels: np.ndarray) -> Tensor:
    """Convert grayscale or channels-last images to a tensor (examples, channels, height, width).

    >>> channels_first(np.zeros((5, 8, 8, 3), np.uint8)).shape
    torch.Size([5, 3, 8, 8])
    """
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[-1] in (1, 3, 4) and pixels.shape[1] not in (1, 3):
        pixels = np.moveaxis(pixels, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(pixels))


def numbered(labels: Any) -> tuple[Tensor, list[str]]:
    """Convert labels to a tensor and class names.

    Non-negative integers stay as they are, floats are regression targets; anything else is a class name, numbered in
    sorted order.

    >>> numbered(["dog", "cat", "dog"])
    (tensor([1, 0, 1]), ['cat', 'dog'])
    """
    values = np.asarray(labels)
    if values.dtype.kind in "iub" and (not values.size or values.min() >= 0):
        return torch.from_numpy(values.astype(np.int64)), []

    if values.dtype.kind == "f":
        y = torch.from_numpy(to_float32(values))
        num_invalid = int((~y.isfinite()).sum())
        if num_invalid:
            raise ValueError(
                f"{num_invalid:,} of {y.numel():,} labels are not finite numbers: fill them or leave them out."
            )
        return y, []

    # numpy cannot sort objects of mixed types; their text can be sorted.
    if values.dtype.kind == "O":
        values = values.astype(str)
    names, class_index = np.unique(values, return_inverse=True)
    return torch.from_numpy(class_index.astype(np.int64)), [str(name) for name in names]


def to_float32(values: np.ndarray) -> np.ndarray:
    """Convert to float32 without a warning; values that are too large become infinite, and callers check for them."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def align_labels(y: Tensor, source_names: Sequence[str], names: Sequence[str]) -> Tensor:
    """Renumber labels that index ``source_names`` so that they index ``names``.

    >>> align_labels(torch.tensor([0, 1]), ["a", "c"], ["a", "b", "c"])
    tensor([0, 2])
    """
    if not names:
        return y
    return torch.tensor([names.index(name) for name in source_names])[y]
