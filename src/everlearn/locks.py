"""Locks: entries of parameters that no optimizer moves, and statistics that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from everlearn.params import Params, named_with_frozen, unwrap


class Locks:
    """Which entries of which parameters are locked, where, and how to undo it.

    A zero gradient is not enough: momentum, Adam's averages and weight decay move a weight without one. So gradients of locked
    entries are zeroed before a step, which keeps them out of the norm that clipping looks at, and their values put back after
    it. A parameter that is locked as a whole has no gradient at all, which every optimizer of torch skips.
    """

    def __init__(self) -> None:
        self.masks: Params = {}  # True where an entry is locked
        self.values: Params = {}
        self.whole: set[str] = set()
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self._undo: list[Callable[[], object]] = []

    def lock(self, model: nn.Module, name: str, mask: Tensor) -> None:
        """Lock these entries of a parameter where they are now."""
        if not mask.any():
            return
        if mask.all():
            self.whole.add(name)
        self.masks[name], self.values[name] = mask, named_with_frozen(model)[name].detach().clone()

    def hold_statistics(self, model: nn.Module, names: Iterable[str]) -> None:
        """Lock these buffers: layers that keep running statistics stay in evaluation mode, whatever the loop says."""
        inner, wanted = unwrap(model), set(names)
        for place, module in inner.named_modules():
            own = {f"{place}.{n}".lstrip(".") for n, _ in module.named_buffers(recurse=False)}
            if own & wanted and getattr(module, "track_running_stats", False):
                self._undo.append(module.register_forward_pre_hook(_evaluate).remove)
        self.buffers = [(b, b.clone()) for n, b in inner.named_buffers() if n in wanted]

    def mask_gradients(self, model: nn.Module) -> None:
        """Before a step: no gradient where it is locked."""
        if not self.masks:
            return
        for name, p in named_with_frozen(model).items():
            if name in self.whole:
                p.grad = None
            elif p.grad is not None and name in self.masks:
                p.grad.masked_fill_(self.masks[name], 0)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """After a step: every locked entry where it was."""
        if self.masks:
            for name, p in named_with_frozen(model).items():
                if name in self.masks and name not in self.whole:
                    torch.where(self.masks[name], self.values[name], p, out=p)
        for buffer, value in self.buffers:
            buffer.copy_(value)

    def check(self, model: nn.Module, method: str) -> None:
        """Refuse to go on where a locked entry has moved all the same."""
        for name, p in named_with_frozen(model).items():
            if name in self.masks:
                mask, value = self.masks[name], self.values[name]
                if not torch.equal(p.detach()[mask], value[mask]):
                    raise ValueError(
                        f"Something has moved locked entries of {name}, so earlier tasks would change: call "
                        f"{method}.before_step(model) and {method}.after_step(model) around every optimizer step."
                    )

    def release(self) -> None:
        """Unlock everything."""
        for undo in self._undo:
            undo()
        self.__init__()  # type: ignore[misc]


def _evaluate(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Before every forward, because ``model.train()`` in the loop would set the statistics moving again."""
    module.training = False
