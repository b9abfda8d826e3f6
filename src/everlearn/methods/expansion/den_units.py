"""Units as DEN trains them: which weights each unit has, which lie outside a sub-network, and copies of drifted units.

The units of a layer are numbered in parts: first the units of the model (part 0), then those of each block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everlearn.core.parameters import Params
from everlearn.methods.expansion.added_units import AFFINE, STATISTICS, AddedUnits, Block
from everlearn.surgery.proximal import group_norms
from everlearn.surgery.resize import unit_columns
from everlearn.surgery.tracing import repeat_per_input


def tensor_key(block: int, layer: str, leaf: str) -> str:
    """Name a tensor of a block among the weights that tasks share.

    >>> tensor_key(0, "conv1", "weight")
    '0:conv1:weight'
    """
    return f"{block}:{layer}:{leaf}"


def incoming_names(added_units: AddedUnits, blocks: list[Block], name: str) -> list[list[str]]:
    """Name the incoming weights of a layer's units, for each part; they have a row per unit."""
    input_link = added_units.links_by_consumer.get(name)
    model_names = [f"{name}.weight"]
    leaves = ["weight"]
    if input_link is not None:
        leaves.append("inner")
        if name in added_units.direct_consumers:
            model_names += [tensor_key(b, input_link.producer, "out") for b in range(len(blocks))]

    block_names = [[tensor_key(b, name, leaf) for leaf in leaves] for b in range(len(blocks))]
    return [model_names, *block_names]


def per_unit_names(added_units: AddedUnits, blocks: list[Block], name: str) -> list[list[str]]:
    """Name the biases and the BatchNorm scales and shifts of a layer's units, for each part; an entry per unit."""
    norms = added_units.links_by_producer[name].norms
    model_names = [f"{name}.bias"]
    leaves = ["bias"]
    for i, norm in enumerate(norms):
        model_names += [f"{norm}.{leaf}" for leaf in AFFINE]
        leaves += [f"norm{i}.{leaf}" for leaf in AFFINE]

    block_names = [[tensor_key(b, name, leaf) for leaf in leaves] for b in range(len(blocks))]
    return [model_names, *block_names]


def unit_counts(added_units: AddedUnits, blocks: list[Block], name: str) -> list[int]:
    """Count the units of a layer in each part."""
    return [added_units.links_by_producer[name].width, *(len(b[name]["weight"]) for b in blocks)]


def mask_outside(
    added_units: AddedUnits, blocks: list[Block], weights: Params, selected: Mapping[str, Tensor]
) -> Params:
    """Mask the weights that do not connect two selected units.

    Args:
        added_units: the links of the model.
        blocks: the units that earlier tasks added.
        weights: the weights that tasks share, by name.
        selected: for each layer, whether each of its units is selected.

    Returns:
        masks that are True outside the selected sub-network; weights on no link count as inside and have none.
    """
    masks: Params = {}

    def mask_entries(name: str, rows: Tensor, columns: Tensor | None = None) -> None:
        if name not in weights:
            return
        p = weights[name]
        is_inside = rows
        if columns is not None:
            is_inside = rows[:, None] & columns
        kernel_axes = (1,) * (p.dim() - is_inside.dim())
        masks[name] = ~is_inside.view(*is_inside.shape, *kernel_axes).expand_as(p)

    for name, link in added_units.links_by_producer.items():
        # Inputs of the layer: the model's units below, then added ones.
        num_inputs = added_units.layer_weight(name).shape[1]
        input_link = added_units.links_by_consumer.get(name)
        if input_link is None:
            inputs = selected[name].new_ones(num_inputs)
        else:
            inputs = repeat_per_input(selected[input_link.producer], input_link)

        parts = selected[name].split(unit_counts(added_units, blocks, name))
        for rows, names in zip(parts, per_unit_names(added_units, blocks, name), strict=True):
            for entry_name in names:
                mask_entries(entry_name, rows)

        model_rows, *block_rows = parts
        mask_entries(f"{name}.weight", model_rows, inputs[:num_inputs])
        for b, rows in enumerate(block_rows):
            mask_entries(tensor_key(b, name, "weight"), rows, inputs[:num_inputs])
            if input_link is not None:
                num_added = blocks[b][name]["inner"].shape[1]
                mask_entries(tensor_key(b, name, "inner"), rows, inputs[num_inputs : num_inputs + num_added])
            if link.consumer in added_units.direct_consumers:
                num_outputs = blocks[b][name]["out"].shape[0]
                outputs = selected.get(link.consumer, rows.new_ones(num_outputs))[:num_outputs]
                mask_entries(tensor_key(b, name, "out"), outputs, repeat_per_input(rows, link))

        # A consumer that is no producer has no units of its own to select.
        if link.consumer not in added_units.links_by_producer and link.consumer != added_units.head:
            all_outputs = model_rows.new_ones(len(added_units.layer_weight(link.consumer)))
            mask_entries(f"{link.consumer}.weight", all_outputs, repeat_per_input(model_rows, link))
    return masks


class UnitDuplicator:
    """Copies drifted units into inactive units of the current block.

    The copy keeps the unit's current weights wᵢ, and the unit gets its weights wᵢ* from before the task. The output
    layer and the other units of the current block belong to the current task alone: they receive from the copy instead
    of the unit.

    Args:
        added_units: the links of the model.
        blocks: the units that earlier tasks added.
        current_block: the units of the current task.
        active_units: for each layer, how many units of the current block are active.
        head: weight of the output layer for all added units, if units lead into it.
    """

    def __init__(
        self,
        added_units: AddedUnits,
        blocks: list[Block],
        current_block: Block,
        active_units: dict[str, int],
        head: Tensor | None,
    ) -> None:
        self.added_units = added_units
        self.blocks = blocks
        self.current_block = current_block
        self.active_units = active_units
        self.head = head
        self.earlier_units = {
            name: sum(unit_counts(added_units, blocks, name)[1:]) for name in added_units.links_by_producer
        }

    @torch.no_grad()
    def split(self, weights: Params, anchor: Params, drift: float, max_copies: int) -> dict[str, list[int]]:
        """Copy the units that drifted by more than ``drift``, at most ``max_copies`` per layer.

        Returns:
            the copied units of each layer, by index.
        """
        copied_units = {}
        slots = {}
        for name in self.added_units.links_by_producer:
            units = self.find_drifted(weights, anchor, name, drift)[:max_copies]
            first_slot = self.active_units[name]
            copied_units[name] = units
            slots[name] = range(first_slot, first_slot + len(units))

        # All copies are made before any weight is restored or redirected.
        for name, units in copied_units.items():
            for unit, slot in zip(units, slots[name], strict=True):
                self._copy_unit(name, unit, slot)
        for name, units in copied_units.items():
            self._restore_units(weights, anchor, name, units)
            self.active_units[name] += len(units)
        for name, units in copied_units.items():
            for unit, slot in zip(units, slots[name], strict=True):
                self._redirect_consumers(name, unit, slot)
        return copied_units

    def find_drifted(self, weights: Params, anchor: Params, name: str, drift: float) -> list[int]:
        """List the units of a layer with ρᵢ = ‖wᵢ - wᵢ*‖₂ > drift, the largest ρ first."""
        norms = []
        counts = unit_counts(self.added_units, self.blocks, name)
        for count, names in zip(counts, incoming_names(self.added_units, self.blocks, name), strict=True):
            # Frozen weights are not among the shared ones: their difference is 0.
            differences = [self.added_units.layer_weight(name).new_zeros(count, 1)]
            differences += [weights[n].detach() - anchor[n] for n in names if n in weights]
            norms.append(group_norms(differences))

        rho = torch.cat(norms)
        order = rho.argsort(descending=True)
        return [int(i) for i in order[rho[order] > drift]]

    def _locate(self, name: str, unit: int) -> tuple[int, int]:
        """Return the part of the layer that holds a unit, and its row there."""
        for part, count in enumerate(unit_counts(self.added_units, self.blocks, name)):
            if unit < count:
                return part, unit
            unit -= count
        raise IndexError(unit)

    def _copy_unit(self, name: str, unit: int, slot: int) -> None:
        """Copy the tensors of a unit into an inactive unit of the current block."""
        part, row = self._locate(name, unit)
        copy_tensors = self.current_block[name]
        if part:
            for leaf, v in self.blocks[part - 1][name].items():
                if leaf == "inner":
                    copy_tensors[leaf][slot, : v.shape[1]] = v[row]
                elif leaf != "out":
                    copy_tensors[leaf][slot] = v[row]
            return

        layer = self.added_units.model.get_submodule(name)
        for leaf in ("weight", "bias"):
            if leaf in copy_tensors:
                copy_tensors[leaf][slot] = getattr(layer, leaf)[row]
        for i, norm_name in enumerate(self.added_units.links_by_producer[name].norms):
            norm = self.added_units.model.get_submodule(norm_name)
            for leaf in (*AFFINE, *STATISTICS):
                if f"norm{i}.{leaf}" in copy_tensors:
                    copy_tensors[f"norm{i}.{leaf}"][slot] = getattr(norm, leaf)[row]

        # The model's unit receives from added units through their ``out``, the copy through its ``inner``.
        input_link = self.added_units.links_by_consumer.get(name)
        if input_link is not None and name in self.added_units.direct_consumers:
            added_inputs = [block[input_link.producer]["out"][row] for block in [*self.blocks, self.current_block]]
            copy_tensors["inner"][slot] = torch.cat(added_inputs)

    def _restore_units(self, weights: Params, anchor: Params, name: str, units: list[int]) -> None:
        """Restore the weights of units to their values from before the task."""
        input_link = self.added_units.links_by_consumer.get(name)
        weight_names = incoming_names(self.added_units, self.blocks, name)
        entry_names = per_unit_names(self.added_units, self.blocks, name)
        for unit in units:
            part, row = self._locate(name, unit)
            for tensor_name in [*weight_names[part], *entry_names[part]]:
                if tensor_name in weights:
                    weights[tensor_name][row] = anchor[tensor_name][row]

            # Before the task, the model's unit had no inputs from the current block.
            if input_link is not None and part == 0 and name in self.added_units.direct_consumers:
                self.current_block[input_link.producer]["out"][row] = 0

    def _redirect_consumers(self, name: str, unit: int, slot: int) -> None:
        """Move the weights of the task's consumers from a unit to its copy."""
        link = self.added_units.links_by_producer[name]
        is_model_unit = unit < link.width
        row = unit
        if not is_model_unit:
            row = unit - link.width
        old_columns = unit_columns(torch.tensor([row]), link.repeat)
        new_columns = unit_columns(torch.tensor([self.earlier_units[name] + slot]), link.repeat)

        # The consumer's weights for the model's units, and those for added units.
        if link.consumer == self.added_units.head and self.head is not None:
            model_weight = self.added_units.layer_weight(self.added_units.head)
            added_weight = self.head
            if is_model_unit and not model_weight.requires_grad:
                return  # a frozen output layer does not change
        elif link.consumer in self.current_block:
            model_weight = self.current_block[link.consumer]["weight"]
            added_weight = self.current_block[link.consumer]["inner"]
        else:
            return

        source = added_weight
        if is_model_unit:
            source = model_weight
        added_weight[:, new_columns] = source[:, old_columns]
        source[:, old_columns] = 0
