"""A data set of Hugging Face's ``datasets`` that the user has already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from everlearn.sources.arrays import as_inputs
from everlearn.sources.data import Data, hold_back, numbered, renumbered


def hugging_face(dataset: Any, *, x: str, y: str, test: float = 0.2) -> Data:
    """Two columns of a ``datasets.Dataset`` or ``DatasetDict``, in memory.

    The columns are read without the data set's own format, because ``with_format("torch")`` makes 64-bit numbers of
    bytes: images stay bytes until they become numbers from 0 to 1. Texts come as a list.

    Args:
        dataset: a Dataset, or a DatasetDict with ``train`` and ``test`` (or ``validation``).
        x: the column to learn from: images, texts, numbers or lists of numbers of one length.
        y: the column to predict.
        test: the share of examples for tests, where there is no such part.
    """
    if not isinstance(dataset, Mapping):
        labels, names = _labels(dataset, y)
        return hold_back(_inputs(dataset, x), labels, test, names=names).copy()
    own = next((part for part in ("test", "validation") if part in dataset), None)
    if "train" not in dataset or own is None:
        raise ValueError(
            f"A DatasetDict needs the parts train and test (or validation), got {', '.join(map(str, dataset))}: give one "
            "of its parts alone, and a share of it is held back."
        )
    (train, names), (held, others) = _labels(dataset["train"], y), _labels(dataset[own], y)
    if bool(names) != bool(others) or not set(others) <= set(names):
        raise ValueError(f"The parts train and {own} have different classes: {names}, {others}.")
    pairs = (_inputs(dataset["train"], x), train), (_inputs(dataset[own], x), renumbered(held, others, names))
    return Data(*pairs, names=names).copy()


def _column(dataset: Any, name: str) -> list[Any]:
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "column_names"):
        raise TypeError(
            f"A Dataset or DatasetDict of Hugging Face's datasets is wanted, got a {type(dataset).__name__}."
        )
    if name not in dataset.column_names:
        raise ValueError(f"There is no column {name!r}; there are {', '.join(dataset.column_names)}.")
    values = list(dataset.with_format(None)[name])
    if not values:
        raise ValueError("The data set has no examples.")
    return values


def _labels(dataset: Any, name: str) -> tuple[torch.Tensor, list[str]]:
    values = _column(dataset, name)
    if any(value is None for value in values):
        raise ValueError(f"The column {name!r} has empty cells: leave these examples out.")
    y, names = numbered(values)
    return y, names or list(getattr(dataset.features[name], "names", None) or [])


def _inputs(dataset: Any, name: str) -> Any:
    values = _column(dataset, name)
    if isinstance(values[0], str):
        return values
    if hasattr(values[0], "convert"):  # Pillow's images
        return _pictures(values, name)
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"The column {name!r} has lists of different lengths: pad or cut them first.") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"The column {name!r} must hold images, texts or numbers, got {type(values[0]).__name__}.")
    return as_inputs(array.astype(_kind(dataset.features[name], array.dtype)))


def _pictures(values: list[Any], name: str) -> torch.Tensor:
    if len(sizes := {value.size for value in values}) > 1:
        raise ValueError(f"The images in {name!r} have {len(sizes)} sizes: bring them to one with dataset.map first.")
    grey = all(value.mode in ("L", "1") for value in values)
    pixels = torch.from_numpy(np.stack([np.array(value.convert("L" if grey else "RGB")) for value in values]))
    return pixels.unsqueeze(1) if grey else pixels.permute(0, 3, 1, 2)


def _kind(feature: Any, otherwise: Any) -> Any:
    """The dtype of the numbers in a column, however deep they are nested."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    try:
        return np.dtype(feature.dtype)
    except (AttributeError, TypeError):
        return otherwise
