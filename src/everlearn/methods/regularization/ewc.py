"""Elastic weight consolidation: separate and online; diagonal, Kronecker-factored and full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.parameters import Params
from everlearn.core.traits import Traits
from everlearn.curvature.cotangents import Labels, count_backward_passes, estimate_epochs
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.fisher import Structure, fisher
from everlearn.curvature.kronecker import Kronecker
from everlearn.curvature.quadratic import Form, Quadratic, total
from everlearn.methods.regularization.base import WEAK_WITH_NEW_CLASSES, Auto, QuadraticPenalty


@dataclass(eq=False)
class EWC(QuadraticPenalty):
    """Elastic weight consolidation (Kirkpatrick et al., PNAS 2017): a penalty weighted by the Fisher information.

        separate:  L = L_task + ½ Σₖ (θ - θₖ*)ᵀ λₖFₖ (θ - θₖ*)
        online:    L = L_task + ½ (θ - θₜ*)ᵀ (γ F̃ₜ + λ_prior) (θ - θₜ*),   F̃ₜ = γ F̃ₜ₋₁ + λₜFₜ

    A Gaussian approximates the posterior of the old tasks. Its precision Fₖ is the Fisher information at the optimum
    θₖ* of task k, a mean over labels. Separate penalties are summed into one quadratic exactly, so that their cost does
    not grow with the number of tasks. With γ = 1, "online" is the sequential Bayesian update of Huszár (2018) around
    the latest optimum. With γ < 1 it is the update of Progress & Compress (Schwarz et al., 2018), where γ also acts
    twice. λ_prior is added once, whatever the number of tasks; with separate penalties, around the first θ*. Each call
    of ``end_task`` counts as a task, also for a chunk of an online stream.

    With ``structure="kronecker"`` and ``mode="online"`` this is the online Laplace approximation of Ritter et al.
    (2018). A sum of Kronecker products is no Kronecker product: each layer stores up to ``max_kronecker_terms`` of
    them, then the oldest two are merged (``Kronecker.compact``).

    Args:
        strength: λ: "auto" measures it (docs/strength.md); a number for all tasks, or a tuple with one for
            each. Bayes' rule gives 1 for mean losses over equally many examples. Benchmarks often need far more.
        mode: an anchor per task, or the latest alone.
        labels: of the Fisher information, see ``curvature.fisher``. "auto" costs about one training epoch for any
            number of outputs: it is exact for two classes, and an unbiased random estimate for more. "exact" takes a
            backward pass for every further class.
        structure: of the Fisher information; "full" is for models of a few thousand parameters.
        decay: γ.
        average: average F̃ over tasks, weighted with γ, instead of summing it (Maltoni & Lomonaco, 2019); online only.
        prior: λ_prior; with strength="auto" in units of F, as ``cap``.
        cap: upper limit of λF, after averaging; diagonal only. Where gradient descent would
            diverge, λF is limited without it, too.
        examples: how many examples the Fisher information is computed on, drawn at random (the first ones if the data
            are batches already); by default all.
        max_kronecker_terms: Kronecker products per layer.
    """

    traits = Traits(
        family="regularization",
        pro="any model, any loop, constant cost over tasks",
        con="more rigid with every task",
        step=1.2,
        copies=(2.0,),
        needs_labels=False,  # the model predicts those of the Fisher information
        weak={"class": WEAK_WITH_NEW_CLASSES},
    )

    strength: Annotated[NonNegative | tuple[float, ...] | Auto, Search(1, 1e10, late=True)] = "auto"
    mode: Literal["separate", "online"] = "separate"
    labels: Labels = "auto"
    structure: Structure = "diagonal"
    decay: Annotated[float, Range(0, 1), Search(0.5, 1, log=False, late=True)] = 1.0
    average: bool = False
    prior: NonNegative = 0.0
    cap: NonNegative | None = None
    examples: Annotated[int, Range(1)] | None = None
    max_kronecker_terms: Annotated[int, Range(1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "separate" and (self.decay != 1 or self.average):
            raise ValueError("EWC.decay and EWC.average weight tasks in a running sum: use mode='online'.")
        if self.mode == "online" and not self.decay:
            raise ValueError("EWC.decay = 0 removes the whole penalty, since γ acts on the last task too: use γ > 0.")
        if self.structure != "diagonal" and (self.cap is not None or self.half):
            raise ValueError("EWC.cap and EWC.half are for structure='diagonal'.")
        if isinstance(self.strength, tuple) and not all(s >= 0 for s in self.strength):
            raise ValueError(f"EWC.strength: got {self.strength}, allowed: 0 or more for each task.")
        self.tasks = 0
        self.weight = 0.0  # Σₖ γ^(t-k)

    def _scale_quadratic(self) -> Quadratic:
        """Return the quadratic with γ F̃ + λ_prior: divided by the total weight if averaged, and clamped to ``cap``."""
        factor = self.decay
        if self.average:
            factor = self.decay / self.weight
        scale = self.scale or 1.0
        prior = 0.0
        if self.mode == "online":
            prior = self.prior * scale
        if factor == 1 and not prior and self.cap is None:
            return self.quadratic

        form = self.quadratic.form * factor
        if prior:
            form = form.damped(prior)
        if self.cap is not None:
            form = Diagonal({n: v.clamp(max=self.cap * scale) for n, v in form.diagonal().items()})
        return replace(self.quadratic, form=form)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Compute the Fisher information at the current parameters and consolidate."""
        information = fisher(model, task, self.labels, self.structure, seed=self.tasks, examples=self.examples)
        self.consolidate(model, information)

    def estimate_consolidation(self, batch: Batch, outputs: Tensor) -> float:
        """Estimate what ``end_task`` costs, in epochs of training on the task."""
        return estimate_epochs(count_backward_passes(self.labels, batch, outputs))

    def consolidate(self, model: nn.Module, importance: Form | Params) -> None:
        """Add a penalty around the current parameters, with any importance in place of the Fisher information.

        Args:
            model: at the optimum θ* of the task.
            importance: F, a form or a dict of tensors by parameter name.
        """
        form, theta = self._select_importance(model, importance)
        if self.cap is not None and not isinstance(form, Diagonal):
            raise ValueError(f"EWC.cap is for importances per parameter, not for a {type(form).__name__} form.")
        self.applied_strength = self._task_strength()
        form = form * self.applied_strength

        if self.mode == "separate":
            # Σₖ λₖFₖ around each task's θₖ*, with the prior around the first.
            if self.prior and not self.tasks:
                form = form.damped(self.prior)
            self.quadratic.add(form, theta)
        else:
            # F̃ₜ = γ F̃ₜ₋₁ + λₜFₜ around θₜ*.
            if self.tasks:
                form = total(self._float32_form() * self.decay, form)
            self.quadratic.move(form, theta)

        if isinstance(self.quadratic.form, Kronecker):
            self.quadratic.form = self.quadratic.form.compact(self.max_kronecker_terms)
        self.quadratic.form = self._round_form(self.quadratic.form)
        self.tasks += 1
        self.weight = self.decay * self.weight + 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of an EWC with the same settings."""
        kind = state.get("quadratic", {}).get("kind", self.structure)
        if state.get("tasks") and kind != self.structure:
            raise ValueError(f"This state is of structure={kind!r}, this EWC has {self.structure!r}.")
        super().load_state_dict(state)

    def _task_strength(self) -> float:
        """Return λ of the task that ends; 1 if it is measured in the next task."""
        if not isinstance(self.strength, tuple):
            return self._fixed_strength(self.strength)
        if self.tasks >= len(self.strength):
            raise ValueError(
                f"EWC.strength has {len(self.strength)} values, this is task {self.tasks + 1}: give one for each."
            )
        return self.strength[self.tasks]

    def _last_strength(self) -> float | None:
        if not isinstance(self.strength, tuple):
            return super()._last_strength()
        if 0 < self.tasks <= len(self.strength):
            return self.strength[self.tasks - 1]
        return None
