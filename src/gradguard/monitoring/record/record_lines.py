"""Store many lines of a record compactly: lines with the same keys share one table of keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import is_not, itemgetter
from typing import Any, TypeVar, overload

Numbers = Sequence[float | None]
"""Numbers such as a column; None for a number that was not measured, or was not finite."""

_T = TypeVar("_T")
_Row = tuple[Any, ...]
"""The index of each of the line's keys in this tuple, then the values."""


class Lines(Sequence[dict[str, Any]]):
    """Lines of a record, such as all its steps, as a sequence of dictionaries.

    Each line is stored as a tuple of its values, which takes less than half of a dictionary's memory
    (benchmarks/LOG.md).

    **Guarantees**: A line is returned as it was added, with the same keys in the same order and the same values. Each
    access returns a new dictionary: changing that dictionary does not change the stored line.

    Args:
        lines: The first lines.

    Example:
        >>> steps = Lines([{"t": "step", "i": 0, "norm": 1.5}, {"t": "step", "i": 1, "norm": None}, {"t": "step"}])
        >>> steps[1], steps.column("norm"), steps.has("norm")
        ({'t': 'step', 'i': 1, 'norm': None}, [1.5, None, None], [True, True, False])
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._places: dict[tuple[str, ...], dict[str, int]] = {}
        self._rows: list[_Row] = []
        self._columns: dict[str, list[Any]] = {}
        self.extend(lines)

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Lines":
        """Return ``lines`` as `Lines`; the same object if it already is one."""
        return lines if isinstance(lines, Lines) else cls(lines)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Args:
            line: A dictionary.
        """
        keys = tuple(line)
        places = self._places.get(keys)
        if places is None:
            places = self._places[keys] = {key: place for place, key in enumerate(keys, 1)}
        self._rows.append((places, *line.values()))
        self._columns.clear()

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines.

        Args:
            lines: Dictionaries.
        """
        for line in lines:
            self.append(line)

    def column(self, key: str) -> list[Any]:
        """Return ``line.get(key)`` of every line; the list is cached and must not be changed.

        Args:
            key: The name of a field.
        """
        if key not in self._columns:
            places = {of.get(key) for of in self._places.values()} or {None}
            if places == {None}:
                self._columns[key] = [None] * len(self)
            elif len(places) == 1:  # the usual case: one index in all lines
                self._columns[key] = list(map(itemgetter(*places), self._rows))
            else:
                self._columns[key] = [None if (place := row[0].get(key)) is None else row[place] for row in self._rows]
        return self._columns[key]

    def has(self, key: str) -> list[bool]:
        """Return for every line whether it has the key.

        Args:
            key: The name of a field.
        """
        there = {key in of for of in self._places.values()}
        return [*there] * len(self) if len(there) == 1 else [key in row[0] for row in self._rows]

    def has_any(self, key: str) -> bool:
        """Return whether any line has the key.

        Args:
            key: The name of a field.
        """
        return any(self.has(key))

    def where(self, chosen: Sequence[Any]) -> "Lines":
        """Return the chosen lines; the same object if all lines are chosen.

        Args:
            chosen: A truth value for each line.
        """
        return self if all(chosen) else self._with(list(compress(self._rows, chosen)))

    def _with(self, rows: list[_Row]) -> "Lines":
        lines = Lines()
        lines._places, lines._rows = dict(self._places), rows
        return lines

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> "Lines": ...
    def __getitem__(self, place: int | slice) -> "dict[str, Any] | Lines":
        if isinstance(place, slice):
            return self._with(self._rows[place])
        return _line(self._rows[place])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_line, self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lines | list):
            return NotImplemented
        return len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Lines({list(self)!r})"


def without_none(values: Iterable[_T | None]) -> list[_T]:
    """Return the values that are not None.

    Args:
        values: Values such as a column, where None stands for a number that was not measured or was not finite.
    """
    return list(filter(partial(is_not, None), values))  # type: ignore[arg-type]


def names_of(params: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of parameters, ``"?"`` for a parameter without a name.

    Args:
        params: The ``params`` of a record's first line.
    """
    return [str(parameter.get("name", "?")) for parameter in params]


def known_fields(line: Mapping[str, _T | None]) -> dict[str, _T]:
    """Return the fields that are not None.

    Args:
        line: The fields by name; None stands for a missing field.
    """
    return dict(compress(line.items(), map(is_not, line.values(), repeat(None))))  # type: ignore[arg-type]


def _line(row: _Row) -> dict[str, Any]:
    return dict(zip(row[0], row[1:], strict=True))
