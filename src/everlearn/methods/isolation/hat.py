"""Hard attention to the task: each task learns gates on units, and weights between its units are locked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.parameters import Params, accumulate_dtype, all_parameters, check_finite, refuse_sharded, unwrap
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import copy_task_params, select_task_params
from everlearn.methods.isolation.gates import GatedUnits, cumulative_gates
from everlearn.runtime import distributed
from everlearn.runtime.randomness import generator
from everlearn.surgery.functional import call_with, filled_copy
from everlearn.surgery.hooks import remove_hooks
from everlearn.surgery.resize import cut
from everlearn.surgery.tracing import repeat_per_input


@dataclass(eq=False)
class HAT(GatedUnits):
    """Hard attention to the task (Serrà et al., ICML 2018): learn which units a task needs, and lock their weights.

        a = σ(s · e)                                     a gate per unit, e learned for each task
        h ← h · a                                        at the input of the next layer
        s = 1/s_max + (s_max - 1/s_max) (b-1)/(B-1)      over the B batches of an epoch
        L = L_task + strength · Σᵢ aᵢ (1 - uᵢ) / Σᵢ (1 - uᵢ)
        u = max over earlier tasks of their gates        a weight between two used units is locked

    Forward passes on a few examples show where units are: between two linear or convolution layers with nothing
    between them that mixes units. Anything else (residual streams, attention, stems) has no gate, so it counts as used
    and is locked after the first task. At the end of a task gates become 0 or 1 (e > 0), which makes zero forgetting
    exact. Each task has an output layer of its own.

    Args:
        strength: c, the cost of a unit that no earlier task uses.
        smax: s_max, the final slope of the gates.
        anneal: s rises within every "epoch", as in the paper, or once over the "task", which needs its planned steps.
        soft: keep the gates σ(s_max · e) instead of rounding them, as the paper's code does. Outputs of earlier tasks
            then drift, the more the smaller smax is.
        rest: biases, norms and embeddings: each task's "own", or "frozen" if they belong to used units.
        groups: links between layers, instead of those found; see ``everlearn.surgery.tracing.links``.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, learns how much each task needs",
        con="needs many steps; layers without gates freeze early",
        step=1.2,
        copies=(0.0, 0.01),
        needs_task=True,
        zero_forgetting=True,
    )

    penalty_uses_batch = False

    strength: Annotated[NonNegative, Search(0.05, 5)] = 0.75
    smax: Annotated[float, Range(1), Search(50, 800)] = 400.0
    anneal: Literal["epoch", "task"] = "epoch"
    soft: bool = False
    rest: Literal["own", "frozen"] = "own"
    groups: dict[str, Any] | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed = 0
        self._free: Tensor | None = None  # 1 - u of all units, in the order of the embeddings; None in the first task
        self._num_free = 0.0  # Σᵢ (1 - uᵢ)
        self._gradient_factors: Params = {}

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Initialize the embeddings e, and lock the weights between used units."""
        refuse_sharded(model, type(self).__name__)
        data = as_task(task)
        is_new = self.is_new(task)
        planned_batches = None
        if self.anneal == "task":
            planned_batches = data.steps
            if planned_batches is None:
                raise ValueError('HAT(anneal="task") needs the planned steps of the task: set task.steps.')
        self._select_task_params(model)  # raises now if ``output`` names no layer, not after training
        self._attach_gates(model, task)
        self.check_between_tasks(model, task)

        if self.open_task(task):
            self._reset_batch_count(planned_batches)
        if is_new:
            self._init_embeddings(model)
        self._gates_moved = False
        self._probes = None
        self._read_epoch_length(data)
        self._lock(model)

    def _init_embeddings(self, model: nn.Module) -> None:
        """Draw e from a standard normal distribution, in at least single precision."""
        if len(self.tasks) == 1:
            self.seed = distributed.initial_seed()
        rng = generator(self.seed, "hat", len(self.tasks))
        reference = next(unwrap(model).parameters())
        self.embedding = {}
        for link in self._links:
            e = torch.randn(link.width, generator=rng).to(reference.device, accumulate_dtype(reference))
            self.embedding[link.producer] = nn.Parameter(e)

    def gate(self, producer: str, training: bool) -> Tensor | None:
        """Return the gates a of a layer's units for the active task; None before the first task."""
        if self._active_task is not None:
            return self.masks[self._active_task][producer]
        e = self.embedding.get(producer)
        if e is None:
            return None
        if training and self.is_open:
            return (self._scale() * e).sigmoid()
        return self._final_gate(e)

    def _final_gate(self, e: Tensor) -> Tensor:
        """Return the gates at the end of the task: e > 0, or σ(s_max · e) with ``soft``."""
        if self.soft:
            return (self.smax * e).sigmoid()
        return (e > 0).to(e.dtype)

    def _scale(self) -> float:
        """Compute the slope s = 1/s_max + (s_max - 1/s_max) (b-1)/(B-1); ``batch`` is b - 1."""
        last_batch = (self.batches or 2) - 1
        progress = min(self.batch / last_batch, 1) if last_batch else 1
        return 1 / self.smax + (self.smax - 1 / self.smax) * progress

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Compute strength · Σᵢ aᵢ (1 - uᵢ) / Σᵢ (1 - uᵢ)."""
        if not (self.is_open and self.strength and self.embedding and self._num_free):
            return 0.0
        a = (self._scale() * torch.cat(list(self.embedding.values()))).sigmoid()
        # In the first task u = 0, and the cost is the sum of all gates.
        cost = a.sum() if self._free is None else a.dot(self._free)
        return cost * (self.strength / self._num_free)

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        """Compensate the gradients of e for the slope of the gates, and zero those of locked weights."""
        self._check_modes(model)

        # As in the paper: the gradient of σ(s · e) is replaced by s_max times that of σ(e).
        s = self._scale()
        for e in self.parameters():
            if e.grad is not None:
                slope_ratio = ((s * e).clamp(-50, 50).cosh() + 1) / (e.cosh() + 1)
                e.grad.mul_(self.smax / s * slope_ratio)

        # Soft gates lock weights in part: their gradients are scaled by 1 - min(uᵢ, uⱼ).
        self._locks.mask_gradients(model)
        if self._gradient_factors:
            for name, p in all_parameters(model).items():
                if name in self._gradient_factors and p.grad is not None:
                    p.grad.mul_(self._gradient_factors[name])
        self._record_probes(model)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Clamp e to [-6, 6], restore locked weights and advance the annealing."""
        self._check_optimizer()
        for e in self.parameters():
            e.clamp_(-6, 6)
        self._locks.restore(model)
        self._advance_batch(restart=self.anneal == "epoch")

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Round the gates, and store the parameters that the task has for itself."""
        self._locks.check(model)
        check_finite({**dict(unwrap(model).named_parameters()), **self.embedding})
        gates = {name: self._final_gate(e.detach()) for name, e in self.embedding.items()}
        self.masks = [*self.masks[: len(self.tasks) - 1], gates]
        self.close_task(model, copy_task_params(model, self._select_task_params(model)))

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute outputs with the gates of task k and the parameters that it has for itself."""
        self._attach_gates(model)
        with self.using_task(k):
            return call_with(model, self.task_params[k], x)

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """Copy the sub-network of the task with this id into a plain module, without the units it does not use."""
        k = self.find_task_index(task)
        self._attach_gates(model)
        module = filled_copy(model, self.task_params[k])
        remove_hooks(module)
        for link in self._links:
            cut(module, link, self.masks[k][link.producer])
        return module

    def protected_entries(self, model: nn.Module, count: int) -> Params:
        """Return masks of the weights between units that the first ``count`` tasks use."""
        u = cumulative_gates(self.masks[:count])
        return {name: usage >= 1 for name, usage in self._compute_usage(model, u)}

    def _lock(self, model: nn.Module) -> None:
        """Lock each weight whose two ends are used; with ``soft``, scale its gradient by 1 - usage."""
        self._locks.release(model)
        self._gradient_factors = {}
        earlier_masks = self.masks[: len(self.tasks) - 1]
        if not earlier_masks:
            self._free = None
            self._num_free = sum(len(e) for e in self.embedding.values())
            return

        u = cumulative_gates(earlier_masks)
        self._free = torch.cat([1 - used for used in u.values()])
        self._num_free = float(self._free.sum())
        masks = {}
        for name, usage in self._compute_usage(model, u):
            masks[name] = usage >= 1
            if self.soft:
                self._gradient_factors[name] = 1 - usage
        self._locks.lock(model, masks)
        shared_buffers = {n for n, _ in unwrap(model).named_buffers()} - set(self._select_task_params(model))
        self._locks.lock_buffers(model, shared_buffers)

    def _compute_usage(self, model: nn.Module, u: Params) -> Iterator[tuple[str, Tensor]]:
        """Compute min(uᵢ, uⱼ) of each shared parameter from the two units it connects; 1 for units without a gate."""
        task_params = self._select_task_params(model)
        for name, p in all_parameters(model).items():
            if name in task_params:
                continue
            layer, _, leaf = name.rpartition(".")
            usage = torch.ones_like(p, requires_grad=False)
            for link in self._links:
                u_link = u[link.producer].to(p)
                if layer == link.producer or layer in link.norms:
                    usage = torch.minimum(usage, u_link.view(-1, *[1] * (p.dim() - 1)))
                if layer == link.consumer and leaf == "weight":
                    usage = torch.minimum(usage, repeat_per_input(u_link, link).view(1, -1, *[1] * (p.dim() - 2)))
            yield name, usage

    def _select_task_params(self, model: nn.Module) -> Params:
        return select_task_params(model, self.output, rest=self.rest == "own")
