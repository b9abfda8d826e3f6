"""What growing methods share: units added beside the model's, each with the task it was added in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.beside import Beside, Block, View
from everlearn.columns import plain
from everlearn.growth import columns, length, shrink_groups
from everlearn.isolation import Isolation, call, filled, kept, remembered_state
from everlearn.locks import Locks
from everlearn.params import Params, check_finite, evaluating, grown, named_with_frozen, unwrap
from everlearn.stream import Task

START = 3**-0.5  # the norm of a new unit's weights, U(-1/√n, 1/√n) each


@dataclass(eq=False)
class Expanding(Isolation):
    """A network that gets new units, and answers for every task with those it had when the task ended.

    The model's own tensors keep their shapes, so checkpoints of it fit; added units are state of the method, beside the model.

    Args:
        groups: which layer's units go where, instead of tracing; see ``everlearn.tracing.links``.
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
        self.outputs: list[int] = []  # parameters of each task's output layer
        self.live: Block = {}  # the units of the task that is being learned; those asleep are zero
        self.awake: dict[str, int] = {}
        self.read: Params = {}
        self.size = 0  # parameters of the model without its output layer
        self.seed = 0
        self.steps = 0  # of this task
        self.heard, self.hearings = 0.0, 0  # the training loss since it was asked for
        self._task: Task | None = None
        self._planned: int | None = None  # steps
        self._whole = True  # whether this task was seen from its first step on, and not from a checkpoint
        self._looked = False  # whether somebody has asked for the loss
        self._seen = 0  # losses taken in this task
        self._probe: tuple[Tensor, Tensor] | None = None  # one of the method's own parameters, and where a step began
        self._still: bool | None = None  # whether nothing has moved the method's own parameters; None: who knows
        self._locks = Locks()
        self._beside: Beside | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Those of the current task's units, also of units asleep, and how its output layer reads added units."""
        every = [v for tensors in [*self.live.values(), self.read] for v in tensors.values()]
        return [v for v in every if isinstance(v, nn.Parameter) and v.numel()]

    def answer(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """With the units there were at the end of the k-th task, and its output layer."""
        self._attach(model)
        with self.as_task(k):
            return call(model, self.own[k], x)

    def growth(self) -> dict[int, dict[str, int]]:
        """For every task, how many units it added to each layer."""
        added: dict[int, dict[str, int]] = {number: {} for number in self.tasks[: len(self.own)]}
        for k, block in zip(self.stamps, self.blocks, strict=True):
            mine = added[self.tasks[k]]
            for name, tensors in block.items():
                mine[name] = mine.get(name, 0) + len(tensors["weight"])
        return added

    def facts(self) -> dict[str, float]:
        """Units added so far, and parameters of the network with them and every task's output layer."""
        if not self.own:
            return {}
        tensors = [v for read in self.reads for v in read.values()]
        tensors += [v for b in self.blocks for t in b.values() for n, v in t.items() if "running" not in n]
        units = sum(n for added in self.growth().values() for n in added.values())
        every = self.size + sum(self.outputs) + sum(v.numel() for v in tensors)
        return {"units added so far": units, "all parameters": every}

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """A plain module that answers as the task with this number: the model as wide as it was then.

        It has all outputs of the output layer. Those of classes that the task did not have were never taught to be low: compare
        only those that it had.
        """
        k = self.place(task)
        beside = self._attach(model)
        with plain(unwrap(model)):
            alone = filled(model, self.own[k])
        with self.as_task(k):
            beside.build(alone, self._view())
        Locks().release(alone)
        return alone

    def detach(self, model: nn.Module) -> None:
        """Take off the added units and unlock everything; the model is then that of the first task, with the last's outputs."""
        self._locks.release(model)
        if self._beside is not None:
            self._beside.take_off()
        self._beside = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned; the next ``begin_task`` or ``predict`` puts it on a model."""
        super().load_state_dict(state)
        self._beside = None

    def _attach(self, model: nn.Module) -> Beside:
        if self._beside is None or self._beside.model is not unwrap(model):
            self._beside = Beside(model, self.groups, self.output, self._view, self.free)
        return self._beside

    def _view(self) -> View:
        """What takes part now: for a task that is asked for, its units; else all, and those awake of the current task."""
        if self._asked is None and self.open:
            if not self.live:
                return View()
            return View([*self.blocks, self.live], self.read.get("weight"), self.awake)
        k = len(self.own) - 1 if self._asked is None else self._asked
        blocks = [block for stamp, block in zip(self.stamps, self.blocks, strict=True) if stamp <= k]
        return View(blocks, self.reads[k].get("weight") if k >= 0 else None)

    def _before(self, beside: Beside) -> dict[str, int]:
        """How many units earlier tasks have added to each layer."""
        there = View(self.blocks)
        return {name: there.count(name) for name in beside.made}

    def _lock(self, model: nn.Module) -> None:
        """From the second task on, all of the model but its output layer."""
        self._locks.release(model)
        if len(self.tasks) > 1:
            own = kept(model, self.output, rest=False)
            for name, p in named_with_frozen(model).items():
                if name not in own:  # locked, not frozen: without gradients torch's transformers round in another way
                    self._locks.lock(model, name, torch.ones_like(p, dtype=torch.bool))
            self._locks.hold_statistics(model, {n for n, _ in unwrap(model).named_buffers()})

    def _make(self, beside: Beside, room: dict[str, int]) -> None:
        """Units for the task, asleep: all zero, which no optimizer moves as long as they have no gradient."""
        before = self._before(beside)
        self.live = {
            name: {n: v if "running" in n else nn.Parameter(v) for n, v in tensors.items()}
            for name, tensors in beside.empty(before, room).items()
        }
        self.awake = dict.fromkeys(beside.made, 0)
        if link := beside.feeds.get(beside.head):
            head: Any = beside.model.get_submodule(beside.head).weight
            old = self.reads[-1].get("weight", head.new_zeros(len(head), 0))
            width = (before[link.producer] + room[link.producer]) * link.repeat
            self.read = {"weight": nn.Parameter(grown(old.to(head), (len(head), width)).clone())}

    def _begin(self, task: Task, planned: int | None) -> None:
        """Watch the loop, which may be anybody's."""
        self._task, self._planned, self._looked, self._seen, self._whole = task, planned, False, 0, not self.steps
        self._still = True if self.live else None

    def _watch(self) -> None:
        """Before a step: which of the method's own parameters should move."""
        if not self.tasks:
            raise ValueError(
                f"{type(self).__name__} knows of no task: call begin_task(model, task) before the first step."
            )
        if self._still:  # by value: fused optimizers make no new version of a tensor
            learning = next((p for p in self.parameters() if p.grad is not None and p.grad.any()), None)
            self._probe = None if learning is None else (learning, learning.detach().clone())

    def _notice(self) -> None:
        """After it: whether they have."""
        if self._still and self._probe is not None:
            self._still = torch.equal(*self._probe)
        self.steps += 1

    def _check_loop(self, grows: str) -> None:
        """Tell of a loop that has forgotten something, or planned otherwise than it did."""
        name = type(self).__name__
        if self._seen and not self.steps:
            raise ValueError(
                f"{name}.after_step was not called: without it nothing grows. It follows optimizer.step()."
            )
        if self.live and self._still and self._probe is not None:
            raise ValueError(
                f"The optimizer does not move {name}'s own parameters: make it after begin_task(model, task), of "
                "[*model.parameters(), *method.parameters()]."
            )
        if self.live and self.steps and self._whole and self._planned is None and not self._looked:
            raise ValueError(
                f"{name} has not looked whether to grow, since it does not know how long a task is learned: set task.steps before "
                f"begin_task(model, task), or call {grows} yourself."
            )
        if self.live and self._planned and self._whole and not 0.8 <= self.steps / self._planned <= 1.25:
            warnings.warn(
                f"{self._task} was learned for {self.steps} steps, but {name} had been told {self._planned} (task.steps): it has "
                "grown at the wrong time, or not at all.",
                stacklevel=3,
            )

    def _check(self, model: nn.Module) -> None:
        """Nothing locked has moved, and all is finite."""
        self._locks.check(model, type(self).__name__)
        check_finite({str(i): p for i, p in enumerate([*unwrap(model).parameters(), *self.parameters()])})

    def _settle(self, beside: Beside, alive: dict[str, Tensor]) -> None:
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
        self.size = sum(p.numel() for n, p in named_with_frozen(model).items() if n not in own)
        self.outputs = [*self.outputs[: len(self.tasks) - 1], sum(p.numel() for p in own.values())]
        self.leave(remembered_state(model, own))

    def _groups(self, beside: Beside, name: str) -> tuple[list[Tensor], float]:
        """What decides whether each unit says anything, and its length at first: its scale after BatchNorm, or what it reads."""
        tensors, last = self.live[name], f"norm{len(beside.made[name].norms) - 1}"
        if f"{last}.weight" in tensors:  # which undoes any scale before it
            return [tensors[f"{last}.weight"], tensors[f"{last}.bias"]], 1.0
        return [tensors[n] for n in ("weight", "inner", "bias") if n in tensors], START

    @torch.no_grad()
    def _shrink(self, beside: Beside, share: float) -> None:
        """The group lasso's proximal step for the units awake, by a share of their first length."""
        for name, n in self.awake.items():
            if n:
                groups, size = self._groups(beside, name)
                left = shrink_groups([g[:n] for g in groups], share * size)
                if not left.all():
                    self._silence(beside, name, (~left).nonzero().flatten())

    def _silence(self, beside: Beside, name: str, dead: Tensor) -> None:
        """Nobody reads a unit that reads nothing, so it can go without a trace even where f(0) is not 0."""
        link = beside.made[name]
        read = columns(dead + View(self.blocks).count(name), link.repeat)
        if "out" in self.live[name]:
            self.live[name]["out"][:, columns(dead, link.repeat)] = 0
        if link.consumer in self.live:
            self.live[link.consumer]["inner"][:, read] = 0
        if link.consumer == beside.head:
            self.read["weight"][:, read] = 0

    def _alive(self, beside: Beside) -> dict[str, Tensor]:
        """The units awake that read something."""
        awake = self.awake.items()
        return {n: length([g[:a] for g in self._groups(beside, n)[0]]).nonzero().flatten() for n, a in awake}

    def _hear(self, batch: Batch, out: Tensor) -> None:
        if self._task is None or self._task.valid is None:
            self.heard += float(batch.loss(out))
            self.hearings += 1

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        """On the validation data, or else what was heard in training."""
        self._looked = True
        if self._task is None or self._task.valid is None:
            mean = self.heard / self.hearings if self.hearings else 0.0
            self.heard, self.hearings = 0.0, 0
            return mean
        total, device = [], next(unwrap(model).parameters()).device
        with evaluating(model):
            for batch in self._task.examples(256, "valid", most=2048):
                total.append((float((b := batch.to(device)).loss(model(b.x))) * len(b), len(b)))
        return sum(loss for loss, _ in total) / sum(n for _, n in total)
