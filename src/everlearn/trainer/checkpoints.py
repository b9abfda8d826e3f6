"""Checkpoints: where a run was, in files that are whole or are not used."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

import everlearn
from everlearn import atomic
from everlearn.data import Batches
from everlearn.distributed import agreed, rank, world
from everlearn.distributed import every as every_process
from everlearn.fields import Range, check_field
from everlearn.results import file_name
from everlearn.stream import Stream

MARK = b"Everlearn checkpoint 1\n"
State = dict[str, Any]


class Unusable(ValueError):
    """A checkpoint is whole but cannot be gone on with; it is set aside, so that the next attempt begins from an earlier one."""


@dataclass(frozen=True)
class Every:
    """How often a run writes down where it is, besides at the end of every task.

    Args:
        steps: after so many steps ...
        minutes: ... or so many minutes, whichever comes first; None for never.

    >>> Every(steps=100)
    Every(steps=100, minutes=5.0)
    """

    steps: Annotated[int, Range(1)] | None = None
    minutes: Annotated[float, Range(0)] | None = 5.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check_field(f"Every.{name}", getattr(self, name), hint)


class Checkpoints:
    """The checkpoints of one run: a folder of files, each named by a task and a step in it.

    The file of step 0 is the run between two tasks; that of a later step is of use together with it. The first task needs none:
    whoever begins the run anew is there. The last two are kept, and one of an earlier task, with what they need; a damaged one is
    told of and passed over.

    Args:
        folder: theirs alone.
        every: how often.
    """

    def __init__(self, folder: Path, every: Every) -> None:
        self.folder, self.every = folder, every
        self._steps, self._time = 0, time.monotonic()
        self._started = 0  # the task whose beginning can be had again
        self._proven = self._useless = False
        self._resumed = (0, 0)  # the task and step that ``newest`` has given

    @contextmanager
    def alone(self, anew: bool = False, wait: bool = False) -> Iterator[None]:
        """Inside, no other process works at the same run, also none that has outlived the command it belonged to.

        Args:
            anew: forget what was written.
            wait: for a process that does, instead of an error.
        """
        with atomic.alone(self.folder / "lock", wait) as free:
            if not free:
                raise ValueError(f"Another process is at work on this run, in {self.folder}: wait for it, or stop it.")
            for place in list(self._places()) if anew else ():
                self._path(*place).unlink(missing_ok=True)
            try:
                yield
            finally:
                if not any(self._places()):
                    self._leave()

    def due(self) -> bool:
        """Whether it is time after one more step, and of use."""
        self._steps += 1
        steps, minutes = self.every.steps, self.every.minutes
        if self._useless:
            return False
        if steps is not None and self._steps >= steps:
            return True
        if minutes is None or (world() > 1 and self._steps % 20):  # several processes must ask for one clock
            return False
        return bool(agreed(time.monotonic() - self._time >= 60 * minutes))

    def within(self, task: int) -> bool:
        """Whether one within this task would be of use: not if its beginning was not written."""
        return self._started == task

    def write(self, task: int, step: int, state: State) -> None:
        """Write down where the run is, and forget what is not needed any more."""
        if self._useless:
            return
        content = _content({**state, "made by": _version(), "place": self._place(task, step)})
        path, fine = self._path(task, step), True
        try:
            atomic.writable_folder(self.folder)
            for torn in self.folder.glob(".*.checkpoint.*"):  # of processes that were killed while they wrote
                torn.unlink(missing_ok=True)
            atomic.write(path, MARK, _checksum(content), b"\n", content)
        except OSError as error:  # no reason to end a run
            warnings.warn(
                f"A checkpoint of {len(content) / 2**20:.0f} MB could not be written to {path} ({error.strerror or error}): the run "
                "goes on without it; make room.",
                stacklevel=2,
            )
            fine = False
        self._steps, self._time = 0, time.monotonic()
        if not all(every_process(fine)):  # what one process lacks is of no use to the others
            return
        if not self._proven:  # better told now than when it is needed
            self._useless, self._proven = not all(every_process(self._read(task, step) is not None)), True
        self._started = task if step == 0 else self._started
        places = sorted(self._places(), reverse=True)
        been = [
            place for place in places if place <= (task, step)
        ]  # later ones are of a run that could not be gone on with
        last = [
            *been[:2],
            *[place for place in been if place[0] < task][:1],
        ]  # the start of a task may be the one that is damaged
        for place in set(places) - {*last, *((t, 0) for t, _ in last)}:
            self._path(*place).unlink(missing_ok=True)

    def newest(self) -> tuple[State | None, State | None] | None:
        """The newest that can be read: the run as the task found it (None for the first), and within the task, if it was there."""
        for task, step in sorted(set.intersection(*every_process(set(self._places()))), reverse=True):
            start = self._read(task, 0) if task else None
            within = self._read(task, step) if step else None
            fine = (start is not None or not task) and (within is not None or not step)
            if all(every_process(fine)):
                self._started = task
                self._resumed = task, step
                return start, within
        return None

    def reject(self, within: bool, error: Exception | None) -> Unusable:
        """Set aside what ``newest`` has given, which a model or a method did not take; the error to raise.

        Args:
            within: whether it is the part within the task, rather than the run as the task found it.
            error: what came of it; None where it was another process that failed.
        """
        task, step = self._resumed
        path = self._path(task, step if within else 0)
        with suppress(OSError):
            path.rename(path.with_suffix(".unusable"))  # for who looks into it, until the run has ended
        self._started = 0
        why = "in another process" if error is None else f"{type(error).__name__}: {error}"
        return Unusable(
            f"The checkpoint {path} is of no use (it does not fit: {why}); the same run goes on from an earlier place."
        )

    def tidy(self) -> None:
        """Take away what a process has left that was killed between its result and its end; not what another works with."""
        if self.folder.is_dir():
            with atomic.alone(self.folder / "lock") as free:
                if free:
                    self._leave()

    def clear(self) -> None:
        """The run is done, or begins anew: all is forgotten but the lock, which keeps others out until ``alone`` ends."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                with suppress(OSError):
                    path.unlink()

    def _leave(self) -> None:
        """Take the folder away; the lock is the last file of it, since from then on another process may be there."""
        self.clear()
        with suppress(OSError):  # it is there already, or the system keeps what is open
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()
            if world() > 1:
                self.folder.parent.rmdir()

    def _read(self, task: int, step: int) -> State | None:
        path = self._path(task, step)
        try:
            content = path.read_bytes()
            mark, checksum, rest = content[: len(MARK)], content[len(MARK) : len(MARK) + 8], content[len(MARK) + 9 :]
            if mark != MARK or _checksum(rest) != checksum:
                raise ValueError("it is damaged")
            state: State = torch.load(io.BytesIO(rest), weights_only=True)
            if state.pop("made by", None) != _version():
                raise ValueError("it was made by another version of Everlearn or torch")
            if (place := state.pop("place", None)) != self._place(task, step):
                raise ValueError(f"its name is another than its content, which is of {place}")
            return state
        except FileNotFoundError:
            return None
        except pickle.UnpicklingError:
            why = "it holds more than tensors, numbers and names, which is not read"
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            why = str(error)
        warnings.warn(f"The checkpoint {path} is of no use ({why}); a run goes on from an earlier place.", stacklevel=2)
        return None

    def _places(self) -> Iterator[tuple[int, int]]:
        for path in self.folder.glob("*.checkpoint") if self.folder.is_dir() else ():
            if match := re.fullmatch(r"(\d{6})-(\d{9})", path.stem):
                yield int(match[1]), int(match[2])

    def _place(self, task: int, step: int) -> list[Any]:
        """Of which run, task and step a checkpoint is, as it says itself: a file may have been renamed or copied."""
        run = self.folder.parts[-2:] if world() > 1 else self.folder.parts[-1:]
        return [*run, task, step]

    def _path(self, task: int, step: int) -> Path:
        return self.folder / f"{task:06}-{step:09}.checkpoint"


def checkpoints_of(
    folder: Path | None, config: dict[str, Any], stream: Stream, every: Every | None
) -> Checkpoints | None:
    """Where a run keeps them; none of runs that could not go on as they were, which begin anew.

    Those are runs that cannot be told apart, those whose loaders draw from one generator, and those whose tasks differ in their
    transforms: replay augments old examples as their task did, and a file holds no functions.

    Args:
        folder: of the results.
        config: the run's.
        stream: what is learned.
        every: how often.
    """
    drawing = [
        g for t in stream for source in (t.train, t.test) if isinstance(source, Batches) for g in source.generators
    ]
    alike = all(t.transform is stream[0].transform and t.eval_transform is stream[0].eval_transform for t in stream)
    shared = len(drawing) > len(set(drawing))
    if folder is None or every is None or not alike or shared or None in config["fingerprints"].values():
        return None
    own = folder / f"{Path(file_name(config)).stem}.checkpoints"
    return Checkpoints(own if world() == 1 else own / f"process {rank()} of {world()}", every)


def _content(state: State) -> memoryview:
    """A file's content; torch's checksums of its parts, which take longer than all else, are left out: the whole has one."""
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, file := io.BytesIO())
    finally:
        torch.serialization.set_crc32_options(usual)
    return file.getbuffer()


def _checksum(content: bytes | memoryview) -> bytes:
    """Eight letters; against accidents it is as good as a cryptographic one, at less than half of its time."""
    return f"{zlib.crc32(content):08x}".encode()


@cache
def _version() -> list[str]:
    """Of torch, and of the code here to the last letter: another might go on in another way."""
    files = sorted(Path(everlearn.__file__).parent.rglob("*.py"))
    return [
        str(torch.__version__),
        hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=16).hexdigest(),
    ]
