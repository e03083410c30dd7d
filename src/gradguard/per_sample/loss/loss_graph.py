"""The roots of a backward, and how the autograd graph between there and the module's outputs is read.

The user computes the loss where nobody looks, and it cannot be computed again. But while its graph is alive each node
says what operation it is, and, called with a gradient, what it passes on.
"""

import functools
import hashlib
import math
import re
import threading
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradguard.tensors.layout import wide_dtype
from gradguard.torch_private import (
    Backward,
    call_before_backwards,
    current_graph_task,
    input_metadata_of,
    saved_constant,
    saved_settings,
    saved_value,
)


def operations(names: str) -> frozenset[str]:
    """Return the names of operations, written one after the other."""
    return frozenset(names.split())


# What operations do to the rows of the samples, each in one line.

ELEMENTWISE = operations("Add Sub Rsub Neg Mul Div Clone Alias ToCopy CopyBackwards Where MaskedFill Expand")
"""Linear operations that leave every element in its place, broadcast at most."""

RESHAPING = operations("View UnsafeView ReshapeAlias Squeeze Unsqueeze")
TURNING = operations("Permute Transpose T")
JOINING = operations("Stack Cat")
TAKING = operations("Select Slice Unbind Split SplitWithSizes UnsafeSplit")
"""Operations that take places along a dimension, which their settings, or the numbers of their results, tell."""

SELECTING = operations("Index IndexSelect MaskedSelect")
"""Operations that choose rows by a tensor."""

MOVING = RESHAPING | TURNING | JOINING | TAKING | SELECTING
"""Linear operations that move elements, or choose some."""

MEANS = frozenset(["Mean"])
PRODUCTS = operations("Dot Mv Mm Bmm")
ADDING = PRODUCTS | operations("Sum Nansum")
"""Linear operations that add elements up."""

LABELLED = frozenset(["NllLoss", "NllLoss2D"])
"""Losses with a label in each row, which may be missing."""

_WEIGHTING = PRODUCTS | operations("Mul Div Where MaskedFill")
"""Linear operations whose factors, or choice of elements, are tensors of the user's."""

_LINEAR = ELEMENTWISE | MOVING | MEANS | ADDING
_OPERATION = re.compile(r"(\w+?)Backward\d*")  # with a number unless it is a function of somebody's own, or compiled
_TOO_MANY = 5_000
_Place = TypeVar("_Place", bound=Hashable)
_Found = TypeVar("_Found")


Verdict = Literal["right", "wrong", "unknown", "unverified"]


class Refused(Exception):  # noqa: N818
    """A loss may be something else than it is said to be; the message says why. It never leaves this package.

    Args:
        words: Why.
        factors: Each sample's part in it, as a multiple of its own loss [B], if that is known.
    """

    verdict: Verdict = "unknown"

    def __init__(self, words: str, factors: Tensor | None = None) -> None:
        super().__init__(words)
        self.factors = factors


class Unreadable(Refused):
    """The graph cannot be followed."""

    verdict = "unverified"


class Coupled(Refused):
    """The loss is no sum, or mean, of the samples' own."""

    verdict = "wrong"


class Value(NamedTuple):
    """A value in the graph: one of the results of an operation, whose node autograd has put there."""

    node: Node
    number: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Value":
        """Return where a tensor was computed."""
        edge = get_gradient_edge(tensor)
        return cls(edge.node, edge.output_nr)

    @property
    def meta(self) -> Any:
        """Its shape, dtype and device."""
        return input_metadata_of(self.node)[self.number]

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return torch.Size(self.meta.shape)

    @property
    def operation(self) -> str:
        """The operation that it is a result of; see `operation`."""
        return operation(self.node)

    @property
    def is_tap(self) -> bool:
        """Whether it is a value of the module that the clipper sees: what lies behind it is the module's."""
        return is_tap(self.node)


class Root(NamedTuple):
    """A value that a backward starts from, and the gradient that it starts with."""

    value: Value
    gradient: Tensor


class BackwardRoots:
    """Calls ``look`` with the roots of each backward that this thread is about to run, from `start` to `stop`.

    A backward within a backward, as checkpoints run it, is not one that a loss begins; `torch.autograd.grad` is none.
    """

    def __init__(self, look: Callable[[list[Root]], None]) -> None:
        self._look = look
        self._thread = 0
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin, or go on with this thread."""
        self._thread = threading.get_ident()
        if self._end is not None:
            return
        found = weakref.ref(self, lambda _: end())  # a clipper that is dropped between forward and backward is freed

        def begins(backward: Backward) -> None:
            own = found()
            if own is None or not backward.accumulates or current_graph_task() != -1:
                return
            if threading.get_ident() != own._thread:
                return
            roots = list[Root]()
            for tensor, grad in zip(backward.roots, backward.gradients, strict=True):
                if grad is None or not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    return  # the engine refuses it, or it does not start from tensors
                roots.append(Root(Value.of(tensor), grad.detach()))
            if roots:
                own._look(roots)

        end = self._end = call_before_backwards(begins)

    def stop(self) -> None:
        """End; again does nothing."""
        if self._end is not None:
            self._end()
            self._end = None


class Make(NamedTuple):
    """How a loss is computed, and the numbers that decide what each sample's share in it is.

    Attributes:
        kind: The names of the operations, but of those that are there in some batches only, as where a part is all.
        structure: A digest of their settings and shapes, too; None if data decide which samples an operation puts
            together.
        numbers: The scalars by which values are multiplied or divided.
        labelled: The operations that take labels, of which some may be missing.
    """

    kind: tuple[str, ...] = ()
    structure: bytes | None = None
    numbers: tuple[float, ...] = ()
    labelled: tuple[Node, ...] = ()


def make_of(roots: Sequence[Root], ends: Container[Value]) -> Make:
    """Return how a loss is computed from ``ends``, the values of samples that the module returned.

    A loss that the module itself returns is followed to the layers inside. Tensors by which values are multiplied, and
    labels, are not looked at: the next batch changes them.
    """
    places: dict[Node, int] = {}
    pending: list[Node] = []

    def told_of(node: Node | None, number: int) -> Any:
        """Return a value's number among the nodes, or its shape where samples begin."""
        if node is None:
            return None
        value = Value(node, number)
        if value in ends or (value.is_tap and value.shape):
            return "output", tuple(value.shape)
        if node not in places:
            places[node] = len(places)
            pending.append(node)
        return places[node], number

    told: list[Any] = [(_shown(root.gradient) if root.gradient.dim() else None) for root in roots]
    told += [told_of(*root.value) for root in roots]
    numbers = [float(root.gradient) for root in roots if not root.gradient.dim()]
    labelled: list[Node] = []
    by_data = False
    while pending:
        if len(places) > _TOO_MANY:
            return Make()
        node = pending.pop()
        by_data = by_data or _is_by_data(node)
        if operation(node) in LABELLED:
            labelled.append(node)
        numbers += scalars(node)
        # The name, the shapes, and what decides how it puts elements together.
        own: list[Any] = [node.name(), [tuple(one.shape) for one in input_metadata_of(node)]]
        own += [(name, _shown(value)) for name, value in saved_settings(node).items()]
        if hasattr(node, "saved_tensors"):  # a function of the user's: the class, and what it keeps
            held = {name: _shown(value) for name, value in sorted(getattr(node, "__dict__", {}).items())}
            own += [id(type(node)), held]
        elif operation(node) in LABELLED:
            own.append(saved_constant(node, "weight") is None)
        told += [own, [told_of(*edge) for edge in node.next_functions]]
    structure = None if by_data else hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
    kind = tuple(sorted({node.name() for node in places if operation(node) not in _NOT_TELLING}))
    return Make(kind, structure, tuple(numbers), tuple(labelled))


def data_put_rows(node: Node) -> bool:
    """Tell whether an operation puts rows, or adds them up, where tensors of the user's say."""
    return operation(node) not in _CHOOSING_ROWS and _is_by_data(node)


def data_choose_rows(nodes: Iterable[Node]) -> bool:
    """Tell whether operations take rows that tensors of the user's decide, and put none in between."""
    names, by_data = set[str](), set[str]()
    for node in nodes:
        names.add(node.name())
        if _is_by_data(node):
            by_data.add(operation(node))
    fills = any("CopySlices" in name or "Pad" in name for name in names)
    return bool(by_data) and not fills and by_data <= _CHOOSING_ROWS


def scalars(node: Node) -> list[float]:
    """Return the scalars by which a node multiplies or divides values that have a gradient."""
    name = operation(node)
    if name in {"Add", "Sub", "Rsub"}:
        return [float(saved_constant(node, "alpha"))]
    if name not in {"Mul", "Div"} or all(child is not None for child, _ in node.next_functions):
        return []
    which = 0 if len(node.next_functions) == 1 or node.next_functions[0][0] is not None else 1
    try:
        constant, _ = _multiplier(node, which)
    except Unreadable:
        return [math.nan]  # equal to no number, so that the loss is read again
    return [] if constant is None else [constant.value]


_NOT_TELLING = operations("Slice Alias Clone View UnsafeView ReshapeAlias")
"""Operations that come and go with the sizes of a batch."""

_LOOPED = _NOT_TELLING | MOVING - {"IndexSelect"} | {"Expand"}
"""Operations that put the samples' values elsewhere, of which a loop over samples has others than a matrix."""

_BY_INDEX = operations(
    "IndexSelect Gather IndexAdd IndexCopy IndexFill Scatter ScatterAdd ScatterReduce IndexReduce TakeAlongDim"
)
_CHOOSING_ROWS = SELECTING | operations("Gather Take TakeAlongDim")
_BY_POSITION = operations("Index IndexPut IndexPutImpl MaskedSelect Take Put MaskedScatter")


def _is_by_data(node: Node) -> bool:
    """Whether tensors of the user's decide what an operation takes along any dimension but the last."""
    name = operation(node)
    if name in _BY_POSITION:
        try:
            indices = saved_value(node, "indices")
        except (AttributeError, RuntimeError):
            return True
        return not (isinstance(indices, Sequence) and len(indices) > 0 and indices[0] is None)
    if name not in _BY_INDEX:
        return False
    shape, dim = shape_of(node), saved_constant(node, "dim")
    if not isinstance(dim, int) or len(shape) < 2:
        return True
    return signed(dim) % len(shape) != len(shape) - 1


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.numel() or value.is_complex() or value.dtype is torch.bool:
            return tuple(value.shape)
        low, high = value.detach().aminmax()
        return tuple(value.shape), float(low), float(high)
    return (
        value if isinstance(value, int | float | str | bool | tuple | list) or value is None else type(value).__name__
    )


def is_tap(node: Node) -> bool:
    """Tell whether a node is one by which the clipper sees a value of the module."""
    return node.name() == "TapBackward"


def operation(node: Node) -> str:
    """Return the operation of a node, ``"Mul"`` for ``MulBackward0``; a custom function's node has its whole name."""
    name = node.name()
    return name if hasattr(node, "saved_tensors") else _without_backward(name)


@functools.cache
def _without_backward(name: str) -> str:
    match = _OPERATION.fullmatch(name)
    return match[1] if match else name


def saved(node: Node, name: str) -> Any:
    """Return what the forward operation of a node saved; whole numbers with their sign.

    Raises:
        Unreadable: If it is gone, because a backward has freed the graph, or was never there.
    """
    try:
        value = saved_value(node, name)
    except (AttributeError, RuntimeError) as error:
        raise Unreadable(f"what {node.name()} saved cannot be read ({str(error).split('.')[0]})") from error
    return signed(value) if type(value) is int else value


def signed(dim: int) -> int:
    """Return a number that a node saved: it keeps dimensions that are counted from the end as unsigned numbers."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def dims_of(node: Node) -> list[int] | None:
    """The dimensions along which an operation works; None for all."""
    dims = saved_constant(node, "dim")
    if dims is None or isinstance(dims, float) or (isinstance(dims, Sequence) and not dims):
        return None
    return [signed(dim) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def shape_of(node: Node) -> torch.Size:
    """Return the shape of an operation's first result."""
    return Value(node).shape


def parents(node: Node) -> list[Value]:
    """Return the values that a node was computed from, without those that need no gradient."""
    return [Value(child, number) for child, number in node.next_functions if child is not None]


def input_of(node: Node, which: int) -> Value:
    """Return an input of a node that needs a gradient."""
    child, number = node.next_functions[which]
    if child is None:
        raise Unreadable(f"input {which} of {node.name()} needs no gradient")
    return Value(child, number)


def pull(value: Value, which: int, gradient: Tensor) -> Tensor:
    """Return what a linear operation passes on to its input ``which``, for a gradient of its result.

    Raises:
        Unreadable: If its backward operation cannot be called.
    """
    if value.operation in {"ToCopy", "CopyBackwards", "Clone", "Alias"}:  # a cast would round
        return gradient
    try:
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            try:
                passed = _called(value, which, gradient)
            except RuntimeError:  # some take their own dtype alone: four parts of it hold some 30 bits
                parts, left = list[Tensor](), gradient
                for _ in range(4):
                    part = left.to(value.meta.dtype)
                    parts.append(_called(value, which, part).to(gradient))
                    left = left - part.to(left)
                passed = torch.stack(parts).sum(0)
            shape = input_of(value.node, which).shape
            return passed.to(gradient).sum_to_size(shape)  # the engine does this where forward has broadcast
    except (RuntimeError, TypeError, AttributeError) as error:
        words = str(error).split(".")[0]
        raise Unreadable(f"what {value.node.name()} passes on cannot be read ({words})") from error


def _called(value: Value, which: int, gradient: Tensor) -> Tensor:
    grads: list[Tensor | None] = [None] * len(input_metadata_of(value.node))
    grads[value.number] = gradient
    passed: Any = value.node(*grads)  # type: ignore[operator]
    return passed[which] if isinstance(passed, tuple | list) else passed


def walk(starts: Iterable[_Place], onward: Callable[[_Place], Iterable[_Place]]) -> Iterator[_Place]:
    """Yield the places that are reached from ``starts``, each once and before those behind it."""
    pending = [*starts]
    seen = {*pending}
    while pending:
        yield (place := pending.pop())
        new = [one for one in dict.fromkeys(onward(place)) if one not in seen]
        seen.update(new)
        pending += new


def fold(
    start: _Place,
    below: Callable[[_Place], Iterable[_Place]],
    combine: Callable[[_Place, list[_Found]], _Found],
    known: dict[_Place, _Found],
) -> _Found:
    """Return what a place is found to be by what is found of the places below it, and so on down.

    Args:
        start: The place.
        below: Gives the places that one follows from.
        combine: Gives what is found of a place, by what was found of those below.
        known: The places that are found already; the rest is added.
    """
    pending = [start]
    while pending:
        top = pending[-1]
        places = () if top in known else [*below(top)]
        if unknown := [place for place in places if place not in known]:
            pending += unknown
            continue
        if top not in known:
            known[top] = combine(top, [known[place] for place in places])
        pending.pop()
    return known[start]


class Dependence:
    """Knows which values depend on the samples: those with a tap behind them."""

    def __init__(self) -> None:
        self._known: dict[Node, bool] = {}

    def __call__(self, node: Node) -> bool:
        """Tell whether an operation's results depend on the samples."""
        return fold(node, _nodes_below, lambda top, found: is_tap(top) or any(found), self._known)

    def below(self, node: Node) -> list[Value]:
        """Return the values of the samples that a node was computed from."""
        return [value for value in parents(node) if self(value.node)]

    def inputs(self, node: Node) -> list[int]:
        """Return the places of these values among the inputs of the node."""
        return [k for k, (child, _) in enumerate(node.next_functions) if child is not None and self(child)]


def _nodes_below(node: Node) -> list[Node]:
    return [] if is_tap(node) else [value.node for value in parents(node)]


class ValuePlaces:
    """Knows where an operation acts on the samples' values: by the operations below it, down to the module.

    What is above it, how many samples there are, and whether a loop or a matrix holds them, makes no difference.

    Args:
        ends: The values that the module returned.
        depends: Knows which values depend on the samples.
    """

    def __init__(self, ends: Container[Value], depends: Dependence) -> None:
        self._ends, self._depends = ends, depends
        self._known: dict[Value, frozenset[int]] = {}

    def of(self, value: Value) -> frozenset[int]:
        """Return a value's place."""
        return fold(value, self._below, self._joined, self._known)

    def _below(self, value: Value) -> list[Value]:
        return [] if self._is_end(value) else self._depends.below(value.node)

    def _joined(self, value: Value, found: list[frozenset[int]]) -> frozenset[int]:
        name = value.operation
        if self._is_end(value) or name in _LOOPED or (name == "Add" and len(found) > 1):  # as many as there are samples
            return frozenset().union(*found)
        return frozenset([hash((name, *found))])

    def _is_end(self, value: Value) -> bool:
        return value in self._ends or value.is_tap


@dataclass(frozen=True)
class Constant:
    """A number by which a value was multiplied.

    Attributes:
        node: The operation.
        value: The number.
        divides: Whether the code divided by its inverse.
        precision: How far it may be from what was meant, relatively.
        origin: Its kind in the code: a tensor; a whole number, which a schedule seldom is and a count always, or a
            weight that is trained; a float; a number of a function of torch's; a number that the user has said is not
            computed from the batch; what the weights of all rows have in common; or what backward starts with.
    """

    node: Node
    value: float
    divides: bool
    precision: float
    origin: Literal["tensor", "whole", "float", "torch", "declared", "weights", "gradient"] = "float"

    @property
    def number(self) -> float:
        """The number as it stands in the code."""
        return 1 / self.value if self.divides else self.value

    @property
    def may_be_data(self) -> bool:
        """Whether it may have been computed from the batch, whatever its value."""
        return self.origin in {"tensor", "whole"}


@dataclass(frozen=True)
class LinearStep:
    """A linear operation on the way from a root to rows: its result, and which of its inputs is on the way."""

    value: Value
    which: int

    @property
    def operation(self) -> str:
        """Its name."""
        return self.value.operation

    @property
    def input(self) -> Value:
        """The input."""
        return input_of(self.value.node, self.which)

    @property
    def mean(self) -> float:
        """The factor of a mean."""
        return self.value.shape.numel() / max(1, self.input.shape.numel())


@dataclass(frozen=True)
class Path:
    """One way from a root through linear operations to a value where that ends.

    Attributes:
        value: The value.
        coefficient: The gradient of the root with respect to that value.
        steps: The operations that move elements or add them up, from the value up to the root.
        constants: The scalar factors, from the root down.
        output: The path as far as the value that the module returned, if it has come by one with samples.
        weighing: The operations that multiplied, divided or masked what it has come by, by a tensor of several values.
        factor: The product of all numbers that have multiplied it: constants, means, and what backward starts with.
        single: The product of tensors of one value that have a dimension: a number, or the weight of the only sample.
    """

    value: Value
    coefficient: Tensor
    steps: tuple[LinearStep, ...] = ()
    constants: tuple[Constant, ...] = ()
    output: "Path | None" = None
    weighing: tuple[Node, ...] = ()
    factor: float = 1.0
    single: float = 1.0


def paths(
    roots: Sequence[Root],
    depends: Dependence,
    outputs: Container[Value] = (),
    declared: Sequence[float] = (),
) -> Iterator[Path]:
    """Yield every path to values that depend on the samples.

    Args:
        roots: The values that backward starts from.
        depends: Knows which values depend on the samples.
        outputs: Values with samples that the module returned.
        declared: Numbers in the loss that are no counts.

    Raises:
        Unreadable: If a node cannot be read, or there are too many.
    """
    pending = [
        Path(value, gradient.to(wide_dtype(gradient.device)), factor=1.0 if gradient.dim() else abs(float(gradient)))
        for value, gradient in roots
        if depends(value.node)
    ]
    for _ in range(_TOO_MANY):
        if not pending:
            return
        path = pending.pop()
        if path.value in outputs and path.output is None:
            path = replace(path, output=path)
        onward = _onward(path, depends)
        if onward is None:
            yield replace(path, constants=tuple(_declared(constant, declared) for constant in path.constants))
        else:
            pending += onward
    raise Unreadable(f"there are more than {_TOO_MANY} operations between loss and samples")


def _declared(constant: Constant, numbers: Sequence[float]) -> Constant:
    # A declared number is a float: a whole number of the same value, such as a mean's own divisor, is a count.
    if constant.may_be_data or not any(math.isclose(constant.number, one, rel_tol=1e-12) for one in numbers):
        return constant
    return replace(constant, origin="declared")


def declared_at(node: Node, depends: Dependence, numbers: Sequence[float]) -> list[Constant]:
    """Return the declared numbers that an operation multiplies or divides values of the samples by."""
    found = [_multiplier(node, which)[0] for which in depends.inputs(node)]
    constants = [_declared(constant, numbers) for constant in found if constant is not None]
    return [constant for constant in constants if constant.origin == "declared"]


def is_linear(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation is linear in those of its inputs that depend on the samples."""
    name, inputs = operation(node), depends.inputs(node)
    if name not in _LINEAR or (name == "Div" and inputs != [0]):
        return False
    return len(inputs) == 1 or name not in {"Mul"} | PRODUCTS


def _onward(path: Path, depends: Dependence) -> list[Path] | None:
    """The paths behind the value where ``path`` ends; None if that is the result of no linear operation."""
    value, node = path.value, path.value.node
    if value.is_tap and not value.shape:  # a loss within the module; a tap's last inputs are its outputs
        outputs = len(input_metadata_of(node))
        child, number = node.next_functions[len(node.next_functions) - outputs + value.number]
        # None of a call that runs sample by sample, which compares the number with the samples'
        return [] if child is None else [replace(path, value=Value(child, number))]
    name = value.operation
    if not is_linear(node, depends) or (name in PRODUCTS and value.shape.numel() != 1):
        return None
    found = []
    for which in depends.inputs(node):
        step = LinearStep(value, which)
        keeps = name in ELEMENTWISE and value.shape == step.input.shape
        constant, single = _multiplier(node, which)
        factor = 1.0
        if constant is not None:
            factor = abs(constant.value)
        elif name in MEANS:
            factor = step.mean
        elif name in {"Add", "Sub", "Rsub"} and which == (0 if name == "Rsub" else 1):
            factor = abs(float(saved_constant(node, "alpha")))
        found.append(
            replace(
                path,
                value=step.input,
                coefficient=pull(value, which, path.coefficient),
                steps=path.steps if keeps else (step, *path.steps),
                constants=path.constants if constant is None else (*path.constants, constant),
                weighing=(*path.weighing, node) if constant is None and name in _WEIGHTING else path.weighing,
                factor=path.factor * factor,
                single=path.single * single,
            )
        )
    return found


def is_tensor(number: Any) -> bool:
    """Whether a number is a tensor; torch holds Python's as tensors that promote no dtype."""
    if not isinstance(number, Tensor):
        return False
    least = torch.float16 if number.is_floating_point() else torch.int8
    return bool(torch.result_type(torch.zeros((), dtype=least, device="cpu"), number) != least)


def _multiplier(node: Node, which: int) -> tuple[Constant | None, float]:
    """Return the one value that a node multiplies or divides by.

    Returns:
        The scalar, or None; what the only value of another tensor multiplies by, or 1.
    """
    name = operation(node)
    if name not in {"Mul", "Div"}:
        return None, 1.0
    other = saved(node, "other" if which == 0 else "self")
    tensor, divides = isinstance(other, Tensor), name == "Div"
    if tensor and (other.numel() != 1 or other.is_complex()):
        return None, 1.0
    if tensor and other.dim():
        other = other.detach()
    value = float(
        other.tolist() if tensor and not other.dim() else other
    )  # under a dispatch mode no other way reads it
    if value == 0:
        return None, 1.0
    multiplies = 1 / value if divides else value
    if tensor and other.dim():  # one value of each sample, in a batch of one, is no constant
        return None, abs(multiplies)
    precision = torch.finfo(other.dtype).eps if tensor and other.is_floating_point() else 0.0
    trained = len(node.next_functions) == 2 and node.next_functions[1 - which][0] is not None
    if is_tensor(other):
        origin = "whole" if trained else "tensor"  # a weight of a task that is learnt is the user's
    elif tensor:
        origin = "float" if other.is_floating_point() else "whole"
    else:
        origin = "torch" if value % 1 or divides else "whole"
    return Constant(node, multiplies, divides, 1e-9 + 4 * precision, origin), 1.0
