"""Follow a run in progress in the terminal."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradguard.errors import InvalidValueError, RecordError
from gradguard.monitoring.judge.diagnosis import diagnose
from gradguard.monitoring.record.file import SCHEMA, file_of, read_record
from gradguard.monitoring.record.reader import JsonlReader
from gradguard.monitoring.record.text import drop_output, encodable, printable
from gradguard.monitoring.show.run_state import RunState
from gradguard.monitoring.show.tail_view import clock, ending, event_line, line, view

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERRUPTED = 130
"""The exit code after Ctrl-C, by the shells' convention."""

BROKEN_PIPE = 141
"""The exit code after the reader of the output has closed it, the same as of ``tail -f``."""

POLL_SECONDS = 0.5
JUDGED_SECONDS, JUDGED_SHARE = 10.0, 0.02
"""The seconds between two judgements of a run in progress, and the largest share of the time that they may take."""

LONGEST_JUDGED = 16 * 2**20
"""The largest record in bytes that is judged while it is followed; `gradguard report` judges a longer one."""

LINE_SECONDS = 2.0
QUIET_SECONDS = 30.0
_QUIET_STEPS = 20


def tail(
    path: str | Path,
    *,
    once: bool = False,
    events: int = 5,
    console: "Console | None" = None,
) -> int:
    """Show a run in progress until it ends: its last step, its norms, its largest layers and its events.

    In a terminal, the function redraws one view. With any other output, it prints a line of text every few seconds, and
    one for each event.

    The view begins with the diagnosis of the run and its advice. The function diagnoses again every 10 s, less often if
    a diagnosis takes long, and only while the record is below 16 MiB.

    **Guarantees**: The record is only read. Apart from the diagnoses, each byte is read once, and memory does not grow
    with the run. The terminal is always restored.

    **Edge cases**: The function waits for a record that does not exist yet. If another run replaces the record, the
    function follows the new one from its start. If the run writes nothing for a long time, the view says since when,
    and the function continues to follow the record.

    Args:
        path: The path of the record, or of the folder that holds or will hold it.
        once: Whether to show the present state and return; a missing record is then an error.
        events: The number of last events to show.
        console: The console to print to; standard output if None.

    Returns:
        The exit code: 0 after the end of the run or with ``once``, 130 after Ctrl-C, 141 after a closed output.

    Raises:
        RecordError: If the file cannot be read or is no record, or if ``once`` is set and the file is missing.
        InvalidValueError: If ``events`` is negative.

    Example:
        >>> import tempfile
        >>> from gradguard.monitoring.record.file import RecordWriter
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> with RecordWriter(path) as writer:
        ...     writer.write("meta", version="0.1.0")
        ...     writer.write("step", i=0, loss=4.1, norm=2.5, coefficient=0.4, threshold=1.0, rule="norm")
        ...     writer.write("end", steps=1, wall=0.5, exit=0)
        >>> tail(path, once=True)
        The record has 1 step, too few to say whether the run is well. Record at least 60 steps, or better 200.
        step 0  loss 4.10  norm 2.50  threshold 1.0  coefficient 0.400  clipped 100 % of 1 (normalising)
        finished after 1 step in 0 s
        0
    """
    if events < 0:
        raise InvalidValueError(f"expected a number of events, 0 or more, got {events}; for example --lines 5")
    from rich.console import Console

    console = console or Console()
    watched = Watched(Path(path))
    try:
        with encodable(console.file):
            if once:
                _show_once(watched, events, console)
            elif console.is_terminal and not console.is_dumb_terminal:
                _show_live(watched, events, console)
            else:
                _print_lines(watched, events, console)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE


class Watched:
    """A record and the state of its run so far.

    Args:
        path: The path of the record, or of the folder that holds or will hold it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._follower = JsonlReader(path)
        self.run = RunState()
        self._judge_at, self._judged_whole = float("-inf"), False

    def look(self) -> list[dict[str, Any]]:
        """Read the new lines; the first line of another run, in this or another file, resets the state.

        Returns:
            The new lines.

        Raises:
            RecordError: If the file cannot be read, or is no record.
        """
        lines = self._follower.poll()
        for entry in lines:
            if entry["t"] == "meta":
                self.run = RunState()
            self.run.add(entry)
        return lines

    def judge(self) -> None:
        """Diagnose the whole record if a diagnosis is due and the record is not too long."""
        began = time.monotonic()
        last = self.run.end is not None and not self._judged_whole
        if not self.there or not (last or began >= self._judge_at):
            return
        self._judged_whole = self.run.end is not None
        with suppress(OSError, RecordError):
            if file_of(self.path).stat().st_size <= LONGEST_JUDGED:
                found = diagnose(read_record(self.path))
                advice = "" if found.is_well else f" {found.cause.advice}"
                self.run.diagnosis = f"{found.sentence}{advice}"
        took = time.monotonic() - began
        self._judge_at = began + max(JUDGED_SECONDS, took / JUDGED_SHARE)

    @property
    def there(self) -> bool:
        """Whether the first line of a run has been read."""
        return bool(self.run.meta)

    def title(self) -> str:
        """Return the title: the script and the path of its record."""
        script = " ".join(self.run.meta.get("argv", ())[:3])
        return f"{script} ({self.path})" if script else str(self.path)

    def status(self, now: float) -> tuple[str, str]:
        """Return the state at ``now`` (seconds since the epoch) in words, and a style for them."""
        words, style = self._status(now)
        schema, seen = self.run.meta.get("schema", SCHEMA), self._follower
        remarks = [
            (schema > SCHEMA, f"written by a newer gradguard (schema {schema}): parts may be missing here"),
            (seen.skipped, f"{seen.skipped / 2**20:,.0f} MiB of the start of a long record were not read"),
            (seen.unreadable, f"{seen.unreadable} unreadable lines"),
            (seen.dropped, f"{seen.dropped} invalid fields"),
        ]
        return "; ".join([words, *(said for holds, said in remarks if holds)]), style

    def _status(self, now: float) -> tuple[str, str]:
        if self.run.end is not None:
            return ending(self.run.end)
        if self._follower.missing:
            gone = "the record was deleted: waiting for another run"
            # The path comes last, where a terminal wraps it as a whole.
            return (gone if self.there else f"no record yet: waiting for {self.path}"), "yellow"
        if not self.there:
            return "waiting for the first step", "yellow"
        changed = self._follower.changed
        usual = max(QUIET_SECONDS, _QUIET_STEPS * (self.run.seconds_per_step or 0.0))
        if changed is None or now - changed <= usual:
            return "running", "green"
        return f"no new line since {clock(changed, now)}: killed, or busy without steps", "yellow"


def _show_once(watched: Watched, events: int, console: "Console") -> None:
    watched.look()
    if not watched.there:
        raise RecordError(
            f"no record at {watched.path}, or the record is still empty. Make one: gradguard run --out DIR train.py; "
            "or leave out --once to wait for the record"
        )
    watched.judge()
    if console.is_terminal:
        console.print(_drawn(watched, events, console))
        return
    shown = map(event_line, _last(list(watched.run.events), events))
    diagnosis, status = printable(watched.run.diagnosis), printable(watched.status(time.time())[0])
    for text in [diagnosis, *shown, line(watched.run), status]:
        _write(console, text)


def _drawn(watched: Watched, events: int, console: "Console") -> "RenderableType":
    return view(watched.run, watched.status(time.time()), watched.title(), events, console)


def _show_live(watched: Watched, events: int, console: "Console") -> None:
    """Redraw the view on the terminal's alternate screen, which stays clean after a resize; print the last view."""
    from rich.live import Live

    watched.look()
    watched.judge()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False)
    try:
        live.start()  # inside the block, because Ctrl-C may arrive during the start
        live.update(_drawn(watched, events, console), refresh=True)
        while watched.run.end is None:
            time.sleep(POLL_SECONDS)
            watched.look()
            watched.judge()
            live.update(_drawn(watched, events, console), refresh=True)
    finally:
        live.stop()
        if watched.there:
            console.print(_drawn(watched, events, console))


def _print_lines(watched: Watched, events: int, console: "Console") -> None:
    """Print lines of text: each event, the numbers every few seconds, and each change of the status."""
    printed_at, said = float("-inf"), ""
    has_news = False  # whether there are steps that no printed line covers
    first = True  # of the events before the start, only the last ones are printed
    while True:
        lines = watched.look()
        new = [entry for entry in lines if entry["t"] == "event"]
        for event in _last(new, events) if first else new:
            _write(console, event_line(event))
        has_news = has_news or any(entry["t"] == "step" for entry in lines)
        has_ended = watched.run.end is not None
        if has_news and (has_ended or time.monotonic() - printed_at >= LINE_SECONDS):
            _write(console, line(watched.run))
            has_news, first, printed_at = False, False, time.monotonic()
        if has_ended:
            watched.judge()
            _write(console, printable(watched.run.diagnosis))
        words = watched.status(time.time())[0]
        if words != said and (words != "running" or said):
            _write(console, printable(words))
        said = words
        if has_ended:
            return
        time.sleep(POLL_SECONDS)


def _last(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return events[max(0, len(events) - count) :]


def _write(console: "Console", text: str) -> None:
    """Write and flush one unwrapped line; write nothing for an empty text."""
    console.file.write(f"{text}\n" if text else "")
    console.file.flush()
