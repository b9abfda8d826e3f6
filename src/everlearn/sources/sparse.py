"""Lines of the form ``label 1:value 2:value …``, in which libsvm and the gas sensors come."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_sparse(text: str, width: int, path: Path) -> tuple[list[str], np.ndarray]:
    r"""The labels as written, and the numbers, zero where none is given.

    >>> read_sparse("3 1:0.5 2:-1\n1 2:2", 2, Path("x"))[1].tolist()
    [[0.5, -1.0], [0.0, 2.0]]
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    values = np.zeros((len(lines), width), np.float32)
    for row, (_, *entries) in enumerate(lines):
        try:
            pairs = [entry.split(":") for entry in entries]
            index = [int(place) - 1 for place, _ in pairs]
            if index and not 0 <= min(index) <= max(index) < width:
                raise ValueError(f"places from 1 to {width} are allowed")
            values[row, index] = [float(value) for _, value in pairs]
        except ValueError as error:
            raise ValueError(f"{path}, line {row + 1}: cannot be read as label 1:value 2:value … ({error}).") from None
    return [line[0] for line in lines], values
