"""The commands ``everlearn run`` and ``everlearn compare``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from tqdm.auto import tqdm

from everlearn.cli.options import CompareOptions
from everlearn.experiments.executors import outcomes
from everlearn.experiments.grid import GridRun, grid_runs
from everlearn.experiments.options import Grid
from everlearn.methods import METHODS
from everlearn.results.report.table import overview, table
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable_lines

# Digits have 64 pixels: a thousand random features are enough, and take a tenth of the time of five thousand.
DIGITS_SETTINGS = {"ranpac": "ranpac.dimension=1000", "klda": "klda.dimension=1000"}


def compare_methods(options: CompareOptions) -> int:
    """Run methods on the digits and print one table of all scenarios; returns the exit code."""
    methods = options.methods
    if methods == "all":
        methods = ",".join(["joint", *METHODS])
    grid = Grid(
        stream="digits",
        methods=methods,
        set=[setting for name, setting in DIGITS_SETTINGS.items() if name in methods.split(",")],
        scenario=options.scenario,
        seeds=options.seeds,
        epochs=options.epochs,
        threads=options.threads,
        workers=options.workers,
        out=options.out,
    )
    exit_code, results = _execute_runs(list(grid_runs(grid)), grid, options.force, print_results=False)
    if results:
        print(overview(results))
        print(f"\nThe results are in {options.out}; 'everlearn report {options.out}' shows more of them.")
    return exit_code


def run_grid(grid: Grid, dry_run: bool, force: bool) -> int:
    """Execute the runs of a grid, or only print them; returns the exit code."""
    runs = list(grid_runs(grid))
    if dry_run:
        print("\n".join(f"{number}. {run}" for number, run in enumerate(runs, 1)))
        return 0
    exit_code, results = _execute_runs(runs, grid, force, print_results=True)
    if results:
        print("\n" + table(results))
    return exit_code


def _execute_runs(runs: list[GridRun], grid: Grid, force: bool, print_results: bool) -> tuple[int, list[Result]]:
    """Execute all runs; a failed run is reported and does not stop the others. Returns exit code and results."""
    results: dict[int, Result] = {}
    reported_errors: set[str] = set()
    start_time = datetime.now(UTC).isoformat(timespec="seconds")
    with tqdm(total=len(runs), desc="runs", unit="run", leave=False, disable=None) as bar:
        indexed_outcomes = outcomes(runs, grid.workers, grid.threads, force, grid.cluster)
        for num_ended, (index, outcome) in enumerate(indexed_outcomes, 1):
            bar.update()
            if isinstance(outcome, Exception):
                error = str(outcome)
                message = "as above." if error in reported_errors else error
                reported_errors.add(error)
                bar.write(printable_lines(f"everlearn: {runs[index]} failed: {message}"), file=sys.stderr)
                continue

            results[index] = outcome
            if print_results:
                note = _provenance_note(outcome, start_time)
                bar.write(f"[{num_ended}/{len(runs)}]{note} {outcome}", file=sys.stdout)
                sys.stdout.flush()
    exit_code = int(len(results) < len(runs))
    return exit_code, [results[index] for index in sorted(results)]


def _provenance_note(result: Result, start_time: str) -> str:
    """Whether a result was read from a file, or its run resumed from a checkpoint."""
    if result.provenance.get("time", "") < start_time:
        return " (read)"
    resumed_from = result.provenance.get("resumed_from")
    if resumed_from:
        return f" (resumed at {resumed_from})"
    return ""
