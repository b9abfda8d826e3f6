"""Run the cells of published tables, record the results, and compare them with the published numbers."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from everlearn.experiments.executors import outcomes
from everlearn.experiments.grid import grid_runs
from everlearn.experiments.published_tables import Cell, Table, read_table, select_cells, table_names
from everlearn.results.report.rows import mean_and_std
from everlearn.results.report.table import align_columns
from everlearn.results.result import Result
from everlearn.runtime import files

Runs = dict[str, dict[str, Any]]  # the recorded numbers, by seed
CellRuns = tuple[Cell, Runs]

RECORD_KEYS = {"accuracy", "seconds", "time", "commit", "torch", "threads"}
COLUMN_TITLES = ["cell", "published", "Everlearn", "seeds", "difference", "tolerance", "verdict"]
PAGE_WIDTH = 118  # characters per line of the page
PAGE_INTRODUCTION = """\
This page is written by `everlearn reproduce TABLE --record docs/results`; do not edit it.

A cell is *within* tolerance if our mean over seeds differs from the published mean by at most 1.5 points (T9: \
0.7) or two published standard deviations, whichever is larger. *Above* is better than that, and *miss* is worse."""


def run_cells(
    cells: Sequence[Cell],
    *,
    seeds: int = 3,
    data: Path | None = None,
    workers: int = 1,
    threads: int = 1,
    out: Path = Path("runs/reproduce"),
    force: bool = False,
    record_folder: Path | None = None,
    on_failure: Callable[[Cell, int, Exception], None] | None = None,
) -> tuple[list[CellRuns], int]:
    """Run cells of a published table with several seeds; a failed run does not stop the others.

    Args:
        cells: cells of the table, from ``select_cells``.
        seeds: number of seeds, starting at 0.
        data: folder of the data sets; by default EVERLEARN_DATA.
        workers: number of worker processes.
        threads: torch threads per worker.
        out: folder of the results; existing results are reused.
        force: whether to repeat runs whose results exist.
        record_folder: folder in which ``record`` stores each run as soon as it ends.
        on_failure: called with the cell, the seed and the error of each failed run.

    Returns:
        The runs of every cell, and the number of failed runs.
    """
    grids = [cell.grid(seeds, data=data, workers=workers, out=out) for cell in cells]
    indexed_runs = [(cell_index, run) for cell_index, grid in enumerate(grids) for run in grid_runs(grid)]
    # Run the first seed of every cell before the second seed of any.
    indexed_runs.sort(key=lambda indexed_run: indexed_run[1].seed)

    cell_runs: list[CellRuns] = [(cell, {}) for cell in cells]
    num_failures = 0
    with tqdm(total=len(indexed_runs), desc="reproduce", leave=False, disable=None) as bar:
        for run_index, outcome in outcomes([run for _, run in indexed_runs], workers, threads, force):
            cell_index, run = indexed_runs[run_index]
            cell = cells[cell_index]
            bar.update()
            bar.set_postfix_str(f"{cell.name}, seed {run.seed}")
            if isinstance(outcome, Exception):
                num_failures += 1
                if on_failure is not None:
                    on_failure(cell, run.seed, outcome)
                continue

            _, runs = cell_runs[cell_index]
            runs[str(run.seed)] = _recorded_numbers(outcome)
            # Record at once: the next run may take an hour.
            if record_folder is not None:
                record(record_folder, cell.table, [cell_runs[cell_index]])
    return cell_runs, num_failures


def _recorded_numbers(result: Result) -> dict[str, Any]:
    provenance = result.provenance
    return {
        "accuracy": 100 * result.average_accuracy,
        "seconds": round(result.seconds, 1),
        "time": provenance["time"],
        "commit": provenance["commit"],
        "torch": provenance["versions"]["torch"],
        "threads": provenance["threads"],
    }


def format_table(name: str, table: Table, cell_runs: Sequence[CellRuns], quick: bool) -> str:
    """Format published and measured numbers side by side as text."""
    rows = [_table_row(cell, runs, quick) for cell, runs in cell_runs]
    title = f"{name}: {table.title} ({table.source}); average accuracy in %, mean ± standard deviation"
    summary = "Quick: not the protocol." if quick else _count_verdicts(cell_runs)
    return "\n".join([title, align_columns([COLUMN_TITLES, *rows]), "", summary])


def _table_row(cell: Cell, runs: Runs, quick: bool = False) -> list[str]:
    published = f"{cell.published:.1f}"
    if cell.deviation:
        published += f" ± {cell.deviation:.1f}"
    tolerance = f"{cell.tolerance:.1f}"
    if not runs:
        return [cell.name, published, "–", "0", "–", tolerance, "not run"]

    accuracies = [run["accuracy"] for run in runs.values()]
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    difference = round(fmean(accuracies) - cell.published, 1) + 0.0
    verdict = "quick" if quick else cell.verdict(accuracies)
    return [
        cell.name,
        published,
        mean_and_std(accuracies),
        str(len(accuracies)),
        f"{difference:+.1f}",
        tolerance,
        verdict,
    ]


def _count_verdicts(cell_runs: Sequence[CellRuns]) -> str:
    """Count the cells of each verdict, in one sentence."""
    verdicts = [cell.verdict([run["accuracy"] for run in runs.values()]) for cell, runs in cell_runs if runs]
    num_with_few_seeds = sum(0 < len(runs) < 3 for _, runs in cell_runs)

    sentence = (
        f"{verdicts.count('within')} of {len(cell_runs)} cells within tolerance, {verdicts.count('above')} above, "
        f"{verdicts.count('miss')} missed, {len(cell_runs) - len(verdicts)} not run"
    )
    if num_with_few_seeds:
        return f"{sentence}; {num_with_few_seeds} with fewer than 3 seeds."
    return f"{sentence}."


def record(folder: Path, name: str, cell_runs: Sequence[CellRuns]) -> None:
    """Merge runs into the record file of a table, seed by seed; runs of an earlier protocol are dropped."""
    path = files.writable_folder(folder) / f"{name}.json"
    # Two commands may record into the same file at the same time.
    with files.locked(path):
        table_record = _read_record(path)
        for cell, runs in cell_runs:
            merged_runs = {**recorded_runs(cell, table_record), **runs}
            if merged_runs:
                ordered_runs = dict(sorted(merged_runs.items(), key=lambda seed_and_run: int(seed_and_run[0])))
                table_record[cell.name] = {"options": cell.options, "machine": machine(), "runs": ordered_runs}
        files.write(path, (json.dumps(table_record, indent=1, ensure_ascii=False) + "\n").encode())


def _read_record(path: Path) -> dict[str, Any]:
    """Read and validate the record file of a table; empty if there is none."""
    try:
        if not path.exists():
            return {}
        table_record = json.loads(path.read_text(encoding="utf-8"))
        for cell_record in table_record.values():
            _check_cell_record(cell_record)
        return dict(table_record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a valid record of runs ({type(error).__name__}: {error}): restore it, or move it away and "
            "record again."
        ) from None


def _check_cell_record(cell_record: dict[str, Any]) -> None:
    runs = cell_record["runs"]
    is_complete = {"options", "machine"} <= set(cell_record) and all(set(run) >= RECORD_KEYS for run in runs.values())
    numbers = [float(run[key]) for run in runs.values() for key in ("accuracy", "seconds")]
    has_valid_seeds = all(seed.isdigit() for seed in runs)
    if not is_complete or not all(map(math.isfinite, numbers)) or not has_valid_seeds:
        raise ValueError("a cell is incomplete")


def recorded_runs(cell: Cell, table_record: dict[str, Any]) -> Runs:
    """Look up the recorded runs of a cell; empty if they were made with another protocol."""
    cell_record = table_record.get(cell.name, {})
    # A round trip through JSON makes the options comparable with the recorded ones.
    if cell_record.get("options") != json.loads(json.dumps(cell.options)):
        return {}
    runs: Runs = cell_record["runs"]
    return runs


def machine() -> str:
    """Describe the hardware in a few words."""
    cpu_info = Path("/proc/cpuinfo")
    cpu_lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    model_names = [line.split(":")[1].strip() for line in cpu_lines if line.startswith("model name")]
    processor = next(iter(model_names), "") or platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}"


def page(folder: Path) -> Path:
    """Write all recorded tables as one Markdown page beside the folder."""
    sections: list[str] = []
    summaries: list[str] = []
    for name in table_names():
        table = read_table(name)
        table_record = _read_record(folder / f"{name}.json")
        cell_runs = [(cell, recorded_runs(cell, table_record)) for cell in select_cells(name)]
        machines = sorted({table_record[cell.name]["machine"] for cell, runs in cell_runs if runs})

        link = f"[{name}](#{_heading_anchor(name, table)})"
        summaries.append(f"- {link}, {table.title}: {_count_verdicts(cell_runs)}")
        sections += _page_section(name, table, cell_runs, machines)

    target = folder.with_suffix(".md")
    introduction = _wrap_paragraphs(PAGE_INTRODUCTION)
    summary_list = _wrap_paragraphs("\n".join(summaries))
    parts = ["# Published tables, and ours", introduction, summary_list, *sections]
    files.write(target, ("\n\n".join(parts) + "\n").encode())
    return target


def _heading_anchor(name: str, table: Table) -> str:
    """Anchor of a section's heading, as GitHub and Sphinx derive it."""
    return re.sub(r"[^\w -]", "", f"{name}: {table.title}").strip().lower().replace(" ", "-")


def _page_section(name: str, table: Table, cell_runs: Sequence[CellRuns], machines: list[str]) -> list[str]:
    """Paragraphs of the page on one table."""
    rows = [_table_row(cell, runs) for cell, runs in cell_runs]
    table_lines = ["| " + " | ".join(row) + " |" for row in [COLUMN_TITLES, ["---"] * len(COLUMN_TITLES), *rows]]
    paragraphs = [
        f"## {name}: {table.title}",
        f"{table.source}.",
        _format_protocol(table.protocol),
        f"```sh\neverlearn reproduce {name} --seeds 3\n```",
        "\n".join(table_lines),
        _count_verdicts(cell_runs),
    ]

    explanations = [f"- **{cell.name}**: {cell.known}" for cell, runs in cell_runs if cell.known and runs]
    if explanations:
        paragraphs.append(_wrap_paragraphs("\n".join(explanations)))

    all_runs = [run for _, runs in cell_runs for run in runs.values()]
    paragraphs.append(_wrap_paragraphs(_describe_runs(all_runs, machines)))
    return paragraphs


def _format_protocol(protocol: str) -> str:
    """Wrap the lines of a protocol, with a blank line before its list."""
    text = _wrap_paragraphs(protocol.strip())
    introduction, dash, items = text.partition("\n- ")
    if not dash:
        return text
    return f"{introduction}\n\n- {items}"


def _wrap_paragraphs(text: str) -> str:
    """Wrap each line of Markdown text; a list item continues under its text.

    >>> _wrap_paragraphs("- " + 30 * "word ").splitlines()[1]
    '  word word word word word word word'
    """
    lines = []
    for paragraph in text.splitlines():
        indent = "  " if paragraph.startswith("- ") else ""
        # A number and its percent sign stay on one line.
        joined = paragraph.replace(" %", "\N{NO-BREAK SPACE}%")
        wrapped = textwrap.wrap(
            joined, PAGE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped] or [""]
    return "\n".join(lines)


def _describe_runs(runs: Sequence[dict[str, Any]], machines: Sequence[str]) -> str:
    """Sentence on when, where and with which versions the runs were made."""
    if not runs:
        return "Not run yet."
    days = sorted({run["time"][:10] for run in runs})
    period = days[0] if len(days) == 1 else f"{days[0]} and {days[-1]}"
    torch_versions = ", ".join(sorted({run["torch"] for run in runs}))
    commits = sorted({str(run["commit"])[:7] for run in runs})
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        f"Run on {period} with torch {torch_versions} on {'; '.join(machines)}, "
        f"{max(run['threads'] for run in runs)} thread per run; {minutes:.0f} minutes in total, {len(runs)} runs, "
        f"by commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    )
