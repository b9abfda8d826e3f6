"""Results as one HTML file that needs nothing else: no server, no network, no installed fonts or scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any

from everlearn.results.provenance import version
from everlearn.results.report.rows import runs
from everlearn.results.report.table import table
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable

PAGE = resources.files("everlearn.results.report") / "page"


def html(results: Iterable[Result], title: str = "Everlearn", refresh: int | None = None) -> str:
    """The page.

    Args:
        results: of any streams, scenarios, methods and seeds.
        title: of the page.
        refresh: seconds after which the page loads itself again, for results that are still being made.
    """
    every = list(results)
    data = {"runs": runs(every), "version": version(), "made": datetime.now(UTC).isoformat(timespec="seconds")}
    return Template(_read("report.html")).substitute(
        title=escape(printable(title)),
        refresh=f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        style=_read("report.css"),
        script=_read("charts.js") + _read("report.js"),
        data=embedded(data),
        plain=escape(table(every)),  # for those without scripts
    )


def embedded(data: Any) -> str:
    r"""JSON that cannot end the script element it stands in, whatever people name their things.

    >>> embedded({"method": "</script>"})
    '{"method":"\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
