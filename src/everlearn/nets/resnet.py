"""A residual network for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Block(nn.Module):
    """Residual block: two 3×3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to the output of the convolutions."""
        hidden = self.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(hidden))
        outputs: Tensor = self.relu(residual + self.shortcut(x))
        return outputs


def resnet(inputs: Sequence[int], outputs: int, width: int = 20, blocks: Sequence[int] = (2, 2, 2, 2)) -> nn.Sequential:
    """Create the reduced ResNet-18 of Lopez-Paz & Ranzato (2017), with 20, 40, 80 and 160 channels.

    Args:
        inputs: shape (channels, height, width) of one image.
        outputs: number of outputs.
        width: channels of the first stage; every further stage has twice as many.
        blocks: number of residual blocks in each stage.

    >>> import torch
    >>> resnet((3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if len(inputs) != 3:
        raise ValueError(
            f"resnet needs images of shape (channels, height, width), got inputs of shape {tuple(inputs)}."
        )
    layers: list[nn.Module] = [nn.Conv2d(inputs[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            # The first block of every stage but the first halves the resolution.
            stride = 2 if stage > 0 and i == 0 else 1
            layers.append(Block(channels, width * 2**stage, stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))
