"""How a task is trained: the settings, and what makes optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everlearn.checks import check_settings

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]
Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    """The default optimizer: Adam with learning rate 0.001."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)  # one kernel: on the CPU a third off the whole step


@dataclass(frozen=True)
class Training:
    """How a task is trained; ``train`` and ``run`` document the fields."""

    epochs: int = 1
    iterations: int | None = None
    batch_size: int = 128
    seed: int = 0
    scheduler: SchedulerFactory | None = None
    clip: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    progress: bool | None = None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("epochs", "iterations", "batch_size", "accumulate")}
        check_settings(counts, self.clip, self.precision)

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()


def device_of(model: nn.Module) -> torch.device:
    """Where the model is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def hide_bar(progress: bool | None) -> bool | None:
    """A wish for progress bars in tqdm's words."""
    return None if progress is None else not progress  # tqdm's None: hidden unless on a terminal
