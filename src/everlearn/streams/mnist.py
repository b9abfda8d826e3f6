"""Streams of MNIST (LeCun, Cortes & Burges, 1998) and Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017)."""

from __future__ import annotations

from pathlib import Path

from torch.nn.functional import pad

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources import load
from everlearn.streams.builders import permuted, rotated, split


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
    """Permuted MNIST: all ten digits per task, with another pixel permutation each."""
    return permuted(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-mnist")


def permuted_mnist_32(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Permuted MNIST, zero-padded to 32 × 32 before the permutation, as in van de Ven & Tolias."""
    (x, y), (x_test, y_test) = load("mnist", root)
    train = (pad(x, (2, 2, 2, 2)), y)
    test = (pad(x_test, (2, 2, 2, 2)), y_test)
    return permuted(train, test, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-mnist-32")


def rotated_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Rotated MNIST: all ten digits per task, rotated by another angle each."""
    return rotated(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-mnist")
