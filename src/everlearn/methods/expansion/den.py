"""DEN: retrain the part of the network that a task needs, grow where that is not enough, and copy units that drift."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.parameters import Params, all_parameters, unwrap
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.expansion.added_units import AddedUnits, learning, moved
from everlearn.methods.expansion.base import START, Expansion
from everlearn.methods.expansion.den_units import UnitDuplicator, key, outside
from everlearn.methods.expansion.loop_guard import has_validation
from everlearn.methods.expansion.merge_units import merge
from everlearn.methods.isolation.base import kept
from everlearn.runtime.randomness import derive
from everlearn.surgery.hooks import without_hooks
from everlearn.surgery.proximal import group_norms, soft_threshold_
from everlearn.surgery.resize import check_precision, reachable_units

Share = Annotated[float, Range(0, 1)]
Some = Annotated[int, Range(0)]
PHASES = ("fit", "retrain", "expand", "settle", "split")


@dataclass(eq=False)
class DEN(Expansion):
    """Dynamically expandable networks (Yoon et al., ICLR 2018).

        task 1:   L_task, weights made sparse by ‖W‖₁
        fit:      the task's output layer alone, made sparse by ‖W‖₁
        retrain:  S, the units that its outputs reach through weights that are not zero: L_task + l2·‖W_S‖² + λ·‖W_S - W_S*‖²
        expand:   if the loss is above the threshold, new units for every layer, which alone learn, with the group lasso on what
                  each reads; those that read nothing are removed
        settle:   all weights, L = L_task + λ·‖W - W*‖², W* as before the task
        split:    a unit i with ‖wᵢ - wᵢ*‖₂ > drift is copied: the copy goes on with wᵢ, the old one gets wᵢ* back; then as settle
        f(x, k):  the units that there were in task k, as they are now

    Old weights learn, held by λ, and after the split they learn on: little is forgotten, not nothing, and nothing bounds it. The
    method does not see the learning rate; ``l1`` and ``lasso`` are lengths that one step takes away, as in the authors' code.
    A loop of your own takes its loss from ``loss(model, batch)``, and sets ``task.steps`` or calls ``turn(model)`` when a phase
    is over.

    Args:
        units: k, new units per layer when the network grows.
        threshold: τ, the loss above which it does: on the validation data of the task if it has any, or else the mean training
            loss over the second half of retraining; so without validation data ``retrain`` must not be 0.
        drift: σ, how far what a unit reads may move before the unit is copied.
        splits: most copies per layer and task, those that have drifted most first.
        strength: λ.
        l1: how much nearer to zero a step takes each weight, in the first task, in fitting and in expanding.
        l2: of retraining.
        lasso: by how much a step shortens what each new unit reads, in expanding.
        fit: share of a task's steps for fitting.
        retrain: share for retraining.
        expand: share for expanding; what is left is for settling before and after the split, half each.
    """

    traits = Traits(
        family="growth",
        pro="old weights learn, too, and what would be overwritten is copied",
        con="forgets a little, and has five phases with as many numbers to choose",
        step=1.9,
        copies=(0.0, 0.05),
        needs_task=True,
        grows=True,
        needs_labels=False,
    )

    units: Some = 10
    threshold: NonNegative = 0.01
    drift: NonNegative = 0.05
    splits: Some = 10
    strength: NonNegative = 0.5
    l1: NonNegative = 1e-5
    l2: NonNegative = 1e-4
    lasso: NonNegative = 1e-3
    fit: Share = 0.1
    retrain: Share = 0.3
    expand: Share = 0.3
    free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (total := self.fit + self.retrain + self.expand) > 1:
            raise ValueError(
                f"DEN: fit, retrain and expand are shares of a task's steps; together {total:g} is over 1."
            )
        self.phase = ""  # in the first task there is none
        self.grew = False
        self.anchor: Params = {}  # W*
        self.locked: Params = {}  # True where an entry is
        self.dead: dict[str, Tensor] = {}  # of the task's new units
        self._values: Params = {}
        self._due: list[int] = []

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Make units that may be needed, asleep, and remember the weights."""
        planned = getattr(task, "steps", None)
        if self.is_new(task) and self.tasks and planned and not self.retrain and not has_validation(as_task(task)):
            raise ValueError(
                "DEN(retrain=0) hears no training loss to compare with its threshold: give the task validation data, or a share of "
                "the steps for retraining."
            )
        self._beside = None  # layers may have been replaced since
        beside = self._attach(model)
        if self.l1 or self.lasso:
            check_precision("DEN", map(beside.weight, beside.links_by_producer), "l1=0, lasso=0")
        self._move(beside)
        if self.open_task(task):
            self.steps, self.phase, self.heard, self.hearings, self.grew, self.dead = 0, "", 0.0, 0, False, {}
            self.live, self.awake, self.read, self.anchor, self.locked = {}, {}, {}, {}, {}
            if len(self.tasks) == 1:
                self.seed = torch.initial_seed()
            else:
                self._make(beside, dict.fromkeys(beside.links_by_producer, self.units + self.splits))
                self.anchor = {n: v.detach().clone() for n, v in self._weights(model).items()}
                self.phase = "fit"
                self._lock_all(model)
        self._begin(as_task(task), planned)
        self._due = [] if planned is None else self._ends(planned)
        self._values = {n: v.detach().clone() for n, v in self._weights(model).items() if n in self.locked}
        self._locks.release(model)
        if len(self.tasks) > 1:
            self._locks.lock_buffers(model, {n for n, _ in unwrap(model).named_buffers()})
        self._attach(model)

    def parameters(self) -> list[nn.Parameter]:
        """Those of all added units, also of units asleep, and how the task's output layer reads them."""
        every = [v for block in self.blocks for t in block.values() for v in t.values()] if self.live else []
        return [v for v in every if isinstance(v, nn.Parameter) and v.numel()] + super().parameters()

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """What holds old weights: λ·‖W - W*‖², and in retraining l2·‖W_S‖²."""
        if self.phase not in ("retrain", "settle", "split") and not self._retrains:
            return 0.0
        total: Tensor | float = 0.0
        for name, p in self._weights(model).items():
            if self.strength:  # of what is locked it is zero
                total = total + self.strength * (p - self.anchor[name]).square().sum()
            if self.l2 and self._retrains:
                free = p.masked_fill(self.locked[name], 0) if name in self.locked else p
                total = total + self.l2 * free.square().sum()
        return total

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Hear the training loss, where it will be needed."""
        self._watch.seen += 1
        late = not self._due or self.steps >= (self._due[0] + self._due[1]) // 2
        if self.phase == "retrain" and late and not self.grew:
            self._hear(batch, out)

    def before_step(self, model: nn.Module) -> None:
        """No gradient for what is locked."""
        self._before_step()
        for name, p in self._weights(model).items() if self.locked else ():
            if name in self.locked and p.grad is not None:
                if self.locked[name].all():
                    p.grad = None
                else:
                    p.grad.masked_fill_(self.locked[name], 0)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """What is locked goes back to where it was, what should be sparse gets sparser; when it is time, the next phase."""
        self._after_step()
        self._locks.restore(model)
        for name, p in self._weights(model).items() if self.locked else ():
            if name in self.locked:
                torch.where(self.locked[name], self._values[name], p, out=p)
        self._sparser(model)
        while self.phase and self._due and (at := PHASES.index(self.phase)) < 4 and self.steps >= self._due[at]:
            self.turn(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Keep the units that are left, each with its task."""
        self._watch.check(as_task(task), self.steps, "turn(model)")
        self._check(model)
        if self.live:
            beside = self._attach(model)
            self._settle(beside, self._alive(beside))
        self.anchor, self.locked, self.dead, self._values, self.phase = {}, {}, {}, {}, ""
        self._keep(model)

    @torch.no_grad()
    def turn(self, model: nn.Module) -> str:
        """On to the next phase, which is returned: fit, retrain, expand, settle, split."""
        if not self.phase or self.phase == "split":
            return self.phase
        beside, self.phase = self._attach(model), PHASES[PHASES.index(self.phase) + 1]
        if self.phase == "retrain":
            self._lock_outside(model, beside)
        elif self.phase == "expand":
            self.grew = self._loss(model) > self.threshold
            if self.grew:
                self._lock_all(model)
                self._wake(beside)
        elif self.phase == "settle":
            self.locked = {}
            for name, (groups, _) in {n: self._groups(beside, n) for n in self.awake}.items():
                silent = group_norms([g[: self.awake[name]] for g in groups]).eq(0).nonzero().flatten()
                self.dead[name] = silent
                self._silence(beside, name, silent)
        else:
            twins = UnitDuplicator(beside, self.blocks, self.live, self.awake, self.read.get("weight"))
            twins.split(self._weights(model), self.anchor, self.drift, self.splits)
        self._values = {n: v.detach().clone() for n, v in self._weights(model).items() if n in self.locked}
        self._attach(model)
        return self.phase

    def _ends(self, planned: int) -> list[int]:
        """The steps after which fit, retrain, expand and settle are over."""
        first, second, third = self.fit, self.fit + self.retrain, self.fit + self.retrain + self.expand
        due = [max(1, round(share * planned)) for share in (first, second, third, (third + 1) / 2)]
        if self.retrain:
            due[1] = max(due[1], due[0] + 1)  # or there would be no loss to decide by
        return [max(due[: i + 1]) for i in range(4)]

    @property
    def _retrains(self) -> bool:
        """Retraining goes on where the network need not grow."""
        return self.phase == "retrain" or (self.phase == "expand" and not self.grew)

    @torch.no_grad()
    def _move(self, beside: AddedUnits) -> None:
        super()._move(beside)
        self.blocks = [learning(block) for block in self.blocks]
        weights = self._weights(beside.model)
        self.anchor = {n: moved(v, weights[n]) for n, v in self.anchor.items()}
        self.locked = {n: v.to(weights[n].device) for n, v in self.locked.items()}
        self.dead = {n: v.to(self.live[n]["weight"].device) for n, v in self.dead.items()}

    def _weights(self, model: nn.Module) -> Params:
        """All that tasks share, by name: the model without its output layer, and the units of earlier tasks."""
        own = kept(model, self.output, rest=False)
        shared = {n: p for n, p in all_parameters(model).items() if n not in own and p.requires_grad}
        for b, block in enumerate(self.blocks):
            shared |= {
                key(b, name, n): v for name, t in block.items() for n, v in t.items() if isinstance(v, nn.Parameter)
            }
        return shared

    def _lock_all(self, model: nn.Module) -> None:
        self.locked = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self._weights(model).items()}

    def _lock_outside(self, model: nn.Module, beside: AddedUnits) -> None:
        """Only what lies between units that the task's outputs reach may learn."""
        with without_hooks(unwrap(model)):
            whole = copy.deepcopy(unwrap(model))
        merge(beside, whole, self._view())
        wide: Any = whole.get_submodule(beside.head).weight
        rows = self.rows[-1]
        rows = torch.ones(len(wide), dtype=torch.bool) if rows is None else rows[: len(wide)]
        chosen = reachable_units(whole, beside.links, {beside.head: rows.to(wide.device)})
        self.locked = outside(beside, self.blocks, self._weights(model), chosen)

    def _wake(self, beside: AddedUnits) -> None:
        """New units take part; nobody hears them yet, so the model says the same."""
        old, self.awake = self.awake, dict.fromkeys(self.awake, self.units)
        seed = derive(self.seed, "den", len(self.tasks), len(self.blocks))
        beside.draw(self.live, self._before(beside), old, self.awake, seed)

    def _sparser(self, model: nn.Module) -> None:
        """The proximal steps that the phase asks for."""
        own = {n: p for n, p in kept(model, self.output, rest=False).items() if p.requires_grad}
        if not self.phase and self.l1:
            for p in [*self._weights(model).values(), *own.values()]:
                if p.dim() > 1:
                    soft_threshold_(p, self.l1)
        elif self.phase == "fit" and self.l1:
            for p in [*own.values(), *self.read.values()]:
                if p.dim() > 1:
                    soft_threshold_(p, self.l1)
        elif self.phase == "expand" and self.grew:
            beside = self._attach(model)
            for name, n in self.awake.items() if self.l1 else ():
                for leaf in ("weight", "inner"):
                    if leaf in self.live[name]:
                        soft_threshold_(self.live[name][leaf][:n], self.l1)
            self._shrink(beside, self.lasso / START)
        for name, dead in self.dead.items():
            if len(dead):  # momentum would wake them
                for leaf, v in self.live[name].items():
                    if leaf != "out" and "running" not in leaf:
                        v[dead] = 0
                self._silence(self._attach(model), name, dead)
