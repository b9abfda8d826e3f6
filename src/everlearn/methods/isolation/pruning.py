"""Record which task owns each weight, and find weights that must not be pruned to zero."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from everlearn.core.parameters import Params, all_parameters, unwrap
from everlearn.methods.isolation.base import Isolation, select_task_params, shorten_names

MAX_OWNERS = 255  # owners are stored in a byte, and 0 marks a free weight


@dataclass(eq=False)
class WeightOwners(Isolation):
    """Isolation in which every shared weight is free or owned by one task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.owner: Params = {}  # of each weight: 0 if it is free, k for the k-th task, counted from 1
        self._reported_locked: set[str] = set()  # weights that a warning has named

    def _select_task_params(self, model: nn.Module) -> Params:
        """Select the parameters and buffers that each task has for itself."""
        raise NotImplementedError

    def protected_entries(self, model: nn.Module, count: int) -> Params:
        """Return masks of the weights that the first ``count`` tasks own, and of all parameters that tasks share."""
        task_params = self._select_task_params(model)
        masks = {}
        for name, p in all_parameters(model).items():
            if name in self.owner:
                owner = self.owner[name].to(p.device)
                masks[name] = (owner > 0) & (owner <= count)
            elif name not in task_params:
                masks[name] = torch.ones_like(p, dtype=torch.bool)
        return masks

    def capacity(self) -> dict[str, float]:
        """Return the share of owned weights in each layer."""
        return {name: float((owner > 0).float().mean()) for name, owner in self.owner.items()}

    def diagnostics(self) -> dict[str, float]:
        """Return the share of owned weights in the network."""
        if not self.owner:
            return {}
        num_owned = sum(int((owner > 0).sum()) for owner in self.owner.values())
        return {"capacity used": num_owned / sum(owner.numel() for owner in self.owner.values())}

    def _owned_weights(self, model: nn.Module) -> Params:
        """Return the weights that are divided among the tasks, by name."""
        return {n: p for n, p in all_parameters(model).items() if n in self.owner}

    def _register_weights(self, model: nn.Module, task: Any, output: str | None) -> None:
        """Add trainable weights as free ones; weights that were frozen in an earlier task belong to it."""
        num_ended = self._count_ended(task)
        earlier_names: set[str] = set()
        if num_ended:
            earlier_names = set(self.checksums[num_ended - 1])
        task_params = select_task_params(model, output, rest=True)
        unfrozen = []
        for name, p in all_parameters(model).items():
            if name in self.owner:
                self.owner[name] = self.owner[name].to(p.device)
            elif name in task_params or not p.requires_grad:
                continue
            elif name in earlier_names:
                unfrozen.append(name)
            else:
                self.owner[name] = torch.zeros_like(p, dtype=torch.uint8)

        if not self.owner:
            _raise_no_weights(model, task_params)
        self._warn_of_locked([name for name in unfrozen if name not in self._reported_locked])
        if self.is_new(task) and len(self.tasks) == MAX_OWNERS:
            raise ValueError(f"PackNet numbers the owners of weights up to {MAX_OWNERS}; this is one task more.")

    def _warn_of_locked(self, names: list[str]) -> None:
        """Warn once of weights that became trainable after an earlier task and stay locked."""
        if not names:
            return
        self._reported_locked.update(names)
        warnings.warn(
            f"PackNet keeps {shorten_names(names, 4)} locked: frozen while earlier tasks were learned, they are part "
            "of those. Only weights that are trainable when the first task begins are divided among the tasks.",
            UserWarning,
            stacklevel=4,
        )


def find_normalized_weights(model: nn.Module) -> dict[str, int]:
    """Return the weights that ``weight_norm`` divides by a norm, with the dimension whose slices have a norm each.

    A slice of zeros has no direction: everything computed from it would be NaN.
    """
    dimensions = {}
    for path, module in unwrap(model).named_modules():
        if isinstance(module, _WeightNorm):
            parent, _, _ = path.rpartition(".")
            dimensions[f"{parent}.original1"] = module.dim
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                dimensions[f"{path}.{hook.name}_v".lstrip(".")] = hook.dim
    return dimensions


def largest_of_zero_slices(weight: Tensor, is_zero: Tensor, dim: int) -> Tensor:
    """Mark the largest entry of every slice that would become zero.

    Args:
        weight: the weight before pruning.
        is_zero: mask of the entries that would be zero.
        dim: dimension of the slices; -1 stands for the tensor as a single slice.
    """
    if dim == -1:
        magnitudes = weight.detach().abs().unsqueeze(0)
        is_zero = is_zero.unsqueeze(0)
    else:
        magnitudes = weight.detach().abs().movedim(dim, 0)
        is_zero = is_zero.movedim(dim, 0)

    # Slices are rows from here on.
    is_zero_slice = is_zero.flatten(1).all(1, keepdim=True)
    largest_index = magnitudes.flatten(1).argmax(1, keepdim=True)
    is_largest = torch.zeros_like(is_zero.flatten(1)).scatter_(1, largest_index, True)
    is_marked = (is_largest & is_zero_slice).reshape(magnitudes.shape)
    return is_marked.squeeze(0) if dim == -1 else is_marked.movedim(0, dim)


def _raise_no_weights(model: nn.Module, task_params: Params) -> None:
    """Explain why there are no weights to divide among tasks."""
    frozen = [n for n, p in all_parameters(model).items() if n not in task_params and not p.requires_grad]
    if not frozen:
        raise ValueError("PackNet finds no weights to divide among tasks except the output layer: use a deeper model.")
    raise ValueError(
        f"PackNet divides trainable weights among tasks, and except for the output layer all are frozen "
        f"({shorten_names(frozen)} have requires_grad=False): set requires_grad to True for those that should learn, "
        "before the first task begins. If only the output layer should learn, you do not need PackNet."
    )
