"""The rounding of a run, measured: the run is repeated with each operation's result off by about its own last bit.

Rounding is relative to the operands of an operation, and a difference of nearly equal numbers, or a gradient that
cancels to zero, is small beside them. No bar relative to the result is right there. So where a sample alone differs
from the sample in its batch, the sample runs again a few times, and each number that an operation computes is moved by
one unit in its last place, up or down at random. How far the result moves is how far its own rounding may move it. A
model that mixes samples by more than that is told from rounding, however small the result is.

Numbers with few digits, such as 0, 1 and the entries of masks, stay as they are: they are exact.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradguard.per_sample.call_arguments import is_inexact
from gradguard.torch_private import each_operation, returns_a_view

_ALLOWED = 16.0
"""Multiple of the measured movement that rounding may explain: kernels sum in other orders for other batch sizes."""

_RUNS = 3
"""Number of moved runs; the median of their movements counts, so one branch taken otherwise explains nothing."""

_Key = TypeVar("_Key")


def movements_of(run: Callable[[], Mapping[_Key, Tensor]], size: Callable[[Tensor], Tensor]) -> dict[_Key, Tensor]:
    """Return how far rounding may move the results of a run.

    Args:
        run: Runs and returns results by name.
        size: The size of a difference of two results.

    Returns:
        A multiple of the median size by name; nothing if a run fails, because its own code refuses moved numbers.

    Raises:
        OutOfMemoryError: If memory runs out.
    """
    try:
        return {key: _ALLOWED * moved for key, moved in _medians(run, size).items()}
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return {}


def _medians(run: Callable[[], Mapping[_Key, Tensor]], size: Callable[[Tensor], Tensor]) -> dict[_Key, Tensor]:
    """Return the median movement of each result; zero where it is not finite, since it then explains nothing."""
    plain, sizes = run(), list[dict[_Key, Tensor]]()
    for seed in range(_RUNS):
        with _moved(seed):
            again = run()
        sizes.append({key: size(again[key] - value) for key, value in plain.items() if key in again})
    medians = {key: torch.stack([one[key] for one in sizes]).median(0).values for key in sizes[0]}
    return {key: median.nan_to_num(0.0, 0.0, 0.0) for key, median in medians.items()}


@contextmanager
def _moved(seed: int) -> Iterator[None]:
    """Move each number that an operation computes in a block by about one unit in its last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if returns_a_view(func) and not func.name().partition(".")[0].endswith("_"):
            return result
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and is_inexact(tensor) and tensor.layout is torch.strided:
                generator = generators.get(tensor.device)
                if generator is None:
                    generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
                _move(torch.view_as_real(tensor) if tensor.is_complex() else tensor, generator)
        return result

    with each_operation(move):
        yield


def _move(values: Tensor, generator: torch.Generator) -> None:
    """Move ``values`` in place, except for numbers whose lower half of digits is zero."""
    info = torch.finfo(values.dtype)
    mantissa = torch.frexp(values.detach().to(torch.promote_types(values.dtype, torch.float32))).mantissa
    coarse = mantissa * 2.0 ** (1 + round(-math.log2(info.eps)) // 2)
    signs = torch.rand(values.shape, generator=generator, device=values.device).round_().mul_(2).sub_(1)
    signs = signs.masked_fill_((coarse == coarse.round()) | ~values.isfinite(), 0.0)
    signs = torch.where(values.abs() > info.max / 4, -signs.abs(), signs)
    values.mul_((1 + info.eps * signs.to(torch.float64)).to(values.dtype))
