"""Dynamically expandable networks: retrain a task's sub-network, add units if needed, and copy units that drift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.parameters import refuse_sharded
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.expansion.added_units import AddedUnits
from everlearn.methods.expansion.base import INITIAL_NORM
from everlearn.methods.expansion.den_units import UnitDuplicator
from everlearn.methods.expansion.loop_guard import has_validation_data
from everlearn.methods.expansion.partial_training import PartialTraining
from everlearn.methods.isolation.base import select_task_params
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive
from everlearn.surgery.proximal import soft_threshold_
from everlearn.surgery.resize import check_precision

Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(0)]
PHASES = ("fit", "retrain", "expand", "settle", "split")


@dataclass(eq=False)
class DEN(PartialTraining):
    """Dynamically expandable networks (Yoon et al., ICLR 2018): retrain, add and duplicate units.

        task 1:   L_task, with L1 regularization of the weights
        fit:      the task's output layer alone, with L1 regularization
        retrain:  S, the units that lead to the task's outputs through nonzero weights:
                  L_task + l2·‖W_S‖² + λ·‖W_S - W_S*‖²
        expand:   if the loss is above the threshold, new units in every layer: they alone are trained, with the group
                  lasso on each unit's incoming weights; units without incoming weights are removed
        settle:   all weights, L = L_task + λ·‖W - W*‖², W* as before the task
        split:    a unit i with ‖wᵢ - wᵢ*‖₂ > drift is copied: the copy keeps wᵢ, the old unit gets wᵢ*; then as settle
        f(x, k):  the units that existed in task k, with their current weights

    Old weights are trained under the penalty λ, also after the split: forgetting is small, but not bounded. DEN has no
    access to the learning rate: as in the authors' code, ``l1`` and ``lasso`` are amounts per step. A custom loop
    computes its loss with ``loss(model, batch)``, and sets ``task.steps`` or calls ``next_phase(model)`` after each
    phase.

    Args:
        units: k, new units per layer when the network grows.
        threshold: τ, the loss above which it grows: on the validation data of the task if it has any, else the mean
            training loss over the second half of retraining. Without validation data, ``retrain`` must not be 0.
        drift: σ, how far the incoming weights of a unit may move before the unit is copied.
        splits: largest number of copies per layer and task; the units with the largest drift are copied.
        strength: λ.
        l1: by how much a step shrinks each weight toward zero, in the first task, in fitting and in expanding.
        l2: weight decay in retraining.
        lasso: by how much a step shrinks the norm of each new unit's incoming weights, in expanding.
        fit: share of a task's steps for fitting.
        retrain: share for retraining.
        expand: share for expanding; the rest is for settling, half before and half after the split.
    """

    traits = Traits(
        family="expansion",
        pro="old weights keep learning, drifting units are duplicated",
        con="forgets a little; many hyperparameters",
        step=1.7,
        copies=(0.0, 0.05),
        needs_task=True,
        grows=True,
        needs_labels=False,
    )

    penalty_uses_batch = False
    units: Count = 10
    threshold: NonNegative = 0.01
    drift: NonNegative = 0.05
    splits: Count = 10
    strength: NonNegative = 0.5
    l1: NonNegative = 1e-5
    l2: NonNegative = 1e-4
    lasso: NonNegative = 1e-3
    fit: Share = 0.1
    retrain: Share = 0.15
    expand: Share = 0.3
    old_units_read_added: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.fit + self.retrain + self.expand
        if total > 1:
            raise ValueError(
                f"DEN: fit, retrain and expand are shares of a task's steps; their sum {total:g} is over 1."
            )
        self.phase = ""  # the first task has none
        self.has_grown = False  # in the current task
        self._phase_ends: dict[str, int] = {}  # the step after which each phase ends

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Create inactive units for the task, and copy the weights W*."""
        refuse_sharded(model, type(self).__name__)
        planned_steps = getattr(task, "steps", None)
        is_later_task = self.is_new(task) and self.tasks
        if is_later_task and planned_steps and not self.retrain and not has_validation_data(as_task(task)):
            raise ValueError(
                "DEN(retrain=0) has no training loss to compare with its threshold: give the task validation data, or "
                "retraining a share of the steps."
            )
        self._added_units = None  # layers may have been replaced since the last task
        self._find_links(model, task)
        added_units = self._attach_units(model)
        if self.l1 or self.lasso:
            check_precision("DEN", map(added_units.layer_weight, added_units.links_by_producer), "l1=0, lasso=0")
        self._move_to_model(added_units)

        if self.open_task(task):
            self._reset_task()
            self.phase = ""
            self.has_grown = False
            if len(self.tasks) == 1:
                self.seed = distributed.initial_seed()
            else:
                self._create_units(added_units, dict.fromkeys(added_units.links_by_producer, self.units + self.splits))
                self.anchor = {n: w.detach().clone() for n, w in self._shared_weights(model).items()}
                self.phase = "fit"
                self._lock_all(model)

        self._start_guard(as_task(task), planned_steps)
        self._phase_ends = {} if planned_steps is None else self._plan_phases(planned_steps)
        self._restart_locks(model)
        self._attach_units(model)

    def _plan_phases(self, planned_steps: int) -> dict[str, int]:
        """Compute the steps after which fit, retrain, expand and settle end."""
        retrain_end = self.fit + self.retrain
        expand_end = retrain_end + self.expand
        shares = {"fit": self.fit, "retrain": retrain_end, "expand": expand_end, "settle": (expand_end + 1) / 2}
        ends = {phase: max(1, round(share * planned_steps)) for phase, share in shares.items()}

        # Retraining has at least one step, whose loss decides whether the network grows.
        if self.retrain:
            ends["retrain"] = max(ends["retrain"], ends["fit"] + 1)
        last_end = 0
        for phase, end in ends.items():
            last_end = max(last_end, end)
            ends[phase] = last_end
        return ends

    @property
    def _is_retraining(self) -> bool:
        """Whether S is trained: in the phase "retrain", and in "expand" if the network does not grow."""
        return self.phase == "retrain" or (self.phase == "expand" and not self.has_grown)

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Compute λ·‖W - W*‖², and in retraining also l2·‖W_S‖²."""
        if self.phase not in ("settle", "split") and not self._is_retraining:
            return 0.0
        penalty: Tensor | float = 0.0
        for name, w in self._shared_weights(model).items():
            # Locked entries equal their anchor, so that ‖W - W*‖² is ‖W_S - W_S*‖² in retraining.
            if self.strength:
                penalty = penalty + self.strength * (w - self.anchor[name]).square().sum()
            if self.l2 and self._is_retraining:
                w_s = w
                if name in self.lock_masks:
                    w_s = w.masked_fill(self.lock_masks[name], 0)
                penalty = penalty + self.l2 * w_s.square().sum()
        return penalty

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Record the training loss in the second half of retraining."""
        self._loop_guard.num_losses += 1
        if self.phase != "retrain" or self.has_grown:
            return
        if not self._phase_ends or self.steps >= (self._phase_ends["fit"] + self._phase_ends["retrain"]) // 2:
            self._record_loss(batch, outputs)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Restore locked entries, apply the proximal steps, and start the next phase when it is due."""
        super().after_step(model)
        self._apply_proximal_steps(model)
        while self.phase in self._phase_ends and self.steps >= self._phase_ends[self.phase]:
            self.next_phase(model)

    def _apply_proximal_steps(self, model: nn.Module) -> None:
        """Apply L1 and the group lasso as the phase requires: soft thresholds after the optimizer's step."""
        head = [p for p in select_task_params(model, self.output, rest=False).values() if p.requires_grad]
        if not self.phase:
            self._soft_threshold([*self._shared_weights(model).values(), *head])
        elif self.phase == "fit":
            self._soft_threshold([*head, *self.current_head.values()])
        elif self.phase == "expand" and self.has_grown:
            for name, count in self.active_units.items():
                tensors = self.current_block[name]
                self._soft_threshold([tensors[leaf][:count] for leaf in ("weight", "inner") if leaf in tensors])
            self._shrink_units(self._attach_units(model), self.lasso / INITIAL_NORM)
        self._zero_removed_units(model)

    def _soft_threshold(self, tensors: Iterable[Tensor]) -> None:
        """Set w ← sign(w)·max(0, |w| - l1) for all weights, not for biases."""
        if self.l1:
            for w in tensors:
                if w.dim() > 1:
                    soft_threshold_(w, self.l1)

    @torch.no_grad()
    def next_phase(self, model: nn.Module) -> str:
        """Start the next phase of fit, retrain, expand, settle and split, and return its name."""
        if not self.phase or self.phase == "split":
            return self.phase
        added_units = self._attach_units(model)
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        if self.phase == "retrain":
            self._lock_outside(model, added_units)
        elif self.phase == "expand":
            self.has_grown = self._compute_loss(model) > self.threshold
            if self.has_grown:
                self._lock_all(model)
                self._activate_units(added_units)
        elif self.phase == "settle":
            self.lock_masks = {}
            self._remove_zero_units(added_units)
        else:
            head = self.current_head.get("weight")
            duplicator = UnitDuplicator(added_units, self.blocks, self.current_block, self.active_units, head)
            duplicator.split(self._shared_weights(model), self.anchor, self.drift, self.splits)
        self._apply_locks(model)
        self._attach_units(model)
        return self.phase

    def _activate_units(self, added_units: AddedUnits) -> None:
        """Activate k new units per layer; their outgoing weights are zero, so that no output changes."""
        old_count = self.active_units
        self.active_units = dict.fromkeys(old_count, self.units)
        earlier_units = self._count_earlier_units(added_units)
        seed = derive(self.seed, "den", len(self.tasks), len(self.blocks))
        added_units.initialize_units(self.current_block, earlier_units, old_count, self.active_units, seed)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Add the connected units to the network, with the task that they belong to."""
        self._loop_guard.check(as_task(task), self.steps, "next_phase(model)")
        self._check_model(model)
        if self.current_block:
            added_units = self._attach_units(model)
            self._add_block(added_units, self._connected_units(added_units))
        self._clear_locks()
        self.phase = ""
        self._store_task(model)
