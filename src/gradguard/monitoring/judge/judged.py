"""What health has to say of a run, told as ``event`` lines right behind the lines that show it."""

from typing import Any

from gradguard.monitoring.judge.findings import RECOVERED_STEPS, Finding
from gradguard.monitoring.judge.health_live import HealthMonitor
from gradguard.monitoring.record.file import RecordWriter

Line = dict[str, Any]


class Judge:
    """Follows the lines of a run, and says which of them to write, and what to write behind them.

    **Guarantees**: a fault is told once for as long as it lasts. Gradients that are not finite are told by the event
    that names them, when it begins and when it reaches further parameters, and by no second one. It raises nothing:
    if it fails, an event says so and the lines go on without it.

    Args:
        meta: The first line of the record.

    Example:
        >>> judge = Judge({"params": [{"name": "head.weight"}]})
        >>> lines = [line for i in range(12) for line in judge.follow({"t": "tensors", "i": i, "norm": [0.0, 1.0]})]
        >>> lines = Judge({}).follow({"t": "step", "i": 0, "norm": 1.0, "amp_scale": 0.5})
        >>> [line["t"] for line in lines], lines[1]["kind"], lines[1]["value"]
        (['step', 'event'], 'amp_scale_collapse', 0.5)
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        self._monitor: HealthMonitor | None = HealthMonitor(meta)
        self._told: dict[Any, tuple[int, set[str]]] = {}  # for each optimizer: the last bad step, and who was named
        self._skipped = False

    def follow(self, line: Line) -> list[Line]:
        """Return ``line`` and what follows from it; nothing where it only repeats what was told.

        Args:
            line: A line, its kind under ``"t"``; None stands for a key that is not there.
        """
        if self._monitor is None:
            return [line]
        try:
            return self._followed(line, self._monitor)
        except Exception as error:
            self._monitor = None
            return [line, _failure(line, error)]

    def _followed(self, line: Line, monitor: HealthMonitor) -> list[Line]:
        kind = line["t"]
        if kind == "step":
            self._skipped = bool(line.get("skipped"))
        elif kind == "tensors" and line.get("norm") is None:
            return [line]
        found = monitor.see(line)
        news = kind != "event" or line.get("kind") != "nonfinite" or self._is_news(line)
        lines = [line] if news else []
        if not found:
            return lines
        return lines + [_event(one, line["i"]) for one in found if one.kind != "nonfinite"]

    def _is_news(self, event: Line) -> bool:
        """Whether it begins an episode, or names somebody new in it."""
        if self._skipped:
            event["severity"] = "warning"
        i, names = event["i"], set(event.get("params") or [])
        last, named = self._told.get(event.get("optimizer"), (-RECOVERED_STEPS - 1, set()))
        begins = i - last > RECOVERED_STEPS
        self._told[event.get("optimizer")] = i, names if begins else named | names
        return begins or not names <= named


class JudgedWriter:
    """A writer of a record whose lines are followed by what health has to say of them.

    Args:
        writer: Where they go.
        judge: What follows them.
    """

    def __init__(self, writer: RecordWriter, judge: Judge) -> None:
        self._writer, self._judge = writer, judge

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line, as `RecordWriter.write` does."""
        fields["t"] = kind
        for line in self._judge.follow(fields):
            self._writer.write(line.pop("t"), **line)


def _event(found: Finding, i: int) -> Line:
    fields = {
        "t": "event",
        "i": i,
        "kind": found.kind,
        "severity": found.severity,
        "message": found.message,
        "advice": found.advice,
        "params": list(found.params) or None,
        "value": found.value,
        "optimizer": found.optimizer,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _failure(line: Line, error: Exception) -> Line:
    return {
        "t": "event",
        "i": line.get("i", 0),
        "kind": "observer_failed",
        "severity": "warning",
        "message": f"gradguard stopped judging the health of the run: {type(error).__name__}: {error}",
        "advice": "norms are still recorded; please report this with the record",
    }
