"""The report of a run on a port of this machine: two addresses, read only."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_opo.errors import LogError
from megatron_opo.observe.report import report_page

HOST = "127.0.0.1"
# As which a browser may ask. A page from elsewhere whose name was pointed here has another one.
NAMES = ("127.0.0.1", "localhost")
NOTHING_YET = b"no step is logged yet; this page shows the run as soon as one is\n"
RETRY_S = 1


def version_of(run_path: Path) -> str | None:
    """Another text whenever metrics.jsonl has changed; None as long as there is none."""
    try:
        status = (run_path / "metrics.jsonl").stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"{run_path}/metrics.jsonl: cannot be read: {error.strerror}") from error
    return f"{status.st_size}-{status.st_mtime_ns}"


class Pages:
    """The newest report, made when it is asked for and the run has gone on since."""

    def __init__(self, run_path: Path):
        self.run_path = run_path
        self._lock = threading.Lock()
        self._version: str | None = None
        self._page = b""

    def get(self) -> bytes:
        """Raises LogError: there are no metrics yet, or a file of the run is broken."""
        with self._lock:
            version = version_of(self.run_path)
            if version is None or version != self._version:
                text = report_page(self.run_path, live=True)
                self._page = text.encode("utf-8", errors="replace")
                self._version = version
            return self._page


@contextmanager
def serving(run_path: Path, port: int) -> Iterator[str]:
    """Serve / (the report) and /version meanwhile; the address.

    Raises:
        LogError: the port cannot be taken.
    """
    pages = Pages(run_path)

    class Handler(_Handler):
        def answer(self) -> tuple[HTTPStatus, str, bytes]:
            return respond(pages, self.path, self.headers.get("Host", ""))

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise LogError(
            f"--port {port}: cannot be taken on {HOST}: {error.strerror}; give another one, or 0 "
            "for any that is free"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def respond(pages: Pages, path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
    """Status, content type and content. No part of `path` names a file."""
    if host.rpartition(":")[0] not in NAMES and host not in NAMES:
        return HTTPStatus.FORBIDDEN, "text/plain", b"ask as 127.0.0.1 or localhost\n"
    if path == "/favicon.ico":  # browsers ask for it unasked, and tell when it is missing
        return HTTPStatus.NO_CONTENT, "image/x-icon", b""
    try:
        if path == "/" and version_of(pages.run_path) is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", NOTHING_YET
        if path == "/":
            return HTTPStatus.OK, "text/html", pages.get()
        if path == "/version":
            return HTTPStatus.OK, "text/plain", str(version_of(pages.run_path)).encode()
    except LogError as error:
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode(errors="replace")
    return HTTPStatus.NOT_FOUND, "text/plain", b"there is only / here\n"


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD; any other method gets the 501 of the base class."""

    def answer(self) -> tuple[HTTPStatus, str, bytes]:
        raise NotImplementedError

    def do_GET(self) -> None:
        status, kind, content = self.answer()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Refresh", str(RETRY_S))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are of no interest, and the terminal shows the run."""
