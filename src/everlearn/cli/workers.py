"""Many runs, one after the other or side by side in processes of their own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from everlearn.cli.names import UsageError
from everlearn.cli.plan import Cell
from everlearn.distributed import world
from everlearn.results import Result

FAILURES = (
    ArithmeticError,
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
)  # of one run, which leave the others in peace


def outcomes(
    todo: Sequence[Cell], workers: int = 1, threads: int | None = None, force: bool = False
) -> Iterator[tuple[int, Result | Exception]]:
    """Which run has ended and what came of it, as they end.

    Args:
        todo: the runs.
        workers: processes. Results are those of a single one, bit for bit.
        threads: that torch may use, each.
        force: do also what is done already.
    """
    if workers > 1 and world() > 1:
        raise UsageError(
            "--workers makes processes of its own: leave it out under torchrun, whose processes share every run."
        )
    if workers <= 1 or len(todo) <= 1:
        if threads is not None:
            torch.set_num_threads(threads)
        for i, cell in enumerate(todo):
            yield i, _outcome(cell, force)
        return
    fresh = multiprocessing.get_context("spawn")  # a forked torch may hang
    pool = ProcessPoolExecutor(min(workers, len(todo)), fresh, _begin, (threads or 1,))
    places = {pool.submit(_outcome, cell, force): i for i, cell in enumerate(todo)}
    left = set(places.values())
    try:
        for future in as_completed(places):
            outcome: Result | Exception
            try:
                outcome = future.result()
            except BrokenProcessPool:
                outcome = RuntimeError(
                    "a worker process has died, perhaps for lack of memory; the same command goes on, best with fewer --workers"
                )
            left.discard(places[future])
            yield places[future], outcome
    finally:  # also when the reader stops listening: no run is begun any more, and those that go on are ended
        going = list((pool._processes or {}).values()) if left else []
        pool.shutdown(wait=False, cancel_futures=True)
        for process in going:
            process.terminate()


def _begin(threads: int) -> None:
    """A worker ends with the command it belongs to, at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)


def _outcome(cell: Cell, force: bool) -> Result | Exception:
    try:
        return cell.run(force)
    except FAILURES as error:
        return error
