"""Continual-learning methods by family, and METHODS, the registry of all of them by name."""

from everlearn.runtime.lazy_imports import LazyTable, lazy_attributes

# Classes are imported when they are looked up: the command line lists the methods without torch. After a change of this
# table, ``make tables`` updates everything that lists methods, with the types of these names in __init__.pyi.
METHODS = LazyTable(
    {
        "finetune": "everlearn.core.method:Method",
        "freeze": "everlearn.methods.baselines.freeze:Freeze",
        "l2": "everlearn.methods.baselines.l2:L2",
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
        # Heads by their accuracy on CLINC150, the best first, which is the order in which ``advise`` lists them.
        "ranpac": "everlearn.methods.heads.ranpac:RanPAC",
        "klda": "everlearn.methods.heads.klda:KLDA",
        "fecam": "everlearn.methods.heads.fecam:FeCAM",
        "streaming-lda": "everlearn.methods.heads.streaming_lda:StreamingLDA",
        "nearest-mean": "everlearn.methods.heads.nearest_mean:NearestMean",
        "slca": "everlearn.methods.heads.slca:SLCA",
    }
)

# Public base classes of methods.
_BASES = [
    "everlearn.methods.heads.base:FrozenHead",
    "everlearn.methods.isolation.base:Isolation",
    "everlearn.methods.regularization.base:QuadraticPenalty",
    "everlearn.methods.replay.base:Replay",
]
_TARGETS = {target.partition(":")[2]: target for target in [*_BASES, *METHODS.targets.values()]}

__all__ = ["METHODS", *_TARGETS]  # noqa: PLE0604
__getattr__ = lazy_attributes(__name__, _TARGETS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
