"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import glob
import io
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

PART = ".everlearn-part"  # how a file ends that is being written: nobody's own file is taken for one


def write(path: Path, *content: bytes | memoryview, mode: int = 0o644) -> None:
    """Write a file, of one piece or several, so that a killed process leaves the old one or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # mkstemp's 0600 would hide results from colleagues
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def parts(path: Path) -> list[Path]:
    """What processes that were killed have left of writing this file."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.????????{PART}"))


def save(state: Any, path: Path) -> Path:
    """Write tensors, numbers and dicts of them, for ``torch.load(path, weights_only=True)``, whole or not at all."""
    torch.save(state, content := io.BytesIO())
    write(path, content.getvalue())
    return path


def load(path: Path) -> Any:
    """Read what ``save`` has written; anything else is refused by name, and nothing in it is executed."""
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except (RuntimeError, ValueError, EOFError, LookupError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is damaged, or no file of tensors and numbers ({type(error).__name__}): use an earlier copy of it."
        ) from None


@contextmanager
def locked(path: Path, stale: float = 60.0) -> Iterator[None]:
    """Inside, no other process is inside for the same file: for reading, changing and writing it.

    Args:
        path: the file; the lock lies beside it.
        stale: seconds after which a lock is taken to be that of a process that was killed.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            try:
                if time.time() - lock.stat().st_mtime > stale:
                    lock.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # it was freed just now
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


@contextmanager
def alone(path: Path, wait: bool = False) -> Iterator[bool]:
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
