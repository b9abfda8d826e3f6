"""Five data sets, one after the other (Ebrahimi et al., 2020)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from everlearn.sources.published import raw
from everlearn.stream import Scenario, Stream
from everlearn.streams.parts import Fitted
from everlearn.streams.sets import a_task_per_set, first_of, name_of, present

SETS = ("mnist", "fashion_mnist", "notmnist", "svhn", "cifar10")


def five_datasets(
    scenario: Scenario = "class",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
) -> Stream:
    """MNIST, Fashion-MNIST, notMNIST, SVHN and CIFAR-10 as tasks of ten classes, those that are here, at 3 × 32 × 32."""
    found = present({name: partial(raw, name, root) for name in SETS}, "five-datasets")
    sets = {name: found[name] for name in first_of(list(found), tasks, "five-datasets")}
    name = name_of("five-datasets", SETS, list(sets))
    return a_task_per_set(sets, Fitted(3, 32), scenario=scenario, seed=seed, valid=valid, name=name)
