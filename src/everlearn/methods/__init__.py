"""All methods; the table is the whole registry."""

from everlearn.method import Method
from everlearn.methods.ewc import EWC
from everlearn.methods.freeze import Freeze
from everlearn.methods.l2 import L2
from everlearn.methods.lwf import LwF
from everlearn.methods.mas import MAS
from everlearn.methods.si import SI

METHODS: dict[str, type[Method]] = {
    "finetune": Method,
    "freeze": Freeze,
    "l2": L2,
    "ewc": EWC,
    "si": SI,
    "mas": MAS,
    "lwf": LwF,
}
