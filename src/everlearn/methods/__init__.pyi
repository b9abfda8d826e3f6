# Written by make tables (docs/tables.py). Type checkers read it instead of __init__.py.

from everlearn.core.method import Method
from everlearn.methods.baselines.freeze import Freeze
from everlearn.methods.baselines.l2 import L2
from everlearn.methods.expansion.den import DEN
from everlearn.methods.expansion.expandable import ExpandableRepresentation
from everlearn.methods.expansion.expandnet import ExpandNet
from everlearn.methods.isolation.base import Isolation
from everlearn.methods.isolation.hat import HAT
from everlearn.methods.isolation.packnet import PackNet
from everlearn.methods.isolation.pnn import PNN
from everlearn.methods.regularization.base import QuadraticPenalty
from everlearn.methods.regularization.ewc import EWC
from everlearn.methods.regularization.lwf import LwF
from everlearn.methods.regularization.mas import MAS
from everlearn.methods.regularization.si import SI
from everlearn.methods.replay.agem import AGEM
from everlearn.methods.replay.base import Replay
from everlearn.methods.replay.der import DER, DERpp
from everlearn.methods.replay.er import ER
from everlearn.methods.replay.er_ace import ERACE
from everlearn.methods.replay.gem import GEM
from everlearn.methods.replay.generative import GenerativeReplay
from everlearn.runtime.lazy_imports import LazyTable

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
    "DERpp",
    "ExpandNet",
    "ExpandableRepresentation",
    "Freeze",
    "GenerativeReplay",
    "Isolation",
    "LwF",
    "Method",
    "PackNet",
    "QuadraticPenalty",
    "Replay",
]

METHODS: LazyTable[type[Method]]
