"""Run a model repeatedly and leave it exactly as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from everlearn.core.parameters import evaluating
from everlearn.runtime.randomness import seeded


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and freeze the parameters; restore modes, flags, buffers, gradients and RNG afterwards."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        for p in trainable:
            p.requires_grad_(False)

        # The fast path of attention is one fused call, whose parts cannot be intercepted.
        torch.backends.mha.set_fastpath_enabled(False)
        with evaluating(model), seeded(0), _preserve_buffers(model), _disable_checkpointing(), _disable_compilation():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)
        for p in trainable:
            p.requires_grad_(True)


@contextmanager
def _preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Begin every forward pass with the current buffers, and restore them at the end.

    A counter or a running mean may change in evaluation mode too. Without this an example's gradient would depend on
    the examples before it.
    """
    # (dict of the module's buffers, name, buffer); a buffer may be in several modules.
    slots = [(module._buffers, name, b) for module in model.modules() for name, b in module._buffers.items()]
    copies = {id(b): _clone(b) for _, _, b in slots}
    initial_versions = {id(b): _version(b) for _, _, b in slots}
    expected = [(b, _version(b)) for _, _, b in slots]

    def reset_buffers(module: nn.Module, args: Any) -> None:
        nonlocal expected
        current = [buffers.get(name) for buffers, name, _ in slots]
        unchanged = [b is e and _version(b) == version for b, (e, version) in zip(current, expected, strict=True)]
        if all(unchanged):
            return

        # New copies, because tensors that an earlier pass saved for its backward pass must not change.
        fresh = {key: _clone(b) for key, b in copies.items()}
        for buffers, name, b in slots:
            buffers[name] = fresh[id(b)]
        expected = [(fresh[id(b)], _version(fresh[id(b)])) for _, _, b in slots]

    hook = model.register_forward_pre_hook(reset_buffers, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        for buffers, name, b in slots:
            if buffers.get(name) is not b:
                buffers[name] = b
            if b is not None and _version(b) != initial_versions[id(b)]:
                with torch.no_grad():
                    b.copy_(copies[id(b)])  # type: ignore[arg-type]
                initial_versions[id(b)] = _version(b)


def _clone(buffer: Tensor | None) -> Tensor | None:
    """Copy a buffer, which may be None."""
    if buffer is None:
        return None
    return buffer.detach().clone()


def _version(tensor: Tensor | None) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which cannot be written to."""
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


@contextmanager
def _disable_checkpointing() -> Iterator[None]:
    """Run modules under ``torch.utils.checkpoint`` without it.

    A checkpoint repeats its forward pass during the backward pass, where it cannot be intercepted and where the
    parameters of ``functional_call`` are gone. Models import ``checkpoint`` by name, so what it calls is replaced.
    """
    replacements = {
        "CheckpointFunction": _PlainFunction,
        "_checkpoint_without_reentrant_generator": _plain_generator,
    }
    originals = {name: getattr(checkpointing, name) for name in replacements if hasattr(checkpointing, name)}
    for name in originals:
        setattr(checkpointing, name, replacements[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpointing, name, original)


class _PlainFunction:
    """Replacement of the function behind ``checkpoint(…, use_reentrant=True)``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Do nothing, in place of the generator behind ``checkpoint(…, use_reentrant=False)``."""
    yield


@contextmanager
def _disable_compilation() -> Iterator[None]:
    """Run compiled modules eagerly: the compiler would trace the interceptor."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield
