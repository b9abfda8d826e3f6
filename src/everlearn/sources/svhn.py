"""Street View House Numbers: 99,289 color digits, 32 × 32 pixels (Netzer et al., 2011), the cropped version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.runtime.optional_imports import import_optional
from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.labeled_data import Data, Pair

URL = "http://ufldl.stanford.edu/housenumbers/"


def _read(folder: Path) -> Data:
    train = _read_digits(folder / "train_32x32.mat")
    test = _read_digits(folder / "test_32x32.mat")
    return Data(train, test, names="0123456789")


def _read_digits(path: Path) -> Pair:
    """Read images, stored as (height, width, channels, examples), and labels; the digit 0 is stored as 10."""
    stored = read_mat(path, ("X", "y"))
    x = np.ascontiguousarray(np.transpose(stored["X"], (3, 2, 0, 1)))
    y = stored["y"].astype(np.int64).ravel() % 10
    return torch.from_numpy(x), torch.from_numpy(y)


def read_mat(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read the named arrays of a Matlab file."""
    io = import_optional("scipy.io", "data", "Reading Matlab files (.mat)")
    try:
        stored = io.loadmat(path, variable_names=keys)
        return {key: stored[key] for key in keys}
    except (io.matlab.MatReadError, ValueError, TypeError, KeyError, OSError, NotImplementedError) as error:
        raise ValueError(f"{path} is not a Matlab file with {', '.join(keys)}, or is damaged: {error}.") from None


SVHN = PublishedDataset(
    "svhn",
    (
        Layout(
            (
                File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", url=URL + "train_32x32.mat"),
                File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", url=URL + "test_32x32.mat"),
            ),
            _read,
        ),
    ),
    "ufldl.stanford.edu/housenumbers, cropped digits",
)
