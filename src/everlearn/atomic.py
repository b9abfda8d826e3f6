"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file so that a killed process leaves the old one or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide results from colleagues
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
