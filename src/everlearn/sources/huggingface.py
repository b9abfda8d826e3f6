"""Read a data set of Hugging Face's ``datasets`` that the user has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from everlearn.sources.arrays import as_inputs
from everlearn.sources.labeled_data import Data, align_labels, hold_back, numbered


def hugging_face(dataset: Any, *, x: str, y: str, test: float = 0.2) -> Data:
    """Read two columns of a ``datasets.Dataset`` or ``DatasetDict`` into memory.

    The format of the data set is ignored, because ``with_format("torch")`` converts bytes to 64-bit integers: images
    stay bytes until they become floats in [0, 1]. Texts are returned as a list.

    Args:
        dataset: a Dataset, or a DatasetDict with ``train`` and ``test`` (or ``validation``).
        x: input column: images, texts, numbers, or lists of numbers of equal length.
        y: label column.
        test: share of examples for testing, if ``dataset`` is a single Dataset.
    """
    if not isinstance(dataset, Mapping):
        labels, names = _read_labels(dataset, y)
        return hold_back(_read_inputs(dataset, x), labels, test, names=names).copy()

    test_split = next((split for split in ("test", "validation") if split in dataset), None)
    if "train" not in dataset or test_split is None:
        raise ValueError(
            f"A DatasetDict needs the splits train and test (or validation), got {', '.join(map(str, dataset))}: give "
            "a single split, and a share of it is used for testing."
        )

    train_labels, names = _read_labels(dataset["train"], y)
    test_labels, test_names = _read_labels(dataset[test_split], y)
    if bool(names) != bool(test_names) or not set(test_names) <= set(names):
        raise ValueError(f"The splits train and {test_split} have different classes: {names}, {test_names}.")

    train_pair = (_read_inputs(dataset["train"], x), train_labels)
    test_pair = (_read_inputs(dataset[test_split], x), align_labels(test_labels, test_names, names))
    return Data(train_pair, test_pair, names=names).copy()


def _read_column(dataset: Any, name: str) -> list[Any]:
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "column_names"):
        raise TypeError(
            f"Expected a Dataset or DatasetDict of Hugging Face's datasets, got a {type(dataset).__name__}."
        )
    if name not in dataset.column_names:
        raise ValueError(f"There is no column {name!r}; there are {', '.join(dataset.column_names)}.")

    values = list(dataset.with_format(None)[name])
    if not values:
        raise ValueError("The data set has no examples.")
    return values


def _read_labels(dataset: Any, name: str) -> tuple[torch.Tensor, list[str]]:
    values = _read_column(dataset, name)
    if any(value is None for value in values):
        raise ValueError(f"The column {name!r} has empty cells: leave these examples out.")

    # Integer labels have their names in the ClassLabel feature.
    y, names = numbered(values)
    if not names:
        names = list(getattr(dataset.features[name], "names", None) or [])
    return y, names


def _read_inputs(dataset: Any, name: str) -> Any:
    values = _read_column(dataset, name)
    if isinstance(values[0], str):
        return values
    if hasattr(values[0], "convert"):  # a Pillow image
        return _stack_images(values, name)

    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"The column {name!r} has lists of different lengths: pad or truncate them first.") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"The column {name!r} must hold images, texts or numbers, got {type(values[0]).__name__}.")
    return as_inputs(array.astype(_column_dtype(dataset.features[name], array.dtype)))


def _stack_images(pil_images: list[Any], name: str) -> torch.Tensor:
    sizes = {image.size for image in pil_images}
    if len(sizes) > 1:
        raise ValueError(f"The images in {name!r} have {len(sizes)} sizes: resize them to one with dataset.map first.")

    # "L" is grayscale and "1" is black and white.
    if all(image.mode in ("L", "1") for image in pil_images):
        pixels = torch.from_numpy(np.stack([np.array(image.convert("L")) for image in pil_images]))
        return pixels.unsqueeze(1)
    pixels = torch.from_numpy(np.stack([np.array(image.convert("RGB")) for image in pil_images]))
    return pixels.permute(0, 3, 1, 2)


def _column_dtype(feature: Any, default: Any) -> Any:
    """Return the dtype of the numbers in a column of nested lists, or ``default`` if the feature has none."""
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    try:
        return np.dtype(feature.dtype)
    except (AttributeError, TypeError):
        return default
