"""HTML report in a single file that needs no server, network, fonts or scripts from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any

from everlearn.results.provenance import version
from everlearn.results.report.rows import run_rows
from everlearn.results.report.table import table
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable

PAGE = resources.files("everlearn.results.report") / "page"


def html(results: Iterable[Result], title: str = "Everlearn", refresh: int | None = None) -> str:
    """Render the report as an HTML page.

    Args:
        results: results of any streams, scenarios, methods and seeds.
        title: title of the page.
        refresh: seconds after which the page reloads itself, for runs that are in progress.
    """
    results = list(results)
    data = {
        "runs": run_rows(results),
        "version": version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    refresh_element = ""
    if refresh:
        refresh_element = f'<meta http-equiv="refresh" content="{refresh}">'
    return Template(_read("report.html")).substitute(
        title=escape(printable(title)),
        refresh=refresh_element,
        style=_read("report.css"),
        script=_read("charts.js") + _read("report.js"),
        data=embed_json(data),
        plain=escape(table(results)),  # for browsers without scripts
    )


def embed_json(data: Any) -> str:
    r"""Encode JSON for a script element: no user's name can end the element.

    >>> embed_json({"method": "</script>"})
    '{"method":"\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
