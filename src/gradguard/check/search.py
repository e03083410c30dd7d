"""Look for a wrong element: random directions first, halving where one disagrees, a close look at what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradguard.check.differences import Differences, Disagreement, are_finite, directions, mean_size
from gradguard.check.element import LITTLE_OF_TYPICAL, Diagnosis, examine, typical_size
from gradguard.check.elementwise import check_every_element
from gradguard.check.nearby import Pieces, pieces_around
from gradguard.check.report import Finding

_ROUNDS = 12
_MOST_FINDINGS = 5
_SETS_PER_LEVEL = 8
_POWERLESS = 1e-3
_TOO_WEAK = 0.1
_FEW_ENOUGH = 5000
_MOST_BROKEN = 200
_LITTLE = 1e-4
"""An error below this, of several elements, may be that of a solver which stops at a tolerance."""
_SEVERAL = 3
_MESSAGES = {
    "mismatch": "",
    "kink": "outside the subgradients [{low:.6g}, {high:.6g}]",
    "nan": "not finite where the function has a finite derivative",
}
_NOTES = {
    "kink": "a subgradient, between the one-sided derivatives {low:.6g} and {high:.6g}",
    "jump": "the function jumps here",
    "singular": "the derivative is not finite here, or the function is defined on one side only",
}

_NAN_AT_A_JUMP = "NaN, and the function jumps when such elements move together: choose another point"


@dataclass
class Search:
    """The state of one search: what was found, which elements are done with."""

    differences: Differences
    generator: torch.Generator
    count: int = 2
    """Random directions that have to agree; in float64, where bars are narrow, the first does if it is clear."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    undecided: list[Finding] = field(default_factory=list)
    agreed: list[Disagreement] = field(default_factory=list)
    unclear: list[Finding] = field(default_factory=list)
    singly: list[float] = field(default_factory=list)
    """Relative bars of elements that were examined by themselves and agreed."""
    kinks: list[int] = field(default_factory=list)
    """Elements at a kink or a tie, where a subgradient was accepted."""
    has_every_element: bool = False
    """Whether each element was compared by itself."""
    power: float = float("inf")
    smooth: tuple[Tensor, Disagreement] | None = None
    """A direction along which gradient and differences agree."""

    def run(self) -> None:
        """Search until all directions agree, or enough is found."""
        differences = self.differences
        self.open = differences.point.isfinite()
        self.continuous = self.open.clone()
        self.negligible = differences.negligible()
        self._examine_broken_gradients()
        suspect = None
        for _ in range(_ROUNDS):
            suspect = self._first_suspect(jointly=False)
            if suspect is None or len(self.findings) >= _MOST_FINDINGS:
                break
            elements = self._halve(suspect, self._disagrees(suspect))
            if not elements and not self._set_jumps_aside(suspect):
                break
            for position in elements:
                if len(self.findings) < _MOST_FINDINGS:
                    self.examine_element(position)
        if suspect is not None and not self.findings:
            if len(differences.point) <= _FEW_ENOUGH:
                check_every_element(self)
            else:
                self._first_suspect(jointly=True)
        if not self.findings:
            self._examine_kinks_together()
        self._propose_a_tolerance()
        self._rate()
        if len(self.findings) >= _MOST_FINDINGS:
            self.notes.insert(0, Finding("stopped", f"after {_MOST_FINDINGS} wrong elements, and there may be more"))

    def _first_suspect(self, jointly: bool) -> Tensor | None:
        """Return the first direction that disagrees or says nothing, None if enough of them agree.

        With ``jointly`` such a direction is examined as it is: no single element explains it, or too many do.
        """
        self.agreed = []
        if not bool(self.open.any()):
            return None
        powerless = None
        drawn = directions(self.differences.point, self._input_points(), self.generator)
        count = self.count if self.differences.are_few and self.differences.is_low else 1
        first = torch.stack([next(drawn) for _ in range(count)]) if count > 1 else next(drawn)[None]
        first *= self.open
        known = self.differences.along_each(first, with_noise=self.differences.has_noise)
        is_clear = self._is_clear(known)
        if not self.differences.has_noise and not is_clear:
            known = self.differences.along_each(first, with_noise=True)
            is_clear = self._is_clear(known)
        waiting = [(direction, known.of(i)) for i, direction in enumerate(first.unbind())]
        if is_clear and (count == self.count or (not self.differences.is_low and self._is_telling(known))):
            self.agreed, self.smooth = [found for _, found in waiting], waiting[0]
            return None
        del first
        for _ in range(2 * self.count):
            direction = waiting[0][0] if waiting else next(drawn).mul_(self.open)
            found = waiting.pop(0)[1] if waiting else self.differences.along(direction)
            if not self.differences.has_noise and not self._is_clear(found):
                found = self.differences.along_each(direction[None], with_noise=True).of(0)
            is_wrong = self.is_wrong(found)
            if not is_wrong and not bool(self._say_nothing(found)):
                self.agreed.append(found)
                self.smooth = direction, found
            elif jointly:
                self._examine_jointly(direction, found, is_wrong)
            elif is_wrong:
                return direction
            else:
                powerless = direction if powerless is None else powerless
            if len(self.agreed) >= self.count:
                return None
        return powerless

    def _is_clear(self, found: Disagreement) -> bool:
        """Tell whether all that is known agrees, and says something."""
        return not bool((self._are_wrong(found) | self._say_nothing(found)).any())

    def _is_telling(self, found: Disagreement) -> bool:
        """Tell whether a wrong element of typical size would show, or no element has a size."""
        powers = self._powers(found)
        return not powers or min(powers) <= _TOO_WEAK

    def _powers(self, found: Disagreement) -> list[float]:
        """Return from which relative error on one element of typical size would show, for each cotangent that tells."""
        typical = found.scale / max(1, int(self.open.sum())) ** 0.5
        telling = found.scale > self.negligible
        return (found.allowed(self.differences.relative) / typical)[telling].tolist()

    def is_wrong(self, found: Disagreement) -> bool:
        """Tell whether a disagreement is larger than its bar allows."""
        return bool(self._are_wrong(found))

    def _are_wrong(self, found: Disagreement) -> Tensor:
        return (found.error.abs() > found.allowed(self.differences.relative)).any(dim=-1)

    def _say_nothing(self, found: Disagreement) -> Tensor:
        nothing = (found.scale <= self.negligible) & (found.bar <= 1e3 * self.negligible)
        return (~nothing & (found.bar > _POWERLESS * found.size)).any(dim=-1)

    def _halve(self, direction: Tensor, is_suspect: Callable[[Tensor], bool]) -> list[int]:
        """Return single elements of ``direction`` that are suspect, found by halving."""
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
        return [int(one) for one in singles][: 2 * _SETS_PER_LEVEL]

    def _disagrees(self, direction: Tensor) -> Callable[[Tensor], bool]:
        """Return what tells whether the gradient disagrees along a part of ``direction``, or nothing can be said."""
        floor = _POWERLESS * (self.differences.gradients * direction).square().mean(dim=1).sqrt()

        def disagrees(part: Tensor) -> bool:
            found = self.differences.along(part)
            if self.is_wrong(found):
                return True
            enough = torch.maximum(_POWERLESS * found.scale, floor * float((part != 0).sum()) ** 0.5)
            return bool((found.bar > enough).any())

        return disagrees

    def _set_jumps_aside(self, direction: Tensor) -> bool:
        """Return whether elements were left out whose value is isolated: whichever way they move, the function jumps.

        Central differences of such an element alone see nothing; those of others see another function.
        """
        jumping = self._halve(direction, self.differences.jumps) if self.differences.jumps(direction) else []
        for position in jumping:
            self.open[position] = self.continuous[position] = False
            self.notes.append(Finding("jump", _NOTES["jump"], *self._place(position)))
        return bool(jumping)

    def _examine_broken_gradients(self) -> None:
        """Look at elements whose gradient is not finite; the others are then checked without them."""
        gradients = self.differences.gradients
        if are_finite(gradients):
            return
        kinds = gradients.isnan().any(dim=0), gradients.isinf().any(dim=0)
        broken = [position for kind in kinds for position in kind.nonzero().reshape(-1).tolist()]
        for position in broken[:_MOST_BROKEN]:
            if len(self.findings) < _MOST_FINDINGS:
                self.examine_element(position)
        if len(broken) > _MOST_BROKEN and not self.findings:
            message = f"{len(broken):,} elements have a gradient that is not finite, {_MOST_BROKEN} were looked at"
            self.undecided.append(Finding("singular", message))
        self.open[broken] = self.continuous[broken] = False
        self.differences.gradients = self.differences.gradients.nan_to_num(0.0, 0.0, 0.0)

    @cached_property
    def _jumps_where_it_is_nan(self) -> bool:
        """Whether it jumps when elements whose gradient is NaN move, as eigenvectors do where eigenvalues are equal."""
        broken = self.differences.gradients.isnan().any(dim=0)
        direction = next(directions(self.differences.point, self._input_points(), self.generator))
        return self.differences.jumps(direction * broken)

    def examine_element(self, position: int) -> None:
        """Look closely at one element, once, and note what it shows."""
        differences = self.differences
        if not bool(self.open[position]):
            return
        self.open[position] = False
        direction = torch.zeros_like(differences.point)
        direction[position] = 1.0
        value = abs(float(differences.point[position]))
        name, _ = differences.function.name_of(position)
        own = differences.function.range_of(name)
        mean = float(mean_size(differences.point[own.start : own.stop]))
        shown = examine(differences, direction, [value, mean, 1.0])
        if any(one.kind == "nan" for one in shown):
            if differences.reaches_a_pole(direction):
                self.notes.append(Finding("singular", _NOTES["singular"], *self._place(position)))
                return
            if self._jumps_where_it_is_nan:
                self.undecided += (
                    [] if self.undecided else [Finding("singular", _NAN_AT_A_JUMP, *self._place(position))]
                )
                return
        wrong = [k for k, one in enumerate(shown) if one.is_wrong and one.kind != "nan"]
        pieces = pieces_around(differences, direction, wrong, self.generator) if wrong else None
        if pieces is not None:
            self.kinks.append(position)
            message = f"between the derivatives of pieces that meet here, {pieces.low:.6g} and {pieces.high:.6g}"
            self.notes.append(Finding("tie", message, *self._place(position), analytical=shown[wrong[0]].analytical))
        else:
            self._note([self._unless_in_doubt(one, k, direction * mean) for k, one in enumerate(shown)], position)

    def _unless_in_doubt(self, shown: Diagnosis, k: int, direction: Tensor) -> Diagnosis:
        """Return "undecided" for what agrees within a bar so wide that the disagreement at larger steps fits in."""
        if shown.kind != "ok" or shown.is_wrong or not self.differences.is_low:
            return shown
        found = self.differences.along(direction)
        off, allowed = float(found.error[k].abs()), float(found.allowed(self.differences.relative)[k])
        moved = float(direction.abs().max())
        bar = 10 * shown.bar * moved
        is_little = bar <= LITTLE_OF_TYPICAL * typical_size(self.differences, k) * moved
        return replace(shown, kind="undecided") if allowed < off < bar and not is_little else shown

    def _examine_jointly(self, direction: Tensor, found: Disagreement, is_wrong: bool) -> None:
        """Look at a direction as at one element: kinks, ties and noise of many elements show there as well."""
        shown = examine(self.differences, direction, [1.0])
        worst = max(shown, key=lambda one: (one.is_wrong, one.kind == "undecided", one.kind != "ok"))
        pieces = self._pieces(direction, shown) if worst.is_wrong else None
        if pieces is not None or (not worst.is_wrong and worst.kind in ("ok", "kink")):
            low, high = pieces or (worst.low, worst.high)
            width = 0.0 if low != low else high - low  # anything in between passes, and less than that is not seen
            self.agreed.append(found._replace(bar=found.bar.clamp(min=width)))
        elif worst.is_wrong and is_wrong:
            self.findings.append(_finding(worst, "", None, "along a random direction, from many elements together"))
        else:
            self.unclear.append(_finding(worst, "", None, "nothing settles along a random direction"))

    def _examine_kinks_together(self) -> None:
        """Move everything, or what is tied, by the same amount: each element may be right, and their sum too large.

        Tied values stay tied, so that every right choice among them gives the same.
        """
        if len(self.kinks) < 2:
            return
        tied = torch.zeros_like(self.continuous)
        tied[self.kinks] = True
        for moved in (self.continuous, tied):
            direction = mean_size(self.differences.point) * moved
            shown = examine(self.differences, direction, [1.0])
            worst = max(shown, key=lambda one: one.is_wrong)
            if worst.is_wrong and self._pieces(direction, shown) is None:
                message = f"{len(self.kinks)} elements at kinks or ties, right one by one, are not when moved together"
                self.findings.append(_finding(worst, "", None, message))
                return

    def _pieces(self, direction: Tensor, shown: list[Diagnosis]) -> Pieces | None:
        wrong = [k for k, one in enumerate(shown) if one.is_wrong]
        return pieces_around(self.differences, direction, wrong, self.generator)

    def _note(self, shown: list[Diagnosis], position: int) -> None:
        name, index = self._place(position)
        worst = max(shown, key=lambda one: (one.is_wrong, one.kind == "undecided", one.kind != "ok"))
        if worst.is_wrong:
            self.findings.append(
                _finding(worst, name, index, _MESSAGES[worst.kind].format(low=worst.low, high=worst.high))
            )
        elif worst.kind == "undecided":
            self.undecided.append(_finding(worst, name, index, "the numerical derivative does not settle"))
        elif worst.kind in _NOTES:
            self.kinks += [position] if worst.kind == "kink" else []
            self.continuous[position] = worst.kind == "kink"
            self.singly += [0.0 for one in shown if one.numerical == one.numerical]  # something to compare with
            self.notes.append(_finding(worst, name, index, _NOTES[worst.kind].format(low=worst.low, high=worst.high)))
        else:
            rounding, told = float(self.negligible.max()), [one for one in shown if one.numerical == one.numerical]
            self.singly += [one.bar / size if (size := abs(one.analytical)) > rounding else 0.0 for one in told]

    def _place(self, position: int) -> tuple[str, tuple[int, ...]]:
        return self.differences.function.name_of(position)

    def _propose_a_tolerance(self) -> None:
        """Say which ``rtol`` would accept what is off by little: wrong, unless the function is itself no more exact."""
        if len(self.findings) < _SEVERAL or any(one.kind != "mismatch" or one.index is None for one in self.findings):
            return
        drawn = directions(self.differences.point, self._input_points(), self.generator)
        usable = self.differences.point.isfinite()
        found = self.differences.along_each(torch.stack([next(drawn) for _ in range(self.count)]) * usable)
        needed = float((found.error.abs() / found.scale).max())
        if not 0 < needed < _LITTLE:
            return
        proposed = 10.0 ** math.ceil(math.log10(3 * needed))
        message = f"off by {needed:.0e} relative in all; if this is the error of a solver, rtol={proposed:g} allows it"
        self.findings[0] = replace(self.findings[0], message=message)

    def _rate(self) -> None:
        """Work out the relative error that one element of typical size would have shown with."""
        if len(self.agreed) < self.count / 2:
            self.undecided += self.unclear[:1]
        seen = []
        if self.agreed:
            seen = self._powers(Disagreement.together(self.agreed))
        compared = self.agreed or self.singly or self.kinks or self.has_every_element
        if not compared and len(self.differences.point):
            self.undecided.append(Finding("undecided", "jumps and poles everywhere: there is nothing to compare with"))
        self.power = min(seen, default=5 * max(self.singly, default=0.0) or float("inf"))
        if self.power > _TOO_WEAK and (seen or any(self.singly)) and not self.findings:
            message = f"a wrong element would show only from {self.power:.1g} relative"
            self.undecided.append(Finding("undecided", message))

    def _input_points(self) -> list[Tensor]:
        return list(self.differences.point.split(self.differences.function.sizes))


def _finding(shown: Diagnosis, name: str, index: tuple[int, ...] | None, message: str) -> Finding:
    return Finding(shown.kind, message, name, index, shown.analytical, shown.numerical, shown.bar, shown.step)
