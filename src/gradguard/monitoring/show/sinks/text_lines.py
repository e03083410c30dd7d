"""Write every line to a JSON Lines file or to a function."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradguard.json_values import jsonable
from gradguard.monitoring.record.file import Line, RecordWriter
from gradguard.monitoring.record.text import on_stderr


class JsonLinesSink:
    """Write a record in the same format as ``gradguard run``.

    Args:
        path: The path of the record; if the file exists, a number is added to the name.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # training may change the working directory
        self._writer = RecordWriter(path)
        self.path, self.name = self._writer.path, str(self._writer.path)
        if self.path != path:
            on_stderr(f"{path} exists and is kept: this run is recorded in {self.path.name}")

    def push(self, lines: Sequence[Line]) -> None:
        """Write ``lines`` and flush them to the operating system."""
        for line in lines:
            self._writer.write_line(line)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class CallableSink:
    """Call a function with each line, as a new dictionary.

    Args:
        function: A function of one dictionary; its result is ignored.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function
        self.name = getattr(function, "__qualname__", type(function).__qualname__)

    def push(self, lines: Sequence[Line]) -> None:
        """Call the function with each line."""
        for line in lines:
            self._function(jsonable(line))

    def close(self) -> None:
        """Do nothing, because the function belongs to the user."""
