"""What a monitor is given, checked and taken apart."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.optimizer_hooks import runs_hooks


def taken_apart(source: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer, and the guard if that is what came.

    Args:
        source: An optimizer, or anything with an ``optimizer`` and the result of its ``last`` clip.

    Returns:
        The optimizer; and the guard, or None.

    Raises:
        InvalidTypeError: If it is neither.
    """
    if runs_hooks(source):
        return source, None
    inside = getattr(source, "optimizer", None)
    if not isinstance(source, type | Optimizer) and isinstance(inside, Optimizer) and hasattr(source, "last"):
        return inside, source
    came = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise InvalidTypeError(
        f"optimizer_or_guard is {came}: expected a torch.optim.Optimizer or a gradguard.Guard. "
        "Of a wrapper pass the optimizer inside, often wrapper.optimizer."
    )


def check_arguments(optimizer: Optimizer, parameters: list[Tensor], model: Any, scaler: Any, every: Any) -> None:
    """Refuse what cannot be meant, before anything is opened.

    Raises:
        InvalidTypeError: If ``model`` or ``scaler`` is of another type.
        InvalidValueError: If ``every`` is no number of steps, or ``model`` has none of the ``parameters``.
    """
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise InvalidValueError(f"every={every!r}: expected a whole number of steps, at least 1, or None.")
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained.")
    if model is not None and not {id(p) for p in model.parameters()} & set(map(id, parameters)):
        raise InvalidValueError(
            f"model ({type(model).__name__}) has none of the parameters of this {type(optimizer).__name__}: expected "
            "the module that was given to it, as it is now; wrapping or moving it may have made new parameters."
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidTypeError(f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler.")
