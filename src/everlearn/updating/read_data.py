"""Read the data of an update from a file, a folder of images, or arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.arrays import as_inputs, npz
from everlearn.sources.folders import image_folder
from everlearn.sources.labeled_data import Data, first_few, hold_back, numbered
from everlearn.sources.tables import table

TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Reading:
    """How to read data files. Fields that are left out have the value of the previous update.

    Args:
        x: the input columns of a table, in the order that the model was trained on, by default all but the labels in
            the order of the file; or the name of the inputs in an npz file, by default "x".
        y: the column of the labels in a table, or their name in an npz file; by default "y".
        size: the side in pixels that images of a folder are resized to.
        grey: whether images have one channel instead of three.
    """

    x: tuple[str, ...] = ()
    y: str = ""
    size: int | None = None
    grey: bool | None = None

    def with_defaults(self, previous: Reading) -> Reading:
        """Fill the fields that are left out from the previous update.

        >>> Reading(y="label").with_defaults(Reading(x=("a", "b"), y="kind"))
        Reading(x=('a', 'b'), y='label', size=None, grey=None)
        """
        given_fields = {name: value for name, value in asdict(self).items() if value not in ((), "", None)}
        return replace(previous, **given_fields)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Restore from JSON, which has lists for tuples."""
        return cls(**{**stored, "x": tuple(stored["x"])})


def read(data: Any, reading: Reading, holdout: float, columns: Sequence[str] = ()) -> Data:
    """Read data and split them into a training set and a held-out set.

    Args:
        data: a CSV, Parquet or npz file, a folder of images, ``Data``, or a pair (x, y) of arrays.
        reading: which columns, which image size.
        holdout: the share to hold out, if the data have no test set.
        columns: the model's input columns in their order; empty if they are not known yet.
    """
    if isinstance(data, Data):
        if not data.features:
            return data
        return select_columns(data, columns or reading.x)

    if isinstance(data, (str, os.PathLike)):
        return _read_path(Path(data), reading, holdout, columns)

    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], (Tensor, np.ndarray)):
        x, y = data
        if isinstance(y, Tensor):
            y = y.cpu().numpy()
        y, names = numbered(y)
        if not isinstance(x, Tensor):
            x = as_inputs(x)
        return hold_back(x, y, holdout, names=names)

    raise TypeError(
        f"New data must be a file ({', '.join(TABLES)}, .npz), a folder of images, what everlearn.sources reads, or "
        f"a pair (x, y) of arrays; got a {type(data).__name__}."
    )


def is_table(data: Any) -> bool:
    """Return whether the data have named columns."""
    if isinstance(data, Data):
        return bool(data.features)
    return isinstance(data, (str, os.PathLike)) and Path(data).suffix.lower() in TABLES


def select_columns(data: Data, columns: Sequence[str]) -> Data:
    """Select columns of a table in the given order; all of them if none is named.

    >>> train, test = (torch.tensor([[1.0, 2.0]]), torch.tensor([0])), (torch.zeros(1, 2), torch.tensor([0]))
    >>> table = Data(train, test, features=["a", "b"])
    >>> select_columns(table, ["b", "a"])[0][0]
    tensor([[2., 1.]])
    """
    if not columns or list(columns) == data.features:
        return data

    missing = [name for name in columns if name not in data.features]
    if missing:
        raise ValueError(
            f"The data have no column {first_few([*map(repr, missing)])}; "
            f"they have {first_few(data.features, limit=8, last=2)}."
        )

    (x, y), (x_test, y_test) = data
    order = torch.tensor([data.features.index(name) for name in columns])
    return Data((x[:, order], y), (x_test[:, order], y_test), names=data.names, features=columns)


def check_same_columns(data: Data, title: str, old: Data, old_title: str) -> None:
    """Raise if new and old data have different columns or orders, and it is unknown which the model was trained on."""
    if not data.features or not old.features or data.features == old.features:
        return

    cure = (
        "name those that the model was trained on, in its order, read=Reading(x=(…)) (--x on the command line: names "
        "separated by commas, or a file with one name per line)."
    )
    # The same columns in another order: name the first that differs.
    if set(data.features) == set(old.features):
        pairs = zip(data.features, old.features, strict=True)
        index = next(i for i, (name, old_name) in enumerate(pairs) if name != old_name)
        raise ValueError(
            f"{title} and {old_title} have the same columns in another order: column {index + 1} of the inputs is "
            f"{data.features[index]!r} in the first and {old.features[index]!r} in the second, and it is unknown "
            f"which order the model was trained on: {cure}"
        )

    # Different columns: name those that only one table has.
    only_new = [name for name in data.features if name not in set(old.features)]
    only_old = [name for name in old.features if name not in set(data.features)]
    differences = [
        f"only {file} has {first_few([*map(repr, names)])}"
        for file, names in ((title, only_new), (old_title, only_old))
        if names
    ]
    raise ValueError(f"{title} and {old_title} have different columns: {' and '.join(differences)}; {cure}")


def check_known_columns(columns: Sequence[str], given_columns: Sequence[str]) -> None:
    """Raise if the given columns are not those of earlier updates; their order may differ.

    Args:
        columns: the columns in the state; empty if no table was read yet.
        given_columns: the columns that the user names; empty for none.
    """
    differing = sorted(set(columns) ^ set(given_columns))
    if columns and given_columns and differing:
        raise ValueError(
            f"x: the inputs of the model are {len(columns)} columns since its first table, and the given ones "
            f"differ: {first_few([*map(repr, differing)])} is in one list and not in the other. Leave x (--x) out: "
            "the columns and their order are read from the state. If a column was renamed, give it its old name."
        )


def check_examples(data: Data, title: str) -> None:
    """Raise unless the data are finite inputs with class labels, with a training and a held-out part."""
    check_inputs_and_labels(data, title)
    (x, y), (x_test, y_test) = data
    for part, purpose in ((x, "to train on"), (x_test, "to hold out")):
        if not len(part):
            raise ValueError(f"{title} has no example {purpose}: {len(y) + len(y_test)} in all are too few.")


def check_inputs_and_labels(data: Data, title: str) -> None:
    """Raise unless the data are finite inputs with class labels."""
    (x, y), (x_test, _) = data
    if not isinstance(x, Tensor):
        raise TypeError(
            f"The inputs of {title} must be one tensor, got a {type(x).__name__}: convert them to numbers first."
        )

    if y.is_floating_point():
        problem = "fractions"
    elif y.dim() != 1:
        problem = "more than one per example"
    else:
        problem = ""
    if problem:
        raise ValueError(
            f"The labels of {title} are {problem}: an update learns classes; save them as integers or as words, one "
            "per example."
        )

    if x.is_floating_point() and not (torch.isfinite(x).all() and torch.isfinite(x_test).all()):
        count = sum(int((~torch.isfinite(part.flatten(1))).any(1).sum()) for part in (x, x_test))
        raise ValueError(f"{count} examples of {title} have NaN or infinite inputs: fill them or leave them out.")


def _read_path(path: Path, reading: Reading, holdout: float, columns: Sequence[str]) -> Data:
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")

    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            if reading.size is None:
                raise ValueError(f"{path} is a folder of images: give the side in pixels to resize them to, size=….")
            return image_folder(path, size=reading.size, grey=bool(reading.grey), test=holdout)

        if suffix == ".npz":
            inputs_name = reading.x[0] if len(reading.x) == 1 else "x"
            return npz(path, x=inputs_name, y=reading.y or "y", test=holdout)

        if suffix in TABLES:
            return table(path, target=reading.y or "y", features=columns or reading.x or None, test=holdout)
    except ValueError as error:
        message = str(error)

        # The readers name Python arguments; say which options of the command these are.
        if "…" in message or "has no column" in message:
            message += " (On the command line: --x, --y, --size.)"
        raise ValueError(message) from None

    raise ValueError(
        f"Data must be a folder of images or a file that ends in {', '.join(TABLES)} or .npz; got {path.name!r}."
    )
