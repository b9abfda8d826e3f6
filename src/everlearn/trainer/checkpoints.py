"""Checkpoints: files from which a run resumes exactly, written atomically and verified by checksums."""

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
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

from everlearn.core.data_source import Batches
from everlearn.core.hyperparameters import Range, check_field
from everlearn.core.stream import Stream
from everlearn.results.result import file_name
from everlearn.runtime import files
from everlearn.runtime.distributed import all_gather_object, broadcast_object, rank, world_size

HEADER = b"Everlearn checkpoint 1\n"
State = dict[str, Any]
Position = tuple[int, int]  # task index and step within the task


class Unusable(ValueError):
    """Raised for an intact checkpoint that cannot be loaded; it is renamed, so the next attempt uses an earlier one."""


@dataclass(frozen=True)
class CheckpointEvery:
    """The interval between checkpoints within a task. A checkpoint is also written at the end of every task.

    Args:
        steps: write after this many steps; None to ignore steps.
        minutes: write after this many minutes, if that is earlier; None to ignore time.

    >>> CheckpointEvery(steps=100)
    CheckpointEvery(steps=100, minutes=5.0)
    """

    steps: Annotated[int, Range(1)] | None = None
    minutes: Annotated[float, Range(0)] | None = 5.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check_field(f"CheckpointEvery.{name}", getattr(self, name), hint)


class Checkpoints:
    """The checkpoints of one run: a folder with one file per (task, step).

    The file of step 0 has the state before the task. The file of a later step is loaded on top of it. The first task
    has no file of step 0, since a new run starts there. The last two checkpoints are kept, and one of an earlier task,
    each with its file of step 0. Damaged files are skipped with a warning.

    Args:
        folder: the folder, which contains nothing else.
        interval: the interval between checkpoints.
    """

    def __init__(self, folder: Path, interval: CheckpointEvery) -> None:
        self.folder = folder
        self.interval = interval

        self._steps_since_write = 0
        self._last_write_time = time.monotonic()
        self._start_task = 0  # the task whose initial state can be restored
        self._is_verified = False  # whether a first file was read back
        self._is_disabled = False  # whether that file could not be read
        self._resumed: Position = (0, 0)  # what ``newest`` returned

    @contextmanager
    def alone(self, restart: bool = False, wait: bool = False) -> Iterator[None]:
        """Hold the lock of this run, so that no other process works on it.

        Args:
            restart: delete the existing checkpoints.
            wait: wait for a process that holds the lock, instead of raising.
        """
        with files.exclusive_lock(self.folder / "lock", wait) as is_free:
            if not is_free:
                raise ValueError(
                    f"Another process is at work on this run, in {self.folder}: wait for it to finish, or stop it."
                )
            if restart:
                for task, step in list(self._positions()):
                    self._path(task, step).unlink(missing_ok=True)
            try:
                yield
            finally:
                if not any(self._positions()):
                    self._remove_folder()

    def is_due(self) -> bool:
        """Count a step and return whether a checkpoint should be written after it."""
        self._steps_since_write += 1
        if self._is_disabled:
            return False
        if self.interval.steps is not None and self._steps_since_write >= self.interval.steps:
            return True
        if self.interval.minutes is None:
            return False

        # Clocks of several processes differ, so the first process decides, which costs a message.
        if world_size() > 1 and self._steps_since_write % 20:
            return False
        return bool(broadcast_object(time.monotonic() - self._last_write_time >= 60 * self.interval.minutes))

    def has_task_start(self, task: int) -> bool:
        """Return whether the state before this task can be restored, which a checkpoint within it requires."""
        return self._start_task == task

    def write(self, task: int, step: int, state: State) -> None:
        """Write a checkpoint and delete those that are no longer needed.

        Args:
            task: index of the task.
            step: step within the task; 0 for the state before it.
            state: tensors, numbers, strings and containers of them.
        """
        if self._is_disabled:
            return

        content = _serialize({**state, "made by": _code_version(), "place": self._identity(task, step)})
        path = self._path(task, step)
        is_written = True
        try:
            files.writable_folder(self.folder)
            # Processes that were killed while writing leave partial files.
            for partial_file in self.folder.glob(".*.checkpoint.*"):
                partial_file.unlink(missing_ok=True)
            files.write(path, HEADER, _checksum(content), b"\n", content)
        except OSError as error:
            # A full disk is no reason to stop training.
            warnings.warn(
                f"A checkpoint of {len(content) / 2**20:.0f} MB could not be written to {path} "
                f"({error.strerror or error}): the run continues without it; free some disk space.",
                stacklevel=2,
            )
            is_written = False
        self._steps_since_write = 0
        self._last_write_time = time.monotonic()

        # All processes need a checkpoint of the same step to resume.
        if not all(all_gather_object(is_written)):
            return

        # Reading the first one back reveals an unreadable state early.
        if not self._is_verified:
            self._is_disabled = not all(all_gather_object(self._read(task, step) is not None))
            self._is_verified = True
        if step == 0:
            self._start_task = task
        self._delete_old((task, step))

    def _delete_old(self, current: Position) -> None:
        """Delete all but the last two checkpoints and one of an earlier task, each with the start of its task."""
        positions = sorted(self._positions(), reverse=True)

        # Later ones are from an attempt that could not be resumed.
        reached = [position for position in positions if position <= current]
        earlier_tasks = [position for position in reached if position[0] < current[0]]

        # The start of the current task may turn out to be damaged, hence the earlier task.
        kept = [*reached[:2], *earlier_tasks[:1]]
        task_starts = [(task, 0) for task, _ in kept]
        for task, step in set(positions) - {*kept, *task_starts}:
            self._path(task, step).unlink(missing_ok=True)

    def newest(self) -> tuple[State | None, State | None] | None:
        """Read the newest intact checkpoint that all processes have.

        Returns:
            The state before the task (None for the first task) and the state within it (None if it had not begun);
            None without an intact checkpoint.
        """
        common_positions = set.intersection(*all_gather_object(set(self._positions())))
        for task, step in sorted(common_positions, reverse=True):
            task_start = self._read(task, 0) if task else None
            task_state = self._read(task, step) if step else None
            has_start = task_start is not None or not task
            has_state = task_state is not None or not step
            if all(all_gather_object(has_start and has_state)):
                self._start_task = task
                self._resumed = task, step
                return task_start, task_state
        return None

    def reject(self, within_task: bool, error: Exception | None) -> Unusable:
        """Rename the checkpoint that ``newest`` returned, which did not fit, and return the error to raise.

        Args:
            within_task: whether the state within the task did not fit, rather than that before the task.
            error: the cause; None if another process failed.
        """
        task, step = self._resumed
        path = self._path(task, step if within_task else 0)

        # The renamed file can be inspected until the run ends.
        with suppress(OSError):
            path.rename(path.with_suffix(".unusable"))
        self._start_task = 0

        reason = "in another process" if error is None else f"{type(error).__name__}: {error}"
        return Unusable(
            f"The checkpoint {path} is not usable (it does not fit: {reason}); the run resumes from an earlier one."
        )

    def tidy(self) -> None:
        """Delete what a process killed after saving its result has left, unless another process holds the lock."""
        if self.folder.is_dir():
            with files.exclusive_lock(self.folder / "lock") as is_free:
                if is_free:
                    self._remove_folder()

    def clear(self) -> None:
        """Delete all files but the lock, which is held until ``alone`` exits."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                with suppress(OSError):
                    path.unlink()

    def _remove_folder(self) -> None:
        """Delete the folder; the lock goes last, since another process may enter as soon as it is gone."""
        self.clear()

        # Another process may have entered already; and some systems cannot delete open files.
        with suppress(OSError):
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()
            if world_size() > 1:
                self.folder.parent.rmdir()

    def _read(self, task: int, step: int) -> State | None:
        """Read a checkpoint; None if it is missing or, with a warning, damaged."""
        path = self._path(task, step)
        try:
            content = path.read_bytes()
            header = content[: len(HEADER)]
            checksum = content[len(HEADER) : len(HEADER) + 8]
            payload = content[len(HEADER) + 9 :]
            if header != HEADER or _checksum(payload) != checksum:
                raise ValueError("it is damaged")

            state: State = torch.load(io.BytesIO(payload), weights_only=True)
            if state.pop("made by", None) != _code_version():
                raise ValueError("it was written by another version of Everlearn or torch")
            identity = state.pop("place", None)
            if identity != self._identity(task, step):
                raise ValueError(f"its name does not match its content, which is of {identity}")
            return state
        except FileNotFoundError:
            return None
        except pickle.UnpicklingError:
            reason = "it contains more than tensors, numbers and names, which is not loaded"
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            reason = str(error)
        warnings.warn(
            f"The checkpoint {path} is not usable ({reason}); the run resumes from an earlier one.", stacklevel=2
        )
        return None

    def _positions(self) -> Iterator[Position]:
        """Iterate over the tasks and steps of the existing files."""
        if not self.folder.is_dir():
            return
        for path in self.folder.glob("*.checkpoint"):
            match = re.fullmatch(r"(\d{6})-(\d{9})", path.stem)
            if match:
                yield int(match[1]), int(match[2])

    def _identity(self, task: int, step: int) -> list[Any]:
        """Return the run, task and step that a file stores, since it may have been renamed or copied."""
        # With several processes, the run's folder has a subfolder per process.
        depth = 2 if world_size() > 1 else 1
        return [*self.folder.parts[-depth:], task, step]

    def _path(self, task: int, step: int) -> Path:
        return self.folder / f"{task:06}-{step:09}.checkpoint"


def checkpoints_of(
    folder: Path | None, config: dict[str, Any], stream: Stream, interval: CheckpointEvery | None
) -> Checkpoints | None:
    """Create the checkpoints of a run; None for runs that cannot resume exactly.

    These are runs whose data or model cannot be hashed, runs whose loaders share a random generator, and runs whose
    tasks differ in their transforms: replay applies the transform of an old example's task, and a checkpoint cannot
    contain functions.

    Args:
        folder: the folder of the results.
        config: the configuration of the run.
        stream: the stream.
        interval: the interval between checkpoints.
    """
    if folder is None or interval is None or None in config["fingerprints"].values():
        return None

    first_task = stream[0]
    for task in stream:
        if task.transform is not first_task.transform or task.eval_transform is not first_task.eval_transform:
            return None

    sources = [source for task in stream for source in (task.train, task.test)]
    generators = [g for source in sources if isinstance(source, Batches) for g in source.generators]
    if len(generators) > len(set(generators)):
        return None

    run_folder = folder / f"{Path(file_name(config)).stem}.checkpoints"
    if world_size() > 1:
        run_folder = run_folder / f"process {rank()} of {world_size()}"
    return Checkpoints(run_folder, interval)


def _serialize(state: State) -> memoryview:
    """Serialize a state without torch's checksums of its parts, which are slow; the file has a checksum as a whole."""
    buffer = io.BytesIO()
    previous_option = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, buffer)
    finally:
        torch.serialization.set_crc32_options(previous_option)
    return buffer.getbuffer()


def _checksum(content: bytes | memoryview) -> bytes:
    """Compute the CRC-32 as eight hexadecimal digits; against accidents it is enough, and faster than a hash."""
    return f"{zlib.crc32(content):08x}".encode()


@cache
def _code_version() -> list[str]:
    """Return the version of torch and the hash of this package's code: other code may not resume exactly."""
    sources = sorted(Path(str(resources.files("everlearn"))).rglob("*.py"))
    digest = hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=16)
    return [str(torch.__version__), digest.hexdigest()]
