"""Streams of whole data sets: a task per set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from everlearn.data import Arrays
from everlearn.sources import Data
from everlearn.stream import Scenario, Stream
from everlearn.streams.own import from_tasks
from everlearn.streams.parts import View

T = TypeVar("T")


def a_task_per_set(
    sets: Mapping[str, Data], view: View | None, *, scenario: Scenario, seed: int, valid: float, name: str
) -> Stream:
    """Every set in turn, its images seen through a view a batch at a time; the settings say which sets are in.

    Classes are numbered on from set to set; domain-incremental sets share theirs and must have equally many.
    """
    sizes = {one: len(data.names) or int(data[0][1].max()) + 1 for one, data in sets.items()}
    if scenario == "domain" and len(set(sizes.values())) > 1:
        raise ValueError(f"{name} has no domain-incremental form, as its sets have different classes: {sizes}.")
    pairs, classes, first = [], [], 0
    for one, data in sets.items():
        pairs.append(tuple(Arrays(x, y + first, view=view) for x, y in data))
        classes.append(range(first, first + sizes[one]))
        first += 0 if scenario == "domain" else sizes[one]
    stream = from_tasks(
        [(train, test) for train, test in pairs],
        scenario=scenario,
        names=list(sets),
        classes=classes,
        seed=seed,
        valid=valid,
        name=name,
    )
    return replace(stream, settings={**stream.settings, "sets": list(sets)})


def present(loaders: Mapping[str, Callable[[], Data]], name: str) -> dict[str, Data]:
    """The sets that are there, in order; a warning says which are not, an error if fewer than two are."""
    found, lacking = {}, {}
    for one, load in loaders.items():
        try:
            found[one] = load()
        except FileNotFoundError as error:
            lacking[one] = str(error)
    if len(found) < 2:
        raise FileNotFoundError(
            f"{name} needs two of its sets or more, and has {', '.join(found) or 'none'}. " + " ".join(lacking.values())
        )
    if lacking:
        reasons = " ".join(lacking.values())
        warnings.warn(f"{name} is made without {', '.join(lacking)}, which are not here. {reasons}", stacklevel=3)
    return found


def name_of(name: str, all_sets: Sequence[str], sets: Sequence[str]) -> str:
    """The stream's name, with the sets that are in where some are not: results of other sets are not comparable.

    >>> name_of("three", ["a", "b", "c"], ["a", "c"])
    'three-of-a-c'
    """
    return name if list(all_sets) == list(sets) else f"{name}-of-{'-'.join(sets)}"


def first_of(things: Sequence[T], tasks: int | None, name: str) -> list[T]:
    """The first so many of a stream's tasks; None for all."""
    if tasks is None:
        return list(things)
    if not isinstance(tasks, int) or not 1 <= tasks <= len(things):
        raise ValueError(f"{name} has {len(things)} tasks here: ask for 1 to {len(things)}, or leave tasks out, not {tasks}.")  # fmt: skip
    return list(things[:tasks])
