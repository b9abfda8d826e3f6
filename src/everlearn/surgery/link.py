"""A link: units that one layer produces and one other layer reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Link:
    """Units that one layer produces and one other layer consumes, with nothing between them that mixes units.

    Args:
        producer: name of the linear or convolution layer whose outputs the units are.
        consumer: name of the only layer that reads them.
        norms: names of the BatchNorms between them.
        width: number of units.
        repeat: inputs of the consumer per unit; more than 1 where feature maps are flattened.
        rigid: whether the model's code fixes their number, as in ``x.view(-1, 400)``.
    """

    producer: str
    consumer: str
    norms: tuple[str, ...]
    width: int
    repeat: int = 1
    rigid: bool = False


def is_plain_layer(module: nn.Module | None) -> bool:
    """Whether a module is an ungrouped layer with a weight parameter, without weight_norm or spectral_norm."""
    return isinstance(module, LAYERS) and getattr(module, "groups", 1) == 1 and "weight" in module._parameters


def num_units(layer: nn.Module) -> int:
    """Return the number of outputs of a linear or convolution layer."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def num_inputs(layer: nn.Module) -> int:
    """Return the number of inputs of a linear or convolution layer."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def repeat_per_input(unit_values: Tensor, link: Link) -> Tensor:
    """Turn a value per unit into a value per input of the consumer."""
    if link.repeat == 1:
        return unit_values
    return unit_values.repeat_interleave(link.repeat)
