"""The clips of a run told apart, where more than one acts: whose each is, and how often each of them bound."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.monitoring.judge.numbers import percent, plain_threshold
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.lines import Lines, without_none
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


def acting_clips(record: Record, steps: Lines | None = None) -> list[ActingClip]:
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
    found = _Found(_of_command(record))
    steps = taken_steps(record) if steps is None else steps
    rules, thresholds, coefficients = (steps.column(key) for key in ("rule", "threshold", "coefficient"))
    if len(set(rules)) == 1 and not any(steps.column("clips")):  # one clip, whose steps need not be told apart
        if rules[0]:
            found.of([(rules[0], None, None)])[0].add_all(thresholds, coefficients)
        return found.told()
    for clips, rule, *numbers in zip(steps.column("clips"), rules, thresholds, coefficients, strict=True):
        clips = clips or ([(rule, *numbers)] if rule else [])
        for clip, (_, threshold, coefficient, *_) in zip(found.of(clips) if clips else [], clips, strict=True):
            clip.add(threshold, coefficient)
    return found.told()


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
    """What is counted of a clip, over what may be millions of steps."""

    rule: str
    applied: bool
    place: int
    acted: int = 0
    measured: int = 0
    bound: int = 0
    last: float | None = None
    least: float = math.inf
    largest: float = -math.inf

    def add(self, threshold: float | None, coefficient: float | None) -> None:
        self.acted += 1
        if threshold != self.last:
            self.last = threshold
            if threshold is not None:
                self.least, self.largest = min(self.least, threshold), max(self.largest, threshold)
        if coefficient is not None:
            self.measured += 1
            self.bound += coefficient < BINDS_BELOW

    def add_all(self, thresholds: Sequence[float | None], coefficients: Sequence[float | None]) -> None:
        known = without_none(thresholds)
        measured = without_none(coefficients)
        self.acted, self.measured, self.last = len(thresholds), len(measured), thresholds[-1]
        self.bound = sum(coefficient < BINDS_BELOW for coefficient in measured)
        self.least, self.largest = min(known, default=math.inf), max(known, default=-math.inf)

    def told(self, place: int, beside_command: bool) -> ActingClip:
        at = ""
        if self.rule in _FIXED and self.largest >= self.least:
            at = " to ".join(dict.fromkeys((plain_threshold(self.least), plain_threshold(self.largest))))
        if beside_command:
            whose = "--clip" if self.applied else "the script's own"
            name = f"{whose} {self.rule}{f'={at}' if at else ''}"
        else:
            name = f"the {_ORDINALS[min(place, 2)]} ({self.rule}{f' at {at}' if at else ''})"
        return ActingClip(name, self.last, self.acted, self.bound if self.measured else None)


class _Found:
    """The clips that are known by now."""

    def __init__(self, own: str | None) -> None:
        self._own, self._number = own, own.partition("=")[2] if own else ""
        self._clips: dict[tuple, _Clip] = {}
        self._fitting: dict[tuple[str, ...], list[int]] = {}
        self._of: dict[tuple, list[_Clip]] = {}  # by the rules of a step, and the place of the one of --clip

    def of(self, clips: Sequence[Sequence[Any]]) -> list[_Clip]:
        """Return the clips of a step, in their order."""
        rules = tuple([clip[0] for clip in clips])
        applied = self._applied(rules, clips)
        if (known := self._of.get((rules, applied))) is None:
            known = self._of[rules, applied] = self._new(rules, applied)
        return known

    def _applied(self, rules: tuple[str, ...], clips: Sequence[Sequence[Any]]) -> int | None:
        """Which of them is the one of ``--clip``: the last that fits what it was given."""
        if self._own is None:
            return None
        if (fitting := self._fitting.get(rules)) is None:
            name = _plain(self._own.partition("=")[0])
            fitting = self._fitting[rules] = [place for place, rule in enumerate(rules) if name in _plain(str(rule))]
        if len(fitting) > 1:
            exactly = [k for k in fitting if clips[k][1] is not None and f"{clips[k][1]:g}" == self._number]
            return (exactly or fitting)[-1]
        return fitting[0] if fitting else None

    def _new(self, rules: tuple[str, ...], applied: int | None) -> list[_Clip]:
        found, seen = [], Counter()
        for place, rule in enumerate(rules):
            seen[rule] += place != applied
            key = ("--clip",) if place == applied else (rule, seen[rule])
            clip = self._clips.setdefault(key, _Clip(str(rule), place == applied, place))
            clip.place = max(clip.place, place)
            found.append(clip)
        return found

    def told(self) -> list[ActingClip]:
        """Return what was counted of each."""
        ordered = sorted(self._clips.values(), key=lambda clip: clip.place)
        return [clip.told(place, self._own is not None) for place, clip in enumerate(ordered)]


def _of_command(record: Record) -> str | None:
    """What ``--clip`` was given; a `Monitor` writes the class of its guard's clipper there instead."""
    clip = record.meta.get("clip")
    return clip if isinstance(clip, str) and clip[:1].islower() else None


def _plain(name: str) -> str:
    """``clip_fraction`` and ``ClipFraction`` are the same."""
    return name.replace("_", "").lower()
