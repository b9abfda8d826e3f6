"""The report as a page on this machine that renews itself while runs go on."""

from __future__ import annotations

from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from everlearn.report.html import html
from everlearn.results import Result


def server(folder: Path, port: int = 0, refresh: int = 10) -> ThreadingHTTPServer:
    """A server for this machine alone; ``serve_forever()`` starts it, ``server_port`` is where.

    Args:
        folder: of results; those that are not whole yet are left out.
        port: 0 for any that is free.
        refresh: seconds after which the page loads itself again.
    """
    return ThreadingHTTPServer(("127.0.0.1", port), partial(_Page, folder, refresh))


def page(folder: Path, refresh: int) -> str:
    """What there is now, or a page that waits for it."""
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Result.load(path))
        except (ValueError, OSError):
            continue  # being written by something else, or no result; 'everlearn report' names it
    if found:
        return html(found, f"Everlearn: {folder}", refresh)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{refresh}">'
        f"<title>Everlearn</title><p>No results in {escape(str(folder))} yet; this page looks again every {refresh} seconds."
    )


class _Page(BaseHTTPRequestHandler):
    def __init__(self, folder: Path, refresh: int, *args: Any) -> None:
        self.folder, self.refresh = folder, refresh
        super().__init__(*args)

    def do_GET(self) -> None:
        """Only the page itself."""
        if self.path != "/":
            self.send_error(404)
            return
        content = page(self.folder, self.refresh).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line every few seconds helps nobody."""
