"""Many runs: one after the other, side by side in processes of their own, or on a cluster."""

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

from everlearn.cli.names import UsageError
from everlearn.cli.plan import Cell
from everlearn.distributed import world
from everlearn.extras import needs
from everlearn.orphans import end_with_parent
from everlearn.results import Result, file_name
from everlearn.stdio import survive_closed_streams
from everlearn.tuning import Lost

Cluster = Literal["ray", "slurm"]
Outcome = Result | Exception
FAILURES = (
    ArithmeticError,
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
)  # of one run, which leave the others in peace
TRIES = 3  # for a run whose process dies; each goes on from its last checkpoint


def outcomes(
    todo: Sequence[Cell],
    workers: int = 1,
    threads: int | None = None,
    force: bool = False,
    cluster: Cluster | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Which run has ended and what came of it, as they end; ``Lost`` where its process or its machine has failed.

    Args:
        todo: the runs.
        workers: processes. Results are those of a single one, bit for bit.
        threads: that torch may use, each.
        force: do also what is done already.
        cluster: where to run instead; there workers are at most so many jobs at a time, and 1 stands for what fits.
    """
    if (workers > 1 or cluster) and world() > 1:
        raise UsageError(
            "--workers and --cluster make processes of their own: leave them out under torchrun, whose processes share every run."
        )
    if not todo:
        return
    if cluster is not None:
        on = {"ray": _on_ray, "slurm": _on_slurm}[cluster]
        yield from _brought_home(todo, on(todo, workers, threads or 1, force))
    elif workers > 1 and len(todo) > 1:
        yield from _side_by_side(todo, workers, threads or 1, force)
    else:
        if threads is not None:
            torch.set_num_threads(threads)
        for i, cell in enumerate(todo):
            # Of several processes none may go on alone: an error ends them all.
            yield i, outcome_of(cell, force) if world() == 1 else cell.run(force)


def _side_by_side(todo: Sequence[Cell], workers: int, threads: int, force: bool) -> Iterator[tuple[int, Outcome]]:
    """A process each for as many runs as there are workers; one that dies costs its own run alone, which is tried again."""
    fresh = _fresh()

    def process() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, fresh, _begin, (threads,))

    waiting, tries = deque(range(len(todo))), Counter[int]()
    free = [process() for _ in range(min(workers, len(todo)))]
    running: dict[Future[Outcome], tuple[ProcessPoolExecutor, int]] = {}
    try:
        while waiting or running:
            while free and waiting:
                pool, i = free.pop(), waiting.popleft()
                running[pool.submit(outcome_of, todo[i], force and not tries[i])] = pool, i
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, i = running.pop(future)
                try:
                    outcome = future.result()
                    free.append(pool)
                except BrokenProcessPool:
                    pool.shutdown(wait=False)
                    free.append(process())
                    tries[i] += 1
                    if tries[i] < TRIES:
                        waiting.append(i)
                        continue
                    outcome = Lost(
                        f"its process has died {TRIES} times, perhaps for lack of memory; the same command goes on, best with "
                        "fewer --workers"
                    )
                yield i, outcome
    finally:  # also when the reader stops listening: no run is begun any more, and those that go on are ended
        busy = [pool for pool, _ in running.values()]
        for one in [process for pool in busy for process in (pool._processes or {}).values()]:
            one.terminate()
        for pool in [*free, *busy]:
            pool.shutdown(cancel_futures=True)


def _fresh() -> Any:
    """How processes begin: a torch that was at work may hang when it is forked, so from one that has only been imported."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # which not every system has

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Python puts the working folder first for a process that it starts with -c: a numpy.py beside the data would be run.
    given = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = given
    return context


def _on_ray(todo: Sequence[Cell], workers: int, threads: int, force: bool) -> Iterator[tuple[int, Outcome]]:
    """On the Ray cluster that RAY_ADDRESS names, or one of this machine alone."""
    ray: Any = needs("ray", "ray", "--cluster ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    # Forced, a second try would begin anew; a GPU is asked for where one is used.
    needs_gpu = todo[0].plan.device.startswith("cuda")
    job = ray.remote(num_cpus=threads, num_gpus=int(needs_gpu), max_retries=0 if force else TRIES - 1)(_with_threads)
    waiting = deque(range(len(todo)))
    running: dict[Any, int] = {}
    while waiting or running:
        while waiting and (workers == 1 or len(running) < workers):
            i = waiting.popleft()
            running[job.remote(todo[i], threads, force)] = i
        done, _ = ray.wait(list(running))
        for one in done:
            yield running.pop(one), _result(partial(ray.get, one), ray.exceptions.RayError, ray.exceptions.RayTaskError)


def _on_slurm(todo: Sequence[Cell], workers: int, threads: int, force: bool) -> Iterator[tuple[int, Outcome]]:
    """As an array of Slurm jobs; one that is put off or runs out of time is queued again and goes on from its last checkpoint."""
    submitit: Any = needs("submitit", "slurm", "--cluster slurm")
    if shutil.which("srun") is None:
        raise UsageError(
            "--cluster slurm: there is no Slurm here (srun is not found): call it where jobs are submitted."
        )
    plan = todo[0].plan
    executor = submitit.AutoExecutor(folder=plan.out.resolve() / "slurm", slurm_max_num_timeout=100)
    executor.update_parameters(name="everlearn", cpus_per_task=threads, timeout_min=plan.time_limit)
    if executor.cluster == "slurm":
        if plan.device.startswith("cuda"):
            executor.update_parameters(gpus_per_node=1)
        executor.update_parameters(
            slurm_partition=plan.partition, slurm_array_parallelism=workers if workers > 1 else 256
        )
    with executor.batch():
        jobs = [executor.submit(Job(cell, threads, force)) for cell in todo]
    left = dict(enumerate(jobs))
    while left:
        for i, job in list(left.items()):
            if job.done():
                yield i, _result(left.pop(i).result, Exception, submitit.core.utils.FailedJobError)
        time.sleep(0.5 if left else 0)


class Job:
    """A run as submitit takes it, which knows how it is queued again."""

    def __init__(self, cell: Cell, threads: int, force: bool) -> None:
        self.cell, self.threads, self.force = cell, threads, force

    def __call__(self) -> Outcome:
        """Do it."""
        return _with_threads(self.cell, self.threads, self.force)

    def checkpoint(self) -> Any:
        """The same again, which goes on."""
        helpers: Any = needs("submitit.helpers", "slurm", "--cluster slurm")
        return helpers.DelayedSubmission(Job(self.cell, self.threads, False))


def _brought_home(todo: Sequence[Cell], outcomes: Iterator[tuple[int, Outcome]]) -> Iterator[tuple[int, Outcome]]:
    """Results of machines that may not share a disk with this one."""
    for i, outcome in outcomes:
        if isinstance(outcome, Result) and not (Path(todo[i].plan.out) / file_name(outcome.config)).exists():
            outcome.save(todo[i].plan.out)
        yield i, outcome


def _result(get: Callable[[], Outcome], failure: type[BaseException], own: type[BaseException]) -> Outcome:
    """What a job has given; of failures those of the run's own code are told from those of its machine."""
    try:
        return get()
    except failure as error:
        kind = RuntimeError if isinstance(error, own) else Lost
        return kind(f"its job has failed ({' '.join(str(error).split())[-300:]})")


def _with_threads(cell: Cell, threads: int, force: bool) -> Outcome:
    torch.set_num_threads(threads)
    return outcome_of(cell, force)


def _begin(threads: int) -> None:
    """A worker ends with the command it belongs to, in whatever way that ends, and does not mind who reads it."""
    survive_closed_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    end_with_parent()


def outcome_of(cell: Cell, force: bool) -> Outcome:
    """What comes of a run."""
    try:
        return cell.run(force)
    except FAILURES as error:
        return error
