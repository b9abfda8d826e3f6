"""Executors of runs: in this process, in worker processes, or on a Ray or Slurm cluster."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from everlearn.experiments.grid import GridRun
from everlearn.experiments.parsing import UsageError
from everlearn.results.result import Result, file_name
from everlearn.runtime.distributed import world_size
from everlearn.runtime.optional_imports import import_optional
from everlearn.runtime.processes import end_with_parent
from everlearn.runtime.stdio import survive_closed_streams

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Cluster = Literal["ray", "slurm"]
Outcome = Result | Exception
RUN_ERRORS = (  # errors of a single run, which do not stop the others
    MemoryError,
    ArithmeticError,
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
)
MAX_ATTEMPTS = 3  # for a run whose process dies


class Run(Protocol[T_co]):
    """What an executor runs: a run of a grid, or a trial of a study.

    If a run has an attribute ``report``, a function, then a worker process calls that of the process that started it.
    """

    def run(self, force: bool) -> T_co:
        """Run it and return its result; ``force`` repeats a run whose result exists."""


class WorkerLost(OSError):
    """A worker process or its machine was lost; repeating the command resumes its run."""


def outcomes(
    runs: Sequence[GridRun],
    workers: int = 1,
    threads: int | None = None,
    force: bool = False,
    cluster: Cluster | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Execute runs; yields (index, result or error) as each ends, ``WorkerLost`` if its process or machine failed.

    Args:
        runs: the runs.
        workers: number of processes; results are the same, bit for bit, for any number. On a cluster, the maximum
            number of jobs at a time, where 1 means no limit.
        threads: torch threads per process.
        force: whether to repeat runs whose results exist.
        cluster: cluster to run on, instead of this machine.
    """
    if (workers > 1 or cluster) and world_size() > 1:
        raise UsageError(
            "--workers and --cluster start processes of their own: leave them out under torchrun, whose processes "
            "share every run."
        )
    if not runs:
        return

    if cluster == "ray":
        yield from _save_locally(runs, _run_on_ray(runs, workers, threads or 1, force))
    elif cluster == "slurm":
        yield from _save_locally(runs, _run_on_slurm(runs, workers, threads or 1, force))
    else:
        yield from local_outcomes(runs, min(workers, len(runs)), threads, force)


def local_outcomes(
    runs: Iterable[Run[T]], workers: int, threads: int | None = None, force: bool = False, fork: bool = False
) -> Iterator[tuple[int, T | Exception]]:
    """Execute runs on this machine; yields (index, result or error) as each ends.

    A run is taken from ``runs`` when a worker is free, so that it may depend on the outcomes before it.

    Args:
        runs: the runs.
        workers: number of processes; 1 runs them in this process.
        threads: torch threads per process; by default 1 per worker process.
        force: whether to repeat runs whose results exist.
        fork: fork this process for each run, so that runs share its memory and need not be pickled.
    """
    if workers > 1:
        yield from _run_in_processes(runs, workers, threads or 1, force, fork)
        return

    if threads is not None:
        torch.set_num_threads(threads)
    for index, run in enumerate(runs):
        # Under torchrun an error must end all processes: none of them may continue alone.
        if world_size() > 1:
            yield index, run.run(force)
        else:
            yield index, execute(run, force)


@dataclass(frozen=True)
class _RunningProcess:
    """A process with its run, and the number of processes that the run has had."""

    index: int
    run: Any
    process: Any
    attempt: int


def _run_in_processes(
    runs: Iterable[Run[T]], workers: int, threads: int, force: bool, fork: bool
) -> Iterator[tuple[int, T | Exception]]:
    """Run in worker processes; a run whose process dies is tried again, the others are not affected."""
    context = _fork_context() if fork else _forkserver_context()
    next_runs = enumerate(runs)
    running: dict[Any, _RunningProcess] = {}
    idle: list[tuple[Any, Any]] = []

    def start_run(index: int, run: Run[T], attempt: int) -> None:
        # A repeated attempt is not forced, so that it resumes from the last checkpoint.
        force_attempt = force and attempt == 1
        if idle:
            pipe, process = idle.pop()
        else:
            pipe, worker_pipe = context.Pipe()
            forked_run = (run, force_attempt) if fork else None
            process = context.Process(target=_serve_runs, args=(worker_pipe, threads, forked_run))
            process.start()
            worker_pipe.close()
        running[pipe] = _RunningProcess(index, run, process, attempt)
        if not fork:
            _send(pipe, (run, force_attempt))

    try:
        while True:
            while len(running) < workers and (next_run := next(next_runs, None)) is not None:
                start_run(*next_run, attempt=1)
            if not running:
                return

            ready_pipes: list[Any] = wait(list(running))
            for pipe in ready_pipes:
                current = running[pipe]
                try:
                    kind, content = _receive(pipe)
                except (EOFError, OSError):
                    kind, content = "died", None
                if kind == "report":
                    _send(pipe, current.run.report(*content))
                    continue

                del running[pipe]
                if kind == "died" or fork:
                    pipe.close()
                    current.process.join()
                else:
                    idle.append((pipe, current.process))

                if kind == "raised":
                    raise content
                if kind == "ended":
                    yield current.index, content
                elif current.attempt < MAX_ATTEMPTS:
                    start_run(current.index, current.run, current.attempt + 1)
                else:
                    message = (
                        f"its process has died {MAX_ATTEMPTS} times, perhaps for lack of memory; repeat the command to "
                        "resume it, best with fewer --workers"
                    )
                    yield current.index, WorkerLost(message)
    finally:
        # Also if the consumer stops iterating: start no further run and end those that are running.
        for current in running.values():
            current.process.terminate()
        for pipe, _ in idle:
            pipe.close()
        for process in [current.process for current in running.values()] + [process for _, process in idle]:
            process.join()


def _send(pipe: Any, message: Any) -> None:
    """Send a message; if the other process has died, the next read from its pipe fails."""
    # The pickle of ``pipe.send`` would put tensors into shared memory, which ends with its process.
    content = pickle.dumps(message)
    with suppress(OSError):
        pipe.send_bytes(content)


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve_runs(pipe: Any, threads: int, forked_run: tuple[Any, bool] | None) -> None:
    """Execute a forked run, or those that arrive, in a process that ends with its parent."""
    survive_closed_streams()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_DFL)
    torch.set_num_threads(threads)
    end_with_parent()

    if forked_run is not None:
        _send(pipe, _execute_in_worker(pipe, *forked_run))
        return
    with suppress(EOFError):  # the parent process closes the pipe
        while True:
            _send(pipe, _execute_in_worker(pipe, *_receive(pipe)))


def _execute_in_worker(pipe: Any, run: Any, force: bool) -> tuple[str, Any]:
    """Execute a run; returns the message for the parent process."""

    def report(*arguments: Any) -> Any:
        _send(pipe, ("report", arguments))
        return _receive(pipe)

    if hasattr(run, "report"):
        run.report = report
    try:
        outcome = execute(run, force)
        kind = "ended"
    except Exception as error:  # noqa: BLE001 - raised again in the parent process
        outcome = error
        kind = "raised"
    if isinstance(outcome, Exception):
        outcome = _portable_error(outcome)
    return kind, outcome


def _portable_error(error: Exception) -> Exception:
    """Return the error with its traceback as a note, or a RuntimeError if another process could not read it."""
    remote_traceback = "".join(traceback.format_exception(error))
    try:
        portable_error: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - errors of other packages may do anything here
        portable_error = RuntimeError(f"{type(error).__name__}: {error}")
    portable_error.add_note(f"In a worker process:\n{remote_traceback}")
    return portable_error


def _fork_context() -> Any:
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise ValueError(
            "Several workers are forked, which is not possible on this system, or in a process that uses a GPU: set "
            "workers=1."
        )
    return multiprocessing.get_context("fork")


def _forkserver_context() -> Any:
    """Fork workers from a fresh process where that is possible, because forking an active torch may hang."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Not every system has this module.
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    # Python puts the working folder first on the path of a process started with -c: a file numpy.py beside the data
    # would be imported. PYTHONSAFEPATH prevents that.
    previous_value = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if previous_value is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = previous_value
    return context


def _run_on_ray(runs: Sequence[GridRun], workers: int, threads: int, force: bool) -> Iterator[tuple[int, Outcome]]:
    """Run on the Ray cluster named by RAY_ADDRESS, or on a local one."""
    ray: Any = import_optional("ray", "ray", "--cluster ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)

    # A forced run is not retried: it would start again from the first step.
    max_retries = 0 if force else MAX_ATTEMPTS - 1
    num_gpus = int(runs[0].grid.device.startswith("cuda"))
    remote_function = ray.remote(num_cpus=threads, num_gpus=num_gpus, max_retries=max_retries)(_execute_with_threads)

    pending = deque(range(len(runs)))
    running: dict[Any, int] = {}
    while pending or running:
        while pending and (workers == 1 or len(running) < workers):
            index = pending.popleft()
            running[remote_function.remote(runs[index], threads, force)] = index
        finished, _ = ray.wait(list(running))
        for reference in finished:
            outcome = _job_outcome(partial(ray.get, reference), ray.exceptions.RayError, ray.exceptions.RayTaskError)
            yield running.pop(reference), outcome


def _run_on_slurm(runs: Sequence[GridRun], workers: int, threads: int, force: bool) -> Iterator[tuple[int, Outcome]]:
    """Run as a Slurm job array; a preempted or timed-out job is queued again and resumes from its checkpoint."""
    submitit: Any = import_optional("submitit", "slurm", "--cluster slurm")
    if shutil.which("srun") is None:
        raise UsageError(
            "--cluster slurm: there is no Slurm here (srun is not found): run the command where jobs are submitted."
        )

    grid = runs[0].grid
    executor = submitit.AutoExecutor(folder=grid.out.resolve() / "slurm", slurm_max_num_timeout=100)
    executor.update_parameters(name="everlearn", cpus_per_task=threads, timeout_min=grid.time_limit)
    if executor.cluster == "slurm":
        if grid.device.startswith("cuda"):
            executor.update_parameters(gpus_per_node=1)
        max_parallel_jobs = workers if workers > 1 else 256
        executor.update_parameters(slurm_partition=grid.partition, slurm_array_parallelism=max_parallel_jobs)

    with executor.batch():
        jobs = [executor.submit(SlurmJob(run, threads, force)) for run in runs]
    running = dict(enumerate(jobs))
    while running:
        for index, job in list(running.items()):
            if job.done():
                del running[index]
                yield index, _job_outcome(job.result, Exception, submitit.core.utils.FailedJobError)
        if running:
            time.sleep(0.5)


class SlurmJob:
    """Run that submitit can submit, and queue again after a timeout."""

    def __init__(self, run: GridRun, threads: int, force: bool) -> None:
        self.run = run
        self.threads = threads
        self.force = force

    def __call__(self) -> Outcome:
        """Execute the run."""
        return _execute_with_threads(self.run, self.threads, self.force)

    def checkpoint(self) -> Any:
        """Submission of the same run that resumes from its checkpoint; called by submitit."""
        helpers: Any = import_optional("submitit.helpers", "slurm", "--cluster slurm")
        return helpers.DelayedSubmission(SlurmJob(self.run, self.threads, False))


def _save_locally(
    runs: Sequence[GridRun], indexed_outcomes: Iterator[tuple[int, Outcome]]
) -> Iterator[tuple[int, Outcome]]:
    """Save results of machines that do not share a disk with this one."""
    for index, outcome in indexed_outcomes:
        folder = Path(runs[index].grid.out)
        if isinstance(outcome, Result) and not (folder / file_name(outcome.config)).exists():
            outcome.save(folder)
        yield index, outcome


def _job_outcome(
    get_result: Callable[[], Outcome], job_error: type[BaseException], run_error: type[BaseException]
) -> Outcome:
    """Result of a job; an error of the run becomes a RuntimeError, an error of its machine ``WorkerLost``."""
    try:
        return get_result()
    except job_error as error:
        message = f"its job has failed ({' '.join(str(error).split())[-300:]})"
        if isinstance(error, run_error):
            return RuntimeError(message)
        return WorkerLost(message)


def _execute_with_threads(run: GridRun, threads: int, force: bool) -> Outcome:
    torch.set_num_threads(threads)
    return execute(run, force)


def execute(run: Run[T], force: bool) -> T | Exception:
    """Execute a run; returns its result, or its error."""
    try:
        return run.run(force)
    except RUN_ERRORS as error:
        return error
