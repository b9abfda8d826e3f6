"""Initial values of a new column: parameters drawn again as when the network was built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from everlearn.core.parameters import Params, unwrap
from everlearn.runtime.randomness import seeded
from everlearn.surgery.functional import named_tensors
from everlearn.surgery.hooks import without_hooks


def draw_column(net: nn.Module, initial: Params, factory: Callable[[], nn.Module] | None, seed: int) -> Params:
    """Return initial parameters and buffers for a new column; parameters that are frozen are left out.

    Args:
        net: the newest column, which stays unchanged.
        initial: values from before the first task of tensors that no module can reset.
        factory: creates a new model; None uses ``reset_parameters`` of each module.
        seed: of the random numbers.
    """
    with without_hooks(net):
        fresh = copy.deepcopy(net)
    device = next(net.parameters()).device
    with torch.no_grad(), seeded(seed, device):
        if factory is None:
            _reinitialize(fresh, initial)
        else:
            fresh = unwrap(factory())

    fresh_tensors = named_tensors(fresh)
    for name, v in named_tensors(net).items():
        if name not in fresh_tensors:
            problem = "is missing"
        elif fresh_tensors[name].shape != v.shape:
            problem = f"has shape {tuple(fresh_tensors[name].shape)}"
        else:
            continue
        raise ValueError(
            f"PNN.factory must make a model like the one that learns: {name} {problem}, it should have "
            f"{tuple(v.shape)}."
        )
    frozen = {n for n, p in net.named_parameters() if not p.requires_grad}
    return {n: fresh_tensors[n].detach() for n in named_tensors(net) if n not in frozen}


def tensors_without_reset(net: nn.Module) -> Params:
    """Return buffers and the parameters that no module can draw again."""
    resettable = set()
    for module in net.modules():
        if _reset_function(module) is not None:
            resettable |= {id(p) for p in module.parameters(recurse=False)}
    return {n: v for n, v in named_tensors(net).items() if id(v) not in resettable}


def _reinitialize(net: nn.Module, initial: Params) -> None:
    """Restore the initial values, then reset every module that can be reset."""
    for name, v in named_tensors(net).items():
        if name in initial and v.shape == initial[name].shape:
            v.copy_(initial[name])

    # Parts come before the module that contains them, as when the network was built.
    for module in reversed(list(net.modules())):
        reset = _reset_function(module)
        if reset is not None:
            reset()


def _reset_function(module: nn.Module) -> Callable[[], None] | None:
    """Return the function by which a module draws its parameters again; None if it has none or they are frozen."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        return None
    parameters = list(module.parameters(recurse=False))
    if parameters and not any(p.requires_grad for p in parameters):
        return None
    return cast("Callable[[], None]", reset)
