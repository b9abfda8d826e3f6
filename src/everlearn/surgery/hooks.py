"""Register, remove and restore the hooks that methods put on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

HookRecord = tuple[dict[int, Any], int, "Hook"]  # the hook dict of a module, the key in it, the hook


class Hook(partial[Any]):
    """A hook that a method has registered. Copying a model copies the hook, its arguments and its owner."""

    owner: str = ""


def make_hook(owner: str, function: Callable[..., Any], *args: Any) -> Hook:
    """Create a hook that calls ``function(*args, …)``.

    Args:
        owner: name of the method, for ``remove_hooks``.
        function: called with the arguments, followed by those of torch's hooks.
        args: first arguments.
    """
    hook = Hook(function, *args)
    hook.owner = owner
    return hook


def remove_hooks(net: nn.Module, owner: str | None = None, kind: object = None) -> list[HookRecord]:
    """Remove the hooks of a method, also those copied with a model. Returns what ``restore_hooks`` needs.

    Args:
        net: the model.
        owner: name of the method; by default all methods.
        kind: the function that the hooks call, or the class of the object that they call; by default any.
    """
    hook_dicts: list[Any] = []
    for module in net.modules():
        hook_dicts += [module._forward_hooks, module._forward_pre_hooks]

    removed: list[HookRecord] = []
    for hook_dict in hook_dicts:
        for key, hook in hook_dict.items():
            if isinstance(hook, Hook) and owner in (None, hook.owner) and kind in (None, *_kinds(hook)):
                removed.append((hook_dict, key, hook))
    for hook_dict, key, _ in removed:
        del hook_dict[key]
    return removed


def _kinds(hook: Hook) -> tuple[object, type]:
    """Return the function that a hook calls, and the class of the object that it is or belongs to."""
    return hook.func, type(getattr(hook.func, "__self__", hook.func))


def restore_hooks(hooks: list[HookRecord]) -> None:
    """Put back the hooks that ``remove_hooks`` removed."""
    for hook_dict, key, hook in hooks:
        hook_dict[key] = hook


@contextmanager
def without_hooks(net: nn.Module) -> Iterator[None]:
    """Remove the hooks of all methods inside the context, so that copies of the model contain none."""
    removed = remove_hooks(net)
    try:
        yield
    finally:
        restore_hooks(removed)


@contextmanager
def temporarily_unhooked(net: nn.Module, owner: str) -> Iterator[bool]:
    """Temporarily remove the hooks of another instance of a method; yields whether any existed.

    Hooks registered inside the context stay on the model, unless there were others before.
    """
    removed = remove_hooks(net, owner)
    try:
        yield bool(removed)
    finally:
        if removed:
            remove_hooks(net, owner)
            restore_hooks(removed)


def move_like(module: nn.Module, model: nn.Module) -> None:
    """Move a module to the device and dtype of a model."""
    parameter = next(module.parameters(), None)
    reference = next(model.parameters())
    if parameter is not None and (parameter.device, parameter.dtype) != (reference.device, reference.dtype):
        module.to(reference.device, reference.dtype)


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps the model or a part of it."""
    return any("_orig_mod" in module._modules for module in model.modules())


def recompile(model: nn.Module) -> None:
    """Discard the compiled code of a compiled model, which ignores hooks registered after its first call."""
    if is_compiled(model):
        torch.compiler.reset()
