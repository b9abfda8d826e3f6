"""What happens in a run, told while it happens to whoever listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everlearn.results import Result

EVERY = 20  # steps from one loss that is told to the next


class Tracker(Protocol):
    """Somebody who listens to a run: a logger, a dashboard, a file of your own."""

    def start(self, config: Mapping[str, Any]) -> None:
        """A run begins; its configuration is that of its result."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers by name at an optimizer step, counted over all tasks: the loss every few steps, accuracies after each task."""

    def finish(self, result: Result | None) -> None:
        """The run has ended; None if it has failed or was stopped."""


@dataclass
class Journal:
    """The trackers of one run, and where it is.

    >>> journal = Journal()
    >>> journal.stepped(0.5)
    >>> journal.step
    1
    """

    trackers: Sequence[Tracker] = ()
    step: int = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """To all."""
        for tracker in self.trackers:
            tracker.start(config)

    def stepped(self, loss: float) -> None:
        """One more step."""
        self.step += 1
        if self.trackers and self.step % EVERY == 0:
            self.log({"loss": loss})

    def learned(self, row: Sequence[float], tasks: int) -> None:
        """The accuracies after so many tasks."""
        sofar = row[:tasks] if len(row) > tasks else row
        each = {f"accuracy/task {j + 1}": value for j, value in enumerate(sofar)}
        self.log({"tasks learned": tasks, "accuracy/so far": sum(sofar) / len(sofar), **each})

    def log(self, numbers: Mapping[str, float]) -> None:
        """To all."""
        for tracker in self.trackers:
            tracker.log(numbers, self.step)

    def finish(self, result: Result | None) -> None:
        """To all."""
        for tracker in self.trackers:
            tracker.finish(result)
