"""Name how often the squares of a class count, and find the counts that explain a norm that was only reported."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul

MOST_HYPOTHESES = 200_000
"""Maximum number of combinations of counts that are tried on a norm that was only reported."""

Candidates = Mapping[float, Sequence[str]]
"""Maps each count that a known mistake gives a class to its explanations."""


@dataclass(frozen=True)
class Setting:
    """The numbers of a run from which a wrong factor may be built.

    Attributes:
        world: Number of processes.
        accumulation: Number of micro-batches of a step.
        loss_scale: Factor that gradients still contain.
    """

    world: int = 1
    accumulation: int = 1
    loss_scale: float = 1.0


def candidates(setting: Setting, copies: int = 1, parts: int = 1, names: int = 1) -> Candidates:
    """Return the counts that known mistakes give a class, with their explanations, and the right count 1.

    Args:
        setting: The numbers of the run.
        copies: Number of processes that hold each part.
        parts: Number of parts.
        names: Number of names under which the tensor is tied.
    """
    w, g, s, both = setting.world, setting.accumulation, setting.loss_scale, names > 1 < copies
    known = [
        (0.0, "it is left out"),
        (names, f"once for each of its {names} names"),
        (names * copies, f"once for each of its {names * copies} copies under {names} names" if both else ""),
        (copies, f"once on each of the {copies} processes that hold it"),
        (1 / copies, f"divided by its {copies} copies though it is added up once"),
        (1 / parts, f"divided by its {parts} parts: the mean over ranks is taken instead of the sum"),
        (parts, f"multiplied by its {parts} parts"),
        (w, f"once for each of the {w} processes"),
        (1 / w, f"divided by the {w} processes"),
        (w * w, f"gradients multiplied by the {w} processes"),
        (1 / (w * w), f"gradients divided by the {w} processes once too often"),
        (g * g, f"gradients multiplied by the {g} micro-batches"),
        (1 / (g * g), f"gradients divided by the {g} micro-batches once too often"),
        (s * s, f"the loss scale of {s:g} is still in it"),
        (1 / (s * s), f"the loss scale of {s:g} is divided out twice"),
        (2, "twice"),
        (4, "gradients doubled"),
    ]
    found: dict[float, list[str]] = {1.0: []}
    for count, words in known:
        if count != 1 and words:
            found.setdefault(float(count), []).append(words)
    return found


def named(count: float, known: Candidates, tolerance: float) -> tuple[float, str]:
    """Return the known count close to ``count``, with its explanations; ``count`` and ``""`` if not exactly one is.

    Args:
        count: The measured count.
        known: Result of `candidates`.
        tolerance: The relative error of the measurement.
    """
    close = [k for k in known if abs(count - k) <= tolerance * max(k, min(1.0, min(filter(None, known))))]
    if len(close) != 1:
        return count, ""
    return close[0], " or ".join(dict.fromkeys(known[close[0]]))


def fit(
    squares: Sequence[float], reported: float, known: Sequence[Collection[float]], tolerance: float
) -> list[tuple[float, ...]]:
    r"""Return all combinations of candidate counts :math:`m` with :math:`R^2 = \sum_c m_c s_c`.

    More than one combination means that the norm does not distinguish them; none means that no known mistake fits.

    Args:
        squares: The true squared norm of each class.
        reported: The reported norm.
        known: The candidate counts of each class.
        tolerance: The relative error of a squared norm.
    """
    found, square = [], reported * reported
    for counts in product(*known):
        terms = [*map(mul, counts, squares)]
        if abs(math.fsum(terms) - square) <= tolerance * max([square, *terms]):
            found.append(counts)
    return found
