"""Validate arrays as scikit-learn does, with the error messages that its estimator checks expect."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def check_inputs(X: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """Convert inputs to a float tensor of finite numbers with a row per example.

    Args:
        X: the inputs.
        shape: expected shape of one example; any if not given.
    """
    if hasattr(X, "toarray"):
        raise TypeError("Sparse data are not supported: give X.toarray().")
    array = np.asarray(X)
    if array.dtype.kind == "c":
        raise ValueError("Complex data not supported: give the real and the imaginary part as features.")
    try:
        with np.errstate(over="ignore"):  # numbers that overflow become infinite, and are refused below
            array = array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"X must contain only numbers ({error}): convert the other values to numbers first."
        ) from None

    if array.ndim < 2:
        raise ValueError(
            f"X must have a row per example, got the shape {array.shape}. Reshape your data: X.reshape(-1, 1)."
        )
    if not array.size:
        empty_axis = "0 feature(s)" if len(array) else "0 sample(s)"
        raise ValueError(f"Found array with {empty_axis} (shape={array.shape}) while a minimum of 1 is required.")
    if shape is not None and array.shape[1:] != shape:
        features = " × ".join(map(str, array.shape[1:]))
        expected = " × ".join(map(str, shape))
        raise ValueError(
            f"X has {features} features, but ContinualClassifier is expecting {expected} features as input."
        )

    num_invalid = int((~np.isfinite(array)).reshape(len(array), -1).any(1).sum())
    if num_invalid:
        raise ValueError(f"{num_invalid} of {len(array)} rows of X hold NaN or infinity: fill or remove them.")
    return torch.from_numpy(np.ascontiguousarray(array))


def check_labels(y: Any) -> Array:
    """Convert labels to an array of integers or strings, one per example."""
    if y is None:
        raise ValueError("ContinualClassifier requires y to be passed, but the target y is None.")
    array = np.asarray(y)
    if array.ndim != 1:
        raise ValueError(f"y must be one class per example, got the shape {array.shape}: give y.ravel() or one column.")
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array):
        array = array.astype(str)

    is_float = array.dtype.kind == "f"
    if is_float and not np.isfinite(array).all():
        raise ValueError("Input y contains NaN or infinity: fill them or remove these examples.")
    is_continuous = is_float and (array != np.floor(array)).any()
    if array.dtype.kind not in "iubfUS" or is_continuous:
        raise ValueError(
            f"Unknown label type: {array.dtype}, continuous or of mixed types; a class is an integer or a string."
        )
    return array


def merge_classes(known_classes: Array | None, *new_labels: Array | None) -> Array:
    """Return all classes, sorted; strings and numbers cannot be mixed."""
    parts = [part for part in (known_classes, *new_labels) if part is not None]
    if len({part.dtype.kind in "US" for part in parts}) > 1:
        raise ValueError("y: classes are strings in one call and numbers in another; use the same type in all calls.")
    classes: Array = np.unique(np.concatenate(parts))
    return classes
