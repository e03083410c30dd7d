"""The two sinks that get every line: a JSON Lines file and a function."""

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradguard.errors import InvalidValueError
from gradguard.monitoring.record.file import Line, RecordWriter
from gradguard.monitoring.show.sinks.base import plain


class JsonLinesSink:
    """A record as ``gradguard run`` writes it.

    Args:
        path: Where it goes; an existing file is replaced.

    Raises:
        InvalidValueError: If another monitor of this process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # training may change the working directory
        if _is_written(self.path):
            raise InvalidValueError(
                f"sink={str(path)!r} is being written by another Monitor: give each a file of its own, or close() the "
                "other first (`with gradguard.Monitor(...)` does)."
            )
        self._writer = RecordWriter(self.path)
        self.name = str(path)
        _being_written.add(self)

    def push(self, lines: Sequence[Line]) -> None:
        """Write ``lines`` and hand them to the operating system."""
        for line in lines:
            self._writer.write(line["t"], **{key: value for key, value in line.items() if key != "t"})
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        _being_written.discard(self)
        self._writer.close()


_being_written: "weakref.WeakSet[JsonLinesSink]" = weakref.WeakSet()


def _is_written(path: Path) -> bool:
    """Tell whether a living sink writes to ``path``; one that only a cycle keeps alive does not count."""
    if any(sink.path == path for sink in _being_written):
        gc.collect()
    return any(sink.path == path for sink in _being_written)


class CallableSink:
    """A function that is called with each line, as a dictionary of its own.

    Args:
        function: Takes one dictionary; what it returns is not looked at.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function
        self.name = getattr(function, "__qualname__", type(function).__qualname__)

    def push(self, lines: Sequence[Line]) -> None:
        """Call the function with each line."""
        for line in lines:
            self._function(plain(line))

    def close(self) -> None:
        """Do nothing: the function is the user's."""
