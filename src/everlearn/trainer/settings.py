"""Training settings, and the types of functions that create optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everlearn.trainer.validation import check_settings

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]
Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    """Create the default optimizer: Adam with learning rate 0.001."""
    # The fused kernel saves a third of a training step on the CPU.
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


@dataclass(frozen=True)
class Training:
    """Training settings of a task; ``train`` and ``run`` document the fields."""

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
        """Return the context of the forward pass: autocast for bfloat16, else a null context."""
        if self.precision == "bfloat16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def hide_bar(progress: bool | None) -> bool | None:
    """Return tqdm's ``disable`` argument for a ``progress`` setting."""
    # For tqdm, None means: disabled unless on a terminal.
    if progress is None:
        return None
    return not progress
