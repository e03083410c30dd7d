"""Tells of each value between a module's outputs and a loss whose it is, from the operations that made it.

The owners of a value are the numbers of the samples that its elements belong to: a tensor of as many dimensions, of
size 1 where the sample does not change. From the module's outputs upward each operation says what becomes of them:
a view turns them as it turns the values, a sum over some dimensions leaves them as they are where one sample lies along
these, and mixes samples elsewhere. An operation that is not in the table below may do anything, and is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.loss_graph import (
    LABELLED,
    TAPS,
    Coupled,
    Dependence,
    Unreadable,
    inputs_of,
    operation,
    operations,
    parents,
    saved,
    shape_of,
    signed,
)
from gradguard.per_sample.loss.separation import Outputs, numbered
from gradguard.torch_private import input_metadata_of, saved_constant

Value = tuple[Node, int]
Given = Mapping[int, Tensor]
"""The owners of those inputs of an operation that depend on samples, by their places."""

Rule = Callable[[Node, int, Given], Tensor]

NOBODY = -1
"""The owner of what belongs to no sample, such as padding."""

_NO_SAMPLE = torch.iinfo(torch.int64).max

BY_ELEMENT = operations(
    "Add Sub Rsub Neg Mul Div Clone Alias ToCopy CopyBackwards Where MaskedFill Expand Tril Triu "
    "Pow Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Reciprocal Abs Sgn Sign Sin Cos Tan Atan Sinh Cosh Asinh Erf "
    "Lgamma Sigmoid LogSigmoid LogSigmoidForward Logit Tanh Relu LeakyRelu Elu Gelu Silu Mish Softplus Hardtanh "
    "Maximum Minimum Clamp ClampMin ClampMax Xlogy Addcmul Addcdiv"
)
"""Operations of which an element of the result takes one of each input, broadcast at most."""

FUSED = operations("MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss")
"""Losses by element that are reduced in the same operation: in what they save 0 is none, 1 the mean, and 2 the sum."""

MARGINS = frozenset(["MultiMarginLoss", "MultilabelMarginLoss"])
"""Such losses of a row of classes each."""

WITH_REDUCTION = LABELLED | FUSED | MARGINS

_RESHAPED = operations("View UnsafeView ReshapeAlias Squeeze Unsqueeze")
_ALONG = operations(
    "Sum Nansum Mean Var Std VarMean StdMean Logsumexp Amax Amin Max Min Norm LinalgVectorNorm Prod Median Softmax "
    "LogSoftmax Cumsum Sort Topk"
)
"""Operations that put together what lies along some dimensions, which they save; all dimensions otherwise."""


class Owners:
    """The owners of the values of one loss.

    Args:
        outputs: The values that the module returned.
        depends: Knows which values depend on samples.
    """

    def __init__(self, outputs: Outputs, depends: Dependence) -> None:
        self._outputs, self._depends = outputs, depends
        self._known: dict[Value, Tensor] = dict(outputs.owners)

    def __call__(self, node: Node, number: int = 0) -> Tensor:
        """Return the owners of a value.

        Raises:
            Coupled: If an element of it, or of one that it is computed from, belongs to several samples.
            Unreadable: If an operation that it is computed by is not in the table.
        """
        return self._found((node, number))

    def rows(self, node: Node, number: int) -> Tensor:
        """Return the owners of the rows of a value: of a loss that reduces them itself, before it does."""
        name = operation(node)
        if name not in WITH_REDUCTION or (node, number) in self._known:
            return self._found((node, number))
        return _loss_rows(node, self._given(node))

    def _found(self, value: Value) -> Tensor:
        pending = [value]
        while pending:
            top = pending[-1]
            behind = [cast("Value", top[0].next_functions[place]) for place in self._places(*top)]
            unknown = [one for one in behind if one not in self._known]
            pending += unknown
            if not unknown:
                if top not in self._known:
                    self._known[top] = self._of(*top)
                pending.pop()
        return self._known[value]

    def _places(self, node: Node, number: int) -> Sequence[int]:
        """The places of the inputs that decide whose a value is."""
        if (node, number) in self._known or (node.name() in TAPS and shape_of(node, number)):
            return ()
        if node.name() in TAPS:  # of one number; its last inputs are its outputs
            return (len(node.next_functions) - len(input_metadata_of(node)) + number,)
        return inputs_of(node, self._depends)

    def _given(self, node: Node) -> dict[int, Tensor]:
        return {k: self._found(cast("Value", node.next_functions[k])) for k in inputs_of(node, self._depends)}

    def _of(self, node: Node, number: int) -> Tensor:
        shape, places = shape_of(node, number), self._places(node, number)
        if node.name() in TAPS:
            if shape:
                return _in_module(shape, self._outputs, input_metadata_of(node)[number].device)
            return self._known[cast("Value", node.next_functions[places[0]])]
        rule = _TABLE.get(operation(node))
        if rule is None:
            raise Unreadable(
                f"the operation {node.name()} between the loss and the samples is not known, and its graph does not "
                "show all that it takes. Compute it by functions that are (docs/per_sample_support.md)"
            )
        given = {place: self._known[cast("Value", node.next_functions[place])] for place in places}
        return rule(node, number, given)


def _in_module(shape: torch.Size, outputs: Outputs, device: torch.device) -> Tensor:
    """The owners of what a layer returned inside the module, which was looked at by itself."""
    size, usual = outputs.batch_size, 0 if outputs.batch_first or len(shape) == 1 else 1
    dims = [usual, *[dim for dim in range(len(shape)) if dim != usual]]
    found = [dim for dim in dims if shape[dim] == size]
    if not found and (not size or shape[0] % size):
        raise Unreadable(f"values of shape {list(shape)} do not tell the {size} samples apart")
    dim = found[0] if found else 0
    owners = numbered(shape[dim], size, not outputs.batch_first, device)
    return owners.view([-1 if one == dim else 1 for one in range(len(shape))])


# What operations do with owners


class Mixed(Coupled):
    """Samples are mixed by an operation.

    Args:
        node: It.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(
            f"{node.name()} mixes samples, and what comes of it is no sum of parts that are one sample's own: what a "
            "sample adds to the gradient depends on the others. Leave that term out, or compute it for each sample and "
            "average"
        )
        self.node = node


def _single(node: Node, owners: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the one owner along some dimensions, which are kept with size 1."""
    if all(owners.shape[dim] == 1 for dim in dims):
        return owners
    if not owners.numel():
        sizes = [1 if dim in dims else size for dim, size in enumerate(owners.shape)]
        return owners.new_full(sizes, NOBODY)
    last = owners.amax([*dims], keepdim=True)
    first = owners.where(owners != NOBODY, _NO_SAMPLE).amin([*dims], keepdim=True)
    if bool(((first != last) & (last != NOBODY)).any()):
        raise Mixed(node)
    return last


def _beside(node: Node, given: Sequence[Tensor], dims: int) -> Tensor:
    """Return the owners of what is computed element by element from several values."""
    found = given[0].view((1,) * (dims - given[0].dim()) + given[0].shape)
    for other in given[1:]:
        other = other.view((1,) * (dims - other.dim()) + other.shape)
        if found is other or (found.shape == other.shape and torch.equal(found, other)):
            continue
        found, other = torch.broadcast_tensors(found, other)
        if bool(((found != other) & (found != NOBODY) & (other != NOBODY)).any()):
            raise Mixed(node)
        found = _compact(torch.maximum(found, other))
    return found


def _compact(owners: Tensor) -> Tensor:
    """Return owners with size 1 along dimensions where they do not change."""
    for dim in range(owners.dim()):
        if owners.shape[dim] > 1 and bool((owners == owners.narrow(dim, 0, 1)).all()):
            owners = owners.narrow(dim, 0, 1)
    return owners


def _by_element(node: Node, number: int, given: Given) -> Tensor:
    return _beside(node, [*given.values()], len(shape_of(node, number)))


def _loss_rows(node: Node, given: Given) -> Tensor:
    """The owners of the rows of a loss that reduces them itself."""
    name = operation(node)
    dims = max(owners.dim() for owners in given.values())
    owners = _beside(node, [*given.values()], dims)
    if name in LABELLED:
        classes = 1 if dims > 1 else 0
        owners = _single(node, owners, [classes])
        return owners.squeeze(classes) if saved(node, "target").dim() < dims else owners
    if name in MARGINS and dims > 1:
        return _single(node, owners, [dims - 1]).squeeze(-1)
    return owners


def _with_reduction(node: Node, number: int, given: Given) -> Tensor:
    rows = _loss_rows(node, given)
    return _single(node, rows, range(rows.dim())).reshape(()) if saved(node, "reduction") else rows


def _along(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    dims = [dim % owners.dim() for dim in dims_of(node) or range(owners.dim())] if owners.dim() else []
    owners = _single(node, owners, dims)
    return owners if len(shape_of(node, number)) == owners.dim() else owners.squeeze(dims)


def dims_of(node: Node) -> list[int]:
    """Return the dimensions along which an operation works; none for all."""
    dims = saved_constant(node, "dim")
    if dims is None or isinstance(dims, float):
        return []
    return [signed(dim) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def _product(node: Node, number: int, given: Given) -> Tensor:
    """The owners of a product of matrices, or vectors: of rows of the left one and of columns of the right one."""
    name, places = operation(node), len(node.next_functions)
    turned = []
    for place, owners in given.items():
        if place == places - 2:
            owners = _single(node, owners, [owners.dim() - 1])
            owners = owners.squeeze(-1) if name in {"Mv", "Addmv", "Dot"} else owners
        elif place == places - 1:
            contracted = max(0, owners.dim() - 2)
            owners = _single(node, owners, [contracted])
            owners = owners.squeeze(0) if owners.dim() == 1 else owners
        turned.append(owners)
    return _beside(node, turned, len(shape_of(node, number)))


def _reshaped(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    before, after = shape_of(*_input(node, given)), shape_of(node, number)
    varies = [dim for dim, size in enumerate(owners.shape) if size > 1]
    if not owners.numel():
        return owners.new_empty(after)
    if not varies:
        return owners.view([1] * len(after))
    first, last = varies[0], varies[-1] + 1
    front = before[:first].numel()
    # The dimensions that vary, as far as they begin and end where some of the new ones do.
    for start in range(len(after) + 1):
        for end in range(start, len(after) + 1):
            if after[:start].numel() == front and after[start:end].numel() == before[first:last].numel():
                inner = owners.reshape(owners.shape[first:last]).expand(before[first:last]).reshape(after[start:end])
                inner = _compact(inner)
                return inner.view((1,) * start + inner.shape + (1,) * (len(after) - end))
    return _compact(owners.expand(before).reshape(after))


def _input(node: Node, given: Given) -> Value:
    return cast("Value", node.next_functions[next(iter(given))])


def _permuted(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    if operation(node) == "Permute":
        return owners.permute([signed(dim) for dim in saved(node, "dims")])
    if operation(node) == "T":
        return owners.t()
    return owners.transpose(signed(saved(node, "dim0")), signed(saved(node, "dim1")))


def _turned(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    dims = [signed(dim) % owners.dim() for dim in saved(node, "dims")] or [0]
    if operation(node) == "Flip":
        return owners.flip(dims)
    shifts = [signed(shift) for shift in saved(node, "shifts")]
    if not saved(node, "dims"):
        return _compact(owners.expand(shape_of(node, number)).roll(shifts))
    return owners.roll(shifts, dims)


def _taken(node: Node, number: int, given: Given) -> Tensor:
    """The owners of some places along one dimension."""
    [owners] = given.values()
    name, dim = operation(node), signed(saved(node, "dim")) % owners.dim()
    size, length = shape_of(*_input(node, given))[dim], shape_of(node, number)[dim] if name in _PARTS else 1
    if owners.shape[dim] == 1 < size or not size:
        start, step = 0, 1
        length = min(1, length)
    elif name == "Slice":
        start, step = slice(signed(saved(node, "start") or 0), None, saved(node, "step")).indices(size)[::2]
    elif name in {"Select", "Unbind"}:
        start, step = number if name == "Unbind" else signed(saved(node, "index")) % size, 1
    elif name == "SplitWithSizes":
        start, step = sum(saved(node, "split_sizes")[:number]), 1
    else:
        start, step = number * saved(node, "split_size"), 1
    taken = owners.narrow(dim, start, max(0, (length - 1) * step + 1) if length else 0)
    taken = taken[(slice(None),) * dim + (slice(None, None, step),)]
    return taken if name in _PARTS else taken.squeeze(dim)


_PARTS = operations("Slice Split SplitWithSizes UnsafeSplit")


def _joined(node: Node, number: int, given: Given) -> Tensor:
    """The owners of values side by side."""
    dims, shapes = len(shape_of(node, number)), [shape_of(*one) for one in parents(node)]
    dim = signed(saved(node, "dim")) % dims
    if len(given) < len(node.next_functions):
        raise Unreadable(f"its graph does not show all that {node.name()} puts side by side")
    if operation(node) == "Stack":
        return _compact(torch.stack(torch.broadcast_tensors(*given.values()), dim))
    parts = [(owners, shape) for owners, shape in zip(given.values(), shapes, strict=True) if len(shape) == dims]
    sizes = torch.broadcast_shapes(*[(*owners.shape[:dim], 1, *owners.shape[dim + 1 :]) for owners, _ in parts])
    whole = [owners.expand(sizes[:dim] + shape[dim : dim + 1] + sizes[dim + 1 :]) for owners, shape in parts]
    return _compact(torch.cat(whole, dim))


def _indexed(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    name, before = operation(node), shape_of(*_input(node, given))
    if name == "MaskedSelect":
        mask = saved(node, "mask")
        return _compact(owners.broadcast_to(torch.broadcast_shapes(before, mask.shape))[mask.broadcast_to(before)])
    if name == "Take":
        return _compact(owners.expand(before).flatten()[saved(node, "index")])
    if name == "Index":
        indices = [slice(None) if index is None else index for index in saved(node, "indices")]
        dims = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in indices]
        chosen = [isinstance(i, Tensor) for i, n in zip(indices, dims, strict=True) for _ in range(n)]
        chosen += [False] * (len(before) - len(chosen))
        sizes = [size if one else owners.shape[dim] for dim, (size, one) in enumerate(zip(before, chosen, strict=True))]
        return _compact(owners.expand(sizes)[tuple(indices)])
    dim, index = signed(saved(node, "dim")) % max(1, len(before)), saved(node, "index")
    if name == "IndexSelect":
        return owners if owners.shape[dim] == 1 else _compact(owners.index_select(dim, index))
    cut = tuple(slice(None) if one == dim else slice(n) for one, n in enumerate(index.shape))
    return owners[cut] if owners.shape[dim] == 1 else _compact(owners.expand(before)[cut].gather(dim, index))


def _repeated(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    times = [*saved(node, "repeats")]
    owners = owners.view((1,) * (len(times) - owners.dim()) + owners.shape)
    return owners.repeat([n if size > 1 else 1 for n, size in zip(times, owners.shape, strict=True)])


def _padded(node: Node, number: int, given: Given) -> Tensor:
    [owners] = given.values()
    padded = [owners.dim() - 1 - k // 2 for k, n in enumerate(saved(node, "pad")) if signed(n)]
    if any(owners.shape[dim] > 1 for dim in padded):
        raise Unreadable(f"{node.name()} puts values between the samples that are of none")
    return owners


def _of_sequences(node: Node, number: int, given: Given) -> Tensor:
    """The owners of the losses of sequences ``[T, B, C]``."""
    [owners] = given.values()
    last = owners.dim() - 1
    return _single(node, owners, [0, last]).squeeze((0, last))


_TABLE: Mapping[str, Rule] = {
    **dict.fromkeys(BY_ELEMENT, _by_element),
    **dict.fromkeys(WITH_REDUCTION, _with_reduction),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_RESHAPED, _reshaped),
    **dict.fromkeys(operations("Dot Mv Mm Bmm Addmm Addmv Baddbmm"), _product),
    **dict.fromkeys(operations("Permute Transpose T"), _permuted),
    **dict.fromkeys(operations("Flip Roll"), _turned),
    **dict.fromkeys(operations("Select Unbind") | _PARTS, _taken),
    **dict.fromkeys(operations("Stack Cat"), _joined),
    **dict.fromkeys(operations("Index IndexSelect MaskedSelect Gather Take"), _indexed),
    "Repeat": _repeated,
    "ConstantPadNd": _padded,
    "CtcLoss": _of_sequences,
}
"""What becomes of owners in each operation that is known."""
