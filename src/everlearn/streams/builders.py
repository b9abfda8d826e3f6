"""Build streams from one labeled data set: by class, by permutation, by rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from everlearn.core.batch import Transform
from everlearn.core.data_source import Source, as_source
from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.streams.assemble import StreamOptions, assemble, first_input
from everlearn.streams.subset import Permutation, Rotation, View, derive_source, read_labels


def split(
    train: Any,
    test: Any,
    *,
    tasks: int = 5,
    scenario: Scenario = "class",
    seed: int = 0,
    class_order: Sequence[int] | None = None,
    valid: float = 0.0,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    workers: int = 0,
    name: str = "split",
) -> Stream:
    """Split the classes of a labeled data set into tasks.

    In the domain-incremental scenario the classes of each task are renumbered 0, 1, …, so that all tasks share their
    outputs; otherwise labels stay as they are.

    Args:
        train: training data, a pair (x, y) or a Dataset.
        test: test data, a pair (x, y) or a Dataset.
        tasks: number of tasks.
        scenario: "task", "domain" or "class".
        seed: seed of the class order and the validation split; seed 0 keeps the natural order, as in van de Ven &
            Tolias.
        class_order: order of the classes, instead of a random one.
        valid: share of each task's training examples to use for validation.
        transform: transform of training inputs, applied to batches.
        eval_transform: transform of inputs in evaluation and importance estimation.
        workers: number of processes that load a Dataset.
        name: name of the stream, for output and file names.

    >>> x, y = torch.rand(12, 3), torch.arange(12) % 4
    >>> print(split((x, y), (x, y), tasks=2, scenario="class"))
    split: 2 tasks, class-incremental, 4 outputs
      task 0: 6 train, 6 test, classes 0 1
      task 1: 6 train, 6 test, classes 2 3
    """
    sources = (as_source(train, workers), as_source(test, workers))
    labels = [read_labels(source) for source in sources]
    classes = sorted(set(labels[0].tolist()))
    order = _order_classes(classes, class_order, seed)

    unknown_classes = sorted(set(labels[1].tolist()) - set(classes))
    if unknown_classes:
        listed = ", ".join(map(str, unknown_classes[:5]))
        raise ValueError(f"The test data have classes that the training data do not have: {listed}.")
    if not isinstance(tasks, int) or not 1 <= tasks <= len(order):
        raise ValueError(f"Cannot split {len(order)} classes into {tasks} tasks: ask for 1 to {len(order)}.")

    groups = [order[i[0] : i[-1] + 1] for i in torch.arange(len(order)).tensor_split(tasks)]
    if scenario == "domain" and len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"Domain-incremental tasks need the same number of classes: {len(order)} cannot be divided by {tasks}."
        )

    # In the domain-incremental scenario all tasks use the outputs 0, 1, ….
    label_maps: list[dict[int, int]] | None = None
    outputs = groups
    if scenario == "domain":
        label_maps = [{c: i for i, c in enumerate(group)} for group in groups]
        outputs = [list(range(len(group))) for group in groups]

    pairs = []
    for t, group in enumerate(groups):
        label_map = None if label_maps is None else label_maps[t]
        task_sources = []
        for source, y in zip(sources, labels, strict=True):
            index = torch.isin(y, torch.tensor(group, device=y.device)).nonzero().flatten()
            task_sources.append(derive_source(source, index, label_map))
        pairs.append(tuple(task_sources))

    options = StreamOptions(seed, valid, transform, eval_transform)
    return assemble(pairs, outputs, scenario, name, {"class_order": order}, options, label_maps=label_maps)


def permuted(
    train: Any,
    test: Any,
    *,
    tasks: int = 10,
    scenario: Scenario = "domain",
    seed: int = 0,
    valid: float = 0.0,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    workers: int = 0,
    name: str = "permuted",
) -> Stream:
    """Permute the input features of a data set, with another fixed random order in each task, the first included.

    Arguments as for ``split``. In task- and class-incremental streams each task has separate classes.
    """
    sources = (as_source(train, workers), as_source(test, workers))
    num_features = tree_leaves(first_input(sources[0]))[0].numel()
    orders = [torch.randperm(num_features, generator=generator(seed, "stream", t)) for t in range(tasks)]
    views: list[View] = [Permutation(order) for order in orders]
    options = StreamOptions(seed, valid, transform, eval_transform)
    return _build_from_views(sources, views, scenario, name, {}, options)


def rotated(
    train: Any,
    test: Any,
    *,
    tasks: int | None = None,
    scenario: Scenario = "domain",
    seed: int = 0,
    angles: Sequence[float] | None = None,
    valid: float = 0.0,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    workers: int = 0,
    name: str = "rotated",
) -> Stream:
    """Rotate the images of a data set, by another angle in each task.

    Arguments as for ``split``, and ``angles`` in degrees; by default ten, in equal steps from 0 to below 180.
    """
    if angles is None:
        num_angles = tasks or 10
        angles = [180 * t / num_angles for t in range(num_angles)]
    degrees = [float(angle) for angle in angles]
    if tasks is not None and tasks != len(degrees):
        raise ValueError(f"{len(degrees)} angles make {len(degrees)} tasks, not {tasks}: leave tasks out.")

    sources = (as_source(train, workers), as_source(test, workers))
    views: list[View] = [Rotation(angle) for angle in degrees]
    options = StreamOptions(seed, valid, transform, eval_transform)
    return _build_from_views(sources, views, scenario, name, {"angles": degrees}, options)


def _build_from_views(
    sources: tuple[Source, Source],
    views: Sequence[View],
    scenario: Scenario,
    name: str,
    settings: dict[str, Any],
    options: StreamOptions,
) -> Stream:
    """Build a stream with one task per view of the same data set."""
    classes = sorted(set(read_labels(sources[0]).tolist()))
    num_labels = max(classes) + 1

    # Domain-incremental tasks share their outputs; otherwise each task gets the next block of outputs.
    label_maps: list[dict[int, int]] | None = None
    if scenario != "domain":
        label_maps = [{c: c + num_labels * t for c in classes} for t in range(len(views))]

    pairs = []
    outputs = []
    for t, view in enumerate(views):
        label_map = None if label_maps is None else label_maps[t]
        pairs.append(tuple(derive_source(source, None, label_map, view) for source in sources))
        outputs.append(list(label_map.values()) if label_map else classes)
    return assemble(pairs, outputs, scenario, name, settings, options, label_maps=label_maps)


def _order_classes(classes: list[int], class_order: Sequence[int] | None, seed: int) -> list[int]:
    if class_order is not None:
        if len(set(class_order)) != len(class_order) or not set(class_order) <= set(classes):
            raise ValueError(
                f"class_order must name classes of the data once each ({classes}), got {list(class_order)}."
            )
        return [int(c) for c in class_order]
    if seed == 0:
        return classes
    order = torch.randperm(len(classes), generator=generator(seed, "stream"))
    return [classes[i] for i in order.tolist()]
