"""MNIST: 70,000 handwritten digits of 28 × 28 pixels (LeCun, Cortes & Burges, 1998), read from the published files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from everlearn.stream import Scenario, Stream
from everlearn.streams.build import permuted, rotated, split
from everlearn.streams.files import find, read_idx

Pair = tuple[Tensor, Tensor]
FILES = {  # the published checksums
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def load(root: str | Path | None = None) -> tuple[Pair, Pair]:
    """Training and test pairs (x, y): images of shape (1, 28, 28) in [0, 1].

    Args:
        root: the folder of the four gzipped files, or one that has a folder ``mnist``; by default EVERLEARN_DATA.
    """
    (x, y), (x_test, y_test) = _read(tuple(find("mnist", FILES, root, "yann.lecun.com/exdb/mnist or its mirrors")))
    return (x.clone(), y.clone()), (x_test.clone(), y_test.clone())  # what the caller changes stays the caller's


@cache
def _read(paths: tuple[Path, ...]) -> tuple[Pair, Pair]:
    """Read once a process."""
    x, y, x_test, y_test = map(read_idx, paths)
    return (_images(x), y.long()), (_images(x_test), y_test.long())


def _images(raw: Tensor) -> Tensor:
    return raw.unsqueeze(1).to(torch.float32) / 255


def split_mnist(
    scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split MNIST: two digits per task."""
    return split(*load(root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-mnist")


def permuted_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """All ten digits per task, pixels in another order each time."""
    return permuted(*load(root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-mnist")


def rotated_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """All ten digits per task, turned by another angle each time."""
    return rotated(*load(root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-mnist")
