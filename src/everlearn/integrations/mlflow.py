"""Track runs in MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class MLflow:
    """Tracker that creates one MLflow run per Everlearn run.

    Args:
        experiment: name of the experiment.
        uri: address of the tracking server; MLflow's default if not given.
    """

    def __init__(self, experiment: str = "everlearn", uri: str | None = None) -> None:
        self._mlflow = import_optional("mlflow", "mlflow", "The MLflow tracker")
        if uri is not None:
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(experiment)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start a run with the name of the result file."""
        self._mlflow.start_run(run_name=file_name(dict(config)).removesuffix(".json"))
        self._mlflow.log_params({key: str(value)[:500] for key, value in config.items()})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        # MLflow allows only these characters in names.
        metrics = {re.sub(r"[^\w\-. /]", "_", name): float(value) for name, value in numbers.items()}
        self._mlflow.log_metrics(metrics, step=step)

    def finish(self, result: Result | None) -> None:
        """End the run, with the accuracy over tasks and over all test examples if it has a result."""
        if result is not None:
            self._mlflow.log_metrics(
                {"average accuracy": result.average_accuracy, "overall accuracy": result.overall_accuracy}
            )
        self._mlflow.end_run("FINISHED" if result is not None else "FAILED")
