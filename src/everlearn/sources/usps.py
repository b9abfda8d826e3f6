"""USPS: 9,298 digits from envelopes, 16 × 16 grey pixels (Hull, 1994), as libsvm's files or as one npz."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.data import Data, Pair
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.sparse import read_sparse

MOST_BYTES = 2**27  # of a file, unpacked; the larger of the two has 27 million
URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"


def _stored(folder: Path) -> Data:
    """Grey values from −1000 to 1000."""
    with np.load(folder / "usps.npz", allow_pickle=False) as stored:
        x, y, x_test, y_test = (stored[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    return Data(_pair(x / 1000, y), _pair(x_test / 1000, y_test), names="0123456789")


def _libsvm(folder: Path) -> Data:
    """Grey values from −1 to 1; a digit's label is one more than the digit."""
    train, test = (_one(folder / name) for name in ("usps.bz2", "usps.t.bz2"))
    return Data(train, test, names="0123456789")


def _one(path: Path) -> Pair:
    try:
        with bz2.open(path) as file:
            text = file.read(MOST_BYTES + 1).decode("ascii")
        if len(text) > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; get it anew.") from None
    labels, x = read_sparse(text, 256, path)
    return _pair(x, np.array([int(label) - 1 for label in labels]))


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    grey = torch.from_numpy((x.reshape(-1, 1, 16, 16).astype(np.float64) + 1) / 2).float()
    return grey, torch.from_numpy(y.astype(np.int64))


USPS = Published(
    "usps",
    (
        Layout((File("usps.npz", "f6510bba0d2745175f0d4d76bb6e040a"),), _stored),
        Layout(
            (
                File("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197", url=URL + "usps.bz2"),
                File("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118", url=URL + "usps.t.bz2"),
            ),
            _libsvm,
        ),
    ),
    "www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
)
