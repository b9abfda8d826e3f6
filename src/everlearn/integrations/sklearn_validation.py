"""Arrays as people have them for scikit-learn, checked; in the words that scikit-learn has for what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def inputs(X: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """Rows of finite numbers, in the shape that is known."""
    if hasattr(X, "toarray"):
        raise TypeError("Sparse data are not supported: give X.toarray().")
    array = np.asarray(X)
    if array.dtype.kind == "c":
        raise ValueError("Complex data not supported: give the real and the imaginary part as features.")
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is looked for below
            array = array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise type(error)(f"X must be made of numbers, got others ({error}): make numbers of them first.") from None
    if array.ndim < 2:
        raise ValueError(
            f"X must have a row per example, got the shape {array.shape}. Reshape your data: X.reshape(-1, 1)."
        )
    if not array.size:
        what = "0 feature(s)" if len(array) else "0 sample(s)"
        raise ValueError(f"Found array with {what} (shape={array.shape}) while a minimum of 1 is required.")
    if shape is not None and array.shape[1:] != shape:
        given, wanted = (" × ".join(map(str, s)) for s in (array.shape[1:], shape))
        raise ValueError(f"X has {given} features, but ContinualClassifier is expecting {wanted} features as input.")
    if wrong := int((~np.isfinite(array)).reshape(len(array), -1).any(1).sum()):
        raise ValueError(f"{wrong} of {len(array)} rows of X hold NaN or infinity: fill them or leave them out.")
    return torch.from_numpy(np.ascontiguousarray(array))


def labels(y: Any) -> Array:
    """One label per example: whole numbers or words."""
    if y is None:
        raise ValueError("ContinualClassifier requires y to be passed, but the target y is None.")
    array = np.asarray(y)
    if array.ndim != 1:
        raise ValueError(f"y must be one class per example, got the shape {array.shape}: give y.ravel() or one column.")
    if array.dtype.kind == "O" and all(isinstance(v, str) for v in array):
        array = array.astype(str)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("Input y contains NaN or infinity: fill them or leave these examples out.")
    if array.dtype.kind not in "iubfUS" or (array.dtype.kind == "f" and (array != np.floor(array)).any()):
        raise ValueError(
            f"Unknown label type: {array.dtype}, continuous or of mixed kinds; a class is a whole number or a word."
        )
    return array


def merged(known: Array | None, *new: Array | None) -> Array:
    """All classes, sorted; words and numbers do not mix."""
    parts = [part for part in (known, *new) if part is not None]
    if len({part.dtype.kind in "US" for part in parts}) > 1:
        raise ValueError("y: classes are words in one call and numbers in another; give the same kind in all.")
    every: Array = np.unique(np.concatenate(parts))
    return every
