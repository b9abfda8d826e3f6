"""The user's own tasks as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everlearn.batch import Transform
from everlearn.data import Arrays, Batches, as_source
from everlearn.likelihood import Categorical, Likelihood
from everlearn.stream import Scenario, Stream
from everlearn.streams.assemble import Manner, assemble
from everlearn.streams.parts import labels_of


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

    >>> import torch
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
    manner = Manner(seed, valid, transform, eval_transform)
    stream = assemble(pairs, classes, scenario, name, {}, manner, meaning)
    for task, own in zip(stream, names or [], strict=False):
        task.name = own
    return replace(stream, outputs=needed)


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
