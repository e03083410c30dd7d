"""The values that a module returned to the code that computes the loss, and whose they are."""

import functools
from collections.abc import Sequence, Set

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.loss.loss_graph import Root, parents, walk
from gradguard.torch_private import input_metadata_of, version_of


class Outputs:
    """The values that a module returned to the code that computes the loss.

    Args:
        batch_size: Number of samples B.
        batch_first: Whether they are the first dimension of the outputs, as far as is known.

    Attributes:
        constant_sizes: Sizes of constants that are known not to be made of the samples.
        repeated: Sizes of constants along which values were repeated.
        values_of_each: How many values there are of each sample.
        declared: Values that the user has said are not made of the samples.
    """

    def __init__(self, batch_size: int, batch_first: bool = True) -> None:
        self.batch_size, self.batch_first = batch_size, batch_first
        self.constant_sizes: Set[int] = frozenset()
        self.repeated: set[int] = set()
        self.values_of_each = 0.0
        self.declared: Sequence[Tensor | float] = ()
        self._held: dict[tuple[Node, int], tuple[Tensor, int]] = {}
        self._edges: list[GradientEdge] = []
        self._axes: list[BatchAxis] = []
        self._numbers: list[GradientEdge] = []

    def add(self, tensors: Sequence[Tensor], axes: Sequence[BatchAxis | None]) -> None:
        """Add what a call has returned.

        Args:
            tensors: The tensors.
            axes: Where the samples are in each; None for one that belongs to no sample.
        """
        for tensor, axis in zip(tensors, axes, strict=True):
            if tensor.requires_grad and axis is None:
                self._numbers.append(get_gradient_edge(tensor))
            elif tensor.requires_grad and axis is not None:
                self.values_of_each += tensor.numel() / self.batch_size
                self._edges.append(get_gradient_edge(tensor))
                self._axes.append(axis)
                self._held[self._edges[-1].node, self._edges[-1].output_nr] = tensor.detach(), version_of(tensor)

    @property
    def held(self) -> dict[tuple[Node, int], Tensor]:
        """The values themselves, but for those that were changed in place."""
        return {edge: tensor for edge, (tensor, version) in self._held.items() if version_of(tensor) == version}

    @property
    def owners(self) -> dict[tuple[Node, int], Tensor]:
        """The sample of each element of the values, with size 1 along other dimensions than the samples'."""
        found = {}
        for edge, axis in zip(self._edges, self._axes, strict=True):
            value = input_metadata_of(edge.node)[edge.output_nr]
            size, dims = value.shape[axis.dim], len(value.shape)
            samples = numbered(size, self.batch_size, axis.last, value.device)
            found[edge.node, edge.output_nr] = samples.view([-1 if dim == axis.dim else 1 for dim in range(dims)])
        return found

    @property
    def values(self) -> set[tuple[Node, int]]:
        """The values with samples, by node and number."""
        return {(edge.node, edge.output_nr) for edge in self._edges}

    def are_behind(self, roots: Sequence[Root]) -> bool:
        """Tell whether a backward from ``roots`` comes by."""
        ends = {(edge.node, edge.output_nr) for edge in (*self._edges, *self._numbers)}
        starts = [(root.node, root.number) for root in roots]
        return any(place in ends for place in walk(starts, lambda place: () if place in ends else parents(place[0])))

    def and_of(self, other: "Outputs") -> "Outputs":
        """Return these and the ones of another call."""
        both = Outputs(self.batch_size, self.batch_first and other.batch_first)
        both._edges, both._axes = self._edges + other._edges, self._axes + other._axes
        both._numbers, both._held = self._numbers + other._numbers, self._held | other._held
        both.values_of_each = self.values_of_each + other.values_of_each
        return both


def numbered(size: int, batch_size: int, last: bool, device: torch.device) -> Tensor:
    """Return the samples along a dimension of some size, where they vary fastest (``last``), or lie side by side."""
    places = torch.arange(size, device=device)
    return places % batch_size if last else places // max(1, size // max(1, batch_size))


def of_several(calls: Sequence[Outputs]) -> Outputs | None:
    """Return the outputs of all calls together; None if their numbers of samples differ."""
    if len({call.batch_size for call in calls}) != 1:
        return None
    return functools.reduce(Outputs.and_of, calls)
