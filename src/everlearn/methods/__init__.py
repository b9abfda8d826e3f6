"""Continual-learning methods by family, and METHODS, the registry of all of them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everlearn.runtime.lazy_imports import LazyTable, lazy_attributes

if TYPE_CHECKING:
    from everlearn.core.method import Method
    from everlearn.methods.baselines.freeze import Freeze
    from everlearn.methods.expansion.den import DEN
    from everlearn.methods.expansion.expandable import ExpandableRepresentation
    from everlearn.methods.expansion.expandnet import ExpandNet
    from everlearn.methods.isolation.base import Isolation
    from everlearn.methods.isolation.hat import HAT
    from everlearn.methods.isolation.packnet import PackNet
    from everlearn.methods.isolation.pnn import PNN
    from everlearn.methods.regularization.base import QuadraticPenalty
    from everlearn.methods.regularization.ewc import EWC
    from everlearn.methods.regularization.l2 import L2
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
    "PackNet",
    "QuadraticPenalty",
    "Replay",
]

# Classes are imported when they are looked up: the command line lists the methods without torch.
METHODS: LazyTable[type[Method]] = LazyTable(
    {
        "finetune": "everlearn.core.method:Method",
        "freeze": "everlearn.methods.baselines.freeze:Freeze",
        "l2": "everlearn.methods.regularization.l2:L2",
        "ewc": "everlearn.methods.regularization.ewc:EWC",
        "si": "everlearn.methods.regularization.si:SI",
        "mas": "everlearn.methods.regularization.mas:MAS",
        "lwf": "everlearn.methods.regularization.lwf:LwF",
        "er": "everlearn.methods.replay.er:ER",
        "er-ace": "everlearn.methods.replay.er_ace:ERACE",
        "der": "everlearn.methods.replay.der:DER",
        "derpp": "everlearn.methods.replay.der:DERpp",
        "agem": "everlearn.methods.replay.agem:AGEM",
        "gem": "everlearn.methods.replay.gem:GEM",
        "generative": "everlearn.methods.replay.generative:GenerativeReplay",
        "packnet": "everlearn.methods.isolation.packnet:PackNet",
        "pnn": "everlearn.methods.isolation.pnn:PNN",
        "hat": "everlearn.methods.isolation.hat:HAT",
        "expandable": "everlearn.methods.expansion.expandable:ExpandableRepresentation",
        "den": "everlearn.methods.expansion.den:DEN",
        "expandnet": "everlearn.methods.expansion.expandnet:ExpandNet",
    }
)

if not TYPE_CHECKING:
    _BASES = {
        "Isolation": "everlearn.methods.isolation.base:Isolation",
        "QuadraticPenalty": "everlearn.methods.regularization.base:QuadraticPenalty",
        "Replay": "everlearn.methods.replay.base:Replay",
    }
    _CLASSES = {target.partition(":")[2]: target for target in METHODS.targets.values()}
    __getattr__ = lazy_attributes(__name__, {**_BASES, **_CLASSES})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
