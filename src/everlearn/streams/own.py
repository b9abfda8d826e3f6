"""The user's own tasks as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from everlearn.batch import Transform
from everlearn.data import Arrays, Batches, as_source
from everlearn.likelihood import Categorical, Likelihood
from everlearn.stream import Scenario, Stream
from everlearn.streams.assemble import Manner, assemble
from everlearn.streams.parts import labels_of, part

Labels = Literal["own", "shared"]


def from_tasks(
    tasks: Sequence[tuple[Any, Any]],
    *,
    scenario: Scenario = "task",
    names: Sequence[str] | None = None,
    classes: Sequence[Sequence[int]] | None = None,
    labels: Labels | None = None,
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
        classes: of each task, as its data number them; found by itself in arrays and Datasets, asked for otherwise.
        labels: what a label means that two tasks have. "own": other classes, so that each task gets outputs of its own; where
            labels meet they are renumbered from task to task, and ``task.original_labels`` reads predictions back. "shared":
            the same class, seen again. By default "own" in a task-incremental stream and "shared" in a domain-incremental
            one, which is what the two mean; a class-incremental stream whose tasks have common labels asks you to say which.
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
    for i, (train, _) in enumerate(pairs):
        if isinstance(train, Arrays) and train.y is None:
            raise TypeError(
                f"Task {i} has training data without labels: each task is a pair (train, test), such as "
                "((x, y), (x_test, y_test)), or ((x, y), None) without test data."
            )
    if isinstance(meaning, Categorical):
        for i, sources in enumerate(pairs):
            for source in sources:
                y = source.y if isinstance(source, Arrays) else None
                if y is not None and y.dim() == 1 and len(y) and not y.is_floating_point():
                    _check_lowest(int(y.min()), i)
    if classes is None and isinstance(meaning, Categorical) and (scenario != "domain" or outputs is None):
        classes = [_classes(pair[0], i) for i, pair in enumerate(pairs)]
    if classes is None and scenario != "domain":
        raise ValueError(f"A {scenario}-incremental stream is about classes: use scenario='domain' with {meaning}.")
    for i, own_classes in enumerate(classes or []):
        _check_lowest(min(own_classes, default=0), i)
    renamed = _renamed(classes, scenario, labels, names)
    settings: dict[str, Any] = {} if labels is None else {"labels": labels}
    if renamed is not None:
        settings = {"labels": "own", "classes": [list(rename) for rename in renamed]}
        classes = [list(rename.values()) for rename in renamed]
        pairs = [
            tuple(None if source is None else part(source, rename=rename) for source in pair)
            for pair, rename in zip(pairs, renamed, strict=True)
        ]
    needed = max(max(c) for c in classes) + 1 if classes else 0
    if outputs is not None and outputs < needed:
        raise ValueError(
            f"The tasks' classes need {needed} outputs, not {outputs}: leave outputs out, or give {needed} or more."
        )
    needed = outputs or needed or _outputs(pairs[0][0], meaning)
    manner = Manner(seed, valid, transform, eval_transform)
    stream = assemble(pairs, classes, scenario, name, settings, manner, meaning, renamed)
    for task, own in zip(stream, names or [], strict=False):
        task.name = own
    return replace(stream, outputs=needed)


def _renamed(
    classes: Sequence[Sequence[int]] | None, scenario: Scenario, labels: Labels | None, names: Sequence[str] | None
) -> list[dict[int, int]] | None:
    """For each task the output of every label, where tasks have labels in common that mean different classes."""
    if labels not in ("own", "shared", None):
        raise ValueError(f"labels: got {labels!r}, allowed: 'own', 'shared', or None for what the scenario means.")
    if scenario == "domain":
        if labels == "own":
            raise ValueError(
                "Domain-incremental tasks share their labels: use scenario='task' or 'class' with labels='own'."
            )
        return None
    owners: dict[int, int] = {}
    common: list[int] = []
    meeting: tuple[int, int] | None = None
    for t, own in enumerate(classes or []):
        again = [c for c in own if owners.setdefault(int(c), t) != t]
        if again and meeting is None:
            meeting = owners[int(again[0])], t
            common = [int(c) for c in again]
    if meeting is None or labels == "shared":
        return None
    if labels is None and scenario == "class":
        first, second = (names[t] if names else f"task {t}" for t in meeting)
        some = ", ".join(map(str, common[:5])) + ", …" * (len(common) > 5)
        raise ValueError(
            f"{first} and {second} have labels in common ({some}). In class-incremental learning say what that means: "
            "labels='shared' if it is the same class seen again, labels='own' if each task numbers classes of its own."
        )
    renamed: list[dict[int, int]] = []
    column = 0
    for own in classes or []:
        renamed.append({int(c): column + i for i, c in enumerate(dict.fromkeys(own))})
        column += len(renamed[-1])
    return renamed


def _check_lowest(label: int, t: int) -> None:
    """Refuse a class that no output can stand for."""
    if label < 0:
        raise ValueError(f"Task {t} has the label {label}: classes are numbered from 0.")


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
