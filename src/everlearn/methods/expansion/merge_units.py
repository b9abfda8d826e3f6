"""Merge added units into a plain module, as wide as the model is together with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from everlearn.core.parameters import Params
from everlearn.methods.expansion.added_units import AFFINE, STATISTICS, AddedUnits, View
from everlearn.runtime.randomness import seeded
from everlearn.surgery.resize import widen
from everlearn.surgery.tracing import Link


@torch.no_grad()
def merge_units(added_units: AddedUnits, model: nn.Module, view: View) -> None:
    """Widen a model by added units, with zeros where there is no connection.

    Args:
        added_units: the positions of the units.
        model: a copy of their model without hooks; changed in place.
        view: the units to merge.
    """
    view = added_units.move_view(view)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in added_units.layer_names}
    old_inputs = {name: int(layer.weight.shape[1]) for name, layer in layers.items()}

    # ``widen`` draws weights, which are overwritten below; the global random state must not change.
    with seeded(0):
        for name, link in added_units.links_by_producer.items():
            widen(model, link, view.count(name))

    for name, link in added_units.links_by_producer.items():
        layers[name].weight[link.width :] = 0
        start = link.width
        for tensors in added_units.layer_tensors(view, name):
            _write_units(model, link, tensors, start, old_inputs[name])
            start += len(tensors["weight"])

    if view.head is not None:
        new_columns = layers[added_units.head].weight[:, old_inputs[added_units.head] :]
        new_columns.copy_(view.head[:, : new_columns.shape[1]])


def _write_units(model: nn.Module, link: Link, tensors: Params, start: int, old_inputs: int) -> None:
    """Write the units of a block into a widened layer, its BatchNorms and its consumer.

    Args:
        model: the widened model.
        link: the layer of the units and the layer that they lead into.
        tensors: the layer's tensors in the block.
        start: position of the first unit in the layer.
        old_inputs: number of the layer's inputs before widening.
    """
    producer: Any = model.get_submodule(link.producer)
    consumer: Any = model.get_submodule(link.consumer)
    rows = slice(start, start + len(tensors["weight"]))

    # Incoming weights: W' for the old inputs, then V' for added ones.
    producer.weight[rows, :old_inputs] = tensors["weight"]
    if "inner" in tensors:
        producer.weight[rows, old_inputs : old_inputs + tensors["inner"].shape[1]] = tensors["inner"]
    if "bias" in tensors:
        producer.bias[rows] = tensors["bias"]

    # Outgoing weights O', to the old outputs of the consumer alone.
    if "out" in tensors:
        columns = slice(rows.start * link.repeat, rows.stop * link.repeat)
        consumer.weight[: len(tensors["out"]), columns] = tensors["out"]

    for i, norm_name in enumerate(link.norms):
        norm = model.get_submodule(norm_name)
        for leaf in (*AFFINE, *STATISTICS):
            if f"norm{i}.{leaf}" in tensors:
                getattr(norm, leaf)[rows] = tensors[f"norm{i}.{leaf}"]
