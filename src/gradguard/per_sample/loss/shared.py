"""Compares what all samples of a batch share in a loss, beside their own rows, with what it was in batches before.

Weights of classes, a temperature, the columns of a matrix: they are constants, or they were made of the batch, and no
value tells which. But a constant is the same in the next batch. So everything that a loss takes, and that no sample
owns, is compared with what it was in the batches before. What has changed is refused, unless the user declares it.
"""

import contextlib
import functools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.torch_private import tree_flatten, version_of


@dataclass(frozen=True)
class SharedValue:
    """Something that a loss takes, and that all samples seem to share.

    Attributes:
        key: Where it stands in the loss.
        value: It.
        is_shared: Whether samples do share it.
        rounding: How far it may be from what was meant.
        places: A place along a dimension as it is counted from the front, from the end, and so on: one that is the
            same in one of these ways is the same.
    """

    key: Hashable
    value: Tensor | float
    is_shared: bool = True
    rounding: float = 0.0
    places: tuple[Hashable, ...] = ()

    def is_of(self, declared: Tensor | float) -> bool:
        """Tell whether it is a value that was declared, a view or a copy of it, what subtracts it or divides by it."""
        storages = [one.untyped_storage().data_ptr() for one in (self.value, declared) if isinstance(one, Tensor)]
        if len(storages) == 2 and storages[0] == storages[1]:
            return True
        divisor = [] if isinstance(declared, Tensor) or not declared else [1 / declared]
        return any(map(self.is_equal, (declared, -declared, *divisor)))

    def is_equal(self, other: Tensor | float) -> bool:
        """Tell whether it is the same as another, but for rounding; a number is one of every element."""
        mine, theirs = (
            one.detach() if isinstance(one, Tensor) else torch.tensor(one, device="cpu") for one in (self.value, other)
        )
        if theirs.dim() and mine.numel() != theirs.numel():
            return False
        theirs = theirs.flatten() if theirs.dim() else theirs
        return torch.allclose(mine.flatten(), theirs.to(mine), rtol=1e-12, atol=self.rounding, equal_nan=True)


@dataclass(frozen=True)
class _KeptValue:
    """A value as it was: the tensor, which keeps its memory from being used again, and a copy, as it may change."""

    value: Tensor | float
    copied: Tensor | float
    place: Hashable
    of_several: bool  # samples, and not of a batch of one
    places: tuple[Hashable, ...] = ()

    def is_same(self, one: SharedValue) -> bool:
        if self.places and one.places:
            return any(mine == theirs for mine, theirs in zip(self.places, one.places, strict=True))
        is_there = isinstance(one.value, Tensor) and place_of(one.value) == self.place
        return is_there or one.is_equal(self.copied)


class SharedValues:
    """The values that samples have shared in the batches that were accepted.

    Attributes:
        strict: Take no tensor that was not declared, for another batch might have given another.
    """

    def __init__(self) -> None:
        self.strict = False
        self._kept: dict[Hashable, _KeptValue] = {}
        self._owned: set[Hashable] = set()  # places of what was seen to be each sample's own
        self.declared: list[Tensor | float] = []
        self._new: dict[Hashable, _KeptValue] = {}

    def declare(self, value: Tensor | float) -> None:
        """Take a value for the user's own, until `end`."""
        self.declared.append(value)

    def end(self, accepted: bool) -> None:
        """A loss was judged: nothing is declared for the next, which must have the values of one that was accepted."""
        self._kept |= self._new if accepted else {}
        self._new = {}
        self.declared.clear()

    def objection(self, found: Iterable[SharedValue], batch_size: int) -> str:
        """Return why the values of a batch cannot be accepted; "" if they can."""
        several = batch_size > 1
        for one in found:
            kept = self._kept.get(one.key)
            is_known = kept is not None and kept.is_same(one)
            if not one.is_shared:
                self._owned.add(one.key)
            if one.key in self._owned or any(map(one.is_of, self.declared)):
                continue
            if several and self.strict and isinstance(one.value, Tensor):
                is_known, kept = False, _kept(math.nan, of_several=True)
            if kept is None or is_known:
                self._new[one.key] = kept if kept and kept.of_several else _kept(one.value, several, one.places)
            elif not (several or kept.of_several):  # each is its only sample's own, or it changes
                self._new[one.key] = _kept(math.nan, of_several=False)
            else:
                return _words(kept, one)
        return ""


def _kept(value: Tensor | float, of_several: bool, places: tuple[Hashable, ...] = ()) -> _KeptValue:
    copied = value.detach().clone() if isinstance(value, Tensor) else value
    return _KeptValue(value, copied, place_of(value) if isinstance(value, Tensor) else None, of_several, places)


def place_of(value: Tensor) -> Hashable:
    """Return what tells a tensor from others, and from itself once it has changed."""
    return value.data_ptr(), value.shape, value.stride(), value.dtype, version_of(value)


def _words(kept: _KeptValue, shared: SharedValue) -> str:
    """Say what is wrong with a value that all samples share."""
    value = shared.value
    if shared.places:
        return (
            f"the place {value:.6g} that the loss takes of all samples, such as a column, was {kept.copied:.6g} in an "
            "earlier batch. Was it chosen by the batch? Then what a sample gives depends on the others. If it is "
            "yours, write int(clipper.constant(place)); if each sample has its own, take them by gather, or let "
            "clipper.per_sample_losses compute each sample's loss"
        )
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"the number {value:.6g}"
    said = "has changed since an earlier batch"
    if not isinstance(kept.copied, Tensor):
        said = "may be another in the next batch" if math.isnan(kept.copied) else f"{said}, from {kept.copied:.6g}"
    given = "value" if not isinstance(value, Tensor) or value.dim() else "value.item()"
    return (
        f"{what}, which all samples share in the loss, {said}. Was it computed from the batch, such as weights of "
        "classes, a mean or a length? Then what a sample gives depends on the others: compute it from the sample's own "
        f"rows, or once for all batches. If it is yours, say clipper.constant({given}) where it stands in the loss"
    )


# What is bound to a function


_DEEPEST = 4
"""Functions within functions that are looked into."""


def bound_values(loss_fn: Any, place: tuple[Hashable, ...] = ()) -> Iterator[tuple[Hashable, Tensor | float]]:
    """Yield the tensors and numbers that are bound to a function, each with its place.

    A module has its parameters and buffers, `functools.partial` what it gives. Code takes numbers from what it closes
    over, from its file, and from the object that it is a method of.
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
    elif isinstance(loss_fn, Tensor) or type(loss_fn) in (int, float):
        yield place, loss_fn


def _numbers_in(code: Any, place: tuple[Hashable, ...]) -> Iterator[tuple[Hashable, float]]:
    """Yield the numbers that code takes from elsewhere; torch's own takes none."""
    function = getattr(code, "__func__", code)
    if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch.nn.functional"):
        return
    named = {**function.__globals__, **getattr(getattr(code, "__self__", None), "__dict__", {})}
    taken = {name: named[name] for name in function.__code__.co_names if name in named}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            taken[name] = cell.cell_contents
    taken |= {str(i): value for i, value in enumerate(function.__defaults__ or ())}
    for name, value in (taken | (function.__kwdefaults__ or {})).items():
        if len(place) < _DEEPEST:
            found = bound_values(value, (*place, function.__code__, name))
            yield from ((where, one) for where, one in found if not isinstance(one, Tensor))


def shared_in_function(loss_fn: Any) -> Iterator[SharedValue]:
    """Yield what is bound to a function of one sample's loss, but for weights of layers, which are trained."""
    yield from (SharedValue(p, one) for p, one in bound_values(loss_fn) if not isinstance(one, nn.Parameter))
