"""Published tables as data: the protocol that made them, their numbers, and when a cell of ours counts as the same."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from math import sqrt
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everlearn.cli.names import UsageError, did_you_mean, explain
from everlearn.cli.plan import Plan

FOLDER = resources.files("everlearn.cli") / "published"
Options = dict[str, Any]  # of ``everlearn run``, by name
Verdict = Literal["within", "above", "miss"]


class Entry(BaseModel):
    """A cell as it was published, in per cent, and what its run needs beyond its row and column."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    published: float
    spread: float = Field(0.0, ge=0)
    run: Options = {}
    known: str = ""  # why it misses, as far as that is known


class Row(BaseModel):
    """A method, in one or more columns."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    run: Options = {}
    cells: dict[str, Entry]


class Table(BaseModel):
    """A published table with its protocol."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    title: str
    source: str
    protocol: str
    spread: Literal["sem", "std"]  # what the source writes behind its means
    runs: int = Field(ge=1)  # of which they are means
    run: Options
    quick: Options
    columns: dict[str, Options]
    rows: list[Row]


@dataclass(frozen=True)
class Cell:
    """One published number and the runs that shall give it again."""

    table: str
    row: str
    column: str
    published: float
    deviation: float  # of single runs, where it was published
    options: Options
    known: str

    @property
    def name(self) -> str:
        """As people choose it."""
        return f"{self.row}/{self.column}"

    @property
    def tolerance(self) -> float:
        """The larger of 1.5 points and two published standard deviations."""
        return max(1.5, 2 * self.deviation)

    def verdict(self, accuracies: Sequence[float]) -> Verdict:
        """Of a mean over seeds; better than published is no miss.

        >>> Cell("T", "ER", "task", 90.0, 0.0, {}, "").verdict([88.0, 89.5])
        'within'
        """
        apart = fmean(accuracies) - self.published
        return "within" if abs(apart) <= self.tolerance else "above" if apart > 0 else "miss"

    def command(self, seeds: int) -> str:
        """What to type for the runs of this cell alone.

        >>> Cell("T", "ER", "task", 90.0, 0.0, {"methods": "er", "keep_optimizer": True, "set": {"er.capacity": 9}}, "").command(3)
        'everlearn run --methods er --keep-optimizer --set er.capacity=9 --seeds 3 --threads 1'
        """
        words = ["everlearn run"]
        for option, value in self.options.items():
            flag = "--" + option.replace("_", "-")
            if isinstance(value, dict):
                words += [f"{flag} {field}={v}" for field, v in value.items()]
            elif value is not False:
                words.append(flag if value is True else f"{flag} {value}")
        return " ".join([*words, f"--seeds {seeds}", "--threads 1"])

    def plan(self, seeds: int, **given: Any) -> Plan:
        """What to run."""
        return Plan(**self.options, seeds=seeds, **given)


def names() -> list[str]:
    """The tables there are."""
    return sorted(f.name.removesuffix(".toml") for f in FOLDER.iterdir() if f.name.endswith(".toml"))


def read(name: str) -> Table:
    """A table by its name."""
    known = {n.lower(): n for n in names()}
    if name.lower() not in known:
        raise UsageError(f"Unknown table {name!r}. {did_you_mean(name, known.values())}")
    text = (FOLDER / f"{known[name.lower()]}.toml").read_text(encoding="utf-8")
    try:
        return Table.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"The table {name} cannot be read: {why}") from None


def cells(name: str, chosen: str = "*", quick: bool = False, strict: bool = True) -> list[Cell]:
    """The cells of a table whose ROW/COLUMN matches one of the patterns, in its order; a strict pattern must match some."""
    every = list(_cells(name, read(name), quick))
    patterns = [p.strip() for p in chosen.split(",") if p.strip()]
    for p in patterns if strict else ():
        if not any(fnmatch(c.name.lower(), p.lower()) for c in every):
            raise UsageError(f"No cell of {name} is called {p!r}. {did_you_mean(p, [c.name for c in every])}")
    return [c for c in every if any(fnmatch(c.name.lower(), p.lower()) for p in patterns)]


def _cells(name: str, table: Table, quick: bool) -> Iterator[Cell]:
    scale = sqrt(table.runs) if table.spread == "sem" else 1.0
    for row in table.rows:
        for column, entry in row.cells.items():
            if column not in table.columns:
                raise UsageError(f"{name}, {row.name}: {did_you_mean(column, table.columns)}")
            layers = [table.run, table.columns[column], row.run, entry.run, table.quick if quick else {}]
            yield Cell(name, row.name, column, entry.published, entry.spread * scale, merged(layers), entry.known)


def merged(layers: Sequence[Options]) -> Options:
    """Options over options, the later winning; a method's fields (``set``) one by one.

    >>> merged([{"lr": 0.1, "set": {"ewc.strength": 1.0}}, {"set": {"ewc.mode": "online"}}])
    {'lr': 0.1, 'set': {'ewc.strength': 1.0, 'ewc.mode': 'online'}}
    """
    whole: Options = {}
    for layer in layers:
        both = {"set": {**whole.get("set", {}), **layer["set"]}} if "set" in layer else {}
        whole = {**whole, **layer, **both}
    return whole
