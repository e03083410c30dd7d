"""Names of the clipping rules on the command line, shared by all commands: ``norm=1.0``, ``median``, ``zclip=inf``.

Each name stands for a clipper of gradients. If the rule needs only the norms of a record, the name also stands for the
same rule on plain numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradguard.errors import InvalidValueError
from gradguard.threshold_rules import (
    FixedNorm,
    Fraction,
    Median,
    NormRule,
    Percentile,
    PerTensor,
    ZScore,
)

_LEAST = 1e-300  # thresholds are above 0


@dataclass(frozen=True, slots=True)
class _Name:
    """One rule's name and its two implementations.

    Attributes:
        example: How to type the rule.
        low: The smallest number that the rule accepts.
        high: The largest number.
        clipper: The class name of the clipper in `gradguard`.
        argument: The clipper's argument that the number sets.
        on_numbers: The rule on plain numbers; None if a record does not hold what the rule needs.
        needs_number: Whether the number has no default.
        excludes: Whether the clipper can exclude parameters.
    """

    example: str
    low: float
    high: float
    clipper: str
    argument: str
    on_numbers: Callable[..., FixedNorm | NormRule | PerTensor] | None = None
    needs_number: bool = False
    excludes: bool = False


_NAMES = {
    "norm": _Name("norm=1.0", _LEAST, math.inf, "ClipByGlobalNorm", "max_norm", FixedNorm, needs_number=True),
    "value": _Name("value=0.5", _LEAST, math.inf, "ClipByValue", "max", needs_number=True),
    "adaptive": _Name("adaptive=0.01", _LEAST, math.inf, "ClipAdaptive", "threshold", needs_number=True, excludes=True),
    "median": _Name("median", 0.0, 1e6, "ClipByMedian", "k", Median),
    "autoclip": _Name("autoclip", 0.0, 100.0, "AutoClip", "percentile", Percentile),
    "zclip": _Name("zclip", _LEAST, math.inf, "ZClip", "ceiling", ZScore),
    "clip_fraction": _Name("clip_fraction=0.05", 1e-6, 1 - 1e-6, "ClipFraction", "target", Fraction, needs_number=True),
    "adagc": _Name("adagc", _LEAST, math.inf, "AdaGC", "absolute", PerTensor),
}

REPLAYABLE = tuple(kind.example for kind in _NAMES.values() if kind.on_numbers is not None)
"""An example of each rule that can be replayed on a record."""

CLIPPERS = tuple(kind.example for kind in _NAMES.values())
"""An example of each rule."""


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule as it was typed.

    Attributes:
        text: The whole text, such as ``"median=6"``.
        name: The rule, ``"median"``.
        number: The number; None for the default.
        exclude: Excluded parameters: names, modules or patterns.
    """

    text: str
    name: str
    number: float | None
    exclude: tuple[str, ...] = ()

    @property
    def clipper(self) -> tuple[str, dict[str, float]]:
        """The clipper: its class name in `gradguard`, and its arguments."""
        kind = _NAMES[self.name]
        return kind.clipper, {} if self.number is None else {kind.argument: self.number}

    @property
    def call(self) -> str:
        """How to type the clipper in Python.

        Example:
            >>> clipping_rule("median").call, clipping_rule("zclip=inf").call
            ('gg.ClipByMedian()', "gg.ZClip(ceiling=float('inf'))")
        """
        name, arguments = self.clipper
        shown = [f"{key}={f'{x:g}' if math.isfinite(x) else f'float({str(x)!r})'}" for key, x in arguments.items()]
        if self.exclude:
            exclude = self.exclude[0] if len(self.exclude) == 1 else self.exclude
            shown.append(f"exclude={exclude!r}")
        return f"gg.{name}({', '.join(shown)})"


def clipping_rule(text: str) -> NamedRule:
    """Return the clipping rule that ``text`` names.

    Args:
        text: As for `replayed_rule`, or ``value=0.5`` (`ClipByValue`) or ``adaptive=0.01`` (`ClipAdaptive`). The latter
            may exclude parameters, as in ``adaptive=0.01,exclude=fc,exclude=embed*``.

    Raises:
        InvalidValueError: If the rule is unknown, or its number is out of range.

    Returns:
        The rule.

    Example:
        >>> clipping_rule("norm=1.0").clipper
        ('ClipByGlobalNorm', {'max_norm': 1.0})
        >>> clipping_rule("adaptive=0.01,exclude=fc").call
        "gg.ClipAdaptive(threshold=0.01, exclude='fc')"
    """
    rule = _parse(text, CLIPPERS)
    kind = _NAMES[rule.name]
    if kind.needs_number and rule.number == math.inf:
        raise InvalidValueError(f"rule {text} would clip nothing: expected a number, as in {kind.example}.")
    return rule


def replayed_rule(text: str) -> Callable[[], FixedNorm | NormRule | PerTensor]:
    """Return a constructor of the rule on plain numbers that ``text`` names.

    =============================  =====================================================================================
    text                           rule
    =============================  =====================================================================================
    ``norm=1.0``                   one threshold for the global norm (`ClipByGlobalNorm`)
    ``median``, ``median=6``       robust deviations above the running median (`ClipByMedian`)
    ``autoclip``, ``autoclip=10``  percentile of all norms so far (`AutoClip`)
    ``zclip``, ``zclip=inf``       z-score with the published ceiling of 1.0, or another, or none (`ZClip`)
    ``clip_fraction=0.05``         the threshold that clips this share of the steps (`ClipFraction`)
    ``adagc``, ``adagc=inf``       moving averages of each tensor; λ_abs of 1.0, or another, or none (`AdaGC`)
    =============================  =====================================================================================

    Args:
        text: A name, with a number after ``=`` where the rule takes one.

    Returns:
        A function without arguments that makes the rule, with an empty state.

    Raises:
        InvalidValueError: If the rule is unknown or cannot be replayed, or its number is out of range.

    Example:
        >>> replayed_rule("value=0.5")
        Traceback (most recent call last):
        gradguard.errors.InvalidValueError: rule value=0.5: the rule needs single elements, ...
    """
    rule = _parse(text, REPLAYABLE)
    make: Any = _NAMES[rule.name].on_numbers
    if make is None:
        raise InvalidValueError(
            f"rule {text}: the rule needs single elements, but a record holds only norms, so it cannot be replayed. "
            "Replay norm=, median or zclip instead."
        )
    return make if rule.number is None else lambda: make(rule.number)


def _parse(text: str, examples: tuple[str, ...]) -> NamedRule:
    first, *others = text.strip().split(",")
    name, equals, given = first.partition("=")
    kind = _NAMES.get(name)
    if kind is None:
        raise InvalidValueError(f"rule {text}: unknown rule {name!r}; expected one of {', '.join(examples)}.")
    exclude = tuple(other.strip().removeprefix("exclude=") for other in others)
    if others and not (kind.excludes and all(exclude) and all(o.strip().startswith("exclude=") for o in others)):
        raise InvalidValueError(
            f"rule {text}: only adaptive takes more than a number, as in adaptive=0.01,exclude=fc or, for two, "
            "adaptive=0.01,exclude=fc,exclude=embed*."
        )
    if not equals and not kind.needs_number:
        return NamedRule(text.strip(), name, None)
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not kind.low <= number <= kind.high:
        bounds = "above 0" if kind.low == _LEAST else f"from {kind.low:g} to {kind.high:g}"
        example = kind.example if "=" in kind.example else f"{name}=1.0"
        raise InvalidValueError(f"rule {text}: expected a number {bounds} after {name}=, as in {example}.")
    return NamedRule(text.strip(), name, number, exclude)
