"""The trainer: the loop of ``Method``'s docstring as functions, and nothing a method could not do without."""

from everlearn.trainer.checkpoints import Every
from everlearn.trainer.evaluation import evaluate
from everlearn.trainer.lesson import Trained, train
from everlearn.trainer.running import run
from everlearn.trainer.tracking import Tracker
from everlearn.trainer.training import Training

__all__ = ["Every", "Tracker", "Trained", "Training", "evaluate", "run", "train"]
