"""Which lines of the checked function no input reached: a wrong backward there stays unseen."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import nn

from gradguard.check.function import is_autograd_function
from gradguard.check.report import Finding


class Branches:
    """A block in which the lines are noted that run of functions in the file of ``fn``, backwards included."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        code = _code_of(fn)
        self._file = code.co_filename if code is not None else None
        self._visited: dict[CodeType, set[int]] = {}
        self._before: Any = None

    def __enter__(self) -> Branches:
        self._before = sys.gettrace()
        if self._file is not None:
            sys.settrace(self._enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            sys.settrace(self._before)

    def unvisited(self) -> list[Finding]:
        """Return a note for each stretch of lines that did not run, of functions that did."""
        if self._file is None:
            return [Finding("branches", "the function has no Python code of its own: its branches cannot be seen")]
        notes = []
        for code, visited in sorted(self._visited.items(), key=lambda one: one[0].co_firstlineno):
            lines = {line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno}
            for first, last in _stretches(sorted(lines), visited):
                source = linecache.getline(code.co_filename, first).strip()
                said = f"line {first}" if first == last else f"lines {first} to {last}"
                message = f"{said} of {Path(code.co_filename).name}, in {code.co_name}, never ran: {source}"
                notes.append(Finding("branches", message))
        return notes

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._visited.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line


def _stretches(lines: list[int], visited: set[int]) -> list[tuple[int, int]]:
    """Return the first and the last line of what did not run in one go."""
    found: list[tuple[int, int]] = []
    going = False
    for line in lines:
        if line in visited:
            going = False
        elif going:
            found[-1] = (found[-1][0], line)
        else:
            found.append((line, line))
            going = True
    return found


def _code_of(fn: Any) -> CodeType | None:
    if isinstance(fn, nn.Module):
        fn = type(fn).forward
    owner = getattr(fn, "__self__", None)
    if is_autograd_function(owner):
        fn = owner.forward
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return getattr(getattr(fn, "__func__", fn), "__code__", None)
