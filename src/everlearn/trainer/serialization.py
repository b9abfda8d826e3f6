"""State dicts of models and optimizers that can be loaded in another process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everlearn.core.method import Method
from everlearn.surgery.feature_head import restore_feature_head
from everlearn.trainer.settings import OptimizerFactory


def model_state(model: nn.Module) -> dict[str, Any]:
    """Collect the state dict of a model and its non-persistent buffers, which training can change too."""
    state = model.state_dict()
    non_persistent = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    return {"state": state, "passing": non_persistent}


def load_model(model: nn.Module, content: dict[str, Any]) -> None:
    """Load what ``model_state`` returned into a model."""
    restore_feature_head(model, content["state"])
    model.load_state_dict(content["state"])
    with torch.no_grad():
        for name, value in content["passing"].items():
            model.get_buffer(name).copy_(value)


def optimizer_state(optimizer: Optimizer, num_initial_groups: int, model: nn.Module, method: Method) -> dict[str, Any]:
    """Describe an optimizer by tensors, numbers and parameter names.

    Args:
        optimizer: the optimizer to save.
        num_initial_groups: how many of its parameter groups its factory created; the others were added later, for
            parameters that a method created.
        model: the model whose parameters it optimizes.
        method: the method whose parameters it optimizes, too.
    """
    names = {id(p): name for name, p in _named_parameters(model, method).items()}
    groups = [[[names.get(id(p), ""), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    return {"num_initial_groups": num_initial_groups, "groups": groups, "state": optimizer.state_dict()}


def rebuild_optimizer(
    content: dict[str, Any], factory: OptimizerFactory, model: nn.Module, method: Method
) -> Optimizer:
    """Recreate an optimizer from ``optimizer_state`` for the parameters of another process.

    Args:
        content: what ``optimizer_state`` returned.
        factory: the function that created the first optimizer.
        model: the model with the same parameter names.
        method: the method with as many parameters.
    """
    params_by_name = _named_parameters(model, method)

    def find_params(group: list[tuple[str, list[int]]]) -> list[nn.Parameter]:
        # A parameter without a name no longer exists, such as the gates of a finished task. A placeholder of its
        # shape keeps the optimizer's indices; it never has a gradient.
        return [params_by_name[name] if name else nn.Parameter(torch.zeros(shape)) for name, shape in group]

    groups = [find_params(group) for group in content["groups"]]
    num_initial_groups = content["num_initial_groups"]

    # The factory must receive the parameters in the order of the first call.
    position = {id(p): i for i, p in enumerate(params_by_name.values())}
    initial_params = [p for group in groups[:num_initial_groups] for p in group]
    optimizer = factory(sorted(initial_params, key=lambda p: position.get(id(p), len(position))))

    for group in groups[num_initial_groups:]:
        optimizer.add_param_group({"params": group})
    optimizer.load_state_dict(content["state"])
    return optimizer


def _named_parameters(model: nn.Module, method: Method) -> dict[str, nn.Parameter]:
    """Map unique names to the parameters of the model, then of the method."""
    params_by_name = {f"model {name}": p for name, p in model.named_parameters()}
    for i, p in enumerate(method.parameters()):
        params_by_name[f"method {i}"] = p
    return params_by_name
