"""Compares with the loop: the module is run on a few samples at once, and on each by itself.

Both get the same random gradient of the output, so no loss function is needed, and what the clipper computes from one
backward must be what plain autograd computes for each sample alone. That finds samples that are mixed, parameters
that were missed, and samples that were looked for in the wrong dimension.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import is_sharded
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.arithmetic import exact_products, row_squares, wide
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
    if found is None or not any(axis is not None for c in following.last_calls.values() for axis in c.output_axes):
        why = "it draws random numbers of its own" if found is None else "no tensor can be seen in what it returns"
        warnings.warn(
            f"gradguard could not compare the model with single samples, because {why}: make sure that it does not "
            "mix samples. (check=False leaves this check and this warning out.)",
            stacklevel=4,
        )
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
            take_samples(call.arguments, batch_first, call.batch_size, s, call.whole)
            for s in (samples, *[[i] for i in samples])
        ]
        if _is_random(call.module, cut[0]):
            return None
        together = _contributions(call, cut[0], gathering)
        differences = [_alone(following, call, one, together, i) for i, one in enumerate(cut[1:])]
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
    following: Following, call: LastCall, arguments: Arguments, together: _Together, sample: int, hold: bool = False
) -> Comparison:
    """Return how far plain autograd of one sample by itself is; ``.grad`` stays as it was.

    Each gradient is compared when it is complete, and dropped, so that the model's gradients are never there at once;
    with ``hold`` they are, for a reentrant checkpoint, which completes gradients more than once.
    """
    parameters = {name: following.parameter(name) for name in following.aliases}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    errors = _Errors(together.contributions, sample)
    hooks = []
    try:
        with following.quietly():
            for name, parameter in parameters.items():
                parameter.grad = None
                if parameter.requires_grad and not hold:
                    hooks.append(parameter.register_post_accumulate_grad_hook(partial(errors.compare, name)))
            outputs = _outputs(call, arguments)
            grads = [
                _entries_of(grad, axis, output, sample)
                for (output, axis), grad in zip(outputs, together.output_grads, strict=True)
            ]
            if outputs:
                torch.autograd.backward([t for t, _ in outputs], grads)
            if hold:
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        errors.compare(name, parameter)
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return _alone(following, call, arguments, together, sample, hold=True) if errors.repeated else errors.largest()


def _entries_of(grad: Tensor, axis: BatchAxis, output: Tensor, sample: int) -> Tensor:
    """The part of a gradient that belongs to one sample, in the shape that the sample's own output has."""
    size = output.shape[axis.dim]
    if axis.last:
        return grad.unflatten(axis.dim, (size, -1)).select(axis.dim + 1, sample)
    return grad.narrow(axis.dim, sample * size, size)


class _Errors:
    """Compares one gradient after another, and holds none of them.

    Attributes:
        repeated: A parameter came twice, so its gradient was not complete the first time.
    """

    def __init__(self, contributions: dict[str, Contribution], sample: int) -> None:
        self._contributions, self._sample = contributions, sample
        self._squares: dict[str, float] = {}
        self._total = 0.0
        self.repeated = False

    def compare(self, name: str, parameter: Tensor) -> None:
        """Take in the gradient of a parameter from the sample alone, and drop it."""
        expected, parameter.grad = parameter.grad, None
        assert expected is not None
        expected = expected.to_dense() if expected.layout is not torch.strided else expected
        self.repeated |= name in self._squares
        self._total += float(row_squares(expected.unsqueeze(0)))
        found = self._rows(name) if name in self._contributions else torch.zeros((), device=expected.device)
        self._squares[name] = float(row_squares((wide(expected) - found).unsqueeze(0)))

    def largest(self) -> Comparison:
        """Return the largest error, relative to the norm of the sample's whole gradient."""
        for name in self._contributions.keys() - self._squares.keys():
            self._squares[name] = float(row_squares(self._rows(name).unsqueeze(0)))
        name = max(self._squares, key=lambda key: self._squares[key], default="")
        return Comparison(math.sqrt(self._squares.get(name, 0.0) / (self._total or 1.0)), name)

    def _rows(self, name: str) -> Tensor:
        return self._contributions[name].rows(self._sample, self._sample + 1)[0]
