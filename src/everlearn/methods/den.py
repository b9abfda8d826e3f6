"""DEN: retrain the part of the network that a task needs, grow where that is not enough, and copy units that drift."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.beside import Beside
from everlearn.columns import plain
from everlearn.expanding import START, Expanding
from everlearn.growth import length, reached, shrink
from everlearn.isolation import kept
from everlearn.method import NonNegative, Range
from everlearn.params import Params, named_with_frozen, unwrap
from everlearn.seeds import derive
from everlearn.splitting import Twins, key, outside
from everlearn.stream import as_task

Share = Annotated[float, Range(0, 1)]
Some = Annotated[int, Range(0)]
PHASES = ("fit", "retrain", "expand", "settle", "split")


@dataclass(eq=False)
class DEN(Expanding):
    """Dynamically expandable networks (Yoon et al., ICLR 2018).

        task 1:   L_task, weights made sparse by ‖W‖₁
        fit:      the task's output layer alone, made sparse by ‖W‖₁
        retrain:  S, the units that its outputs reach through weights that are not zero: L_task + l2·‖W_S‖² + λ·‖W_S - W_S*‖²
        expand:   if the loss is above the threshold, new units for every layer, which alone learn, with the group lasso on what
                  each reads; those that read nothing are removed
        settle:   all weights, L = L_task + λ·‖W - W*‖², W* as before the task
        split:    a unit i with ‖wᵢ - wᵢ*‖₂ > drift is copied: the copy goes on with wᵢ, the old one gets wᵢ* back; then as settle
        f(x, k):  the units that there were in task k, as they are now

    Old weights learn, so old tasks drift within the bounds that λ and splitting set: little is forgotten, not nothing. The
    method does not see the learning rate; ``l1`` and ``lasso`` are lengths that one step takes away, as in the authors' code.
    A loop of your own sets ``task.steps``, or calls ``turn(model)`` when a phase is over.

    Args:
        units: k, new units per layer when the network grows.
        threshold: τ, the loss above which it does: on the validation data of the task if it has any, or else the mean training
            loss over the second half of retraining.
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
        self.is_new(task)
        self._beside = None  # layers may have been replaced since
        beside = self._attach(model)
        self.blocks = [
            {n: {leaf: _learns(leaf, v) for leaf, v in t.items()} for n, t in block.items()} for block in self.blocks
        ]
        if self.enter(task):
            self.steps, self.phase, self.heard, self.hearings, self.grew, self.dead = 0, "", 0.0, 0, False, {}
            self.live, self.awake, self.read, self.anchor, self.locked = {}, {}, {}, {}, {}
            if len(self.tasks) == 1:
                self.seed = torch.initial_seed()
            else:
                self._make(beside, dict.fromkeys(beside.made, self.units + self.splits))
                self.anchor = {n: v.detach().clone() for n, v in self._weights(model).items()}
                self.phase = "fit"
                self._lock_all(model)
        planned = getattr(task, "steps", None)
        self._begin(as_task(task), planned)
        first, second, third = self.fit, self.fit + self.retrain, self.fit + self.retrain + self.expand
        shares = (first, second, third, (third + 1) / 2)
        self._due = [] if planned is None else [max(1, round(share * planned)) for share in shares]
        self._values = {n: v.detach().clone() for n, v in self._weights(model).items() if n in self.locked}
        if len(self.tasks) > 1:
            self._locks.hold_statistics(model, {n for n, _ in unwrap(model).named_buffers()})

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
        self._seen += 1
        late = not self._due or self.steps >= (self._due[0] + self._due[1]) // 2
        if self.phase == "retrain" and late and not self.grew:
            self._hear(batch, out)

    def before_step(self, model: nn.Module) -> None:
        """No gradient for what is locked."""
        self._watch()
        for name, p in self._weights(model).items() if self.locked else ():
            if name in self.locked and p.grad is not None:
                if self.locked[name].all():
                    p.grad = None
                else:
                    p.grad.masked_fill_(self.locked[name], 0)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """What is locked goes back to where it was, what should be sparse gets sparser; when it is time, the next phase."""
        self._notice()
        self._locks.restore(model)
        for name, p in self._weights(model).items() if self.locked else ():
            if name in self.locked:
                torch.where(self.locked[name], self._values[name], p, out=p)
        self._sparser(model)
        while self.phase and self._due and (at := PHASES.index(self.phase)) < 4 and self.steps >= self._due[at]:
            self.turn(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Keep the units that are left, each with its task."""
        self._check_loop("turn(model)")
        self._check(model)
        if self.live:
            beside, gone = self._attach(model), self.dead
            at = {n: torch.arange(a, device=self.live[n]["weight"].device) for n, a in self.awake.items()}
            self._settle(beside, {n: v[~torch.isin(v, gone[n])] if n in gone else v for n, v in at.items()})
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
                silent = length([g[: self.awake[name]] for g in groups]).eq(0).nonzero().flatten()
                self.dead[name] = silent
                self._silence(beside, name, silent)
        else:
            twins = Twins(beside, self.blocks, self.live, self.awake, self.read.get("weight"))
            twins.split(self._weights(model), self.anchor, self.drift, self.splits)
        self._values = {n: v.detach().clone() for n, v in self._weights(model).items() if n in self.locked}
        return self.phase

    @property
    def _retrains(self) -> bool:
        """Retraining goes on where the network need not grow."""
        return self.phase == "retrain" or (self.phase == "expand" and not self.grew)

    def _weights(self, model: nn.Module) -> Params:
        """All that tasks share, by name: the model without its output layer, and the units of earlier tasks."""
        own = kept(model, self.output, rest=False)
        shared = {n: p for n, p in named_with_frozen(model).items() if n not in own and p.requires_grad}
        for b, block in enumerate(self.blocks):
            shared |= {
                key(b, name, n): v for name, t in block.items() for n, v in t.items() if isinstance(v, nn.Parameter)
            }
        return shared

    def _lock_all(self, model: nn.Module) -> None:
        self.locked = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self._weights(model).items()}

    def _lock_outside(self, model: nn.Module, beside: Beside) -> None:
        """Only what lies between units that the task's outputs reach may learn."""
        with plain(unwrap(model)):
            whole = copy.deepcopy(unwrap(model))
        beside.build(whole, self._view())
        wide: Any = whole.get_submodule(beside.head).weight
        rows = self.rows[-1]
        rows = torch.ones(len(wide), dtype=torch.bool) if rows is None else rows[: len(wide)]
        chosen = reached(whole, beside.links, {beside.head: rows.to(wide.device)})
        self.locked = outside(beside, self.blocks, self._weights(model), chosen)

    def _wake(self, beside: Beside) -> None:
        """New units take part; nobody hears them yet, so the model says the same."""
        old, self.awake = self.awake, dict.fromkeys(self.awake, self.units)
        seed = derive(self.seed, "den", len(self.tasks), len(self.blocks))
        beside.draw(self.live, self._before(beside), old, self.awake, seed)

    def _sparser(self, model: nn.Module) -> None:
        """The proximal steps that the phase asks for."""
        own = kept(model, self.output, rest=False)
        if not self.phase and self.l1:
            for p in [*self._weights(model).values(), *own.values()]:
                if p.dim() > 1:
                    shrink(p, self.l1)
        elif self.phase == "fit" and self.l1:
            for p in [*own.values(), *self.read.values()]:
                if p.dim() > 1:
                    shrink(p, self.l1)
        elif self.phase == "expand" and self.grew:
            beside = self._attach(model)
            for name, n in self.awake.items() if self.l1 else ():
                for leaf in ("weight", "inner"):
                    if leaf in self.live[name]:
                        shrink(self.live[name][leaf][:n], self.l1)
            self._shrink(beside, self.lasso / START)
        for name, dead in self.dead.items():
            if len(dead):  # momentum would wake them
                for leaf, v in self.live[name].items():
                    if leaf != "out" and "running" not in leaf:
                        v[dead] = 0
                self._silence(self._attach(model), name, dead)


def _learns(leaf: str, v: Tensor) -> Tensor:
    return v if "running" in leaf or isinstance(v, nn.Parameter) else nn.Parameter(v)
