"""The origins of the tensors in one forward, as far as the torch functions that it calls show them.

Four facts are recorded of a tensor:

* It is made of *sizes alone*, as ``arange(len(x))`` is: then it is the same for all batches of these sizes, and no
  operation on it reads, compares or selects by values of samples. A function passes this on from all its tensors to
  its result if nothing but its arguments decides the result: no random numbers, no uninitialised memory, no state. The
  fact ends once the tensor is written in place. After the forward has read values of data, a number of the program may
  be one of them, so no further tensor is made of sizes alone.
* It is a *number of a whole tensor*, such as its maximum. Where such a number goes into another tensor, a sample's
  values may depend on those of the others.
* It is made *of data*: of the samples' values, and not only of their sizes. A later forward that finds such a tensor
  outside uses what was carried from call to call, unless the clipper can put it back.
* It is made of such a tensor, so it is *carried*.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from gradguard.per_sample.call_arguments import changes_of

_NUMBERS = frozenset({"__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"})
"""Functions that return values of a tensor to the program as numbers."""

_BY_VALUE = _NUMBERS | {
    "__bool__", "__contains__", "allclose", "equal", "nonzero", "argwhere", "masked_select", "unique", "topk", "sort",
    "argsort", "kthvalue", "median", "quantile", "multinomial", "bincount", "argmax", "argmin", "cumsum",
}  # fmt: skip
"""Functions that return values to the program, or select by values: their effect on a sample may depend on others."""

_COMPARE = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "where"})
"""Functions that count as `_BY_VALUE` if an argument requires grad; a comparison of masks or ids does not count."""

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__",
                       "__ior__"})  # fmt: skip
"""Operators that write in place."""

_GIVEN = "argument", "outside"
"""Makers of tensors that no function of the forward made."""

_MOST_TENSORS = 4096
"""Number of tensors made of data after which those that no longer exist are dropped."""

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are tensors made of it."""

_PROPERTIES = _VIEWS | {"data", "grad_fn"}
"""Properties that count as functions. Hooks may be registered on a ``grad_fn``."""

_OF_SHAPES = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
                        "new_zeros", "new_ones", "new_empty", "new_full"})  # fmt: skip
"""Functions that do not read the values of their first argument."""

_OF_FIRST = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that read the values of their first argument alone."""

_OF_ARGUMENTS = _VIEWS | {
    "arange", "ones", "zeros", "full", "eye", "tril_indices", "triu_indices", "getitem", "view", "reshape", "unsqueeze",
    "squeeze", "expand", "expand_as", "repeat", "to", "long", "int", "bool", "flatten", "unflatten", "transpose",
    "permute", "t", "contiguous", "clone", "diff", "cumsum", "cat", "stack", "all", "any", "add", "sub", "rsub", "mul",
    "rmul", "radd", "floordiv", "floor_divide", "mod", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "tril", "triu",
    "bitwise_not", "invert", "logical_not",
}  # fmt: skip
"""Functions whose result nothing but their arguments decides, without the underscores round their names."""


def name_of(func: Any) -> str:
    """Return the name of a torch function; a property that is a tensor made of its tensor has its own name."""
    name = getattr(func, "__name__", "")
    if name == "__get__" and (own := getattr(func.__self__, "__name__", "")) in _PROPERTIES:
        return own
    return name


def tensors_given(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments of a torch function, which may be nested."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_given(*value)
        elif isinstance(value, dict):
            yield from tensors_given(*value.values())
        elif isinstance(value, slice):
            yield from tensors_given(value.start, value.stop, value.step)


class Origin:
    """The origin of one tensor, as far as it is known.

    Args:
        tensor: The tensor.

    Attributes:
        tensor: A weak reference to it.
        name: A hash of the functions that made it, and the number of tensors with this hash up to this one; None if no
            `OperationTrace` has named it.
        made_by: The last of these functions, or the class of a module; True for a parameter; ``"argument"`` and
            ``"outside"`` for a tensor that none of them made.
        of_sizes: How often it had been written in place when it was made of sizes alone; None if it never was.
        of_whole: Whether it is a number of a whole tensor.
        of_data: Whether it is made of the samples' values, or they were written into it.
        made_of_data: Whether it is the result of a function that read them.
        carried: Whether it is made of a tensor that an earlier forward made of its samples' values.
    """

    name: tuple[int, int] | None = None
    made_by: Any = True
    of_sizes: int | None = None
    of_whole = of_data = made_of_data = carried = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)

    @property
    def is_of_sizes(self) -> bool:
        """Whether the tensor is made of sizes alone."""
        return self.of_sizes is not None and self.of_sizes == changes_of(cast("Tensor", self.tensor()))


class Origins:
    """Record the origins of the tensors in one forward.

    Attributes:
        has_read: Whether a function returned values of data to the program as numbers.
        by_value: Whether a function's effect may depend on values, or on all values of a tensor together.
        stored: How often a function made numbers or bools of the samples' values, or wrote these in place, by its name.
            Either may store them outside of the forward.
    """

    def __init__(self) -> None:
        self._known: dict[int, Origin] = {}
        self.has_read = self.by_value = False
        self.stored = Counter[str]()

    def of(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor, to be read or added to."""
        origin = self._known.get(id(tensor))
        if origin is None or origin.tensor() is not tensor:
            origin = self._known[id(tensor)] = Origin(tensor)
        return origin

    def follow(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Origin]
    ) -> Any:
        """Call a torch function, and record what its result is made of.

        Args:
            name: The function's `name_of`.
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            given: The origins of the tensors in its arguments.

        Returns:
            The result.
        """
        of_sizes, of_whole, of_data, carried = True, False, False, False
        for origin in given:
            of_sizes = of_sizes and origin.is_of_sizes
            of_whole = of_whole or origin.of_whole
            of_data = of_data or origin.of_data
            carried = carried or origin.carried
        if not of_sizes:
            compares = name in _COMPARE and any(tensor.requires_grad for tensor in tensors_given(args, kwargs))
            self.by_value |= compares or name in _BY_VALUE
            self.has_read |= name in _NUMBERS
        result = func(*args, **kwargs)
        if of_data or carried:
            self._follow_data(name, args, kwargs, result, of_data, carried)
        if type(result) is not Tensor:
            return result
        if of_sizes and not self.has_read and name.strip("_") in _OF_ARGUMENTS:
            self.of(result).of_sizes = changes_of(result)
        if result.dim():
            self.by_value |= of_whole
        elif of_whole or any(map(Tensor.dim, tensors_given(args, kwargs))):
            self.of(result).of_whole = True
        return result

    def _follow_data(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, of_data: bool, carried: bool
    ) -> None:
        """Record that a function got values of samples, or carried ones."""
        if name in _OF_SHAPES or name in _OF_FIRST:
            read = [self.of(one) for one in tensors_given(args[:1] if name in _OF_FIRST else (args[1:], kwargs))]
            of_data, carried = any(one.of_data for one in read), any(one.carried for one in read)
        changed, is_new = [*tensors_given(result)], True
        if name in _NUMBERS or name == "__bool__":
            self.stored[name] += of_data
        elif name in _IN_PLACE or "out" in kwargs or (name.endswith("_") and not name.endswith("__")):
            self.stored[name] += of_data
            is_new = False
            changed += tensors_given(args[:1], kwargs.get("out"))
        for tensor in changed:
            origin = self.of(tensor)
            origin.of_data |= of_data
            origin.made_of_data |= of_data and is_new
            origin.carried |= carried

    def forget(self) -> list[Origin]:
        """Drop the origins, and return them."""
        known, self._known = self._known, {}
        return [*known.values()]


class MadeOfData:
    """The tensors that forwards made of their samples' values and that still exist, held weakly.

    A tensor that such values were only written into is none of them: it may be memory that each forward uses again.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[Tensor]] = {}
        self._most = _MOST_TENSORS

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._tensors.get(id(tensor))
        return known is not None and known() is tensor

    def add(self, origins: Iterable[Origin]) -> None:
        """Add those tensors of a forward that are made of data."""
        for one in origins:
            if one.made_of_data and one.made_by not in _GIVEN and (tensor := one.tensor()) is not None:
                self._tensors[id(tensor)] = one.tensor
        if len(self._tensors) > self._most:
            self._tensors = {key: one for key, one in self._tensors.items() if one() is not None}
            self._most = 2 * len(self._tensors) + _MOST_TENSORS
