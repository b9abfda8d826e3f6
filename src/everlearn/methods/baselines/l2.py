"""L2: penalize all parameter changes since the last task equally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.core.hyperparameters import NonNegative, Search
from everlearn.core.parameters import Params, trainable_parameters
from everlearn.core.traits import Traits
from everlearn.curvature.diagonal import Diagonal
from everlearn.methods.regularization.base import WEAK_WITH_NEW_CLASSES, Auto, QuadraticPenalty


@dataclass(eq=False)
class L2(QuadraticPenalty):
    """L2 penalty (baseline of Kirkpatrick et al., PNAS 2017): the same penalty for all parameters.

        L = L_task + strength/2 · Σᵢ (θᵢ - θ*ᵢ)²

    Weight decay toward the last solution θ* instead of zero. What methods with importances gain over it is what their
    importances are worth. There is one anchor, at the latest optimum.

    Args:
        strength: weight of the penalty: "auto" measures it (docs/strength.md); 0 is fine-tuning.
    """

    traits = Traits(
        family="baselines",
        pro="any model, any loop, one field to set",
        con="protects unimportant parameters as strongly as important ones",
        step=1.2,
        copies=(2.0,),
        needs_labels=False,
        weak={
            "task": "penalizes changes of unimportant parameters, too: no strength helped on the digits",
            "class": WEAK_WITH_NEW_CLASSES,
        },
    )

    strength: Annotated[NonNegative | Auto, Search(1e-4, 1e3, late=True)] = "auto"

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Move the anchor to the current parameters."""
        ones = {n: _full_like(p, 1.0) for n, p in trainable_parameters(model).items()}
        form, theta = self._select_importance(model, ones)

        # Parameters that are frozen in this task keep the importance of an earlier one.
        frozen = {n: v for n, v in self.quadratic.form.diagonal().items() if n not in form.names}
        self.applied_strength = self._fixed_strength(self.strength)
        importance = frozen | (form * self.applied_strength).diagonal()
        self.quadratic.move(self._round_form(Diagonal(importance)), theta)

    def _thaw(self, parameters: Params, weights: dict[str, float]) -> None:
        """Penalize thawed parameters like all others: frozen, they have stayed at θ*, and importances are equal."""
        strength = self.applied_strength
        if strength is None:
            strength = self._fixed_strength(self.strength)
        strength *= self.scale or 1.0
        importance = {n: _full_like(p, strength * weights[n]) for n, p in parameters.items()}
        thawed = self._round_form(self._offload_form(Diagonal(importance)))
        self.quadratic.form = Diagonal({**self.quadratic.form.diagonal(), **thawed.diagonal()})

        theta = {n: p.detach().clone() for n, p in parameters.items()}
        self.quadratic.anchor |= self._offload(theta)
        self._active = None


def _full_like(parameter: Tensor, value: float) -> Tensor:
    """Return a real tensor of the parameter's shape, filled with a value."""
    return torch.full_like(parameter.detach(), value, dtype=parameter.dtype.to_real())
