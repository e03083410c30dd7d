"""A cause: one thing that explains what a run did, with how sure it is, what to do, and where it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.numbers import capital

CERTAINTIES = ("certain", "likely", "possible")
"""How sure a cause is: the record leaves no other reading; it is the likely reading; it may be."""

KEYS = (
    "nonfinite_data",
    "nonfinite_range",
    "nonfinite_growth",
    "clip_before_unscale",
    "accumulation",
    "no_gradient",
    "rate_zero",
    "clip_starves",
    "clip_twice",
    "bad_batches",
    "exploding_time",
    "exploding_depth",
    "vanishing",
    "not_started",
    "rate_decayed",
    "drift",
    "rate_too_high",
    "rate_too_low",
    "data_shift",
    "healthy",
    "unknown",
)
"""Every key of a cause. Of two causes that are as sure, and explain as much, the one that stands first here leads."""


_DIVERGES = ("exploding", "diverging_loss", "not_learning", "spike", "recurring_spikes", "norm_drift", "oscillation")
_LOST = ("nonfinite", "amp_scale_collapse", "exploding", "diverging_loss", "not_learning", "vanishing", "rate_too_high")
_STANDS_STILL = ("not_learning", "dead_layer", "half_dead_layer", "dominating_layer", "vanishing", "unused_parameter")
_CLIPS = ("clipping_always_on", "clip_below_eps", "lock_in", "norm_drift", "not_learning", "update_ratio")
_FALLS_BEHIND = ("rate_too_low", "not_started")

EXPLAINS: Mapping[str, frozenset[str]] = {
    "nonfinite_data": frozenset((*_LOST, "nonfinite_range")),
    "nonfinite_range": frozenset(_LOST),
    "nonfinite_growth": frozenset((*_LOST, *_DIVERGES, "drift", "update_ratio", "bad_batches", "data_shift")),
    "clip_before_unscale": frozenset((*_CLIPS, *_FALLS_BEHIND, "clip_before_unscale", "clip_starves", "clip_twice")),
    "accumulation": frozenset(
        (*_DIVERGES, *_LOST, *_CLIPS, "missing_zero_grad", "nonfinite_growth", "drift", "data_shift", "bad_batches",
         "rate_too_high")
    ),
    "no_gradient": frozenset(
        (*_STANDS_STILL, *_FALLS_BEHIND, "detached_layer", "gradient_without_optimizer", "optimizer_without_gradient")
    ),
    "rate_zero": frozenset((*_STANDS_STILL, *_FALLS_BEHIND, "rate_decayed", "repeated_batches")),
    "clip_starves": frozenset((*_CLIPS, *_FALLS_BEHIND)),
    "clip_twice": frozenset((*_CLIPS, *_FALLS_BEHIND, "clipped_twice", "clip_starves")),
    "bad_batches": frozenset(
        (*_DIVERGES, *_STANDS_STILL, "rate_too_high", "data_shift", "drift", "corrupt_gradient", "exploding_time",
         "exploding_depth", "nonfinite_growth")
    ),
    "exploding_time": frozenset(
        (*_DIVERGES, "rate_too_high", "bad_batches", "corrupt_gradient", "nonfinite_growth", "dominating_layer",
         "drift", "nonfinite")
    ),
    "exploding_depth": frozenset(
        (*_DIVERGES, "rate_too_high", "dominating_layer", "nonfinite_growth", "bad_batches", "drift", "nonfinite")
    ),
    "vanishing": frozenset((*_STANDS_STILL, *_FALLS_BEHIND, "update_ratio", "rate_too_high")),
    "not_started": frozenset((*_STANDS_STILL, "no_gradient")),
    "rate_decayed": frozenset(
        (*_DIVERGES, "rate_too_high", "rate_too_low", "not_started", "repeated_batches", "data_shift", "bad_batches")
    ),
    "drift": frozenset(
        (*_DIVERGES, *_CLIPS, "nonfinite_growth", "nonfinite", "rate_too_high", "data_shift")
    ),
    "rate_too_high": frozenset((*_DIVERGES, *_STANDS_STILL, *_CLIPS, "drift", "not_started", "corrupt_gradient")),
    "rate_too_low": frozenset(("not_learning", "update_ratio", "not_started", "drift")),
    "data_shift": frozenset((*_DIVERGES, "rate_too_high", "drift", "bad_batches", "exploding_time")),
}  # fmt: skip
"""Keys of causes, and kinds of findings, that a cause produces by itself."""


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
    def explains(self) -> frozenset[str]:
        """Keys of causes, and kinds of findings, that this cause produces by itself."""
        return EXPLAINS.get(self.key, frozenset())

    def of(self, optimizer: str) -> "Cause":
        """Return this cause as one of an optimizer among several.

        Args:
            optimizer: What to call it.
        """
        sentence = f"{capital(optimizer)}: {self.sentence}"
        return replace(self, optimizer=optimizer, sentence=sentence)
