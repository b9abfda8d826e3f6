"""Everlearn: continual learning for PyTorch models."""

from typing import TYPE_CHECKING

from everlearn.methods import __all__ as _method_names
from everlearn.runtime.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from everlearn import curvature, nets, optim, results, sources, streams, surgery
    from everlearn.core.batch import Batch
    from everlearn.core.chain import Chain
    from everlearn.core.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
    from everlearn.core.stream import Stream
    from everlearn.core.task import Task, allowed_classes
    from everlearn.core.traits import Traits
    from everlearn.experiments import advice
    from everlearn.memory import Memory
    from everlearn.methods import *
    from everlearn.results import Result, metrics
    from everlearn.trainer import evaluate, run, train
    from everlearn.tuning import tune as tune
    from everlearn.updating import forget, update

__all__ = [  # noqa: PLE0604
    "Batch",
    "Bernoulli",
    "Categorical",
    "Chain",
    "Gaussian",
    "Likelihood",
    "Memory",
    "Result",
    "Stream",
    "Task",
    "Traits",
    "advice",
    "allowed_classes",
    "curvature",
    "evaluate",
    "forget",
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

# Public names are imported when they are first used: the command line starts without torch. Type checkers read the
# imports above instead.
if not TYPE_CHECKING:
    _ROOMS = ["core", "curvature", "experiments", "memory", "nets", "optim", "results"]
    _ROOMS += ["sources", "streams", "surgery", "trainer", "updating"]
    _TARGETS = {
        "Batch": "everlearn.core.batch:Batch",
        "Bernoulli": "everlearn.core.likelihood:Bernoulli",
        "Categorical": "everlearn.core.likelihood:Categorical",
        "Chain": "everlearn.core.chain:Chain",
        "Gaussian": "everlearn.core.likelihood:Gaussian",
        "Likelihood": "everlearn.core.likelihood:Likelihood",
        "Memory": "everlearn.memory:Memory",
        "Result": "everlearn.results:Result",
        "Stream": "everlearn.core.stream:Stream",
        "Task": "everlearn.core.task:Task",
        "Traits": "everlearn.core.traits:Traits",
        "advice": "everlearn.experiments.advice",
        "allowed_classes": "everlearn.core.task:allowed_classes",
        "evaluate": "everlearn.trainer:evaluate",
        "forget": "everlearn.updating:forget",
        "metrics": "everlearn.results.metrics",
        "run": "everlearn.trainer:run",
        "train": "everlearn.trainer:train",
        "tune": "everlearn.tuning:tune",  # not in __all__: it needs the extra of this name
        "update": "everlearn.updating:update",
        **{name: f"everlearn.methods:{name}" for name in _method_names},
        **{room: f"everlearn.{room}" for room in _ROOMS},
    }
    __getattr__ = lazy_attributes(__name__, _TARGETS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
