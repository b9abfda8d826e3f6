"""The state folder: a numbered folder per accepted update, and a pointer file that names the current one."""

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

from everlearn.runtime import files
from everlearn.updating.weights_file import compute_digest

FORMAT = 1
POINTER = "current.json"
FACTS = "facts.json"
REFUSED = "refused"
LOCK = ".lock"
CURE = "put it back from a copy, or start over with an empty state folder"


@dataclass(frozen=True)
class Version:
    """The folder of an update, written once and never changed.

    Args:
        folder: its path.
        number: the number of the update; 0 is the model before the first update.
        facts: the content of facts.json: the configuration of the update, the digest of every other file of the folder,
            and the digests of the facts of earlier versions.
        pending_digest: the digest of the deployed file that this version has yet to replace; None once it is replaced.
    """

    folder: Path
    number: int
    facts: dict[str, Any]
    pending_digest: str | None = None

    def read(self, name: str) -> bytes:
        """Read one of its files, and raise if it is not as it was written."""
        content = _read_bytes(self.folder / name)
        if compute_digest(content) != self.facts["files"].get(name):
            raise ValueError(f"{self.folder / name} is not the file that was written there: {CURE}.")
        return content


class StateFolder:
    """A folder of versions that stays consistent if the process is killed.

    Each version is written to a new folder. It becomes the current one when the pointer, one small file, is replaced.
    Folders with a higher number than the pointer's are left over from an interrupted update.

    Args:
        folder: its path; created when something is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder, so that one update runs at a time; raise if it is taken."""
        self._check_is_state_folder()
        files.writable_folder(self.folder)
        with files.exclusive_lock(self.folder / LOCK) as is_acquired:
            if not is_acquired:
                raise OSError(f"Another update is running in {self.folder}: wait until it has ended.")
            yield

    def current(self) -> Version | None:
        """Return the current version; None before the first update."""
        self._check_is_state_folder()
        if not (self.folder / POINTER).exists():
            return None

        pointer = _parse_json(self.folder / POINTER, _read_bytes(self.folder / POINTER))
        if not _is_pointer(pointer):
            raise ValueError(f"{self.folder / POINTER} is not of this version of Everlearn, or damaged: {CURE}.")
        return self._read_version(pointer["version"], pointer["facts"], pointer.get("replacing"))

    def find_version(self, name: str, digest: str, before: Version) -> Version | None:
        """Find the latest earlier version that has a file with this name and digest.

        Args:
            name: the file.
            digest: its digest.
            before: only versions before this one are searched.

        Returns:
            The version; None if no stored version has such a file.
        """
        for number, folder in reversed(self._list_versions()):
            # The file itself is hashed: damaged facts are reported when the version is read, not skipped here.
            path = folder / name
            if number < before.number and path.is_file() and compute_digest(path.read_bytes()) == digest:
                facts_digest = before.facts.get("earlier", {}).get(str(number))
                return self._read_version(number, facts_digest)
        return None

    def version_folder(self, number: int) -> Path:
        """Return the path of a version."""
        return self.folder / f"update-{number:04d}"

    def remove_unfinished(self, current: Version | None) -> None:
        """Delete what an interrupted update has left."""
        current_number = -1 if current is None else current.number
        for number, folder in self._list_versions():
            if number > current_number:
                shutil.rmtree(folder)
        for partial_file in files.unfinished_files(self.folder / POINTER):
            partial_file.unlink(missing_ok=True)

    def write_version(self, number: int, contents: Mapping[str, bytes | Path], facts: Mapping[str, Any]) -> Version:
        """Write a version without making it the current one.

        Args:
            number: of the update.
            contents: the files by name; a path is linked to, as a file of an earlier version.
            facts: what facts.json holds besides the digests.
        """
        # With these digests, a damaged earlier version is detected before the state is resumed from it.
        facts_of_earlier_versions = {}
        for earlier_number, earlier_folder in self._list_versions():
            facts_path = earlier_folder / FACTS
            if facts_path.is_file():
                facts_of_earlier_versions[earlier_number] = compute_digest(facts_path.read_bytes())

        folder = self.version_folder(number)
        folder.mkdir()
        digests = {}
        for name, content in contents.items():
            if isinstance(content, Path):
                _link_or_copy(content, folder / name)
                digests[name] = compute_digest((folder / name).read_bytes())
            else:
                files.write(folder / name, content)
                digests[name] = compute_digest(content)

        all_facts = {
            "format": FORMAT,
            "version": number,
            **facts,
            "files": digests,
            "earlier": facts_of_earlier_versions,
        }
        files.write(folder / FACTS, serialize_json(all_facts))
        _sync_folder(folder)
        return Version(folder, number, all_facts)

    def set_current(self, version: Version, pending_digest: str | None = None) -> None:
        """Make a version the current one.

        Args:
            version: a version that is completely written.
            pending_digest: the digest of the deployed file that is replaced next. After a crash in between it tells a
                file that was not yet replaced from an older one that was put back on purpose.
        """
        facts_digest = compute_digest(_read_bytes(version.folder / FACTS))
        pointer = {"format": FORMAT, "version": version.number, "facts": facts_digest}
        if pending_digest is not None:
            pointer["replacing"] = pending_digest
        files.write(self.folder / POINTER, serialize_json(pointer))
        _sync_folder(self.folder)

    def delete_old_versions(self, keep: int, parent: int) -> None:
        """Delete all but the latest versions.

        Args:
            keep: how many stay.
            parent: the version that the latest one was trained from. It is deleted after all other earlier ones, also
                after those with a higher number, so that it is possible to return to it again.
        """
        *earlier, latest = self._list_versions()
        earlier.sort(key=lambda version: version[0] == parent)
        for _, folder in [*earlier, latest][:-keep]:
            shutil.rmtree(folder)

    def _read_version(self, number: int, facts_digest: str | None, pending_digest: str | None = None) -> Version:
        """Read a version, and raise if its facts do not have the expected digest."""
        path = self.version_folder(number) / FACTS
        content = _read_bytes(path)
        if facts_digest is not None and compute_digest(content) != facts_digest:
            raise ValueError(f"{path} is not the file that was written there: {CURE}.")
        return Version(path.parent, number, _parse_json(path, content), pending_digest)

    def _list_versions(self) -> list[tuple[int, Path]]:
        """List numbers and paths of all version folders, in the order of their numbers."""
        versions = []
        for path in self.folder.glob("update-*"):
            match = re.fullmatch(r"update-(\d{4,})", path.name)
            if match:
                versions.append((int(match[1]), path))
        return sorted(versions)

    def _check_is_state_folder(self) -> None:
        """Raise if the folder belongs to something else, or has lost its pointer."""
        if not self.folder.is_dir() or (self.folder / POINTER).exists():
            return

        # An interrupted first update leaves versions 0 and 1 without a pointer; later ones always have one.
        versions = self._list_versions()
        if any(number > 1 for number, _ in versions):
            raise FileNotFoundError(f"{self.folder / POINTER} is missing, which names the current version: {CURE}.")

        # A folder of the user's files is not written to.
        expected_names = {REFUSED, LOCK}
        expected_names.update(path.name for _, path in versions)
        expected_names.update(path.name for path in files.unfinished_files(self.folder / POINTER))
        foreign_names = sorted(path.name for path in self.folder.iterdir() if path.name not in expected_names)
        if foreign_names:
            raise ValueError(
                f"{self.folder} is not a state folder, it holds {', '.join(foreign_names[:3])}: give that of the "
                "earlier updates, or for a first update a new or empty one."
            )


def serialize_json(content: Mapping[str, Any]) -> bytes:
    """Serialize the content of a JSON file of the state folder."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode()


def _is_pointer(content: Mapping[str, Any]) -> bool:
    number = content.get("version")
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    digests = (content.get("facts"), content.get("replacing", ""))
    return content.get("format") == FORMAT and is_number and all(isinstance(digest, str) for digest in digests)


def _parse_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{path} cannot be read as the state of an update: {CURE}.") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing, so the state is incomplete: {CURE}.") from None


def _link_or_copy(source: Path, target: Path) -> None:
    """Link to a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        files.write(target, source.read_bytes())


def _sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk before anything else is written."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
