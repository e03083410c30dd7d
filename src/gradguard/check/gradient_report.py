"""The report of a gradient check, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gradguard.json_values import jsonable

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

_MOST_NOTES = 12


@dataclass(frozen=True)
class GradientFinding:
    """One fault of a gradient, or one remark about it.

    ``kind`` is ``"mismatch"``, ``"kink"``, ``"jump"``, ``"singular"``, ``"nan"`` or ``"undecided"`` for an element.
    Otherwise it names the broken contract: ``"non-determinism"``, ``"layout"``, ``"linearity"``, ``"mutation"``,
    ``"state"``, ``"outputs"``, ``"error"``, ``"precision"``, ``"backends"``, ``"needs_input_grad"``, ``"random"``.
    A note of kind ``"stopped"`` reports that a search stopped early, with the findings it had.
    """

    kind: str
    message: str
    input: str = ""
    index: tuple[int, ...] | None = None
    analytical: float | None = None
    numerical: float | None = None
    bar: float | None = None
    step: float | None = None
    guess: str = ""

    @property
    def place(self) -> str:
        """The element as a Python expression: ``"weight[3, 17]"``."""
        return place_of(self.input, self.index or ())

    def __str__(self) -> str:
        parts = [self.place] if self.place else []
        digits = 6
        if self.analytical is not None and self.numerical is not None:
            digits = digits_apart(self.analytical, self.numerical, digits)
        if self.analytical is not None:
            parts.append(f"analytical {self.analytical:.{digits}g}")
        if self.numerical is not None and math.isfinite(self.numerical):
            bar = f" ± {self.bar:.1g}" if self.bar is not None and math.isfinite(self.bar) else ""
            step = f" (h {self.step:.1g})" if self.step is not None and math.isfinite(self.step) else ""
            parts.append(f"numerical {self.numerical:.{digits}g}{bar}{step}")
        said = f"{self.kind}: {self.message}" if self.message else self.kind
        return "  ".join([*parts, said + (f": {self.guess}" if self.guess else "")])


@dataclass(frozen=True)
class Power:
    """The smallest relative errors of a gradient that the comparison in a low dtype detects.

    Attributes:
        dtype: The low dtype.
        one: The smallest detectable error of a single wrong element; the median over elements.
        all: The smallest detectable error of all elements of an input together: all too large, or all too small.
    """

    dtype: str
    one: float
    all: float

    def __str__(self) -> str:
        return f"{self.dtype}; one wrong element would show from {self.one:.1g} relative, all alike from {self.all:.1g}"


@dataclass(frozen=True)
class GradientReport:
    """The outcome of `gradcheck`: print it, or read its ``verdict`` and ``findings``.

    Example:
        >>> import gradguard as gg, torch
        >>> report = gg.gradcheck(torch.sin, torch.linspace(0, 1, 5, dtype=torch.float64))
        >>> report.verdict, report.findings
        ('PASS', ())
    """

    verdict: Verdict
    findings: tuple[GradientFinding, ...] = ()
    """The reasons for a verdict other than PASS."""
    notes: tuple[GradientFinding, ...] = ()
    """Remarks that are not faults: kinks, ties, jumps, poles, outputs without a graph."""
    power: float = math.inf
    """The smallest relative error of one element of typical size that the check would have detected."""
    low_power: Power | None = None
    """The errors that the comparison of the low dtype with float64 would have detected; None without a comparison."""
    dtype: str = "float64"
    forward_mode: str = "not checked"
    """The result for the ``jvp``: "agrees", "wrong", "not defined" or "not checked"."""
    directions: int = 0
    forwards: int = 0
    backwards: int = 0
    seconds: float = field(default=0.0, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: a non-finite number becomes None, an index becomes a list."""
        return jsonable(asdict(self))

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        lines = [f"{self.verdict:<13} {finding}" for finding in self.findings]
        counted = f"{self.forwards} forwards, {self.backwards} backwards, {self.dtype}"
        if self.directions:
            several = "" if self.directions == 1 else "s"
            counted = f"{self.directions} direction{several}, {counted}, forward mode {self.forward_mode}"
        if self.power < 1:
            counted += f"; a wrong element of typical size would show from {self.power:.0e} relative"
            tied = sum(note.kind in ("kink", "tie") for note in self.notes)
            counted += f", except for {tied} at kinks or ties" if tied else ""
        lines.append(f"{self.verdict:<13} {counted}")
        lines += [f"{'':<13} {self.low_power}"] if self.low_power is not None else []
        lines += [f"{'note':<13} {note}" for note in self.notes[:_MOST_NOTES]]
        if len(self.notes) > _MOST_NOTES:
            lines.append(f"{'note':<13} and {len(self.notes) - _MOST_NOTES} more")
        return "\n".join(lines)


def place_of(name: str, index: Sequence[int]) -> str:
    """Return an element of a tensor as a Python expression: the name and the index, or the name alone for a scalar."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def digits_apart(first: float, second: float, least: int) -> int:
    """Return the number of significant digits that show two numbers as different, plus one digit."""
    if first == second or not (math.isfinite(first) and math.isfinite(second)):
        return least
    size = max(abs(first), abs(second))
    return min(17, max(least, math.floor(math.log10(size / abs(first - second))) + 3))
