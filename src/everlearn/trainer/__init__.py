"""The trainer: the loop of ``Method``'s docstring as functions, and nothing a method could not do without."""

from everlearn.trainer.evaluation import evaluate
from everlearn.trainer.running import run
from everlearn.trainer.tracking import Tracker
from everlearn.trainer.training import Trained, Training, train

__all__ = ["Tracker", "Trained", "Training", "evaluate", "run", "train"]
