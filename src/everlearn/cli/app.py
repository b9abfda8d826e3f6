"""The commands."""

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

from everlearn.cli.advise import Answers, give_advice
from everlearn.cli.listing import everything, explain_method
from everlearn.cli.names import UsageError, explain
from everlearn.cli.plan import Cell, Plan, cells, read
from everlearn.cli.reproduce import Reproduction
from everlearn.cli.reproduce import reproduce as reproduction
from everlearn.cli.tune import Trials, Tuning, tuned
from everlearn.cli.update import Updating, give_update
from everlearn.cli.workers import outcomes
from everlearn.escaping import printable, printable_lines
from everlearn.methods import METHODS
from everlearn.report.files import Format, write
from everlearn.report.serve import server
from everlearn.report.table import overview, table
from everlearn.results import Result, files

app = App(
    name="everlearn",
    help="Continual learning: let a model go on learning without forgetting.\n\n"
    "Start with 'everlearn compare': every method on real handwritten digits, in all three scenarios. "
    "'everlearn advise' asks a few questions and tells which methods fit.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # start() says what is kept
)


class Comparison(BaseModel):
    """The options of ``everlearn compare``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    methods: str = Field("all", description="Methods, separated by commas, or 'all'.")
    scenario: str = Field("all", description="Any of task, domain, class, separated by commas, or 'all'.")
    seeds: int = Field(1, ge=1, description="How many seeds, counted from 0; several give a spread.")
    epochs: int | None = Field(None, ge=1, description="Passes over each task's data; 10 by default.")
    workers: int = Field(1, ge=1, description="Runs side by side, each in a process of its own.")
    threads: int = Field(1, ge=1, description="Threads torch may use; small models are fastest with 1.")
    out: Path = Field(Path("runs/compare"), description="Folder of the results; what is there is not done again ...")
    force: bool = Field(False, description="... unless you force it.")


@app.command
def compare(*, options: Annotated[Comparison, Parameter(name="*")] = Comparison()) -> int:  # noqa: B008
    """Every method on the embedded digits in all three scenarios, as one table. Takes a few minutes.

    Five tasks of two digits each are learned one after the other. 'joint' learns them all at once and shows what is
    possible; 'finetune' does nothing against forgetting and shows the problem.

    Args:
        options: What to compare.
    """
    o = options
    names = ",".join(["joint", *METHODS]) if o.methods == "all" else o.methods
    facts = {
        "scenario": o.scenario,
        "seeds": o.seeds,
        "epochs": o.epochs,
        "threads": o.threads,
        "workers": o.workers,
        "out": o.out,
    }
    plan = Plan(stream="digits", methods=names, **facts)
    code, results = _run_all(list(cells(plan)), plan, o.force, talk=False)
    if results:
        print(overview(results))
        print(f"\nThe results are in {o.out}; 'everlearn report {o.out}' shows more of them.")
    return code


@app.command
def advise(*, answers: Annotated[Answers, Parameter(name="*")] = Answers()) -> int:  # noqa: B008
    """Which method? From a few answers those that fit, best first, with our measured numbers, and why the others do not.

    On a terminal you are asked what you leave out. Elsewhere what you leave out does not matter. A number of ours is quoted
    with the published table whose protocol gave it; 'everlearn reproduce' runs it again.

    For example: everlearn advise --scenario class --keep-data no --tasks 10

    Args:
        answers: What is known of your project.
    """
    return give_advice(answers)


@app.command
def run(
    config: Path | None = None,
    *,
    plan: Annotated[Plan, Parameter(name="*")] = Plan(),  # noqa: B008 - a frozen model is a safe default
    dry_run: bool = False,
    force: bool = False,
) -> int:
    """Run methods on streams: streams × scenarios × methods × seeds, one result file each.

    For example: ``everlearn run --scenario all --methods finetune,l2,l2+freeze,joint --set l2.strength=0.1 --seeds 5``

    Args:
        config: A YAML file with the options below as keys; options given on the command line win.
        plan: What to run and how.
        dry_run: Only say what would be run.
        force: Run again what is there already.
    """
    plan = read(config, plan) if config is not None else plan
    todo = list(cells(plan))
    if dry_run:
        print("\n".join(f"{i}. {cell}" for i, cell in enumerate(todo, 1)))
        return 0
    code, results = _run_all(todo, plan, force, talk=True)
    if results:
        print("\n" + table(results))
    return code


@app.command
def reproduce(table: str, *, options: Annotated[Reproduction, Parameter(name="*")] = Reproduction()) -> int:  # noqa: B008
    """Run a published table's protocol and print its numbers and ours side by side, cell by cell.

    A cell counts as reproduced if the mean over seeds lies within the larger of 1.5 points and two published standard
    deviations. A run that was stopped goes on where it was: the same command again.

    Args:
        table: Its name, as 'everlearn list' gives it, or 'all'.
        options: Which cells, how often, and where results go.
    """
    return reproduction(table, options)


@app.command
def tune(
    config: Path | None = None,
    *,
    plan: Annotated[Trials, Parameter(name="*")] = Trials(),  # noqa: B008
    tuning: Annotated[Tuning, Parameter(name="*")] = Tuning(),  # noqa: B008
) -> int:
    """Find a method's strength, or other fields, on validation data held back from training.

    For example: everlearn tune --methods ewc,si --stream split-mnist --scenario domain --iterations 500 --trials 16

    Half of the trials are spread over the range, the others go where it is promising; several fields are left to Optuna. The first task is trained once for all trials
    where the field acts only later, as a penalty's strength does. The same command goes on where it was stopped.

    Args:
        config: A YAML file with the options of 'everlearn run' as keys; options given on the command line win.
        plan: The stream, the methods, and how each is trained.
        tuning: What to look for.
    """
    plan = read(config, plan) if config is not None else plan
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    tuned(plan, tuning)
    return 0


@app.command
def update(*, options: Annotated[Updating, Parameter(name="*")]) -> int:
    """Teach a deployed model new data, and replace it only if it has not forgotten too much of the old.

    For example: everlearn update --model shop.models:make_model --weights model.safetensors --state state --data new.parquet --method er

    The state folder holds what the method has learned and an exam of every update. The first update is told of the skills
    that the model has by --old. Exit codes: 0 accepted, 3 refused because old accuracy has fallen by more than the tolerance and
    nothing was replaced, 1 something failed, 2 asked wrongly. A killed process leaves model and state of before or of
    after; the same command goes on.

    Args:
        options: The model, the data, the method, and by how much old accuracy may fall.
    """
    return give_update(options)


@app.command
def report(folder: Path, *, format: Format = "html", out: Path | None = None) -> int:
    """Show the results of a folder: tables here, and a page with pictures that opens in any browser, offline.

    Args:
        folder: Where 'everlearn run' or 'everlearn compare' wrote its results.
        format: html, a page; md, tables for a document; csv, a line per run; png, the main pictures; text, only what is shown here.
        out: The file to write; by default 'report' in the folder.
    """
    whole, code = [], 0
    for path in files(folder):
        try:
            whole.append(Result.load(path))
        except (ValueError, OSError) as error:
            code = _complain(str(error), 1)
    if whole:
        print(table(whole))
    if whole and format != "text":
        print(f"\n{write(whole, format, out or folder / f'report.{format}', str(folder))} is written.")
    return code


@app.command
def watch(folder: Path, *, port: int = 0, refresh: Annotated[int, Field(ge=1)] = 10) -> int:
    """Show the report of a folder on this machine, renewed while runs go on; Ctrl-C ends it.

    Args:
        folder: Where results are, or will be.
        port: Where to serve; 0 for any that is free.
        refresh: Seconds after which the page loads itself again.
    """
    with server(folder, port, refresh) as page:
        print(f"The report of {printable(str(folder))} is at {page.url} (Ctrl-C to end).", flush=True)
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


@app.command(name="list")
def list_everything() -> int:
    """List the methods, streams and models, a line each."""
    everything()
    return 0


@app.command
def show(method: str) -> int:
    """Show a method: what it does, its formula and paper, its fields and their defaults.

    Args:
        method: Its name, as 'everlearn list' gives it.
    """
    explain_method(method)
    return 0


def start(arguments: Sequence[str]) -> int:
    """Run a command; 0 when all went well, 1 when something failed, 2 when it was asked wrongly, 130 when stopped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ± gets a question mark, not a traceback
    try:
        return app(arguments or ["--help"], exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        cause = error.__cause__
        return _complain(explain(cause) if isinstance(cause, ValidationError) else str(error), 2)
    except ValidationError as error:
        return _complain(explain(error), 2)
    except UsageError as error:
        return _complain(str(error), 2)
    except (OSError, ValueError, TypeError, ImportError) as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("Stopped. Finished runs are kept; the same command goes on from there.", 130)


def _run_all(todo: list[Cell], plan: Plan, force: bool, talk: bool) -> tuple[int, list[Result]]:
    """Each cell in turn; one that fails is reported and does not stop the others."""
    done: dict[int, Result] = {}
    failures: set[str] = set()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with tqdm(total=len(todo), desc="runs", unit="run", leave=False, disable=None) as bar:
        for ended, (i, outcome) in enumerate(outcomes(todo, plan.workers, plan.threads, force, plan.cluster), 1):
            bar.update()
            if isinstance(outcome, Exception):
                why = str(outcome) if str(outcome) not in failures else "as above."
                failures.add(str(outcome))
                bar.write(printable_lines(f"everlearn: {todo[i]} failed: {why}"), file=sys.stderr)
                continue
            done[i] = outcome
            if talk:
                gone_on = f" (gone on with from {where})" if (where := outcome.made.get("gone_on_from")) else ""
                note = " (read)" if outcome.made.get("time", "") < started else gone_on
                bar.write(f"[{ended}/{len(todo)}]{note} {outcome}", file=sys.stdout)
                sys.stdout.flush()
    return (0 if len(done) == len(todo) else 1), [done[i] for i in sorted(done)]


def _complain(message: str, code: int) -> int:
    print(printable_lines(f"everlearn: {message}"), file=sys.stderr)
    return code
