"""Study files: an Optuna study in SQLite that also stores the configuration it belongs to."""

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

from everlearn.core.chain import methods_of
from everlearn.runtime import files
from everlearn.tuning.search_space import Dimension, Value, first_values
from everlearn.tuning.start import Start

ENDED_STATES = ("COMPLETE", "PRUNED")
STUDY_FILE = "study.db"

# Names of attributes in the study file.
CONFIG_KEY = "question"
FIRST_VALUES_KEY = "first values"
QUEUED_KEY = "first values are queued"


@contextmanager
def open_study(
    optuna: Any, path: Path, dimensions: Sequence[Dimension], starts: Sequence[Start], trials: int
) -> Iterator[Any]:
    """Open or create a study; a study of another configuration, or one in use, raises."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with files.exclusive_lock(path.with_suffix(".lock")) as is_locked:
        if not is_locked:
            raise ValueError(f"Another process is using {path}: wait for it, or give another folder.")
        try:
            yield _prepare_study(optuna, path, dimensions, starts, trials)
        except optuna.exceptions.StorageInternalError as error:
            # Raised while the study is in use, too.
            raise _damaged_error(path, error.__cause__ or error) from error


def max_trials(dimensions: Sequence[Dimension], trials: int) -> int:
    """Maximum number of trials: that of all combinations if every field has a list of choices."""
    if all(dimension.choices for dimension in dimensions):
        return prod(len(dimension.choices) for dimension in dimensions)
    return trials


def _prepare_study(
    optuna: Any, path: Path, dimensions: Sequence[Dimension], starts: Sequence[Start], trials: int
) -> Any:
    """Open the study, check its configuration, set its sampler, and queue the first values of a new one."""
    config = json.dumps([_study_config(dimensions, start) for start in starts], sort_keys=True, default=str)
    study = _create_or_load(optuna, path)
    _check_config(study, path, config)
    # A resumed study needs another seed, or the sampler would propose the same values again.
    sampler_seed = starts[0].seed + len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=sampler_seed, n_startup_trials=max(1, trials // 2))
    if CONFIG_KEY not in study.user_attrs:
        study.set_user_attr(CONFIG_KEY, config)
    _queue_first_values(study, first_values(dimensions, trials))
    return study


def _queue_first_values(study: Any, values: Sequence[dict[str, Value]]) -> None:
    """Queue the values to try first; completed by a later call if the process was killed in between.

    Each value is queued by its own write. The list is stored before the first write, because a later call may have
    another number of trials, and its completion is stored after the last.
    """
    if study.user_attrs.get(QUEUED_KEY):
        return
    if FIRST_VALUES_KEY not in study.user_attrs:
        study.set_user_attr(FIRST_VALUES_KEY, list(values))
    for value in study.user_attrs[FIRST_VALUES_KEY]:
        study.enqueue_trial(value, skip_if_exists=True)
    study.set_user_attr(QUEUED_KEY, True)


def _storage(optuna: Any, path: Path) -> Any:
    """Storage of a file with any name: SQLite gets the path itself, as some characters have a meaning in URLs."""
    connect = partial(sqlite3.connect, path.absolute(), check_same_thread=False)
    return optuna.storages.RDBStorage(f"sqlite:///{STUDY_FILE}", engine_kwargs={"creator": connect})


def _create_or_load(optuna: Any, path: Path) -> Any:
    # The errors of a damaged database have many classes, and reading the content may fail, too.
    try:
        study = optuna.create_study(
            storage=_storage(optuna, path), study_name="everlearn", direction="maximize", load_if_exists=True
        )
        _ = study.trials
        _ = study.user_attrs
    except Exception as error:
        raise _damaged_error(path, error.__cause__ or error) from error
    return study


def _damaged_error(path: Path, error: BaseException) -> ValueError:
    reason = " ".join(str(getattr(error, "orig", error)).split())
    return ValueError(
        f"{path} is damaged, or its disk is full ({reason}): free disk space, or move the file away to start a new "
        "study."
    )


def _check_config(study: Any, path: Path, config: str) -> None:
    """Raise if a study was created by another program, or for another configuration."""
    # A study without trials may have been killed before its configuration was stored.
    stored_config = study.user_attrs.get(CONFIG_KEY, None if study.trials else config)
    if stored_config is None:
        raise ValueError(f"{path} is a study that everlearn has not created: give another folder, or move it away.")
    if stored_config != config:
        raise ValueError(f"{path} is a study of other data, settings or fields: give another folder, or move it away.")


def _study_config(dimensions: Sequence[Dimension], start: Start) -> dict[str, Any]:
    """Configuration of a study: everything but the tuned values, and the number of trials, which may grow."""
    config = start.config(start.method)
    tuned_fields = {(dimension.method_index, dimension.field) for dimension in dimensions}
    fixed_fields = [
        [
            type(method).__name__,
            {f.name: repr(getattr(method, f.name)) for f in fields(method) if (index, f.name) not in tuned_fields},
        ]
        for index, method in enumerate(methods_of(start.method))
    ]
    fingerprints = {name: digest for name, digest in config["fingerprints"].items() if name != "method"}
    other_entries = {name: entry for name, entry in config.items() if name not in ("method", "fields", "fingerprints")}
    return {
        "dimensions": [_dimension_text(dimension) for dimension in dimensions],
        "method": fixed_fields,
        "fingerprints": fingerprints,
        **other_entries,
    }


def _dimension_text(d: Dimension) -> str:
    """Text of a dimension in study files; changing it would make existing studies unusable."""
    return (
        f"Dimension(part={d.method_index}, field={d.field!r}, name={d.name!r}, search={d.search!r}, "
        f"words={d.options!r}, whole={d.is_integer})"
    )
