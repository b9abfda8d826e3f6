"""Atomic file writes, checked tensor files and inter-process locks."""

from __future__ import annotations

import errno
import glob
import io
import os
import pickle
import secrets
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

# Errors of reading a damaged tensor file.
DAMAGED = (
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    AttributeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
)

# Suffix of unfinished files, distinctive enough that no user's file has it.
UNFINISHED_SUFFIX = ".everlearn-part"

LOCK_IS_TAKEN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


def write(path: Path, *content: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file atomically: a killed process leaves the old file or the new one, never a part.

    Args:
        path: the file.
        content: its bytes, in one piece or several.
        mode: its permissions. By default those that ``open`` would give: an existing file keeps its permissions, and a
            new one follows the umask of the process.
    """
    with replacing(path, mode) as file:
        file.writelines(content)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a file to write it atomically, piece by piece; it gets its name when the context ends without an error.

    Args:
        path: the file.
        mode: its permissions, as for ``write``.
    """
    if mode is None:
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode) & 0o777
    handle, temporary = _create_temporary(path, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.chmod(temporary, mode)  # before there is any content to read
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create_temporary(path: Path, mode: int) -> tuple[int, Path]:
    """Create a temporary file in the folder of ``path``; the umask and the folder's rules restrict the mode."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
        with suppress(FileExistsError):
            return os.open(temporary, flags, mode), temporary


def unfinished_files(path: Path) -> list[Path]:
    """List the temporary files that killed processes have left of writing this file."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.????????{UNFINISHED_SUFFIX}"))


def save(state: Any, path: Path) -> Path:
    """Write tensors, numbers and dicts of them atomically, for ``torch.load(path, weights_only=True)``."""
    content = io.BytesIO()

    # ``load`` verifies the checksums, so they are written even if the user has switched them off.
    computes_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(state, content)
    finally:
        torch.serialization.set_crc32_options(computes_checksums)
    write(path, content.getvalue())
    return path


def load(path: Path) -> Any:
    """Read a file that ``save`` has written. Other files are refused, and no code in them is executed.

    The checksum of every part is verified, which ``torch.load`` does not do.
    """
    try:
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged_part = archive.testzip()
            if damaged_part is not None:
                raise ValueError(f"the checksum of {damaged_part} is wrong")
        return torch.load(io.BytesIO(content), weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged, or not a file of tensors and numbers ({type(error).__name__}): use an earlier copy."
        ) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock of a file and hold it, to read, change and write the file.

    The lock is a file in the same folder. The operating system releases it when its process ends, so it never expires.

    Args:
        path: the file to protect.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with exclusive_lock(lock, wait=True) as is_acquired:
            if not is_acquired:
                continue  # some systems stop waiting after a while
            try:
                yield
            finally:
                with suppress(OSError):  # some systems do not remove open files
                    lock.unlink()
            return


@contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock; yields False if another process holds it.

    The operating system releases the lock when its process ends, in whatever way. On disks without locks it always
    yields True.

    Args:
        path: the lock file. It is created with its folder if missing, and kept; the process that holds the lock may
            remove it as its last action.
        wait: wait for the lock instead of yielding False at once.
    """
    while True:
        with _open_lock_file(path) as file:
            try:
                _lock(file.fileno(), wait)
            except OSError as error:
                if error.errno in LOCK_IS_TAKEN:
                    yield False
                    return
            # The previous holder may have removed the file after it was opened here: then open the new one.
            if _is_current_file(path, file.fileno()):
                yield True  # closing the file releases the lock
                return


def _open_lock_file(path: Path) -> BinaryIO:
    """Open the file, created with its folder if missing; another process may remove the folder at any moment."""
    for _ in range(100):
        try:
            return path.open("ab")
        except FileNotFoundError:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            break
    writable_folder(path.parent)  # raises an error with the reason
    return path.open("ab")


def _is_current_file(path: Path, handle: int) -> bool:
    """Check that an open file is still the one at its path: a lock on a removed file excludes nobody."""
    if sys.platform == "win32":
        return True  # Windows does not remove open files
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int, wait: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """Create the folder if missing, and raise an error before any work is done if it is not writable."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise OSError(f"Cannot write to the folder {path}: it is a file; choose another one for the results.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(
            f"Cannot write to the folder {path} ({error.strerror}): choose another one for the results."
        ) from None
    return path
