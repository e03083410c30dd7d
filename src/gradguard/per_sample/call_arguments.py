"""Arguments and outputs of a module: their tensors, and the samples in the tensors."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.argument_parts import (
    INSIDE,
    Arguments,
    entries_of,
    is_array,
    is_list,
    mapped,
    taken,
    tensors_in,
)
from gradguard.torch_private import tree_flatten, tree_unflatten, version_of

Gradients = Sequence[Tensor | None]
"""The gradients of some tensors; None for a tensor that autograd gave none."""

Slot = tuple[nn.Module, str]
"""A module, and the name of an attribute that holds a parameter or buffer."""

Places = Mapping[str, Sequence[Slot]]
"""The attributes of modules that hold each parameter."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in _flat(tree)[0] if isinstance(leaf, Tensor)]


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor can have a gradient: whether its numbers are floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def count_samples(arguments: Arguments, batch_first: bool, name: str) -> int:
    """Return the number of samples B in one call: the size of the first tensor's batch dimension.

    Raises:
        InvalidValueError: If no tensor has a batch dimension.
    """
    for find in (tensor_leaves, tensors_in):  # most calls need no look into objects
        for tensor in filter(Tensor.dim, find(arguments)):
            return tensor.shape[0 if batch_first or tensor.dim() == 1 else 1]
    raise InvalidValueError(
        f"{name} was called without a tensor that has a batch dimension, so its samples cannot be distinguished. Call "
        "it with the batch as a tensor, such as model(x)."
    )


class Part(NamedTuple):
    """A part of the arguments that may belong to samples: a tensor, an array, or a list.

    Attributes:
        name: Where it is, such as ``"0"`` or ``"batch.data['lengths']"``.
        value: The part.
        dim: Its batch dimension, 0 for a list; None if it belongs to no sample.
    """

    name: str
    value: Any
    dim: int | None


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and the samples in them.

    Attributes:
        arguments: The arguments.
        batch_first: Whether the batch is the first dimension of the arguments.
        size: Number of samples B. Every tensor whose batch dimension has this size belongs to samples, and so does
            every array, and every list with B entries in which no tensor has a batch dimension.
        whole: Names of parts that belong to no sample, although their batch dimension has this size.
        second: Names of tensors with the samples along the second dimension, such as a state ``[layers, B, H]`` beside
            inputs ``[B, T]``.
    """

    arguments: Arguments
    batch_first: bool
    size: int
    whole: frozenset[str] = frozenset()
    second: frozenset[str] = frozenset()

    @cached_property
    def parts(self) -> list[Part]:
        """The tensors, arrays and lists in the arguments.

        Raises:
            UnsupportedGradientError: If an argument that may hold values of samples cannot be looked into.
        """
        found: list[Part] = []

        def note(name: str, value: Any) -> Any:
            if (dim := self._dim(name, value)) is INSIDE:
                return INSIDE
            found.append(Part(name, value, dim))
            return INSIDE if dim is None and is_list(value) else value

        mapped(note, self.arguments)
        return found

    def _dim(self, name: str, value: Any) -> Any:
        """Return the batch dimension of a part, None if it belongs to no sample, and `INSIDE` for another value."""
        if isinstance(value, Tensor) or is_array(value):
            if name in self.second:
                return 1 if self._has_second(value) else None
            return None if name in self.whole else self._dim_of_size(value)
        if is_list(value):
            return 0 if name not in self.whole and self._has_entries(value) else None
        if entries_of(value) == self.size > 1:
            raise UnsupportedGradientError(
                f"argument {name} of the module, a {type(value).__name__}, has an entry for each of the {self.size} "
                "samples and cannot be divided among them. Pass a tensor or a list; or, if it is the same for all "
                "samples, make it an attribute of the module."
            )
        return INSIDE

    def _dim_of_size(self, value: Any) -> int | None:
        """Return the dimension of a tensor or array that has size B.

        With ``batch_first=False`` the batch may also be the first dimension, as in a padding mask ``[B, T]``.
        """
        shape = value.shape
        dims = [0] if self.batch_first or len(shape) == 1 else [1, 0]
        return next((dim for dim in dims if dim < len(shape) and shape[dim] == self.size), None)

    def _has_second(self, value: Any) -> bool:
        """Tell whether the second dimension of a tensor or array has size B."""
        return value.shape[1:2] == (self.size,)

    def _has_entries(self, value: Sequence[Any]) -> bool:
        """Return whether a list has an entry for each sample, rather than tensors with the samples in each."""
        if len(value) != self.size:
            return False
        fits = [self._dim_of_size(tensor) is not None for tensor in tensors_in(value)]
        return not all(fits) if all(isinstance(one, Tensor) for one in value) else not any(fits)

    @property
    def dims(self) -> list[tuple[Tensor, int | None]]:
        """Each tensor with its batch dimension; None for a tensor that belongs to no sample, or to only one."""
        found = list[tuple[Tensor, int | None]]()
        for _, value, dim in self.parts:
            if isinstance(value, Tensor):
                found.append((value, dim))
            elif is_list(value) and dim is not None:
                found += [(tensor, None) for tensor in tensors_in(value)]
        return found

    @property
    def of_samples(self) -> list[Tensor]:
        """The tensors that hold values of the samples."""
        return [tensor for part in self.parts if part.dim is not None for tensor in tensors_in(part.value)]

    def alone(self, sample: int) -> "Batch":
        """Return one sample as a batch; what belongs to no sample here belongs to none there."""
        whole = self.whole.union([part.name for part in self.parts if part.dim is None])
        return Batch(self.samples([sample]), self.batch_first, 1, whole)

    @property
    def divided(self) -> list[Part]:
        """The lists and arrays of which each sample gets its own entry: torch does not see what is done with them."""
        return [part for part in self.parts if part.dim is not None and not isinstance(part.value, Tensor)]

    @property
    def words_on_divided(self) -> str:
        """A sentence on the lists and arrays that are divided among the samples, for a refusal; "" for none."""
        names = " and ".join([part.name for part in self.divided])
        return names and (
            f" The clipper gave a sample alone its own entry of {names}, which had one for each sample: a list that is "
            "the same for all samples needs a first batch of another size, or is an attribute of the module."
        )

    @property
    def of_no_sample(self) -> frozenset[str]:
        """The names of parts without a batch dimension.

        If such a part has a dimension of size B in a later call, it has that size by chance.
        """
        return frozenset(part.name for part in self.parts if part.dim is None)

    @property
    def other_candidates(self) -> list[str]:
        """The names of parts, other than the first tensor, whose batch dimension may have size B by chance.

        Such a part is a list of positions, a square mask, or has its batch in another dimension than expected. Any
        other tensor of this size may hold samples' data, such as the second input of a contrastive model, so it counts
        as samples.
        """
        found = []
        first = next((part for part in self.parts if part.dim is not None and isinstance(part.value, Tensor)), None)
        for part in self.parts:
            if part.dim is None or part is first:
                continue
            tensor = part.value
            if not isinstance(tensor, Tensor):
                found.append(part.name)
                continue
            square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] and tensor.unique().numel() <= 2
            positions = tensor.dim() == 1 and not is_inexact(tensor)
            if square or positions or (part.dim == 0 and not self.batch_first):
                found.append(part.name)
        return found

    @property
    def second_candidates(self) -> frozenset[str]:
        """The names of tensors, other than the first, that may have the samples along the second dimension."""
        if not self.batch_first:
            return frozenset()
        tensors = [part for part in self.parts if isinstance(part.value, Tensor)]
        return frozenset(part.name for part in tensors[1:] if self._has_second(part.value))

    def samples(self, indices: Sequence[int]) -> Arguments:
        """Return the arguments for the samples ``indices``."""

        def take(name: str, value: Any) -> Any:
            if (dim := self._dim(name, value)) is INSIDE or (dim is None and is_list(value)):
                return INSIDE
            if is_list(value):
                return taken(value, indices)
            if not isinstance(value, Tensor):
                return value if dim is None else value.take(list(indices), axis=dim)
            own = value.detach()
            own = own.clone() if dim is None else own.index_select(dim, torch.tensor(indices, device=value.device))
            return _as_leaf(own, value)

        return mapped(take, self.arguments)

    def finite_samples(self, number: int) -> list[int]:
        """Return the first ``number`` samples without NaN or inf, or fewer; -inf is accepted if there are too few."""
        found: list[int] = []
        for masked in (False, True):  # masks may have -inf
            if len(found) >= number:
                break
            good = torch.ones(self.size, dtype=torch.bool, device="cpu")
            for tensor, dim in self.dims:
                if dim is not None:
                    values = tensor.detach().movedim(dim, 0).unsqueeze(-1).flatten(1)
                    finite = values.isfinite()
                    finite = finite | values.isneginf() if masked and values.is_floating_point() else finite
                    good &= finite.all(1).cpu()
            found = good.nonzero().flatten().tolist()
        return found[:number]


def signature(arguments: Arguments) -> Hashable:
    """Return a key for one way of calling a module, which includes everything but the sizes of tensors.

    It distinguishes size 1 from other sizes: one token in this call may be several in the next.
    """
    leaves, spec = _flat(arguments)
    return spec if spec is _CALL else str(spec), tuple(map(_form, leaves))


def _form(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple([size == 1 for size in leaf.shape])
    if isinstance(leaf, bool | str | None):
        return leaf
    inside = tensors_in(leaf) if hasattr(leaf, "__dict__") else ()
    return (type(leaf), tuple(map(_form, inside))) if inside else type(leaf)


def promoted(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments with floating-point and complex tensors promoted to at least the precision of ``dtype``."""

    def promote(name: str, value: Any) -> Any:
        del name
        if not isinstance(value, Tensor):
            return INSIDE
        return _as_leaf(value.detach().to(promoted_type(value, dtype)), value)

    return mapped(promote, arguments)


def _as_leaf(copied: Tensor, value: Tensor) -> Tensor:
    """Let a copy require a gradient if ``value`` is a leaf that does: a reentrant checkpoint needs such an input."""
    return copied.requires_grad_(value.requires_grad and value.is_leaf)


def promoted_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of ``tensor``, promoted to at least ``dtype`` if it is floating-point or complex."""
    return torch.promote_types(tensor.dtype, dtype) if dtype is not None and is_inexact(tensor) else tensor.dtype


def changes_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written in place; 0 for an inference tensor, whose writes are not counted."""
    return 0 if tensor.is_inference() else version_of(tensor)


Versions = list[tuple[Tensor, int]]
"""Tensors, each with the number of in-place writes so far."""


def versions_of(tensors: Iterable[Tensor]) -> Versions:
    """Return ``tensors`` with their present versions."""
    return [(tensor, changes_of(tensor)) for tensor in tensors]


def written(versions: Versions) -> list[Tensor]:
    """Return the tensors that were written in place since `versions_of`."""
    return [tensor for tensor, version in versions if changes_of(tensor) != version]


_LONE, _CALL = object(), object()
"""Specs of a single tensor and of a call with one tensor: shortcuts, because both occur many times in a step."""


def _flat(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of ``tree``, and the spec that rebuilds it from them."""
    if type(tree) is Tensor:
        return [tree], _LONE
    if type(tree) is tuple and len(tree) == 2 and type(tree[0]) is tuple and type(tree[1]) is dict:
        (args, kwargs), alone = tree, len(tree[0]) == 1
        if alone and not kwargs and type(args[0]) is Tensor:
            return [args[0]], _CALL
    return tree_flatten(tree)


class Skeleton:
    """The structure of nested tuples, lists and dicts, separate from the tensors in it.

    Args:
        tree: The nested structure, with tensors.

    Attributes:
        tensors: The tensors, in order, until `release`.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = _flat(tree)
        self.tensors: list[Tensor] = leaves
        if self._spec is _LONE or self._spec is _CALL:
            self._places: Sequence[int] = (0,)
            return
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def __len__(self) -> int:
        return len(self._places)

    def release(self) -> list[Tensor]:
        """Return the tensors and drop the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def fill(self, tensors: Gradients) -> Any:
        """Return the tree with ``tensors`` in the places of the original tensors."""
        if self._spec is _LONE:
            return tensors[0]
        if self._spec is _CALL:
            return (tensors[0],), {}
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)
