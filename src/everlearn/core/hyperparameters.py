"""Allowed values and search ranges of hyper-parameters."""

from __future__ import annotations

import types
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Range:
    """Closed interval of allowed values of a numeric field, given in ``Annotated`` with its type."""

    low: float
    high: float = inf

    def __contains__(self, value: Any) -> bool:
        number = float(value)
        return self.low <= number <= self.high and isfinite(number)

    def __str__(self) -> str:
        if self.high == inf:
            return f"{self.low:g} or more"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Search:
    """Search range of a field for hyper-parameter tuning, given in ``Annotated``; see ``everlearn.tuning``.

    Args:
        low: lower end.
        high: upper end.
        log: whether to search on a logarithmic scale.
        late: whether the field has no effect before the first ``end_task``, so that trials can share the first task.
        unless: name of another field; if that field is set, ``late`` does not hold.
    """

    low: float
    high: float
    log: bool = True
    late: bool = False
    unless: str = ""

    def __str__(self) -> str:
        return f"searched from {self.low:g} to {self.high:g}"


NonNegative = Annotated[float, Range(0)]


def check_field(name: str, value: object, hint: Any) -> None:
    """Raise ValueError or TypeError if a hyper-parameter's value does not match its type hint.

    >>> check_field("EWC.mode", "onlin", Literal["online", "separate"])
    Traceback (most recent call last):
    ValueError: EWC.mode: got 'onlin', allowed: 'online', 'separate'.
    """
    # Annotated[type, Range]: check the type, then the range.
    if get_origin(hint) is Annotated:
        plain_type, *annotations = get_args(hint)
        check_field(name, value, plain_type)
        for annotation in annotations:
            if isinstance(annotation, Range) and value not in annotation:
                raise ValueError(f"{name}: got {value!r}, allowed: {annotation}.")
        return

    options: tuple[Any, ...] = (hint,)
    if get_origin(hint) in (Union, types.UnionType):
        options = get_args(hint)

    # A union with Annotated[type, Range]: check the union of plain types, then the range of a number.
    annotated = [option for option in options if get_origin(option) is Annotated]
    if annotated:
        plain_types = tuple(get_args(option)[0] if option in annotated else option for option in options)
        check_field(name, value, Union.__getitem__(plain_types))
        if isinstance(value, Real):
            check_field(name, value, annotated[0])
        return

    literals = [literal for option in options if get_origin(option) is Literal for literal in get_args(option)]
    if value in literals:
        return

    # Types that isinstance cannot check, such as Any, accept every value.
    value_types = [get_origin(option) or option for option in options if get_origin(option) is not Literal]
    if not all(isinstance(value_type, type) for value_type in value_types):
        return

    # Numbers of numpy count as numbers. A bool is an int in Python, but not an allowed int.
    number_types = [Real] * (float in value_types) + [Integral] * (int in value_types)
    is_bool_as_int = isinstance(value, bool) and bool not in value_types
    if isinstance(value, (*value_types, *number_types)) and not is_bool_as_int:
        return

    allowed = [repr(literal) for literal in literals]
    for value_type in value_types:
        allowed.append("None" if value_type is types.NoneType else value_type.__name__)
    message = f"{name}: got {value!r}, allowed: {', '.join(allowed)}."
    if literals:
        raise ValueError(message)
    raise TypeError(message)
