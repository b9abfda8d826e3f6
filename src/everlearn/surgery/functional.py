"""Call or copy a model with other parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import Params, unwrap


def named_tensors(net: nn.Module) -> Params:
    """Return parameters and buffers by name."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def clone_tensors(tensors: Params) -> Params:
    """Return detached copies."""
    return {name: v.detach().clone() for name, v in tensors.items()}


def call_with(model: nn.Module, state: Params, x: Any) -> Tensor:
    """Compute the outputs of the model with other parameters and buffers, without changing the model."""
    inner = unwrap(model)
    model_tensors = named_tensors(inner)

    # The model may have moved to another device or dtype since the state was saved.
    placed_state = {n: v.to(model_tensors[n].device, model_tensors[n].dtype) for n, v in state.items()}
    return forward(inner, x, placed_state)


@torch.no_grad()
def filled_copy(model: nn.Module, state: Params) -> nn.Module:
    """Copy the model, in evaluation mode, with other parameters and buffers of any shape."""
    duplicate = copy.deepcopy(unwrap(model)).eval()

    # A tensor may be registered in several modules: tied weights must stay tied.
    registrations: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in duplicate.modules():
        for leaf, v in [*module._parameters.items(), *module._buffers.items()]:
            registrations.setdefault(id(v), []).append((module, leaf))

    old_tensors = named_tensors(duplicate)
    for name, value in state.items():
        old = old_tensors[name]
        new = value.detach().clone().to(old.device, old.dtype)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new)
        for module, leaf in registrations[id(old)]:
            setattr(module, leaf, new)
            if isinstance(module, nn.Linear) and leaf == "weight":
                module.out_features, module.in_features = new.shape
    return duplicate
