"""File format of results: conversion to JSON, and validation of files before they are read."""

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
MAX_FILE_BYTES = 2**28  # a stream of two thousand tasks has a file of half that
MAX_DEPTH = 40  # nested lists and mappings; a result has six levels


def json_settings(value: Any) -> Any:
    """Convert settings to JSON; values without a JSON form become text, so that every run can be saved.

    >>> json_settings({"clip": float("inf"), "order": (np.int64(3), 1), "root": Path("data")})
    {'clip': 'inf', 'order': [3, 1], 'root': 'data'}
    """
    return _as_json(value, infinite_as_text=True)


def json_measurements(value: Any) -> Any:
    """Convert measured numbers to JSON; numbers that are not finite become None, like missing ones.

    >>> json_measurements([0.5, float("nan"), {"loss": np.float32("inf")}])
    [0.5, None, {'loss': None}]
    """
    return _as_json(value, infinite_as_text=False)


def _as_json(value: Any, infinite_as_text: bool) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(content, infinite_as_text) for key, content in value.items()}
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_as_json(content, infinite_as_text) for content in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        if infinite_as_text:
            return repr(number)
        return None
    return str(value)


def read(path: Path) -> dict[str, Any]:
    """Read and validate a result file; a ValueError says why a file is not a result."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if not path.is_file():
        raise ValueError("it is not a regular file")  # reading a pipe would block
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, allowed: {MAX_FILE_BYTES:,}")
    try:
        content = json.loads(
            path.read_bytes().decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    _check_depth(content)
    _check_content(content)
    return dict(content)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _parse_int(text: str) -> int:
    if len(text) > 30:  # neither numpy nor JavaScript has such integers
        raise ValueError(f"{text[:10]}… is too large")
    return int(text)


def _check_depth(content: Any) -> None:
    """Refuse content that a table or page would be too deeply nested to show."""
    level = [content]
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
        if not next_level:
            return
        level = next_level
    raise ValueError("its lists are nested too deeply")


def _check_content(content: Any) -> None:
    """Refuse a result that tables, pages and plots could not show."""
    _expect(isinstance(content, dict), "it is not a mapping")
    _expect(content.get("format") == FORMAT, f"its format is {content.get('format')!r}, allowed: {FORMAT}")
    for key in ("config", "cost", "provenance"):
        _expect(isinstance(content.get(key), dict), f"{key} is not a mapping")
    num_tasks = _check_accuracy(content.get("accuracy"))
    _check_config(content["config"], num_tasks)

    initial = content.get("initial_accuracy")
    _expect(_are_numbers(initial) and len(initial) in (0, num_tasks), f"initial_accuracy is not {num_tasks} numbers")
    examples = content.get("examples", [])  # older files have none
    are_counts = isinstance(examples, list) and all(_is_integer(count) and count > 0 for count in examples)
    _expect(are_counts and len(examples) in (0, num_tasks), f"examples is not {num_tasks} counts")

    _check_cost(content["cost"])
    provenance = content["provenance"]
    for key in ("time", "resumed_from"):
        _expect(isinstance(provenance.get(key, ""), str), f"provenance.{key} is not text")
    _expect(isinstance(provenance.get("versions", {}), dict), "provenance.versions is not a mapping")


def _check_accuracy(rows: Any) -> int:
    """Check the accuracy matrix and return its number of columns, one per task."""
    is_table = isinstance(rows, list) and bool(rows) and all(map(_are_numbers, rows))
    _expect(is_table, "accuracy is not a table of numbers")
    num_tasks = len(rows[0])
    _expect(num_tasks > 0 and all(len(row) == num_tasks for row in rows), "accuracy has rows of different lengths")
    return num_tasks


def _check_config(config: dict[str, Any], num_tasks: int) -> None:
    _expect(isinstance(config.get("method"), str), "config.method is not text")
    for key in ("scenario", "score"):
        _expect(isinstance(config.get(key, ""), str), f"config.{key} is not text")
    _expect(config.get("seed") is None or _is_integer(config["seed"]), "config.seed is not an integer")
    for key in ("stream", "training", "fingerprints"):
        _expect(isinstance(config.get(key, {}), dict), f"config.{key} is not a mapping")
    _expect("fingerprints" in config, "config.fingerprints is missing")

    stream = config.get("stream", {})
    _expect(isinstance(stream.get("name", ""), str), "config.stream.name is not text")
    tasks = stream.get("tasks", num_tasks)
    _expect(tasks == num_tasks, f"config.stream.tasks is {tasks!r} but accuracy has {num_tasks} columns")

    training = config.get("training", {})
    merged = stream.get("merged", 1)
    _expect(_is_integer(merged) and merged > 0, "config.stream.merged is not a count")
    iterations = training.get("iterations") or 1
    _expect(_is_integer(iterations) and iterations > 0, "config.training.iterations is not a count")
    groups = training.get("groups", [])
    are_mappings = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    _expect(are_mappings, "config.training.groups are not mappings")


def _check_cost(cost: dict[str, Any]) -> None:
    seconds = cost.get("seconds", {})
    _expect(isinstance(seconds, dict) and all(map(_is_number, seconds.values())), "cost.seconds are not numbers")
    _expect(_is_number(cost.get("peak_memory", 0)), "cost.peak_memory is not a number")
    for key in ("parameters", "state_bytes"):
        counts = cost.get(key, [])
        _expect(isinstance(counts, list) and all(map(_is_number, counts)), f"cost.{key} are not numbers")

    diagnostics = cost.get("diagnostics", [])
    are_mappings = isinstance(diagnostics, list) and all(isinstance(values, dict) for values in diagnostics)
    _expect(are_mappings, "cost.diagnostics are not mappings")
    are_numbers = all(_are_numbers(list(values.values())) for values in diagnostics)
    _expect(are_numbers, "cost.diagnostics are not numbers")


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _are_numbers(values: Any) -> bool:
    """Whether a value is a list of numbers, with None for missing ones."""
    return isinstance(values, list) and all(value is None or _is_number(value) for value in values)
