"""The form of a result file: what is written into it, and what a file must hold to be read as one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

FORMAT = 1
LARGEST = 2**28  # bytes; a stream of two thousand tasks has a file of half that
DEEPEST = 40  # lists and mappings within each other; ours have six


def storable(value: Any) -> Any:
    """A setting as JSON has it: what JSON has no form for is given as text, so that no run is lost when it is saved.

    >>> storable({"clip": float("inf"), "order": (np.int64(3), 1), "root": Path("data")})
    {'clip': 'inf', 'order': [3, 1], 'root': 'data'}
    """
    return _as_json(value, keep_infinite=True)


def measured(value: Any) -> Any:
    """Measured numbers as JSON has them; those that are not finite are None, as is what nobody measured.

    >>> measured([0.5, float("nan"), {"loss": np.float32("inf")}])
    [0.5, None, {'loss': None}]
    """
    return _as_json(value, keep_infinite=False)


def _as_json(value: Any, keep_infinite: bool) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(content, keep_infinite) for key, content in value.items()}
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_as_json(content, keep_infinite) for content in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        infinite = repr(number) if keep_infinite else None
        return number if math.isfinite(number) else infinite
    return str(value)


def read(path: Path) -> dict[str, Any]:
    """The content of a result file; a ValueError says what is wrong with one that is no result, however it came about."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if not path.is_file():
        raise ValueError("it is not a plain file")  # a pipe would wait for ever
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, allowed: {LARGEST:,}")
    try:
        content = json.loads(
            path.read_bytes().decode("utf-8"), parse_constant=_constant, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    _check_depth(content)
    _check(content)
    return dict(content)


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _int(text: str) -> int:
    if len(text) > 30:  # numpy and pages have none so large
        raise ValueError(f"{text[:10]}… is too large")
    return int(text)


def _check_depth(content: Any) -> None:
    """Refuse what whoever shows it might give up on half-way."""
    level = [content]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("its lists are nested too deeply")


def _check(content: Any) -> None:
    """Refuse a result of which a table, a page or a picture could not be made."""
    _expect(isinstance(content, dict), "it is no mapping")
    _expect(content.get("format") == FORMAT, f"its format is {content.get('format')!r}, allowed: {FORMAT}")
    for key in ("config", "cost", "made"):
        _expect(isinstance(content.get(key), dict), f"{key} is no mapping")
    columns = _check_accuracy(content.get("accuracy"))
    _check_config(content["config"], columns)
    initial = content.get("initial")
    _expect(_are_numbers(initial) and len(initial) in (0, columns), f"initial has no {columns} numbers")
    examples = content.get("examples", [])  # older files have none
    counted = isinstance(examples, list) and all(_is_whole(count) and count > 0 for count in examples)
    _expect(counted and len(examples) in (0, columns), f"examples has no {columns} counts")
    _check_cost(content["cost"])
    made = content["made"]
    for key in ("time", "resumed_from"):
        _expect(isinstance(made.get(key, ""), str), f"made.{key} is no text")
    _expect(isinstance(made.get("versions", {}), dict), "made.versions is no mapping")


def _check_accuracy(rows: Any) -> int:
    """The number of columns."""
    _expect(isinstance(rows, list) and bool(rows) and all(map(_are_numbers, rows)), "accuracy is no table of numbers")
    columns = len(rows[0])
    _expect(columns > 0 and all(len(row) == columns for row in rows), "accuracy has rows of different lengths")
    return columns


def _check_config(config: dict[str, Any], columns: int) -> None:
    _expect(isinstance(config.get("method"), str), "config.method is no text")
    for key in ("scenario", "score"):
        _expect(isinstance(config.get(key, ""), str), f"config.{key} is no text")
    _expect(config.get("seed") is None or _is_whole(config["seed"]), "config.seed is no whole number")
    for key in ("stream", "training", "fingerprints"):
        _expect(isinstance(config.get(key, {}), dict), f"config.{key} is no mapping")
    _expect("fingerprints" in config, "config.fingerprints is missing")
    stream = config.get("stream", {})
    _expect(isinstance(stream.get("name", ""), str), "config.stream.name is no text")
    tasks = stream.get("tasks", columns)
    _expect(tasks == columns, f"config.stream.tasks is {tasks!r} but accuracy has {columns} columns")
    iterations = config.get("training", {}).get("iterations")
    for key, count in (("stream.merged", stream.get("merged", 1)), ("training.iterations", iterations or 1)):
        _expect(_is_whole(count) and count > 0, f"config.{key} is no count")
    groups = config.get("training", {}).get("groups", [])
    _expect(
        isinstance(groups, list) and all(isinstance(g, dict) for g in groups), "config.training.groups are no mappings"
    )


def _check_cost(cost: dict[str, Any]) -> None:
    seconds = cost.get("seconds", {})
    _expect(isinstance(seconds, dict) and all(map(_is_number, seconds.values())), "cost.seconds are no numbers")
    _expect(_is_number(cost.get("peak_memory", 0)), "cost.peak_memory is no number")
    for key in ("parameters", "state_bytes"):
        counts = cost.get(key, [])
        _expect(isinstance(counts, list) and all(map(_is_number, counts)), f"cost.{key} are no numbers")
    facts = cost.get("facts", [])
    _expect(
        isinstance(facts, list) and all(isinstance(after, dict) for after in facts), "cost.diagnostics are no mappings"
    )
    _expect(all(_are_numbers(list(after.values())) for after in facts), "cost.diagnostics are no numbers")


def _expect(condition: bool, wrong: str) -> None:
    if not condition:
        raise ValueError(wrong)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _are_numbers(values: Any) -> bool:
    """Whether these are numbers, or None where one is not known."""
    return isinstance(values, list) and all(value is None or _is_number(value) for value in values)
