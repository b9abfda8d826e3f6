"""Function-preserving widening and pruning of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import grown, unwrap
from everlearn.surgery.tracing import Link, num_units, repeat_per_input

NEW_NORM_ENTRIES = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}


@torch.no_grad()
def widen(model: nn.Module, link: Link, count: int) -> Link:
    """Add units to a layer. The outputs of the model stay the same, up to rounding.

    New units come after the old ones. Their incoming weights are drawn as in a new layer, U(-1/√fan-in, 1/√fan-in);
    their outgoing weights are zero. BatchNorms between the layers get new entries (scale 1, shift 0, mean 0, variance
    1). Create the optimizer after growing, or add the new parameters to it.

    Args:
        model: changed in place.
        link: the layer of the units and the layer that reads them, as ``surgery.tracing.links(model, x)`` finds.
        count: number of units to add.

    Returns:
        the link with its new width.

    >>> from everlearn.surgery.tracing import links
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> widen(net, links(net, torch.zeros(2, 4))[0], 5)
    Link(producer='0', consumer='2', norms=(), width=8, repeat=1, rigid=False)
    >>> net
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    inner = unwrap(model)
    _check_widening(inner, link, count)
    producer = inner.get_submodule(link.producer)
    consumer = inner.get_submodule(link.consumer)
    norms = [inner.get_submodule(name) for name in link.norms]

    # Incoming weights and biases of the new units.
    producer_weight: Any = producer.weight
    fan_in = producer_weight[0].numel()
    for leaf, p in producer._parameters.items():
        if p is not None:
            new_rows = draw_weights((count, *p.shape[1:]), fan_in, p)
            _replace_tensor(producer, leaf, torch.cat([p, new_rows]))

    for norm in norms:
        for leaf, v in [*norm._parameters.items(), *norm._buffers.items()]:
            if v is not None and leaf in NEW_NORM_ENTRIES:
                new_entries = v.new_full((count,), NEW_NORM_ENTRIES[leaf])
                _replace_tensor(norm, leaf, torch.cat([v, new_entries]))

    # Outgoing weights of the new units are zero.
    consumer_weight: Any = consumer.weight
    wide_shape = (len(consumer_weight), (link.width + count) * link.repeat, *consumer_weight.shape[2:])
    _replace_tensor(consumer, "weight", grown(consumer_weight, wide_shape))

    _update_sizes(producer, consumer, *norms)
    return replace(link, width=link.width + count)


def _check_widening(inner: nn.Module, link: Link, count: int) -> None:
    """Raise if the arguments of ``widen`` do not fit the model."""
    if not isinstance(link, Link) or not isinstance(count, int):
        raise TypeError(
            "widen(model, link, count) takes a link, as everlearn.surgery.tracing.links(model, x) finds it, and a "
            f"number of units; got {link!r} and {count!r}."
        )
    if link.rigid:
        raise ValueError(
            f"{link.producer!r} cannot grow: the code of the model fixes the number of inputs of {link.consumer!r}."
        )
    if count < 0:
        raise ValueError(f"A layer can get 0 or more units, not {count}; everlearn.surgery.resize.cut removes units.")

    width = num_units(inner.get_submodule(link.producer))
    if width != link.width:
        raise ValueError(
            f"{link.producer!r} has {width} units, the link has {link.width}: use the link that the last widen() "
            "returned."
        )


@torch.no_grad()
def cut(model: nn.Module, link: Link, gate: Tensor) -> Link:
    """Remove the units whose gate is 0, and multiply the other gates into the weights.

    If the code of the model fixes the number of units, none is removed and all gates are multiplied into the weights.
    """
    remaining = torch.arange(link.width, device=gate.device)
    if not link.rigid:
        remaining = remaining[gate > 0]
    if not len(remaining):
        remaining = remaining.new_zeros(1)  # a layer needs a unit; the gate of this one is 0

    inner = unwrap(model)
    producer = inner.get_submodule(link.producer)
    consumer = inner.get_submodule(link.consumer)
    norms = [inner.get_submodule(name) for name in link.norms]

    columns = unit_columns(remaining, link.repeat)
    weight: Any = consumer.weight
    column_gates = repeat_per_input(gate, link)[columns].to(weight)
    gated_weight = weight[:, columns] * column_gates.view(1, -1, *(1,) * (weight.dim() - 2))
    _replace_tensor(consumer, "weight", gated_weight)

    for module in (producer, *norms):
        for leaf, v in [*module._parameters.items(), *module._buffers.items()]:
            if v is not None and v.dim() and len(v) == link.width:
                _replace_tensor(module, leaf, v[remaining])

    _update_sizes(producer, consumer, *norms)
    return replace(link, width=len(remaining))


@torch.no_grad()
def reachable_units(model: nn.Module, all_links: Sequence[Link], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the units that selected outputs depend on through nonzero weights.

    Args:
        model: the model whose weights are followed backward.
        all_links: its links.
        outputs: by layer name, a mask of the outputs to start from. A layer without a mask and without a link starts
            from all its outputs.

    Returns:
        by producer, a mask of the reachable units.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> _ = net[2].weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    >>> reachable_units(net, [Link("0", "2", (), 3)], {"2": torch.tensor([True, False])})
    {'0': tensor([ True, False, False])}
    """
    inner = unwrap(model)
    reached = dict(outputs)
    links_by_producer = {link.producer: link for link in all_links}

    def reached_outputs(name: str) -> Tensor:
        if name not in reached:
            link = links_by_producer[name]
            reached[name] = reached_inputs(link.consumer).view(-1, link.repeat).any(1)
        return reached[name]

    def reached_inputs(name: str) -> Tensor:
        weight: Any = inner.get_submodule(name).weight
        is_connected: Tensor = weight.reshape(*weight.shape[:2], -1).ne(0).any(2)
        if name in reached or name in links_by_producer:
            is_connected = is_connected[reached_outputs(name)]
        return is_connected.any(0)

    return {link.producer: reached_outputs(link.producer) for link in all_links}


def unit_columns(unit_indices: Tensor, repeat: int) -> Tensor:
    """Return the input columns of a consumer that belong to units, ``repeat`` columns each.

    >>> unit_columns(torch.tensor([0, 2]), 3)
    tensor([0, 1, 2, 6, 7, 8])
    """
    return (unit_indices.view(-1, 1) * repeat + torch.arange(repeat, device=unit_indices.device)).flatten()


def draw_weights(shape: Sequence[int], fan_in: int, reference: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Draw weights as in a new layer, U(-1/√fan-in, 1/√fan-in), on the device and in the dtype of a reference."""
    bound: float = max(1, fan_in) ** -0.5
    return torch.empty(tuple(shape), dtype=torch.double).uniform_(-bound, bound, generator=source).to(reference)


def check_precision(method: str, weights: Iterable[Tensor], switch_off: str) -> None:
    """Raise if the dtype of the weights rounds small proximal steps to zero."""
    for dtype in {w.dtype for w in weights}:
        if torch.finfo(dtype).eps > 1e-4:
            raise ValueError(
                f"{method} shrinks weights by small steps, which {str(dtype).removeprefix('torch.')} rounds to zero: "
                f"keep the model in float32 (torch.autocast is fine), or switch these steps off: {switch_off}."
            )


def _replace_tensor(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Replace a parameter or buffer by a tensor of any shape; a parameter stays frozen or trainable."""
    if leaf in module._parameters:
        requires_grad = module._parameters[leaf].requires_grad  # type: ignore[union-attr]
        setattr(module, leaf, nn.Parameter(value.clone(), requires_grad=requires_grad))
    else:
        setattr(module, leaf, value.clone())


def _update_sizes(*modules: nn.Module) -> None:
    """Set the size attributes of layers (``in_features``, ``num_features``, …) to the shapes of their tensors."""
    for module in modules:
        weight: Any = module.weight
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif weight is not None and weight.dim() > 1:
            module.out_channels, module.in_channels = weight.shape[:2]
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            entries = module.running_mean if weight is None else weight
            if entries is not None:
                module.num_features = len(entries)
