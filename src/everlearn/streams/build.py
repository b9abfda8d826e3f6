"""Making streams from one labelled data set: by class, by permutation, by rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from everlearn.batch import Transform
from everlearn.data import Source, as_source
from everlearn.seeds import generator
from everlearn.stream import Scenario, Stream
from everlearn.streams.assemble import Manner, assemble, first_input
from everlearn.streams.parts import Permutation, Rotation, View, labels_of, part


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
    """Classes into tasks: each task brings some classes of one labelled data set.

    In the domain-incremental scenario a task's classes are renamed 0, 1, … within the task, so that all tasks ask the
    same question of other inputs; otherwise labels stay.

    Args:
        train: pair (x, y) or Dataset to learn from.
        test: pair (x, y) or Dataset to be tested on.
        tasks: how many.
        scenario: "task", "domain" or "class".
        seed: of the class order and the validation share. Seed 0 keeps the natural order, as van de Ven & Tolias do.
        class_order: the classes in the order they come, instead of a random one.
        valid: share of each task's training examples held back for choosing hyper-parameters.
        transform: of training inputs, a batch at a time.
        eval_transform: of inputs in tests and importance passes.
        workers: processes that load a Dataset.
        name: for people and file names.

    >>> x, y = torch.rand(12, 3), torch.arange(12) % 4
    >>> print(split((x, y), (x, y), tasks=2, scenario="class"))
    split: 2 tasks, class-incremental, 4 outputs
      task 0: 6 train, 6 test, classes 0 1
      task 1: 6 train, 6 test, classes 2 3
    """
    sources = as_source(train, workers), as_source(test, workers)
    labels = [labels_of(source) for source in sources]
    classes = sorted(set(labels[0].tolist()))
    order = _order(classes, class_order, seed)
    if strange := sorted(set(labels[1].tolist()) - set(classes)):
        raise ValueError(
            f"The test data have classes that the training data have not: {', '.join(map(str, strange[:5]))}."
        )
    if not isinstance(tasks, int) or not 1 <= tasks <= len(order):
        raise ValueError(f"Cannot split {len(order)} classes into {tasks} tasks: ask for 1 to {len(order)}.")
    groups = [order[i[0] : i[-1] + 1] for i in torch.arange(len(order)).tensor_split(tasks)]
    if scenario == "domain" and len({len(g) for g in groups}) > 1:
        raise ValueError(f"Domain-incremental tasks need equally many classes: {len(order)} do not divide by {tasks}.")
    renamed = [{c: i for i, c in enumerate(group)} for group in groups] if scenario == "domain" else None
    pairs = []
    for t, group in enumerate(groups):
        rename = None if renamed is None else renamed[t]
        index = [torch.isin(y, torch.tensor(group, device=y.device)).nonzero().flatten() for y in labels]
        pairs.append(tuple(part(s, i, rename) for s, i in zip(sources, index, strict=True)))
    named = [list(range(len(g))) for g in groups] if scenario == "domain" else groups
    manner = Manner(seed, valid, transform, eval_transform)
    return assemble(pairs, named, scenario, name, {"class_order": order}, manner, renamed=renamed)


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
    """One data set, its input features in another fixed random order in every task, the first included.

    Arguments as for ``split``; task- and class-incremental streams have classes of their own for every task.
    """
    sources = as_source(train, workers), as_source(test, workers)
    features = tree_leaves(first_input(sources[0]))[0].numel()
    orders = [torch.randperm(features, generator=generator(seed, "stream", t)) for t in range(tasks)]
    views: list[View] = [Permutation(order) for order in orders]
    return _views(sources, views, scenario, name, {}, Manner(seed, valid, transform, eval_transform))


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
    """One data set of images, turned by another angle in every task.

    Arguments as for ``split``, and ``angles`` in degrees; by default ten, from 0 in equal steps up to below 180.
    """
    degrees = [180 * t / (tasks or 10) for t in range(tasks or 10)] if angles is None else [float(a) for a in angles]
    if tasks is not None and tasks != len(degrees):
        raise ValueError(f"{len(degrees)} angles make {len(degrees)} tasks, not {tasks}: leave tasks out.")
    sources = as_source(train, workers), as_source(test, workers)
    views: list[View] = [Rotation(angle) for angle in degrees]
    manner = Manner(seed, valid, transform, eval_transform)
    return _views(sources, views, scenario, name, {"angles": degrees}, manner)


def _views(
    sources: tuple[Source, Source],
    views: Sequence[View],
    scenario: Scenario,
    name: str,
    settings: dict[str, Any],
    manner: Manner,
) -> Stream:
    """A task per view of one data set."""
    old = sorted(set(labels_of(sources[0]).tolist()))
    width = max(old) + 1
    pairs, named = [], []
    renamed = None if scenario == "domain" else [{c: c + width * t for c in old} for t in range(len(views))]
    for t, view in enumerate(views):
        rename = None if renamed is None else renamed[t]
        pairs.append(tuple(part(source, None, rename, view) for source in sources))
        named.append(list(rename.values()) if rename else old)
    return assemble(pairs, named, scenario, name, settings, manner, renamed=renamed)


def _order(classes: list[int], given: Sequence[int] | None, seed: int) -> list[int]:
    if given is not None:
        if len(set(given)) != len(given) or not set(given) <= set(classes):
            raise ValueError(f"class_order must name classes of the data once each ({classes}), got {list(given)}.")
        return [int(c) for c in given]
    if seed == 0:
        return classes
    return [classes[i] for i in torch.randperm(len(classes), generator=generator(seed, "stream")).tolist()]
