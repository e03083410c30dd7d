"""Clip where the norm of all gradients is not known yet, inside a backward pass: by that of the step before."""

from typing import Any

import torch
from torch import Tensor

from gradguard.arguments import check_order, check_threshold
from gradguard.clip.clipper import Decision, describe
from gradguard.clip.gradients import Gradients, norms_of, total_of
from gradguard.clip.thresholds.base import StatefulClipper, scalar
from gradguard.errors import InvalidValueError
from gradguard.tensors.layout import move
from gradguard.tensors.scaling import clip_coefficient, steps_of
from gradguard.tensors.units import scale_each_


class ClipByPreviousNorm(StatefulClipper):
    r"""Scale gradients by the norm that all of them had in the step before: for optimizers that step inside a backward.

    .. math:: g_i \leftarrow g_i \cdot \min\Bigl(1, \frac{m}{\max(n, \lVert g_i \rVert_p) + 10^{-6}}\Bigr),
              \qquad n = \lVert g \rVert_p \text{ of all gradients in the step before}

    With one optimizer for each parameter, stepped as soon as its gradient is there, no gradient waits for the others,
    and memory for them is saved. Their norm is known only when the last has come: then it is too late for the first.
    One object serves the `Guard` of each of these optimizers. Call `end_step` after each ``backward()``.

    **Guarantees.** No tensor is left with a norm above m. Where no tensor's own norm is above n, all are multiplied by
    one number, so that the direction of the whole gradient stays. The order in which gradients come changes nothing.
    Decided on the device. A second gradient of one parameter before `end_step` is refused.

    **Not guaranteed.** The norm of all gradients may exceed m: by the factor that it grows by from one step to the
    next, at most, and on the first step by the square root of the number of tensors (p = 2). For a bound on every
    step, clip after the backward with `ClipByGlobalNorm`.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    first step, n unknown               n = 0: each tensor is clipped by its own norm, as `ClipByNorm` does
    NaN or inf in a step                as the policy says; its norm is forgotten, n stays that of the step before
    a parameter without a gradient      does not count in the norm of that step
    `end_step` with no gradient since   n stays
    ==================================  ========================================================================

    Args:
        max_norm: m, at least 0; a 0-dim tensor stays on its device. The attribute of that name may be set at any time.
        norm_type: p, above 0 or ``float("inf")``; the result's norms are of this order.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
        InvalidTypeError: If ``max_norm`` is no number.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> model, clipper = torch.nn.Linear(2, 1), gg.ClipByPreviousNorm(1.0)
        >>> optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        >>> guards = [gg.Guard(optimizer, clipper, model=model) for optimizer in optimizers.values()]
        >>> def step(p):
        ...     optimizers[p].step()
        ...     p.grad = None
        >>> for p in model.parameters():
        ...     handle = p.register_post_accumulate_grad_hook(step)
        >>> for _ in range(2):
        ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
        ...     norm = clipper.end_step()
        >>> round(float(norm), 4), round(float(guards[0].last.coefficient), 4)
        (5.099, 0.1961)
    """

    serves_several_guards = True

    _per_tensor = True

    def __init__(self, max_norm: float | Tensor, norm_type: float = 2.0) -> None:
        super().__init__(previous=scalar(0.0))
        self.max_norm = check_threshold("max_norm", max_norm)
        self.norm_type = check_order(norm_type)
        self._norms: dict[int, Tensor] = {}  # of this step, by the parameter's identity
        self._clipped: list[Tensor] = []
        self._locked_in: Tensor | None = None

    @property
    def previous_norm(self) -> Tensor:
        """The norm of all gradients in the last step that was finite, 0-dim; 0 before the first."""
        return self.state["previous"].clone()

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure each gradient, and decide on its coefficient with the norm of the step before."""
        limit = check_threshold("max_norm", self.max_norm)
        norms = norms_of(grads, scale, self.norm_type)
        self._follow(norms.device)
        self._remember(grads, norms)
        reckoned = torch.maximum(norms, self.state["previous"].to(norms.dtype))
        coefficients = clip_coefficient(reckoned, limit)
        clipped = (coefficients < 1).any()
        self._clipped.append(clipped)
        before, after = total_of(norms, self.norm_type), total_of(norms * coefficients, self.norm_type)
        result = describe(
            grads,
            norms,
            torch.where(clipped, after / torch.where(before == 0, 1.0, before), 1.0),
            clipped,
            order=self.norm_type,
            threshold=limit,
            locked_in=self._locked_in,
        )

        def write() -> None:
            for step in steps_of(coefficients, limit, reckoned):
                scale_each_(grads.gradients, step)

        return Decision(grads, result, None, write)

    @torch.no_grad()
    def end_step(self) -> Tensor:
        """Let the norm of the gradients that have come since the last call be that of the step before; return it.

        Call it after each ``backward()``, on every process. It does not communicate: each norm is known by then.

        Returns:
            The norm of these gradients, finite or not, 0-dim; where none has come, the one that was known.
        """
        if not self._norms:
            return self.previous_norm
        device = self.state["previous"].device
        norms = torch.stack([move(norm, device, self.state["previous"].dtype) for norm in self._norms.values()])
        clipped = torch.stack([move(flag, device) for flag in self._clipped]).any()
        norm = total_of(norms, self.norm_type)
        finite = norm.isfinite()
        self.state["previous"].copy_(torch.where(finite, norm, self.state["previous"]))
        self._locked_in = self.lock_in.follow(clipped, check_threshold("max_norm", self.max_norm), finite)
        self._count(clipped, ~finite)
        self._norms, self._clipped = {}, []
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state.

        Raises:
            InvalidValueError: In the middle of a step, whose norms are not in it.
        """
        if self._norms:
            raise InvalidValueError(
                f"state_dict() within a step would lose the norms of {len(self._norms)} gradients: call end_step() "
                "after the backward, then state_dict()."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, and forget what has come of a step that was not ended."""
        super().load_state_dict(state_dict)
        self._norms, self._clipped = {}, []
        self._locked_in = self.lock_in.verdict() if self.steps else None

    def _remember(self, grads: Gradients, norms: Tensor) -> None:
        again = [i for i, parameter in enumerate(grads.parameters) if id(parameter) in self._norms]
        if again:
            raise InvalidValueError(
                f"{grads.name(again[0])} has got a second gradient in one step, so the norm of the step before is not "
                "known: call clipper.end_step() after each backward(). (If a backward has failed, call it then too.)"
            )
        self._norms.update(zip(map(id, grads.parameters), norms.unbind(), strict=True))
