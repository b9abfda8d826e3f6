"""The multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int | Sequence[int], outputs: int, hidden: Sequence[int] = (400, 400)) -> nn.Sequential:
    """Linear layers with ReLU between them; images are flattened.

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
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(widths[-1], outputs))
