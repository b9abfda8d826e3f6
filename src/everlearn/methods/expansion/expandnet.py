"""ExpandNet: freeze what is learned, and add units until the network can learn the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.parameters import Params, all_parameters, refuse_sharded
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.expansion.base import Expansion
from everlearn.methods.isolation.base import select_task_params
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive
from everlearn.surgery.resize import check_precision

Count = Annotated[int, Range(1)]


@dataclass(eq=False)
class ExpandNet(Expansion):
    """ExpandNet (defined by this library): lock learned weights, and add units where a task needs them.

        task 1:      ordinary training
        task k > 1:  all learned weights are locked; the task's output layer is trained, at first alone
        look:        if the loss is above the threshold, each growable layer gets new units. They receive from old and
                     new units and lead into new units and the task's output layer (block-triangular weights)
        lasso:       v ← v · max(0, 1 - c/‖v‖₂) after each step, v the incoming weights of a new unit; units with v = 0
                     are removed
        f(x, k):     the units that existed at the end of task k
        L = L_task, minimized over the task's output layer and the new units

    The outputs of an earlier task never change, bit for bit. Forward passes show which layers can grow: linear or
    convolution layers with nothing between them and the next one that mixes units. New units that lead into another
    layer (a residual stream) contribute there in their own and later tasks. A custom loop calls ``loss``,
    ``before_step`` and ``after_step``; set ``task.steps``, or call ``look_now(model)``.

    Args:
        units: new units per layer each time the network grows.
        threshold: loss up to which a task needs no more units: on the task's validation data, or without them the mean
            training loss over the second half of the steps since the last look.
        look: share of a task's steps from one look at the loss to the next.
        rounds: number of looks, so that a task adds at most units · rounds units to a layer.
        max_units: maximum number of units added to a layer over all tasks.
        sparsity: share of its initial norm that v would lose over a task without a gradient; c is the part of one
            step. Values that remove units, from about 1.5, cost accuracy; 0, the default, for no lasso.
    """

    traits = Traits(
        family="expansion",
        pro="forgets nothing, and grows only where a task needs it",
        con="a threshold to choose, in units of the loss",
        step=1.9,
        step_growth=0.1,
        copies=(0.0, 0.1, 0.09),  # if each task takes all the units it may
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
    sparsity: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.look * self.rounds > 1:
            raise ValueError(
                f"ExpandNet looks at the loss after a share of the steps, rounds times: look * rounds = "
                f"{self.look:g} * {self.rounds} must not exceed 1."
            )

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Lock the learned weights, and create inactive units for the task."""
        refuse_sharded(model, type(self).__name__)
        self.check_between_tasks(model, task)
        self._added_units = None  # layers may have been replaced since
        self._find_links(model, task)
        added_units = self._attach_units(model)
        if self.sparsity:
            check_precision("ExpandNet", map(added_units.layer_weight, added_units.links_by_producer), "sparsity=0")
        self._move_to_model(added_units)

        if self.open_task(task):
            self._reset_task()
            if len(self.tasks) == 1:
                self.seed = distributed.initial_seed()
            else:
                new_units = {}
                for name, num_earlier in self._count_earlier_units(added_units).items():
                    new_units[name] = max(0, min(self.units * self.rounds, self.max_units - num_earlier))
                self._create_units(added_units, new_units)

        self._start_guard(as_task(task), getattr(task, "steps", None))
        self._lock_protected(model)
        self._attach_units(model)

    def protected_entries(self, model: nn.Module, count: int) -> Params:
        """Return masks of all parameters except the output layer's, from the first task on."""
        task_params = select_task_params(model, self.output, rest=False)
        shared = {name: p for name, p in all_parameters(model).items() if name not in task_params}
        return {name: torch.ones_like(p, dtype=torch.bool) for name, p in shared.items()}

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Record the training loss in the second half of the steps before a look."""
        self._loop_guard.num_losses += 1
        if not self.current_block:
            return

        interval = self._look_interval
        is_needed = True
        if interval is not None:
            is_needed = self.steps < interval * self.rounds and self.steps % interval >= interval // 2
        if is_needed:
            self._record_loss(batch, outputs)

    def before_step(self, model: nn.Module) -> None:
        """Zero the gradients of locked entries."""
        super().before_step(model)
        self._locks.mask_gradients(model)

    def after_step(self, model: nn.Module) -> None:
        """Restore locked entries, apply the lasso to new units, and look at the loss if it is time."""
        super().after_step(model)
        self._locks.restore(model)
        if not self._planned_steps:
            return

        # v ← v · max(0, 1 - c/‖v‖₂), c = sparsity · initial norm / steps of the task
        if self.sparsity and any(self.active_units.values()):
            self._shrink_units(self._attach_units(model), self.sparsity / self._planned_steps)

        # Units activated after the last step would never be trained.
        interval = self._look_interval
        is_last_step = self.steps >= self._planned_steps
        if interval and self.steps % interval == 0 and self.steps <= interval * self.rounds and not is_last_step:
            self.look_now(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Remove units without incoming or outgoing weights, and keep the others for good."""
        self._loop_guard.check(as_task(task), self.steps, "look_now(model)")
        self._check_model(model)
        if self.current_block:
            added_units = self._attach_units(model)
            self._add_block(added_units, self._connected_units(added_units))
        self._store_task(model)

    def look_now(self, model: nn.Module) -> bool:
        """Add units if the loss is above the threshold, except in the first task. Returns whether it was above."""
        if not self.current_block:
            return False
        is_above = self._compute_loss(model) > self.threshold
        if is_above:
            self._activate_units(model)
        return is_above

    @property
    def _look_interval(self) -> int | None:
        """Number of steps from one look to the next; None if the task's length is unknown."""
        if self._planned_steps is None:
            return None
        return max(1, round(self._planned_steps * self.look))

    def _activate_units(self, model: nn.Module) -> None:
        """Activate the next units. Their outgoing weights are zero, so that the outputs do not change."""
        added_units = self._attach_units(model)
        old_count = self.active_units
        self.active_units = {}
        for name, count in old_count.items():
            self.active_units[name] = min(count + self.units, len(self.current_block[name]["weight"]))

        seed = derive(self.seed, "expandnet", len(self.tasks), len(self.blocks))
        earlier_units = self._count_earlier_units(added_units)
        added_units.initialize_units(self.current_block, earlier_units, old_count, self.active_units, seed)
        self._attach_units(model)
