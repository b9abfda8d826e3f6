"""Search space of a study: tuned fields of a method or a chain, and the ranges of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from everlearn.core.chain import Chain, methods_of
from everlearn.core.hyperparameters import Search
from everlearn.core.method import Method

Value = float | int | str
MAX_CHOICES = 16  # integer ranges up to this size are tried exhaustively
SearchRange = Search | tuple[float, float] | None  # None: the range in the field's annotation


@dataclass(frozen=True)
class Dimension:
    """One tuned field.

    Args:
        method_index: index of the method in its chain.
        field: name of the field.
        name: displayed name: that of the field, prefixed by the method's class in a chain.
        search: range of the values.
        options: values of a field with named values; empty for a number.
        is_integer: whether the field is an integer.
    """

    method_index: int
    field: str
    name: str
    search: Search
    options: tuple[str, ...] = ()
    is_integer: bool = False

    def suggest(self, trial: Any) -> Value:
        """Value proposed by an Optuna trial."""
        low, high = self.search.low, self.search.high
        if self.options:
            return str(trial.suggest_categorical(self.name, self.options))
        if self.is_integer:
            return int(trial.suggest_int(self.name, int(low), int(high), log=self._is_logarithmic))
        return float(trial.suggest_float(self.name, low, high, log=self._is_logarithmic))

    @property
    def is_continuous(self) -> bool:
        """Whether the field is a real number."""
        return not self.options and not self.is_integer

    @property
    def choices(self) -> list[Value]:
        """All values, if they are few enough to be tried exhaustively; otherwise empty."""
        if self.is_integer and self.search.high - self.search.low < MAX_CHOICES:
            return list(range(int(self.search.low), int(self.search.high) + 1))
        return list(self.options)

    def spread(self, count: int) -> list[float]:
        """Evenly spaced values, the middle first and the ends early, so that the first few already cover the range.

        >>> [round(v) for v in Dimension(0, "strength", "strength", Search(1, 10_000)).spread(5)]
        [100, 1, 10000, 10, 1000]
        """
        fractions = [0.5] if count == 1 else [i / (count - 1) for i in range(count)]
        fractions.sort(key=lambda fraction: (min(abs(fraction - x) for x in (0.5, 0.0, 1.0)), abs(fraction - 0.5)))
        low, high = self._to_scale(self.search.low), self._to_scale(self.search.high)
        return [self._from_scale(low + (high - low) * fraction) for fraction in fractions]

    def refine(self, tried: Sequence[tuple[float, float | None]]) -> float:
        """Middle of the most promising gap between the tried values (Shubert, 1972).

            promise of a gap = (score at one end + score at the other) / 2 + steepest slope · width / 2

        No score in the gap exceeds this bound if no slope is steeper, so that several peaks are followed.

        Args:
            tried: pairs of value and score, None for failed trials, which count as the worst score.

        >>> strength = Dimension(0, "strength", "strength", Search(1, 9, log=False))
        >>> strength.refine([(1, 0.5), (3, 0.9), (9, 0.8)])
        6.0
        >>> strength.refine([(1, 0.5), (3, 0.9), (5, 0.5), (7, 0.5), (9, 0.85)])
        2.0
        """
        worst_score = min((score for _, score in tried if score is not None), default=0.0)
        points = sorted((self._to_scale(value), worst_score if score is None else score) for value, score in tried)

        # With a single value, try the middle between it and the farther end.
        if len(points) < 2:
            only_x, _ = points[0]
            ends = [self._to_scale(end) for end in (self.search.low, self.search.high)]
            farther_end = max(ends, key=lambda end: abs(end - only_x))
            return self._from_scale((only_x + farther_end) / 2)

        gaps = [(lower, upper) for lower, upper in pairwise(points) if upper[0] > lower[0]]
        slope = max(abs(upper[1] - lower[1]) / (upper[0] - lower[0]) for lower, upper in gaps)
        lower, upper = max(gaps, key=lambda gap: gap[0][1] + gap[1][1] + slope * (gap[1][0] - gap[0][0]))
        return self._from_scale((lower[0] + upper[0]) / 2)

    def interpolate_running(
        self, tried: Sequence[tuple[float, float | None]], running: Sequence[float]
    ) -> list[tuple[float, float | None]]:
        """Add the values of running trials, with scores interpolated between their neighbors.

        >>> strength = Dimension(0, "strength", "strength", Search(1, 9, log=False))
        >>> strength.interpolate_running([(1, 0.5), (3, 0.9)], [2.0])
        [(1, 0.5), (3, 0.9), (2.0, 0.7)]
        """
        points = sorted((self._to_scale(value), score) for value, score in tried if score is not None)
        if not points:
            return [*tried, *((value, None) for value in running)]
        xs, scores = zip(*points, strict=True)
        interpolated = [(value, float(np.interp(self._to_scale(value), xs, scores))) for value in running]
        return [*tried, *interpolated]

    def _to_scale(self, value: float) -> float:
        return math.log(value) if self._is_logarithmic else value

    def _from_scale(self, scaled_value: float) -> float:
        value = math.exp(scaled_value) if self._is_logarithmic else scaled_value
        # Four digits are readable, and the score does not depend on more.
        rounded_value = float(f"{value:.4g}")
        return min(max(rounded_value, self.search.low), self.search.high)

    @property
    def _is_logarithmic(self) -> bool:
        return self.search.log and self.search.low > 0


def find_dimensions(method: Method, wanted: Mapping[str, SearchRange] | None = None) -> list[Dimension]:
    """Search space of a method.

    Args:
        method: method or chain to tune.
        wanted: fields by name, "strength" or in a chain "EWC.strength", each with a range (low, high), a ``Search``, or
            None for the range in its annotation; by default the first field with such a range of each method.

    >>> from everlearn import EWC, LwF
    >>> [(d.name, str(d.search)) for d in find_dimensions(EWC() + LwF())]
    [('EWC.strength', 'searched from 1 to 1e+10'), ('LwF.strength', 'searched from 0.01 to 100')]
    """
    if not isinstance(method, Method):
        raise TypeError(f"A method such as EWC() can be tuned, got {method!r}.")
    if wanted is not None and not wanted:
        raise ValueError("No field is named: leave fields out to tune the first field with a range.")
    tunable = _tunable_fields(method)
    if wanted is not None:
        return [_select_field(tunable, name, search_range, method) for name, search_range in wanted.items()]

    # By default the first field with a range of each method.
    first_fields: dict[int, Dimension] = {}
    for dimension in tunable:
        if dimension.search.low < dimension.search.high:
            first_fields.setdefault(dimension.method_index, dimension)
    if not first_fields:
        raise ValueError(
            f"{_class_names(method)} has no field with a default range: name one with a range, as in "
            "fields={'capacity': (50, 1000)}, or --fields er.capacity=50:1000 on the command line."
        )
    return list(first_fields.values())


def with_values(method: Method, dimensions: Sequence[Dimension], values: Sequence[Value]) -> Method:
    """Fresh copy of a method with these values of its fields."""
    new_values: dict[int, dict[str, Any]] = {}
    for dimension, value in zip(dimensions, values, strict=True):
        new_values.setdefault(dimension.method_index, {})[dimension.field] = value
    if not isinstance(method, Chain):
        return replace(method, **new_values.get(0, {}))
    return Chain(*[replace(m, **new_values.get(index, {})) for index, m in enumerate(method.methods)])


def first_values(dimensions: Sequence[Dimension], trials: int) -> list[dict[str, Value]]:
    """Values to try first: all choices, or half of the trials spread over the range of a single real number.

    >>> from everlearn import EWC
    >>> first_values(find_dimensions(EWC(), {"mode": None}), 5)
    [{'mode': 'separate'}, {'mode': 'online'}]
    """
    if all(dimension.choices for dimension in dimensions):
        names = [dimension.name for dimension in dimensions]
        combinations = product(*(dimension.choices for dimension in dimensions))
        return [dict(zip(names, values, strict=True)) for values in combinations]
    if len(dimensions) == 1 and dimensions[0].is_continuous:
        count = min(trials, max(3, trials // 2))
        return [{dimensions[0].name: value} for value in dimensions[0].spread(count)]
    return []


def check_values(method: Method, dimensions: Sequence[Dimension]) -> None:
    """Raise if the method accepts neither end of a field's range, or none of its choices."""
    for dimension in dimensions:
        candidates: list[Value] = dimension.choices or [dimension.search.low, dimension.search.high]
        for index, candidate in enumerate(candidates):
            try:
                with_values(method, [dimension], [candidate])
                break
            except ValueError:
                if index + 1 == len(candidates):
                    raise


def set_values(method: Method, dimensions: Sequence[Dimension], values: Sequence[Value]) -> None:
    """Set the fields of a method in training, before its first ``end_task``."""
    for dimension, value in zip(dimensions, values, strict=True):
        setattr(methods_of(method)[dimension.method_index], dimension.field, value)


def _tunable_fields(method: Method) -> list[Dimension]:
    """All fields that can be tuned: numbers, and literals; those without a default range have an empty one."""
    methods = methods_of(method)
    tunable = []
    for method_index, m in enumerate(methods):
        hints = get_type_hints(type(m), include_extras=True)
        for field in fields(m):
            plain_type = hints[field.name]
            annotations: tuple[Any, ...] = ()
            if get_origin(plain_type) is Annotated:
                plain_type, *annotation_list = get_args(plain_type)
                annotations = tuple(annotation_list)
            name = f"{type(m).__name__}.{field.name}" if len(methods) > 1 else field.name
            value = getattr(m, field.name)

            if get_origin(plain_type) is Literal and all(isinstance(o, str) for o in get_args(plain_type)):
                tunable.append(Dimension(method_index, field.name, name, Search(0, 0), get_args(plain_type)))
            elif value == "auto" or (isinstance(value, (int, float)) and not isinstance(value, bool)):
                search = next((a for a in annotations if isinstance(a, Search)), Search(0, 0))
                # Another field may make this one act in the first task.
                if search.unless and getattr(m, search.unless):
                    search = replace(search, late=False)
                is_integer = isinstance(value, int) and plain_type is int
                tunable.append(Dimension(method_index, field.name, name, search, is_integer=is_integer))
    return tunable


def _select_field(tunable: Sequence[Dimension], name: str, search_range: SearchRange, method: Method) -> Dimension:
    """Dimension of a named field, with its range checked."""
    methods = methods_of(method)
    matching = [
        dimension
        for dimension in tunable
        if name
        in (dimension.name, dimension.field, f"{type(methods[dimension.method_index]).__name__}.{dimension.field}")
    ]
    if len(matching) != 1:
        known_names = ", ".join(dimension.name for dimension in tunable)
        problem = "several fields" if matching else "no field"
        raise ValueError(f"{name!r} is {problem} that can be tuned: there are {known_names}.")

    dimension = matching[0]
    if dimension.options:
        if search_range is not None:
            raise ValueError(f"{name} is one of {', '.join(dimension.options)}: all are tried, a range has no meaning.")
        return dimension

    search = dimension.search
    if isinstance(search_range, Search):
        search = search_range
    elif search_range is not None:
        try:
            low, high = (float(end) for end in search_range)
        except (TypeError, ValueError):
            raise ValueError(f"{name} needs a range (low, high), got {search_range!r}.") from None
        search = replace(search, low=low, high=high)
    _check_range(name, search, dimension.is_integer)
    return replace(dimension, search=search)


def _check_range(name: str, search: Search, is_integer: bool) -> None:
    if not search.low < search.high or not math.isfinite(search.high - search.low):
        raise ValueError(f"{name} needs a range (low, high) with low < high, got {search.low:g} and {search.high:g}.")
    if search.log and not search.low > 0:
        raise ValueError(
            f"{name} is searched on a logarithmic scale, so that its range begins above 0, got {search.low:g}: begin "
            "higher, or give Search(low, high, log=False)."
        )
    if is_integer and (search.low != int(search.low) or search.high != int(search.high)):
        raise ValueError(f"{name} is an integer: give integer ends, got {search.low:g} and {search.high:g}.")


def _class_names(method: Method) -> str:
    return " + ".join(type(m).__name__ for m in methods_of(method))
