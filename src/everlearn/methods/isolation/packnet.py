"""PackNet: many tasks in one network, each in the weights that those before it can do without."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from everlearn.core.hyperparameters import Range, Search
from everlearn.core.parameters import Params, all_parameters, check_finite, unwrap
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import Isolation, kept, remembered_state
from everlearn.surgery.freezing import FrozenEntries
from everlearn.surgery.functional import call_with, filled_copy

Share = Annotated[float, Range(0, 0.999)]


@dataclass(eq=False)
class PackNet(Isolation):
    """PackNet (Mallya & Lazebnik, CVPR 2018).

        task k:     all weights that no task owns become its own; those of earlier tasks take part but are locked
        pruning:    of each layer's weights owned by k the smallest share in magnitude is given up: zero, owned by nobody
        retraining: what is left learns on, the given-up ones stay zero
        f(x, k):    weights owned by tasks up to k, zero elsewhere
        L = L_task, in the weights that task k owns

    Any weight that connects units is shared out like this (linear, convolution, attention, recurrent), if it is not frozen. The
    output layer is each task's own. A loop of your own speaks ``before_step`` and ``after_step``; set
    ``task.steps``, or call ``prune_now(model)`` when the last third begins, or else pruning waits for ``end_task`` and nothing
    is retrained.

    Args:
        prune: share of its weights that a task gives up.
        first: the same for the first task.
        retrain: share of a task's steps that come after pruning.
        rest: biases, norms and embeddings: "frozen" after the first task, as in the paper, or each task's "own".
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, in one network of constant size",
        con="every task takes weights, and some day none are left",
        step=1.0,
        copies=(0.25, 0.01),
        needs_task=True,
        zero_forgetting=True,
    )

    prune: Annotated[Share, Search(0.3, 0.9, log=False)] = 0.75
    first: Share = 0.5
    retrain: Annotated[float, Range(0, 1)] = 1 / 3
    rest: Literal["frozen", "own"] = "frozen"
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.owner: Params = {}  # of every shared weight: 0 for nobody, k for the k-th task, counted from 1
        self.pruned: bool = False
        self.steps = 0
        self._due: int | None = None
        self._told: set[str] = set()  # layers of which it was said that they stay locked

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Hand all free weights to the task and lock those of the others."""
        self.check_between_tasks(model, task)
        self._take_stock(model, task)
        if self.is_new(task):
            self._check_room(task)
        if self.open_task(task):
            self.steps, self.pruned = 0, False
            for owner in self.owner.values():
                owner[owner == 0] = len(self.tasks)
        planned = getattr(task, "steps", None)
        self._due = None if planned is None else max(1, round(planned * (1 - self.retrain)))
        self._lock(model)

    def protected(self, model: nn.Module, count: int) -> Params:
        """The weights of these tasks, and what all tasks have in common."""
        own = self._kept(model)
        masks = {}
        for name, p in all_parameters(model).items():
            if name in self.owner:
                owner = self.owner[name].to(p.device)
                masks[name] = (owner > 0) & (owner <= count)
            elif name not in own:
                masks[name] = torch.ones_like(p, dtype=torch.bool)
        return masks

    def before_step(self, model: nn.Module) -> None:
        """No gradient for what is locked."""
        self._locks.mask_gradients(model)

    def after_step(self, model: nn.Module) -> None:
        """What is locked goes back to where it was; when it is time, prune."""
        self._locks.restore(model)
        self.steps += 1
        if self.steps == self._due and not self.pruned:
            self.prune_now(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Prune, if that is not done yet, and keep what is the task's own."""
        if self.open and not self.pruned:
            self.prune_now(model)
        self._locks.check(model, "PackNet")
        check_finite(dict(unwrap(model).named_parameters()))
        self.close_task(model, remembered_state(model, self._kept(model)))

    @torch.no_grad()
    def prune_now(self, model: nn.Module) -> None:
        """Give up the smallest of the current task's weights, layer by layer; the rest learns on."""
        if not self.open or self.pruned:
            raise ValueError(f"There is nothing to prune: {'it is done' if self.open else 'no task is being learned'}.")
        self._locks.check(model, "PackNet")
        k, share = len(self.tasks), self.first if len(self.tasks) == 1 else self.prune
        directions = _directions(model)
        for name, p in self._weights(model).items():
            owner = self.owner[name]
            size = p.abs()[owner == k]
            if (count := min(round(share * size.numel()), size.numel() - 1)) > 0:  # or small layers would never fill up
                given_up = (owner == k) & (p.abs() <= size.kthvalue(count).values)
                if name in directions:
                    given_up &= ~_last_of_each_slice(p, given_up | (owner == 0), directions[name])
                p[given_up] = 0
                owner[given_up] = 0
        self.pruned = True
        self._lock(model)

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """With the weights of tasks up to the k-th and what is its own."""
        return call_with(model, self._up_to(model, k), x)

    def capacity(self) -> dict[str, float]:
        """Of every layer, the share of weights that some task owns."""
        return {name: float((owner > 0).float().mean()) for name, owner in self.owner.items()}

    def diagnostics(self) -> dict[str, float]:
        """The share of all weights that some task owns."""
        owned = [(int((owner > 0).sum()), owner.numel()) for owner in self.owner.values()]
        return {"capacity used": sum(a for a, _ in owned) / sum(n for _, n in owned)} if owned else {}

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """A plain module that answers as the task with this number, with zeros where weights are not its own."""
        alone = filled_copy(model, self._up_to(model, self.place(task)))
        FrozenEntries().release(alone)
        return alone

    def detach(self, model: nn.Module) -> None:
        """Unlock everything; the model stays as the last task uses it."""
        self._locks.release(model)

    def _weights(self, model: nn.Module) -> Params:
        """The parameters that tasks share out among themselves."""
        return {n: p for n, p in all_parameters(model).items() if n in self.owner}

    def _take_stock(self, model: nn.Module, task: Any) -> None:
        """Note the weights to be shared out; what was frozen in an earlier task took part in it, and stays as it is."""
        ended = len(self.tasks) - (not self.is_new(task))
        earlier = self.checksums[ended - 1] if ended else {}
        own = kept(model, self.output, rest=True)
        thawed = []
        for name, p in all_parameters(model).items():
            if name in self.owner:
                self.owner[name] = self.owner[name].to(p.device)
            elif name not in own and p.requires_grad and name in earlier:
                thawed.append(name)
            elif name not in own and p.requires_grad:
                self.owner[name] = torch.zeros_like(p, dtype=torch.uint8)
        if not self.owner:
            frozen = [n for n, p in all_parameters(model).items() if n not in own and not p.requires_grad]
            if frozen:
                raise ValueError(
                    f"PackNet shares out trainable weights, and besides the output layer all are frozen "
                    f"({', '.join(frozen[:3])}{', …' * (len(frozen) > 3)} have requires_grad=False): set requires_grad to True for those "
                    "that are to learn before the first task begins. Where only the output layer is to learn, no sharing out is needed."
                )
            raise ValueError("PackNet finds no weights to share out besides the output layer: use a deeper model.")
        if new := [name for name in thawed if name not in self._told]:
            self._told.update(new)
            warnings.warn(
                f"PackNet keeps {', '.join(new[:4])}{', …' * (len(new) > 4)} locked: frozen while earlier tasks were learned, they are "
                "part of those. Weights are shared out that are trainable when the first task begins.",
                UserWarning,
                stacklevel=3,
            )

    def _kept(self, model: nn.Module) -> Params:
        return kept(model, self.output, self.rest == "own")

    def _up_to(self, model: nn.Module, k: int) -> Params:
        """What the k-th task, counted from 0, sees."""
        masked = {}
        for name, p in self._weights(model).items():
            owner = self.owner[name].to(p.device)
            masked[name] = torch.where((owner > 0) & (owner <= k + 1), p, 0)
        return {n: v.detach() for n, v in {**masked, **self.own[k]}.items()}

    def _lock(self, model: nn.Module) -> None:
        self._locks.release(model)
        k, weights, kept = len(self.tasks), self._weights(model), self._kept(model)
        for name in weights:
            self._locks.lock(model, name, self.owner[name] != k)
        if k > 1:
            for name, p in all_parameters(model).items():
                if name not in weights and name not in kept:
                    self._locks.lock(model, name, torch.ones_like(p, dtype=torch.bool))
            self._locks.lock_buffers(model, {n for n, _ in unwrap(model).named_buffers()} - set(kept))

    def _check_room(self, task: Any) -> None:
        before = len(self.tasks)
        if before == 255:
            raise ValueError("PackNet numbers the owners of weights up to 255; this is one task more.")
        if not any((owner == 0).any() for owner in self.owner.values()):
            raise ValueError(
                f"PackNet has no free weights left for {task}: all are owned by the {before} tasks before it. Use a wider "
                f"network, or give up a larger share (prune={self.prune:g}, first={self.first:g})."
            )


def _directions(model: nn.Module) -> dict[str, int]:
    """The weights that ``weight_norm`` divides by their norm, by name, each with the dimension of which every slice has its own.

    A slice of zeros would have no direction, and all that is computed from it would be NaN.
    """
    found = {}
    for place, module in unwrap(model).named_modules():
        if isinstance(module, _WeightNorm):
            parent, _, _ = place.rpartition(".")
            found[f"{parent}.original1"] = module.dim
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                found[f"{place}.{hook.name}_v".lstrip(".")] = hook.dim
    return found


def _last_of_each_slice(weight: Tensor, zero: Tensor, dim: int) -> Tensor:
    """Of every slice along a dimension that would be zero all over, its largest entry; -1 stands for the tensor as a whole."""
    whole = dim == -1
    size = weight.detach().abs()
    slices = size.reshape(1, -1) if whole else size.movedim(dim, 0).flatten(1)
    gone = zero.reshape(1, -1) if whole else zero.movedim(dim, 0).flatten(1)
    largest = torch.zeros_like(gone).scatter_(1, slices.argmax(1, keepdim=True), True)
    last = largest & gone.all(1, keepdim=True)
    if whole:
        return last.reshape(weight.shape)
    shape = size.movedim(dim, 0).shape
    return last.reshape(shape).movedim(0, dim)
