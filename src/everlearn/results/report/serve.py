"""The report as a page on this machine that renews itself while runs go on."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from everlearn.results.report.html import html
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable_lines

HOST = re.compile(r"(\[[0-9a-f:]+\]|[0-9a-z.-]+)(?::\d{1,5})?")  # a name or an address, and perhaps a port
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
TIMEOUT = 10.0  # seconds in which a client must go on with what it says or reads
Version = tuple[int, int, int]  # of a file: when it was written, its size, and which file it is


class Pages:
    """The page of a folder; a file is read again only when it has changed, and the page made again only when one has.

    Args:
        folder: of results; those that are not whole yet are left out.
        refresh: seconds after which the page loads itself again.
    """

    def __init__(self, folder: Path, refresh: int) -> None:
        self.folder = folder
        self.refresh = refresh
        self._lock = threading.Lock()  # requests come in threads of their own
        self._results: dict[Path, tuple[Version, Result | None]] = {}
        self._page: str | None = None

    def current(self) -> str:
        """What there is now, or a page that waits for it."""
        with self._lock:
            if self._update() or self._page is None:
                self._page = self._made()
            return self._page

    def _update(self) -> bool:
        """Read what has changed; whether anything has."""
        versions = {path: version for path in sorted(self.folder.glob("*.json")) if (version := _version(path))}
        known = {path: version for path, (version, _) in self._results.items()}
        if versions == known:
            return False
        self._results = {
            path: self._results[path] if known.get(path) == version else (version, _load(path))
            for path, version in versions.items()
        }
        return True

    def _made(self) -> str:
        found = [result for _, result in self._results.values() if result is not None]
        if found:
            return html(found, f"Everlearn: {self.folder}", self.refresh)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{self.refresh}">'
            f"<title>Everlearn</title><p>No results in {escape(str(self.folder))} yet; this page looks again every "
            f"{self.refresh} seconds."
        )


def _version(path: Path) -> Version | None:
    try:
        facts = path.stat()
    except OSError:
        return None  # it was taken away just now
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _load(path: Path) -> Result | None:
    try:
        return Result.load(path)
    except (ValueError, OSError):
        return None  # being written by something else, or no result; 'everlearn report' names it


class Server(ThreadingHTTPServer):
    """Serves the page to this machine alone; ``serve_forever()`` starts it.

    Args:
        pages: what is served.
        port: 0 for any that is free.
    """

    def __init__(self, pages: Pages, port: int) -> None:
        super().__init__(("127.0.0.1", port), partial(_Page, pages))

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def is_own_name(self, host: str) -> bool:
        """Whether a ``Host`` header names this machine.

        A page of another site may have its own name point here (DNS rebinding), and would then read what is served.
        """
        match = HOST.fullmatch(host.strip().lower())
        return match is not None and match[1].strip("[]") in {*LOCAL_NAMES, str(self.server_address[0])}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or says nothing, is no error; anything else is told in a line."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            message = "".join(traceback.format_exception_only(error)).strip()
            print(printable_lines(f"everlearn: The page could not be served: {message}"), file=sys.stderr)


def server(folder: Path, port: int = 0, refresh: int = 10) -> Server:
    """A server for this machine alone; ``serve_forever()`` starts it, ``url`` is where.

    Args:
        folder: of results; those that are not whole yet are left out.
        port: 0 for any that is free.
        refresh: seconds after which the page loads itself again.
    """
    return Server(Pages(folder, refresh), port)


def page(folder: Path, refresh: int) -> str:
    """What there is now, or a page that waits for it."""
    return Pages(folder, refresh).current()


class _Page(BaseHTTPRequestHandler):
    server: Server
    timeout = TIMEOUT

    def __init__(self, pages: Pages, *args: Any) -> None:
        self.pages = pages
        super().__init__(*args)

    def do_GET(self) -> None:
        """Only the page itself."""
        content = self._answer()
        if content is not None:
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        """What there is to say of the page."""
        self._answer()

    def _answer(self) -> bytes | None:
        """Send the headers; the content, or None where the client gets none."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not self.server.is_own_name(hosts[0]):
            self.send_error(421, explain=f"This page is at {self.server.url} alone.")
            return None
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return None
        content = self.pages.current().encode(errors="backslashreplace")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        return content

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line every few seconds helps nobody."""
