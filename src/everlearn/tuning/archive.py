"""The file a study lives in: an Optuna study in SQLite, which knows what it was asked."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from everlearn import atomic
from everlearn.method import parts
from everlearn.tuning.space import Dimension, Value, first_values
from everlearn.tuning.start import Start

ENDED = ("COMPLETE", "PRUNED")
STUDY_FILE = "study.db"
QUESTION, FIRST_VALUES, QUEUED = "question", "first values", "first values are queued"  # attributes of a study


@contextmanager
def study(optuna: Any, path: Path, at: Sequence[Dimension], starts: Sequence[Start], trials: int) -> Iterator[Any]:
    """The study of a file, new or gone on with; one of another question is refused, and one that somebody works at."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with atomic.alone(path.with_suffix(".lock")) as free:
        if not free:
            raise ValueError(f"Another process is at work on {path}: wait for it, or give another folder.")
        try:
            yield _ready(optuna, path, at, starts, trials)
        except optuna.exceptions.StorageInternalError as error:  # also of what is done with it
            raise _damaged(path, error.__cause__ or error) from error


def most(at: Sequence[Dimension], trials: int) -> int:
    """How many trials there are at most."""
    return prod(len(d.choices) for d in at) if all(d.choices for d in at) else trials


def _ready(optuna: Any, path: Path, at: Sequence[Dimension], starts: Sequence[Start], trials: int) -> Any:
    """The study, with a sampler, and in a new one the values that are tried first."""
    question = json.dumps([_question(at, start) for start in starts], sort_keys=True, default=str)
    found = _open(optuna, path)
    _check(found, path, question)
    found.sampler = optuna.samplers.TPESampler(
        seed=starts[0].training.seed + len(found.trials),  # gone on with, it proposes others than before
        n_startup_trials=max(1, trials // 2),
    )
    if QUESTION not in found.user_attrs:
        found.set_user_attr(QUESTION, question)
    _queue_first_values(found, first_values(at, trials))
    return found


def _queue_first_values(found: Any, values: Sequence[dict[str, Value]]) -> None:
    """Queue what is tried before anything is known, all of it, also where a process was killed while it did so.

    Each value is queued by a write of its own. The whole list is noted before the first of them, because a later call may ask for
    another number of trials, and that it is done after the last.
    """
    if found.user_attrs.get(QUEUED):
        return
    if FIRST_VALUES not in found.user_attrs:
        found.set_user_attr(FIRST_VALUES, list(values))
    for value in found.user_attrs[FIRST_VALUES]:
        found.enqueue_trial(value, skip_if_exists=True)
    found.set_user_attr(QUEUED, True)


def _storage(optuna: Any, path: Path) -> Any:
    """The storage of a file of any name: SQLite is given the path itself, as in a URL some characters mean something else."""
    connect = partial(sqlite3.connect, path.absolute(), check_same_thread=False)
    return optuna.storages.RDBStorage(f"sqlite:///{STUDY_FILE}", engine_kwargs={"creator": connect})


def _open(optuna: Any, path: Path) -> Any:
    try:
        found = optuna.create_study(
            storage=_storage(optuna, path), study_name="everlearn", direction="maximize", load_if_exists=True
        )
        _ = found.trials, found.user_attrs  # what is damaged is found now
    except Exception as error:  # of the database, whose kinds are its own, or of what it holds
        raise _damaged(path, error.__cause__ or error) from error
    return found


def _damaged(path: Path, error: BaseException) -> ValueError:
    why = " ".join(str(getattr(error, "orig", error)).split())
    return ValueError(
        f"{path} is not a whole study, or has no room on its disk ({why}): make room, or move it away to begin anew."
    )


def _check(found: Any, path: Path, question: str) -> None:
    before = found.user_attrs.get(QUESTION, None if found.trials else question)
    if before is None:
        raise ValueError(f"{path} is a study that everlearn has not made: give another folder, or move it away.")
    if before != question:
        raise ValueError(f"{path} is a study of other data, settings or fields: give another folder, or move it away.")


def _question(at: Sequence[Dimension], start: Start) -> dict[str, Any]:
    """What is asked: everything but the values of what is tuned, and the number of trials, which may grow."""
    config = start.config(start.method)
    tuned = {(d.part, d.field) for d in at}
    others = [
        [type(m).__name__, {f.name: repr(getattr(m, f.name)) for f in fields(m) if (i, f.name) not in tuned}]
        for i, m in enumerate(parts(start.method))
    ]
    prints = {name: word for name, word in config["fingerprints"].items() if name != "method"}
    rest = {name: fact for name, fact in config.items() if name not in ("method", "fields", "fingerprints")}
    return {"dimensions": [repr(d) for d in at], "method": others, "fingerprints": prints, **rest}
