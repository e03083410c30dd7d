"""A cause: one thing that explains what a run did, with how sure it is, what to do, and where it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.numbers import capital

CERTAINTIES = ("certain", "likely", "possible")
"""How sure a cause is: the record leaves no other reading; it is the likely reading; it may be."""

_FALLS_BEHIND = ("rate_too_low", "not_started")

EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "nonfinite_data": ("nonfinite_range", "vanishing", "rate_too_high"),
    "nonfinite_range": ("vanishing", "rate_too_high"),
    "nonfinite_growth": ("vanishing", "rate_too_high", "drift", "bad_batches", "data_shift"),
    "clip_before_unscale": (*_FALLS_BEHIND, "clip_starves", "clip_twice"),
    "accumulation": ("vanishing", "rate_too_high", "nonfinite_growth", "drift", "data_shift", "bad_batches"),
    "no_gradient": ("vanishing", *_FALLS_BEHIND),
    "rate_zero": ("vanishing", *_FALLS_BEHIND, "rate_decayed"),
    "clip_starves": _FALLS_BEHIND,
    "clip_twice": (*_FALLS_BEHIND, "clip_starves"),
    "bad_batches": (
        "vanishing", "rate_too_high", "data_shift", "drift", "exploding_time", "exploding_depth", "nonfinite_growth",
    ),
    "exploding_time": ("rate_too_high", "bad_batches", "nonfinite_growth", "drift"),
    "exploding_depth": ("rate_too_high", "nonfinite_growth", "bad_batches", "drift"),
    "vanishing": (*_FALLS_BEHIND, "rate_too_high"),
    "not_started": ("vanishing", "no_gradient"),
    "update_rule": (*_FALLS_BEHIND, "rate_too_high", "rate_decayed", "vanishing"),
    "rate_decayed": ("rate_too_high", *_FALLS_BEHIND, "data_shift", "bad_batches"),
    "drift": ("nonfinite_growth", "rate_too_high", "data_shift"),
    "rate_too_high": ("vanishing", "drift", "not_started"),
    "rate_too_low": ("not_started", "drift"),
    "data_shift": ("rate_too_high", "drift", "bad_batches", "exploding_time"),
}  # fmt: skip
"""The causes that a cause produces by itself."""

KEYS = (*EXPLAINS, "healthy", "unknown")
"""Every key of a cause. Of two causes that are as sure, the one that stands first here leads."""


@dataclass(frozen=True)
class Evidence:
    """Where a cause shows.

    Attributes:
        steps: The first and the last step that it is about.
        words: What was seen, as one sentence with numbers.
        params: The parameters that it is about, if it is about some.
    """

    steps: tuple[int, int]
    words: str
    params: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Finding) -> "Evidence":
        """Return what a finding shows.

        Args:
            found: The finding.
        """
        return cls((found.first_step, found.last_step), f"{capital(found.message)}.", found.params)


@dataclass(frozen=True)
class Cause:
    """A cause that explains a run.

    Attributes:
        key: One of `KEYS`.
        certainty: ``"certain"``, ``"likely"`` or ``"possible"``.
        sentence: One sentence on the run.
        advice: What to do, in whole sentences that can be followed literally.
        evidence: Where it shows, the strongest first.
        rules_out: What the evidence excludes, in whole sentences.
        rate_factor: What to multiply the learning rate by, where that is the advice.
        threshold: The norm to clip at, where that is part of the advice.
        optimizer: What to call the optimizer that it is about, where the record has several.
    """

    key: str
    certainty: str
    sentence: str
    advice: str
    evidence: tuple[Evidence, ...] = ()
    rules_out: tuple[str, ...] = ()
    rate_factor: float | None = None
    threshold: float | None = None
    optimizer: str = ""

    @property
    def explains(self) -> tuple[str, ...]:
        """The keys of the causes that this cause produces by itself."""
        return EXPLAINS.get(self.key, ())

    def of(self, optimizer: str) -> "Cause":
        """Return this cause as one of an optimizer among several.

        Args:
            optimizer: What to call it.
        """
        sentence = f"{capital(optimizer)}: {self.sentence}"
        return replace(self, optimizer=optimizer, sentence=sentence)
