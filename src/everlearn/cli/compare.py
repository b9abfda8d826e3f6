"""The command ``everlearn compare``: all methods on three problems with the embedded digits, as one table."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from everlearn.cli.options import CompareOptions
from everlearn.cli.run import execute_runs
from everlearn.core.chain import methods_of
from everlearn.core.method import Method
from everlearn.core.scenario import SCENARIOS, Scenario
from everlearn.core.stream import Stream
from everlearn.core.traits import traits_of
from everlearn.experiments.grid import GridRun, grid_runs, optimizer
from everlearn.experiments.options import Grid
from everlearn.experiments.parsing import look_up, split_list
from everlearn.methods import METHODS
from everlearn.results.report.overview import overview
from everlearn.trainer import run as train_on_stream


@dataclass(frozen=True)
class Problem:
    """A stream of the digits, and how many epochs its tasks need."""

    stream: str
    scenario: Scenario
    tasks: int
    epochs: int


# The longest runs come first, so that all workers end at about the same time.
PROBLEMS = (
    Problem("permuted-digits", "domain", tasks=5, epochs=4),
    Problem("disjoint-digits", "task", tasks=4, epochs=10),
    Problem("digits", "class", tasks=5, epochs=10),
)
# Digits have 64 pixels: 500 random features and a small generator are enough, and take far less time.
DIGITS_SETTINGS = {
    "ranpac": "ranpac.dimension=500",
    "klda": "klda.dimension=500",
    "generative": "generative.hidden=100",
}

# Time of all runs over the time of their steps: a complete run on two cores took 92 s, its steps were estimated at
# 44 s. The other time goes to workers that slow each other down, consolidation, tests and files.
TIME_PER_STEP_TIME = 2.1


def compare_methods(options: CompareOptions) -> int:
    """Run methods on the digits and print one table of all scenarios; returns the exit code."""
    runs = _make_runs(options)
    seconds = _estimate_seconds(runs)
    reuse_note = ""
    if not options.force and any(options.out.glob("*.json")):
        reuse_note = f", less what {options.out} already has"
    print(
        f"{len(runs)} runs with {options.workers} worker{'s' * (options.workers > 1)}: about "
        f"{_format_duration(seconds)}{reuse_note}.",
        file=sys.stderr,
    )
    exit_code, results = execute_runs(runs, runs[0].grid, options.force, print_results=False)
    if results:
        print(overview(results))
        print(f"\nThe results are in {options.out}; 'everlearn report {options.out}' shows more of them.")
    return exit_code


def _make_runs(options: CompareOptions) -> list[GridRun]:
    """Make the runs of all problems whose scenario was selected."""
    methods = options.methods
    if methods == "all":
        methods = ",".join(["joint", *METHODS])
    known_scenarios = {scenario: scenario for scenario in (*SCENARIOS, "all")}
    selected = {look_up("scenario", name, known_scenarios) for name in split_list(options.scenario)}

    runs: list[GridRun] = []
    for problem in PROBLEMS:
        if problem.scenario not in selected and "all" not in selected:
            continue
        grid = Grid(
            stream=problem.stream,
            scenario=problem.scenario,
            methods=methods,
            set=[setting for name, setting in DIGITS_SETTINGS.items() if name in split_list(methods)],
            tasks=problem.tasks,
            seeds=options.seeds,
            hidden="80,80",
            lr=0.005,
            batch_size=64,
            epochs=options.epochs or problem.epochs,
            threads=options.threads,
            workers=options.workers,
            out=options.out,
        )
        runs += grid_runs(grid)
    return runs


def _estimate_seconds(runs: Sequence[GridRun]) -> float:
    """Estimate the time of all runs from that of a few measured steps of fine-tuning and the traits of the methods."""
    step_time = 0.0
    num_steps: dict[str, int] = {}
    for run in runs:
        if run.stream not in num_steps:
            stream = run.build_stream()
            steps_per_epoch = sum(math.ceil(len(task.train) / run.grid.batch_size) for task in stream)
            num_steps[run.stream] = run.grid.num_epochs(stream) * steps_per_epoch
            step_time = step_time or _measure_training(run.grid, stream) / steps_per_epoch

    total_steps = sum(num_steps[run.stream] * _relative_step_time(run.method) for run in runs)
    num_workers = min(runs[0].grid.workers, len(runs))
    return TIME_PER_STEP_TIME * step_time * total_steps / num_workers


def _measure_training(grid: Grid, stream: Stream) -> float:
    """Measure the seconds that fine-tuning trains for one epoch on each task."""
    if grid.threads is not None:
        torch.set_num_threads(grid.threads)
    # The first steps of a process take longer, so that the second run is measured.
    for _ in range(2):
        result = train_on_stream(
            grid.model_factory,
            Method(),
            stream,
            optimizer=optimizer(grid),
            epochs=1,
            batch_size=grid.batch_size,
            progress=False,
        )
    seconds: float = result.cost["seconds"]["train"]
    return seconds


def _relative_step_time(method: Method) -> float:
    """Return the time of a training step relative to fine-tuning; a method that was not measured counts as 1."""
    relative_time = 1.0
    for member in methods_of(method):
        traits = traits_of(type(member))
        if traits is not None and traits.step is not None:
            relative_time += traits.step - 1
    return max(0.0, relative_time)


def _format_duration(seconds: float) -> str:
    """Format an estimate, which is not known to the second.

    >>> _format_duration(7.3), _format_duration(76.0), _format_duration(400.0)
    ('10 s', '80 s', '7 min')
    """
    if seconds < 120:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min"
