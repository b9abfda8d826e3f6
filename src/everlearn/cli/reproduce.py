"""The command ``everlearn reproduce``: run published tables and print published and measured numbers side by side."""

from __future__ import annotations

import sys

from everlearn.cli.options import ReproduceOptions
from everlearn.experiments.parsing import UsageError
from everlearn.experiments.published_tables import Cell, read_table, select_cells, table_names
from everlearn.experiments.reproduce import format_table, page, run_cells


def reproduce_tables(table: str, options: ReproduceOptions) -> int:
    """Run the selected cells of a table, or of 'all' tables, and print the comparison; returns the exit code."""
    selected_tables = [name for name in table_names() if table.lower() in ("all", name.lower())] or [table]
    if options.record is not None and options.quick:
        raise UsageError(
            "--record keeps results of the full protocol, and --quick is not the protocol: drop one of them."
        )

    # With 'all', a pattern only needs to match a cell of some table.
    is_single_table = len(selected_tables) == 1
    cells_of_table = {
        name: select_cells(name, options.cells, options.quick, strict=is_single_table) for name in selected_tables
    }
    if not any(cells_of_table.values()):
        raise UsageError(
            f"No cell of any table is called {options.cells!r}; 'everlearn reproduce TABLE --dry-run' lists them."
        )

    seeds = 1 if options.quick else options.seeds
    has_failed = False
    for name, cells in cells_of_table.items():
        if not cells:
            continue
        if options.dry_run:
            for cell in cells:
                print(f"{cell.name}: {cell.command(seeds)}")
            continue

        cell_runs, num_failures = run_cells(
            cells,
            seeds=seeds,
            data=options.data,
            workers=options.workers,
            threads=options.threads,
            out=options.out,
            force=options.force,
            record_folder=options.record,
            on_failure=_print_failure,
        )
        print(format_table(name, read_table(name), cell_runs, options.quick), end="\n\n")
        has_failed |= num_failures > 0

    if options.record is not None and not options.dry_run:
        print(f"Wrote {page(options.record)}.")
    return int(has_failed)


def _print_failure(cell: Cell, seed: int, error: Exception) -> None:
    print(f"everlearn: {cell.name}, seed {seed} failed: {error}", file=sys.stderr)
