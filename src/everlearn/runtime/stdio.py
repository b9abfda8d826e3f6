"""Standard streams that never fail: a command finishes even if nobody reads its output."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

# Error numbers that say that the reader of a pipe has closed it.
READER_CLOSED = {errno.EPIPE, errno.EINVAL} if sys.platform == "win32" else {errno.EPIPE}


class _Output(io.RawIOBase):
    """Raw stream that discards output once its reader has closed the pipe or its disk is full.

    Args:
        stream: the stream to write to. A reference is kept, because a stream closes its file when it is deleted.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._raw = _raw(stream)
        self._broken = False
        self.error: OSError | None = None  # why output was lost, unless its reader closed the pipe

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    def write(self, content: Any) -> int | None:
        if not self._broken:
            try:
                byte_count: int | None = self._raw.write(content)
                return byte_count
            except OSError as error:
                self._broken = True
                self.error = None if error.errno in READER_CLOSED else error
        return len(content)


def survive_closed_streams() -> None:
    """Replace the standard streams of this process with ones that never fail, whether closed now or later."""
    _open_standard_files()
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    sys.stdout = _make_robust(sys.stdout)
    sys.stderr = _make_robust(sys.stderr)


def output_error() -> OSError | None:
    """Return why standard output was lost, as on a full disk; None if it was written or its reader closed it."""
    with suppress(ValueError):
        sys.stdout.flush()
    raw = _raw(sys.stdout)
    if isinstance(raw, _Output):
        return raw.error
    return None


def _raw(stream: Any) -> Any:
    """Return the raw stream below the text layer and the buffer, if any."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _open_standard_files() -> None:
    """Open the null device for each closed standard descriptor, or the next opened file would take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null_device = os.open(os.devnull, os.O_RDWR)
            os.dup2(null_device, descriptor)
            os.set_inheritable(descriptor, True)  # child processes need it too
            if null_device != descriptor:
                os.close(null_device)


def _make_robust(stream: Any) -> Any:
    """Wrap a text stream in one that never fails."""
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # replaced by the caller, such as a test's capture
    if isinstance(_raw(stream), _Output):
        return stream

    with suppress(OSError):
        stream.flush()
    output: Any = _Output(stream)
    if _raw(stream) is not stream.buffer:  # python -u has no buffer
        output = io.BufferedWriter(output)
    return io.TextIOWrapper(
        output,
        encoding=stream.encoding,
        errors="replace",  # a terminal without ± shows a question mark instead of a traceback
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
