"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def cnn(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64), norm: bool = True) -> nn.Sequential:
    """Create a convolutional network: blocks of 3×3 convolution, BatchNorm, ReLU and 2×2 max pooling.

    The last block is followed by average pooling over all positions and a linear layer.

    Args:
        inputs: shape (channels, height, width) of one image.
        outputs: number of outputs.
        channels: output channels of each block.
        norm: whether blocks have BatchNorm.

    >>> import torch
    >>> cnn((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if len(inputs) != 3:
        raise ValueError(f"cnn needs images of shape (channels, height, width), got inputs of shape {tuple(inputs)}.")
    blocks = [
        nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=not norm),
            nn.BatchNorm2d(out_channels) if norm else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        for in_channels, out_channels in pairwise([inputs[0], *channels])
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs))
