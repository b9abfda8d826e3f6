"""``everlearn reproduce``: the runs behind a published table, and its numbers beside ours."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.cli import plan as plans
from everlearn.cli.names import UsageError
from everlearn.cli.tables import Cell, Table, cells, names, read
from everlearn.cli.workers import outcomes
from everlearn.report.runs import spread
from everlearn.report.table import columns
from everlearn.results import Result

Runs = dict[str, dict[str, Any]]  # what is remembered of each seed
FACTS = {"accuracy", "seconds", "time", "commit", "torch", "threads"}
TITLES = ["cell", "published", "Everlearn", "seeds", "difference", "tolerance", "verdict"]


class Reproduction(BaseModel):
    """The options of ``everlearn reproduce``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cells: str = Field("*", description="Cells as ROW/COLUMN, separated by commas; ``SI/*`` takes a row.")
    seeds: int = Field(3, ge=1, description="How many seeds, counted from 0.")
    force: bool = Field(False, description="Run again what is there already.")
    quick: bool = Field(False, description="A few steps and one seed, to see that all runs: not the protocol.")
    dry_run: bool = Field(False, description="Only print each cell's command.")
    data: Path | None = Field(None, description="Folder of data sets in files; by default EVERLEARN_DATA.")
    workers: int = Field(1, ge=1, description="Runs side by side, each in a process of its own.")
    threads: int = Field(1, ge=1, description="Threads torch may use; small models are fastest with 1.")
    out: Path = Field(Path("runs/reproduce"), description="Folder of the results; what is there is not done again.")
    record: Path | None = Field(None, description="Folder to keep the numbers in; beside it they become a page.")


def reproduce(table: str, options: Reproduction) -> int:
    """Run the cells, print both numbers of each, and keep them if asked to."""
    o, chosen = options, [name for name in names() if table.lower() in ("all", name.lower())] or [table]
    if o.record is not None and o.quick:
        raise UsageError("--record keeps what the protocol gives, and --quick is not the protocol.")
    wanted = {name: cells(name, o.cells, o.quick, strict=len(chosen) == 1) for name in chosen}
    if not any(wanted.values()):
        raise UsageError(
            f"No cell of any table is called {o.cells!r}; 'everlearn reproduce TABLE --dry-run' names them."
        )
    failed = False
    for name in [name for name in chosen if wanted[name]]:
        if o.dry_run:
            for cell in wanted[name]:
                print(f"{cell.name}: {cell.command(1 if o.quick else o.seeds)}")
            continue
        found, wrong = _runs(wanted[name], o)
        print(shown(name, read(name), found, o.quick), end="\n\n")
        failed |= wrong
    if o.record is not None and not o.dry_run:
        print(f"{page(o.record)} is written.")
    return 1 if failed else 0


def _runs(wanted: Sequence[Cell], o: Reproduction) -> tuple[list[tuple[Cell, Runs]], bool]:
    """What every seed of every cell gave; a run that fails is told and does not stop the others."""
    plan = [c.plan(1 if o.quick else o.seeds, data=o.data, workers=o.workers, out=o.out) for c in wanted]
    todo = [(i, cell) for i, p in enumerate(plan) for cell in plans.cells(p)]
    todo.sort(key=lambda one: one[1].seed)  # a first seed of all cells is worth more than all seeds of the first
    found: list[tuple[Cell, Runs]] = [(c, {}) for c in wanted]
    failed = False
    with tqdm(total=len(todo), desc="reproduce", leave=False, disable=None) as bar:
        for place, outcome in outcomes([cell for _, cell in todo], o.workers, o.threads, o.force):
            i, cell = todo[place]
            bar.update()
            bar.set_postfix_str(f"{wanted[i].name}, seed {cell.seed}")
            if isinstance(outcome, Exception):
                failed = True
                print(f"everlearn: {wanted[i].name}, seed {cell.seed} failed: {outcome}", file=sys.stderr)
                continue
            found[i][1][str(cell.seed)] = _kept(outcome)
            if o.record is not None:  # at once: the next run may be an hour's
                record(o.record, wanted[i].table, [found[i]])
    return found, failed


def _kept(result: Result) -> dict[str, Any]:
    made = result.made
    return {
        "accuracy": 100 * result.average_accuracy,
        "seconds": round(result.seconds, 1),
        "time": made["time"],
        "commit": made["commit"],
        "torch": made["versions"]["torch"],
        "threads": made["threads"],
    }


def shown(name: str, table: Table, found: Sequence[tuple[Cell, Runs]], quick: bool) -> str:
    """The table as text, published and own numbers side by side."""
    lines = [_line(cell, runs, quick) for cell, runs in found]
    title = f"{name}: {table.title} ({table.source}); average accuracy in %, mean ± standard deviation"
    return "\n".join([title, columns([TITLES, *lines]), "", _tally(found) if not quick else "Quick: not the protocol."])


def _line(cell: Cell, runs: Runs, quick: bool = False) -> list[str]:
    published = f"{cell.published:.1f}" + (f" ± {cell.deviation:.1f}" if cell.deviation else "")
    if not runs:
        return [cell.name, published, "–", "0", "–", f"{cell.tolerance:.1f}", "not run"]
    ours = [run["accuracy"] for run in runs.values()]
    apart = fmean(ours) - cell.published
    verdict = "quick" if quick else cell.verdict(ours)
    return [
        cell.name,
        published,
        spread(ours),
        str(len(ours)),
        f"{round(apart, 1) + 0.0:+.1f}",
        f"{cell.tolerance:.1f}",
        verdict,
    ]


def _tally(found: Sequence[tuple[Cell, Runs]]) -> str:
    verdicts = [cell.verdict([r["accuracy"] for r in runs.values()]) for cell, runs in found if runs]
    within, above = verdicts.count("within"), verdicts.count("above")
    few = sum(0 < len(runs) < 3 for _, runs in found)
    return (
        f"{within} of {len(found)} cells within tolerance, {above} above, {verdicts.count('miss')} missed, "
        f"{len(found) - len(verdicts)} not run" + (f"; {few} with fewer than 3 seeds." if few else ".")
    )


def record(folder: Path, name: str, found: Sequence[tuple[Cell, Runs]]) -> None:
    """Put runs among those kept, seed by seed; those of another protocol are dropped."""
    path = atomic.writable_folder(folder) / f"{name}.json"
    with atomic.locked(path):  # two commands side by side are the way to use two cores
        kept = _kept_in(path)
        for cell, runs in found:
            if both := {**kept_of(cell, kept), **runs}:
                ordered = dict(sorted(both.items(), key=lambda run: int(run[0])))
                kept[cell.name] = {"options": cell.options, "machine": machine(), "runs": ordered}
        atomic.write(path, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())


def _kept_in(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for cell in kept.values():
            whole = {"options", "machine"} <= set(cell) and all(set(run) >= FACTS for run in cell["runs"].values())
            numbers = [float(run[name]) for run in cell["runs"].values() for name in ("accuracy", "seconds")]
            if not whole or not all(map(math.isfinite, numbers)) or not all(seed.isdigit() for seed in cell["runs"]):
                raise ValueError("a cell is not whole")
        return dict(kept)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a record of runs ({type(error).__name__}: {error}): restore it, or move it away and record again."
        ) from None


def kept_of(cell: Cell, kept: dict[str, Any]) -> Runs:
    """The runs that are kept of a cell, if they were of its protocol as it is now."""
    before = kept.get(cell.name, {})
    return before["runs"] if before.get("options") == json.loads(json.dumps(cell.options)) else {}


def machine() -> str:
    """The hardware in a few words."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in facts.splitlines() if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def page(folder: Path) -> Path:
    """All that is kept as one page beside the folder, which shows misses as misses."""
    rule = (
        "Made by `everlearn reproduce TABLE --record docs/results`; do not edit. A cell is *within* if the mean over our seeds "
        "is no farther from the published mean than 1.5 points or two published standard deviations, whichever is more. "
        "*Above* is better than that, *miss* worse."
    )
    parts, tallies = [], []
    for name in names():
        path, table = folder / f"{name}.json", read(name)
        kept = _kept_in(path)
        found = [(c, kept_of(c, kept)) for c in cells(name)]
        tallies.append(f"- [{name}](#{_anchor(name, table)}), {table.title}: {_tally(found)}")
        parts += _section(name, table, found, sorted({kept[c.name]["machine"] for c, runs in found if runs}))
    target = folder.with_suffix(".md")
    head = ["# Published tables, and ours", rule, "\n".join(tallies)]
    atomic.write(target, ("\n\n".join([*head, *parts]) + "\n").encode())
    return target


def _anchor(name: str, table: Table) -> str:
    """Where a page's heading is found, as GitHub and the site have it."""
    return re.sub(r"[^\w -]", "", f"{name}: {table.title}").strip().lower().replace(" ", "-")


def _section(name: str, table: Table, found: Sequence[tuple[Cell, Runs]], machines: list[str]) -> list[str]:
    rows = [_line(cell, runs) for cell, runs in found]
    body = ["| " + " | ".join(row) + " |" for row in [TITLES, ["---"] * len(TITLES), *rows]]
    every = [run for _, runs in found for run in runs.values()]
    commits = sorted({str(run["commit"])[:7] for run in every})
    days = sorted({run["time"][:10] for run in every})
    facts = (
        f"Run on {' and '.join([days[0], days[-1]][: len(days)])} with torch {', '.join(sorted({r['torch'] for r in every}))} "
        f"on {'; '.join(machines)}, {max(r['threads'] for r in every)} thread a run; {sum(r['seconds'] for r in every) / 60:.0f} "
        f"minutes in all, {len(every)} runs, by commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
        if every
        else "Not run yet."
    )
    known = [f"- **{c.name}**: {c.known}" for c, runs in found if c.known and runs]
    return [
        f"## {name}: {table.title}",
        f"{table.source}. {' '.join(table.protocol.split())}",
        f"```sh\neverlearn reproduce {name} --seeds 3\n```",
        "\n".join(body),
        _tally(found),
        *(["\n".join(known)] if known else []),
        facts,
    ]
