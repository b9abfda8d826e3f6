"""ExpandNet: what is learned stays, and a network that cannot do a task grows until it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.parameters import Params, all_parameters
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.expansion.base import Expansion
from everlearn.methods.isolation.base import kept
from everlearn.runtime.randomness import derive
from everlearn.surgery.resize import check_precision

Count = Annotated[int, Range(1)]


@dataclass(eq=False)
class ExpandNet(Expansion):
    """ExpandNet, defined by this library: grow when, and as far as, a task needs it.

        task 1:      plain training
        task k > 1:  all that was learned is locked; a new output layer reads it, and learns alone at first
        look:        if the loss is above the threshold, every growable layer gets new units, which read old and new ones and
                     are read by new ones and the task's output layer alone (a block-triangular weight matrix)
        lasso:       v ← v · max(0, 1 - c/‖v‖₂) after every step, v what a new unit reads; one that reads nothing is removed
        f(x, k):     the units that there were at the end of task k
        L = L_task, in the task's output layer and the new units

    Nothing of an earlier task ever changes, bit for bit. Layers are found by tracing: linear or convolution layers with nothing
    between them and the next that mixes units. New units that lead into no such layer (a residual stream) are heard there, from
    their task on. A loop of your own speaks ``loss``, ``before_step`` and ``after_step``; set ``task.steps``, or call
    ``look_now(model)`` yourself.

    Args:
        units: new units per layer each time the network grows.
        threshold: the loss up to which a task needs no more units: on the validation data of the task if it has any, or else
            the mean training loss over the second half of the steps since the last look.
        look: share of a task's steps after which to look at the loss, and again after as many.
        rounds: how often to look, so a task gets at most units · rounds units per layer.
        max_units: most units that a layer may get over all tasks.
        sparsity: share of its first length that v would lose over a task if the loss did not hold it (c is that per step). Values
            that remove units, from about 1.5 on, cost accuracy; the default only shortens.
    """

    traits = Traits(
        family="growth",
        pro="forgets nothing, and grows only where a task needs it",
        con="a threshold to choose, in units of the loss",
        step=2.0,
        step_growth=0.1,
        copies=(0.0, 0.1, 0.09),  # where every task takes all the units it may
        needs_task=True,
        zero_forgetting=True,
        grows=True,
        needs_labels=False,
    )

    units: Count = 64
    threshold: NonNegative = 0.05
    look: Annotated[float, Range(0, 1)] = 0.1
    rounds: Count = 3
    max_units: Annotated[int, Range(0)] = 10_000
    sparsity: NonNegative = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.look * self.rounds > 1:
            raise ValueError(
                f"ExpandNet looks at the loss after a share of the steps, rounds times: look * rounds = "
                f"{self.look:g} * {self.rounds} must not exceed 1."
            )

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Lock what is learned; units that may be needed are made, asleep."""
        self.check_between_tasks(model, task)
        self._beside = None  # layers may have been replaced since
        beside = self._attach(model)
        if self.sparsity:
            check_precision("ExpandNet", map(beside.weight, beside.links_by_producer), "sparsity=0")
        self._move(beside)
        if self.open_task(task):
            self.steps, self.heard, self.hearings = 0, 0.0, 0
            self.live, self.awake, self.read = {}, {}, {}
            if len(self.tasks) == 1:
                self.seed = torch.initial_seed()
            else:
                there, most = self._before(beside), self.units * self.rounds
                self._make(beside, {n: max(0, min(most, self.max_units - there[n])) for n in beside.links_by_producer})
        self._begin(as_task(task), getattr(task, "steps", None))
        self._lock(model)
        self._attach(model)

    def protected(self, model: nn.Module, count: int) -> Params:
        """All of the model but its output layer, from the first task on."""
        own = kept(model, self.output, rest=False)
        parameters = all_parameters(model)
        return {n: torch.ones_like(p, dtype=torch.bool) for n, p in parameters.items() if n not in own}

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Hear the training loss, where it will be needed."""
        self._watch.seen += 1
        every = self._every
        if self.live and (not every or (self.steps < every * self.rounds and self.steps % every >= every // 2)):
            self._hear(batch, out)

    def before_step(self, model: nn.Module) -> None:
        """No gradient for what is locked."""
        self._before_step()
        self._locks.mask_gradients(model)

    def after_step(self, model: nn.Module) -> None:
        """What is locked goes back to where it was, new units shrink; when it is time, look at the loss."""
        self._after_step()
        self._locks.restore(model)
        if self._planned and self.sparsity and any(self.awake.values()):
            self._shrink(self._attach(model), self.sparsity / self._planned)
        every, last = self._every, self._planned  # units that wake after the last step would never learn
        if every and last and self.steps % every == 0 and self.steps <= every * self.rounds and self.steps < last:
            self.look_now(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Remove units that read nothing or that nobody reads, and keep the rest for good."""
        self._watch.check(as_task(task), self.steps, "look_now(model)")
        self._check(model)
        if self.live:
            beside = self._attach(model)
            self._settle(beside, self._alive(beside))
        self._keep(model)

    def look_now(self, model: nn.Module) -> bool:
        """Grow if the loss is above the threshold; whether it was."""
        if not self.live:
            return False  # the first task learns in the network as it is
        if high := self._loss(model) > self.threshold:
            self._wake(model)
        return high

    @property
    def _every(self) -> int | None:
        """Steps from one look to the next."""
        return None if self._planned is None else max(1, round(self._planned * self.look))

    def _wake(self, model: nn.Module) -> None:
        """The next units take part; nobody hears them yet, so the model says the same."""
        beside, old = self._attach(model), self.awake
        self.awake = {n: min(a + self.units, len(self.live[n]["weight"])) for n, a in old.items()}
        seed = derive(self.seed, "expandnet", len(self.tasks), len(self.blocks))
        beside.draw(self.live, self._before(beside), old, self.awake, seed)
        self._attach(model)
