"""A short word for a thing, another one when the thing is another: tells whether a run has been done before."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

KNOWN = {"everlearn", "torch", "numpy", *sys.stdlib_module_names}  # whose code their version speaks for


class Unknowable(Exception):
    """Something whose content cannot be read, such as a generator."""


def fingerprint(thing: Any) -> str | None:
    """A word made of everything inside: bytes of tensors, code of functions, attributes of objects; None if unknowable.

    What an object reads from elsewhere, such as a Dataset from its files, is not looked at.

    >>> fingerprint([torch.zeros(3), "a"]) == fingerprint([torch.zeros(3), "a"]) != fingerprint([torch.ones(3), "a"])
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    >>> fingerprint(i for i in "abc") is None
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        _feed(thing, digest.update, {}, [])
    except Unknowable:
        return None
    return digest.hexdigest()


def _feed(thing: Any, update: Callable[[Any], None], seen: dict[Any, int], alive: list[Any]) -> None:
    """Hash a thing; one met before counts by its number, so that shared memory is read once."""
    if thing is None or isinstance(
        thing, (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device)
    ):
        return update(repr(thing).encode())
    key = (thing.data_ptr(), thing.shape, thing.stride()) if isinstance(thing, Tensor) and thing.numel() else id(thing)
    if key in seen:
        return update(f"#{seen[key]}".encode())
    seen[key] = len(seen)
    alive.append(thing)  # or another thing could get its id
    update(f"<{type(thing).__module__}.{type(thing).__qualname__}>".encode())
    if isinstance(thing, Tensor):
        update(repr((tuple(thing.shape), thing.dtype)).encode())
        if thing.numel():
            update(thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return None
    for part in _parts(thing):
        _feed(part, update, seen, alive)
    return None


def _code(kind: type) -> list[Any]:
    """Its functions; of a class that somebody else's package brings, the file, since libraries decorate theirs beyond reading."""
    if (source := _installed(kind.__module__)) is not None:
        return [source]
    return [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]


@cache
def _installed(module: str) -> bytes | None:
    """A module's source, if it was installed like a library; None if it is the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return None
    return Path(file).read_bytes()


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0] if kind.__module__ != "__main__" else ""


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, np.ndarray):
        return [torch.from_numpy(np.ascontiguousarray(thing))] if thing.dtype.kind in "biufc" else thing.tolist()
    if isinstance(thing, Mapping):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, (list, tuple, range)):
        return list(thing)
    if isinstance(thing, (set, frozenset)):
        return sorted(thing, key=repr)
    if isinstance(thing, torch.Generator):
        return [thing.get_state()]
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        closure = [cell.cell_contents for cell in thing.__closure__ or ()]
        return [thing.__qualname__, thing.__code__, thing.__defaults__, thing.__kwdefaults__, closure]
    if isinstance(thing, types.CodeType):
        return [thing.co_code, thing.co_names, list(thing.co_consts)]
    if isinstance(thing, type):
        own = [] if _package(thing) in KNOWN else _code(thing)
        return [thing.__module__, thing.__qualname__, *own, *(base for base in thing.__mro__[1:] if own)]
    if isinstance(thing, (types.BuiltinFunctionType, types.ModuleType)):
        return [getattr(thing, "__module__", ""), getattr(thing, "__qualname__", thing.__name__)]
    if hasattr(thing, "__dict__"):
        return [type(thing), vars(thing)]
    if hasattr(thing, "__slots__"):
        return [type(thing), [(name, getattr(thing, name, None)) for name in thing.__slots__]]
    raise Unknowable(type(thing).__name__)
