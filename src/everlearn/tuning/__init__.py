"""Hyperparameter tuning of methods on validation data, with trials that share the first task."""

from everlearn.core.hyperparameters import Search
from everlearn.experiments.executors import WorkerLost
from everlearn.tuning.trials import Trial
from everlearn.tuning.tune import Tuned, tune

__all__ = ["Search", "Trial", "Tuned", "WorkerLost", "tune"]
