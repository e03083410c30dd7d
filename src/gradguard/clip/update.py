"""A clipper for the update of the weights, which an adaptive optimizer computes from the gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.clip.clip_rules import ClipByGlobalNorm, ClipByNorm, ClipByRMS, ClipByValue
from gradguard.clip.clipper import Clipper, ClipResult
from gradguard.clip.gradients import refused_by_name
from gradguard.clip.guard import OfOneOptimizer, check_attachable, give_back, take
from gradguard.clip.guard_parameters import GuardedParameters
from gradguard.clip.in_backward import is_in_backward, refuse_in_backward
from gradguard.clip.reach import Reach
from gradguard.distributed.placements import local_part
from gradguard.distributed.reduction_group import Stages
from gradguard.errors import InvalidValueError
from gradguard.optimizer_hooks import EveryStep, parameters_of
from gradguard.tensors.layout import are_readable, wide_dtype
from gradguard.tensors.tensor_admission import keeping_subnormals


class ClipUpdate(OfOneOptimizer):
    r"""Clip the update that ``optimizer`` computes from its gradients; the training loop does not change.

    .. math:: u = \frac{\theta_{t} - \mathrm{step}(\theta_{t})}{\eta}, \qquad
              \theta_{t+1} = \theta_{t} - \eta\, \mathrm{clip}(u)

    with the learning rate η of each parameter's group. A clip of gradients cannot bound the steps of an optimizer that
    normalises them itself: Adam, Adafactor and Muon move the weights by as much after a clip as before, and Adam by far
    more if a gradient grows a hundredfold while its average of squares is still small. The clipper treats u as it would
    treat gradients, so any rule works. `ClipByRMS` is Adafactor's, ``ClipAdaptive(0.1)`` bounds each unit's u by a
    share of its weights, ``ClipByMedian()`` follows the recent past.

    **Guarantees.**

    * An element of the weights whose update is not clipped keeps the bits that the optimizer gave it. On the CPU
      `ClipByGlobalNorm`, `ClipByNorm`, `ClipByRMS` and `ClipByValue` write nothing if they do not bind.
    * The optimizer's state stays as its step wrote it, as in Adafactor: only the weights move by less.
    * With DDP, FSDP2 or tensor parallelism each step equals the step of one process with all weights.
    * It works together with a `Guard` on the same optimizer, in any order, under a GradScaler, with a closure, and with
      optimizers that step inside backward: a skipped step stays skipped.
    * It causes no host sync beyond those of the clipper.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    weight decay, decoupled             is part of the update, as :math:`\lambda\theta` beside the rest of u
    a learning rate of 0                u is computed with a rate of 1; a negative rate counts by its absolute value
    a rate that changes in the step     u is computed with the rate at the start of the step
    a step that a `Guard` skips         is an update of 0, which ``last`` shows and the clipper counts
    groups of several learning rates    u is computed with the rate of each
    NaN or inf in an update             as the rule does for a gradient; the weights hold it. A `Guard` keeps such
                                        gradients from the optimizer
    weights kept twice (a master copy)  only the optimizer's own copy is clipped, until it is copied to the others
    ``copy.deepcopy(optimizer)``        the copy is not clipped; attach another `ClipUpdate`
    weights of 16 bits                  a clipped element is rounded once more
    weights of float16                  u is clipped in float32, and ``grad_dtype`` is then set to float16: set it anew
                                        if such a model is converted later
    a group without ``lr``              an error when the `ClipUpdate` is made
    several evaluations of a closure    the whole step is one update
    ==================================  ========================================================================

    **Memory.** Twice the weights of this process (three times those of float16), as long as it is attached. During a
    clip, some three times the largest tensor, and another copy of the weights for a rule that reads them or is one of
    your own.

    Args:
        optimizer: Any `torch.optim.Optimizer`. For a wrapper, pass the optimizer inside, ``wrapper.optimizer``.
        clipper: The rule; None for ``ClipByRMS(1.0)``.
        model: Names the parameters, as for `Guard`.
        process_group: As for `Guard`.
        mesh: As for `Guard`.
        shared: As for `Guard`.

    Attributes:
        last: The result of the last clip, in units of u; None before the first step.
        optimizer: The optimizer.
        clipper: The clipper.

    Raises:
        InvalidTypeError: If ``optimizer`` cannot be hooked or is a wrapper, or ``clipper`` is not a clipper.
        InvalidValueError: If ``model`` shares no parameter with the optimizer, or a group has no learning rate.

    Example:
        >>> import gradguard as gg, torch
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> update = gg.ClipUpdate(optimizer, gg.ClipByRMS(1.0))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> optimizer.step()
        >>> weight.detach().round(decimals=4), bool(update.last.clipped)  # -0.5 instead of -1.5
        (tensor([0.5000, 0.5000, 0.5000, 0.5000]), True)

    Reference:
        Shazeer, Stern (2018), Adafactor: adaptive learning rates with sublinear memory cost, arXiv
        1804.04235, section 6.
        Wortsman et al. (2023), Stable and low-precision training for large-scale vision-language models, arXiv
        2304.13013 (StableAdamW, which measures the gradient over Adam's root of squares instead of the update).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clipper: Clipper | None = None,
        *,
        model: nn.Module | None = None,
        process_group: Any = None,
        mesh: Any = None,
        shared: Any = None,
    ) -> None:
        stages = Stages.named(process_group, mesh, shared)
        self.clipper = ClipByRMS(1.0) if clipper is None else clipper
        check_attachable(optimizer, self.clipper)
        _learning_rates(optimizer)
        self.optimizer, self.last = optimizer, cast("ClipResult | None", None)
        self._guarded = GuardedParameters(optimizer, self.clipper, model, stages)
        self._moving: list[_Moving] = []
        self._rates: list[float | Tensor] = []  # of the running step, for each parameter
        take(self)
        self._hooks = EveryStep(lambda *_: None, self._after, optimizer=optimizer, enter=self._enter)

    def __repr__(self) -> str:
        """Return the constructor call, with the names ``optimizer`` and ``model``."""
        model = "" if self._guarded.model is None else ", model=model"
        return f"ClipUpdate(optimizer, {self.clipper!r}{model})"

    def detach(self) -> None:
        """Stop clipping, for good; may be repeated."""
        self._hooks.remove()
        give_back(self)
        self._moving, self._rates = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the clipper's state."""
        return {"clipper": self.clipper.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state_dict: A state that `state_dict` returned.

        Raises:
            InvalidValueError: If it is not the state of a `ClipUpdate`.
        """
        if not isinstance(state_dict, dict) or set(state_dict) != {"clipper"}:
            raise InvalidValueError(
                f"this is not the state of a ClipUpdate: expected what state_dict() returned, got {state_dict!r:.80}."
            )
        self.clipper.load_state_dict(state_dict["clipper"])

    @torch.no_grad()
    def _enter(self, optimizer: Optimizer, closure: bool) -> None:
        """Store the weights, and the learning rates by which the step will move them."""
        del optimizer, closure
        parameters = parameters_of(self.optimizer)
        if is_in_backward():
            refuse_in_backward(self.clipper, parameters, self._guarded.stages)
        self._guarded.refresh()
        self._rates = _learning_rates(self.optimizer)
        known = {id(one.parameter): one for one in self._moving if one.fits()}
        if list(known) != list(map(id, parameters)):
            self._moving = [known.get(id(p)) or _Moving.of(p) for p in parameters]
        for one in self._moving:
            local_part(one.before).copy_(local_part(one.parameter))

    @torch.no_grad()
    @keeping_subnormals
    def _after(self, optimizer: Optimizer) -> None:
        del optimizer
        rates, self._rates = self._rates, []
        if not rates:
            return
        for one, rate in zip(self._moving, rates, strict=True):
            one.measure(rate)
        plain = all(type(leaf) in _OF_GRADIENTS_ALONE for leaf in self.clipper.leaves())
        with _in_place_of_gradients(self._moving), nullcontext() if plain else _as_before(self._moving):
            reach = Reach([{"params": [one.parameter]} for one in self._moving], rates)
            grads = self._guarded.gradients("update", reach=reach)
            with refused_by_name(grads):
                decision = self.clipper.decide(grads)
            self.last, bad = decision.result, decision.result.clipped | decision.result.nonfinite
            # In a composition, whether a later member binds may be known only after the earlier ones have written.
            if type(self.clipper) in _OF_GRADIENTS_ALONE and are_readable(bad) and not bool(bad):
                return
            decision.apply()
        for one, rate in zip(self._moving, rates, strict=True):
            one.write(rate)


_OF_GRADIENTS_ALONE = (ClipByGlobalNorm, ClipByNorm, ClipByRMS, ClipByValue)
"""Rules that read no weight, and change nothing on a step on which they do not bind."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    """A parameter, with buffers for its value before the step and for its update."""

    parameter: Tensor
    before: Tensor
    update: Tensor

    @staticmethod
    def of(parameter: Tensor) -> "_Moving":
        """Allocate the buffers; float16 gets a float32 update, whose range a change over a small rate needs."""
        dtype = parameter.grad_dtype or parameter.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
        return _Moving(parameter, torch.empty_like(parameter), torch.empty_like(parameter, dtype=dtype))

    def fits(self) -> bool:
        """Tell whether the buffers still match the parameter."""
        own, now = self.before, self.parameter
        alike = (own.shape, own.dtype, own.device) == (now.shape, now.dtype, now.device)
        return alike and not own.is_inference()

    def measure(self, rate: float | Tensor) -> None:
        """Set ``update`` to the change of the weights in the step, over the learning rate."""
        local_part(self.update).copy_(self._over(rate))

    def write(self, rate: float | Tensor) -> None:
        """Move the parameter by the clipped update; keep elements whose update is as `measure` set it."""
        before, after, update = map(local_part, (self.before, self.parameter, self.update))
        moved = before - update * rate
        after.copy_(torch.where(update == self._over(rate), after, moved))

    def _over(self, rate: float | Tensor) -> Tensor:
        update = local_part(self.update)
        return torch.sub(local_part(self.before).to(update.dtype), local_part(self.parameter)).div_(rate)


@contextmanager
def _in_place_of_gradients(moving: Sequence[_Moving]) -> Iterator[None]:
    """Put the updates in place of the gradients: after a member of a `Chain` has written, the next one reads there."""
    gradients = [(one.parameter, one.parameter.grad, one.parameter.grad_dtype) for one in moving]
    try:
        for one in moving:
            _set_gradient(one.parameter, one.update, one.update.dtype)
        yield
    finally:
        for parameter, gradient, dtype in gradients:
            _set_gradient(parameter, gradient, dtype)


def _set_gradient(parameter: Tensor, gradient: Tensor | None, dtype: torch.dtype | None) -> None:
    if parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype
    parameter.grad = gradient


@contextmanager
def _as_before(moving: Sequence[_Moving]) -> Iterator[None]:
    """Restore the weights from before the step for a while: a rule may compare an update with its weights."""
    places = [local_part(one.parameter) for one in moving]
    after = [place.clone() for place in places]
    try:
        for one, place in zip(moving, places, strict=True):
            place.copy_(local_part(one.before))
        yield
    finally:
        for place, weight in zip(places, after, strict=True):
            place.copy_(weight)


def _learning_rates(optimizer: Optimizer) -> list[float | Tensor]:
    """Return the absolute learning rate of each parameter of ``optimizer``; 1 in place of 0, which moves nothing.

    Raises:
        InvalidValueError: If a group has no learning rate.
    """
    rates: list[float | Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if not isinstance(rate, int | float | Tensor):
            raise InvalidValueError(
                f"param_groups[{number}] of this {type(optimizer).__name__} has lr={rate!r}: expected a learning rate, "
                "because updates are clipped in units of it. Give the group a number; use group['lr'] = 1.0 if the "
                "optimizer chooses the size of its steps by itself."
            )
        if isinstance(rate, Tensor):
            wide = rate.detach().to(wide_dtype(rate.device))
            rate = torch.where(wide == 0, 1.0, wide.abs())
        else:
            rate = abs(float(rate)) or 1.0
        rates += [rate] * len(group["params"])
    return rates
