"""What growing methods share: units added beside the model's, each with the task it was added in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.parameters import Params, all_parameters, check_finite, grown, unwrap
from everlearn.core.task import Task
from everlearn.methods.expansion.added_units import AddedUnits, Block, View, learning
from everlearn.methods.expansion.loop_guard import Watch, has_validation, validation_loss
from everlearn.methods.expansion.merge_units import merge
from everlearn.methods.isolation.base import Isolation, kept, remembered_state
from everlearn.runtime import distributed
from everlearn.surgery.freezing import FrozenEntries, seen_by_compiler
from everlearn.surgery.functional import call_with, filled_copy
from everlearn.surgery.hooks import remove_hooks, temporarily_unhooked, without_hooks
from everlearn.surgery.proximal import group_norms, group_soft_threshold_
from everlearn.surgery.resize import unit_columns
from everlearn.surgery.tracing import Link

START = 3**-0.5  # the norm of a new unit's weights, U(-1/√n, 1/√n) each


@dataclass(eq=False)
class Expansion(Isolation):
    """A network that gets new units, and answers for every task with those it had when the task ended.

    The model's own tensors keep their shapes, so checkpoints of it fit; added units are state of the method, beside the model.

    Args:
        groups: which layer's units go where, instead of tracing; see ``everlearn.surgery.tracing.links``.
        output: name of the output layer, which every task has for itself; by default the last ``nn.Linear``.
    """

    groups: dict[str, Any] | None = field(default=None, kw_only=True)
    output: str | None = field(default=None, kw_only=True)
    free: ClassVar[bool] = False  # whether old units may read added ones

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks: list[Block] = []  # the units of tasks that have ended
        self.stamps: list[int] = []  # in which task each block was added, counted from 0
        self.reads: list[Params] = []  # how each task's output layer reads added units
        self.live: Block = {}  # the units of the task that is being learned; those asleep are zero
        self.awake: dict[str, int] = {}
        self.read: Params = {}
        self.seed = 0
        self.steps = 0  # of this task
        self.heard, self.hearings = 0.0, 0  # the training loss since it was asked for
        self._task: Task | None = None
        self._planned: int | None = None  # steps
        self._watch = Watch(type(self).__name__, None, False, False)
        self._beside: AddedUnits | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Those of the current task's units, also of units asleep, and how its output layer reads added units."""
        every = [v for tensors in [*self.live.values(), self.read] for v in tensors.values()]
        return [v for v in every if isinstance(v, nn.Parameter) and v.numel()]

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """With the units there were at the end of the k-th task, and its output layer."""
        with self._on(model) as beside, beside.showing(self._view(k)):
            return call_with(model, self.own[k], x)

    def current(self, model: nn.Module, x: Any) -> Tensor:
        """With all units, and of the task that is being learned those awake."""
        if not self.tasks:
            return super().current(model, x)
        with self._on(model):
            return super().current(model, x)

    def growth(self) -> dict[int, dict[str, int]]:
        """For every task, how many units it added to each layer."""
        added: dict[int, dict[str, int]] = {number: {} for number in self.tasks[: len(self.own)]}
        for k, block in zip(self.stamps, self.blocks, strict=True):
            mine = added[self.tasks[k]]
            for name, tensors in block.items():
                mine[name] = mine.get(name, 0) + len(tensors["weight"])
        return added

    def diagnostics(self) -> dict[str, float]:
        """Units added so far."""
        units = sum(n for added in self.growth().values() for n in added.values())
        return {"units added so far": units} if self.own else {}

    def extra_parameters(self, model: nn.Module) -> int:
        """Those of added units and of what reads them, and every earlier task's output layer."""
        tensors = [v for read in self.reads for v in read.values()]
        tensors += [v for b in self.blocks for t in b.values() for n, v in t.items() if "running" not in n]
        every = {id(v): v for v in [*tensors, *self.parameters()]}
        return self.count_own(model) + sum(v.numel() for v in every.values())

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """A plain module that answers as the task with this number: the model as wide as it was then.

        It has all outputs of the output layer. Those of classes that the task did not have were never taught to be low: compare
        only those that it had.
        """
        k = self.place(task)
        with self._on(model) as beside:
            with without_hooks(unwrap(model)):
                alone = filled_copy(model, self.own[k])
            merge(beside, alone, self._view(k))
        FrozenEntries().release(alone)
        return alone

    def detach(self, model: nn.Module) -> None:
        """Take off the added units and unlock everything; the model is then that of the first task, with the last's outputs."""
        inner = unwrap(model)
        learns = self._beside is not None and self._beside.is_on(inner)
        (self._locks if learns else FrozenEntries()).release(
            model
        )  # from a copy of the model that learns, only its hooks
        remove_hooks(inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned; the next ``begin_task`` or ``predict`` puts it on a model."""
        super().load_state_dict(state)
        self._beside = None

    def _attach(self, model: nn.Module) -> AddedUnits:
        """Our hooks on the model, with all that there is now; other methods' off."""
        if self._beside is None or not self._beside.is_on(unwrap(model)):
            self._beside = AddedUnits(model, self.groups, self.output, self.free)
            seen_by_compiler(model)
        self._beside.view = self._beside.placed(self._view())
        return self._beside

    @contextmanager
    def _on(self, model: nn.Module) -> Iterator[AddedUnits]:
        """Our hooks on a model that is only asked: another method may be learning there."""
        inner, before = unwrap(model), self._beside
        if before is not None and before.is_on(inner):
            yield self._attach(model)
            return
        with temporarily_unhooked(inner) as theirs:
            yield self._attach(model)
        self._beside = before if theirs else self._beside

    @torch.no_grad()
    def _move(self, beside: AddedUnits) -> None:
        """All of ours to where the model is: it may have been moved, or a checkpoint come from elsewhere."""
        self.blocks = beside.placed(View(self.blocks)).blocks
        live = beside.placed(View([self.live], self.read.get("weight")))
        self.live = learning(live.blocks[0])
        if live.head is not None:
            self.read = learning({"": {"weight": live.head}})[""]

    def _view(self, k: int | None = None) -> View:
        """What takes part: for the k-th task, its units; else all, and those awake of the current task."""
        if k is None and self.open:
            if not self.live:
                return View()
            return View([*self.blocks, self.live], self.read.get("weight"), self.awake)
        k = len(self.own) - 1 if k is None else k
        blocks = [block for stamp, block in zip(self.stamps, self.blocks, strict=True) if stamp <= k]
        return View(blocks, self.reads[k].get("weight") if k >= 0 else None)

    def _before(self, beside: AddedUnits) -> dict[str, int]:
        """How many units earlier tasks have added to each layer."""
        there = View(self.blocks)
        return {name: there.count(name) for name in beside.links_by_producer}

    def _lock(self, model: nn.Module) -> None:
        """From the second task on, all of the model but its output layer."""
        self._locks.release(model)
        if len(self.tasks) > 1:
            own = kept(model, self.output, rest=False)
            for name, p in all_parameters(model).items():
                if name not in own:  # locked, not frozen: without gradients torch's transformers round in another way
                    self._locks.lock(model, name, torch.ones_like(p, dtype=torch.bool))
            self._locks.lock_buffers(model, {n for n, _ in unwrap(model).named_buffers()})

    def _make(self, beside: AddedUnits, room: dict[str, int]) -> None:
        """Units for the task, asleep: all zero, which no optimizer moves as long as they have no gradient."""
        before = self._before(beside)
        self.live = learning(beside.empty(before, room))
        self.awake = dict.fromkeys(beside.links_by_producer, 0)
        if link := beside.feeds.get(beside.head):
            head = beside.weight(beside.head)
            old = self.reads[-1].get("weight", head.new_zeros(len(head), 0))
            width = (before[link.producer] + room[link.producer]) * link.repeat
            self.read = {"weight": nn.Parameter(grown(old.to(head), (len(head), width)).clone())}

    def _begin(self, task: Task, planned: int | None) -> None:
        """Watch the loop, which may be anybody's."""
        self._task, self._planned = task, planned
        self._watch = Watch(type(self).__name__, planned, not self.steps, bool(self.live))

    def _before_step(self) -> None:
        if not self.tasks:
            raise ValueError(
                f"{type(self).__name__} knows of no task: call begin_task(model, task) before the first step."
            )
        self._watch.before_step(self.parameters())

    def _after_step(self) -> None:
        self._watch.after_step()
        self.steps += 1

    def _check(self, model: nn.Module) -> None:
        """Nothing locked has moved, and all is finite."""
        self._locks.check(model, type(self).__name__)
        check_finite({str(i): p for i, p in enumerate([*unwrap(model).parameters(), *self.parameters()])})

    def _settle(self, beside: AddedUnits, alive: dict[str, Tensor]) -> None:
        """Of the task's units, these become a block of the network."""
        k = len(self.tasks) - 1
        block, read = beside.part(self.live, self.read.get("weight"), self._before(beside), alive)
        self.reads = [*self.reads[:k], {} if read is None else {"weight": read}]
        if any(len(rows) for rows in alive.values()):
            self.blocks.append(block)
            self.stamps.append(k)
        for p in self.parameters():
            p.grad = None  # a live optimizer would go on moving them
        self.live, self.awake, self.read = {}, {}, {}

    def _keep(self, model: nn.Module) -> None:
        """The task's output layer, and that it has ended."""
        if len(self.reads) < len(self.tasks):
            self.reads.append({})
        own = kept(model, self.output, rest=False)
        self.close_task(model, remembered_state(model, own))
        self._task = None  # or its data would live as long as the method
        self._attach(model)

    def _groups(self, beside: AddedUnits, name: str) -> tuple[list[Tensor], float]:
        """What decides whether each unit says anything, and its length at first: its scale after BatchNorm, or what it reads."""
        tensors, last = self.live[name], f"norm{len(beside.links_by_producer[name].norms) - 1}"
        if f"{last}.weight" in tensors:  # which undoes any scale before it
            return [tensors[f"{last}.weight"], tensors[f"{last}.bias"]], 1.0
        return [tensors[n] for n in ("weight", "inner", "bias") if n in tensors], START

    @torch.no_grad()
    def _shrink(self, beside: AddedUnits, share: float) -> None:
        """The group lasso's proximal step for the units awake, by a share of their first length."""
        for name, n in self.awake.items():
            if n:
                groups, size = self._groups(beside, name)
                left = group_soft_threshold_([g[:n] for g in groups], share * size)
                if not left.all():
                    self._silence(beside, name, (~left).nonzero().flatten())

    def _silence(self, beside: AddedUnits, name: str, dead: Tensor) -> None:
        """Nobody reads a unit that reads nothing, so it can go without a trace even where f(0) is not 0."""
        link = beside.links_by_producer[name]
        read = unit_columns(dead + View(self.blocks).count(name), link.repeat)
        if "out" in self.live[name]:
            self.live[name]["out"][:, unit_columns(dead, link.repeat)] = 0
        if link.consumer in self.live:
            self.live[link.consumer]["inner"][:, read] = 0
        if link.consumer == beside.head:
            self.read["weight"][:, read] = 0

    def _alive(self, beside: AddedUnits) -> dict[str, Tensor]:
        """The units awake that read something and that somebody reads."""
        alive = {n: group_norms([g[:a] for g in self._groups(beside, n)[0]]).ne(0) for n, a in self.awake.items()}
        for _ in alive:  # as often as there are layers: who is read by the dead alone is dead too
            for name, link in beside.links_by_producer.items():
                alive[name] &= self._heard(name, link, alive)
        return {n: some.nonzero().flatten() for n, some in alive.items()}

    def _heard(self, name: str, link: Link, alive: dict[str, Tensor]) -> Tensor:
        """Of the units awake, which somebody alive reads."""
        first, width = View(self.blocks).count(name) * link.repeat, self.awake[name] * link.repeat
        readers = [self.live[name]["out"][:, :width]] if "out" in self.live[name] else []
        if link.consumer in alive:
            there = alive[link.consumer].nonzero().flatten()
            readers.append(self.live[link.consumer]["inner"][there, first : first + width])
        elif not readers:
            readers.append(self.read["weight"][:, first : first + width])
        heard = torch.stack([r.ne(0).transpose(0, 1).flatten(1).any(1) for r in readers]).any(0)
        return heard.view(-1, link.repeat).any(1)

    def _hear(self, batch: Batch, out: Tensor) -> None:
        if not has_validation(self._task):
            self.heard += float(batch.loss(out))
            self.hearings += 1

    def _loss(self, model: nn.Module) -> float:
        """On the validation data, or else what was heard in training."""
        self._watch.looked = True
        if self._task is not None and has_validation(self._task):
            return validation_loss(model, self._task)
        if not self.hearings:
            raise ValueError(
                f"{type(self).__name__} has heard no training loss to compare with its threshold: take the loss of your loop from "
                "method.loss(model, batch), or give the task validation data."
            )
        mean = distributed.sum_across(self.heard) / distributed.sum_across(
            self.hearings
        )  # or processes would grow apart
        self.heard, self.hearings = 0.0, 0
        return mean
