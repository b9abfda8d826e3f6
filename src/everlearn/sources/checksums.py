"""Describe the files of published data sets, find them on disk and verify them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everlearn.sources.labeled_data import Data


@dataclass(frozen=True)
class File:
    """Published file of a data set.

    Args:
        name: path relative to the folder of the data set; a folder of images is also described as a file.
        md5: published checksum, None if unknown.
        size: size in bytes, None if unknown.
        url: address for ``load(download=True)``; empty if the file must be obtained manually.
        unpacks: for an archive, the folder inside that is needed.
    """

    name: str
    md5: str | None = None
    size: int | None = None
    url: str = ""
    unpacks: str = ""


@dataclass(frozen=True)
class Layout:
    """Arrangement of the files of a data set in a folder.

    Args:
        files: files that are read.
        read: function that reads them, given the folder (and the side of the images, if ``takes_size``).
        folders: folder names to try in addition to the name of the data set.
        archives: archives that the files are unpacked from.
        any_file: whether a single one of the files suffices; otherwise all are required.
        takes_size: whether the images differ in size and are resized to a given one.
    """

    files: tuple[File, ...]
    read: Callable[..., Data]
    folders: tuple[str, ...] = ()
    archives: tuple[File, ...] = ()
    any_file: bool = False
    takes_size: bool = False

    @property
    def downloads(self) -> tuple[File, ...]:
        """Files to download; empty if one of the required files has no address."""
        required = self.archives or self.files
        if not all(file.url for file in required):
            return ()
        return (*self.archives, *(file for file in self.files if file.url))


@dataclass(frozen=True)
class PublishedDataset:
    """Published data set: its name, its possible layouts on disk, and where to get it."""

    name: str
    layouts: tuple[Layout, ...]
    origin: str


class DamagedFileError(ValueError):
    """A file differs from the published one."""


def resolve_root(root: str | Path | None) -> Path | None:
    """Return ``root``, or the folder in EVERLEARN_DATA; None if neither is given or the variable is empty."""
    if root is not None:
        return Path(root)
    environment_root = os.environ.get("EVERLEARN_DATA")
    if environment_root:
        return Path(environment_root)
    return None


def require_root(name: str, files: str, origin: str, root: str | Path | None) -> Path:
    """Return the folder of data sets; raise with instructions if none is given.

    Args:
        name: name of the data set, for the message.
        files: its files, for the message.
        origin: where to get it, for the message.
        root: folder given by the user, or None.
    """
    folder = resolve_root(root)
    if folder is None:
        raise FileNotFoundError(
            f"Where is {name}? Give the folder that holds it, as root=… (--data on the command line) or in the "
            f"environment variable EVERLEARN_DATA. Its files are {files}, from {origin}."
        )
    return folder


def find_layout(dataset: PublishedDataset, root: Path) -> tuple[Layout, Path] | None:
    """Return the first layout whose files exist, with its folder; None if there is none."""
    for layout in dataset.layouts:
        for folder in candidate_folders(dataset, layout, root):
            exists = [(folder / file.name).exists() for file in layout.files]
            if all(exists) or (layout.any_file and any(exists)):
                return layout, folder
    return None


def has_any_file(dataset: PublishedDataset, root: Path) -> bool:
    """Return whether any file or archive of any layout exists."""
    return any(
        (folder / file.name).exists()
        for layout in dataset.layouts
        for folder in candidate_folders(dataset, layout, root)
        for file in (*layout.files, *layout.archives)
    )


def candidate_folders(dataset: PublishedDataset, layout: Layout, root: Path) -> Iterator[Path]:
    """Yield the folders to search: named after the data set, named as in the layout, then ``root`` itself."""
    for name in (dataset.name, *layout.folders):
        yield root / name
        yield from (root / name / inner for inner in layout.folders)
    yield root


def missing_files_error(dataset: PublishedDataset, root: Path) -> FileNotFoundError:
    """Build the error that names the missing files of the most complete layout, and where to get them."""
    # Report the layout that misses the smallest fraction of its files: the one the user most likely means.
    missing_by_layout = []
    for layout in dataset.layouts:
        folders = list(candidate_folders(dataset, layout, root))
        absent = [file.name for file in layout.files if not any((f / file.name).exists() for f in folders)]
        names = absent or [file.name for file in layout.files]
        missing_by_layout.append((len(absent) / len(layout.files), names, layout))
    _, names, layout = min(missing_by_layout, key=lambda entry: entry[0])

    description = ", ".join(names)
    if layout.any_file:
        description = f"any of {description}"
    if layout.archives:
        description += f" (unpacked from {', '.join(file.name for file in layout.archives)})"

    instruction = f"get it from {dataset.origin}"
    if any(layout.downloads for layout in dataset.layouts):
        instruction += f", or let load({dataset.name!r}, root, download=True) do it"

    return FileNotFoundError(f"{dataset.name} is incomplete in {root}: missing {description}; {instruction}.")


def verify_file(path: Path, file: File, origin: str) -> None:
    """Raise if a file differs from the published one in size or checksum, where these are known."""
    if not path.is_file():
        return

    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DamagedFileError(
            f"{path} is damaged: it has {size:,} bytes, not {file.size:,}; get it again from {origin}."
        )

    if file.md5 is not None:
        checksum = md5(path)
        if checksum != file.md5:
            raise DamagedFileError(
                f"{path} is damaged: its md5 is {checksum}, not {file.md5}; get it again from {origin}."
            )


def is_intact(path: Path, file: File) -> bool:
    """Return whether a file exists and matches the published size and checksum, where these are known."""
    try:
        verify_file(path, file, "")
    except DamagedFileError:
        return False
    return path.exists()


def md5(path: Path) -> str:
    """Compute the MD5 checksum, as data sets publish it; it detects damage, not tampering."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
