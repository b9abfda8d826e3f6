"""CIFAR-10 and CIFAR-100: 60,000 color images of 32 × 32 pixels (Krizhevsky, 2009), from their binary versions.

The Python versions are pickles, which can run arbitrary code when they are opened; they are not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.labeled_data import Data, Pair

NUM_PIXELS = 3 * 32 * 32  # channel by channel
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ORIGIN = "www.cs.toronto.edu/~kriz/cifar.html, binary version"
URL = "https://www.cs.toronto.edu/~kriz/"


def _read_records(paths: list[Path], num_labels: int, num_classes: int) -> tuple[Pair, np.ndarray]:
    """Read records of ``num_labels`` label bytes followed by the pixels.

    Returns:
        The images with the last label of each, and an array of all labels.
    """
    content = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    records = content.reshape(-1, num_labels + NUM_PIXELS)
    labels = records[:, :num_labels]
    y = torch.from_numpy(labels[:, -1].astype(np.int64))

    # The files have no checksum of their own, but all classes are equally large.
    class_sizes = y.bincount(minlength=num_classes)
    if len(class_sizes) != num_classes or (class_sizes != len(y) // num_classes).any():
        raise ValueError(f"{paths[0]} is damaged: its classes differ in size.")

    images = torch.from_numpy(records[:, num_labels:].reshape(-1, 3, 32, 32).copy())
    return (images, y), labels


def _read_cifar10(folder: Path) -> Data:
    train, _ = _read_records([folder / f"data_batch_{i}.bin" for i in range(1, 6)], 1, 10)
    test, _ = _read_records([folder / "test_batch.bin"], 1, 10)
    return Data(train, test, names=CIFAR10_CLASSES)


def _read_cifar100(folder: Path) -> Data:
    """Read CIFAR-100 with its fine labels; the twenty coarse labels are the groups."""
    train, labels = _read_records([folder / "train.bin"], 2, 100)
    test, _ = _read_records([folder / "test.bin"], 2, 100)
    fine_names = _read_names(folder / "fine_label_names.txt")
    coarse_names = _read_names(folder / "coarse_label_names.txt") or [f"coarse {c}" for c in range(20)]

    coarse_labels = labels[:, 0]
    fine_labels = labels[:, 1]
    groups = {name: np.unique(fine_labels[coarse_labels == c]).tolist() for c, name in enumerate(coarse_names)}
    return Data(train, test, names=fine_names, groups=groups)


def _read_names(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="ascii").split()


CIFAR10 = PublishedDataset(
    "cifar10",
    (
        Layout(
            tuple(
                File(f"{name}.bin", size=10_000 * (1 + NUM_PIXELS))
                for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
            ),
            _read_cifar10,
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

CIFAR100 = PublishedDataset(
    "cifar100",
    (
        Layout(
            (File("train.bin", size=50_000 * (2 + NUM_PIXELS)), File("test.bin", size=10_000 * (2 + NUM_PIXELS))),
            _read_cifar100,
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
