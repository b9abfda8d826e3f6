"""Locks: entries of parameters that no optimizer moves, and statistics that stay."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from everlearn.params import Params, named_with_frozen, unwrap
from everlearn.running_statistics import HoldStatistics

HELD_BY_LOCKS = HoldStatistics("Locks")

Checksum = tuple[str, int]  # the precision it was taken in, and the number


class Locks:
    """Which entries of which parameters are locked, and where.

    A zero gradient is not enough: momentum, Adam's averages and weight decay move a weight without one. So gradients of locked
    entries are zeroed before a step, which keeps them out of the norm that clipping looks at, and their values put back after
    it. A parameter that is locked as a whole has no gradient at all, which every optimizer of torch skips.

    Both are done on the bits of the numbers, p ← (p AND open) OR held: exact, also where a step has made a number NaN, and a
    twentieth of the time that choosing by a mask of booleans takes on a CPU.
    """

    def __init__(self) -> None:
        self.masks: Params = {}  # True where an entry is locked
        self.values: Params = {}
        self.whole: set[str] = set()
        self._open: Params = {}  # all bits set where an entry is free, none where it is locked
        self._held: Params = {}  # the bits of locked entries, none where one is free
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []

    def lock(self, model: nn.Module, name: str, mask: Tensor) -> None:
        """Lock these entries of a parameter where they are now."""
        if not mask.any():
            return
        if mask.all():
            self.whole.add(name)
        value = named_with_frozen(model)[name].detach().clone()
        self.masks[name], self.values[name] = mask, value
        self._open[name] = mask.to(_bits(value).dtype) - 1
        self._held[name] = _bits(value) & ~self._open[name]

    def hold_statistics(self, model: nn.Module, names: Iterable[str]) -> None:
        """Lock these buffers: layers that keep running statistics stay in evaluation mode, whatever the loop says."""
        wanted = set(names)
        for place, module in unwrap(model).named_modules():
            own = {leaf: f"{place}.{leaf}".lstrip(".") for leaf, _ in module.named_buffers(recurse=False)}
            held = [leaf for leaf, name in own.items() if name in wanted]
            self.buffers += [(module, leaf, module.get_buffer(leaf).clone()) for leaf in held]
            if held and getattr(module, "track_running_stats", False):
                module.register_forward_pre_hook(HELD_BY_LOCKS)
        seen_by_compiler(model)

    @torch.no_grad()
    def mask_gradients(self, model: nn.Module) -> None:
        """Before a step: no gradient where it is locked."""
        if not self.masks:
            return
        for name, p in named_with_frozen(model).items():
            if name in self.whole:
                p.grad = None
            elif p.grad is not None and name in self.masks:
                _bits(p.grad).bitwise_and_(self._open[name])

    @torch.no_grad()
    def restore(self, model: nn.Module, everything: bool = False) -> None:
        """After a step: every locked entry where it was.

        A parameter that is locked as a whole and has no gradient is passed over, since no optimizer has moved it, unless
        ``everything`` is asked for.
        """
        for name, p in named_with_frozen(model).items() if self.masks else ():
            if name in self.masks and (
                everything or name not in self.whole or p.grad is not None
            ):  # another method may have given it one
                _bits(p).bitwise_and_(self._open[name]).bitwise_or_(self._held[name])
        for module, leaf, value in self.buffers:  # looked up anew: a model may put another tensor in its place
            module.get_buffer(leaf).copy_(value)

    def check(self, model: nn.Module, method: str) -> None:
        """Refuse to go on where a locked entry has moved all the same."""
        for name, p in named_with_frozen(model).items():
            if name in self.masks:
                mask, value = self.masks[name], self.values[name]
                if not torch.equal(p.detach()[mask], value[mask]):
                    raise ValueError(
                        f"Something has moved locked entries of {name}, so earlier tasks would change: call "
                        f"{method}.before_step(model) and {method}.after_step(model) around every optimizer step, and after copying "
                        f"averaged weights in {method}.restore_locked(model)."
                    )

    def release(self, model: nn.Module) -> None:
        """Unlock everything; from a copied model, take off the hooks that came with it."""
        self.masks, self.values, self.whole, self.buffers = {}, {}, set(), []
        self._open, self._held = {}, {}
        take_off(model, HELD_BY_LOCKS)


@torch.no_grad()
def checksums(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Checksum]:
    """Of every parameter with a mask, a number that tells later whether the masked entries are still the same.

    It takes no memory and goes into a file, where a copy of the entries would double the model.
    """
    parameters = named_with_frozen(model)
    return {n: (str(parameters[n].dtype), _checksum(parameters[n], mask)) for n, mask in masks.items()}


@torch.no_grad()
def changed(model: nn.Module, masks: Mapping[str, Tensor], before: Mapping[str, Checksum]) -> list[str]:
    """The parameters whose masked entries are others than when the checksums were taken.

    A model that was moved to a finer precision has the same numbers in it; one that was rounded to a coarser one cannot be compared.
    """
    parameters, found = named_with_frozen(model), []
    for name, (precision, number) in before.items():
        if name not in parameters or name not in masks:
            found.append(name)
            continue
        dtype = getattr(torch, precision.removeprefix("torch."))
        if torch.promote_types(parameters[name].dtype, dtype) != parameters[name].dtype:
            continue
        if _checksum(parameters[name].to(dtype), masks[name]) != number:
            found.append(name)
    return found


def _checksum(parameter: Tensor, mask: Tensor) -> int:
    held = torch.where(mask.to(parameter.device), parameter, 0) + 0.0  # of two zeros, one
    return zlib.crc32(_bits(held.contiguous()).cpu().numpy().data)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory read as integers."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def take_off(model: nn.Module, kind: object) -> None:
    """Remove hooks before the forward pass: this one, or all of this class, whoever put them on."""
    for module in unwrap(model).modules():
        hooks = module._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if hook == kind or type(hook) is kind]:
            del hooks[key]


def seen_by_compiler(model: nn.Module) -> None:
    """Have a compiled model compiled anew: it does not notice hooks that came after its first call."""
    if any("_orig_mod" in module._modules for module in model.modules()):
        torch.compiler.reset()
