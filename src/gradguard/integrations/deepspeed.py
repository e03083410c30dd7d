"""Read DeepSpeed's own clip from its engine. Nothing here clips: the engine does, by its configuration."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.integrations.versions import require
from gradguard.listeners import ClipEvent, announce, is_heard, tell

require("deepspeed", "0.19", "0.20", extra="deepspeed")  # not imported: an engine has imported it


def last_clip(engine: Any) -> gg.results.ClipResult | None:
    """Return the result of the clip in the last ``engine.step()``, in the form of gradguard's clippers.

    **Guarantees.** The engine is not changed, and nothing is measured again.

    **Edge cases.**

    ================================  ==========================================================================
    case                              result
    ================================  ==========================================================================
    before the first step             None
    float32 without ZeRO (stage 0)    None: the engine keeps no norm
    ``compute_grad_norm: false``      None
    a norm that was not finite        ``norm`` is infinite and ``nonfinite`` True; the engine itself returns -1
    no ``gradient_clipping``          ``clipped`` is False
    norms by parameter                not available: ``names`` is ``("all parameters",)``
    ================================  ==========================================================================

    Do not attach `gradguard.Guard` to the optimizer inside an engine: under ZeRO its gradients are this process' part
    of one flat vector, and their norm is not the whole norm. To clip, set ``"gradient_clipping"`` in the configuration.

    Args:
        engine: The first result of ``deepspeed.initialize``.

    Returns:
        The norm before the clip, the threshold, the coefficient and whether it bound; None if there is no norm.

    Raises:
        InvalidTypeError: If ``engine`` is something else, for example the optimizer that was returned with it.

    Example:
        >>> from types import SimpleNamespace
        >>> from gradguard.integrations.deepspeed import last_clip
        >>> engine = SimpleNamespace(get_global_grad_norm=lambda: 5.0, gradient_clipping=lambda: 1.0)  # stands in
        >>> result = last_clip(engine)  # after engine.step()
        >>> float(result.norm), bool(result.clipped), round(float(result.coefficient), 4)
        (5.0, True, 0.2)
    """
    _refuse_other(engine)
    value = engine.get_global_grad_norm()
    if value is None:
        return None
    norm = torch.as_tensor(value).detach().double()
    norm = torch.where(norm < 0, torch.inf, norm)  # -1 means not finite
    threshold = float(engine.gradient_clipping() or 0.0)
    nonfinite = ~norm.isfinite()
    clipped = (norm > threshold) & ~nonfinite & (threshold > 0)
    return gg.results.ClipResult(
        norm=norm.float(),
        coefficient=torch.where(clipped, threshold / norm, 1.0),
        clipped=clipped,
        nonfinite=nonfinite,
        tensor_norms=norm.reshape(1),
        names=("all parameters",),
        threshold=torch.full_like(norm, threshold) if threshold > 0 else None,
    )


def tell_clips(engine: Any) -> Callable[[], None]:
    """Let `gradguard run`, `gg.watch` and `gg.Monitor` observe the clip that a ZeRO engine makes itself.

    The optimizer inside an engine receives this process' part of the gradients, already clipped: a monitor of this
    optimizer alone would record the norm of a part. After this call the engine reports, at each step, the norm of the
    whole gradient before its clip, its threshold and its coefficient, and a record contains them.

    **Guarantees.** Gradients and steps are unchanged. The norm is the engine's own, and is not measured again.
    Without a listener, this costs nothing.

    **Edge cases.** The engine steps an optimizer with several parameter groups once for each group: the record has a
    row for each, all with the same norm. Norms by parameter are not available.

    Args:
        engine: The first result of ``deepspeed.initialize``.

    Returns:
        A function that undoes this; calling it again does nothing.

    Raises:
        InvalidTypeError: If ``engine`` is something else.
        InvalidValueError: If its optimizer is not ZeRO's (stages 1 to 3), or keeps no norm.

    Example:
        ``end = tell_clips(engine)`` after ``deepspeed.initialize``, then train under ``gradguard run``.
    """
    _refuse_other(engine)
    zero = engine.optimizer
    own = getattr(zero, "unscale_and_clip_grads", None)
    if own is None or not getattr(zero, "compute_grad_norm", True):
        raise InvalidValueError(
            f"engine.optimizer is {type(zero).__name__}, which reports no norm of the whole gradient: expected ZeRO "
            'stage 1, 2 or 3, without "compute_grad_norm": false in the configuration.'
        )

    def clip(part: Any, total_norm: Any) -> None:
        if not is_heard():
            own(part, total_norm)
            return
        parameters = _parameters_of(zero, part)
        announce(parameters, tells_norms=True)
        norm = torch.as_tensor(total_norm).detach() / zero.loss_scale
        own(part, total_norm)
        threshold = float(zero.clip_grad) or torch.inf
        coefficient = (threshold / (norm + 1e-6)).clamp(max=1.0)
        tell(ClipEvent("norm", parameters, threshold, norm, coefficient))

    zero.unscale_and_clip_grads = clip

    def end() -> None:
        if vars(zero).get("unscale_and_clip_grads") is clip:
            del zero.unscale_and_clip_grads

    return end


def _refuse_other(engine: Any) -> None:
    if not all(callable(getattr(engine, name, None)) for name in ("get_global_grad_norm", "gradient_clipping")):
        raise InvalidTypeError(
            f"engine is {type(engine).__name__}: expected the engine, the first result of deepspeed.initialize(...)."
        )


def _parameters_of(zero: Any, part: Any) -> list[Tensor]:
    """Return the inner optimizer's parameters that are clipped; ``part`` is a number in ZeRO 3, else gradients."""
    if isinstance(part, int):
        return [zero.fp32_partitioned_groups_flat[part]]
    clipped = {id(gradient) for gradient in part}
    return [p for group in zero.optimizer.param_groups for p in group["params"] if id(p.grad) in clipped]
