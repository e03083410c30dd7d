"""Search for wrong elements: try random directions, halve those that disagree, and examine the elements that remain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradguard.check.differences import Differences, Disagreement, directions
from gradguard.check.direction_verdict import LITTLE_OF_TYPICAL, ElementVerdict, examine, typical_size
from gradguard.check.elementwise import check_every_element
from gradguard.check.flat_vectors import are_finite, finite, mean_size, norm
from gradguard.check.gradient_report import GradientFinding
from gradguard.check.meeting_pieces import Pieces, pieces_around

_DIRECTIONS = 2
"""The number of random directions that must agree. In float64, whose bars are narrow, one clear direction suffices."""
_ROUNDS = 12
_MOST_FINDINGS = 5
_SETS_PER_LEVEL = 8
_POWERLESS = 1e-3
_TOO_WEAK = 0.1
_FEW_ENOUGH = 5000
_MOST_BROKEN = 200
_LITTLE = 1e-4
"""A smaller relative error in several elements may come from a solver that stops at a tolerance."""
_SEVERAL = 3
_WORDS = {
    ("mismatch", True): "",
    ("kink", True): "outside the subgradients [{low:.6g}, {high:.6g}]",
    ("nan", True): "not finite where the function has a finite derivative",
    ("undecided", False): "the numerical derivative does not settle",
    ("kink", False): "a subgradient, between the one-sided derivatives {low:.6g} and {high:.6g}",
    ("jump", False): "the function jumps at this point",
    ("singular", False): "the derivative is not finite at this point, or the function is defined on one side only",
}
"""The message for an element, by the kind of the verdict and by whether the gradient is wrong."""

_NAN_AT_A_JUMP = "NaN, and the function jumps when such elements move together: choose another point"


@dataclass
class Search:
    """A search for wrong elements: its findings, and the elements that it has not settled yet."""

    differences: Differences
    generator: torch.Generator
    findings: list[GradientFinding] = field(default_factory=list)
    notes: list[GradientFinding] = field(default_factory=list)
    undecided: list[GradientFinding] = field(default_factory=list)
    agreed: list[Disagreement] = field(default_factory=list)
    unclear: list[GradientFinding] = field(default_factory=list)
    singly: list[float] = field(default_factory=list)
    """The allowed relative error of each element that was examined alone and agreed."""
    kinks: list[int] = field(default_factory=list)
    """The elements at a kink or a tie whose gradient was accepted as a subgradient."""
    has_every_element: bool = False
    """Whether every element was compared with its own derivative."""
    power: float = float("inf")
    smooth: tuple[Tensor, Disagreement] | None = None
    """A direction along which gradient and differences agree, and their remaining disagreement."""

    def run(self, exhaustive: bool) -> None:
        """Search until all directions agree or there are enough findings; if ``exhaustive``, compare every element."""
        differences = self.differences
        self.open = differences.point.isfinite()
        self.continuous = self.open.clone()
        self.negligible = differences.negligible
        self._examine_broken_gradients()
        suspect = None
        for _ in range(_ROUNDS):
            suspect = self._first_suspect(jointly=False)
            if suspect is None or len(self.findings) >= _MOST_FINDINGS:
                break
            elements = self._halve(suspect, self._disagrees(suspect))
            if not elements and not self._set_jumps_aside(suspect):
                break
            self._examine_up_to_five(elements)
        is_open = suspect is not None and not self.findings
        if is_open and len(differences.point) > _FEW_ENOUGH:
            self._first_suspect(jointly=True)
        elif is_open:
            check_every_element(self)
        if not self.findings:
            self._examine_kinks_together()
        if exhaustive and not self.findings:
            check_every_element(self)
        self._propose_a_tolerance()
        self._rate()
        if len(self.findings) >= _MOST_FINDINGS:
            message = f"after {_MOST_FINDINGS} wrong elements, and there may be more"
            self.notes.insert(0, GradientFinding("stopped", message))

    def _examine_up_to_five(self, elements: list[int]) -> None:
        """Examine elements one by one, and stop at five findings."""
        for position in elements:
            if len(self.findings) < _MOST_FINDINGS:
                self.examine_element(position)

    def _first_suspect(self, jointly: bool) -> Tensor | None:
        """Return a direction that disagrees, or else one whose bar is too wide to decide; None if enough agree.

        With ``jointly``, such a direction is examined as a whole, because no single element explains it or too many do.
        """
        self.agreed = []
        if not bool(self.open.any()):
            return None
        differences, powerless, needed = self.differences, None, _DIRECTIONS
        drawn = directions(differences.function, self.generator)
        for attempt in range(2 * _DIRECTIONS):
            direction = next(drawn).mul_(self.open)
            found = self._along(direction)
            if self._is_clear(found):
                self.agreed.append(found)
                self.smooth = direction, found
                is_telling = (self._power(found) or 0.0) <= _TOO_WEAK  # the power is None if the gradient is 0
                needed = 1 if not attempt and not differences.is_low and is_telling else needed
            elif jointly:
                self._examine_jointly(direction, found)
            elif found.is_wrong:
                return direction
            else:
                powerless = direction if powerless is None else powerless
            if len(self.agreed) >= needed:
                return self._suspect_of_one_input(direction, found, jointly)
        return powerless

    def _suspect_of_one_input(self, direction: Tensor, agreed: Disagreement, jointly: bool) -> Tensor | None:
        """Check each input whose gradient is so small that an error would not show in ``agreed``, by itself."""
        differences = self.differences
        for name, own in differences.function.ranges.items():
            moved = direction[own]
            scale = norm(moved * differences.gradient[own])
            hidden = agreed.allowed * int((moved != 0).sum()) ** 0.5
            if scale >= agreed.scale or hidden <= _TOO_WEAK * scale:
                continue
            part = _of_input(direction, own)
            found = self._along(part)
            if found.size > self.negligible and found.is_wrong:
                if not jointly:
                    return part
                self._examine_jointly(part, found)
            elif scale > 0 and (found.size <= self.negligible or found.allowed > _TOO_WEAK * scale):
                note = GradientFinding(
                    "precision", "not judged: its gradient is within the rounding of the others", name
                )
                self.notes += [] if note in self.notes else [note]
        return None

    def _along(self, direction: Tensor) -> Disagreement:
        """Return the disagreement along a direction; measure the noise of the outputs if it is unclear without."""
        found = self.differences.along(direction)
        if self.differences.has_noise or self._is_clear(found):
            return found
        return self.differences.along(direction, with_noise=True)

    def _is_clear(self, found: Disagreement) -> bool:
        """Return whether a direction agrees within a bar narrow enough to be evidence."""
        is_nothing = found.scale <= self.negligible and found.bar <= 1e3 * self.negligible
        return not found.is_wrong and (is_nothing or not found.bar > _POWERLESS * found.size)

    def _power(self, found: Disagreement) -> float | None:
        """Return the relative error above which a wrong element of typical size shows; None if the gradient is 0."""
        if found.scale <= self.negligible:
            return None
        return found.allowed / found.scale * max(1, int(self.open.sum())) ** 0.5

    def _halve(self, direction: Tensor, is_suspect: Callable[[Tensor], bool]) -> list[int]:
        """Find the single suspect elements of ``direction`` by halving."""
        level = [direction.nonzero().reshape(-1)]
        singles: list[Tensor] = []
        if len(level[0]) == 1:
            return level[0].tolist()
        while level:
            following = []
            for half in (half for indices in level for half in indices.tensor_split(2)):
                masked = torch.zeros_like(direction)
                masked[half] = direction[half]
                if is_suspect(masked):
                    (singles if len(half) == 1 else following).append(half)
            level = following[:_SETS_PER_LEVEL]
        return list(map(int, singles))[: 2 * _SETS_PER_LEVEL]

    def _disagrees(self, direction: Tensor) -> Callable[[Tensor], bool]:
        """Return a predicate for parts of ``direction``: the gradient disagrees, or the bar is too wide to decide."""
        floor = _POWERLESS * norm(self.differences.gradient * direction) / len(direction) ** 0.5

        def disagrees(part: Tensor) -> bool:
            found = self.differences.along(part)
            enough = max(_POWERLESS * found.scale, floor * int((part != 0).sum()) ** 0.5)
            return found.is_wrong or found.bar > enough

        return disagrees

    def _set_jumps_aside(self, direction: Tensor) -> bool:
        """Exclude elements at which the function jumps in both directions.

        Central differences of such an element alone do not show the jump, and central differences of other elements
        measure a different function.

        Returns:
            Whether there are such elements.
        """
        jumping = self._halve(direction, self.differences.jumps) if self.differences.jumps(direction) else []
        for position in jumping:
            self.open[position] = self.continuous[position] = False
            self.notes.append(GradientFinding("jump", _WORDS["jump", False], *self._place(position)))
        return bool(jumping)

    def _examine_broken_gradients(self) -> None:
        """Examine the elements with a non-finite gradient, and exclude them from the rest of the search."""
        gradient = self.differences.gradient
        if are_finite(gradient):
            return
        broken = [i for kind in (gradient.isnan(), gradient.isinf()) for i in kind.nonzero().reshape(-1).tolist()]
        self._examine_up_to_five(broken[:_MOST_BROKEN])
        if len(broken) > _MOST_BROKEN and not self.findings:
            message = f"{len(broken):,} elements have a gradient that is not finite, {_MOST_BROKEN} were examined"
            self.undecided.append(GradientFinding("singular", message))
        self.open[broken] = self.continuous[broken] = False
        self.differences.gradient = finite(gradient)

    @cached_property
    def _jumps_where_it_is_nan(self) -> bool:
        """Whether the outputs jump when elements with a NaN gradient move, as eigenvectors of equal eigenvalues do."""
        direction = next(directions(self.differences.function, self.generator))
        return self.differences.jumps(direction * self.differences.gradient.isnan())

    def examine_element(self, position: int) -> None:
        """Examine one element and record the verdict; an element that is settled already is skipped."""
        differences = self.differences
        if not bool(self.open[position]):
            return
        self.open[position] = False
        direction = torch.zeros_like(differences.point)
        direction[position] = 1.0
        place = self._place(position)
        own = differences.function.ranges[place[0]]
        mean = float(mean_size(differences.point[own]))
        shown = examine(differences, direction, [abs(float(differences.point[position])), mean, 1.0])
        if shown.kind == "nan" and differences.reaches_a_pole(direction):
            self.notes.append(GradientFinding("singular", _WORDS["singular", False], *place))
            return
        if shown.kind == "nan" and self._jumps_where_it_is_nan:
            self.undecided = self.undecided or [GradientFinding("singular", _NAN_AT_A_JUMP, *place)]
            return
        pieces = self._pieces(direction) if shown.is_wrong and shown.kind != "nan" else None
        if pieces is not None:
            self.kinks.append(position)
            message = (
                f"between the derivatives of pieces that meet at this point, {pieces.low:.6g} and {pieces.high:.6g}"
            )
            self.notes.append(GradientFinding("tie", message, *place, analytical=shown.analytical))
            return
        if shown.kind == "ok" and differences.is_low:
            # A wide bar may hide a disagreement that shows at larger steps.
            found = differences.along(direction * mean)
            bar = 10 * shown.numerical.bar * mean
            is_little = bar <= LITTLE_OF_TYPICAL * typical_size(differences) * mean
            if found.allowed < abs(found.error) < bar and not is_little:
                shown = replace(shown, kind="undecided")
        self._note(shown, position)

    def _examine_jointly(self, direction: Tensor, found: Disagreement) -> None:
        """Examine a whole direction like a single element, if too many elements are at kinks or ties."""
        shown = examine(self.differences, direction, [1.0])
        pieces = self._pieces(direction) if shown.is_wrong else None
        if pieces is not None or (not shown.is_wrong and shown.kind in ("ok", "kink")):
            low, high = pieces or (shown.low, shown.high)
            width = 0.0 if low != low else high - low  # any gradient in the interval passes, so the bar spans it
            self.agreed.append(found._replace(bar=max(found.bar, width)))
        elif shown.is_wrong and found.is_wrong:
            self.findings.append(_finding(shown, "", None, "along a random direction, from many elements together"))
        else:
            self.unclear.append(_finding(shown, "", None, "nothing settles along a random direction"))

    def _examine_kinks_together(self) -> None:
        """Move all elements, then the tied ones, by equal amounts: each may be right alone while the sum is too large.

        Tied values stay tied under such a move, so every valid subgradient has the same derivative along it.
        """
        if len(self.kinks) < 2:
            return
        tied = torch.zeros_like(self.continuous)
        tied[self.kinks] = True
        for moved in (self.continuous, tied):
            direction = mean_size(self.differences.point) * moved
            shown = examine(self.differences, direction, [1.0])
            if shown.is_wrong and self._pieces(direction) is None:
                message = (
                    f"{len(self.kinks)} elements at kinks or ties are right one by one, and wrong when moved together"
                )
                self.findings.append(_finding(shown, "", None, message))
                return

    def _pieces(self, direction: Tensor) -> Pieces | None:
        return pieces_around(self.differences, direction, self.generator)

    def _note(self, shown: ElementVerdict, position: int) -> None:
        if shown.kind != "ok":
            words = _WORDS[shown.kind, shown.is_wrong].format(low=shown.low, high=shown.high)
            kept = self.findings if shown.is_wrong else self.undecided if shown.kind == "undecided" else self.notes
            kept.append(_finding(shown, *self._place(position), words))
        if shown.is_wrong or shown.kind == "undecided":
            return
        if shown.kind == "kink":
            self.kinks.append(position)
        elif shown.kind != "ok":
            self.continuous[position] = False
        if not math.isnan(shown.numerical.value):
            size = abs(shown.analytical) if shown.kind == "ok" else 0.0
            is_known = size > self.negligible
            self.singly.append(max(shown.numerical.bar / size, self.differences.rtol) if is_known else 0.0)

    def _place(self, position: int) -> tuple[str, tuple[int, ...]]:
        return self.differences.function.name_of(position)

    def _propose_a_tolerance(self) -> None:
        """Propose an ``rtol`` that accepts small errors, which may come from a function that is itself as inexact."""
        if len(self.findings) < _SEVERAL or any(one.kind != "mismatch" or one.index is None for one in self.findings):
            return
        drawn = directions(self.differences.function, self.generator)
        usable = self.differences.point.isfinite()
        ranges = self.differences.function.ranges.values()
        moved = [next(drawn) * usable for _ in range(_DIRECTIONS)]
        parts = [_of_input(direction, own) for direction in moved for own in ranges]
        found = [one for one in map(self.differences.along, parts) if one.is_wrong]
        needed = max((abs(one.error) / one.scale if one.scale else math.inf for one in found), default=0.0)
        if not 0 < needed < _LITTLE:
            return
        proposed = 10.0 ** math.ceil(math.log10(3 * needed))
        message = f"off by {needed:.0e} relative in all; if this is the error of a solver, rtol={proposed:g} allows it"
        self.findings[0] = replace(self.findings[0], message=message)

    def _rate(self) -> None:
        """Compute the relative error above which one wrong element of typical size would have shown."""
        if not self.agreed:
            self.undecided += self.unclear[:1]
        seen = [power for one in self.agreed if (power := self._power(one)) is not None]
        compared = self.agreed or self.singly or self.kinks or self.has_every_element
        if not compared and len(self.differences.point):
            self.undecided.append(
                GradientFinding("undecided", "jumps and poles everywhere: there is nothing to compare with")
            )
        if not (self.agreed or self.undecided or self.has_every_element) and bool(self.open.any()):
            self.undecided.append(GradientFinding("undecided", "no direction was accurate enough for a comparison"))
        self.power = min(seen, default=5 * max(self.singly, default=0.0) or float("inf"))
        if self.power > _TOO_WEAK and (seen or any(self.singly)) and not self.findings:
            message = f"a wrong element would show only from {self.power:.1g} relative"
            self.undecided.append(GradientFinding("undecided", message))


def _of_input(direction: Tensor, own: slice) -> Tensor:
    """Return the part of a direction that moves only the input at the slice ``own``."""
    part = torch.zeros_like(direction)
    part[own] = direction[own]
    return part


def _finding(shown: ElementVerdict, name: str, index: tuple[int, ...] | None, message: str) -> GradientFinding:
    return GradientFinding(shown.kind, message, name, index, shown.analytical, *shown.numerical[:3])
