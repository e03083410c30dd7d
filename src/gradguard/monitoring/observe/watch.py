"""Watching from inside: a notebook, a script's own call, and `GRADGUARD=run.jsonl python train.py`."""

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
"""The environment variable that holds the path of the record, as `start_up` has it, which is installed beside us."""

REPLACED = "GRADGUARD_REPLACED"
"""The environment variable that says which file `gradguard run --force` was asked to replace."""


class Watch:
    """A watch that is on; from `watch`.

    **Guarantees**: what it sees it does not change; its failures become an event in the record; closing it twice is
    harmless, and so is a kernel that ends without a call of `close`.

    Args:
        observer: The observer that watches.
        whole_process: Whether it was on from the start, so that how Python ends is how the training ended.
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
        """The record; None where another process writes it, and as long as it is not known which one does."""
        return self._observer.path

    @property
    def steps(self) -> int:
        """Optimizer steps seen so far."""
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
        """Let SIGTERM and SIGHUP write the end of the record, before they do what they would have done."""
        self._give_back = before_signals(self._terminated, self._observer.flush)

    def _terminated(self, code: int) -> None:
        self._observer.close(code, interrupted=True)

    def report(self, path: str | Path | None = None) -> Path:
        """Draw the record as it is now, whether or not the watch is still on.

        Args:
            path: The page; by default beside the record, with its name: ``run.html``.

        Returns:
            The page.

        Raises:
            RecordError: There is no record: nothing has been trained yet, or this process writes none.
        """
        if self.path is None:
            raise RecordError("this process writes no record: ask for the report on the process of rank 0.")
        self._observer.flush()
        return page_of(self.path, path)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def page_of(record: Path, path: str | os.PathLike | None) -> Path:
    """Draw a record as one HTML page at ``path``, by default beside it, and return where that is."""
    from gradguard.monitoring.show.report import page_beside, write_report

    return write_report([read_record(record)], page_beside(record) if path is None else Path(path))


def watch(
    path: str | Path | None = None,
    *,
    every: int | None = None,
    on_finding: Callable[[Finding], object] | None = None,
    argv: bool = False,
) -> Watch:
    """Watch every optimizer step of this process from now on, until ``close()``: for notebooks.

    **Guarantees**: the training's numbers stay bit-identical; only one watch is on at a time.

    **Edge cases**:

    =====================================  ====================================================================
    situation                              what happens
    =====================================  ====================================================================
    called again, as when a cell is rerun  the watch before is closed, then the new one begins
    the record exists                      a number is added to its name; a record is never replaced
    several processes                      only that of rank 0 writes
    the folder cannot be written to        one warning, and no record; the training goes on
    SIGTERM, SIGHUP                        last rows and end are written, then the signal acts as without
    a forked child                         writes nothing
    =====================================  ====================================================================

    Args:
        path: The record, or a folder for it; by default a new folder ``runs/watch-<time>``.
        every: Write the norm of each parameter every so many steps; by default so that a step takes
            some 200 bytes, and half as often from step 50,000 on, a quarter as often from 100,000, and so on.
        on_finding: Called with each health finding as it is made: an object with ``kind``, ``severity``, ``message``,
            ``advice``, ``first_step``, ``last_step``, ``params``, ``optimizer`` and ``value``. It runs in a thread of
            its own, on the process of rank 0, at the latest 50 steps or 2 s after the step; what it raises is an event
            in the record. `close` waits up to 10 s for it.
        argv: Write the command line as it is; by default secrets in it are hidden.

    Returns:
        The watch: ``close()``, ``report()``, and a context manager that closes it.

    Raises:
        InvalidValueError: If ``every`` is below 1.
        InvalidTypeError: If ``path`` is not a path, or ``on_finding`` no function.

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
    """Begin to watch this process as the environment variable asks; what `start_up` calls when torch is there.

    The record is opened at the first step, by which time it is known which process this is: a launcher takes none,
    a process of rank 0 the path itself, and a child of a watched process a name with its own number.
    """
    if _active is None:
        path = Path(os.environ[VARIABLE]).absolute()
        in_child = functools.partial(record_of_fork, path)
        _begin(Watch(Observer(lambda: _opened(path), program_facts(), in_child=in_child), whole_process=True))


@contextmanager
def children_watched(path: Path | None, replaced: str = "") -> Iterator[None]:
    """Let Python processes that begin inside the block watch themselves, as with the environment variable.

    One that makes no optimizer step, such as a worker of a data loader, writes nothing.

    Args:
        path: The record of this process, beside which theirs go; None to leave them alone.
        replaced: From `identity`: which file may be replaced, by whichever process writes the record.
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
    """Return the record of a forked child, and let it have an end.

    Args:
        path: The record of the parent.
        observer: The one of the child.

    Returns:
        The record; None where another process writes.
    """
    # The children of multiprocessing end without a word to atexit; one that calls os._exit() leaves what was flushed.
    multiprocessing.util.Finalize(None, functools.partial(observer.close, None, False), exitpriority=0)
    before_signals(lambda code: observer.close(code, interrupted=True), observer.flush)
    return _own_path(path)


def identity(path: Path | None) -> str:
    """Return what tells this file, as it is now, from another one, and from itself once somebody writes to it.

    Args:
        path: A file.

    Returns:
        The words; empty where there is no file.
    """
    with suppress(OSError):
        if path is not None:
            found = path.stat()
            return f"{found.st_dev} {found.st_ino} {found.st_mtime_ns} {found.st_size}"
    return ""


def remove_replaced(path: Path, replaced: str) -> None:
    """Delete the record that is to be replaced; not one that another run, or a child of this one, writes by now.

    Args:
        path: Where the record is.
        replaced: Its `identity` when it was asked to be replaced.
    """
    if replaced and identity(path) == replaced:
        path.unlink(missing_ok=True)


def records_beside(path: Path | None) -> list[Path]:
    """Return the record at ``path`` and those of the processes that a program started, as far as they are there."""
    return [] if path is None else sorted(path.parent.glob(f"{glob.escape(path.stem)}*{path.suffix}"))


def process_of(path: Path) -> tuple[int | None, int | None]:
    """Return the number of the process that writes a record, and of the first watched one of those it comes from.

    Args:
        path: A record; None stands for what it does not say, or not yet.
    """
    meta = first_line(path)
    return meta.get("pid"), meta.get("root")


def stop_watching() -> None:
    """End the watch that is on, if one is: another one takes over."""
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
    """The record of this process, which from now on ends in order."""
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
    """The record of this process: None where another one writes, never a file that another process writes."""
    rank, world = rank_and_world()
    if rank:
        return None
    owner, _, started = os.environ.get(OWNER, "").partition(" ")
    with suppress(OSError, ValueError):  # another process of this run wrote it: a child, or one that was restarted
        if path.stat().st_mtime >= float(started):
            owner, world = "", 1
    if world > 1 or owner == str(os.getpid()):
        return path
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _how_it_ends() -> tuple[int | None, bool]:
    """The exit code as far as it is known, and whether Ctrl-C ended the program."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None, False
    return (130, True) if isinstance(error, KeyboardInterrupt) else (1, False)
