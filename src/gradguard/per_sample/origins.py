"""The origins of the tensors in one forward, as far as the torch functions that it calls show them.

Two facts are recorded of a tensor:

* It is made of *sizes alone*, as ``arange(len(x))`` is: then it is the same for all batches of these sizes, and no
  operation on it reads, compares or selects by values of samples. A function passes this on from all its tensors to
  its result if nothing but its arguments decides the result: no random numbers, no uninitialised memory, no state. The
  fact ends once the tensor is written in place. After the forward has read values of data, a number of the program may
  be one of them, so no further tensor is made of sizes alone.
* It is a *number of a whole tensor*, such as its maximum. Where such a number goes into another tensor, a sample's
  values may depend on those of the others.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
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

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are tensors made of it."""

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
    if name == "__get__" and (view := getattr(func.__self__, "__name__", "")) in _VIEWS:
        return view
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
        made_by: The last of these functions, or the class of a module; True for a parameter.
        of_sizes: How often it had been written in place when it was made of sizes alone; None if it never was.
        of_whole: Whether it is a number of a whole tensor.
    """

    name: tuple[int, int] | None = None
    made_by: Any = True
    of_sizes: int | None = None
    of_whole = False

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
    """

    def __init__(self) -> None:
        self._known: dict[int, Origin] = {}
        self.has_read = self.by_value = False

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
        of_sizes, of_whole = True, False
        for origin in given:
            of_sizes = of_sizes and origin.is_of_sizes
            of_whole = of_whole or origin.of_whole
        if not of_sizes:
            compares = name in _COMPARE and any(tensor.requires_grad for tensor in tensors_given(args, kwargs))
            self.by_value |= compares or name in _BY_VALUE
            self.has_read |= name in _NUMBERS
        result = func(*args, **kwargs)
        if type(result) is not Tensor:
            return result
        if of_sizes and not self.has_read and name.strip("_") in _OF_ARGUMENTS:
            self.of(result).of_sizes = changes_of(result)
        if result.dim():
            self.by_value |= of_whole
        elif of_whole or any(map(Tensor.dim, tensors_given(args, kwargs))):
            self.of(result).of_whole = True
        return result

    def forget(self) -> None:
        """Drop the origins."""
        self._known.clear()
