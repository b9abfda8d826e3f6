"""Testing a model on tasks."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from everlearn import distributed
from everlearn.batch import Batch
from everlearn.checks import check_first_batch, check_outputs, explain_error
from everlearn.data import Arrays, as_source
from everlearn.forward import ask, check_next_tokens
from everlearn.method import Method
from everlearn.params import evaluating
from everlearn.stream import Split, Task
from everlearn.trainer.training import device_of


def evaluate(
    model: nn.Module,
    method: Method,
    tasks: Any,
    *,
    allowed: Tensor | None = None,
    split: Split = "test",
    batch_size: int = 1024,
) -> list[float]:
    """Mean score (accuracy) on each task.

    Args:
        model: in whatever mode; it is tested in eval mode and put back.
        method: whose ``predict`` answers.
        tasks: to be tested on: a list such as ``stream.exams``, or test data as ``train`` takes them.
        allowed: which class may be named now (see ``allowed_classes``); by default whatever one of the tasks allows.
        split: which of the task's data.
        batch_size: examples per forward pass.
    """
    counted = evaluate_and_count(model, method, tasks, allowed=allowed, split=split, batch_size=batch_size)
    return [score for score, _ in counted]


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
    """Mean score on each task as ``evaluate`` gives it, and the number of examples that it is a mean of."""
    exams = _exams(tasks)
    if allowed is None and (tables := [t.allowed for t in exams if t.allowed is not None]):
        allowed = reduce(torch.logical_or, tables)
    with evaluating(model):
        return [_score(model, method, task, allowed, split, batch_size) for task in exams]


def outputs_of(model: nn.Module, x: Any, name: str = "") -> int:
    """How many outputs a model gives for such inputs.

    Args:
        model: in whatever mode; it is asked in eval mode and put back.
        x: inputs, of which one is tried.
        name: what they are called where the model cannot take them.
    """
    batch, task = Batch(x)[:1].to(device_of(model)), Task(name=name)
    try:
        with torch.no_grad(), evaluating(model):
            out = ask(model, batch.x)
    except RuntimeError as error:
        raise explain_error(error, task, batch, first=True) from error
    if out.dim() != 2:
        raise TypeError(
            "The model must give a row of outputs per example, a tensor with two axes; it gave one of shape "
            f"{tuple(out.shape)}."
        )
    return out.shape[1]


def _score(
    model: nn.Module, method: Method, task: Task, allowed: Tensor | None, split: Split, batch_size: int
) -> tuple[float, int]:
    total, count, device = 0.0, 0, device_of(model)
    for batch in task.examples(batch_size, split, shared=True):
        here = Batch(batch.x, batch.y, batch.t, allowed, batch.likelihood).to(device)
        if not count:
            check_first_batch(task, here, list(model.parameters()))
            check_next_tokens(model, here.x, here.y)
        try:
            out = method.predict(model, here.x, here.t if task.identity else None)
        except RuntimeError as error:
            raise explain_error(error, task, here, first=not count) from error
        check_outputs(task, here, out)
        total += here.score(out).sum().item()
        rows = here.labeled_rows()  # examples without a label that counts are not scored
        count += len(here) if rows is None else int(rows.sum())
    total, count = distributed.total(total), int(distributed.total(count))
    if not count:
        raise ValueError(
            f"{task} has no {split} examples, or a generator that was read already: give a list or a loader."
        )
    if not math.isfinite(total):
        raise FloatingPointError(f"The score on {task} is {total}: its {split} targets are not all finite numbers.")
    return total / count, count


def _exams(tasks: Any) -> list[Task]:
    """What is to be tested on as tasks; a pair of arrays, a Dataset, a loader count as one."""
    several = isinstance(tasks, (list, tuple)) and not isinstance(as_source(tasks), Arrays)
    return [t if isinstance(t, Task) else Task(test=t) for t in (tasks if several else [tasks])]
