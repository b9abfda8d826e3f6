"""Running statistics of normalization layers: which layers keep them, how they are held, and a warning where they are not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from everlearn.params import unwrap


@dataclass(frozen=True)
class HoldStatistics:
    """A hook before a layer's forward pass: it normalizes by the statistics that it keeps, and leaves these as they are.

    It acts before every forward pass, because ``model.train()`` in the loop would set the statistics moving again.

    Args:
        owner: who put it on and may take it off.
    """

    owner: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put the layer into evaluation mode."""
        module.training = False


def tracking_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that keep running statistics of their inputs, by name.

    >>> list(tracking_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))))
    ['1']
    """
    return {
        name: module
        for name, module in unwrap(model).named_modules()
        if getattr(module, "track_running_stats", False) and isinstance(getattr(module, "running_mean", None), Tensor)
    }


def warn_if_statistics_move(model: nn.Module, method: str) -> bool:
    """Warn where running statistics follow the data of a new task.

    A layer in training mode moves them with every forward pass, unless a hook holds them.

    Returns:
        Whether the question is settled, which it is not yet for a model in evaluation mode.
    """
    layers = tracking_layers(model)
    moving = [name for name, layer in layers.items() if layer.training and not _is_held(layer)]
    if moving:
        some = ", ".join(moving[:3]) + ", …" * (len(moving) > 3)
        warnings.warn(
            f"The running statistics of {some} ({len(moving)} in all, {type(layers[moving[0]]).__name__}) follow the data of "
            f"the new task, which {method} does not prevent: old tasks can be lost although hardly any weight moves. Add "
            f'Freeze("statistics"), {method}(…) + Freeze("statistics"), to freeze them after the first task (a state that was loaded '
            "takes effect with begin_task), or use a model with GroupNorm or LayerNorm.",
            UserWarning,
            stacklevel=4,
        )
    return bool(moving) or not layers or model.training


def _is_held(layer: nn.Module) -> bool:
    return any(isinstance(hook, HoldStatistics) for hook in layer._forward_pre_hooks.values())
