"""Read the terms of a loss: the rows that each reduces, the sample of each row, and operations that mix samples."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.beside import (
    INVERTIBLE,
    AffineChains,
    Bounds,
    adds_unseen,
    constants_beside,
    hides_constant,
    is_affine,
    known_values,
    own_sizes,
    places_of,
    recovered,
    unrepeated,
)
from gradguard.per_sample.loss.ledger import RowWeights
from gradguard.per_sample.loss.loss_graph import (
    Constant,
    Coupled,
    LinearStep,
    Path,
    Unreadable,
    Value,
    data_choose_rows,
    data_put_rows,
    dims_of,
    input_of,
    is_tap,
    nodes_below,
    operation,
    parents,
    pull,
    saved,
    shape_of,
)
from gradguard.per_sample.loss.operation_table import (
    ADDING,
    ELEMENTWISE,
    FUNCTIONS,
    FUSED,
    JOINING,
    LABELLED,
    MEANS,
    MOVING,
    PRODUCTS,
    RESHAPING,
    SCALINGS,
    SELECTING,
    TAKING,
    operations,
)
from gradguard.per_sample.loss.separation import Outputs, Silent
from gradguard.per_sample.loss.shared import is_declared

_ROW_EACH = frozenset(["MultiMarginLoss", "MultilabelMarginLoss"])
"""Losses of `FUSED` whose last input dimension holds the classes of one row."""

_OVER_DIMS = operations("reduces")
_NONLINEAR = _OVER_DIMS | FUNCTIONS | PRODUCTS | SCALINGS
"""Operations after which, if a reduction over the batch precedes them, no value belongs to one sample."""

_CHOOSING = operations("compares")
"""Operations that select a value by comparing it with others, possibly those of other samples."""


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss: the weights of each sample's rows, and the reductions and constants of the term.

    Attributes:
        weights: The sum of the weights of each sample's rows [B], without constants; the number of rows where these are
            not weighted.
        size: The number of all rows, including those that do not count.
        even: Whether every weight is 0 or 1.
        labels: Whether rows are labels.
        share: Each sample's share of the mean that reduces the batch [B]; None where a sum reduces it.
        levels: The counts of values that the rows are summed to within samples.
        constants: The constants, from the root down.
        mean: The mean that reduces the batch, and how many values of each sample it takes from this term [B].
        rows: The number of all rows of each sample [B], including those that do not count.
        inner: How many values a row has if rows lie along the first dimension, along the first two, and so on.
        class_weights: Whether the term is a mean over labels of classes that have different weights.
        summed: The weights of the values that the last sum adds up, by sample [B].
        width: How many row values the sums within samples add up to one such value.
        is_mean: Whether the last operation that adds rows up is a mean.
        numbers: The constants on each path to the rows: in a loop over samples each path may have its own.
    """

    weights: Tensor
    size: float
    even: bool
    labels: bool
    share: Tensor | None
    levels: list["Summands"]
    constants: tuple[Constant, ...]
    rows: Tensor
    mean: tuple[Node, Tensor] | None = None
    inner: tuple[int, ...] = ()
    class_weights: bool = False
    summed: Tensor | None = None
    width: float = 1.0
    is_mean: bool = False
    numbers: tuple[tuple[Constant, ...], ...] = ()

    @property
    def mean_of_one(self) -> bool:
        """True if the term is a mean over the rows of one sample: the only one of several samples that has rows."""
        several = len(self.weights) > 1 and self.share is None
        return several and self.is_mean and int((self.weights > 0).sum()) == 1


@dataclass(frozen=True)
class Owner:
    """The sample of each row at the end of a path. It depends on the structure of a loss, not on the numbers in it.

    Attributes:
        name: The operation that computes the rows; "" for values that the module returned.
        samples: The sample of each row; can be broadcast to the rows.
        sure: Whether the samples are known; else they are only likely.
    """

    name: str
    samples: Tensor
    sure: bool


class SampleRows:
    """The rows at the end of a path, and the sample of each row.

    Args:
        path: The path from the loss to the rows.
        outputs: The values that the module returned.
        owner: The samples of the rows, if they are known from a loss of the same structure.
        is_output: Take the values at the end of the path as the rows, whatever operation computes them.

    Attributes:
        path: As passed.
        name: The operation that computes the rows; "" for values that the module returned.
        shape: Shape of the rows.
        behind: The operations between the rows and the module.
        owner: The samples of the rows.

    Raises:
        Coupled: If an operation mixes samples in the rows.
        Unreadable: If the sample of a row cannot be found out.
    """

    def __init__(self, path: Path, outputs: Outputs, owner: Owner | None, is_output: bool = False) -> None:
        self.path, self._outputs, self._depends = path, outputs, outputs.depends
        self.name = "" if is_output else path.value.operation
        self.shape = self._shape()
        ends, top = outputs.values, path.value.node
        below = nodes_below(top, ends, lambda node: [] if is_tap(node) else self._depends.below(node))
        self.behind = [node for node in below if not is_tap(node)]
        self.owner = self._owner() if owner is None else owner
        self._refuse_constants()

    def _shape(self) -> torch.Size:
        """Return the shape of the rows: that of the labels, or of the input of a loss that also reduces its rows."""
        node = self.path.value.node
        if self.name in LABELLED:
            return saved(node, "target").shape
        if self.name not in FUSED:
            return self.path.value.shape
        of_samples = node.next_functions[0][0] is not None
        shape = input_of(node, 0).shape if of_samples else torch.Size(saved(node, "self").shape)
        return shape[:-1] if self.name in _ROW_EACH and len(shape) > 1 else shape

    def _owner(self) -> Owner:
        """Map each row to its sample: check the layouts that the sizes allow, else infer the samples from derivatives.

        Returns:
            The owner.

        Raises:
            Coupled: If rows belong to several samples each.
            Silent: If rows have a derivative of 0, which does not show their sample.
            Unreadable: If the samples cannot be found out.
        """
        outputs, known = self._outputs, self.name in _NONLINEAR | FUSED
        size, rows, node = outputs.batch_size, self.shape[:1].numel(), self.path.value.node
        candidates = self._candidates()
        if candidates or known:
            self._refuse_mixing()
        either_order = (False, True) if candidates and rows > size and rows % size == 0 else ()
        for samples in [*candidates, *[_numbered(node, self.shape, 0, size, first) for first in either_order]]:
            found = self._apart(samples)
            if all(one is None for one in found):  # the rows are inside the module, which is checked by itself
                sure = size == 1 or (len(candidates) == 1 and self._in_order)
            elif False not in found:
                sure = self._are_shown(samples)
            else:
                continue
            self._refuse_broadcast()
            return Owner(self.name, samples, sure)
        depends = candidates or not all(one is None for one in self._apart(torch.zeros((), device="cpu")))
        if depends and len(self._values) == 1 and not self._passes(_CHOOSING):
            try:
                measured = self._measured(*self._values)
                if all(self._apart(measured)):
                    self._refuse_broadcast()
                    return Owner(self.name, measured, True)
            except Silent:
                raise
            except Unreadable:
                pass
        if candidates:
            raise Coupled(
                f"the values that it is computed from, of shape {list(self.shape)} from {node.name()}, depend on "
                "several samples each, so a sample's gradient depends on the other samples. Leave that term out, or "
                "compute it for each sample and average"
            )
        raise Unreadable(
            f"values of shape {list(self.shape)}, from {node.name()}, do not show which of the {size} samples each "
            "belongs to"
            if known
            else f"the operation {node.name()} between the loss and the samples is not known"
        )

    def _candidates(self) -> list[Tensor]:
        """Return the layouts of samples that the sizes of the rows allow, the likeliest first."""
        node, shape, outputs = self.path.value.node, self.shape, self._outputs
        if selected := self._selections:
            first, *others = [_chosen_samples(one, shape, outputs) for one in selected]
            agreed = [one for one in first if all(any(torch.equal(one, two) for two in other) for other in others)]
            return [one.view(one.shape + (1,) * (len(shape) - one.dim())).broadcast_to(shape) for one in agreed]
        axes, size = _axes(shape, outputs), outputs.batch_size
        return [_numbered(node, shape, axis, size, outputs.batch_first) for axis in axes]

    @functools.cached_property
    def _selections(self) -> list[Node]:
        """The operations that selected these rows, such as ``logits[mask]``; none if a path below has no selection."""
        node, shape = self.path.value.node, self.shape
        found: list[Node] = []
        pending, seen = [node] if shape else [], {node}
        while pending:
            node = pending.pop()
            if operation(node) in SELECTING:
                found.append(node)
                continue
            below = self._depends.below(node)
            if is_tap(node) or not below or any(each.shape[:1] != shape[:1] for each in below):
                return []
            pending += [each.node for each in below if each.node not in seen]
            seen.update(each.node for each in below)
        return found

    def _apart(self, samples: Tensor) -> list[bool | None]:
        """Tell of each value that holds the rows whether it depends on these samples only; None if on no output."""
        found = []
        for value in self._values:
            shape, own = value.shape, samples
            if len(shape) != len(self.shape):  # rows have classes
                own = samples.broadcast_to(self.shape).unsqueeze(self._dim_of_classes(shape))
            found.append(self._outputs.are_separate(value, own))
        return found

    @property
    def _values(self) -> list[Value]:
        """The values that hold the rows: the inputs of a loss that also reduces its rows, else the last value."""
        return self._depends.below(self.path.value.node) if self.name in FUSED else [self.path.value]

    def _are_shown(self, samples: Tensor) -> bool:
        """Tell whether the samples of the rows are certain: by the order of the samples, or by each row's derivative.

        Returns:
            The answer; False where a row has a derivative of 0.

        Raises:
            Silent: If such a row was selected by data: then neither order nor derivative shows its sample.
            Unreadable: If rows belong to other samples, or their samples cannot be found out.
        """
        is_chosen = self._passes(SELECTING)
        is_list = is_chosen or samples.numel() > self._outputs.batch_size
        if not is_list or self._in_order:  # of [B, T] the samples are known
            return True
        try:
            shown = [*map(self._measured, self._values)]
        except Silent:
            if is_chosen:
                raise
            return False
        if not all(torch.equal(one, samples.broadcast_to(self.shape).to(one)) for one in shown):
            raise Unreadable(f"values of shape {list(self.shape)} are not in the order of the samples")
        return True

    def _passes(self, names: frozenset[str]) -> bool:
        """Tell whether one of these operations is between the rows and the module."""
        return not names.isdisjoint(map(operation, self.behind))

    @property
    def _in_order(self) -> bool:
        """True if no operation between the rows and the module, or a layer inside it, changes the samples' order."""
        outputs = self._outputs
        edges = [self.path.value, *[edge for node in self.behind for edge in parents(node)]]
        ends = [end for end in edges if end in outputs.values or end.is_tap]
        in_front = all(end.shape[:1] == (outputs.batch_size,) for end in ends if end.shape)
        chosen = self._selections  # the samples of selected rows are known
        still = all(operation(n) in _IN_ORDER or n in chosen or _turns_rows_only(n) for n in self.behind)
        return outputs.batch_first and in_front and still

    def _measured(self, value: Value) -> Tensor:
        """Return the sample of each row, inferred from derivatives of a value that holds the rows."""
        samples = self._outputs.samples_of(value)
        return samples if samples.shape == self.shape else samples.select(self._dim_of_classes(samples.shape), 0)

    def _dim_of_classes(self, values: torch.Size) -> int:
        return 1 if self.name in LABELLED and len(values) > 1 else -1

    def _refuse_mixing(self) -> None:
        """Check that no operation between the end of the path and the module mixes samples.

        Raises:
            Coupled: If one does.
        """
        if self.path.value in self._outputs.values:
            return
        for node in self.behind:
            reduces = node is self.path.value.node and self.name in FUSED
            if not reduces and self._mixes(node):
                raise Coupled(
                    f"{node.name()} mixes samples, and its result is no sum of parts of single samples, so a sample's "
                    "gradient depends on the other samples. Leave that term out, or compute it for each sample and "
                    "average"
                )

    def _mixes(self, node: Node) -> bool:
        """Tell whether an operation mixes samples: sizes say that it may, and derivatives do not show the contrary."""
        name, outputs = operation(node), self._outputs
        behind = self._depends.below(node)
        if not behind:
            return False
        before = behind[0].shape
        if name in FUSED:
            return saved(node, "reduction") != 0 and bool(_axes(before, outputs))
        if name == "Mm":
            return len(behind) == 2
        if name not in _OVER_DIMS or not before:
            return False
        dims, usual = dims_of(node), outputs.usual_dim(before)
        if dims is None:
            mixes = bool(_axes(before, outputs))
        else:
            others = before[:usual] + before[usual + 1 :]
            along = usual in dims
            whole = before[usual] > 0 and before[usual] % outputs.batch_size == 0
            mixes = along and whole and outputs.batch_size not in others
        if not mixes:
            return False
        try:
            samples = outputs.samples_of(parents(node)[0])
        except Unreadable:
            return True
        together = dims or [*range(samples.dim())]
        return not torch.equal(samples.amin(together), samples.amax(together))

    @property
    def _nodes(self) -> list[Node]:
        """The operations between the loss and the module."""
        return [*[step.value.node for step in self.path.steps], *self.behind]

    def _refuse_constants(self) -> None:
        """Check that no constant has B entries along a dimension other than the samples', the same for every sample.

        Where T is B, outputs ``[B, T]`` and targets ``[B]`` make such losses: each depends on two samples.

        Raises:
            Coupled: If there is such a constant.
            Unreadable: If that cannot be decided.
        """
        depends, nodes, outputs = self._depends, [*self._nodes, *self.path.weighing], self._outputs
        for node in nodes:
            for value, constant, _ in constants_beside(node, depends):
                shape, sizes = value.shape, own_sizes(constant)
                if is_declared(constant, outputs):
                    continue
                outputs.coincide |= self._is_doubtful(shape, shape)  # the next batch's constant may have other sizes
                if self._is_doubtful(shape, sizes):
                    self._refuse_transposed(node, value, constant)
                    varying = Bounds.exactly(constant.double()).sizes
                    sizes = varying if max(varying, default=1) > 1 else sizes
                self._refuse_constant(node, value, sizes, sizes)
                if all(sizes[dim] == 1 for dim in places_of(shape, outputs.batch_size)):
                    self._learn(sizes)
        unseen = [node for node in self.behind if adds_unseen(node, depends)]
        hiding = [node for node in nodes if hides_constant(node, depends)]
        for node in hiding:
            for value in (Value(node), *[input_of(node, place) for place in depends.inputs(node)]):
                self._refuse_constant(node, value)
        for node in (*unseen, *hiding):
            self._learn(shape_of(node))
        for node in unseen:
            if operation(node) in JOINING:  # the joined shape is another one than that of the constant
                shapes = [input_of(node, place).shape for place in depends.inputs(node)]
                if any(self._is_doubtful(shape, shape) for shape in shapes):
                    raise Unreadable(f"its graph does not show all numbers that {node.name()} takes")
        if not any(self._is_doubtful(shape_of(node), shape_of(node)) for node in unseen):
            return
        outputs.coincide = True
        chains = AffineChains(outputs.tensors | known_values(nodes, depends), depends)
        from_results = {parents(node)[0]: recovered(node) for node in nodes if operation(node) in INVERTIBLE}
        wholes = {one: bounds for one, bounds in from_results.items() if bool(bounds.middle.isfinite().all())}
        wholes |= {one: Bounds.exactly(values) for one, values in chains.known.items()}
        curved = [node for node in nodes if not is_affine(node, depends)]
        for value in dict.fromkeys(edge for node in curved for edge in depends.below(node)):
            if not chains.add_unseen(value) or not self._is_doubtful(value.shape, value.shape):
                continue
            if value in wholes and (found := chains.added(value, wholes[value])) is not None:
                each = found.difference.widened(found.each)
                self._refuse_constant(value.node, value, each.sizes, found.bounds.sizes)
            else:
                self._refuse_constant(value.node, value)

    def _learn(self, sizes: Sequence[int]) -> None:
        """Remember sizes of constants that are not made of samples. A batch of one sample shows none."""
        if self._outputs.batch_size > 1:
            self._outputs.repeated.update(size for size in sizes if size > 1)

    @functools.cached_property
    def _is_inside(self) -> bool:
        """True if the rows are computed inside the module, which is checked by itself."""
        edges = [edge for node in [self.path.value.node, *self.behind] for edge in parents(node)]
        return self._outputs.values.isdisjoint([self.path.value, *edges])

    def _is_doubtful(self, shape: torch.Size, constant: Sequence[int]) -> bool:
        """Tell whether a constant beside a value may lie along a dimension of B entries that is not the samples'."""
        batch_size, places = self._outputs.batch_size, places_of(shape, self._outputs.batch_size)
        sized = {dim for dim, size in enumerate(constant) if size == batch_size}
        known = batch_size == 1 or batch_size in self._outputs.constant_sizes or self._is_inside
        return not known and bool(sized) and (len(places) != 1 or not sized <= {*places})

    def _refuse_constant(
        self, node: Node, value: Value, sizes: Sequence[int] | None = None, surely: Sequence[int] = ()
    ) -> None:
        """Check that a constant beside a value has its own entry for each sample, or lies along no dimension of size B.

        Args:
            node: The operation that takes the constant.
            value: The value.
            sizes: Sizes of the constant, 1 where it is repeated; None where the graph does not keep them.
            surely: These sizes, but larger than 1 only where entries differ by more than rounding.

        Raises:
            Coupled: If the constant is the same for every sample along another dimension of size B.
            Unreadable: If it may be, and its sizes are not known.
        """
        shape, batch_size = value.shape, self._outputs.batch_size
        if not self._is_doubtful(shape, shape if sizes is None else sizes):
            return
        places = places_of(shape, batch_size)
        if surely and places and all(surely[dim] > 1 for dim in places):
            return
        samples = self._dim_of_samples(value, places)
        if sizes is None and [dim for dim, size in enumerate(shape) if size == batch_size] != [samples]:
            raise Unreadable(
                f"{node.name()} takes a constant beside values of shape {list(shape)}, and the graph does not keep the "
                f"constant's shape. If the constant has {batch_size} entries, one of each sample, then each value "
                "belongs to two samples. Begin with a batch of another size, or let clipper.per_sample_losses compute "
                "the losses"
            )
        one = sizes is not None and (samples is None or surely[samples] == 1)
        if one and self._outputs.only_sample(value) is None:
            raise Coupled(
                f"{node.name()} puts a constant of {batch_size} entries, the same ones for every sample, beside values "
                f"of shape {list(shape)}. Is the constant made of the {batch_size} samples? Then each value belongs to "
                "two samples: give the constant a dimension for the samples, as by target.unsqueeze(1). If it is not, "
                "begin with a batch of another size, or let clipper.per_sample_losses compute each sample's loss from "
                "its own rows"
            )

    def _refuse_transposed(self, node: Node, value: Value, constant: Tensor) -> None:
        """Check that a constant is no transposed view, whose samples lie along another dimension than the value's.

        Raises:
            Coupled: If it is such a view.
        """
        places = [dim for dim in places_of(value.shape, len(constant)) if constant.shape[dim] == len(constant)]
        if len(places) < 2 or constant.is_contiguous():
            return
        outermost = max(places, key=constant.stride)  # in memory, a batch has its samples outermost
        samples = self._dim_of_samples(value, places)
        if samples is not None and samples != outermost and constant.stride(outermost) > constant.stride(samples) > 0:
            raise Coupled(
                f"{node.name()} puts a transposed constant of shape {list(constant.shape)}, such as target.T, beside "
                f"values whose samples lie along dimension {samples}: so each value belongs to two samples. Use the "
                f"tensor as the loader returned it; if its samples lie along dimension {samples}, copy it by "
                ".contiguous()"
            )

    def _dim_of_samples(self, value: Value, places: Sequence[int]) -> int | None:
        """Return the dimension of the samples, found by derivatives; None if no dimension holds them."""
        shape, size = value.shape, self._outputs.batch_size
        orders = ((dim, _numbered(value.node, shape, dim, size, first)) for dim in places for first in (True, False))
        # Inside the module, where the answer is None, this takes the likeliest: the module is checked by itself.
        return next((dim for dim, one in orders if self._outputs.are_separate(value, one) is not False), None)

    def _refuse_broadcast(self) -> None:
        """Check that no value of the samples is repeated along a constant of B entries.

        Outputs ``[B, 1]`` and targets ``[B]`` make such ``[B, B]`` losses: each depends on two samples.

        Raises:
            Coupled: If a value is repeated so.
        """
        outputs, nodes = self._outputs, self._nodes
        elsewhere = {edge.node for n in nodes if operation(n) not in _BROADCASTING for edge in parents(n)}
        beside = {edge.node for n in nodes if operation(n) in _BROADCASTING for edge in parents(n)} - elsewhere
        for node in nodes:
            name, shape = operation(node), shape_of(node)
            if name not in _BROADCASTING or (name == "Expand" and node in beside):  # its user is checked instead
                continue
            before = map(_before_expand, self._depends.below(node))
            padded = [(1,) * (len(shape) - len(one)) + one for one in before]
            for dim, size in enumerate(shape):
                if size < 2 or any(one[dim] != 1 for one in padded):
                    continue
                self._learn([size])
                if size == outputs.batch_size > 1 and size not in outputs.constant_sizes:
                    raise Coupled(
                        f"{node.name()} repeats outputs along a constant of {size} entries, which makes values of "
                        f"shape {list(shape)}. Is the constant made of the {size} samples? Then each value belongs to "
                        "two samples: give outputs and targets the same shape, as by output.squeeze(1). If the "
                        "constant is not made of them, begin with a batch of another size"
                    )

    def cut(self) -> str:
        """Return the name of an operation that cuts, fills or puts rows where other samples may decide; "" if none."""
        declared = {one for one in self._outputs.declared if not isinstance(one, Tensor)}
        for node in self._nodes:
            fills = operation(node) in {"Alias", _COPIES, "ConstantPadNd"}
            if fills or data_put_rows(node) or not declared.issuperset(self._places_of_cuts(node)):
                return node.name()
        return ""

    def _places_of_cuts(self, node: Node) -> list[int]:
        """Return the positions where an operation cuts each sample, without the first, the last and the middle one."""
        name = operation(node)
        if name not in TAKING - {"Select", "Unbind"}:
            return []
        [whole], dim = parents(node), saved(node, "dim")
        length = whole.shape[dim]
        if name == "Slice":
            start, end = saved(node, "start"), saved(node, "end")
            return [abs(place) for place in (start, end) if 1 < abs(place) < length and end - start != 1]
        sizes = list(saved(node, "split_sizes")) if name == "SplitWithSizes" else [saved(node, "split_size")]
        along = {dim % len(whole.shape)} & {*places_of(whole.shape, self._outputs.batch_size)}
        is_halved = sizes[0] == -(-length // 2) and len(sizes) < 3
        return [] if is_halved or self._dim_of_samples(whole, [*along]) is not None else sizes[: max(1, len(sizes) - 1)]

    @property
    def _adding(self) -> list[str]:
        """The operations that add rows up, from the rows up to the root."""
        return [step.operation for step in self.path.steps if step.operation in MEANS | ADDING]

    @functools.cached_property
    def _weighed(self) -> tuple[Tensor, Tensor | float]:
        """Each row's weight in the loss, and the part that its label decides: the class weight; 0 if it is missing.

        Weights have a size of 1 along a dimension where they are repeated.
        """
        path, counting, weights = self.path, 1.0, unrepeated(self.path.coefficient).abs()
        if self.name in LABELLED:
            node = path.value.node
            counting = there = has_label(node)
            if self._has_class_weights:
                weight, target = saved(node, "weight"), saved(node, "target")
                counting = there * weight.detach().to(path.coefficient)[target.where(there, 0)]
            weights = (weights * counting).abs()
        return weights.view((1,) * (len(self.shape) - weights.dim()) + weights.shape), counting

    @property
    def _fused(self) -> int:
        """How the operation that computes the rows reduces them: 0 not at all, 1 by a mean, 2 by a sum."""
        return int(saved(self.path.value.node, "reduction")) if self.name in FUSED else 0

    @property
    def _has_class_weights(self) -> bool:
        """True if the rows are reduced by a mean over labels of classes that have different weights."""
        if self.name not in LABELLED or self._fused != 1:
            return False
        weight = saved(self.path.value.node, "weight")
        return weight is not None and not torch.equal(weight, weight[:1].expand_as(weight))

    def term(self, scale: float, seen: bool) -> LossTerm:
        """Return the term of these rows: each sample's rows and weights.

        Args:
            scale: The factor by which a GradScaler multiplied the loss.
            seen: Whether such a loss was accepted, so that class weights are compared with the earlier ones.

        Returns:
            The term.

        Raises:
            Coupled: If the weights of rows are normalized over the batch.
            Unreadable: If rows may belong to samples in several ways.
        """
        path, samples, shape, fused = self.path, self.owner.samples, self.shape, self._fused
        batch_size = self._outputs.batch_size
        inner = math.prod(step.mean or 1.0 for step in path.steps if step.operation in MEANS)
        weights = self._weighed[0] / (inner * abs(math.prod(constant.value for constant in path.constants)))
        there = weights > 0
        smallest, largest = _extremes_above_zero(weights) or (1.0, 1.0)
        cancelled, counting = largest, self._weighed[1]
        if self._has_class_weights and isinstance(counting, Tensor) and bool(there.any()):
            cancelled = float(weights.sum() / counting.sum())  # class weights divide what they multiply
        even = math.isclose(smallest, largest, rel_tol=1e-6)
        if even:
            weights = there.to(weights)
        if not self.owner.sure and not (even and bool(there.all())):
            raise Unreadable(f"values of shape {list(shape)} may belong to {batch_size} samples in several ways")
        sums = by_sample(samples, weights, batch_size, shape)
        one_each = torch.ones([1] * len(shape), dtype=weights.dtype, device=weights.device)
        rows = by_sample(samples, one_each, batch_size, shape)
        share, levels, mean, size, summed, width = None, [], None, shape.numel(), None, 1.0
        if fused and int((rows > 0).sum()) == 1 and batch_size > 1:  # a mean or a sum within one sample
            summed = sums
            sums, size, even, inner, largest = (sums > 0).to(sums), 1, True, 1.0, cancelled
            rows = sums
        elif fused == 1:  # a mean of rows: of all of them, or of those with a label
            share = sums / sums.sum()
        else:
            levels, mean = _levels(path.steps, shape, samples, there, batch_size)
            share = None if mean is None else mean[1] / mean[1].sum()
            summed, width = self._summed(sums * inner, levels)
        # With only two distinct weights, their sum may equal the number of rows by chance.
        if (
            share is not None
            and not even
            and not (seen and self._has_class_weights)
            and any(abs(float(weights.sum() / n) - 1) < 1e-6 for n in (weights.numel(), there.sum()))
            and weights[there].unique().numel() > 2
        ):
            raise Coupled(
                "the weights in the mean add up to the number of rows: they were divided by their own mean over the "
                "batch, so every sample's weight depends on the other samples. Use weights that do not depend on the "
                "batch"
            )
        constants = _without(scale, path.constants)
        sizes = tuple([math.prod(shape[dim:]) for dim in range(1, len(shape))])
        if not even:
            each = by_sample(samples, there, batch_size, shape)
            wide = [Summands(each / n, rows / n, size / n) for n in (1, *sizes) if n and float(each.sum()) % n == 0]
            levels = [*wide, *levels]
        equal = sums[sums > 0] * inner
        if share is None and len(equal) and not even and torch.allclose(equal, equal[:1].expand_as(equal)):
            even, largest, sums, size = True, float(equal[0]), (sums > 0).to(sums) / inner, len(equal) / inner
            rows, summed = sums, None
        if share is None and even and not math.isclose(largest, 1.0, rel_tol=1e-6):
            constants = (
                *constants,
                Constant(path.value.node, largest, False, 1e-6, "weights" if path.weighing else "gradient"),
            )  # for example from gradient=torch.full((B,), 1 / B)
        inner = inner if share is None else 1.0
        weights, size, rows = sums * inner, size * inner, rows * inner
        reduced = fused == 1 or self._adding[-1:] in (["Mean"],)
        return LossTerm(
            weights,
            size,
            even,
            self.name in LABELLED,
            share,
            levels,
            constants,
            rows,
            mean,
            sizes,
            self._has_class_weights,
            weights if summed is None else summed,
            width,
            reduced,
            (constants,),
        )

    def _summed(self, sums: Tensor, levels: Sequence["Summands"]) -> tuple[Tensor, float]:
        """Return the weights of the values that the last sum adds up, and how many row values make one such value.

        Args:
            sums: The weights of the rows, by sample [B].
            levels: The values between the rows and the operation that adds up samples.

        Returns:
            The weights by sample [B], NaN where an earlier operation adds up samples; and the number of row values.
        """
        steps = [step for step in self.path.steps if step.operation not in ELEMENTWISE]
        adding = [i for i, step in enumerate(steps) if step.operation in MEANS | ADDING]
        last = adding[-1] if adding else 0
        if len(levels) < last:
            return torch.full_like(sums, math.nan), 1.0
        width = math.prod(1 / (step.mean or 1.0) for step in steps[:last] if step.operation in ADDING)
        return sums / width, width

    def weights(self, scale: float) -> RowWeights:
        """Return the weights of the rows for the ledger, in a loss that a GradScaler multiplied by ``scale``."""
        path, samples, batch_size = self.path, self.owner.samples, self._outputs.batch_size
        weights, counting = self._weighed
        there = weights > 0
        counts = by_sample(samples, there, batch_size, self.shape)
        number = path.factor * (path.single if int((counts > 0).sum()) > 1 else 1.0)
        if self._fused == 1:
            rows = (float(counting.sum()) if isinstance(counting, Tensor) else self.shape.numel()) or 1.0
            weights, number = weights / rows, number / rows
        constants = _without(scale, path.constants)
        scaled = abs(scale) if len(constants) < len(path.constants) else 1.0
        scaled *= math.prod(abs(constant.value) for constant in constants if constant.origin == "declared")
        distinct = _distinct_above_zero(weights)
        behind = [] if path.output is not None else self.behind
        nodes = [*behind, *[step.value.node for step in path.steps]]
        return RowWeights(
            kind=(*sorted({operation(node) for node in behind} - _WITH_SIZES), "to", *self._adding),
            each=by_sample(samples, weights, batch_size, self.shape) / scaled,
            counts=counts,
            distinct=() if path.weighing and float(counts.sum()) == 1 else tuple([one / scaled for one in distinct]),
            number=math.nan if self._has_class_weights else number / scaled,
            precision=sum(constant.precision for constant in path.constants),
            size=self.shape.numel(),
            by_shape=self._by_shape(nodes, there),
        )

    def _by_shape(self, nodes: Sequence[Node], weighed: Tensor) -> bool | None:
        """Tell whether shapes alone decide how many rows count; None if a mask or missing labels leave rows out."""
        if data_choose_rows(nodes):
            return False
        labelled = self.name in LABELLED
        if not (self.path.weighing or labelled) or bool(weighed.all()):
            return True
        # A product with a one-hot target leaves the same number of values along the last dimension of every row.
        weighed = weighed.broadcast_to(self.shape)
        counts = weighed.sum(-1) if weighed.dim() else weighed
        of_each = counts.numel() > self._outputs.batch_size  # else a mask may leave whole samples out
        return True if not labelled and of_each and bool((counts == counts.flatten()[:1]).all()) else None


_FEW = 64
"""Most distinct weights that are listed."""

_SOME = 4096
"""Number of weights that are examined first: they usually show whether all weights have more than `_FEW` values."""

_COPIES = "torch::autograd::CopySlices"
_WITH_SIZES = ELEMENTWISE | MOVING | {_COPIES, "ConstantPadNd", "Gather", "AsStrided"}
"""Operations that occur in the graph or not depending on the sizes of a batch."""


def _extremes_above_zero(weights: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest weight above 0; None if all weights are 0."""
    if not weights.numel():
        return None
    if math.isnan(largest := float(weights.max())):
        weights = weights.where(weights > 0, 0.0)
        largest = float(weights.max())
    smallest = float(weights.min())
    return (smallest or float(weights.where(weights > 0, largest).min()), largest) if largest else None


def _distinct_above_zero(weights: Tensor) -> list[float]:
    """Return the distinct weights above 0 in ascending order; an empty list if there are more than `_FEW`."""
    if (extremes := _extremes_above_zero(weights)) is None:
        return []
    if extremes[0] == extremes[1]:
        return [extremes[0]]
    some, there = weights.flatten()[:_SOME], weights > 0
    few = some[some > 0].unique()
    if len(few) <= _FEW and not bool((torch.isin(weights, few) | ~there).all()):
        few = weights[there].unique()
    return few.tolist() if len(few) <= _FEW else []


def _without(scale: float, constants: tuple[Constant, ...]) -> tuple[Constant, ...]:
    """Return the constants without the factor ``scale`` of a GradScaler, or of a trainer."""
    for k, constant in enumerate(constants):
        if scale != 1 and math.isclose(constant.value, scale, rel_tol=1e-6):
            return constants[:k] + constants[k + 1 :]
    return constants


def has_label(node: Node) -> Tensor:
    """Return a mask of the labels that are not ``ignore_index``, of an operation of `LABELLED`."""
    return saved(node, "target") != saved(node, "ignore_index")


# Where the samples are


def _axes(shape: torch.Size, outputs: Outputs) -> list[int]:
    """Return the dimensions that may hold the samples, the likeliest first; 0 also if others are flattened into it."""
    if not shape:
        return []
    usual, batch_size = outputs.usual_dim(shape), outputs.batch_size
    if shape[usual] == batch_size:
        return [usual]
    flat = [0] if shape[0] > batch_size and shape[0] % batch_size == 0 else []
    return flat + [dim for dim, size in enumerate(shape) if size == batch_size]


def _numbered(node: Node, shape: torch.Size, axis: int, batch_size: int, batch_first: bool) -> Tensor:
    """Return the index of each element's sample along ``axis``, as a view that can be broadcast to ``shape``."""
    places = torch.arange(shape[axis], device=_device(node))
    if shape[axis] != batch_size:
        places = places // (shape[axis] // batch_size) if batch_first else places % batch_size
    return places.view([-1 if dim == axis else 1 for dim in range(len(shape))])


_IN_ORDER = ELEMENTWISE | FUSED | RESHAPING | FUNCTIONS | operations("order")
"""Operations that keep the samples in their order, if each sample's values are adjacent."""


def _turns_rows_only(node: Node) -> bool:
    """Tell whether an operation exchanges or removes dimensions other than the first."""
    if operation(node) == "Permute":
        return saved(node, "dims")[0] == 0
    if operation(node) == "Select":
        return saved(node, "dim") % len(parents(node)[0].shape) != 0
    if operation(node) != "Transpose":
        return False
    dims = len(shape_of(node))
    return all(saved(node, name) % dims for name in ("dim0", "dim1"))


def _chosen_samples(node: Node, shape: torch.Size, outputs: Outputs) -> list[Tensor]:
    """Return the samples of a selection's rows, for each dimension that may hold the samples."""
    before, found = parents(node)[0].shape, []
    for axis in _axes(before, outputs):
        numbers = _numbered(node, before, axis, outputs.batch_size, outputs.batch_first).broadcast_to(before)
        if operation(node) == "IndexSelect":
            chosen = numbers.index_select(saved(node, "dim") % len(before), saved(node, "index"))
        elif operation(node) == "MaskedSelect":
            chosen = numbers[saved(node, "mask").broadcast_to(before)]
        else:
            indices = tuple(slice(None) if index is None else index for index in saved(node, "indices"))
            used = sum(
                index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1 for index in indices
            )
            chosen = numbers[(slice(None),) * used + (slice(1),) * (len(before) - used)][indices]
        samples = chosen.reshape(len(chosen), -1)[:, 0] if chosen.numel() else chosen.flatten()
        if len(samples) == shape[0]:
            found.append(samples)
    return found


def _device(node: Node) -> torch.device:
    return torch.device(Value(node).meta.device)


def by_sample(samples: Tensor, values: Tensor, batch_size: int, shape: Sequence[int] | None = None) -> Tensor:
    """Add up the values of each sample.

    Args:
        samples: The sample of each value; can be broadcast to the values' shape.
        values: The values, or a mask of those that count; can be broadcast to ``shape``.
        batch_size: Number of samples.
        shape: The full shape of the values; None for ``values.shape``.

    Returns:
        The sums [B].
    """
    shape = values.shape if shape is None else shape
    if samples.dim() < len(shape):
        samples = samples.view(samples.shape + (1,) * (len(shape) - samples.dim()))
    samples = unrepeated(samples)
    within = [dim for dim, size in enumerate(samples.shape) if size == 1]
    if within:
        times = math.prod(shape[dim] for dim in within if values.shape[dim] == 1)
        values = values.sum(within, keepdim=True) * times
    values = values if values.is_floating_point() else values.double()
    together = torch.broadcast_shapes(samples.shape, values.shape)
    sums = torch.zeros(batch_size, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, samples.broadcast_to(together).flatten(), values.broadcast_to(together).flatten())


@dataclass(frozen=True)
class Summands:
    """Values between the rows and the operation that adds up samples.

    Attributes:
        counts: How many values of each sample contribute [B].
        rows: How many values each sample has [B].
        size: How many values there are in all.
    """

    counts: Tensor
    rows: Tensor
    size: float


def _levels(
    steps: Sequence[LinearStep], shape: Sequence[int], samples: Tensor, rows: Tensor, batch_size: int
) -> tuple[list[Summands], tuple[Node, Tensor] | None]:
    """Follow each row's sample from the rows up, until an operation adds up different samples.

    Args:
        steps: The operations from the rows up to the root.
        shape: The shape of the rows.
        samples: The sample of each row; can be broadcast to ``shape``.
        rows: A mask of the rows that contribute; can be broadcast to ``shape``.
        batch_size: Number of samples.

    Returns:
        The levels where each value still belongs to one sample; and the mean that reduces the batch, with how many
        values of each sample it takes [B]; None if a sum reduces the batch, or no operation does.

    Raises:
        Unreadable: If a mean reduces the samples in several groups.
    """
    levels: list[Summands] = []
    samples = unrepeated(samples.broadcast_to(shape))
    for step in steps:
        shape, before = step.value.shape, shape
        if step.operation in ELEMENTWISE:
            samples, rows = (one.view((1,) * (len(shape) - one.dim()) + one.shape) for one in (samples, rows))
            continue
        dims = _dims_added_up(step)
        if dims and math.prod(before) and bool((samples >= 0).all()):
            first, last = samples.amin(dims, keepdim=True), samples.amax(dims, keepdim=True)
            if not bool((first < last).any()):
                rows = rows.amax(dims, keepdim=True)
                samples, rows = (one if len(shape) == len(before) else one.squeeze(dims) for one in (last, rows))
                counts, every = (
                    by_sample(samples, own.double(), batch_size, shape) for own in (rows, torch.ones_like(rows))
                )
                levels.append(Summands(counts, every, shape.numel()))
                continue
            if step.operation not in MEANS:
                return levels, None
            if shape.numel() == 1:
                every = torch.ones([1] * len(before), dtype=torch.float64, device=samples.device)
                return levels, (step.value.node, by_sample(samples, every, batch_size, before))
        samples, rows = samples.broadcast_to(before), rows.broadcast_to(before)
        # For each input element: whether the operation takes it, and the output position to which it is added.
        one = torch.ones(shape, dtype=torch.float64, device=_device(step.value.node))
        weight = pull(step.value, step.which, one)
        place = pull(step.value, step.which, one.flatten().cumsum(0).view(shape))
        taken, target = (weight != 0) & (samples >= 0), (place / weight).nan_to_num(1).round().long() - 1
        target, values = target[taken], samples[taken]
        first, last = (
            torch.full((shape.numel(),), fill, device=samples.device).scatter_reduce(0, target, values, reduce)
            for fill, reduce in ((batch_size, "amin"), (-1, "amax"))
        )
        if (first < last).any():
            if step.operation not in MEANS:
                return levels, None
            return levels, (step.value.node, _taken(target, values, shape.numel(), batch_size))
        contributing = torch.zeros(shape.numel(), device=samples.device)
        rows = (contributing.index_add_(0, target, rows[taken].to(contributing)) > 0).view(shape)
        samples = last.view(shape)
        owned = samples.clamp(min=0)
        counts, every = (by_sample(owned, own.double(), batch_size) for own in (rows, samples >= 0))
        levels.append(Summands(counts, every, shape.numel()))
    return levels, None


def _dims_added_up(step: LinearStep) -> list[int]:
    """Return the dimensions along which a sum or a mean reduces; none for another operation."""
    before = len(step.input.shape)
    if step.operation not in {"Sum", "Mean"} or not before:
        return []
    dims = dims_of(step.value.node)
    return [*range(before)] if dims is None else dims


def _taken(target: Tensor, samples: Tensor, size: int, batch_size: int) -> Tensor:
    """Return how many elements of each sample a mean takes [B]; the counts must be equal for each of its results."""
    counts = torch.zeros(batch_size, dtype=torch.float64, device=target.device)
    for i in range(batch_size):
        count = target[samples == i].bincount(minlength=size)
        if not torch.equal(count, count[:1].expand_as(count)):
            raise Unreadable("a mean reduces the batch in groups")
        counts[i] = count[0]
    return counts


# What couples samples


_BROADCASTING = operations("broadcasts")
"""Operations that repeat a value along the dimensions of another value or of a constant."""


def _before_expand(value: Value) -> torch.Size:
    """Return the shape of a value before it was expanded."""
    while value.operation == "Expand":
        [value] = parents(value.node)
    return value.shape
