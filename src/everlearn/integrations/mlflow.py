"""Runs in MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class MLflow:
    """A tracker that makes one MLflow run per Everlearn run.

    Args:
        experiment: its name.
        uri: of the tracking server; by default MLflow's own.
    """

    def __init__(self, experiment: str = "everlearn", uri: str | None = None) -> None:
        self._mlflow = import_optional("mlflow", "mlflow", "The MLflow tracker")
        if uri is not None:
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(experiment)

    def start(self, config: Mapping[str, Any]) -> None:
        """A run of the result's own name."""
        self._mlflow.start_run(run_name=file_name(dict(config)).removesuffix(".json"))
        self._mlflow.log_params({k: str(v)[:500] for k, v in config.items()})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """A point of each curve; MLflow allows few signs in names."""
        self._mlflow.log_metrics({re.sub(r"[^\w\-. /]", "_", n): float(v) for n, v in numbers.items()}, step=step)

    def finish(self, result: Result | None) -> None:
        """With the accuracy over tasks and over all test examples, if it has come to an end."""
        if result is not None:
            self._mlflow.log_metrics(
                {"average accuracy": result.average_accuracy, "overall accuracy": result.overall_accuracy}
            )
        self._mlflow.end_run("FINISHED" if result is not None else "FAILED")
