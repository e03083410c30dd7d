"""Compares with the loop: the module is run on a few samples at once, and on each by itself.

Both get the same random gradient of the output, so no loss function is needed, and what the clipper computes from one
backward must be what plain autograd computes for each sample alone. That finds samples that are mixed, parameters
that were missed, and samples that were looked for in the wrong dimension.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguard.distributed import is_sharded
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.arithmetic import exact_products
from gradguard.per_sample.contributions import Contribution
from gradguard.per_sample.dry_run import Observer, undisturbed
from gradguard.per_sample.following import Following, LastCall
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.mini_batch import Gathering
from gradguard.per_sample.samples import Arguments, take_samples
from gradguard.per_sample.trees import Skeleton


@dataclass(frozen=True)
class Comparison:
    """How far the per-sample gradients are from those of single samples.

    Attributes:
        largest: Largest relative error, by the norm of a sample's whole gradient.
        parameter: The name of the parameter where it is.
    """

    largest: float
    parameter: str


def verify_first_step(following: Following, batch_first: bool) -> None:
    """Check the first mini-batch on two of its samples; a model that draws random numbers cannot be checked.

    Raises:
        UnsupportedGradientError: If the per-sample gradients are not those of the samples by themselves.
    """
    if any(is_sharded(following.parameter(name)) for name in following.aliases):
        return  # a second run would be a collective
    found = compare_with_loop(following, batch_first, 2)
    dtypes = {following.parameter(name).dtype for name in following.aliases}
    dtypes |= {call.autocast[1] for call in following.last_calls.values() if call.autocast}
    tolerance = max([math.sqrt(torch.finfo(dtype).eps) for dtype in dtypes if dtype.is_floating_point])
    if found is not None and found.largest > tolerance:
        raise UnsupportedGradientError(
            f"the per-sample gradient of {found.parameter} is not what the sample gives by itself (relative error "
            f"{found.largest:.2g}). Does the model mix samples (batch statistics, x - x.mean(0), routing that looks at "
            "the batch)? Is the batch in another dimension (batch_first=False)? Nothing was clipped."
        )


def compare_with_loop(following: Following, batch_first: bool, samples: int) -> Comparison | None:
    """Return the largest error over the modules that were last called; None if they draw random numbers.

    Raises:
        InvalidValueError: If nothing was called yet.
    """
    if not following.last_calls:
        raise InvalidValueError("verify() needs a batch: call the module once, with gradients, before it.")
    worst = Comparison(0.0, "")
    for call in list(following.last_calls.values()):
        for order in _orders(min(samples, call.batch_size)):
            found = _compare(following, call, batch_first, order)
            if found is None:
                return None
            worst = max(worst, found, key=lambda comparison: comparison.largest)
    return worst


def _orders(count: int) -> list[list[int]]:
    """Both directions, so that a model that sorts its samples is found out."""
    forward = list(range(count))
    return [forward, forward[::-1]] if count > 1 else [forward]


def _compare(following: Following, call: LastCall, batch_first: bool, samples: list[int]) -> Comparison | None:
    with torch.enable_grad(), following.apart() as gathering, _same_numerics(call), exact_products():
        cut = [
            take_samples(call.arguments, batch_first, call.batch_size, s) for s in (samples, *[[i] for i in samples])
        ]
        if _is_random(call.module, cut[0]):
            return None
        together = _contributions(call, cut[0], gathering)
        differences = [
            _difference(following, together.contributions, _alone(following, call, one, together, i), i)
            for i, one in enumerate(cut[1:])
        ]
    return max(differences, key=lambda comparison: comparison.largest)


@dataclass
class _Together:
    """What the clipper computes for a few samples at once, and the gradients of the outputs that it is for."""

    contributions: dict[str, Contribution]
    output_grads: list[Tensor]


@contextmanager
def _same_numerics(call: LastCall) -> Iterator[None]:
    """Run as the call ran, but without dropout, and leave no trace."""
    with undisturbed(call.module), Observer(frozenset()), ExitStack() as stack:
        if call.autocast:
            stack.enter_context(torch.autocast(*call.autocast))
        yield


def _outputs(call: LastCall, arguments: Arguments) -> list[tuple[Tensor, BatchAxis]]:
    """What the module returns and can have a gradient."""
    torch.manual_seed(0)
    tensors = Skeleton(call.module(*arguments[0], **arguments[1])).tensors
    pairs = zip(tensors, call.output_axes, strict=True)
    return [(t, axis) for t, axis in pairs if axis is not None and t.requires_grad]


def _is_random(module: nn.Module, arguments: Arguments) -> bool:
    results = []
    with torch.no_grad():
        for seed in (0, 1):
            torch.manual_seed(seed)
            results.append(Skeleton(module(*arguments[0], **arguments[1])).tensors)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*results, strict=True))


def _contributions(call: LastCall, arguments: Arguments, gathering: Gathering) -> _Together:
    outputs = _outputs(call, arguments)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator).to(t) for t, _ in outputs]
    if outputs:
        torch.autograd.backward([t for t, _ in outputs], grads)
    mini_batch = gathering.mini_batch
    return _Together(mini_batch.finish(outputs[0][0].device) if mini_batch else {}, grads)


def _alone(
    following: Following, call: LastCall, arguments: Arguments, together: _Together, sample: int
) -> dict[str, Tensor]:
    """The gradients of one sample by itself, from plain autograd; ``.grad`` stays as it was."""
    parameters = {name: following.parameter(name) for name in following.aliases}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        with following.quietly():
            for parameter in parameters.values():
                parameter.grad = None
            outputs = _outputs(call, arguments)
            grads = [
                _entries_of(grad, axis, output, sample)
                for (output, axis), grad in zip(outputs, together.output_grads, strict=True)
            ]
            if outputs:
                torch.autograd.backward([t for t, _ in outputs], grads)
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _entries_of(grad: Tensor, axis: BatchAxis, output: Tensor, sample: int) -> Tensor:
    """The part of a gradient that belongs to one sample, in the shape that the sample's own output has."""
    size = output.shape[axis.dim]
    if axis.last:
        return grad.unflatten(axis.dim, (size, -1)).select(axis.dim + 1, sample)
    return grad.narrow(axis.dim, sample * size, size)


def _difference(
    following: Following, contributions: dict[str, Contribution], alone: dict[str, Tensor], sample: int
) -> Comparison:
    """The largest error of one sample's gradient, relative to the norm of the whole."""
    total = math.sqrt(math.fsum(float(g.double().square().sum()) for g in alone.values()))
    worst = Comparison(0.0, "")
    for name in following.aliases:
        found = contributions[name].rows(sample, sample + 1)[0] if name in contributions else None
        expected = alone.get(name)
        if found is None and expected is None:
            continue
        difference = (0 if found is None else found.double()) - (0 if expected is None else expected.double())
        error = float(torch.linalg.vector_norm(difference)) / (total or 1.0)  # type: ignore[arg-type]
        if error > worst.largest:
            worst = Comparison(error, name)
    return worst
