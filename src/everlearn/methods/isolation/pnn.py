"""PNN: a network of its own for every task, which looks at what the earlier ones make of the input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.forward import arguments, forward, read_outputs
from everlearn.core.parameters import Params, check_finite, unwrap
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import Isolation
from everlearn.methods.isolation.lateral_columns import ColumnStack, key, leads, take_notes, visible
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.functional import filled_copy
from everlearn.surgery.hooks import move_like, remove_hooks, temporarily_unhooked, without_hooks


@dataclass(eq=False)
class PNN(Isolation):
    """Progressive neural networks (Rusu et al., 2016).

        task k: a fresh network, column k; the columns of earlier tasks take part, frozen and in evaluation mode
        L = L_task, in column k and its laterals
        layer:  h_i⁽ᵏ⁾ = f( W_i h_{i-1}⁽ᵏ⁾ + U σ(V [α_j h_{i-1}⁽ʲ⁾ for j < k]) ),  σ = ReLU, α_j a number

    Your model is always the newest column: ``model(x)`` is the current task's network, in any loop. When a task begins, the
    column before it is put away and the model starts anew, in place. Laterals lead into every ``nn.Linear`` and ``nn.Conv``
    that was called in the first task with an input that something had learned to make; so not into the first layer, nor inside
    ``nn.MultiheadAttention``, which calls no layers. Their parameters are ``method.parameters()``.

    Args:
        laterals: "adapter", as above; "linear": Σ_j U_j h_{i-1}⁽ʲ⁾; or "none": separate networks, the measure of what laterals
            bring.
        factory: makes a fresh model, without arguments; by default each layer's ``reset_parameters`` does, and what has none
            starts where the first task did. Frozen parameters keep their values.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, and late tasks learn as well as early ones",
        con="memory and time grow with every task",
        step=4.3,
        step_growth=1.9,
        copies=(0.0, 1.0, 0.33),
        needs_task=True,
        zero_forgetting=True,
        grows=True,
    )

    laterals: Literal["adapter", "linear", "none"] = "adapter"
    factory: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers: list[str] = []  # those that take laterals
        self.links: list[dict[str, Params]] = []  # of every column, its laterals by layer
        self.sizes: list[int] = []  # parameters of every column
        self.start: Params = {}  # what no layer can reset, as it was before the first task
        self.seed = 0
        self._tower: ColumnStack | None = None
        self._live: nn.ModuleDict | None = None  # the laterals that learn

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Put the last column away, start a new one in place, and lay its laterals."""
        inner, new = unwrap(model), self.is_new(task)
        fresh = self._fresh(inner) if new else {}
        self.open_task(task)
        k = len(self.tasks) - 1
        if new:
            self._live = None
            with torch.no_grad():
                for name, v in fresh.items():
                    _tensors(inner)[name].copy_(v)
        if new and not k:
            self.seed, self.start = torch.initial_seed(), _clones(_without_reset(inner))
        self._attach(model)

    def parameters(self) -> list[nn.Parameter]:
        """Those of the laterals into the newest column."""
        return [] if self._live is None else list(self._live.parameters())

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Keep the column and its laterals as they are."""
        inner, learned = unwrap(model), self.parameters()
        check_finite({**dict(inner.named_parameters()), **{str(i): p for i, p in enumerate(learned)}})
        self.close_task(model, _clones(_tensors(inner)))
        k = len(self.own) - 1
        self.sizes[k:] = [sum(p.numel() for p in inner.parameters())]
        self._keep_links()
        for p in learned:
            p.grad = None  # a live optimizer would go on moving them
        self._columns(model, k).shorten(k)

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """What column k says, with its laterals."""
        tower = self._columns(model, k + 1)
        if self.laterals == "none":
            return forward(tower.columns[k], x)
        args, kwargs = arguments(tower.columns[k], x)
        return read_outputs(tower.run(k + 1, *args, **kwargs)[0])

    def current(self, model: nn.Module, x: Any) -> Tensor:
        """The newest column, with its laterals."""
        live = self._laterals(model) if self.tasks else None
        if live is None or leads(unwrap(model), live):
            return super().current(model, x)
        with temporarily_unhooked(unwrap(model)):
            self._attach(model)
            return super().current(model, x)

    def growth(self) -> dict[str, int]:
        """Parameters of every column, and of the laterals that lead into it."""
        count = {}
        for task, own, links in zip(self.tasks, self.sizes, self.links, strict=False):
            count[f"column {task}"] = own
            count[f"laterals {task}"] = sum(v.numel() for link in links.values() for v in link.values())
        return count

    def extra_parameters(self, model: nn.Module) -> int:
        """The columns of earlier tasks, and the laterals into all columns."""
        kept = self.links if self._live is None else self.links[: len(self.tasks) - 1]
        return super().extra_parameters(model) + sum(
            v.numel() for links in kept for t in links.values() for v in t.values()
        )

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """A module of its own that answers as the task with this number: the columns up to it and their laterals."""
        k = self.place(task)
        tower = self._columns(model, k + 1)
        if self.laterals == "none":
            return copy.deepcopy(tower.columns[k])
        alone = copy.deepcopy(tower)
        alone.shorten(k + 1)
        return alone

    def detach(self, model: nn.Module) -> None:
        """No laterals any more: the model stays the newest column, without what it was told by the others."""
        remove_hooks(unwrap(model))

    def state_dict(self) -> dict[str, Any]:
        """With the laterals as they are just now."""
        self._keep_links()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned; the next ``begin_task`` lays the laterals."""
        self._live = self._tower = None
        super().load_state_dict(state)

    def _keep_links(self) -> None:
        """The learning laterals among those kept; the first column has none."""
        k = len(self.tasks) - 1
        if k == 0 or (k > 0 and self.laterals == "none"):
            self.links[k:] = [{}]
        elif self._live is not None:
            self.links[k:] = [
                {n: _clones(self._live[key(n)].state_dict()) for n in self.layers if key(n) in self._live}
            ]

    def _laterals(self, model: nn.Module) -> nn.ModuleDict | None:
        """Those into the newest column, where it is; after loading a checkpoint as they were kept."""
        k = len(self.tasks) - 1
        if k and self._live is None and self.laterals != "none":
            before = self._columns(model, k)
            with seeded(derive(self.seed, "laterals", k)):
                self._live = before.laterals(unwrap(model), k, self.laterals == "adapter", *self.links[k : k + 1])
        if self._live is not None:
            move_like(self._live, unwrap(model))
        return self._live

    def _attach(self, model: nn.Module) -> None:
        """Hooks on the user's model: in the first task to see which layers are called, then to lay the laterals."""
        k, live = len(self.tasks) - 1, self._laterals(model)
        inner, compiled = unwrap(model), any("_orig_mod" in m._modules for m in model.modules())
        remove_hooks(inner)
        if compiled:
            torch.compiler.reset()  # or what was compiled before would go on without the hooks
        if k == 0:
            take_notes(inner, self.layers)
        elif live is not None:
            self._columns(model, k).lead_into(inner, k, live, compiled)

    def _columns(self, model: nn.Module, count: int) -> ColumnStack:
        """The columns put away, at least so many of them, where the model is."""
        inner = unwrap(model)
        tower = self._tower = self._tower or ColumnStack(self.layers)
        for k in range(len(tower), count):
            with without_hooks(inner):
                net = filled_copy(inner, self.own[k])
            with seeded(0):
                tower.add(net, tower.laterals(net, k, True, self.links[k]))
        move_like(tower, inner)
        return tower

    def _fresh(self, inner: nn.Module) -> Params:
        """What a new column starts with; nothing new in the first. All that can go wrong with a new task goes wrong here."""
        self._check(inner)
        if not self.tasks:
            return {}
        with without_hooks(inner):
            made = copy.deepcopy(inner)
        device = next(inner.parameters()).device
        with torch.no_grad(), seeded(derive(self.seed, "column", len(self.tasks)), device):
            if self.factory is None:
                for name, v in _tensors(made).items():
                    if name in self.start and v.shape == self.start[name].shape:
                        v.copy_(self.start[name])
                for module in reversed(list(made.modules())):  # as when it was built: parts first
                    if reset := _reset(module):
                        reset()
            else:
                made = unwrap(self.factory())
        there, frozen = _tensors(made), {n for n, p in inner.named_parameters() if not p.requires_grad}
        for name, v in _tensors(inner).items():
            if name not in there or there[name].shape != v.shape:
                got = f"has shape {tuple(there[name].shape)}" if name in there else "is missing"
                raise ValueError(
                    f"PNN.factory must make a model like the one that learns: {name} {got}, it should have {tuple(v.shape)}."
                )
        return {n: there[n].detach() for n in _tensors(inner) if n not in frozen}

    def _check(self, inner: nn.Module) -> None:
        if self.laterals == "none":
            return
        parts = [m for m in inner.modules() if any(True for _ in m.parameters(recurse=False))]
        if not visible(inner) or len(parts) < 2 or (self.tasks and not self.layers):
            when = " that is called in the first task, through model(x) and with gradients" if self.tasks else ""
            raise ValueError(
                f"PNN finds no layer of {type(inner).__name__} for laterals to lead into: it needs an nn.Linear or nn.Conv "
                f"behind the first layer{when}."
            )


def _tensors(net: nn.Module) -> Params:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _clones(tensors: Params) -> Params:
    return {n: v.detach().clone() for n, v in tensors.items()}


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """How a module draws its own parameters anew, if it can and they are not frozen."""
    own = list(module.parameters(recurse=False))
    how = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return how if callable(how) and (not own or any(p.requires_grad for p in own)) else None


def _without_reset(net: nn.Module) -> Params:
    """Buffers, and the parameters that no module draws anew."""
    drawn = {id(p) for m in net.modules() if _reset(m) for p in m.parameters(recurse=False)}
    return {n: v for n, v in _tensors(net).items() if id(v) not in drawn}
