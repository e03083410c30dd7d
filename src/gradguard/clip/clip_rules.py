"""The fixed rules as objects: by value, by the norm of each tensor, by the norm of all tensors."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from gradguard.arguments import check_interval, check_order, check_threshold
from gradguard.clip.clipper import Clipper, Decision, describe
from gradguard.clip.gradients import (
    Gradients,
    measured,
    norms_of,
    total_of,
    with_norms,
)
from gradguard.clip.lock_in import LockIn
from gradguard.distributed.wrappers import refuse_flat_parameters
from gradguard.errors import InvalidValueError
from gradguard.tensors.layout import are_readable, coalesce_, meeting_device, move
from gradguard.tensors.norms import tensor_norms, total_norm
from gradguard.tensors.scaling import clamp_, clip_coefficient, exceeds
from gradguard.tensors.units import scale_each_


class FixedRule(Clipper):
    """A rule whose threshold does not move by itself: the lock-in alarm is its only state."""

    def __init__(self) -> None:
        self._lock_in, self._is_for_one_step = LockIn(), False

    def for_one_step(self) -> Self:
        """Drop the lock-in alarm, which needs many steps and whose state would need a host sync; return ``self``."""
        self._is_for_one_step = True
        return self

    def _is_locked_in(self, clipped: Tensor, threshold: float | Tensor, finite: Tensor) -> Tensor | None:
        return None if self._is_for_one_step else self._lock_in.follow(clipped, threshold, finite)

    def state_dict(self) -> dict[str, Any]:
        """Return the lock-in alarm's memory; thresholds are arguments, not state."""
        return {"lock_in": self._lock_in.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            InvalidValueError: If the state belongs to another kind of clipper.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"lock_in"}:
            came = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise InvalidValueError(
                f"the state is not of a {type(self).__name__}: expected {{'lock_in': ...}}, came {came}. Load it into "
                "the kind of clipper that it was saved from."
            )
        self._lock_in.load_state_dict(state_dict["lock_in"])


class ClipByGlobalNorm(FixedRule):
    r"""Scale all gradients together so that their norm is at most ``max_norm``: `clip_grad_norm_` as an object.

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{m}{\lVert g \rVert_p + 10^{-6}}\Bigr)

    **Guarantees.** Those of `clip_grad_norm_`. One number multiplies all gradients, so their direction is unchanged,
    and a fused optimizer may multiply instead. The coefficient is computed on the device.

    **Edge cases.** Those of `clip_grad_norm_`: no gradients give norm 0; ``max_norm=inf`` measures only;
    ``max_norm=0`` makes gradients 0. The ``nonfinite`` argument of the call handles NaN and inf, which never enter the
    state.

    Args:
        max_norm: m, at least 0; a 0-dim tensor stays on its device. The attribute may be set at any time.
        norm_type: p, above 0 or ``float("inf")``; the result's norms are of this order.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
        InvalidTypeError: If ``max_norm`` is not a number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> result = gg.ClipByGlobalNorm(max_norm=1.0)(layer)
        >>> result.norm, layer.weight.grad
        (tensor(5.), tensor([[0.6000, 0.8000]]))

    Reference:
        Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural networks, arXiv 1211.5063.
    """

    def __init__(self, max_norm: float | Tensor, norm_type: float = 2.0) -> None:
        super().__init__()
        self.max_norm = check_threshold("max_norm", max_norm)
        self.norm_type = check_order(norm_type)

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the norm of all gradients, and choose one coefficient."""
        limit = check_threshold("max_norm", self.max_norm)
        norms = norms_of(grads, scale, self.norm_type)
        norm = total_of(norms, self.norm_type)
        coefficient = clip_coefficient(norm, limit)
        clipped = coefficient < 1
        result = describe(
            grads,
            norms,
            coefficient,
            clipped,
            order=self.norm_type,
            norm=norm,
            threshold=limit,
            locked_in=self._is_locked_in(clipped, limit, norm < math.inf),
        )
        return Decision(grads, result, coefficient)


class ClipByNorm(FixedRule):
    r"""Scale each gradient separately so that its norm is at most ``max_norm``.

    .. math:: g_i \leftarrow g_i \cdot \min\Bigl(1, \frac{m}{\lVert g_i \rVert_p + 10^{-6}}\Bigr)
              \quad\text{for each tensor } i

    Different factors scale the tensors, so the direction of the update changes.

    **Guarantees.** Each tensor becomes the result of `clip_grad_norm_` on that tensor alone. All are measured in one
    pass; on the CPU a tensor below its threshold is not written.

    **Edge cases.** As for `clip_grad_norm_`, tensor by tensor: under ``"propagate"`` NaN in one tensor does not affect
    the others. An empty tensor has norm 0.

    Args:
        max_norm: m, at least 0; a 0-dim tensor stays on its device. The attribute may be set at any time.
        norm_type: p, above 0 or ``float("inf")``; the result's norms are of this order.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
        InvalidTypeError: If ``max_norm`` is not a number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([0.5])
        >>> result = gg.ClipByNorm(max_norm=1.0)(layer)
        >>> layer.weight.grad, layer.bias.grad
        (tensor([[0.6000, 0.8000]]), tensor([0.5000]))

    Reference:
        Chollet and others (2015), Keras, the argument ``clipnorm``; PaddlePaddle, ``ClipGradByNorm``.
    """

    _per_tensor = True

    def __init__(self, max_norm: float | Tensor, norm_type: float = 2.0) -> None:
        super().__init__()
        self.max_norm = check_threshold("max_norm", max_norm)
        self.norm_type = check_order(norm_type)

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure each gradient, and choose one coefficient for each."""
        limit = check_threshold("max_norm", self.max_norm)
        return _decide_each(self, grads, norms_of(grads, scale, self.norm_type), limit, limit, self.norm_type)


class ClipByRMS(FixedRule):
    r"""Scale each gradient separately so that the root mean square of its elements is at most ``max_rms``.

    .. math:: g_i \leftarrow g_i \cdot \min\Bigl(1, \frac{d \sqrt{n_i}}{\lVert g_i \rVert_2 + 10^{-6}}\Bigr)
              \quad\text{for each tensor } i \text{ of } n_i \text{ elements}

    The rule bounds the size of a typical element, whatever the size of the tensor. Adafactor bounds its updates by this
    rule, which is the default of `ClipUpdate`.

    **Guarantees.** Those of `ClipByNorm` with the threshold :math:`d \sqrt{n_i}`. For a sharded tensor :math:`n_i`
    counts the elements on all processes; for a sparse one it counts the zeros too.

    **Edge cases.** As for `ClipByNorm`.

    Args:
        max_rms: d, at least 0; a 0-dim tensor stays on its device. The attribute may be set at any time.

    Raises:
        InvalidValueError: If ``max_rms`` is negative or NaN.
        InvalidTypeError: If ``max_rms`` is not a number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer.weight.grad, layer.bias.grad = torch.tensor([[6.0, 8.0]]), torch.tensor([0.5])
        >>> result = gg.ClipByRMS(max_rms=1.0)(layer)
        >>> layer.weight.grad.round(decimals=4), layer.bias.grad
        (tensor([[0.8485, 1.1314]]), tensor([0.5000]))

    Reference:
        Shazeer, Stern (2018), Adafactor: adaptive learning rates with sublinear memory cost, arXiv
        1804.04235, section 6.
    """

    _per_tensor = True

    def __init__(self, max_rms: float | Tensor = 1.0) -> None:
        super().__init__()
        self.max_rms = check_threshold("max_rms", max_rms)
        self._roots: tuple[tuple[int, ...], Tensor] | None = None  # numbers of elements, and their square roots

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure each gradient, and choose one coefficient for each."""
        norms, limit = norms_of(grads, scale), check_threshold("max_rms", self.max_rms)
        if isinstance(limit, Tensor):
            limit = move(limit.detach(), norms.device, norms.dtype)
        return _decide_each(self, grads, norms, self._roots_of_sizes(grads, norms) * limit, limit)

    def _roots_of_sizes(self, grads: Gradients, norms: Tensor) -> Tensor:
        """Return the square root of the number of elements of each whole tensor: its norm if all elements were 1."""
        sizes = tuple([gradient.numel() for gradient in grads.gradients])
        if self._roots is None or self._roots[0] != sizes or self._roots[1].device != norms.device:
            roots = torch.tensor(sizes, dtype=torch.float64, device="cpu").sqrt()
            self._roots = sizes, roots.to(norms.device, norms.dtype)
        return grads.added_up(self._roots[1]).clamp(min=1.0)  # not 0: an empty tensor never exceeds its bound


def _decide_each(
    rule: FixedRule,
    grads: Gradients,
    norms: Tensor,
    limits: float | Tensor,
    threshold: float | Tensor,
    order: float = 2.0,
) -> Decision:
    """Choose one coefficient for each gradient, so that its norm is at most its entry of ``limits`` (or ``limits``)."""
    if grads.reduction is not None:
        refuse_flat_parameters(grads.parameters, type(rule).__name__)
    coefficients = clip_coefficient(norms, limits)
    clipped = (coefficients < 1).any()
    before, after = total_of(norms, order), total_of(norms * coefficients, order)
    result = describe(
        grads,
        norms,
        torch.where(clipped, after / torch.where(before == 0, 1.0, before), 1.0),
        clipped,
        order=order,
        threshold=threshold,
        locked_in=rule._is_locked_in(clipped, threshold, before < math.inf),
    )
    return Decision(grads, result, None, lambda: scale_each_(grads.gradients, coefficients))


class ClipByValue(FixedRule):
    r"""Clamp every element of every gradient to an interval: `clip_grad_value_` as an object.

    .. math:: g_i \leftarrow \min(\max(g_i, a), b), \qquad a = -b \text{ unless given}

    **Guarantees.** Those of `clip_grad_value_`: an element inside the interval keeps its bits; on the CPU nothing is
    written if nothing exceeds the bounds.

    **Edge cases.** Those of `clip_grad_value_`: under ``"propagate"`` NaN stays and inf becomes the bound; a bound
    beyond the dtype's range is the dtype's largest number; sparse gradients are coalesced; real and imaginary parts
    are clamped separately. The result's ``coefficient`` is 1 until the clamp is done.

    Args:
        max: b, the upper bound, and without ``min`` the negated lower one (then at least 0); a 0-dim tensor stays on
            its device.
        min: a, the lower bound, if it is not ``-max``; at most ``max``.

    Raises:
        InvalidValueError: If a bound is NaN or the bounds are in the wrong order.
        InvalidTypeError: If a bound is not a number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, -4.0]])
        >>> result = gg.ClipByValue(max=1.0, min=-2.0)(layer)
        >>> layer.weight.grad, bool(result.clipped)
        (tensor([[ 1., -2.]]), True)

    Reference:
        Mikolov (2012), Statistical language models based on neural networks, PhD thesis.
    """

    measures_itself = True

    _per_tensor = True

    def __init__(self, max: float | Tensor, min: float | None = None) -> None:
        super().__init__()
        self.max, self.min = max, min
        check_interval(self.min, self.max, ("min", "max"))

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure, and check whether any element exceeds the bounds."""
        low, high = check_interval(self.min, self.max, ("min", "max"))
        bounds = at_scale(low, scale), at_scale(high, scale)
        if grads.reduction is not None:
            return self._decide_sharded(grads, scale, bounds, high)
        for gradient in grads.gradients:
            coalesce_(gradient)  # a duplicate index would store an element as several values
        grads = measured(grads)
        norms = norms_of(grads, scale)
        norm = total_of(norms)
        suspect = _may_exceed(grads.norms, *bounds)
        some = [g for g, may in zip(grads.gradients, suspect, strict=True) if may]
        clipped = move(exceeds(some, *bounds), norm.device) if some else norm > norm
        locked_in = self._is_locked_in(clipped, high if isinstance(high, Tensor) else abs(high), norm < math.inf)
        coefficient = torch.ones_like(norm)

        def write() -> None:
            if are_readable(clipped, norm) and not bool(clipped) and bool(norm.isfinite()):
                return
            clamp_(some, *bounds)
            others = [one for one, may in zip(grads.norms.unbind(), suspect, strict=True) if not may]
            others = total_of(torch.stack(others) if others else grads.norms[:0])  # no index tensor, so no host copy
            after = total_of(torch.stack([others, move(total_norm(some), norm.device)]))
            coefficient.copy_(torch.where(clipped, after / total_of(grads.norms), 1.0))

        result = describe(grads, norms, coefficient, clipped, threshold=high, locked_in=locked_in)
        return Decision(grads, result, None, write)

    def _decide_sharded(
        self, grads: Gradients, scale: float | Tensor, bounds: tuple[float | Tensor, float | Tensor], high: Any
    ) -> Decision:
        """Clamp copies of sharded gradients, so that one all-reduce carries the norms before and after the clamp."""
        assert grads.reduction is not None
        before = tensor_norms(grads.gradients)
        suspect = [i for i, may in enumerate(_may_exceed(before, *bounds)) if may]
        outside = torch.zeros_like(before)
        for i in suspect:
            outside[i] = exceeds([grads.gradients[i]], *bounds).to(outside)
        after = before.clone()
        for i in suspect:  # one copy of a gradient at a time
            copy = grads.gradients[i].clone()
            clamp_([copy], *bounds)
            after[i] = total_norm([copy])
        before, after, outside = grads.reduction.add_up((before, 2.0), (after, 2.0), (outside, 1.0))
        grads = with_norms(grads, before)
        norms = norms_of(grads, scale)
        norm, clipped = total_of(norms), (outside > 0).any()
        coefficient = torch.where(clipped, total_of(after) / total_of(before), 1.0)
        locked_in = self._is_locked_in(clipped, high if isinstance(high, Tensor) else abs(high), norm < math.inf)
        result = describe(grads, norms, coefficient, clipped, threshold=high, locked_in=locked_in)
        return Decision(grads, result, None, lambda: clamp_([grads.gradients[i] for i in suspect], *bounds))


def _may_exceed(norms: Tensor, low: float | Tensor, high: float | Tensor) -> list[bool]:
    """Return for each gradient whether an element may exceed the bounds; always True if reading would be a host sync.

    No element is larger than the gradient's norm, except for rounding.
    """
    if not are_readable(norms, *[bound for bound in (low, high) if isinstance(bound, Tensor)]):
        return [True] * len(norms)
    certain = min(-float(low), float(high)) * (1 - 1e-5)
    return [not norm <= certain for norm in norms.tolist()]


def at_scale(bound: float | Tensor, scale: float | Tensor) -> float | Tensor:
    """Return ``bound`` for gradients that are still multiplied by ``scale``."""
    # In a `Chain` the scale is infinite or NaN after a coefficient of 0 or NaN. The clip then no longer matters, but a
    # bound must not be NaN.
    if not isinstance(scale, Tensor):
        return bound * scale
    if not isinstance(bound, Tensor):
        return bound * torch.where(scale.isnan(), torch.inf, scale) if bound else bound
    device = meeting_device([bound, scale])
    bound, scale = move(bound, device), move(scale, device)
    return torch.where(bound == 0, bound, bound * torch.where(scale.isnan(), torch.inf, scale))
