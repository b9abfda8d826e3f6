"""Growing: layers with more units that say the same, layers without the units that say nothing, and what makes units silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.params import grown, unwrap
from everlearn.tracing import Link, repeated, units

NEW = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}  # what BatchNorm has for a new unit


@torch.no_grad()
def widen(model: nn.Module, link: Link, count: int) -> Link:
    """Give a layer more units; the model says what it said before, to rounding.

    The units come after those there are. What they read starts as in a new layer, U(-1/√fan-in, 1/√fan-in); what reads them
    starts with zero, so nobody hears them yet. BatchNorms between get new entries (scale 1, shift 0, mean 0, variance 1). Make
    the optimizer after growing, or tell it of the new parameters.

    Args:
        model: grown in place.
        link: where the units come from and go, as ``everlearn.tracing.links(model)`` finds it.
        count: how many to add.

    >>> from everlearn.tracing import links
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> widen(net, links(net)[0], 5)
    Link(producer='0', consumer='2', norms=(), width=8, repeat=1, rigid=False)
    >>> net
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    if not isinstance(link, Link) or not isinstance(count, int):
        raise TypeError(
            f"widen(model, link, count) takes a link, as everlearn.tracing.links(model) finds it, and a number of units; got "
            f"{link!r} and {count!r}."
        )
    if link.rigid:
        raise ValueError(
            f"The model writes out how many inputs {link.consumer!r} has, so {link.producer!r} cannot grow."
        )
    if count < 0:
        raise ValueError(f"A layer can get 0 or more units, not {count}; everlearn.growth.cut takes units out.")
    inner = unwrap(model)
    producer, consumer = inner.get_submodule(link.producer), inner.get_submodule(link.consumer)
    if units(producer) != link.width:
        raise ValueError(
            f"{link.producer!r} has {units(producer)} units, the link says {link.width}: use the link that the last widen() gave."
        )
    norms = [inner.get_submodule(n) for n in link.norms]
    weight: Any = producer.weight
    for leaf, p in producer._parameters.items():
        if p is not None:
            _replace(producer, leaf, torch.cat([p, drawn((count, *p.shape[1:]), weight[0].numel(), p)]))
    for norm in norms:
        for leaf, v in [*norm._parameters.items(), *norm._buffers.items()]:
            if v is not None and leaf in NEW:
                _replace(norm, leaf, torch.cat([v, v.new_full((count,), NEW[leaf])]))
    read: Any = consumer.weight
    _replace(consumer, "weight", grown(read, (len(read), (link.width + count) * link.repeat, *read.shape[2:])))
    _resize(producer, consumer, *norms)
    return replace(link, width=link.width + count)


@torch.no_grad()
def cut(model: nn.Module, link: Link, gate: Tensor) -> Link:
    """Take the units with a closed gate (0) out of the layers; what is left of the others' gates goes into the weights.

    Between layers whose lengths the model writes out as numbers no unit can be taken out: there all gates go into the weights.
    """
    keep = (gate > 0).nonzero().flatten() if not link.rigid else torch.arange(link.width, device=gate.device)
    if not len(keep):
        keep = keep.new_zeros(1)  # a layer needs a unit: one whose gate is closed says nothing
    inner = unwrap(model)
    producer, consumer = inner.get_submodule(link.producer), inner.get_submodule(link.consumer)
    norms = [inner.get_submodule(n) for n in link.norms]
    places = columns(keep, link.repeat)
    weight: Any = consumer.weight
    open_ = repeated(gate, link)[places].to(weight)
    _replace(consumer, "weight", weight[:, places] * open_.view(1, -1, *(1,) * (weight.dim() - 2)))
    for module in (producer, *norms):
        for leaf, v in [*module._parameters.items(), *module._buffers.items()]:
            if v is not None and v.dim() and len(v) == link.width:
                _replace(module, leaf, v[keep])
    _resize(producer, consumer, *norms)
    return replace(link, width=len(keep))


@torch.no_grad()
def reached(model: nn.Module, found: Sequence[Link], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The units that some output depends on: breadth first from the outputs down, through weights that are not zero.

    Args:
        model: whose weights.
        found: its links.
        outputs: of some layers, which outputs to start from; of a layer that neither this nor a link tells, all.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> _ = net[2].weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    >>> reached(net, [Link("0", "2", (), 3)], {"2": torch.tensor([True, False])})
    {'0': tensor([ True, False, False])}
    """
    inner, chosen = unwrap(model), dict(outputs)
    waiting = {link.producer: link for link in found}

    def rows(name: str) -> Tensor:
        if name not in chosen:
            link = waiting[name]
            chosen[name] = heard(link.consumer).view(-1, link.repeat).any(1)
        return chosen[name]

    def heard(name: str) -> Tensor:
        weight: Any = inner.get_submodule(name).weight
        read = weight.reshape(*weight.shape[:2], -1).ne(0).any(2)
        some: Tensor = read[rows(name)] if name in chosen or name in waiting else read
        return some.any(0)

    return {link.producer: rows(link.producer) for link in found}


def columns(at: Tensor, repeat: int) -> Tensor:
    """Where a consumer reads these units.

    >>> columns(torch.tensor([0, 2]), 3)
    tensor([0, 1, 2, 6, 7, 8])
    """
    return (at.view(-1, 1) * repeat + torch.arange(repeat, device=at.device)).flatten()


def drawn(shape: Sequence[int], fan_in: int, like: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Weights as those of a new layer: U(-1/√fan-in, 1/√fan-in)."""
    bound: float = max(1, fan_in) ** -0.5
    return torch.empty(tuple(shape), dtype=torch.double).uniform_(-bound, bound, generator=source).to(like)


def length(groups: Sequence[Tensor]) -> Tensor:
    """Of every unit, the Euclidean norm of what belongs to it: entry i of each tensor.

    >>> length([torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0])])
    tensor([5., 0.])
    """
    rows = [g.detach().reshape(len(g), -1) if len(g) else g.detach().new_zeros(0, 1) for g in groups]
    sizes: Tensor = torch.linalg.vector_norm(torch.cat(rows, 1), dim=1)
    return sizes


@torch.no_grad()
def shrink_groups(groups: Sequence[Tensor], threshold: float | Tensor) -> Tensor:
    """The proximal step of the group lasso, in place: every unit's group shorter by the threshold, zero where it was no longer.

        v ← v · max(0, 1 - threshold/‖v‖₂) = argmin_u ½‖u - v‖² + threshold·‖u‖₂

    Returns which units are left.

    >>> v = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> shrink_groups([v], 1.0), v
    (tensor([ True, False]), tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]]))
    """
    size = length(groups)
    left = size > threshold
    factor = torch.where(left, 1 - threshold / torch.where(left, size, 1), 0)
    for g in groups:
        g.mul_(factor.view(-1, *(1,) * (g.dim() - 1)).to(g.dtype))
    return left


@torch.no_grad()
def shrink(values: Tensor, threshold: float) -> None:
    """The proximal step of the L1 norm, in place: every entry nearer to zero by the threshold, zero where it was no farther.

    >>> v = torch.tensor([3.0, -0.5, -2.0])
    >>> shrink(v, 1.0); v
    tensor([ 2., -0., -1.])
    """
    values.copy_(values.sign() * (values.abs() - threshold).clamp(min=0))


def check_precision(method: str, weights: Iterable[Tensor], off: str) -> None:
    """Refuse weights so coarse that proximal steps round to nothing."""
    for dtype in {w.dtype for w in weights}:
        if torch.finfo(dtype).eps > 1e-4:
            raise ValueError(
                f"{method} shortens weights by small steps, which {str(dtype).removeprefix('torch.')} cannot tell from none: keep "
                f"the model in float32, under torch.autocast if you like, or switch the steps off: {off}."
            )


def _replace(module: nn.Module, leaf: str, value: Tensor) -> None:
    if leaf in module._parameters:
        learns = module._parameters[leaf].requires_grad  # type: ignore[union-attr]
        setattr(module, leaf, nn.Parameter(value.clone(), requires_grad=learns))
    else:
        setattr(module, leaf, value.clone())


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
