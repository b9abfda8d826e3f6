"""QuadraticPenalty, the base of EWC, MAS, SI and L2: a quadratic penalty on parameter changes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.chain import label
from everlearn.core.check import describe_parameters, list_names
from everlearn.core.method import Method
from everlearn.core.parameters import (
    Params,
    all_parameters,
    check_finite,
    evaluating,
    is_sharded,
    refuse_meta,
    remembered_parameters,
    select_by_pattern,
    sharded_like,
    trainable_parameters,
)
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.quadratic import FORMS, Form, Quadratic, total
from everlearn.curvature.step_limit import limit_curvature
from everlearn.methods.regularization.optimizer_steps import OptimizerSteps
from everlearn.methods.regularization.relative_strength import GradientProbe, relative_strength

Auto = Literal["auto"]

# The gradient of so many losses is enough for the strength, if no optimizer steps: a loop may have one of its own.
MAX_PROBED_LOSSES = 16

WEAK_WITH_NEW_CLASSES = "a penalty on parameters does not raise the outputs of old classes against those of new ones"


@dataclass(eq=False)
class QuadraticPenalty(Method):
    """Quadratic penalty on parameter changes: the base of methods that give each parameter an importance.

        L = L_task + ½ (θ - θ*)ᵀ F (θ - θ*)

    F is ``quadratic.form``, the importances times their strength, and θ* is ``quadratic.anchor``. Outputs and
    parameters that are added after θ* was stored are not penalized.

    The gradient is computed in closed form for all parameters at once, at a cost that does not depend on the number
    of tasks. Where it is exactly zero, ``p.grad`` stays None, so that weight decay acts as in fine-tuning.

    With ``strength="auto"`` the first gradient g of each task sets the strength λ of all importances so far, see
    ``relative_strength`` and docs/strength.md:

        λ = ½ rms(g) / (mean(diag F) · rms(θ))

    A strength that is a number belongs to the task that ends: each task keeps its own. Whatever the strength,
    F is limited where gradient descent with the optimizer's learning rate would diverge (``limit_curvature``).

    Parameters that are frozen when a task ends get no importance; if they become trainable later, a warning names them.

    Args:
        only: which parameters are penalized: a pattern such as ``"backbone.*"``, or patterns with weights, where the
            last match counts: ``{"*": 1.0, "head.*": 0.0, "stem.*": 10.0}``. By default all.
        half: store importances in bfloat16, in half the memory; θ* keeps its precision. Rounding is stochastic, so
            that sums over many tasks are unbiased. Rounding to nearest would stop them from growing after about two
            hundred tasks.
        offload: store importances and θ* on the CPU, for models that fill their device.
    """

    only: str | dict[str, float] | None = field(default=None, kw_only=True)
    half: bool = field(default=False, kw_only=True)
    offload: bool = field(default=False, kw_only=True)

    penalty_uses_batch = False

    # How to give importances to parameters that were frozen when the last task ended: the end of a warning.
    _thaw_advice: ClassVar[str] = (
        "To penalize their changes, make them trainable before end_task(model, task), which measures all trainable "
        "parameters, and freeze them again after it."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quadratic = Quadratic()
        # λ of strength="auto", by which the stored quadratic is multiplied; None until it is measured in each task.
        self.scale: float | None = None
        self.last_scale: float | None = None  # of the last task that ended
        # Parameters without an importance, frozen when the last task ended, with their weights in ``only``.
        self.frozen: dict[str, float] = {}
        # Learning rates of gradient descent by parameter name, and whether the optimizer has stepped in this task.
        self.rates: dict[str, float] = {}
        self.has_stepped = False
        # The strength of the last task that ended.
        self.applied_strength: float | None = None
        if self.half:
            # Seeds the rounding: saved, so that a resumed run continues the random sequence.
            self.num_stochastic_roundings = 0
        # The quadratic that is added to the loss: the stored one, scaled and limited; None until it is computed.
        self._active: Quadratic | None = None
        self._probe: GradientProbe | None = None
        self._optimizer_steps: OptimizerSteps | None = None
        self._warned_of_limit = False

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Warn if the last task has not ended."""
        self._open(task)

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Return ½ (θ - θ*)ᵀ F (θ - θ*); 0 before the first task has ended."""
        if self.frozen:
            self._notice_thawed(trainable_parameters(model))
        if not self.quadratic.anchor:
            return 0.0

        self._check_statistics(model)
        if not torch.is_grad_enabled():  # for a log, and perhaps of a copy of the model
            return 0.0 if self._is_strength_unknown else self._effective_quadratic()(model)
        self._follow_optimizer(model)
        if self._is_strength_unknown and self._attached is not None and self._attached.is_stepping:
            self._measure_strength(model, _gradients(model))
        if self._is_strength_unknown:
            return self._note_loss(self._probe_gradient(model))
        return self._note_loss(self._effective_quadratic()(model))

    def after_step(self, model: nn.Module) -> None:
        """Record which parameters the step has updated."""
        if self._active is not None:
            self._active.note_step(model)

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return which parameters are penalized, now or at the end of the task."""
        parameters = all_parameters(model)
        trainable = trainable_parameters(model)
        weights = select_by_pattern(parameters, self.only)
        selected = [n for n in trainable if n in weights]
        skipped = [n for n in trainable if n not in weights]
        facts = {"penalized": describe_parameters(selected, parameters)}
        if skipped:
            facts["not penalized"] = describe_parameters(skipped, parameters)
        if self.frozen:
            facts["without importance"] = f"{list_names(list(self.frozen))}: frozen when the last task ended"

        if batch is not None:
            with torch.no_grad(), evaluating(model):
                num_epochs = self.estimate_consolidation(batch, batch.forward(model))
            if num_epochs:
                facts["consolidation"] = f"about {num_epochs:.1f} epochs of training at the end of the task"

        if self.quadratic.anchor and not any(n in parameters for n in self.quadratic.anchor):
            raise ValueError(
                f"{type(self).__name__} has nothing to protect: it penalizes changes of "
                f"{list_names(list(self.quadratic.anchor))}, and the model has no such parameter. Use the model of the "
                "earlier tasks, without a wrapper that changes names."
            )
        return facts

    def estimate_consolidation(self, batch: Batch, outputs: Tensor) -> float:
        """Estimate what ``end_task`` costs, in epochs of training on the task; 0 if it needs no pass over the data.

        Args:
            batch: some examples of the task.
            outputs: the model's outputs for them.
        """
        return 0.0

    def diagnostics(self) -> dict[str, float]:
        """Return the measured strength, and quantiles of importances times strength, of about a million of them."""
        if not self.quadratic.anchor:
            return {}
        form = self._effective_quadratic().form
        measured = {} if self.last_scale is None else {"strength": self.last_scale}
        if not isinstance(form, Diagonal) or not form.values or any(map(is_sharded, form.values.values())):
            return measured

        # A regular subsample: sorting all importances of a large model would take long.
        count = sum(v.numel() for v in form.values.values())
        stride = 1 + count // 10**6
        sample = torch.cat([v.detach().flatten()[::stride].float().cpu() for v in form.values.values()])

        levels = torch.tensor([0.5, 0.9, 0.99, 1.0])
        positions = ((len(sample) - 1) * levels).round().long()
        quantiles = sample.sort().values[positions]
        return measured | {
            f"importance {100 * level:.0f} %": float(v) for level, v in zip(levels, quantiles, strict=True)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a method of the same class; warn if its last task had a different strength."""
        self._stop_probe()
        super().load_state_dict(state)
        self._active = None
        if self._optimizer_steps is not None:
            self._optimizer_steps.restart()
        strength = self._last_strength()
        if self.applied_strength is None or strength is None or strength == self.applied_strength:
            return
        own_strength = "'auto'" if getattr(self, "strength", None) == "auto" else f"{strength:g}"
        warnings.warn(
            f"Tasks in this state keep their strength {self.applied_strength:g}: "
            f"{type(self).__name__}(strength={own_strength}) applies to tasks that end from now on.",
            UserWarning,
            stacklevel=3,
        )

    def _last_strength(self) -> float | None:
        """Return the strength that this method would have given to the last task that ended."""
        strength = getattr(self, "strength", None)
        if isinstance(strength, (int, float, str)):
            return self._fixed_strength(strength)
        return None

    def _effective_quadratic(self) -> Quadratic:
        """Return the quadratic that is added to the loss, limited to what the optimizer can follow."""
        if self._active is None:
            scaled = self._scale_quadratic()
            self._active = limit_curvature(scaled, self.rates)
            if self._active is not scaled and getattr(self, "strength", None) != "auto":
                self._warn_of_limit()
        return self._active

    def _scale_quadratic(self) -> Quadratic:
        """Return the quadratic before its limit; subclasses may scale the stored one."""
        return self.quadratic

    def _warn_of_limit(self) -> None:
        """Warn once that a strength is too large for the learning rate."""
        if self._warned_of_limit:
            return
        self._warned_of_limit = True
        rate = max(self.rates.values())
        warnings.warn(
            f"{label(self)} has importances times strength above {1 / rate:.3g}, which gradient descent with "
            f"learning rate {rate:.3g} cannot follow (above {2 / rate:.3g} it diverges): they are limited, and "
            'protect less than asked for. Use a smaller learning rate or strength, strength="auto", or Adam.',
            UserWarning,
            stacklevel=4,
        )

    @property
    def _is_strength_unknown(self) -> bool:
        """Whether the strength waits for the first gradient of a task."""
        return self.scale is None and bool(self.quadratic.anchor) and getattr(self, "strength", None) == "auto"

    def _follow_optimizer(self, model: nn.Module, restart: bool = False) -> None:
        """Be told of the steps of the optimizer that trains the model."""
        if self._optimizer_steps is None:
            self._optimizer_steps = OptimizerSteps(self._before_optimizer_step)
        self._optimizer_steps.follow(model, restart)

    def _before_optimizer_step(self, model: nn.Module, rates: dict[str, float]) -> None:
        """Set the strength from the gradients of the first step, and limit the penalty to what the step can follow."""
        if not self.quadratic.anchor:
            return
        if self._is_strength_unknown:
            if self._probe is not None:
                gradient = self._probe.gradient()
                # Parameters that FSDP shards have no hooks.
                if not gradient and any(map(is_sharded, trainable_parameters(model).values())):
                    gradient = _gradients(model)
                self._measure_strength(model, gradient)
            if self._is_strength_unknown:
                self._follow_optimizer(model, restart=True)

        # Within a task the limit stays when a rate falls, or rises little: a warm-up changes it in each step. Another
        # task may have another optimizer.
        old_rates = self.rates if self.has_stepped else {}
        is_higher = any(rate > 1.2 * old_rates.get(n, 0.0) for n, rate in rates.items())
        if is_higher or not self.has_stepped:
            new_rates = old_rates | {n: max(rate, old_rates.get(n, 0.0)) for n, rate in rates.items()}
            if new_rates != self.rates:
                self.rates = new_rates
                self._active = None
        self.has_stepped = True

    def _probe_gradient(self, model: nn.Module) -> Tensor:
        """Return a zero to be added to the loss, in place of the penalty, that measures the gradient of the loss."""
        old_entries = remembered_parameters(model, self.quadratic.anchor, None, self.quadratic.widened)
        parameters = {n: p for n, p in trainable_parameters(model).items() if n in old_entries}
        if not parameters:  # all are frozen
            return torch.zeros(())

        if self._probe is not None and self._probe.num_penalties >= MAX_PROBED_LOSSES:
            self._measure_strength(model, self._probe.gradient())
            if not self._is_strength_unknown:
                return self._effective_quadratic()(model)
        if self._probe is None or not self._probe.is_of(parameters):
            self._stop_probe()
            self._probe = GradientProbe(parameters)
        self._probe.num_penalties += 1
        return self._probe.zero

    def _measure_strength(self, model: nn.Module, gradient: Params) -> None:
        """Set λ from a gradient of the new task's loss."""
        theta = remembered_parameters(model, self.quadratic.anchor, None, self.quadratic.widened)
        self._stop_probe()
        scale = relative_strength(gradient, self._scale_quadratic().form, theta)
        if scale is not None:
            self._rescale(scale)

    def _rescale(self, scale: float | None) -> None:
        """Multiply the stored quadratic by λ, or divide it by the last λ if ``scale`` is None."""
        factor = (scale or 1.0) / (self.scale or 1.0)
        if factor != 1:
            self.quadratic.rescale(factor)
        self.scale = scale
        self._active = None

    def _stop_probe(self) -> None:
        if self._probe is not None:
            self._probe.remove()
            self._probe = None

    def _notice_thawed(self, parameters: Params) -> None:
        """Handle trainable parameters that were frozen when the last task ended."""
        thawed = {n: parameters[n] for n in self.frozen if n in parameters}
        if thawed:
            weights = {n: self.frozen.pop(n) for n in thawed}
            self._thaw(thawed, weights)

    def _thaw(self, parameters: Params, weights: dict[str, float]) -> None:
        """Warn that these parameters have no importance, since the data to measure it on are gone."""
        names = ", ".join(list(parameters)[:4])
        if len(parameters) > 4:
            names += ", …"
        warnings.warn(
            f"{type(self).__name__} does not penalize changes of {names}: frozen when the last task ended, they have "
            f"no importance and learn as in fine-tuning. {self._thaw_advice}",
            UserWarning,
            stacklevel=4,
        )

    def _update_quadratic(self, model: nn.Module, importance: Form | Params, scale: float, decay: float = 1.0) -> None:
        """Set F ← decay · F + scale · importance and θ* ← θ."""
        form, theta = self._select_importance(model, importance)
        form = form * scale
        if self.quadratic.anchor and decay:
            form = total(self._float32_form() * decay, form)
        self.quadratic.move(self._round_form(form), theta)

    def _select_importance(self, model: nn.Module, importance: Form | Params) -> tuple[Form, Params]:
        """Check an importance and weight it by ``only``; return it with a copy of the parameters to penalize.

        The stored quadratic is unscaled, so that the importance can be added to it.
        """
        self._open_task = None
        self._begin_consolidation(model)
        form = _as_form(importance)
        trainable = trainable_parameters(model)
        parameters = all_parameters(model)
        refuse_meta(parameters.values())
        if any(map(is_sharded, parameters.values())):
            form = _shard_form(form, parameters)

        weights = select_by_pattern(parameters, self.only)
        _check_form(form, parameters, trainable)
        if self.quadratic.anchor:
            # Raises where a layer has changed in anything but its number of outputs.
            remembered_parameters(model, self.quadratic.anchor, trainable, self.quadratic.widened)

        # No overlap is an error, unless all parameters that ``only`` selects are frozen.
        if not form.names & set(weights) and weights.keys() & trainable.keys():
            raise ValueError(f"The importance contains none of the parameters that only={self.only!r} selects.")
        if self.half and not isinstance(form, Diagonal):
            raise ValueError(f"half is for importances per parameter, not for a {type(form).__name__} form.")

        theta = {n: p.detach().clone() for n, p in trainable.items() if n in weights}
        check_finite(theta)
        self._note_frozen(parameters, weights)
        return self._offload_form(form.weighted(weights)), self._offload(theta)

    def _begin_consolidation(self, model: nn.Module) -> None:
        """Undo the scale of the stored quadratic; the next task measures a new one, and the learning rate again."""
        self._stop_probe()
        self.last_scale = self.scale
        self._rescale(None)
        self._follow_optimizer(model, restart=True)
        self.has_stepped = False

    def _fixed_strength(self, strength: float | str) -> float:
        """Return the strength by which importances are multiplied when a task ends; 1 if it is measured later."""
        return 1.0 if strength == "auto" else float(strength)

    def _note_frozen(self, parameters: Params, weights: dict[str, float]) -> None:
        """Record which of the selected parameters are frozen and have no importance from an earlier task."""
        known_names = self.quadratic.form.names
        frozen_names = {n for n, p in parameters.items() if not p.requires_grad and p.is_floating_point()}
        self.frozen = {n: weight for n, weight in weights.items() if n in frozen_names and n not in known_names}

    def _offload_form(self, form: Form) -> Form:
        """Move a form to the CPU if ``offload``."""
        if self.offload:
            return form.to("cpu")
        return form

    def _offload(self, tensors: Params) -> Params:
        """Move tensors to the CPU if ``offload``."""
        return self._offload_form(Diagonal(tensors)).diagonal()

    def _round_form(self, form: Form) -> Form:
        """Round a diagonal form to bfloat16 stochastically if ``half``."""
        if not self.half or not isinstance(form, Diagonal):
            return form
        self.num_stochastic_roundings += 1
        return form.halved(self.num_stochastic_roundings)

    def _float32_form(self) -> Form:
        """Return the stored form in float32: a product in bfloat16 would be rounded to nearest."""
        if self.half:
            return self.quadratic.form.to(dtype=torch.float32)
        return self.quadratic.form


def _gradients(model: nn.Module) -> Params:
    """Return the gradients of the model's parameters by name."""
    return {n: p.grad for n, p in trainable_parameters(model).items() if p.grad is not None}


def _as_form(importance: Form | Params) -> Form:
    """Convert an importance to a form; a dict of tensors becomes a diagonal one."""
    if isinstance(importance, dict):
        return Diagonal({n: torch.as_tensor(v) for n, v in importance.items()})
    if isinstance(importance, tuple(FORMS.values())):
        return importance
    raise TypeError(
        "An importance is a Diagonal, Kronecker or Full form or a dict of tensors by parameter name, "
        f"got a {type(importance).__name__}."
    )


def _shard_form(form: Form, parameters: Params) -> Form:
    """Distribute importances as their parameters are sharded."""
    if not isinstance(form, Diagonal):
        raise TypeError(f"Sharded parameters need a Diagonal importance, got a {type(form).__name__} form.")
    shards = {n: sharded_like(v, parameters[n]) for n, v in form.values.items() if n in parameters}
    return Diagonal(form.values | shards)


def _check_form(form: Form, parameters: Params, trainable: Params) -> None:
    """Raise if an importance does not fit the model: names, shapes and signs."""
    unknown = form.names - set(parameters)
    if not form.names & set(trainable):
        form_names = ", ".join(sorted(form.names)[:3]) or "nothing"
        model_names = ", ".join(list(trainable)[:3])
        raise ValueError(
            f"The importance is of {form_names}, none of which is a trainable parameter of the model "
            f"({model_names} …): compute it on the same model."
        )
    if unknown:
        raise ValueError(f"The importance names {', '.join(sorted(unknown)[:3])}, which the model does not have.")

    for name, value in form.diagonal().items():
        if name in trainable and value.shape != trainable[name].shape:
            shape = tuple(trainable[name].shape)
            raise ValueError(
                f"The importance of {name} has shape {tuple(value.shape)}, the parameter {shape}. (The shards of "
                "FullyShardedDataParallel are flat: use torch.distributed.fsdp.fully_shard, or SI or L2.)"
            )
        if not value.isfinite().all() or (value < 0).any():
            raise ValueError(f"The importance of {name} has negative, infinite or NaN entries: a penalty needs F ≥ 0.")
