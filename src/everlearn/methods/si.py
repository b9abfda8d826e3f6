"""Synaptic intelligence: parameters are held by how much they have lowered the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.curvature.diagonal import Diagonal, grown_sum, on
from everlearn.curvature.quadratic import nonzero
from everlearn.fields import NonNegative, Range, Search
from everlearn.params import Params, check_finite, check_growth, corner, grown, matching, named, named_with_frozen, wide
from everlearn.penalty import HELD, QuadraticPenalty
from everlearn.traits import Traits


@dataclass(eq=False)
class SI(QuadraticPenalty):
    """Synaptic intelligence (Zenke, Poole & Ganguli, ICML 2017).

        every step:     ωᵢ ← ωᵢ - gᵢ · Δθᵢ,   g = ∂L_task/∂θ before the step, Δθ = what the optimizer did
        end of a task:  Ωᵢ ← max(0, Ωᵢ + ωᵢ / ((θᵢ - θ*ᵢ)² + damping)),   θ* ← θ,   ω ← 0
        L = L_task + strength · Σᵢ Ωᵢ (θᵢ - θ*ᵢ)²

    The path integral is over the gradient of the task loss alone. That is why the pull of the penalty is added to the
    gradients in ``before_step``: ``penalty`` tells its height and has no gradient. A loop of your own speaks ``before_step``
    (after a gradient scaler's ``unscale_``) and ``after_step``. In a chain, penalties of other methods count as part of the
    task loss. Weights that somebody changes between two steps are noticed, in the trainer not if through ``p.data``.

    Args:
        strength: c; 0 is fine-tuning.
        damping: ξ, keeps the importance of a parameter that has hardly moved finite.
        consolidate_every: consolidate after so many steps instead of at the end of a task: no boundaries are needed.
    """

    traits = Traits(
        family="regularisation",
        pro="gathers importances while it learns: no pass over the data at the end of a task",
        con="three copies of the model, and importances that small batches make noisy",
        step=1.2,
        copies=(3.0,),
        without_boundaries={"consolidate_every": 100},
        weak={"class": HELD},
    )

    strength: Annotated[NonNegative, Search(1e-2, 1e5, late=True, unless="consolidate_every")] = 10.0
    damping: Annotated[float, Range(1e-12), Search(1e-4, 1, late=True, unless="consolidate_every")] = 0.1
    consolidate_every: Annotated[int, Range(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.half and self.consolidate_every:
            raise ValueError(
                "SI.half rounds at every consolidation, too often for consolidate_every: use one of the two."
            )
        self.path: Params = {}  # ω
        self.steps = 0
        self._known: dict[str, torch.Size] = {}  # for which a path was begun, or is not wanted
        self._live: Params = {}  # the parameters of this step: finding their names takes time
        self._task: Params = {}  # g
        self._away: Params = {}  # θ - θ*, at these versions of the parameters
        self._versions: list[tuple[int, int]] = []
        self._ready = self._arrived = self._hurries = False

    _hold_thawed = (
        "SI measures while parameters learn: let them learn in the task that is to be kept, or use EWC, MAS or L2, which hold "
        "what is trainable at end_task(model, task)."
    )

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """The path of new parameters begins here."""
        self._ready = False
        self._set_out(model)

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The height of the penalty, for the loss that is shown; its gradient comes in ``before_step``."""
        return self.bowl(model).detach() if self._holds() else 0.0

    @property
    def of_parameters(self) -> bool:
        """It is: the gradient of its penalty comes in ``before_step``."""
        return True

    def unpulled(self, model: nn.Module, batch: Batch | None, out: Tensor | None) -> Tensor | float:
        """Nothing: without a gradient, the height is for show."""
        self._hurries = True
        return 0.0

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        """Note where the step starts and the task loss's gradient there; then add that of the penalty."""
        parameters = named(model)
        if self.frozen:
            self._notice_thawed(parameters)
        if any(self._known.get(n) != p.shape for n, p in parameters.items()):
            self._set_out(model)
        if all(p.grad is None for p in parameters.values()):
            raise ValueError(
                "SI.before_step found no gradients: call it after loss.backward(), before optimizer.step()."
            )
        self._live = {n: p for n, p in parameters.items() if n in self.path}
        for p in self._live.values():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        self._locate(trust=self._hurries and self._arrived)
        held = self._pulled([n for n in self._live if n in self.omega.values])
        self._task = {n: p.grad for n, p in self._live.items() if p.grad is not None}
        self._task |= {n: g.clone() for n, g in self._task.items() if n not in held}  # clipping works in place
        if held:
            self._check_statistics(model)
            away = [self._away[n] for n in held]
            omega = [on(self.omega.values[n], d).to(d.dtype) for n, d in zip(held, away, strict=True)]
            grads = [
                torch.zeros_like(d) if (g := self._live[n].grad) is None else g for n, d in zip(held, away, strict=True)
            ]
            for name, grad in zip(held, torch._foreach_addcmul(grads, omega, away), strict=True):
                self._live[name].grad = grad
        self._ready, self._arrived, self._hurries = True, False, False

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Add to the path integral what the step has brought."""
        if not self._ready:
            raise ValueError(
                "SI.after_step needs the before_step(model) of the same step, between backward() and step()."
            )
        start, names = self._away, list(self._task)
        moved = self._locate()  # or the step was not taken: a scaler skips a gradient that overflowed
        if names and (moved or all(g.sum().isfinite() for g in self._task.values())):
            torch._foreach_sub_(back := [start[n] for n in names], [self._away[n] for n in names])
            torch._foreach_addcmul_([self.path[n] for n in names], list(self._task.values()), back)
        self._live, self._task, self._ready, self._arrived = {}, {}, False, True
        self.steps += 1
        if self.consolidate_every and self.steps % self.consolidate_every == 0:
            self._arrive(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Turn the path integral into importances, unless that is done every so many steps."""
        if not self.steps:
            raise ValueError(
                "SI has not seen a single step: call before_step(model) and after_step(model) in your loop."
            )
        if self.consolidate_every is None:
            self._arrive(model)
        self._away, self._versions = {}, []

    def _pulled(self, held: list[str]) -> list[str]:
        """Those of the held parameters that get a gradient: not what the task loss does not touch and has not left its place."""
        untouched = [n for n in held if self._live[n].grad is None]
        if not untouched:
            return held
        away = {n: self._away[n] for n in untouched}
        still = set(untouched) - nonzero({n: on(self.omega.values[n], d) * d for n, d in away.items()})
        return [n for n in held if n not in still]

    def _locate(self, trust: bool = False) -> bool:
        """Find θ - θ* and tell whether θ is a new version, which writing to p.data and fused optimizers do not make.

        With trust, what was found at the end of the last step stands where there is none.
        """
        versions = [(id(p), p._version) for p in self._live.values()]
        if (moved := versions != self._versions) or not trust:
            anchors = [on(self.bowl.anchor[n], p) for n, p in self._live.items()]
            self._away = dict(zip(self._live, torch._foreach_sub(list(self._live.values()), anchors), strict=True))
            self._versions = versions
        return moved

    def _holds(self) -> bool:
        return bool(self.omega.values)

    @property
    def omega(self) -> Diagonal:
        """Ω times twice the strength, because the quadratic has a ½ and the penalty has none."""
        if not isinstance(self.bowl.form, Diagonal):
            raise TypeError("SI holds importances per parameter: hand it a Diagonal.")
        return self.bowl.form

    def _set_out(self, model: nn.Module) -> None:
        """Paths for parameters, and rows of parameters, that have none yet."""
        if has_complex := [n for n, p in named(model).items() if p.is_complex()]:
            raise TypeError(
                f"SI integrates along the path of real parameters, and {has_complex[0]} is complex: use EWC or MAS, or freeze it."
            )
        wanted = matching(named_with_frozen(model), self.only)
        parameters = named(model)
        self._notice_thawed(parameters)
        self._known, self._versions = {n: p.shape for n, p in parameters.items()}, []
        for name, parameter in parameters.items():
            if name not in wanted:
                continue
            p = parameter.detach()
            if (path := self.path.get(name)) is not None and path.shape == p.shape:
                continue
            start, held = p.clone(), self.bowl.anchor.get(name)
            if held is not None:  # the rows it had stay held
                check_growth(name, p, held.shape)
                corner(start, held.shape).copy_(held)
            if name in self.omega.values:
                self.omega.values[name] = grown(self.omega.values[name], p.shape)
            self.bowl.anchor[name] = start.cpu() if self.offload else start
            zero = torch.zeros_like(p, dtype=wide(p))
            self.path[name] = zero if path is None else grown(path, p.shape).clone()

    @torch.no_grad()
    def _arrive(self, model: nn.Module) -> None:
        """Ω, and a new path from here."""
        parameters, known = named(model), named_with_frozen(model)
        weights = matching(known, self.only)
        here = {n: p.detach().clone() for n, p in parameters.items() if n in self.path}
        check_finite(here)
        importance: Params = {}
        for name, theta in here.items():
            moved = theta - on(self.bowl.anchor[name], theta)
            new = 2 * self.strength * weights[name] * self.path[name] / (moved.square() + self.damping)
            before = self.omega.values.get(name)
            importance[name] = (new if before is None else grown_sum(on(before, new).to(new.dtype), new)).relu()
            self.path[name].zero_()
        form = Diagonal({**self.omega.values, **importance})  # what is frozen just now keeps its importance
        self.applied_strength = float(self.strength)
        self.bowl.move(self._stored(self._placed(form)), self._placed(Diagonal(here)).diagonal())
        # Its importance comes from the steps: what was frozen in them has none, also if it is trainable by now.
        self.frozen = {n: w for n, w in weights.items() if n not in form.values and known[n].is_floating_point()}
        self._versions = []  # seen from a new θ*

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an SI of the same settings had learned."""
        super().load_state_dict(state)
        self._versions = []
