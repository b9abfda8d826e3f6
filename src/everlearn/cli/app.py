"""The commands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, CycloptsError, Parameter
from pydantic import ValidationError
from tqdm.auto import tqdm

from everlearn.cli.names import UsageError, explain, look_up
from everlearn.cli.plan import Cell, Plan, cells, read
from everlearn.methods import METHODS
from everlearn.nets import NETS
from everlearn.report.table import overview, table
from everlearn.results import Result, files
from everlearn.streams import STREAMS

app = App(
    name="everlearn",
    help="Continual learning: let a model go on learning without forgetting.\n\n"
    "Start with 'everlearn compare': every method on real handwritten digits, in all three scenarios.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # start() says what is kept
)


@app.command
def compare(
    *,
    seeds: int = 3,
    scenario: str = "all",
    out: Path = Path("runs/compare"),
    force: bool = False,
) -> int:
    """Every method on the embedded digits in all three scenarios, as one table. Takes a minute or two.

    Five tasks of two digits each are learned one after the other. 'joint' learns them all at once and shows what is
    possible; 'finetune' does nothing against forgetting and shows the problem.

    Args:
        seeds: How many seeds, counted from 0.
        scenario: Any of task, domain, class, separated by commas, or 'all'.
        out: Folder of the results; runs that are there already are not done again ...
        force: ... unless you force it.
    """
    if seeds < 1:
        raise UsageError(f"seeds: got {seeds}, allowed: at least 1.")
    names = ",".join(["joint", *METHODS])
    plan = Plan(stream="digits", scenario=scenario, methods=names, seeds=seeds, threads=1, out=out)
    code, results = _run_all(list(cells(plan)), plan, force, talk=False)
    if results:
        print(overview(results))
        print(f"\nThe results are in {out}; 'everlearn report {out}' shows more of them.")
    return code


@app.command
def run(
    config: Path | None = None,
    *,
    plan: Annotated[Plan, Parameter(name="*")] = Plan(),  # noqa: B008 - a frozen model is a safe default
    dry_run: bool = False,
    force: bool = False,
) -> int:
    """Run methods on streams: streams × scenarios × methods × seeds, one result file each.

    For example: everlearn run --scenario all --methods finetune,l2,l2+freeze,joint --set l2.strength=0.1 --seeds 5

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
def report(folder: Path) -> int:
    """Show the results of a folder as tables: mean ± standard deviation over seeds.

    Args:
        folder: Where 'everlearn run' or 'everlearn compare' wrote its results.
    """
    whole, code = [], 0
    for path in files(folder):
        try:
            whole.append(Result.load(path))
        except ValueError as error:
            print(f"everlearn: {error}", file=sys.stderr)
            code = 1
    if whole:
        print(table(whole))
    return code


@app.command(name="list")
def list_everything() -> int:
    """List the methods, streams and models, a line each."""
    tables: dict[str, Mapping[str, Any]] = {"Methods": METHODS, "Streams": STREAMS, "Models": NETS}
    for title, things in tables.items():
        print(f"{title}:")
        for name, thing in things.items():
            print(f"  {name:16s} {_first_line(thing)}")
        print()
    print("'everlearn show METHOD' tells more; 'joint' among methods learns all tasks at once; 'a+b' chains two.")
    return 0


@app.command
def show(method: str) -> int:
    """Show a method: what it does, its formula and paper, its fields and their defaults.

    Args:
        method: Its name, as 'everlearn list' gives it.
    """
    kind = look_up("method", method, METHODS)
    print(f"{method} ({kind.__module__}.{kind.__qualname__})\n")
    print(inspect.cleandoc(kind.__doc__ or "").split("\nArgs:")[0].rstrip())
    documented = _arguments(kind)
    if own := fields(kind):
        print(f"\nFields, set with --set {method}.FIELD=VALUE:")
        for f in own:
            default = "" if f.default is MISSING else f" = {f.default!r}"
            print(f"  {f.name}: {f.type}{default}\n      {documented.get(f.name, '')}")
    else:
        print("\nIt has no fields to set.")
    return 0


def start(arguments: Sequence[str]) -> int:
    """Run a command; 0 when all went well, 1 when something failed, 2 when it was asked wrongly, 130 when stopped."""
    try:
        return app(arguments or ["--help"], exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        cause = error.__cause__
        return _complain(explain(cause) if isinstance(cause, ValidationError) else str(error), 2)
    except ValidationError as error:
        return _complain(explain(error), 2)
    except UsageError as error:
        return _complain(str(error), 2)
    except (OSError, ValueError, TypeError) as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("Stopped. Finished runs are kept; the same command goes on from there.", 130)


def _run_all(todo: list[Cell], plan: Plan, force: bool, talk: bool) -> tuple[int, list[Result]]:
    """Each cell in turn; one that fails is reported and does not stop the others."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    results, failed = [], 0
    bar = nullcontext(todo) if talk else tqdm(todo, desc="everlearn", leave=False, disable=None)
    with bar as shown:
        for i, cell in enumerate(shown, 1):
            try:
                results.append(cell.run(force))
            except (FloatingPointError, ValueError) as error:
                failed += 1
                print(f"everlearn: {cell} failed: {error}", file=sys.stderr)
                continue
            if talk:
                print(f"[{i}/{len(todo)}] {results[-1]}", flush=True)
    return (1 if failed else 0), results


def _complain(message: str, code: int) -> int:
    print(f"everlearn: {message}", file=sys.stderr)
    return code


def _first_line(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").splitlines()[0]


def _arguments(kind: type) -> dict[str, str]:
    """What the docstring's Args section says of each field."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = text
        elif name:
            found[name] += " " + line.strip()
    return found
