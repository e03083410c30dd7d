"""Nested arguments and results, with the tensors taken out and put in again."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradguard.torch_private import tree_flatten, tree_unflatten, version_of


def changes_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written into; 0 for one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


class Skeleton:
    """Nested tuples, lists and dicts without their tensors.

    Args:
        tree: With tensors.

    Attributes:
        tensors: The tensors, in order; `release` forgets them.
    """

    def __init__(self, tree: Any) -> None:
        self._lone = type(tree) is Tensor  # what most layers return, many times in a step
        leaves, spec = ([tree], None) if self._lone else tree_flatten(tree)
        self._spec: Any = spec
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def __len__(self) -> int:
        return len(self._places)

    def release(self) -> list[Tensor]:
        """Return the tensors and forget them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def fill(self, tensors: Sequence[Tensor | None]) -> Any:
        """Return the tree with ``tensors`` in the places of its own."""
        if self._lone:
            return tensors[0]
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)
