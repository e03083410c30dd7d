"""Steps on their way from a monitor to its sinks."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gradguard.monitoring.observe.monitor_lines import LineMaker, Seen
from gradguard.monitoring.observe.rows import total_of
from gradguard.monitoring.observe.transfer import Copy, Parcel
from gradguard.monitoring.show.sinks import Sinks
from gradguard.monitoring.show.sinks.base import plain

FLUSH_ROWS = 50
FLUSH_SECONDS = 2.0
KEPT_ROWS = 1000


class Output:
    """Keeps steps for a while, sends for their numbers together, and gives sinks the lines once they have arrived.

    Args:
        lines: Makes them.
        sinks: Take them.
        seen: Called with the norm of each step once it is known.
        copy: How numbers come from a device, for tests.
    """

    def __init__(
        self, lines: LineMaker, sinks: Sinks, seen: Callable[[float], object], copy: Copy | None = None
    ) -> None:
        self.sinks, self._lines, self._look, self._copy = sinks, lines, seen, copy
        self.newest: Seen | None = None
        self.rows: deque[Mapping[str, Any]] = deque(maxlen=KEPT_ROWS)
        self._waiting: list[Seen] = []
        self._sent: deque[tuple[list[Seen], list[tuple[Any, Any]], Parcel]] = deque()
        self._flushed = time.perf_counter()

    def add(self, seen: Seen, *, keep: bool) -> None:
        """Take a step.

        Args:
            seen: The step.
            keep: Whether something may still be added to it: it then waits for the next one, or for `write_all`.
        """
        if self.newest is not None:
            self._waiting.append(self.newest)
        self.newest = seen
        if not keep:
            self._waiting.append(seen)
            self.newest = None
        if len(self._waiting) >= FLUSH_ROWS or time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self._send()
        self._write_arrived()

    def write_all(self) -> None:
        """Write every step; waits for the device."""
        if self.newest is not None:
            self._waiting.append(self.newest)
            self.newest = None
        self._send()
        self._write_arrived(wait=True)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._flushed = time.perf_counter()
        if waiting:
            places = list(_places_of_tensors(waiting))
            self._sent.append((waiting, places, Parcel([_at(*place) for place in places], self._copy)))

    def _write_arrived(self, *, wait: bool = False) -> None:
        while self._sent and (wait or self._sent[0][2].arrived()):
            steps, places, parcel = self._sent.popleft()
            for place, value in zip(places, parcel.values(), strict=True):
                _put(*place, value)
            lines = [line for seen in steps for line in self._lines.lines_of(seen)]
            for seen in steps:
                self._look(total_of(seen.row))
            self.rows += [plain(line) for line in lines if line["t"] == "step"]
            self.sinks.push(lines)


def _places_of_tensors(steps: list[Seen]) -> Iterator[tuple[Any, Any]]:
    """Yield where tensors are in ``steps``: an object and the name of its field, or a list and an index in it."""
    for seen in steps:
        for part in (seen, seen.row, seen.row.extras, *seen.row.clips):
            for name in [] if part is None else type(part).__slots__:
                value = getattr(part, name)
                if isinstance(value, Tensor):
                    yield part, name
                elif isinstance(value, list) and name in _LISTS:
                    yield from ((value, k) for k, item in enumerate(value) if isinstance(item, Tensor))


_LISTS = {"losses", "values"}
"""The fields whose lists hold numbers; others may be long (an entry for each parameter) or not to be read (weights)."""


def _at(holder: Any, key: Any) -> Any:
    return holder[key] if isinstance(holder, list) else getattr(holder, key)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, list):
        holder[key] = value
    else:
        setattr(holder, key, value)
