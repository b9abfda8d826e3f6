"""New data from wherever they lie: a file, a folder of images, arrays."""

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
from everlearn.sources.data import Data, first_few, hold_back, numbered
from everlearn.sources.folders import image_folder
from everlearn.sources.tables import table

TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Reading:
    """How data files are read. What is left out is as it was in the update before.

    Args:
        x: the columns of a table to learn from, in the order that the model was trained on, by default all but the labels
            in the order of the file; or the inputs' name in an npz file, "x".
        y: the column of a table that holds the labels, or their name in an npz file; by default "y".
        size: the side in pixels that images in a folder are brought to.
        grey: images with one channel instead of three.
    """

    x: tuple[str, ...] = ()
    y: str = ""
    size: int | None = None
    grey: bool | None = None

    def over(self, before: Reading) -> Reading:
        """What is given here, and for the rest what was given before.

        >>> Reading(y="label").over(Reading(x=("a", "b"), y="kind"))
        Reading(x=('a', 'b'), y='label', size=None, grey=None)
        """
        return replace(before, **{name: value for name, value in asdict(self).items() if value not in ((), "", None)})

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """As JSON has it."""
        return cls(**{**stored, "x": tuple(stored["x"])})


def read(data: Any, how: Reading, share: float, columns: Sequence[str] = ()) -> Data:
    """Data to learn from and to be examined on, wherever they come from.

    Args:
        data: a CSV, Parquet or npz file, a folder of images, ``Data``, or a pair (x, y) of arrays.
        how: which columns, which size.
        share: held back for the exam, where the data have no test set of their own.
        columns: the columns that the model was given so far, in its order; empty where that is not known yet.
    """
    if isinstance(data, Data):
        return select_columns(data, columns or how.x) if data.features else data
    if isinstance(data, (str, os.PathLike)):
        return _file(Path(data), how, share, columns)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], (Tensor, np.ndarray)):
        x, y = data
        y, names = numbered(y.cpu().numpy() if isinstance(y, Tensor) else y)
        return hold_back(x if isinstance(x, Tensor) else as_inputs(x), y, share, names=names)
    raise TypeError(
        f"New data are a file ({', '.join(TABLES)}, .npz), a folder of images, what everlearn.sources reads, or a pair (x, y) "
        f"of arrays; got a {type(data).__name__}."
    )


def is_table(data: Any) -> bool:
    """Whether data have named columns."""
    if isinstance(data, Data):
        return bool(data.features)
    return isinstance(data, (str, os.PathLike)) and Path(data).suffix.lower() in TABLES


def select_columns(data: Data, columns: Sequence[str]) -> Data:
    """The same data with these columns alone, in this order; all of them as they are where none is named.

    >>> table = Data((torch.tensor([[1.0, 2.0]]), torch.tensor([0])), (torch.zeros(1, 2), torch.tensor([0])), features=["a", "b"])
    >>> select_columns(table, ["b", "a"])[0][0]
    tensor([[2., 1.]])
    """
    if not columns or list(columns) == data.features:
        return data
    if lacking := [name for name in columns if name not in data.features]:
        raise ValueError(
            f"The data have no column {first_few([*map(repr, lacking)])}; they have {first_few(data.features, limit=8, last=2)}."
        )
    (x, y), (x_test, y_test) = data
    order = torch.tensor([data.features.index(name) for name in columns])
    return Data((x[:, order], y), (x_test[:, order], y_test), names=data.names, features=columns)


def check_same_columns(data: Data, title: str, old: Data, old_title: str) -> None:
    """Refuse two tables whose columns differ where nobody has said which order the model was trained on."""
    if not data.features or not old.features or data.features == old.features:
        return
    cure = (
        "name those that the model was trained on, in its order, read=Reading(x=(…)) (--x on the command line: names separated "
        "by commas, or a file with one name per line)."
    )
    if set(data.features) == set(old.features):
        index = next(i for i, (a, b) in enumerate(zip(data.features, old.features, strict=True)) if a != b)
        raise ValueError(
            f"{title} and {old_title} have the same columns in another order: column {index + 1} of the inputs is "
            f"{data.features[index]!r} in the first and {old.features[index]!r} in the second, and which order the model was "
            f"trained on is not known: {cure}"
        )
    extra = [name for name in data.features if name not in set(old.features)]
    lacking = [name for name in old.features if name not in set(data.features)]
    parts = [
        f"only {where} has {first_few([*map(repr, names)])}"
        for where, names in ((title, extra), (old_title, lacking))
        if names
    ]
    raise ValueError(f"{title} and {old_title} have other columns: {' and '.join(parts)}; {cure}")


def check_known_columns(columns: Sequence[str], given: Sequence[str]) -> None:
    """Refuse other columns than those that the model was given in the updates before; their order is the state's."""
    differing = sorted(set(columns) ^ set(given))
    if columns and given and differing:
        raise ValueError(
            f"x: the model learns from {len(columns)} columns since its first table, and these are others: "
            f"{first_few([*map(repr, differing)])} is in one list and not in the other. Leave x (--x) out: the columns and "
            "their order are read from the state; a column that was renamed gets its old name back."
        )


def _file(path: Path, how: Reading, share: float, columns: Sequence[str]) -> Data:
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    kind = path.suffix.lower()
    try:
        if path.is_dir():
            if how.size is None:
                raise ValueError(f"{path} is a folder of images: say to what side in pixels to bring them, size=….")
            return image_folder(path, size=how.size, grey=bool(how.grey), test=share)
        if kind == ".npz":
            return npz(path, x=how.x[0] if len(how.x) == 1 else "x", y=how.y or "y", test=share)
        if kind in TABLES:
            return table(path, target=how.y or "y", features=columns or how.x or None, test=share)
    except ValueError as error:
        option = (
            " (On the command line: --x, --y, --size.)" if "…" in str(error) or "has no column" in str(error) else ""
        )
        raise ValueError(f"{error}{option}") from None
    raise ValueError(
        f"Data are a folder of images or a file that ends in {', '.join(TABLES)} or .npz; got {path.name!r}."
    )


def check(data: Data, name: str) -> None:
    """Refuse what is not examples with classes, some of them to learn from and some to be examined on."""
    (x, y), (x_test, y_test) = data
    if not isinstance(x, Tensor):
        raise TypeError(
            f"The inputs of {name} must be one tensor, got a {type(x).__name__}: make numbers of them first."
        )
    if y.is_floating_point() or y.dim() != 1:
        raise ValueError(
            f"The labels of {name} are {'fractions' if y.is_floating_point() else 'more than one per example'}: an update "
            "learns classes; save them as whole numbers or as words, one for each example."
        )
    for part, what in ((x, "to learn from"), (x_test, "to hold back for the exam")):
        if not len(part):
            raise ValueError(f"{name} has no example {what}: {len(y) + len(y_test)} in all are too few.")
    if x.is_floating_point() and not (torch.isfinite(x).all() and torch.isfinite(x_test).all()):
        lost = sum(int((~torch.isfinite(v.flatten(1))).any(1).sum()) for v in (x, x_test))
        raise ValueError(f"{lost} examples of {name} have NaN or infinite inputs: fill them or leave them out.")
