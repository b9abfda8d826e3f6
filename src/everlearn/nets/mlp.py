"""A multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn


def mlp(
    inputs: int | Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (400, 400),
    init: Literal["torch", "xavier"] = "torch",
) -> nn.Sequential:
    """Create a multi-layer perceptron: linear layers with ReLU between them. Images are flattened.

    Args:
        inputs: number of features, or the shape of one input.
        outputs: number of outputs.
        hidden: width of each hidden layer.
        init: "torch" for torch's initialization, or "xavier" for the uniform weights of Glorot & Bengio (2010) and zero
            biases, as in some papers.

    >>> mlp((1, 8, 8), 10, hidden=[32])
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    num_features = inputs if isinstance(inputs, int) else math.prod(inputs)
    widths = [num_features, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for in_features, out_features in pairwise(widths):
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    if init == "xavier":
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
    elif init != "torch":
        raise ValueError(f"init: got {init!r}, allowed: 'torch', 'xavier'.")
    return net
