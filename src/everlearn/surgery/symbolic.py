"""Find links by symbolic tracing, for a model of which no example input is known."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from everlearn.surgery.link import NORMS, Link, is_plain_layer, num_inputs, num_units

ELEMENT_WISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Tanh,
    nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Dropout,
    torch.relu, torch.tanh, torch.sigmoid, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish,
    F.softplus,
    F.tanh, F.sigmoid, F.hardswish, F.dropout,
    "relu", "relu_", "tanh", "sigmoid", "contiguous",
)  # fmt: skip
# Operations on images and sequences that treat each channel separately.
CHANNEL_WISE = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    F.dropout1d, F.dropout2d, F.dropout3d, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d,
    F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool2d,
)  # fmt: skip


def find_symbolic_links(model: nn.Module) -> list[Link]:
    """Return the links that ``torch.fx`` can see; raise ValueError if it cannot trace the model."""
    all_links = _transformer_links(model)
    try:
        all_links += _traced_links(model)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        if not all_links:
            raise ValueError(
                f"{type(model).__name__} cannot be traced without examples ({str(error)[:100]}). Give inputs, "
                "links(model, x), or a task whose data can be read twice (arrays, a Dataset, a DataLoader); or name which "
                'layer\'s units go where, groups={"conv1": "conv2"}, and with BatchNorms between '
                '{"conv1": ["norm1", "conv2"]}.'
            ) from error
    return all_links


def _transformer_links(model: nn.Module) -> list[Link]:
    """Find the feed-forward links inside torch's transformer layers, which tracing treats as single operations."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [
        Link(f"{name}.linear1".lstrip("."), f"{name}.linear2".lstrip("."), (), module.linear1.out_features)
        for name, module in model.named_modules()
        if type(module) in kinds and is_plain_layer(module.linear1) and is_plain_layer(module.linear2)
    ]


def _traced_links(model: nn.Module) -> list[Link]:
    """Find links in the graph that ``torch.fx`` traces."""
    # Trace a copy: the forward pass may write attributes while it is traced.
    graph = fx.Tracer().trace(copy.deepcopy(model))
    modules = dict(model.named_modules())

    # A module registered under two names counts as one.
    name_of = {id(m): n for n, m in modules.items()}
    layer_calls = {node: name_of[id(modules[str(node.target)])] for node in graph.nodes if node.op == "call_module"}
    call_counts = Counter(layer_calls.values())

    # Weights that the model's forward reads directly are used outside their layer.
    direct_reads = {str(node.target) for node in graph.nodes if node.op == "get_attr"}

    traced_links = []
    for node, name in layer_calls.items():
        if not is_plain_layer(modules[name]) or call_counts[name] != 1:
            continue
        link = _follow_units(node, name, layer_calls, modules, call_counts)
        if link is not None and not {f"{link.producer}.weight", f"{link.consumer}.weight"} & direct_reads:
            traced_links.append(link)
    return traced_links


def _follow_units(
    node: fx.Node,
    producer: str,
    layer_calls: dict[fx.Node, str],
    modules: dict[str, nn.Module],
    call_counts: Counter[str],
) -> Link | None:
    """Follow the graph from a producer to the layer that consumes its units; None if anything mixes the units."""
    start = modules[producer]
    width = num_units(start)
    norms: list[str] = []
    is_flat = isinstance(start, nn.Linear)
    is_rigid = False

    while True:
        # The units must have one user, which has them as its first and only tensor argument.
        users = [user for user in node.users if not _is_shape_query(user)]
        if len(users) != 1 or not users[0].args or users[0].args[0] is not node:
            return None
        (user,) = users
        side_arguments = [*user.args[1:], *user.kwargs.values()]
        if any(isinstance(a, fx.Node) and not _is_shape_query(a) for a in side_arguments):
            return None

        name = layer_calls.get(user, "")
        module = modules[name] if name else None
        if module is not None and is_plain_layer(module):
            fits = isinstance(module, nn.Linear) == is_flat and num_inputs(module) % width == 0
            repeat = num_inputs(module) // width
            if not fits or call_counts[name] != 1 or (repeat > 1 and isinstance(start, nn.Linear)):
                return None
            return Link(producer, name, tuple(norms), width, repeat, is_rigid)

        if isinstance(module, NORMS) and module.num_features == width and call_counts[name] == 1:
            norms.append(name)
        elif _is_flatten(user, module) or (not is_flat and _is_spatial_mean(user)):
            is_flat = True
            is_rigid = is_rigid or (user.target in ("view", "reshape") and user.args[-1:] != (-1,))
        elif not (_is_one_of(user, module, ELEMENT_WISE) or (not is_flat and _is_one_of(user, module, CHANNEL_WISE))):
            return None
        node = user


def _is_one_of(node: fx.Node, module: nn.Module | None, kinds: tuple[Any, ...]) -> bool:
    """Whether a node calls one of these functions, methods or module classes."""
    return (node.target if module is None else type(module)) in kinds


def _is_flatten(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node merges all dimensions but the first."""
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    arguments = node.args[1:]
    if node.target in (torch.flatten, "flatten"):
        return arguments == (1,) or (not arguments and node.kwargs == {"start_dim": 1})
    return node.target in ("view", "reshape") and len(arguments) == 2 and -1 in arguments


def _is_spatial_mean(node: fx.Node) -> bool:
    """Whether a node averages images over height and width."""
    if node.target not in (torch.mean, "mean"):
        return False
    dims = node.args[1:] or (node.kwargs.get("dim"),)
    return not node.kwargs.get("keepdim", False) and dims in (((2, 3),), ([2, 3],), ((-2, -1),), ([-2, -1],))


def _is_shape_query(node: fx.Node) -> bool:
    """Whether a node only reads sizes of a tensor."""
    if node.op == "call_method" and node.target in ("size", "dim"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "shape"
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, fx.Node) and _is_shape_query(source)
