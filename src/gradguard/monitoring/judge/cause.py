"""A cause: one thing that explains what a run did, with how sure it is, what to do, and where it shows."""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Evidence:
    """Where a cause shows.

    Attributes:
        steps: The first and the last step that it is about.
        words: What was seen, as one sentence with numbers.
        params: The parameters that it is about, if it is about some.
        numbers: What was measured, by name.
    """

    steps: tuple[int, int]
    words: str
    params: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Cause:
    """What explains a run.

    Attributes:
        key: One of `KEYS`.
        certainty: ``"certain"``, ``"likely"`` or ``"possible"``.
        sentence: One sentence on the run.
        advice: What to do, in whole sentences that can be followed literally.
        evidence: Where it shows, the strongest first.
        rules_out: What the evidence excludes, in whole sentences.
        explains: Keys of causes, and kinds of findings, that this cause produces by itself.
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
    explains: frozenset[str] = frozenset()
    rate_factor: float | None = None
    threshold: float | None = None
    optimizer: str = ""

    def of(self, optimizer: str) -> "Cause":
        """Return this cause as one of an optimizer among several.

        Args:
            optimizer: What to call it.
        """
        sentence = f"{optimizer[:1].upper()}{optimizer[1:]}: {self.sentence}"
        return replace(self, optimizer=optimizer, sentence=sentence)
