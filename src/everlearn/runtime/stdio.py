"""Standard input, output and error of a command whose work does not depend on who listens."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

GONE = {errno.EPIPE, errno.EINVAL} if sys.platform == "win32" else {errno.EPIPE}  # whoever read has gone


class _Output(io.RawIOBase):
    """A raw stream that takes what is written also after its reader has gone, or its disk is full.

    Args:
        stream: whose file this writes to as long as that works; it is kept, since it closes its file when it goes.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._raw = _raw(stream)
        self._broken = False
        self.error: OSError | None = None  # why something was lost that somebody may still wait for

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    def write(self, content: Any) -> int | None:
        if not self._broken:
            try:
                written: int | None = self._raw.write(content)
                return written
            except OSError as error:
                self._broken = True
                self.error = None if error.errno in GONE else error
        return len(content)


def survive_closed_streams() -> None:
    """Have the standard streams of this process never fail, whether closed from the start or later."""
    _open_standard_files()
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def output_error() -> OSError | None:
    """Why standard output could not be written where its reader is still there, as on a full disk; None where all is well."""
    with suppress(ValueError):
        sys.stdout.flush()
    raw = _raw(sys.stdout)
    return raw.error if isinstance(raw, _Output) else None


def _raw(stream: Any) -> Any:
    """The stream below the text and the buffer, if any."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _open_standard_files() -> None:
    """Give the three numbers that every program may read and write a file each, or the next file opened would get one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)  # processes that this one starts have it too
            if nowhere != number:
                os.close(nowhere)


def _lasting(stream: Any) -> Any:
    """The stream, or one that writes to it for as long as that works."""
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # somebody has put one of their own there
    if isinstance(_raw(stream), _Output):
        return stream
    with suppress(OSError):
        stream.flush()
    lasting = _Output(stream)
    return io.TextIOWrapper(
        lasting if _raw(stream) is stream.buffer else io.BufferedWriter(lasting),  # python -u buffers nothing
        encoding=stream.encoding,
        errors="replace",  # a terminal that knows no ± gets a question mark, not a traceback
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
