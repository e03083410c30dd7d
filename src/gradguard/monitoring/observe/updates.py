"""Measure how far a step moves each weight tensor, from a sample of its elements.

A tensor of more than `ELEMENTS` elements is represented by about that many, evenly spread. A sharded tensor is
represented by this process's shard.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradguard.distributed.placements import local_part
from gradguard.monitoring.judge.detectors.update_sizes import ELEMENTS
from gradguard.monitoring.observe.measure import Norms, every_so_many, gradient_norms
from gradguard.monitoring.observe.step_rules import Rule, Taken, rule_of
from gradguard.tensors.kernels import SampledBlocks, memory_of
from gradguard.tensors.layout import flat, is_dense

SHARE = 0.01
"""The largest share of the run's time that these measurements may take."""

FREE = 0.1
"""The seconds of these measurements that are always allowed."""

RULE_EVERY, OF_RULE, ROUNDING = 8, 3, 0.01
"""The interval of comparisons with the optimizer's rule; the largest number of compared tensors; the largest share of
the step, and of the rule's step, that rounding may be for a comparison to count."""

_ORDINARY = (Tensor, Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Moved(NamedTuple):
    """The change of the sampled elements of each parameter by a step.

    Attributes:
        update: The 2-norm of the change of each parameter's sample.
        weight: The 2-norm of each parameter's sample before the step.
        counts: The number of sampled elements of each parameter; 0 if it cannot be sampled.
        sizes: The number of elements of each parameter.
        roots: The square root of ``sizes / counts``, the factor from a sample's norm to the norm of all elements.
        rates: The learning rate of each parameter group.
        added: The 2-norm of the step's addition to the momentum, for each parameter of at most `ELEMENTS` elements;
            0 for other parameters. Empty if `step_rules` has the optimizer's rule, or the optimizer has no momentum.
        over_rule: The step divided by the step that the optimizer's rule computes, if their ratio is one number; NaN if
            it is not, None if the step was not compared.
    """

    update: Norms
    weight: Norms
    counts: list[int]
    sizes: list[int]
    roots: list[float]
    rates: list[Any]
    added: Norms
    over_rule: Tensor | None


class Samples:
    """A sample of the elements of an optimizer's weights.

    Args:
        parameters: The weights, at least one. Only weights on the first weight's device are sampled.

    Attributes:
        views: A 1-D view of each weight's sampled elements; empty if no view is possible.
        before: The sampled elements of all weights, copied before the step.
        changes: A buffer for the step's change of all sampled elements.
        parts: Each weight's slice of ``changes``, then each weight's slice of ``before``.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.views = [_sample(p.detach(), parameters[0].device) for p in parameters]
        self.counts, self.sizes = [view.numel() for view in self.views], [p.numel() for p in parameters]
        pairs = zip(self.sizes, self.counts, strict=True)
        self.roots = [math.sqrt(size / count) if count else 0.0 for size, count in pairs]
        self.before = torch.cat(self.views)  # in the promoted dtype of all weights
        self.changes = torch.empty_like(self.before)
        self.parts = [*self.changes.split(self.counts), *self.before.split(self.counts)]
        self._blocks = SampledBlocks.of(self.views, self.before, self.changes)

    def take(self) -> None:
        """Copy the current elements to `before`."""
        if self._blocks is None:
            torch.cat(self.views, out=self.before)
        else:
            self._blocks.take()

    def moved(self) -> Norms:
        """Return the 2-norm of each weight's change since `take`, then the 2-norm of each weight before it."""
        if self._blocks is not None:
            return self._blocks.moved()
        torch.cat(self.views, out=self.changes).sub_(self.before)
        return gradient_norms(self.parts)


class Sampled:
    """Cache the `Samples` of an optimizer until one of its weights moves to other memory.

    The samples keep that memory alive: no other weight can get its address in the meantime.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._samples: Samples | None = None

    def of(self, parameters: Sequence[Tensor]) -> Samples:
        """Return the samples of a step's ``parameters``, with their current elements."""
        memory, samples, self._samples = memory_of(parameters), self._samples, None
        if samples is None or memory is None or memory != self._memory:
            samples = Samples(parameters)
        else:
            samples.take()
        if memory is not None:  # without addresses, the cache could not notice that a weight has moved
            self._memory, self._samples = memory, samples
        return samples


class Moving:
    """Measure the change of the sampled weights by one step; created before the step.

    Args:
        optimizer: The optimizer that makes the step.
        parameters: The parameters that have a gradient, at least one.
        samples: The samples of these parameters.
        step: The number of earlier steps of this optimizer.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], samples: Samples, step: int = 0) -> None:
        device, rule = parameters[0].device, rule_of(optimizer)
        self._optimizer, self._parameters, self._samples = optimizer, parameters, samples
        self._rule, self._momenta = None if step % RULE_EVERY else rule, list[tuple[Tensor, Tensor]]()
        if rule is None:
            with suppress(Exception):  # an optimizer may have no momentum, or another layout of its state
                first, momenta = optimizer.param_groups[0], [_momentum(optimizer, p, device) for p in parameters]
                factor = first.get("momentum") or first["betas"][0]
                self._momenta = [(kept, factor * kept.float()) for kept in momenta]
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        self._rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def moved(self) -> Moved:
        """Return the change by the step."""
        samples = self._samples
        norms, n, over_rule = samples.moved(), len(samples.counts), None
        added = [kept.float() - left for kept, left in self._momenta]
        if self._rule is not None:
            with suppress(Exception):  # a subclass may have another state, or other settings
                over_rule = self._over_rule(self._rule, samples.parts[:n], samples.parts[n:])
        facts = samples.counts, samples.sizes, samples.roots, self._rates
        return Moved(norms[:n], norms[n:], *facts, gradient_norms(added) if added else [], over_rule)

    @torch.no_grad()
    def _over_rule(self, rule: Rule, changes: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
        """Return the ratio of the step to the rule's step, from tensors of the first group; NaN if it is no number."""
        group, rate = self._optimizer.param_groups[0], self._rates[0]
        own = set(map(id, group["params"]))
        rows = []
        for p, change, weight in zip(self._parameters, changes, weights, strict=True):
            if len(rows) == OF_RULE:
                break
            if id(p) not in own or p.grad is None or not weight.numel():
                continue
            state = {
                key: _sample(value, p.device) if isinstance(value, Tensor) and value.shape == p.shape else value
                for key, value in self._optimizer.state[p].items()
            }
            step = rule(Taken(group, state, _sample(p.grad, p.device), weight, p.shape))
            if step is not None:
                rows.append((-change, step.mul(rate), weight * torch.finfo(p.dtype).eps))
        if not rows:
            return None
        done, made, rounding = (torch.cat(parts).to(self._samples.before.dtype) for parts in zip(*rows, strict=True))
        lengths = [torch.linalg.vector_norm(one) for one in (done, made, rounding)]
        factor = torch.dot(done, made) / lengths[1].square()
        is_known = lengths[2] < ROUNDING * torch.minimum(*lengths[:2])
        is_one = torch.linalg.vector_norm(done - factor * made) < 2 * ROUNDING * lengths[0]
        return torch.where(is_known & is_one, factor, torch.nan)


def _momentum(optimizer: Optimizer, parameter: Tensor, device: torch.device) -> Tensor:
    """Return an optimizer's momentum of a parameter; empty if there is none, or if it exceeds `ELEMENTS` elements."""
    state = optimizer.state.get(parameter, {})
    kept = _sample(state.get("exp_avg", state.get("momentum_buffer", parameter.new_empty(0))), device)
    return kept if kept.numel() == parameter.numel() else kept[:0]


def _sample(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a 1-D view of at most about `ELEMENTS` elements of a parameter; empty if no view is possible."""
    values = parameter if type(parameter) in _ORDINARY else local_part(parameter)
    if values.dtype.is_complex and not values.is_conj():
        values = torch.view_as_real(values)
    known = type(values) in _ORDINARY and values.dtype in _DTYPES and values.device == device and not values.is_meta
    if known and values.is_contiguous():
        values = values.view(-1)
    elif known and is_dense(values):
        values = flat(values)
    else:
        return torch.empty(0, device=device)
    elements = values.numel()
    return values if elements <= ELEMENTS else values[:: every_so_many(elements, ELEMENTS)]
