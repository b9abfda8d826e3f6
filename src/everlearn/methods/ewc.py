"""Elastic weight consolidation, separate and online, diagonal, Kronecker-factored and full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn

from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.fisher import Labels, Structure, fisher
from everlearn.curvature.kronecker import Kronecker
from everlearn.curvature.quadratic import Form, Quadratic, total
from everlearn.fields import NonNegative, Range, Search
from everlearn.params import Params
from everlearn.penalty import HELD, QuadraticPenalty
from everlearn.traits import Traits


@dataclass(eq=False)
class EWC(QuadraticPenalty):
    """Elastic weight consolidation (Kirkpatrick et al., PNAS 2017): old tasks as a Gaussian at their optimum.

        separate:  L = L_task + ½ Σₖ (θ - θₖ*)ᵀ λₖFₖ (θ - θₖ*)
        online:    L = L_task + ½ (θ - θₜ*)ᵀ (γ F̃ₜ + λ_prior) (θ - θₜ*),   F̃ₜ = γ F̃ₜ₋₁ + λₜFₜ

    Fₖ is the Fisher information at the optimum θₖ* of task k, a mean over labels. Separate penalties are kept as one
    quadratic, exactly: their cost does not grow with the tasks. Online is the sequential Bayesian update of Huszár (2018)
    for γ = 1, around the latest optimum alone, and that of Progress & Compress (Schwarz et al., 2018) for γ < 1, where γ
    acts twice, as there. λ_prior is counted once, whatever the number of tasks; separate penalties have it at the first θ*.
    Every call of ``end_task`` is a task, also a chunk of an online stream.

    With ``structure="kronecker"`` and ``mode="online"`` this is the online Laplace approximation of Ritter et al. (2018).
    A sum of Kronecker products is not one: up to ``pairs`` of them are kept per layer, then the oldest two become one
    (``Kronecker.compact``).

    Args:
        strength: λ, the same for all tasks, or one for each. With mean losses over equally many examples 1 is what Bayes'
            rule asks; benchmarks often need far more, and it must be tuned.
        mode: an anchor per task, or only the latest.
        labels: of the Fisher information, see ``curvature.fisher``; with many classes "signs" is nearly as good and one pass.
        structure: of the Fisher information; "full" is for models of a few thousand parameters.
        decay: γ.
        average: of F̃ over tasks instead of their sum (Maltoni & Lomonaco, 2019), weighted with γ; online only.
        prior: λ_prior.
        cap: upper limit for λF, after averaging. A gradient step of rate η diverges where η λF > 2, so that 1/η is a
            natural limit. Diagonal only.
        examples: how many to take the Fisher information on, drawn at random (of ready-made batches the first); by default all.
        pairs: Kronecker products kept per layer.
    """

    traits = Traits(
        family="regularisation",
        pro="any model, one line more in any loop, the same cost after any number of tasks",
        con="very sensitive to its strength, and stiffer with every task",
        step=1.1,
        copies=(2.0,),
        needs_labels=False,  # those of the Fisher information are the model's own
        weak={"class": HELD},
    )

    strength: Annotated[NonNegative | tuple[float, ...], Search(1, 1e10, late=True)] = 100.0
    mode: Literal["separate", "online"] = "separate"
    labels: Labels = "exact"
    structure: Structure = "diagonal"
    decay: Annotated[float, Range(0, 1), Search(0.5, 1, log=False, late=True)] = 1.0
    average: bool = False
    prior: NonNegative = 0.0
    cap: NonNegative | None = None
    examples: Annotated[int, Range(1)] | None = None
    pairs: Annotated[int, Range(1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "separate" and (self.decay != 1 or self.average):
            raise ValueError("EWC.decay and EWC.average weigh tasks in a running sum: use mode='online'.")
        if self.mode == "online" and not self.decay:
            raise ValueError(
                "EWC.decay = 0 would hold nothing, since γ acts on the last task too: that is fine-tuning."
            )
        if self.structure != "diagonal" and (self.cap is not None or self.half):
            raise ValueError("EWC.cap and EWC.half are for structure='diagonal'.")
        if isinstance(self.strength, tuple) and not all(s >= 0 for s in self.strength):
            raise ValueError(f"EWC.strength: got {self.strength}, allowed: 0 or more for each task.")
        self.tasks = 0
        self.weight = 0.0  # Σ γ^(t-k)
        self._now: Quadratic | None = None

    def _holding(self) -> Quadratic:
        if self._now is None:
            self._now = self._weighed()
        return self._now

    def _weighed(self) -> Quadratic:
        """What holds now: F̃ times γ, over the total weight where it is an average, and the prior, up to the cap."""
        factor = self.decay / self.weight if self.average else self.decay
        prior = self.prior if self.mode == "online" else 0.0
        if factor == 1 and not prior and self.cap is None:
            return self.bowl
        form = self.bowl.form * factor
        form = form.damped(prior) if prior else form
        if self.cap is not None:
            form = Diagonal({n: v.clamp(max=self.cap) for n, v in form.diagonal().items()})
        return Quadratic(form, self.bowl.anchor, self.bowl.slope, self.bowl.constant, self.bowl.widened)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Take the Fisher information where the task has left the model."""
        found = fisher(model, task, self.labels, self.structure, seed=self.tasks, examples=self.examples)
        self.consolidate(model, found)

    def consolidate(self, model: nn.Module, importance: Form | Params) -> None:
        """Hold the parameters where they are now, with any importance in the Fisher information's place."""
        form, here = self._selected(model, importance)
        if self.cap is not None and not isinstance(form, Diagonal):
            raise ValueError(f"EWC.cap is for importances per parameter, not for a {type(form).__name__} form.")
        self.applied_strength = self._strength()
        form = form * self.applied_strength
        if self.mode == "separate":
            self.bowl.add(form.damped(self.prior) if self.prior and not self.tasks else form, here)
        else:
            self.bowl.move(form if not self.tasks else total(self._exact() * self.decay, form), here)
        if isinstance(self.bowl.form, Kronecker):
            self.bowl.form = self.bowl.form.compact(self.pairs)
        self.bowl.form = self._stored(self.bowl.form)
        self.tasks, self.weight, self._now = self.tasks + 1, self.decay * self.weight + 1, None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an EWC of the same settings had learned."""
        kind = state.get("bowl", {}).get("kind", self.structure)
        if state.get("tasks") and kind != self.structure:
            raise ValueError(f"This state is of structure={kind!r}, this EWC has {self.structure!r}.")
        super().load_state_dict(state)
        self._now = None

    def _strength(self) -> float:
        if not isinstance(self.strength, tuple):
            return float(self.strength)
        if self.tasks >= len(self.strength):
            raise ValueError(
                f"EWC.strength has {len(self.strength)} values, this is task {self.tasks + 1}: give one for each."
            )
        return self.strength[self.tasks]

    def _last_strength(self) -> float | None:
        if not isinstance(self.strength, tuple):
            return super()._last_strength()
        return self.strength[self.tasks - 1] if 0 < self.tasks <= len(self.strength) else None
