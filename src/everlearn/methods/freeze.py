"""Freeze: learn features with the first task, then only the output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everlearn.heads import output_layer
from everlearn.method import Method
from everlearn.params import unwrap


@dataclass(eq=False)
class Freeze(Method):
    """After the first task only the output layer learns; everything under it is frozen.

        θ_features = θ*_features of task 1,   L = L_task in θ_output alone

    Keeps the features at the price of learning new ones: the other end of the scale from fine-tuning. Frozen parameters
    have no gradient, so no optimizer, momentum or weight decay moves them, and normalisation layers that track running
    statistics stay in evaluation mode.

    Args:
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: int = 0
        self.first: int | None = None

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze everything but the output layer, from the second task on."""
        place = getattr(task, "id", None)
        if self.tasks == 0:
            self.tasks, self.first = 1, place
        elif place is None or place != self.first:
            self._freeze(unwrap(model))

    def _freeze(self, model: nn.Module) -> None:
        _, output = output_layer(model, self.output)
        learning = {id(p) for p in output.parameters()}
        for p in model.parameters():
            if id(p) not in learning:
                p.requires_grad_(False)
                p.grad = None  # a gradient left over would still be stepped on
        for module in model.modules():
            if getattr(module, "track_running_stats", False) and not _is_held(module):
                module.register_forward_pre_hook(_hold_statistics)


def _hold_statistics(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Before every forward, because ``model.train()`` in the loop would set the statistics moving again."""
    module.training = False


def _is_held(module: nn.Module) -> bool:
    return _hold_statistics in module._forward_pre_hooks.values()
