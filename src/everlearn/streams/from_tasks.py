"""Build a stream from the user's own tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from everlearn.core.batch import Transform
from everlearn.core.data_source import Arrays, Batches, Source, as_source
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.streams.assemble import StreamOptions, assemble
from everlearn.streams.subset import derive_source, read_labels

Labels = Literal["own", "shared"]
Pairs = list[tuple[Source | None, ...]]


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
    """Build a stream from tasks, each a pair (training data, test data).

    Args:
        tasks: tasks in order; data are pairs (x, y), Datasets, DataLoaders or iterables of batches.
        scenario: "task", "domain" or "class".
        names: names of the tasks, for output.
        classes: labels of each task's classes; required for DataLoaders and iterables, otherwise read from the data.
        labels: meaning of a label that occurs in several tasks. "own": a different class in each task, so that each
            task gets separate outputs; labels that overlap are renumbered, and ``task.original_labels`` maps
            predictions back. "shared": the same class. By default "own" in a task-incremental stream and "shared" in a
            domain-incremental one; required in a class-incremental stream whose tasks have common labels.
        outputs: number of model outputs; by default derived from the labels.
        likelihood: meaning of the outputs; classes by default.
        seed: seed of the validation split.
        valid: share of each task's training examples to use for validation.
        transform: transform of training inputs, applied to batches.
        eval_transform: transform of inputs in evaluation and importance estimation.
        workers: number of processes that load a Dataset.
        name: name of the stream.

    >>> import torch
    >>> x, y = torch.rand(8, 3), torch.arange(8) % 2
    >>> stream = from_tasks([((x, y), (x, y)), ((x + 1, y), (x + 1, y))], scenario="domain", names=["dry", "wet"])
    >>> print(stream)
    own: 2 tasks, domain-incremental, 2 outputs
      dry: 8 train, 8 test, classes 0 1
      wet: 8 train, 8 test, classes 0 1
    """
    output_likelihood = likelihood or Categorical()
    _check_arguments(tasks, names, classes)
    pairs: Pairs = [tuple(None if data is None else as_source(data, workers) for data in pair) for pair in tasks]
    _check_labels(pairs, output_likelihood)

    # A domain-incremental stream with a given number of outputs needs no classes.
    needs_classes = scenario != "domain" or outputs is None
    if classes is None and isinstance(output_likelihood, Categorical) and needs_classes:
        classes = [_read_classes(pair[0], t) for t, pair in enumerate(pairs)]
    if classes is None and scenario != "domain":
        raise ValueError(
            f"A {scenario}-incremental stream is about classes: use scenario='domain' with {output_likelihood}."
        )
    for t, task_classes in enumerate(classes or []):
        _check_lowest_label(min(task_classes, default=0), t)

    settings: dict[str, Any] = {}
    if labels is not None:
        settings = {"labels": labels}

    # Give each task separate outputs where its labels mean other classes than those of earlier tasks.
    label_maps = _separate_labels(classes, scenario, labels, names)
    if label_maps is not None:
        settings = {"labels": "own", "classes": [list(label_map) for label_map in label_maps]}
        classes = [list(label_map.values()) for label_map in label_maps]
        pairs = [
            tuple(None if source is None else derive_source(source, new_labels=label_map) for source in pair)
            for pair, label_map in zip(pairs, label_maps, strict=True)
        ]

    required_outputs = 0
    if classes:
        required_outputs = max(max(task_classes) for task_classes in classes) + 1
    if outputs is not None and outputs < required_outputs:
        raise ValueError(
            f"The tasks' classes need {required_outputs} outputs, not {outputs}: leave outputs out, or give "
            f"{required_outputs} or more."
        )
    num_outputs = outputs or required_outputs or _count_outputs(pairs[0][0], output_likelihood)

    options = StreamOptions(seed, valid, transform, eval_transform)
    stream = assemble(pairs, classes, scenario, name, settings, options, output_likelihood, label_maps)
    for task, task_name in zip(stream, names or [], strict=False):
        task.name = task_name
    return replace(stream, outputs=num_outputs)


def _check_arguments(
    tasks: Sequence[Any], names: Sequence[str] | None, classes: Sequence[Sequence[int]] | None
) -> None:
    if not tasks:
        raise ValueError("A stream needs at least one task.")
    for t, pair in enumerate(tasks):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"Task {t} must be a pair (training data, test data), got a {type(pair).__name__}.")
    for argument, value in (("names", names), ("classes", classes)):
        if value is not None and len(value) != len(tasks):
            raise ValueError(f"There are {len(tasks)} tasks but {len(value)} {argument}: give one for each.")


def _check_labels(pairs: Pairs, likelihood: Likelihood) -> None:
    """Raise if training arrays have no labels, or class labels are negative."""
    for t, (train, _) in enumerate(pairs):
        if isinstance(train, Arrays) and train.y is None:
            raise TypeError(
                f"Task {t} has training data without labels: each task is a pair (train, test), such as "
                "((x, y), (x_test, y_test)), or ((x, y), None) without test data."
            )

    if not isinstance(likelihood, Categorical):
        return
    for t, pair in enumerate(pairs):
        for source in pair:
            y = source.y if isinstance(source, Arrays) else None
            if y is not None and y.dim() == 1 and len(y) and not y.is_floating_point():
                _check_lowest_label(int(y.min()), t)


def _separate_labels(
    classes: Sequence[Sequence[int]] | None, scenario: Scenario, labels: Labels | None, names: Sequence[str] | None
) -> list[dict[int, int]] | None:
    """Return for each task the output index of each label, or None if labels can stay as they are."""
    if labels not in ("own", "shared", None):
        raise ValueError(f"labels: got {labels!r}, allowed: 'own', 'shared', or None for the scenario's default.")
    if scenario == "domain":
        if labels == "own":
            raise ValueError(
                "Domain-incremental tasks share their labels: use scenario='task' or 'class' with labels='own'."
            )
        return None

    overlap = _first_overlap(classes or [])
    if overlap is None or labels == "shared":
        return None

    # In the class-incremental scenario both meanings are common: the user must choose.
    if labels is None and scenario == "class":
        first_task, second_task, common_labels = overlap
        first_name, second_name = (names[t] if names else f"task {t}" for t in (first_task, second_task))
        listed = ", ".join(map(str, common_labels[:5])) + ", …" * (len(common_labels) > 5)
        raise ValueError(
            f"{first_name} and {second_name} have labels in common ({listed}). In class-incremental learning choose "
            "what that means: labels='shared' if it is the same class again, labels='own' if each task numbers its "
            "classes separately."
        )

    label_maps: list[dict[int, int]] = []
    first_output = 0
    for task_classes in classes or []:
        label_map = {int(c): first_output + i for i, c in enumerate(dict.fromkeys(task_classes))}
        label_maps.append(label_map)
        first_output += len(label_map)
    return label_maps


def _first_overlap(classes: Sequence[Sequence[int]]) -> tuple[int, int, list[int]] | None:
    """Return the first two tasks with common labels, and these labels; None if there are none."""
    first_task_by_label: dict[int, int] = {}
    for t, task_classes in enumerate(classes):
        common_labels = [int(c) for c in task_classes if first_task_by_label.setdefault(int(c), t) != t]
        if common_labels:
            return first_task_by_label[common_labels[0]], t, common_labels
    return None


def _check_lowest_label(label: int, t: int) -> None:
    if label < 0:
        raise ValueError(f"Task {t} has the label {label}: classes are numbered from 0.")


def _read_classes(source: Any, t: int) -> list[int]:
    if isinstance(source, Batches):
        raise TypeError(
            f"Task {t} comes in batches, so its classes are not known: name them, as in classes=[[0, 1], [2, 3]], or "
            "give outputs=… for a domain-incremental stream."
        )
    if isinstance(source, Arrays) and not len(source):
        raise ValueError(f"Task {t} has no examples to train on: leave it out of the stream.")
    return sorted(set(read_labels(source).tolist()))


def _count_outputs(source: Any, likelihood: Likelihood) -> int:
    if isinstance(source, Arrays) and source.y is not None:
        return likelihood.outputs(likelihood.labels(source.y))
    raise ValueError("The number of outputs cannot be derived from these data: give outputs=….")
