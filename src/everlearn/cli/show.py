"""The command ``everlearn show``: the description of a method and its fields."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from everlearn.core.stream import Stream
from everlearn.experiments.parsing import look_up
from everlearn.methods import METHODS


def print_method(method: str) -> None:
    """Print the description of a method and its fields."""
    if method.lower() == "joint":
        print(f"joint ({Stream.__module__}.{Stream.__qualname__}.joint)\n\n{inspect.getdoc(Stream.joint)}")
        return
    known_names = {name: name for name in [*METHODS, "joint"]}
    method_class = METHODS[look_up("method", method, known_names)]
    print(f"{method} ({method_class.__module__}.{method_class.__qualname__})\n")
    print(inspect.cleandoc(method_class.__doc__ or "").split("\nArgs:")[0].rstrip())

    descriptions = _field_descriptions(method_class)
    hints = get_type_hints(method_class, include_extras=True)
    # Keyword-only fields are those that many methods share: they come last.
    method_fields = sorted(fields(method_class), key=lambda field: bool(field.kw_only))
    if not method_fields:
        print("\nIt has no fields to set.")
        return
    print(f"\nFields, set with --set {method}.FIELD=VALUE:")
    for field in method_fields:
        default = "" if field.default is MISSING else f" = {field.default!r}"
        print(f"  {field.name}: {_format_type(hints[field.name])}{default}")
        print(f"      {descriptions.get(field.name, '')}")


def _format_type(hint: Any) -> str:
    """Format a type hint with its ranges."""
    if get_origin(hint) is Annotated:
        plain_type, *annotations = get_args(hint)
        return ", ".join([_format_type(plain_type), *map(str, annotations)])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("None" if option is NoneType else _format_type(option) for option in get_args(hint))
    return inspect.formatannotation(hint)


def _field_descriptions(method_class: type) -> dict[str, str]:
    """Read the description of each field from the Args section of the class and its base classes."""
    descriptions: dict[str, str] = {}
    if method_class.__base__ not in (None, object):
        descriptions = _field_descriptions(method_class.__base__)

    _, _, section = inspect.cleandoc(method_class.__doc__ or "").partition("\nArgs:\n")
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        # A field starts at four spaces of indentation; deeper lines continue its description.
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            descriptions[name] = text
        elif name:
            descriptions[name] += " " + line.strip()
    return descriptions
