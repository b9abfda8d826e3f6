"""Added units merged into a model: a plain module, as wide as the model is with them."""

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
def merge(beside: AddedUnits, model: nn.Module, view: View) -> None:
    """Make a plain copy of the model as wide as it is with these blocks, zero where there is no connection."""
    view = beside.placed(view)
    layers: dict[str, Any] = {n: model.get_submodule(n) for n in {**beside.links_by_producer, **beside.feeds}}
    inputs = {n: int(layer.weight.shape[1]) for n, layer in layers.items()}
    with seeded(0):  # what is drawn is overwritten: nobody's random numbers may shift
        for name, link in beside.links_by_producer.items():
            widen(model, link, view.count(name))
    for name, link in beside.links_by_producer.items():
        layers[name].weight[link.width :] = 0
        at = link.width
        for tensors in beside.tensors(view, name):
            _put(model, link, tensors, at, inputs)
            at += len(tensors["weight"])
    if view.head is not None:
        new = layers[beside.head].weight[:, inputs[beside.head] :]
        new.copy_(view.head[:, : new.shape[1]])


def _put(model: nn.Module, link: Link, tensors: Params, at: int, inputs: dict[str, int]) -> None:
    producer: Any = model.get_submodule(link.producer)
    consumer: Any = model.get_submodule(link.consumer)
    rows, old = slice(at, at + len(tensors["weight"])), inputs[link.producer]
    producer.weight[rows, :old] = tensors["weight"]
    if "inner" in tensors:
        producer.weight[rows, old : old + tensors["inner"].shape[1]] = tensors["inner"]
    if "bias" in tensors:
        producer.bias[rows] = tensors["bias"]
    if "out" in tensors:
        read, wrote = slice(at * link.repeat, rows.stop * link.repeat), len(tensors["out"])
        consumer.weight[:wrote, read] = tensors["out"]
    for i, norm in enumerate(link.norms):
        for leaf in (*AFFINE, *STATISTICS):
            if f"norm{i}.{leaf}" in tensors:
                getattr(model.get_submodule(norm), leaf)[rows] = tensors[f"norm{i}.{leaf}"]
