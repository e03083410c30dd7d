"""Sketches as plain numbers, so that two files are compared without torch."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def norm(sketch: Vector) -> float:
    """Return the norm of what ``sketch`` is of: exact for a single element, else to 13 % with 32 sums."""
    return math.hypot(*sketch) / math.sqrt(len(sketch)) if sketch else 0.0


def distance(a: Vector, b: Vector) -> float:
    """Return the norm of the difference of what two sketches are of."""
    return norm(minus(a, b))


def minus(a: Vector, b: Vector) -> list[float]:
    """Return the difference of two sketches of one length."""
    return [x - y for x, y in zip(a, b, strict=True)]


def dot(a: Vector, b: Vector) -> float:
    """Return the sum of the products."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def along(sketch: Vector, other: Vector) -> float:
    """Return how often ``other`` is contained in ``sketch``; squares neither overflow nor vanish."""
    size = norm(other)
    unit = [x / size for x in other]
    return dot([x / size for x in sketch], unit) / dot(unit, unit)
