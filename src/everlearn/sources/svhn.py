"""Street View House Numbers: 99,289 digits in colour, 32 × 32 pixels (Netzer et al., 2011), the cropped version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.extras import needs
from everlearn.sources.data import Data, Pair
from everlearn.sources.files import File, Layout, Published

URL = "http://ufldl.stanford.edu/housenumbers/"


def _read(folder: Path) -> Data:
    return Data(_one(folder / "train_32x32.mat"), _one(folder / "test_32x32.mat"), names="0123456789")


def _one(path: Path) -> Pair:
    """A file has the images last and calls the digit 0 by the label 10."""
    stored = read_mat(path, ("X", "y"))
    x = np.ascontiguousarray(np.transpose(stored["X"], (3, 2, 0, 1)))
    return torch.from_numpy(x), torch.from_numpy(stored["y"].astype(np.int64).ravel() % 10)


def read_mat(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Some arrays of a Matlab file."""
    io = needs("scipy.io", "data", "Reading Matlab files (.mat)")
    try:
        stored = io.loadmat(path, variable_names=keys)
        return {key: stored[key] for key in keys}
    except (io.matlab.MatReadError, ValueError, TypeError, KeyError, OSError, NotImplementedError) as error:
        raise ValueError(f"{path} is not a Matlab file with {', '.join(keys)}, or is damaged: {error}.") from None


SVHN = Published(
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
