"""HAT: every task learns which units it needs, and what it uses is locked for those after it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.data_source import Batches
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.parameters import Params, accumulate_dtype, all_parameters, check_finite, unwrap
from everlearn.core.task import Task, as_task
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import Isolation, kept, remembered_state
from everlearn.runtime import distributed
from everlearn.runtime.randomness import generator
from everlearn.surgery.freezing import FrozenEntries, remove_entry_hooks, seen_by_compiler
from everlearn.surgery.functional import call_with, filled_copy
from everlearn.surgery.resize import cut
from everlearn.surgery.tracing import Link, keeps_units_separate, links, repeat_per_input


@dataclass(eq=False)
class HAT(Isolation):
    """Hard attention to the task (Serrà et al., ICML 2018).

        a = σ(s · e)                                     a gate per unit, e learned for each task
        h ← h · a                                        where the next layer reads it
        s = 1/s_max + (s_max - 1/s_max) (b-1)/(B-1)      over the B batches of an epoch
        L = L_task + strength · Σᵢ aᵢ (1 - uᵢ) / Σᵢ (1 - uᵢ)
        u = max over earlier tasks of their gates        a weight between two used units is locked

    Gates are found by tracing: between two linear or convolution layers with nothing between them that mixes units. What lies
    on no such link (residual streams, attention, stems) is always used, so it is locked after the first task. At the end of a
    task gates become 0 or 1 (e > 0), which makes zero forgetting exact. The output layer is each task's own.

    Args:
        strength: c, the price of a unit that no earlier task uses.
        smax: s_max, how steep gates become.
        anneal: s rises within every "epoch", as in the paper, or once over the whole "task", which needs its planned steps.
        soft: keep gates as they are instead of rounding them, as the paper's code does: earlier tasks then drift, the more the
            smaller smax.
        rest: biases, norms and embeddings: each task's "own", or "frozen" where they belong to units in use.
        groups: which layer's units go where, instead of tracing; see ``everlearn.surgery.tracing.links``.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, and learns how much of the network a task needs",
        con="needs enough steps for its gates to settle; what has no gate is locked after the first task",
        step=1.2,
        copies=(0.0, 0.01),
        needs_task=True,
        zero_forgetting=True,
    )

    strength: Annotated[NonNegative, Search(0.05, 5)] = 0.75
    smax: Annotated[float, Range(1), Search(50, 800)] = 400.0
    anneal: Literal["epoch", "task"] = "epoch"
    soft: bool = False
    rest: Literal["own", "frozen"] = "own"
    groups: dict[str, Any] | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.embedding: Params = {}  # e of the last task, by the name of the layer whose units are gated
        self.masks: list[Params] = []  # the gates of the tasks that have ended
        self.batch = 0  # b, counted from 0
        self.batches: int | None = None  # B
        self.seed = 0
        self._links: list[Link] = []
        self._used: Params = {}
        self._free: Tensor | None = None  # 1 - u of all units, in the order of the embeddings
        self._room = 0.0
        self._factors: Params = {}
        self._untried = False  # whether nobody has tried yet that the links are true
        self._probes: list[tuple[Tensor, Tensor]] | None = (
            None  # a gate and a weight that should move, and where the step began
        )
        self._learn: bool = False  # whether gates were seen to move in this task
        self._examples = 0  # of the first step
        self._rows: int | None = None  # of the task's data

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """New gates; lock the weights between units in use."""
        data, new = as_task(task), self.is_new(task)
        if self.anneal == "task" and data.steps is None:
            raise ValueError('HAT(anneal="task") needs the planned steps of the task: set task.steps.')
        self._kept(model)  # or a wrong name of the output layer would show only at the end
        self._attach(model, data)
        self.check_between_tasks(model, task)
        if self.open_task(task):
            self.batch, self.batches, self._examples = 0, data.steps if self.anneal == "task" else None, 0
        if new:
            self.seed = torch.initial_seed() if len(self.tasks) == 1 else self.seed
            source, like = generator(self.seed, "hat", len(self.tasks)), next(unwrap(model).parameters())
            self.embedding = {
                link.producer: nn.Parameter(
                    torch.randn(link.width, generator=source).to(like.device, accumulate_dtype(like))
                )
                for link in self._links
            }
        self._learn, self._probes = False, None
        self._count(data)
        self._lock(model)

    def protected(self, model: nn.Module, count: int) -> Params:
        """What lies between units that these tasks use."""
        own = self._kept(model)
        used = _union(self.masks[:count])
        parameters = all_parameters(model)
        return {n: self._in_use(n, p, used) >= 1 for n, p in parameters.items() if n not in own}

    def parameters(self) -> list[nn.Parameter]:
        """The embeddings e of the current task."""
        return [e for e in self.embedding.values() if isinstance(e, nn.Parameter)]

    def extra_parameters(self, model: nn.Module) -> int:
        """The gates of all tasks, and what each has for itself."""
        earlier = self.masks[: max(0, len(self.tasks) - 1)]
        return super().extra_parameters(model) + sum(gates.numel() for masks in earlier for gates in masks.values())

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The price of units that are not in use yet."""
        if not (self.open and self.strength and self.embedding):
            return 0.0
        if not self._room:
            return 0.0
        every = (self._scale() * torch.cat(list(self.embedding.values()))).sigmoid()
        asked = every if self._free is None else every.dot(self._free)
        return asked.sum() * (self.strength / self._room)

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Count the examples of the first step, which tell how many batches an epoch has."""
        if self.batches is None:
            self._examples += len(batch)

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        """Give gates the gradient they would have if they were not steep; none to what is locked."""
        self._check_modes(model)
        s = self._scale()
        for e in self.parameters():
            if e.grad is not None:
                steep = ((s * e).clamp(-50, 50).cosh() + 1) / (e.cosh() + 1)
                e.grad.mul_(self.smax / s * steep)
        self._locks.mask_gradients(model)
        if self._factors:
            for name, p in all_parameters(model).items():
                if name in self._factors and p.grad is not None:
                    p.grad.mul_(self._factors[name])
        if not self._learn:
            gate, weight = (_with_gradient(ps) for ps in (self.parameters(), unwrap(model).parameters()))
            self._probes = None if gate is None or weight is None else [(p, p.clone()) for p in (gate, weight)]

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Embeddings stay in [-6, 6], what is locked where it was; the next batch's gates are steeper."""
        self._check_optimizer()
        for e in self.parameters():
            e.clamp_(-6, 6)
        self._locks.restore(model)
        self.batch += 1
        if self.batches is None and self._rows is not None:
            self.batches = -(-self._rows // max(1, int(distributed.sum_across(self._examples))))
        if self.batches is not None and self.batch >= self.batches and self.anneal == "epoch":
            self.batch = 0

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Round the gates, and keep what is the task's own."""
        self._locks.check(model, "HAT")
        check_finite({**dict(unwrap(model).named_parameters()), **self.embedding})
        self.masks = [
            *self.masks[: len(self.tasks) - 1],
            {n: self._settled(e.detach()) for n, e in self.embedding.items()},
        ]
        self.close_task(model, remembered_state(model, self._kept(model)))

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """With the gates of the k-th task and what is its own."""
        self._attach(model)
        with self.as_task(k):
            return call_with(model, self.own[k], x)

    def capacity(self) -> dict[str, float]:
        """Of every gated layer, the share of units that some task uses."""
        used = _union(self.masks)
        return {name: float((u > 0.5).float().mean()) for name, u in used.items()}

    def diagnostics(self) -> dict[str, float]:
        """The share of all gated units that some task uses."""
        used = [u > 0.5 for u in _union(self.masks).values()]
        return {"capacity used": float(torch.cat(used).float().mean())} if used else {}

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """A plain module that answers as the task with this number, without the units that it does not use."""
        k = self.place(task)
        self._attach(model)
        alone = filled_copy(model, self.own[k])
        remove_entry_hooks(alone, Gate)
        remove_entry_hooks(alone, Trial)
        FrozenEntries().release(alone)
        for link in self._links:
            cut(alone, link, self.masks[k][link.producer])
        return alone

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned; the next ``begin_task`` or ``predict`` puts its gates on a model."""
        super().load_state_dict(state)
        self._links, self._untried = [], False

    def detach(self, model: nn.Module) -> None:
        """Take off the gates and unlock everything; the model is then what all tasks have made of it together."""
        remove_entry_hooks(model, Gate)
        remove_entry_hooks(model, Trial)
        self._locks.release(model)

    def gate(self, producer: str, training: bool) -> Tensor | None:
        """The gates of a layer's units for the task that is asked for, or learned; None before the first task."""
        if self._asked is not None:
            return self.masks[self._asked][producer]
        e = self.embedding.get(producer)
        if e is None:
            return None
        return (self._scale() * e).sigmoid() if training and self.open else self._settled(e)

    def _attach(self, model: nn.Module, data: Task | None = None) -> None:
        """Put the gates on the model, each before the layer that reads its units."""
        inner = unwrap(model)
        if not self._links:
            self._links = self._found(inner, data)
        if self._untried and not any(isinstance(hook, Trial) for hook in inner._forward_pre_hooks.values()):
            compiled = any("_orig_mod" in module._modules for module in model.modules())
            inner.register_forward_pre_hook(Trial(self, compiled), with_kwargs=True)
        consumers = [inner.get_submodule(link.consumer) for link in self._links]
        if all(any(_is_gate(hook, self) for hook in m._forward_pre_hooks.values()) for m in consumers):
            return
        remove_entry_hooks(inner, Gate)  # a copied model comes with gates of the method it was copied from
        for link, consumer in zip(self._links, consumers, strict=True):
            consumer.register_forward_pre_hook(Gate(self, link))
        seen_by_compiler(model)

    def _found(self, inner: nn.Module, data: Task | None) -> list[Link]:
        """The links, each tried on some of the data, or else on what the model is first called with in training."""
        remove_entry_hooks(inner, Gate)
        found = links(inner, self.groups)
        known = self.masks[0] if self.masks else self.embedding
        if known:  # what was begun with goes on
            return [link for link in found if link.producer in known]
        self._untried = True
        if data is not None and not isinstance(data.train, Batches) and data.train is not None:
            x = next(data.examples(4)).to(next(inner.parameters()).device).x
            flags = _flags(inner, found, (x,), {})
            if not isinstance(flags, Exception):  # or the model does not take so few
                self._untried = False
                found = self._true(inner, found, flags)
        return self._some(inner, found)

    def try_links(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Try the links on what the model is called with, and take the gates off units that do not stay apart."""
        self._untried = False
        remove_entry_hooks(inner, Trial)
        remove_entry_hooks(inner, Gate)
        flags = _flags(inner, self._links, args, kwargs)
        if isinstance(flags, Exception):
            warnings.warn(
                f"HAT could not try whether the units it gates stay apart ({str(flags)[:100]}): where something mixes them, or they go "
                "elsewhere too, later tasks change what earlier ones answer.",
                UserWarning,
                stacklevel=2,
            )
        else:
            self._links = self._true(inner, self._links, flags)
            self._some(inner, self._links)
            producers = {link.producer for link in self._links}
            self.embedding = {n: e for n, e in self.embedding.items() if n in producers}
            self._lock(inner)
        self._attach(inner)

    def _true(self, inner: nn.Module, found: list[Link], flags: list[bool]) -> list[Link]:
        """The links whose units stay apart; all that somebody has named, or that tasks were learned with, must."""
        false = [link for link, flag in zip(found, flags, strict=True) if not flag]
        if false and (self.groups is not None or self.masks):
            raise ValueError(
                f"{'groups: ' * (self.groups is not None)}the units of {false[0].producer!r} do not go to {false[0].consumer!r} alone, "
                "or are mixed on their way."
            )
        return [link for link in found if link not in false]

    def _some(self, inner: nn.Module, found: list[Link]) -> list[Link]:
        if not found:
            raise ValueError(
                f"HAT finds no units to gate in {type(inner).__name__}: it needs two linear or convolution layers with nothing "
                'between them that mixes units; name them, groups={"conv1": "conv2"}.'
            )
        return found

    def _check_modes(self, model: nn.Module) -> None:
        """Refuse to learn in evaluation mode, where gates are open or shut and have no gradient."""
        inner = unwrap(model)
        resting = [link.consumer for link in self._links if not inner.get_submodule(link.consumer).training]
        if resting:
            raise ValueError(
                f"HAT's gates learn in training mode only, and {', '.join(resting[:3])}{', …' * (len(resting) > 3)} is in evaluation mode: "
                "call model.train() before the loss is taken. To hold the statistics of a BatchNorm, set that layer alone to eval()."
            )

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that moves the model and not the gates."""
        if self._learn or self._probes is None:
            return
        gate_moved, weight_moved = (not torch.equal(p, start) for p, start in self._probes)
        self._learn = gate_moved
        if weight_moved and not gate_moved:
            raise ValueError(
                "The optimizer does not move HAT's gates, so that they would never learn: make it after begin_task(model, task), of "
                "[*model.parameters(), *method.parameters()]."
            )

    def _count(self, data: Task) -> None:
        """How many batches an epoch has, or the examples from which the first step will tell."""
        if self.batches is not None:
            return
        if isinstance(data.train, Batches) or data.train is None:
            self.batches = data.steps if data.train is None else data.steps_per_epoch(1) or data.steps
            if self.batches is None:
                raise ValueError(
                    "HAT must know how many batches an epoch has, and these data do not tell: set task.steps."
                )
        else:
            self._rows = len(data.train)

    def _settled(self, e: Tensor) -> Tensor:
        """The gates as they will be at the end of the task."""
        return (self.smax * e).sigmoid() if self.soft else (e > 0).to(e.dtype)

    def _scale(self) -> float:
        """The slope s."""
        low, last = 1 / self.smax, (self.batches or 2) - 1
        return low + (self.smax - low) * (min(self.batch / last, 1) if last else 1)

    def _kept(self, model: nn.Module) -> Params:
        return kept(model, self.output, self.rest == "own")

    def _lock(self, model: nn.Module) -> None:
        """Lock every weight in so far as both its ends are in use; what has no gate is."""
        self._locks.release(model)
        self._factors, earlier = {}, self.masks[: len(self.tasks) - 1]
        self._used = _union(earlier)
        self._free = torch.cat([1 - u for u in self._used.values()]) if earlier else None
        self._room = sum(len(e) for e in self.embedding.values()) if self._free is None else float(self._free.sum())
        if not earlier:
            return
        inner, kept = unwrap(model), self._kept(model)
        for name, p in all_parameters(model).items():
            if name not in kept:
                used = self._in_use(name, p, self._used)
                self._locks.lock(model, name, used >= 1)
                if self.soft:
                    self._factors[name] = 1 - used
        self._locks.lock_buffers(model, {n for n, _ in inner.named_buffers()} - set(kept))

    def _in_use(self, name: str, p: Tensor, units: Params) -> Tensor:
        """How far each entry of a parameter serves tasks that use these units: the lesser of its two ends."""
        place, _, leaf = name.rpartition(".")
        used = torch.ones_like(p, requires_grad=False)
        for link in self._links:
            u, tail = units[link.producer].to(p), (1,) * (p.dim() - 2)
            if place == link.producer or place in link.norms:
                used = torch.minimum(used, u.view(-1, *(1,) * (p.dim() - 1)))
            if place == link.consumer and leaf == "weight":
                used = torch.minimum(used, repeat_per_input(u, link).view(1, -1, *tail))
        return used


class Gate:
    """A hook before a layer that reads gated units; with a copied model it stays a gate of the same method."""

    def __init__(self, method: HAT, link: Link) -> None:
        self.method, self.link = method, link

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The input, times the gates."""
        gate, x = self.method.gate(self.link.producer, module.training), args[0]
        if gate is None:
            return args
        a = repeat_per_input(gate, self.link).to(x.device, x.dtype)
        return x * a.view([-1] if isinstance(module, nn.Linear) else [-1, *[1] * (x.dim() - 2)]), *args[1:]

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


class Trial:
    """A hook before the model's first pass in training, on which links are tried that no data told of before."""

    def __init__(self, method: HAT, compiled: bool) -> None:
        self.method = method
        self.run = torch.compiler.disable(method.try_links) if compiled else method.try_links

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once, in training mode."""
        if self.method._untried and module.training:
            self.run(module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trial:
        return self


def _flags(
    inner: nn.Module, found: list[Link], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[bool] | Exception:
    """Of each link whether it is true, or why that could not be tried."""
    try:
        return [keeps_units_separate(inner, link, *args, kwargs=kwargs) for link in found]
    except (RuntimeError, ValueError, TypeError) as error:
        return error


def _with_gradient(parameters: Iterable[Tensor]) -> Tensor | None:
    """The first that a step should move."""
    return next((p for p in parameters if p.grad is not None and not p.grad.is_sparse and p.grad.any()), None)


def _is_gate(hook: Any, method: HAT) -> bool:
    return isinstance(hook, Gate) and hook.method is method


def _union(masks: list[Params]) -> Params:
    """Of all masks the largest, unit by unit."""
    return {n: torch.stack([m[n] for m in masks]).amax(0) for n in masks[0]} if masks else {}
