"""What EWC, MAS, SI and L2 share: parameters held where they are, each as firmly as it matters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.quadratic import FORMS, Form, Quadratic, total
from everlearn.method import Method
from everlearn.params import (
    Params,
    check_finite,
    is_sharded,
    matching,
    named,
    named_with_frozen,
    refuse_meta,
    remembered,
    sharded_like,
)

HELD = "holding parameters does not bring the outputs of old classes back up against new ones"


@dataclass(eq=False)
class QuadraticPenalty(Method):
    """A penalty that is a quadratic in the parameters: the base of methods that give each parameter an importance.

        L = L_task + ½ (θ - θ*)ᵀ F (θ - θ*)

    F is ``bowl.form``, the importances times their strength, and θ* is ``bowl.anchor``. Outputs and parameters that appear
    after θ* was taken are free. The gradient is computed directly, all parameters at once, and costs the same after any
    number of tasks; where it is exactly zero there is none, so that weight decay moves no more than it does in fine-tuning. A
    strength is that of the tasks that end under it: tasks that have ended keep theirs. What is frozen when a task ends gets no
    importance: if it learns later, a warning says so.

    Args:
        only: which parameters are held: a pattern such as ``"backbone.*"``, or patterns with weights, the last match
            counting: ``{"*": 1.0, "head.*": 0.0, "stem.*": 10.0}``. By default all.
        half: keep importances in bfloat16, at half the memory; θ* stays exact. They are rounded up or down at random, so that
            sums over many tasks are right on average: rounded to the nearest, they would stop to grow after some two hundred.
        offload: keep importances and θ* on the CPU, for a model that fills its device.
    """

    only: str | dict[str, float] | None = field(default=None, kw_only=True)
    half: bool = field(default=False, kw_only=True)
    offload: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bowl = Quadratic()
        self.frozen: dict[
            str, float
        ] = {}  # what was frozen when the last task ended and has no importance, with its weight
        self.applied_strength: float | None = None  # that of the last task that ended
        if self.half:
            self.roundings = 0  # each of which draws anew, also after a restart

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The pull back to θ*; nothing before the first task has ended."""
        if self.frozen:
            self._notice_thawed(named(model))
        if not self.bowl.anchor:
            return 0.0
        self._check_statistics(model)
        return self._noted(self._holding()(model))

    def penalty_gradient(self, model: nn.Module) -> None:
        """The pull without its height and without a graph."""
        parameters = named(model)
        if self.frozen:
            self._notice_thawed(parameters)
        if self.bowl.anchor:
            self._check_statistics(model)
            self._holding().pull(model, parameters)

    def before_step(self, model: nn.Module) -> None:
        """Nothing but a guard: a pull that was forgotten would be fine-tuning."""
        if self._owes and self.bowl.anchor:
            name = type(self).__name__
            raise ValueError(f"The loss was taken with pulled=True: call {name}.pull(model) after backward().")

    def facts(self) -> dict[str, float]:
        """How the importances, times their strength, are distributed: quantiles, of a million of them where there are more."""
        form = self._holding().form if self.bowl.anchor else None
        if not isinstance(form, Diagonal) or not form.values or any(map(is_sharded, form.values.values())):
            return {}
        every = sum(v.numel() for v in form.values.values())
        some = torch.cat([v.detach().flatten()[:: 1 + every // 10**6].float().cpu() for v in form.values.values()])
        shares = torch.tensor([0.5, 0.9, 0.99, 1.0])
        found = some.sort().values[((len(some) - 1) * shares).round().long()]
        return {f"importance {100 * share:.0f} %": float(v) for share, v in zip(shares, found, strict=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a method of the same kind had learned; say so where it has learned with another strength."""
        super().load_state_dict(state)
        own = self._last_strength()
        if self.applied_strength is not None and own is not None and own != self.applied_strength:
            warnings.warn(
                f"This state holds its tasks with strength {self.applied_strength:g}, and keeps doing so: "
                f"{type(self).__name__}(strength={own:g}) uses its own strength for tasks that end from now on.",
                UserWarning,
                stacklevel=3,
            )

    def _last_strength(self) -> float | None:
        """The strength that this method would have given to the last task that ended."""
        strength = getattr(self, "strength", None)
        return float(strength) if isinstance(strength, (int, float)) else None

    def _holding(self) -> Quadratic:
        """What holds now."""
        return self.bowl

    def _notice_thawed(self, parameters: Params) -> None:
        """Parameters that learn now were frozen when the last task ended."""
        thawed = {n: parameters[n] for n in self.frozen if n in parameters}
        if thawed:
            weights = {n: self.frozen.pop(n) for n in thawed}
            self._thaw(thawed, weights)

    _hold_thawed: ClassVar[str] = (
        "To hold them, make them trainable before end_task(model, task), which measures what is trainable then, and freeze them "
        "again after it."
    )

    def _thaw(self, parameters: Params, weights: dict[str, float]) -> None:
        """Say that nothing holds them: what they matter to earlier tasks was not measured, and the data are gone."""
        names = list(parameters)
        warnings.warn(
            f"{type(self).__name__} does not hold {', '.join(names[:4])}{', …' * (len(names) > 4)}: frozen when the last task ended, "
            f"they have no importance, and learn now as in fine-tuning. {self._hold_thawed}",
            UserWarning,
            stacklevel=4,
        )

    def _hold(self, model: nn.Module, importance: Form | Params, scale: float, decay: float = 1.0) -> None:
        """Hold the parameters where they are now: F ← decay · F + scale · importance."""
        form, here = self._selected(model, importance)
        form = form * scale
        if self.bowl.anchor and decay:
            form = total(self._exact() * decay, form)
        self.bowl.move(self._stored(form), here)

    def _selected(self, model: nn.Module, importance: Form | Params) -> tuple[Form, Params]:
        """An importance and the parameters it holds, as ``only`` says."""
        if isinstance(importance, dict):
            importance = Diagonal({n: torch.as_tensor(v) for n, v in importance.items()})
        form: Form = importance
        if not isinstance(form, tuple(FORMS.values())):
            raise TypeError(
                f"An importance is a Diagonal, Kronecker or Full form or a dict of tensors by parameter name, got a "
                f"{type(importance).__name__}."
            )
        parameters, known = named(model), named_with_frozen(model)
        refuse_meta(known.values())
        if any(map(is_sharded, known.values())):
            form = _sharded(form, known)
        weights = matching(known, self.only)
        _check(form, known, parameters)
        if self.bowl.anchor:
            remembered(
                model, self.bowl.anchor, parameters, self.bowl.widened
            )  # refuses layers that are not what they were
        if not form.names & set(weights) and weights.keys() & parameters.keys():  # or all that is to be held is frozen
            raise ValueError(f"This importance is of none of the parameters that only={self.only!r} asks to hold.")
        if self.half and not isinstance(form, Diagonal):
            raise ValueError(f"half is for importances per parameter, not for a {type(form).__name__} form.")
        here = {n: p.detach().clone() for n, p in parameters.items() if n in weights}
        check_finite(here)
        self._note_frozen(known, weights)
        return self._placed(form.weighted(weights)), self._placed(Diagonal(here)).diagonal()

    def _note_frozen(self, known: Params, wanted: dict[str, float]) -> None:
        """Remember which of the parameters to be held are frozen and have no importance from an earlier task."""
        held = self.bowl.form.names
        frozen = {n for n, p in known.items() if not p.requires_grad and p.is_floating_point()}
        self.frozen = {n: weight for n, weight in wanted.items() if n in frozen and n not in held}

    def _placed(self, form: Form) -> Form:
        """The form where it is to be kept."""
        return form.to("cpu") if self.offload else form

    def _stored(self, form: Form) -> Form:
        """The form as it is to be kept."""
        if not self.half or not isinstance(form, Diagonal):
            return form
        self.roundings += 1
        return form.halved(self.roundings)

    def _exact(self) -> Form:
        """The form that is kept, as it is to be reckoned with: a product in bfloat16 would be rounded to the nearest."""
        return self.bowl.form.to(dtype=torch.float32) if self.half else self.bowl.form


def _sharded(form: Form, parameters: Params) -> Form:
    if not isinstance(form, Diagonal):
        raise TypeError(f"A {type(form).__name__} form is of whole layers; sharded parameters take importances each.")
    return Diagonal({n: sharded_like(v, parameters[n]) if n in parameters else v for n, v in form.values.items()})


def _check(form: Form, known: Params, parameters: Params) -> None:
    if form.names & set(parameters) and (strange := form.names - set(known)):
        raise ValueError(f"This importance names {', '.join(sorted(strange)[:3])}, which the model has not.")
    if not form.names & set(parameters):
        raise ValueError(
            f"This importance is of {', '.join(sorted(form.names)[:3]) or 'nothing'}, none of which is a trainable parameter "
            f"of the model ({', '.join(list(parameters)[:3])} …): take it of the same model."
        )
    for name, value in form.diagonal().items():
        if name in parameters and value.shape != parameters[name].shape:
            raise ValueError(
                f"The importance of {name} has shape {tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}."
            )
        if not value.isfinite().all() or (value < 0).any():
            raise ValueError(f"The importance of {name} has negative, infinite or NaN entries: a penalty needs F ≥ 0.")
