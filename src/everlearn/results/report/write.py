"""Write results as a report file, in one of several formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from everlearn.results.report.html import html
from everlearn.results.report.plot import png
from everlearn.results.report.rows import as_csv, as_markdown
from everlearn.results.result import Result
from everlearn.runtime import files

Format = Literal["html", "md", "csv", "png", "text"]


def write(results: Sequence[Result], format: Format, path: Path, title: str) -> Path:
    """Write the report file atomically."""
    if format == "html":
        content = html(results, f"Everlearn: {title}").encode(errors="backslashreplace")
    elif format == "md":
        content = as_markdown(results).encode()
    elif format == "csv":
        content = as_csv(results).encode()
    else:
        content = png(results)
    files.writable_folder(path.parent)
    files.write(path, content)
    return path
