"""What is tuned: fields of a method, or of the methods of a chain, and where their values are looked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from everlearn.fields import Search
from everlearn.method import Chain, Method, parts

Value = float | int | str
FEW = 16
Given = Search | tuple[float, float] | None  # None: what stands beside the field


@dataclass(frozen=True)
class Dimension:
    """One field that is tuned.

    Args:
        part: the method's place in its chain.
        field: its name.
        name: for people: the field's name, with the method's where a chain has several.
        search: from where to where.
        words: for a field that names its values, these.
        whole: whether it is an integer.
    """

    part: int
    field: str
    name: str
    search: Search
    words: tuple[str, ...] = ()
    whole: bool = False

    def suggest(self, trial: Any) -> Value:
        """A value, by an Optuna trial."""
        low, high = self.search.low, self.search.high
        if self.words:
            return str(trial.suggest_categorical(self.name, self.words))
        if self.whole:
            return int(trial.suggest_int(self.name, int(low), int(high), log=self._logarithmic))
        return float(trial.suggest_float(self.name, low, high, log=self._logarithmic))

    @property
    def measured(self) -> bool:
        """Whether it is a real number, of which there is one between any two."""
        return not self.words and not self.whole

    @property
    def choices(self) -> list[Value]:
        """All its values, where they are few enough to be tried one by one."""
        if self.whole and self.search.high - self.search.low < FEW:
            return list(range(int(self.search.low), int(self.search.high) + 1))
        return list(self.words)

    def spread(self, count: int) -> list[float]:
        """So many values, evenly, the middle first and the ends early, so that few of them are a rough picture already.

        >>> [round(v) for v in Dimension(0, "strength", "strength", Search(1, 10_000)).spread(5)]
        [100, 1, 10000, 10, 1000]
        """
        shares = [0.5] if count == 1 else [i / (count - 1) for i in range(count)]
        shares.sort(key=lambda share: (min(abs(share - x) for x in (0.5, 0.0, 1.0)), abs(share - 0.5)))
        low, high = self._scaled(self.search.low), self._scaled(self.search.high)
        return [self._back(low + (high - low) * share) for share in shares]

    def between(self, tried: Sequence[tuple[float, float | None]]) -> float:
        """The middle of the most promising gap between the values tried, given with their scores, None for failures.

            a gap's promise = (score at one end + score at the other) / 2 + steepest slope seen · width / 2

        which no score inside exceeds if none is steeper (Shubert, 1972): several peaks are followed, not the first alone.

        >>> strength = Dimension(0, "strength", "strength", Search(1, 9, log=False))
        >>> strength.between([(1, 0.5), (3, 0.9), (9, 0.8)])
        6.0
        >>> strength.between([(1, 0.5), (3, 0.9), (5, 0.5), (7, 0.5), (9, 0.85)])
        2.0
        """
        worst = min((score for _, score in tried if score is not None), default=0.0)
        found = sorted((self._scaled(value), worst if score is None else score) for value, score in tried)
        if len(found) < 2:
            ends = [self._scaled(end) for end in (self.search.low, self.search.high)]
            return self._back((found[0][0] + max(ends, key=lambda end: abs(end - found[0][0]))) / 2)
        gaps = [(a, b) for a, b in pairwise(found) if b[0] > a[0]]
        steepest = max(abs(b[1] - a[1]) / (b[0] - a[0]) for a, b in gaps)
        a, b = max(gaps, key=lambda gap: gap[0][1] + gap[1][1] + steepest * (gap[1][0] - gap[0][0]))
        return self._back((a[0] + b[0]) / 2)

    def with_running(
        self, tried: Sequence[tuple[float, float | None]], running: Sequence[float]
    ) -> list[tuple[float, float | None]]:
        """With values that are being tried, as if their scores were known to lie on a line between their neighbours'.

        >>> strength = Dimension(0, "strength", "strength", Search(1, 9, log=False))
        >>> strength.with_running([(1, 0.5), (3, 0.9)], [2.0])
        [(1, 0.5), (3, 0.9), (2.0, 0.7)]
        """
        known = sorted((self._scaled(value), score) for value, score in tried if score is not None)
        if not known:
            return [*tried, *((value, None) for value in running)]
        places, scores = zip(*known, strict=True)
        return [*tried, *((value, float(np.interp(self._scaled(value), places, scores))) for value in running)]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._logarithmic else value

    def _back(self, value: float) -> float:
        value = float(f"{math.exp(value) if self._logarithmic else value:.4g}")  # more digits only look exact
        return min(max(value, self.search.low), self.search.high)

    @property
    def _logarithmic(self) -> bool:
        return self.search.log and self.search.low > 0


def dimensions(method: Method, wanted: Mapping[str, Given] | None = None) -> list[Dimension]:
    """The fields to tune.

    Args:
        method: the method, or a chain.
        wanted: fields by name, "strength" or in a chain "EWC.strength", each with a range (low, high), a ``Search``, or None
            for the one beside the field; by default the first field of each method that has a range beside it.

    >>> from everlearn import EWC, LwF
    >>> [(d.name, str(d.search)) for d in dimensions(EWC() + LwF())]
    [('EWC.strength', 'searched from 1 to 1e+10'), ('LwF.strength', 'searched from 0.01 to 100')]
    """
    if not isinstance(method, Method):
        raise TypeError(f"What is tuned is a method such as EWC(), got {method!r}.")
    found = _every(method)
    if wanted is not None and not wanted:
        raise ValueError("No field is named: leave fields out for the first with a range.")
    if wanted is None:
        ready = [d for d in found if d.search.low < d.search.high]
        if firsts := [next(d for d in ready if d.part == part) for part in dict.fromkeys(d.part for d in ready)]:
            return firsts
        raise ValueError(
            f"{_kinds(method)} has no field with a range beside it: name one with a range, as in fields={{'capacity': (50, 1000)}}, or "
            "--fields er.capacity=50:1000 on the command line."
        )
    return [_chosen(found, name, given, method) for name, given in wanted.items()]


def changed(method: Method, at: Sequence[Dimension], values: Sequence[Value]) -> Method:
    """A fresh method with these values."""
    own = {d.part: {e.field: v for e, v in zip(at, values, strict=True) if e.part == d.part} for d in at}
    if not isinstance(method, Chain):
        return replace(method, **own.get(0, {}))
    return Chain(*[replace(m, **own.get(i, {})) for i, m in enumerate(method.methods)])


def first_values(at: Sequence[Dimension], trials: int) -> list[dict[str, Value]]:
    """What is tried before anything is known: every choice, or half the trials spread over the range of a single number.

    >>> from everlearn import EWC
    >>> first_values(dimensions(EWC(), {"mode": None}), 5)
    [{'mode': 'separate'}, {'mode': 'online'}]
    """
    if all(d.choices for d in at):
        return [dict(zip((d.name for d in at), values, strict=True)) for values in product(*(d.choices for d in at))]
    if len(at) == 1 and at[0].measured:
        return [{at[0].name: value} for value in at[0].spread(min(trials, max(3, trials // 2)))]
    return []


def check_values(method: Method, at: Sequence[Dimension]) -> None:
    """Refuse a field none of whose ends the method takes."""
    for d in at:
        ends: list[Value] = d.choices or [d.search.low, d.search.high]
        for i, end in enumerate(ends):
            try:
                changed(method, [d], [end])
                break
            except ValueError:
                if i + 1 == len(ends):
                    raise


def change(method: Method, at: Sequence[Dimension], values: Sequence[Value]) -> None:
    """Give these values to a method that is under way, before its first task has ended."""
    for d, value in zip(at, values, strict=True):
        setattr(parts(method)[d.part], d.field, value)


def _every(method: Method) -> list[Dimension]:
    """All fields that could be tuned: numbers, and words from a list; those without a range have an empty one."""
    several, found = len(parts(method)) > 1, []
    for part, m in enumerate(parts(method)):
        hints = get_type_hints(type(m), include_extras=True)
        for f in fields(m):
            hint = hints[f.name]
            extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
            plain = get_args(hint)[0] if extras else hint
            name = f"{type(m).__name__}.{f.name}" if several else f.name
            if get_origin(plain) is Literal and all(isinstance(v, str) for v in get_args(plain)):
                found.append(Dimension(part, f.name, name, Search(0, 0), get_args(plain)))
            elif isinstance(value := getattr(m, f.name), (int, float)) and not isinstance(value, bool):
                search = next((e for e in extras if isinstance(e, Search)), Search(0, 0))
                if search.unless and getattr(m, search.unless):
                    search = replace(search, late=False)
                found.append(Dimension(part, f.name, name, search, whole=isinstance(value, int) and plain is int))
    return found


def _chosen(found: Sequence[Dimension], name: str, given: Given, method: Method) -> Dimension:
    matching = [d for d in found if name in (d.name, d.field, f"{type(parts(method)[d.part]).__name__}.{d.field}")]
    if len(matching) != 1:
        known = ", ".join(d.name for d in found)
        raise ValueError(
            f"{name!r} is {'several fields' if matching else 'no field'} that can be tuned: there are {known}."
        )
    d = matching[0]
    if d.words:
        if given is not None:
            raise ValueError(f"{name} is one of {', '.join(d.words)}: all are tried, a range has no meaning.")
        return d
    search = given if isinstance(given, Search) else d.search
    if given is not None and not isinstance(given, Search):
        try:
            low, high = (float(end) for end in given)
        except (TypeError, ValueError):
            raise ValueError(f"{name} needs a range (low, high), got {given!r}.") from None
        search = replace(d.search, low=low, high=high)
    if not search.low < search.high or not math.isfinite(search.high - search.low):
        raise ValueError(f"{name} needs a range (low, high) with low < high, got {search.low:g} and {search.high:g}.")
    if search.log and not search.low > 0:
        raise ValueError(
            f"{name} is looked for by factors, so that its range begins above 0, got {search.low:g}: begin higher, or give "
            "Search(low, high, log=False)."
        )
    if d.whole and (search.low != int(search.low) or search.high != int(search.high)):
        raise ValueError(f"{name} is a whole number: give whole ends, got {search.low:g} and {search.high:g}.")
    return replace(d, search=search)


def _kinds(method: Method) -> str:
    return " + ".join(type(m).__name__ for m in parts(method))
