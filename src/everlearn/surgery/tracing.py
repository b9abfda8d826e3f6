"""Trace which layer produces each unit and which layer reads it, for methods that gate, remove or add units."""

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

from everlearn.core.parameters import unwrap
from everlearn.runtime.randomness import seeded

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
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


@dataclass(frozen=True)
class Link:
    """Units that one layer produces and one other layer consumes, with nothing between them that mixes units.

    Args:
        producer: name of the linear or convolution layer whose outputs the units are.
        consumer: name of the only layer that reads them.
        norms: names of the BatchNorms between them.
        width: number of units.
        repeat: inputs of the consumer per unit; more than 1 where feature maps are flattened.
        rigid: whether the model's code fixes their number, as in ``x.view(-1, 400)``.
    """

    producer: str
    consumer: str
    norms: tuple[str, ...]
    width: int
    repeat: int = 1
    rigid: bool = False


def links(model: nn.Module, groups: Mapping[str, str | list[str]] | None = None) -> list[Link]:
    """Return the links of a model: those in ``groups``, or else those that tracing finds.

    Args:
        model: any module that ``torch.fx`` can trace. The transformer layers of torch need no tracing.
        groups: for a model that cannot be traced: a producer and its consumer, ``{"conv1": "conv2"}``, or with the
            BatchNorms between them, ``{"conv1": ["norm1", "conv2"]}``.

    >>> links(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)))
    [Link(producer='0', consumer='3', norms=(), width=4, repeat=9, rigid=False)]
    """
    inner = unwrap(model)

    # Units of a layer with tied weights are also produced or read by the other layers that share the weight.
    uses = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False))
    tied_layers = set()
    for name, module in inner.named_modules():
        if _is_plain_layer(module) and any(uses[id(p)] > 1 for p in module.parameters()):
            tied_layers.add(name)

    if groups is not None:
        return _links_from_groups(inner, groups, tied_layers)

    all_links = _transformer_links(inner)
    try:
        all_links += _traced_links(inner)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        if not all_links:
            raise ValueError(
                f"{type(inner).__name__} cannot be traced ({str(error)[:100]}): name which layer's units go where, "
                'groups={"conv1": "conv2"}, and with BatchNorms between {"conv1": ["norm1", "conv2"]}.'
            ) from error
    return [link for link in all_links if not {link.producer, link.consumer} & tied_layers]


def num_units(layer: nn.Module) -> int:
    """Return the number of outputs of a linear or convolution layer."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def num_inputs(layer: nn.Module) -> int:
    """Return the number of inputs of a linear or convolution layer."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def repeat_per_input(unit_values: Tensor, link: Link) -> Tensor:
    """Turn a value per unit into a value per input of the consumer."""
    if link.repeat == 1:
        return unit_values
    return unit_values.repeat_interleave(link.repeat)


def _links_from_groups(inner: nn.Module, groups: Mapping[str, str | list[str]], tied_layers: set[str]) -> list[Link]:
    """Read and check the links that the user named."""
    named_links = []
    for producer, target in groups.items():
        if isinstance(target, str):
            target_names = [target]
        elif isinstance(target, (list, tuple)) and target:
            target_names = list(target)
        else:
            raise ValueError(
                f"groups: got {target!r} for {producer!r}, allowed: a layer's name, or BatchNorms and then a layer."
            )
        named_links.append(_named_link(inner, producer, target_names))

    shared = tied_layers & {name for link in named_links for name in (link.producer, link.consumer)}
    if shared:
        raise ValueError(
            f"groups: {', '.join(map(repr, sorted(shared)))} shares a weight with another layer, which uses the same "
            "units: leave it out."
        )
    return named_links


def _named_link(model: nn.Module, producer: str, target_names: list[str]) -> Link:
    """Make the link from a producer through BatchNorms to a consumer, all given by name."""
    *norms, consumer = target_names
    modules = dict(model.named_modules())
    for name in (producer, consumer):
        if not _is_plain_layer(modules.get(name)):
            allowed = ", ".join(n for n, m in modules.items() if _is_plain_layer(m))
            raise ValueError(
                f"groups: {name!r} is no linear or ungrouped convolution layer of this model; there are: {allowed}."
            )
    for name in norms:
        if not isinstance(modules.get(name), NORMS):
            raise ValueError(f"groups: {name!r} is no BatchNorm of this model.")  # noqa: TRY004 - a wrong name

    width = num_units(modules[producer])
    for name in norms:
        norm_width = modules[name].num_features
        if norm_width != width:
            raise ValueError(f"groups: {name!r} is for {norm_width} units, {producer!r} has {width}.")

    consumer_inputs = num_inputs(modules[consumer])
    if consumer_inputs % width:
        raise ValueError(
            f"groups: the {consumer_inputs} inputs of {consumer!r} are not a multiple of the {width} units of "
            f"{producer!r}."
        )
    return Link(producer, consumer, tuple(norms), width, consumer_inputs // width)


def _is_plain_layer(module: nn.Module | None) -> bool:
    """Whether a module is an ungrouped layer with a weight parameter, without weight_norm or spectral_norm."""
    return isinstance(module, LAYERS) and getattr(module, "groups", 1) == 1 and "weight" in module._parameters


def _transformer_links(model: nn.Module) -> list[Link]:
    """Find the feed-forward links inside torch's transformer layers, which tracing treats as single operations."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [
        Link(f"{name}.linear1".lstrip("."), f"{name}.linear2".lstrip("."), (), module.linear1.out_features)
        for name, module in model.named_modules()
        if type(module) in kinds and _is_plain_layer(module.linear1) and _is_plain_layer(module.linear2)
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
        if not _is_plain_layer(modules[name]) or call_counts[name] != 1:
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
        if module is not None and _is_plain_layer(module):
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


@torch.no_grad()
def keeps_units_separate(model: nn.Module, link: Link, *args: Any, kwargs: dict[str, Any] | None = None) -> bool:
    """Test on real inputs that the weights of gated-off units influence nothing.

    Half of the gates are closed, then noise is added to the weights of those units. If the consumer's input and the
    model's outputs stay equal, in training and in evaluation mode, the units are separate. Tracing alone cannot see the
    effect of hooks, and links named by the user were never traced.
    """
    is_closed = torch.arange(link.width) % 2 == 0
    for training in (False, True):
        clean = _gated_pass(model, link, args, kwargs or {}, is_closed, 0.0, training)
        noisy = _gated_pass(model, link, args, kwargs or {}, is_closed, 1.0, training)
        if len(clean) != len(noisy) or not all(torch.equal(a, b) for a, b in zip(clean, noisy, strict=True)):
            return False
    return True


def _gated_pass(
    model: nn.Module,
    link: Link,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_closed: Tensor,
    noise_scale: float,
    training: bool,
) -> list[Tensor]:
    """Return the consumer's gated inputs and the model's outputs, with noise on the weights of closed units."""
    inner = unwrap(model)
    consumer = inner.get_submodule(link.consumer)
    gated_inputs: list[Tensor] = []

    def gate(module: nn.Module, args: Any) -> tuple[Any, ...]:
        x = args[0]
        gates = repeat_per_input(~is_closed, link).to(x.device, x.dtype)
        if not isinstance(module, nn.Linear):
            gates = gates.view(-1, *[1] * (x.dim() - 2))
        gated_inputs.append(x * gates)
        return gated_inputs[-1], *args[1:]

    # Buffers are cloned, so that the pass in training mode leaves running statistics unchanged.
    state = {name: v.clone() for name, v in inner.named_buffers()}
    for layer_name in (link.producer, *link.norms):
        for leaf, p in inner.get_submodule(layer_name)._parameters.items():
            if p is not None:
                noise = is_closed.to(p.device, p.dtype).view(-1, *[1] * (p.dim() - 1)) * noise_scale
                state[f"{layer_name}.{leaf}".lstrip(".")] = p + noise
    weight: Any = consumer.weight
    closed_columns = repeat_per_input(is_closed, link).to(weight.device, weight.dtype)
    state[f"{link.consumer}.weight"] = weight + closed_columns.view(1, -1, *[1] * (weight.dim() - 2)) * noise_scale

    handle = consumer.register_forward_pre_hook(gate)
    modes = [(module, module.training) for module in inner.modules()]
    try:
        inner.train(training)
        with seeded(0):
            outputs = functional_call(inner, state, args, kwargs)
    finally:
        handle.remove()
        for module, mode in modes:
            module.training = mode
    return [*gated_inputs, *(v for v in tree_leaves(outputs) if isinstance(v, Tensor))]
