"""New data from wherever they lie: a file, a folder of images, arrays."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.arrays import as_inputs, npz
from everlearn.sources.data import Data, hold_back, numbered
from everlearn.sources.folders import image_folder
from everlearn.sources.tables import table

TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Reading:
    """How data files are read. What is left out is as it was in the update before.

    Args:
        x: the columns of a table to learn from, by default all but the labels; or the inputs' name in an npz file, "x".
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


def read(data: Any, how: Reading, share: float) -> Data:
    """Data to learn from and to be examined on, wherever they come from.

    Args:
        data: a CSV, Parquet or npz file, a folder of images, ``Data``, or a pair (x, y) of arrays.
        how: which columns, which size.
        share: held back for the exam, where the data have no test set of their own.
    """
    if isinstance(data, Data):
        return data
    if isinstance(data, (str, os.PathLike)):
        return _file(Path(data), how, share)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], (Tensor, np.ndarray)):
        x, y = data
        y, names = numbered(y.cpu().numpy() if isinstance(y, Tensor) else y)
        return hold_back(x if isinstance(x, Tensor) else as_inputs(x), y, share, names=names)
    raise TypeError(
        f"New data are a file ({', '.join(TABLES)}, .npz), a folder of images, what everlearn.sources reads, or a pair (x, y) "
        f"of arrays; got a {type(data).__name__}."
    )


def _file(path: Path, how: Reading, share: float) -> Data:
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
            return table(path, target=how.y or "y", features=how.x or None, test=share)
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
