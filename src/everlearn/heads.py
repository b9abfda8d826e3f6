"""The output layer: finding it, and giving it more outputs."""

from __future__ import annotations

import torch
from torch import nn

from everlearn.params import unwrap


def output_layer(model: nn.Module, name: str | None = None) -> tuple[str, nn.Linear]:
    """The layer that gives the outputs, with its name: the last ``nn.Linear`` registered, unless you name it.

    >>> output_layer(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2', Linear(in_features=3, out_features=2, bias=True))
    """
    model = unwrap(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if name is None and layers:
        return list(layers.items())[-1]
    if name is not None and name in layers:
        return name, layers[name]
    wanted = "nn.Linear layer" if name is None else f"nn.Linear layer named {name!r}"
    raise ValueError(f"{type(model).__name__} has no {wanted}; its linear layers are: {', '.join(layers) or 'none'}.")


def grow_output(model: nn.Module, outputs: int, name: str | None = None) -> None:
    """Give the output layer more outputs; its old outputs stay the same, to rounding.

    New rows start as a new layer's would. Make the optimizer after growing, or tell it of the new parameters.

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
    new.train(old.training)
    for p, q in zip(new.parameters(), old.parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    unwrap(model).set_submodule(name, new)
