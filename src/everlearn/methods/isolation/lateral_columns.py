"""Columns of a progressive network: networks side by side, each told what the layers of those before it are given."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import Params
from everlearn.surgery.hooks import Hook

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Given = dict[str, list[Tensor]]  # what the layers of a column were given, call by call


class Lateral(nn.Module):
    """What a layer is told by the columns before: U σ(V [α_j h_j]), or Σ_j U_j h_j; no biases, so that α = 0 says nothing."""

    def __init__(self, layer: Any, widths: list[int], adapter: bool) -> None:
        super().__init__()
        own, total, conv = _width(layer), sum(widths), _convolution(layer)
        self.axis = -1 if conv is None else -1 - len(layer.kernel_size)
        self.adapter = adapter
        if adapter:
            self.alpha = nn.Parameter(0.1 * torch.randn(len(widths)))
            self.down = nn.Linear(total, own, bias=False) if conv is None else conv(total, own, 1, bias=False)
        self.up = nn.ModuleList(_like(layer, width) for width in ([own] if adapter else widths))
        self.to(layer.weight.device, layer.weight.dtype)

    def forward(self, before: list[Tensor]) -> Tensor:
        """From what the same layer was given in each column before."""
        if self.adapter:
            scaled = [a * h for a, h in zip(self.alpha.unbind(), before, strict=True)]
            before = [self.down(torch.cat(scaled, self.axis)).relu()]
        first, *more = [up(h) for up, h in zip(self.up, before, strict=True)]
        total: Tensor = sum(more, first)
        return total


class Pass:
    """One forward pass of a column: what its layers are given, and what those of the columns before it were."""

    def __init__(self, links: Any, before: list[Given] | None = None) -> None:
        self.links, self.before = links, before
        self.given: Given = {}

    def hook(self, net: nn.Module, layers: list[str]) -> list[Any]:
        """Have these layers take part."""
        every = visible(net)
        return [every[n].register_forward_hook(Hook(self.add, n), with_kwargs=True) for n in layers if n in every]

    def add(self, name: str, layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        """To what a layer says, what its laterals say."""
        if self.before is None:
            raise RuntimeError(f"PNN's columns work together: call the model as a whole, not its part {name} alone.")
        calls = self.given.setdefault(name, [])
        calls.append(args[0] if args else kwargs["input"])
        if key(name) not in self.links or any(len(given.get(name, ())) < len(calls) for given in self.before):
            return None  # a column before has not called this layer, or not so often
        said: Tensor = self.links[key(name)]([given[name][len(calls) - 1] for given in self.before])
        return out + said


class ColumnStack(nn.Module):
    """Frozen columns in evaluation mode, with laterals from each to all after it; the answer is that of the last.

    Hooks are put on for each pass and taken off again, so that between passes all are plain modules: they can be copied, saved
    and exported. While they are on, torch's transformer layers do not take the shortcut that calls no layers.
    """

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.layers = layers
        self.columns, self.links = nn.ModuleList(), nn.ModuleList()
        self.eval()

    def __len__(self) -> int:
        return len(self.columns)

    def __bool__(self) -> bool:
        return True  # also without a column

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the last column says."""
        return self.run(len(self), *args, **kwargs)[0]

    def run(self, count: int, *args: Any, **kwargs: Any) -> tuple[Any, list[Given]]:
        """What the last of the first so many columns says, and what the layers of all of them were given."""
        out, seen = None, list[Given]()
        for net, links in islice(zip(self.columns, self.links, strict=True), count):
            now = Pass(links, list(seen))
            hooks = now.hook(net, self.layers)
            try:
                out = net(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            seen.append(now.given)
        return out, seen

    def add(self, net: nn.Module, links: nn.ModuleDict) -> None:
        """One more column, with the laterals that lead into it."""
        self.columns.append(net.eval().requires_grad_(False))
        self.links.append(links.eval().requires_grad_(False))

    def shorten(self, count: int) -> None:
        """Keep the first so many columns only."""
        del self.columns[count:], self.links[count:]

    def laterals(self, net: nn.Module, k: int, adapter: bool, kept: dict[str, Params] | None = None) -> nn.ModuleDict:
        """Those from the first k columns into a net: new ones, or as they were kept."""
        links, every = nn.ModuleDict(), visible(net)
        for name in (self.layers if kept is None else kept) if k else ():
            if name in every:
                widths = [_width(column.get_submodule(name)) for column in islice(self.columns, k)]
                link = Lateral(every[name], widths, adapter if kept is None else "alpha" in kept[name])
                if kept is not None:
                    link.load_state_dict(kept[name])
                links[key(name)] = link
        return links

    def lead_into(self, net: nn.Module, k: int, links: nn.ModuleDict, compiled: bool = False) -> None:
        """From now on the first k columns run before a net does, which is told by these laterals."""
        now = Pass(links)
        ask, forget = _ask, _forget
        if compiled:  # the columns' own hooks come and go, which cannot be compiled
            ask, forget = torch.compiler.disable(_ask), torch.compiler.disable(_forget)
        net.register_forward_pre_hook(Hook(ask, self, k, now), with_kwargs=True)
        net.register_forward_hook(Hook(forget, now))
        now.hook(net, self.layers)


def take_notes(net: nn.Module, layers: list[str]) -> None:
    """From now on, list the layers that are called with an input that something learns to make."""
    for name, layer in visible(net).items():
        layer.register_forward_hook(Hook(_note, layers, name), with_kwargs=True)


def leads(net: nn.Module, links: nn.ModuleDict) -> bool:
    """Whether a net is told by these laterals."""
    hooks = (h for h in net._forward_pre_hooks.values() if isinstance(h, Hook))
    return any(isinstance(h.args[-1], Pass) and h.args[-1].links is links for h in hooks)


def visible(net: nn.Module) -> dict[str, Any]:
    """The layers that laterals can lead into, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))}


def key(name: str) -> str:
    """A layer's name as that of its laterals; a module's own name may hold no dot."""
    return name.replace(".", "/")


def _note(layers: list[str], name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    given = args[0] if args else kwargs["input"]
    if given.requires_grad and torch.is_grad_enabled() and name not in layers:
        layers.append(name)


def _ask(tower: ColumnStack, k: int, now: Pass, net: nn.Module, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        now.before, now.given = tower.run(k, *args, **kwargs)[1], {}


def _forget(now: Pass, net: nn.Module, args: Any, out: Any) -> None:
    now.before, now.given = None, {}


def _convolution(layer: Any) -> Any:
    return next((kind for kind in CONVOLUTIONS if isinstance(layer, kind)), None)


def _width(layer: Any) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def _like(layer: Any, width: int) -> nn.Module:
    """A layer that gives what another gives, from inputs of some width; ungrouped, without a bias."""
    conv = _convolution(layer)
    if conv is None:
        return nn.Linear(width, layer.out_features, bias=False)
    form = {n: getattr(layer, n) for n in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    made: nn.Module = conv(width, layer.out_channels, **form, bias=False)
    return made
