"""What a method's hyper-parameters may be, and where to look for good ones."""

from __future__ import annotations

import types
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Range:
    """What a numeric field may be, both ends included; written beside its type, in ``Annotated``."""

    low: float
    high: float = float("inf")

    def __str__(self) -> str:
        return f"{self.low:g} or more" if self.high == float("inf") else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Search:
    """Where the best value of a field is looked for, written beside it; see ``everlearn.tuning``.

    Args:
        low: where it begins.
        high: where it ends.
        log: whether a factor counts everywhere the same, rather than a difference.
        late: whether the field does nothing before the first ``end_task``, so that trials can share the first task ...
        unless: ... where that is so only while another field, of this name, is not set.
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
    """Refuse a hyper-parameter of the wrong kind, saying what is allowed.

    >>> check_field("EWC.mode", "onlin", Literal["online", "separate"])
    Traceback (most recent call last):
    ValueError: EWC.mode: got 'onlin', allowed: 'online', 'separate'.
    """
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        check_field(name, value, hint)
        for extra in extras:
            if isinstance(extra, Range) and not (extra.low <= float(value) <= extra.high and isfinite(float(value))):  # type: ignore[arg-type]
                raise ValueError(f"{name}: got {value!r}, allowed: {extra}.")
        return
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bounded := [o for o in options if get_origin(o) is Annotated]:
        plain: Any = Union.__getitem__(tuple(get_args(o)[0] if o in bounded else o for o in options))
        check_field(name, value, plain)
        if isinstance(value, Real):
            check_field(name, value, bounded[0])
        return
    literals = [v for o in options if get_origin(o) is Literal for v in get_args(o)]
    if value in literals:
        return
    kinds = [get_origin(o) or o for o in options if get_origin(o) is not Literal]
    if not all(isinstance(k, type) for k in kinds):
        return  # a kind that isinstance cannot judge, such as Any
    if not isinstance(value, bool) or bool in kinds:  # True is an int to Python, not to people
        wider = [Real] * (float in kinds) + [Integral] * (int in kinds)  # numpy's numbers are numbers
        if isinstance(value, (*kinds, *wider)):
            return
    wanted = ", ".join([*map(repr, literals), *("None" if k is types.NoneType else k.__name__ for k in kinds)])
    raise (ValueError if literals else TypeError)(f"{name}: got {value!r}, allowed: {wanted}.")
