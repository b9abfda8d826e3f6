"""Parse text from the command line and YAML files into methods and values, with suggestions in error messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from everlearn.methods import METHODS
from everlearn.runtime.optional_imports import imports_of_extra

with imports_of_extra("cli", "A grid of runs"):
    import yaml
    from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from everlearn.core.method import Method

T = TypeVar("T")
MAX_YAML_CHARACTERS = 2**18
MAX_YAML_VALUES = 10_000


class UsageError(Exception):
    """Invalid command-line input; the message says what is allowed."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML text of limited size.

    The limit also counts values that aliases stand for: a few lines of aliases that refer to each other can expand to
    more than any memory holds.

    >>> parse_yaml("{a: &x [1, 2], b: *x}")
    {'a': [1, 2], 'b': [1, 2]}
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, allowed: {MAX_YAML_CHARACTERS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _count_values(node, {}) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_YAML_VALUES:,} values: write them out")
        return yaml.safe_load(text)
    except RecursionError:
        raise yaml.YAMLError("its lists are nested too deeply") from None


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Count the values of a node with its aliases expanded; infinite for a node that contains itself."""
    if id(node) not in counts:
        # Until its children are counted, a node counts as infinite: it is met again only inside itself.
        counts[id(node)] = math.inf
        children: list[yaml.Node] = []
        if isinstance(node, yaml.CollectionNode):
            for entry in node.value:
                # Entries of a mapping are pairs of key and value.
                children += entry if isinstance(entry, tuple) else (entry,)
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[id(node)]


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Look up a name in any case; an unknown name raises an error that suggests the nearest.

    >>> look_up("method", "fintune", METHODS)
    Traceback (most recent call last):
    everlearn.experiments.parsing.UsageError: Unknown method 'fintune'. Did you mean 'finetune'? ...
    """
    if name.lower() not in table:
        raise UsageError(f"Unknown {kind} {name!r}. {did_you_mean(name, table)}")
    return table[name.lower()]


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Suggest the nearest known name, and list all of them."""
    known_names = list(known_names)
    by_lower_case = {known_name.lower(): known_name for known_name in known_names}
    close_matches = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    all_names = f"There are: {', '.join(known_names)}."
    if close_matches:
        return f"Did you mean {by_lower_case[close_matches[0]]!r}? {all_names}"
    return all_names


def split_list(text: str) -> list[str]:
    """Split a list separated by commas, without empty and repeated items."""
    return list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def make_method(expression: str, settings: Mapping[str, Mapping[str, Any]]) -> Method:
    """Make a method from its name, or a chain from names joined by ``+``, with the settings of each.

    >>> make_method("lwf+freeze", {"lwf": {"strength": "30"}})
    LwF(strength=30.0, temperature=2.0, refuse_new=False, warmup=0, output=None) + Freeze(what='features', output=None)
    """
    return reduce(add, [_make_single_method(name.strip(), settings) for name in expression.split("+")])


def _make_single_method(name: str, settings: Mapping[str, Mapping[str, Any]]) -> Method:
    known_names = {known_name: known_name for known_name in [*METHODS, "joint"]}
    name = look_up("method", name, known_names)
    if name == "joint":
        raise UsageError("'joint' learns all tasks at once by fine-tuning; it is not chained with another method.")
    method_class = METHODS[name]
    hints = get_type_hints(method_class)
    field_values = {
        field: field_value(name, field, value, hints[field]) for field, value in settings.get(name, {}).items()
    }
    try:
        return method_class(**field_values)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None


def parse_settings(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Parse settings such as ``ewc.strength=30`` by method and field; unknown methods and fields raise.

    >>> parse_settings(["l2.strength=30"])
    {'l2': {'strength': '30'}}
    """
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        name, dot, field = path.strip().partition(".")
        if not equals or not dot:
            raise UsageError(f"A setting reads METHOD.FIELD=VALUE, as in l2.strength=30; got {text!r}.")

        known_fields = [f.name for f in fields(look_up("method", name, METHODS))]
        if field not in known_fields:
            suggestion = did_you_mean(field, known_fields) if known_fields else "It has no fields."
            raise UsageError(f"{name} has no field {field!r}. {suggestion}")
        settings.setdefault(name, {})[field] = value.strip()
    return settings


def field_value(method: str, field: str, value: Any, hint: Any) -> Any:
    """Convert text to the type of a field; an error names the field, the text and what is allowed.

    >>> make_method("pnn", {"pnn": {"laterals": "none", "factory": "none"}})
    PNN(unknown='confident', laterals='none', factory=None)
    """
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    try:
        if not isinstance(value, str):
            return adapter.validate_python(value)

        # 'none' is None unless the field has a choice of that name.
        if value.lower() in ("none", "null") and value not in get_args(hint):
            return adapter.validate_python(None)

        # A field may hold a value per task, or patterns of layer names with weights.
        if value.startswith(("[", "(", "{")):
            collection = parse_yaml(value.replace("(", "[").replace(")", "]"))
            if isinstance(collection, list):
                collection = tuple(collection)
            return adapter.validate_python(collection)
        return adapter.validate_python(value)
    except yaml.YAMLError:
        raise UsageError(f"{method}.{field}: cannot read {value!r}; write [1, 2] or {{'backbone.*': 1.0}}.") from None
    except ValidationError as error:
        raise UsageError(f"{method}.{field}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Rewrite a pydantic error as one sentence: the field, what was given, what is allowed."""
    details = error.errors()
    # A field of several types has an error for each.
    is_union = len(details) > 1 and all(detail["input"] is details[0]["input"] for detail in details)
    if is_union and all(len(detail["loc"]) == 1 for detail in details):
        allowed_types = " or ".join(dict.fromkeys(_allowed(detail["msg"]) for detail in details))
        return f"got {details[0]['input']!r}, allowed: {allowed_types}."

    sentences = []
    for detail in details:
        field = ".".join(str(key) for key in detail["loc"] if isinstance(key, str) and key.isidentifier())
        allowed = _allowed(detail["msg"])

        # Errors that validators of this package raise are complete sentences.
        if detail["type"] == "value_error":
            sentences.append(allowed)
        elif detail["type"] == "extra_forbidden":
            sentences.append(f"unknown key {field!r}")
        else:
            prefix = f"{field}: " if field else ""
            sentences.append(f"{prefix}got {detail['input']!r}, allowed: {allowed}")
    return "; ".join(dict.fromkeys(sentences)) + "."


def _allowed(message: str) -> str:
    """Return what a message of pydantic says is allowed."""
    return message.removeprefix("Input should be ").removeprefix("Value error, ").split(", unable to")[0]
