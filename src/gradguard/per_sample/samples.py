"""Where the samples are in what a module is called with, and how to take some of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradguard.errors import InvalidValueError

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one call."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_samples(arguments: Arguments, batch_first: bool, name: str) -> int:
    """Return the number of samples B in one call: the size of the first tensor's batch dimension.

    Raises:
        InvalidValueError: If no tensor has one.
    """
    for tensor in tensor_leaves(arguments):
        if tensor.dim():
            return tensor.shape[_batch_dim(tensor, batch_first)]
    raise InvalidValueError(
        f"{name} was called without a tensor that has a batch dimension, so the samples cannot be told apart. Call it "
        "with the batch as a tensor, such as model(x)."
    )


def take_samples(arguments: Arguments, batch_first: bool, size: int, indices: Sequence[int]) -> Arguments:
    """Return the arguments for the samples ``indices``: every tensor whose batch dimension has ``size`` is cut."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.dim() and leaf.shape[_batch_dim(leaf, batch_first)] == size:
            chosen = torch.tensor(indices, device=leaf.device)
            return leaf.index_select(_batch_dim(leaf, batch_first), chosen)
        return leaf.clone()

    args, kwargs = tree_map(take, (tuple(arguments[0]), dict(arguments[1])))
    return args, kwargs


def _batch_dim(tensor: Tensor, batch_first: bool) -> int:
    return 0 if batch_first or tensor.dim() == 1 else 1
