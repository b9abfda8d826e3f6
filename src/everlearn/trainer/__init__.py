"""Training loops: ``train`` for a task, ``run`` for a stream, ``evaluate`` for tests."""

from everlearn.trainer.checkpoints import CheckpointEvery
from everlearn.trainer.evaluate import evaluate
from everlearn.trainer.run import run
from everlearn.trainer.settings import Training
from everlearn.trainer.trackers import Tracker
from everlearn.trainer.train import TrainResult, train

__all__ = ["CheckpointEvery", "Tracker", "TrainResult", "Training", "evaluate", "run", "train"]
