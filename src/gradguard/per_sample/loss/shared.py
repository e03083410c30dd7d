"""Compare the values that all samples of a batch share in a loss with those of earlier batches.

Class weights, a temperature or a list of columns may be constants, or may be computed from the batch: one value does
not show which. But a constant is the same in the next batch. So every value that a loss takes, and that is not each
sample's own, is compared with its values in earlier batches. A value that has changed is refused, unless the user
declares it by ``clipper.constant``.
"""

import contextlib
import functools
import itertools
import math
import numbers
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.per_sample.loss.beside import (
    INVERTIBLE,
    TAKES_BESIDE,
    WITH_RESULTS,
    AffineChains,
    Bounds,
    adds_unseen,
    constants_beside,
    is_affine,
    known_values,
    own_sizes,
    places_of,
    plain,
    recovered,
    unrepeated,
    wide_of,
)
from gradguard.per_sample.loss.loss_graph import (
    Dependence,
    ResultNumbers,
    Root,
    Unreadable,
    Value,
    ValuePlaces,
    dims_of,
    fold,
    is_linear,
    is_tensor,
    operation,
    parents,
    saved,
    scalars,
    shape_of,
    walk,
)
from gradguard.per_sample.loss.operation_table import (
    ADDS_UNSEEN,
    ALL_PRODUCTS,
    CHOOSING_ROWS,
    ELEMENTWISE,
    JOINING,
    LABELLED,
    MOVING,
    PRODUCTS,
    SCALINGS,
    TAKING,
    operations,
)
from gradguard.per_sample.loss.separation import Outputs, Silent
from gradguard.per_sample.loss.trained import TrainedValue, as_number
from gradguard.torch_private import (
    RECORDED_SIZE,
    base_of,
    saved_constant,
    saved_settings,
    saved_tensors,
    tree_flatten,
    version_of,
)

_SHOWING = operations("shown")
_ENDING = frozenset(["Mean", "Sum", "NllLoss", "MseLoss", "BinaryCrossEntropyWithLogits"])
"""Operations of losses without an intermediate value: each takes the module's outputs and saves them."""

_IN_CACHE = 1 << 17
"""Numbers that are compared at once, so that intermediate results stay in the processor's cache."""

_ADDING_ONLY = JOINING | ELEMENTWISE & ADDS_UNSEEN
"""Operations that put a value in as it is."""

_BY_TENSORS = CHOOSING_ROWS | ALL_PRODUCTS
"""Operations that choose or weigh values by tensors, which are compared themselves."""

_ADDING_UP = operations("mean", "sum", "product") | {"IndexAdd", "ScatterAdd"}

_Found = TypeVar("_Found")

Unsettled = Literal["own here", "unclear"]
"""Answer of one batch only: a value is each sample's own in this batch (the next may differ), or that is unclear."""

IsShared = Callable[[], bool | Unsettled]
"""Finds out whether samples share a value."""

_MOST_ELEMENTS = 4096
"""Elements of a batch that are kept, and from which weights are computed; all elements of a batch are compared."""


@dataclass(frozen=True)
class Mixture:
    r"""A sum of unsaved constants, to be explained by known constants of the samples.

    The sum is :math:`c = A w`. Each column of A is a constant of the samples' own that the graph keeps, or the increase
    of each element where an operation adds 1. If one w explains all batches, no sample's c depends on another sample.

    Attributes:
        constants: A, with a row for each element; its first column is 1, and a column with NaN explains nothing.
        bounds: Bounds of c.
        words: The refusal if c is not explained.
    """

    constants: Tensor
    bounds: Bounds
    words: str

    @functools.cached_property
    def columns(self) -> Tensor:
        """A, with 0 in columns that explain nothing."""
        return self.constants.where(~self.constants.isnan().any(0), 0.0)

    def joined(self, other: "Mixture") -> "Mixture":
        """Return a mixture of the elements of two batches that have the same number of constants."""
        both = zip((self.constants, *self._ends), (other.constants, *other._ends), strict=True)
        constants, low, high = map(torch.cat, both)
        return Mixture(constants, Bounds(low, high), other.words)

    def thinned(self) -> "Mixture":
        """Return a mixture of at most some 4,096 of the elements, copied."""
        step = 1 + len(self.constants) // _MOST_ELEMENTS
        constants, low, high = (one[::step].clone() for one in (self.constants, *self._ends))
        return Mixture(constants, Bounds(low, high), self.words)

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return self.bounds.low, self.bounds.high

    @functools.cached_property
    def weights(self) -> Tensor:
        """The weights w that fit the known elements by least squares."""
        is_known, total = self.bounds.are_known, self.bounds.middle
        found = torch.linalg.lstsq(self.columns[is_known].cpu(), total[is_known, None].cpu(), driver="gelsd")
        return found.solution[:, 0].to(total)

    @functools.cached_property
    def is_coarse(self) -> bool:
        """True if the rounding of c is too large for weights to be meaningful."""
        total, rounding = (one[self.bounds.are_known] for one in (self.bounds.middle, self.bounds.rounding))
        return bool(len(total)) and bool((rounding > 1e-4 * total.abs().max()).any())

    @property
    def refusal(self) -> str:
        """The words of the refusal, with advice if the values are too coarse."""
        coarse = ", or compute the loss of output.float(): 16 bits are too coarse"
        return self.words + (coarse if self.is_coarse else "")

    def is_explained(self, weights: Tensor) -> bool:
        """Tell whether weights give c within its bounds, which must not be too coarse; a bound may be one-sided."""
        found = self.columns @ weights
        most = self.bounds.middle.nan_to_num(0.0, 0.0, 0.0).abs()
        near = 7 * self.bounds.rounding.nan_to_num(0.0, 0.0, 0.0) + 1e-9 * (self.columns.abs() @ weights.abs() + most)
        is_within = (found >= self.bounds.low - near) & (found <= self.bounds.high + near)
        return not self.is_coarse and bool(is_within.all())


@dataclass(frozen=True)
class SharedValue:
    """A value that a loss takes, and that all samples seem to share.

    Attributes:
        key: The value's place in the loss.
        value: The value; NaN where it is not known.
        is_shared: Finds out whether samples do share the value, which takes time. The answer is a bool if it holds for
            all batches, else `Unsettled`.
        bounds: Bounds of a value that is known up to rounding.
        places: A position along a dimension counted from the front, from the end, and so on. Two positions are the same
            if they agree in one of these ways.
        weighs: Whether the value weighs rows, so that private training takes it only if it is declared.
        may_be_labels: Whether whole numbers may be each sample's own, and equal for all samples by chance.
        mixture: A sum of several constants, to be compared by the constants that explain it, instead of a value.
        among: The number of values in this place, and the index of this one: a loop over samples has one for each.
        words: A name of the value for a refusal; by default the number, or the shape of the tensor.
        chooses: Whether the number decides which columns the loss takes: then private training asks for a declaration.
        of_all: Whether the value has no dimension of samples. So it is compared in batches of one sample, too, where
            other values may be the sample's own.
        seen: ``"several"`` if several samples have the same value, ``"each"`` if each has its own. ``"one"`` if only
            one sample shows the value: then either may be true.
    """

    key: Hashable
    value: Tensor | float
    is_shared: IsShared = lambda: True
    bounds: Bounds | None = None
    places: tuple[Hashable, ...] = ()
    seen: Literal["several", "each", "one"] = "several"
    mixture: "Mixture | None" = None
    among: tuple[int, int] = (1, 0)
    may_be_labels: bool = True
    weighs: bool = False
    words: str = ""
    chooses: bool = False
    of_all: bool = False

    def is_of(self, declared: Tensor | float) -> bool:
        """Tell whether this is a declared value, a view or a copy of one, its negative, or 1 over a declared number."""
        storages = [one.untyped_storage().data_ptr() for one in (self.value, declared) if isinstance(one, Tensor)]
        if len(storages) == 2 and storages[0] == storages[1]:
            return True
        divisor = [] if isinstance(declared, Tensor) or not declared else [1 / declared]
        return any(map(self.is_equal, (declared, -declared, *divisor)))

    def is_equal(self, other: Tensor | float) -> bool:
        """Tell whether this value equals another up to rounding; a number is compared with every element."""
        are_numbers = self.bounds is None and not isinstance(self.value, Tensor) and not isinstance(other, Tensor)
        if are_numbers and self.value == other:
            return True
        mine, theirs = (
            one.detach() if isinstance(one, Tensor) else torch.tensor(one, device="cpu") for one in (self.value, other)
        )
        if theirs.dim() and mine.numel() != theirs.numel():
            return False
        mine = mine.flatten().float() if mine.dtype is torch.bool else mine.flatten()
        if self.bounds is not None and not isinstance(other, Tensor):
            theirs = torch.tensor(other, dtype=self.bounds.low.dtype, device=self.bounds.low.device)
        else:
            theirs = (theirs.flatten() if theirs.dim() else theirs).to(mine)
        if self.bounds is not None:  # one-sided bounds must hold, too, and at least one element must be known
            low, high, rounding = (one.flatten() for one in (self.bounds.low, self.bounds.high, self.bounds.rounding))
            near = rounding.nan_to_num(0.0, 0.0) + 1e-12 * theirs.abs()
            is_within = (theirs >= low - near) & (theirs <= high + near)
            return bool(self.bounds.are_known.any()) and bool(is_within.all())
        close = ((mine - theirs).abs() <= 1e-12 * theirs.abs()) & theirs.isfinite()
        return bool((close | (mine == theirs) | mine.isnan()).all())


def is_declared(value: Tensor | float, outputs: Outputs) -> bool:
    """Tell whether the user declared a value as not computed from the batch."""
    return any(map(SharedValue(None, value).is_of, outputs.declared))


@dataclass(frozen=True)
class _KeptValue:
    """A value of an earlier batch: the tensor, kept so that its memory is not reused, and a copy of its content."""

    value: Tensor | float
    copied: Tensor | float
    place: Hashable
    samples: int  # size of the largest batch that had the value
    places: tuple[Hashable, ...] = ()
    bounds: Bounds | None = None
    may_be_labels: ClassVar[bool] = True

    def is_same(self, one: SharedValue, samples: int) -> bool:
        """Tell whether a value of a batch of ``samples`` samples may be this one."""
        if self.bounds is not None and one.bounds is not None:
            by_chance = _may_be_labels(self) and _may_be_labels(one) and min(samples, self.samples) < _MANY_SAMPLES
            return self.bounds.meets(one.bounds) or by_chance
        if self.places and one.places:
            return any(mine == theirs for mine, theirs in zip(self.places, one.places, strict=True))
        is_there = isinstance(one.value, Tensor) and _place(one.value) == self.place
        return is_there or one.is_equal(self.copied)

    def narrowed(self, one: SharedValue) -> "_KeptValue":
        """Return the value with its bounds narrowed by a later batch, if the two bounds meet."""
        if one.bounds is None or (self.bounds is not None and not self.bounds.meets(one.bounds)):
            return self
        return replace(self, bounds=one.bounds if self.bounds is None else self.bounds.within(one.bounds))


class SharedValues:
    """The values that samples shared in the accepted batches.

    Attributes:
        strict: Accept no undeclared tensor, because another batch might have given another tensor.
        declared: Values that the user declared as not computed from the batch, until `end`.
    """

    def __init__(self) -> None:
        self.strict = False
        self._kept: dict[Hashable, list[_KeptValue]] = {}
        self._owned: set[Hashable] = set()  # kinds of loss, and places, whose value is each sample's own
        self._of_each: set[Hashable] = set()  # kinds and places where the samples of some batch had different values
        self._mixtures: dict[Hashable, Mixture] = {}
        self._new_mixtures: dict[Hashable, Mixture] = {}
        self.declared: list[Tensor | float] = []
        self._new: dict[Hashable, list[_KeptValue]] = {}

    def end(self, accepted: bool) -> None:
        """Finish a loss: keep its values if it was accepted, and forget the declarations."""
        self._kept |= self._new if accepted else {}
        self._mixtures |= self._new_mixtures if accepted else {}
        self._new, self._new_mixtures = {}, {}
        self.declared.clear()

    def objection(self, found: Iterable[SharedValue], batch_size: int, kind: Hashable = None) -> str:
        """Return the reason why the values of a batch cannot be accepted; "" if they can.

        Args:
            found: The values.
            batch_size: Number of samples.
            kind: The kind of loss. That a value is each sample's own holds for one kind only; shared values are
                compared across all kinds.
        """
        for one in found:
            if one.mixture is not None:
                if words := self._unexplained(one.key, one.mixture, batch_size, one.seen == "several"):
                    return words
                continue
            place = kind, one.key, one.among if batch_size > 1 else ()
            if one.seen == "each":
                self._of_each.add(place)
                if self._of_each.issuperset((kind, one.key, (one.among[0], i)) for i in range(one.among[0])):
                    self._of_each.add((kind, one.key, ()))  # as in `_owned`
                continue
            is_own = place in self._owned or (one.seen == "one" and place in self._of_each)
            if is_own or any(map(one.is_of, self.declared)):
                continue
            kept = self._kept.get(one.key)
            new = self._new.setdefault(one.key, [*(kept or ())])
            same = next((i for i, old in enumerate(new) if old.is_same(one, batch_size)), None)
            is_value = isinstance(one.value, Tensor) or one.weighs
            is_undeclared = one.chooses or (is_value and not _may_be_labels(one))
            is_of_all = one.of_all and (self.strict or not _is_mask(one.value))
            if (batch_size > 1 or is_of_all) and self.strict and is_undeclared:
                kept, same = [_kept(math.nan, batch_size)], None
            if same is not None:
                old = new[same] if new[same].samples > 1 else _kept(one.value, batch_size, one.places)
                new[same] = replace(old.narrowed(one), samples=max(old.samples, batch_size))
            elif kept is None:
                new.append(_kept(one.value, batch_size, one.places).narrowed(one))
            elif (
                not is_of_all and max(batch_size, *[old.samples for old in kept]) == 1
            ):  # each sample's own, or a changing shared value
                self._new[one.key] = [_kept(math.nan, 1)]
            elif (is_shared := one.is_shared()) is True or (is_shared == "unclear" and self.strict):
                return _words(kept[-1], one, batch_size)
            elif is_shared is False:
                self._owned.add(place)
                if self._owned.issuperset((kind, one.key, (one.among[0], i)) for i in range(one.among[0])):
                    self._owned.add((kind, one.key, ()))  # in a batch of one sample the value is its own, too
        return ""

    def _unexplained(self, key: Hashable, mixture: Mixture, batch_size: int, are_alike: bool) -> str:
        """Return the refusal of a sum if no weights of known constants explain it in all batches; "" if some do.

        In private training only a single number may explain the sum: weights of other constants that fit the first
        batch need not fit a neighbouring batch.

        Args:
            key: The place of the sum.
            mixture: The sum and the constants.
            batch_size: Number of samples.
            are_alike: Whether all samples have the same sum. The first such batch, like one of a single sample, is
                accepted: it does not determine the weights.
        """
        before = (self._mixtures | self._new_mixtures).get(key)  # a loop over samples has a sum for each
        if self.strict:
            mixture = replace(mixture, constants=mixture.constants[:, :1])
        if before is not None and len(before.constants.T) != len(mixture.constants.T):
            return mixture.refusal
        joined = mixture if before is None else before.joined(mixture)
        self._new_mixtures[key] = thinned = joined.thinned()
        is_first = before is None and (are_alike or batch_size == 1)
        return "" if is_first or joined.is_explained(thinned.weights) else mixture.refusal


_MANY_SAMPLES = 8
"""With this many samples, it is no chance if two batches each have one label that all their samples share."""


def _may_be_labels(one: SharedValue | _KeptValue) -> bool:
    """Tell whether a value may be whole numbers: such targets or masks may be equal for all samples by chance."""
    return one.may_be_labels and one.bounds is not None and one.bounds.are_whole


def _is_mask(value: Tensor | float) -> bool:
    """Tell whether a value may be a mask, which a program for one sample may hold without a dimension of samples."""
    if not isinstance(value, Tensor) or not (value.dim() or value.dtype == torch.bool):
        return False
    return bool(((value == 0) | (value == 1)).all())


def _kept(value: Tensor | float, samples: int, places: tuple[Hashable, ...] = ()) -> _KeptValue:
    """Return a value of a batch of ``samples`` samples, with a copy of its content."""
    copied = value.detach().clone() if isinstance(value, Tensor) else value
    return _KeptValue(value, copied, _place(value) if isinstance(value, Tensor) else None, samples, places)


def _place(value: Tensor) -> Hashable:
    """Return the identity of a tensor's memory: two tensors with the same one have the same content."""
    return value.data_ptr(), value.shape, value.stride(), value.dtype, version_of(value)


def _words(kept: _KeptValue, shared: SharedValue, batch_size: int) -> str:
    """Return the refusal of a value that all samples share and that has changed."""
    value = shared.value
    if shared.places and not shared.words:
        return (
            f"the place {value:.6g} that the loss takes of all samples, such as a column, was {kept.copied:.6g} in an "
            "earlier batch. Did the batch decide it? Then a sample's gradient depends on the other samples. If the "
            "place is yours, write int(clipper.constant(place)). If each sample has a place of its own, take them by "
            "gather, or let clipper.per_sample_losses compute each sample's loss"
        )
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"the number {value:.6g}"
    what = shared.words or what
    said = "has changed since an earlier batch"
    if not isinstance(kept.copied, Tensor) and (not shared.words or math.isnan(kept.copied)):
        said = "may be another in the next batch" if math.isnan(kept.copied) else f"{said}, from {kept.copied:.6g}"
    own = "" if batch_size > 1 else ". If it is the one sample's own, make it a tensor with a first dimension of size 1"
    given = "value" if not isinstance(value, Tensor) or value.dim() else "value.item()"
    return (
        f"{what}, which all samples share in the loss, {said}. Was it computed from the batch, such as weights of "
        "classes, a mean or a length? Then a sample's gradient depends on the other samples: compute it from the "
        f"sample's own rows, or once for all batches. If it is yours, write clipper.constant({given}) where it stands "
        f"in the loss{own}"
    )


# Shared values in the graph of a loss


class _Use(NamedTuple):
    """An operation that takes a value, and a function that finds out whether samples share the value there.

    ``of_all`` is as in `SharedValue`.
    """

    node: Node
    value: Tensor | float
    is_shared: IsShared
    of_all: bool = False


class LossConstants:
    """The constants of a loss, read from its graph: all values beside the samples' own, without weights of rows.

    Args:
        roots: The values that backward starts from.
        outputs: The values that the module returned.
    """

    def __init__(self, roots: Sequence[Root], outputs: Outputs) -> None:
        self._roots, self._outputs, self._depends = roots, outputs, outputs.depends
        self._nodes = _nodes(roots, outputs)
        self._places = ValuePlaces(outputs.results, outputs.depends)
        self._results = ResultNumbers(outputs.results, outputs.depends)
        self._bounds: dict[Value, Bounds] = {}

    @functools.cached_property
    def _chains(self) -> AffineChains:
        """The affine operations above the known values of this loss."""
        return AffineChains(known_values([*self._nodes], self._depends) | self._outputs.tensors, self._depends)

    @functools.cached_property
    def _ends(self) -> list[Value]:
        """The known values, and inputs of functions that are not affine, to which an unsaved constant was added."""
        if not any(adds_unseen(node, self._depends) for node in self._nodes):
            return []
        depends = self._depends
        edges = [(edge, is_affine(node, depends)) for node in self._nodes for edge in depends.below(node)]
        ends = dict.fromkeys(edge for edge, affine in edges if edge in self._chains.known or not affine)
        return [end for end in ends if self._chains.add_unseen(end)]

    def _are_changed(self) -> bool:
        """Tell whether a known value differs from the result of its operations: it was changed without a record."""
        if self._outputs.are_changed:
            return True
        if all(operation(node) in _ENDING for node in self._nodes):  # nothing lies between outputs and functions
            return False
        values = dict.fromkeys(edge for node in self._nodes for edge in parents(node) if edge in self._chains.known)
        return any(map(self._is_changed, values)) or any(map(self._is_taken_changed, self._with_results))

    def _is_changed(self, value: Value) -> bool:
        """Tell whether a value that an operation saved differs from the result of its operations on known values."""
        if value in self._outputs.values or not self._is_comparable(value):
            return False
        again, saved_value = self._chains.retraced(value), self._chains.known[value]
        if again is not None and torch.equal(saved_value, again):
            return False
        apart = self._chains.added(value, Bounds.exactly(saved_value))
        return apart is not None and not apart.bounds.holds_zero

    def _is_taken_changed(self, node: Node) -> bool:
        """Tell whether a result that was saved without its input differs from the result of its operations."""
        [value], chains = parents(node), self._chains
        base = chains.known.get(value)
        if not self._depends(value.node) or (base is None and not self._is_comparable(value)):
            return False
        again = chains.retraced(value) if base is None else base
        if again is not None:
            return not _is_result(node, again)
        whole = recovered(node)
        if (apart := chains.added(value, whole)) is None:
            return False
        bounds = apart.bounds
        if operation(node) == "LogSoftmax":
            bounds = _but_for_a_number(bounds, whole.middle, saved(node, "dim"))
        return not bounds.holds_zero

    def _is_comparable(self, value: Value) -> bool:
        """Tell whether a value can be compared with the result of its operations, which put in no unsaved constant."""
        return self._depends(value.node) and value.shape.numel() > 0 and self._chains.put_nothing_unseen(value)

    @functools.cached_property
    def _with_results(self) -> list[Node]:
        """The operations that saved their result but not their input."""
        return [node for node in self._nodes if operation(node) in WITH_RESULTS]

    @functools.cached_property
    def _users(self) -> dict[Value, Node]:
        """For each input that only such an operation's result determines, the operation."""
        by_kind = sorted(self._with_results, key=lambda node: operation(node) != "LogSoftmax")
        users = {parents(node)[0]: node for node in by_kind}
        return {value: node for value, node in users.items() if value not in self._chains.known}

    @functools.cached_property
    def _normalized(self) -> dict[Value, int]:
        """The inputs of `log_softmax`, which are known up to a number of each row, with the dimension of the rows."""
        return {value: saved(node, "dim") for value, node in self._users.items() if operation(node) == "LogSoftmax"}

    def _whole(self, value: Value) -> Bounds | None:
        """Return the bounds of a value; None if no saved tensor determines it."""
        if value not in self._bounds and (value in self._chains.known or value in self._users):
            exact = self._chains.known.get(value)
            self._bounds[value] = recovered(self._users[value]) if exact is None else Bounds.exactly(exact)
        return self._bounds.get(value)

    def _constant_in(self, value: Value) -> Bounds | None:
        """Return bounds of the constant that was added to known values in a value; None if it is unknown."""
        if (whole := self._whole(value)) is None or (apart := self._chains.added(value, whole)) is None:
            return None
        dim = self._normalized.get(value)
        return apart.bounds if dim is None else _but_for_a_number(apart.bounds, whole.middle, dim)

    def hidden(self) -> str:
        """Return the reason why the graph may hide a constant of the loss; "" if it hides none."""
        for node, is_behind in self._nodes.items():
            if node.name() == "BackwardHookFunctionBackward":
                return (
                    "a full backward hook of the outermost module, of the loss's module or of all modules "
                    "(register_full_backward_hook, register_full_backward_pre_hook) stands in its graph, and might "
                    "change gradients there. Register the hook on a layer inside the module, or log by "
                    "output.register_hook(...)"
                )
            if operation(node) not in _SHOWING:
                return f"its graph does not show all numbers that {node.name()} takes"
            if operation(node) == "NanToNum" and not bool(saved(node, "self").isfinite().all()):
                if self._outputs.batch_size > 1 and any(map(_adds_up, _until_outputs(Value(node), self._outputs))):
                    return (
                        "nan_to_num has replaced a value of several samples, so one sample took away the gradients of "
                        "others. Apply it to each sample's loss, before the mean"
                    )
                if is_behind:
                    return (
                        "its graph does not show the numbers by which nan_to_num has replaced some values. Apply it to "
                        "each sample's loss, or use torch.where(x.isfinite(), x, number)"
                    )
        if self._are_changed():
            return (
                "a value in it was changed in place where its graph does not record the change, as under "
                "torch.no_grad(), by .detach() or .data, or by an eps of torch's. Compute a new tensor instead, as in "
                "output - output.detach()"
            )
        for end in self._ends:
            if self._whole(end) is None or not self._chains.constant_is_known(end, self._outputs.values):
                return f"its graph does not show the constant that is added to values from {end.node.name()}"
            if end in self._mixed and all(end != value for _, value, _ in self._sums):
                return self._mixed[end]
        if any(bounds is None for _, _, trained in self._trained for bounds in trained.added):
            return (
                "its graph does not show a number that is added to a trained parameter. Make the sum a parameter, or "
                "add the number before an operation that saves its input, such as a division or log()"
            )
        return ""

    def _is_each_own(self, value: Value, bounds: Bounds) -> bool:
        """Tell whether samples may have different constants in a value."""
        places = _places_of_rows(value, self._outputs)
        return self._outputs.batch_size == 1 or any(bounds.sizes[dim] > 1 for dim in places)

    @functools.cached_property
    def _mixed(self) -> dict[Value, str]:
        """The values for which the graph shows only a sum of constants, each with a refusal that says how to avoid it.

        Either several constants were added, or one was weighted and then summed.
        """
        found, sums = dict[Value, str](), {end: bounds for _, end, bounds in self._sums}
        for end, parts in self._parts.items():
            is_summed = end in self._normalized
            if any(self._chains.is_weighed_and_summed(one, end, is_summed) for one in parts):
                found[end] = (
                    f"a constant that is added to values before {end.node.name()} is weighted and then summed, and its "
                    "graph shows only the sum. Sum outputs and constants separately, as in "
                    "(output * mask).sum(-1) - (target * mask).sum(-1), or write the loss of one sample and call "
                    "clipper.per_sample_losses"
                )
            elif (
                end in sums
                and (self._is_each_own(end, sums[end]) or all(size == 1 for size in sums[end].sizes))
                and self._additions(end) > 1
            ):
                found[end] = (
                    f"several numbers or tensors are added to values before {end.node.name()}, and its graph shows "
                    "only their sum. Add up the numbers and tensors that are no outputs first, as in "
                    "output - (target - 1), p.sum(1) + (y.sum(1) + 1) or (a - b) - (reference_a - reference_b), or "
                    "write the loss of one sample and call clipper.per_sample_losses"
                )
        return found

    def _additions(self, value: Value) -> int:
        """Return the largest number of unsaved constants that are added to one element of a value."""
        known, depends = self._chains.known, self._depends

        def below(top: Value) -> list[Value]:
            is_end = (top in known and top != value) or not is_affine(top.node, depends)
            return [] if is_end else depends.below(top.node)

        def combine(top: Value, found: list[int]) -> int:
            if not found:
                return 0
            node = top.node
            together = max(found) if top.operation in JOINING else sum(found)
            is_number = node.name() in {"AddBackward1", "SubBackward1"}  # a number of a torch function, such as an eps
            if is_number or not adds_unseen(node, depends):
                return together
            if top.operation in JOINING:  # what it puts in lies beside the other elements
                return max(together, 1)
            if top == value and top.operation == "Where":  # if it puts in 0, it is a mask and adds nothing
                whole, mask = self._whole(value), saved(node, "condition")
                own = mask if depends.inputs(node) == [0] else ~mask
                if whole is not None and bool(
                    (whole.middle == 0).logical_or(own.broadcast_to(whole.middle.shape)).all()
                ):
                    return together
            return together + 1

        return fold(value, below, combine, {})

    def _mixtures(self) -> Iterator[SharedValue]:
        """Yield the sums of constants in the values of `_mixed`, with the constants that may explain them."""
        chains = self._chains
        for place, end, bounds in self._sums if self._mixed else ():
            if end not in self._mixed:
                continue
            beside = [
                one.nan_to_num(0.0) for node in self._nodes for _, one, _ in constants_beside(node, self._depends)
            ]
            for _, value, other in self._sums:
                if value not in self._mixed:  # a constant that is no sample's own, such as a statistic, is no column
                    own = self._is_each_own(value, other)
                    beside.append(other.middle.nan_to_num(0.0) if own else torch.full_like(other.low, math.nan))
            parts = [*([end] if adds_unseen(end.node, self._depends) else []), *self._parts[end]]
            columns = [torch.ones_like(bounds.low), *[chains.reached(part, end) for part in parts]]
            columns += [one for constant in beside for one in chains.summed_in(end, constant)]
            if (dim := self._normalized.get(end)) is not None:
                columns = [one.double() - one.double().mean(dim, keepdim=True) for one in columns]
            constants = torch.stack([one.broadcast_to(bounds.low.shape).double().flatten() for one in columns], 1)
            each = Bounds(bounds.low.double().flatten(), bounds.high.double().flatten())
            seen = "several" if all(size == 1 for size in bounds.sizes) else "each"
            yield SharedValue(
                ("mixture", place), math.nan, mixture=Mixture(constants, each, self._mixed[end]), seen=seen
            )

    @functools.cached_property
    def _sums(self) -> list[tuple[Hashable, Value, Bounds]]:
        """The sums of unsaved constants in values: the place, the value, and bounds of the sum."""
        sums = list[tuple[Hashable, Value, Bounds]]()
        for end in self._ends:
            below = self._places.of(end)
            if self._whole(end) is None or not (_places_of_rows(end, self._outputs) or end.shape == ()):
                continue
            bounds = self._subtracted(end) or self._constant_in(end)
            if bounds is not None:
                sums.append((below, end, bounds))
        return sums

    def _subtracted(self, value: Value) -> Bounds | None:
        """Return bounds of the constant that a single `Add` or `Sub` adds to known values, faster than `added`.

        Returns:
            The bounds; None where a value is not computed so.
        """
        node, known = value.node, self._chains.known
        if value not in known or value.operation not in {"Add", "Sub"} or scalars(node, self._depends) != [1.0]:
            return None
        below, inputs = self._depends.below(node), self._depends.inputs(node)
        if len(below) != 1 or below[0] not in known or known[below[0]].shape != known[value].shape:
            return None
        whole, part = known[value], known[below[0]]
        sign = -1 if value.operation == "Sub" and inputs == [1] else 1
        eps, whole, part = torch.finfo(whole.dtype).eps, whole.to(wide_of(whole)), part.to(wide_of(whole))
        return Bounds.around(whole - part if sign == 1 else whole + part, whole.abs().add_(part.abs()).mul_(2 * eps))

    @functools.cached_property
    def _parts(self) -> dict[Value, list[Value]]:
        """For each value of `_ends`, the values below it to which constants were added before further operations."""
        return {end: self._chains.parts_of(end) for end in self._ends}

    def _added(self) -> Iterator[SharedValue]:
        """Yield the constants that operations add without saving them, where all samples may have the same one.

        Each constant is computed in the value of `_ends`. Where further operations follow the addition, it is also
        computed in the value to which it was added.
        """
        summands = [
            ((place, number), part, self._chains.where_added(part, end, bounds))
            for place, end, bounds in self._sums
            if end not in self._mixed
            for number, part in enumerate(self._parts[end])
        ]
        sums, counted = [*self._sums, *summands], Counter[Hashable]()
        of_each = Counter(place for place, _, _ in sums)
        in_loops = defaultdict[tuple[Hashable, torch.Size], list[tuple[Value, Bounds]]](list)
        for place, value, bounds in sums:
            among, counted[place] = (of_each[place], counted[place]), counted[place] + 1
            if value in self._mixed and self._outputs.batch_size > 1:
                continue
            sizes, shape, places = bounds.sizes, value.shape, _places_of_rows(value, self._outputs)
            if not shape or of_each[place] > 1:  # a loop over samples has a value for each
                narrow = bounds.alike([dim for dim, size in enumerate(sizes) if size == 1])
                in_loops[place, narrow.low.shape].append((value, narrow))
            if not shape:
                continue
            keys = {dim: ("added", place, shape[:dim], shape[dim + 1 :]) for dim in places}
            alike = next((dim for dim in places if sizes[dim] == 1), None)
            if alike is None:
                yield from (SharedValue(key, math.nan, seen="each", among=among) for key in keys.values())
                continue
            seen = "several" if _are_of_several(bounds, alike) else "one"
            constant, bounds = as_number(bounds.alike([alike]))
            yield SharedValue(keys[alike], constant, self._look(value, sizes), bounds, seen=seen, among=among)
        for (place, shape), found in in_loops.items():
            yield from self._added_in_loop(("added", place, "alone", shape), found)

    def _added_in_loop(self, key: Hashable, found: Sequence[tuple[Value, Bounds]]) -> Iterator[SharedValue]:
        """Yield the constant that operations add to one value after the other, as a loop over samples does."""
        values, bounds = [value for value, _ in found], found[0][1]
        if values[0].shape and len(found) == 1:
            return
        for _, other in found[1:]:
            bounds = bounds.within(other)
            if not bounds.are_possible:
                break
        if not (bounds.are_possible and bool(bounds.are_known.any())):
            yield SharedValue(key, math.nan, seen="each")
            return
        seen = "several" if len(found) >= (_MANY_SAMPLES if bounds.are_whole else 2) else "one"
        is_shared = functools.partial(_is_of_several, self._outputs, [value.node for value in values])
        constant, bounds = as_number(bounds)
        yield SharedValue(key, constant, is_shared if values[0].shape else lambda: True, bounds, seen=seen)

    def given(self) -> Iterator[SharedValue]:
        """Yield the gradients that were passed to backward, without all 1 (a sum) and all 1/n (a mean)."""
        for number, (_, gradient) in enumerate(self._roots):
            wanted = [1.0, 1 / max(1, gradient.numel())]
            if not any(bool(((gradient - one).abs() <= 1e-6 * one).all()) for one in wanted):
                yield SharedValue(("gradient", number), gradient, lambda: "unclear")

    def shared(self) -> Iterator[SharedValue]:
        """Yield the values that all samples may share; a value's place does not depend on the rest of the loss."""
        outputs, depends, size = self._outputs, self._depends, self._outputs.batch_size
        uses: defaultdict[Hashable, dict[Hashable, list[_Use]]] = defaultdict(dict)

        def use(node: Node, value: Tensor | float, is_shared: IsShared, *key: Hashable, of_all: bool = False) -> None:
            place = operation(node), self._places.of(Value(node)), *key
            same = _place(value) if isinstance(value, Tensor) else value
            uses[place].setdefault(same, []).append(_Use(node, value, functools.cache(is_shared), of_all))

        # Behind a nonlinear operation (`is_behind`) a number is no weight of rows, which the ledger compares.
        for node, is_behind in self._nodes.items():
            name, whole = operation(node), Value(node)
            look_at_all = self._look(whole, [1] * len(whole.shape))
            labelled = name in LABELLED or name == "MultiMarginLoss"
            if labelled and (weight := saved(node, "weight")) is not None and not _is_of_parameter(weight):
                use(node, plain(weight), lambda: True, weight.shape, of_all=True)
            for i, (value, constant, is_short) in enumerate(constants_beside(node, depends) if not labelled else ()):
                places = places_of(value.shape, size)
                sizes, constant = own_sizes(constant), unrepeated(constant)
                is_one = size > 1 and _is_one_number(constant)
                if is_one:
                    # In another batch its elements may differ.
                    if sizes[0] == 1 and 1 in [sizes[dim] for dim in places]:
                        use(node, constant, self._look(value, sizes), i, constant.shape)
                    sizes, constant = [1] * len(sizes), constant[(slice(1),) * constant.dim()]
                is_own = places and all(sizes[dim] > 1 for dim in (0, *places)) and not _is_reduced(value, outputs)
                if is_own or (constant.numel() == 1 and not is_behind and not is_one):
                    continue
                by_chance = is_one and size < _MANY_SAMPLES
                is_shared = (lambda: "unclear") if by_chance else self._look(value, sizes)
                if not _is_of_parameter(constant):
                    use(node, constant, is_shared, i, constant.shape, of_all=is_short)
            # Tensors without a dimension, except factors of rows. Python's numbers are read from the settings below.
            takes = name in TAKES_BESIDE and (is_behind or name not in SCALINGS)
            given = [one for one in (saved_tensors(node) if takes else ()) if not (one.dim() or depends.holds(one))]
            given = [plain(one) for one in given if not depends.is_trained_beside(node, one)]
            singles = [
                one for one in given if not _is_of_parameter(one) and (one.dtype == torch.bool or is_tensor(one))
            ]
            # A condition may take away all derivatives of its result.
            chosen = depends.below(node)[0] if name == "Where" else whole
            for i, constant in enumerate(singles):
                use(node, constant, self._look(chosen, [1] * len(chosen.shape)), i, "single", of_all=True)
            for columns, sizes in _columns_of(node):
                if 1 in [sizes[dim] for dim in (0, *places_of(whole.shape, size))]:
                    use(node, columns, self._look(whole, sizes), "columns", columns.dim())
            for setting, value in _numbers_of(node, depends) if is_behind else ():
                use(node, value, look_at_all, setting, outputs.values_of_each, of_all=True)
        for key, values in uses.items():
            for number, users in enumerate(values.values()):
                is_shared = functools.partial(_is_shared_by, outputs, users)
                of_all = any(one.of_all for one in users)
                yield SharedValue(key, users[0].value, is_shared, among=(len(values), number), of_all=of_all)
            yield from self._in_order(key, values)
        yield from self._within_trained()
        yield from self._settings()
        yield from self._weights()
        yield from self._places_taken()
        if self._ends:  # else no unsaved constant was added, and nothing need be recomputed
            yield from self._added()
            yield from self._mixtures()

    def _look(self, value: Value, sizes: Sequence[int]) -> IsShared:
        """Return a function that tells whether an element of a constant lies beside values of several samples."""
        return functools.partial(_is_shared, self._outputs, value, sizes)

    @functools.cached_property
    def _trained(self) -> list[tuple[Node, int, TrainedValue]]:
        """The values of parameters alone by which the loss multiplies, or that act on it in another way.

        What is only added to the loss acts on no sample; what is added before a function is compared as a constant.
        """
        return [
            (node, which, TrainedValue(value, node))
            for node, is_behind in self._nodes.items()
            if operation(node) not in _ADDING_ONLY and (is_behind or operation(node) in PRODUCTS | SCALINGS)
            for which, value in enumerate(self._depends.trained_beside(node))
        ]

    def _within_trained(self) -> Iterator[SharedValue]:
        """Yield the numbers, settings and added constants in values of parameters alone."""
        for node, which, trained in self._trained:
            place = "trained", operation(node), self._places.of(Value(node)), which
            for at, value, is_usual in trained.numbers():
                yield SharedValue((*place, at), value, weighs=not (is_usual or self._nodes[node]), of_all=True)
            for number, bounds in enumerate(trained.added):
                if bounds is not None:
                    value, bounds = as_number(bounds)
                    surely = not self._nodes[node]
                    key = (*place, number)
                    yield SharedValue(key, value, bounds=bounds, may_be_labels=False, weighs=surely, of_all=True)

    def _in_order(self, key: Hashable, values: Mapping[Hashable, Sequence[_Use]]) -> Iterator[SharedValue]:
        """Yield the values of a place in the order of the loss, apart for each result of the module.

        Each value may be one of an earlier batch, and yet stand where another stood: two temperatures of two heads.
        """
        by_result: defaultdict[Hashable, list[tuple[int, _Use]]] = defaultdict(list)
        for users in values.values():
            for use in users:
                if not is_declared(use.value, self._outputs):
                    by_result[self._results.of(Value(use.node))].append((self._order[use.node], use))
        for results, found in by_result.items():
            ordered = [use for _, use in sorted(found, key=lambda one: one[0])]
            same = [_place(use.value) if isinstance(use.value, Tensor) else use.value for use in ordered]
            for uses in _sequences(ordered, same):
                if len(ordered) == 1 and len(self._outputs.results) == 1:
                    continue  # this place has one value, which is compared already
                given, places = [use.value for use in uses], ()
                if all(isinstance(one, Tensor) for one in given):
                    if len({one.shape for one in given}) > 1:  # pyright: ignore[reportAttributeAccessIssue]
                        continue
                    value = torch.stack([*given]) if len(given) > 1 else given[0]  # pyright: ignore
                else:
                    numbers = tuple(float(one) for one in given)
                    value, places = numbers[0] if len(numbers) == 1 else math.inf, (_rounded(numbers),)
                are_shared = self._are_shared(ordered, len(uses))
                words = "" if len(uses) == 1 and not places else f"the order of numbers or tensors, {_shown(given)}"
                of_all = all(use.of_all for use in uses)
                place = key, results, len(uses)
                yield SharedValue(place, value, are_shared, places=places, words=words, of_all=of_all)

    def _settings(self) -> Iterator[SharedValue]:
        """Yield what operations are told besides numbers: dimensions, modes, and how many values they combine."""
        outputs = self._outputs
        found: defaultdict[Hashable, list[tuple[Node, Hashable]]] = defaultdict(list)
        for node, is_behind in self._nodes.items():
            for setting, value in _settings_of(node) if is_behind else ():
                results = self._results.of(Value(node))
                place = operation(node), self._places.of(Value(node)), results, len(shape_of(node))
                found[(*place, setting, outputs.values_of_each)].append((node, value))
        for key, uses in found.items():
            setting, values = key[-2], [value for _, value in uses]  # pyright: ignore[reportIndexIssue]
            nodes = [node for node, _ in uses]
            taking = [_Use(node, math.inf, lambda: True) for node in nodes]
            for taken in _sequences(values, values):
                is_alone = len(taken) == 1
                number = taken[0] if is_alone else None
                number = number[0] if isinstance(number, tuple) and len(number) == 1 else number
                yield SharedValue(
                    key if is_alone else (key, len(taken)),
                    float(number) if type(number) is int else math.inf,
                    (lambda: True) if is_alone else self._are_shared(taking, len(taken)),
                    places=(tuple(taken),),
                    seen="one" if is_alone and len(uses) > 1 else "several",
                    words=f"{setting} = {taken[0] if is_alone else tuple(taken)} of {nodes[0].name()}",
                    chooses=setting in _CHOICES,
                    of_all=setting.startswith("dim") or not isinstance(values[0], tuple),
                )
            if len({*values}) > 1 and self._is_loop(nodes):
                yield SharedValue(key, math.nan, seen="each")  # the samples have different lengths

    def _weights(self) -> Iterator[SharedValue]:
        """Yield the ratios of several numbers by which values of the same kind are multiplied, if the ratios differ.

        The ledger compares these numbers whatever their order. A common factor, such as 1 over a count, is left out.
        """
        found: defaultdict[Hashable, list[tuple[Hashable, int, Node, float]]] = defaultdict(list)
        for number, (node, is_behind) in enumerate(self._nodes.items()):
            if is_behind or operation(node) not in SCALINGS or len(self._depends.below(node)) != 1:
                continue
            for one in scalars(node, self._depends):
                if math.isfinite(one) and one and not is_declared(one, self._outputs):
                    below = self._depends.below(node)[0]
                    results = tuple(sorted(self._results.of(below)))
                    found[self._places.of(below)].append((results, number, node, one))
        for place, each in found.items():
            most = max(abs(one) for *_, one in each)
            each.sort(key=lambda one: one[:2])  # pyright: ignore
            ratios = [round(one / most, 6) for *_, one in each]
            if len({*ratios}) == 1:
                continue
            results = tuple(one[0] for one in each)
            pairs, uses = (
                [*zip(results, ratios, strict=True)],
                [_Use(node, one, lambda: True) for *_, node, one in each],
            )
            words = f"the order of factors, {_shown(ratios)} times the largest"
            for ordered in _sequences(pairs, pairs):
                key = "weights", place, tuple(one for one, _ in ordered), frozenset(ratios)
                are_shared = self._are_shared(uses, len(ordered))
                yield SharedValue(key, math.inf, are_shared, places=(tuple(ordered),), words=words)

    def _is_loop(self, nodes: Sequence[Node]) -> bool:
        """Tell whether some operation acts on one of several samples."""
        outputs = self._outputs
        return outputs.batch_size > 1 and any(outputs.only_sample(Value(node)) is not None for node in nodes)

    def _are_shared(self, uses: Sequence[_Use], count: int) -> IsShared:
        """Return a function that tells whether samples share a sequence of values, which operations take in order.

        In a loop over samples each operation acts on one sample. Then the samples share a sequence only if each of them
        has as many operations as the sequence has values.
        """

        def are_shared() -> bool | Unsettled:
            nodes = [use.node for use in uses]
            if not self._is_loop(nodes):
                return _is_shared_in(uses)
            each = Counter(self._outputs.only_sample(Value(node)) for node in (nodes if count < len(nodes) else ()))
            return True if {*each.values()} == {count} else "own here"

        return are_shared

    @functools.cached_property
    def _order(self) -> dict[Node, int]:
        """The number of each operation in the order of the loss."""
        return {node: number for number, node in enumerate(self._nodes)}

    def _places_taken(self) -> Iterator[SharedValue]:
        """Yield the positions that operations take along a dimension, such as a column, for each user of the result."""
        counted: Counter[Hashable] = Counter()
        alike: defaultdict[Hashable, list[tuple[Node, float]]] = defaultdict(list)
        outputs = self._outputs
        several = outputs.batch_size > 1
        edges = [(root.value, "root") for root in self._roots]
        edges += [(edge, operation(node)) for node in self._nodes for edge in parents(node)]
        for value, user in edges:
            node, name = value.node, value.operation
            if node not in self._nodes or name not in TAKING:
                continue
            [whole], dim = parents(node), saved(node, "dim") % len(parents(node)[0].shape)
            shape, among = whole.shape, places_of(whole.shape, outputs.batch_size)
            if among == [dim] and _is_reduced(whole, outputs):
                among = []
            if shape[dim] == 1 or (not several and dim in among):
                continue
            place = "taken", user, name, len(shape), among == [dim]
            counted[place] += 1
            of_several = functools.partial(_is_for_several, outputs, value, dim, among)
            shared = of_several if several else lambda: True
            yield SharedValue((*place, counted[place], "dim"), float(dim), shared)
            for which, at, ways in _taken(value, dim, shape[dim]):
                yield SharedValue((*place, counted[place], which), at, shared, places=ways)
                if name in {"Select", "Unbind"}:
                    alike[place, which].append((node, at))
        for key, found in alike.items() if several else ():
            if len(found) > 1:
                # In a loop over samples, each operation takes the position for one sample.
                nodes, positions = [node for node, _ in found], {at for _, at in found}
                is_shared = functools.partial(_is_of_several, outputs, nodes) if len(positions) == 1 else lambda: False
                yield SharedValue((key, "each"), found[0][1], is_shared, places=(found[0][1],))


def _but_for_a_number(bounds: Bounds, result: Tensor, dim: int) -> Bounds:
    """Return bounds of a constant added before `log_softmax`, up to a number of each row.

    The result of `log_softmax` shows neither this number nor the magnitude of the inputs, on which their rounding
    depends: a magnitude up to 64 times that of the result is allowed for.
    """
    mean, most = bounds.middle.mean(dim, keepdim=True), (result.abs() + bounds.middle.abs()).amax(dim, keepdim=True)
    unseen = bounds.rounding.amax(dim, keepdim=True) + 64 * torch.finfo(result.dtype).eps * (1 + most)
    return Bounds(bounds.low - mean - unseen, bounds.high - mean + unseen)


def _is_result(node: Node, values: Tensor) -> bool:
    """Tell whether an operation's saved result is its result for some values, up to the rounding of kernels."""
    result = saved(node, "result").detach()
    if operation(node) == "LogSoftmax":
        return _are_normalized(result, values, saved(node, "dim"))
    again, limits = INVERTIBLE[operation(node)].function(values), torch.finfo(result.dtype)
    if torch.equal(again, result):
        return True
    near = (again - result).abs() <= 4 * limits.eps * result.abs() + limits.tiny
    return bool((near | (again == result) | (again.isnan() & result.isnan())).all())


def _are_normalized(result: Tensor, values: Tensor, dim: int) -> bool:
    """Tell whether a result equals `log_softmax` of values up to rounding."""
    result, values = (one.movedim(dim, -1).reshape(-1, one.shape[dim]) for one in (result, values))
    rows = max(1, _IN_CACHE // max(1, result.shape[-1])) if result.device.type == "cpu" else max(1, len(result))
    wide = wide_of(result)
    own, eps = torch.finfo(result.dtype).eps, torch.finfo(wide).eps
    for some, given in zip(result.split(rows), values.split(rows), strict=True):
        if own == eps:  # if all is finite, result and values differ by one number in each row
            apart = some - given
            low, high = apart.amin(-1), apart.amax(-1)  # `aminmax` of rows takes ten times as long
            most = torch.stack([-some.amin(-1), -low, high]).amax(0)
            if bool(((high - low <= 64 * eps * (1 + most)) & (most < torch.inf)).all()):
                continue
        log, given = some.to(wide), given.to(wide)
        total, sizes = given.logsumexp(-1, keepdim=True), log.abs()
        most = sizes.where(sizes < torch.inf, 0.0).amax(-1, keepdim=True)
        near = (log - given + total).abs() <= own * (1 + sizes) + 64 * eps * (1 + most) + 4 * eps * total.abs()
        if not bool(((near & (sizes < torch.inf)) | (log == given) | (log.isnan() & given.isnan())).all()):
            return False
    return True


def _is_reduced(value: Value, outputs: Outputs) -> bool:
    """Tell whether an operation below a value may add up samples: then a dimension of size B need not hold them."""
    for place in _until_outputs(value, outputs):
        name, below = place.operation, parents(place.node)
        if not _adds_up(place) or not below:
            continue
        dims = dims_of(place.node) if name in operations("mean", "sum") else None
        shape = below[0].shape
        places = {*places_of(shape, outputs.batch_size)}
        if places and (dims is None or not places.isdisjoint(dims)):
            return True
    return False


def _until_outputs(value: Value, outputs: Outputs) -> Iterator[Value]:
    """Yield the values that a value is computed from, with itself, without the module's outputs."""
    ends = outputs.values

    def onward(place: Value) -> list[Value]:
        return [] if place in ends or place.is_tap else outputs.depends.below(place.node)

    return (place for place in walk([value], onward) if place not in ends)


def _adds_up(value: Value) -> bool:
    """Tell whether an operation adds up values, of whichever samples."""
    return value.operation in _ADDING_UP or saved_constant(value.node, "reduction") in {1, 2}


def _places_of_rows(value: Value, outputs: Outputs) -> list[int]:
    """Return the dimensions along which samples, or rows selected from them, may lie."""
    shape = value.shape
    places = places_of(shape, outputs.batch_size)
    return [*places, 0] if 0 not in places and shape and shape[0] else places


def _are_of_several(bounds: Bounds, dim: int) -> bool:
    """Tell whether equal numbers along a dimension are known for enough samples to be equal not just by chance."""
    known, alike = bounds.are_known, bounds.alike([dim])
    for other in range(known.dim()):
        if other != dim and alike.sizes[other] == 1:
            known, alike = known.any(other, keepdim=True), alike.alike([other])
    is_whole = (alike.middle - alike.middle.round()).abs() <= alike.rounding
    by_chance = is_whole | alike.are_of_two  # labels, or a margin where the label is
    return bool((known.sum(dim, keepdim=True) >= torch.where(by_chance, _MANY_SAMPLES, 2)).any())


def _taken(value: Value, dim: int, size: int) -> list[tuple[str, float, tuple[Hashable, ...]]]:
    """Return the positions that an operation takes of ``size`` along a dimension.

    Returns:
        Each position's name, its value, and the ways in which it is counted, as in ``SharedValue.places``.
    """
    (node, number), name = value, value.operation
    if name in {"Select", "Unbind"}:
        at = number if name == "Unbind" else saved(node, "index") % size
        return [("at", float(at), (at, at - size))]
    if name == "Slice":  # the end is left out: it is a length, and lengths are judged by the ledger
        start, _, step = slice(saved(node, "start"), None, saved(node, "step")).indices(size)
        return [("from", float(start), (start, start - size, object())), ("step", float(step), ())]
    part: Hashable = object()
    if name == "SplitWithSizes":
        sizes = list(saved(node, "split_sizes"))
        start, end = sum(sizes[:number]), sum(sizes[: number + 1])
    else:
        each = saved(node, "split_size")
        start, end = number * each, min(size, (number + 1) * each)
        count = -(-size // each) if each else 1
        if count and each == -(-size // count):
            part = number, count
    return [(which, float(at), (at, at - size, part)) for which, at in (("from", start), ("to", end))]


def _is_for_several(outputs: Outputs, value: Value, dim: int, among: Sequence[int]) -> bool:
    """Tell whether a result belongs to several samples, and was taken along a dimension that does not hold them."""
    if _is_shared(outputs, value, [1] * len(value.shape), lambda: False) is not True:
        return False
    try:
        samples = outputs.samples_of(parents(value.node)[0])
    except Unreadable:
        return among[:1] != [dim]
    return torch.equal(samples.amin(dim), samples.amax(dim))


def _is_of_parameter(constant: Tensor) -> bool:
    """Tell whether a constant is a parameter or a view of one: another optimizer may train it."""
    return isinstance(constant, nn.Parameter) or isinstance(base_of(constant), nn.Parameter)


def _nodes(roots: Sequence[Root], outputs: Outputs) -> dict[Node, bool]:
    """Return the operations between a loss and the module, each with whether a path to it, or itself, is nonlinear."""
    pending = [(root.value, False) for root in roots]
    found: dict[Node, bool] = {}
    while pending:
        value, is_behind = pending.pop()
        node = value.node
        if value in outputs.values or value.is_tap or not outputs.depends(node):
            continue
        is_behind = is_behind or not is_linear(node, outputs.depends)
        if found.get(node) in {True, is_behind}:
            continue
        found[node] = is_behind
        pending += [(below, is_behind) for below in parents(node)]
    return found


_CHOICES = {"shifts", "k"}
"""Settings that decide which columns the loss takes."""


def _numbers_of(node: Node, depends: Dependence) -> Iterator[tuple[Hashable, float]]:
    """Yield the numbers that an operation takes, without sizes and positions; infinity for None."""
    yield from enumerate(scalars(node, depends))
    if operation(node) in MOVING:
        return  # its settings are positions and sizes
    for name, value in [
        *saved_settings(node).items(),
        *[(one, saved_constant(node, one)) for one in ("alpha", "beta", "value", "self")],
    ]:
        is_number = type(value) is int or (isinstance(value, float) and not math.isnan(value))
        if is_number and not (RECORDED_SIZE in name or name.startswith("dim") or name == "reduction"):
            yield name, float(value)


def _settings_of(node: Node) -> Iterator[tuple[str, Hashable]]:
    """Yield the settings of an operation that are not numbers, and how many values of a sample the operation combines.

    The reduction of a loss is left out, because the ledger compares the weights of rows. So are operations that move
    values: a loop over samples uses others of them than a batched loss.
    """
    name, settings = operation(node), saved_settings(node)
    if name in MOVING or not (below := parents(node)):
        return
    shape = below[0].shape
    for setting, value in settings.items():
        is_list = isinstance(value, list | tuple)
        is_of_each = setting.endswith("lengths") or setting == "reduction" or RECORDED_SIZE in setting
        if is_of_each or not (is_list or value is None or type(value) in (bool, str) or setting.startswith("dim")):
            continue
        if type(value) is int:
            value = (value,)
        if isinstance(value, list | tuple):
            counted = max(1, len(shape)) if setting.startswith("dim") else None  # from the front, or from the end
            value = tuple(one if counted is None else one % counted for one in value)
        yield setting, value
    if "reduction" in settings or name in _BY_TENSORS:
        return
    if (dims := dims_of(node) if "dim" in settings else None) is not None:
        yield "size", tuple(shape[dim] for dim in dims if shape)
        if name == "Topk":
            yield "k", shape_of(node)[dims[0]]
    elif len(below) == 1 and not shape_of(node) and shape:
        yield "size", shape.numel()


def _sequences(found: Sequence[_Found], same: Sequence[Hashable]) -> list[list[_Found]]:
    """Return a sequence, and what is left of it without repetitions: a loop over samples repeats a batched loss.

    Args:
        found: The sequence.
        same: For each element what is equal for equal elements.

    Returns:
        The sequence; and its shortest period, with each run of equal elements as short as the runs' ratio allows, if
        that is another one.
    """
    size = len(same)
    period = next(n for n in range(1, size + 1) if size % n == 0 and [*same[:n]] * (size // n) == [*same])
    starts = [i for i in range(period) if not i or same[i] != same[i - 1]]
    lengths = [end - start for start, end in itertools.pairwise([*starts, period])]
    each = math.gcd(*lengths)
    short = [found[start] for start, many in zip(starts, lengths, strict=True) for _ in range(many // each)]
    return [[*found], short] if len(short) < size else [short]


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{one:.10e}") for one in numbers)


def _shown(values: Sequence[Tensor | float]) -> str:
    return ", ".join(f"shape {list(one.shape)}" if isinstance(one, Tensor) else f"{one:.6g}" for one in values)


def _columns_of(node: Node) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield the index tensors of an operation, with their sizes along the result: 1 where an index is repeated."""
    name, alike = operation(node), [1] * len(shape_of(node))
    if name == "Gather":
        index = saved(node, "index")
        yield unrepeated(index), own_sizes(index)
    indices = [saved(node, "index")] if name == "IndexSelect" else saved(node, "indices") if name == "Index" else ()
    given = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, Tensor)]
    for _, index in given:
        if index.dim() == 1 and index.dtype != torch.bool:
            dim = saved(node, "dim") % len(alike) if name == "IndexSelect" else given[0][0]
            yield unrepeated(index), [*alike[:dim], *own_sizes(index), *alike[dim + 1 :]]


def _is_one_number(constant: Tensor) -> bool:
    """Tell whether all elements of a constant are one number that is not whole, and so is no label."""
    first = constant.flatten()[:1]
    is_a_number = constant.numel() > 1 and constant.is_floating_point()
    return is_a_number and bool((constant == first).all() & (first != first.round()))


def _is_shared_by(outputs: Outputs, uses: Sequence[_Use]) -> bool | Unsettled:
    """Tell whether samples share a value: within one operation, or across operations of one sample each."""
    shared = _is_shared_in(uses)
    return shared is True or (len(uses) > 1 and _is_of_several(outputs, [use.node for use in uses])) or shared


def _is_shared_in(uses: Sequence[_Use]) -> bool | Unsettled:
    """Tell whether samples share a value within one of the operations."""
    found: list[bool | Unsettled] = [use.is_shared() for use in uses]
    return True in found or max(found, key=bool)


def _is_of_several(outputs: Outputs, nodes: Sequence[Node]) -> bool:
    """Tell whether the operations do not all act on the same sample."""
    return len({outputs.only_sample(Value(node)) for node in nodes}) > 1


def _is_shared(
    outputs: Outputs, value: Value, sizes: Sequence[int], is_reduced: Callable[[], bool] | None = None
) -> bool | Unsettled:
    """Tell whether an element of a constant lies beside values of several samples.

    Args:
        outputs: The values that the module returned.
        value: The values.
        sizes: The sizes of the constant, 1 where it is the same along a dimension.
        is_reduced: Tells whether samples may have been added up in the values; `_is_reduced` by default. If so, a batch
            in which each column has one sample does not settle the next batch.

    Returns:
        The answer, or what this batch alone shows.
    """
    if outputs.batch_size == 1:
        return True
    is_reduced = is_reduced or functools.partial(_is_reduced, value, outputs)
    try:
        samples, tells_all = outputs.samples_of(value), True
    except Silent as silent:
        samples, tells_all = silent.samples, False
    except Unreadable:
        return True
    places, tells = _places_of_rows(value, outputs), samples >= 0
    if not tells_all and places and not is_reduced():
        return len(sizes) > places[0] and sizes[places[0]] == 1
    alike = [dim for dim in range(samples.dim()) if dim >= len(sizes) or sizes[dim] == 1]
    if alike and bool((samples.where(tells, outputs.batch_size).amin(alike) < samples.amax(alike)).any()):
        return True
    if not is_reduced():
        return False if tells_all else "own here"
    rows = torch.arange(outputs.batch_size, device=samples.device)
    in_order = [dim for dim in places if samples.shape[dim] == len(rows)]
    along = (rows.view(-1, *[1] * (samples.dim() - dim - 1)) for dim in in_order)
    return "own here" if any(bool((~tells | (samples == row)).all()) for row in along) else "unclear"


# Values bound to a function


_DEEPEST = 4
"""Depth of nested functions that are searched."""

_CALLED = "__call__"
"""The method of an object that is a function."""

_LONGEST = 64
"""The most items of a list or tuple that are read."""


def bound_values(loss_fn: Any, place: tuple[Hashable, ...] = ()) -> Iterator[tuple[Hashable, Tensor | float]]:
    """Yield the tensors and numbers that are bound to a function, each with its place.

    Of a module these are parameters and buffers, of `functools.partial` the bound arguments. Of Python code they are
    the numbers in its closure, its defaults, its module's globals, and the object whose method it is.
    """
    if isinstance(loss_fn, functools.partial):
        yield from bound_values(loss_fn.func, (*place, "func"))
        for i, leaf in enumerate(tree_flatten((loss_fn.args, loss_fn.keywords))[0]):
            yield from bound_values(leaf, (*place, i))
    elif isinstance(loss_fn, nn.Module):
        for name, module in loss_fn.named_modules():
            yield from (((*place, name, slot), one) for slot, one in module.named_parameters(recurse=False))
            yield from (((*place, name, slot), one) for slot, one in module.named_buffers(recurse=False))
            yield from _numbers_in(module.forward, (*place, name))
    elif isinstance(loss_fn, FunctionType | MethodType):
        yield from _numbers_in(loss_fn, place)
    elif isinstance(loss_fn, Tensor):
        yield place, loss_fn
    elif isinstance(call := getattr(type(loss_fn), _CALLED, None), FunctionType):
        yield from _numbers_in(MethodType(call, loss_fn), place)
    elif isinstance(loss_fn, tuple | list) and len(loss_fn) <= _LONGEST:
        for i, leaf in enumerate(loss_fn):
            yield from bound_values(leaf, (*place, i))
    elif (plain := _as_number(loss_fn)) is not None:
        yield place, plain


def _as_number(value: Any) -> float | None:
    """Return a number that differs where a plain value differs; None for a value that is not plain."""
    if type(value) in (int, float):
        return value
    if isinstance(value, numbers.Real) or type(value).__name__ in ("bool", "bool_"):
        return float(value)
    return float(zlib.crc32(value.encode())) if isinstance(value, str) else None


def _numbers_in(code: Any, place: tuple[Hashable, ...]) -> Iterator[tuple[Hashable, float]]:
    """Yield the numbers that code takes from outside its arguments; torch's own functions are skipped."""
    function = getattr(code, "__func__", code)
    if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch.nn.functional"):
        return
    named = {**function.__globals__, **getattr(getattr(code, "__self__", None), "__dict__", {})}
    taken = {name: named[name] for name in function.__code__.co_names if name in named and name != "training"}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            taken[name] = cell.cell_contents
    taken |= {str(i): value for i, value in enumerate(function.__defaults__ or ())}
    taken |= function.__kwdefaults__ or {}
    for name, value in list(taken.items()):  # `settings.weight`: the code names the object, and its attribute
        if not callable(value) or isinstance(value, type):
            read = [one for one in function.__code__.co_names if one in getattr(value, "__dict__", {})]
            taken |= {f"{name}.{one}": getattr(value, one) for one in read if not callable(getattr(value, one))}
    for name, value in taken.items():
        if len(place) < _DEEPEST:
            found = bound_values(value, (*place, function.__code__, name))
            yield from ((where, one) for where, one in found if not isinstance(one, Tensor))
