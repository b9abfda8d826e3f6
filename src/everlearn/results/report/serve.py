"""Serve the report on this machine, as a page that reloads itself while runs are in progress."""

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

HOST = re.compile(r"(\[[0-9a-f:]+\]|[0-9a-z.-]+)(?::\d{1,5})?")  # a name or address, with an optional port
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
TIMEOUT = 10.0  # seconds after which an inactive client is disconnected
FileVersion = tuple[int, int, int]  # time of the last change, size and inode


class ReportPage:
    """Report page of a folder, which reads a file again only if it has changed.

    Args:
        folder: folder of results; invalid or unfinished files are skipped.
        refresh: seconds after which the page reloads itself.
    """

    def __init__(self, folder: Path, refresh: int) -> None:
        self.folder = folder
        self.refresh = refresh
        self._lock = threading.Lock()  # every request has its own thread
        self._results: dict[Path, tuple[FileVersion, Result | None]] = {}
        self._page: str | None = None

    def render(self) -> str:
        """Return the page with the current results, or one that waits for results."""
        with self._lock:
            has_changed = self._read_changed_files()
            if has_changed or self._page is None:
                self._page = self._create_page()
            return self._page

    def _read_changed_files(self) -> bool:
        """Read the files that have changed, and return whether there are any."""
        versions = {}
        for path in sorted(self.folder.glob("*.json")):
            version = _file_version(path)
            if version is not None:
                versions[path] = version

        read_versions = {path: version for path, (version, _) in self._results.items()}
        if versions == read_versions:
            return False
        results = {}
        for path, version in versions.items():
            if read_versions.get(path) == version:
                results[path] = self._results[path]
            else:
                results[path] = (version, _load(path))
        self._results = results
        return True

    def _create_page(self) -> str:
        results = [result for _, result in self._results.values() if result is not None]
        if results:
            return html(results, f"Everlearn: {self.folder}", self.refresh)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{self.refresh}">'
            f"<title>Everlearn</title><p>No results in {escape(str(self.folder))} yet. This page reloads every "
            f"{self.refresh} seconds."
        )


def _file_version(path: Path) -> FileVersion | None:
    try:
        status = path.stat()
    except OSError:
        return None  # it has just been removed
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load(path: Path) -> Result | None:
    try:
        return Result.load(path)
    except (ValueError, OSError):
        return None  # unfinished or not a result; 'everlearn report' names it


class Server(ThreadingHTTPServer):
    """Server of a report page for this machine only; ``serve_forever()`` starts it.

    Args:
        page: the page.
        port: port to listen on; 0 for any free port.
    """

    def __init__(self, page: ReportPage, port: int) -> None:
        super().__init__(("127.0.0.1", port), partial(_Handler, page))

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def is_local_host(self, host: str) -> bool:
        """Whether a ``Host`` header names this machine.

        Another site could let its own name resolve to this address (DNS rebinding), and would then read the page.
        """
        match = HOST.fullmatch(host.strip().lower())
        return match is not None and match[1].strip("[]") in {*LOCAL_NAMES, str(self.server_address[0])}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors in one line, but ignore clients that disconnect or time out."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            message = "".join(traceback.format_exception_only(error)).strip()
            print(printable_lines(f"everlearn: The page could not be served: {message}"), file=sys.stderr)


def create_server(folder: Path, port: int = 0, refresh: int = 10) -> Server:
    """Create a server of a folder's report; ``serve_forever()`` starts it, and ``url`` is its address.

    Args:
        folder: folder of results; invalid or unfinished files are skipped.
        port: port to listen on; 0 for any free port.
        refresh: seconds after which the page reloads itself.
    """
    return Server(ReportPage(folder, refresh), port)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = TIMEOUT

    def __init__(self, page: ReportPage, *args: Any) -> None:
        self.page = page
        super().__init__(*args)

    def do_GET(self) -> None:
        """Send the headers and the page."""
        content = self._send_headers()
        if content is not None:
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        """Send the headers of the page."""
        self._send_headers()

    def _send_headers(self) -> bytes | None:
        """Send the headers and return the page, or None if the request is refused."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not self.server.is_local_host(hosts[0]):
            self.send_error(421, explain=f"This page is served only at {self.server.url}.")
            return None
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return None
        content = self.page.render().encode(errors="backslashreplace")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        return content

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page reloads every few seconds."""
