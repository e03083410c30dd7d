r"""By what the gradient at the loss is multiplied in the runs that show what rounding does.

A backward pass is linear in it, so that :math:`g(c) / c` is :math:`g(1)` but for rounding; and each addition of each
kernel rounds anew, for how a term lies between two neighbouring numbers depends on :math:`c`. Changed weights and
another order of the samples do not show this: a long running sum whose terms are alike rounds to the same side each
time, by :math:`10^{-5}` of itself after some 10,000 terms of float32.
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
        at: The optimizer step whose gradients are saved, from 1.
        steps: How many whole steps are saved from there on; 0 for gradients alone.
        change: Which change of the weights at the first forward pass; 0 for none.
        epsilon: By what part of themselves weights are changed.
        scale: Factor on the gradient at each loss from then on; it is taken off before an optimizer's step.
        sizes: By step, and by parameter, what is added to each element of a gradient or subtracted, by its place.
    """

    at: int = 1
    steps: int = 0
    change: int = 0
    epsilon: float = 0.0
    scale: float = 1.0
    sizes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last optimizer step that is looked at, from 1."""
        return self.at - 1 + max(self.steps, 1)

    @property
    def is_first_step_alone(self) -> bool:
        """Whether no optimizer has changed a weight by the time the run ends."""
        return self.last == 1 and not self.steps


DOUBLED = 2.0
"""A power of two changes no bit of a mantissa: where a step is linear, twice its gradient comes back exactly."""

_EXACT = 1e-12  # what the order of additions does to a sketch, relative
_BY_CHANCE = 20.0  # of a step that is not the same twice, a second difference is no so many times the first
_MOST_CHANCE, _FARTHEST = 1000, 0.1  # kernels that add in any order change a gradient or an update by some epsilon

_SAME_SETTING = 2.0**-23

_LOUD, _LOUDEST = 16.0, 1e-2
"""A turned gradient element is off by so many times what rounding does, but by no more of the gradient than that."""


def scale_of(run: int) -> float:
    """Return the scale of a run with changed weights: between 1 and 2, exact in every dtype of 8 bits and more.

    Example:
        >>> [scale_of(run) for run in range(1, 5)]
        [1.5859375, 1.1640625, 1.7421875, 1.3203125]
    """
    return 1 + (2 * (37 * run % 64) + 1) / 128


def is_linear(first: Sequence[Vector], doubled: Sequence[Vector], again: Sequence[Vector] | None = None) -> bool:
    """Tell whether twice the gradient at the loss makes twice the gradient of each parameter.

    Args:
        first: The sketch of each parameter's gradient.
        doubled: Half of what comes of twice the gradient at the loss.
        again: The sketches of one more run like the first, where ``doubled`` is not exactly that: a step that is not
            the same twice differs as far.

    Returns:
        Whether it does, in each of them.
    """
    alike = first if again is None else again
    return all(
        distance(two, one) <= _EXACT * norm(one) + _BY_CHANCE * distance(other, one)
        for one, two, other in zip(first, doubled, alike, strict=True)
    )


def same_twice(first: Sequence[Vector], again: Sequence[Vector], epsilon: float) -> bool:
    """Tell whether two runs that nothing tells apart agree: half of their tensors by some ``epsilon`` of themselves."""
    return apart(first, again) <= min(_MOST_CHANCE * epsilon, _FARTHEST)


def apart(first: Sequence[Vector], again: Sequence[Vector]) -> float:
    """Return by what part of themselves tensors differ: the median of those that are not zero."""
    shares = [distance(a, b) / norm(a) for a, b in zip(first, again, strict=True) if norm(a)]
    return statistics.median(shares) if shares else 0.0


def turned_sizes(parameters: Sequence[SavedParameter], runs: Sequence[Sequence[Vector]]) -> dict[str, float]:
    """Return by how much to move each element of each gradient, up or down, so that it differs by more than rounding.

    Args:
        parameters: Description of each.
        runs: The sketches of their gradients in runs that differ by rounding.

    Returns:
        The sizes, by name.
    """
    first, *others = runs
    sizes = {}
    for i, p in enumerate(parameters):
        noise = max(p.rounding * norm(first[i]), *(distance(run[i], first[i]) for run in others))
        size = min(_LOUD * noise, max(_LOUDEST * norm(first[i]), noise))
        sizes[p.name] = size / math.sqrt(max(1, math.prod(p.shape)))
    return sizes


def is_same_setting(a: float, b: float) -> bool:
    """Tell whether two numbers are one setting, which a tensor of float32 may hold."""
    return math.isclose(a, b, rel_tol=_SAME_SETTING)


def alike_settings(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the settings of the first run that all runs have: others are estimates that an optimizer makes.

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
