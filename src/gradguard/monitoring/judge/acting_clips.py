"""The clips of a run told apart, where more than one acts: whose each is, and how often each of them bound."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.monitoring.judge.numbers import percent, plain_threshold
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.steps import BINDS_BELOW, taken_steps

_FIXED = ("norm", "value", "adaptive")
_ORDINALS = ("first", "second", "third")


@dataclass(frozen=True, slots=True)
class ActingClip:
    """One clip of a run.

    Attributes:
        name: What to call it: ``"--clip norm=4.0"``, ``"the script's own norm=1.0"``, or ``"the first (norm at 1.0)"``
            where nobody knows whose it is.
        threshold: Its last threshold, if it has one.
        acted: On how many steps it acted.
        bound: On how many of these it bound; None if its coefficient is not known.
    """

    name: str
    threshold: float | None
    acted: int
    bound: int | None


def acting_clips(record: Record, steps: Sequence[dict[str, Any]] | None = None) -> list[ActingClip]:
    """Return the clips of a run in the order in which they act within a step.

    ``gradguard run --clip`` acts behind what the script clips before its step, and before a guard's.

    Args:
        record: The record of a run, of one optimizer.
        steps: Those of its steps to look at; by default all that the optimizer took.

    Returns:
        The clips; empty where none acted.

    Example:
        >>> from pathlib import Path
        >>> clips = [["norm", 1.0, 0.5], ["norm", 4.0, 1.0]]
        >>> step = {"t": "step", "i": 0, "norm": 2.0, "rule": "norm", "threshold": 1.0, "clips": clips}
        >>> record = Record(Path("run.jsonl"), {"t": "meta", "clip": "norm=4"}, [step], [], [], None, False)
        >>> [(clip.name, clip.bound) for clip in acting_clips(record)]
        [("the script's own norm=1.0", 1), ('--clip norm=4.0', 0)]
    """
    own = _of_command(record)
    found: dict[tuple, _Clip] = {}
    for step in taken_steps(record) if steps is None else steps:
        clips = step.get("clips") or ([_only_clip(step)] if step.get("rule") else [])
        applied, seen = _place_of(own, clips), Counter()
        for place, (rule, threshold, coefficient, *_) in enumerate(clips):
            seen[rule] += 1
            key = (True,) if place == applied else (rule, seen[rule])
            found.setdefault(key, _Clip(str(rule), place == applied)).add(place, threshold, coefficient)
    ordered = sorted(found.values(), key=lambda clip: clip.place)
    return [clip.told(place, bool(own)) for place, clip in enumerate(ordered)]


def shares_in_words(clips: Sequence[ActingClip], steps: int) -> str:
    """Return how often each of several clips bound.

    Args:
        clips: The clips.
        steps: Of how many steps these are shares.

    Example:
        >>> shares_in_words([ActingClip("the first", 1.0, 9, 3), ActingClip("the second", 2.0, 9, None)], 10)
        'the first bound on 30 %, the second bound on an unknown share'
    """
    shares = ["an unknown share" if clip.bound is None else percent(clip.bound / steps) for clip in clips]
    return ", ".join(f"{clip.name} bound on {share}" for clip, share in zip(clips, shares, strict=True))


@dataclass(slots=True)
class _Clip:
    """What is counted of a clip."""

    rule: str
    applied: bool
    place: int = 0
    acted: int = 0
    bound: int | None = None
    thresholds: dict[float | None, None] = field(default_factory=dict)  # in the order in which they came
    last: float | None = None

    def add(self, place: int, threshold: float | None, coefficient: float | None) -> None:
        self.place, self.acted, self.last = max(place, self.place), self.acted + 1, threshold
        self.thresholds[threshold] = None
        if coefficient is not None:
            self.bound = (self.bound or 0) + (coefficient < BINDS_BELOW)

    def told(self, place: int, beside_command: bool) -> ActingClip:
        known = [threshold for threshold in self.thresholds if threshold is not None]
        shown = [plain_threshold(threshold) for threshold in dict.fromkeys((min(known), max(known)))] if known else []
        at = " to ".join(shown) if self.rule in _FIXED else ""
        if beside_command:
            whose = "--clip" if self.applied else "the script's own"
            name = f"{whose} {self.rule}{f'={at}' if at else ''}"
        else:
            name = f"the {_ORDINALS[min(place, 2)]} ({self.rule}{f' at {at}' if at else ''})"
        return ActingClip(name, self.last, self.acted, self.bound)


def _only_clip(step: dict[str, Any]) -> list[Any]:
    return [step["rule"], step.get("threshold"), step.get("coefficient")]


def _of_command(record: Record) -> str | None:
    """What ``--clip`` was given; a `Monitor` writes the class of its guard's clipper there instead."""
    clip = record.meta.get("clip")
    return clip if isinstance(clip, str) and clip[:1].islower() else None


def _place_of(own: str | None, clips: Sequence[Sequence[Any]]) -> int | None:
    """Which of the clips of a step is the one of ``--clip``: the last that fits what it was given."""
    if own is None:
        return None
    name, _, number = own.partition("=")
    fitting = [k for k, (rule, *_) in enumerate(clips) if _plain(name) in _plain(str(rule))]
    exactly = [k for k in fitting if clips[k][1] is not None and f"{clips[k][1]:g}" == number]
    return (exactly or fitting or [None])[-1]


def _plain(name: str) -> str:
    """``clip_fraction`` and ``ClipFraction`` are the same."""
    return name.replace("_", "").lower()
