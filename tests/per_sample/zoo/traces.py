"""What a module is made of, so that it can be told whether a clipper has left something behind."""

from typing import Any

import torch
from torch import Tensor, nn

Trace = dict[str, Any]


def trace(model: nn.Module) -> Trace:
    """Attributes, hooks, flags and buffers of every module, and switches of torch."""
    found: Trace = {
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for path, module in model.named_modules():
        found[f"{path}: class"] = type(module).__qualname__
        for key, value in vars(module).items():
            if key == "_torchdynamo_wrapper_id":  # another in each wrapper
                continue
            found[f"{path}.{key}"] = _summary(value)
    return found


def differences(after: Trace, *allowed: Trace) -> str:
    """The first entry that is as in none of ``allowed``; "" if there is none."""
    for key in [*after, *(k for k in allowed[0] if k not in after)]:
        if not any(_same(after.get(key), other.get(key)) for other in allowed):
            return f"{key}: {_shown(after.get(key), allowed[0].get(key))}"
    return ""


def _summary(value: Any, depth: int = 0) -> Any:
    if isinstance(value, nn.Parameter):
        return value.detach().clone(), value.requires_grad, "no .grad" if value.grad is None else "a .grad"
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.device):
        return value
    if isinstance(value, dict) and depth < 3:
        keys = [k if isinstance(k, str) else type(k).__name__ for k in value]  # those of hooks are numbers
        return type(value).__qualname__, keys, [_summary(v, depth + 1) for v in value.values()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple) and depth < 3:
        return type(value).__qualname__, [_summary(v, depth + 1) for v in value]
    return type(value).__qualname__


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and _equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b or (a != a and b != b)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or not a.numel():
        return a.layout == b.layout
    if a.is_floating_point():
        return torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    return torch.equal(a, b)


def _shown(a: Any, b: Any) -> str:
    """Where two summaries differ."""
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return next((_shown(x, y) for x, y in zip(a, b, strict=True) if not _same(x, y)), "")
    return " instead of ".join(" ".join(repr(x).split())[:100] for x in (a, b))
