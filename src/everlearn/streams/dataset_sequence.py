"""Build streams with one data set per task."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from everlearn.core.data_source import Arrays
from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources import Data
from everlearn.streams.from_tasks import from_tasks
from everlearn.streams.subset import View

T = TypeVar("T")


def stream_of_datasets(
    datasets: Mapping[str, Data], view: View | None, *, scenario: Scenario, seed: int, valid: float, name: str
) -> Stream:
    """Build a stream with one task per data set, in order; the settings record the names of the data sets.

    The classes of each data set get the next output indices; domain-incremental data sets share theirs and must have
    the same number of classes.

    Args:
        datasets: data sets by name.
        view: transform of the inputs, applied to batches.
        scenario: "task", "domain" or "class".
        seed: seed of the validation split.
        valid: share of each task's training examples to use for validation.
        name: name of the stream.
    """
    num_classes = {}
    for dataset_name, data in datasets.items():
        (_, y), _ = data
        num_classes[dataset_name] = len(data.names) or int(y.max()) + 1
    if scenario == "domain" and len(set(num_classes.values())) > 1:
        raise ValueError(
            f"{name} has no domain-incremental form, because its data sets have different classes: {num_classes}."
        )

    pairs = []
    classes = []
    first_class = 0
    for dataset_name, data in datasets.items():
        (x, y), (x_test, y_test) = data
        train = Arrays(x, y + first_class, view=view)
        test = Arrays(x_test, y_test + first_class, view=view)
        pairs.append((train, test))

        size = num_classes[dataset_name]
        classes.append(range(first_class, first_class + size))
        if scenario != "domain":
            first_class += size

    stream = from_tasks(
        pairs,
        scenario=scenario,
        names=list(datasets),
        classes=classes,
        seed=seed,
        valid=valid,
        name=name,
    )
    return replace(stream, settings={**stream.settings, "sets": list(datasets)})


def load_available(loaders: Mapping[str, Callable[[], Data]], name: str) -> dict[str, Data]:
    """Load the data sets whose files exist, in order; warn about the others, raise if fewer than two exist."""
    loaded = {}
    missing = {}
    for dataset_name, load in loaders.items():
        try:
            loaded[dataset_name] = load()
        except FileNotFoundError as error:
            missing[dataset_name] = str(error)

    reasons = " ".join(missing.values())
    if len(loaded) < 2:
        raise FileNotFoundError(
            f"{name} needs at least two of its data sets, and has {', '.join(loaded) or 'none'}. {reasons}"
        )
    if missing:
        warnings.warn(f"{name} is built without {', '.join(missing)}, which were not found. {reasons}", stacklevel=3)
    return loaded


def stream_name(name: str, all_datasets: Sequence[str], datasets: Sequence[str]) -> str:
    """Append the data sets to the name if some are missing, because results are not comparable then.

    >>> stream_name("three", ["a", "b", "c"], ["a", "c"])
    'three-of-a-c'
    """
    if list(all_datasets) == list(datasets):
        return name
    return f"{name}-of-{'-'.join(datasets)}"


def take_first(items: Sequence[T], tasks: int | None, name: str) -> list[T]:
    """Return the first ``tasks`` items, all if None; raise if there are fewer."""
    if tasks is None:
        return list(items)
    if not isinstance(tasks, int) or not 1 <= tasks <= len(items):
        raise ValueError(
            f"{name} has {len(items)} tasks here: ask for 1 to {len(items)}, or leave tasks out, not {tasks}."
        )
    return list(items[:tasks])
