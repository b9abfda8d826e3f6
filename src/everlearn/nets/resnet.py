"""A residual network for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3×3 convolutions with BatchNorm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """X around plus x through."""
        through: Tensor = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(through + self.around(x))
        return out


def resnet(inputs: Sequence[int], outputs: int, width: int = 20, blocks: Sequence[int] = (2, 2, 2, 2)) -> nn.Sequential:
    """ResNet-18 with few channels, as Lopez-Paz & Ranzato (2017) use it: widths 20, 40, 80, 160.

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
            layers.append(Block(channels, width * 2**stage, 2 if stage and not i else 1))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))
