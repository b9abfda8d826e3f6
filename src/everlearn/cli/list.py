"""The commands ``everlearn list`` and ``everlearn show``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.experiments.parsing import look_up
from everlearn.experiments.published_tables import read_table, table_names
from everlearn.methods import METHODS
from everlearn.nets import NETS
from everlearn.streams import STREAMS


def print_lists() -> None:
    """Print the methods, streams, models and published tables."""
    registries: dict[str, Mapping[str, Any]] = {
        "Methods": {**METHODS, "joint": Stream.joint},
        "Streams": STREAMS,
        "Models": NETS,
    }
    for title, registry in registries.items():
        print(f"{title}:")
        for name, entry in registry.items():
            print(f"  {name:19s} {_summary_line(entry)}")
        print()

    print("Published tables, for 'everlearn reproduce':")
    for name in table_names():
        table = read_table(name)
        print(f"  {name:19s} {table.title} ({table.source})")
    print()
    print("'everlearn show METHOD' describes a method; 'a+b' chains two methods.")


def print_method(method: str) -> None:
    """Print the description of a method and its fields."""
    if method == "joint":
        print(f"joint ({Stream.__module__}.{Stream.__qualname__}.joint)\n\n{inspect.getdoc(Stream.joint)}")
        return
    method_class = look_up("method", method, {**METHODS, "joint": Method})
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


def _summary_line(entry: Any) -> str:
    return inspect.cleandoc(entry.__doc__ or "").splitlines()[0]


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
