"""Causes: each explains what a run did, with its certainty, the advice and the evidence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.numbers import capital

CERTAINTIES = ("certain", "likely", "possible")
"""Certain: the record allows no other explanation. Likely: it is the likely one. Possible: it is one of several."""


@dataclass(frozen=True)
class Evidence:
    """An observation that supports a cause.

    Attributes:
        steps: The first and the last step of the observation.
        words: The observation, as one sentence with numbers.
        params: The parameters concerned; empty where the observation concerns the whole run.
    """

    steps: tuple[int, int]
    words: str
    params: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Finding) -> "Evidence":
        """Return a finding as evidence.

        Args:
            found: The finding.
        """
        return cls((found.first_step, found.last_step), f"{capital(found.message)}.", found.params)


@dataclass(frozen=True)
class Cause:
    """A cause that explains a run.

    Attributes:
        key: One of `causes.KEYS`.
        certainty: ``"certain"``, ``"likely"`` or ``"possible"``.
        sentence: One sentence about the run.
        advice: The steps to take, in whole sentences that can be followed literally.
        evidence: The observations that support the cause, the strongest first.
        rules_out: The explanations that the evidence excludes, in whole sentences.
        rate_factor: The factor to multiply the learning rate by, where the advice changes the rate.
        threshold: The norm to clip at, where the advice includes a clip.
        optimizer: The label of the affected optimizer, where the record has several.
        may_be_meant: Whether the user may have intended it. If so, the report of a run that learns asks instead of
            advising.
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
    may_be_meant: bool = False

    @property
    def doubt(self) -> int:
        """The rank of the certainty: 0 for certain, 2 for possible."""
        return CERTAINTIES.index(self.certainty)

    def for_optimizer(self, optimizer: str) -> "Cause":
        """Return a copy whose sentence names the affected optimizer.

        Args:
            optimizer: The label of the optimizer.
        """
        sentence = f"{capital(optimizer)}: {self.sentence}"
        return replace(self, optimizer=optimizer, sentence=sentence)


@dataclass(frozen=True)
class Sign:
    """A match of one row of the cause table with a record.

    Attributes:
        evidence: The observations, the strongest first.
        words: The values for the placeholders in the row's sentences.
        certainty: The certainty; empty for the row's own.
        rate_factor: The factor to multiply the learning rate by, where the advice changes the rate.
        threshold: The norm to clip at, where the advice includes a clip.
    """

    evidence: tuple[Evidence, ...]
    words: Mapping[str, Any] = field(default_factory=dict)
    certainty: str = ""
    rate_factor: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table of causes.

    Attributes:
        key: The cause.
        sign: Searches the signals of a run for the cause: returns a `Sign`, or None where nothing was found.
        certainty: The certainty, unless the sign sets its own.
        sentence: One sentence about the run, with placeholders in braces.
        advice: The steps to take, with placeholders in braces.
        rules_out: The explanations that the evidence excludes. A cause that is only possible excludes nothing.
        may_be_meant: Whether the user may have intended it.
    """

    key: str
    sign: Callable[[Any], Sign | None]
    certainty: str
    sentence: str
    advice: str
    rules_out: str = ""
    may_be_meant: bool = False

    def cause(self, sign: Sign) -> Cause:
        """Return the cause, with the sign's values filled into the sentences.

        Args:
            sign: A sign that this row's ``sign`` returned.
        """
        certainty = sign.certainty or self.certainty
        excludes = certainty != "possible" and self.rules_out
        return Cause(
            self.key,
            certainty,
            self.sentence.format(**sign.words),
            self.advice.format(**sign.words),
            sign.evidence,
            (excludes,) if excludes else (),
            sign.rate_factor,
            sign.threshold,
            may_be_meant=self.may_be_meant,
        )
