r"""The factors on the gradient at the loss in the runs that measure rounding.

A backward pass is linear in the factor :math:`c`, so :math:`g(c) / c` equals :math:`g(1)` up to rounding. Each addition
of each kernel rounds differently, because the distance of a term to its two neighbouring numbers depends on :math:`c`.
Changed weights and another order of the samples do not have this effect: a long running sum of similar terms rounds to
the same side each time, by :math:`10^{-5}` of itself after some 10,000 terms of float32.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradguard.parity.saved import SavedParameter
from gradguard.parity.vectors import Vector, distance, norm


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One of several runs of a script.

    Attributes:
        at: The optimizer step whose gradients are saved, counted from 1.
        steps: The number of whole steps saved from there on; 0 for gradients alone.
        change: The number of the change of the weights at the first forward pass; 0 for none.
        epsilon: The relative size of the change of the weights.
        scale: The factor on the gradient at each loss from the first forward pass on; undone before an optimizer step.
        sizes: The size added to or subtracted from each gradient element, by step and by parameter.
    """

    at: int = 1
    steps: int = 0
    change: int = 0
    epsilon: float = 0.0
    scale: float = 1.0
    sizes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last optimizer step that is saved, counted from 1."""
        return self.at - 1 + max(self.steps, 1)

    @property
    def is_first_step_alone(self) -> bool:
        """Whether the run ends before an optimizer has changed a weight."""
        return self.last == 1 and not self.steps


DOUBLED = 2.0
"""A power of two changes no bit of a mantissa: the gradient of a linear step is doubled exactly."""

_EXACT = 1e-12  # the relative error of a sketch by the order of additions
_BY_CHANCE = 20.0  # a step that is not deterministic may differ this many times as far in a second comparison
_MOST_CHANCE, _FARTHEST = 1000, 0.1  # non-deterministic kernels change a gradient or an update by some epsilons

_SAME_SETTING = 2.0**-23

_LOUD, _LOUDEST = 16.0, 1e-2
"""A shift of a gradient is 16 times its rounding, but not more than a hundredth of the gradient unless rounding is."""


def scale_of(run: int) -> float:
    """Return the factor of a run with changed weights: between 1 and 2, exact with 8 bits of mantissa or more.

    Example:
        >>> [scale_of(run) for run in range(1, 5)]
        [1.5859375, 1.1640625, 1.7421875, 1.3203125]
    """
    return 1 + (2 * (37 * run % 64) + 1) / 128


def is_linear(first: Sequence[Vector], doubled: Sequence[Vector], again: Sequence[Vector] | None = None) -> bool:
    """Return whether doubling the gradient at the loss doubles the gradient of each parameter.

    Args:
        first: The sketch of each parameter's gradient.
        doubled: Half of each sketch from a run with twice the gradient at the loss.
        again: The sketches of a repetition of the first run: a non-deterministic step may differ as far as these.

    Returns:
        Whether all parameters are linear.
    """
    alike = first if again is None else again
    return all(
        distance(two, one) <= _EXACT * norm(one) + _BY_CHANCE * distance(other, one)
        for one, two, other in zip(first, doubled, alike, strict=True)
    )


def same_twice(first: Sequence[Vector], again: Sequence[Vector], epsilon: float) -> bool:
    """Return whether two identical runs agree: the median relative difference is below 1000 ``epsilon`` and 0.1."""
    return apart(first, again) <= min(_MOST_CHANCE * epsilon, _FARTHEST)


def apart(first: Sequence[Vector], again: Sequence[Vector]) -> float:
    """Return the median relative difference of the tensors that are not zero."""
    shares = [distance(a, b) / norm(a) for a, b in zip(first, again, strict=True) if norm(a)]
    return statistics.median(shares) if shares else 0.0


def turned_sizes(parameters: Sequence[SavedParameter], runs: Sequence[Sequence[Vector]]) -> dict[str, float]:
    """Return the size by which to shift each gradient element up or down, larger than the effect of rounding.

    Args:
        parameters: The descriptions of the parameters.
        runs: The sketches of their gradients in runs that differ by rounding.

    Returns:
        The size for the elements of each parameter, by name.
    """
    first, *others = runs
    sizes = {}
    for i, p in enumerate(parameters):
        noise = max(p.rounding * norm(first[i]), *(distance(run[i], first[i]) for run in others))
        size = min(_LOUD * noise, max(_LOUDEST * norm(first[i]), noise))
        sizes[p.name] = size / math.sqrt(max(1, math.prod(p.shape)))
    return sizes


def is_same_setting(a: float, b: float) -> bool:
    """Return whether two numbers are equal within float32, in which a setting may be stored."""
    return math.isclose(a, b, rel_tol=_SAME_SETTING)


def alike_settings(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the settings that are equal in all runs; the others are estimates computed by an optimizer.

    Example:
        >>> alike_settings([{"weight": {"lr": 0.1, "d": 1.0}}, {"weight": {"lr": 0.1, "d": 1.001}}])
        {'weight': {'lr': 0.1}}
    """

    def is_alike(name: str, key: str, value: float) -> bool:
        return all(is_same_setting(value, run.get(name, {}).get(key, math.nan)) for run in runs)

    return {name: {k: x for k, x in of.items() if is_alike(name, k, x)} for name, of in runs[0].items()}


def mean_of(runs: Sequence[Sequence[Vector]]) -> list[list[float]]:
    """Return the mean of the sketches of several runs."""
    return [[sum(numbers) / len(runs) for numbers in zip(*of, strict=True)] for of in zip(*runs, strict=True)]
