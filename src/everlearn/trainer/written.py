"""Models and optimizers written down by the names of their tensors, so that they outlive their process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everlearn.method import Method
from everlearn.trainer.training import OptimizerFactory


def model_state(model: nn.Module) -> dict[str, Any]:
    """All of a model that training can change, also buffers that it does not mean to save."""
    state = model.state_dict()
    return {"state": state, "passing": {n: b for n, b in model.named_buffers() if n not in state}}


def load_model(model: nn.Module, content: dict[str, Any]) -> None:
    """Give a model that state."""
    model.load_state_dict(content["state"])
    with torch.no_grad():
        for name, value in content["passing"].items():
            model.get_buffer(name).copy_(value)


def written(optimizer: Optimizer, made: int, model: nn.Module, method: Method) -> dict[str, Any]:
    """An optimizer as tensors, numbers and names.

    Args:
        optimizer: a live one.
        made: how many of its groups its function has made; the others were added for parameters that came later.
        model: whose parameters it moves.
        method: whose parameters it moves, too.
    """
    names = {id(p): name for name, p in _named(model, method).items()}
    groups = [[[names.get(id(p), ""), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    return {"made": made, "groups": groups, "state": optimizer.state_dict()}


def rebuilt(content: dict[str, Any], make: OptimizerFactory, model: nn.Module, method: Method) -> Optimizer:
    """The same optimizer for the same parameters in another process."""
    named = _named(model, method)

    def found(group: list[tuple[str, list[int]]]) -> list[nn.Parameter]:
        # What neither has any more, such as the gates of a task that has ended, gets no gradient and is not moved.
        return [named[name] if name else nn.Parameter(torch.zeros(shape)) for name, shape in group]

    groups = [found(group) for group in content["groups"]]
    place = {id(p): i for i, p in enumerate(named.values())}
    first = [p for group in groups[: content["made"]] for p in group]
    optimizer = make(sorted(first, key=lambda p: place.get(id(p), len(place))))  # as it was given them
    for group in groups[content["made"] :]:
        optimizer.add_param_group({"params": group})
    optimizer.load_state_dict(content["state"])
    return optimizer


def _named(model: nn.Module, method: Method) -> dict[str, nn.Parameter]:
    own = {f"method {i}": p for i, p in enumerate(method.parameters())}
    return {**{f"model {name}": p for name, p in model.named_parameters()}, **own}
