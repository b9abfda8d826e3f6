"""Read tables of numbers from CSV and Parquet files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from everlearn.runtime.optional_imports import import_optional
from everlearn.sources.labeled_data import Data, first_few, hold_back, numbered, to_float32

Columns = dict[str, np.ndarray]


def table(path: str | Path, *, target: str, features: Sequence[str] | None = None, test: float = 0.2) -> Data:
    """Read a CSV or Parquet file: numeric feature columns and a target column.

    A target of words or integers is a class (words are numbered in alphabetical order, ``names`` lists them); a target
    of floats is a regression target.

    Args:
        path: file that ends in .csv, .tsv or .parquet; the first line of a CSV file has the column names.
        target: column to predict.
        features: feature columns; by default all others.
        test: share of rows for testing, taken at equal distances within each class.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise ValueError(f"A table ends in {', '.join(readers)}, got {path.name!r}.")
    columns = readers[path.suffix.lower()](path)

    if features is None:
        features = [name for name in columns if name != target]
    feature_names = list(features)
    _check_columns(path, columns, target, feature_names)

    x = np.stack([_as_float_column(path, name, columns[name]) for name in feature_names], axis=1)
    if columns[target].dtype.kind == "f":
        _as_float_column(path, target, columns[target])  # only to check that all values are finite
    y, names = numbered(columns[target])
    return hold_back(torch.from_numpy(x), y, test, names=names, features=feature_names)


def _check_columns(path: Path, columns: Columns, target: str, feature_names: list[str]) -> None:
    missing_names = [name for name in (target, *feature_names) if name not in columns]
    if missing_names:
        # The last names are shown, too, because the target is often the last column.
        available = first_few([*columns], limit=8, last=2)
        raise ValueError(f"{path} has no column {first_few([*map(repr, missing_names)])}; it has {available}.")
    if target in feature_names:
        raise ValueError(f"{target!r} is the column to predict: take it out of features.")
    if not feature_names or not len(columns[target]):
        raise ValueError(
            f"{path} has no training data: {len(feature_names)} feature columns, {len(columns[target])} rows."
        )


def _read_csv(path: Path) -> Columns:
    """Read each column as integers, else as floats, else as text; the delimiter is a comma, semicolon or tab."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}.") from None

    if len(set(names)) != len(names) or not names:
        repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        problem = f"{first_few([*map(repr, repeated)])} more than once" if repeated else "an empty line"
        raise ValueError(f"{path} must begin with a line of column names, each once; got {problem}.")

    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"{path}, row {number}: {len(row)} cells, but {len(names)} columns.")
        if "" in row:
            name = names[row.index("")]
            raise ValueError(f"{path}, row {number}: the cell {name!r} is empty; fill it or leave the row out.")

    cells = np.array(rows, dtype=str).reshape(len(rows), len(names))
    return {name: _infer_type(cells[:, i]) for i, name in enumerate(names)}


def _infer_type(cells: np.ndarray) -> np.ndarray:
    for dtype in (np.int64, np.float64):
        try:
            return cells.astype(dtype)
        except (ValueError, OverflowError):  # not a number, or too many digits
            continue
    return cells


def _read_parquet(path: Path) -> Columns:
    parquet = import_optional("pyarrow.parquet", "data", "Reading Parquet files")
    try:
        stored = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of ValueError
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}.") from None

    columns = {}
    for name in stored.column_names:
        if stored[name].null_count:
            raise ValueError(f"{path}: the column {name!r} has {stored[name].null_count} empty cells; fill them.")
        column = stored[name].to_numpy()
        if column.dtype.kind == "O":
            column = np.asarray(column.tolist())
        columns[name] = column
    return columns


def _as_float_column(path: Path, name: str, column: np.ndarray) -> np.ndarray:
    """Convert a column to float32; raise if it has text or values that are not finite."""
    if column.dtype.kind not in "iufb":
        row = next((i for i, cell in enumerate(column) if not _is_number(cell)), 0)
        raise ValueError(
            f"{path}: the column {name!r} is not numeric ({str(column[row])!r} in row {row + 1}); encode it "
            "as numbers, or leave it out by naming the others in features=[…]."
        )
    values = to_float32(column)
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: the column {name!r} has cells that are not finite; fill them or leave the rows out.")
    return values


def _is_number(cell: object) -> bool:
    try:
        float(str(cell))
    except ValueError:
        return False
    return True
