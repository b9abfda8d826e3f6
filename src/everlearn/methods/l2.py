"""L2: every parameter is held near where the last task left it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from everlearn.method import Method, NonNegative
from everlearn.params import Params, difference, snapshot
from everlearn.stream import Batch


@dataclass(eq=False)
class L2(Method):
    """A uniform anchor: weight decay centred on the last task's solution θ*, all parameters equally important.

        L = L_task + strength/2 · Σᵢ (θᵢ - θ*ᵢ)²

    The baseline of Kirkpatrick et al. (PNAS 2017), there to be beaten: what a method with importances gains over it
    is what its importances are worth. One anchor, at the latest optimum.

    Args:
        strength: of the pull; 0 is fine-tuning.
    """

    strength: NonNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anchor: Params = {}

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The pull towards the anchor."""
        if not self.anchor:
            return 0.0
        moved = difference(model, self.anchor)
        return self.strength / 2 * sum((d.square().sum() for d in moved.values()), start=0.0)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """The anchor moves to where this task ended."""
        self.anchor = snapshot(model)
