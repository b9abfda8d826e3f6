"""The commands ``everlearn report`` and ``everlearn watch``."""

from __future__ import annotations

import sys
from pathlib import Path

from everlearn.cli.options import ReportFormat
from everlearn.results.report.serve import create_server
from everlearn.results.report.table import table
from everlearn.results.report.write import write
from everlearn.results.result import Result, result_files
from everlearn.runtime.escaping import printable, printable_lines


def write_report(folder: Path, format: ReportFormat, out: Path | None) -> int:
    """Print the results of a folder and write the report file; returns the exit code."""
    results = []
    exit_code = 0
    for path in result_files(folder):
        try:
            results.append(Result.load(path))
        except (ValueError, OSError) as error:
            print(printable_lines(f"everlearn: {error}"), file=sys.stderr)
            exit_code = 1
    if results:
        print(table(results))
    if results and format != "text":
        report_file = write(results, format, out or folder / f"report.{format}", str(folder))
        print(f"\nWrote {report_file}.")
    return exit_code


def serve_report(folder: Path, port: int, refresh: int) -> int:
    """Serve the report of a folder until Ctrl-C; returns the exit code."""
    with create_server(folder, port, refresh) as page:
        print(f"The report of {printable(str(folder))} is at {page.url} (Ctrl-C to end).", flush=True)
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
