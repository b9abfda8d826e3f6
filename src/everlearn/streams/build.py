"""Making streams from labelled data: by class, by permutation, by rotation, in small chunks, or the user's own list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from everlearn.batch import Transform
from everlearn.data import Arrays, Batches, Items, Source, as_source
from everlearn.likelihood import Categorical, Likelihood
from everlearn.seeds import generator, seeded
from everlearn.stream import SCENARIOS, Scenario, Stream, Task, allowed_classes
from everlearn.streams.parts import Permutation, Rotation, View, labels_of, part


@dataclass(frozen=True)
class _Manner:
    """How every task of a stream is presented, whatever the stream."""

    seed: int
    valid: float
    transform: Transform | None
    eval_transform: Transform | None


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
    if not isinstance(tasks, int) or not 1 <= tasks <= len(order):
        raise ValueError(f"Cannot split {len(order)} classes into {tasks} tasks: ask for 1 to {len(order)}.")
    groups = [order[i[0] : i[-1] + 1] for i in torch.arange(len(order)).tensor_split(tasks)]
    if scenario == "domain" and len({len(g) for g in groups}) > 1:
        raise ValueError(f"Domain-incremental tasks need equally many classes: {len(order)} do not divide by {tasks}.")
    pairs = []
    for group in groups:
        rename = {c: i for i, c in enumerate(group)} if scenario == "domain" else None
        index = [torch.isin(y, torch.tensor(group, device=y.device)).nonzero().flatten() for y in labels]
        pairs.append(tuple(part(s, i, rename) for s, i in zip(sources, index, strict=True)))
    named = [list(range(len(g))) for g in groups] if scenario == "domain" else groups
    manner = _Manner(seed, valid, transform, eval_transform)
    return _stream(pairs, named, scenario, name, {"class_order": order}, manner)


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
    features = tree_leaves(_first(sources[0]))[0].numel()
    orders = [torch.randperm(features, generator=generator(seed, "stream", t)) for t in range(tasks)]
    views: list[View] = [Permutation(order) for order in orders]
    return _views(sources, views, scenario, name, {}, _Manner(seed, valid, transform, eval_transform))


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
    manner = _Manner(seed, valid, transform, eval_transform)
    return _views(sources, views, scenario, name, {"angles": degrees}, manner)


def online(stream: Stream, *, chunk: int = 10, seed: int = 0) -> Stream:
    """The same tasks in small chunks that come once: a method sees a chunk's begin and end, never a whole task.

    Chunks keep their task's number: tests are taken, and a fresh optimizer is made, when the task changes. Train with
    ``epochs=1`` for a single pass.

    >>> x, y = torch.rand(12, 3), torch.arange(12) % 4
    >>> print(online(split((x, y), (x, y), tasks=2), chunk=4))
    online-split: 4 tasks, class-incremental, 4 outputs
      task 0, chunk 0: 4 train, classes 0 1
      task 0, chunk 1: 2 train, classes 0 1
      task 1, chunk 0: 4 train, classes 2 3
      task 1, chunk 1: 2 train, classes 2 3
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a whole number of at least 1 example, got {chunk}.")
    chunks = []
    for place, task in enumerate(stream):
        if isinstance(task.train, Batches):
            raise TypeError("An online stream is cut from arrays or a Dataset; a DataLoader comes in batches already.")
        order = torch.randperm(len(task.train), generator=generator(seed, "stream", "online", place))
        chunks += [
            replace(task, train=part(task.train, i), valid=None, test=None, name=f"{task}, chunk {k}", part=k)
            for k, i in enumerate(order.split(chunk))
        ]
    settings = {**stream.settings, "chunk": chunk}
    name = f"online-{stream.name}"
    return replace(stream, tasks=chunks, exams=stream.exams, name=name, settings=settings, once=True)


def from_tasks(
    tasks: Sequence[tuple[Any, Any]],
    *,
    scenario: Scenario = "task",
    names: Sequence[str] | None = None,
    classes: Sequence[Sequence[int]] | None = None,
    outputs: int | None = None,
    likelihood: Likelihood | None = None,
    seed: int = 0,
    valid: float = 0.0,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    workers: int = 0,
    name: str = "own",
) -> Stream:
    """The user's own tasks, each a pair (training data, test data).

    Args:
        tasks: in order; data are pairs (x, y), Datasets, DataLoaders or iterables of batches.
        scenario: "task", "domain" or "class".
        names: of the tasks, for people.
        classes: of each task; found by itself in arrays and Datasets, asked for otherwise.
        outputs: how many a model needs; found by itself where labels can be looked at.
        likelihood: what outputs mean; classes by default.
        seed: of the validation share.
        valid: share of training examples held back.
        transform: of training inputs, a batch at a time.
        eval_transform: of inputs in tests and importance passes.
        workers: processes that load a Dataset.
        name: of the stream.

    >>> x, y = torch.rand(8, 3), torch.arange(8) % 2
    >>> stream = from_tasks([((x, y), (x, y)), ((x + 1, y), (x + 1, y))], scenario="domain", names=["dry", "wet"])
    >>> print(stream)
    own: 2 tasks, domain-incremental, 2 outputs
      dry: 8 train, 8 test, classes 0 1
      wet: 8 train, 8 test, classes 0 1
    """
    meaning = likelihood or Categorical()
    if not tasks:
        raise ValueError("A stream needs at least one task.")
    for i, pair in enumerate(tasks):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"Task {i} must be a pair (training data, test data), got a {type(pair).__name__}.")
    for given, what in ((names, "names"), (classes, "classes")):
        if given is not None and len(given) != len(tasks):
            raise ValueError(f"There are {len(tasks)} tasks but {len(given)} {what}: give one for each.")
    pairs = [tuple(None if data is None else as_source(data, workers) for data in pair) for pair in tasks]
    if classes is None and isinstance(meaning, Categorical) and (scenario != "domain" or outputs is None):
        classes = [_classes(pair[0], i) for i, pair in enumerate(pairs)]
    if classes is None and scenario != "domain":
        raise ValueError(f"A {scenario}-incremental stream is about classes: use scenario='domain' with {meaning}.")
    needed = outputs or (max(max(c) for c in classes) + 1 if classes else _outputs(pairs[0][0], meaning))
    manner = _Manner(seed, valid, transform, eval_transform)
    stream = _stream(pairs, classes, scenario, name, {}, manner, meaning)
    for task, own in zip(stream, names or [], strict=False):
        task.name = own
    return replace(stream, outputs=needed)


def _views(
    sources: tuple[Source, Source],
    views: Sequence[View],
    scenario: Scenario,
    name: str,
    settings: dict[str, Any],
    manner: _Manner,
) -> Stream:
    """A task per view of one data set."""
    old = sorted(set(labels_of(sources[0]).tolist()))
    width = max(old) + 1
    pairs, named = [], []
    for t, view in enumerate(views):
        rename = None if scenario == "domain" else {c: c + width * t for c in old}
        pairs.append(tuple(part(source, None, rename, view) for source in sources))
        named.append(list(rename.values()) if rename else old)
    return _stream(pairs, named, scenario, name, settings, manner)


def _stream(
    pairs: Sequence[tuple[Source | None, ...]],
    classes: Sequence[Sequence[int]] | None,
    scenario: Scenario,
    name: str,
    settings: dict[str, Any],
    manner: _Manner,
    likelihood: Likelihood | None = None,
) -> Stream:
    if scenario not in SCENARIOS:
        raise ValueError(f"Unknown scenario {scenario!r}: it is one of {', '.join(SCENARIOS)}.")
    tasks = []
    for t, (train, test) in enumerate(pairs):
        learned, held = _hold_back(train, manner.valid, manner.seed, t)
        task = Task(learned, test, held, id=t, likelihood=likelihood or Categorical())
        task.allowed, task.identity = allowed_classes(scenario, classes or [], t), scenario == "task"
        task.transform, task.eval_transform = manner.transform, manner.eval_transform
        tasks.append(task)
    settings = {**settings, "seed": manner.seed, "valid": manner.valid}
    readable = not isinstance(tasks[0].train, Batches) or isinstance(tasks[0].train.iterable, (DataLoader, Sequence))
    inputs = tree_leaves(_first(tasks[0].train))[0] if readable else None
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


def _order(classes: list[int], given: Sequence[int] | None, seed: int) -> list[int]:
    if given is not None:
        if len(set(given)) != len(given) or not set(given) <= set(classes):
            raise ValueError(f"class_order must name classes of the data once each ({classes}), got {list(given)}.")
        return [int(c) for c in given]
    if seed == 0:
        return classes
    return [classes[i] for i in torch.randperm(len(classes), generator=generator(seed, "stream")).tolist()]


def _first(source: Any) -> Any:
    """One input without its batch axis."""
    if isinstance(source, Batches):
        with seeded(0):
            return tree_map(lambda v: v[0], next(source.batches(1, None, 0))[0])
    if isinstance(source, Items):
        with seeded(0):
            return tree_map(torch.as_tensor, source.dataset[0][0])
    return tree_map(lambda v: v[0], source.rows(torch.tensor([0]))[0])


def _classes(source: Any, t: int) -> list[int]:
    if isinstance(source, Batches):
        raise TypeError(
            f"Task {t} comes in batches, so its classes are not known: name them, as in classes=[[0, 1], [2, 3]], or "
            "give outputs=… for a domain-incremental stream."
        )
    if isinstance(source, Arrays) and not len(source):
        raise ValueError(f"Task {t} has no examples to train on: leave it out of the stream.")
    return sorted(set(labels_of(source).tolist()))


def _outputs(source: Any, likelihood: Likelihood) -> int:
    if isinstance(source, Arrays) and source.y is not None:
        return likelihood.outputs(likelihood.labels(source.y))
    raise ValueError("The number of outputs cannot be seen in these data: give outputs=….")
