"""Running statistics of normalization layers: find the layers, freeze their statistics, warn if they change."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from everlearn.core.parameters import unwrap


def hold_statistics(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Make a layer normalize by its running statistics, without updating them: a forward pre-hook.

    It acts before every forward pass, because ``model.train()`` in the training loop would re-enable the updates.
    """
    module.training = False


def tracking_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the layers with running statistics, by name.

    >>> list(tracking_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))))
    ['1']
    """
    return {
        name: module
        for name, module in unwrap(model).named_modules()
        if getattr(module, "track_running_stats", False) and isinstance(getattr(module, "running_mean", None), Tensor)
    }


def warn_if_statistics_move(model: nn.Module, method: str) -> bool:
    """Warn if running statistics are updated on the data of a new task.

    A layer in training mode updates them in every forward pass, unless a hook freezes them.

    Returns:
        Whether no further check is needed: False while the model is in evaluation mode.
    """
    layers = tracking_layers(model)
    updated = [name for name, layer in layers.items() if layer.training and not _is_frozen(layer)]
    if updated:
        layer_names = ", ".join(updated[:3]) + ", …" * (len(updated) > 3)
        layer_type = type(layers[updated[0]]).__name__
        warnings.warn(
            f"The running statistics of {layer_names} ({len(updated)} in all, {layer_type}) follow the data of the new "
            f"task, which {method} does not prevent: accuracy on old tasks can drop although the weights hardly "
            f'change. Add Freeze("statistics"), {method}(…) + Freeze("statistics"), to freeze them after the first '
            "task (a loaded state takes effect with begin_task), or use a model with GroupNorm or LayerNorm.",
            UserWarning,
            stacklevel=4,
        )
    return bool(updated) or not layers or model.training


def _is_frozen(layer: nn.Module) -> bool:
    """Whether a hook freezes the layer's running statistics."""
    # Methods register functions as partial ones, which carry the name of their owner.
    return any(getattr(hook, "func", hook) is hold_statistics for hook in layer._forward_pre_hooks.values())
