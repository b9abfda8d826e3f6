"""Extract zip and tar archives without trusting their names, links or sizes."""

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

MAX_BYTES = 16 * 2**30  # in total; more than any supported data set
BLOCK = 4096  # counted for each file, even an empty one, to bound the number of files
CHUNK = 2**20


def extract_folder(archive: Path, folder: str, target: Path, max_bytes: int = MAX_BYTES) -> Path:
    """Extract one top-level folder of an archive into ``target``, completely or not at all.

    Only regular files and folders are extracted. A path that leaves the folder, a link, a device, or more than
    ``max_bytes`` in total raises an error, and nothing is kept.

    Args:
        archive: zip or tar file.
        folder: name of the folder inside the archive.
        target: folder to create it in.
        max_bytes: limit for the total size of all files.

    Returns:
        The path of the extracted folder.
    """
    if (target / folder).exists():
        raise FileExistsError(
            f"{target / folder} exists but is incomplete: remove it, so that {archive} can be unpacked."
        )

    # The folder is moved to its place only after everything has been written.
    with tempfile.TemporaryDirectory(dir=target, prefix=f".{archive.name}.") as temporary:
        budget = max_bytes
        try:
            for name, content in _iterate_files(archive):
                path = Path(temporary, *_check_path(name, archive).parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                budget = _write_file(content, path, budget - BLOCK)
                if budget < 0:
                    raise ValueError(
                        f"{archive} unpacks to more than {max_bytes:,} bytes: it is not the expected archive."
                    )
        except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}; get it again.") from error

        extracted = Path(temporary, folder)
        if not extracted.is_dir():
            raise ValueError(f"{archive} has no folder {folder!r} inside: it is another archive.")
        os.replace(extracted, target / folder)
    return target / folder


def _iterate_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each regular file; refuse links and devices."""
    if zipfile.is_zipfile(archive):
        yield from _iterate_zip(archive)
    else:
        yield from _iterate_tar(archive)


def _iterate_zip(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zip_file:
        for entry in zip_file.infolist():
            file_type = stat.S_IFMT(entry.external_attr >> 16)
            if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refusal(archive, entry.filename, "a link or a device")
            if entry.is_dir():
                _check_path(entry.filename, archive)
                continue
            with zip_file.open(entry) as content:
                yield entry.filename, content


def _iterate_tar(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as tar_file:
        for member in tar_file:
            if not member.isfile() and not member.isdir():
                raise _refusal(archive, member.name, "a link or a device")
            content_or_none = tar_file.extractfile(member)
            if content_or_none is None:
                _check_path(member.name, archive)
                continue
            with content_or_none as content:
                yield member.name, content


def _check_path(name: str, archive: Path) -> PurePosixPath:
    """Return the path of an archive member; raise if it leaves the folder on any operating system."""
    path = PurePosixPath(name)
    windows_path = PureWindowsPath(name)
    is_absolute = path.is_absolute() or windows_path.drive or windows_path.root
    if is_absolute or ".." in (*path.parts, *windows_path.parts) or "\0" in name:
        raise _refusal(archive, name, "a path that leads out of the folder")
    return path


def _refusal(archive: Path, name: str, reason: str) -> ValueError:
    return ValueError(f"{archive} is refused: {name!r} is {reason}, which no data set contains.")


def _write_file(content: IO[bytes], path: Path, budget: int) -> int:
    """Write a file and return the remaining budget in bytes.

    Bytes are counted as they are read, because the size in the archive's header may be false.
    """
    with path.open("wb") as file:
        while budget >= 0 and (chunk := content.read(CHUNK)):
            budget -= len(chunk)
            file.write(chunk)
    return budget
