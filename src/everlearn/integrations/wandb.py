"""Track runs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class WandB:
    """Tracker that creates one Weights & Biases run per Everlearn run.

    Args:
        project: name of the project.
        mode: "online", "offline" or "disabled"; by default the environment variable WANDB_MODE.
    """

    def __init__(self, project: str = "everlearn", mode: str | None = None) -> None:
        self._wandb = import_optional("wandb", "wandb", "The Weights & Biases tracker")
        self.project = project
        self.mode = mode
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Start a run with the name of the result file."""
        name = file_name(dict(config)).removesuffix(".json")
        self._run = self._wandb.init(
            project=self.project, name=name, config=dict(config), mode=self.mode, reinit="finish_previous"
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        self._run.log(dict(numbers), step=step)

    def finish(self, result: Result | None) -> None:
        """End the run, with the accuracy over tasks and over all test examples if it has a result."""
        if result is not None:
            self._run.summary["average accuracy"] = result.average_accuracy
            self._run.summary["overall accuracy"] = result.overall_accuracy
        self._run.finish(exit_code=0 if result is not None else 1)
