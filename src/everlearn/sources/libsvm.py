"""Parse the sparse text format of libsvm: lines ``label 1:value 2:value …``."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_sparse(text: str, width: int, path: Path) -> tuple[list[str], np.ndarray]:
    r"""Return the labels as text and a dense array of the values, zero where none is given.

    Args:
        text: content of the file.
        width: number of features.
        path: the file, for messages.

    >>> read_sparse("3 1:0.5 2:-1\n1 2:2", 2, Path("x"))[1].tolist()
    [[0.5, -1.0], [0.0, 2.0]]
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    values = np.zeros((len(lines), width), np.float32)
    for row, (_, *entries) in enumerate(lines):
        try:
            pairs = [entry.split(":") for entry in entries]
            indices = [int(index) - 1 for index, _ in pairs]
            if indices and not 0 <= min(indices) <= max(indices) < width:
                raise ValueError(f"indices from 1 to {width} are allowed")
            values[row, indices] = [float(value) for _, value in pairs]
        except ValueError as error:
            raise ValueError(f"{path}, line {row + 1}: cannot be read as label 1:value 2:value … ({error}).") from None

    labels = [line[0] for line in lines]
    return labels, values
