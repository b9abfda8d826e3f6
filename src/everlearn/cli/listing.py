"""What there is, a line each, and what a method is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from everlearn.cli.names import look_up
from everlearn.cli.tables import names as table_names
from everlearn.cli.tables import read as read_table
from everlearn.method import Method
from everlearn.methods import METHODS
from everlearn.nets import NETS
from everlearn.stream import Stream
from everlearn.streams import STREAMS


def everything() -> None:
    """Print the methods, streams, models and published tables."""
    tables: dict[str, Mapping[str, Any]] = {
        "Methods": {**METHODS, "joint": Stream.joint},
        "Streams": STREAMS,
        "Models": NETS,
    }
    for title, things in tables.items():
        print(f"{title}:")
        for name, thing in things.items():
            print(f"  {name:19s} {_first_line(thing)}")
        print()
    print("Published tables, for 'everlearn reproduce':")
    for name in table_names():
        print(f"  {name:19s} {read_table(name).title} ({read_table(name).source})")
    print()
    print("'everlearn show METHOD' tells more; 'a+b' chains two methods.")


def explain_method(method: str) -> None:
    """Print what a method does, and its fields."""
    if method == "joint":
        print(f"joint ({Stream.__module__}.{Stream.__qualname__}.joint)\n\n{inspect.getdoc(Stream.joint)}")
        return
    kind = look_up("method", method, {**METHODS, "joint": Method})
    print(f"{method} ({kind.__module__}.{kind.__qualname__})\n")
    print(inspect.cleandoc(kind.__doc__ or "").split("\nArgs:")[0].rstrip())
    documented, hints = _arguments(kind), get_type_hints(kind, include_extras=True)
    if own := sorted(fields(kind), key=lambda f: bool(f.kw_only)):  # those that many methods share come last
        print(f"\nFields, set with --set {method}.FIELD=VALUE:")
        for f in own:
            default = "" if f.default is MISSING else f" = {f.default!r}"
            print(f"  {f.name}: {_type(hints[f.name])}{default}\n      {documented.get(f.name, '')}")
    else:
        print("\nIt has no fields to set.")


def _type(hint: Any) -> str:
    """A field's type as people read it."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        return ", ".join([_type(kind), *map(str, extras)])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("None" if option is NoneType else _type(option) for option in get_args(hint))
    return inspect.formatannotation(hint)


def _first_line(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").splitlines()[0]


def _arguments(kind: type) -> dict[str, str]:
    """What the docstring's Args section says of each field, the class's own first."""
    found = _arguments(kind.__base__) if kind.__base__ not in (None, object) else {}
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = text
        elif name:
            found[name] += " " + line.strip()
    return found
