"""Who listens to runs that are started from the command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from everlearn.cli.names import look_up, words
from everlearn.integrations.mlflow import MLflow
from everlearn.integrations.tensorboard import TensorBoard
from everlearn.integrations.wandb import WandB
from everlearn.results import Result, amount
from everlearn.trainer.tracking import Tracker

TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def listeners(names: str) -> list[Tracker]:
    """The trackers of these names, and a plain log where there is no terminal for bars."""
    chosen = [look_up("tracker", name, TRACKERS)() for name in words(names)]
    return chosen if sys.stderr.isatty() else [*chosen, Lines()]


class Lines:
    """A tracker for logs: after a task, where it is, how well it does and how long it will take; not oftener than now and then.

    Args:
        pause: seconds from one line to the next at least, so that short runs are not talkative.
    """

    def __init__(self, pause: float = 10.0) -> None:
        self.pause = pause

    def start(self, config: Mapping[str, Any]) -> None:
        """Look at the clock."""
        self._config, self._loss = config, ""
        self._begun = self._last = time.monotonic()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """A line after a task."""
        if "loss" in numbers:
            self._loss = f"loss {numbers['loss']:.3g}, "  # told every few steps: a short task may have none
        now, done = time.monotonic(), int(numbers.get("tasks learned", 0))
        if not done or now - self._last < self.pause:
            return
        c, spent, tasks = self._config, now - self._begun, self._config["stream"]["tasks"]
        self._last = now
        print(
            f"{c['method']} ({c['stream']['name']}, {c['scenario']}-incremental, seed {c['seed']}): task {done} of {tasks}, "
            f"{self._loss}so far {amount(numbers['accuracy/so far'], c['score'])}, {spent:.0f} s, "
            f"about {spent / done * (tasks - done):.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def finish(self, result: Result | None) -> None:
        """The result speaks for itself."""
