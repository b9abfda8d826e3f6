"""Files that are either whole or not there."""

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
)  # what reading a file of tensors that is none may end in
PART = ".everlearn-part"  # how a file ends that is being written: nobody's own file is taken for one


def write(path: Path, *content: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file, of one piece or several, so that a killed process leaves the old one or the new one, never a part.

    Args:
        path: the file.
        content: its bytes.
        mode: its permissions. By default those that ``open`` gives: a file that is there keeps its own, a new one has what
            the umask of the process leaves.
    """
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode) & 0o777 if mode is None else mode
    handle, temporary = _opened_beside(path, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.chmod(temporary, mode)  # before there is anything to read in it
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _opened_beside(path: Path, mode: int) -> tuple[int, Path]:
    """A new file beside one that shall be written; the umask, and what the folder says of its files, take from the mode."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
        with suppress(FileExistsError):
            return os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
            ), temporary


def parts(path: Path) -> list[Path]:
    """What processes that were killed have left of writing this file."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.????????{PART}"))


def save(state: Any, path: Path) -> Path:
    """Write tensors, numbers and dicts of them, for ``torch.load(path, weights_only=True)``, whole or not at all."""
    content = io.BytesIO()
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # ``load`` looks at them
    try:
        torch.save(state, content)
    finally:
        torch.serialization.set_crc32_options(usual)
    write(path, content.getvalue())
    return path


def load(path: Path) -> Any:
    """Read what ``save`` has written; anything else is refused by name, and nothing in it is executed.

    A bit that has turned since is found: every part of such a file has a checksum, which ``torch.load`` does not look at.
    """
    try:
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            if (damaged := packed.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(io.BytesIO(content), weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged, or no file of tensors and numbers ({type(error).__name__}): use an earlier copy of it."
        ) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same file: for reading, changing and writing it.

    The lock, which lies beside the file, is the system's: it ends with its process and knows no clock.

    Args:
        path: the file.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with exclusive_lock(lock, wait=True) as free:
            if not free:
                continue  # some systems give up waiting after a while
            try:
                yield
            finally:
                with suppress(OSError):  # some systems keep what is open
                    lock.unlink()
            return


@contextmanager
def exclusive_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Inside, True where no other process is inside for the same file, however long that takes; False at once where one is.

    The system frees such a lock when its process ends, in whatever way. On disks that know no locks it is always True.

    Args:
        path: a file to lock, made if missing, with its folder, and left there; who is inside may remove it as the last thing.
        wait: until it is free, instead.
    """
    while True:
        with _opened(path) as file:
            try:
                _lock(file.fileno(), wait)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                    yield False
                    return
            if _is_at(path, file.fileno()):
                yield True  # closing the file frees it
                return


def _opened(path: Path) -> BinaryIO:
    """The file, made if missing, with its folder, which somebody may take away at any moment."""
    for _ in range(100):
        try:
            return path.open("ab")
        except FileNotFoundError:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            break
    writable_folder(path.parent)  # says why
    return path.open("ab")


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is still the one at its path: a lock on one that was removed keeps nobody else out."""
    if sys.platform == "win32":
        return True  # there what is open cannot be removed
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
    """The folder, made if missing; an error before any work is done if nothing can be written there."""
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
