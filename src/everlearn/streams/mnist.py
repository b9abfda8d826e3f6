"""Streams of MNIST (LeCun, Cortes & Burges, 1998) and Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017)."""

from __future__ import annotations

from pathlib import Path

from torch.nn.functional import pad

from everlearn.sources import load
from everlearn.stream import Scenario, Stream
from everlearn.streams.build import permuted, rotated, split


def split_mnist(
    scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split MNIST: two digits per task."""
    return split(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-mnist")


def split_fashion_mnist(
    scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split Fashion-MNIST: two kinds of clothing per task."""
    data = load("fashion_mnist", root)
    return split(*data, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-fashion-mnist")


def permuted_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """All ten digits per task, pixels in another order each time."""
    return permuted(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-mnist")


def permuted_mnist_32(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Permuted MNIST with a rim of two pixels, 32 × 32, as van de Ven & Tolias permute it."""
    (x, y), (x_test, y_test) = load("mnist", root)
    wide = [(pad(images, (2, 2, 2, 2)), labels) for images, labels in ((x, y), (x_test, y_test))]
    return permuted(*wide, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-mnist-32")


def rotated_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """All ten digits per task, turned by another angle each time."""
    return rotated(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-mnist")
