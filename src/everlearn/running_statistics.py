"""Running statistics of normalization layers: which layers keep them, and which follow the data of the current task."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from everlearn.params import unwrap


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
    """Warn where running statistics follow the data of a new task; returns whether the model is in training mode, so that this is known.

    Called after a forward pass: a layer in training mode has just moved its statistics.
    """
    layers = tracking_layers(model)
    moving = [name for name, layer in layers.items() if layer.training]
    if moving:
        some = ", ".join(moving[:3]) + ", …" * (len(moving) > 3)
        warnings.warn(
            f"The running statistics of {some} ({len(moving)} in all, {type(layers[moving[0]]).__name__}) follow the data of "
            f"the new task, which {method} does not prevent: old tasks can be lost although hardly any weight moves. Add "
            f'Freeze("statistics"), {method}(…) + Freeze("statistics"), to freeze them after the first task, or use a model with '
            "GroupNorm or LayerNorm.",
            UserWarning,
            stacklevel=4,
        )
    return bool(moving) or not layers or model.training
