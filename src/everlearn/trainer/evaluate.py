"""Evaluation of a model on tasks."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.data_source import Arrays, as_source
from everlearn.core.forward import check_next_tokens, forward
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating
from everlearn.core.task import Split, Task
from everlearn.runtime import distributed
from everlearn.trainer.settings import device_of
from everlearn.trainer.validation import check_first_batch, check_outputs, explain_error


def evaluate(
    model: nn.Module,
    method: Method,
    tasks: Any,
    *,
    allowed: Tensor | None = None,
    split: Split = "test",
    batch_size: int = 1024,
) -> list[float]:
    """Compute the mean score (accuracy) on each task.

    Args:
        model: evaluated in eval mode; its modes are restored afterwards.
        method: the method whose ``predict`` computes the outputs.
        tasks: the tasks: a list such as ``stream.test_tasks``, or test data in any form that ``train`` accepts.
        allowed: the scenario mask of allowed classes (see ``allowed_classes``); by default the union of the tasks'.
        split: which of the task's data to use.
        batch_size: examples per forward pass.
    """
    scores_and_counts = evaluate_and_count(model, method, tasks, allowed=allowed, split=split, batch_size=batch_size)
    return [score for score, _ in scores_and_counts]


@torch.no_grad()
def evaluate_and_count(
    model: nn.Module,
    method: Method,
    tasks: Any,
    *,
    allowed: Tensor | None = None,
    split: Split = "test",
    batch_size: int = 1024,
) -> list[tuple[float, int]]:
    """Compute the mean score on each task, as ``evaluate`` does, and the number of scored examples."""
    test_tasks = _as_test_tasks(tasks)
    masks = [task.allowed for task in test_tasks if task.allowed is not None]
    if allowed is None and masks:
        allowed = reduce(torch.logical_or, masks)
    with evaluating(model):
        return [_score(model, method, task, allowed, split, batch_size) for task in test_tasks]


def outputs_of(model: nn.Module, x: Any, name: str = "") -> int:
    """Return the number of outputs of a model, by a forward pass on one example.

    Args:
        model: used in eval mode; its modes are restored afterwards.
        x: inputs, of which the first is used.
        name: the name of the inputs in error messages.
    """
    batch = Batch(x)[:1].to(device_of(model))
    try:
        with torch.no_grad(), evaluating(model):
            outputs = forward(model, batch.x)
    except RuntimeError as error:
        raise explain_error(error, Task(name=name), batch, first=True) from error
    if outputs.dim() != 2:
        raise TypeError(
            "The model must give a row of outputs per example, a tensor with two axes; it gave one of shape "
            f"{tuple(outputs.shape)}."
        )
    return outputs.shape[1]


def _score(
    model: nn.Module, method: Method, task: Task, allowed: Tensor | None, split: Split, batch_size: int
) -> tuple[float, int]:
    """Compute the mean score on a task over all processes, and the number of scored examples."""
    device = device_of(model)
    score_sum = 0.0
    count = 0
    for task_batch in task.examples(batch_size, split, shared=True):
        batch = Batch(task_batch.x, task_batch.y, task_batch.t, allowed, task_batch.likelihood).to(device)
        is_first = count == 0
        if is_first:
            check_first_batch(task, batch, list(model.parameters()))
            check_next_tokens(model, batch.x, batch.y)

        task_ids = batch.t if task.known_at_test else None
        try:
            outputs = method.predict(model, batch.x, task_ids)
        except RuntimeError as error:
            raise explain_error(error, task, batch, first=is_first) from error
        check_outputs(task, batch, outputs)
        score_sum += batch.score(outputs).sum().item()

        # Examples whose labels are all ignored (-100) are not scored.
        labeled_rows = batch.labeled_rows()
        count += len(batch) if labeled_rows is None else int(labeled_rows.sum())

    score_sum = distributed.sum_across(score_sum)
    count = int(distributed.sum_across(count))
    if not count:
        raise ValueError(
            f"{task} has no {split} examples, or a generator that was read already: give a list or a loader."
        )
    if not math.isfinite(score_sum):
        raise FloatingPointError(f"The score on {task} is {score_sum}: its {split} targets are not all finite numbers.")
    return score_sum / count, count


def _as_test_tasks(tasks: Any) -> list[Task]:
    """Convert the argument of ``evaluate`` to tasks; a pair of arrays, a Dataset or a loader is one task."""
    is_sequence = isinstance(tasks, (list, tuple)) and not isinstance(as_source(tasks), Arrays)
    sources = tasks if is_sequence else [tasks]
    return [source if isinstance(source, Task) else Task(test=source) for source in sources]
