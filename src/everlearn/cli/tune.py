"""The command ``everlearn tune``: a study per stream, scenario and method, with a YAML file of the best values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from everlearn.cli.options import TuneGrid, TuneOptions
from everlearn.core.chain import label, methods_of
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.experiments.executors import Outcome, outcomes
from everlearn.experiments.grid import GridRun, grid_runs, optimizer
from everlearn.experiments.parsing import UsageError, look_up, parse_settings, split_list
from everlearn.methods import METHODS
from everlearn.results.report.table import align_columns
from everlearn.results.result import format_score, slugify
from everlearn.runtime import files
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.settings import Training
from everlearn.tuning import Trial, Tuned, WorkerLost, tune
from everlearn.tuning.plot import png
from everlearn.tuning.search_space import SearchRange

# Options of the search, which the YAML file of the best values leaves out.
SEARCH_OPTIONS = {
    "stream",
    "scenario",
    "set",
    "valid",
    "out",
    "data",
    "workers",
    "cluster",
    "time_limit",
    "partition",
    "track",
    "seeds",
}
FieldRanges = dict[str, dict[str, SearchRange]]  # by class name and field


def run_studies(grid: TuneGrid, options: TuneOptions) -> None:
    """Run a study for every stream, scenario and method of the grid; scores are averaged over seeds."""
    if grid.threads is not None:
        torch.set_num_threads(grid.threads)
    if grid.track:
        raise UsageError("Trials are not tracked: leave --track out.")
    if grid.cluster and grid.workers == 1:
        raise UsageError("Give the number of trials to run on the cluster at a time, as in --workers 8.")
    runs = [run for run in grid_runs(grid) if run.seed == 0]
    if any(run.joint for run in runs):
        raise UsageError("'joint' has no strength to tune: name methods, as in --methods ewc,si.")

    field_ranges = _parse_fields(options.fields)
    class_names = {type(method).__name__ for run in runs for method in methods_of(run.method)}
    unused_names = set(field_ranges) - class_names
    if unused_names:
        raise UsageError(
            f"--fields names {', '.join(sorted(unused_names))}, which is not among the methods ({grid.methods})."
        )

    lost_studies = []
    for run in runs:
        run = replace(run, num_first_tasks=options.first)
        streams = [replace(run, seed=seed).build_stream() for seed in range(grid.seeds)]
        folder = grid.out / slugify(run.stream, run.scenario, label(run.method))
        try:
            tuned = _run_study(run, streams, options, field_ranges, folder)
        except WorkerLost as error:
            # The other studies may still succeed.
            lost_studies.append(f"{_study_name(run)}: {error}")
            continue
        _report_study(run, tuned, streams[0].test_tasks[0].likelihood.score_name, folder)
    if lost_studies:
        raise WorkerLost("\n".join(lost_studies))


def _report_study(run: GridRun, tuned: Tuned, score_name: str, folder: Path) -> None:
    """Write the best values and the plot of a study, and print its trials."""
    best_file = folder / "best.yaml"
    plot_file = folder / "trade-off.png"
    files.write(best_file, _best_config(run, tuned).encode())
    files.write(plot_file, png(tuned))

    print(f"{_study_name(run)}: averages on validation data, best first")
    print(_trials_table(tuned, score_name))
    print(f"\nThe trade-off plot is {plot_file}, the runs are in {folder / 'trials'}.")
    for dimension in tuned.dimensions:
        range_ends = (dimension.search.low, dimension.search.high)
        if not dimension.options and tuned.best.values[dimension.name] in range_ends:
            print(f"The best {dimension.name} is at an end of its range: extend the range with --fields.")
    data_option = "" if run.grid.data is None else f" --data {run.grid.data}"
    print(f"On test data: everlearn run {best_file}{data_option}\n")


def _study_name(run: GridRun) -> str:
    return f"{run.stream}, {run.scenario}-incremental, {label(run.method)}"


def _run_study(
    run: GridRun, streams: list[Stream], options: TuneOptions, field_ranges: FieldRanges, folder: Path
) -> Tuned:
    grid = run.grid
    class_names = dict.fromkeys(type(method).__name__ for method in methods_of(run.method))
    study_fields = {
        f"{class_name}.{field}": search_range
        for class_name in class_names
        for field, search_range in field_ranges.get(class_name, {}).items()
    }
    training = Training(
        grid.num_epochs(streams[0]),
        grid.iterations,
        grid.batch_size,
        0,
        None,
        grid.clip,
        grid.accumulate,
        grid.precision,
        None,
    )
    run_remotely = None
    if grid.cluster is not None:
        run_remotely = partial(_run_on_cluster, run, folder / "trials")
    # Without a terminal there is no bar: print a line per trial.
    on_trial = None if sys.stderr.isatty() else _print_trial
    return tune(
        grid.model_factory,
        run.method,
        streams.__getitem__,
        fields=study_fields or None,
        trials=options.trials,
        seeds=grid.seeds,
        prune=options.prune,
        training=training,
        optimizer=optimizer(grid),
        keep_optimizer=grid.keep_optimizer,
        device=grid.device,
        out=folder,
        workers=grid.workers,
        run_remotely=run_remotely,
        checkpoint=CheckpointEvery(grid.checkpoint_steps, grid.checkpoint_minutes),
        on_trial=on_trial,
    )


def _run_on_cluster(
    run: GridRun, folder: Path, methods_and_seeds: Sequence[tuple[Method, int]]
) -> Iterator[tuple[int, Outcome]]:
    grid = run.grid.model_copy(update={"out": folder})
    trial_runs = [replace(run, grid=grid, method=method, seed=seed) for method, seed in methods_and_seeds]
    return outcomes(trial_runs, grid.workers, grid.threads, cluster=grid.cluster)


def _print_trial(number: int, num_trials: int, trial: Trial) -> None:
    print(f"trial {number} of {num_trials}: {trial}", file=sys.stderr, flush=True)


def _parse_fields(text: str) -> FieldRanges:
    """Parse fields such as ``ewc.strength=1:1e9`` by class name and field; None is the default range."""
    field_ranges: FieldRanges = {}
    for item in split_list(text):
        path, equals, range_text = item.partition("=")
        if "." not in path:
            raise UsageError(f"A field is named METHOD.FIELD, as in ewc.strength; got {path!r}.")
        # Parsing a setting raises if there is no such field.
        parse_settings([f"{path}=0"])

        method_name, _, field = path.strip().partition(".")
        low, _, high = range_text.partition(":")
        search_range: SearchRange = None
        if equals:
            try:
                search_range = (float(low), float(high))
            except ValueError:
                raise UsageError(f"A range reads LOW:HIGH, as in ewc.strength=1:1e9; got {item!r}.") from None
        class_name = look_up("method", method_name, METHODS).__name__
        field_ranges.setdefault(class_name, {})[field] = search_range
    return field_ranges


def _best_config(run: GridRun, tuned: Tuned) -> str:
    """YAML file for ``everlearn run`` with the best values and the training settings of the study."""
    method_names = {method_class: name for name, method_class in METHODS.items()}
    methods = methods_of(tuned.method)
    settings = {}
    for method in methods:
        changed_fields = _changed_fields(method)
        if changed_fields:
            settings[method_names[type(method)]] = changed_fields

    config = {
        "stream": run.stream,
        "scenario": run.scenario,
        **run.grid.model_dump(mode="json", exclude=SEARCH_OPTIONS),
        "methods": "+".join(method_names[type(method)] for method in methods),
    }
    config = {key: value for key, value in config.items() if value is not None}
    header = f"# Found by everlearn tune: {tuned.best}, on validation data.\n"
    return header + yaml.safe_dump({**config, "set": settings}, sort_keys=False)


def _changed_fields(method: Method) -> dict[str, Any]:
    """Fields of a method that differ from their defaults."""
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    return {field.name: values[field.name] for field in fields(method) if values[field.name] != field.default}


def _trials_table(tuned: Tuned, score_name: str) -> str:
    """Table of all trials, best first, failed ones last."""
    rows = [[*tuned.best.values, f"average {score_name}", "old tasks", "new tasks", ""]]
    for trial in sorted(tuned.trials, key=lambda trial: (trial.score is None, -(trial.score or 0))):
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.values.values()]
        scores = (trial.score, trial.old, trial.new)
        score_texts = ["–" if score is None else format_score(score, score_name) for score in scores]
        rows.append([*values, *score_texts, trial.failure.split(":")[0]])
    return align_columns(rows)
