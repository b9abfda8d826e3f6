"""Data sets in files: finding them, checking that they are whole, reading the idx format."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

KINDS = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def find(name: str, checksums: Mapping[str, str | None], root: str | Path | None, origin: str) -> list[Path]:
    """The files of a data set, each checked against its published md5.

    Args:
        name: of the data set, and of its folder.
        checksums: md5 by file name; None where there is none to check.
        root: the folder, or one that has a folder of that name; by default the environment variable EVERLEARN_DATA.
        origin: where people get the files.
    """
    given = root if root is not None else os.environ.get("EVERLEARN_DATA")
    if given is None:
        raise FileNotFoundError(
            f"Where is {name}? Give the folder that holds it, as root=… (--data on the command line) or in the environment "
            f"variable EVERLEARN_DATA. Its files are {', '.join(checksums)}, from {origin}."
        )
    folders = [Path(given) / name, Path(given)]
    folder = next((f for f in folders if all((f / file).exists() for file in checksums)), None)
    if folder is None:
        missing = [file for file in checksums if not any((f / file).exists() for f in folders)]
        raise FileNotFoundError(
            f"{name} is not whole in {given}: missing {', '.join(missing or checksums)}; get it from {origin}."
        )
    for file, md5 in checksums.items():
        if md5 is None:
            continue
        found = hashlib.md5((folder / file).read_bytes(), usedforsecurity=False).hexdigest()
        if found != md5:
            raise ValueError(f"{folder / file} is damaged: its md5 is {found}, not {md5}; get it anew from {origin}.")
    return [folder / file for file in checksums]


def read_idx(path: Path) -> Tensor:
    """The array in an idx file, gzipped or not: a magic number (kind, dimensions), the sizes, then the numbers."""
    raw = path.read_bytes()
    try:
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        kind, dimensions = np.dtype(KINDS[raw[2]]), raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, 4)
        values = np.frombuffer(raw, kind, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not an idx file, or is damaged: {error}.") from None
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
