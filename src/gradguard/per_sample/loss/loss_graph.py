"""Find the roots of a backward, and read the autograd graph between these roots and the module's outputs.

The clipper does not run the code that computes the loss, and cannot run it again. But while the loss's graph is alive,
each node names its operation, and a node that is called with a gradient returns the gradients of its inputs.

In this package the operations that a value was computed from are *below* or *behind* the value, down to the module; the
operations that use the value are *above* it, up to the loss. *The user's* numbers and tensors are those that do not
depend on the module's outputs.
"""

import hashlib
import math
import re
import threading
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradguard.per_sample.loss.operation_table import (
    ADDITIONS,
    ALL_PRODUCTS,
    CHOOSING_ROWS,
    ELEMENTWISE,
    LABELLED,
    LINEAR,
    MEANS,
    MOVING,
    PRODUCTS,
    SCALINGS,
    SINGLY,
    operations,
)
from gradguard.tensors.layout import wide_dtype
from gradguard.torch_private import (
    Backward,
    call_before_backwards,
    current_graph_task,
    input_metadata_of,
    saved_constant,
    saved_settings,
    saved_tensors,
    saved_value,
)

_OPERATION = re.compile(r"(\w+?)Backward\d*")  # custom and compiled functions have no number
_TOO_MANY = 5_000
_Place = TypeVar("_Place", bound=Hashable)
_Found = TypeVar("_Found")


Verdict = Literal["right", "wrong", "unknown", "unverified"]


class Refused(Exception):  # noqa: N818
    """A loss may not have the reduction that the user declared. The exception never leaves this package.

    Args:
        words: The reason.
        factors: Each sample's part in the loss, as a multiple of the sample's own loss [B]; None if unknown.
    """

    verdict: Verdict = "unknown"

    def __init__(self, words: str, factors: Tensor | None = None) -> None:
        super().__init__(words)
        self.factors = factors


class Unreadable(Refused):
    """The graph cannot be followed."""

    verdict = "unverified"


class Coupled(Refused):
    """The loss is neither the sum nor the mean of the samples' own losses."""

    verdict = "wrong"


class Value(NamedTuple):
    """A value in the graph: result ``number`` of the operation that ``node`` records."""

    node: Node
    number: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Value":
        """Return the value that a tensor holds."""
        edge = get_gradient_edge(tensor)
        return cls(edge.node, edge.output_nr)

    @property
    def meta(self) -> Any:
        """Metadata of the value: shape, dtype and device."""
        return input_metadata_of(self.node)[self.number]

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        return torch.Size(self.meta.shape)

    @property
    def operation(self) -> str:
        """Name of the operation that computed the value; see `operation`."""
        return operation(self.node)

    @property
    def is_tap(self) -> bool:
        """True if the value passed a tap of the clipper: the operations behind it belong to the module."""
        return is_tap(self.node)


class Root(NamedTuple):
    """A value that a backward starts from, and the gradient that the backward starts with there."""

    value: Value
    gradient: Tensor


class BackwardRoots:
    """Calls ``look`` with the roots of each backward that this thread is about to run, from `start` to `stop`.

    A backward within a backward, such as a checkpoint's, does not start from a loss and is ignored. So is
    `torch.autograd.grad`.
    """

    def __init__(self, look: Callable[[list[Root]], None]) -> None:
        self._look = look
        self._thread = 0
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to report backwards; after another `start`, report those of the calling thread instead."""
        self._thread = threading.get_ident()
        if self._end is not None:
            return
        # The listener must not keep alive a clipper that is dropped between forward and backward.
        found = weakref.ref(self, lambda _: end())

        def begins(backward: Backward) -> None:
            own = found()
            if own is None or not backward.accumulates or current_graph_task() != -1:
                return
            if threading.get_ident() != own._thread:
                return
            roots = list[Root]()
            for tensor, grad in zip(backward.roots, backward.gradients, strict=True):
                if grad is None or not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    return  # the engine raises for such a root, or the root is a GradientEdge
                roots.append(Root(Value.of(tensor), grad.detach()))
            if roots:
                own._look(roots)

        end = self._end = call_before_backwards(begins)

    def stop(self) -> None:
        """Stop reporting backwards. A second call does nothing."""
        if self._end is not None:
            self._end()
            self._end = None


class Make(NamedTuple):
    """How a loss is computed, and the numbers that decide each sample's share in the loss.

    Attributes:
        kind: The sorted names of the operations, without those that occur in some batches only (a slice of all rows).
        structure: A digest of the operations, their settings and shapes; None if data decide which rows an operation
            takes, or if the graph is too large.
        numbers: The scalars by which values are multiplied or divided.
        labelled: The operations that take labels; a label may be missing.
    """

    kind: tuple[str, ...] = ()
    structure: bytes | None = None
    numbers: tuple[float, ...] = ()
    labelled: tuple[Node, ...] = ()


def make_of(roots: Sequence[Root], ends: Container[Value], depends: "Dependence") -> Make:
    """Return how a loss is computed from ``ends``, the values of samples that the module returned.

    Where the module itself returns the loss, the graph is followed to the layers inside the module. Of tensors that
    multiply values, and of labels, nothing enters the result: the next batch changes them.
    """
    places: dict[Node, int] = {}
    pending: list[Node] = []

    def reference(node: Node | None, number: int) -> Any:
        """Return the position of the value's node in the description, or the shape where the value is an output."""
        if node is None:
            return None
        value = Value(node, number)
        if value in ends or (value.is_tap and value.shape):
            return "output", tuple(value.shape)
        if node not in places:
            places[node] = len(places)
            pending.append(node)
        return places[node], number

    description: list[Any] = [(_shown(root.gradient) if root.gradient.dim() else None) for root in roots]
    description += [reference(*root.value) for root in roots]
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
        numbers += scalars(node, depends)
        # The name, the shapes, and the settings that decide how the operation combines elements.
        own: list[Any] = [node.name(), [tuple(one.shape) for one in input_metadata_of(node)]]
        own += [(name, _shown(value)) for name, value in saved_settings(node).items()]
        if hasattr(type(node), "saved_tensors"):  # an autograd.Function: its class, and the attributes of its ctx
            attributes = {name: _shown(value) for name, value in sorted(getattr(node, "__dict__", {}).items())}
            own += [id(type(node)), attributes]
        elif operation(node) in LABELLED:
            own.append(saved_constant(node, "weight") is None)
        description += [own, [reference(*edge) for edge in node.next_functions]]
    structure = None if by_data else hashlib.blake2b(repr(description).encode(), digest_size=16).digest()
    kind = tuple(sorted({node.name() for node in places if operation(node) not in _NOT_TELLING}))
    return Make(kind, structure, tuple(numbers), tuple(labelled))


def data_put_rows(node: Node) -> bool:
    """Tell whether tensors of the user's decide where an operation puts rows, or which rows it adds up."""
    return operation(node) not in CHOOSING_ROWS and _is_by_data(node)


def data_choose_rows(nodes: Iterable[Node]) -> bool:
    """Tell whether some operations take rows by tensors of the user's, and none of the others puts or pads rows."""
    names, by_data = set[str](), set[str]()
    for node in nodes:
        names.add(node.name())
        if _is_by_data(node):
            by_data.add(operation(node))
    fills = any("CopySlices" in name or "Pad" in name for name in names)
    return bool(by_data) and not fills and by_data <= CHOOSING_ROWS


def scalars(node: Node, depends: "Dependence") -> list[float]:
    """Return the scalars by which a node multiplies values of the samples; of an addition its ``alpha``."""
    name = operation(node)
    if name in ADDITIONS:  # one that adds a number of torch's, such as an eps, saves no alpha and multiplies nothing
        alpha = float(saved_constant(node, "alpha"))
        return [] if math.isnan(alpha) else [alpha]
    if name not in SCALINGS or len(inputs := depends.inputs(node)) != 1:
        return []
    try:
        constant, _ = _multiplier(node, inputs[0], depends)
    except Unreadable:
        return [math.nan]  # NaN equals no earlier number, so the loss is read again
    return [] if constant is None else [constant.value]


_NOT_TELLING = operations("sizes")
_LOOPED = _NOT_TELLING | MOVING - {"IndexSelect"} | {"Expand"}
"""Operations that only move the samples' values; a loop over samples uses others of them than a batched loss."""

_WEIGHTING = SCALINGS | {"Where", "MaskedFill"}
_BY_INDEX, _BY_POSITION = operations("index"), operations("position")
_OF_PARAMETERS = operations("read")


def _is_by_data(node: Node) -> bool:
    """Tell whether tensors of the user's decide what an operation takes along any dimension but the last."""
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
    return dim % len(shape) != len(shape) - 1


def _shown(value: Any) -> Any:
    """Return a description of a setting: of a tensor the shape and the extremes, of an object its class."""
    if isinstance(value, Tensor):
        if not value.numel() or value.is_complex() or value.dtype is torch.bool:
            return tuple(value.shape)
        low, high = value.detach().aminmax()
        return tuple(value.shape), float(low), float(high)
    return (
        value if isinstance(value, int | float | str | bool | tuple | list) or value is None else type(value).__name__
    )


def is_tap(node: Node) -> bool:
    """Tell whether a node is a tap: the identity operation by which the clipper reads a value of the module."""
    return node.name() == "TapBackward"


def operation(node: Node) -> str:
    """Return the operation of a node, ``"Mul"`` for ``MulBackward0``; for a custom function the node's whole name."""
    kind = type(node)
    found = _NAMES.get(kind)
    if found is None:
        name = node.name()
        match = None if hasattr(kind, "saved_tensors") else _OPERATION.fullmatch(name)
        found = match[1] if match else name
        if kind.__module__ == "builtins" and kind.__name__ != "CppFunction":  # the class of a single operation
            _NAMES[kind] = found
    return found


_NAMES: dict[type, str] = {}
"""The operation of each class of nodes that torch has for one operation only."""


def saved(node: Node, name: str) -> Any:
    """Return a value that the forward operation of a node saved.

    Raises:
        Unreadable: If a backward has freed the saved value, or the operation saves none of this name.
    """
    try:
        return saved_value(node, name)
    except (AttributeError, RuntimeError) as error:
        raise Unreadable(f"the values that {node.name()} saved cannot be read ({str(error).split('.')[0]})") from error


def dims_of(node: Node) -> list[int] | None:
    """Return the dimensions of its input along which an operation works, counted from the front; None for all."""
    dims = saved_constant(node, "dim")
    if dims is None or isinstance(dims, float) or (isinstance(dims, Sequence) and not dims):
        return None
    places = max(1, len(parents(node)[0].shape))
    return sorted({dim % places for dim in (dims if isinstance(dims, Sequence) else [dims])})


def shape_of(node: Node) -> torch.Size:
    """Return the shape of an operation's first result."""
    return Value(node).shape


def parents(node: Node) -> list[Value]:
    """Return the inputs of a node's operation that need a gradient."""
    return [Value(child, number) for child, number in node.next_functions if child is not None]


def input_of(node: Node, which: int) -> Value:
    """Return input ``which`` of a node.

    Raises:
        Unreadable: If that input needs no gradient.
    """
    child, number = node.next_functions[which]
    if child is None:
        raise Unreadable(f"input {which} of {node.name()} needs no gradient")
    return Value(child, number)


def pull(value: Value, which: int, gradient: Tensor) -> Tensor:
    """Return the gradient of input ``which`` of a linear operation, for a gradient of the operation's result.

    Raises:
        Unreadable: If the node cannot be called.
    """
    if value.operation in {"ToCopy", "CopyBackwards", "Clone", "Alias"}:  # calling the node of a cast would round
        return gradient
    try:
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            try:
                passed = _called(value, which, gradient)
            except RuntimeError:  # some nodes take their own dtype only: four parts of that dtype hold some 30 bits
                parts, left = list[Tensor](), gradient
                for _ in range(4):
                    part = left.to(value.meta.dtype)
                    parts.append(_called(value, which, part).to(gradient))
                    left = left - part.to(left)
                passed = torch.stack(parts).sum(0)
            shape = input_of(value.node, which).shape
            return passed.to(gradient).sum_to_size(shape)  # as the engine does where the forward has broadcast
    except (RuntimeError, TypeError, AttributeError) as error:
        words = str(error).split(".")[0]
        raise Unreadable(f"the gradients that {value.node.name()} passes on cannot be read ({words})") from error


def _called(value: Value, which: int, gradient: Tensor) -> Tensor:
    """Call a value's node with a gradient of that value, and return the gradient of input ``which``."""
    grads: list[Tensor | None] = [None] * len(input_metadata_of(value.node))
    grads[value.number] = gradient
    passed: Any = value.node(*grads)  # type: ignore[operator]
    return passed[which] if isinstance(passed, tuple | list) else passed


def walk(starts: Iterable[_Place], onward: Callable[[_Place], Iterable[_Place]]) -> Iterator[_Place]:
    """Yield each place that can be reached from ``starts`` once, the starts included."""
    pending = [*starts]
    seen = {*pending}
    while pending:
        yield (place := pending.pop())
        new = [one for one in dict.fromkeys(onward(place)) if one not in seen]
        seen.update(new)
        pending += new


def nodes_below(
    node: Node, ends: Container[Value], below: Callable[[Node], Iterable[Value]] | None = None
) -> Iterator[Node]:
    """Yield a node and the nodes below it, by ``below`` or else `parents`, that are not only below ``ends``."""
    return walk([node], lambda one: [value.node for value in (below or parents)(one) if value not in ends])


def fold(
    start: _Place,
    below: Callable[[_Place], Iterable[_Place]],
    combine: Callable[[_Place, list[_Found]], _Found],
    known: dict[_Place, _Found],
) -> _Found:
    """Compute a result for a place from the results of the places below it, bottom-up and without recursion.

    Args:
        start: The place.
        below: Returns the places below a place.
        combine: Computes the result of a place from the results of the places below it.
        known: Results that are computed already, by place; the new ones are added.

    Returns:
        The result for ``start``.
    """
    if start in known:
        return known[start]
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
    """Finds, and caches, which operations depend on the samples: those with a tap behind them.

    Args:
        batch_size: Number of samples.
        is_end: Tells which nodes the operations depend on.
    """

    def __init__(self, batch_size: int = 1, is_end: Callable[[Node], bool] = is_tap) -> None:
        self._batch_size, self._is_end = batch_size, is_end
        self._known: dict[Node, bool] = {}
        self._trained: dict[Node, bool] = {}
        self._inputs: dict[Node, list[int]] = {}
        self._below: dict[Node, list[Value]] = {}

    def __call__(self, node: Node) -> bool:
        """Tell whether an operation's results depend on the samples."""
        if node in self._known:
            return self._known[node]
        return fold(node, _nodes_below, lambda top, found: self._is_end(top) or any(found), self._known)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on the samples."""
        return tensor.requires_grad and self(Value.of(tensor).node)

    def is_trained(self, node: Node) -> bool:
        """Tell whether an operation computes its results from parameters and single numbers alone."""
        return fold(
            node,
            _nodes_below,
            lambda top, found: all(found) and _keeps_to_parameters(top) if found else is_parameter(top),
            self._trained,
        )

    def trained_beside(self, node: Node) -> list[Value]:
        """Return the inputs of an operation that parameters alone decide, if they are the same for all samples."""
        values = [value for value in parents(node) if not self(value.node) and self.is_trained(value.node)]
        return [value for value in values if not self._has_positions(node, value)]

    def is_trained_beside(self, node: Node, constant: Tensor) -> bool:
        """Tell whether a tensor that an operation saved is one of `trained_beside`."""
        return constant.requires_grad and Value.of(constant) in self.trained_beside(node)

    def _has_positions(self, node: Node, value: Value) -> bool:
        """Tell whether what is trained beside values may have an entry for each position in the batch."""
        size, result = self._batch_size, shape_of(node)
        if size == 1 or operation(node) in ALL_PRODUCTS:
            return size > 1 and size in value.shape and result.numel() == 1

        def below(place: Value) -> list[Value]:
            return parents(place.node) if place.operation in SINGLY else []

        shapes = [place.shape for place in walk([value], below) if not below(place)]  # those before an expand
        return any(len(shape) == len(result) and shape[:1] == (size,) for shape in shapes)

    def below(self, node: Node) -> list[Value]:
        """Return the inputs of a node that depend on the samples."""
        if node not in self._below:
            self._below[node] = [value for value in parents(node) if self(value.node)]
        return self._below[node]

    def inputs(self, node: Node) -> list[int]:
        """Return the positions of the inputs of a node that depend on the samples."""
        if node not in self._inputs:
            edges = enumerate(node.next_functions)
            self._inputs[node] = [k for k, (child, _) in edges if child is not None and self(child)]
        return self._inputs[node]


def _nodes_below(node: Node) -> list[Node]:
    """Return the nodes of an operation's inputs; none below a tap."""
    return [] if is_tap(node) else [value.node for value in parents(node)]


def is_parameter(node: Node) -> bool:
    """Tell whether a node stands for an `nn.Parameter`, and not for the result of an operation."""
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _keeps_to_parameters(node: Node) -> bool:
    """Tell whether an operation of `_OF_PARAMETERS` takes single numbers besides its inputs that need a gradient."""
    if operation(node) not in _OF_PARAMETERS:
        return False
    below = parents(node)
    if len(below) == len(node.next_functions):
        return True
    # An operation that does not save its constant shows the constant's size only by the size of its result.
    is_single = all(one.requires_grad or not one.dim() for one in saved_tensors(node))
    return operation(node) in SINGLY and is_single and shape_of(node) == below[0].shape


class _FromBelow:
    """Describes a value by what is below it, down to the module.

    Args:
        results: The numbers of the values that the module returned.
        depends: Tells which operations depend on the samples.
    """

    def __init__(self, results: Mapping[Value, int], depends: Dependence) -> None:
        self._results, self._depends = results, depends
        self._known: dict[Value, frozenset[int]] = {}

    def of(self, value: Value) -> frozenset[int]:
        """Return the description of a value."""
        return fold(value, self._below, self._joined, self._known)

    def _below(self, value: Value) -> list[Value]:
        return [] if value in self._results or value.is_tap else self._depends.below(value.node)

    def _joined(self, value: Value, found: list[frozenset[int]]) -> frozenset[int]:
        raise NotImplementedError


class ValuePlaces(_FromBelow):
    """Identifies the place of a value in a loss by the operations below the value.

    The operations above the value, the number of samples, and whether a loop or one batched tensor computes the loss
    make no difference.
    """

    def _joined(self, value: Value, found: list[frozenset[int]]) -> frozenset[int]:
        name = value.operation
        # A loop over samples has an addition for each sample, a batched loss has none.
        if value in self._results or value.is_tap or name in _LOOPED or (name == "Add" and len(found) > 1):
            return frozenset().union(*found)
        return frozenset([hash((name, *found))])


class ResultNumbers(_FromBelow):
    """Finds the numbers of the module's results that a value was computed from, whatever call returned them."""

    def _joined(self, value: Value, found: list[frozenset[int]]) -> frozenset[int]:
        return frozenset([self._results[value]]) if value in self._results else frozenset().union(*found)


@dataclass(frozen=True)
class Constant:
    """A number by which a value was multiplied.

    Attributes:
        node: The operation.
        value: The factor.
        divides: Whether the code divided, by ``1 / value``.
        precision: The relative error that the number may have.
        origin: Where the number comes from.

            - ``"tensor"``: a tensor.
            - ``"whole"``: a whole number, which a count always is and a schedule's number seldom.
            - ``"float"``: a float.
            - ``"torch"``: a number of a function of torch's.
            - ``"declared"``: a number that the user has declared as not computed from the batch.
            - ``"weights"``: the weight that all rows have in common.
            - ``"gradient"``: the gradient that backward starts with.
    """

    node: Node
    value: float
    divides: bool
    precision: float
    origin: Literal["tensor", "whole", "float", "torch", "declared", "weights", "gradient"] = "float"

    @property
    def number(self) -> float:
        """The number as the code has it: the divisor where the code divides."""
        return 1 / self.value if self.divides else self.value

    @property
    def may_be_data(self) -> bool:
        """True if the number may have been computed from the batch, whatever its value."""
        return self.origin in {"tensor", "whole"}


@dataclass(frozen=True)
class LinearStep:
    """A linear operation on a path from a root to rows: its result, and which of its inputs is on the path."""

    value: Value
    which: int

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.value.operation

    @property
    def input(self) -> Value:
        """The operation's input on the path."""
        return input_of(self.value.node, self.which)

    @property
    def mean(self) -> float:
        """The factor of the operation as a mean: 1 over the number of elements that each result averages."""
        return self.value.shape.numel() / max(1, self.input.shape.numel())


@dataclass(frozen=True)
class Path:
    """One path from a root down through linear operations, to the value where no linear operation follows.

    Attributes:
        value: The value at the end of the path.
        coefficient: The gradient of the root with respect to that value.
        steps: The operations that move elements or add them up, from the value up to the root.
        constants: The scalar factors, from the root down.
        output: The path as far as the first value with samples that the module returned; None if there is none.
        weighing: The operations on the path that multiply, divide or mask by a tensor of several values.
        factor: The product of all numbers on the path: constants, means, the ``alpha`` of additions, and a scalar
            gradient that backward starts with.
        single: The product of tensors with one value and at least one dimension: numbers, or weights of the only
            sample.
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
    """Yield every path from the roots to values that depend on the samples.

    Args:
        roots: The values that backward starts from.
        depends: Tells which operations depend on the samples.
        outputs: Values with samples that the module returned.
        declared: Numbers that the user has declared as not computed from the batch.

    Raises:
        Unreadable: If a node cannot be read, or there are more than 5,000 of them.
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
    """Return the constant, with the origin ``"declared"`` if it is one of these numbers."""
    # A declared number is a float. A whole number of the same value, such as the divisor of a mean, is a count.
    if constant.may_be_data or not any(math.isclose(constant.number, one, rel_tol=1e-12) for one in numbers):
        return constant
    return replace(constant, origin="declared")


def declared_at(node: Node, depends: Dependence, numbers: Sequence[float]) -> list[Constant]:
    """Return the declared numbers by which an operation multiplies or divides values of the samples."""
    found = [_multiplier(node, which, depends)[0] for which in depends.inputs(node)]
    constants = [_declared(constant, numbers) for constant in found if constant is not None]
    return [constant for constant in constants if constant.origin == "declared"]


def is_linear(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation is linear in its inputs that depend on the samples."""
    name, inputs = operation(node), depends.inputs(node)
    if name not in LINEAR or (name == "Div" and inputs != [0]):
        return False
    return len(inputs) == 1 or name not in {"Mul"} | PRODUCTS


def _onward(path: Path, depends: Dependence) -> list[Path] | None:
    """Extend a path by one operation; return None if the path's last value is not the result of a linear one."""
    value, node = path.value, path.value.node
    if value.is_tap and not value.shape:  # a loss inside the module; the last inputs of a tap are its outputs
        outputs = len(input_metadata_of(node))
        child, number = node.next_functions[len(node.next_functions) - outputs + value.number]
        # There is no child where the call runs sample by sample: that run compares the number with the samples' own.
        return [] if child is None else [replace(path, value=Value(child, number))]
    name = value.operation
    if not is_linear(node, depends) or (name in PRODUCTS and value.shape.numel() != 1):
        return None
    found = []
    for which in depends.inputs(node):
        step = LinearStep(value, which)
        keeps = name in ELEMENTWISE and value.shape == step.input.shape
        constant, single = _multiplier(node, which, depends)
        trained = depends.trained_beside(node) if name in PRODUCTS | SCALINGS else []
        weighs = name in PRODUCTS | _WEIGHTING and not trained
        factor = 1.0
        if constant is not None:
            factor = abs(constant.value)
        elif name in MEANS:
            factor = step.mean
        elif name in ADDITIONS and which == (0 if name == "Rsub" else 1):
            factor = abs(float(saved_constant(node, "alpha")))
        found.append(
            replace(
                path,
                value=step.input,
                coefficient=_unweighted(path.coefficient, step) if trained else pull(value, which, path.coefficient),
                steps=path.steps if keeps else (step, *path.steps),
                constants=path.constants if constant is None else (*path.constants, constant),
                weighing=(*path.weighing, node) if constant is None and weighs else path.weighing,
                factor=path.factor * factor,
                single=path.single * single,
            )
        )
    return found


def _unweighted(gradient: Tensor, step: LinearStep) -> Tensor:
    """Return the gradient of a product's input as if the other input were 1: what is trained is in all samples' losses.

    The sample's own loss has the same factor, whatever the optimizer makes of it.
    """
    shape = step.input.shape
    return gradient.reshape(()).expand(shape) if step.operation in PRODUCTS else gradient.sum_to_size(shape)


def is_tensor(number: Any) -> bool:
    """Tell whether a saved number was a tensor: torch stores Python numbers as tensors that promote no dtype."""
    if not isinstance(number, Tensor):
        return False
    least = torch.float16 if number.is_floating_point() else torch.int8
    return bool(torch.result_type(torch.zeros((), dtype=least, device="cpu"), number) != least)


def _multiplier(node: Node, which: int, depends: Dependence) -> tuple[Constant | None, float]:
    """Return the single number by which a node multiplies or divides, unless the number is trained.

    Returns:
        The scalar as a `Constant`, or None; and the factor of a tensor with dimensions and one value, or 1.
    """
    name = operation(node)
    if name not in SCALINGS or depends.trained_beside(node):
        return None, 1.0
    other = saved(node, "other" if which == 0 else "self")
    tensor, divides = isinstance(other, Tensor), name == "Div"
    if tensor and (other.numel() != 1 or other.is_complex()):
        return None, 1.0
    if tensor and other.dim():
        other = other.detach()
    # Under a dispatch mode only tolist() reads the value of a tensor.
    value = float(other.tolist() if tensor and not other.dim() else other)
    if value == 0:
        return None, 1.0
    multiplies = 1 / value if divides else value
    if tensor and other.dim():  # in a batch of one sample, a weight for each sample has one value, too
        return None, abs(multiplies)
    precision = torch.finfo(other.dtype).eps if tensor and other.is_floating_point() else 0.0
    if is_tensor(other):
        origin = "tensor"
    elif tensor:
        origin = "float" if other.is_floating_point() else "whole"
    else:
        origin = "torch" if value % 1 or divides else "whole"
    return Constant(node, multiplies, divides, 1e-9 + 4 * precision, origin), 1.0
