"""Getting a file from the network: with progress, resumed where it broke off, verified, there only when whole."""

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

from everlearn.sources.files import File, check, sound

ATTEMPTS = 3
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 2**18
THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
LARGEST = 16 * 2**30  # bytes; no data set here is larger


class Broken(Exception):
    """The connection ended before the file did."""


def fetch(file: File, path: Path) -> None:
    """Download a file to a path; what an earlier attempt left in ``path.part`` is gone on with.

    Only a file with a known checksum or size is resumed: otherwise parts of two versions would pass for one.
    """
    if not file.url.startswith(("http://", "https://")):
        raise ValueError(f"{file.name} can be downloaded from http:// and https:// addresses only, got {file.url!r}.")
    _check_protected(file.url, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if file.md5 is None and file.size is None:
        part.unlink(missing_ok=True)
    for attempt in range(ATTEMPTS):
        try:
            if not _continue(file, part) and not sound(part, file):
                raise Broken(f"it ended after {part.stat().st_size:,} bytes, without having said how many there are")
            break
        except (OSError, http.client.HTTPException, Broken) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if attempt == ATTEMPTS - 1 or refused:
                kept = part.stat().st_size if part.exists() else 0
                raise OSError(
                    f"Could not download {file.url}: {error}. {kept:,} bytes are kept in {part}; call again to go on, or "
                    f"get the file by hand and put it at {path}."
                ) from error
    try:
        check(part, file, file.url)
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{error} What was downloaded has been removed.") from None
    os.replace(part, path)


def _check_protected(url: str, file: File) -> None:
    """Refuse what anybody on the way could exchange unnoticed: plain http, without a checksum to tell."""
    address = urllib.parse.urlsplit(url)
    if address.scheme == "http" and file.md5 is None and address.hostname not in THIS_MACHINE:
        raise ValueError(
            f"{file.name} comes from {url}, which is not encrypted, and has no published checksum: anybody on the way could exchange "
            "it. Get it by hand from where you trust."
        )


def _continue(file: File, part: Path) -> bool:
    """Ask for what is missing and append it; start anew if the server sends all. Whether the length was known, and reached."""
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have == file.size:
        return True
    headers = {"User-Agent": "everlearn", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(file.url, headers=headers), timeout=TIMEOUT) as answer:
            _check_protected(answer.url, file)  # it may have been sent on to elsewhere
            resumed = answer.status == 206 and _start(answer) == have
            if answer.status == 206 and not resumed:
                part.unlink()
                raise Broken("the server sent another part than was asked for")
            return _receive(answer, part, have if resumed else 0, file)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing is left to send: the part is whole, or it is longer than the file and wrong.
        if error.headers.get("Content-Range") != f"bytes */{have}":
            part.unlink()
            raise Broken("the part kept here is longer than the file") from None
        return True


def _start(answer: Any) -> int | None:
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range") or "")
    return int(found[1]) if found else None


def _receive(answer: Any, part: Path, have: int, file: File) -> bool:
    announced = answer.headers.get("Content-Length")
    total = have + int(announced) if announced and announced.isdigit() else None
    most = file.size if file.size is not None else LARGEST
    with (
        part.open("ab" if have else "wb") as out,
        tqdm(total=total, initial=have, unit="B", unit_scale=True, unit_divisor=1024, desc=file.name) as bar,
    ):
        while chunk := answer.read(CHUNK):
            have += len(chunk)
            if have > most:
                break  # whatever this is, it is not the file; the check says so
            out.write(chunk)
            bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    if have > most:
        part.unlink()
        raise ValueError(f"{file.url} sends more than the {most:,} bytes of {file.name}: it is another file.")
    if total is not None and have < total:
        raise Broken(f"the connection ended after {have:,} of {total:,} bytes")
    return total is not None
