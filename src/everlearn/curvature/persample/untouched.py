"""A model that is run again and again, and stays exactly as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from everlearn.params import evaluating
from everlearn.seeds import seeded


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside; outside, modes, flags, buffers, gradients and random numbers as before."""
    learning = [p for p in model.parameters() if p.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for p in learning:
            p.requires_grad_(False)
        torch.backends.mha.set_fastpath_enabled(False)  # one fused call that no tap can see into
        with evaluating(model), seeded(0), _same_buffers(model), _without_checkpoints(), _eager():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for p in learning:
            p.requires_grad_(True)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Every forward pass begins with the buffers as they are now, and in the end they are put back.

    A counter or a running mean may move in evaluation mode too. Without this an example's gradient would depend on the
    examples before it.
    """
    places = [(module._buffers, name, b) for module in model.modules() for name, b in module._buffers.items()]
    kept = {id(b): None if b is None else b.detach().clone() for _, _, b in places}
    begun = {id(b): _version(b) for _, _, b in places}
    now = [(b, _version(b)) for _, _, b in places]

    def renew(module: nn.Module, args: Any) -> None:
        nonlocal now
        held = [owner.get(name) for owner, name, _ in places]
        if all(b is own and _version(b) == version for b, (own, version) in zip(held, now, strict=True)):
            return
        # Copies, because what an earlier pass has saved for its backward pass must not change.
        fresh = {key: None if b is None else b.clone() for key, b in kept.items()}
        for owner, name, b in places:
            owner[name] = fresh[id(b)]
        now = [(fresh[id(b)], _version(fresh[id(b)])) for _, _, b in places]

    hook = model.register_forward_pre_hook(renew, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        for owner, name, b in places:
            if owner.get(name) is not b:
                owner[name] = b
            if b is not None and _version(b) != begun[id(b)]:
                with torch.no_grad():
                    b.copy_(kept[id(b)])  # type: ignore[arg-type]
                begun[id(b)] = _version(b)


def _version(tensor: Tensor | None) -> int:
    """How often it was written to; nobody can write to an inference tensor outside of that mode."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Parts under ``torch.utils.checkpoint`` run as any other.

    A checkpoint runs its part a second time in the backward pass, where no tap sees it and where the parameters that
    ``functional_call`` lent it are gone. Models import ``checkpoint`` by name, so what it calls is replaced.
    """
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    before = {name: getattr(checkpointing, name) for name in names if hasattr(checkpointing, name)}
    for name, plain in zip(names, (_PlainFunction, _plain_generator), strict=True):
        if name in before:
            setattr(checkpointing, name, plain)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpointing, name, value)


class _PlainFunction:
    """In the place of the function behind ``checkpoint(…, use_reentrant=True)``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of what ``checkpoint(…, use_reentrant=False)`` does around its part."""
    yield


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts run as they were written: a compiler would look into the tap."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield
