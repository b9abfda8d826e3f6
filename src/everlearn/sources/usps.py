"""USPS: 9,298 digits from envelopes, 16 × 16 grayscale (Hull, 1994), as libsvm files or as one npz file."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.labeled_data import Data, Pair
from everlearn.sources.libsvm import read_sparse

MAX_BYTES = 2**27  # of an unpacked file; the larger of the two has 27 million
URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"


def _read_npz(folder: Path) -> Data:
    """Read the npz file, whose gray values lie between −1000 and 1000."""
    with np.load(folder / "usps.npz", allow_pickle=False) as stored:
        train = _as_pair(stored["x_train"] / 1000, stored["y_train"])
        test = _as_pair(stored["x_test"] / 1000, stored["y_test"])
    return Data(train, test, names="0123456789")


def _read_libsvm(folder: Path) -> Data:
    """Read the libsvm files, whose gray values lie between −1 and 1, and whose labels are digit + 1."""
    train = _read_libsvm_file(folder / "usps.bz2")
    test = _read_libsvm_file(folder / "usps.t.bz2")
    return Data(train, test, names="0123456789")


def _read_libsvm_file(path: Path) -> Pair:
    try:
        with bz2.open(path) as file:
            text = file.read(MAX_BYTES + 1).decode("ascii")
        if len(text) > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES:,} bytes")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; get it again.") from None

    labels, x = read_sparse(text, 256, path)
    return _as_pair(x, np.array([int(label) - 1 for label in labels]))


def _as_pair(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """Scale gray values from [−1, 1] to [0, 1]."""
    images = torch.from_numpy((x.reshape(-1, 1, 16, 16).astype(np.float64) + 1) / 2).float()
    return images, torch.from_numpy(y.astype(np.int64))


USPS = PublishedDataset(
    "usps",
    (
        Layout((File("usps.npz", "f6510bba0d2745175f0d4d76bb6e040a"),), _read_npz),
        Layout(
            (
                File("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197", url=URL + "usps.bz2"),
                File("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118", url=URL + "usps.t.bz2"),
            ),
            _read_libsvm,
        ),
    ),
    "www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
)
