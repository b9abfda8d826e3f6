"""Small reference models; every one is a function of the shape of one input and the number of outputs."""

from collections.abc import Callable

from torch import nn

from everlearn.nets.cnn import cnn
from everlearn.nets.mlp import mlp

NETS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn}

__all__ = ["NETS", "cnn", "mlp"]
