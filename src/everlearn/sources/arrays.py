"""Arrays in an npz file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.data import Data, hold_back, images, numbered, renumbered
from everlearn.sources.limits import check_fits


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
            wanted = _wanted(stored.files, path, x, y)
            arrays = _read(stored, wanted, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, TypeError, NotImplementedError, MemoryError) as error:
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"There is no file {path}.") from None
        raise ValueError(f"{path} is not an npz file, or is damaged: {error}.") from None
    labels, names = numbered(arrays[1])
    inputs = as_inputs(arrays[0])
    if len(arrays) == 2:
        return hold_back(inputs, labels, test, names=names).copy()
    labels_test, names_test = numbered(arrays[3])
    if bool(names) != bool(names_test) or not set(names_test) <= set(names):
        raise ValueError(f"{path}: training and test labels are words, and not the same ones: {names}, {names_test}.")
    held = as_inputs(arrays[2]), renumbered(labels_test, names_test, names)
    return Data((inputs, labels), held, names=names).copy()


def _wanted(stored: Sequence[str], path: str | Path, x: str, y: str) -> list[str]:
    """The arrays that are read: inputs and labels and, where there are such, those for tests."""
    own = {name: name if name in stored else f"{name}_train" for name in (x, y)}
    if lacking := [name for name in (x, y) if own[name] not in stored]:
        raise ValueError(
            f"{path} has no array {' and no '.join(map(repr, lacking))}; it has {', '.join(stored)}: say which with x=…, y=…."
        )
    held = [f"{x}_test", f"{y}_test"]
    return [own[x], own[y], *(held if set(held) <= set(stored) else [])]


def _read(stored: Any, wanted: Sequence[str], path: str | Path) -> list[np.ndarray]:
    """These arrays and no others, as long as they fit: a small file may unpack to more than any memory holds."""
    sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in stored.zip.infolist()}
    check_fits(sum(sizes[name] for name in wanted), path)
    try:
        return [stored[name] for name in wanted]
    except ValueError as error:
        if "pickle" in str(error):
            raise ValueError(
                f"{path} holds Python objects, which are not read: save plain arrays of numbers."
            ) from None
        raise ValueError(f"{path} is not an npz file, or is damaged: {error}.") from None


def as_inputs(array: np.ndarray) -> Tensor:
    """Bytes with two or three axes per example as images, float64 as torch's float32, others as they are."""
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return images(array)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.float32)
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
