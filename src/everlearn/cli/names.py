"""From what people type to methods, streams and values; a wrong word is answered with the right ones."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import reduce
from operator import add
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from everlearn.method import Method
from everlearn.methods import METHODS

T = TypeVar("T")
MOST_CHARACTERS = 2**18  # of a YAML text; a plan has a few hundred
MOST_VALUES = 10_000  # that it stands for


class UsageError(Exception):
    """Something typed wrongly; its message is the answer."""


def parse_yaml(text: str) -> Any:
    """What a YAML text says, if it is of the size of something that people write.

    A few lines of YAML whose aliases name each other can stand for more than any memory holds.

    >>> parse_yaml("{a: &x [1, 2], b: *x}")
    {'a': [1, 2], 'b': [1, 2]}
    """
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, allowed: {MOST_CHARACTERS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _values(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values: write them out")
        return yaml.safe_load(text)
    except RecursionError:
        raise yaml.YAMLError("its lists are nested too deeply") from None


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for once its aliases are written out; one that is part of itself has no end."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of that name, or an error that suggests the nearest.

    >>> look_up("method", "fintune", METHODS)
    Traceback (most recent call last):
    everlearn.cli.names.UsageError: Unknown method 'fintune'. Did you mean 'finetune'? ...
    """
    if name.lower() not in table:
        raise UsageError(f"Unknown {kind} {name!r}. {did_you_mean(name, table)}")
    return table[name.lower()]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known names, and all of them."""
    known = list(known)
    lower = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return (f"Did you mean {lower[near[0]]!r}? " if near else "") + f"There are: {', '.join(known)}."


def words(text: str) -> list[str]:
    """A list separated by commas, each word once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def make_method(expression: str, settings: Mapping[str, Mapping[str, Any]]) -> Method:
    """A method from its name, or a chain from names joined by ``+``, with the settings of each.

    >>> make_method("lwf+freeze", {"lwf": {"strength": "30"}})
    LwF(strength=30.0, temperature=2.0, refuse_new=False, warmup=0, output=None) + Freeze(what='features', output=None)
    """
    return reduce(add, [_make_one(name.strip(), settings) for name in expression.split("+")])


def _make_one(name: str, settings: Mapping[str, Mapping[str, Any]]) -> Method:
    if name == "joint":
        raise UsageError("'joint' learns all tasks at once by fine-tuning; it is not chained with another method.")
    known: dict[str, type[Method]] = {**METHODS, "joint": Method}
    kind = look_up("method", name, known)
    name = name.lower()
    hints = get_type_hints(kind)
    given = {f: field_value(name, f, value, hints[f]) for f, value in settings.get(name, {}).items()}
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None


def parse_settings(given: Iterable[str]) -> dict[str, dict[str, str]]:
    """Settings such as ``ewc.strength=30``, by method and field; unknown ones are refused.

    >>> parse_settings(["l2.strength=30"])
    {'l2': {'strength': '30'}}
    """
    settings: dict[str, dict[str, str]] = {}
    for text in given:
        path, equals, value = text.partition("=")
        name, dot, field = path.strip().partition(".")
        if not equals or not dot:
            raise UsageError(f"A setting reads METHOD.FIELD=VALUE, as in l2.strength=30; got {text!r}.")
        known = [f.name for f in fields(look_up("method", name, METHODS))]
        if field not in known:
            raise UsageError(
                f"{name} has no field {field!r}. " + (did_you_mean(field, known) if known else "It has no fields.")
            )
        settings.setdefault(name, {})[field] = value.strip()
    return settings


def field_value(method: str, field: str, value: Any, hint: Any) -> Any:
    """A typed text as the value of a field, or an error that names the field, the text and what is allowed.

    >>> make_method("pnn", {"pnn": {"laterals": "none", "factory": "none"}})
    PNN(unknown='confident', laterals='none', factory=None)
    """
    try:
        if isinstance(value, str) and value.lower() in ("none", "null") and value not in get_args(hint):
            return TypeAdapter(hint).validate_python(None)
        if isinstance(value, str) and value.startswith(("[", "(", "{")):  # a value per task, or patterns with weights
            opened = parse_yaml(value.replace("(", "[").replace(")", "]"))
            return TypeAdapter(hint).validate_python(tuple(opened) if isinstance(opened, list) else opened)
        return TypeAdapter(hint).validate_python(value)
    except yaml.YAMLError:
        raise UsageError(f"{method}.{field}: cannot read {value!r}; write [1, 2] or {{'backbone.*': 1.0}}.") from None
    except ValidationError as error:
        raise UsageError(f"{method}.{field}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Pydantic's complaint in one sentence: the field, what was given, what is allowed."""
    parts = []
    for e in error.errors():
        where = ".".join(str(word) for word in e["loc"] if isinstance(word, str) and word.isidentifier())
        wanted = e["msg"].removeprefix("Input should be ").removeprefix("Value error, ").split(", unable to")[0]
        if e["type"] == "value_error":  # our own sentence
            parts.append(wanted)
        elif e["type"] == "extra_forbidden":
            parts.append(f"unknown key {where!r}")
        else:
            parts.append(f"{where + ': ' if where else ''}got {e['input']!r}, allowed: {wanted}")
    return "; ".join(dict.fromkeys(parts)) + "."
