"""Omniglot as a stream: one alphabet per task (Lake et al., 2015)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.sources.registry import load_raw
from everlearn.streams.dataset_sequence import take_first
from everlearn.streams.from_tasks import from_tasks
from everlearn.streams.subset import ImageResizer


def omniglot(
    scenario: Scenario = "task",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 28,
) -> Stream:
    """Classify the characters of the available alphabets, one alphabet per task, with 16 training drawings each.

    Args:
        scenario: "task" or "class"; alphabets have different numbers of characters.
        tasks: number of alphabets to use, from the first; by default all.
        seed: seed of the order of the alphabets and of the validation split; seed 0 keeps the alphabetical order.
        valid: share of each task's training examples to use for validation.
        root: folder of the data sets; by default EVERLEARN_DATA.
        size: side of the images in pixels; ink is 1 and paper 0, as in MNIST.
    """
    if scenario == "domain":
        raise ValueError(
            "omniglot has no domain-incremental form, because alphabets differ in length: use task or class."
        )

    data = load_raw("omniglot", root)
    alphabets = list(data.groups)
    if seed != 0:
        order = torch.randperm(len(alphabets), generator=generator(seed, "stream"))
        alphabets = [alphabets[i] for i in order.tolist()]
    alphabets = take_first(alphabets, tasks, "omniglot")

    # Characters are renumbered in the order of the alphabets.
    resize = ImageResizer(1, size)
    pairs = []
    classes = []
    first_class = 0
    for alphabet in alphabets:
        labels = data.groups[alphabet]
        offset = first_class - labels[0]
        pair = []
        for x, y in data:
            rows = torch.isin(y, torch.tensor(labels))
            pair.append((1 - resize(x[rows]), y[rows] + offset))
        pairs.append((pair[0], pair[1]))
        classes.append(range(first_class, first_class + len(labels)))
        first_class += len(labels)

    stream = from_tasks(
        pairs, scenario=scenario, names=alphabets, classes=classes, seed=seed, valid=valid, name="omniglot"
    )
    return replace(stream, settings={**stream.settings, "alphabets": alphabets, "size": size})
