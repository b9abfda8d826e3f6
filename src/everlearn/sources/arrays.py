"""Read labeled arrays from an npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.labeled_data import Data, align_labels, channels_first, hold_back, numbered
from everlearn.sources.limits import check_fits


def npz(path: str | Path, *, x: str = "x", y: str = "y", test: float = 0.2) -> Data:
    """Read inputs and labels from a numpy archive; arrays of Python objects, which could run code, are refused.

    Bytes with two or three axes per example are images and become floats in [0, 1] with the channels first. If the
    file has ``x_test`` and ``y_test``, they are the test set, and the training arrays may be called ``x_train`` and
    ``y_train``.

    Args:
        path: the file.
        x: name of the input array.
        y: name of the label array.
        test: share of examples for testing, if the file has no test set.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            array_names = _choose_arrays(stored.files, path, x, y)
            arrays = _read_arrays(stored, array_names, path)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, TypeError, NotImplementedError, MemoryError) as error:
        raise ValueError(f"{path} is not an npz file, or is damaged: {error}.") from None

    labels, names = numbered(arrays[1])
    inputs = as_inputs(arrays[0])
    if len(arrays) == 2:
        return hold_back(inputs, labels, test, names=names).copy()

    test_labels, test_names = numbered(arrays[3])
    if bool(names) != bool(test_names) or not set(test_names) <= set(names):
        raise ValueError(f"{path}: the test labels are not classes of the training labels: {names}, {test_names}.")
    test_pair = as_inputs(arrays[2]), align_labels(test_labels, test_names, names)
    return Data((inputs, labels), test_pair, names=names).copy()


def _choose_arrays(stored_names: Sequence[str], path: str | Path, x: str, y: str) -> list[str]:
    """Return the names of the arrays to read: inputs, labels and, if present, the test inputs and labels."""
    train_names = []
    missing_names = []
    for name in (x, y):
        if name in stored_names:
            train_names.append(name)
        elif f"{name}_train" in stored_names:
            train_names.append(f"{name}_train")
        else:
            missing_names.append(name)

    if missing_names:
        raise ValueError(
            f"{path} has no array {' and no '.join(map(repr, missing_names))}; it has {', '.join(stored_names)}: "
            "name the arrays with x=…, y=…."
        )

    test_names = [f"{x}_test", f"{y}_test"]
    if set(test_names) <= set(stored_names):
        return train_names + test_names
    return train_names


def _read_arrays(stored: Any, array_names: Sequence[str], path: str | Path) -> list[np.ndarray]:
    """Read the named arrays only, and only if they fit: a small file may unpack to more than the memory."""
    sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in stored.zip.infolist()}
    check_fits(sum(sizes[name] for name in array_names), path)
    try:
        return [stored[name] for name in array_names]
    except ValueError as error:
        if "pickle" in str(error):
            raise ValueError(
                f"{path} holds Python objects, which are not read: save plain arrays of numbers."
            ) from None
        raise ValueError(f"{path} is not an npz file, or is damaged: {error}.") from None


def as_inputs(array: np.ndarray) -> Tensor:
    """Convert an array to model inputs: image bytes stay bytes, other bytes and float64 become float32."""
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return channels_first(array)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype in (torch.uint8, torch.float64):
        return tensor.to(torch.float32)
    return tensor
