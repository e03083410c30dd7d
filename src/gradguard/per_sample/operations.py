"""Rules for single operations that a module's code does with its parameters: ``weight * x``, ``x + bias``,
`torch.nn.functional.linear`, `layer_norm` and `rms_norm`.

Most layers without a rule use their parameters in such operations only: a normalization written by hand or over other
dimensions, the scale of a residual branch, an adapter. Such an operation is tapped like a layer. The code around it
then need not run again for each sample (`vmap_fallback`), and may draw random numbers.

A proxy takes the parameter's place while the code runs. Torch functions that are called with the proxy go through
`ParameterProxy.__torch_function__`. Planned operations are tapped there. Any other function gets a leaf instead, and a
gradient that reaches the leaf is refused, so the clipper detects every other use of the parameter, at every step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradguard.per_sample.call_arguments import Slot
from gradguard.per_sample.contributions import Contributions, Materialized, wide
from gradguard.per_sample.layers.call import BatchAxis, LayerCall
from gradguard.per_sample.layers.linear import linear
from gradguard.per_sample.layers.normalization import layer_norm_over, rms_norm_over
from gradguard.per_sample.layers.registry import LayerRule
from gradguard.torch_private import never_compiled, tree_map

_ELEMENTWISE = {
    torch.mul: "product", torch.multiply: "product", Tensor.mul: "product", Tensor.multiply: "product",
    torch.add: "sum", Tensor.add: "sum",
}  # fmt: skip

_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}
"""The names of the functions' arguments, in order."""


class Operation(NamedTuple):
    """One operation with parameters.

    Attributes:
        kind: The kind of operation, such as ``"product"``.
        operand: The tensor that belongs to samples.
        parameters: The weight, the bias, or both, if the clipper follows them.
        options: Further numbers that the rule needs.
    """

    kind: str
    operand: Tensor
    parameters: Mapping[str, Tensor]
    options: Mapping[str, Any]


class ObservedOperation(NamedTuple):
    """One operation in a dry run.

    Attributes:
        kind: The kind of operation, such as ``"product"``.
        slots: The operation's parameters, each by module and attribute.
        operand: Shape of the tensor that belongs to samples.
        result: Shape of the result.
    """

    kind: str
    slots: tuple[Slot, ...]
    operand: torch.Size
    result: torch.Size


class PlannedOperation(NamedTuple):
    """The plan for one parameter in a call.

    Attributes:
        kind: The kind of operation, such as ``"product"``.
        dims: Number of dimensions of the operand and of the result.
        axis: Batch axis of both.
    """

    kind: str
    dims: int
    axis: BatchAxis


def operation_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], followed: Callable[[Any], bool]
) -> Operation | None:
    """Return the operation that ``func`` does with parameters; None if it is no known operation.

    Args:
        func: A torch function.
        args: The arguments of ``func``.
        kwargs: The keyword arguments of ``func``.
        followed: Returns whether an argument is a parameter that the clipper follows.
    """
    if func in _ELEMENTWISE and len(args) == 2 and not kwargs:
        kind, (first, second) = _ELEMENTWISE[func], args
        parameter, operand = (first, second) if followed(first) else (second, first)
        found = Operation(kind, operand, {"weight": parameter}, {})
    elif func in _FUNCTIONS:
        given = dict(zip(_FUNCTIONS[func], args, strict=False)) | dict(kwargs)
        parameters = {role: given[role] for role in ("weight", "bias") if followed(given.get(role))}
        shape = tuple(given.get("normalized_shape", ()))
        default = None if func is F.rms_norm else 1e-5
        options = {"shape": shape, "eps": given.get("eps", default)} if shape else {}
        found = Operation(func.__name__, given.get("input"), parameters, options)  # type: ignore[arg-type]
    else:
        return None
    tensors = [found.operand, *found.parameters.values()]
    known = found.parameters and all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors)
    return found if known and not followed(found.operand) else None


def stays(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Return whether ``func`` moved a tensor to its own device, as transformers does with results of embeddings."""
    return func is Tensor.to and result is args[0] and not kwargs and isinstance(args[-1], torch.device)


def planned(
    two: Sequence[ObservedOperation | None], three: Sequence[ObservedOperation | None]
) -> dict[Slot, PlannedOperation] | None:
    """Return the planned operation of each parameter; None unless all operations are known and agree.

    Args:
        two: The operations of a call for two samples.
        three: The operations of the same call for three samples.
    """
    found: dict[Slot, PlannedOperation] = {}
    if len(two) != len(three):
        return None
    for a, b in zip(two, three, strict=True):
        if a is None or b is None or a[:2] != b[:2]:
            return None
        axis = _axis(a.operand, b.operand)
        if axis is None or axis != _axis(a.result, b.result) or len(a.operand) != len(a.result):
            return None
        plan = PlannedOperation(a.kind, len(a.operand), BatchAxis(axis))
        if any(found.setdefault(slot, plan) != plan for slot in a.slots):
            return None
    return found


def _axis(two: torch.Size, three: torch.Size) -> int | None:
    """Return the dimension that has size 2 for two samples and 3 for three; None if any other dimension differs."""
    differing = [d for d in range(len(two)) if len(two) == len(three) and two[d] != three[d]]
    return differing[0] if len(differing) == 1 and (two[differing[0]], three[differing[0]]) == (2, 3) else None


def rule_of(operation: Operation) -> LayerRule:
    """Return the rule of one operation."""
    if operation.kind == "linear":
        return LayerRule(linear)
    if operation.kind in ("layer_norm", "rms_norm"):
        over = layer_norm_over if operation.kind == "layer_norm" else rms_norm_over
        return LayerRule(partial(over, shape=list(operation.options["shape"]), eps=operation.options["eps"]))
    return LayerRule(partial(_elementwise, operation.kind == "product", operation.parameters["weight"].shape))


def rule_of_result(operation: Operation, embedding: nn.Module, rule: LayerRule) -> LayerRule:
    """Return the rule of an operation with the result of an embedding, whose ids are the same for all samples.

    The last argument of the call contains these ids.
    """
    of_operation = rule_of(operation).contributions

    def contributions(call: LayerCall) -> Contributions:
        rows, ids = of_operation(call)["weight"].materialize().gradients, call.args[-1]
        ids, first = ids.expand(len(rows), *ids.shape), [BatchAxis(0)]
        return rule.contributions(
            LayerCall(embedding, (ids,), {}, [None], [rows], len(rows), first, first, call.wanted)  # type: ignore[arg-type]
        )

    return LayerRule(contributions)


def _elementwise(product: bool, shape: torch.Size, call: LayerCall) -> Contributions:
    """Return the gradient of a parameter from the result's gradient, by summing over broadcast dimensions."""
    rows = wide(call.grad())
    if product:
        rows = wide(call.input()) * rows
    assert call.grad_axes[0] is not None
    repeated = [1] * (rows.dim() - len(shape)) + list(shape)  # dimensions of the result, with its batch axis in place
    del repeated[call.grad_axes[0].dim]
    over = [d for d, size in enumerate(repeated, 1) if size == 1]
    rows = rows.sum(over) if over else rows
    return {"weight": Materialized(rows.reshape(len(rows), *shape))}


class ParameterProxy(Tensor):
    """A tensor in a parameter's place while a module's code runs.

    Attributes:
        leaf: The tensor that functions other than the planned operation get instead.
        full_name: Name of the parameter in the whole module.
        plan: The planned operation.
        tapped: Called with a planned operation, its function, arguments and keyword arguments; returns its result.
    """

    leaf: Tensor
    full_name: str
    plan: PlannedOperation
    tapped: Callable[[Operation, Any, Sequence[Any], Mapping[str, Any]], Tensor]

    @staticmethod
    def of(leaf: Tensor, full_name: str, plan: PlannedOperation, tapped: Callable[..., Tensor]) -> "ParameterProxy":
        """Return a proxy for ``leaf``, which gets the gradient of every use that is not planned."""
        made = leaf.as_subclass(ParameterProxy)
        made.leaf, made.full_name, made.plan, made.tapped = leaf, full_name, plan, tapped
        return made

    @classmethod
    @never_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and (func in _ELEMENTWISE or func in _FUNCTIONS):
            operation = operation_of(func, args, kwargs, lambda value: isinstance(value, ParameterProxy))
            if operation is not None:
                own = [one for one in operation.parameters.values() if isinstance(one, ParameterProxy)]
                dims = operation.operand.dim()
                if all((one.plan.kind, one.plan.dims) == (operation.kind, dims) for one in own):
                    return own[0].tapped(operation, func, args, kwargs)
        leaf_of = lambda value: value.leaf if isinstance(value, ParameterProxy) else value  # noqa: E731
        leaves, kwargs = tree_map(leaf_of, (tuple(args), kwargs))
        result = func(*leaves, **kwargs)
        return args[0] if stays(func, leaves, kwargs, result) else result
