"""Assemble a stream from the data sources of its tasks; the common last step of all stream builders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from everlearn.core.batch import Transform
from everlearn.core.data_source import Batches, Items, Source
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.scenario import SCENARIOS, Scenario
from everlearn.core.stream import Stream
from everlearn.core.task import Task, allowed_classes
from everlearn.runtime.randomness import generator, seeded
from everlearn.streams.subset import derive_source


@dataclass(frozen=True)
class StreamOptions:
    """Options that apply to all tasks of any stream; see ``streams.split``."""

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
    options: StreamOptions,
    likelihood: Likelihood | None = None,
    label_maps: Sequence[Mapping[int, int]] | None = None,
) -> Stream:
    """Build a stream from the sources of its tasks.

    Args:
        pairs: training and test source of each task.
        classes: output indices of each task; None if the stream has no classes.
        scenario: "task", "domain" or "class".
        name: name of the stream.
        settings: what identifies the stream, for results; the seed and the validation share are added.
        options: options common to all tasks.
        likelihood: meaning of the outputs; classes by default.
        label_maps: for each task the output index of each original label, if the sources renumber labels.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"Unknown scenario {scenario!r}: it is one of {', '.join(SCENARIOS)}.")

    tasks = []
    for t, (train, test) in enumerate(pairs):
        train_source, valid_source = _split_validation(train, options.valid, options.seed, t)
        task = Task(train_source, test, valid_source, id=t, likelihood=likelihood or Categorical())
        task.allowed = allowed_classes(scenario, classes or [], t)
        task.known_at_test = scenario == "task"
        task.transform = options.transform
        task.eval_transform = options.eval_transform
        task.labels = {}
        if label_maps is not None:
            task.labels = {output: label for label, output in label_maps[t].items()}
        tasks.append(task)

    num_outputs = 0
    if classes:
        num_outputs = max(c for task_classes in classes for c in task_classes) + 1
    settings = {**settings, "seed": options.seed, "valid": options.valid}
    return Stream(tasks, scenario, name, [], _input_shape(tasks[0].train), num_outputs, settings)


def _input_shape(source: Source | None) -> tuple[int, ...]:
    """Return the shape of one input; () for an iterator, from which reading would remove a batch."""
    if isinstance(source, Batches) and not isinstance(source.iterable, (DataLoader, Sequence)):
        return ()
    return tuple(tree_leaves(first_input(source))[0].shape)


def _split_validation(train: Source | None, share: float, seed: int, t: int) -> tuple[Source | None, Source | None]:
    """Split the training data of task t at random into training and validation data."""
    if not 0 <= share < 1:
        raise ValueError(f"valid is a share of the training examples, from 0 to below 1, got {share}.")
    if not share or train is None:
        return train, None
    if isinstance(train, Batches):
        raise TypeError(
            "A validation share cannot be taken from a DataLoader: give a Dataset, or split the data yourself."
        )

    order = torch.randperm(len(train), generator=generator(seed, "stream", "valid", t))
    num_valid = max(1, round(share * len(train)))
    if num_valid >= len(train):
        raise ValueError(f"Task {t} has {len(train)} examples: a validation share of {share} leaves none to train on.")

    train_source = derive_source(train, order[num_valid:].sort().values)
    valid_source = derive_source(train, order[:num_valid].sort().values)
    return train_source, valid_source


def first_input(source: Any) -> Any:
    """Return the first input of a source, without its batch axis and without changing the random state."""
    if isinstance(source, Batches):
        with seeded(0):
            inputs, *_ = next(source.batches(1, None, 0))
            return tree_map(lambda v: v[0], inputs)
    if isinstance(source, Items):
        with seeded(0):
            return tree_map(torch.as_tensor, source.dataset[0][0])
    return tree_map(lambda v: v[0], source.rows(torch.tensor([0]))[0])
