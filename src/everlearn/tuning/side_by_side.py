"""Run trials in worker processes that are forked after the first task is trained."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from everlearn.experiments.executors import WorkerLost
from everlearn.runtime.processes import end_with_parent

ReportScore = Callable[[float, int], bool]  # (score, step) -> whether to prune
TrainTrial = Callable[[Any, ReportScore], dict[str, Any]]
MAX_ATTEMPTS = 3  # for a trial whose process dies


class RunningTrial(NamedTuple):
    """A trial in a worker process."""

    trial: Any
    values: Any
    process: Any
    attempts: int


def run_in_processes(
    propose: Callable[[], tuple[Any, Any] | None],
    train: TrainTrial,
    should_prune: Callable[[Any, float, int], bool],
    workers: int,
) -> Iterator[tuple[Any, dict[str, Any] | WorkerLost]]:
    """Run trials in processes; yields each with its outcome as it ends, ``WorkerLost`` if its process dies repeatedly.

    Processes are forked, so that they share the memory of the trained first task.

    Args:
        propose: returns the next trial and its values, or None when there are enough.
        train: called with the values in a worker process.
        should_prune: called with a trial, its score and its step.
        workers: maximum number of processes at a time.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise ValueError(
            "Several workers are forked, which is not possible on this system, or in a process that uses a GPU: set "
            "workers=1."
        )
    context = multiprocessing.get_context("fork")
    running: dict[Any, RunningTrial] = {}

    def start_process(trial: Any, values: Any, attempts: int) -> None:
        parent_pipe, child_pipe = context.Pipe()
        process = context.Process(target=_run_worker, args=(child_pipe, train, values))
        process.start()
        child_pipe.close()
        running[parent_pipe] = RunningTrial(trial, values, process, attempts)

    try:
        while True:
            while len(running) < workers:
                proposed = propose()
                if proposed is None:
                    break
                start_process(*proposed, 1)
            if not running:
                return

            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                current = running[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    # The process has died.
                    del running[pipe]
                    if current.attempts < MAX_ATTEMPTS:
                        start_process(current.trial, current.values, current.attempts + 1)
                    else:
                        message = f"its process has died {MAX_ATTEMPTS} times, perhaps for lack of memory"
                        yield current.trial, WorkerLost(message)
                    continue

                if kind == "score":
                    is_pruned = should_prune(current.trial, *content)
                    # If the process has died meanwhile, the next read from its pipe fails.
                    with suppress(OSError):
                        pipe.send(is_pruned)
                    continue

                del running[pipe]
                current.process.join()
                if kind == "error":
                    raise content
                yield current.trial, content
    finally:
        for current in running.values():
            current.process.terminate()


def _run_worker(pipe: Connection, train: TrainTrial, values: Any) -> None:
    # The other workers use the other cores.
    torch.set_num_threads(1)
    end_with_parent()

    def report_score(score: float, step: int) -> bool:
        pipe.send(("score", (score, step)))
        return bool(pipe.recv())

    try:
        pipe.send(("ended", train(values, report_score)))
    except Exception as error:  # noqa: BLE001 - raised again in the parent process
        pipe.send(("error", error))
