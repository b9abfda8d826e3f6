"""The multi-layer perceptron."""

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
    """Linear layers with ReLU between them; images are flattened.

    ``init="xavier"``: uniform weights of Glorot & Bengio (2010) and zero biases, as some papers have it, instead of torch's.

    >>> mlp((1, 8, 8), 10, hidden=[32])
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    widths = [inputs if isinstance(inputs, int) else math.prod(inputs), *hidden]
    body = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(nn.Flatten(), *body, nn.Linear(widths[-1], outputs))
    if init == "xavier":
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
    elif init != "torch":
        raise ValueError(f"init: got {init!r}, allowed: 'torch', 'xavier'.")
    return net
