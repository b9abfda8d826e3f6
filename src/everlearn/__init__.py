"""Everlearn: continual learning for PyTorch models."""

from everlearn import curvature, nets, optim, results, sources, streams, surgery
from everlearn.core.batch import Batch
from everlearn.core.chain import Chain
from everlearn.core.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.core.task import Task, allowed_classes
from everlearn.core.traits import Traits
from everlearn.experiments import advice
from everlearn.memory import Memory
from everlearn.methods import *
from everlearn.methods import __all__ as _method_names
from everlearn.results import Result, metrics
from everlearn.trainer import evaluate, run, train
from everlearn.updating import update

__all__ = [  # noqa: PLE0604
    "Batch",
    "Bernoulli",
    "Categorical",
    "Chain",
    "Gaussian",
    "Likelihood",
    "Memory",
    "Method",
    "Result",
    "Stream",
    "Task",
    "Traits",
    "advice",
    "allowed_classes",
    "curvature",
    "evaluate",
    "metrics",
    "nets",
    "optim",
    "results",
    "run",
    "sources",
    "streams",
    "surgery",
    "train",
    "update",
    *_method_names,
]
