"""By how much a step moves each tensor of the weights, from some of their elements.

A tensor of more than `ELEMENTS` is judged by about so many, evenly spread, and a sharded one by this process's part.
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
"""Seconds of them that no share limits."""

RULE_EVERY, OF_RULE, ROUNDING = 8, 3, 0.01
"""How often a step is compared with the optimizer's rule, the most tensors that are, and the share of a step, or of
what the rule makes, by which rounding may change it."""

_ORDINARY = (Tensor, Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Moved(NamedTuple):
    """The change that a step made to the weights, in the elements that are looked at.

    Attributes:
        update: 2-norm of what it changed, for each parameter.
        weight: 2-norm of these elements before the step.
        counts: How many elements are looked at; 0 where none can be.
        sizes: How many elements there are.
        roots: The root of ``sizes`` over ``counts``: by so much a norm of these elements is less than that of all.
        rates: The learning rate of each group of the optimizer.
        added: 2-norm of what it added to the momentum of each parameter of at most `ELEMENTS` elements, 0 for others;
            empty where the optimizer has a rule here, or no momentum.
        over_rule: The step over what the rule of the optimizer makes of its state and gradients, where these
            are one factor times each other; else NaN, or None where that is not looked at.
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
    """Some elements of the weights of an optimizer.

    Args:
        parameters: The weights, at least one; of those on several devices, those on the first are looked at.

    Attributes:
        views: The elements of each weight, as one dimension that shares its memory; none where that is not possible.
        before: All of them as they were at the last look.
        changes: Room for what a step does to all of them.
        parts: The part of each weight in ``changes``, then in ``before``.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.views = [_sample(p.detach(), parameters[0].device) for p in parameters]
        self.counts, self.sizes = [view.numel() for view in self.views], [p.numel() for p in parameters]
        pairs = zip(self.sizes, self.counts, strict=True)
        self.roots = [math.sqrt(size / count) if count else 0.0 for size, count in pairs]
        self.before = torch.cat(self.views)  # in the widest of their dtypes
        self.changes = torch.empty_like(self.before)
        self.parts = [*self.changes.split(self.counts), *self.before.split(self.counts)]
        self._blocks = SampledBlocks.of(self.views, self.before, self.changes)

    def take(self) -> None:
        """Keep what they are now."""
        if self._blocks is None:
            torch.cat(self.views, out=self.before)
        else:
            self._blocks.take()

    def moved(self) -> Norms:
        """Return the 2-norm of what a step has done to each since, then of each before it."""
        if self._blocks is not None:
            return self._blocks.moved()
        torch.cat(self.views, out=self.changes).sub_(self.before)
        return gradient_norms(self.parts)


class Sampled:
    """The `Samples` of an optimizer, made anew where one of its weights has other memory.

    They keep that memory alive, so that no other weight gets its address before the next look.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._samples: Samples | None = None

    def of(self, parameters: Sequence[Tensor]) -> Samples:
        """Return the samples of ``parameters``, those of a step of the optimizer, as they are now."""
        memory, samples, self._samples = memory_of(parameters), self._samples, None
        if samples is None or memory is None or memory != self._memory:
            samples = Samples(parameters)
        else:
            samples.take()
        if memory is not None:  # else nobody could tell whether they still are the weights
            self._memory, self._samples = memory, samples
        return samples


class Moving:
    """A sample of the weights that a step is about to change.

    Args:
        optimizer: Whose step it is.
        parameters: Those that have a gradient, at least one.
        samples: Their samples.
        step: How many steps of this optimizer came before.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], samples: Samples, step: int = 0) -> None:
        device, rule = parameters[0].device, rule_of(optimizer)
        self._optimizer, self._parameters, self._samples = optimizer, parameters, samples
        self._rule, self._momenta = None if step % RULE_EVERY else rule, list[tuple[Tensor, Tensor]]()
        if rule is None:
            with suppress(Exception):  # it may have no momentum, or a state of its own kind
                first, momenta = optimizer.param_groups[0], [_momentum(optimizer, p, device) for p in parameters]
                factor = first.get("momentum") or first["betas"][0]
                self._momenta = [(kept, factor * kept.float()) for kept in momenta]
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        self._rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def moved(self) -> Moved:
        """Return what the step has done."""
        samples = self._samples
        norms, n, over_rule = samples.moved(), len(samples.counts), None
        added = [kept.float() - left for kept, left in self._momenta]
        if self._rule is not None:
            with suppress(Exception):  # a subclass may keep another state, or other settings
                over_rule = self._over_rule(self._rule, samples.parts[:n], samples.parts[n:])
        facts = samples.counts, samples.sizes, samples.roots, self._rates
        return Moved(norms[:n], norms[n:], *facts, gradient_norms(added) if added else [], over_rule)

    @torch.no_grad()
    def _over_rule(self, rule: Rule, changes: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor | None:
        """Return the factor between what was done and what the rule makes, of tensors of the first group; else NaN."""
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
    """Return the running mean or sum that an optimizer keeps; empty where it is unknown or longer than `ELEMENTS`."""
    state = optimizer.state.get(parameter, {})
    kept = _sample(state.get("exp_avg", state.get("momentum_buffer", parameter.new_empty(0))), device)
    return kept if kept.numel() == parameter.numel() else kept[:0]


def _sample(parameter: Tensor, device: torch.device) -> Tensor:
    """Return some elements of a parameter as one dimension that shares its memory; none where that is not possible."""
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
