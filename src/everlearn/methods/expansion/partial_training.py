"""PartialTraining, the base of DEN: train a part of the weights that tasks share, and lock the rest."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import Params, all_parameters, unwrap
from everlearn.methods.expansion.added_units import AddedUnits, as_parameters, placed_like
from everlearn.methods.expansion.base import Expansion
from everlearn.methods.expansion.den_units import mask_outside, tensor_key
from everlearn.methods.expansion.merge_units import merge_units
from everlearn.methods.isolation.base import select_task_params
from everlearn.surgery.hooks import without_hooks
from everlearn.surgery.proximal import group_norms
from everlearn.surgery.resize import reachable_units


class PartialTraining(Expansion):
    """Bookkeeping of DEN: the weights W that tasks share, their anchor W*, and the entries that are locked.

    W are the weights of the model without its output layer, and those of the units that earlier tasks added.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anchor: Params = {}  # W*, the weights before the task
        self.lock_masks: Params = {}  # True at locked entries of W
        self.removed_units: dict[str, Tensor] = {}  # masks of the current block's units without incoming weights

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of all added units, also inactive ones, and the head's weights for them."""
        tensors: list[Tensor] = []
        if self.current_block:
            for block in self.blocks:
                for layer_tensors in block.values():
                    tensors += layer_tensors.values()
        earlier_parameters = [v for v in tensors if isinstance(v, nn.Parameter) and v.numel()]
        return earlier_parameters + super().parameters()

    def before_step(self, model: nn.Module) -> None:
        """Clear the gradients of locked entries."""
        super().before_step(model)
        if self.lock_masks:
            self._locks.mask_gradients(self._shared_weights(model))

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Restore the values of locked entries and buffers."""
        super().after_step(model)
        self._locks.restore_buffers(model)
        if self.lock_masks:
            self._locks.restore(self._shared_weights(model))

    def restore_locked(self, model: nn.Module) -> None:
        """Restore the locked entries. Call it after copying averaged weights into the model, before ``end_task``."""
        self._locks.restore(self._shared_weights(model), everything=True)
        self._locks.restore_buffers(model)

    def _reset_task(self) -> None:
        super()._reset_task()
        self._clear_locks()

    def _clear_locks(self) -> None:
        """Unlock all of W, and discard the anchor."""
        self.anchor = {}
        self.lock_masks = {}
        self.removed_units = {}
        self._locks.unlock()

    def _shared_weights(self, model: nn.Module) -> Params:
        """Return W by name."""
        task_params = select_task_params(model, self.output, rest=False)
        shared = {n: p for n, p in all_parameters(model).items() if n not in task_params and p.requires_grad}
        for b, block in enumerate(self.blocks):
            for name, tensors in block.items():
                for leaf, v in tensors.items():
                    if isinstance(v, nn.Parameter):
                        shared[tensor_key(b, name, leaf)] = v
        return shared

    def _lock_all(self, model: nn.Module) -> None:
        """Lock all of W."""
        self.lock_masks = {n: torch.ones_like(w, dtype=torch.bool) for n, w in self._shared_weights(model).items()}

    def _lock_outside(self, model: nn.Module, added_units: AddedUnits) -> None:
        """Lock the weights outside S, the units that lead to the task's outputs through nonzero weights."""
        # Paths also lead through added units: a copy of the model with all units shows them.
        with without_hooks(unwrap(model)):
            wide_model = copy.deepcopy(unwrap(model))
        merge_units(added_units, wide_model, self._task_view())

        # Paths start from the outputs that the task may use.
        output_weight: Any = wide_model.get_submodule(added_units.head).weight
        num_outputs = len(output_weight)
        outputs = torch.ones(num_outputs, dtype=torch.bool)
        allowed_outputs = self.allowed_outputs[-1]
        if allowed_outputs is not None:
            outputs = allowed_outputs[:num_outputs]

        start_units = {added_units.head: outputs.to(output_weight.device)}
        selected = reachable_units(wide_model, added_units.links, start_units)
        self.lock_masks = mask_outside(added_units, self.blocks, self._shared_weights(model), selected)

    def _apply_locks(self, model: nn.Module) -> None:
        """Lock the masked entries of W at their current values."""
        shared = self._shared_weights(model)
        # Weights that another method has frozen since are not among the shared ones.
        self._locks.lock(shared, {name: mask for name, mask in self.lock_masks.items() if name in shared})

    def _restart_locks(self, model: nn.Module) -> None:
        """Lock the masked entries of W and, from the second task on, buffers such as running statistics."""
        self._locks.release(model)
        if len(self.tasks) > 1:
            self._locks.lock_buffers(model)
        self._apply_locks(model)

    def _remove_zero_units(self, added_units: AddedUnits) -> None:
        """Remove the new units whose incoming weights the group lasso has made zero."""
        for name, count in self.active_units.items():
            groups, _ = self._unit_groups(added_units, name)
            self.removed_units[name] = group_norms([g[:count] for g in groups]).eq(0)
            self._zero_outgoing(added_units, name, self.removed_units[name])

    def _zero_removed_units(self, model: nn.Module) -> None:
        """Keep removed units at zero, since an optimizer's momentum would move them."""
        for name, is_removed in self.removed_units.items():
            for leaf, v in self.current_block[name].items():
                if leaf != "out" and "running" not in leaf:
                    v[: len(is_removed)].masked_fill_(is_removed.view(-1, *(1,) * (v.dim() - 1)), 0)
            self._zero_outgoing(self._attach_units(model), name, is_removed)

    @torch.no_grad()
    def _move_to_model(self, added_units: AddedUnits) -> None:
        super()._move_to_model(added_units)
        self.blocks = [as_parameters(block) for block in self.blocks]
        shared = self._shared_weights(added_units.model)
        self.anchor = {n: placed_like(v, shared[n]) for n, v in self.anchor.items()}
        self.lock_masks = {n: mask.to(shared[n].device) for n, mask in self.lock_masks.items()}
        self.removed_units = {
            name: mask.to(self.current_block[name]["weight"].device) for name, mask in self.removed_units.items()
        }
