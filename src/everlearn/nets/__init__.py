"""Small reference models, created from the shape of one input and the number of outputs."""

from collections.abc import Callable

from torch import nn

from everlearn.nets.cnn import cnn
from everlearn.nets.mlp import mlp
from everlearn.nets.mobilenet_v2 import mobilenet_v2
from everlearn.nets.resnet import resnet
from everlearn.nets.transformer import transformer

NETS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "mobilenet_v2": mobilenet_v2,
    "transformer": transformer,
}

__all__ = ["NETS", "cnn", "mlp", "mobilenet_v2", "resnet", "transformer"]
