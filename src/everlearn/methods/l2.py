"""L2: every parameter is held near where the last task left it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from everlearn.curvature.diagonal import Diagonal
from everlearn.fields import NonNegative, Search
from everlearn.params import Params, named
from everlearn.penalty import HELD, QuadraticPenalty
from everlearn.traits import Traits


@dataclass(eq=False)
class L2(QuadraticPenalty):
    """A uniform anchor: weight decay centred on the last task's solution θ*, all parameters equally important.

        L = L_task + strength/2 · Σᵢ (θᵢ - θ*ᵢ)²

    The baseline of Kirkpatrick et al. (PNAS 2017), there to be beaten: what a method with importances gains over it
    is what its importances are worth. One anchor, at the latest optimum.

    Args:
        strength: of the pull; 0 is fine-tuning.
    """

    traits = Traits(
        family="reference",
        pro="any model, any loop, one field to set",
        con="holds what does not matter as firmly as what does, and so learns less",
        step=1.1,
        copies=(2.0,),
        needs_labels=False,
        weak={"task": "holds what does not matter, too: no strength helped on the digits", "class": HELD},
    )

    strength: Annotated[NonNegative, Search(1e-4, 1e3, late=True)] = 0.1

    def end_task(self, model: nn.Module, task: Any) -> None:
        """The anchor moves to where this task ended."""
        form, here = self._selected(
            model, {n: torch.ones_like(p, dtype=p.dtype.to_real()) for n, p in named(model).items()}
        )
        frozen = {n: v for n, v in self.bowl.form.diagonal().items() if n not in form.names}
        self.applied_strength = float(self.strength)
        self.bowl.move(self._stored(Diagonal(frozen | (form * self.strength).diagonal())), here)

    def _thaw(self, parameters: Params, weights: dict[str, float]) -> None:
        """Hold them like all others: frozen, they have stayed where the last task left them, and all matter equally."""
        strength = self.strength if self.applied_strength is None else self.applied_strength
        importance = {
            n: torch.full_like(p.detach(), strength * weights[n], dtype=p.dtype.to_real())
            for n, p in parameters.items()
        }
        here = {n: p.detach().clone() for n, p in parameters.items()}
        thawed = self._stored(self._placed(Diagonal(importance)))
        self.bowl.form = Diagonal({**self.bowl.form.diagonal(), **thawed.diagonal()})
        self.bowl.anchor |= self._placed(Diagonal(here)).diagonal()
