r"""Finds constants in a loss that lie along as many entries as there are samples, and are the same for each sample.

Outputs ``[B, T]`` beside targets ``[B]``: where T is B, PyTorch repeats the targets for every sample, along the wrong
dimension, and each value belongs to two samples. Most operations save such a constant. What ``Add``, ``Where`` and the
like put in is saved nowhere. Its value follows from values that are saved: let x be the values nearest below, and J
their Jacobian. The operations between are affine, so the constant is :math:`v - J x`.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.loss.loss_graph import (
    LABELLED,
    PRODUCTS,
    RESHAPING,
    Dependence,
    Unreadable,
    Value,
    dims_of,
    fold,
    input_of,
    is_linear,
    operation,
    operations,
    parents,
    saved,
    shape_of,
    signed,
    walk,
)
from gradguard.torch_private import arguments_of, input_metadata_of, saved_all, saved_tensors

TAKES_BESIDE = operations(
    "Mul Div Where MaskedFill MaskedSelect Pow Maximum Minimum Fmax Fmin Xlogy Atan2 Lerp Addcmul Addcdiv Clamp "
    "ClampMin ClampMax Dot MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits "
    "SoftMarginLoss Logaddexp Logaddexp2 SpecialXlog1Py NativeLayerNorm"
)
"""Operations whose constants are broadcast beside values."""

_PRODUCTS = PRODUCTS - {"Dot"} | operations("Addmm Baddbmm Addmv")
_ADDING_UNSEEN = operations("Add Sub Rsub Where Lerp Addcmul Addcdiv Addmm Baddbmm Addmv")
"""Affine operations that do not save what they add."""

_BESIDE_NOTHING = operations("Index CopySlices torch::autograd::CopySlices Convolution ConvolutionOverrideable")
"""Operations that choose or put values, whose constants lie beside none, and those that only a module may take."""

_TAKEN = operations(
    "Gather Take TakeAlongDim Topk Sort Max Min Amax Amin Median Kthvalue Cumsum Flip Roll Repeat Diagonal Tril Triu"
)
"""Operations that are linear once they have chosen what they take, beside those that a loss is read through."""

_WEIGHING = operations("Mul Div Where MaskedFill Index Gather TakeAlongDim")
_SUMMING = operations("Sum Mean Nansum Cumsum")

INVERTIBLE: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "Exp": (torch.exp, torch.log), "Sigmoid": (torch.sigmoid, torch.logit), "Tanh": (torch.tanh, torch.atanh),
    "Sqrt": (torch.sqrt, torch.square), "Relu": (torch.relu, torch.clone),
    "Reciprocal": (torch.reciprocal, torch.reciprocal),
}  # fmt: skip
"""Operations that save their results alone, each of which rises or falls throughout: the function, its inverse."""

_RANGES = {"Exp": (0.0, math.inf), "Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Sqrt": (0.0, math.inf)}
"""The results that operations have, where there are others."""


_Again = Callable[[Tensor, Node, int], Tensor]
"""Does an operation again, of a value that is its only one of the samples, and which of its inputs that is."""

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
    "Permute": lambda x, node, _: x.permute([signed(dim) for dim in saved(node, "dims")]),
    "Neg": lambda x, *_: -x,
    "Mul": lambda x, node, which: x * saved(node, "self" if which else "other"),
    "Div": lambda x, node, _: x / saved(node, "other"),
}
"""Operations on one value, and how they are done again."""


def _without_constant(x: Tensor, node: Node, which: int) -> Tensor:
    """Return what an addition makes of one of its two inputs alone."""
    name = operation(node)
    x = x * saved(node, "alpha") if which == (0 if name == "Rsub" else 1) else x
    return (-x if (name, which) in {("Sub", 1), ("Rsub", 0)} else x).expand(shape_of(node))


def constants_beside(node: Node, depends: Dependence) -> Iterator[tuple[Value, Tensor]]:
    """Yield the constants that an operation saved, each with the value of the samples that it lies beside.

    Dimensions of a constant are those of the value, from the first on; more of them are new in the result.
    """
    name = operation(node)
    inputs = depends.inputs(node)
    if not inputs or name not in TAKES_BESIDE | _PRODUCTS | LABELLED | {"Index"}:
        return
    value = input_of(node, inputs[0])
    shape = value.shape
    if name == "Index":
        at = 0
        for index in saved(node, "indices"):
            used = 1
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                used = index.dim()
                yield value, index.view((1,) * at + index.shape + (1,) * (len(shape) - at - used))
            at += used
        return
    if name in LABELLED:
        if (weights := saved(node, "weight")) is not None and len(shape) > 1:
            yield value, weights.view(1, -1, *[1] * (len(shape) - 2))
        return
    for constant in (one for one in saved_tensors(node) if not one.requires_grad and one.dim()):
        if name not in _PRODUCTS:
            whole = shape if constant.shape == shape else torch.broadcast_shapes(shape, constant.shape)
            place = value if whole == shape else Value(node)
            yield place, constant[(None,) * (len(whole) - constant.dim())] if constant.dim() < len(whole) else constant
        elif len(inputs) == 1 and constant.dim() == 1:
            yield value, constant.unsqueeze(0)
        elif len(inputs) == 1:
            left = inputs[0] == len(node.next_functions) - 2
            turned = constant if left else constant.mT
            yield value, turned if len(shape) < constant.dim() else turned.unsqueeze(-3 if left else -2)


def adds_unseen(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation adds a constant that it does not save."""
    count, places = len(depends.inputs(node)), len(node.next_functions)
    return operation(node) in _ADDING_UNSEEN and (count < places or places == 1)


def hides_constant(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation takes a constant of any size that it need not save, in a way that is not known."""
    known = operation(node) in TAKES_BESIDE | _PRODUCTS | _ADDING_UNSEEN | _BESIDE_NOTHING
    return not known and 0 < len(depends.inputs(node)) < len(node.next_functions)


def is_affine(node: Node, depends: Dependence) -> bool:
    """Tell whether a value is a linear function of one value of the samples, or of several, and a constant."""
    return is_linear(node, depends) or (operation(node) in _ADDING_UNSEEN and len(depends.inputs(node)) == 1)


def known_values(nodes: Sequence[Node]) -> dict[Value, Tensor]:
    """Return the values of the samples that operations saved or that follow from these, by where they were computed."""
    found, copied = dict[Value, Tensor](), dict[Value, Tensor]()
    for node in nodes:
        for tensor in saved_tensors(node):
            if tensor.requires_grad:
                value = Value.of(tensor)
                found[value] = tensor.detach()
                if value.operation == "Clone":  # of what an operation in place has written over
                    copied[parents(value.node)[0]] = tensor.detach()
        if (again := _again(node)) is not None:
            found.setdefault(Value(node), again)
    return copied | found


def _again(node: Node) -> Tensor | None:
    """Return the result of a function of torch's where the operation saved all that it takes."""
    for function, names, tensors in _functions(operation(node)) if operation(node) not in _TAKEN else ():
        given = saved_all(node, names) if len(names) >= len(node.next_functions) else None
        if given is None or any(tensors[i] != isinstance(one, Tensor) for i, one in enumerate(given) if i in tensors):
            continue
        with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError, ValueError):
            values = [_signed(one) for one in given]
            named = zip(arguments_of(function), values, strict=True)
            keywords = {one.name: value for one, value in named if one.kwarg_only}
            found = function(*values[: len(values) - len(keywords)], **keywords)
            found = found[0] if isinstance(found, tuple) else found
            return found if isinstance(found, Tensor) and found.shape == shape_of(node) else None
    return None


def _signed(value: Any) -> Any:
    """Return what a node saved as it was given: whole numbers below 0 are kept as unsigned ones."""
    if isinstance(value, list | tuple):
        return [_signed(one) for one in value]
    return signed(value) if type(value) is int else value


_KINDS = {"Tensor", "number", "int", "float"}


@functools.cache
def _functions(name: str) -> list[tuple[Callable[..., Any], tuple[str, ...], Mapping[int, bool]]]:
    """Return the forms of torch's function that an operation is called after.

    Returns:
        Each with the names of its arguments, and which of them are tensors or numbers.
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
    """Numbers that are known but for rounding, or not at all.

    Attributes:
        low: The least that they may be.
        high: The most.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, values: Tensor, rounding: Tensor) -> "Bounds":
        """Return those of values, of which NaN are not known."""
        return cls.between(values - rounding, values + rounding)

    @classmethod
    def exactly(cls, values: Tensor) -> "Bounds":
        """Return the bounds of values that are known without rounding."""
        return cls(values, values)

    def widened(self, rounding: Tensor) -> "Bounds":
        """Return those of numbers that are known less exactly."""
        return Bounds(self.low - rounding, self.high + rounding)

    @classmethod
    def between(cls, low: Tensor, high: Tensor) -> "Bounds":
        """Return bounds in these tensors, which are changed: NaN bounds nothing."""
        endless = torch.inf
        return cls(low.nan_to_num_(-endless, endless, -endless), high.nan_to_num_(endless, endless, -endless))

    def alike(self, dim: int) -> "Bounds":
        """Return those of the numbers along a dimension, which are the same."""
        return Bounds(self.low.amax(dim, keepdim=True), self.high.amin(dim, keepdim=True))

    def minus(self, values: Tensor) -> "Bounds":
        """Return the bounds of the differences from values, in float32 at least."""
        low = self.low.to(_wide(self.low)) - values
        return Bounds(low, low if self.low is self.high else self.high.to(_wide(self.high)) - values)

    def meets(self, other: "Bounds") -> bool:
        """Tell whether the same numbers may be within both."""
        try:
            both = self.within(other)
        except RuntimeError:  # of other shapes
            return False
        return not bool((both.low > both.high).any())

    def within(self, other: "Bounds") -> "Bounds":
        """Return the bounds of numbers that are within both; NaN bounds nothing."""
        return Bounds(torch.fmax(self.low, other.low), torch.fmin(self.high, other.high))

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The sizes, 1 where numbers along a dimension may be the same."""
        if not self.low.numel() or bool(self.low.max() <= self.high.min()):
            return [1] * self.low.dim()
        differ = [bool((self.low.amax(dim) > self.high.amin(dim)).any()) for dim in range(self.low.dim())]
        return [size if differs else 1 for size, differs in zip(self.low.shape, differ, strict=True)]

    @property
    def are_whole(self) -> bool:
        """Whether all that are known may be whole numbers."""
        return not bool(((self.middle - self.middle.round()).abs() > self.rounding).any())

    @property
    def holds_zero(self) -> bool:
        """Whether all the numbers may be 0."""
        return not bool(((self.low > 0) | (self.high < 0)).any())

    @property
    def are_known(self) -> Tensor:
        """Which of the numbers have two bounds."""
        return (self.low > -torch.inf) & (self.high < torch.inf)

    @property
    def middle(self) -> Tensor:
        """The numbers; NaN where they are not known."""
        return self.low if self.low is self.high else (self.low + self.high) / 2

    @property
    def rounding(self) -> Tensor:
        """How far the numbers may be from `middle`."""
        return (self.high - self.low) / 2


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def recovered(node: Node) -> Bounds:
    """Return the value that an operation of `INVERTIBLE` took, as it follows from the result.

    A rounded result is that of all values between two: what it does not show, as where a function is flat, is within.
    """
    name, result = operation(node), saved(node, "result").detach()
    limits, wide, inverse = torch.finfo(result.dtype), result.to(_wide(result)), INVERTIBLE[name][1]
    rounding = 16 * limits.eps * wide.abs() + limits.tiny
    least, most = _RANGES.get(name, (-math.inf, math.inf))
    one, other = (inverse(each.clamp(least, most)) for each in (wide - rounding, wide + rounding))
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    if name == "Relu":
        low = low.where(wide > 0, -math.inf)  # what it leaves out is at most 0
    elif name == "Reciprocal":
        low, high = low.where(wide != 0, -math.inf), high.where(wide != 0, math.inf)
    return Bounds.between(low.to(result.dtype), high.to(result.dtype))


@dataclass(frozen=True)
class Added:
    """A constant that was added to known values, and how far it may be from what was added.

    Attributes:
        difference: The value less what the operations make of the known ones.
        each: The rounding of each element, where its parts do not cancel.
        most: The rounding where they do.
    """

    difference: Bounds
    each: Tensor
    most: Tensor

    @property
    def bounds(self) -> Bounds:
        """The bounds of the constant, where its parts may cancel."""
        return self.difference.widened(self.most)


class AffineChains:
    r"""The affine operations from known values on, and the constants that they add.

    Args:
        known: The values that are known, through which nothing is followed.
        depends: Knows which values depend on the samples.
    """

    def __init__(self, known: Mapping[Value, Tensor], depends: Dependence) -> None:
        self.known, self._depends = known, depends

    def below(self, value: Value) -> list[Node]:
        """Return the affine operations from a value to the known ones that are nearest."""

        def ends(place: Value) -> bool:
            moves = place.operation in _TAKEN or is_affine(place.node, self._depends)
            return (place in self.known and place != value) or not moves

        places = walk([value], lambda place: () if ends(place) else self._depends.below(place.node))
        return [place.node for place in places if not ends(place)]

    def nearest(self, value: Value) -> list[Value]:
        """Return the nearest values that a value is an affine function of."""
        nodes = dict.fromkeys(self.below(value))
        edges = dict.fromkeys([value, *[edge for node in nodes for edge in self._depends.below(node)]])
        return [edge for edge in edges if (edge in self.known and edge != value) or edge.node not in nodes]

    def add_unseen(self, value: Value) -> bool:
        """Tell whether a constant that is not saved was added to a value, or to one that it is a function of."""
        return any(adds_unseen(node, self._depends) for node in self.below(value))

    def put_nothing_unseen(self, value: Value) -> bool:
        """Tell whether operations made a value of known ones, none of which may put in what it does not save."""
        depends, nodes = self._depends, self.below(value)
        puts = (operation(n) == "MaskedFill" or adds_unseen(n, depends) or hides_constant(n, depends) for n in nodes)
        return bool(nodes) and not any(puts)

    def retraced(self, value: Value, adds: bool = True) -> Tensor | None:
        """Return what the operations make of the nearest known value, when done again; None where that is not known.

        Args:
            value: Where they lead to.
            adds: None, too, where one adds a constant; else it is left out.

        Returns:
            The result, which may be a view of the known value.
        """
        steps, place = list[tuple[_Again, Node, int]](), value
        while place not in self.known or place == value:
            node, again = place.node, _RETRACED.get(place.operation)
            if not adds and place.operation in {"Add", "Sub", "Rsub"}:
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

    def are_told(self, value: Value, ends: Container[Value]) -> bool:
        """Tell whether what was added to a value follows from known values, or lies within the module.

        Args:
            value: Where it was computed.
            ends: The values that the module returned.

        Returns:
            Whether it is so.
        """
        return all(edge in self.known or (edge.is_tap and edge not in ends) for edge in self.nearest(value))

    def added(self, value: Value, whole: Bounds) -> "Added | None":
        """Return the constant in a value; None if it cannot be told.

        Args:
            value: Where it was computed.
            whole: The value, without rounding where an operation saved it.

        Raises:
            Unreadable: If a backward from there cannot be run.
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
        linear = linear.to(_wide(linear))
        each = whole.middle.to(linear).nan_to_num(0.0, 0.0, 0.0).abs_().add_(linear.abs()).mul_(rounding)
        most = torch.stack([each.max(), *[(rounding * known[one].abs().max()).to(each) for one in below]]).sum()
        is_one = sum(adds_unseen(node, self._depends) for node in chain) == 1
        if is_one and _SUMMING.isdisjoint(map(operation, chain)):
            most = each  # nothing that is larger than the value has been there
        return Added(whole.minus(linear), each, most)

    def _linear(self, value: Value, like: Tensor, below: Sequence[Value]) -> Tensor:
        """Return what the operations make of known values but for the constants that they add, by derivatives.

        Raises:
            Unreadable: If a backward from there cannot be run.
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
        """Return the constant in a value as it was where an operation added it to a part of the value.

        Operations since then have chosen and scaled elements. With :math:`J` for what they do, the constant c was

        .. math:: s = (J^T c) / (J^T J 1)

        where each of its elements comes from one of s, or from a plain sum of them. What no element takes is not known.

        Args:
            part: Where it was added.
            value: Where it is seen.
            constant: As it is there.

        Raises:
            Unreadable: If a backward from there cannot be run.
        """
        is_known = constant.are_known
        middle, rounding = (torch.where(is_known, one, 0.0) for one in (constant.middle, constant.rounding))
        factors = torch.where(is_known, self.reached(part, value), 0.0)
        with _reading(value, self.nearest(value)):
            weights, sums, errors = (_pulled(value, part, one) for one in (factors, middle, rounding * factors.sign()))
        found = (sums / weights).where(weights > 0, torch.nan)
        return Bounds.around(found, errors / weights + 16 * torch.finfo(found.dtype).eps * found.abs())

    def reached(self, part: Value, value: Value) -> Tensor:
        """Return what each element of a value gains where 1 is added to a part of it by the operation of the part.

        Raises:
            Unreadable: If a backward from there cannot be run.
        """
        meta, inputs = value.meta, self._depends.inputs(part.node)
        one: Tensor | float = 1.0
        if part.operation == "Where" and len(inputs) == 1:  # where the mask takes the constant
            mask = saved(part.node, "condition").broadcast_to(part.shape)
            one = (~mask if inputs == [0] else mask).to(meta.dtype)
        if part == value:
            return torch.ones(meta.shape, dtype=meta.dtype, device=meta.device) * one
        cotangent = torch.ones(meta.shape, dtype=meta.dtype, device=meta.device, requires_grad=True)
        with _reading(value, self.nearest(value)):
            pulled = _pulled(value, part, cotangent, again=True)
            return torch.autograd.grad((pulled * one).sum(), cotangent)[0]

    def summed_in(self, value: Value, constant: Tensor) -> Iterator[Tensor]:
        """Yield a constant, as it is or as an operation before a value would sum it up, in the value's shape."""
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
        """Return the values that an operation has added an unseen constant to, and others have changed since."""
        nodes = dict.fromkeys(self.below(value))
        return [Value(node) for node in nodes if adds_unseen(node, self._depends) and node is not value.node]

    def is_weighed_and_summed(self, part: Value, value: Value, is_summed: bool) -> bool:
        """Tell whether a part of a value is multiplied by several numbers, or chosen from, and that is added up.

        Args:
            part: Where something was added.
            value: Where it is seen.
            is_summed: Whether the value itself is known but for a sum, as where it is normalized.

        Returns:
            Whether it is so.
        """
        nodes = {*self.below(value)}

        def below(node: Node) -> list[Node]:
            return [edge.node for edge in parents(node) if edge.node in nodes]

        def combine(node: Node, found: list[int]) -> int:
            """-1 of what the part does not reach, 0 where it is as it was, 1 where weighed, 2 where summed since."""
            name, state = operation(node), max(found, default=-1)
            if state >= 0 and (name in _PRODUCTS or (name in _SUMMING and state)):
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
    """Run backwards from a value to known ones and no further, with nothing of the user's called.

    Raises:
        Unreadable: If one cannot be run.
    """
    ends = [node.register_prehook(functools.partial(_without, number)) for node, number in below]
    try:
        kind = value.meta.device.type
        with torch.enable_grad(), torch.autocast(kind, enabled=False), silent_taps(value.node):
            yield
    except (RuntimeError, TypeError) as error:
        raise Unreadable(f"what is added to values from {value.node.name()} cannot be read") from error
    finally:
        for end in ends:  # a known value may be a function of another one
            end.remove()


def _without(number: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of an operation's results, 0 for one of them."""
    return tuple(torch.zeros_like(one) if i == number else one for i, one in enumerate(gradients))


def places_of(shape: Sequence[int], batch_size: int) -> list[int]:
    """Return the dimensions along which the samples may lie; 0 also where others are flattened into it."""
    return [
        dim
        for dim, size in enumerate(shape)
        if size == batch_size or (dim == 0 and size > batch_size and size % batch_size == 0)
    ]


def own_sizes(constant: Tensor) -> list[int]:
    """Return the sizes of a constant, 1 where it is repeated; copies of values count."""
    return [1 if stride == 0 else size for size, stride in zip(constant.shape, constant.stride(), strict=True)]


def unrepeated(constant: Tensor) -> Tensor:
    """Return a constant with one of the values that it repeats along a dimension."""
    return constant[tuple(slice(size) for size in own_sizes(constant))]
