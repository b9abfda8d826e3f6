# Written by make tables (docs/tables.py). Type checkers read it instead of __init__.py.

from everlearn.core.method import Method
from everlearn.methods.baselines.freeze import Freeze
from everlearn.methods.baselines.l2 import L2
from everlearn.methods.expansion.den import DEN
from everlearn.methods.expansion.expandable import ExpandableRepresentation
from everlearn.methods.expansion.expandnet import ExpandNet
from everlearn.methods.heads.base import FrozenHead
from everlearn.methods.heads.fecam import FeCAM
from everlearn.methods.heads.klda import KLDA
from everlearn.methods.heads.nearest_mean import NearestMean
from everlearn.methods.heads.ranpac import RanPAC
from everlearn.methods.heads.slca import SLCA
from everlearn.methods.heads.streaming_lda import StreamingLDA
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
    "KLDA",
    "L2",
    "MAS",
    "METHODS",
    "PNN",
    "SI",
    "SLCA",
    "DERpp",
    "ExpandNet",
    "ExpandableRepresentation",
    "FeCAM",
    "Freeze",
    "FrozenHead",
    "GenerativeReplay",
    "Isolation",
    "LwF",
    "Method",
    "NearestMean",
    "PackNet",
    "QuadraticPenalty",
    "RanPAC",
    "Replay",
    "StreamingLDA",
]

METHODS: LazyTable[type[Method]]
