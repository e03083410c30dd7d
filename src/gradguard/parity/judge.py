"""Judging a parameter's gradients in two runs: equal, off by a factor, or wrong in another way.

Plain numbers: each gradient is a sketch, a few signed sums whose root mean square is the gradient's norm. All that the
verdicts need is linear in the gradient, so it is the same of sketches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gradguard.parity.vectors import Vector, along, distance, dot, minus, norm
from gradguard.words import listed

Facts = Mapping[str, float]
"""Numbers that a factor may be, by name."""

BARS = 3.0
"""Two gradients are equal if they are no further apart than so many bars; those of healthy runs are up to 0.8."""

BLIND = 0.5
"""If not even an error of this part of a gradient would show, as where it is halved, nothing is known of it."""

UNEVEN = 100.0
"""A run whose rounding is amplified so many times more than the other's is not compared by its own bar."""

SKETCH_ROUNDING = 1e-12
"""Relative error of a sketch by the order of additions: the limit for float64 gradients."""

MOST_PARTS = 16
"""So many weights can be told from 32 sums, with as many left to see that they explain all."""

_NOISE = 0.3  # of a gradient whose bar is this part of its norm no factor is told
_WIDEST_NAMED = 0.1  # a factor known less well than to a tenth has no name
_MANY = 16  # so many numbers are not a multiple of others by chance
_BY_CHANCE = 1e-3  # a factor that random numbers have more often than that needs others beside it
_WIDEST_ALONE = 1e-3  # a single number is a multiple of any other: it has a name only if it is known so well
_NOT_MEASURED = "not equal, and nobody has measured what rounding does"
_ONE_SIDED = (
    "not equal, and so many micro-batches may all be rounded to one side, as the same one over and over is: compare "
    "with fewer"
)
_DEPENDENT = 1e-4  # a part of which no more is its own is a mixture of the others
_ONE_NUMBER = 1e-9  # candidates closer than this are one number with two names
_MOST_RANGES = 8  # of rows in a message

Kind = Literal[
    "missing", "extra", "shape", "ranks", "rows", "mixture", "factor", "dead", "nonfinite", "different", "noisy",
    "unknown", "blind", "equal",
]  # fmt: skip
"""Verdicts on a parameter, what explains others first."""


@dataclass(frozen=True, slots=True)
class MeasuredGradient:
    """One parameter's gradient in one run.

    Attributes:
        shape: The whole parameter's.
        rounding: Error of storing the gradient and adding it up, relative.
        gradient: Its sketch.
        repeated: Sketches of the same gradient from runs that differ from it by rounding; empty where nobody tried.
        has_gradient: Whether any process has one.
        contrasts: Weighted sums over the copies of different ranks, with weights that add up to 0.
        copies: How many ranks hold the same part.
        parts: Sketches of other gradients of which this one may be a mixture, by name.
        rows: Sketches like ``gradient`` and ``repeated`` of each row, where ``rows=`` has asked for them.
        epsilon: The spacing of the coarsest dtype that is computed in, relative, by which the weights were changed for
            ``repeated``; 0 where nobody knows.
        one_sided: Largest error of adding it up, relative: where each addition rounds to the same side.
    """

    shape: tuple[int, ...]
    rounding: float
    gradient: Vector
    repeated: Sequence[Vector] = ()
    has_gradient: bool = True
    contrasts: Sequence[Vector] = ()
    copies: int = 1
    parts: Mapping[str, Vector] = field(default_factory=dict)
    rows: Sequence[Sequence[Vector]] = ()
    epsilon: float = 0.0
    one_sided: float = 0.0

    @property
    def size(self) -> float:
        """The norm of the gradient."""
        return norm(self.gradient)

    @property
    def floor(self) -> float:
        """The least error that storing and adding up cause."""
        return max(self.rounding, SKETCH_ROUNDING) * self.size

    @property
    def few(self) -> float:
        """The factor from the change that a few runs show to the largest: a single number may change little by luck."""
        return 1 + 4 / max(1, math.prod(self.shape))

    @property
    def amplified(self) -> float:
        """The gradient's relative change over that of the weights; 0 if it is not known."""
        bar = bar_of(self)
        return bar / self.size / self.epsilon if bar and self.size and self.epsilon else 0.0


Runs = Mapping[str, MeasuredGradient]
"""The two runs, by the words for them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one parameter's gradient compares.

    Attributes:
        name: The parameter.
        kind: Verdict; ``"blind"`` where the two are no further apart than rounding, and a wrong one would not be.
        distance: How far apart the two are, in bars; None where that is no number.
        bar: Error by rounding, as a part of the gradient's norm: infinite where it is zero in both runs, NaN where it
            was not measured.
        factor: Factor on the reference's gradient, NaN if there is none; of a ``"different"`` one, if it is
            multiplied: few numbers may be a multiple of others by chance.
        factor_bar: How well that is known.
        factor_name: Name of a number of that size, such as ``"world size"``.
        rows: The wrong rows.
        weights: The share of each part, with how well it is known.
        reduction: ``"sum"`` or ``"mean"`` of the copies of ranks, if that is right where they are not.
        message: The rest, in words.
    """

    name: str
    kind: Kind
    distance: float | None = None
    bar: float = math.nan
    factor: float = math.nan
    factor_bar: float = 0.0
    factor_name: str = ""
    rows: tuple[int, ...] = ()
    weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reduction: Literal["", "sum", "mean"] = ""
    message: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the two are known to differ."""
        return self.kind not in ("equal", "blind")

    @property
    def shows(self) -> float:
        """The size from which on an error would have shown, as a part of the gradient; NaN if not measured."""
        return BARS * self.bar


Outcomes = Sequence[Outcome]


def bar_of(run: MeasuredGradient) -> float:
    r"""Return what rounding does to the gradient; 0 where nobody has measured it.

    .. math:: b = \max\bigl((1 + 4/n) \max_k \lVert g_k - g \rVert,\; u \lVert g \rVert\bigr)

    where the :math:`g_k` are of runs that differ by rounding, :math:`u` is what storing and adding up do at least, and
    :math:`n` the number of elements: a single one may change little in all of a few runs, by luck.
    """
    if not run.repeated:
        return 0.0
    return max([run.floor, *(run.few * distance(other, run.gradient) for other in run.repeated)])


def judge(name: str, reference: MeasuredGradient | None, new: MeasuredGradient | None, facts: Facts) -> Outcome:
    """Compare one parameter's gradient in two runs; the first verdict that applies is the one.

    Args:
        name: The parameter.
        reference: Parameter in the first run; None if that has none of this name.
        new: Parameter in the second run.
        facts: Numbers that a factor may be, by name: the world size, the number of micro-batches ...

    Returns:
        The outcome.
    """
    if reference is None or not reference.has_gradient:
        if new is None or not new.has_gradient:
            return Outcome(name, "blind", bar=math.inf, message="no gradient in either run")
        return Outcome(name, "extra", message=_no_gradient(reference, "the reference"))
    if new is None or not new.has_gradient:
        return Outcome(name, "missing", message=_no_gradient(new, "the new run"))
    if reference.shape != new.shape:
        return Outcome(name, "shape", message=f"{list(reference.shape)} in the reference, {list(new.shape)} now")
    runs = {"the reference": reference, "the new run": new}
    if bad := [who for who, run in runs.items() if not all(map(math.isfinite, run.gradient))]:
        return Outcome(name, "nonfinite", message=f"NaN or infinity in {' and in '.join(bad)}")
    bars = [*map(bar_of, runs.values())]
    if not all(map(math.isfinite, bars)):
        return Outcome(name, "unknown", message="runs that differ by rounding alone are not finite")
    return _by_numbers(name, runs, max([*bars, reference.floor, new.floor]), facts)


def _no_gradient(run: MeasuredGradient | None, who: str) -> str:
    return f"{who} has none of this name" if run is None else f"no gradient (None) in {who}"


def _by_numbers(name: str, runs: Runs, bar: float, facts: Facts) -> Outcome:
    reference, new = runs.values()
    size, difference = max(reference.size, new.size), distance(new.gradient, reference.gradient)
    bars = difference / bar if bar else (math.inf if difference else 0.0)
    is_measured = bool(reference.repeated or new.repeated)
    why = "" if bars <= BARS and is_measured else _not_measured(runs)
    shown = Outcome(name, "equal", bars, math.inf if not size else math.nan if why else bar / size)
    pair = _Pair(reference, new, bar, facts, shown)
    apart = [who for who, run in runs.items() if any(not norm(one) <= BARS * bar for one in run.contrasts)]
    dead = [who for who, run in runs.items() if not any(run.gradient)]
    if dead and not apart and not why and bars > BARS:
        return pair.is_("dead", f"all zeros in {dead[0]}")
    if apart:
        said = f"ranks hold different copies in {' and in '.join(apart)}"
        if why:
            return pair.is_("unknown", f"{said}; {why}")
        return (pair.missing_reduction(*apart) if len(apart) == 1 else None) or pair.is_("ranks", said)
    if bars <= BARS:
        return _noisy(pair, runs, difference) or pair.blind() or shown
    if difference <= BARS * bar + reference.one_sided * reference.size + new.one_sided * new.size:
        return pair.is_("unknown", _ONE_SIDED)
    if why:
        return pair.plain_factor() or pair.is_("unknown", why)
    multiple = pair.factor()
    if multiple and multiple.kind == "factor":
        return multiple
    return pair.wrong_rows() or pair.mixture() or multiple or pair.is_("different")


def _not_measured(runs: Runs) -> str:
    """Why no bar is that of both runs, in words; empty if one is: it is of a finer dtype, or there is none."""
    measured = [run.epsilon for run in runs.values() if run.repeated]
    for who, run in runs.items():
        if not run.repeated and any(epsilon < run.epsilon for epsilon in measured):
            return f"{who} computes in a coarser dtype than the bars are of: save {who} with --perturbed 4"
    return "" if measured else _NOT_MEASURED


def _noisy(pair: "_Pair", runs: Runs, difference: float) -> Outcome | None:
    """Gradients that are equal only because one run is not even equal to itself, and the other is."""
    moves = {who: run.amplified for who, run in runs.items()}
    quiet, loud = sorted(moves, key=lambda who: moves[who])
    if math.isnan(pair.shown.bar) or not 0 < UNEVEN * moves[quiet] < moves[loud]:
        return None
    epsilon = max(run.epsilon for run in runs.values())
    if difference <= BARS * UNEVEN * moves[quiet] * epsilon * runs[quiet].size:
        return None
    said = f"rounding or chance moves it {moves[loud] / moves[quiet]:.0g} times as far in {loud} as in {quiet}"
    return pair.is_("noisy", f"{said}, and the two differ: is {loud} the same twice?")


@dataclass(frozen=True, slots=True)
class _Pair:
    """One parameter's finite gradients in two runs; each method returns None where its verdict does not apply.

    Attributes:
        reference: The first run.
        new: The second.
        bar: Error of the gradients by rounding.
        facts: Numbers that a factor may be, by name.
        shown: The outcome if the gradients are equal.
    """

    reference: MeasuredGradient
    new: MeasuredGradient
    bar: float
    facts: Facts
    shown: Outcome

    def is_(self, kind: Kind, message: str = "", **found: Any) -> Outcome:
        return replace(self.shown, kind=kind, message=message, **found)

    def blind(self) -> Outcome | None:
        if not self.shown.shows >= BLIND:
            return None
        said = "zero in both runs" if math.isinf(self.shown.bar) else f"rounding makes {self.shown.bar:.1%} of it"
        return self.is_("blind", said)

    def missing_reduction(self, who: str) -> Outcome | None:
        """Find that the other run's gradient is the sum or the mean of the copies of ``who``."""
        of_ranks, one = (self.new, self.reference) if who == "the new run" else (self.reference, self.new)
        for reduction, times in (("sum", of_ranks.copies), ("mean", 1)):
            reduced = [times * x for x in of_ranks.gradient]
            if distance(reduced, one.gradient) <= BARS * self.bar * times:
                said = f"a {reduction} over {of_ranks.copies} ranks is missing in {who}: that of its copies is right"
                return self.is_("ranks", said, reduction=reduction)
        return None

    def factor(self) -> Outcome | None:
        """Find a factor, with its bar; ``"different"`` where so few numbers may have one by chance."""
        reference, new = self.reference, self.new
        own, others = bar_of(reference), bar_of(new)
        if not any(reference.gradient) or own >= _NOISE * reference.size or others >= _NOISE * new.size:
            return None
        factor, left = self._multiple()
        own = max(abs(factor) * own, others, abs(factor) * reference.floor)
        if not left <= BARS * own or not abs(factor - 1) * reference.size > BARS * self.bar:
            return None
        spread = max(_spread_along(reference), _spread_along(new), reference.rounding, new.rounding)
        width = BARS * abs(factor) * spread
        if abs(factor - 1) <= width:
            return None
        directions = min(math.prod(reference.shape), len(reference.gradient)) - 1
        if (BARS * own / new.size) ** directions <= _BY_CHANCE:
            return self._named("factor", factor, width)
        named = self._named("different", factor, width)
        return named if width <= _WIDEST_ALONE * abs(factor) else replace(named, factor_name="")

    def plain_factor(self) -> Outcome | None:
        """Find a factor that is no rounding: off by half or more, of 16 numbers or more, a tenth left at most."""
        few = math.prod(self.reference.shape) < _MANY
        if few or not any(self.reference.gradient) or not any(self.new.gradient):
            return None
        factor, left = self._multiple()
        width = left / self.reference.size
        if not width <= _WIDEST_NAMED * abs(factor) or not abs(factor - 1) >= max(0.5, 5 * width):
            return None
        return self._named("factor", factor, width)

    def _multiple(self) -> tuple[float, float]:
        """Return the factor of the reference that is nearest to the new gradient, and the norm of the remainder."""
        factor = along(self.new.gradient, self.reference.gradient)
        return factor, distance(self.new.gradient, [factor * x for x in self.reference.gradient])

    def _named(self, kind: Kind, factor: float, width: float) -> Outcome:
        name = name_of_factor(factor, width, self.facts)
        return self.is_(kind, factor=factor, factor_bar=width, factor_name=name)

    def wrong_rows(self) -> Outcome | None:
        if not self.reference.rows or not self.new.rows or len(self.reference.rows[0]) < 2:
            return None
        (r, *of_reference), (c, *of_new) = self.reference.rows, self.new.rows
        share = self.bar / math.sqrt(len(r))  # a row of few elements may have been lucky in all runs
        wrong = []
        for i, (x, y) in enumerate(zip(r, c, strict=True)):
            apart = [distance(run[i], base) for runs, base in ((of_reference, x), (of_new, y)) for run in runs]
            if not distance(y, x) <= BARS * max([share, *apart]):
                wrong.append(i)
        if not 0 < len(wrong) < len(r):
            return None
        return self.is_("rows", f"rows {in_ranges(wrong)} of {len(r)}", rows=tuple(wrong))

    def mixture(self) -> Outcome | None:
        """Find a mixture of the parts, or else of these and the reference, as where a stale gradient was added."""
        parts = {**self.new.parts, **self.reference.parts}
        if not parts:
            return None
        return self._mixture_of(parts) or self._mixture_of({"the reference": self.reference.gradient, **parts})

    def _mixture_of(self, parts: Mapping[str, Vector]) -> Outcome | None:
        if len(parts) > min(MOST_PARTS, math.prod(self.reference.shape) - 1):
            return None
        solved = least_squares([*parts.values()], self.new.gradient)
        if solved is None:
            return None
        weights, spreads = solved
        mixed = [dot(weights, one) for one in zip(*parts.values(), strict=True)]
        left = distance(self.new.gradient, mixed)
        bar, largest = BARS * self.bar, max(map(abs, weights))
        widths = [bar * spread for spread in spreads]
        if not left <= bar * max(1.0, largest) or not max(widths) <= _WIDEST_NAMED * largest:
            return None
        known = dict(zip(parts, zip(weights, widths, strict=True), strict=True))
        there = [f"{weight:.4g} × {name}" for name, (weight, width) in known.items() if abs(weight) > width]
        words = " + ".join(there)
        said = f"only {words} is left" if len(there) == 1 < len(known) else f"it is {words}"
        return self.is_("mixture", said, weights=known)


def _spread_along(run: MeasuredGradient) -> float:
    """Return the largest relative change of the gradient along itself that rounding may cause."""
    g = run.gradient
    return run.few * max((abs(along(minus(other, g), g)) for other in run.repeated), default=0.0) if any(g) else 0.0


def name_of_factor(factor: float, width: float, facts: Facts) -> str:
    """Return what is as large as ``factor``: facts, their roots and inverses, and 2; empty unless one number fits.

    Args:
        factor: The number, known to ``width`` either way.
        width: How well it is known.
        facts: Numbers that it may be, by name.

    Example:
        >>> name_of_factor(4.0, 1e-6, {"world size": 4.0}), name_of_factor(4.0, 0.3, {"world size": 4.0, "tokens": 4.1})
        ('world size', '')
    """
    if width > _WIDEST_NAMED * abs(factor):
        return ""
    known: list[tuple[float, str]] = []
    for name, value in facts.items():
        if value > 0 and value != 1:
            known += [(value, name), (1 / value, f"1 / {name}")]
            known += [(math.sqrt(value), f"√ {name}"), (1 / math.sqrt(value), f"1 / √ {name}")]
    known += [(2.0, "counted twice"), (0.5, "half"), (-1.0, "the sign")]
    near = [(value, name) for value, name in known if abs(factor - value) <= width]
    if not near or any(abs(value / near[0][0] - 1) > _ONE_NUMBER for value, _ in near):
        return ""
    return " or ".join(dict.fromkeys(name for _, name in near))


def in_ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers in words, neighbours as a range.

    Example:
        >>> in_ranges([1, 2, 3, 7, 9, 10])
        '1–3, 7, 9–10'
    """
    known = {*numbers}
    first, last = ([i for i in numbers if i + step not in known] for step in (-1, 1))
    return listed([f"{a}–{b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True)], _MOST_RANGES)


def least_squares(parts: Sequence[Vector], of: Vector) -> tuple[list[float], list[float]] | None:
    """Return the weights with which ``parts`` add up to ``of`` most nearly, and what an error of 1 does to each.

    Returns:
        None where the parts are not independent.
    """
    own = [_left_over(part, [*parts[:i], *parts[i + 1 :]]) for i, part in enumerate(parts)]
    if any(not norm(left) > _DEPENDENT * norm(part) for left, part in zip(own, parts, strict=True)):
        return None
    return [along(of, left) for left in own], [1 / norm(left) for left in own]


def _left_over(vector: Vector, others: Sequence[Vector]) -> Vector:
    """Return the part of ``vector`` that no mixture of the others has (Gram and Schmidt)."""
    basis: list[Vector] = []
    for one in (*others, vector):
        for known in basis:
            if any(known):
                times = along(one, known)
                one = [x - times * y for x, y in zip(one, known, strict=True)]
        basis.append(one)
    return basis[-1]
