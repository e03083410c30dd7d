r"""Find the constants that a loss combines with values of the samples, those included that no operation saves.

Where T is B, PyTorch broadcasts targets ``[B]`` beside outputs ``[B, T]`` along the wrong dimension: it repeats the
targets for every sample, and each value belongs to two samples. Most operations save such a constant. ``Add``,
``Where`` and some others save nothing of the constant that they put in. Its value follows from other saved values: let
v be a saved value, x the nearest saved values below v, and J the Jacobian of v with respect to x. The operations in
between are affine, so the constant is :math:`v - J x`.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.loss.loss_graph import (
    Dependence,
    Unreadable,
    Value,
    dims_of,
    fold,
    input_of,
    is_linear,
    operation,
    parents,
    saved,
    shape_of,
    walk,
)
from gradguard.per_sample.loss.operation_table import (
    ADDITIONS,
    ADDS_UNSEEN,
    ALL_PRODUCTS,
    CHOOSING_ROWS,
    JOINING,
    LABELLED,
    RESHAPING,
    SCALINGS,
    SUMMING,
    operations,
)
from gradguard.torch_private import arguments_of, input_metadata_of, saved_all, saved_tensors

TAKES_BESIDE = operations("saves")
_BESIDE_NOTHING, _TAKEN = operations("alone"), operations("fixed")
_WEIGHING = CHOOSING_ROWS | SCALINGS | {"Where", "MaskedFill"}


class Inverse(NamedTuple):
    """A monotone operation that saves only its result: its function, the inverse, and the range of results."""

    function: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    least: float = -math.inf
    most: float = math.inf


INVERTIBLE = {
    "Exp": Inverse(torch.exp, torch.log, 0.0),
    "Sigmoid": Inverse(torch.sigmoid, torch.logit, 0.0, 1.0),
    "Tanh": Inverse(torch.tanh, torch.atanh, -1.0, 1.0),
    "Sqrt": Inverse(torch.sqrt, torch.square, 0.0),
    "Relu": Inverse(torch.relu, torch.clone),
    "Reciprocal": Inverse(torch.reciprocal, torch.reciprocal),
}

WITH_RESULTS = frozenset([*INVERTIBLE, "LogSoftmax"])
"""Operations that save their result but not their input."""

_Again = Callable[[Tensor, Node, int], Tensor]
"""Repeats an operation: takes its only input that depends on the samples, its node, and that input's position."""

_RETRACED: Mapping[str, _Again] = {
    **dict.fromkeys(RESHAPING, lambda x, node, _: x.reshape(shape_of(node))),
    "Alias": lambda x, *_: x,
    "Clone": lambda x, *_: x,
    "Expand": lambda x, node, _: x.expand(shape_of(node)),
    "ToCopy": lambda x, node, _: x.to(Value(node).meta.device, Value(node).meta.dtype),
    "Slice": lambda x, node, _: torch.ops.aten.slice(
        x, saved(node, "dim"), saved(node, "start"), saved(node, "end"), saved(node, "step")
    ),
    "Select": lambda x, node, _: x.select(saved(node, "dim"), saved(node, "index")),
    "Transpose": lambda x, node, _: x.transpose(saved(node, "dim0"), saved(node, "dim1")),
    "T": lambda x, *_: x.t(),
    "Permute": lambda x, node, _: x.permute(saved(node, "dims")),
    "Neg": lambda x, *_: -x,
    "Mul": lambda x, node, which: x * saved(node, "self" if which else "other"),
    "Div": lambda x, node, _: x / saved(node, "other"),
}
"""Operations on one value, and functions that repeat them."""


def _without_constant(x: Tensor, node: Node, which: int) -> Tensor:
    """Return an addition's result from one of its two inputs, with 0 for the other."""
    name = operation(node)
    x = x * saved(node, "alpha") if which == (0 if name == "Rsub" else 1) else x
    return (-x if (name, which) in {("Sub", 1), ("Rsub", 0)} else x).expand(shape_of(node))


class Beside(NamedTuple):
    """A constant that an operation saved, and the value of the samples beside which it lies.

    Attributes:
        value: The value.
        constant: The constant, with the dimensions of the value.
        is_short: Whether the constant was given without the value's first dimension, and with another than one of
            size 1. Then it is no single sample's own, also in a batch of one sample.
    """

    value: Value
    constant: Tensor
    is_short: bool = False


def constants_beside(node: Node, depends: Dependence) -> Iterator[Beside]:
    """Yield the constants that an operation saved.

    What parameters alone decide is left out: it is trained, and no constant.

    The dimensions of a constant are those of the value, from the first on; any further ones are new in the result.
    """
    name = operation(node)
    inputs = depends.inputs(node)
    if not inputs or name not in TAKES_BESIDE | ALL_PRODUCTS | LABELLED | {"Index"}:
        return
    value = input_of(node, inputs[0])
    shape = value.shape
    if name == "Index":
        at = 0
        for index in saved(node, "indices"):
            used = 1
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                used = index.dim()
                yield Beside(value, index.view((1,) * at + index.shape + (1,) * (len(shape) - at - used)))
            at += used
        return
    if name in LABELLED:
        if (weights := saved(node, "weight")) is not None and len(shape) > 1:
            yield Beside(value, weights.view(1, -1, *[1] * (len(shape) - 2)), is_short=True)
        return
    beside = [one for one in saved_tensors(node) if one.dim() and not depends.holds(one)]
    for constant in [plain(one) for one in beside if not depends.is_trained_beside(node, one)]:
        is_short = constant.shape[0] != 1
        if name in TAKES_BESIDE:
            whole = shape if constant.shape == shape else torch.broadcast_shapes(shape, constant.shape)
            place = value if whole == shape else Value(node)
            lacking = len(whole) - constant.dim()
            yield Beside(place, constant[(None,) * lacking] if lacking else constant, is_short and lacking > 0)
        elif len(inputs) == 1 and constant.dim() == 1:
            yield Beside(value, constant.unsqueeze(0), is_short)
        elif len(inputs) == 1:
            left = inputs[0] == len(node.next_functions) - 2
            turned = constant if left else constant.mT
            is_batched = len(shape) < constant.dim()
            beside = turned if is_batched else turned.unsqueeze(-3 if left else -2)
            yield Beside(value, beside, is_short and constant.dim() == 2)


def adds_unseen(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation adds a constant that it does not save."""
    count, places = len(depends.inputs(node)), len(node.next_functions)
    is_list = operation(node) in JOINING  # a list of one tensor
    return operation(node) in ADDS_UNSEEN and (count < places or (places == 1 and not is_list))


def hides_constant(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation of an unknown kind takes a constant, of any size, that it may not save."""
    known = operation(node) in TAKES_BESIDE | ALL_PRODUCTS | ADDS_UNSEEN | _BESIDE_NOTHING
    return not known and 0 < len(depends.inputs(node)) < len(node.next_functions)


def is_affine(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation's result is an affine function of its inputs that depend on the samples."""
    return is_linear(node, depends) or (operation(node) in ADDS_UNSEEN and len(depends.inputs(node)) == 1)


def known_values(nodes: Sequence[Node], depends: Dependence) -> dict[Value, Tensor]:
    """Return the tensors of the samples' values that operations saved, or that saved tensors determine."""
    found, copied = dict[Value, Tensor](), dict[Value, Tensor]()
    for node in nodes:
        for tensor in saved_tensors(node):
            if depends.holds(tensor):
                value = Value.of(tensor)
                found[value] = tensor.detach()
                if value.operation == "Clone":  # the original was overwritten in place afterwards
                    copied[parents(value.node)[0]] = tensor.detach()
        if (again := _again(node)) is not None:
            found.setdefault(Value(node), again)
    return copied | found


def _again(node: Node) -> Tensor | None:
    """Compute an operation's result again with torch's function, if the operation saved all arguments; else None."""
    for function, names, tensors in _functions(operation(node)) if operation(node) not in _TAKEN else ():
        given = saved_all(node, names) if len(names) >= len(node.next_functions) else None
        if given is None or any(tensors[i] != isinstance(one, Tensor) for i, one in enumerate(given) if i in tensors):
            continue
        with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError, ValueError):
            named = zip(arguments_of(function), given, strict=True)
            keywords = {one.name: value for one, value in named if one.kwarg_only}
            found = function(*given[: len(given) - len(keywords)], **keywords)
            found = found[0] if isinstance(found, tuple) else found
            return found if isinstance(found, Tensor) and found.shape == shape_of(node) else None
    return None


_KINDS = {"Tensor", "number", "int", "float"}


@functools.cache
def _functions(name: str) -> list[tuple[Callable[..., Any], tuple[str, ...], Mapping[int, bool]]]:
    """Return the overloads of the torch function that an operation is named after.

    Returns:
        Each overload with the names of its arguments, and whether an argument is a tensor, by position, for those that
        are tensors or numbers.
    """
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    packets = [getattr(torch.ops.aten, one, None) for one in dict.fromkeys((name.lower(), words, f"{words}_forward"))]
    forms = [getattr(packet, form) for packet in packets if packet is not None for form in packet.overloads()]
    named = [
        (
            form,
            tuple(one.name for one in arguments_of(form)),
            {i: str(one.type) == "Tensor" for i, one in enumerate(arguments_of(form)) if str(one.type) in _KINDS},
        )
        for form in forms
    ]
    drawn = torch.Tag.nondeterministic_seeded
    return sorted([one for one in named if drawn not in one[0].tags], key=lambda one: -len(one[1]))


@dataclass(frozen=True)
class Bounds:
    """Intervals that contain numbers which are known up to rounding; infinite where a number is unknown.

    Attributes:
        low: Lower ends of the intervals.
        high: Upper ends of the intervals.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, values: Tensor, rounding: Tensor) -> "Bounds":
        """Return the bounds of values with some rounding; a NaN is unknown."""
        return cls.between(values - rounding, values + rounding)

    @classmethod
    def exactly(cls, values: Tensor) -> "Bounds":
        """Return the bounds of values that are known without rounding."""
        return cls(values, values)

    def widened(self, rounding: Tensor) -> "Bounds":
        """Return the bounds with a further rounding on each side."""
        return Bounds(self.low - rounding, self.high + rounding)

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> "Bounds":
        """Return bounds in these tensors, and change them in place: a NaN becomes infinite."""
        endless = torch.inf
        return cls(low.nan_to_num_(-endless, endless, -endless), high.nan_to_num_(endless, endless, -endless))

    def alike(self, dims: list[int]) -> "Bounds":
        """Return the common bounds of numbers that are equal along some dimensions."""
        return Bounds(self.low.amax(dims, keepdim=True), self.high.amin(dims, keepdim=True)) if dims else self

    def minus(self, values: Tensor) -> "Bounds":
        """Return the bounds of the differences from values, in float32 at least."""
        low = self.low.to(wide_of(self.low)) - values
        return Bounds(low, low if self.low is self.high else self.high.to(wide_of(self.high)) - values)

    def meets(self, other: "Bounds") -> bool:
        """Tell whether some numbers satisfy both bounds."""
        try:
            return self.within(other).are_possible
        except RuntimeError:  # the shapes differ
            return False

    @property
    def are_possible(self) -> bool:
        """True if there is a number in each of the intervals."""
        return not bool((self.low > self.high).any())

    def within(self, other: "Bounds") -> "Bounds":
        """Return the intersection with other bounds; a NaN bounds nothing."""
        return Bounds(torch.fmax(self.low, other.low), torch.fmin(self.high, other.high))

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The shape, with 1 for each dimension along which the numbers may be equal."""
        if not self.low.numel() or bool(self.low.max() <= self.high.min()):
            return [1] * self.low.dim()
        differ = [bool((self.low.amax(dim) > self.high.amin(dim)).any()) for dim in range(self.low.dim())]
        return [size if differs else 1 for size, differs in zip(self.low.shape, differ, strict=True)]

    @property
    def are_whole(self) -> bool:
        """True if all known numbers may be whole numbers."""
        return not bool(((self.middle - self.middle.round()).abs() > self.rounding).any())

    @property
    def are_of_two(self) -> bool:
        """True if the known numbers are two different ones, as a number times a mask has."""
        known = self.are_known
        if not bool(known.any()):
            return False
        middle, near = self.middle[known], 2 * self.rounding[known]
        least, most = middle - middle.min() <= near, middle.max() - middle <= near
        return bool((least | most).all()) and not bool(least.all())

    @property
    def holds_zero(self) -> bool:
        """True if all the numbers may be 0."""
        return not bool(((self.low > 0) | (self.high < 0)).any())

    @property
    def are_known(self) -> Tensor:
        """Mask of the numbers that are bounded on both sides."""
        return (self.low > -torch.inf) & (self.high < torch.inf)

    @property
    def middle(self) -> Tensor:
        """The middles of the bounds; infinite or NaN where a number is unknown."""
        return self.low if self.low is self.high else (self.low + self.high) / 2

    @property
    def rounding(self) -> Tensor:
        """Largest distance of each number from `middle`."""
        return (self.high - self.low) / 2


def wide_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor, or float32 if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def recovered(node: Node) -> Bounds:
    """Return bounds of the input of an operation of `WITH_RESULTS`, computed from its result.

    For `log_softmax` this is the result, from which the input differs by a number of each row. Else a whole interval of
    inputs gives the same rounded result. Where the function is flat, the interval is wide.
    """
    name, result = operation(node), saved(node, "result").detach()
    if name == "LogSoftmax":
        return Bounds.exactly(result)
    limits, wide, own = torch.finfo(result.dtype), result.to(wide_of(result)), INVERTIBLE[name]
    rounding = 16 * limits.eps * wide.abs() + limits.tiny
    one, other = (own.inverse(each.clamp(own.least, own.most)) for each in (wide - rounding, wide + rounding))
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    if name == "Relu":
        low = low.where(wide > 0, -math.inf)  # relu maps every number up to 0 to 0
    elif name == "Reciprocal":
        low, high = low.where(wide != 0, -math.inf), high.where(wide != 0, math.inf)
    return Bounds.between(low.to(result.dtype), high.to(result.dtype))


@dataclass(frozen=True)
class Added:
    """A constant that was added to known values, with the rounding of its computation.

    Attributes:
        difference: The value minus the result of the operations on the known values.
        each: The rounding of each element, if no larger intermediate values cancel.
        most: The rounding if larger intermediate values may cancel.
    """

    difference: Bounds
    each: Tensor
    most: Tensor

    @property
    def bounds(self) -> Bounds:
        """The bounds of the constant if larger intermediate values may cancel."""
        return self.difference.widened(self.most)


class AffineChains:
    r"""The chains of affine operations above known values, and the constants that these operations add.

    Args:
        known: The known tensors by their values; chains end there.
        depends: Tells which operations depend on the samples.
    """

    def __init__(self, known: Mapping[Value, Tensor], depends: Dependence) -> None:
        self.known, self._depends = known, depends
        self._below: dict[Value, list[Node]] = {}

    def below(self, value: Value) -> list[Node]:
        """Return the affine operations between a value and the nearest known values below it."""
        if value in self._below:
            return self._below[value]

        def ends(place: Value) -> bool:
            moves = place.operation in _TAKEN or is_affine(place.node, self._depends)
            return (place in self.known and place != value) or not moves

        places = walk([value], lambda place: () if ends(place) else self._depends.below(place.node))
        self._below[value] = [place.node for place in places if not ends(place)]
        return self._below[value]

    def nearest(self, value: Value) -> list[Value]:
        """Return the nearest values below a value, known or not, of which the value is an affine function."""
        nodes = dict.fromkeys(self.below(value))
        edges = dict.fromkeys([value, *[edge for node in nodes for edge in self._depends.below(node)]])
        return [edge for edge in edges if (edge in self.known and edge != value) or edge.node not in nodes]

    def add_unseen(self, value: Value) -> bool:
        """Tell whether a chain below a value adds a constant that is not saved."""
        return any(adds_unseen(node, self._depends) for node in self.below(value))

    def put_nothing_unseen(self, value: Value) -> bool:
        """Tell whether there is a chain below a value, and none of its operations may put in an unsaved constant."""
        depends, nodes = self._depends, self.below(value)
        puts = (operation(n) == "MaskedFill" or adds_unseen(n, depends) or hides_constant(n, depends) for n in nodes)
        return bool(nodes) and not any(puts)

    def retraced(self, value: Value, adds: bool = True) -> Tensor | None:
        """Repeat the operations from the nearest known value up to a value.

        Args:
            value: The value at the top of the chain.
            adds: Return None where an operation adds a constant; if False, leave the constant out.

        Returns:
            The result, which may be a view of the known value; None where an operation cannot be repeated.
        """
        steps, place = list[tuple[_Again, Node, int]](), value
        while place not in self.known or place == value:
            node, again = place.node, _RETRACED.get(place.operation)
            if not adds and place.operation in ADDITIONS:
                again = _without_constant
            inputs = self._depends.inputs(node)
            if len(inputs) != 1 or again is None or (inputs[0] and place.operation == "Div"):
                return None
            steps.append((again, node, inputs[0]))
            place = input_of(node, inputs[0])
        found = self.known[place]
        try:
            with torch.no_grad():
                for again, node, which in reversed(steps):
                    found = again(found, node, which)
        except (RuntimeError, TypeError, IndexError):
            return None
        meta = value.meta
        return found if (found.shape, found.dtype, found.device) == (value.shape, meta.dtype, meta.device) else None

    def constant_is_known(self, value: Value, ends: Container[Value]) -> bool:
        """Tell whether the constant in a value can be computed from known values, or the chain is inside the module.

        Args:
            value: The value.
            ends: The values that the module returned.

        Returns:
            The answer.
        """
        return all(edge in self.known or (edge.is_tap and edge not in ends) for edge in self.nearest(value))

    def added(self, value: Value, whole: Bounds) -> "Added | None":
        """Return the constant in a value; None if a value at the bottom of its chain is not known.

        Args:
            value: The value.
            whole: Bounds of the value's tensor, exact where an operation saved it.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        below, known = self.nearest(value), self.known
        if any(one not in known for one in below):
            return None
        if (linear := self.retraced(value, adds=False)) is None:
            linear = self._linear(value, whole.low, below)
        chain = self.below(value)
        kinds = {whole.low.dtype, *[known[one].dtype for one in below]}
        kinds |= {one.dtype for node in chain for one in input_metadata_of(node)}
        rounding = min(16, 2 + len(chain)) * max(torch.finfo(kind).eps for kind in kinds)
        linear = linear.to(wide_of(linear))
        each = whole.middle.to(linear).nan_to_num(0.0, 0.0, 0.0).abs_().add_(linear.abs()).mul_(rounding)
        most = torch.stack([each.max(), *[(rounding * known[one].abs().max()).to(each) for one in below]]).sum()
        is_one = sum(adds_unseen(node, self._depends) for node in chain) == 1
        if is_one and SUMMING.isdisjoint(map(operation, chain)):
            most = each  # no intermediate value was larger than the value
        return Added(whole.minus(linear), each, most)

    def _linear(self, value: Value, like: Tensor, below: Sequence[Value]) -> Tensor:
        """Return J x: the result of the operations on known values without added constants, by two backwards.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        cotangent = torch.zeros_like(like, requires_grad=True)
        with _reading(value, below):
            pulled = torch.autograd.grad(
                [GradientEdge(*value)],  # pyright: ignore[reportArgumentType]
                [GradientEdge(*one) for one in below],  # pyright: ignore[reportArgumentType]
                [cotangent],
                retain_graph=True,
                create_graph=True,
            )
            product = torch.stack([(self.known[one] * each).sum() for one, each in zip(below, pulled, strict=True)])
            return torch.autograd.grad(product.sum(), cotangent)[0]

    def where_added(self, part: Value, value: Value, constant: Bounds) -> Bounds:
        """Return the constant in a value as it was where an operation added it, in a part of the value.

        The operations above the part have selected and scaled elements. With their Jacobian :math:`J` and the constant
        c in the value, the constant in the part was

        .. math:: s = (J^T c) / (J^T J 1)

        where each element of c comes from one element of s, or from a plain sum of elements. An element of s that no
        element of c takes is unknown.

        Args:
            part: The result of the operation that added the constant.
            value: The value in which the constant is known.
            constant: The constant in the value.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        is_known = constant.are_known
        middle, rounding = (torch.where(is_known, one, 0.0) for one in (constant.middle, constant.rounding))
        factors = torch.where(is_known, self.reached(part, value), 0.0)
        with _reading(value, self.nearest(value)):
            weights, sums, errors = (_pulled(value, part, one) for one in (factors, middle, rounding * factors.sign()))
        found = (sums / weights).where(weights > 0, torch.nan)
        return Bounds.around(found, errors / weights + 16 * torch.finfo(found.dtype).eps * found.abs())

    def reached(self, part: Value, value: Value) -> Tensor:
        """Return the increase of each element of a value if the operation of a part adds 1 to that part.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        meta, inputs = value.meta, self._depends.inputs(part.node)
        one: Tensor | float = 1.0
        if part.operation == "Where" and len(inputs) == 1:  # 1 where the mask selects the constant
            mask = saved(part.node, "condition").broadcast_to(part.shape)
            one = (~mask if inputs == [0] else mask).to(meta.dtype)
        if part == value:
            return torch.ones(meta.shape, dtype=meta.dtype, device=meta.device) * one
        cotangent = torch.ones(meta.shape, dtype=meta.dtype, device=meta.device, requires_grad=True)
        with _reading(value, self.nearest(value)):
            pulled = _pulled(value, part, cotangent, again=True)
            return torch.autograd.grad((pulled * one).sum(), cotangent)[0]

    def summed_in(self, value: Value, constant: Tensor) -> Iterator[Tensor]:
        """Yield a constant in a value's shape: as it is, or summed like an operation below the value would."""
        shape = value.shape
        if constant.shape == shape:
            yield constant
        for node in self.below(value):
            sums = operation(node) in {"Sum", "Mean"} and parents(node)[0].shape == constant.shape
            if sums and (dims := dims_of(node)):
                summed = constant.sum(dims, keepdim=bool(saved(node, "keepdim")))
                if summed.shape == shape:
                    yield summed

    def parts_of(self, value: Value) -> list[Value]:
        """Return the results of operations below a value that add an unsaved constant, without the value itself."""
        nodes = dict.fromkeys(self.below(value))
        return [Value(node) for node in nodes if adds_unseen(node, self._depends) and node is not value.node]

    def is_weighed_and_summed(self, part: Value, value: Value, is_summed: bool) -> bool:
        """Tell whether a part of a value is weighted by several numbers, or selected from, and then summed.

        Args:
            part: The result of an operation that added a constant.
            value: The value in which the constant is known.
            is_summed: Whether the value itself is known up to a number of each row only, as before `log_softmax`.

        Returns:
            The answer.
        """
        nodes = {*self.below(value)}

        def below(node: Node) -> list[Node]:
            return [edge.node for edge in parents(node) if edge.node in nodes]

        def combine(node: Node, found: list[int]) -> int:
            """Return -1 where the part does not arrive, 0 unchanged, 1 weighted, 2 weighted and then summed."""
            name, state = operation(node), max(found, default=-1)
            if state >= 0 and (name in ALL_PRODUCTS or (name in SUMMING and state)):
                return 2
            weighs = not state and name in _WEIGHING and any(one.numel() > 1 for one in saved_tensors(node))
            return 1 if weighs else state

        return fold(value.node, below, combine, {part.node: 0}) >= (1 if is_summed else 2)


def _pulled(value: Value, part: Value, cotangent: Tensor, *, again: bool = False) -> Tensor:
    edges = [GradientEdge(*value)], [GradientEdge(*part)]
    [found] = torch.autograd.grad(*edges, [cotangent], retain_graph=True, create_graph=again)  # pyright: ignore
    return found


@contextlib.contextmanager
def _reading(value: Value, below: Sequence[Value]) -> Iterator[None]:
    """Let backwards in this block run from a value to known ones and no further, without the clipper's taps.

    Raises:
        Unreadable: If such a backward cannot be run.
    """
    # A known value may be a function of another known one: its node passes on no gradient.
    ends = [node.register_prehook(functools.partial(_without, number)) for node, number in below]
    try:
        kind = value.meta.device.type
        with torch.enable_grad(), torch.autocast(kind, enabled=False), silent_taps(value.node):
            yield
    except (RuntimeError, TypeError) as error:
        raise Unreadable(f"the constant that is added to values from {value.node.name()} cannot be read") from error
    finally:
        for end in ends:
            end.remove()


def _without(number: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of an operation's results, with 0 for result ``number``."""
    return tuple(torch.zeros_like(one) if i == number else one for i, one in enumerate(gradients))


def places_of(shape: Sequence[int], batch_size: int) -> list[int]:
    """Return the dimensions along which the samples may lie; 0 also if other dimensions are flattened into it."""
    return [
        dim
        for dim, size in enumerate(shape)
        if size == batch_size or (dim == 0 and size > batch_size and size % batch_size == 0)
    ]


def plain(constant: Tensor) -> Tensor:
    """Return a constant without its graph; one that needs no gradient as it is, which may be a view of a parameter."""
    return constant.detach() if constant.requires_grad else constant


def own_sizes(constant: Tensor) -> list[int]:
    """Return the sizes of a constant, 1 along expanded dimensions; dimensions of copied values keep their size."""
    return [1 if stride == 0 else size for size, stride in zip(constant.shape, constant.stride(), strict=True)]


def unrepeated(constant: Tensor) -> Tensor:
    """Return a view of a constant with one entry along each expanded dimension."""
    return constant[tuple(slice(size) for size in own_sizes(constant))]
