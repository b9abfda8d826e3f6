"""Find which layer produces each unit and which layer reads it, for methods that gate, remove or add units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.core.data_source import Batches, row_count
from everlearn.core.forward import arguments
from everlearn.core.parameters import Params, unwrap
from everlearn.core.task import Split, as_task
from everlearn.runtime.randomness import seeded
from everlearn.surgery.hooks import without_hooks
from everlearn.surgery.link import NORMS, Link, is_plain_layer, num_inputs, num_units, repeat_per_input
from everlearn.surgery.unit_flow import UnitTracker

__all__ = [
    "Link",
    "Structure",
    "find_structure",
    "keeps_units_separate",
    "links",
    "num_inputs",
    "num_units",
    "read_example",
    "repeat_per_input",
]

# Examples from which the structure is read. They are also run one by one: the model's code may depend on the data.
NUM_EXAMPLES = 8

# What a model may raise for a batch of a size, or with a number of units, that its code does not expect.
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)

# Why a layer that no traced example calls has no link.
NOT_CALLED = "the traced examples do not call it as a module; layers inside nn.MultiheadAttention never are"


@dataclass(frozen=True)
class Structure:
    """Links of a model, and the layers whose units are on no link.

    Args:
        links: in the order in which the model calls their producers.
        unlinked: the other linear and convolution layers, each with the reason.
    """

    links: list[Link]
    unlinked: list[tuple[str, str]]


def links(model: nn.Module, x: Any = None, *, groups: Mapping[str, str | list[str]] | None = None) -> list[Link]:
    """Return the links of a model: those in ``groups``, or else those that forward passes on examples show.

    Args:
        model: any module.
        x: a batch of a few inputs, as ``everlearn.core.forward.forward`` takes it; not needed with ``groups``.
        groups: links named by the user: a producer and its consumer, ``{"conv1": "conv2"}``, or with the BatchNorms
            between them, ``{"conv1": ["norm1", "conv2"]}``.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))
    >>> links(net, torch.zeros(2, 1, 5, 5))
    [Link(producer='0', consumer='3', norms=(), width=4, repeat=9, rigid=False)]
    """
    if groups is not None:
        inner = unwrap(model)
        return _links_from_groups(inner, groups, _find_tied_layers(inner))
    if x is None:
        raise ValueError(
            "Links are found by running the model: give a batch of inputs, links(model, x), or name them, "
            'groups={"conv1": "conv2"}, and with BatchNorms between {"conv1": ["norm1", "conv2"]}.'
        )
    return find_structure(model, x).links


def find_structure(model: nn.Module, x: Any) -> Structure:
    """Find links by following the operations of real forward passes, and test each of them.

    The batch is run in evaluation and in training mode, and its examples one by one, so that code that depends on the
    data takes several of its paths. A link must be the same in all passes, and its layers must be called once in each.
    It is then tested with ``keeps_units_separate``.

    Args:
        model: any module. Its parameters, buffers, attributes and random state stay as they are.
        x: a batch of a few inputs, as ``everlearn.core.forward.forward`` takes it.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> structure = find_structure(net, torch.zeros(2, 4))
    >>> [(link.producer, link.consumer) for link in structure.links]
    [('0', '2')]
    >>> structure.unlinked[0]
    ('2', "native_layer_norm mixes its units (in '3', LayerNorm)")
    """
    inner = unwrap(model)
    with without_hooks(inner):
        return _find_structure(inner, x)


def _find_structure(inner: nn.Module, x: Any) -> Structure:
    """Find the structure of a model without hooks of methods."""
    tied_layers = _find_tied_layers(inner)
    passes = _record_passes(inner, x)

    # Layers in the order of their calls, and then those that are never called.
    layer_names = {name: None for tracker in passes for name in tracker.num_calls}
    layer_names |= {name: None for name, _ in inner.named_modules()}

    recorded = []
    unlinked = []
    for name in layer_names:
        if is_plain_layer(inner.get_submodule(name)):
            link = _merge_passes(name, passes, tied_layers)
            if isinstance(link, Link):
                recorded.append(link)
            else:
                unlinked.append((name, link))

    # One test of all links is enough if none of them fails.
    args, kwargs = arguments(inner, x)
    separate = recorded
    if not _are_separate(inner, recorded, args, kwargs):
        separate = [link for link in recorded if _are_separate(inner, [link], args, kwargs)]
    for link in recorded:
        if link not in separate:
            reason = f"a test showed that its units do not go to {link.consumer!r} alone, or are mixed on their way"
            unlinked.append((link.producer, reason))

    plain_outputs = _run(inner, {}, args, kwargs, training=False)
    if _can_widen(inner, separate, args, kwargs, plain_outputs):
        return Structure(separate, unlinked)
    measured = []
    for link in separate:
        is_rigid = not _can_widen(inner, [link], args, kwargs, plain_outputs)
        measured.append(replace(link, rigid=is_rigid))
    return Structure(measured, unlinked)


def read_example(model: nn.Module, task: Any) -> Any:
    """Read inputs of a few examples of a task, on the model's device; None if there are none to read.

    The training loop misses nothing: a DataLoader's random generators are put back, and the first batch of an iterator
    is put back into the task. An iterator outside a Task is not read.
    """
    data = as_task(task)
    splits: tuple[Split, ...] = ("train", "valid", "test")
    for split in splits:
        source = getattr(data, split)
        if isinstance(source, Batches) and isinstance(source.iterable, Iterator):
            if data is not task:
                continue
            source = _peek(source)
        if source is None:
            continue

        generators = _find_generators(source)
        states = [generator.get_state() for generator in generators]
        readable = replace(data, **{split: source})
        batch = next(readable.examples(NUM_EXAMPLES, split, max_examples=NUM_EXAMPLES), None)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if batch is not None:
            return batch.to(next(unwrap(model).parameters()).device).x
    return None


def _peek(source: Batches) -> Batches | None:
    """Return the first batch of an iterator, which is put back; None if there is no batch left."""
    iterator: Any = source.iterable
    with seeded(0):
        first_batch = next(iterator, None)
    if first_batch is None:
        return None
    source.iterable = chain([first_batch], iterator)
    return Batches([first_batch], source.rename)


def _find_generators(source: Any) -> list[torch.Generator]:
    """List the random generators of a DataLoader and its samplers."""
    loader = getattr(source, "iterable", None)
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


def _record_passes(inner: nn.Module, x: Any) -> list[UnitTracker]:
    """Follow units through passes of the batch in both modes, and of its examples one by one."""
    num_examples = row_count(x)
    try:
        passes = [_record_pass(inner, x, training=False), _record_pass(inner, x, training=True)]
    except MODEL_ERRORS as error:
        raise ValueError(
            f"{type(inner).__name__} cannot be run on {num_examples} examples to find its units ({str(error)[:200]}): "
            'name the layers, groups={"conv1": "conv2"}, and with BatchNorms between {"conv1": ["norm1", "conv2"]}.'
        ) from error

    for i in range(min(num_examples, NUM_EXAMPLES)):
        example = tree_map(lambda v, i=i: _select_row(v, i, num_examples), x)
        try:
            passes.append(_record_pass(inner, example, training=False))
        except MODEL_ERRORS:
            # A model that takes whole batches only has no other passes.
            break
    return passes


def _select_row(value: Any, i: int, num_examples: int) -> Any:
    """Return one example of a tensor with a row per example; options stay as they are."""
    is_per_example = isinstance(value, Tensor) and value.dim() and len(value) == num_examples
    return value[i : i + 1] if is_per_example else value


def _record_pass(inner: nn.Module, x: Any, training: bool) -> UnitTracker:
    args, kwargs = arguments(inner, x)
    tracker = UnitTracker(inner)
    with _preserved(inner, training), tracker.hooked(), tracker:
        outputs = functional_call(inner, _clone_buffers(inner), args, kwargs)
    tracker.end_pass(outputs)
    return tracker


def _merge_passes(name: str, passes: list[UnitTracker], tied_layers: set[str]) -> Link | str:
    """Return the link of a layer if it is the same in all passes, or else the reason why there is none."""
    if len({tracker.num_calls[name] for tracker in passes}) > 1:
        return "it is called a varying number of times, depending on the data"
    if not passes[0].num_calls[name]:
        return NOT_CALLED

    merged: Link | str | None = None
    for tracker in passes:
        link = _find_link(name, tracker, tied_layers)
        if isinstance(link, str):
            return link
        if merged is not None and link != merged:
            return "its units go different ways, depending on the data or the mode"
        merged = link
    assert merged is not None  # there is at least one pass
    return merged


def _find_link(name: str, tracker: UnitTracker, tied_layers: set[str]) -> Link | str:
    """Return the link of a layer in one pass, or the reason why there is none."""
    obstacle = _find_obstacle(name, tracker, tied_layers)
    if obstacle is not None:
        return f"it {obstacle}"
    if name in tracker.reasons:
        return tracker.reasons[name]

    readings = tracker.readers.get(name, [])
    reader_names = sorted({consumer for consumer, _ in readings})
    if not readings:
        return "no layer reads its units"
    if len(reader_names) > 1:
        return f"its units are read by several layers: {', '.join(map(repr, reader_names))}"

    consumer, units = readings[0]
    for other in (consumer, *units.norms):
        obstacle = _find_obstacle(other, tracker, tied_layers)
        if obstacle is not None:
            return f"{other!r}, to which its units go, {obstacle}"
    return Link(name, consumer, units.norms, units.width, units.repeat)


def _find_obstacle(name: str, tracker: UnitTracker, tied_layers: set[str]) -> str | None:
    """Say why a layer or norm can be on no link, as the end of a sentence; None if it can."""
    if tracker.num_calls[name] > 1:
        return f"is called {tracker.num_calls[name]} times in a forward pass"
    if name in tied_layers:
        return "shares a weight with another layer"
    if name in tracker.read_directly:
        return "has a weight that is also read outside of the layer"
    return None


def _find_tied_layers(inner: nn.Module) -> set[str]:
    """Find layers that share a parameter: their units are also produced or read by the other layers."""
    uses = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False))
    tied_layers = set()
    for name, module in inner.named_modules():
        if is_plain_layer(module) and any(uses[id(p)] > 1 for p in module.parameters()):
            tied_layers.add(name)
    return tied_layers


@torch.no_grad()
def _can_widen(
    inner: nn.Module,
    widened_links: list[Link],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plain_outputs: list[Tensor],
) -> bool:
    """Whether the model gives the same outputs with one more unit per link, with outgoing weights of zero."""
    state: Params = {}
    for link in widened_links:
        for name in (link.producer, *link.norms):
            module = inner.get_submodule(name)
            for leaf, v in [*module._parameters.items(), *module._buffers.items()]:
                if v is not None and v.dim():
                    key = f"{name}.{leaf}"
                    rows = state.get(key, v)
                    state[key] = torch.cat([rows, rows[:1]])
        key = f"{link.consumer}.weight"
        weight = state.get(key, inner.get_parameter(key))
        new_columns = weight.new_zeros(len(weight), link.repeat, *weight.shape[2:])
        state[key] = torch.cat([weight, new_columns], 1)

    try:
        outputs = _run(inner, state, args, kwargs, training=False)
    except MODEL_ERRORS:
        return False
    if [v.shape for v in outputs] != [v.shape for v in plain_outputs]:
        return False

    # Sums of another length round differently.
    for wide, plain in zip(outputs, plain_outputs, strict=True):
        if plain.is_floating_point() and plain.numel():
            tolerance = 1e-2 * float(plain.double().abs().max()) + 1e-6
            if not torch.allclose(wide.double(), plain.double(), rtol=0, atol=tolerance, equal_nan=True):
                return False
    return True


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
        if not is_plain_layer(modules.get(name)):
            allowed = ", ".join(n for n, m in modules.items() if is_plain_layer(m))
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


def keeps_units_separate(model: nn.Module, link: Link, *args: Any, kwargs: dict[str, Any] | None = None) -> bool:
    """Test on real inputs that the weights of gated-off units influence nothing.

    Half of the gates are closed, then noise is added to the weights of those units. If the consumer's input and the
    model's outputs stay equal, in training and in evaluation mode, the units are separate. Links named by the user were
    never seen in a forward pass.
    """
    return _are_separate(unwrap(model), [link], args, kwargs or {})


@torch.no_grad()
def _are_separate(inner: nn.Module, tested_links: list[Link], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Test several links at once, with half of the units of each gated off."""
    for training in (False, True):
        clean = _gated_pass(inner, tested_links, args, kwargs, 0.0, training)
        noisy = _gated_pass(inner, tested_links, args, kwargs, 1.0, training)
        if len(clean) != len(noisy) or not all(torch.equal(a, b) for a, b in zip(clean, noisy, strict=True)):
            return False
    return True


def _gated_pass(
    inner: nn.Module,
    tested_links: list[Link],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noise_scale: float,
    training: bool,
) -> list[Tensor]:
    """Return the consumers' gated inputs and the model's outputs, with noise on the weights of closed units."""
    gated_inputs: list[Tensor] = []

    def make_gate(link: Link) -> Callable[..., tuple[Any, ...]]:
        def gate(module: nn.Module, args: Any) -> tuple[Any, ...]:
            x = args[0]
            gates = repeat_per_input(~_closed_units(link), link).to(x.device, x.dtype)
            if not isinstance(module, nn.Linear):
                gates = gates.view(-1, *[1] * (x.dim() - 2))
            gated_inputs.append(x * gates)
            return gated_inputs[-1], *args[1:]

        return gate

    handles = [inner.get_submodule(k.consumer).register_forward_pre_hook(make_gate(k)) for k in tested_links]
    try:
        outputs = _run(inner, _noisy_weights(inner, tested_links, noise_scale), args, kwargs, training)
    finally:
        for handle in handles:
            handle.remove()
    return [*gated_inputs, *outputs]


def _noisy_weights(inner: nn.Module, tested_links: list[Link], noise_scale: float) -> Params:
    """Add noise to the incoming and outgoing weights of closed units."""
    state: Params = {}
    for link in tested_links:
        is_closed = _closed_units(link)
        for layer_name in (link.producer, *link.norms):
            for leaf, p in inner.get_submodule(layer_name)._parameters.items():
                if p is not None:
                    key = f"{layer_name}.{leaf}"
                    noise = is_closed.to(p.device, p.dtype).view(-1, *[1] * (p.dim() - 1)) * noise_scale
                    state[key] = state.get(key, p) + noise

        key = f"{link.consumer}.weight"
        weight = state.get(key, inner.get_parameter(key))
        closed_columns = repeat_per_input(is_closed, link).to(weight.device, weight.dtype)
        state[key] = weight + closed_columns.view(1, -1, *[1] * (weight.dim() - 2)) * noise_scale
    return state


def _closed_units(link: Link) -> Tensor:
    return torch.arange(link.width) % 2 == 0


def _run(
    inner: nn.Module, state: Params, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> list[Tensor]:
    """Return the output tensors of a forward pass with some other parameters, which leaves the model unchanged."""
    with _preserved(inner, training):
        outputs = functional_call(inner, {**_clone_buffers(inner), **state}, args, kwargs)
    return [v for v in tree_leaves(outputs) if isinstance(v, Tensor)]


def _clone_buffers(inner: nn.Module) -> Params:
    """Copy the buffers, so that a pass in training mode leaves running statistics unchanged."""
    return {name: v.clone() for name, v in inner.named_buffers()}


@contextmanager
def _preserved(inner: nn.Module, training: bool) -> Iterator[None]:
    """Set a mode without gradients inside the context; restore modes, attributes and random state afterwards."""
    attributes = [(module, dict(vars(module))) for module in inner.modules()]
    try:
        inner.train(training)
        with seeded(0), torch.no_grad():
            yield
    finally:
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
