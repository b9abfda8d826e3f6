"""Streams of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009)."""

from __future__ import annotations

from pathlib import Path

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources import load
from everlearn.streams.builders import split


def split_cifar10(
    scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split CIFAR-10: two classes per task."""
    data = load("cifar10", root)
    return split(*data, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-cifar10")


def split_cifar100(
    scenario: Scenario = "class", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split CIFAR-100: ten classes per task."""
    data = load("cifar100", root)
    return split(*data, tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="split-cifar100")
