"""Judge a parameter's gradients in two runs: equal, off by a factor, or wrong in another way.

The module works on plain numbers. Each gradient is a sketch: a few signed sums whose root mean square estimates the
gradient's norm. Sketches are linear in the gradient, so factors, differences and mixtures can be computed from them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gradguard.parity.vectors import Vector, along, distance, dot, minus, norm
from gradguard.words import listed

Facts = Mapping[str, float]
"""Numbers that may explain a factor, by name."""

BARS = 3.0
"""Two gradients are equal up to this many bars apart; the gradients of healthy runs are up to 0.8 bars apart."""

BLIND = 0.5
"""A comparison is inconclusive if an error of this share of the gradient, such as a halved gradient, would not show."""

UNEVEN = 100.0
"""If one run amplifies rounding this many times more than the other, its own bar does not count: the gradients must
agree within this multiple of the other run's bars."""

SKETCH_ROUNDING = 1e-12
"""The relative error of a sketch by the order of additions, a lower limit for float64 gradients."""

MOST_PARTS = 16
"""The largest number of weights of a mixture: 32 sums then leave 16 to test that the mixture explains the gradient."""

_NOISE = 0.3  # with a bar of this share of the norm, no factor is reported
_WIDEST_NAMED = 0.1  # a factor with a wider relative bar gets no name
_MANY = 16  # this many numbers are not a multiple of others by chance
_BY_CHANCE = 1e-3  # a factor that is more probable by chance needs other parameters with the same factor
_WIDEST_ALONE = 1e-3  # one number is a multiple of any other: its factor gets a name only within this relative bar
_NOT_MEASURED = "not equal, and no run has measured the effect of rounding"
_ONE_SIDED = (
    "not equal, but so many micro-batches may all round to one side, as repetitions of one micro-batch do: compare "
    "with fewer"
)
_DEPENDENT = 1e-4  # a part is a mixture of the others if a smaller share of it is independent
_ONE_NUMBER = 1e-9  # candidates closer than this are one number with two names
_MOST_RANGES = 8  # the number of row ranges in a message

Kind = Literal[
    "missing", "extra", "shape", "ranks", "rows", "mixture", "factor", "dead", "nonfinite", "different", "noisy",
    "unknown", "blind", "equal",
]  # fmt: skip
"""The verdicts on a parameter; a verdict that may explain others comes before them."""


@dataclass(frozen=True, slots=True)
class MeasuredGradient:
    """One parameter's gradient in one run.

    Attributes:
        shape: The shape of the whole parameter.
        rounding: The relative error of storing and accumulating the gradient.
        gradient: The sketch of the gradient.
        repeated: The sketches of the gradient in runs that differ by rounding; empty without such runs.
        has_gradient: Whether any rank has a gradient.
        contrasts: Weighted sums over the copies of different ranks, with weights that add up to 0.
        copies: The number of ranks that hold the same shard.
        parts: The sketches of other gradients of which this one may be a mixture, by name.
        rows: The sketches of each row, first of ``gradient``, then of ``repeated``; empty without ``rows=``.
        epsilon: The machine epsilon of the coarsest dtype of the computation, the relative change of the weights for
            ``repeated``; 0 if unknown.
        one_sided: The largest relative error of accumulating the gradient, if each addition rounds to the same side.
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
        """The least error of storing and accumulating the gradient."""
        return max(self.rounding, SKETCH_ROUNDING) * self.size

    @property
    def few(self) -> float:
        """The factor from the largest change in a few runs to the largest possible: one number may change little."""
        return 1 + 4 / max(1, math.prod(self.shape))

    @property
    def amplified(self) -> float:
        """The relative change of the gradient divided by the relative change of the weights; 0 if unknown."""
        bar = bar_of(self)
        return bar / self.size / self.epsilon if bar and self.size and self.epsilon else 0.0


Runs = Mapping[str, MeasuredGradient]
"""The two runs, by their descriptions "the reference" and "the new run"."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the comparison of one parameter's gradients.

    Attributes:
        name: The parameter.
        kind: The verdict; ``"blind"`` if the gradients agree within rounding and a wrong gradient would agree too.
        distance: The distance of the two gradients in bars; None without a comparison of numbers.
        bar: The error by rounding, relative to the gradient's norm; infinite if the gradient is zero in both runs, NaN
            if it was not measured.
        factor: The factor on the reference's gradient; NaN for none. A ``"different"`` gradient may have a factor
            too, by chance, if it has few elements.
        factor_bar: The error bar of the factor.
        factor_name: The name of a number of that size, such as ``"world size"``.
        rows: The wrong rows.
        weights: The share of each part and its error bar.
        reduction: ``"sum"`` or ``"mean"`` if this reduction of the ranks' copies would be right and is missing.
        message: A description of further details.
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
        """Whether the outcome is a finding: neither equal nor blind."""
        return self.kind not in ("equal", "blind")

    @property
    def shows(self) -> float:
        """The smallest error that would have shown, relative to the gradient; NaN if not measured."""
        return BARS * self.bar


Outcomes = Sequence[Outcome]


def bar_of(run: MeasuredGradient) -> float:
    r"""Return the error of the gradient by rounding; 0 if it was not measured.

    .. math:: b = \max\bigl((1 + 4/n) \max_k \lVert g_k - g \rVert,\; u \lVert g \rVert\bigr)

    The :math:`g_k` are the gradients of runs that differ by rounding, :math:`u` is the least error of storing and
    accumulating, and :math:`n` is the number of elements. A single element may by luck change little in a few runs.
    """
    if not run.repeated:
        return 0.0
    return max([run.floor, *(run.few * distance(other, run.gradient) for other in run.repeated)])


def judge(name: str, reference: MeasuredGradient | None, new: MeasuredGradient | None, facts: Facts) -> Outcome:
    """Compare one parameter's gradient in two runs, and return the first verdict that applies.

    Args:
        name: The parameter.
        reference: The parameter in the first run; None if the run has no parameter of this name.
        new: The parameter in the second run; None likewise.
        facts: Numbers that may explain a factor, by name: the world size, the number of micro-batches ...

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
        shapes = f"{list(reference.shape)} in the reference, {list(new.shape)} in the new run"
        return Outcome(name, "shape", message=shapes)
    runs = {"the reference": reference, "the new run": new}
    if bad := [who for who, run in runs.items() if not all(map(math.isfinite, run.gradient))]:
        return Outcome(name, "nonfinite", message=f"NaN or infinity in {' and in '.join(bad)}")
    bars = [*map(bar_of, runs.values())]
    if not all(map(math.isfinite, bars)):
        return Outcome(name, "unknown", message="the gradient is not finite in runs that differ by rounding alone")
    return _by_numbers(name, runs, max([*bars, reference.floor, new.floor]), facts)


def _no_gradient(run: MeasuredGradient | None, who: str) -> str:
    return f"{who} has no tensor of this name" if run is None else f"no gradient (None) in {who}"


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
        words = f"ranks hold different copies in {' and in '.join(apart)}"
        if why:
            return pair.is_("unknown", f"{words}; {why}")
        return (pair.missing_reduction(*apart) if len(apart) == 1 else None) or pair.is_("ranks", words)
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
    """Return why no bar applies to both runs: none was measured, or only one in a finer dtype. Empty if one applies."""
    measured = [run.epsilon for run in runs.values() if run.repeated]
    for who, run in runs.items():
        if not run.repeated and any(epsilon < run.epsilon for epsilon in measured):
            return (
                f"{who} computes in a coarser dtype than the one in which the bars were measured: save {who} with "
                f"--perturbed 4"
            )
    return "" if measured else _NOT_MEASURED


def _noisy(pair: "_Pair", runs: Runs, difference: float) -> Outcome | None:
    """Find gradients that are equal only within the bar of one run, which is far noisier than the other run."""
    moves = {who: run.amplified for who, run in runs.items()}
    quiet, loud = sorted(moves, key=lambda who: moves[who])
    if math.isnan(pair.shown.bar) or not 0 < UNEVEN * moves[quiet] < moves[loud]:
        return None
    epsilon = max(run.epsilon for run in runs.values())
    if difference <= BARS * UNEVEN * moves[quiet] * epsilon * runs[quiet].size:
        return None
    words = f"rounding or chance moves it {moves[loud] / moves[quiet]:.0g} times as far in {loud} as in {quiet}"
    return pair.is_("noisy", f"{words}, and the two differ: is {loud} deterministic?")


@dataclass(frozen=True, slots=True)
class _Pair:
    """One parameter's finite gradients in two runs; each method returns None if its verdict does not apply.

    Attributes:
        reference: The first run.
        new: The second run.
        bar: The error of the gradients by rounding.
        facts: Numbers that may explain a factor, by name.
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
        words = "zero in both runs" if math.isinf(self.shown.bar) else f"rounding makes {self.shown.bar:.1%} of it"
        return self.is_("blind", words)

    def missing_reduction(self, who: str) -> Outcome | None:
        """Test whether the other run's gradient is the sum or the mean of the ranks' copies in ``who``."""
        of_ranks, one = (self.new, self.reference) if who == "the new run" else (self.reference, self.new)
        for reduction, times in (("sum", of_ranks.copies), ("mean", 1)):
            reduced = [times * x for x in of_ranks.gradient]
            if distance(reduced, one.gradient) <= BARS * self.bar * times:
                missing = f"a {reduction} over {of_ranks.copies} ranks is missing in {who}"
                words = f"{missing}: the {reduction} of its copies is right"
                return self.is_("ranks", words, reduction=reduction)
        return None

    def factor(self) -> Outcome | None:
        """Find a factor and its bar; the verdict is ``"different"`` if so few numbers may have a factor by chance."""
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
        """Find a factor too large for rounding: off by half or more, in 16 or more numbers, a tenth left at most."""
        few = math.prod(self.reference.shape) < _MANY
        if few or not any(self.reference.gradient) or not any(self.new.gradient):
            return None
        factor, left = self._multiple()
        width = left / self.reference.size
        if not width <= _WIDEST_NAMED * abs(factor) or not abs(factor - 1) >= max(0.5, 5 * width):
            return None
        return self._named("factor", factor, width)

    def _multiple(self) -> tuple[float, float]:
        """Return the factor on the reference that fits the new gradient best, and the norm of the remainder."""
        factor = along(self.new.gradient, self.reference.gradient)
        return factor, distance(self.new.gradient, [factor * x for x in self.reference.gradient])

    def _named(self, kind: Kind, factor: float, width: float) -> Outcome:
        name = name_of_factor(factor, width, self.facts)
        return self.is_(kind, factor=factor, factor_bar=width, factor_name=name)

    def wrong_rows(self) -> Outcome | None:
        if not self.reference.rows or not self.new.rows or len(self.reference.rows[0]) < 2:
            return None
        (r, *of_reference), (c, *of_new) = self.reference.rows, self.new.rows
        share = self.bar / math.sqrt(len(r))  # a row of few elements may by luck change little in all runs
        wrong = []
        for i, (x, y) in enumerate(zip(r, c, strict=True)):
            apart = [distance(run[i], base) for runs, base in ((of_reference, x), (of_new, y)) for run in runs]
            if not distance(y, x) <= BARS * max([share, *apart]):
                wrong.append(i)
        if not 0 < len(wrong) < len(r):
            return None
        return self.is_("rows", f"rows {in_ranges(wrong)} of {len(r)}", rows=tuple(wrong))

    def mixture(self) -> Outcome | None:
        """Find a mixture of the parts, or else of the parts and the reference, such as an added stale gradient."""
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
        message = f"only {words} is left" if len(there) == 1 < len(known) else f"it is {words}"
        return self.is_("mixture", message, weights=known)


def _spread_along(run: MeasuredGradient) -> float:
    """Return the largest relative change of the gradient in its own direction by rounding."""
    g = run.gradient
    return run.few * max((abs(along(minus(other, g), g)) for other in run.repeated), default=0.0) if any(g) else 0.0


def name_of_factor(factor: float, width: float, facts: Facts) -> str:
    """Name a number as large as ``factor``: a fact, its root or inverse, 2, a half or -1.

    Args:
        factor: The factor.
        width: Its error bar, to either side.
        facts: Numbers that may explain the factor, by name.

    Returns:
        The name; empty if no number fits, or if several different numbers do.

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
    """Return rising numbers as text, with neighbours as a range.

    Example:
        >>> in_ranges([1, 2, 3, 7, 9, 10])
        '1–3, 7, 9–10'
    """
    known = {*numbers}
    first, last = ([i for i in numbers if i + step not in known] for step in (-1, 1))
    return listed([f"{a}–{b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True)], _MOST_RANGES)


def least_squares(parts: Sequence[Vector], of: Vector) -> tuple[list[float], list[float]] | None:
    """Fit ``of`` by a weighted sum of ``parts``.

    Returns:
        The weights, and the error of each weight per unit of error in ``of``; None if the parts are not independent.
    """
    own = [_left_over(part, [*parts[:i], *parts[i + 1 :]]) for i, part in enumerate(parts)]
    if any(not norm(left) > _DEPENDENT * norm(part) for left, part in zip(own, parts, strict=True)):
        return None
    return [along(of, left) for left in own], [1 / norm(left) for left in own]


def _left_over(vector: Vector, others: Sequence[Vector]) -> Vector:
    """Return the component of ``vector`` that is orthogonal to all the others (Gram and Schmidt)."""
    basis: list[Vector] = []
    for one in (*others, vector):
        for known in basis:
            if any(known):
                times = along(one, known)
                one = [x - times * y for x, y in zip(one, known, strict=True)]
        basis.append(one)
    return basis[-1]
