"""Samples of PyTorch's own operator database, as they are and with a small error planted in the backward."""

import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

SAMPLES_LOOKED_AT = 40
"""Of one operator; a few operators have hundreds, most of them too large."""


@dataclass(frozen=True)
class Sample:
    """An operator at a point: ``fn(*inputs)`` returns a floating tensor, or a tuple of them.

    Attributes:
        name: The operator with its variant, and the number of the sample: ``"std.unbiased#1"``.
        fn: The operator, all arguments but the inputs bound.
        inputs: Leaves in float64 that require gradients, in storages of their own.
    """

    name: str
    fn: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]

    @property
    def operator(self) -> str:
        return self.name.rpartition("#")[0]


def samples(
    per_operator: int = 3, max_inputs: int = 300, max_outputs: int = 600, only: str = "", every: int = 1
) -> Iterator[Sample]:
    """Small samples of every operator that has gradients in float64 on the CPU, the same at every call.

    Args:
        per_operator: At most so many of each operator.
        max_inputs: At most so many elements in all inputs together.
        max_outputs: At most so many elements in all outputs together.
        only: Only operators whose names contain this.
        every: Only every so many-th operator; making samples of all takes a minute.

    Yields:
        Samples in the order of the database. Left out is what raises, gives NaN, or has nothing to differentiate.
    """
    for operator in _operators()[::every]:
        if only not in operator.full_name or torch.float64 not in operator.supported_backward_dtypes("cpu"):
            continue
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            small = (s for s in _all_samples(operator) if _is_usable(s, max_inputs, max_outputs))
            found = list(itertools.islice(small, per_operator))
        yield from found


def planted_one_element(sample: Sample, seed: int) -> Sample | None:
    """The same forward; in backward, one element of the first input's gradient is 10 % too large.

    Returns:
        The wrong sample: the element is the one with the largest gradient under a random cotangent drawn from the seed.
        None if the gradient is 0 everywhere.
    """
    gradient = _gradient_of_first_input(sample, seed)
    if gradient is None:
        return None
    factors = torch.ones_like(gradient, memory_format=torch.contiguous_format)
    factors.view(-1)[gradient.abs().argmax()] = 1.1
    return _with_wrong_backward(sample, factors, "one element +10 %")


def planted_factor(sample: Sample, factor: float) -> Sample | None:
    """The same forward; in backward, all of the first input's gradient is multiplied by the factor.

    Returns:
        The wrong sample, or None if the gradient is 0 everywhere.
    """
    gradient = _gradient_of_first_input(sample, seed=0)
    if gradient is None:
        return None
    return _with_wrong_backward(sample, torch.tensor(factor, dtype=gradient.dtype), f"all × {factor}")


class _WrongBackward(torch.autograd.Function):
    """Returns its input; multiplies the gradient by factors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factors: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def _with_wrong_backward(sample: Sample, factors: Tensor, error: str) -> Sample:
    fn = lambda x, *others: sample.fn(_WrongBackward.apply(x, factors), *others)  # noqa: E731
    return replace(sample, name=f"{sample.name}, {error}", fn=fn)


def _gradient_of_first_input(sample: Sample, seed: int) -> Tensor | None:
    """Under a normal cotangent. Non-finite elements count as 0; None if nothing else is left."""
    outputs = _as_tuple(sample.fn(*sample.inputs))
    outputs = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs]
    (gradient,) = torch.autograd.grad(outputs, sample.inputs[:1], cotangents, allow_unused=True)
    if gradient is None:
        return None
    gradient = gradient.nan_to_num(0, 0, 0)
    return gradient if gradient.any() else None


def _all_samples(operator: Any) -> Iterator[Sample]:
    try:
        found = operator.sample_inputs("cpu", torch.float64, requires_grad=True)
        for number, sample in enumerate(itertools.islice(found, SAMPLES_LOOKED_AT)):
            yield _bound(operator, sample, f"{operator.full_name}#{number}")
    except Exception:  # what draws the samples needs a library, or a build of torch, that is not here
        return


def _bound(operator: Any, sample: Any, name: str) -> Sample:
    """Bind everything but the floating tensors that require gradients."""
    values, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [k for k, value in enumerate(values) if _is_floating(value) and value.requires_grad]
    inputs = tuple(values[k].detach().clone().requires_grad_() for k in places)
    bound = [value.detach() if isinstance(value, Tensor) else value for value in values]
    op, wrapper, finished = operator.get_op(), operator.gradcheck_wrapper, sample.output_process_fn_grad

    def fn(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = list(bound)
        for k, tensor in zip(places, tensors, strict=True):
            values[k] = tensor
        args, kwargs = tree_unflatten(values, structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated operators say so at every call
            outputs = finished(wrapper(op, *args, **kwargs))
        outputs = tuple(y for y in tree_flatten(outputs)[0] if _is_floating(y) or _is_complex(y))
        return outputs[0] if len(outputs) == 1 else outputs

    return Sample(name, fn, inputs)


def _is_usable(sample: Sample, max_inputs: int, max_outputs: int) -> bool:
    if not 0 < sum(x.numel() for x in sample.inputs) <= max_inputs or _any_sparse(sample.inputs):
        return False
    try:
        outputs = _as_tuple(sample.fn(*sample.inputs))
    except Exception:  # the database has samples that are errors on purpose, and some for other builds
        return False
    if not 0 < sum(y.numel() for y in outputs) <= max_outputs or _any_sparse(outputs):
        return False
    return any(y.requires_grad for y in outputs) and not any(y.isnan().any() for y in outputs)


def _operators() -> list[Any]:
    with warnings.catch_warnings(), _a_stand_in_for_expecttest():
        warnings.simplefilter("ignore")
        # Importing it would forbid everybody else in this process to set a flag of a backend.
        with mock.patch.object(torch.backends, "disable_global_flags"):
            from torch.testing._internal.common_methods_invocations import op_db
    return op_db


@contextmanager
def _a_stand_in_for_expecttest() -> Iterator[None]:
    """PyTorch's test helpers derive a class from one of a package that torch does not install; no test here uses it."""
    if "expecttest" in sys.modules or importlib.util.find_spec("expecttest"):
        yield
        return
    sys.modules["expecttest"] = stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    try:
        yield
    finally:
        del sys.modules["expecttest"]


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _any_sparse(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.layout != torch.strided for tensor in tensors)


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()
