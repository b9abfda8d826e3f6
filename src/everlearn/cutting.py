"""Taking units out of layers, where a gate has closed on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.tracing import Link, repeated


@torch.no_grad()
def cut(model: nn.Module, link: Link, gate: Tensor) -> None:
    """Take the units with a closed gate out of the layers; what is left of the others' gates goes into the weights.

    Between layers whose lengths the model writes out as numbers, no unit can be taken out: there all gates go into the weights.
    """
    keep = (gate > 0).nonzero().flatten() if not link.rigid else torch.arange(link.width, device=gate.device)
    if not len(keep):
        keep = keep.new_zeros(1)  # a layer needs a unit: one whose gate is closed says nothing
    producer, consumer = model.get_submodule(link.producer), model.get_submodule(link.consumer)
    places = torch.arange(link.width * link.repeat, device=keep.device).view(link.width, link.repeat)[keep].flatten()
    weight: Any = consumer.weight
    open_ = repeated(gate, link)[places].to(weight)
    _replace(consumer, "weight", weight[:, places] * open_.view(1, -1, *(1,) * (weight.dim() - 2)))
    for module in (producer, *(model.get_submodule(n) for n in link.norms)):
        for leaf, v in [*module._parameters.items(), *module._buffers.items()]:
            if v is not None and v.dim() and len(v) == link.width:
                _replace(module, leaf, v[keep])
    _resize(producer, consumer, *(model.get_submodule(n) for n in link.norms))


def _replace(module: nn.Module, leaf: str, value: Tensor) -> None:
    setattr(module, leaf, nn.Parameter(value.clone()) if leaf in module._parameters else value.clone())


def _resize(*modules: nn.Module) -> None:
    """The lengths that layers show, as their weights have them."""
    for module in modules:
        weight: Any = module.weight
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif weight is not None and weight.dim() > 1:
            module.out_channels, module.in_channels = weight.shape[:2]
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            statistics = module.running_mean if weight is None else weight
            module.num_features = module.num_features if statistics is None else len(statistics)
