"""Run a script or module as Python itself does, and return its exit code."""

import builtins
import concurrent.futures.thread
import functools
import importlib.util
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradguard.errors import CommandError
from gradguard.monitoring.observe.termination import BySignal, SignalHandlers

INTERRUPTED = BySignal.of(signal.SIGINT)
"""The exit code of a program that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled script or module, ready to run as ``__main__``.

    Attributes:
        code: The compiled code.
        main: The module that becomes ``__main__``.
        argv: The program's ``sys.argv``.
        path_entry: The entry that Python puts first in ``sys.path``.
    """

    code: types.CodeType
    main: types.ModuleType
    argv: Sequence[str]
    path_entry: str


def load(words: Sequence[str], is_module: bool) -> Program:
    """Compile a script, or a module as ``python -m`` does.

    Args:
        words: The script or the module, then its arguments.
        is_module: Whether ``words`` names a module.

    Returns:
        The program, not yet run.

    Raises:
        CommandError: If the script or module does not exist, or cannot be run.
    """
    return (load_module if is_module else load_script)(words[0], words[1:])


def load_script(path: str, arguments: Sequence[str]) -> Program:
    """Compile the script at ``path``.

    Args:
        path: A Python file.
        arguments: The rest of the command line.

    Returns:
        The program, not yet run.

    Raises:
        CommandError: If the file does not exist, or is not a Python script.
    """
    file = Path(path)
    if file.is_dir():
        raise CommandError(f"{path} is a folder: name the script in it, or run a package with -m.")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}. Usage: gradguard run script.py args...") from error
    main = _main_module(str(file.absolute()))
    return Program(_compile(source, path, main.__file__ or path), main, [path, *arguments], str(file.resolve().parent))


def load_module(name: str, arguments: Sequence[str]) -> Program:
    """Find and compile the module ``name``, as ``python -m`` does.

    Args:
        name: A module, or a package with a ``__main__``.
        arguments: The rest of the command line.

    Returns:
        The program, not yet run.

    Raises:
        CommandError: If the module does not exist, or cannot be run.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = spec.loader.get_code(spec.name) if spec and hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    except Exception as error:  # importing a package may raise anything
        raise CommandError(f"cannot import {name}: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(here)
    if spec is None or code is None:
        raise CommandError(f"no module {name} to run: expected the name that `python -m` takes, without .py.")
    main = _main_module(spec.origin or name)
    main.__spec__, main.__package__ = spec, spec.parent
    return Program(code, main, [spec.origin or name, *arguments], str(Path.cwd()))


def seed_generators(seed: int | None) -> None:
    """Seed the random generators of Python, PyTorch, and NumPy if it is installed.

    Args:
        seed: A number from 0 to 2^32 - 1, the largest that NumPy takes; None does not seed.
    """
    if seed is None:
        return
    import torch

    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed)
    torch.manual_seed(seed)


def run(program: Program, signals: SignalHandlers | None = None) -> int:
    """Run ``program`` as ``__main__`` and return its exit code; print an uncaught exception as Python does.

    Args:
        program: The program.
        signals: The active signal handlers, which store signals after the program. By default, handlers are installed
            for the run only.

    Returns:
        The exit code; a `BySignal` if a signal ended the program.
    """
    if signals is None:
        with SignalHandlers() as signals:
            return run(program, signals)
    sys.modules["__main__"] = program.main
    sys.argv = list(program.argv)
    sys.path.insert(0, program.path_entry)
    before = threading.enumerate()
    code = _until_a_signal(functools.partial(_executed, program), signals)
    if not isinstance(code, BySignal):
        code = _until_a_signal(functools.partial(_end_threads, before), signals) or code
    signals.hold()
    return code


def _until_a_signal(work: Callable[[], int | None], signals: SignalHandlers) -> int:
    try:
        return work() or 0
    except KeyboardInterrupt as interrupt:
        signals.hold(signal.SIGINT)
        _show(interrupt, frames=2)
        return INTERRUPTED
    except SystemExit as stop:
        return _exit_code(stop)


def _executed(program: Program) -> int:
    try:
        exec(program.code, program.main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _show(error, frames=1)
        return 1
    return 0


def _show(error: BaseException, frames: int) -> None:
    """Print an uncaught exception as Python does, without the first ``frames``, which belong to this module."""
    own = error.__traceback__
    for _ in range(frames):
        own = own.tb_next if own else None
    sys.excepthook(type(error), error.with_traceback(own), own)


def _end_threads(before: list[threading.Thread]) -> None:
    """Wait for the threads that the program left running, as Python does at its shutdown.

    The threads of an executor run until Python's shutdown stops all executors, so the function stops the executors
    first. If the process had other non-daemon threads ``before``, it continues after the program: the function then
    leaves the executors running.
    """
    mine = all(thread.daemon or thread is threading.main_thread() for thread in before)
    if mine and any(map(_is_of_executor, _left(before))):
        for end in reversed(list(getattr(threading, "_threading_atexits", ()))):
            end()
    while waiting := [thread for thread in _left(before) if mine or not _is_of_executor(thread)]:
        waiting[0].join()


def _left(before: list[threading.Thread]) -> list[threading.Thread]:
    me = threading.current_thread()
    return [t for t in threading.enumerate() if t not in before and not t.daemon and t is not me]


def _is_of_executor(thread: threading.Thread) -> bool:
    """Return whether a thread works for a `ThreadPoolExecutor`, or manages a process pool of Python or joblib."""
    return thread in concurrent.futures.thread._threads_queues or "ExecutorManagerThread" in type(thread).__name__


def _main_module(file: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__dict__["__builtins__"] = builtins
    return main


def _compile(source: bytes, path: str, file: str) -> types.CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        shown = "".join(traceback.format_exception_only(error)).strip()
        raise CommandError(f"{path} is not a Python script:\n{shown}") from error


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1
