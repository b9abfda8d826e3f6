"""CIFAR-100: 60,000 colour images of 32 × 32 pixels in 100 classes (Krizhevsky, 2009), from its binary version."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everlearn.stream import Scenario, Stream
from everlearn.streams.build import split
from everlearn.streams.files import find

Pair = tuple[Tensor, Tensor]
FOLDER = "cifar-100-binary"
COUNTS = {"train.bin": 50_000, "test.bin": 10_000}
RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, then the pixels channel by channel


def load(root: str | Path | None = None) -> tuple[Pair, Pair]:
    """Training and test pairs (x, y): images of shape (3, 32, 32) in [0, 1], fine labels.

    Args:
        root: the folder of ``train.bin`` and ``test.bin``, or one that has a folder ``cifar-100-binary``; by default
            EVERLEARN_DATA.
    """
    train, test = find(FOLDER, dict.fromkeys(COUNTS), root, "www.cs.toronto.edu/~kriz/cifar.html, binary version")
    (x, y), (x_test, y_test) = _read(train), _read(test)
    return (x.clone(), y.clone()), (x_test.clone(), y_test.clone())


@cache
def _read(path: Path) -> Pair:
    raw = np.fromfile(path, np.uint8)
    if raw.size != COUNTS[path.name] * RECORD:
        raise ValueError(f"{path} is damaged: it has {raw.size:,} bytes, not {COUNTS[path.name] * RECORD:,}.")
    rows = raw.reshape(-1, RECORD)
    y = torch.from_numpy(rows[:, 1].astype(np.int64))
    if (y.bincount(minlength=100) != len(y) // 100).any():
        raise ValueError(f"{path} is damaged: its classes are not equally many.")
    return torch.from_numpy(rows[:, 2:].reshape(-1, 3, 32, 32).astype(np.float32) / 255), y


def split_cifar100(
    scenario: Scenario = "class", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split CIFAR-100: ten classes per task."""
    return split(*load(root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-cifar100")
