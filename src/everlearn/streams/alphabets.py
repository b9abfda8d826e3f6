"""Omniglot as a stream: an alphabet per task (Lake et al., 2015)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from everlearn.seeds import generator
from everlearn.sources.published import raw
from everlearn.stream import Scenario, Stream
from everlearn.streams.own import from_tasks
from everlearn.streams.parts import Fitted
from everlearn.streams.sets import first_of


def omniglot(
    scenario: Scenario = "task",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 28,
) -> Stream:
    """Characters of other alphabets, an alphabet per task, those that are here; 16 drawings of each to learn from.

    Args:
        scenario: "task" or "class"; alphabets have different numbers of characters.
        tasks: only the first so many alphabets.
        seed: of the order of the alphabets and of the validation share; seed 0 keeps the alphabetical one.
        valid: share of each task's training examples held back for choosing hyper-parameters.
        root: the folder of data sets; by default EVERLEARN_DATA.
        size: the side of the images, in pixels; ink is 1 and paper 0, as in MNIST.
    """
    if scenario == "domain":
        raise ValueError("omniglot has no domain-incremental form, as alphabets differ in length: use task or class.")
    data = raw("omniglot", root)
    alphabets = list(data.groups)
    if seed != 0:
        order = torch.randperm(len(alphabets), generator=generator(seed, "stream"))
        alphabets = [alphabets[i] for i in order.tolist()]
    alphabets = first_of(alphabets, tasks, "omniglot")
    fit, pairs, classes, first = Fitted(1, size), [], [], 0
    for alphabet in alphabets:
        own = data.groups[alphabet]
        rows = [torch.isin(y, torch.tensor(own)) for _, y in data]
        train, test = ((1 - fit(x[i]), y[i] - own[0] + first) for (x, y), i in zip(data, rows, strict=True))
        pairs.append((train, test))
        classes.append(range(first, first + len(own)))
        first += len(own)
    stream = from_tasks(
        pairs, scenario=scenario, names=alphabets, classes=classes, seed=seed, valid=valid, name="omniglot"
    )
    return replace(stream, settings={**stream.settings, "alphabets": alphabets, "size": size})
