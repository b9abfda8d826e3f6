"""Synaptic intelligence: importances from each parameter's contribution to lowering the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.parameters import Params, all_parameters, check_finite, select_by_pattern, trainable_parameters
from everlearn.core.traits import Traits
from everlearn.curvature.diagonal import Diagonal, grown_sum, to_device_of
from everlearn.methods.regularization.base import WEAK_WITH_NEW_CLASSES, Auto
from everlearn.methods.regularization.path_integral import PathIntegral


@dataclass(eq=False)
class SI(PathIntegral):
    """Synaptic intelligence (Zenke et al., ICML 2017): a penalty weighted by contributions to the loss.

        each step:      ωᵢ ← ωᵢ - gᵢ · Δθᵢ,   g = ∂L_task/∂θ before the step, Δθ = the optimizer's update
        end of a task:  Ωᵢ ← max(0, Ωᵢ + ωᵢ / ((θᵢ - θ*ᵢ)² + damping)),   θ* ← θ,   ω ← 0
        L = L_task + strength · Σᵢ Ωᵢ (θᵢ - θ*ᵢ)²

    The path integral ω uses the gradient of the task loss alone. Therefore ``before_step`` adds the gradient of the
    penalty to ``p.grad``, and the loss does not contain the penalty; ``penalty_value`` computes it. A custom loop must
    call ``before_step`` (after a gradient scaler's ``unscale_``) and ``after_step``. In a chain, penalties of other
    methods count as part of the task loss.

    Args:
        strength: c: "auto" measures it (docs/strength.md); 0 is fine-tuning.
        damping: ξ, bounds the importance of a parameter that has hardly moved.
        consolidate_every: consolidate after this many steps instead of at the end of a task, for streams without
            task boundaries.
    """

    traits = Traits(
        family="regularization",
        pro="importances from training steps: no pass over the data",
        con="three copies of the model; noisy with small batches",
        step=1.3,
        copies=(3.0,),
        without_boundaries={"consolidate_every": 100},
        weak={"class": WEAK_WITH_NEW_CLASSES},
    )

    strength: Annotated[NonNegative | Auto, Search(1e-2, 1e5, late=True, unless="consolidate_every")] = "auto"
    damping: Annotated[float, Range(1e-12), Search(1e-4, 1, late=True, unless="consolidate_every")] = 0.1
    consolidate_every: Annotated[int, Range(1)] | None = None

    _thaw_advice = (
        "SI measures importances while parameters learn: train them in the task that is to be kept, or use EWC, MAS "
        "or L2, which penalize changes of all parameters that are trainable at end_task(model, task)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.half and self.consolidate_every:
            raise ValueError("SI.half rounds at each consolidation, too often for consolidate_every: use one of them.")

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Return 0: ``before_step`` adds the gradient of the penalty."""
        return 0.0

    @torch.no_grad()
    def penalty_value(self, model: nn.Module) -> float:
        """Compute strength · Σᵢ Ωᵢ (θᵢ - θ*ᵢ)²; 0 before the first task has ended."""
        if not self.omega.values:
            return 0.0
        return float(self._effective_quadratic()(model))

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        """Store g, then add the gradient of the penalty, 2 · strength · Ω (θ - θ*), to ``p.grad``."""
        names = self._begin_step(model)
        if not names:
            return
        self._check_statistics(model)
        self._follow_optimizer(model)
        if self._is_strength_unknown:
            self._measure_strength(model, self._task_gradient)
            if self._is_strength_unknown:
                self._task_gradient = {n: g.clone() for n, g in self._task_gradient.items()}
                return
        importances = self._effective_quadratic().form.diagonal()

        # Into the displacement: new tensors of the model's size would take longer than the arithmetic.
        for name, delta in zip(names, self._displacement(names), strict=True):
            omega = to_device_of(importances[name], delta).to(delta.dtype)
            p = self._theta[name]
            if p.grad is None:
                p.grad = delta.mul_(omega)
            else:
                p.grad = torch.addcmul(p.grad, omega, delta, out=delta)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Update the path integral, ω ← ω - g · Δθ."""
        g, negative_update = self._end_step()
        if g:
            omega = [self.path[n] for n in g]
            torch._foreach_addcmul_(omega, list(g.values()), negative_update)

        self.steps += 1
        if self.consolidate_every and self.steps % self.consolidate_every == 0:
            self._consolidate(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Consolidate, unless ``consolidate_every`` is set."""
        if not self.steps:
            raise ValueError("SI has not seen a step: call before_step(model) and after_step(model) in your loop.")
        self._open_task = None
        if self.consolidate_every is None:
            self._consolidate(model)
        self._start = {}

    @torch.no_grad()
    def _consolidate(self, model: nn.Module) -> None:
        """Set Ω ← max(0, Ω + ω / ((θ - θ*)² + ξ)), θ* ← θ and ω ← 0."""
        self._open_task = None
        self._begin_consolidation(model)
        self.applied_strength = self._fixed_strength(self.strength)
        parameters = all_parameters(model)
        weights = select_by_pattern(parameters, self.only)
        theta = {n: p.detach().clone() for n, p in trainable_parameters(model).items() if n in self.path}
        check_finite(theta)

        importance: Params = {}
        for name, value in theta.items():
            delta = value - to_device_of(self.quadratic.anchor[name], value)
            scale = 2 * self.applied_strength * weights[name]
            omega = scale * self.path[name] / (delta.square() + self.damping)
            old_omega = self.omega.values.get(name)
            if old_omega is not None:
                omega = grown_sum(to_device_of(old_omega, omega).to(omega.dtype), omega)
            importance[name] = omega.relu()
            self.path[name].zero_()

        # Parameters that are currently frozen keep their importance.
        form = Diagonal({**self.omega.values, **importance})
        self.quadratic.move(self._round_form(self._offload_form(form)), self._offload(theta))

        # Importances come from steps: parameters frozen during them have none, even if they are trainable by now.
        self.frozen = {n: w for n, w in weights.items() if n not in form.values and parameters[n].is_floating_point()}
