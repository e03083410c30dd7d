"""Operations that choose or order the rows of a tensor by values, such as ``hidden[mask]`` or ``x[order]``.

A layer's plan gives each row to a sample by its place. Rows that were chosen by values stand in other places in the
next batch, and sizes do not show it: four lengths 6, 2, 4, 4 have as many tokens as 4, 4, 4, 4. So a module that
chooses rows of samples by values runs its samples one by one.

An operation chooses rows of samples if it selects along a dimension that holds samples. In the dry runs that is the
dimension that grows from two samples to three: ``x[:, index]``, ``table[ids]`` and a gather within each sample choose
nothing. On each step the operations are compared with those of the dry runs. Of an operation that no dry run has had,
each dimension whose size is a multiple of the number of samples may hold samples.

An index that is made of sizes alone (`origins`), such as ``arange(len(x))``, is the same for all batches of one size,
so it chooses nothing. Slices and concatenations are numbers of the program: they choose rows where they cut through a
sample, or where the forward has read values before.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from gradguard.per_sample.origins import Origins
from gradguard.torch_private import PACKING

_ALONG = {
    "index_select": (1, 2), "gather": (1, 2), "scatter": (1, 2), "scatter_add": (1, 2), "scatter_reduce": (1, 2),
    "index_add": (1, 2), "index_copy": (1, 2), "index_fill": (1, 2), "index_reduce": (1, 2), "take_along_dim": (2, 1),
    "repeat_interleave": (2, 1),
}  # fmt: skip
"""Functions that select along one dimension by an index: the positions of the dimension and of the index."""

_ORDERING = {"sort": (1, -1), "topk": (2, -1), "msort": (9, 0), "flip": (1, None), "roll": (2, None), "flipud": (9, 0),
             "unique": (9, None), "unique_consecutive": (9, None)}  # fmt: skip
"""Functions that return rows in another order: the position of the dimension, and its default (None for all)."""

_JOINING = {"cat": 0, "concat": 0, "concatenate": 0, "stack": 0, "vstack": 0, "row_stack": 0, "pad_sequence": 0}
_WITHIN = frozenset({"getitem", "setitem", "index_put", "embedding", "embedding_bag", "masked_select", "masked_scatter",
                     "take", "put", "narrow", PACKING.strip("_")})  # fmt: skip


class Selection(NamedTuple):
    """One operation that selects, writes or joins rows.

    Attributes:
        kind: The name of the function, and the dimensions along which it selects.
        shape: The shape of the tensor in which it selects, or that it returns.
        dims: The dimensions along which it selects.
        by_value: Whether it selects by values.
        cuts: Numbers of rows at which it cuts the dimensions; they cut no sample if each is a multiple of the batch's.
    """

    kind: tuple[Any, ...]
    shape: Size
    dims: tuple[int, ...]
    by_value: bool
    cuts: tuple[int, ...] = ()

    def chooses(self, dims: Collection[int], samples: int) -> bool:
        """Return whether it chooses rows of samples, if ``dims`` are the dimensions of samples."""
        chosen = [dim for dim in self.dims if dim in dims]
        return bool(chosen) and (self.by_value or any(cut % samples for cut in self.cuts))


class RowChoices:
    """Record the operations of one forward that select rows.

    Args:
        origins: The origins of the tensors of the forward.

    Attributes:
        selections: The operations, in order.
        paused: Whether operations are not the model's, such as those of the hooks of ``fully_shard``.
    """

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self.selections: list[Selection] = []
        self.paused = False

    def look_at(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at a function that is about to be called."""
        if self.paused:
            return
        kind = name.strip("_")
        if kind not in _ALL:
            return
        if kind == "getitem" or kind == "setitem":
            found = self._of_index(kind, args)
        elif kind in _JOINING:
            found = self._of_joined(kind, args, kwargs)
        elif kind in _ALONG:
            found = self._of_one_dimension(kind, args, kwargs)
        elif kind in _ORDERING:
            found = self._of_order(kind, args, kwargs)
        else:
            found = self._of_others(kind, args, kwargs)
        if found is not None:
            self.selections.append(found)

    def _of_index(self, kind: str, args: Sequence[Any]) -> Selection | None:
        operand, index = args[0], args[1]
        if not isinstance(operand, Tensor):
            return None
        items = index if type(index) is tuple else (index,)
        taken = sum(_consumed(item) for item in items)
        dims, cuts, by_value, dim, writes = [], [], False, 0, kind == "setitem"
        rows = operand.dim() - taken + (1 if writes else 0)
        for item in items:
            if item is Ellipsis:
                dim += operand.dim() - taken
                continue
            count = _consumed(item)
            own = range(dim, dim + count)
            dim += count
            if isinstance(item, slice):
                if item.start is None and item.stop is None and item.step in (None, 1):
                    continue
                size = operand.shape[own[0]]
                if any(isinstance(bound, Tensor) for bound in (item.start, item.stop, item.step)):
                    by_value = True
                else:
                    start, stop, step = item.indices(size)
                    if (start, stop, step) == (0, size, 1):
                        continue
                    cuts += [start, stop] if step == 1 else [1]
                    by_value |= self._origins.has_read
                dims += own
            elif isinstance(item, Tensor):
                if item.dtype in (torch.bool, torch.uint8) and writes and _is_alike(args[2], rows):
                    continue  # ``x[mask] = 0`` puts the same into each row
                if not self._origins.of(item).is_of_sizes:
                    dims += own
                    by_value = True
            elif isinstance(item, int):
                if writes and not isinstance(item, bool):  # a row is written by itself
                    dims += own
                    cuts.append(1)
            elif count:  # a list, or an array of NumPy's
                dims += own
                by_value = True
        return (
            Selection((kind, operand.dim(), *dims), operand.shape, tuple(dims), by_value, tuple(cuts)) if dims else None
        )

    def _of_joined(self, kind: str, args: Sequence[Any], given: Mapping[str, Any]) -> Selection | None:
        parts = _argument(args, given, 0, "tensors", "sequences", default=())
        parts = [part for part in parts if isinstance(part, Tensor)]
        if not parts:
            return None
        stacked = kind in ("stack", "pad_sequence")
        number = parts[0].dim() + stacked
        dim = _argument(args, given, 1, "dim", "axis", "batch_first") or 0
        if kind == "pad_sequence":
            dim = 0 if dim else 1
        if not isinstance(dim, int) or not number:
            return None
        dim %= number
        shape = list(parts[0].shape)
        if stacked:
            shape.insert(dim, len(parts))
            cuts = [1] * len(parts)
        else:
            cuts = [part.shape[dim] if dim < part.dim() else 0 for part in parts]
            if dim < len(shape):
                shape[dim] = sum(cuts)
        return Selection((kind, number, len(parts), dim), Size(shape), (dim,), self._origins.has_read, tuple(cuts))

    def _of_one_dimension(self, kind: str, args: Sequence[Any], given: Mapping[str, Any]) -> Selection | None:
        place, of_index = _ALONG[kind]
        operand = _argument(args, given, 0, "input")
        dim = _argument(args, given, place, "dim", "axis")
        index = _argument(args, given, of_index, "index", "indices", "repeats")
        if not isinstance(operand, Tensor) or not isinstance(index, Tensor) or self._origins.of(index).is_of_sizes:
            return None
        dims = tuple(range(operand.dim())) if dim is None else (dim % max(1, operand.dim()),)
        return Selection((kind, operand.dim(), *dims), operand.shape, dims, True)

    def _of_order(self, kind: str, args: Sequence[Any], given: Mapping[str, Any]) -> Selection | None:
        place, default = _ORDERING[kind]
        operand = _argument(args, given, 0, "input")
        if not isinstance(operand, Tensor) or not operand.dim() or self._origins.of(operand).is_of_sizes:
            return None
        dim = _argument(args, given, place, "dim", "dims", default=default)
        if kind == "flip" and len(args) > 2:
            dim = args[1:]
        if isinstance(dim, int):
            dim = (dim,)
        numbers: Sequence[int] = list(dim) if dim else range(operand.dim())
        dims = tuple([number % operand.dim() for number in numbers])
        return Selection((kind, operand.dim(), *dims), operand.shape, dims, True)

    def _of_others(self, kind: str, args: Sequence[Any], given: Mapping[str, Any]) -> Selection | None:
        if kind in ("embedding", "embedding_bag"):
            operand = _argument(args, given, 1, "weight")
            if not isinstance(operand, Tensor) or isinstance(operand, nn.Parameter):
                return None
            if operand.is_leaf and operand.requires_grad:
                return None
            return Selection((kind, 2, 0), operand.shape, (0,), True)
        operand = _argument(args, given, 0, "input")
        if not isinstance(operand, Tensor):
            return None
        if kind == "narrow":
            dim, start, length = (
                _argument(args, given, i, name) for i, name in enumerate(("dim", "start", "length"), 1)
            )
            dims = (dim % operand.dim(),)
            numbers = isinstance(start, int) and isinstance(length, int)
            cuts = (start, length) if numbers else ()
            return Selection(
                (kind, operand.dim(), *dims), operand.shape, dims, self._origins.has_read or not numbers, cuts
            )
        if kind == "index_put":
            items, values = _argument(args, given, 1, "indices"), _argument(args, given, 2, "values")
            return self._of_index("setitem", (operand, tuple(items), values))
        dims = tuple(range(operand.dim()))
        return Selection((kind, operand.dim()), operand.shape, dims, True)


_ALL = _WITHIN | _JOINING.keys() | _ALONG.keys() | _ORDERING.keys()


def _argument(args: Sequence[Any], given: Mapping[str, Any], place: int, *names: str, default: Any = None) -> Any:
    """Return an argument of a function, which stands in ``place`` or has one of ``names``."""
    return args[place] if len(args) > place else next((given[name] for name in names if name in given), default)


def _consumed(item: Any) -> int:
    """Return the number of dimensions that an entry of an index stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _is_alike(value: Any, rows: int) -> bool:
    """Return whether a value that is written into rows of ``rows`` dimensions, with theirs, is alike for all rows."""
    return not isinstance(value, Tensor) or value.dim() < rows or value.shape[0] == 1


class SafeSelections:
    """The selections of the dry runs of a module, if none of them chooses rows of samples.

    Args:
        two: The selections of the run with two samples.
        three: The selections of the run with three samples.

    Attributes:
        choosing: The first function that chooses rows of samples, or that one run called and the other did not; ""
            if there is none.
    """

    def __init__(self, two: Sequence[Selection], three: Sequence[Selection]) -> None:
        self._known: dict[tuple[Any, ...], set[tuple[tuple[int, ...], Size | None]]] = defaultdict(set)
        self.choosing = ""
        for a, b in zip(two, three, strict=False):
            grown = tuple([d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n])
            if a.kind != b.kind or a.chooses(grown, 2) or b.chooses(grown, 3):
                self.choosing = str(a.kind[0])
                return
            self._known[a.kind].add((grown, None if grown else a.shape))
        if len(two) != len(three):
            self.choosing = str(max(two, three, key=len)[-1].kind[0])

    def grown(self, selection: Selection, samples: int) -> set[int] | None:
        """Return the dimensions of samples, of an operation like one in the dry runs; None if there was none.

        A tensor that holds no samples, such as a table, must have the same shape as in the dry runs.
        """
        found = [
            grown
            for grown, shape in self._known.get(selection.kind, ())
            if shape in (None, selection.shape) and not any(selection.shape[dim] % samples for dim in grown)
        ]
        return set[int]().union(*found) if found else None


def chosen(selections: Sequence[Selection], known: Sequence[SafeSelections], samples: int) -> str:
    """Return the function by which a forward chose rows of samples; "" if it chose none.

    Args:
        selections: The operations of the forward that select rows.
        known: The operations of the dry runs.
        samples: The number of samples.
    """
    for selection in selections if samples > 1 else ():
        found = [grown for one in known if (grown := one.grown(selection, samples)) is not None]
        if found:
            dims = set[int]().union(*found)
        else:
            sizes = enumerate(selection.shape)
            dims = {dim for dim, size in sizes if size % samples == 0 and (selection.by_value or dim == 0)}
        if selection.chooses(dims, samples):
            return str(selection.kind[0])
    return ""
