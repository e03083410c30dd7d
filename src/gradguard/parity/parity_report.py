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
    """One thing that is wrong with the gradients of one or several parameters.

    ``kind`` is ``"missing"``, ``"extra"``, ``"shape"``, ``"nonfinite"``, ``"dead"``, ``"ranks"``, ``"factor"``,
    ``"rows"``, ``"mixture"``, ``"different"``, ``"noisy"`` or ``"unknown"``; or, of the runs themselves,
    ``"weights"``, ``"random"``, ``"blind"``, ``"settings"`` or ``"clip"``.
    """

    kind: str
    message: str
    parameters: tuple[str, ...] = ()
    distance: float | None = None
    factor: float | None = None
    factor_bar: float | None = None
    factor_name: str = ""
    stage: str = ""
    """The stage of the step; empty for the gradients of the first."""

    def __str__(self) -> str:
        front = f"{self.stage}: " if self.stage else ""
        return f"{front}{self.kind}: {self.message}" + (f": {names(self.parameters)}" if self.parameters else "")


def _power(outcomes: Sequence[Outcome]) -> float:
    known = [o for o in outcomes if o.distance is not None and o.kind != "blind"]
    sizes = sorted(math.inf if math.isnan(o.bar) else o.shows for o in known)
    return sizes[len(sizes) // 2] if sizes else math.inf


@dataclass(frozen=True)
class Stage:
    """One point of a training step, such as the optimizer's state after it, with the outcome of each tensor."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def power(self) -> float:
        """An error of this relative size would have shown in half of the tensors of which something is known."""
        return _power(self.outcomes)


@dataclass(frozen=True)
class ParityReport:
    """The outcome of a comparison of two runs: print it, or ask for its ``verdict`` and ``findings``.

    **Guarantees.**

    * A report is true of PASS alone: INCONCLUSIVE is false, as FAIL is. What is not known is never a PASS.
    * Every reason for another verdict is a finding; ``power`` says how large an error would have shown.
    """

    verdict: Verdict
    findings: tuple[ParityFinding, ...] = ()
    """Why the verdict is not PASS."""
    notes: tuple[str, ...] = ()
    """Notes: worth knowing, and no fault."""
    parameters: tuple[Outcome, ...] = ()
    """Return the facts of each parameter."""
    stages: tuple[Stage, ...] = ()
    """The stages of the step beside its gradients, in order, where both runs have kept them."""

    @property
    def largest(self) -> float:
        """How far apart the gradients of equal parameters are at most, in bars."""
        return max((o.distance or 0.0 for o in self.parameters if o.kind == "equal"), default=0.0)

    @property
    def power(self) -> float:
        """An error of this relative size would have shown in half of the parameters of which something is known."""
        return _power(self.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it: what is not finite is None."""
        parameters = [{**asdict(o), "shows": o.shows} for o in self.parameters]
        return jsonable({**asdict(self), "parameters": parameters, "largest": self.largest, "power": self.power})

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        equal, blind = (sum(o.kind == kind for o in self.parameters) for kind in ("equal", "blind"))
        told = f"{equal:,} of {len(self.parameters):,} parameters are equal, at most {self.largest:.2g} bars apart"
        told += f", and nothing is known of {blind:,}" if blind else ""
        if self.power < 1:
            told += f"; an error of {self.power:.1g} of a gradient would show in the median one"
        return verdict_text(self.verdict, self.findings, told, self.notes)


def names(parameters: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return listed(parameters, _MOST_NAMES)
