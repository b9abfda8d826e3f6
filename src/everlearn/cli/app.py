"""The commands of ``everlearn``, each of which imports what it needs when it runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from pydantic import Field, ValidationError

from everlearn.cli.options import (
    AdviseOptions,
    CompareOptions,
    ReportFormat,
    ReproduceOptions,
    TuneGrid,
    TuneOptions,
    Updating,
)
from everlearn.experiments.options import Grid, read_grid
from everlearn.experiments.parsing import UsageError, explain
from everlearn.runtime.escaping import printable_lines

# Options are frozen, so that an instance is a safe default. It is constructed without a validator, which takes longer
# to build than the help text.
app = App(
    name="everlearn",
    help="Continual learning: train a model on one task after the other without forgetting.\n\n"
    "Start with 'everlearn compare', which runs every method on handwritten digits in all three scenarios. "
    "'everlearn advise' asks a few questions and lists the methods that fit.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # start() handles it
)


@app.command
def compare(
    *,
    options: Annotated[CompareOptions, Parameter(name="*")] = CompareOptions.model_construct(),  # noqa: B008
) -> int:
    """Compare all methods on handwritten digits in all three scenarios, as one table. Takes a minute or two.

    Tasks are learned one after the other. Domain-incremental: all ten digits, with other permutations of the pixels.
    Task-incremental: the same with separate outputs and a quarter of the images each. Class-incremental: two digits
    each.
    'joint' learns all tasks at once and is the upper bound; 'finetune' does nothing against forgetting.

    Args:
        options: What to compare.
    """
    from everlearn.cli.compare import compare_methods

    return compare_methods(options)


@app.command
def advise(
    *,
    options: Annotated[AdviseOptions, Parameter(name="*")] = AdviseOptions.model_construct(),  # noqa: B008
) -> int:
    """List the methods that fit a project, best first, with measured results, and reasons against the others.

    On a terminal, options that are not given are asked for; otherwise they are not taken into account. Each result is
    quoted with the published table whose protocol it follows; 'everlearn reproduce' runs it again.

    For example: everlearn advise --scenario class --keep-data no --tasks 10

    Args:
        options: Constraints of the project.
    """
    from everlearn.cli.advise import print_advice

    return print_advice(options)


@app.command
def run(
    config: Path | None = None,
    *,
    grid: Annotated[Grid, Parameter(name="*")] = Grid.model_construct(),  # noqa: B008
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

    from everlearn.cli.run import run_grid

    return run_grid(grid, dry_run, force)


@app.command
def reproduce(
    table: str,
    *,
    options: Annotated[ReproduceOptions, Parameter(name="*")] = ReproduceOptions.model_construct(),  # noqa: B008
) -> int:
    """Run the protocol of a published table and print published and measured numbers side by side.

    A cell counts as reproduced if the mean over seeds is within the larger of 1.5 points (or what the table
    says) and two published standard deviations. Repeat the command to resume runs that were stopped.

    Args:
        table: Name of the table, as listed by 'everlearn list', or 'all'.
        options: Cells, number of seeds, and folders.
    """
    from everlearn.cli.reproduce import reproduce_tables

    return reproduce_tables(table, options)


@app.command
def tune(
    config: Path | None = None,
    *,
    grid: Annotated[TuneGrid, Parameter(name="*")] = TuneGrid.model_construct(),  # noqa: B008
    options: Annotated[TuneOptions, Parameter(name="*")] = TuneOptions.model_construct(),  # noqa: B008
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

    from everlearn.cli.tune import run_studies

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

    --method ranpac teaches new classes to a pretrained model in seconds: it trains nothing and stores no examples. With
    --forget rows.parquet instead of --data, learned rows are taken out again.

    Args:
        options: Model, data, method, and by how much old accuracy may fall.
    """
    from everlearn.cli.update import give_update

    return give_update(options)


@app.command
def report(folder: Path, *, format: ReportFormat = "html", out: Path | None = None) -> int:
    """Print the results of a folder as tables, and write a report that any browser opens offline.

    Args:
        folder: Folder of results of 'everlearn run' or 'everlearn compare'.
        format: html, a page; md, Markdown tables; csv, a line per run; png, the main plots; text, print tables only.
        out: File to write; default: 'report' in the folder.
    """
    from everlearn.cli.report import write_report

    return write_report(folder, format, out)


@app.command
def watch(folder: Path, *, port: int = 0, refresh: Annotated[int, Field(ge=1)] = 10) -> int:
    """Serve the report of a folder on this machine, updated while runs are in progress; Ctrl-C ends it.

    Args:
        folder: Folder of results, which may still be empty.
        port: Port to serve on; 0 selects a free one.
        refresh: Seconds after which the page reloads.
    """
    from everlearn.cli.report import serve_report

    return serve_report(folder, port, refresh)


@app.command(name="list")
def list_everything() -> int:
    """List the methods, streams, models and published tables."""
    from everlearn.cli.list import print_lists

    print_lists()
    return 0


@app.command
def show(method: str) -> int:
    """Show a method: description, formula, paper, fields and their defaults.

    Args:
        method: Name of the method, as listed by 'everlearn list'.
    """
    from everlearn.cli.show import print_method

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
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as error:
        return _print_error(str(error), 1)
    except KeyboardInterrupt:
        return _print_error("Stopped. Finished runs are kept; repeat the command to resume.", 130)


def _print_error(message: str, exit_code: int) -> int:
    print(printable_lines(f"everlearn: {message}"), file=sys.stderr)
    return exit_code
