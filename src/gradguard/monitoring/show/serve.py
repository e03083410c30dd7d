"""A page in the browser that follows runs in progress: the report, drawn again as its records grow."""

import html
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from gradguard.errors import InvalidValueError
from gradguard.monitoring.record.file import FILE_NAME, Record, read_record
from gradguard.monitoring.record.text import printable
from gradguard.monitoring.show.report.page import render
from gradguard.monitoring.show.report.summary import labelled
from gradguard.monitoring.show.tail_view import duration

ADDRESS = "127.0.0.1"
"""Only programs on this machine reach it."""

SHARE = 0.1
"""The most of one processor core that drawing the page takes."""

_LOOK_SECONDS = 1.0
_WRITING_SECONDS = 30.0  # a record without its last line's end was cut by our look at it, if it was written so recently


def serve(paths: Sequence[str | Path], port: int = 0) -> None:
    """Show records in the browser, as their report, until Ctrl-C; the page follows runs that go on.

    **Guarantees**: it listens on 127.0.0.1 alone, and answers only requests that name this address or ``localhost``
    as their host, so that no page of another site can read it through a name of its own; it serves the page and the
    number of its version, and no file; records are only read.

    **Edge cases**: a record that is not there yet is waited for; so is one that is empty. One that cannot be read any
    more is told on the page. Drawing takes at most a tenth of a core's time, so that the page of a long record is some
    seconds behind: it says which step it shows, and how long ago that was written.

    Args:
        paths: The records, or the folders that they are or will be in.
        port: Where to listen; 0 takes a free port.

    Raises:
        RecordError: A file is there and is no record.
        InvalidValueError: The port cannot be listened on.
    """
    page = LivePage(paths)
    with suppress(KeyboardInterrupt), page_server(page, port) as server:
        page.look()
        if page.fault is not None:
            raise page.fault
        shown = ", ".join(printable(path) for path in paths)
        print(f"http://{ADDRESS}:{server.server_port}/ shows {shown}; Ctrl-C ends it", flush=True)
        threading.Thread(target=page.follow, daemon=True).start()
        server.serve_forever()


@dataclass(frozen=True)
class _View:
    """One state of the page."""

    version: str
    page: bytes
    words: str
    running: tuple["_RunningServer", ...] = ()

    def age(self, now: float) -> str:
        """Say how old what the page shows of runs in progress is at ``now``, in seconds since the epoch."""
        ages = [
            f"{f'{run.label}: ' * (len(self.running) > 1)}{run.step}, {duration(now - run.written)} ago"
            for run in self.running
        ]
        return f"{'; '.join(ages)}." if ages else ""


@dataclass(frozen=True)
class _RunningServer:
    """A run that has not ended, as it was when it was read."""

    label: str
    step: str
    written: float


class LivePage:
    """The page of some records as they are now.

    Args:
        paths: The records, or the folders that they are or will be in.

    Attributes:
        fault: What went wrong at the last look.
        view: What browsers are shown.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._seen: object = None
        self._count = 0
        self.fault: Exception | None = None
        self.view = _View("", b"", "")

    def look(self) -> bool:
        """Draw the page again if a record has changed.

        Returns:
            Whether one had.
        """
        files = [path / FILE_NAME if path.is_dir() else path for path in self._paths]
        seen = {file: _state(file) for file in files}
        if seen == self._seen:
            return False
        self._seen, self.fault = seen, None
        self._count += 1
        version = f"{os.getpid()}-{self._count}"  # another server on the same port has other versions
        try:
            self.view = _view(version, seen)
        except Exception as error:  # the next lines of the record may mend it, so the server goes on
            self.fault, words = error, f"This page cannot be drawn: {printable(error)}"
            self.view = _View(version, _message(version, words), words)
        return True

    def follow(self) -> None:
        """Look again and again, with pauses that keep the work below `SHARE` of a core.

        What counts is the time of the processor: on a busy machine a drawing takes longer and costs the same.
        """
        while True:
            begin = time.thread_time()
            self.look()
            time.sleep(max(_LOOK_SECONDS, (time.thread_time() - begin) * (1 / SHARE - 1)))


def page_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Listen for browsers on this machine.

    Args:
        page: What to show.
        port: Where; 0 takes a free port.

    Returns:
        The server, listening already.

    Raises:
        InvalidValueError: The port cannot be listened on.
    """
    if not 0 <= port < 2**16:
        raise InvalidValueError(f"expected a port from 0 to 65535, got {port}; 0 takes a free one")
    try:
        server = ThreadingHTTPServer((ADDRESS, port), type("Handler", (_Handler,), {"live": page}))
    except OSError as error:
        why = error.strerror or error
        raise InvalidValueError(f"cannot listen on port {port}: {why}. Leave out --port to take a free one") from error
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    live: LivePage
    server_version, sys_version = "gradguard", ""
    timeout = 30.0  # seconds without a byte, either way, after which a connection is closed

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        view = self.live.view
        host = re.sub(
            r":\d+$", "", self.headers.get("Host", "")
        )  # any port: a tunnel to this machine has one of its own
        path = self.path.partition("?")[0]
        if host not in (ADDRESS, "localhost"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to its own address only")
        elif path == "/":
            self._answer("text/html; charset=utf-8", view.page)
        elif path == "/version":
            told = {"version": view.version, "words": view.words, "age": view.age(time.time())}
            self._answer("application/json", json.dumps(told).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS):
            self.send_header(name, value)
        with suppress(ConnectionError, TimeoutError):  # the browser has gone
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line for each look of each browser tells nobody anything."""


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class _State(NamedTuple):
    """A value that changes when the record does."""

    identity: int
    size: int
    written: int  # in nanoseconds since the epoch


def _state(file: Path) -> _State | None:
    """The state of a file; None where nothing has been written yet."""
    try:
        found = file.stat()
    except OSError:
        return None
    return _State(found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _read(file: Path) -> Record:
    record = read_record(file)
    recent = time.time() - file.stat().st_mtime < _WRITING_SECONDS
    return replace(record, torn=False) if record.torn and record.end is None and recent else record


def _view(version: str, seen: Mapping[Path, object]) -> _View:
    records = [_read(file) for file, state in seen.items() if state]
    missing = [printable(file) for file, state in seen.items() if not state]
    words = "The page follows the run." if any(record.end is None for record in records) else "The run has ended."
    if len(records) > 1:
        words = words.replace("run", "runs").replace("has", "have")
    if missing:
        waiting = f"Waiting for {', '.join(missing)}, which gradguard run --out DIR writes from its first step on."
        words = f"{words} {waiting}" if records else waiting
    page = render(records, version, words).encode("utf-8", "replace") if records else _message(version, words)
    return _View(version, page, words, tuple(_running(records, seen)))


def _running(records: Sequence[Record], seen: Mapping[Path, object]) -> Iterator[_RunningServer]:
    for record, label in labelled(records):
        state = seen[record.path]
        if record.end is None and isinstance(state, _State):
            step = f"Step {record.steps[-1]['i']:,}" if len(record.steps) else "No step yet"
            yield _RunningServer(printable(label), step, state.written / 1e9)


def _message(version: str, words: str) -> bytes:
    script = (Path(__file__).parent / "report" / "live.js").read_text(encoding="utf-8")
    return _MESSAGE.format(version=version, words=html.escape(words), script=script).encode("utf-8", "replace")


_MESSAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradguard</title><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 sans-serif; max-width: 76ch; margin: 48px auto; padding: 0 16px; }}
</style>
</head><body data-version="{version}"><p id="live" role="status">{words}</p><script>
{script}</script></body></html>
"""
