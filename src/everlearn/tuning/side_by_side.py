"""Trials side by side, each in a process of its own that begins where the first task is learned."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from everlearn.orphans import end_with_parent

Report = Callable[[float, int], bool]  # the score so far and the step; whether to give up
Learn = Callable[[Any, Report], dict[str, Any]]  # of values
TRIES = 3  # for a trial whose process dies


class Lost(OSError):
    """A process is gone, or its machine, which says nothing about what it did: the same command goes on with that."""


class Running(NamedTuple):
    """A trial under way."""

    trial: Any
    values: Any
    process: Any
    tries: int


def side_by_side(
    propose: Callable[[], tuple[Any, Any] | None],
    learn: Learn,
    hopeless: Callable[[Any, float, int], bool],
    workers: int,
) -> Iterator[tuple[Any, dict[str, Any] | Lost]]:
    """Trials and what came of each, as they end; ``Lost`` where its process dies again and again.

    Processes are forked, so that all share the memory of what was learned before them.

    Args:
        propose: the next trial and its values, None when there are enough.
        learn: what a process does with the values.
        hopeless: whether a trial with this score at this step is given up.
        workers: processes at a time.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise ValueError(
            "Trials side by side are forked, which this system, or a process that uses a GPU, cannot: workers=1."
        )
    context, running = multiprocessing.get_context("fork"), {}

    def begin(trial: Any, values: Any, tries: int) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, learn, values))
        process.start()
        theirs.close()
        running[ours] = Running(trial, values, process, tries)

    try:
        while True:
            while len(running) < workers and (proposed := propose()) is not None:
                begin(*proposed, 1)
            if not running:
                return
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                one = running[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    del running[pipe]
                    if one.tries < TRIES:
                        begin(one.trial, one.values, one.tries + 1)
                    else:
                        yield one.trial, Lost(f"its process has died {TRIES} times, perhaps for lack of memory")
                    continue
                if kind == "so far":
                    verdict = hopeless(one.trial, *content)
                    with suppress(OSError):  # it has died meanwhile, as the next look at its pipe tells
                        pipe.send(verdict)
                    continue
                del running[pipe]
                one.process.join()
                if kind == "error":
                    raise content
                yield one.trial, content
    finally:
        for one in running.values():
            one.process.terminate()


def _work(pipe: Connection, learn: Learn, values: Any) -> None:
    torch.set_num_threads(1)  # the others have the other cores
    end_with_parent()

    def report(score: float, step: int) -> bool:
        pipe.send(("so far", (score, step)))
        return bool(pipe.recv())

    try:
        pipe.send(("ended", learn(values, report)))
    except Exception as error:  # noqa: BLE001 - raised where somebody listens
        pipe.send(("error", error))
