"""Arrays in an npz file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.data import Data, hold_back, images, numbered, renumbered


def npz(path: str | Path, *, x: str = "x", y: str = "y", test: float = 0.2) -> Data:
    """Inputs and labels from a numpy archive; objects, which could run code, are refused.

    Bytes with two or three axes per example are images: they become numbers from 0 to 1 with the channels first.
    Where the file has ``x_test`` and ``y_test`` (for ``x`` also ``x_train``), they are the test set.

    Args:
        path: the file.
        x: the name of the inputs in it.
        y: the name of the labels.
        test: the share of examples for tests, where the file has no test set of its own.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return _cut({name: stored[name] for name in stored.files}, path, x, y, test)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, TypeError, NotImplementedError, MemoryError) as error:
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"There is no file {path}.") from None
        raise ValueError(f"{path} is not an npz file, or is damaged: {error}.") from None
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise ValueError(f"{path} holds Python objects, which are not read: save plain arrays of numbers.") from None


def _cut(stored: dict[str, Any], path: str | Path, x: str, y: str, test: float) -> Data:
    own = {name: name if name in stored else f"{name}_train" for name in (x, y)}
    if lacking := [name for name in (x, y) if own[name] not in stored]:
        raise ValueError(
            f"{path} has no array {' and no '.join(map(repr, lacking))}; it has {', '.join(stored)}: say which with x=…, y=…."
        )
    labels, names = numbered(stored[own[y]])
    inputs = as_inputs(stored[own[x]])
    if f"{x}_test" not in stored or f"{y}_test" not in stored:
        return hold_back(inputs, labels, test, names=names).copy()
    labels_test, names_test = numbered(stored[f"{y}_test"])
    if bool(names) != bool(names_test) or not set(names_test) <= set(names):
        raise ValueError(f"{path}: training and test labels are words, and not the same ones: {names}, {names_test}.")
    held = as_inputs(stored[f"{x}_test"]), renumbered(labels_test, names_test, names)
    return Data((inputs, labels), held, names=names).copy()


def as_inputs(array: np.ndarray) -> Tensor:
    """Bytes with two or three axes per example as images, float64 as torch's float32, others as they are."""
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return images(array)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.float32)
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
