"""Download files with a progress bar; resume partial downloads, and verify a file before it gets its name."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from everlearn.sources.checksums import File, is_intact, verify_file

ATTEMPTS = 3
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 2**18
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
MAX_BYTES = 16 * 2**30  # more than any supported data set


class IncompleteDownloadError(Exception):
    """The connection ended before the file was complete."""


def download_file(file: File, path: Path) -> None:
    """Download a file to ``path``, resuming what an earlier attempt left in ``path.part``.

    Only files with a known checksum or size are resumed: otherwise the parts of two versions could be joined.
    """
    if not file.url.startswith(("http://", "https://")):
        raise ValueError(f"{file.name} can be downloaded from http:// and https:// addresses only, got {file.url!r}.")
    _check_integrity_protected(file.url, file)

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if file.md5 is None and file.size is None:
        part.unlink(missing_ok=True)

    for attempt in range(ATTEMPTS):
        try:
            if not _request_rest(file, part) and not is_intact(part, file):
                raise IncompleteDownloadError(
                    f"it ended after {part.stat().st_size:,} bytes, without a Content-Length to compare with"
                )
            break
        except (OSError, http.client.HTTPException, IncompleteDownloadError) as error:
            # A client error (such as 404) does not go away by asking again.
            is_client_error = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if attempt == ATTEMPTS - 1 or is_client_error:
                raise OSError(
                    f"Could not download {file.url}: {error}. {_file_size(part):,} bytes are kept in {part}; call "
                    f"again to resume, or get the file manually and put it at {path}."
                ) from error

    try:
        verify_file(part, file, file.url)
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{error} The downloaded file has been removed.") from None
    os.replace(part, path)


def _check_integrity_protected(url: str, file: File) -> None:
    """Refuse plain http without a published checksum: the content could be replaced in transit."""
    address = urllib.parse.urlsplit(url)
    if address.scheme == "http" and file.md5 is None and address.hostname not in LOCAL_HOSTS:
        raise ValueError(
            f"{file.name} comes from {url}, which is not encrypted, and has no published checksum: it could be "
            "replaced in transit. Get it manually from a source you trust."
        )


def _file_size(path: Path) -> int:
    if not path.exists():
        return 0
    return path.stat().st_size


def _request_rest(file: File, part: Path) -> bool:
    """Request the missing bytes and append them; restart if the server sends the complete file.

    Returns:
        Whether the length of the file was known and reached.
    """
    offset = _file_size(part)
    if file.size is not None and offset == file.size:
        return True

    headers = {"User-Agent": "everlearn", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"

    try:
        request = urllib.request.Request(file.url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            # The request may have been redirected to an unprotected address.
            _check_integrity_protected(response.url, file)

            if response.status != 206:
                return _receive(response, part, 0, file)
            if _range_start(response) != offset:
                part.unlink()
                raise IncompleteDownloadError("the server sent another part than was requested")
            return _receive(response, part, offset, file)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # 416 Range Not Satisfiable: the part is complete, or it is longer than the file and therefore wrong.
        if error.headers.get("Content-Range") != f"bytes */{offset}":
            part.unlink()
            raise IncompleteDownloadError("the kept part is longer than the file") from None
        return True


def _range_start(response: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    if match is None:
        return None
    return int(match[1])


def _receive(response: Any, part: Path, offset: int, file: File) -> bool:
    """Append the response to ``part``, of which ``offset`` bytes exist; return whether the length was announced."""
    total = None
    content_length = response.headers.get("Content-Length")
    if content_length and content_length.isdigit():
        total = offset + int(content_length)

    limit = MAX_BYTES
    if file.size is not None:
        limit = file.size

    received = offset
    with (
        part.open("ab" if offset else "wb") as out,
        tqdm(total=total, initial=offset, unit="B", unit_scale=True, unit_divisor=1024, desc=file.name) as bar,
    ):
        while chunk := response.read(CHUNK):
            received += len(chunk)
            if received > limit:
                break
            out.write(chunk)
            bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())

    if received > limit:
        part.unlink()
        raise ValueError(f"{file.url} sends more than the {limit:,} bytes of {file.name}: it is another file.")
    if total is not None and received < total:
        raise IncompleteDownloadError(f"the connection ended after {received:,} of {total:,} bytes")
    return total is not None
