"""Published tables as TOML data: protocol, published numbers, and the tolerance within which a cell is reproduced."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from math import sqrt
from statistics import fmean
from typing import Any, Literal

from everlearn.core.scenario import DataKind
from everlearn.experiments.options import Grid
from everlearn.experiments.parsing import UsageError, did_you_mean, explain
from everlearn.runtime.optional_imports import imports_of_extra

with imports_of_extra("cli", "A published table"):
    from pydantic import BaseModel, ConfigDict, Field, ValidationError

FOLDER = resources.files("everlearn.experiments") / "published"
Options = dict[str, Any]  # options of ``everlearn run``, by name
Verdict = Literal["within", "above", "miss"]


class Entry(BaseModel):
    """A published number in percent, and the options its run needs beyond those of its row and column."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    published: float
    spread: float = Field(0.0, ge=0)
    run: Options = {}
    known: str = ""  # explanation of a miss


class Row(BaseModel):
    """A row of a table: one method in one or more columns."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    run: Options = {}
    cells: dict[str, Entry]


class Table(BaseModel):
    """A published table with its protocol.

    ``spread`` is what the source prints after its means, which are taken over ``runs`` runs. ``tolerance`` is the
    least difference in points that counts as a miss. ``quick`` holds the options of a smoke test. ``data`` and
    ``pretrained`` say what the results are comparable with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    title: str
    source: str
    protocol: str
    spread: Literal["sem", "std"]
    runs: int = Field(ge=1)
    tolerance: float = Field(1.5, gt=0)
    run: Options
    quick: Options
    data: DataKind = "images"
    pretrained: bool = False
    columns: dict[str, Options]
    rows: list[Row]


@dataclass(frozen=True)
class Cell:
    """One published number and the options of the runs that reproduce it.

    Args:
        table: name of the table.
        row: name of the row.
        column: name of the column.
        published: published mean in percent.
        deviation: published standard deviation of single runs; 0 if none was published.
        options: options of ``everlearn run``.
        known: explanation of a miss; empty if there is none.
        least_tolerance: least tolerance in points.
    """

    table: str
    row: str
    column: str
    published: float
    deviation: float
    options: Options
    known: str
    least_tolerance: float = 1.5

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.row}/{self.column}"

    @property
    def tolerance(self) -> float:
        """The larger of the least tolerance and two published standard deviations."""
        return max(self.least_tolerance, 2 * self.deviation)

    def verdict(self, accuracies: Sequence[float]) -> Verdict:
        """Compare the mean over seeds with the published mean; a better mean is no miss.

        >>> Cell("T", "ER", "task", 90.0, 0.0, {}, "").verdict([88.0, 89.5])
        'within'
        """
        difference = fmean(accuracies) - self.published
        if abs(difference) <= self.tolerance:
            return "within"
        return "above" if difference > 0 else "miss"

    def command(self, seeds: int) -> str:
        """Command line that runs this cell alone.

        >>> options = {"methods": "er", "keep_optimizer": True, "set": {"er.capacity": 9}}
        >>> Cell("T", "ER", "task", 90.0, 0.0, options, "").command(3)
        'everlearn run --methods er --keep-optimizer --set er.capacity=9 --seeds 3 --threads 1'
        """
        arguments = ["everlearn run"]
        for option, value in self.options.items():
            flag = "--" + option.replace("_", "-")
            if isinstance(value, dict):
                arguments += [f"{flag} {field}={field_value}" for field, field_value in value.items()]
            elif value is True:
                arguments.append(flag)
            elif value is not False:
                arguments.append(f"{flag} {value}")
        return " ".join([*arguments, f"--seeds {seeds}", "--threads 1"])

    def grid(self, seeds: int, **options: Any) -> Grid:
        """Grid of the cell's runs, with further options of ``everlearn run``."""
        return Grid(**self.options, seeds=seeds, **options)


def table_names() -> list[str]:
    """Names of the published tables in the package."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def read_table(name: str) -> Table:
    """Read a table by its name, in any case."""
    known_names = {known_name.lower(): known_name for known_name in table_names()}
    if name.lower() not in known_names:
        raise UsageError(f"Unknown table {name!r}. {did_you_mean(name, known_names.values())}")

    text = (FOLDER / f"{known_names[name.lower()]}.toml").read_text(encoding="utf-8")
    try:
        return Table.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise UsageError(f"The table {name} cannot be read: {explain(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The table {name} cannot be read: {error}") from None


def select_cells(name: str, patterns: str = "*", quick: bool = False, strict: bool = True) -> list[Cell]:
    """Select the cells of a table whose ROW/COLUMN matches a pattern, in the order of the table.

    Args:
        name: name of the table.
        patterns: shell patterns separated by commas, matched in any case.
        quick: whether to use the options of the smoke test.
        strict: whether every pattern must match a cell.
    """
    table_cells = list(_make_cells(name, read_table(name), quick))
    pattern_list = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if strict:
        for pattern in pattern_list:
            if not any(_matches(cell, pattern) for cell in table_cells):
                suggestion = did_you_mean(pattern, [cell.name for cell in table_cells])
                raise UsageError(f"No cell of {name} is called {pattern!r}. {suggestion}")
    return [cell for cell in table_cells if any(_matches(cell, pattern) for pattern in pattern_list)]


def _matches(cell: Cell, pattern: str) -> bool:
    return fnmatch(cell.name.lower(), pattern.lower())


def _make_cells(name: str, table: Table, quick: bool) -> Iterator[Cell]:
    # A standard error over n runs is the standard deviation of single runs divided by the square root of n.
    deviation_scale = sqrt(table.runs) if table.spread == "sem" else 1.0
    quick_options = table.quick if quick else {}
    for row in table.rows:
        for column, entry in row.cells.items():
            if column not in table.columns:
                raise UsageError(f"{name}, {row.name}: {did_you_mean(column, table.columns)}")
            options = merge_options([table.run, table.columns[column], row.run, entry.run, quick_options])
            deviation = entry.spread * deviation_scale
            yield Cell(name, row.name, column, entry.published, deviation, options, entry.known, table.tolerance)


def merge_options(layers: Sequence[Options]) -> Options:
    """Merge options, later layers winning; the method fields under ``set`` are merged one by one.

    >>> merge_options([{"lr": 0.1, "set": {"ewc.strength": 1.0}}, {"set": {"ewc.mode": "online"}}])
    {'lr': 0.1, 'set': {'ewc.strength': 1.0, 'ewc.mode': 'online'}}
    """
    merged: Options = {}
    for layer in layers:
        method_fields = {**merged.get("set", {}), **layer.get("set", {})}
        merged = {**merged, **layer}
        if "set" in merged:
            merged["set"] = method_fields
    return merged
