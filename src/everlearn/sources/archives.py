"""Unpacking zip and tar archives without trusting what they say: names, links, sizes."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

LARGEST = 16 * 2**30  # bytes in all; no data set here is larger
BLOCK = 4096  # what even an empty file takes; or the number of files would have no bound
CHUNK = 2**20


def extract(archive: Path, folder: str, into: Path, largest: int = LARGEST) -> Path:
    """Unpack one top-level folder of an archive: it appears under ``into`` when it is whole, or not at all.

    Only plain files and folders are unpacked. A name that leads out of the folder, a link, a device, or more bytes than
    ``largest`` in all means that the archive is not what it should be, and nothing of it is kept.
    """
    if (into / folder).exists():
        raise FileExistsError(f"{into / folder} is there but not whole: remove it, so that {archive} can be unpacked.")
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{archive.name}.") as temporary:
        left = largest
        try:
            for name, content in _members(archive):
                target = Path(temporary, *_safe(name, archive).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                left = _copy(content, target, left - BLOCK)
                if left < 0:
                    raise ValueError(f"{archive} unpacks to more than {largest:,} bytes: it is not what it should be.")
        except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}; get it anew.") from error
        made = Path(temporary, folder)
        if not made.is_dir():
            raise ValueError(f"{archive} has no folder {folder!r} inside: it is another archive.")
        os.replace(made, into / folder)
    return into / folder


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of every plain file; folders are made as they are needed."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _refused(archive, entry.filename, "a link or a device")
                if entry.is_dir():
                    _safe(entry.filename, archive)
                    continue
                with packed.open(entry) as content:
                    yield entry.filename, content
        return
    with tarfile.open(archive) as tape:
        for member in tape:
            if not member.isfile() and not member.isdir():
                raise _refused(archive, member.name, "a link or a device")
            content_or_none = tape.extractfile(member)
            if content_or_none is None:
                _safe(member.name, archive)
                continue
            with content_or_none as content:
                yield member.name, content


def _safe(name: str, archive: Path) -> PurePosixPath:
    """The name, if it stays inside the folder on every system."""
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    if path.is_absolute() or windows.drive or windows.root or ".." in (*path.parts, *windows.parts) or "\0" in name:
        raise _refused(archive, name, "a path that leads out of the folder")
    return path


def _refused(archive: Path, name: str, what: str) -> ValueError:
    return ValueError(f"{archive} is refused: {name!r} is {what}; a data set has none.")


def _copy(content: IO[bytes], target: Path, left: int) -> int:
    """Write one file; the number of bytes that may still come, counted as they come and not as announced."""
    with target.open("wb") as file:
        while left >= 0 and (chunk := content.read(CHUNK)):
            left -= len(chunk)
            file.write(chunk)
    return left
