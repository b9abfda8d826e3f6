"""Executors of grid runs: in this process, in worker processes, or on a Ray or Slurm cluster."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from everlearn.experiments.grid import GridRun
from everlearn.experiments.parsing import UsageError
from everlearn.results.result import Result, file_name
from everlearn.runtime.distributed import world_size
from everlearn.runtime.optional_imports import import_optional
from everlearn.runtime.processes import end_with_parent
from everlearn.runtime.stdio import survive_closed_streams

Cluster = Literal["ray", "slurm"]
Outcome = Result | Exception
RUN_ERRORS = (  # errors of a single run, which do not stop the others
    ArithmeticError,
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
)
MAX_ATTEMPTS = 3  # for a run whose process dies


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
    elif workers > 1 and len(runs) > 1:
        yield from _run_in_processes(runs, workers, threads or 1, force)
    else:
        if threads is not None:
            torch.set_num_threads(threads)
        for index, run in enumerate(runs):
            # Under torchrun an error must end all processes: none of them may continue alone.
            if world_size() > 1:
                yield index, run.run(force)
            else:
                yield index, execute(run, force)


def _run_in_processes(
    runs: Sequence[GridRun], workers: int, threads: int, force: bool
) -> Iterator[tuple[int, Outcome]]:
    """Run in worker processes; a run whose process dies is tried again, the others are not affected."""
    context = _process_context()

    # A pool of one process per worker: if a process dies, only its own pool breaks.
    def start_worker() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, context, _init_worker, (threads,))

    pending = deque(range(len(runs)))
    attempts = Counter[int]()
    idle_workers = [start_worker() for _ in range(min(workers, len(runs)))]
    running: dict[Future[Outcome], tuple[ProcessPoolExecutor, int]] = {}
    try:
        while pending or running:
            while idle_workers and pending:
                worker = idle_workers.pop()
                index = pending.popleft()
                # A repeated attempt is not forced, so that it resumes from the last checkpoint.
                force_attempt = force and not attempts[index]
                running[worker.submit(execute, runs[index], force_attempt)] = worker, index

            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, index = running.pop(future)
                try:
                    outcome = future.result()
                    idle_workers.append(worker)
                except BrokenProcessPool:
                    worker.shutdown(wait=False)
                    idle_workers.append(start_worker())
                    attempts[index] += 1
                    if attempts[index] < MAX_ATTEMPTS:
                        pending.append(index)
                        continue
                    outcome = WorkerLost(
                        f"its process has died {MAX_ATTEMPTS} times, perhaps for lack of memory; repeat the command to "
                        "resume it, best with fewer --workers"
                    )
                yield index, outcome
    finally:
        # Also if the consumer stops iterating: start no further run and end those that are running.
        busy_workers = [worker for worker, _ in running.values()]
        for worker in busy_workers:
            for process in (worker._processes or {}).values():
                process.terminate()
        for worker in [*idle_workers, *busy_workers]:
            worker.shutdown(cancel_futures=True)


def _process_context() -> Any:
    """Start method of worker processes: forkserver where available, because forking an active torch may hang."""
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


def _init_worker(threads: int) -> None:
    """Set up a worker process, which ends with its parent and survives closed output streams."""
    survive_closed_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    end_with_parent()


def execute(run: GridRun, force: bool) -> Outcome:
    """Execute a run; returns its result, or its error."""
    try:
        return run.run(force)
    except RUN_ERRORS as error:
        return error
