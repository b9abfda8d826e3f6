"""Losses of recent steps, read together: reading one makes the host wait for an accelerator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_PENDING = 50  # steps after which a loss that is not finite is noticed on an accelerator


class PendingLosses:
    """Losses that are still on the device, in the order of the steps.

    Args:
        device: device of the model; on the CPU a loss is read at once, because nothing has to be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.max_pending = 1 if device.type == "cpu" else MAX_PENDING
        self.last = math.nan  # the last loss that was read
        self._pending: list[tuple[int, Tensor]] = []
        self._unreported: list[float] = []

    def add(self, step: int, loss: Tensor) -> None:
        """Keep the loss of a step."""
        self._pending.append((step, loss.detach()))

    def is_full(self) -> bool:
        """Whether the losses are to be read."""
        return len(self._pending) >= self.max_pending

    def read(self) -> list[tuple[int, float]]:
        """Read all pending losses with a single synchronization; returns each with its step."""
        if not self._pending:
            return []
        steps = [step for step, _ in self._pending]
        values: list[float] = torch.stack([loss for _, loss in self._pending]).tolist()
        self._pending.clear()
        self._unreported += values
        self.last = values[-1]
        return list(zip(steps, values, strict=True))

    def take_unreported(self) -> list[float]:
        """Return the losses that were read since the last call."""
        values = self._unreported
        self._unreported = []
        return values
