"""Checks of clipping thresholds and norm orders, made before any gradient is changed."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import assert_async


def check_threshold(name: str, value: float | Tensor) -> float | Tensor:
    """Return ``value`` as a float, or as a detached 0-dim float tensor if it is a tensor.

    Reading a tensor on an accelerator would be a host sync. A device-side assertion checks such a threshold instead: it
    stops the stream before the gradients change.

    Raises:
        InvalidValueError: If the threshold is NaN, negative, or a tensor of more than one element.
        InvalidTypeError: If the argument is not a number.
    """
    if not isinstance(value, Tensor):
        return _check_number(name, value)
    if value.numel() != 1:
        raise InvalidValueError(f"{name} is a tensor of shape {tuple(value.shape)}: expected one number, shape ().")
    value = value.detach().reshape(())
    value = value if value.dtype in (torch.float32, torch.float64) else value.float()
    if are_readable(value):
        _check_number(name, value.item())
    else:
        assert_async((value >= 0).all(), f"gradguard: {name} must be a number >= 0, not negative or NaN")
    return value


_RANGES: dict[str, Callable[[float], bool]] = {
    "a number": lambda number: True,
    "a number > 0, or float('inf') for none": lambda number: number > 0,
    "a number > 0, or None": lambda number: number > 0,
    "a number above 0": lambda number: number > 0,
    "a finite number > 0": lambda number: 0 < number < math.inf,
    "a finite number >= 0": lambda number: 0 <= number < math.inf,
    "a number from 0 to 1": lambda number: 0 <= number <= 1,
    "a number from 0 to 100": lambda number: 0 <= number <= 100,
    "a number above 0 and at most 1": lambda number: 0 < number <= 1,
    "a probability above 0 and below 1": lambda number: 0 < number < 1,
    "a share above 0 and below 1": lambda number: 0 < number < 1,
    "at least 1, which calls each that stands out a spike": lambda number: number >= 1,
}
"""The ranges that `check_number` can require, by the words that its error uses. Only ``"a number"`` accepts NaN."""


def check_number(name: str, value: float, expected: str = "a number") -> float:
    """Return ``value`` as a float; refuse a bool.

    Args:
        name: The argument's name.
        value: The argument.
        expected: The range that ``value`` must lie in, a key of `_RANGES`; by default any number, NaN included.

    Raises:
        InvalidTypeError: If the argument is not a number.
        InvalidValueError: If the number is outside the range.
    """
    if isinstance(value, str | bool) or not hasattr(value, "__float__"):
        raise InvalidTypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}.")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidTypeError(f"{name}={value!r}: expected one number.") from error
    if not _RANGES[expected](number):
        raise InvalidValueError(f"{name}={value}: expected {expected}.")
    return number


def check_whole(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``most``; refuse a bool.

    Raises:
        InvalidTypeError: If ``value`` is not an integer.
        InvalidValueError: If the integer is out of range.
    """
    bound = f">= {least}" if most is None else f"from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidTypeError(f"{name}={value!r}: expected a whole number {bound}, got {type(value).__name__}.")
    if value < least or (most is not None and value > most):
        raise InvalidValueError(f"{name}={value}: expected a whole number {bound}.")
    return value


def check_order(norm_type: float) -> float:
    """Return the order p of a norm as a float.

    Raises:
        InvalidValueError: If the order is not above 0.
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise InvalidValueError(f"norm_type={norm_type!r}: expected a number above 0, or float('inf').")
    return order


def check_bounds(low: float, high: float, names: tuple[str, str]) -> tuple[float, float]:
    """Return ``low`` and ``high`` as floats; ``names`` are the caller's names of the two arguments.

    Raises:
        InvalidValueError: If a bound is NaN or ``low > high``.
    """
    low, high = check_number(names[0], low), check_number(names[1], high)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise InvalidValueError(f"cannot clip to [{low}, {high}]: expected {names[0]} <= {names[1]}, and no NaN.")
    return low, high


def check_interval(
    low: float | None, high: float | Tensor, names: tuple[str, str]
) -> tuple[float | Tensor, float | Tensor]:
    """Return the bounds of a clip by value; without ``low`` they are ``[-high, high]``.

    Args:
        low: The lower bound, or None.
        high: The upper bound.
        names: The caller's names of the two arguments.

    Raises:
        InvalidTypeError: If a bound is not a number.
        InvalidValueError: If a bound is NaN, ``low > high``, or ``high`` alone is negative.
    """
    if low is None:
        high = check_threshold(names[1], high)
        return -high, high
    return check_bounds(low, float(high) if isinstance(high, Tensor) else high, names)


def _check_number(name: str, value: float) -> float:
    number = check_number(name, value)
    if math.isnan(number) or number < 0:
        raise InvalidValueError(f"{name}={number}: expected a number >= 0, or float('inf') to only measure.")
    return number
