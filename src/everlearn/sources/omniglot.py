"""Omniglot: characters of fifty alphabets, each drawn by twenty people, 105 × 105 pixels (Lake et al., 2015)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

import torch

from everlearn.sources.data import Data, hold_back
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.folders import read_image

URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
SETS = ("images_background", "images_evaluation")
SMALL = ("images_background_small1", "images_background_small2")
Drawings = dict[tuple[str, str], dict[str, Callable[[], IO[bytes]]]]


def _read(folder: Path) -> Data:
    """Every character of every alphabet that is there is a class; every fifth drawing, the same people's, is for tests."""
    found: Drawings = {}
    for name in (*SETS, *SMALL):
        if (folder / name).is_dir():
            _add(found, _in_folder(folder / name))
        elif name in SMALL and (folder / f"{name}.zip").exists():
            _add(found, _in_zip(folder / f"{name}.zip"))
    x, y = [], []
    groups: dict[str, list[int]] = {}
    for label, (alphabet, character) in enumerate(sorted(found)):
        groups.setdefault(alphabet, []).append(label)
        for _, open_ in sorted(found[alphabet, character].items()):
            with open_() as file:
                x.append(read_image(file, grey=True))
            y.append(label)
    if not x:
        raise ValueError(f"{folder} has no images alphabet/character/drawing.png in its sets: unpack it anew.")
    names = [f"{alphabet}/{character}" for alphabet, character in sorted(found)]
    return hold_back(torch.stack(x), torch.tensor(y), names=names, groups=groups)


def _add(found: Drawings, more: Drawings) -> None:
    """The small sets overlap; a drawing has one name everywhere, so that it counts once."""
    for character, drawings in more.items():
        found.setdefault(character, {}).update(drawings)


def _in_folder(folder: Path) -> Drawings:
    found: Drawings = {}
    for path in folder.glob("*/*/*.png"):
        found.setdefault((path.parts[-3], path.parts[-2]), {})[path.name] = lambda path=path: path.open("rb")  # type: ignore[misc]
    return found


def _in_zip(path: Path) -> Drawings:
    """Read where it lies: nothing is unpacked."""
    found: Drawings = {}
    try:
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                parts = PurePosixPath(name).parts
                if name.endswith(".png") and len(parts) == 4:
                    content = packed.read(name)
                    found.setdefault((parts[1], parts[2]), {})[parts[3]] = lambda c=content: io.BytesIO(c)  # type: ignore[misc]
    except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; get it anew.") from None
    return found


OMNIGLOT = Published(
    "omniglot",
    (
        Layout(
            tuple(File(name) for name in SETS),
            _read,
            (),
            (
                File("images_background.zip", "68d2efa1b9178cc56df9314c21c6e718", url=URL + "images_background.zip", unpacks=SETS[0]),
                File("images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811", url=URL + "images_evaluation.zip", unpacks=SETS[1]),
            ),
        ),
        Layout(
            (
                *(File(name) for name in (*SETS, *SMALL)),
                File("images_background_small1.zip", "e704a628b5459e08445c13499850abc4"),
                File("images_background_small2.zip", "b75a71a51d3b13f821f212756fe481fd"),
            ),
            _read,
            ("omniglot_small",),
            some=True,
        ),
    ),
    "github.com/brendenlake/omniglot, folder python",
)  # fmt: skip
