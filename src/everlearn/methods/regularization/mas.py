"""Memory aware synapses: importances from the sensitivity of the output to each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.parameters import Params
from everlearn.core.traits import Traits
from everlearn.curvature.cotangents import estimate_epochs
from everlearn.curvature.quadratic import Form
from everlearn.curvature.sensitivity import Norm, count_sensitivity_passes, sensitivity
from everlearn.methods.regularization.base import WEAK_WITH_NEW_CLASSES, Auto, QuadraticPenalty


@dataclass(eq=False)
class MAS(QuadraticPenalty):
    """Memory aware synapses (Aljundi et al., ECCV 2018): a penalty weighted by the sensitivity of the outputs.

    After each task the importance of a parameter increases by the sensitivity of the output's squared norm to it,
    averaged over examples. No labels are needed.

        Ωᵢ ← decay · Ωᵢ + (1/N) Σₙ |∂ ‖f(xₙ)‖² / ∂θᵢ|
        L = L_task + strength · Σᵢ Ωᵢ (θᵢ - θ*ᵢ)²

    θ* are the parameters at the last update of Ω. ``end_task`` accepts any inputs, so that a deployed model can
    consolidate on the inputs it receives. Unlike in the authors' code, absolute values are taken per example, not per
    batch, so that Ω does not depend on the batch size.

    Args:
        strength: λ: "auto" measures it (docs/strength.md); 0 is fine-tuning.
        norm: "squared" as above; "vector" sums ``|∂ f_c(x) / ∂θᵢ|`` over the outputs c, with one backward pass each;
            "local" uses each layer's output instead of the network's (Hebbian learning).
        decay: factor on earlier importances; 1 sums them, 0 keeps those of the last task alone.
    """

    traits = Traits(
        family="regularization",
        pro="needs no labels: consolidates on any inputs",
        con="more rigid with every task, as EWC",
        step=1.2,
        copies=(2.0,),
        needs_labels=False,
        weak={"class": WEAK_WITH_NEW_CLASSES},
    )

    strength: Annotated[NonNegative | Auto, Search(1e-3, 1e4, late=True)] = "auto"
    norm: Norm = "squared"
    decay: Annotated[float, Range(0, 1), Search(0.5, 1, log=False, late=True)] = 1.0

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Compute the sensitivity on the task's inputs, or on any other data, and consolidate."""
        self.consolidate(model, sensitivity(model, task, self.norm))

    def estimate_consolidation(self, batch: Batch, outputs: Tensor) -> float:
        """Estimate what ``end_task`` costs, in epochs of training on the task."""
        return estimate_epochs(count_sensitivity_passes(self.norm, batch, outputs))

    def consolidate(self, model: nn.Module, importance: Form | Params) -> None:
        """Update Ω with any importance, a tensor per parameter name, and set θ* to the current parameters."""
        self.applied_strength = self._fixed_strength(self.strength)
        # The quadratic is ½ δᵀFδ and the penalty λ δᵀΩδ without a ½, so F = 2λΩ.
        self._update_quadratic(model, importance, scale=2 * self.applied_strength, decay=self.decay)
