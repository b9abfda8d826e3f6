"""Tables of numbers: CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from everlearn.extras import needs
from everlearn.sources.data import Data, first_few, hold_back, in_float32, numbered

Columns = dict[str, np.ndarray]


def table(path: str | Path, *, target: str, features: Sequence[str] | None = None, test: float = 0.2) -> Data:
    """The rows of a CSV or Parquet file: numbers to learn from, and one column to predict.

    A target of words or whole numbers is a class (words are numbered in alphabetical order, and ``names`` has them); one
    of fractions is a number to predict.

    Args:
        path: a file that ends in .csv, .tsv or .parquet; a CSV file begins with the names of its columns.
        target: the column to predict.
        features: the columns to learn from; by default all the others.
        test: the share of rows for tests: of each class, rows at equal distances.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise ValueError(f"A table ends in {', '.join(readers)}, got {path.name!r}.")
    columns = readers[path.suffix.lower()](path)
    own = list(features) if features is not None else [name for name in columns if name != target]
    if lacking := [name for name in (target, *own) if name not in columns]:
        there = first_few([*columns], limit=8, last=2)  # the label often comes last
        raise ValueError(f"{path} has no column {first_few([*map(repr, lacking)])}; it has {there}.")
    if target in own:
        raise ValueError(f"{target!r} is what is to be predicted: take it out of features.")
    if not own or not len(columns[target]):
        raise ValueError(f"{path} has nothing to learn from: {len(own)} columns, {len(columns[target])} rows.")
    x = np.stack([_numbers(path, name, columns[name]) for name in own], axis=1)
    if columns[target].dtype.kind == "f":
        _numbers(path, target, columns[target])
    y, names = numbered(columns[target])
    return hold_back(torch.from_numpy(x), y, test, names=names, features=own)


def _csv(path: Path) -> Columns:
    """Every column as whole numbers, as fractions or, if it is neither, as words."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            mark = max(",;\t", key=header.count)
            names = next(csv.reader([header], delimiter=mark), [])
            rows = [row for row in csv.reader(file, delimiter=mark) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}.") from None
    if len(set(names)) != len(names) or not names:
        repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        got = f"{first_few([*map(repr, repeated)])} more than once" if repeated else "an empty line"
        raise ValueError(f"{path} must begin with a line of column names, each once; got {got}.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"{path}, row {number}: {len(row)} cells, but {len(names)} columns.")
        if "" in row:
            raise ValueError(f"{path}, row {number}: the cell {names[row.index('')]!r} is empty; fill it or leave the row out.")  # fmt: skip
    cells = np.array(rows, dtype=str).reshape(len(rows), len(names))
    return {name: _typed(cells[:, i]) for i, name in enumerate(names)}


def _typed(words: np.ndarray) -> np.ndarray:
    for kind in (np.int64, np.float64):
        try:
            return words.astype(kind)
        except (ValueError, OverflowError):  # no number, or one of more digits than fit
            continue
    return words


def _parquet(path: Path) -> Columns:
    parquet = needs("pyarrow.parquet", "data", "Reading Parquet files")
    try:
        stored = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}.") from None
    for name in stored.column_names:
        if stored[name].null_count:
            raise ValueError(f"{path}: the column {name!r} has {stored[name].null_count} empty cells; fill them.")
    columns = {name: stored[name].to_numpy() for name in stored.column_names}
    return {name: np.asarray(c.tolist()) if c.dtype.kind == "O" else c for name, c in columns.items()}


def _numbers(path: Path, name: str, column: np.ndarray) -> np.ndarray:
    if column.dtype.kind not in "iufb":
        row = next((i for i, cell in enumerate(column) if not _is_number(cell)), 0)
        raise ValueError(
            f"{path}: the column {name!r} is not made of numbers ({str(column[row])!r} in row {row + 1}); number it, or leave "
            "it out by naming the others in features=[…]."
        )
    numbers = in_float32(column)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{path}: the column {name!r} has cells that are not finite; fill them or leave the rows out.")
    return numbers


def _is_number(cell: object) -> bool:
    try:
        float(str(cell))
    except ValueError:
        return False
    return True
