"""Units beside those of a model: in tensors of their own, taking part through hooks; the model's tensors stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import Params, unwrap
from everlearn.runtime.randomness import generator
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import Hook, remove_hooks
from everlearn.surgery.resize import draw_weights, unit_columns
from everlearn.surgery.tracing import Link, links

Block = dict[str, Params]  # of some layers' new units, by the layer's name, what they read and what reads them
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")


@dataclass
class View:
    """What takes part in a forward pass.

    Args:
        blocks: in the order they were added; each reads those before it and itself.
        head: how the output layer reads all their units together, where units lead into it.
        awake: of the last block, how many units of each layer take part, the first ones; that block learns, so its BatchNorms
            look at the batch. None where all blocks have been learned.
    """

    blocks: list[Block] = field(default_factory=list)
    head: Tensor | None = None
    awake: Mapping[str, int] | None = None

    def count(self, name: str) -> int:
        """How many added units of a layer take part."""
        whole = self.blocks if self.awake is None else self.blocks[:-1]
        return sum(len(b[name]["weight"]) for b in whole) + (0 if self.awake is None else self.awake[name])


class AddedUnits:
    """Where units can be added to a model, and the hooks by which they take part.

        new units:      [h; h'] = [f(W h₀); f(W' h₀ + V' h₀')]     ' marks what was added
        output layer:   W h + H' h'
        chained layer:  its old units read h alone, its new units both
        other layers:   W h + O' h', where what they say is no link's units (a residual stream)

    A block holds for each layer ``weight`` W', ``bias``, ``inner`` V' (where the layer itself reads added units), ``out`` O'
    (where they lead into neither the output layer nor a chained one) and the entries of BatchNorms.

    Args:
        model: hooks are put on it.
        groups: see ``everlearn.surgery.tracing.links``.
        output: name of the output layer; by default the last ``nn.Linear``.
        free: whether added units may be read by the old units of chained layers too, through an ``out``.
    """

    def __init__(
        self, model: nn.Module, groups: Mapping[str, Any] | None, output: str | None, free: bool = False
    ) -> None:
        self.model = unwrap(model)
        self.view = View()  # what takes part; no more than that is copied and saved with the model's hooks
        self.head = output_layer(self.model, output)[0]
        remove_hooks(self.model)
        found = links(self.model, groups)
        self.links = [link for link in found if link.producer != self.head and not link.rigid]
        if not self.links:
            raise ValueError(
                f"There is no layer to widen in {type(self.model).__name__}: growing needs two linear or convolution layers "
                "with nothing between them that mixes units or fixes their number (for x.view(-1, 64) write x.flatten(1)); "
                'name them, groups={"conv1": "conv2"}, and with BatchNorms between {"conv1": ["norm1", "conv2"]}.'
            )
        self.feeds = {link.consumer: link for link in self.links}
        self.links_by_producer = {link.producer: link for link in self.links}
        self.written = {
            c for c in self.feeds if c != self.head and (free or c not in self.links_by_producer)
        }  # by an ``out``
        self._extra: Params = {}  # the added part of a layer's input, while the layer works
        for name in {**self.feeds, **self.links_by_producer}:
            layer = self.model.get_submodule(name)
            if name in self.feeds:
                layer.register_forward_pre_hook(Hook(self._split, name, self.feeds[name]), with_kwargs=True)
            layer.register_forward_hook(Hook(self._add, name), with_kwargs=True)
        for link in self.links:
            for norm in link.norms:
                layer = self.model.get_submodule(norm)
                layer.register_forward_pre_hook(Hook(self._split, norm, link), with_kwargs=True)
                layer.register_forward_hook(Hook(self._normalise, norm, link))

    def is_on(self, model: nn.Module) -> bool:
        """Whether all these hooks are on a model: another method takes off what it finds, and layers get replaced."""

        def ours(name: str) -> bool:
            hooks = model.get_submodule(name)._forward_hooks.values()
            return any(isinstance(h, Hook) and getattr(h.func, "__self__", None) is self for h in hooks)

        return model is self.model and all(ours(name) for name in {**self.feeds, **self.links_by_producer})

    @contextmanager
    def showing(self, view: View) -> Iterator[None]:
        """Inside, something else takes part."""
        before, self.view = self.view, self.placed(view)
        try:
            yield
        finally:
            self.view = before

    def placed(self, view: View) -> View:
        """The same where the model's weights are now, and in their precision."""
        blocks = [
            {n: {leaf: moved(v, self._like(n, leaf)) for leaf, v in t.items()} for n, t in block.items()}
            for block in view.blocks
        ]
        return View(blocks, None if view.head is None else moved(view.head, self.weight(self.head)), view.awake)

    def weight(self, name: str) -> Tensor:
        """What a layer of the model reads."""
        return cast(Tensor, self.model.get_submodule(name).weight)

    def _like(self, name: str, leaf: str) -> Tensor:
        """What of the model has the place and precision that a block's tensor should have."""
        link, (first, _, last) = self.links_by_producer[name], leaf.partition(".")
        place = link.norms[int(first.removeprefix("norm"))] if last else link.consumer if leaf == "out" else name
        return cast(Tensor, getattr(self.model.get_submodule(place), last or "weight"))

    def empty(self, before: Mapping[str, int], count: Mapping[str, int]) -> Block:
        """A block of so many units per layer, all zero, behind so many that were added before."""
        block: Block = {}
        for name, link in self.links_by_producer.items():
            layer, n = self.model.get_submodule(name), count[name]
            weight: Any = layer.weight
            block[name] = {"weight": weight.new_zeros(n, *weight.shape[1:])}
            if layer.bias is not None:
                block[name]["bias"] = weight.new_zeros(n)
            if up := self.feeds.get(name):
                read = (before[up.producer] + count[up.producer]) * up.repeat
                block[name]["inner"] = weight.new_zeros(n, read, *weight.shape[2:])
            if link.consumer in self.written:
                reader = self.weight(link.consumer)
                block[name]["out"] = reader.new_zeros(len(reader), n * link.repeat, *reader.shape[2:])
            for i, norm in enumerate(link.norms):
                there = self.model.get_submodule(norm)
                for leaf in (*AFFINE, *STATISTICS):
                    if (v := getattr(there, leaf)) is not None:
                        block[name][f"norm{i}.{leaf}"] = v.new_zeros(n)
        return block

    @torch.no_grad()
    def draw(
        self, block: Block, before: Mapping[str, int], old: Mapping[str, int], new: Mapping[str, int], seed: int
    ) -> None:
        """Wake units of a block: from so many per layer to so many. What reads them is zero, so the model says the same.

        What they read of the block itself, or of the model's input, is drawn as in a new layer. What they read of earlier units
        starts at zero: those were made for other tasks, and drowned out the new ones where tasks are unlike.
        """
        for name, tensors in block.items():
            rows, up, weight = slice(old[name], new[name]), self.feeds.get(name), tensors["weight"]
            if (count := new[name] - old[name]) <= 0:
                continue
            fed = up is not None and new[up.producer] > 0
            skip, read = (
                (n * up.repeat for n in (before[up.producer], before[up.producer] + new[up.producer])) if up else (0, 0)
            )
            fan_in = (read - skip if fed else weight.shape[1]) * weight[0, 0].numel()
            source = generator(seed, "units", name, old[name])
            for leaf, v in tensors.items():
                if leaf == "bias" or (leaf == "weight" and not fed):
                    v[rows] = draw_weights((count, *v.shape[1:]), fan_in, v, source)
                elif leaf == "inner":
                    v[rows, skip:read] = draw_weights((count, read - skip, *v.shape[2:]), fan_in, v, source)
                elif leaf.endswith((".weight", "_var")):
                    v[rows] = 1

    @torch.no_grad()
    def part(
        self, block: Block, head: Tensor | None, before: Mapping[str, int], at: Mapping[str, Tensor]
    ) -> tuple[Block, Tensor | None]:
        """Of a block and the way the output layer reads it, these units alone, behind so many that were added before."""
        chosen: Block = {}
        for name, tensors in block.items():
            link, up, rows = self.links_by_producer[name], self.feeds.get(name), at[name]
            chosen[name] = {n: v.detach()[rows] for n, v in tensors.items() if n not in ("inner", "out")}
            if up is not None:
                chosen[name]["inner"] = tensors["inner"].detach()[rows][:, _read(up, before, at)]
            if "out" in tensors:
                chosen[name]["out"] = tensors["out"].detach()[:, unit_columns(rows, link.repeat)]
        if head is not None:
            head = head.detach()[:, _read(self.feeds[self.head], before, at)]
        return chosen, head

    def tensors(self, view: View, name: str) -> list[Params]:
        """What belongs to a layer's added units, block by block; of the one that learns only what is awake."""
        every = [b[name] for b in view.blocks]
        if view.awake is None:
            return every
        n, link, up, last = view.awake[name], self.links_by_producer[name], self.feeds.get(name), every[-1]
        awake = {leaf: v[:n] for leaf, v in last.items()}
        if up is not None:
            awake["inner"] = awake["inner"][:, : view.count(up.producer) * up.repeat]
        if "out" in last:
            awake["out"] = last["out"][:, : n * link.repeat]
        return [*every[:-1], awake]

    def _split(self, name: str, link: Link, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The layer reads the old units; the added ones wait."""
        if not (new := self.view.count(link.producer)):
            return None
        x, axis, times = _given(args, kwargs), _axis(layer), link.repeat if name == link.consumer else 1
        if x.shape[axis] != (link.width + new) * times:
            raise ValueError(
                f"{name!r} should be given {(link.width + new) * times} inputs, {link.width * times} of its own and the rest of "
                f"added units, it is given {x.shape[axis]}: the model's code must not fix a number of units, as x.view(-1, 64) "
                "does; write x.flatten(1)."
            )
        own, self._extra[name] = x.split([link.width * times, new * times], axis)
        return (own, *args[1:]), {n: v for n, v in kwargs.items() if n != "input"}

    def _add(self, name: str, layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        """To what a layer says, what it hears from added units, and what its own added units say."""
        view, extra, axis = self.view, self._extra.pop(name, None), _axis(layer)
        if extra is not None and name == self.head and view.head is not None:
            out = out + _apply(layer, extra, view.head[:, : extra.shape[axis]])
        elif extra is not None and name in self.written:
            link, at = self.feeds[name], 0
            for tensors in self.tensors(view, link.producer):
                n = len(tensors["weight"]) * link.repeat
                out = out + _apply(layer, extra.narrow(axis, at, n), tensors["out"]) if n else out
                at += n
        said = []
        for tensors in self.tensors(view, name) if name in self.links_by_producer and view.blocks else ():
            if not len(tensors["weight"]):
                continue
            new = _apply(layer, _given(args, kwargs), tensors["weight"], tensors.get("bias"))
            if extra is not None and "inner" in tensors and (read := tensors["inner"].shape[1]):
                new = new + _apply(layer, extra.narrow(axis, 0, read), tensors["inner"])
            said.append(new)
        return torch.cat([out, *said], axis) if said else out

    def _normalise(self, name: str, link: Link, norm: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Added units through entries of their own; only the block that learns looks at the batch."""
        extra, view = self._extra.pop(name, None), self.view
        if extra is None:
            return out
        producer = self.model.get_submodule(link.producer)  # its mode is the loop's; the norm's may be held
        said, at, i = [out], 0, link.norms.index(name)
        every = self.tensors(view, link.producer)
        for tensors in every:
            if n := len(tensors["weight"]):
                mean, spread, scale, shift = (tensors.get(f"norm{i}.{leaf}") for leaf in (*STATISTICS, *AFFINE))
                learns = view.awake is not None and tensors is every[-1] and producer.training
                momentum = 0.1 if norm.momentum is None else norm.momentum
                x, learns = extra.narrow(1, at, n), learns or mean is None
                said.append(F.batch_norm(x, mean, spread, scale, shift, learns, momentum, norm.eps))
                at += n
        return torch.cat(said, 1)


def _read(link: Link, before: Mapping[str, int], at: Mapping[str, Tensor]) -> Tensor:
    """Where a consumer reads all added units of before and these of a block."""
    rows, first = at[link.producer], before[link.producer]
    return unit_columns(torch.cat([torch.arange(first, device=rows.device), rows + first]), link.repeat)


def moved(v: Tensor, like: Tensor) -> Tensor:
    """A tensor where another is, and in its precision; itself where it is so."""
    return v if (v.device, v.dtype) == (like.device, like.dtype) else v.to(like)


def learning(block: Block) -> Block:
    """The same tensors as parameters, but for statistics."""
    return {
        n: {leaf: v if "running" in leaf or isinstance(v, nn.Parameter) else nn.Parameter(v) for leaf, v in t.items()}
        for n, t in block.items()
    }


def _given(args: Any, kwargs: Any) -> Tensor:
    """What a layer is called with, by place or by name."""
    return cast(Tensor, args[0] if args else kwargs["input"])


def _axis(layer: nn.Module) -> int:
    """Where a layer's input and output have their units."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return 1
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]


def _apply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The layer with other weights."""
    said: Tensor = F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, bias)
    return said
