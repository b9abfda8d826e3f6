"""Many runs, one after the other or side by side in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from everlearn.cli.plan import Cell
from everlearn.results import Result

FAILURES = (ArithmeticError, ValueError, TypeError, RuntimeError)  # of one run, which leave the others in peace


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
    if workers <= 1 or len(todo) <= 1:
        _start(threads)
        for i, cell in enumerate(todo):
            yield i, _outcome(cell, force)
        return
    fresh = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(min(workers, len(todo)), fresh, _start, (threads or 1,)) as pool:
        places = {pool.submit(_outcome, cell, force): i for i, cell in enumerate(todo)}
        try:
            for future in as_completed(places):
                yield places[future], future.result()
        except BrokenProcessPool:
            raise RuntimeError(
                "A worker process has died, perhaps for lack of memory. Finished runs are kept; go on with fewer --workers."
            ) from None
        finally:  # also when the reader stops listening
            pool.shutdown(wait=False, cancel_futures=True)


def _start(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _outcome(cell: Cell, force: bool) -> Result | Exception:
    try:
        return cell.run(force)
    except FAILURES as error:
        return error
