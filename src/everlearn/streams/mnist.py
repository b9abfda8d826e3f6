"""Streams of MNIST (LeCun, Cortes & Burges, 1998) and Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017)."""

from __future__ import annotations

from pathlib import Path

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


def rotated_mnist(
    scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """All ten digits per task, turned by another angle each time."""
    return rotated(*load("mnist", root), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-mnist")
