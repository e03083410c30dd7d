"""The two sinks that get every line: a JSON Lines file and a function."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradguard.json_values import jsonable
from gradguard.monitoring.record.file import Line, RecordWriter
from gradguard.monitoring.record.text import on_stderr


class JsonLinesSink:
    """A record as ``gradguard run`` writes it.

    Args:
        path: Where it goes; where a file exists, a number is added to the name.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # training may change the working directory
        self._writer = RecordWriter(path)
        self.path, self.name = self._writer.path, str(self._writer.path)
        if self.path != path:
            on_stderr(f"{path} exists and is kept: this run is recorded in {self.path.name}")

    def push(self, lines: Sequence[Line]) -> None:
        """Write ``lines`` and hand them to the operating system."""
        for line in lines:
            self._writer.write_line(line)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


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
            self._function(jsonable(line))

    def close(self) -> None:
        """Do nothing: the function is the user's."""
