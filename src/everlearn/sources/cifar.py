"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32 × 32 pixels (Krizhevsky, 2009), from their binary versions.

The versions for Python are pickles, which run whatever code is in them when they are opened; they are not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.data import Data, Pair
from everlearn.sources.files import File, Layout, Published

PIXELS = 3 * 32 * 32  # channel by channel
TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ORIGIN = "www.cs.toronto.edu/~kriz/cifar.html, binary version"
URL = "https://www.cs.toronto.edu/~kriz/"


def _read(paths: list[Path], labels: int, classes: int) -> tuple[Pair, np.ndarray]:
    """Images and their last label, and all the labels; a record is the labels, a byte each, then the pixels."""
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    rows = raw.reshape(-1, labels + PIXELS)
    y = torch.from_numpy(rows[:, labels - 1].astype(np.int64))
    counts = y.bincount(minlength=classes)
    if len(counts) != classes or (counts != len(y) // classes).any():
        raise ValueError(f"{paths[0]} is damaged: its classes are not equally many.")
    return (torch.from_numpy(rows[:, labels:].reshape(-1, 3, 32, 32).copy()), y), rows[:, :labels]


def _ten(folder: Path) -> Data:
    train, _ = _read([folder / f"data_batch_{i}.bin" for i in range(1, 6)], 1, 10)
    test, _ = _read([folder / "test_batch.bin"], 1, 10)
    return Data(train, test, names=TEN)


def _hundred(folder: Path) -> Data:
    """Fine labels; the twenty coarse ones are the groups."""
    train, labels = _read([folder / "train.bin"], 2, 100)
    test, _ = _read([folder / "test.bin"], 2, 100)
    names = _names(folder / "fine_label_names.txt")
    coarse = _names(folder / "coarse_label_names.txt") or [f"coarse {c}" for c in range(20)]
    groups = {name: np.unique(labels[labels[:, 0] == c, 1]).tolist() for c, name in enumerate(coarse)}
    return Data(train, test, names=names, groups=groups)


def _names(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split() if path.exists() else []


CIFAR10 = Published(
    "cifar10",
    (
        Layout(
            tuple(
                File(f"{name}.bin", size=10_000 * (1 + PIXELS))
                for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
            ),
            _ten,
            ("cifar-10-batches-bin",),
            (
                File(
                    "cifar-10-binary.tar.gz",
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    url=URL + "cifar-10-binary.tar.gz",
                    unpacks="cifar-10-batches-bin",
                ),
            ),
        ),
    ),
    ORIGIN,
)

CIFAR100 = Published(
    "cifar100",
    (
        Layout(
            (File("train.bin", size=50_000 * (2 + PIXELS)), File("test.bin", size=10_000 * (2 + PIXELS))),
            _hundred,
            ("cifar-100-binary",),
            (
                File(
                    "cifar-100-binary.tar.gz",
                    "03b5dce01913d631647c71ecec9e9cb8",
                    url=URL + "cifar-100-binary.tar.gz",
                    unpacks="cifar-100-binary",
                ),
            ),
        ),
    ),
    ORIGIN,
)
