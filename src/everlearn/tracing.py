"""Where a layer's units go: found by tracing the model, for methods that gate, remove or add units."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from everlearn.params import unwrap
from everlearn.seeds import seeded

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ELEMENT_WISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh,
    nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Dropout,
    torch.relu, torch.tanh, torch.sigmoid, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus,
    F.tanh, F.sigmoid, F.hardswish, F.dropout,
    "relu", "relu_", "tanh", "sigmoid", "contiguous",
)  # fmt: skip
OVER_PLACES = (  # of images and sequences, each channel for itself
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    F.dropout1d, F.dropout2d, F.dropout3d, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool2d,
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """Units that one layer produces and one other layer consumes, with nothing between them that mixes units.

    Args:
        producer: the name of a linear or convolution layer whose outputs the units are.
        consumer: the name of the only layer that sees them.
        norms: the BatchNorms between them.
        width: how many units.
        repeat: inputs of the consumer per unit; more than 1 where channels with several places are flattened.
        rigid: whether the model writes out their number, as in ``x.view(-1, 400)``, so that it cannot change.
    """

    producer: str
    consumer: str
    norms: tuple[str, ...]
    width: int
    repeat: int = 1
    rigid: bool = False


def links(model: nn.Module, groups: Mapping[str, str | list[str]] | None = None) -> list[Link]:
    """The links of a model: those you name, or else those that tracing finds.

    Args:
        model: any module that ``torch.fx`` can trace; transformer layers of torch are known without.
        groups: for a model that cannot be traced: a producer and its consumer, ``{"conv1": "conv2"}``, or with the BatchNorms
            between them, ``{"conv1": ["norm1", "conv2"]}``.

    >>> links(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)))
    [Link(producer='0', consumer='3', norms=(), width=4, repeat=9, rigid=False)]
    """
    inner = unwrap(model)
    shared = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False))
    layers = {n: m for n, m in inner.named_modules() if _plain(m)}
    tied = {
        n for n, m in layers.items() if any(shared[id(p)] > 1 for p in m.parameters())
    }  # in use wherever else they are
    if groups is not None:
        for a, b in groups.items():
            if not isinstance(b, str) and not (isinstance(b, (list, tuple)) and b):
                raise ValueError(
                    f"groups: got {b!r} for {a!r}, allowed: a layer's name, or BatchNorms and then a layer."
                )
        named = [_named(inner, a, [b] if isinstance(b, str) else list(b)) for a, b in groups.items()]
        if wrong := tied & {name for link in named for name in (link.producer, link.consumer)}:
            raise ValueError(
                f"groups: {', '.join(map(repr, sorted(wrong)))} shares a weight with another layer, where its units go too: leave it out."
            )
        return named
    found = _of_transformers(inner)
    try:
        found += _traced(inner)
    except Exception as error:  # tracing runs the model's own code, which may fail in any way on a tensor that is none
        if not found:
            raise ValueError(
                f"{type(inner).__name__} cannot be traced ({str(error)[:100]}): name which layer's units go where, "
                'groups={"conv1": "conv2"}, and with BatchNorms between {"conv1": ["norm1", "conv2"]}.'
            ) from error
    return [link for link in found if not {link.producer, link.consumer} & tied]


def units(layer: nn.Module) -> int:
    """How many outputs a layer has."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def inputs(layer: nn.Module) -> int:
    """How many inputs a layer has."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def _named(model: nn.Module, producer: str, others: list[str]) -> Link:
    *norms, consumer = others
    modules = dict(model.named_modules())
    for name in (producer, consumer):
        if not _plain(modules.get(name)):
            known = ", ".join(n for n, m in modules.items() if _plain(m))
            raise ValueError(
                f"groups: {name!r} is no linear or ungrouped convolution layer of this model; there are: {known}."
            )
    for name in norms:
        if not isinstance(modules.get(name), NORMS):
            raise ValueError(f"groups: {name!r} is no BatchNorm of this model.")  # noqa: TRY004 - of a wrong name, not a wrong type
    width, wanted = units(modules[producer]), inputs(modules[consumer])
    for name in norms:
        if (own := modules[name].num_features) != width:
            raise ValueError(f"groups: {name!r} is for {own} units, {producer!r} has {width}.")
    if wanted % width:
        raise ValueError(
            f"groups: the {wanted} inputs of {consumer!r} are no multiple of the {width} units of {producer!r}."
        )
    return Link(producer, consumer, tuple(norms), width, wanted // width)


def _plain(module: nn.Module | None) -> bool:
    """Whether it is a layer with a weight of its own, not one that is computed, as weight_norm and spectral_norm do."""
    return isinstance(module, LAYERS) and getattr(module, "groups", 1) == 1 and "weight" in module._parameters


def _of_transformers(model: nn.Module) -> list[Link]:
    """The wide layer inside torch's own transformer layers, which tracing takes for one step."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [
        Link(f"{name}.linear1".lstrip("."), f"{name}.linear2".lstrip("."), (), module.linear1.out_features)
        for name, module in model.named_modules()
        if type(module) in kinds and _plain(module.linear1) and _plain(module.linear2)
    ]


def _traced(model: nn.Module) -> list[Link]:
    graph = fx.Tracer().trace(copy.deepcopy(model))  # what forward puts on the module while traced must not stay
    modules = dict(model.named_modules())
    elsewhere = {str(node.target) for node in graph.nodes if node.op == "get_attr"}  # weights that forward reads itself
    names = {id(m): n for n, m in modules.items()}  # one module under two names is one
    places = {node: names[id(modules[str(node.target)])] for node in graph.nodes if node.op == "call_module"}
    calls = Counter(places.values())
    found = []
    for node, name in places.items():
        link = _follow(node, name, places, modules, calls) if _plain(modules[name]) and calls[name] == 1 else None
        if link is not None and not {f"{link.producer}.weight", f"{link.consumer}.weight"} & elsewhere:
            found.append(link)
    return found


def _follow(
    node: fx.Node, producer: str, places: dict[fx.Node, str], modules: dict[str, nn.Module], calls: Counter[str]
) -> Link | None:
    """From a producer on, as long as units stay apart, to the layer that consumes them."""
    start, norms = modules[producer], list[str]()
    width, flat, rigid = units(start), isinstance(start, nn.Linear), False
    while True:
        users = [user for user in node.users if not _asks_shape(user)]
        if len(users) != 1 or not users[0].args or users[0].args[0] is not node:
            return None
        (user,) = users
        if any(isinstance(a, fx.Node) and not _asks_shape(a) for a in [*user.args[1:], *user.kwargs.values()]):
            return None
        name = places.get(user, "")
        module = modules[name] if name else None
        if _plain(module) and module is not None:
            fits = isinstance(module, nn.Linear) == flat and inputs(module) % width == 0
            repeat = inputs(module) // width
            if not fits or calls[name] != 1 or (repeat > 1 and isinstance(start, nn.Linear)):
                return None
            return Link(producer, name, tuple(norms), width, repeat, rigid)
        if isinstance(module, NORMS) and module.num_features == width and calls[name] == 1:
            norms.append(name)
        elif _flattens(user, module) or (not flat and _averages(user)):
            flat, rigid = True, rigid or (user.target in ("view", "reshape") and user.args[-1:] != (-1,))
        elif not (_is(user, module, ELEMENT_WISE) or (not flat and _is(user, module, OVER_PLACES))):
            return None
        node = user


def _is(node: fx.Node, module: nn.Module | None, kinds: tuple[Any, ...]) -> bool:
    return (node.target if module is None else type(module)) in kinds


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether all dimensions but the first become one."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    rest = node.args[1:]
    if node.target in (torch.flatten, "flatten"):
        return rest == (1,) or (not rest and node.kwargs == {"start_dim": 1})
    return node.target in ("view", "reshape") and len(rest) == 2 and -1 in rest


def _averages(node: fx.Node) -> bool:
    """Whether an image becomes its average."""
    if node.target not in (torch.mean, "mean"):
        return False
    dims = node.args[1:] or (node.kwargs.get("dim"),)
    return not node.kwargs.get("keepdim", False) and dims in (((2, 3),), ([2, 3],), ((-2, -1),), ([-2, -1],))


def _asks_shape(node: fx.Node) -> bool:
    """Whether a node only asks for lengths."""
    if node.op == "call_method" and node.target in ("size", "dim"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "shape"
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, fx.Node) and _asks_shape(source)


@torch.no_grad()
def separate(model: nn.Module, link: Link, *args: Any, kwargs: dict[str, Any] | None = None) -> bool:
    """Whether units really stay apart: with some gates closed, what makes and what reads those units changes nothing.

    Tried on what the model is called with, in both modes: tracing cannot see what hooks, places and lengths make of units, and
    nobody has looked at links that were named by hand.
    """
    shut = torch.arange(link.width) % 2 == 0
    for training in (False, True):
        still, noisy = (_with_noise(model, link, args, kwargs or {}, shut, size, training) for size in (0.0, 1.0))
        if len(still) != len(noisy) or not all(torch.equal(a, b) for a, b in zip(still, noisy, strict=True)):
            return False
    return True


def _with_noise(
    model: nn.Module,
    link: Link,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shut: Tensor,
    size: float,
    training: bool,
) -> list[Tensor]:
    """What the consumer is given and the model says, with noise on all that belongs to units that are shut out before the consumer."""
    given: list[Tensor] = []

    def gate(module: nn.Module, args: Any) -> tuple[Any, ...]:
        open_ = repeated(~shut, link).to(args[0].device, args[0].dtype)
        given.append(args[0] * (open_ if isinstance(module, nn.Linear) else open_.view(-1, *[1] * (args[0].dim() - 2))))
        return given[-1], *args[1:]

    inner = unwrap(model)
    consumer = inner.get_submodule(link.consumer)
    state = {n: v.clone() for n, v in inner.named_buffers()}
    for place in (link.producer, *link.norms):
        for leaf, p in inner.get_submodule(place)._parameters.items():
            if p is not None:
                noise = shut.to(p.device, p.dtype).view(-1, *[1] * (p.dim() - 1)) * size
                state[f"{place}.{leaf}".lstrip(".")] = p + noise
    weight: Any = consumer.weight
    columns = repeated(shut, link).to(weight.device, weight.dtype).view(1, -1, *[1] * (weight.dim() - 2))
    state[f"{link.consumer}.weight"] = weight + columns * size
    hook, modes = consumer.register_forward_pre_hook(gate), [(m, m.training) for m in inner.modules()]
    try:
        inner.train(training)
        with seeded(0):
            out = functional_call(inner, state, args, kwargs)
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode
    return [*given, *(v for v in tree_leaves(out) if isinstance(v, Tensor))]


def repeated(units: Tensor, link: Link) -> Tensor:
    """A number per unit as a number per input of the consumer."""
    return units.repeat_interleave(link.repeat) if link.repeat > 1 else units
