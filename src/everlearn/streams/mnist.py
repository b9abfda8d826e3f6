"""MNIST (LeCun, Cortes & Burges, 1998) and Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017), read from the published files.

Both are 70,000 grey images of 28 × 28 pixels in ten classes, in four files of one format.
"""

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


FASHION = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def load(root: str | Path | None = None) -> tuple[Pair, Pair]:
    """Training and test pairs (x, y): images of shape (1, 28, 28) in [0, 1].

    Args:
        root: the folder of the four gzipped files, or one that has a folder ``mnist``; by default EVERLEARN_DATA.
    """
    return _copied(find("mnist", FILES, root, "yann.lecun.com/exdb/mnist or its mirrors"))


def load_fashion(root: str | Path | None = None) -> tuple[Pair, Pair]:
    """The same of Fashion-MNIST, whose folder is ``fashion_mnist``."""
    return _copied(find("fashion_mnist", FASHION, root, "github.com/zalandoresearch/fashion-mnist"))


def _copied(paths: list[Path]) -> tuple[Pair, Pair]:
    (x, y), (x_test, y_test) = _read(tuple(paths))
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


def split_fashion_mnist(
    scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split Fashion-MNIST: two kinds of clothing per task."""
    data = load_fashion(root)
    return split(*data, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-fashion-mnist")


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
