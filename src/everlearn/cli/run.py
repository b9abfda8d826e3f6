"""The command ``everlearn run``, and the execution of runs that it shares with ``everlearn compare``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from tqdm.auto import tqdm

from everlearn.experiments.executors import outcomes
from everlearn.experiments.grid import GridRun, grid_runs
from everlearn.experiments.options import Grid
from everlearn.results.report.table import table
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable_lines


def run_grid(grid: Grid, dry_run: bool, force: bool) -> int:
    """Execute the runs of a grid, or only print them; returns the exit code."""
    runs = list(grid_runs(grid))
    if dry_run:
        print("\n".join(f"{number}. {run}" for number, run in enumerate(runs, 1)))
        return 0
    exit_code, results = execute_runs(runs, grid, force, print_results=True)
    if results:
        print("\n" + table(results))
    return exit_code


def execute_runs(runs: list[GridRun], grid: Grid, force: bool, print_results: bool) -> tuple[int, list[Result]]:
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
