"""Parameters that code by itself multiplies with, or adds to, what belongs to samples: ``weight * x``, ``x + bias``.

That is all that most layers without a rule do with a parameter: a normalization written by hand, the scale of a
residual branch. Such an operation is tapped as a layer is, so the code around it need not run again for each sample
(`own_code`), and may draw random numbers.

A stand-in takes the parameter's place while the code runs. Functions of torch that are called with it come to
`StandIn.__torch_function__`: the operations that were planned are tapped; everything else gets a leaf, and a gradient
that reaches the leaf is refused. So no use of the parameter goes unnoticed, at any step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradguard.per_sample.arithmetic import wide
from gradguard.per_sample.contributions import Contribution, Kept
from gradguard.per_sample.layers.call import BatchAxis, LayerCall
from gradguard.per_sample.layers.rules import Rule
from gradguard.torch_private import tree_map

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply}
_SUMS = {torch.add, Tensor.add}


class Operation(NamedTuple):
    """One operation of a parameter with something else, as it was observed.

    Attributes:
        slot: The parameter's name in its module.
        product: Multiplied; otherwise added.
        operand: Shape of the other.
        result: Shape of the result.
    """

    slot: str
    product: bool
    operand: torch.Size
    result: torch.Size


class PlannedOperation(NamedTuple):
    """What to do at each operation of one parameter in a call.

    Attributes:
        product: Multiplied; otherwise added.
        dims: Number of dimensions of the operand, and of the result.
        axis: Where the samples lie in both.
    """

    product: bool
    dims: int
    axis: BatchAxis


def operation_of(func: Any, args: Sequence[Any], kwargs: Any, parameter: Tensor, slot: str, result: Any) -> Any:
    """Return the `Operation` that ``func`` did with ``parameter``; None if it was anything else."""
    other = other_operand(func, args, kwargs, parameter)
    if other is None or not (parameter.is_floating_point() and other.is_floating_point()):
        return None
    return Operation(slot, func in _PRODUCTS, other.shape, result.shape)


def other_operand(func: Any, args: Sequence[Any], kwargs: Any, parameter: Tensor) -> Tensor | None:
    """Return what ``parameter`` is multiplied with or added to; None if ``func`` does anything else."""
    if func not in _PRODUCTS | _SUMS or len(args) != 2 or kwargs or not all(isinstance(a, Tensor) for a in args):
        return None
    others = [argument for argument in args if argument is not parameter]
    return others[0] if len(others) == 1 else None


def planned(two: Sequence[Operation | None], three: Sequence[Operation | None]) -> dict[str, PlannedOperation] | None:
    """Return what to do with each parameter, by its name in the module; None if that is not known of all of them.

    Args:
        two: The operations of a call for two samples.
        three: Of the same call for three.
    """
    found: dict[str, PlannedOperation] = {}
    if len(two) != len(three):
        return None
    for a, b in zip(two, three, strict=True):
        if a is None or b is None or a[:2] != b[:2]:
            return None
        axis = _axis(a.operand, b.operand)
        if axis is None or axis != _axis(a.result, b.result) or len(a.operand) != len(a.result):
            return None
        plan = PlannedOperation(a.product, len(a.operand), BatchAxis(axis))
        if found.setdefault(a.slot, plan) != plan:
            return None
    return found


def _axis(two: torch.Size, three: torch.Size) -> int | None:
    """The dimension of size 2 for two samples and 3 for three, if nothing else differs."""
    differing = [d for d in range(len(two)) if len(two) == len(three) and two[d] != three[d]]
    return differing[0] if len(differing) == 1 and (two[differing[0]], three[differing[0]]) == (2, 3) else None


def rule(operation: PlannedOperation, shape: torch.Size) -> Rule:
    """Return the rule of an operation of a parameter of ``shape``, which it knows as ``"weight"``."""
    return Rule(partial(_contribution, operation.product, shape))


def _contribution(product: bool, shape: torch.Size, call: LayerCall) -> dict[str, Contribution]:
    r"""The gradient of the result, times the operand in a product, summed over what the parameter was repeated in."""
    rows = wide(call.grad())
    if product:
        rows = wide(call.input()) * rows
    assert call.grad_axes[0] is not None
    repeated = [1] * (rows.dim() - len(shape)) + list(shape)  # as in the result, with its samples in their place
    del repeated[call.grad_axes[0].dim]
    over = [d for d, size in enumerate(repeated, 1) if size == 1]
    rows = rows.sum(over) if over else rows
    return {"weight": Kept(rows.reshape(len(rows), *shape))}


class StandIn(Tensor):
    """Takes a parameter's place while code runs.

    Attributes:
        leaf: What functions get in its place, but for operations that are planned.
        operation: What is planned.
        tapped: Called with a planned operation's function, its arguments and its other operand; returns its result.
    """

    leaf: Tensor
    operation: PlannedOperation
    tapped: Callable[[Any, Sequence[Any], Tensor], Tensor]

    @staticmethod
    def of(leaf: Tensor, operation: PlannedOperation, tapped: Callable[..., Tensor]) -> "StandIn":
        """Make one for ``leaf``, which gets the gradient of every use that is not planned."""
        made = leaf.as_subclass(StandIn)
        made.leaf, made.operation, made.tapped = leaf, operation, tapped
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            for own in args:
                other = other_operand(func, args, kwargs, own) if isinstance(own, StandIn) else None
                if other is not None and own.is_planned(func, other):
                    return own.tapped(func, args, other)
        args, kwargs = tree_map(leaf_of, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def is_planned(self, func: Any, other: Tensor) -> bool:
        """Tell whether this operation is the one that was observed."""
        planned = self.operation
        same = planned.product == (func in _PRODUCTS) and not isinstance(other, StandIn)
        return same and other.is_floating_point() and other.dim() == planned.dims


def leaf_of(value: Any) -> Any:
    """Return the leaf of a stand-in, anything else as it is."""
    return value.leaf if isinstance(value, StandIn) else value
