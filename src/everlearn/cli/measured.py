"""The numbers of ours that ``everlearn reproduce --record docs/results`` keeps, as ``everlearn advise`` quotes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import fmean

from everlearn.advice import Measured
from everlearn.cli.reproduce import Runs, kept_of
from everlearn.cli.tables import cells, names, read
from everlearn.methods import METHODS


def folder() -> Traversable:
    """Where they are: in the package as it is installed, or in the docs of its source folder, of which that is a copy."""
    packaged = resources.files("everlearn.cli") / "results"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "docs" / "results"


def recorded() -> list[Measured]:
    """All cells of a single method that have been run, by the protocol as it is now."""
    return [m for name in names() if (file := folder() / f"{name}.json").is_file() for m in _of_table(name, file)]


def _of_table(name: str, file: Traversable) -> Iterator[Measured]:
    kept, title = json.loads(file.read_text(encoding="utf-8")), read(name).title
    found = [(cell, runs) for cell in cells(name) if (runs := kept_of(cell, kept))]
    ends = {(c.options["methods"], c.options["scenario"]): fmean(_accuracies(runs)) for c, runs in found}
    for cell, runs in found:
        method, scenario = cell.options["methods"], cell.options["scenario"]
        if method in METHODS:
            lower, upper = (ends.get((end, scenario)) for end in ("finetune", "joint"))
            settings = cell.options.get("set", {})
            yield Measured(
                method, scenario, name, title, cell.name, _accuracies(runs), settings, finetune=lower, joint=upper
            )


def _accuracies(runs: Runs) -> tuple[float, ...]:
    return tuple(run["accuracy"] for run in runs.values())
