"""Find the output layer, and add outputs to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from everlearn.core.parameters import unwrap


def output_layer(model: nn.Module, name: str | None = None) -> tuple[str, nn.Linear]:
    """Return the name and module of the output layer: the last registered ``nn.Linear``, or the one named.

    A layer that a method has replaced by a feature head is found by its old name: it is the head's ``output``.

    >>> output_layer(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2', Linear(in_features=3, out_features=2, bias=True))
    """
    model = unwrap(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if name is None and layers:
        return list(layers.items())[-1]
    if name is not None and name in layers:
        return name, layers[name]
    if name is not None and f"{name}.output" in layers:
        return f"{name}.output", layers[f"{name}.output"]

    wanted = "nn.Linear layer"
    if name is not None:
        wanted += f" named {name!r}"
    raise ValueError(f"{type(model).__name__} has no {wanted}; its linear layers are: {', '.join(layers) or 'none'}.")


def tied_parameters(model: nn.Module, name: str) -> list[str]:
    """List the parameters outside a layer that are the layer's own, as an embedding may be the output layer's weight.

    >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    >>> net[1].weight = net[0].weight
    >>> tied_parameters(net, "1")
    ['0.weight']

    Args:
        model: the model.
        name: name of the layer.
    """
    inner = unwrap(model)
    layer_ids = {id(p) for p in inner.get_submodule(name).parameters()}
    names = [n for n, p in inner.named_parameters(remove_duplicate=False) if id(p) in layer_ids]
    return [n for n in names if not n.startswith(f"{name}.".lstrip("."))]


def grow_output(model: nn.Module, outputs: int, name: str | None = None) -> None:
    """Add outputs to the output layer. The values of its old outputs stay the same, up to rounding.

    New rows are initialized as in a new layer. Create the optimizer after growing, or add the new parameters to it.

    >>> net = nn.Sequential(nn.Linear(4, 2))
    >>> grow_output(net, 5)
    >>> net[0]
    Linear(in_features=4, out_features=5, bias=True)
    """
    name, old = output_layer(model, name)
    if not name:
        raise ValueError(
            "The model is the output layer itself and cannot be replaced: put it into nn.Sequential(layer)."
        )
    if outputs < old.out_features:
        raise ValueError(
            f"The output layer {name!r} has {old.out_features} outputs already; it cannot shrink to {outputs}."
        )

    new = nn.Linear(old.in_features, outputs, old.bias is not None, old.weight.device, old.weight.dtype)
    with torch.no_grad():
        new.weight[: old.out_features] = old.weight
        if old.bias is not None:
            new.bias[: old.out_features] = old.bias

    # The new layer takes over the mode and the frozen flags of the old one.
    new.train(old.training)
    for new_parameter, old_parameter in zip(new.parameters(), old.parameters(), strict=True):
        new_parameter.requires_grad_(old_parameter.requires_grad)
    unwrap(model).set_submodule(name, new)
    update_num_labels(model, outputs)


def update_num_labels(model: nn.Module, outputs: int) -> None:
    """Tell a model of transformers, which computes its own loss, how many outputs it has."""
    inner: Any = unwrap(model)
    config: Any = getattr(inner, "config", None)
    if hasattr(config, "num_labels") and isinstance(getattr(inner, "num_labels", None), int):
        config.num_labels = outputs
        inner.num_labels = outputs
