r"""Tells whether values that a loss is computed from belong to one sample each, by what they pass on in backward.

Let rows r be computed from a module's outputs o with Jacobian J, and row k be said to be sample s(k)'s. Of any
cotangent c, sample i's outputs get :math:`g_i = (J^T c)_i`. Multiply the cotangent of each sample's rows by a power of
two of its own, :math:`c'_k = 2^{d(s(k))} c_k`: where every row depends on its own sample alone,
:math:`g'_i = 2^{d(i)} g_i`, to the last bit, whatever the operations between are. A row that depends on another sample
breaks it, unless both have the same d; so d runs through the digits of the sample's number.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.layers.call import BatchAxis, samples_first
from gradguard.per_sample.loss.loss_graph import Root, Unreadable, parents, walk
from gradguard.state.generators import seeded_normal
from gradguard.torch_private import input_metadata_of, version_of

_BITS = 3
_BASE = 1 << _BITS


class Silent(Unreadable):
    """Values whose derivative is 0 do not tell which sample they are of.

    Attributes:
        samples: The sample of each value that tells it, and -1 of others.
    """

    def __init__(self, samples: Tensor, message: str) -> None:
        super().__init__(message)
        self.samples = samples


class _Held(NamedTuple):
    """A tensor that a call has returned, its values, and its version then."""

    given: Tensor
    value: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """Whether it was changed in place since."""
        return version_of(self.value) != self.version

    @property
    def node(self) -> Node:
        """The operation that its graph names now: another one if what changed it was recorded."""
        return get_gradient_edge(self.given).node


class Outputs:
    """The values that a module returned to the code that computes the loss.

    Args:
        batch_size: Number of samples B.
        batch_first: Whether they are the first dimension of the outputs, as far as is known.
        pulls: Whether backwards may be run to see whether samples meet; not where they wait for other processes.

    Attributes:
        conclusive: False once `are_separate` had nothing to go by: gradients that are not finite, or of one sample.
        constant_sizes: Sizes of constants that are known not to be made of the samples.
        repeated: Sizes of constants along which values were repeated.
        values_of_each: How many values there are of each sample.
        declared: Values that the user has said are not made of the samples.
        coincide: Whether a constant in the loss is each sample's own only because of its shape, which may change.
    """

    def __init__(self, batch_size: int, batch_first: bool = True, pulls: bool = True) -> None:
        self.batch_size, self.batch_first, self._pulls = batch_size, batch_first, pulls
        self.conclusive = True
        self.constant_sizes: Set[int] = frozenset()
        self.repeated: set[int] = set()
        self.values_of_each = 0.0
        self.declared: Sequence[Tensor | float] = ()
        self.coincide = False
        self._held: dict[tuple[Node, int], _Held] = {}
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
                held = _Held(tensor, tensor.detach(), version_of(tensor))
                self._held[self._edges[-1].node, self._edges[-1].output_nr] = held

    @property
    def held(self) -> dict[tuple[Node, int], Tensor]:
        """The values themselves, but for those that were changed in place."""
        return {edge: held.value for edge, held in self._held.items() if not held.is_written}

    @property
    def are_changed(self) -> bool:
        """Whether one was changed in place by an operation that its graph does not record."""
        return any(held.is_written and held.node is node for (node, _), held in self._held.items())

    @property
    def values(self) -> set[tuple[Node, int]]:
        """The values with samples, by node and number."""
        return {(edge.node, edge.output_nr) for edge in self._edges}

    @property
    def axes(self) -> dict[tuple[Node, int], BatchAxis]:
        """Where the samples are in each of the values with samples."""
        return {(edge.node, edge.output_nr): axis for edge, axis in zip(self._edges, self._axes, strict=True)}

    def are_behind(self, roots: Sequence[Root]) -> bool:
        """Tell whether a backward from ``roots`` comes by."""
        return any(_reached(root.node, root.number, [*self._edges, *self._numbers]) for root in roots)

    def operations_behind(self, value: Tensor) -> frozenset[str]:
        """Return the names of the operations between these outputs and a value."""
        ends = {edge.node for edge in self._edges}
        places = walk([get_gradient_edge(value).node], lambda n: [] if n in ends else [one for one, _ in parents(n)])
        return frozenset({node.name() for node in places if node not in ends})

    def and_of(self, other: "Outputs") -> "Outputs":
        """Return these and the ones of another call."""
        both = Outputs(self.batch_size, self.batch_first and other.batch_first, self._pulls and other._pulls)
        both._edges, both._axes = self._edges + other._edges, self._axes + other._axes
        both._numbers, both._held = self._numbers + other._numbers, self._held | other._held
        both.values_of_each = self.values_of_each + other.values_of_each
        return both

    def are_separate(self, node: Node, number: int, samples: Tensor) -> bool | None:
        """Tell whether each element of a value depends on the outputs of the sample that it is said to belong to.

        Args:
            node: The node of the value.
            number: Which of its outputs.
            samples: The sample of each element; can be broadcast to the value's shape.

        Returns:
            None where the value does not depend on these outputs at all, or no backward may be run.

        Raises:
            Unreadable: If a backward from there cannot be run.
        """
        if not self._edges or not self._pulls:
            return None
        value = input_metadata_of(node)[number]
        samples = samples.to(value.device)
        cotangent = _normal(value.shape, value.dtype, value.device)
        once = self._pull(node, number, cotangent)
        if all(gradient is None for gradient in once):
            return None
        self.conclusive = self.conclusive and self._tells(once, samples)
        for digit in range(self._digits):
            multiplied = self._pull(node, number, cotangent * _power(samples, digit).to(value.dtype))
            if self._are_multiples(once, once, multiplied, digit):
                continue
            if not self._are_multiples(once, self._pull(node, number, cotangent), multiplied, digit):
                return False
        return True

    def samples_of(self, node: Node, number: int) -> Tensor:
        """Return the sample that each element of a value seems to depend on, from derivatives of J^T c.

        An element whose derivative is 0, as of a sample that is classified perfectly, tells of no sample.

        Raises:
            Silent: If the derivative of one is 0.
            Unreadable: If one depends on none or several, or an operation cannot be differentiated twice.
        """
        if not self._pulls:
            raise Unreadable("a sharded model's backward cannot be run twice")
        value = input_metadata_of(node)[number]
        if math.prod(value.shape) == 1 and (reached := self._samples_reached(node, number)):
            if len(reached) > 1:  # a derivative of one number may look like that of one of them
                raise Unreadable(f"the value from {node.name()} depends on {len(reached)} samples")
            return torch.full(value.shape, reached[0], device=value.device)
        cotangent = torch.zeros(value.shape, dtype=value.dtype, device=value.device, requires_grad=True)
        pulled = self._pull(node, number, cotangent, create_graph=True)
        used = [(g, axis) for g, axis in zip(pulled, self._axes, strict=True) if g is not None and g.requires_grad]
        if not used:
            raise Unreadable(f"values from {node.name()} do not tell the samples apart")
        gradients = [gradient for gradient, _ in used]
        directions = [_normal(gradient.shape, gradient.dtype, gradient.device) for gradient in gradients]
        try:
            [one] = torch.autograd.grad(gradients, cotangent, directions, retain_graph=True)
            multiplied = []
            for digit in range(self._digits):
                turned = [d.clone() for d in directions]
                for direction, (_, axis) in zip(turned, used, strict=True):
                    first = samples_first(direction, axis, self.batch_size)  # a view
                    first *= self._powers(digit, first)
                multiplied += torch.autograd.grad(gradients, cotangent, turned, retain_graph=True)
        except RuntimeError as error:
            raise Unreadable(f"{node.name()} cannot be differentiated twice ({_sentence(error)})") from error
        tells = one != 0
        exponents = [(many.double() / one.double()).log2().where(tells, 0.0) for many in multiplied]
        digits = [exponent.round() for exponent in exponents]
        near = all(bool(((a - b).abs() < 0.05).all()) for a, b in zip(exponents, digits, strict=True))
        samples = torch.stack([each * _BASE**digit for digit, each in enumerate(digits)]).sum(0)
        if not near or not bool(((samples >= 0) & (samples < self.batch_size)).all()):
            raise Unreadable(f"values from {node.name()} do not tell the {self.batch_size} samples apart")
        if not bool(tells.all()):
            raise Silent(
                samples.long().where(tells, -1),
                f"{int((~tells).sum())} of the {one.numel()} values from {node.name()} have a derivative of 0 in this "
                "batch, as the loss of a sample that is classified perfectly has, so that they do not tell which "
                "sample they are of. Leave samples in their order, or begin with another batch",
            )
        return samples.long()

    @property
    def _digits(self) -> int:
        """How many digits tell the samples apart."""
        return max(1, math.ceil((self.batch_size - 1).bit_length() / _BITS))

    def _powers(self, digit: int, like: Tensor) -> Tensor:
        """The power of two of each sample, to be broadcast to a tensor with the samples first."""
        return _along(_power(torch.arange(self.batch_size, device=like.device), digit).to(like.dtype), like)

    def only_sample(self, node: Node, number: int) -> int | None:
        """Return the one sample that a value depends on; None if it depends on none or several."""
        reached = self._samples_reached(node, number)
        return reached[0] if len(reached) == 1 else None

    def _samples_reached(self, node: Node, number: int) -> list[int]:
        """Return the samples that a value depends on."""
        value = input_metadata_of(node)[number]
        once = self._pull(node, number, _normal(value.shape, value.dtype, value.device))
        reached = [
            samples_first(_finite(g), axis, self.batch_size).reshape(self.batch_size, -1).any(1)
            for g, axis in zip(once, self._axes, strict=True)
            if g is not None
        ]
        return torch.stack(reached).any(0).nonzero().flatten().tolist() if reached else []

    def _pull(self, node: Node, number: int, cotangent: Tensor, create_graph: bool = False) -> Sequence[Tensor | None]:
        """Return the gradients of the outputs for a cotangent of the value; None where others lie in front."""
        reached = _reached(node, number, self._edges)
        if not reached:
            return [None] * len(self._edges)
        try:
            with torch.autocast(cotangent.device.type, enabled=False), silent_taps(node):
                found = torch.autograd.grad(
                    [GradientEdge(node, number)],  # pyright: ignore[reportArgumentType]
                    [self._edges[i] for i in reached],  # pyright: ignore[reportArgumentType]
                    [cotangent],
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                )
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise Unreadable(f"a backward from {node.name()} cannot be run twice ({_sentence(error)})") from error
        gradients: list[Tensor | None] = [None] * len(self._edges)
        for i, gradient in zip(reached, found, strict=True):
            gradients[i] = gradient
        return gradients

    def _tells(self, pulled: Sequence[Tensor | None], samples: Tensor) -> bool:
        """Whether these gradients would show that samples meet: finite ones, of two samples if as many are said."""
        reached = torch.zeros(self.batch_size, dtype=torch.bool, device=samples.device)
        for gradient, axis in zip(pulled, self._axes, strict=True):
            if gradient is not None:
                if not bool(gradient.isfinite().all()):
                    return False
                reached |= samples_first(gradient, axis, self.batch_size).reshape(self.batch_size, -1).any(1)
        return int(reached.sum()) >= min(2, len(samples.unique()))

    def _are_multiples(
        self,
        once: Sequence[Tensor | None],
        again: Sequence[Tensor | None],
        multiplied: Sequence[Tensor | None],
        digit: int,
    ) -> bool:
        """Tell whether samples' parts are multiples; what ``again`` has otherwise than ``once`` is rounding."""
        return all(
            first is None
            or (repeat is not None and second is not None and self._is_multiple(first, repeat, second, axis, digit))
            for first, repeat, second, axis in zip(once, again, multiplied, self._axes, strict=True)
        )

    def _is_multiple(self, first: Tensor, again: Tensor, second: Tensor, axis: BatchAxis, digit: int) -> bool:
        exact = first is again or torch.equal(_finite(first), _finite(again))
        first, second = (samples_first(g, axis, self.batch_size) for g in (first, second))
        if torch.equal(second, first * self._powers(digit, first)):
            return True
        first, second = _finite(first), _finite(second)
        expected = first * self._powers(digit, first)
        limits = torch.finfo(first.dtype)
        bar = _BASE * 2.0**_BASE * limits.smallest_normal * limits.eps  # products below the normal numbers are rounded
        if not exact:  # a kernel that adds up in any order
            bar = bar + 16 * limits.eps * _along(expected.abs().flatten(1).amax(1), expected)
        return bool(((second - expected).abs() <= bar).all())


def of_several(calls: Sequence[Outputs]) -> Outputs | None:
    """Return the outputs of all calls together; None if their numbers of samples differ."""
    if len({call.batch_size for call in calls}) != 1:
        return None
    return functools.reduce(Outputs.and_of, calls)


def _reached(node: Node, number: int, edges: Sequence[GradientEdge]) -> list[int]:
    """The places of those edges that are on the way back from a value, without what lies behind others alone."""
    places: dict[tuple[Node, int], list[int]] = defaultdict(list)
    for i, edge in enumerate(edges):
        places[edge.node, edge.output_nr].append(i)
    if (node, number) in places:
        return places[node, number]
    nodes = walk([node], lambda one: [edge[0] for edge in parents(one) if edge not in places])
    ends = {edge for one in nodes for edge in parents(one) if edge in places}
    return sorted(i for edge in ends for i in places[edge])


def _normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers that leave the generators of the program as they are."""
    # So small that a hook that clips gradients, as error clip's, leaves them alone, and that what `retain_grad` adds up
    # does not show it; float16 would not hold them.
    size = {torch.float16: 1.0, torch.float64: 2.0**-200}.get(dtype, 2.0**-50)
    return seeded_normal(shape, dtype, device).mul_(size)


def _power(samples: Tensor, digit: int) -> Tensor:
    """The power of two by which what is a sample's is multiplied, for one digit of its number."""
    return 2.0 ** (samples // _BASE**digit % _BASE)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value for each sample, to be broadcast to a tensor with the samples first."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _sentence(error: Exception) -> str:
    return str(error).split(".")[0]
