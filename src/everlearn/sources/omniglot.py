"""Omniglot: characters of fifty alphabets, each drawn by twenty people, 105 × 105 pixels (Lake et al., 2015)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.folders import read_image
from everlearn.sources.labeled_data import Data, hold_back

URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
FULL_SETS = ("images_background", "images_evaluation")
SMALL_SETS = ("images_background_small1", "images_background_small2")

# (alphabet, character) -> file name of a drawing -> function that opens it.
Drawings = dict[tuple[str, str], dict[str, Callable[[], IO[bytes]]]]


def _read(folder: Path) -> Data:
    """Read all alphabets that exist, one class per character; every fifth drawing is for testing.

    Drawings are sorted by person, so that the same people draw all test examples.
    """
    drawings: Drawings = {}
    for name in (*FULL_SETS, *SMALL_SETS):
        if (folder / name).is_dir():
            _merge(drawings, _list_folder(folder / name))
        elif name in SMALL_SETS and (folder / f"{name}.zip").exists():
            _merge(drawings, _read_zip(folder / f"{name}.zip"))

    images = []
    labels = []
    groups: dict[str, list[int]] = {}
    for label, (alphabet, character) in enumerate(sorted(drawings)):
        groups.setdefault(alphabet, []).append(label)
        for _, open_drawing in sorted(drawings[alphabet, character].items()):
            with open_drawing() as file:
                images.append(read_image(file, grayscale=True))
            labels.append(label)

    if not images:
        raise ValueError(f"{folder} has no images alphabet/character/drawing.png in its sets: unpack it again.")
    names = [f"{alphabet}/{character}" for alphabet, character in sorted(drawings)]
    return hold_back(torch.stack(images), torch.tensor(labels), names=names, groups=groups)


def _merge(drawings: Drawings, additional: Drawings) -> None:
    """Add drawings in place; the small sets overlap, and a drawing with the same file name counts once."""
    for character, files in additional.items():
        drawings.setdefault(character, {}).update(files)


def _list_folder(folder: Path) -> Drawings:
    drawings: Drawings = {}
    for path in folder.glob("*/*/*.png"):
        alphabet, character, file_name = path.parts[-3:]
        drawings.setdefault((alphabet, character), {})[file_name] = partial(_open_file, path)
    return drawings


def _open_file(path: Path) -> IO[bytes]:
    return path.open("rb")


def _read_zip(path: Path) -> Drawings:
    """Read the drawings of a zip file into memory, without unpacking it to disk."""
    drawings: Drawings = {}
    try:
        with zipfile.ZipFile(path) as zip_file:
            for name in zip_file.namelist():
                parts = PurePosixPath(name).parts
                if name.endswith(".png") and len(parts) == 4:
                    _, alphabet, character, file_name = parts
                    content = zip_file.read(name)
                    drawings.setdefault((alphabet, character), {})[file_name] = partial(io.BytesIO, content)
    except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; get it again.") from None
    return drawings


OMNIGLOT = PublishedDataset(
    "omniglot",
    (
        Layout(
            tuple(File(name) for name in FULL_SETS),
            _read,
            (),
            (
                File(
                    "images_background.zip",
                    "68d2efa1b9178cc56df9314c21c6e718",
                    url=URL + "images_background.zip",
                    unpacks="images_background",
                ),
                File(
                    "images_evaluation.zip",
                    "6b91aef0f799c5bb55b94e3f2daec811",
                    url=URL + "images_evaluation.zip",
                    unpacks="images_evaluation",
                ),
            ),
        ),
        Layout(
            (
                *(File(name) for name in (*FULL_SETS, *SMALL_SETS)),
                File("images_background_small1.zip", "e704a628b5459e08445c13499850abc4"),
                File("images_background_small2.zip", "b75a71a51d3b13f821f212756fe481fd"),
            ),
            _read,
            ("omniglot_small",),
            any_file=True,
        ),
    ),
    "github.com/brendenlake/omniglot, folder python",
)
