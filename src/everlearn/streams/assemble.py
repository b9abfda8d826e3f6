"""From sources of data to a stream: the part that is the same for every stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from everlearn.batch import Transform
from everlearn.data import Batches, Items, Source
from everlearn.likelihood import Categorical, Likelihood
from everlearn.seeds import generator, seeded
from everlearn.stream import SCENARIOS, Scenario, Stream, Task, allowed_classes
from everlearn.streams.parts import part


@dataclass(frozen=True)
class Manner:
    """How every task of a stream is presented, whatever the stream."""

    seed: int
    valid: float
    transform: Transform | None
    eval_transform: Transform | None


def assemble(
    pairs: Sequence[tuple[Source | None, ...]],
    classes: Sequence[Sequence[int]] | None,
    scenario: Scenario,
    name: str,
    settings: dict[str, Any],
    manner: Manner,
    likelihood: Likelihood | None = None,
    renamed: Sequence[Mapping[int, int]] | None = None,
) -> Stream:
    """Tasks from pairs of sources (training, test) and the classes of each, in one scenario.

    ``renamed`` has for each task the output of every label in the data, where the sources have renumbered them.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"Unknown scenario {scenario!r}: it is one of {', '.join(SCENARIOS)}.")
    tasks = []
    for t, (train, test) in enumerate(pairs):
        learned, held = _hold_back(train, manner.valid, manner.seed, t)
        task = Task(learned, test, held, id=t, likelihood=likelihood or Categorical())
        task.allowed, task.identity = allowed_classes(scenario, classes or [], t), scenario == "task"
        task.transform, task.eval_transform = manner.transform, manner.eval_transform
        task.labels = {} if renamed is None else {output: label for label, output in renamed[t].items()}
        tasks.append(task)
    settings = {**settings, "seed": manner.seed, "valid": manner.valid}
    readable = not isinstance(tasks[0].train, Batches) or isinstance(tasks[0].train.iterable, (DataLoader, Sequence))
    inputs = tree_leaves(first_input(tasks[0].train))[0] if readable else None
    outputs = max(c for own in classes for c in own) + 1 if classes else 0
    return Stream(tasks, scenario, name, [], () if inputs is None else tuple(inputs.shape), outputs, settings)


def _hold_back(train: Source | None, share: float, seed: int, t: int) -> tuple[Source | None, Source | None]:
    if not 0 <= share < 1:
        raise ValueError(f"valid is a share of the training examples, from 0 to below 1, got {share}.")
    if not share or train is None:
        return train, None
    if isinstance(train, Batches):
        raise TypeError(
            "A validation share cannot be taken from a DataLoader: give a Dataset, or hold it back yourself."
        )
    order = torch.randperm(len(train), generator=generator(seed, "stream", "valid", t))
    held = max(1, round(share * len(train)))
    if held >= len(train):
        raise ValueError(f"Task {t} has {len(train)} examples: a validation share of {share} leaves none to train on.")
    return part(train, order[held:].sort().values), part(train, order[:held].sort().values)


def first_input(source: Any) -> Any:
    """One input without its batch axis."""
    if isinstance(source, Batches):
        with seeded(0):
            return tree_map(lambda v: v[0], next(source.batches(1, None, 0))[0])
    if isinstance(source, Items):
        with seeded(0):
            return tree_map(torch.as_tensor, source.dataset[0][0])
    return tree_map(lambda v: v[0], source.rows(torch.tensor([0]))[0])
