"""From one step that a monitor saw, its numbers at hand, to lines of the record."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gradguard.monitoring.judge.judged import Judge
from gradguard.monitoring.observe.rows import Row, ScaleUpdate, total_of, write_row
from gradguard.monitoring.observe.script_clips import ScriptClip
from gradguard.monitoring.observe.shared_norms import refuse_lost
from gradguard.monitoring.record.file import RecordWriter


@dataclass(slots=True)
class Seen:
    """One step; tensors stay on their device until they have been read.

    Attributes:
        row: What every watcher measures.
        rule: The guard's rule; None if nothing guards.
        coefficient: What the guard multiplied the gradients by.
        threshold: Its threshold; None where there is not one number.
        norm: The norm that the user's own clip returned.
        max_norm: The threshold that the user gave with it.
        names: What else the user logged, and
        values: its numbers.
    """

    row: Row
    rule: str | None = None
    coefficient: Any = None
    threshold: Any = None
    norm: Any = None
    max_norm: Any = None
    names: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


class LineMaker:
    """Makes lines, in the order of the steps.

    Args:
        names: The parameters, in the order of ``meta``.
        every: Write the norm of each parameter every so many steps.
        skips: Tells whether the guard has ever skipped a step; asked only after a step that was not finite.
        meta: The first line.
    """

    def __init__(self, names: Sequence[str], every: int, skips: Callable[[], bool], meta: dict[str, Any]) -> None:
        self._names, self._every, self._skips, self._judge = names, every, skips, Judge(meta)
        self._scale: float | None = None

    def lines_of(self, seen: Seen) -> list[dict[str, Any]]:
        """Return the ``step`` line, the ``tensors`` line where it is due, and an ``event`` where there is one.

        Raises:
            DistributedError: If another process could not measure its part of the gradients.
        """
        refuse_lost(seen.row.lost)
        logged = {name: float(value) for name, value in zip(seen.names, seen.values, strict=True)}
        own = self._of_guard(seen) if seen.rule is not None else _of_own_clip(seen)
        into = _Collector(logged | own)
        writer, row = cast("RecordWriter", into), seen.row
        if row.amp_scale is not None:
            if self._scale is not None:
                write_row(writer, ScaleUpdate(row.index, self._scale, row.amp_scale), self._names, self._every)
            self._scale = float(row.amp_scale)
        write_row(writer, row, self._names, self._every)
        return [told for line in into.lines for told in self._judge.follow(line)]

    def _of_guard(self, seen: Seen) -> dict[str, Any]:
        """What the guard has done takes the place of what would follow from a norm and a threshold."""
        norm = total_of(seen.row)
        own: dict[str, Any] = {"rule": seen.rule}
        if math.isfinite(norm) and seen.coefficient is not None:
            coefficient = float(seen.coefficient)
            own |= {"coefficient": coefficient, "post_norm": norm * coefficient}
        if seen.threshold is not None and math.isfinite(seen.threshold):
            own["threshold"] = float(seen.threshold)
        if not math.isfinite(norm) and self._skips():
            own["skipped"] = True
        return own


def _of_own_clip(seen: Seen) -> dict[str, Any]:
    """Where the user handed the norm before their own clip, what was measured at the step is the norm after it."""
    row = seen.row
    if row.clips:  # which told more
        return {}
    if seen.norm is None:
        return {} if seen.max_norm is None else {"user_max_norm": float(seen.max_norm)}
    before, after = float(seen.norm), total_of(row)
    row.user_threshold, row.total = seen.max_norm, before
    row.clips = [ScriptClip("norm", seen.max_norm, before)]
    if math.isfinite(before) and math.isfinite(after):
        row.post = after
        if after > 0:  # a norm clip multiplied all gradients by one number
            row.norms = [float(norm) * (before / after) for norm in row.norms]
    return {}


class _Collector:
    """Takes the place of a `RecordWriter`: keeps lines as dictionaries, so that every sink gets the same.

    Args:
        own: Fields of the ``step`` line that take the place of those written.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._own = own

    def write(self, kind: str, /, **fields: Any) -> None:
        if kind == "step":
            fields |= self._own
        self.lines.append({"t": kind} | {key: value for key, value in fields.items() if value is not None})
