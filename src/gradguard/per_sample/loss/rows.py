"""The terms of a loss: which rows each reduces, which sample a row belongs to, and what mixes samples."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradguard.per_sample.loss.ledger import RowWeights
from gradguard.per_sample.loss.loss_graph import (
    ELEMENTWISE,
    LABELLED,
    MEANS,
    TAPS,
    Constant,
    Coupled,
    Dependence,
    LinearStep,
    Path,
    Unreadable,
    data_choose_rows,
    data_put_rows,
    mean_of,
    operation,
    operations,
    parents,
    pull,
    saved,
    shape_of,
    signed,
    walk,
)
from gradguard.per_sample.loss.owners import MARGINS, WITH_REDUCTION, Owners
from gradguard.per_sample.loss.separation import Outputs
from gradguard.torch_private import input_metadata_of

_ADDING = operations("Sum Nansum Dot Mv Mm Bmm")


@dataclass(frozen=True)
class LossTerm:
    """One term: how often each sample's rows stand in it, and what it was reduced and multiplied by.

    Attributes:
        weights: The sum of each sample's weights [B], constants left out: the number of its rows, where not weighted.
        size: The number of all rows, with those that do not count.
        even: Whether the weights are 0 or 1.
        labels: Whether rows are labels.
        share: Each sample's share of the mean that reduces the batch [B]; None where a sum reduces it.
        levels: The numbers of values that rows are summed to within samples.
        constants: The constants, from the root down.
        mean: The mean that reduces the batch, and how many of each sample's values it takes of this term [B].
        rows: The number of all rows of each sample [B], with those that do not count.
        inner: How many values rows have, if they are along the first dimension, the first two, and so on.
        class_weights: Whether it is a mean over labels of classes that have different weights.
        summed: The weights of the values that the last sum adds up, by sample [B].
        width: How many values of rows sums within samples add up to one of these.
        is_mean: Whether the last operation that adds rows up is a mean.
        numbers: The constants on each way to the rows: in a loop over samples each may have its own.
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
        """Whether it is a mean over the rows of one sample, the only one of several that has any."""
        several = len(self.weights) > 1 and self.share is None
        return several and self.is_mean and int((self.weights > 0).sum()) == 1


class SampleRows:
    """The rows where a path ends, and whose they are.

    Args:
        path: From the loss to the rows.
        outputs: The values that the module returned.
        depends: Knows which values depend on the samples.
        owners: Knows whose values are.

    Attributes:
        owners: The sample of each row; can be broadcast to the rows.

    Raises:
        Coupled: If samples are mixed there.
        Unreadable: If rows cannot be told from one another.
    """

    def __init__(self, path: Path, outputs: Outputs, depends: Dependence, owners: Owners) -> None:
        is_output = (path.node, path.number) in outputs.values
        self.path, self._batch_size = path, outputs.batch_size
        self.name = "" if is_output else operation(path.node)
        self.owners = owners.rows(path.node, path.number)
        self.shape = _shape_of_rows(path, self.name)
        self.behind = [] if is_output else list(_behind(path.node, depends, outputs.values))

    def cut(self) -> str:
        """Name an operation that cuts, fills or puts rows at a place that other samples may decide; "" if none does."""
        for node in [*[step.node for step in self.path.steps], *self.behind]:
            name = operation(node)
            if name == "Slice":
                start, end = (signed(saved(node, each)) for each in ("start", "end"))
                if 0 < end < _before(node)[signed(saved(node, "dim"))] and end - start != 1:
                    return node.name()
            elif name in {"Alias", _COPIES, "ConstantPadNd"} or data_put_rows(node) or _takes_columns(node, name):
                return node.name()
        return ""

    @property
    def _adding(self) -> list[str]:
        """The operations that add rows up, from the rows up to the root."""
        return [name for step in self.path.steps if (name := operation(step.node)) in MEANS | _ADDING]

    def _weighed(self) -> tuple[Tensor, Tensor | float]:
        """Return each row's weight in the loss, and how much it counts by itself."""
        counting = _counting(self.path, self.name)
        return (self.path.coefficient * counting).broadcast_to(self.shape).abs(), counting

    @property
    def _fused(self) -> int:
        """How the operation that makes the rows reduces them: 0 not, 1 by a mean, 2 by a sum."""
        return int(saved(self.path.node, "reduction")) if self.name in WITH_REDUCTION else 0

    def term(self, scale: float) -> LossTerm:
        """Count each sample's rows, and their weights, in a loss that a GradScaler multiplied by ``scale``.

        Returns:
            The term.

        Raises:
            Coupled: If the weights of rows are normalized over the batch.
            Unreadable: If rows may belong to samples in several ways.
        """
        path, samples, shape, fused = self.path, self.owners, self.shape, self._fused
        batch_size = self._batch_size
        inner = math.prod(mean_of(step) or 1.0 for step in path.steps if operation(step.node) in MEANS)
        weights = self._weighed()[0] / inner / abs(math.prod(constant.value for constant in path.constants))
        nonzero = weights[weights > 0]
        smallest, largest = (float(nonzero.min()), float(nonzero.max())) if len(nonzero) else (1.0, 1.0)
        even = math.isclose(smallest, largest, rel_tol=1e-6)
        if even:
            weights = (weights > 0).to(weights)
        sums, rows = by_sample(samples, weights, batch_size), by_sample(samples, torch.ones_like(weights), batch_size)
        share, levels, mean, size, summed, width = None, [], None, shape.numel(), None, 1.0
        if fused and int((rows > 0).sum()) == 1 and batch_size > 1:  # a mean or a sum within one sample
            summed = sums
            sums, size, even, inner = (sums > 0).to(sums), 1, True, 1.0
            rows = sums
        elif fused == 1:  # a mean of rows: of all of them, or of those with a label
            share = sums / sums.sum()
        else:
            levels, mean = _levels(path.steps, samples.broadcast_to(shape), weights > 0, batch_size)
            share = None if mean is None else mean[1] / mean[1].sum()
            summed, width = self._summed(sums * inner, levels)
        if share is not None and not even:
            _refuse_normalized(weights, nonzero)
        constants = _without(scale, path.constants)
        sizes = tuple([math.prod(shape[dim:]) for dim in range(1, len(shape))])
        if not even:
            each = by_sample(samples, (weights > 0).double(), batch_size)
            wide = [Summands(each / n, rows / n, size / n) for n in (1, *sizes) if n and float(each.sum()) % n == 0]
            levels = [*wide, *levels]
        equal = sums[sums > 0] * inner
        if share is None and len(equal) and not even and torch.allclose(equal, equal[:1].expand_as(equal)):
            even, largest, sums, size = True, float(equal[0]), (sums > 0).to(sums) / inner, len(equal) / inner
            rows, summed = sums, None
        if share is None and even and not math.isclose(largest, 1.0, rel_tol=1e-6):
            constants = (
                *constants,
                Constant(path.node, largest, False, 1e-6, "weights" if path.weighing else "gradient"),
            )  # as of gradient=torch.full((B,), 1 / B)
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
            has_class_weights(path.node, self.name),
            weights if summed is None else summed,
            width,
            reduced,
            (constants,),
        )

    def _summed(self, sums: Tensor, levels: Sequence["Summands"]) -> tuple[Tensor, float]:
        """Return the weights of the values that the last sum adds up, and how many values of rows each is the sum of.

        Args:
            sums: The weights of the rows, by sample [B].
            levels: The values on the way to the operation that adds up samples.

        Returns:
            The weights by sample [B], NaN where samples are added up before; the number.
        """
        steps = [step for step in self.path.steps if operation(step.node) not in ELEMENTWISE]
        adding = [i for i, step in enumerate(steps) if operation(step.node) in MEANS | _ADDING]
        last = adding[-1] if adding else 0
        if len(levels) < last:
            return torch.full_like(sums, math.nan), 1.0
        width = math.prod(1 / (mean_of(step) or 1.0) for step in steps[:last] if operation(step.node) in _ADDING)
        return sums / width, width

    def weights(self, scale: float) -> RowWeights:
        """Weigh the rows in a loss that a GradScaler multiplied by ``scale``."""
        path, samples, batch_size = self.path, self.owners, self._batch_size
        weights, counting = self._weighed()
        counts = by_sample(samples, (weights > 0).double(), batch_size)
        number = path.factor * (path.single if int((counts > 0).sum()) > 1 else 1.0)
        if self._fused == 1:
            rows = max(1.0, float(counting.sum()) if isinstance(counting, Tensor) else self.shape.numel())
            weights, number = weights / rows, number / rows
        constants = _without(scale, path.constants)
        scaled = abs(scale) if len(constants) < len(path.constants) else 1.0
        scaled *= math.prod(abs(constant.value) for constant in constants if constant.origin == "declared")
        nonzero = weights[weights > 0] / scaled
        few = nonzero.unique()
        nodes = [*self.behind, *[step.node for step in path.steps]]
        return RowWeights(
            kind=(*sorted({operation(node) for node in self.behind} - _MOVING), "to", *self._adding),
            each=by_sample(samples, weights / scaled, batch_size),
            counts=counts,
            distinct=() if len(few) > _FEW or (path.weighing and len(nonzero) == 1) else tuple(few.tolist()),
            number=math.nan if has_class_weights(path.node, self.name) else number / scaled,
            precision=sum(constant.precision for constant in path.constants),
            size=self.shape.numel(),
            by_shape=_by_shape(path, self.name, nodes, weights > 0, batch_size),
        )


def _by_shape(path: Path, name: str, nodes: Sequence[Node], weighed: Tensor, batch_size: int) -> bool | None:
    """Tell whether nothing but shapes decides how many rows count; None if only where all that there are do."""
    if data_choose_rows(nodes):
        return False
    if not (path.weighing or name in LABELLED):
        return True
    if bool(weighed.all()) or (name not in LABELLED and _is_one_class_of_each(weighed, batch_size)):
        return True
    return None


def _is_one_class_of_each(weighed: Tensor, batch_size: int) -> bool:
    """Whether every row weighs as many values along the last dimension, as a product with a one-hot target does."""
    counts = weighed.sum(-1) if weighed.dim() else weighed
    if counts.numel() <= batch_size:  # rows of a sample each, of which a mask leaves some out
        return False
    return bool((counts == counts.flatten()[:1]).all())


_FEW = 64
_COPIES = "torch::autograd::CopySlices"
_MOVING = ELEMENTWISE | operations(
    "View UnsafeView ReshapeAlias Squeeze Unsqueeze Select Slice Unbind Split SplitWithSizes UnsafeSplit Index "
    f"IndexSelect MaskedSelect Stack Cat Permute Transpose T {_COPIES} ConstantPadNd Gather AsStrided"
)
"""Operations that come and go with the sizes of a batch."""


def _takes_columns(node: Node, name: str) -> bool:
    """Whether the same places are taken of every sample, as many as data say."""
    if name == "IndexSelect":
        return saved(node, "dim") != 0
    return name == "Index" and len(saved(node, "indices")) > 1 and saved(node, "indices")[0] is None


def _before(node: Node) -> torch.Size:
    return shape_of(*parents(node)[0])


def _refuse_normalized(weights: Tensor, nonzero: Tensor) -> None:
    """Check that the weights in a mean do not add up to the number of its rows, as ``w / w.mean()`` does.

    Raises:
        Coupled: If they do, and are no two weights by turns, which may do so by chance.
    """
    if nonzero.unique().numel() > 2 and any(abs(float(each.mean()) - 1) < 1e-6 for each in (weights, nonzero)):
        raise Coupled(
            "the weights in the mean add up to the number of rows: they were divided by their own mean over the batch, "
            "so that every sample's weight depends on the others. Use weights that do not depend on the batch"
        )


def _without(scale: float, constants: tuple[Constant, ...]) -> tuple[Constant, ...]:
    """The constants without the one of a GradScaler, or of a trainer."""
    for k, constant in enumerate(constants):
        if scale != 1 and math.isclose(constant.value, scale, rel_tol=1e-6):
            return constants[:k] + constants[k + 1 :]
    return constants


def _shape_of_rows(path: Path, name: str) -> torch.Size:
    node = path.node
    if name in LABELLED:
        return saved(node, "target").shape
    if name in WITH_REDUCTION:
        child, number = node.next_functions[0]
        shape = shape_of(child, number) if child is not None else torch.Size(saved(node, "self").shape)
        return shape[:-1] if name in MARGINS and len(shape) > 1 else shape
    return shape_of(node, path.number)


def _counting(path: Path, name: str) -> Tensor | float:
    """Return how much each row counts: 1 with a label, or in a mean with class weights its weight; 1 for all."""
    if name not in LABELLED:
        return 1.0
    there = has_label(path.node)
    if not has_class_weights(path.node, name):
        return there
    weight, target = saved(path.node, "weight"), saved(path.node, "target")
    return there * weight.detach().to(path.coefficient)[target.where(there, 0)]


def has_class_weights(node: Node, name: str) -> bool:
    """Tell whether an operation is a mean over labels of classes that have different weights."""
    if name not in LABELLED or int(saved(node, "reduction")) != 1:
        return False
    weight = saved(node, "weight")
    return weight is not None and not torch.equal(weight, weight[:1].expand_as(weight))


def has_label(node: Node) -> Tensor:
    """Return which labels of an operation of `LABELLED` are there."""
    return saved(node, "target") != saved(node, "ignore_index")


def _metadata(node: Node) -> Any:
    return input_metadata_of(node)[0]


def by_sample(samples: Tensor, values: Tensor, batch_size: int) -> Tensor:
    """Add values up by the sample that each belongs to, ``[B]``."""
    if samples.dim() < values.dim():
        samples = samples.view(samples.shape + (1,) * (values.dim() - samples.dim()))
    sums = torch.zeros(batch_size, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, samples.broadcast_to(values.shape).flatten(), values.flatten())


@dataclass(frozen=True)
class Summands:
    """Values on the way from the rows up, before samples are added up.

    Attributes:
        counts: How many of each sample's contribute [B].
        rows: How many there are of each sample [B].
        size: How many there are.
    """

    counts: Tensor
    rows: Tensor
    size: float


def _levels(
    steps: Sequence[LinearStep], samples: Tensor, rows: Tensor, batch_size: int
) -> tuple[list[Summands], tuple[Node, Tensor] | None]:
    """Pass the numbers of the samples up from the rows, until an operation adds different samples up.

    Args:
        steps: From the rows up to the root.
        samples: The sample of each row.
        rows: Which rows contribute.
        batch_size: Number of samples.

    Returns:
        The levels where each value is still of one sample; the mean that reduces the batch with the number of
        values of each sample that it takes [B], None if a sum reduces it, or nothing.

    Raises:
        Unreadable: If some samples are added up, and others elsewhere.
    """
    levels: list[Summands] = []
    for step in steps:
        name, shape = operation(step.node), shape_of(step.node, step.number)
        if name in ELEMENTWISE:
            samples, rows = samples.broadcast_to(shape), rows.broadcast_to(shape)
            continue
        taken, target = _targets(step, shape)
        taken &= samples >= 0
        target, values = target[taken], samples[taken]
        first, last = (
            torch.full((shape.numel(),), fill, device=samples.device).scatter_reduce(0, target, values, reduce)
            for fill, reduce in ((batch_size, "amin"), (-1, "amax"))
        )
        if (first < last).any():
            if name not in MEANS:
                return levels, None
            return levels, (step.node, _taken(target, values, shape.numel(), batch_size))
        contributing = torch.zeros(shape.numel(), device=samples.device)
        rows = (contributing.index_add_(0, target, rows[taken].to(contributing)) > 0).view(shape)
        samples = last.view(shape)
        owned = samples.clamp(min=0)
        counts, every = (by_sample(owned, own.double(), batch_size) for own in (rows, samples >= 0))
        levels.append(Summands(counts, every, shape.numel()))
    return levels, None


def _targets(step: LinearStep, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """For each input element of a linear operation, whether it is taken, and the position that it is added to."""
    one = torch.ones(shape, dtype=torch.float64, device=torch.device(_metadata(step.node).device))
    weight = pull(step.node, step.number, step.which, one)
    place = pull(step.node, step.number, step.which, one.flatten().cumsum(0).view(shape))
    return weight != 0, (place / weight).nan_to_num(1).round().long() - 1


def _taken(target: Tensor, samples: Tensor, size: int, batch_size: int) -> Tensor:
    """How many of each sample's elements a mean takes, which must be as many for each of its results."""
    counts = torch.zeros(batch_size, dtype=torch.float64, device=target.device)
    for i in range(batch_size):
        count = target[samples == i].bincount(minlength=size)
        if not torch.equal(count, count[:1].expand_as(count)):
            raise Unreadable("a mean reduces the batch in groups")
        counts[i] = count[0]
    return counts


def _behind(node: Node, depends: Dependence, ends: Container[tuple[Node, int]]) -> Iterator[Node]:
    """The nodes from ``node`` to what the module returned."""

    def onward(top: Node) -> list[Node]:
        edges = [] if top.name() in TAPS else parents(top)
        return [edge[0] for edge in edges if edge not in ends and depends(edge[0])]

    return (top for top in walk([node], onward) if top.name() not in TAPS)
