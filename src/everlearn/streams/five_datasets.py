"""The 5-Datasets benchmark: five data sets of ten classes in sequence (Ebrahimi et al., 2020)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources.registry import load_raw
from everlearn.streams.dataset_sequence import load_available, stream_name, stream_of_datasets, take_first
from everlearn.streams.subset import ImageResizer

DATASETS = ("mnist", "fashion_mnist", "notmnist", "svhn", "cifar10")


def five_datasets(
    scenario: Scenario = "class",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
) -> Stream:
    """Load MNIST, Fashion-MNIST, notMNIST, SVHN and CIFAR-10, as far as available, as one task each, at 3 × 32 × 32."""
    available = load_available({name: partial(load_raw, name, root) for name in DATASETS}, "five-datasets")
    dataset_names = take_first(list(available), tasks, "five-datasets")
    datasets = {name: available[name] for name in dataset_names}
    return stream_of_datasets(
        datasets,
        ImageResizer(3, 32),
        scenario=scenario,
        seed=seed,
        valid=valid,
        name=stream_name("five-datasets", DATASETS, dataset_names),
    )
