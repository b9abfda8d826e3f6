"""The state folder: a numbered folder per accepted update, and one file that says which of them counts."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everlearn import atomic
from everlearn.updating.weights import digest

FORMAT = 1
POINTER, FACTS, REFUSED, LOCK = "current.json", "facts.json", "refused", ".lock"
CURE = "put it back from a copy, or start anew with an empty state folder"


@dataclass(frozen=True)
class Version:
    """One update's folder, written whole and never changed.

    Args:
        folder: where it lies.
        number: of the update; 0 is the model as it was deployed first.
        facts: what was learned how, the digest of every other file, and of the facts of earlier versions.
        replacing: the digest of the deployed file that this version has still to replace; None where it has done so.
    """

    folder: Path
    number: int
    facts: dict[str, Any]
    replacing: str | None = None

    def read(self, name: str) -> bytes:
        """One of its files, if it is the one that was written."""
        content = _bytes(self.folder / name)
        if digest(content) != self.facts["files"].get(name):
            raise ValueError(f"{self.folder / name} is not the file that was written there: {CURE}.")
        return content


class State:
    """A folder of versions; a killed process leaves the version before or the one after.

    Versions are written beside each other; replacing the pointer, one small file, is what makes a new one count. Whatever
    folder the pointer does not reach is left over from an update that was stopped.

    Args:
        folder: made when something is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One update at a time."""
        self._must_be_ours()
        atomic.writable_folder(self.folder)
        with atomic.alone(self.folder / LOCK) as free:
            if not free:
                raise OSError(f"Another update is under way in {self.folder}: wait until it has ended.")
            yield

    def current(self) -> Version | None:
        """The version that counts; None before the first update."""
        self._must_be_ours()
        if not (self.folder / POINTER).exists():
            return None
        pointer = _json(self.folder / POINTER, _bytes(self.folder / POINTER))
        if not _is_pointer(pointer):
            raise ValueError(f"{self.folder / POINTER} is not of this version of Everlearn, or damaged: {CURE}.")
        return self._version(pointer["version"], pointer["facts"], pointer.get("replacing"))

    def holding(self, name: str, wanted: str, before: Version) -> Version | None:
        """The last version before this one whose file of that name has this digest; None where none is kept."""
        for number, folder in reversed(self._versions()):
            file = folder / name  # asked itself: a version whose facts are damaged is told of, not passed over
            if number < before.number and file.is_file() and digest(file.read_bytes()) == wanted:
                return self._version(number, before.facts.get("earlier", {}).get(str(number)))
        return None

    def place(self, number: int) -> Path:
        """The folder of a version."""
        return self.folder / f"update-{number:04d}"

    def clean(self, current: Version | None) -> None:
        """Take away what an update that was stopped has left."""
        last = -1 if current is None else current.number
        for number, folder in self._versions():
            if number > last:
                shutil.rmtree(folder)
        for part in atomic.parts(self.folder / POINTER):
            part.unlink(missing_ok=True)

    def write(self, number: int, files: Mapping[str, bytes | Path], facts: Mapping[str, Any]) -> Version:
        """A version whole, which does not count yet; a path stands for a file that an earlier version has."""
        folder, digests = self.place(number), {}
        earlier = {n: digest((p / FACTS).read_bytes()) for n, p in self._versions() if (p / FACTS).is_file()}
        folder.mkdir()
        for name, content in files.items():
            if isinstance(content, Path):
                _share(content, folder / name)
                digests[name] = digest((folder / name).read_bytes())
            else:
                atomic.write(folder / name, content)
                digests[name] = digest(content)
        whole = {"format": FORMAT, "version": number, **facts, "files": digests, "earlier": earlier}
        atomic.write(folder / FACTS, as_json(whole))
        _settle(folder)
        return Version(folder, number, whole)

    def point_to(self, version: Version, replacing: str | None = None) -> None:
        """From here on this version counts.

        Args:
            version: written whole.
            replacing: the digest of the deployed file that is replaced next. It says what a process that is killed in between
                has left undone; without it nobody could tell that file from an older one that was put back on purpose.
        """
        pointer = {"format": FORMAT, "version": version.number, "facts": digest(_bytes(version.folder / FACTS))}
        more = {} if replacing is None else {"replacing": replacing}
        atomic.write(self.folder / POINTER, as_json({**pointer, **more}))
        _settle(self.folder)

    def forget(self, keep: int, spare: int) -> None:
        """Delete all but the last versions.

        Args:
            keep: how many stay.
            spare: the version that the last one goes on from, which is one of them: others came after it where somebody went
                back, and it must be there to go back to once more.
        """
        *earlier, last = self._versions()
        earlier.sort(key=lambda version: version[0] == spare)
        for _, folder in [*earlier, last][:-keep]:
            shutil.rmtree(folder)

    def _version(self, number: int, facts: str | None, replacing: str | None = None) -> Version:
        """A version with its facts, which have this digest where it is known."""
        path = self.place(number) / FACTS
        content = _bytes(path)
        if facts is not None and digest(content) != facts:
            raise ValueError(f"{path} is not the file that was written there: {CURE}.")
        return Version(path.parent, number, _json(path, content), replacing)

    def _versions(self) -> list[tuple[int, Path]]:
        found = [(re.fullmatch(r"update-(\d{4,})", p.name), p) for p in self.folder.glob("update-*")]
        return sorted((int(match[1]), p) for match, p in found if match)

    def _must_be_ours(self) -> None:
        """Refuse a folder of something else, and one that has lost its pointer."""
        if not self.folder.is_dir() or (self.folder / POINTER).exists():
            return
        versions = self._versions()
        if any(number > 1 for number, _ in versions):
            raise FileNotFoundError(f"{self.folder / POINTER} is missing, which says what counts: {CURE}.")
        ours = {REFUSED, LOCK, *(p.name for _, p in versions), *(p.name for p in atomic.parts(self.folder / POINTER))}
        if foreign := sorted(p.name for p in self.folder.iterdir() if p.name not in ours):
            raise ValueError(
                f"{self.folder} is not a state folder, it holds {', '.join(foreign[:3])}: give the one of the updates before, or "
                "for a first update a new or empty one."
            )


def _is_pointer(content: Mapping[str, Any]) -> bool:
    number, words = content.get("version"), (content.get("facts"), content.get("replacing", ""))
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    return content.get("format") == FORMAT and is_number and all(isinstance(word, str) for word in words)


def as_json(content: Mapping[str, Any]) -> bytes:
    """As it is written."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode()


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{path} cannot be read as the state of an update: {CURE}.") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing, so the state is not whole: {CURE}.") from None


def _share(old: Path, new: Path) -> None:
    """The same file under another name; a copy where the file system knows no links."""
    try:
        os.link(old, new)
    except OSError:
        atomic.write(new, old.read_bytes())


def _settle(folder: Path) -> None:
    """Let the names in a folder reach the disk before what is written next."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
