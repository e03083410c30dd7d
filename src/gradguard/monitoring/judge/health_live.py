"""Health findings while a run goes on: told line by line, each fault once for as long as it lasts."""

import math
from typing import Any

from gradguard.monitoring.judge.detectors import Amp, Clipping, Layers, Level
from gradguard.monitoring.judge.findings import Episode, Finding, Log
from gradguard.monitoring.record.steps import binds, threshold_of


class HealthMonitor:
    """Tells what is wrong with a run as its lines come.

    **Guarantees**: some microseconds a step; memory grows by one number each 20 steps; a fault is told once, and again
    only after 100 steps without it. It knows no more of a run than the lines that it has seen: `findings` judges a
    whole record, and says more.

    **Edge cases**: several optimizers are judged each by its own steps. A ``tensors`` or ``event`` line is taken to
    belong to the ``step`` line before it, as in a record; NaN and infinity mean what null does there. Quantities that
    a line lacks are not judged.

    Args:
        meta: The first line of the record: its ``params`` name what the arrays of later lines are about.

    Example:
        >>> monitor = HealthMonitor({"params": [{"name": "head.weight"}]})
        >>> monitor.see({"t": "step", "i": 0, "norm": 1.0})
        []
        >>> [finding] = monitor.see({"t": "step", "i": 1, "norm": None, "nonfinite": 1})
        >>> finding.severity, finding.message
        ('error', 'gradients were not finite on 1 step, first on step 1')
        >>> monitor.see({"t": "step", "i": 2, "norm": None, "nonfinite": 1})
        []
    """

    def __init__(self, meta: dict[str, Any] | None = None) -> None:
        meta = meta or {}
        self._params = meta.get("params") or []
        self._optimizers = [str(name) for name in meta.get("optimizers") or []]
        self._tracks: dict[int | None, _Track] = {}
        self._last: _Track | None = None

    @property
    def episodes(self) -> list[Episode]:
        """All faults so far, those of each optimizer in the order in which they were first told."""
        return [episode for track in self._tracks.values() for episode in track.log.episodes]

    def see(self, line: dict[str, Any]) -> list[Finding]:
        """Return what is new after one more line of the record.

        Args:
            line: A ``step``, ``tensors`` or ``event`` line; others are passed over. A line without ``t`` is a step.
        """
        kind = line.get("t", "step")
        if kind == "step":
            track = self._tracks.get(line.get("optimizer"))
            self._last = track = track or self._new(line.get("optimizer"))
            return track.step(line)
        track = self._last or self._new(None)
        if kind == "tensors":
            return track.tensors(line)
        return track.event(line) if kind == "event" else []

    def _new(self, optimizer: int | None) -> "_Track":
        place = optimizer or 0
        name = self._optimizers[place] if place < len(self._optimizers) else ""
        track = _Track(optimizer, name, self._params, several=len(self._optimizers) > 1)
        self._tracks[optimizer] = track
        return track


class _Track:
    """What watches the steps of one optimizer."""

    def __init__(self, optimizer: int | None, name: str, params: list[dict[str, Any]], several: bool) -> None:
        self.log = Log(optimizer)
        self.level, self.clipping, self.amp = Level(self.log), Clipping(self.log, name), Amp(self.log)
        self.layers = Layers(self.log, params, several)

    def step(self, step: dict[str, Any]) -> list[Finding]:
        """Return what is new after a step."""
        i, norm, skipped = step["i"], step.get("norm"), bool(step.get("skipped"))
        scale = step.get("amp_scale")
        found = [] if scale is None else self.amp.step(i, scale, skipped)
        if step.get("nonfinite") or ("norm" in step and not _is_finite(norm)):
            return found + self.level.nonfinite(i, skipped, scale is not None)
        if norm is None or skipped:
            return found
        loss = step.get("loss")
        found += self.level.finite(i, norm, loss if _is_finite(loss) else None, binds(step))
        threshold, top = threshold_of(step), step.get("top")
        if threshold is not None:
            found += self.clipping.follow(i, threshold, step.get("coefficient"))
        if top is not None:
            found += self.layers.top(i, *top)
        return found

    def tensors(self, line: dict[str, Any]) -> list[Finding]:
        """Return what is new after a line of per-tensor norms."""
        i, norms = line.get("i", 0), line["norm"]
        bad = [place for place, norm in enumerate(norms) if not _is_finite(norm)]
        if not bad:
            return self.layers.norms(i, norms)
        names = self.layers.names
        self.level.blame(i, [names[place] for place in bad if place < len(names)])
        return []

    def event(self, event: dict[str, Any]) -> list[Finding]:
        """Return what is new after an event."""
        if event.get("kind") == "nonfinite":
            self.level.blame(event["i"], [str(name) for name in event.get("params") or []])
        return self.amp.skip(event["i"]) if event.get("kind") == "amp_skip" else []


def _is_finite(number: float | None) -> bool:
    """A record writes null where a line that was not written yet may still hold NaN or infinity."""
    return number is not None and math.isfinite(number)
