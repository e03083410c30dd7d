"""Clip by one of three rules, with the arguments of timm's `dispatch_clip_grad`."""

from typing import Any, Literal

from torch import Tensor

import gradguard as gg
from gradguard.arguments import check_order
from gradguard.errors import InvalidValueError


def dispatch_clip_grad(
    parameters: Any,
    value: float | Tensor,
    mode: Literal["norm", "value", "agc"] = "norm",
    norm_type: float = 2.0,
    *,
    process_group: Any = None,
    mesh: Any = None,
    shared: Any = None,
) -> Tensor | None:
    """Clip the gradients in place by the rule that ``mode`` names, as a script written for timm calls it.

    **Guarantees.** The result is exactly that of the function named below, with its table of edge cases. The mode and
    the arguments are checked before any gradient changes.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    ``mode="norm"``                   `clip_grad_norm_`
    ``mode="value"``                  `clip_grad_value_`; each element is clipped by itself, so the last three
                                      arguments change nothing
    ``mode="agc"``                    `clip_grad_adaptive_`; if ``parameters`` is a module, units follow its layers,
                                      while timm always uses dimension 0
    ``"agc"``, another ``norm_type``  an error: the rule is defined for 2-norms
    ================================  ==========================================================================

    Args:
        parameters: As for `clip_grad_norm_`; a module determines the right units for ``"agc"``.
        value: The threshold of the rule, at least 0.
        mode: ``"norm"``, ``"value"`` or ``"agc"``.
        norm_type: The order of the norm, for ``"norm"``.
        process_group: Pipeline stages, as for `clip_grad_norm_`.
        mesh: Pipeline stages, as for `clip_grad_norm_`.
        shared: Weights that several stages hold, as for `clip_grad_norm_`.

    Returns:
        The norm before the clip, 0-dim; None for ``"value"``, which measures nothing. (timm returns nothing.)

    Raises:
        InvalidValueError: If the mode, the threshold or the order is invalid.
        InvalidTypeError: If an argument is of another type.
        DistributedError: If processes that hold parts of the gradients do not clip together.

    Example:
        >>> import torch
        >>> from gradguard.integrations.timm import dispatch_clip_grad
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> dispatch_clip_grad(layer.parameters(), 1.0, mode="norm", norm_type=2.0)
        tensor(5.)
        >>> dispatch_clip_grad(layer.parameters(), 0.7, mode="value")
        >>> layer.weight.grad
        tensor([[0.6000, 0.7000]])

    Reference:
        Wightman (2019), PyTorch image models (timm), ``timm.utils.dispatch_clip_grad``.
    """
    stages = {"process_group": process_group, "mesh": mesh, "shared": shared}
    if mode == "norm":
        return gg.clip_grad_norm_(parameters, value, norm_type, **stages)
    if mode == "value":
        return gg.clip_grad_value_(parameters, value)
    if mode != "agc":
        raise InvalidValueError(f"mode={mode!r}: expected 'norm', 'value' or 'agc'.")
    if check_order(norm_type) != 2:
        raise InvalidValueError(
            f"norm_type={norm_type!r} with mode='agc': adaptive clipping compares 2-norms. Leave norm_type out."
        )
    return gg.clip_grad_adaptive_(parameters, value, **stages)
