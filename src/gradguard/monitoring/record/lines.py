"""Lines of one kind as columns: a million steps in a tenth of the memory that as many dictionaries take.

What looks at a whole run takes a column; whoever wants a line gets the dictionary that was written.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from math import nan
from typing import Any, overload

MOST_COLUMNS = 48
"""Further keys are kept with their line: a record whose lines share no keys would fill columns with nothing."""

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""What stands in a column where a line lacks the key; null there is None."""

Column = Any
"""An array as long as all values are floats, or all whole numbers; `Packed`; else a list."""

_REST = object()
_FLOATS, _WHOLE, _LISTS = {float}, {int}, {list}
_LEAST, _LARGEST = -(2**63), 2**63 - 1


class Lines(Sequence[dict[str, Any]]):
    """Lines of a record, such as all its steps: a sequence of dictionaries, kept as one column for each key.

    **Guarantees**: each line is read as it was added: the same keys in the same order, values of the same type. A
    dictionary is made anew for each look, so that changing it changes nothing here.

    Args:
        lines: The first lines.

    Example:
        >>> steps = Lines([{"t": "step", "i": 0, "norm": 1.5}, {"t": "step", "i": 1, "norm": None}, {"t": "step"}])
        >>> steps[1], list(steps.column("norm")), steps.has("norm")
        ({'t': 'step', 'i': 1, 'norm': None}, [1.5, None, None], [True, True, False])
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[Any, Column] = {}
        self._shapes: dict[tuple[str, ...], int] = {}  # the keys of a line, in their order
        self._keys: list[tuple[str, ...]] = []
        self._shape = array("L")  # of each line
        self._known: dict[str, Sequence[Any]] = {}
        self.extend(lines)

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Lines":
        """Return ``lines`` as columns; themselves, where they are."""
        return lines if isinstance(lines, Lines) else cls(lines)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Args:
            line: A dictionary.
        """
        self.extend([line])

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines.

        Args:
            lines: Dictionaries.
        """
        lines = lines if isinstance(lines, list) else list(lines)
        self.extend_columns(*as_columns(lines))

    def extend_columns(self, shapes: Sequence[tuple[str, ...]], columns: Mapping[str, Sequence[Any]]) -> None:
        """Add lines that are columns already.

        Args:
            shapes: The keys of each line, in their order.
            columns: For each key that one of them has, a value for each line; `ABSENT` where it has none.
        """
        if not shapes:
            return
        count, self._known = len(self._shape), {}
        alike = shapes.count(shapes[0]) == len(shapes)
        for shape in shapes[:1] if alike else dict.fromkeys(shapes):
            if shape not in self._shapes:
                self._shapes[shape] = len(self._keys)
                self._keys.append(shape)
        numbers = map(self._shapes.__getitem__, shapes)
        self._shape.extend(array("L", [next(numbers)]) * len(shapes) if alike else numbers)
        rest: list[Any] | None = None
        for key, values in columns.items():
            if key in self._columns or len(self._columns) < MOST_COLUMNS:
                self._add(key, values, count)
            else:
                rest = rest or [{} for _ in shapes]
                for kept, value in zip(rest, values, strict=True):
                    if value is not ABSENT:
                        kept[key] = value
        if rest is not None:
            self._add(_REST, rest, count)
        for key in self._columns.keys() - columns.keys() - ({_REST} if rest is not None else set()):
            self._add(key, [ABSENT] * len(shapes), count)

    def _add(self, key: Any, values: Sequence[Any], count: int) -> None:
        """Add values to a column; the first ``count`` lines lack the field, where it is new."""
        column = self._columns.get(key, [ABSENT] * count)
        if not len(column):
            column = _empty(values)
        elif type(column) is array and not _fits(column, values):
            column = list(column)
        column.extend(values)
        self._columns[key] = column

    def column(self, key: str) -> Sequence[Any]:
        """Return ``line.get(key)`` of every line: an array of numbers where all are, else a list.

        Args:
            key: The name of a field.
        """
        if key not in self._known:
            column = self._columns.get(key, [ABSENT] * len(self))
            gaps = type(column) is not array and not all(self.has(key))
            self._known[key] = [None if value is ABSENT else value for value in column] if gaps else column
        return self._known[key]

    def has(self, key: str) -> Sequence[bool]:
        """Return for every line whether it has the key.

        Args:
            key: The name of a field.
        """
        column = self._columns.get(key, [ABSENT] * len(self))
        if type(column) is list:
            return [value is not ABSENT for value in column]
        found = [True] * len(self)
        for place, value in () if type(column) is array else column.other.items():
            found[place] = value is not ABSENT
        return found

    def has_any(self, key: str) -> bool:
        """Return whether any line has the key.

        Args:
            key: The name of a field.
        """
        return any(self.has(key))

    def where(self, chosen: Sequence[Any]) -> "Lines":
        """Return the lines that are chosen; these, where all are.

        Args:
            chosen: A truth value for each line.
        """
        if all(chosen):
            return self
        return self._picked(lambda column: _where(column, chosen), compress(self._shape, chosen))

    def _picked(self, pick: Callable[[Column], Column], shape: Iterable[int]) -> "Lines":
        picked = Lines()
        picked._columns = {key: pick(column) for key, column in self._columns.items()}
        picked._shapes, picked._keys, picked._shape = dict(self._shapes), list(self._keys), array("L", shape)
        return picked

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> "Lines": ...
    def __getitem__(self, place: int | slice) -> "dict[str, Any] | Lines":
        if isinstance(place, slice):
            return self._picked(lambda column: column[place], self._shape[place])
        place = range(len(self))[place]
        columns = self._columns
        return {
            key: columns[key][place] if key in columns else columns[_REST][place][key]
            for key in self._keys[self._shape[place]]
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lines | list):
            return NotImplemented
        return len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Lines({list(self)!r})"


def as_columns(lines: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, ...]], dict[str, list[Any]]]:
    """Return the keys of each line, in their order, and a column for each key, with `ABSENT` where a line lacks it.

    Args:
        lines: Dictionaries.

    Example:
        >>> as_columns([{"i": 0}, {"i": 1, "norm": 2.0}])
        ([('i',), ('i', 'norm')], {'i': [0, 1], 'norm': [absent, 2.0]})
    """
    shapes = list(map(tuple, lines))
    if shapes and shapes.count(shapes[0]) == len(shapes):
        return shapes, {key: [line[key] for line in lines] for key in shapes[0]}
    keys = dict.fromkeys(chain.from_iterable(dict.fromkeys(shapes)))
    return shapes, {key: [line.get(key, ABSENT) for line in lines] for key in keys}


def _empty(values: Sequence[Any]) -> Column:
    """What keeps these values, and more like them, in the least memory."""
    if isinstance(values, array | Packed):
        return values[:0]
    types = set(map(type, values))
    if types == _FLOATS:
        return array("d")
    if types == _WHOLE and _LEAST <= min(values) <= max(values) <= _LARGEST:
        return array("q")
    if types == _LISTS:
        for packed in (Tops(), Vectors(len(values[0]))):
            if packed.fits(values):
                return packed
    return []


def _fits(column: array, values: Sequence[Any]) -> bool:
    if isinstance(values, array):
        return values.typecode == column.typecode
    types = set(map(type, values))
    if column.typecode == "d":
        return types == _FLOATS
    return types == _WHOLE and _LEAST <= min(values) <= max(values) <= _LARGEST


def _where(column: Column, chosen: Sequence[Any]) -> Column:
    if type(column) is array:
        return array(column.typecode, compress(column, chosen))
    return (
        list(compress(column, chosen)) if type(column) is list else column[list(compress(range(len(column)), chosen))]
    )


class Packed(Sequence[Any], ABC):
    """Lists of one form, without a list for each; what has another form is kept beside them.

    Attributes:
        other: What has another form, by its place.
    """

    def __init__(self) -> None:
        self.other: dict[int, Any] = {}

    @abstractmethod
    def fits(self, values: Sequence[Any]) -> bool:
        """Return whether all values have the form."""

    @abstractmethod
    def _pack(self, values: Sequence[Any]) -> None:
        """Add values that have the form."""

    @abstractmethod
    def _join(self, packed: Any) -> bool:
        """Add what is packed already; return whether it has the form."""

    @abstractmethod
    def _unpack(self, place: int) -> list[Any]:
        """Return the list at a place."""

    @abstractmethod
    def _chosen(self, places: Sequence[int]) -> "Packed":
        """Return what is packed at these places."""

    @property
    @abstractmethod
    def _gap(self) -> list[Any]:
        """What fills the place of a value of another form."""

    def packed(self, values: Sequence[Any]) -> bool:
        """Add values, if all have the form.

        Args:
            values: Lists of the form, or others.

        Returns:
            Whether they have been added.
        """
        fits = self.fits(values)
        if fits:
            self._pack(values)
        return fits

    def extend(self, values: Sequence[Any]) -> None:
        """Add values.

        Args:
            values: Lists of the form, and others.
        """
        if type(values) is type(self) and not values.other and self._join(values):
            return
        if self.packed(values):
            return
        for value in values:
            if not self.fits([value]):
                self.other[len(self)] = value
            self._pack([value if self.fits([value]) else self._gap])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            place = range(len(self))[place]
            return self.other[place] if place in self.other else self._unpack(place)
        places = range(len(self))[place] if isinstance(place, slice) else place
        chosen = self._chosen(places)
        if self.other:
            chosen.other = {new: self.other[old] for new, old in enumerate(places) if old in self.other}
        return chosen


class Vectors(Packed):
    """Lists of floats of one length, such as the norms of all tensors: one after the other in one array.

    Args:
        width: The length.

    Attributes:
        flat: The floats; NaN in the place of what has another form.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.flat = width, array("d")

    def fits(self, values: Sequence[Any]) -> bool:
        """Return whether all values are lists of so many floats."""
        if not self.width or set(map(type, values)) != _LISTS or set(map(len, values)) != {self.width}:
            return False
        return set(map(type, chain.from_iterable(values))) == _FLOATS

    def _pack(self, values: Sequence[Any]) -> None:
        self.flat.extend(array("d", chain.from_iterable(values)))

    def _join(self, packed: "Vectors") -> bool:
        if packed.width == self.width:
            self.flat.extend(packed.flat)
        return packed.width == self.width

    def _unpack(self, place: int) -> list[Any]:
        return self.flat[place * self.width : (place + 1) * self.width].tolist()

    def _chosen(self, places: Sequence[int]) -> "Vectors":
        chosen, width = Vectors(self.width), self.width
        if isinstance(places, range) and places.step == 1:
            chosen.flat = self.flat[places.start * width : places.stop * width]
        else:
            for place in places:
                chosen.flat.extend(self.flat[place * width : (place + 1) * width])
        return chosen

    def rows(self, begin: int = 0, end: int | None = None) -> Iterator[array]:
        """Yield the lists from one place to another, as arrays.

        Args:
            begin: The first place.
            end: The place behind the last one; by default that of the end.
        """
        for place in range(begin, len(self) if end is None else end):
            yield self.flat[place * self.width : (place + 1) * self.width]

    def columns(self, begin: int, end: int) -> list[array]:
        """Return the same lists as one array for each of their entries.

        Args:
            begin: The first place.
            end: The place behind the last one.
        """
        return [self.flat[begin * self.width + k : end * self.width : self.width] for k in range(self.width)]

    @property
    def _gap(self) -> list[Any]:
        return [nan] * self.width

    def __len__(self) -> int:
        return len(self.flat) // self.width


class Tops(Packed):
    """Pairs of the place of a parameter and its share.

    Attributes:
        places: The places; -1 for what has another form.
        shares: The shares.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places, self.shares = array("q"), array("d")

    def fits(self, values: Sequence[Any]) -> bool:
        """Return whether all values are lists of a whole number and a float."""
        if set(map(type, values)) != _LISTS or set(map(len, values)) != {2}:
            return False
        places, shares = zip(*values, strict=True)
        return _fits(array("q"), places) and _fits(array("d"), shares)

    def _pack(self, values: Sequence[Any]) -> None:
        places, shares = zip(*values, strict=True)
        self.places.extend(places)
        self.shares.extend(shares)

    def _join(self, packed: "Tops") -> bool:
        self.places.extend(packed.places)
        self.shares.extend(packed.shares)
        return True

    def _unpack(self, place: int) -> list[Any]:
        return [self.places[place], self.shares[place]]

    def _chosen(self, places: Sequence[int]) -> "Tops":
        chosen = Tops()
        chosen.places = array("q", map(self.places.__getitem__, places))
        chosen.shares = array("d", map(self.shares.__getitem__, places))
        return chosen

    @property
    def _gap(self) -> list[Any]:
        return [-1, nan]

    def __len__(self) -> int:
        return len(self.places)
