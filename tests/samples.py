"""The rows of a long table that `make test` runs; `make exhaustive` runs all."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

ENOUGH = 12
"""Rows of a table of which no other number is asked for, if they hold each of its values."""

GOLDEN, SILVER = 0.6180339887498949, 0.4142135623730951
"""Multiples of them modulo 1 are spread evenly, however many one takes: no step in a table coincides with them."""


def sample(rows: Sequence[Mapping[str, Any]], count: int | None = None, shift: int = 0) -> list[int]:
    """Draw rows of a table by what they hold and where they stand, never by their names.

    The next row is the one with the most values that no drawn row has; then the one with the most pairs of values.
    So each value of each parameter is drawn before one is drawn twice for nothing, and pairs of values soon after.
    Among equal rows the order is spread evenly over the table.

    Args:
        rows: The parameters of each row by name.
        count: How many rows to draw at most; None for `ENOUGH`, and more as long as they hold values that no other has.
        shift: Another number draws other rows: tests that share a table cover more of it together.

    Returns:
        The drawn positions in the order of the table.
    """
    holders = defaultdict[Hashable, list[int]](list)
    """The rows that have a value, or a pair of values, which no drawn row has."""
    unseen = [[0, 0] for _ in rows]
    """How many values, and how many pairs, each row would add to those of the drawn rows."""
    for i, row in enumerate(rows):
        for kind, of_row in enumerate(_values_and_pairs(row)):
            unseen[i][kind] = len(of_row)
            for one in of_row:
                holders[one].append(i)
    left = sorted(range(len(rows)), key=lambda i: (i * GOLDEN + shift * SILVER) % 1)
    drawn: list[int] = []
    while left:
        best = max(left, key=unseen.__getitem__)
        if len(drawn) >= (ENOUGH if count is None else count) and (count is not None or not unseen[best][0]):
            break
        left.remove(best)
        drawn.append(best)
        for kind, of_row in enumerate(_values_and_pairs(rows[best])):
            for one in of_row:
                for i in holders.pop(one, ()):
                    unseen[i][kind] -= 1
    return sorted(drawn)


def _values_and_pairs(row: Mapping[str, Any]) -> tuple[list[Hashable], list[Hashable]]:
    values = [(name, _comparable(value)) for name, value in sorted(row.items())]
    return [*values], [*combinations(values, 2)]


def _comparable(value: Any) -> Hashable:
    """Tell equal values of one type from others; what cannot be hashed is itself alone."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
