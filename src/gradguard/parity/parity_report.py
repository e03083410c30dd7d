"""The report of a comparison of two runs, for people and for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradguard.json_values import jsonable
from gradguard.parity.judge import Outcome
from gradguard.words import listed, verdict_text

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

_MOST_NAMES = 6


@dataclass(frozen=True)
class ParityFinding:
    """One fault of the gradients of one or several parameters, or one doubt about the comparison.

    ``kind`` is ``"missing"``, ``"extra"``, ``"shape"``, ``"nonfinite"``, ``"dead"``, ``"ranks"``, ``"factor"``,
    ``"rows"``, ``"mixture"``, ``"different"``, ``"noisy"`` or ``"unknown"``. A finding about the runs themselves has
    the kind ``"weights"``, ``"random"``, ``"blind"``, ``"settings"`` or ``"clip"``.
    """

    kind: str
    message: str
    parameters: tuple[str, ...] = ()
    distance: float | None = None
    factor: float | None = None
    factor_bar: float | None = None
    factor_name: str = ""
    stage: str = ""
    """The stage of the step; empty for the gradients of the first step."""

    def __str__(self) -> str:
        front = f"{self.stage}: " if self.stage else ""
        return f"{front}{self.kind}: {self.message}" + (f": {names(self.parameters)}" if self.parameters else "")


def _power(outcomes: Sequence[Outcome]) -> float:
    known = [o for o in outcomes if o.distance is not None and o.kind != "blind"]
    sizes = sorted(math.inf if math.isnan(o.bar) else o.shows for o in known)
    return sizes[len(sizes) // 2] if sizes else math.inf


@dataclass(frozen=True)
class Stage:
    """One stage of a training step, such as the optimizer's state after the step, with the outcome of each tensor."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def power(self) -> float:
        """The relative size of an error that would have shown in half of the conclusively compared tensors."""
        return _power(self.outcomes)


@dataclass(frozen=True)
class ParityReport:
    """The outcome of a comparison of two runs: print it, or read its ``verdict`` and ``findings``.

    **Guarantees.**

    * ``bool(report)`` is True for PASS alone, and False for FAIL and INCONCLUSIVE.
    * Every reason for another verdict than PASS is a finding. ``power`` is the size of an error that would have shown.
    """

    verdict: Verdict
    findings: tuple[ParityFinding, ...] = ()
    """The reasons for a verdict other than PASS."""
    notes: tuple[str, ...] = ()
    """Remarks that are not faults."""
    parameters: tuple[Outcome, ...] = ()
    """The outcome of each parameter's gradient."""
    stages: tuple[Stage, ...] = ()
    """The other stages of the steps, in order, if both runs have saved them."""

    @property
    def largest(self) -> float:
        """The largest distance between the gradients of equal parameters, in bars."""
        return max((o.distance or 0.0 for o in self.parameters if o.kind == "equal"), default=0.0)

    @property
    def power(self) -> float:
        """The relative size of an error that would have shown in half of the conclusively compared parameters."""
        return _power(self.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: a non-finite number becomes None."""
        parameters = [{**asdict(o), "shows": o.shows} for o in self.parameters]
        return jsonable({**asdict(self), "parameters": parameters, "largest": self.largest, "power": self.power})

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        equal, blind = (sum(o.kind == kind for o in self.parameters) for kind in ("equal", "blind"))
        summary = f"{equal:,} of {len(self.parameters):,} parameters are equal, at most {self.largest:.2g} bars apart"
        summary += f", and nothing is known of {blind:,}" if blind else ""
        if self.power < 1:
            summary += f"; an error of {self.power:.1g} of a gradient would show in the median one"
        return verdict_text(self.verdict, self.findings, summary, self.notes)


def names(parameters: Sequence[str]) -> str:
    """Return the first few names, and the number of further ones."""
    return listed(parameters, _MOST_NAMES)
