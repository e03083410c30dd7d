"""Choose the rows of a long table that `make test` runs; `make exhaustive` runs all."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

ENOUGH = 12
"""Default number of rows of a table, if they contain each of its values."""

GOLDEN, SILVER = 0.6180339887498949, 0.4142135623730951
"""Multiples of each, modulo 1, are spread evenly for any number of them: no step in a table coincides with them."""


def sample(rows: Sequence[Mapping[str, Any]], count: int | None = None, shift: int = 0) -> list[int]:
    """Draw rows of a table by their values and positions, never by their names.

    The next row is the one with the most values that no drawn row has; then the one with the most pairs of values.
    So each value of each parameter is drawn before one is drawn twice needlessly, and pairs of values soon after.
    Among equal rows the order is spread evenly over the table.

    Args:
        rows: The parameters of each row by name.
        count: Maximum number of rows; None for `ENOUGH`, and more while rows have values that no drawn row has.
        shift: Another number draws other rows: tests that share a table cover more of it together.

    Returns:
        The drawn positions in the order of the table.
    """
    holders = defaultdict[Hashable, list[int]](list)
    """Return the rows that have a value, or a pair of values, which no drawn row has."""
    unseen = [[0, 0] for _ in rows]
    """Return how many values, and how many pairs, each row would add to those of the drawn rows."""
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
    """Return a key that is equal for equal values of one type; a value that cannot be hashed equals only itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
