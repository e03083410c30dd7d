"""Arguments and outputs of a module: their tensors, and the samples in the tensors."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError
from gradguard.torch_private import tree_flatten, tree_map, tree_unflatten, version_of

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one call."""

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
    for tensor in tensor_leaves(arguments):
        if tensor.dim():
            return tensor.shape[0 if batch_first or tensor.dim() == 1 else 1]
    raise InvalidValueError(
        f"{name} was called without a tensor that has a batch dimension, so its samples cannot be distinguished. Call "
        "it with the batch as a tensor, such as model(x)."
    )


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and the samples in them.

    Attributes:
        arguments: The arguments.
        batch_first: Whether the batch is the first dimension of the arguments.
        size: Number of samples B. Every tensor whose batch dimension has this size belongs to samples.
        whole: Positions of tensors that belong to no sample, although their batch dimension has this size.
    """

    arguments: Arguments
    batch_first: bool
    size: int
    whole: frozenset[int] = frozenset()

    @property
    def dims(self) -> list[tuple[Tensor, int | None]]:
        """Each tensor with its batch dimension; None for a tensor that belongs to no sample.

        With ``batch_first=False`` the batch may also be the first dimension, as in a padding mask ``[B, T]``.
        """
        found = list[tuple[Tensor, int | None]]()
        for i, tensor in enumerate(tensor_leaves(self.arguments)):
            dims = [0] if self.batch_first or tensor.dim() == 1 else [1, 0]
            fits = (dim for dim in dims if dim < tensor.dim() and tensor.shape[dim] == self.size)
            found.append((tensor, None if i in self.whole else next(fits, None)))
        return found

    @property
    def of_no_sample(self) -> frozenset[int]:
        """The positions of tensors without a batch dimension.

        If such a tensor has a dimension of size B in a later call, it has that size by chance.
        """
        return frozenset(i for i, (_, dim) in enumerate(self.dims) if dim is None)

    @property
    def other_candidates(self) -> list[int]:
        """The positions of tensors, other than the first, whose batch dimension may have size B by chance.

        Such a tensor is a list of positions, a square mask, or has its batch in another dimension than expected. Any
        other tensor of this size may hold samples' data, such as the second input of a contrastive model, so it counts
        as samples.
        """
        found = []
        for i, (tensor, dim) in [one for one in enumerate(self.dims) if one[1][1] is not None][1:]:
            square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] and tensor.unique().numel() <= 2
            positions = tensor.dim() == 1 and not is_inexact(tensor)
            if square or positions or (dim == 0 and not self.batch_first):
                found.append(i)
        return found

    def samples(self, indices: Sequence[int]) -> Arguments:
        """Return the arguments for the samples ``indices``."""
        dims = iter(self.dims)

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf, (_, dim) = leaf.detach(), next(dims)
            return leaf.clone() if dim is None else leaf.index_select(dim, torch.tensor(indices, device=leaf.device))

        return _mapped(take, self.arguments)

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
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def promoted(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments with floating-point and complex tensors promoted to at least the precision of ``dtype``."""
    return _mapped(lambda x: x.detach().to(promoted_type(x, dtype)) if isinstance(x, Tensor) else x, arguments)


def promoted_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of ``tensor``, promoted to at least ``dtype`` if it is floating-point or complex."""
    return torch.promote_types(tensor.dtype, dtype) if dtype is not None and is_inexact(tensor) else tensor.dtype


def _mapped(function: Callable[[Any], Any], arguments: Arguments) -> Arguments:
    args, kwargs = tree_map(function, (tuple(arguments[0]), dict(arguments[1])))
    return args, kwargs


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
