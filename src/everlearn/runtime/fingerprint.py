"""A short word for a thing, another one when the thing is another: tells whether a run has been done before."""

from __future__ import annotations

import copyreg
import hashlib
import io
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

KNOWN = {"everlearn", "torch", "numpy", *sys.stdlib_module_names}  # whose code their version speaks for
LEAVES = (
    *(bool, int, float, complex, str, bytes, PurePath, types.NoneType, types.EllipsisType),
    *(np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
NAMED = (
    *(types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
CACHED = type(cache(lambda: None))
PASSING = {"training", "_compiled_call_impl"}  # what equal modules may differ in


class Unknowable(Exception):
    """Something whose content cannot be read, such as a generator."""


class Maybe(NamedTuple):
    """What counts by its type alone where it cannot be read."""

    thing: Any


def fingerprint(thing: Any) -> str | None:
    """A word made of everything inside: bytes of tensors, code of functions, attributes of objects; None if unknowable.

    What an object reads from elsewhere, such as a Dataset from its files, is not looked at; nor is whether a module is in
    training mode.

    >>> fingerprint([torch.zeros(3), "a"]) == fingerprint([torch.zeros(3), "a"]) != fingerprint([torch.ones(3), "a"])
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    >>> fingerprint(i for i in "abc") is None
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        _feed(thing, digest.update)
    except Unknowable:
        return None
    return digest.hexdigest()


def _feed(thing: Any, update: Callable[[Any], None]) -> None:
    """Hash a thing; one met before counts by its number, so that shared memory is read once and circles end.

    Every word ends with a byte that no text has, and the numbers of bytes and parts come before these: [1, 23] is not [12, 3].
    """
    seen: dict[Any, int] = {}
    alive, waiting = list[Any](), [(thing, False)]  # not by recursion, which deep models would exhaust
    while waiting:
        thing, lenient = waiting.pop()
        if isinstance(thing, Maybe):
            thing, lenient = thing.thing, True
        content, parts = b"", list[Any]()
        if issubclass(type(thing), LEAVES):  # not isinstance, which a weak proxy of what is gone refuses
            word = repr(thing)
        elif (key := _key(thing)) in seen:
            word = f"#{seen[key]}"
        else:
            if key is not None:
                seen[key] = len(alive)
                alive.append(thing)  # or another thing could get its id
            try:
                content, parts = _content(thing)
            except Unknowable:
                if not lenient:
                    raise
                seen.pop(key, None)  # where it must be read, it is still unknowable
            word = f"<{type(thing).__module__}.{type(thing).__qualname__}>{len(content)}:{len(parts)}"
        update(word.encode() + b"\xff")
        update(content)
        waiting += [(part, lenient) for part in reversed(parts)]


def _key(thing: Any) -> Any:
    """By what a thing is known again; None for tuples of plain values: whether two are one is up to Python and pickle."""
    if type(thing) is tuple and all(isinstance(v, LEAVES) for v in thing):
        return None
    if issubclass(type(thing), Tensor):
        with suppress(Exception):  # of one that has no memory of its own
            if thing.data_ptr():
                kind = type(thing), thing.dtype, thing.device, thing.requires_grad, thing.is_conj(), thing.is_neg()
                return thing.data_ptr(), thing.shape, thing.stride(), kind
    return id(thing)


def _content(thing: Any) -> tuple[Any, list[Any]]:
    """Its bytes, if it is an array, and its parts; whatever goes wrong in foreign code makes it unknowable."""
    try:
        if issubclass(type(thing), Tensor):
            plain = thing.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
            content = plain.view(torch.uint8).numpy().data if plain.numel() else b""
            return content, [list(thing.shape), thing.dtype, thing.requires_grad]
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            content = np.ascontiguousarray(thing).reshape(-1).view(np.uint8).data if thing.size else b""
            return content, [list(thing.shape), thing.dtype]
        return b"", _parts(thing)
    except Unknowable:
        raise
    except Exception as error:
        raise Unknowable(type(thing).__name__) from error


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, np.ndarray):
        return [thing.tolist()]
    if isinstance(thing, Mapping):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, (list, tuple, range, deque)):
        return list(thing)
    if isinstance(thing, (set, frozenset)):
        return _sorted(thing)
    if isinstance(thing, torch.Generator):
        return [thing.get_state()]
    if isinstance(thing, random.Random):
        return [type(thing), thing.getstate()]
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, CACHED):
        return [thing.__wrapped__]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        closure = [None if cell == types.CellType() else cell.cell_contents for cell in thing.__closure__ or ()]
        return [thing.__qualname__, thing.__code__, thing.__defaults__, thing.__kwdefaults__, closure]
    if isinstance(thing, types.CodeType):
        return [thing.co_code, thing.co_names, list(thing.co_consts)]
    if isinstance(thing, type):
        own = [] if _package(thing) in KNOWN else _code(thing)
        return [thing.__module__, thing.__qualname__, *own, *thing.__bases__]
    if isinstance(thing, NAMED):
        return [getattr(thing, "__module__", ""), getattr(thing, "__qualname__", thing.__name__)]
    if isinstance(thing, weakref.ref):  # in a copied model it still points into the first one
        return [type(thing())]
    if isinstance(thing, logging.Logger):
        return [thing.name]
    if isinstance(thing, RemovableHandle):  # counted through all models of a process
        return []
    return _object(thing)


def _sorted(things: set[Any] | frozenset[Any]) -> list[Any]:
    """In an order that does not depend on where they are in memory."""
    if len(things) > 1 and any(" at 0x" in repr(thing) for thing in things):
        raise Unknowable("a set of objects")
    return sorted(things, key=repr)


def _object(thing: Any) -> list[Any]:
    """The attributes of anything else; of a type without any, if it comes with Python or numpy, what pickle would take."""
    if isinstance(thing, nn.Module):
        return [type(thing), _module(thing)]
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    held = [(name, getattr(thing, name, None)) for name in slots]
    if isinstance(thing, io.IOBase) or not (slots or hasattr(thing, "__dict__") or _package(type(thing)) in KNOWN):
        raise Unknowable(type(thing).__name__)
    if slots or hasattr(thing, "__dict__"):
        return [type(thing), _lasting(getattr(thing, "__dict__", {})), held]
    reduce = copyreg.dispatch_table.get(type(thing))
    reduced = thing.__reduce_ex__(4) if reduce is None else reduce(thing)
    return [type(thing), *([reduced] if isinstance(reduced, str) else _lists(reduced))]


def _lasting(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """By name, since copies may have them in another order; without Python's hashes, which are others in every process."""
    own = sorted(attributes.items())
    return {n: v for n, v in own if not (_is_pythons(n) or (n.endswith("_hash") and isinstance(v, int)))}


def _lists(values: tuple[Any, ...]) -> list[Any]:
    return [list(v) if isinstance(v, Iterator) else v for v in values]


def _slots(kind: type) -> list[str]:
    given = vars(kind).get("__slots__", ())
    names = [given] if isinstance(given, str) else [*given]
    own = kind.__name__.lstrip("_")
    return [f"_{own}{n}" if n.startswith("__") else n for n in names if n not in ("__dict__", "__weakref__")]


def _module(module: nn.Module) -> dict[str, Any]:
    """What a module is made of; hooks, which torch numbers through all models of a process, by their order."""
    if "_orig_mod" in module._modules:  # compiled: the compiler's own things tell nothing about the model
        return {"_orig_mod": module._modules["_orig_mod"]}
    made = {name: value for name, value in _lasting(vars(module)).items() if name not in PASSING}
    hooks = {n: v for n, v in made.items() if isinstance(v, dict) and "hooks" in n and all(type(k) is int for k in v)}
    rank = {number: i for i, number in enumerate(sorted({number for held in hooks.values() for number in held}))}
    return made | {name: {rank[k]: v for k, v in held.items()} for name, held in hooks.items()}


def _code(kind: type) -> list[Any]:
    """Its functions and attributes; of a class that somebody else's package brings, the file, since libraries decorate
    theirs beyond reading. An attribute that cannot be read must not make every object of its class unknowable.
    """
    if (source := _installed(kind.__module__)) is not None:
        return [source]
    functions = [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]
    others = {
        name: Maybe(_opened(value))
        for name, value in vars(kind).items()
        if not isinstance(value, types.FunctionType) and (_is_opened(value) or not _is_pythons(name))
    }
    return [*functions, others]


def _is_pythons(name: str) -> bool:
    """Whether Python keeps its own books under this name."""
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


def _is_opened(value: Any) -> bool:
    return isinstance(value, (property, staticmethod, classmethod, cached_property))


def _opened(value: Any) -> Any:
    """The functions inside."""
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    return value.func if isinstance(value, cached_property) else value


@cache
def _installed(module: str) -> str | None:
    """A word for a module's source, if it was installed like a library; None if it is the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return None
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest()


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0] if kind.__module__ != "__main__" else ""
