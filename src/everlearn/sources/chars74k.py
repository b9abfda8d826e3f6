"""Chars74K, English computer fonts: digits and letters, black on white (de Campos et al., 2009), at 28 × 28 pixels."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.folders import read_class_folders
from everlearn.sources.labeled_data import Data, hold_back

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def _read_npz(folder: Path) -> Data:
    """Read digits and capitals; I and O are absent, so the remaining classes are renumbered."""
    with np.load(folder / "chars74k_fnt_28.npz", allow_pickle=False) as stored:
        pixels = stored["x"]
        character_ids = stored["y"]
        names = stored["names"]
    present_ids, labels = np.unique(character_ids, return_inverse=True)
    x = torch.from_numpy(pixels).unsqueeze(1)
    return hold_back(x, torch.from_numpy(labels.astype(np.int64)), names=names[present_ids])


def _read_folders(folder: Path) -> Data:
    """Read one folder per character, Sample001 for 0 to Sample062 for z, with one image per font."""
    x, y, names = read_class_folders(folder, size=28, grayscale=True)
    if names != [f"Sample{i:03d}" for i in range(1, 63)]:
        raise ValueError(f"{folder} must have the folders Sample001 to Sample062 and no others, got {len(names)}.")
    return hold_back(x, y, names=CHARACTERS)


CHARS74K = PublishedDataset(
    "chars74k",
    (
        Layout((File("chars74k_fnt_28.npz", "12dbb5e9930e1abc01b27ebfb55099fe"),), _read_npz),
        Layout(
            tuple(File(f"Sample{i:03d}") for i in range(1, 63)),
            _read_folders,
            ("English/Fnt", "Fnt"),
            (File("EnglishFnt.tgz", unpacks="English"),),
        ),
    ),
    "info.ee.surrey.ac.uk/CVSSP/demos/chars74k (EnglishFnt.tgz)",
)
