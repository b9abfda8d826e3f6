"""Everlearn: let a PyTorch model go on learning without forgetting."""

from everlearn import advice, curvature, growth, heads, metrics, nets, optim, results, sources, streams
from everlearn.batch import Batch
from everlearn.isolation import Isolation
from everlearn.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from everlearn.memory import Memory
from everlearn.method import Chain, Method
from everlearn.methods import METHODS
from everlearn.methods.agem import AGEM
from everlearn.methods.den import DEN
from everlearn.methods.der import DER, DERpp
from everlearn.methods.er import ER
from everlearn.methods.er_ace import ERACE
from everlearn.methods.ewc import EWC
from everlearn.methods.expandable import ExpandableRepresentation
from everlearn.methods.expandnet import ExpandNet
from everlearn.methods.freeze import Freeze
from everlearn.methods.gem import GEM
from everlearn.methods.generative import GenerativeReplay
from everlearn.methods.hat import HAT
from everlearn.methods.l2 import L2
from everlearn.methods.lwf import LwF
from everlearn.methods.mas import MAS
from everlearn.methods.packnet import PackNet
from everlearn.methods.pnn import PNN
from everlearn.methods.si import SI
from everlearn.penalty import QuadraticPenalty
from everlearn.replay import Replay
from everlearn.results import Result
from everlearn.stream import Stream, Task, allowed_classes
from everlearn.trainer import evaluate, run, train
from everlearn.traits import Traits
from everlearn.updating import update

__all__ = [
    "AGEM",
    "DEN",
    "DER",
    "ER",
    "ERACE",
    "EWC",
    "GEM",
    "HAT",
    "L2",
    "MAS",
    "METHODS",
    "PNN",
    "SI",
    "Batch",
    "Bernoulli",
    "Categorical",
    "Chain",
    "DERpp",
    "ExpandNet",
    "ExpandableRepresentation",
    "Freeze",
    "Gaussian",
    "GenerativeReplay",
    "Isolation",
    "Likelihood",
    "LwF",
    "Memory",
    "Method",
    "PackNet",
    "QuadraticPenalty",
    "Replay",
    "Result",
    "Stream",
    "Task",
    "Traits",
    "advice",
    "allowed_classes",
    "curvature",
    "evaluate",
    "growth",
    "heads",
    "metrics",
    "nets",
    "optim",
    "results",
    "run",
    "sources",
    "streams",
    "train",
    "update",
]
