"""Memory aware synapses: what the output is most sensitive to must move least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from everlearn.curvature.quadratic import Form
from everlearn.curvature.sensitivity import Norm, sensitivity
from everlearn.fields import NonNegative, Range, Search
from everlearn.params import Params
from everlearn.penalty import HELD, QuadraticPenalty
from everlearn.traits import Traits


@dataclass(eq=False)
class MAS(QuadraticPenalty):
    """Memory aware synapses (Aljundi et al., ECCV 2018).

    After each task the importance of a parameter grows by how strongly the size of the output reacts to it, averaged over
    examples; no labels are needed:

        Ωᵢ ← decay · Ωᵢ + (1/N) Σₙ |∂ ‖f(xₙ)‖² / ∂θᵢ|
        L = L_task + strength · Σᵢ Ωᵢ (θᵢ - θ*ᵢ)²

    θ* is where the importance was last taken. Give ``end_task`` any inputs: a deployed model can consolidate on what it
    really sees. Differs from the authors' code: absolute values are taken per example, not per batch, so that the importance
    does not depend on the batch size.

    Args:
        strength: λ; 0 is fine-tuning.
        norm: "squared" as above; "vector" sums ``|∂ f_c(x) / ∂θᵢ|`` over the outputs c, a backward pass each; "local"
            takes every layer's own output for f (Hebb's rule).
        decay: of earlier importances; 1 sums them, 0 keeps the last task's alone.
    """

    traits = Traits(
        family="regularisation",
        pro="can be consolidated on whatever inputs the model sees in use",
        con="sensitive to its strength and to the scale of the outputs",
        step=1.1,
        copies=(2.0,),
        needs_labels=False,
        weak={"class": HELD},
    )

    strength: Annotated[NonNegative, Search(1e-3, 1e4, late=True)] = 0.1
    norm: Norm = "squared"
    decay: Annotated[float, Range(0, 1), Search(0.5, 1, log=False, late=True)] = 1.0

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Take the sensitivity on the task's inputs, or on any others."""
        self.consolidate(model, sensitivity(model, task, self.norm))

    def consolidate(self, model: nn.Module, importance: Form | Params) -> None:
        """Hold the parameters where they are now, with any importance, a tensor per parameter name, as Ω."""
        self.applied_strength = float(self.strength)
        self._hold(model, importance, 2 * self.strength, self.decay)  # the quadratic has a ½, the penalty has not
