r"""Finds what a loss takes beside the values of the samples: constants, numbers, places, and what is added to values.

Most operations save their constants. What ``Add``, ``Where`` and the like put in is saved nowhere. Its value follows
from values that are saved: let x be the values nearest below, and J their Jacobian. The operations between are affine,
so the constant is :math:`v - J x`. Where it does not follow, the loss is refused.

A constant that does not change along the dimensions where the samples lie is shared by them. One that has as many
entries as there are samples along another dimension couples them: outputs ``[B, T]`` beside targets ``[B]``, where T
is B.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.loss.loss_graph import (
    LABELLED,
    TAPS,
    Coupled,
    Dependence,
    Root,
    Unreadable,
    inputs_of,
    is_linear,
    is_tensor,
    operation,
    operations,
    parents,
    saved,
    scalars,
    shape_of,
    signed,
    walk,
)
from gradguard.per_sample.loss.owners import FUSED, Mixed, Owners, Value
from gradguard.per_sample.loss.separation import Outputs
from gradguard.per_sample.loss.shared import SharedValue, place_of
from gradguard.torch_private import base_of, saved_constant, saved_names, saved_settings, saved_tensors

_TAKES_BESIDE = FUSED | operations(
    "Mul Div Where MaskedFill MaskedSelect Pow Maximum Minimum Xlogy Clamp ClampMin ClampMax Dot Gather"
)
"""Operations whose constants are broadcast beside values."""

_PRODUCTS = operations("Mm Bmm Mv Addmm Baddbmm Addmv")
_WEIGHS_CLASSES = LABELLED | {"MultiMarginLoss"}
_FILLING = operations("Where MaskedFill")
_ADDING = _FILLING | operations("Add Sub Rsub Addmm Baddbmm Addmv")
"""Affine operations that do not save what they add."""

_MOVING = operations("Repeat Flip Roll Gather Take ConstantPadNd Tril Triu")
"""Linear operations that are not followed from the loss down."""

_OF_TORCH = frozenset(["AddBackward1", "SubBackward1"])
"""Operations that add a number of a function of torch's, such as an eps."""

_TAKING = operations("Select Slice Unbind Split SplitWithSizes UnsafeSplit")
"""Operations that take places along a dimension, which their settings, or the numbers of their results, tell."""

_NUMBERS = frozenset(
    ["exponent", "min", "max", "min_val", "max_val", "threshold", "p", "margin", "scale", "ignore_index", "blank"]
)
"""Settings of operations that may be whole numbers, and are no sizes or places."""

_FACTORS = ("alpha", "beta", "value", "self")
_WHOLE = (["self"], ["self", "other"], ["self", "exponent"], ["self", "mat2"])
"""The inputs of functions, in their order."""


@dataclass(frozen=True)
class LossConstants:
    """What one loss takes beside the values of the samples.

    Args:
        roots: The values that backward starts from.
        outputs: The values that the module returned.
        owners: Whose the values are.
        depends: Knows which values depend on the samples.
        kind: Tells losses of other operations apart.
    """

    roots: Sequence[Root]
    outputs: Outputs
    owners: Owners
    depends: Dependence
    kind: Hashable

    def shared(self) -> Iterator[SharedValue]:
        """Yield what samples may share, but for factors of rows, which are weighed elsewhere.

        Raises:
            Coupled: If a constant lies along as many entries as there are samples, and is the same for each of them.
            Unreadable: If an operation takes a constant that the graph does not show.
        """
        nodes = self._nodes
        counted: Counter[Hashable] = Counter()
        each: defaultdict[Hashable, list[tuple[int, SharedValue]]] = defaultdict(list)

        def told(owners: Tensor | None, place: Hashable, of_each: Hashable, value: Tensor | float, *ways: Hashable):
            """Return what all samples share; what operations for one sample each take waits for the others."""
            one = SharedValue((self.kind, place), value, places=ways)
            if owners is not None and owners.numel() == 1 and self._several:
                each[of_each].append((int(owners), one))
                return []
            counted[place] += 1
            return [SharedValue((self.kind, place, counted[place]), value, places=ways)]

        for node, is_behind in nodes:
            name = operation(node)
            for i, owners, constant in self._kept(node, is_behind):
                own = own_sizes(constant)
                self._refuse_sizes(node, owners, constant, own, own)
                is_single = not self._several or (owners is not None and owners.numel() == 1)
                if not is_single and not _is_beside_several(owners, own):
                    continue
                for dim in (dim for dim, size in enumerate(own) if size == 1):
                    constant = constant.narrow(dim, 0, 1)
                constant = constant.reshape(()) if constant.numel() == 1 else constant
                if not _is_of_parameter(constant):
                    yield from told(owners, (name, i, constant.shape), (name, i, place_of(constant)), constant)
            for setting, number in self._numbers(node) if is_behind else ():
                place = name, setting, self.outputs.values_of_each
                yield from told(self._owners((node, 0)), place, (name, setting), number)
        edges = [((root.node, root.number), "root") for root in self.roots]
        edges += [(edge, operation(node)) for node, _ in nodes for edge in parents(node)]
        own_nodes = {node for node, _ in nodes}
        for (node, number), user in ((edge, user) for edge, user in edges if edge[0] in own_nodes):
            for what, value, ways in self._taken(node, number):
                place = "taken", user, operation(node), len(shape_of(*parents(node)[0])), what
                yield from told(self._owners((node, number)), place, place, value, *ways)
        counted.clear()
        for found in each.values():
            numbers = {one.value for _, one in found if not isinstance(one.value, Tensor)}
            if len({sample for sample, _ in found}) > 1 and len(numbers) < 2:
                place, value = found[0][1].key, found[0][1].value
                counted[place] += 1
                yield SharedValue((place, "each", counted[place]), value, places=found[0][1].places[:1])
        yield from self._added([node for node, _ in nodes])

    @property
    def _several(self) -> bool:
        return self.outputs.batch_size > 1

    @functools.cached_property
    def _nodes(self) -> list[tuple[Node, bool]]:
        """The operations between a loss and the module, each with whether it is behind what is not linear."""
        found: dict[Node, bool] = {}
        pending = [(root.node, root.number, False) for root in self.roots]
        seen: set[tuple[Node, bool]] = set()
        while pending:
            node, number, is_behind = pending.pop()
            if (node, number) in self.outputs.values or node.name() in TAPS or not self.depends(node):
                continue
            is_behind = is_behind or not is_linear(operation(node), inputs_of(node, self.depends))
            if (node, is_behind) in seen:
                continue
            found[node] = found.get(node, False) or is_behind
            seen.add((node, is_behind))
            pending += [(child, output, is_behind) for child, output in parents(node)]
        return [*found.items()]

    def _owners(self, value: Value) -> Tensor | None:
        """Return whose a value is; None if it is of several samples, as in a sum over the batch.

        Raises:
            Mixed: If that is not all that comes of them.
        """
        try:
            return self.owners.rows(*value)
        except Mixed as mixed:
            node = mixed.node
            if dict(self._nodes).get(node, True) or not is_linear(operation(node), inputs_of(node, self.depends)):
                raise
            return None

    def _kept(self, node: Node, is_behind: bool) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Yield the constants that an operation saved, each after its number and the owners of the values beside it.

        A constant has the dimensions of these.
        """
        name, inputs = operation(node), inputs_of(node, self.depends)
        if not inputs:
            return
        value = cast("Value", node.next_functions[inputs[0]])
        shape = shape_of(*value)
        if name in _WEIGHS_CLASSES:
            if (weights := saved(node, "weight")) is not None:
                yield 0, self._owners(value), weights.view([1] * (len(shape) > 1) + [-1] + [1] * (len(shape) - 2))
        elif name in {"Index", "IndexSelect"}:
            yield from ((i, self._owners(value), mask) for i, mask in enumerate(_masks(node, len(shape))))
            yield from ((i, self._owners((node, 0)), columns) for i, columns in enumerate(_columns(node)))
        elif name in _PRODUCTS and len(inputs) == 1:
            yield from self._factors(node, value, inputs[0] - len(node.next_functions))
        elif name in _TAKES_BESIDE:
            for i, constant in enumerate(saved_tensors(node)):
                is_python = not constant.dim() and constant.dtype != torch.bool and not is_tensor(constant)
                is_factor = constant.numel() == 1 and not is_behind and name in {"Mul", "Div"}
                if constant.requires_grad or is_python or is_factor:
                    continue
                whole = shape_of(node) if name == "Gather" else torch.broadcast_shapes(shape, constant.shape)
                place = (node, 0) if name == "Gather" or whole != shape else value
                yield i, self._owners(place), constant[(None,) * (len(whole) - constant.dim())]

    def _factors(self, node: Node, value: Value, place: int) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Yield the matrix, or vector, that a product takes beside values of the samples, the left ones (-2) or not."""
        owners = self._owners(value)
        for i, constant in enumerate(saved_tensors(node)):
            if constant.requires_grad or place < -2 or not constant.dim():
                continue
            if constant.dim() == 1:
                yield i, owners, constant.unsqueeze(0)
            else:
                new = -2 if place == -2 else -1
                turned = constant.mT.unsqueeze(-3 if place == -2 and owners is not None and owners.dim() > 1 else -2)
                turned = constant.mT if owners is not None and owners.dim() == 1 else turned
                yield i, None if owners is None else owners.unsqueeze(new), turned

    def _numbers(self, node: Node) -> Iterator[tuple[Hashable, float]]:
        """Yield the numbers that an operation takes, but for sizes and places."""
        yield from enumerate(scalars(node))
        settings = {**saved_settings(node), **{name: saved_constant(node, name) for name in _FACTORS}}
        for name, value in settings.items():
            if (isinstance(value, float) and not math.isnan(value)) or (name in _NUMBERS and type(value) is int):
                yield name, float(value)

    def _taken(self, node: Node, number: int) -> Iterator[tuple[str, float, tuple[Hashable, ...]]]:
        """Yield the places that an operation takes along a dimension where the samples do not lie."""
        if operation(node) not in _TAKING:
            return
        whole = cast("Value", parents(node)[0])
        dim, owners = signed(saved(node, "dim")) % len(shape_of(*whole)), self._owners(whole)
        if shape_of(*whole)[dim] == 1:
            return
        if owners is None or owners.shape[dim] == 1:
            yield "dim", float(dim), ()
            yield from _places(node, number, dim, shape_of(*whole)[dim])
        elif operation(node) == "Select" and owners.numel() == owners.shape[dim] > self.outputs.batch_size:
            place, flat = signed(saved(node, "index")) % owners.numel(), owners.flatten()
            yield "at", float((flat[:place] == flat[place]).sum()), ()  # among those of its sample

    # What fits along another dimension than the samples'

    def _refuse_sizes(
        self, node: Node, owners: Tensor | None, constant: Tensor | None, sizes: Sequence[int], surely: Sequence[int]
    ) -> None:
        """Check that a constant is each sample's own, or lies along nothing of as many entries as there are samples.

        Args:
            node: The operation that puts it there.
            owners: Whose the values beside it are.
            constant: It, where it was saved.
            sizes: Its sizes, 1 where it is repeated.
            surely: These sizes, but larger than 1 only where rounding cannot be the cause.

        Raises:
            Coupled: If it is neither.
        """
        batch_size, outputs = self.outputs.batch_size, self.outputs
        samples = [] if owners is None else [dim for dim, size in enumerate(owners.shape) if size > 1]
        if not self._several or self._is_inside or (owners is not None and not samples):
            return
        if constant is not None and any(SharedValue("", constant).is_of(one) for one in outputs.declared):
            return
        if not any(sizes[dim] > 1 for dim in samples):
            outputs.repeated.update(size for size in sizes if size > 1)
        if batch_size in outputs.constant_sizes or batch_size not in [
            size for dim, size in enumerate(sizes) if dim not in samples
        ]:
            return
        if constant is not None:
            _refuse_transposed(node, constant, samples)
            values = varying_sizes(constant)
            surely = values if max(values) > 1 else surely
        if samples and all(surely[dim] > 1 for dim in samples):
            return
        raise Coupled(
            f"{node.name()} puts a constant of {batch_size} entries, the same ones for every sample, beside values "
            f"of the samples. Is it made of the {batch_size} samples? Then each value belongs to two of "
            "them: give it a dimension for the samples, as by target.unsqueeze(1). If it is not, begin with a "
            "batch of another size, or let clipper.per_sample_losses compute each sample's loss from its own rows"
        )

    @functools.cached_property
    def _is_inside(self) -> bool:
        """Whether the loss is computed within the module, which was looked at by itself."""
        edges = [edge for node, _ in self._nodes for edge in parents(node)]
        return not self.outputs.values & {*edges, *[(root.node, root.number) for root in self.roots]}

    # What is added to values and saved nowhere

    def _added(self, nodes: Sequence[Node]) -> Iterator[SharedValue]:
        """Yield the constants that operations add and do not save.

        Raises:
            Unreadable: If one does not follow from values that are known.
        """
        if not any(self._adds(node) for node in nodes):
            return
        known = self.outputs.held | _known_values(nodes)
        users: dict[Value, Node] = {}
        for node in nodes:
            if not self._is_affine(node):
                users |= {edge: node for edge in parents(node) if edge not in users and self.depends(edge[0])}
        for number, (value, user) in enumerate(users.items()):
            adding = [node for node in self._affine(value, known) if self._adds(node)]
            if adding:
                yield from self._added_before(user, value, adding, known, number)

    def _added_before(
        self, user: Node, value: Value, adding: list[Node], known: Mapping[Value, Tensor], number: int
    ) -> Iterator[SharedValue]:
        """Yield the constants in one value that an operation takes which is not affine."""
        name, key = operation(user), (self.kind, "added", number)
        whole, normalized = known.get(value), None
        if whole is None and name in {"LogSoftmax", "Softmax"}:  # known but for a number of each row
            whole, normalized = saved(user, "result").detach(), signed(saved(user, "dim"))
            whole = whole if name == "LogSoftmax" else whole.log()
        if whole is None:
            raise _hidden(user)
        owners, filled = self._owners(value), None
        if value[0] in adding and operation(value[0]) in _FILLING:
            adding.remove(value[0])
            filled = self._filled(value[0]).broadcast_to(whole.shape)
            if normalized is None:
                yield from self._filling(user, owners, whole, filled, (*key, "filled"))
            elif bool((whole[filled] > -math.inf).any()):
                raise _hidden(user)
            whole = whole.masked_fill(filled, 0.0)
        found = _constant(value, {**known, value: whole}, self) if adding else None
        if not adding or owners is None:
            return
        if found is None or (normalized is not None and name == "Softmax"):
            raise _hidden(user)
        constant, each, most = found
        samples = [dim for dim, size in enumerate(owners.shape) if size > 1]
        if filled is not None:
            constant = constant.masked_fill(filled, math.nan)
        if normalized is not None:
            constant = constant - constant.nanmean(normalized, keepdim=True)
        if filled is not None and samples:  # what is filled in does not tell samples apart
            constant = constant.where(~filled, constant.nanmean(samples, keepdim=True)).nan_to_num(0.0)
        if any(operation(node) in _FILLING for node in adding):
            if bool((constant.abs() > most).any()):
                raise _hidden(user)
            return
        sizes, surely = varying_sizes(constant, each), varying_sizes(constant, most)
        self._refuse_sizes(value[0], owners, None, sizes, surely)
        shared = _is_beside_several(owners, surely)
        if not self._several:
            return
        if not shared and samples and len(adding) > 1 and self._additions(value, known, adding) > 1:
            raise Unreadable(
                f"several numbers or tensors are added to values before {user.name()}, and its graph shows their sum "
                "alone. Add up what is a sample's own first, as in output - (target - 1), or write the loss of one "
                "sample and call clipper.per_sample_losses"
            )
        for dim in (dim for dim in range(constant.dim()) if surely[dim] == 1):
            constant = constant.narrow(dim, 0, 1)
        one = float(constant) if constant.numel() == 1 else constant
        yield SharedValue((*key, getattr(one, "shape", ())), one, shared, float(2 * most))

    def _filled(self, node: Node) -> Tensor:
        """Return where an operation puts in a constant."""
        if operation(node) == "MaskedFill":
            return saved(node, "mask")
        condition = saved(node, "condition")
        return condition if inputs_of(node, self.depends) == [1] else ~condition

    def _filling(
        self, user: Node, owners: Tensor | None, whole: Tensor, filled: Tensor, key: Hashable
    ) -> Iterator[SharedValue]:
        """Yield what is put in at some places: a number, or each sample's own."""
        if owners is None or not bool(filled.any()) or not self._several:
            return
        values = whole[filled]
        if bool((values == values[0]).all()):
            yield SharedValue(key, float(values[0]), owners.numel() > 1)
            return
        samples = [dim for dim, size in enumerate(owners.shape) if size > 1]
        if not samples:
            return
        low = whole.where(filled, math.inf).amin(samples)
        high = whole.where(filled, -math.inf).amax(samples)
        if bool((filled.sum(samples) > 1).any()) and not bool((low < high).any()):
            raise _hidden(user)

    def _adds(self, node: Node) -> bool:
        """Tell whether an operation adds a constant that it does not save."""
        inputs, places = inputs_of(node, self.depends), node.next_functions
        hides = operation(node) in _ADDING and (len(inputs) < len(places) or len(places) == 1)
        return hides and node.name() not in _OF_TORCH

    def _is_affine(self, node: Node) -> bool:
        """Tell whether a value is a linear function of one value of the samples, or of several, and a constant."""
        inputs, name = inputs_of(node, self.depends), operation(node)
        return is_linear(name, inputs) or name in _MOVING or (name in _ADDING and len(inputs) == 1)

    def _affine(self, value: Value, known: Container[Value]) -> Iterator[Node]:
        """Yield the affine operations from a value to the known ones that are nearest."""

        def ends(place: Value) -> bool:
            return (place in known and place != value) or not self._is_affine(place[0])

        def onward(place: Value) -> list[Value]:
            return [] if ends(place) else [edge for edge in parents(place[0]) if self.depends(edge[0])]

        return (place[0] for place in walk([value], onward) if not ends(place))

    def nearest(self, value: Value, known: Mapping[Value, Tensor]) -> list[Value] | None:
        """Return the known values that a value is an affine function of; None if it is of others, too."""
        nodes = list(self._affine(value, known))
        behind = [edge for node in nodes for edge in parents(node) if self.depends(edge[0])]
        ends = dict.fromkeys(edge for edge in behind if edge in known)
        return [*ends] if all(edge in known or edge[0] in nodes for edge in behind) and value[0] in nodes else None

    def _additions(self, value: Value, known: Mapping[Value, Tensor], adding: Sequence[Node]) -> int:
        """Return how many unseen constants are added to an element of a value at most, from the known values on."""
        counts: dict[Value, int] = {}
        pending = [value]
        while pending:
            top = pending[-1]
            node = top[0]
            ends = top in counts or (top in known and top != value) or not self._is_affine(node)
            below = [] if ends else [edge for edge in parents(node) if self.depends(edge[0])]
            if unknown := [edge for edge in below if edge not in counts]:
                pending += unknown
                continue
            pending.pop()
            found = [counts[edge] for edge in below]
            together = max(found, default=0) if operation(node) in {"Stack", "Cat"} else sum(found)
            counts.setdefault(top, together + (not ends and node in adding))
        return counts[value]


def _hidden(node: Node) -> Unreadable:
    return Unreadable(
        f"its graph does not show what is added to, or filled in, values before {node.name()}. Use an operation that "
        "keeps its input, as .clamp(min=0) for relu"
    )


def _is_beside_several(owners: Tensor | None, sizes: Sequence[int]) -> bool:
    """Tell whether an element of a constant of some sizes lies beside values of several samples."""
    return owners is None or any(many > 1 and size == 1 for many, size in zip(owners.shape, sizes, strict=True))


def _is_of_parameter(constant: Tensor) -> bool:
    """Tell whether a constant is the weight of a layer, or a view of one: it may be trained elsewhere."""
    return isinstance(constant, nn.Parameter) or isinstance(base_of(constant), nn.Parameter)


def _masks(node: Node, dims: int) -> Iterator[Tensor]:
    """Yield the masks by which values are indexed, with a dimension for each of the value's."""
    at = 0
    for index in saved(node, "indices") if operation(node) == "Index" else ():
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            yield index.view((1,) * at + index.shape + (1,) * (dims - at - index.dim()))
            at += index.dim()
        else:
            at += 1


def _columns(node: Node) -> Iterator[Tensor]:
    """Yield the list by which the same places along a dimension are taken of all that lies there."""
    dims = len(shape_of(node))
    if operation(node) == "IndexSelect":
        given = [(signed(saved(node, "dim")) % dims, saved(node, "index"))]
    else:
        given = [(dim, index) for dim, index in enumerate(saved(node, "indices")) if isinstance(index, Tensor)]
    if len(given) == 1 and given[0][1].dim() == 1 and given[0][1].dtype != torch.bool:
        [(dim, index)] = given
        yield index.view([-1 if one == dim else 1 for one in range(dims)])


def _places(node: Node, number: int, dim: int, size: int) -> Iterator[tuple[str, float, tuple[Hashable, ...]]]:
    """Yield the places along a dimension of some size, as they are counted from the front, from the end, and so on."""
    name = operation(node)
    if name in {"Select", "Unbind"}:
        start = number if name == "Unbind" else signed(saved(node, "index")) % size
        yield "at", float(start), (start, start - size)
        return
    if name == "Slice":
        start, end = signed(saved(node, "start") or 0), saved(node, "end")
        start, _, step = slice(start, None if end is None else signed(end), saved(node, "step")).indices(size)
        yield "from", float(start), (start, start - size, object())
        yield "step", float(step), ()  # an end is a length, up to which values are padded: that is judged by itself
        return
    part: Hashable = object()
    if name == "SplitWithSizes":
        sizes = list(saved(node, "split_sizes"))
        start, end = sum(sizes[:number]), sum(sizes[: number + 1])
    else:
        each = saved(node, "split_size")
        start, end, count = number * each, min(size, (number + 1) * each), -(-size // each) if each else 1
        part = (number, count) if count and each == -(-size // count) else part
    yield "from", float(start), (start, start - size, part)
    yield "to", float(end), (end, end - size, part)


def _refuse_transposed(node: Node, constant: Tensor, samples: Sequence[int]) -> None:
    """Check that a constant is no transposed view whose samples lie along another dimension than the values'.

    Raises:
        Coupled: If it is.
    """
    if len(samples) != 1 or constant.is_contiguous():
        return
    places = [dim for dim, size in enumerate(constant.shape) if size == constant.shape[samples[0]]]
    outermost = max(places, key=constant.stride)  # of a batch the samples are
    if outermost != samples[0] and constant.stride(outermost) > constant.stride(samples[0]) > 0:
        raise Coupled(
            f"{node.name()} puts a transposed constant of shape {list(constant.shape)} beside values whose samples "
            f"lie along dimension {samples[0]}, as target.T: so each value belongs to two samples. Leave it as it "
            "came from the loader; if its samples lie there, copy it, .contiguous()"
        )


def _known_values(nodes: Sequence[Node]) -> dict[Value, Tensor]:
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


def _constant(value: Value, known: Mapping[Value, Tensor], of: LossConstants) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the constant in a value, and how far rounding may have moved it; None if it cannot be told.

    Rounding is given twice: of each element where its parts do not cancel, and of any, where they do.

    Raises:
        Unreadable: If a backward from there cannot be run.
    """
    below = of.nearest(value, known)
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
