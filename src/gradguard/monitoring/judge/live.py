"""Judges the health of a run while it goes on: each fault becomes an ``event`` line behind the line that shows it."""

import math
from typing import Any

from gradguard.monitoring.judge.detectors.layer_norms import Layers
from gradguard.monitoring.judge.detectors.level import NormLevel
from gradguard.monitoring.judge.detectors.loop_faults import Setup, is_setup_event
from gradguard.monitoring.judge.detectors.loss import Loss
from gradguard.monitoring.judge.detectors.loss_scale import ScaleFall
from gradguard.monitoring.judge.detectors.outliers import Outliers
from gradguard.monitoring.judge.detectors.update_sizes import Logits, Rule, UpdateSpikes
from gradguard.monitoring.judge.findings import RECOVERED_STEPS, Episode, Finding, Log
from gradguard.monitoring.record.file import Line
from gradguard.monitoring.record.record_lines import known_fields
from gradguard.monitoring.record.step_rows import binds, is_finite, is_nonfinite


class HealthMonitor:
    """Reports what is wrong with a run while its lines arrive.

    **Guarantees**: some microseconds per step; memory grows by one number every 20 steps; a fault is reported once, and
    again only after 100 steps without it. The monitor judges only the lines that it has received: `findings` judges a
    whole record and reports more.

    **Edge cases**: each of several optimizers is judged by its own steps; losses are judged only where all optimizers
    step on one loss. A ``tensors`` or ``event`` line belongs to the ``step`` line before it, as in a record. NaN and
    infinity count like null. Quantities that a line lacks are not judged.

    Args:
        meta: The first line of the record: its ``params`` name the entries of the arrays in later lines.

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

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        self._optimizers = [str(name) for name in meta.get("optimizers", [])]
        self._tracks: dict[int | None, Track] = {}
        self._last: Track | None = None  # the track of the last step
        self._with_losses = set[int]()  # optimizers that had a loss of their own before a step: in a GAN, all of them

    @property
    def episodes(self) -> list[Episode]:
        """All faults so far, for each optimizer in the order in which they were first reported."""
        return [episode for track in self._tracks.values() for episode in track.log.episodes]

    def see(self, line: dict[str, Any]) -> list[Finding]:
        """Return the new findings after one more line of the record.

        Args:
            line: A ``step``, ``tensors`` or ``event`` line; others are ignored. A line without ``t`` is a step.
        """
        kind = line.get("t", "step")
        if kind == "step":
            self._last = track = self._track(line.get("optimizer"))
            if line.get("loss") is not None:
                self._with_losses.add(line.get("optimizer", 0))
            track.step(line, one_loss=len(self._optimizers) <= 1 or len(self._with_losses) <= 1)
        elif kind == "event" and is_setup_event(line):  # an optimizer without gradients has no step to belong to
            track = self._track(line.get("optimizer"))
            track.setup.event(line)
        else:
            track = self._last or self._track(None)
            if kind == "tensors":
                track.tensors(line)
            elif kind == "event":
                track.event(line)
        return track.log.news()

    def finish(self) -> list[Finding]:
        """Return the findings of the last steps at the end of the run; call it once."""
        for track in self._tracks.values():
            track.outliers.finish()
        return [found for track in self._tracks.values() for found in track.log.news()]

    def _track(self, optimizer: int | None) -> "Track":
        """Return the track of an optimizer.

        Args:
            optimizer: The ``optimizer`` of a step.
        """
        if optimizer not in self._tracks:
            self._tracks[optimizer] = Track(optimizer, self._meta, several=len(self._optimizers) > 1)
        return self._tracks[optimizer]


class Track:
    """Watches the steps of one optimizer."""

    def __init__(self, optimizer: int | None, meta: dict[str, Any], several: bool) -> None:
        params = meta.get("params", [])
        self.log = log = Log(optimizer)
        self.setup = Setup(log)
        self.layers = Layers(log, params, several)
        names = self.layers.names
        self.loss = Loss(log)
        self.level, self.outliers = NormLevel(log, self.loss, names), Outliers(log, names)
        self.scale = ScaleFall(log)
        self.update_spikes, self.rule, self.logits = UpdateSpikes(log), Rule(log, params), Logits(log)
        self.used: tuple[float, float] | None = None  # learning rate and norm after clipping, if the step was taken

    def step(self, step: dict[str, Any], one_loss: bool) -> None:
        """Follow a step. Its loss is judged only if ``one_loss``: no other optimizer has a loss of its own."""
        i, norm, skipped, scale = step["i"], step.get("norm"), bool(step.get("skipped")), step.get("amp_scale")
        clipped, self.used = binds(step), None
        self.setup.step(step, clipped)
        if scale is not None:
            self.scale.step(i, scale, skipped and not step.get("spike"))
        if is_nonfinite(step):
            self.level.nonfinite(i, skipped, scale is not None)
            return
        if norm is None or skipped:
            return
        loss, top = step.get("loss"), step.get("top")
        loss = loss if is_finite(loss) else None
        if loss is not None and one_loss:
            self.loss.follow(i, loss)
        self.level.finite(i, norm, loss, clipped, top)
        self.outliers.follow(i, norm, top, clipped)
        self.used = step.get("lr") or 0.0, step.get("post_norm") or norm
        if (logit := step.get("logit")) is not None:
            self.logits.follow(i, logit, step.get("logit_of", ""))
        if update := step.get("update"):
            self.update_spikes.follow(i, update, self.used[0], loss)
            self.rule.step(i, step.get("over_rule"), self.used[0])

    def tensors(self, line: dict[str, Any]) -> None:
        """Follow a line of per-tensor numbers."""
        i, norms, names = line.get("i", 0), line["norm"], self.layers.names
        if None in norms or not all(map(math.isfinite, norms)):
            self.level.blame(i, [name for name, norm in zip(names, norms, strict=False) if not is_finite(norm)])
            return
        known = range(len(names))
        absent = [place for place in line.get("absent", ()) if place in known]
        self.layers.norms(i, norms, absent)
        if self.used is not None:
            self.rule.tensors(i, line, *self.used)

    def event(self, event: dict[str, Any]) -> None:
        """Follow an event."""
        if event.get("kind") == "nonfinite":
            self.level.blame(event["i"], event.get("params", []))
        elif event.get("kind") == "amp_skip":
            self.scale.skip(event["i"])


class Judge:
    """Filters the lines of a run, and adds ``event`` lines for the faults that they show.

    **Guarantees**: a fault is reported once for as long as it lasts. Non-finite gradients are reported only by the
    event that names the parameters: when the fault begins, and when it reaches further parameters. `follow` raises
    nothing: if judging fails, an event says so, and later lines pass unjudged.

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
        self._reported: dict[Any, tuple[int, set[str]]] = {}  # per optimizer: last non-finite step, parameters named
        self._skipped = False

    def follow(self, line: Line) -> list[Line]:
        """Return ``line`` and the events that follow from it; nothing where it repeats a reported event.

        Args:
            line: A line, with its kind under ``"t"``; a value of None stands for a missing key.
        """
        if self._monitor is None:
            return [line]
        try:
            return self._followed(line, self._monitor)
        except Exception as error:
            self._monitor = None
            failure = {
                "t": "event",
                "i": line.get("i", 0),
                "kind": "observer_failed",
                "severity": "warning",
                "message": f"gradguard stopped judging the health of the run: {type(error).__name__}: {error}",
                "advice": "norms are still recorded; please report this error together with the record",
            }
            return [line, failure]

    def _followed(self, line: Line, monitor: HealthMonitor) -> list[Line]:
        kind = line["t"]
        if kind == "step":
            self._skipped = bool(line.get("skipped"))
        elif kind == "tensors" and line.get("norm") is None:
            return [line]
        found = monitor.see(line)
        lines = [] if line.get("kind") == "nonfinite" and not self._is_news(line) else [line]
        if found and not is_setup_event(line):  # such an event is its own report
            lines += [event_line(one, line["i"]) for one in found if one.kind != "nonfinite"]
        return lines

    def _is_news(self, event: Line) -> bool:
        """Return whether a ``nonfinite`` event begins an episode, or names a further parameter."""
        if self._skipped:
            event["severity"] = "warning"
        i, names = event["i"], set(event.get("params", []))
        last, named = self._reported.get(event.get("optimizer"), (-RECOVERED_STEPS - 1, set()))
        begins = i - last > RECOVERED_STEPS
        self._reported[event.get("optimizer")] = i, names if begins else named | names
        return begins or not names <= named


def event_line(found: Finding, i: int) -> Line:
    """Return the ``event`` line that reports a finding.

    Args:
        found: The finding.
        i: The step on which it is reported.
    """
    fields = {name: getattr(found, name) for name in _FIELDS}
    return known_fields({"t": "event", "i": i, **fields, "params": list(found.params) or None})


_FIELDS = ("kind", "severity", "message", "advice", "params", "value", "confidence", "optimizer")
