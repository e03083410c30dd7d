"""A cause: one thing that explains what a run did, with how sure it is, what to do, and where it shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradguard.monitoring.judge.findings import Finding
from gradguard.monitoring.judge.numbers import capital

CERTAINTIES = ("certain", "likely", "possible")
"""How sure a cause is: the record leaves no other reading; it is the likely reading; it may be."""


@dataclass(frozen=True)
class Evidence:
    """Where a cause shows.

    Attributes:
        steps: The first and the last step that it is about.
        words: The observation, as one sentence with numbers.
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
        key: One of `causes.KEYS`.
        certainty: ``"certain"``, ``"likely"`` or ``"possible"``.
        sentence: One sentence on the run.
        advice: The steps to take, in whole sentences that can be followed literally.
        evidence: Where it shows, the strongest first.
        rules_out: Causes that the evidence excludes, in whole sentences.
        rate_factor: The number to multiply the learning rate by, where that is the advice.
        threshold: The norm to clip at, where that is part of the advice.
        optimizer: The label of the optimizer that it is about, where the record has several.
        may_be_meant: Whether it may be wanted, so that the page of a run which learns asks.
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
        """The place of its certainty: 0 for the surest."""
        return CERTAINTIES.index(self.certainty)

    def of(self, optimizer: str) -> "Cause":
        """Return this cause as one of an optimizer among several.

        Args:
            optimizer: Its label.
        """
        sentence = f"{capital(optimizer)}: {self.sentence}"
        return replace(self, optimizer=optimizer, sentence=sentence)


@dataclass(frozen=True)
class Sign:
    """Evidence in a record that a cause is there.

    Attributes:
        evidence: Where it shows, the strongest first.
        words: Words for the gaps in the row's sentences.
        certainty: How sure it is; empty for what the row says.
        rate_factor: The number to multiply the learning rate by, where that is the advice.
        threshold: The norm to clip at, where that is part of the advice.
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
        sign: The evidence that it needs: what it shows by, or None where it does not show.
        certainty: How sure it is, unless the sign says otherwise.
        sentence: One sentence on the run, with gaps in braces.
        advice: The steps to take, with gaps in braces.
        rules_out: The causes that the evidence excludes; a cause that is only possible excludes nothing.
        may_be_meant: Whether it may be wanted.
    """

    key: str
    sign: Callable[[Any], Sign | None]
    certainty: str
    sentence: str
    advice: str
    rules_out: str = ""
    may_be_meant: bool = False

    def cause(self, sign: Sign) -> Cause:
        """Return the cause that a sign shows.

        Args:
            sign: The sign.
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
