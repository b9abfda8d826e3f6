"""Content hash of arbitrary Python objects, to tell whether a run has been done before."""

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

# Packages whose code is identified by their version, so that only names are hashed.
VERSIONED_PACKAGES = {"everlearn", "torch", "numpy", *sys.stdlib_module_names}

# Types whose repr() identifies the value.
LEAF_TYPES = (
    *(bool, int, float, complex, str, bytes, PurePath, types.NoneType, types.EllipsisType),
    *(np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# Types whose qualified name identifies the value.
NAMED_TYPES = (
    *(types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
CACHED_FUNCTION = type(cache(lambda: None))
IGNORED_MODULE_ATTRIBUTES = {"training", "_compiled_call_impl"}  # equal modules may differ in these


class Unhashable(Exception):
    """Raised for an object whose content cannot be read."""


class Lenient(NamedTuple):
    """Value that is hashed by its type alone if its content cannot be read."""

    value: Any


def fingerprint(value: Any) -> str | None:
    """Hash all content of an object: bytes of tensors, code of functions, attributes of objects.

    Data that an object reads from elsewhere, such as a Dataset from its files, is not included; nor is whether a module
    is in training mode.

    Returns:
        A hexadecimal digest, or None if some content cannot be read.

    >>> fingerprint([torch.zeros(3), "a"]) == fingerprint([torch.zeros(3), "a"]) != fingerprint([torch.ones(3), "a"])
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    >>> fingerprint(i for i in "abc") is None
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        _hash_recursively(value, digest.update)
    except Unhashable:
        return None
    return digest.hexdigest()


def fingerprint_model(model: nn.Module) -> str | None:
    """Hash a model: its attributes, tensors and classes."""
    digest = fingerprint(model)
    if digest is not None:
        return digest

    # A lock or an open file in a model cannot be hashed. Its classes, layers and state dict identify most models.
    return fingerprint([[type(m) for m in model.modules()], repr(model), model.state_dict()])


def _hash_recursively(root: Any, update: Callable[[Any], None]) -> None:
    """Hash an object and all its parts. A repeated object is hashed by its number, so that cycles end.

    Every header ends with a byte that UTF-8 never contains, and counts of bytes and parts precede these, so that
    [1, 23] and [12, 3] differ.
    """
    numbers: dict[Any, int] = {}
    referenced: list[Any] = []  # keeps objects alive, or another object could get the id of a deleted one
    stack = [(root, False)]  # a loop, because deep models would exhaust the recursion limit
    while stack:
        value, is_lenient = stack.pop()
        if isinstance(value, Lenient):
            value = value.value
            is_lenient = True
        content: Any = b""
        parts: list[Any] = []

        # issubclass, because isinstance raises for a weak proxy of a deleted object.
        if issubclass(type(value), LEAF_TYPES):
            header = repr(value)
        elif (key := _identity(value)) in numbers:
            header = f"#{numbers[key]}"
        else:
            if key is not None:
                numbers[key] = len(referenced)
                referenced.append(value)
            try:
                content, parts = _read(value)
            except Unhashable:
                if not is_lenient:
                    raise
                numbers.pop(key, None)  # where it is not lenient, the same object must still raise
            header = f"<{type(value).__module__}.{type(value).__qualname__}>{len(content)}:{len(parts)}"

        update(header.encode() + b"\xff")
        update(content)
        stack += [(part, is_lenient) for part in reversed(parts)]


def _identity(value: Any) -> Any:
    """Return a key that identifies the object when it is met again.

    Tuples of plain values have none, since Python and pickle decide whether two equal ones are the same object.
    """
    if type(value) is tuple and all(isinstance(item, LEAF_TYPES) for item in value):
        return None
    if issubclass(type(value), Tensor):
        with suppress(Exception):  # tensors without storage
            if value.data_ptr():
                kind = (
                    type(value),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                )
                return value.data_ptr(), value.shape, value.stride(), kind
    return id(value)


def _read(value: Any) -> tuple[Any, list[Any]]:
    """Return the bytes of an array and the parts of any object; any error in foreign code makes it unhashable."""
    try:
        if issubclass(type(value), Tensor):
            flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
            content: Any = b""
            if flat.numel():
                content = flat.view(torch.uint8).numpy().data
            return content, [list(value.shape), value.dtype, value.requires_grad]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            content = b""
            if value.size:
                content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            return content, [list(value.shape), value.dtype]
        return b"", _parts(value)
    except Unhashable:
        raise
    except Exception as error:
        raise Unhashable(type(value).__name__) from error


def _parts(value: Any) -> list[Any]:
    """Split an object by its type into parts that are hashed in turn."""
    # Containers.
    if isinstance(value, np.ndarray):
        return [value.tolist()]
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, (list, tuple, range, deque)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return _sort(value)

    # Random generators.
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    if isinstance(value, random.Random):
        return [type(value), value.getstate()]

    # Functions and their code.
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, CACHED_FUNCTION):
        return [value.__wrapped__]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        empty_cell = types.CellType()
        closure = [None if cell == empty_cell else cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, closure]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, list(value.co_consts)]

    # Classes and everything that is known by its name.
    if isinstance(value, type):
        code = [] if _package(value) in VERSIONED_PACKAGES else _class_code(value)
        return [value.__module__, value.__qualname__, *code, *value.__bases__]
    if isinstance(value, NAMED_TYPES):
        return [getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)]
    if isinstance(value, weakref.ref):  # in a copied model it still refers to the original
        return [type(value())]
    if isinstance(value, logging.Logger):
        return [value.name]
    if isinstance(value, RemovableHandle):  # its number counts through all models of the process
        return []
    return _object_parts(value)


def _sort(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Sort a set in an order that does not depend on memory addresses."""
    if len(items) > 1 and any(" at 0x" in repr(item) for item in items):
        raise Unhashable("a set of objects")
    return sorted(items, key=repr)


def _object_parts(value: Any) -> list[Any]:
    """Return the type and attributes of an object, or its pickle state for built-in types without attributes."""
    if isinstance(value, nn.Module):
        return [type(value), _module_attributes(value)]

    slots = [name for base in type(value).__mro__ for name in _slots(base)]
    slot_values = [(name, getattr(value, name, None)) for name in slots]
    has_attributes = bool(slots) or hasattr(value, "__dict__")
    if isinstance(value, io.IOBase) or not (has_attributes or _package(type(value)) in VERSIONED_PACKAGES):
        raise Unhashable(type(value).__name__)
    if has_attributes:
        return [type(value), _stable_attributes(getattr(value, "__dict__", {})), slot_values]

    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return [type(value), reduced]
    return [type(value), *(list(item) if isinstance(item, Iterator) else item for item in reduced)]


def _stable_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Sort attributes by name, as copies may reorder them, without hash values, which change between processes."""
    stable = {}
    for name, value in sorted(attributes.items()):
        is_hash = name.endswith("_hash") and isinstance(value, int)
        if not _is_internal(name) and not is_hash:
            stable[name] = value
    return stable


def _slots(cls: type) -> list[str]:
    """List the slots that a class declares, with private names mangled as Python does."""
    declared = vars(cls).get("__slots__", ())
    if isinstance(declared, str):
        declared = [declared]
    class_name = cls.__name__.lstrip("_")
    slots = []
    for name in declared:
        if name in ("__dict__", "__weakref__"):
            continue
        if name.startswith("__"):
            name = f"_{class_name}{name}"
        slots.append(name)
    return slots


def _module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, with hooks renumbered by their order.

    Torch numbers hooks through all models of a process, so that equal models may have different numbers.
    """
    if "_orig_mod" in module._modules:  # compiled: attributes of the compiler say nothing about the model
        return {"_orig_mod": module._modules["_orig_mod"]}

    attributes = {
        name: value for name, value in _stable_attributes(vars(module)).items() if name not in IGNORED_MODULE_ATTRIBUTES
    }
    hook_dicts = {name: value for name, value in attributes.items() if _is_hook_dict(name, value)}
    hook_ids = sorted({hook_id for hooks in hook_dicts.values() for hook_id in hooks})
    position = {hook_id: i for i, hook_id in enumerate(hook_ids)}
    for name, hooks in hook_dicts.items():
        attributes[name] = {position[hook_id]: hook for hook_id, hook in hooks.items()}
    return attributes


def _is_hook_dict(name: str, value: Any) -> bool:
    return isinstance(value, dict) and "hooks" in name and all(type(key) is int for key in value)


def _class_code(cls: type) -> list[Any]:
    """Return the functions and attributes of a class; for a class of an installed library, its file's digest.

    Libraries decorate their classes in ways that cannot be read. An attribute that cannot be read must not make every
    object of its class unhashable.
    """
    source_digest = _library_digest(cls.__module__)
    if source_digest is not None:
        return [source_digest]

    functions = []
    attributes = {}
    for name, value in vars(cls).items():
        if isinstance(value, types.FunctionType):
            functions.append(value)
        elif _is_descriptor(value) or not _is_internal(name):
            attributes[name] = Lenient(_unwrap_descriptor(value))
    return [*functions, attributes]


def _is_internal(name: str) -> bool:
    """Whether Python uses this name for its own bookkeeping."""
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, (property, staticmethod, classmethod, cached_property))


def _unwrap_descriptor(value: Any) -> Any:
    """Return the functions inside a descriptor, and any other value unchanged."""
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, cached_property):
        return value.func
    return value


@cache
def _library_digest(module: str) -> str | None:
    """Return the digest of a module's source if it is an installed library; None for the user's own code."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return None
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest()


def _package(cls: type) -> str:
    if cls.__module__ != "__main__":
        return cls.__module__.split(".")[0]
    return ""
