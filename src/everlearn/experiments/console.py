"""Trackers of runs started from a grid: those chosen by name, and a progress log where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from everlearn.experiments.parsing import look_up, split_list
from everlearn.integrations.mlflow import MLflow
from everlearn.integrations.tensorboard import TensorBoard
from everlearn.integrations.wandb import WandB
from everlearn.results.result import Result, format_score
from everlearn.trainer.trackers import Tracker

TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make_trackers(names: str) -> list[Tracker]:
    """Make the trackers of these names, and a progress log if stderr is no terminal and shows no bars."""
    trackers = [look_up("tracker", name, TRACKERS)() for name in split_list(names)]
    if not sys.stderr.isatty():
        trackers.append(Lines())
    return trackers


class Lines:
    """Tracker that prints a progress line after a task: position, loss, score, and remaining time.

    Args:
        pause: minimum number of seconds between two lines.
    """

    def __init__(self, pause: float = 10.0) -> None:
        self.pause = pause

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the clock."""
        self._config = config
        self._loss = ""
        self._start_time = time.monotonic()
        self._last_time = self._start_time

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Print a line if a task has ended and the last line is old enough."""
        # The loss is logged every few steps only, so that a short task may have none.
        if "loss" in numbers:
            self._loss = f"loss {numbers['loss']:.3g}, "

        current_time = time.monotonic()
        tasks_learned = int(numbers.get("tasks learned", 0))
        if not tasks_learned or current_time - self._last_time < self.pause:
            return
        self._last_time = current_time

        config = self._config
        num_tasks = config["stream"]["tasks"]
        elapsed = current_time - self._start_time
        remaining = elapsed / tasks_learned * (num_tasks - tasks_learned)
        run_name = (
            f"{config['method']} ({config['stream']['name']}, {config['scenario']}-incremental, seed {config['seed']})"
        )
        score = format_score(numbers["accuracy/so far"], config["score"])
        print(
            f"{run_name}: task {tasks_learned} of {num_tasks}, {self._loss}so far {score}, "
            f"{elapsed:.0f} s, about {remaining:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    def finish(self, result: Result | None) -> None:
        """Do nothing: the caller prints the result."""
