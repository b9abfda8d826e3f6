"""PackNet: several tasks in one network, each in the weights that pruning has freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.hyperparameters import Range, Search
from everlearn.core.parameters import Params, all_parameters, check_finite, refuse_sharded, unwrap
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import copy_task_params, select_task_params
from everlearn.methods.isolation.pruning import WeightOwners, find_normalized_weights, largest_of_zero_slices
from everlearn.surgery.functional import call_with, filled_copy
from everlearn.surgery.hooks import remove_hooks

Share = Annotated[float, Range(0, 0.999)]


@dataclass(eq=False)
class PackNet(WeightOwners):
    """PackNet (Mallya & Lazebnik, CVPR 2018): prune after each task, and train the pruned weights on the next.

        task k:     trains all free weights, which it then owns; weights of earlier tasks are used but locked
        pruning:    in each layer, the given share of k's weights with the smallest magnitudes is set to zero and freed
        retraining: the remaining weights of k train further, freed weights stay zero
        f(x, k):    weights owned by tasks up to k, zero elsewhere
        L = L_task, in the weights that task k owns

    Every trainable weight that connects units is divided among the tasks: linear, convolution, attention, recurrent.
    Each task has an output layer of its own. A custom loop calls ``before_step`` and ``after_step``. It also sets
    ``task.steps``, or calls ``prune_now(model)`` when the last third of the steps begins. Otherwise ``end_task``
    prunes, and nothing is retrained.

    Args:
        prune: share of its weights that a task frees.
        first: the same for the first task.
        retrain: share of a task's steps that come after pruning.
        rest: biases, norms and embeddings: "frozen" after the first task, as in the paper, or each task's "own".
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, in one network of constant size",
        con="every task uses up weights, until none are left",
        step=1.1,
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
        self.pruned: bool = False
        self.steps = 0
        self._pruning_step: int | None = None

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Assign all free weights to the task and lock the others."""
        refuse_sharded(model, type(self).__name__)
        self.check_between_tasks(model, task)
        self._register_weights(model, task, self.output)
        if self.is_new(task) and not any((owner == 0).any() for owner in self.owner.values()):
            raise ValueError(
                f"PackNet has no free weights left for {task}: all are owned by the {len(self.tasks)} tasks before it. "
                f"Use a wider network, or free a larger share (prune={self.prune:g}, first={self.first:g})."
            )

        if self.open_task(task):
            self.steps = 0
            self.pruned = False
            for owner in self.owner.values():
                owner[owner == 0] = len(self.tasks)

        # The retraining phase is the last share of the planned steps.
        planned_steps = getattr(task, "steps", None)
        self._pruning_step = None
        if planned_steps is not None:
            self._pruning_step = max(1, round(planned_steps * (1 - self.retrain)))
        self._lock(model)

    def before_step(self, model: nn.Module) -> None:
        """Zero the gradients of locked weights."""
        self._locks.mask_gradients(model)

    def after_step(self, model: nn.Module) -> None:
        """Restore locked weights, and prune when the retraining phase begins."""
        self._locks.restore(model)
        self.steps += 1
        if self.steps == self._pruning_step and not self.pruned:
            self.prune_now(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Prune, unless that is done, and store the parameters that the task has for itself."""
        if self.is_open and not self.pruned:
            self.prune_now(model)
        self._locks.check(model)
        check_finite(dict(unwrap(model).named_parameters()))
        self.close_task(model, copy_task_params(model, self._select_task_params(model)))

    @torch.no_grad()
    def prune_now(self, model: nn.Module) -> None:
        """Zero and free the smallest weights of the current task, layer by layer."""
        if not self.is_open:
            raise ValueError("There is nothing to prune: no task is being learned.")
        if self.pruned:
            raise ValueError("There is nothing to prune: it is done.")
        self._locks.check(model)

        k = len(self.tasks)
        share = self.first if k == 1 else self.prune
        normalized_weights = find_normalized_weights(model)
        for name, p in self._owned_weights(model).items():
            owner = self.owner[name]
            magnitudes = p.abs()[owner == k]

            # At least one weight stays owned, or small layers would never fill up.
            count = min(round(share * magnitudes.numel()), magnitudes.numel() - 1)
            if count <= 0:
                continue
            is_freed = (owner == k) & (p.abs() <= magnitudes.kthvalue(count).values)
            if name in normalized_weights:
                # A slice of zeros would have no direction.
                is_zero = is_freed | (owner == 0)
                is_freed &= ~largest_of_zero_slices(p, is_zero, dim=normalized_weights[name])
            p[is_freed] = 0
            owner[is_freed] = 0

        self.pruned = True
        self._lock(model)

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute outputs with the weights of tasks up to k and the parameters that k has for itself."""
        return call_with(model, self._subnetwork(model, k), x)

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """Copy the sub-network of the task with this id into a plain module, with zeros for weights of later tasks."""
        module = filled_copy(model, self._subnetwork(model, self.find_task_index(task)))
        remove_hooks(module)
        return module

    def detach(self, model: nn.Module) -> None:
        """Unlock everything; the model stays the sub-network of the last task."""
        self._locks.detach(model)

    def _subnetwork(self, model: nn.Module, k: int) -> Params:
        """Return the parameters and buffers of task k, counted from 0; owners count from 1."""
        subnetwork = {}
        for name, p in self._owned_weights(model).items():
            owner = self.owner[name].to(p.device)
            subnetwork[name] = torch.where((owner > 0) & (owner <= k + 1), p, 0)
        subnetwork |= self.task_params[k]
        return {n: v.detach() for n, v in subnetwork.items()}

    def _select_task_params(self, model: nn.Module) -> Params:
        return select_task_params(model, self.output, rest=self.rest == "own")

    def _lock(self, model: nn.Module) -> None:
        """Lock the weights that the current task does not own, and after the first task the rest."""
        self._locks.release(model)
        k = len(self.tasks)
        masks = {name: self.owner[name] != k for name in self._owned_weights(model)}
        if k > 1:
            task_params = self._select_task_params(model)
            for name, p in all_parameters(model).items():
                if name not in self.owner and name not in task_params:
                    masks[name] = torch.ones_like(p, dtype=torch.bool)
            self._locks.lock_buffers(model, {n for n, _ in unwrap(model).named_buffers()} - set(task_params))
        self._locks.lock(model, masks)
