"""Runs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class WandB:
    """A tracker that makes one Weights & Biases run per Everlearn run.

    Args:
        project: its name.
        mode: "online", "offline" or "disabled"; by default as the environment says (WANDB_MODE).
    """

    def __init__(self, project: str = "everlearn", mode: str | None = None) -> None:
        self._wandb, self.project, self.mode = (
            import_optional("wandb", "wandb", "The Weights & Biases tracker"),
            project,
            mode,
        )
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """A run of the result's own name."""
        name = file_name(dict(config)).removesuffix(".json")
        self._run = self._wandb.init(
            project=self.project, name=name, config=dict(config), mode=self.mode, reinit="finish_previous"
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """A point of each curve."""
        self._run.log(dict(numbers), step=step)

    def finish(self, result: Result | None) -> None:
        """With the accuracy over tasks and over all test examples, if it has come to an end."""
        if result is not None:
            self._run.summary["average accuracy"] = result.average_accuracy
            self._run.summary["overall accuracy"] = result.overall_accuracy
        self._run.finish(exit_code=0 if result is not None else 1)
