"""A live page of a run: its report, made anew from the files whenever they have changed.

Invariants: it listens on this machine alone; nothing but the page is served, and only to a browser that asked for this
server by name, so that no other site can read it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from rollover.errors import ResourceError, RolloverError
from rollover.report.metrics import FILE_NAME
from rollover.report.record import JOURNAL, read_run
from rollover.report.run_report import render_report
from rollover.report.sample_cards import read_cards

HOST = "127.0.0.1"
_TIMEOUT_S = 10.0
"""Seconds that a browser has to send its request."""


def open_server(run_dir: Path, port: int) -> ThreadingHTTPServer:
    """Open a server of the run's page on ``http://127.0.0.1:port/``; 0 picks a free port.

    Raises:
        RunError: it is not a run directory, or one of its files is damaged.
        ResourceError: the port is taken.
    """
    page = _LivePage(run_dir)
    page.text()

    class Handler(BaseHTTPRequestHandler):
        """Answers one request for the page."""

        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            """Answer with the page."""
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                self.send_error(403, f"this page is only served as http://{HOST}")
            elif self.path != "/":
                self.send_error(404)
            else:
                self._answer()

        do_HEAD = do_GET

        def _answer(self) -> None:
            try:
                status, content, kind = 200, page.text(), "text/html"
            except RolloverError as error:  # a run that is being written: the next request may find it whole
                status, content, kind = 503, str(error), "text/plain"
            body = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command == "GET":
                with suppress(ConnectionError):  # the browser has gone
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ResourceError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another --port") from error
    return server


class _LivePage:
    """The page of a run, kept until one of its files changes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._made_from: list[tuple[int, int]] | None = None
        self._text = ""
        self._lock = Lock()

    def text(self) -> str:
        """Return the page of what the files hold now. Raises ``RunError`` if they are damaged."""
        files = (self._run_dir / name for name in (FILE_NAME, JOURNAL, f"{JOURNAL}-wal"))
        with self._lock:
            now = [(s.st_mtime_ns, s.st_size) for file in files if file.exists() and (s := file.stat())]
            if now != self._made_from:
                self._text = render_report(read_run(self._run_dir), read_cards(self._run_dir), is_live=True)
                self._made_from = now
            return self._text
