"""Atomic file writes, checked tensor files and inter-process locks."""

from __future__ import annotations

import errno
import glob
import io
import os
import pickle
import secrets
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import BaseFileLock, FileLock, Timeout

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

# Errors of locking a file on a disk without locks.
LOCKS_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


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

    Args:
        path: the file to protect. The lock is a file in the same folder, removed at the end.
    """
    lock_file = path.with_name(f".{path.name}.lock")
    with exclusive_lock(lock_file, wait=True):
        try:
            yield
        finally:
            with suppress(OSError):  # some systems do not remove open files
                lock_file.unlink()


@contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock; yields False if another process holds it.

    The operating system releases the lock when its process ends, in whatever way. On disks without locks it always
    yields True.

    Args:
        path: the lock file. It is created with its folder if missing, and kept; the process that holds the lock may
            remove it as its last action.
        wait: wait for the lock instead of yielding False.
    """
    # Without locks of the operating system, filelock would create a file that a killed process leaves for good.
    lock = FileLock(path, fallback_to_soft=False)
    is_acquired = _acquire(lock, wait)
    try:
        yield is_acquired
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, wait: bool) -> bool:
    """Acquire a lock and return whether it is free; another process may remove its folder at any moment."""
    # A single attempt may find the file that the previous holder has just removed.
    timeout = -1 if wait else 0.1
    for _ in range(100):
        try:
            lock.acquire(timeout)
            return True
        except Timeout:
            return False
        except (FileNotFoundError, FileExistsError):
            continue  # the folder was removed after it was created
        except OSError as error:
            if error.errno in LOCKS_UNSUPPORTED:
                return True
            break
    writable_folder(Path(lock.lock_file).parent)  # raises an error with the reason
    lock.acquire(timeout)
    return True


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
