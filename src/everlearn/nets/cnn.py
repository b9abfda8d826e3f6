"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def cnn(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64), norm: bool = True) -> nn.Sequential:
    """Blocks of 3×3 convolution, BatchNorm, ReLU and 2×2 pooling, then an average over places and a linear layer.

    >>> import torch
    >>> cnn((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if len(inputs) != 3:
        raise ValueError(f"cnn needs images of shape (channels, height, width), got inputs of shape {tuple(inputs)}.")
    blocks = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=not norm),
            nn.BatchNorm2d(b) if norm else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        for a, b in pairwise([inputs[0], *channels])
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs))
