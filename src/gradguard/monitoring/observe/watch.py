"""Record a process from inside: in a notebook, by a script's own call, or by `GRADGUARD=run.jsonl python train.py`."""

import atexit
import functools
import glob
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gradguard.arguments import check_whole
from gradguard.errors import InvalidTypeError, RecordError
from gradguard.monitoring.judge.health import Finding
from gradguard.monitoring.observe.meta import OWNER, program_facts, rank_and_world
from gradguard.monitoring.observe.observer import Observer, check_callable
from gradguard.monitoring.observe.termination import before_signals
from gradguard.monitoring.record.file import FILE_NAME, first_line, read_record
from gradguard.monitoring.record.record_lines import known_fields
from gradguard.script_events import listening

VARIABLE = "GRADGUARD"
"""The environment variable with the path of the record; `start_up`, installed outside the package, has a copy."""

REPLACED = "GRADGUARD_REPLACED"
"""The environment variable with the identity of the file that `gradguard run --force` may replace."""


class Watch:
    """A running watch, as returned by `watch`.

    **Guarantees**: the watch does not change the training. An exception in it becomes an event in the record. A second
    `close` does nothing. A notebook kernel that ends without `close` still completes the record.

    Args:
        observer: The observer that records the steps.
        whole_process: Whether the watch covers the whole process; the ``end`` line then has the exit code if an
            uncaught exception (1) or Ctrl-C (130) ended it.
    """

    def __init__(self, observer: Observer, whole_process: bool = False) -> None:
        self._observer, self._stack, self._whole_process = observer, ExitStack(), whole_process
        self._stack.enter_context(listening(observer))
        atexit.register(self.close)
        self._give_back: Callable[[], None] = lambda: None
        if not whole_process:
            self.end_by_signals()

    @property
    def path(self) -> Path | None:
        """The path of the record; None if another process writes it, or before the file is opened."""
        return self._observer.path

    @property
    def steps(self) -> int:
        """The number of optimizer steps recorded so far."""
        return self._observer.steps

    def close(self) -> None:
        """Stop watching and write the record's last line; a second call does nothing."""
        global _active
        if _active is self:
            _active = None
        atexit.unregister(self.close)
        self._give_back()
        self._stack.close()
        self._observer.close(*(_how_it_ends() if self._whole_process else (None, False)))

    def end_by_signals(self) -> None:
        """Let SIGTERM and SIGHUP write the end of the record before their usual effect."""
        self._give_back = before_signals(self._terminated, self._observer.flush)

    def _terminated(self, code: int) -> None:
        self._observer.close(code, interrupted=True)

    def report(self, path: str | Path | None = None) -> Path:
        """Draw the current record as an HTML page, during the watch or after it.

        Args:
            path: The path of the page; by default beside the record and with its name: ``run.html``.

        Returns:
            The path of the page.

        Raises:
            RecordError: If this process has no record: it has made no step yet, or another process writes the record.
        """
        if self.path is None:
            raise RecordError("this process writes no record: call report() in the process of rank 0.")
        self._observer.flush()
        return page_of(self.path, path)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def page_of(record: Path, path: str | os.PathLike | None) -> Path:
    """Draw a record as one HTML page at ``path``, by default beside the record, and return the page's path."""
    from gradguard.monitoring.show.report import page_beside, write_report

    return write_report([read_record(record)], page_beside(record) if path is None else Path(path))


def watch(
    path: str | Path | None = None,
    *,
    every: int | None = None,
    on_finding: Callable[[Finding], object] | None = None,
    argv: bool = False,
) -> Watch:
    """Record every optimizer step of this process until ``close()``; meant for notebooks.

    **Guarantees**: the training's numbers stay bit-identical; only one watch runs at a time.

    **Edge cases**:

    =====================================  ====================================================================
    situation                              what happens
    =====================================  ====================================================================
    called again, as when a cell is rerun  the earlier watch is closed, then the new one begins
    the record exists                      a number is added to the name; a record is never replaced
    several processes                      only rank 0 writes
    the folder cannot be written to        one warning and no record; the training continues
    SIGTERM, SIGHUP                        the last rows and the end are written, then the signal acts as usual
    a forked child                         writes nothing
    =====================================  ====================================================================

    Args:
        path: The path of the record, or a folder for it; by default a new folder ``runs/watch-<time>``.
        every: The number of steps between two writes of each parameter's norm. By default the interval is chosen so
            that a step takes some 200 bytes; it doubles at step 50,000, again at 100,000, and so on.
        on_finding: A function called with each health finding: an object with ``kind``, ``severity``, ``message``,
            ``advice``, ``first_step``, ``last_step``, ``params``, ``optimizer`` and ``value``. It runs in its own
            thread, on rank 0, at the latest 50 steps or 2 s after the step. If it raises, the record gets an event.
            `close` waits for it for up to 10 s.
        argv: Whether to write the command line unredacted; by default secrets in it are hidden.

    Returns:
        The watch, with ``close()`` and ``report()``; it is also a context manager that closes itself.

    Raises:
        InvalidValueError: If ``every`` is below 1.
        InvalidTypeError: If ``path`` is not a path, or ``on_finding`` is not callable.

    Example:
        >>> import gradguard as gg, tempfile, torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with watch(tempfile.mkdtemp()) as seen:
        ...     layer(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> seen.steps, seen.path.name
        (1, 'run.jsonl')
    """
    if every is not None:
        check_whole("every", every)
    if path is not None and not isinstance(path, str | os.PathLike):
        raise InvalidTypeError(f"path: expected a path such as 'run.jsonl', got {type(path).__name__}.")
    check_callable(on_finding)
    stop_watching()
    rank, _ = rank_and_world()
    target = None if rank else _record_path(path)
    return _begin(Watch(Observer(target, program_facts(keep_arguments=argv), every=every, on_finding=on_finding)))


def watch_process() -> None:
    """Start the watch that the environment variable requests; `start_up` calls this after torch's import.

    The record is opened at the first step, when the role of this process is known. A launcher, which makes no step,
    writes none. A process of rank 0 uses the path itself. A child of a watched process adds its PID to the name.
    """
    if _active is None:
        path = Path(os.environ[VARIABLE]).absolute()
        in_child = functools.partial(record_of_fork, path)
        _begin(Watch(Observer(lambda: _opened(path), program_facts(), in_child=in_child), whole_process=True))


@contextmanager
def children_watched(path: Path | None, replaced: str = "") -> Iterator[None]:
    """Let Python processes started inside the block record themselves, by setting the environment variables.

    A process without an optimizer step, such as a DataLoader worker, writes nothing.

    Args:
        path: The record of this process; the children's records go beside it. None leaves the
            environment unchanged.
        replaced: The `identity` of a file that may be replaced by the process that writes the record.
    """
    if path is None:
        yield
        return
    kept = {name: os.environ.get(name) for name in (VARIABLE, OWNER, REPLACED)}
    os.environ |= {VARIABLE: str(path), OWNER: f"{os.getpid()} {time.time()}", REPLACED: replaced}
    try:
        yield
    finally:
        for name in kept:
            os.environ.pop(name, None)
        os.environ |= known_fields(kept)


def record_of_fork(path: Path, observer: Observer) -> Path | None:
    """Return the path of a forked child's record, and register the calls that complete it.

    Args:
        path: The record of the parent.
        observer: The observer of the child.

    Returns:
        The path of the child's record; None if another process writes.
    """
    # multiprocessing's children do not run atexit handlers; after os._exit() only the flushed lines remain.
    multiprocessing.util.Finalize(None, functools.partial(observer.close, None, False), exitpriority=0)
    before_signals(lambda code: observer.close(code, interrupted=True), observer.flush)
    return _own_path(path)


def identity(path: Path | None) -> str:
    """Return a text that identifies a file and its current content: it changes when the file is written or replaced.

    Args:
        path: A file.

    Returns:
        Device, inode, modification time and size; empty without a file.
    """
    with suppress(OSError):
        if path is not None:
            found = path.stat()
            return f"{found.st_dev} {found.st_ino} {found.st_mtime_ns} {found.st_size}"
    return ""


def remove_replaced(path: Path, replaced: str) -> None:
    """Delete the record that may be replaced, unless another run or a child has written to it in the meantime.

    Args:
        path: The path of the record.
        replaced: The `identity` of the record when its replacement was requested.
    """
    if replaced and identity(path) == replaced:
        path.unlink(missing_ok=True)


def records_beside(path: Path | None) -> list[Path]:
    """Return the existing records of a program: the one at ``path``, and those of the processes that it started."""
    return [] if path is None else sorted(path.parent.glob(f"{glob.escape(path.stem)}*{path.suffix}"))


def process_of(path: Path) -> tuple[int | None, int | None]:
    """Return the PIDs of the process that writes a record and of the watched process that it descends from.

    Args:
        path: The path of a record. A PID is None if the first line lacks it or is not written yet.
    """
    meta = first_line(path)
    return meta.get("pid"), meta.get("root")


def stop_watching() -> None:
    """Close the running watch, if any."""
    if _active is not None:
        _active.close()


_active: Watch | None = None


def _begin(watch: Watch) -> Watch:
    global _active
    _active = watch
    return watch


def _record_path(path: str | Path | None) -> Path:
    if path is None:
        path = Path("runs") / f"watch-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(path)
    return (path if path.suffix in (".jsonl", ".json") else path / FILE_NAME).absolute()


def _opened(path: Path) -> Path | None:
    """Return the path of this process's record, and let signals complete that record."""
    own = _own_path(path)
    if own is not None and _active is not None:
        _active.end_by_signals()
    return own


def _own_path(path: Path) -> Path | None:
    own = _path_of_process(path)
    if own == path:
        remove_replaced(path, os.environ.get(REPLACED, ""))
    return own


def _path_of_process(path: Path) -> Path | None:
    """Return the path of this process's record, never one that another process writes; None above rank 0."""
    rank, world = rank_and_world()
    if rank:
        return None
    owner, _, started = os.environ.get(OWNER, "").partition(" ")
    with suppress(OSError, ValueError):  # a child or a restarted process of this run has written the file
        if path.stat().st_mtime >= float(started):
            owner, world = "", 1
    if world > 1 or owner == str(os.getpid()):
        return path
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _how_it_ends() -> tuple[int | None, bool]:
    """Return the exit code, None if it is unknown, and whether Ctrl-C ended the program."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None, False
    return (130, True) if isinstance(error, KeyboardInterrupt) else (1, False)
