"""What a parameter's gradients in two runs are to each other: equal, off by a factor, or wrong in another way.

Plain numbers: each gradient is a sketch, a few signed sums whose root mean square is the gradient's norm. All that the
verdicts need is linear in the gradient, so it is the same of sketches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal

from gradguard.parity.vectors import Vector, along, minus, norm

BARS = 3.0
"""Two gradients are equal if they are no further apart than so many bars; those of healthy runs are up to 0.8."""

BLIND = 0.5
"""If not even an error of this part of a gradient would show, as where it is halved, nothing is known of it."""

UNEVEN = 100.0
"""A run whose rounding is amplified so many times more than the other's is not compared by its own bar."""

SKETCH_ROUNDING = 1e-12
"""What the order of additions does to a sketch, relative: what float64 gradients can be told to."""

MOST_PARTS = 16
"""So many weights can be told from 32 sums, with as many left to see that they explain all."""

_NOISE = 0.3  # of a gradient whose bar is this part of its norm no factor is told
_WIDEST_NAMED = 0.1  # a factor known less well than to a tenth has no name
_MANY = 16  # so many numbers are not a multiple of others by chance
_BY_CHANCE = 1e-3  # a factor that random numbers have more often than that needs others beside it
_WIDEST_ALONE = 1e-3  # a single number is a multiple of any other: it has a name only if it is known so well
_NOT_MEASURED = "not equal, and nobody has measured what rounding does"
_DTYPES = {2.0**-52: "float64", 2.0**-23: "float32", 2.0**-10: "float16 or TF32", 2.0**-7: "bfloat16"}
_ONE_SIDED = (
    "not equal, and so many micro-batches may all be rounded to one side, as the same one over and over is: compare "
    "with fewer"
)
_DEPENDENT = 1e-4  # a part of which no more is its own is a mixture of the others
_ONE_NUMBER = 1e-9  # candidates closer than this are one number with two names

Kind = Literal[
    "equal",
    "blind",
    "missing",
    "extra",
    "shape",
    "nonfinite",
    "dead",
    "unknown",
    "noisy",
    "ranks",
    "factor",
    "rows",
    "mixture",
    "different",
]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run knows of one parameter's gradient.

    Attributes:
        shape: The whole parameter's.
        rounding: What storing the gradient and adding it up do to it, relative.
        gradient: Its sketch.
        repeated: Sketches of the same gradient from runs that differ from it by rounding; empty where nobody tried.
        has_gradient: Whether any process has one.
        contrasts: Weighted sums over the copies of different ranks, with weights that add up to 0.
        copies: How many ranks hold the same part.
        parts: Sketches of other gradients of which this one may be a mixture, by name.
        rows: The same as ``gradient`` and ``repeated`` of each row, where a second pass has asked for it.
        epsilon: The spacing of the coarsest dtype that is computed in, relative, by which the weights were changed for
            ``repeated``; 0 where nobody knows.
        one_sided: What adding it up does to it at most, relative: where each addition rounds to the same side.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one parameter's gradient compares.

    Attributes:
        name: The parameter.
        kind: What it is; ``"blind"`` where the two are no further apart than rounding, and a wrong one would not be.
        distance: How far apart the two are, in bars; None where that is no number.
        bar: What rounding does to the gradient, as a part of its norm: infinite where it is zero in both runs. None
            where it was not measured.
        factor: What the reference's gradient is multiplied by; of a ``"different"`` one, if it is multiplied: few
            numbers may be a multiple of others by chance.
        factor_bar: How well that is known.
        factor_name: What is of that size, such as ``"world size"``.
        rows: The wrong rows.
        weights: The share of each part, with how well it is known.
        reduction: ``"sum"`` or ``"mean"`` of the copies of ranks, if that is right where they are not.
        message: The rest, in words.
    """

    name: str
    kind: Kind
    distance: float | None = None
    bar: float | None = None
    factor: float | None = None
    factor_bar: float | None = None
    factor_name: str = ""
    rows: tuple[int, ...] = ()
    weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reduction: Literal["", "sum", "mean"] = ""
    message: str = ""

    @property
    def shows(self) -> float | None:
        """The size from which on an error would have shown, as a part of the gradient; None if not measured."""
        return None if self.bar is None else BARS * self.bar


def bar_of(run: Measured) -> float | None:
    r"""Return what rounding does to the gradient; None where nobody has measured it.

    .. math:: b = \max\bigl((1 + 4/n) \max_k \lVert g_k - g \rVert,\; u \lVert g \rVert\bigr)

    where the :math:`g_k` are of runs that differ by rounding, :math:`u` is what storing and adding up do at least, and
    :math:`n` the number of elements: a single one may change little in all of a few runs, by luck.
    """
    if not run.repeated:
        return None
    few = 1 + 4 / max(1, math.prod(run.shape))
    return max([_rounding_of(run), *(few * norm(minus(other, run.gradient)) for other in run.repeated)])


def judge(name: str, reference: Measured | None, new: Measured | None, facts: Mapping[str, float]) -> Outcome:
    """Compare one parameter's gradient in two runs; the first verdict that applies is the one.

    Args:
        name: The parameter.
        reference: What the first run knows; None if it has no such parameter.
        new: What the second knows.
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
    if bad := [who for who, run in _both(reference, new) if not all(map(math.isfinite, run.gradient))]:
        return Outcome(name, "nonfinite", message=f"NaN or infinity in {' and in '.join(bad)}")
    return _by_numbers(name, reference, new, facts)


def _no_gradient(run: Measured | None, who: str) -> str:
    return f"{who} has no such parameter" if run is None else f"no gradient (None) in {who}"


def _both(reference: Measured, new: Measured) -> list[tuple[str, Measured]]:
    return [("the reference", reference), ("the new run", new)]


def _by_numbers(name: str, reference: Measured, new: Measured, facts: Mapping[str, float]) -> Outcome:
    r, c = reference.gradient, new.gradient
    bars = [bar for bar in (bar_of(reference), bar_of(new)) if bar is not None]
    if any(not math.isfinite(bar) for bar in bars):
        return Outcome(name, "unknown", message="runs that differ by rounding alone are not finite")
    bar = max([*bars, _rounding_of(reference), _rounding_of(new)])
    size, difference = max(norm(r), norm(c)), norm(minus(c, r))
    distance = difference / bar if bar else (math.inf if difference else 0.0)
    why = "" if distance <= BARS and bars else _not_measured(reference, new)
    shown = Outcome(name, "equal", distance, math.inf if not size else None if why else bar / size)
    apart = [who for who, run in _both(reference, new) if any(not norm(one) <= BARS * bar for one in run.contrasts)]
    dead = [who for who, sketch in (("the reference", r), ("the new run", c)) if not any(sketch)]
    if dead and not apart and not why and distance > BARS:
        return _with(shown, "dead", message=f"all zeros in {dead[0]}")
    if apart:
        said = f"ranks hold different gradients in {' and in '.join(apart)}"
        if why:
            return _with(shown, "unknown", message=f"{said}; {why}")
        return _missing_reduction(shown, reference, new, bar, apart) or _with(shown, "ranks", message=said)
    if distance <= BARS:
        return _noisy(shown, reference, new, difference) or _blind(shown) or shown
    if difference <= BARS * bar + reference.one_sided * norm(r) + new.one_sided * norm(c):
        return _with(shown, "unknown", message=_ONE_SIDED)
    if why:
        return _plain_factor(shown, reference.shape, r, c, facts) or _with(shown, "unknown", message=why)
    multiple = _factor(shown, reference, new, bar, facts)
    if multiple and multiple.kind == "factor":
        return multiple
    return (
        _rows(shown, reference, new, bar)
        or _mixture(shown, reference, new, bar)
        or multiple
        or _with(shown, "different")
    )


def _not_measured(reference: Measured, new: Measured) -> str:
    """Why no bar is that of both runs, in words; empty if one is: it is of a finer dtype, or there is none."""
    for (who, run), (other, measured) in permutations(_both(reference, new)):
        if measured.repeated and not run.repeated and run.epsilon > measured.epsilon:
            coarse, fine = (_DTYPES.get(e, f"a spacing of {e:.2g}") for e in (run.epsilon, measured.epsilon))
            return f"{who} computes in {coarse}, and the bars are of {other}'s {fine}: save {who} with --perturbed 4"
    return "" if reference.repeated or new.repeated else _NOT_MEASURED


def _blind(shown: Outcome) -> Outcome | None:
    if shown.shows is None or shown.shows < BLIND:
        return None
    said = "zero in both runs" if math.isinf(shown.shows) else f"rounding makes {shown.bar:.1%} of it"
    return _with(shown, "blind", message=said)


def _noisy(shown: Outcome, reference: Measured, new: Measured, difference: float) -> Outcome | None:
    """Gradients that are equal only because one run is not even equal to itself, and the other is."""
    moves = {who: _amplified(run) for who, run in _both(reference, new)}
    quiet, loud = sorted(moves, key=lambda who: moves[who])
    if shown.bar is None or not 0 < UNEVEN * moves[quiet] < moves[loud]:
        return None
    of = dict(_both(reference, new))
    expected = UNEVEN * moves[quiet] * max(reference.epsilon, new.epsilon) * norm(of[quiet].gradient)
    if difference <= BARS * expected:
        return None
    said = f"rounding or chance moves it {moves[loud] / moves[quiet]:.0g} times as far in {loud} as in {quiet}"
    return _with(shown, "noisy", message=f"{said}, and the two differ: is {loud} the same twice?")


def _amplified(run: Measured) -> float:
    """How much larger the relative change of the gradient is than that of the weights; 0 where nobody knows."""
    size, bar = norm(run.gradient), bar_of(run)
    return bar / size / run.epsilon if bar and size and run.epsilon else 0.0


def _with(outcome: Outcome, kind: Kind, **found: object) -> Outcome:
    return Outcome(outcome.name, kind, outcome.distance, outcome.bar, **found)  # type: ignore[arg-type]


# Ranks that hold different copies.


def _missing_reduction(
    shown: Outcome, reference: Measured, new: Measured, bar: float, apart: Sequence[str]
) -> Outcome | None:
    """The sum or the mean of the copies of one run's ranks, if that is the other's gradient."""
    if len(apart) > 1:
        return None
    of_ranks, one = (new, reference) if apart == ["the new run"] else (reference, new)
    total = [x * of_ranks.copies for x in of_ranks.gradient]
    for reduction, reduced, times in (("sum", total, of_ranks.copies), ("mean", of_ranks.gradient, 1)):
        if norm(minus(reduced, one.gradient)) <= BARS * bar * times:
            said = f"a {reduction} over {of_ranks.copies} ranks is missing in {apart[0]}: that of its copies is right"
            return _with(shown, "ranks", reduction=reduction, message=said)
    return None


# A factor.


def _factor(
    shown: Outcome, reference: Measured, new: Measured, bar: float, facts: Mapping[str, float]
) -> Outcome | None:
    """A factor with its bar; ``"different"`` where the numbers are so few that they may have it by chance."""
    r, c = reference.gradient, new.gradient
    if not any(r):
        return None
    factor = along(c, r)
    if any((bar_of(run) or 0.0) >= _NOISE * norm(run.gradient) for run in (reference, new)):
        return None
    own = max(abs(factor) * (bar_of(reference) or 0.0), bar_of(new) or 0.0, abs(factor) * _rounding_of(reference))
    wrong = norm([x - factor * y for x, y in zip(c, r, strict=True)])
    if not wrong <= BARS * own or not abs(factor - 1) * norm(r) > BARS * bar:
        return None
    spread = max(_spread_along(reference), _spread_along(new), reference.rounding, new.rounding)
    width = BARS * abs(factor) * spread
    if abs(factor - 1) <= width:
        return None
    directions = min(math.prod(reference.shape), len(r)) - 1
    if (BARS * own / norm(c)) ** directions > _BY_CHANCE:
        name = name_of_factor(factor, width, facts) if width <= _WIDEST_ALONE * abs(factor) else ""
        return _with(shown, "different", factor=factor, factor_bar=width, factor_name=name)
    return _with(shown, "factor", factor=factor, factor_bar=width, factor_name=name_of_factor(factor, width, facts))


def _plain_factor(
    shown: Outcome, shape: Sequence[int], r: Vector, c: Vector, facts: Mapping[str, float]
) -> Outcome | None:
    """A factor that no rounding makes: of 16 numbers or more, by half of itself or more, with a tenth left over."""
    if math.prod(shape) < _MANY or not any(r) or not any(c):
        return None
    factor = along(c, r)
    width = norm([x - factor * y for x, y in zip(c, r, strict=True)]) / norm(r)
    if not width <= _WIDEST_NAMED * abs(factor) or not abs(factor - 1) >= max(0.5, 5 * width):
        return None
    return _with(shown, "factor", factor=factor, factor_bar=width, factor_name=name_of_factor(factor, width, facts))


def _spread_along(run: Measured) -> float:
    """How much rounding multiplies the gradient by, at most: of few numbers more than a few runs show, by luck."""
    g = run.gradient
    few = 1 + 4 / max(1, math.prod(run.shape))
    return few * max((abs(along(minus(other, g), g)) for other in run.repeated), default=0.0) if any(g) else 0.0


def name_of_factor(factor: float, width: float, facts: Mapping[str, float]) -> str:
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
    near = [(value, name) for value, name in _candidates(facts) if abs(factor - value) <= width]
    if not near or any(abs(value / near[0][0] - 1) > _ONE_NUMBER for value, _ in near):
        return ""
    return " or ".join(dict.fromkeys(name for _, name in near))


def _candidates(facts: Mapping[str, float]) -> list[tuple[float, str]]:
    found = []
    for name, value in facts.items():
        if value > 0 and value != 1:
            found += [(value, name), (1 / value, f"1 / {name}")]
            found += [(math.sqrt(value), f"√ {name}"), (1 / math.sqrt(value), f"1 / √ {name}")]
    return [*found, (2.0, "counted twice"), (0.5, "half"), (-1.0, "the sign")]


# Rows.


def _rows(shown: Outcome, reference: Measured, new: Measured, bar: float) -> Outcome | None:
    if not reference.rows or not new.rows or len(reference.rows[0]) < 2:
        return None
    (r, *of_reference), (c, *of_new) = reference.rows, new.rows
    share = bar / math.sqrt(len(r))  # a row of few elements may have been lucky in all runs
    wrong = []
    for i, (x, y) in enumerate(zip(r, c, strict=True)):
        apart = [norm(minus(run[i], base)) for runs, base in ((of_reference, x), (of_new, y)) for run in runs]
        if not norm(minus(y, x)) <= BARS * max([share, *apart]):
            wrong.append(i)
    if not wrong or len(wrong) == len(r):
        return None
    return _with(shown, "rows", rows=tuple(wrong), message=f"rows {in_ranges(wrong)} of {len(r)}")


def in_ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Return rising numbers in words, neighbours as a range.

    Example:
        >>> in_ranges([1, 2, 3, 7, 9, 10])
        '1–3, 7, 9–10'
    """
    runs: list[list[int]] = []
    for i in numbers:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    words = [f"{a}–{b}" if a < b else str(a) for a, b in runs[:most]]
    return ", ".join(words) + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")


# Mixtures.


def _mixture(shown: Outcome, reference: Measured, new: Measured, bar: float) -> Outcome | None:
    """A mixture of the parts alone; or else with what is right, as where a gradient is added to that of before."""
    parts = {**new.parts, **reference.parts}
    with_right = {"the reference": reference.gradient, **parts}
    return (
        (_mixture_of(parts, shown, reference, new, bar) or _mixture_of(with_right, shown, reference, new, bar))
        if parts
        else None
    )


def _mixture_of(
    parts: Mapping[str, Vector], shown: Outcome, reference: Measured, new: Measured, bar: float
) -> Outcome | None:
    if not 1 <= len(parts) <= min(MOST_PARTS, math.prod(reference.shape) - 1):
        return None
    solved = least_squares(list(parts.values()), new.gradient)
    if solved is None:
        return None
    weights, spreads = solved
    mixed = [math.fsum(w * x for w, x in zip(weights, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    left = norm(minus(new.gradient, mixed))
    widths = [BARS * bar * spread for spread in spreads]
    largest = max(map(abs, weights))
    if not left <= BARS * bar * max(1.0, largest) or not max(widths) <= _WIDEST_NAMED * largest:
        return None
    known = dict(zip(parts, zip(weights, widths, strict=True), strict=True))
    return _with(shown, "mixture", weights=known, message=_about_mixture(known))


def _about_mixture(weights: Mapping[str, tuple[float, float]]) -> str:
    there = {name: weight for name, (weight, width) in weights.items() if abs(weight) > width}
    words = " + ".join(f"{weight:.4g} × {name}" for name, weight in there.items())
    return f"only {words} is left" if len(there) == 1 and len(weights) > 1 else f"it is {words}"


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
    """What ``vector`` has and no mixture of the others has: Gram and Schmidt."""
    basis: list[Vector] = []
    for one in (*others, vector):
        for known in basis:
            if any(known):
                times = along(one, known)
                one = [x - times * y for x, y in zip(one, known, strict=True)]
        basis.append(one)
    return basis[-1]


def _rounding_of(run: Measured) -> float:
    return max(run.rounding, SKETCH_ROUNDING) * norm(run.gradient)
