"""Progress bar of a pass over the data, which appears only if the pass is long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from torch import Tensor
from tqdm.auto import tqdm

from everlearn.core.task import Task
from everlearn.runtime import distributed

# Seconds after which a bar appears.
DELAY = 3.0

_progress: ContextVar[bool | None] = ContextVar("progress", default=None)


@contextmanager
def show_progress(progress: bool | None) -> Iterator[None]:
    """Show the bars of this package, or hide them; None shows them only on a terminal, which is the default.

    Args:
        progress: the setting inside the context.
    """
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


class PassProgress:
    """Progress of a pass over the examples of a task, or over generated ones.

    Args:
        task: whose examples are counted, or the number of examples.
        quantity: what is computed, for the bar's description.
        max_examples: number of examples in the pass; by default all.
    """

    def __init__(self, task: Task | int, quantity: str, max_examples: int | None = None) -> None:
        # For tqdm, None means: disabled unless on a terminal.
        is_disabled: bool | None = None
        progress = _progress.get()
        if progress is not None:
            is_disabled = not progress
        if distributed.rank():
            is_disabled = True

        self._quantity = quantity
        self._num_finished = 0
        self._bar: tqdm[Any] = tqdm(
            total=_count_examples(task, max_examples),
            desc=quantity,
            unit="example",
            leave=False,
            delay=DELAY,
            disable=is_disabled,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def track(self, cotangents: Iterable[Tensor], num_examples: int, num_passes: int) -> Iterator[Tensor]:
        """Yield the cotangents of a batch and advance the bar with each.

        Args:
            cotangents: one for each backward pass.
            num_examples: in the batch.
            num_passes: expected number of cotangents.
        """
        if num_passes > 1:
            self._bar.set_description(f"{self._quantity}, {num_passes} backward passes", refresh=False)
        for index, cotangent in enumerate(cotangents):
            self._advance_to(self._num_finished + num_examples * index // max(1, num_passes))
            yield cotangent

    def finish_batch(self, num_examples: int) -> None:
        """Count the examples of a batch as finished."""
        self._num_finished += num_examples
        self._advance_to(self._num_finished)

    def _advance_to(self, num_examples: int) -> None:
        """Move the bar to a number of examples."""
        self._bar.update(num_examples - self._bar.n)


def _count_examples(task: Task | int, max_examples: int | None) -> int | None:
    """Number of examples of this process, or None if it is unknown."""
    if isinstance(task, int):
        return task
    try:
        num_examples = len(task.train)
    except TypeError:
        return max_examples
    if max_examples is not None:
        num_examples = min(num_examples, max_examples)
    return -(-num_examples // distributed.world_size())
