"""Separates the clips of a run where several act: the owner of each, and how often each bound."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gradguard.monitoring.judge.numbers import from_to, median, percent
from gradguard.monitoring.record.file import Record, once
from gradguard.monitoring.record.record_lines import Lines, without_none
from gradguard.monitoring.record.step_rows import BINDS_BELOW, taken_steps

_FIXED = ("norm", "value", "adaptive")
_ORDINALS = ("first", "second", "third")


@dataclass(frozen=True, slots=True)
class ActingClip:
    """One clip of a run.

    Attributes:
        name: The name: ``"--clip norm=4.0"``, ``"the script's own norm=1.0"``, or ``"the first (norm at 1.0)"`` where
            the record does not say whose clip it is.
        threshold: The last threshold; None if it has none.
        acted: The number of steps on which it acted.
        bound: The number of these steps on which it bound; None if its coefficient is not known.
        coefficient: The median coefficient of the steps on which it bound; None without such steps.
    """

    name: str
    threshold: float | None
    acted: int
    bound: int | None
    coefficient: float | None = None


@once
def acting_clips(record: Record) -> list[ActingClip]:
    """Return the clips of the steps that the optimizer took, in the order in which they act within a step.

    Args:
        record: The record of a run, of one optimizer.

    Example:
        >>> from pathlib import Path
        >>> step = {"t": "step", "i": 0, "norm": 2.0, "rule": "norm", "threshold": 1.0, "coefficient": 0.5}
        >>> record = Record(Path("run.jsonl"), {"t": "meta", "clip": "norm=1"}, [step], [], [], None, False)
        >>> [(clip.name, clip.bound) for clip in acting_clips(record)]
        [('--clip norm=1.0', 1)]
    """
    return clips_on(record, taken_steps(record))


def clips_on(record: Record, steps: Lines) -> list[ActingClip]:
    """Return the clips of some steps in the order in which they act within a step.

    ``gradguard run --clip`` acts after the clips that the script calls before its step, and before a guard's clip.

    Args:
        record: The record of a run, of one optimizer.
        steps: Some of its steps.

    Returns:
        The clips; empty where no clip acted.

    Example:
        >>> from pathlib import Path
        >>> clips = [["norm", 1.0, 0.5], ["norm", 4.0, 1.0]]
        >>> step = {"t": "step", "i": 0, "norm": 2.0, "rule": "norm", "threshold": 1.0, "clips": clips}
        >>> record = Record(Path("run.jsonl"), {"t": "meta", "clip": "norm=4"}, [step], [], [], None, False)
        >>> [(clip.name, clip.bound) for clip in clips_on(record, record.steps)]
        [("the script's own norm=1.0", 1), ('--clip norm=4.0', 0)]
    """
    command = record.meta.get("clip")  # the rule of --clip; but a Monitor writes the class of its guard's clipper
    command = command if isinstance(command, str) and command[:1].islower() else None
    columns = [steps.column(key) for key in ("rule", "threshold", "coefficient")]
    rules, *numbers = columns
    known: dict[tuple, _KnownClip] = {}
    if len(set(rules)) == 1 and not any(steps.column("clips")):  # a single clip on all steps
        is_applied = _applied([(rules[0], None, None)], command) == 0
        known = {(): _KnownClip(str(rules[0]), is_applied, 0, *numbers)} if rules[0] else {}
    else:
        for clips, *alone in zip(steps.column("clips"), *columns, strict=True):
            clips = clips or ([alone] if alone[0] else [])
            applied, seen = _applied(clips, command), Counter()
            for place, (rule, threshold, coefficient, *_) in enumerate(clips):
                seen[rule] += place != applied
                key = ("--clip",) if place == applied else (rule, seen[rule])
                if (clip := known.get(key)) is None:
                    clip = known[key] = _KnownClip(str(rule), place == applied, place)
                clip.place = max(clip.place, place)
                clip.thresholds.append(threshold)
                clip.coefficients.append(coefficient)
    ordered = sorted(known.values(), key=lambda clip: clip.place)
    return [clip.summary(place, command is not None) for place, clip in enumerate(ordered)]


def _applied(clips: Sequence[Sequence[Any]], command: str | None) -> int | None:
    """Return the place of the ``--clip`` among the clips of a step: the last one that fits its argument."""
    if command is None:
        return None
    name, _, number = command.partition("=")
    fitting = [place for place, (rule, *_) in enumerate(clips) if _plain(name) in _plain(str(rule))]
    exactly = [place for place in fitting if clips[place][1] is not None and f"{clips[place][1]:g}" == number]
    return (exactly or fitting or [None])[-1]


def clipped_twice(steps: Lines) -> Lines:
    """Return the steps on which a gradient was clipped more than once.

    Clips of different parameters do not count: each acts on gradients as backward left them.

    Args:
        steps: Steps of a record.

    Example:
        >>> twice = {"t": "step", "i": 0, "clips": [["norm", 1.0, 0.5], ["norm", 4.0, 1.0]]}
        >>> apart = {"t": "step", "i": 1, "clips": [["norm", 1.0, 0.5], ["value", 0.1, 0.9]], "clips_disjoint": True}
        >>> [step["i"] for step in clipped_twice(Lines([twice, apart, {"t": "step", "i": 2, "rule": "norm"}]))]
        [0]
    """
    pairs = zip(steps.column("clips"), steps.column("clips_disjoint"), strict=True)
    return steps.where([bool(clips) and not disjoint for clips, disjoint in pairs])


def shares_in_words(clips: Sequence[ActingClip], steps: int) -> str:
    """Return the share of the steps on which each of several clips bound, as text.

    Args:
        clips: The clips.
        steps: The number of steps that the shares refer to.

    Example:
        >>> shares_in_words([ActingClip("the first", 1.0, 9, 3), ActingClip("the second", 2.0, 9, None)], 10)
        'the first bound on 30 %, the second bound on an unknown share'
    """
    shares = ["an unknown share" if clip.bound is None else percent(clip.bound / steps) for clip in clips]
    return ", ".join(f"{clip.name} bound on {share}" for clip, share in zip(clips, shares, strict=True))


@dataclass(slots=True)
class _KnownClip:
    """A clip, with its threshold and coefficient on each step on which it acted."""

    rule: str
    applied: bool
    place: int
    thresholds: list[float | None] = field(default_factory=list)
    coefficients: list[float | None] = field(default_factory=list)

    def summary(self, place: int, beside_command: bool) -> ActingClip:
        known, measured = without_none(self.thresholds), without_none(self.coefficients)
        rule = self.rule
        if rule in _FIXED and known:
            rule += ("=" if beside_command else " at ") + from_to(known)
        if beside_command:
            name = f"--clip {rule}" if self.applied else f"the script's own {rule}"
        else:
            ordinal = _ORDINALS[place] if place < len(_ORDINALS) else f"{place + 1}th"
            name = f"the {ordinal} ({rule})"
        binding = [coefficient for coefficient in measured if coefficient < BINDS_BELOW]
        bound = len(binding) if measured else None
        return ActingClip(name, self.thresholds[-1], len(self.thresholds), bound, median(binding))


@lru_cache(maxsize=64)
def _plain(name: str) -> str:
    """Return a name without case and underscores: ``clip_fraction`` and ``ClipFraction`` are one rule."""
    return name.replace("_", "").lower()
