"""All methods; the table is the whole registry."""

from everlearn.method import Method
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

METHODS: dict[str, type[Method]] = {
    "finetune": Method,
    "freeze": Freeze,
    "l2": L2,
    "ewc": EWC,
    "si": SI,
    "mas": MAS,
    "lwf": LwF,
    "er": ER,
    "er-ace": ERACE,
    "der": DER,
    "derpp": DERpp,
    "agem": AGEM,
    "gem": GEM,
    "generative": GenerativeReplay,
    "packnet": PackNet,
    "pnn": PNN,
    "hat": HAT,
    "expandable": ExpandableRepresentation,
    "den": DEN,
    "expandnet": ExpandNet,
}
