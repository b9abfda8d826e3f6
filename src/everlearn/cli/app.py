"""The commands of ``everlearn``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, CycloptsError, Parameter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm.auto import tqdm

from everlearn.cli.advise import AdviseOptions, print_advice
from everlearn.cli.list import print_lists, print_method
from everlearn.cli.reproduce import ReproduceOptions, reproduce_tables
from everlearn.cli.tune import TuneGrid, TuneOptions, run_studies
from everlearn.cli.update import Updating, give_update
from everlearn.experiments.executors import outcomes
from everlearn.experiments.grid import Grid, GridRun, grid_runs, read_grid
from everlearn.experiments.parsing import UsageError, explain
from everlearn.methods import METHODS
from everlearn.results.report.serve import create_server
from everlearn.results.report.table import overview, table
from everlearn.results.report.write import Format, write
from everlearn.results.result import Result, result_files
from everlearn.runtime.escaping import printable, printable_lines

app = App(
    name="everlearn",
    help="Continual learning: train a model on one task after the other without forgetting.\n\n"
    "Start with 'everlearn compare', which runs every method on handwritten digits in all three scenarios. "
    "'everlearn advise' asks a few questions and lists the methods that fit.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # start() handles it
)


class CompareOptions(BaseModel):
    """Options of ``everlearn compare``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    methods: str = Field("all", description="Methods, separated by commas, or 'all'.")
    scenario: str = Field("all", description="Any of task, domain, class, separated by commas, or 'all'.")
    seeds: int = Field(1, ge=1, description="Number of seeds, starting at 0; several give a standard deviation.")
    epochs: int | None = Field(None, ge=1, description="Epochs per task; default: 10.")
    workers: int = Field(1, ge=1, description="Number of worker processes.")
    threads: int = Field(1, ge=1, description="Number of torch threads; small models are fastest with 1.")
    out: Path = Field(Path("runs/compare"), description="Folder of the results; existing results are reused ...")
    force: bool = Field(False, description="... unless this is set.")


@app.command
def compare(*, options: Annotated[CompareOptions, Parameter(name="*")] = CompareOptions()) -> int:  # noqa: B008
    """Compare all methods on handwritten digits in all three scenarios, as one table. Takes a few minutes.

    Five tasks of two digits each are learned one after the other. 'joint' learns them all at once and is the upper
    bound; 'finetune' does nothing against forgetting and is the lower bound.

    Args:
        options: What to compare.
    """
    methods = options.methods
    if methods == "all":
        methods = ",".join(["joint", *METHODS])
    grid = Grid(
        stream="digits",
        methods=methods,
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


@app.command
def advise(*, options: Annotated[AdviseOptions, Parameter(name="*")] = AdviseOptions()) -> int:  # noqa: B008
    """List the methods that fit a project, best first, with measured results, and reasons against the others.

    On a terminal, options that are not given are asked for; otherwise they are not taken into account. Each result is
    quoted with the published table whose protocol it follows; 'everlearn reproduce' runs it again.

    For example: everlearn advise --scenario class --keep-data no --tasks 10

    Args:
        options: Constraints of the project.
    """
    return print_advice(options)


@app.command
def run(
    config: Path | None = None,
    *,
    grid: Annotated[Grid, Parameter(name="*")] = Grid(),  # noqa: B008 - a frozen model is a safe default
    dry_run: bool = False,
    force: bool = False,
) -> int:
    """Run methods on streams: streams × scenarios × methods × seeds, one result file each.

    For example: ``everlearn run --scenario all --methods finetune,l2,l2+freeze,joint --set l2.strength=0.1 --seeds 5``

    Args:
        config: YAML file with the options below as keys; options given on the command line win.
        grid: What to run and how.
        dry_run: Only print what would be run.
        force: Repeat runs whose results exist.
    """
    if config is not None:
        grid = read_grid(config, grid)
    runs = list(grid_runs(grid))
    if dry_run:
        print("\n".join(f"{number}. {run}" for number, run in enumerate(runs, 1)))
        return 0
    exit_code, results = _execute_runs(runs, grid, force, print_results=True)
    if results:
        print("\n" + table(results))
    return exit_code


@app.command
def reproduce(
    table: str,
    *,
    options: Annotated[ReproduceOptions, Parameter(name="*")] = ReproduceOptions(),  # noqa: B008
) -> int:
    """Run the protocol of a published table and print published and measured numbers side by side.

    A cell counts as reproduced if the mean over seeds is within the larger of 1.5 points and two published standard
    deviations. Repeat the command to resume runs that were stopped.

    Args:
        table: Name of the table, as listed by 'everlearn list', or 'all'.
        options: Cells, number of seeds, and folders.
    """
    return reproduce_tables(table, options)


@app.command
def tune(
    config: Path | None = None,
    *,
    grid: Annotated[TuneGrid, Parameter(name="*")] = TuneGrid(),  # noqa: B008
    options: Annotated[TuneOptions, Parameter(name="*")] = TuneOptions(),  # noqa: B008
) -> int:
    """Tune the strength of a method, or other fields, on validation data held out from training.

    For example: everlearn tune --methods ewc,si --stream split-mnist --scenario domain --iterations 500 --trials 16

    Half of the trials are spread evenly over the range, the others refine the promising parts; values of several fields
    are proposed by Optuna. The first task is trained once for all trials if the field acts only after it, as the
    strength of a penalty does. Repeat the command to resume a study that was stopped.

    Args:
        config: YAML file with the options of 'everlearn run' as keys; options given on the command line win.
        grid: Streams, methods, and training settings.
        options: Fields to tune, and number of trials.
    """
    if config is not None:
        grid = read_grid(config, grid)
    if grid.threads is not None:
        torch.set_num_threads(grid.threads)
    run_studies(grid, options)
    return 0


@app.command
def update(*, options: Annotated[Updating, Parameter(name="*")]) -> int:
    """Train a deployed model on new data, and replace it only if it has not forgotten too much.

    For example: everlearn update --model shop.models:make_model --weights model.safetensors --state state
    --data new.parquet --method er

    The state folder holds the state of the method and a held-out set of every update. In the first update, --old gives
    data of what the model has learned before. Exit codes: 0 accepted; 1 failed; 2 wrong usage; 3 refused, because the
    accuracy on old held-out sets fell by more than the tolerance, and nothing was replaced. If the process is killed,
    model and state are complete, from before or after the update; repeat the command to resume.

    Args:
        options: Model, data, method, and by how much old accuracy may fall.
    """
    return give_update(options)


@app.command
def report(folder: Path, *, format: Format = "html", out: Path | None = None) -> int:
    """Print the results of a folder as tables, and write a report that any browser opens offline.

    Args:
        folder: Folder of results of 'everlearn run' or 'everlearn compare'.
        format: html, a page; md, Markdown tables; csv, a line per run; png, the main plots; text, print tables only.
        out: File to write; default: 'report' in the folder.
    """
    results = []
    exit_code = 0
    for path in result_files(folder):
        try:
            results.append(Result.load(path))
        except (ValueError, OSError) as error:
            exit_code = _print_error(str(error), 1)
    if results:
        print(table(results))
    if results and format != "text":
        report_file = write(results, format, out or folder / f"report.{format}", str(folder))
        print(f"\nWrote {report_file}.")
    return exit_code


@app.command
def watch(folder: Path, *, port: int = 0, refresh: Annotated[int, Field(ge=1)] = 10) -> int:
    """Serve the report of a folder on this machine, updated while runs are in progress; Ctrl-C ends it.

    Args:
        folder: Folder of results, which may still be empty.
        port: Port to serve on; 0 selects a free one.
        refresh: Seconds after which the page reloads.
    """
    with create_server(folder, port, refresh) as page:
        print(f"The report of {printable(str(folder))} is at {page.url} (Ctrl-C to end).", flush=True)
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


@app.command(name="list")
def list_everything() -> int:
    """List the methods, streams, models and published tables."""
    print_lists()
    return 0


@app.command
def show(method: str) -> int:
    """Show a method: description, formula, paper, fields and their defaults.

    Args:
        method: Name of the method, as listed by 'everlearn list'.
    """
    print_method(method)
    return 0


def start(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    # A terminal that cannot print ± shows a question mark, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return app(arguments or ["--help"], exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        if isinstance(error.__cause__, ValidationError):
            return _print_error(explain(error.__cause__), 2)
        return _print_error(str(error), 2)
    except ValidationError as error:
        return _print_error(explain(error), 2)
    except UsageError as error:
        return _print_error(str(error), 2)
    except (OSError, ValueError, TypeError, ImportError) as error:
        return _print_error(str(error), 1)
    except KeyboardInterrupt:
        return _print_error("Stopped. Finished runs are kept; repeat the command to resume.", 130)


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


def _print_error(message: str, exit_code: int) -> int:
    print(printable_lines(f"everlearn: {message}"), file=sys.stderr)
    return exit_code
