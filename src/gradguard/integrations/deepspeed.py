"""What DeepSpeed's own clip did, read from its engine. Nothing here clips: the engine does, by its configuration."""

from typing import Any

import torch
from torch import Tensor

import gradguard as gg
from gradguard.integrations.versions import require

require("deepspeed", "0.19", "0.20", extra="deepspeed")  # not imported: whoever has an engine has done that


def last_clip(engine: Any) -> gg.ClipResult | None:
    """Return what the clip of the last ``engine.step()`` did, in the form that gradguard's clippers use.

    **Guarantees.** Nothing is changed, and the engine measures nothing anew.

    **Edge cases.**

    ================================  ==========================================================================
    case                              what comes
    ================================  ==========================================================================
    before the first step             None
    float32 without ZeRO (stage 0)    None: the engine keeps no norm there
    ``compute_grad_norm: false``      None
    a norm that was not finite        ``norm`` is infinite and ``nonfinite`` True; the engine itself says -1
    no ``gradient_clipping``          ``clipped`` is False
    norms by parameter                not there: ``names`` is ``("all parameters",)``
    ================================  ==========================================================================

    Do not put `gradguard.Guard` on the optimizer inside an engine: under ZeRO its gradients are this process' part of
    one flat vector, and a norm of them is not the norm. To clip, set ``"gradient_clipping"`` in the configuration.

    Args:
        engine: What ``deepspeed.initialize`` returned first.

    Returns:
        The norm before the clip, the threshold, the coefficient, whether it bound; or None where there is no norm.

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
    if not all(callable(getattr(engine, name, None)) for name in ("get_global_grad_norm", "gradient_clipping")):
        raise gg.InvalidTypeError(
            f"engine is {type(engine).__name__}: expected the engine, what deepspeed.initialize(...) returns first."
        )
    value = engine.get_global_grad_norm()
    return None if value is None else _result(torch.as_tensor(value).detach(), float(engine.gradient_clipping() or 0.0))


def _result(value: Tensor, threshold: float) -> gg.ClipResult:
    norm = torch.where(value < 0, torch.inf, value.double())  # -1 stands for what is not finite
    nonfinite = ~norm.isfinite()
    clipped = (norm > threshold) & ~nonfinite if threshold > 0 else torch.zeros_like(nonfinite)
    return gg.ClipResult(
        norm=norm.float(),
        coefficient=torch.where(clipped, threshold / norm, 1.0),
        clipped=clipped,
        nonfinite=nonfinite,
        norms=norm.reshape(1),
        names=("all parameters",),
        threshold=torch.full_like(norm, threshold) if threshold > 0 else None,
    )
