r"""Finds constants in a loss that lie along as many entries as there are samples, and are the same for each sample.

Outputs ``[B, T]`` beside targets ``[B]``: where T is B, PyTorch repeats the targets for every sample, along the wrong
dimension, and each value belongs to two samples. Most operations save such a constant. What ``Add``, ``Where`` and the
like put in is saved nowhere. Its value follows from values that are saved: let x be the values nearest below, and J
their Jacobian. The operations between are affine, so the constant is :math:`v - J x`.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.loss.loss_graph import (
    LABELLED,
    Dependence,
    Unreadable,
    inputs_of,
    is_linear,
    operation,
    operations,
    parents,
    saved,
    shape_of,
    walk,
)
from gradguard.torch_private import saved_names, saved_tensors

Value = tuple[Node, int]

TAKES_BESIDE = operations(
    "Mul Div Where MaskedFill MaskedSelect Pow Maximum Minimum Fmax Fmin Xlogy Atan2 Lerp Addcmul Addcdiv Clamp "
    "ClampMin ClampMax Dot MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits "
    "SoftMarginLoss Logaddexp Logaddexp2 SpecialXlog1Py NativeLayerNorm"
)
"""Operations whose constants are broadcast beside values."""

_PRODUCTS = operations("Cdist Mm Bmm Mv Addmm Baddbmm Addmv")
_ADDING_UNSEEN = operations("Add Sub Rsub Where Lerp Addcmul Addcdiv Addmm Baddbmm Addmv")
"""Affine operations that do not save what they add."""

_CONVOLUTIONS = operations("Convolution ConvolutionOverrideable")
_BESIDE_NOTHING = operations("Index CopySlices torch::autograd::CopySlices")
"""Operations that choose or put values, whose constants lie beside none."""

_WHOLE = (["self"], ["self", "other"], ["self", "exponent"], ["self", "mat2"])
"""The inputs of functions, in their order."""


def constants_beside(node: Node, depends: Dependence) -> Iterator[tuple[Value, Tensor]]:
    """Yield the constants that an operation saved, each with the value of the samples that it lies beside.

    Dimensions of a constant are those of the value, from the first on; more of them are new in the result.
    """
    name = operation(node)
    inputs = inputs_of(node, depends)
    if not inputs or name not in TAKES_BESIDE | _PRODUCTS | LABELLED | {"Index"}:
        return
    child, number = node.next_functions[inputs[0]]
    assert child is not None
    value, shape = (child, number), shape_of(child, number)
    if name == "Index":
        yield from ((value, mask) for mask in _masks(node, len(shape)))
        return
    if name in LABELLED:
        if (weights := saved(node, "weight")) is not None and len(shape) > 1:
            yield value, weights.view(1, -1, *[1] * (len(shape) - 2))
        return
    for constant in (one for one in saved_tensors(node) if not one.requires_grad and one.dim()):
        if name not in _PRODUCTS:
            whole = shape if constant.shape == shape else torch.broadcast_shapes(shape, constant.shape)
            place = value if whole == shape else (node, 0)
            yield place, constant[(None,) * (len(whole) - constant.dim())] if constant.dim() < len(whole) else constant
        elif len(inputs) == 1 and constant.dim() == 1:
            yield value, constant.unsqueeze(0)
        elif len(inputs) == 1:
            left = name == "Cdist" or inputs[0] == len(node.next_functions) - 2
            turned = constant if left and name != "Cdist" else constant.mT
            yield value, turned if len(shape) < constant.dim() else turned.unsqueeze(-3 if left else -2)


def _masks(node: Node, dims: int) -> Iterator[Tensor]:
    """Yield the masks by which values are indexed, with a dimension for each of the value's."""
    at = 0
    for index in saved(node, "indices"):
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            yield index.view((1,) * at + index.shape + (1,) * (dims - at - index.dim()))
            at += index.dim()
        else:
            at += 1


def adds_unseen(node: Node, depends: Dependence) -> bool:
    """Tell whether an operation adds a constant that it does not save."""
    inputs, places = inputs_of(node, depends), node.next_functions
    return operation(node) in _ADDING_UNSEEN and (len(inputs) < len(places) or len(places) == 1)


def hides_constant(node: Node, depends: Dependence, batch_size: int) -> bool:
    """Tell whether an operation takes a constant of any size that it need not save, in a way that is not known."""
    inputs, name = inputs_of(node, depends), operation(node)
    if not inputs or len(inputs) == len(node.next_functions):
        return False
    if name in _CONVOLUTIONS:  # a bias has as many entries as the kernel has maps
        weight = saved(node, "weight")
        return not isinstance(weight, Tensor) or batch_size in weight.shape
    return name not in TAKES_BESIDE | _PRODUCTS | _ADDING_UNSEEN | _BESIDE_NOTHING


def is_affine(node: Node, depends: Dependence) -> bool:
    """Tell whether a value is a linear function of one value of the samples, or of several, and a constant."""
    inputs, name = inputs_of(node, depends), operation(node)
    return is_linear(name, inputs) or (name in _ADDING_UNSEEN | _CONVOLUTIONS and len(inputs) == 1)


def known_values(nodes: Sequence[Node]) -> dict[Value, Tensor]:
    """Return the values of the samples that operations saved or that follow from these, by where they were computed."""
    found: dict[Value, Tensor] = {}
    for node in nodes:
        for tensor in saved_tensors(node):
            if tensor.requires_grad:
                edge = get_gradient_edge(tensor)
                found[edge.node, edge.output_nr] = tensor.detach()
        if (again := _again(node)) is not None:
            found.setdefault((node, 0), again)
        if operation(node) == "Sqrt":
            found.setdefault(parents(node)[0], saved(node, "result").detach().square())
    return found


def _again(node: Node) -> Tensor | None:
    """Return the result of a function of torch of its inputs, where an operation saved these, and nothing else."""
    function, names = getattr(torch, operation(node).lower(), None), saved_names(node)
    if function is None or names not in _WHOLE or len(names) < len(node.next_functions):
        return None
    with torch.no_grad():
        found = function(*[saved(node, name) for name in names])
    return found if found.shape == shape_of(node) else None


def added(value: Value, known: Mapping[Value, Tensor], depends: Dependence) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the constant in a value, and how far rounding may have moved it; None if it cannot be told.

    Rounding is given twice: of each element where its parts do not cancel, and of any, where they do.

    Args:
        value: Where it was computed.
        known: The values that are known, ``value`` among them.
        depends: Knows which values depend on the samples.

    Raises:
        Unreadable: If a backward from there cannot be run.
    """
    below = _nearest(value, known, depends)
    if below is None:
        return None
    whole = known[value]
    cotangent = torch.zeros_like(whole, requires_grad=True)
    try:
        with torch.enable_grad(), torch.autocast(whole.device.type, enabled=False), silent_taps():
            pulled = torch.autograd.grad(
                [GradientEdge(*value)],  # pyright: ignore[reportArgumentType]
                [GradientEdge(*one) for one in below],  # pyright: ignore[reportArgumentType]
                [cotangent],
                retain_graph=True,
                create_graph=True,
            )
            product = torch.stack([(known[one] * each).sum() for one, each in zip(below, pulled, strict=True)]).sum()
            [linear] = torch.autograd.grad(product, cotangent)
    except (RuntimeError, TypeError) as error:
        raise Unreadable(f"what is added to values from {value[0].name()} cannot be read") from error
    rounding = 16 * max(torch.finfo(known[one].dtype).eps for one in (value, *below))
    each = rounding * (whole.abs() + linear.abs())
    return whole - linear, each, torch.stack([each.max(), *[rounding * known[one].abs().max() for one in below]]).sum()


def adds_unseen_below(value: Value, known: Container[Value], depends: Dependence) -> bool:
    """Tell whether a constant that is not saved was added to a value, or to one that it is an affine function of."""
    return any(adds_unseen(node, depends) for node in _affine(value, known, depends))


def _nearest(value: Value, known: Mapping[Value, Tensor], depends: Dependence) -> list[Value] | None:
    """The known values that a value is an affine function of; None if it is of others, too."""
    found: dict[Value, None] = {}
    nodes = list(_affine(value, known, depends))
    for edge in [value, *[edge for node in nodes for edge in parents(node) if depends(edge[0])]]:
        if edge != value and edge in known:
            found[edge] = None
        elif edge[0] not in nodes:
            return None
    return [*found]


def _affine(value: Value, known: Container[Value], depends: Dependence) -> Iterator[Node]:
    """Yield the affine operations from a value to the known ones that are nearest."""

    def ends(place: Value) -> bool:
        return (place in known and place != value) or not is_affine(place[0], depends)

    places = walk(
        [value], lambda place: () if ends(place) else (edge for edge in parents(place[0]) if depends(edge[0]))
    )
    return (place[0] for place in places if not ends(place))


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


def varying_sizes(constant: Tensor, rounding: Tensor | None = None) -> list[int]:
    """Return the sizes of a constant, 1 where values along a dimension are the same, but for rounding."""
    if rounding is None:
        constant, rounding = constant.double(), torch.zeros((), dtype=torch.float64, device=constant.device)
    rounding = rounding.broadcast_to(constant.shape)
    changes = [
        (constant - constant.roll(1, dim)).abs() > rounding + rounding.roll(1, dim) for dim in range(constant.dim())
    ]  # no NaN is greater
    return [size if bool(change.any()) else 1 for size, change in zip(constant.shape, changes, strict=True)]
