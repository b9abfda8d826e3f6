"""Trackers: loggers that receive the numbers of a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everlearn.results.result import Result

LOG_INTERVAL = 20  # steps between two logged losses


class Tracker(Protocol):
    """Interface of a logger: a dashboard, a console, a file."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            config: the configuration of the run, as its result has it.
        """

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers by name: the loss every few steps, accuracies after each task.

        Args:
            numbers: values by name.
            step: the optimizer step, counted over all tasks.
        """

    def finish(self, result: Result | None) -> None:
        """End a run.

        Args:
            result: the result; None if the run has failed or was stopped.
        """


@dataclass
class Trackers:
    """The trackers of one run, and its step count over all tasks.

    >>> trackers = Trackers()
    >>> trackers.record_step(0.5)
    >>> trackers.step
    1
    """

    trackers: Sequence[Tracker] = ()
    step: int = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Call ``start`` of all trackers."""
        for tracker in self.trackers:
            tracker.start(config)

    def record_step(self, loss: float) -> None:
        """Count an optimizer step and log its loss every few steps."""
        self.step += 1
        if self.trackers and self.step % LOG_INTERVAL == 0:
            self.log({"loss": loss})

    def record_task(self, row: Sequence[float], tasks: int) -> None:
        """Log the accuracies after a task.

        Args:
            row: the accuracy on each task of the stream.
            tasks: how many tasks are learned.
        """
        learned_row = row[:tasks] if len(row) > tasks else row
        by_task = {f"accuracy/task {j + 1}": value for j, value in enumerate(learned_row)}
        average = sum(learned_row) / len(learned_row)
        self.log({"tasks learned": tasks, "accuracy/so far": average, **by_task})

    def log(self, numbers: Mapping[str, float]) -> None:
        """Call ``log`` of all trackers at the current step."""
        for tracker in self.trackers:
            tracker.log(numbers, self.step)

    def finish(self, result: Result | None) -> None:
        """Call ``finish`` of all trackers."""
        for tracker in self.trackers:
            tracker.finish(result)
