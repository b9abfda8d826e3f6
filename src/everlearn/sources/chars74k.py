"""Chars74K, English computer fonts: digits and letters in black on white (de Campos et al., 2009), at 28 × 28 pixels."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import torch

from everlearn.sources.data import Data, hold_back
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.folders import read_folder

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def _stored(folder: Path) -> Data:
    """Digits and capitals. I and O are absent, so the classes that are there are counted anew."""
    with np.load(folder / "chars74k_fnt_28.npz", allow_pickle=False) as stored:
        x, y, names = stored["x"], stored["y"], stored["names"]
    present, y = np.unique(y, return_inverse=True)
    return hold_back(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y.astype(np.int64)), names=names[present])


def _folders(folder: Path) -> Data:
    """A folder per character, Sample001 for 0 to Sample062 for z, an image per font in each."""
    x, y, names = read_folder(folder, size=28, grey=True)
    if names != [f"Sample{i:03d}" for i in range(1, 63)]:
        raise ValueError(f"{folder} must have the folders Sample001 to Sample062 and no others, got {len(names)}.")
    return hold_back(x, y, names=CHARACTERS)


CHARS74K = Published(
    "chars74k",
    (
        Layout((File("chars74k_fnt_28.npz", "12dbb5e9930e1abc01b27ebfb55099fe"),), _stored),
        Layout(
            tuple(File(f"Sample{i:03d}") for i in range(1, 63)),
            _folders,
            ("English/Fnt", "Fnt"),
            (File("EnglishFnt.tgz", unpacks="English"),),
        ),
    ),
    "info.ee.surrey.ac.uk/CVSSP/demos/chars74k (EnglishFnt.tgz)",
)
