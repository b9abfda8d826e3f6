"""Where a layer's units go: found by tracing the model, for methods that gate, remove or add units."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from everlearn.params import unwrap

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
    """

    producer: str
    consumer: str
    norms: tuple[str, ...]
    width: int
    repeat: int = 1


def links(model: nn.Module, groups: Mapping[str, str | list[str]] | None = None) -> list[Link]:
    """The links of a model: those you name, or else those that tracing finds.

    Args:
        model: any module that ``torch.fx`` can trace; transformer layers of torch are known without.
        groups: for a model that cannot be traced: a producer and its consumer, ``{"conv1": "conv2"}``, or with the BatchNorms
            between them, ``{"conv1": ["norm1", "conv2"]}``.

    >>> links(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)))
    [Link(producer='0', consumer='3', norms=(), width=4, repeat=9)]
    """
    inner = unwrap(model)
    if groups is not None:
        return [_named(inner, a, [b] if isinstance(b, str) else list(b)) for a, b in groups.items()]
    found = _of_transformers(inner)
    try:
        found += _traced(inner)
    except Exception as error:  # tracing runs the model's own code, which may fail in any way on a tensor that is none
        if not found:
            raise ValueError(
                f"{type(inner).__name__} cannot be traced ({str(error)[:100]}): name which layer's units go where, "
                'groups={"conv1": "conv2"}.'
            ) from error
    return found


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
    if wanted % width:
        raise ValueError(
            f"groups: the {wanted} inputs of {consumer!r} are no multiple of the {width} units of {producer!r}."
        )
    return Link(producer, consumer, tuple(norms), width, wanted // width)


def _plain(module: nn.Module | None) -> bool:
    return isinstance(module, LAYERS) and getattr(module, "groups", 1) == 1


def _of_transformers(model: nn.Module) -> list[Link]:
    """The wide layer inside torch's own transformer layers, which tracing takes for one step."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [
        Link(f"{name}.linear1".lstrip("."), f"{name}.linear2".lstrip("."), (), module.linear1.out_features)
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]


def _traced(model: nn.Module) -> list[Link]:
    graph = fx.Tracer().trace(model)
    modules = dict(model.named_modules())
    names = {id(m): n for n, m in modules.items()}  # one module under two names is one
    places = {node: names[id(modules[str(node.target)])] for node in graph.nodes if node.op == "call_module"}
    calls = Counter(places.values())
    found = []
    for node, name in places.items():
        if _plain(modules[name]) and calls[name] == 1 and (link := _follow(node, name, places, modules, calls)):
            found.append(link)
    return found


def _follow(
    node: fx.Node, producer: str, places: dict[fx.Node, str], modules: dict[str, nn.Module], calls: Counter[str]
) -> Link | None:
    """From a producer on, as long as units stay apart, to the layer that consumes them."""
    start, norms = modules[producer], list[str]()
    width, flat = units(start), isinstance(start, nn.Linear)
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
            return Link(producer, name, tuple(norms), width, repeat)
        if isinstance(module, NORMS) and module.num_features == width and calls[name] == 1:
            norms.append(name)
        elif _flattens(user, module) or (not flat and _averages(user)):
            flat = True
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


def repeated(units: Tensor, link: Link) -> Tensor:
    """A number per unit as a number per input of the consumer."""
    return units.repeat_interleave(link.repeat) if link.repeat > 1 else units
