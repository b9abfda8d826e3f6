"""Data sets in files: which files a data set is made of, finding them, checking that they are whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everlearn.sources.data import Data


@dataclass(frozen=True)
class File:
    """One published file.

    Args:
        name: its path in the data set's folder; a folder of images counts as a file.
        md5: its published checksum, None where none is known.
        size: its bytes, None where not known.
        url: where ``load(download=True)`` gets it; empty where people must get it by hand.
        unpacks: for an archive, the folder inside that is wanted.
    """

    name: str
    md5: str | None = None
    size: int | None = None
    url: str = ""
    unpacks: str = ""


@dataclass(frozen=True)
class Layout:
    """One way in which a data set lies in a folder.

    Args:
        files: what is read.
        read: the function that does so, given the folder (and the side of the images, if ``sized``).
        folders: what the folder may be called besides the data set's own name.
        archives: what the files are unpacked from.
        some: any one of the files will do; otherwise all must be there.
        sized: whether the images have many sizes and are brought to one.
    """

    files: tuple[File, ...]
    read: Callable[..., Data]
    folders: tuple[str, ...] = ()
    archives: tuple[File, ...] = ()
    some: bool = False
    sized: bool = False

    @property
    def downloads(self) -> tuple[File, ...]:
        """What can be got from the network; empty if something cannot."""
        reachable = all(file.url for file in self.archives or self.files)
        return (*self.archives, *(file for file in self.files if file.url)) if reachable else ()


@dataclass(frozen=True)
class Published:
    """A data set: what people know it as, its layouts, and where it comes from."""

    name: str
    layouts: tuple[Layout, ...]
    origin: str


class Damaged(ValueError):
    """A file is not the published one."""


def given_root(root: str | Path | None) -> Path | None:
    """The folder of data sets that was given, or the one in the environment; an empty variable is none."""
    given = root if root is not None else os.environ.get("EVERLEARN_DATA") or None
    return None if given is None else Path(given)


def data_root(name: str, files: str, origin: str, root: str | Path | None) -> Path:
    """The folder of data sets; an error says what it is for if there is none."""
    given = given_root(root)
    if given is None:
        raise FileNotFoundError(
            f"Where is {name}? Give the folder that holds it, as root=… (--data on the command line) or in the environment "
            f"variable EVERLEARN_DATA. Its files are {files}, from {origin}."
        )
    return given


def locate(data: Published, root: Path) -> tuple[Layout, Path] | None:
    """The first layout that is there, and its folder."""
    for layout in data.layouts:
        for folder in candidates(data, layout, root):
            found = [(folder / file.name).exists() for file in layout.files]
            if any(found) if layout.some else all(found):
                return layout, folder
    return None


def begun(data: Published, root: Path) -> bool:
    """Whether any file of any layout is there, packed or unpacked."""
    return any(
        (folder / file.name).exists()
        for layout in data.layouts
        for folder in candidates(data, layout, root)
        for file in (*layout.files, *layout.archives)
    )


def candidates(data: Published, layout: Layout, root: Path) -> Iterator[Path]:
    """Under the set's name, under one of the layout's, or the given folder itself."""
    for name in (data.name, *layout.folders):
        yield root / name
        yield from (root / name / inner for inner in layout.folders)
    yield root


def missing(data: Published, root: Path) -> FileNotFoundError:
    """What is not there, in the layout that lacks the least, and where to get it."""
    lacking = []
    for layout in data.layouts:
        folders = list(candidates(data, layout, root))
        names = [file.name for file in layout.files if not any((f / file.name).exists() for f in folders)]
        lacking.append((len(names) / len(layout.files), names or [file.name for file in layout.files], layout))
    _, names, layout = min(lacking, key=lambda one: one[0])
    wanted = ("any of " if layout.some else "") + ", ".join(names)
    packed = f" (unpacked from {', '.join(file.name for file in layout.archives)})" if layout.archives else ""
    automatic = any(one.downloads for one in data.layouts)
    way = f", or let load({data.name!r}, root, download=True) do it" if automatic else ""
    return FileNotFoundError(
        f"{data.name} is not whole in {root}: missing {wanted}{packed}; get it from {data.origin}{way}."
    )


def check(path: Path, file: File, origin: str) -> None:
    """Raise if a file is not the published one, as far as that is known."""
    if not path.is_file():
        return
    if file.size is not None and path.stat().st_size != file.size:
        raise Damaged(
            f"{path} is damaged: it has {path.stat().st_size:,} bytes, not {file.size:,}; get it anew from {origin}."
        )
    if file.md5 is not None and (found := md5(path)) != file.md5:
        raise Damaged(f"{path} is damaged: its md5 is {found}, not {file.md5}; get it anew from {origin}.")


def sound(path: Path, file: File) -> bool:
    """Whether a file is there and, as far as that is known, the published one."""
    try:
        check(path, file, "")
    except Damaged:
        return False
    return path.exists()


def md5(path: Path) -> str:
    """The checksum that data sets are published with; it finds damage, not malice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
