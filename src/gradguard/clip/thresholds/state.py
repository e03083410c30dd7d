"""Clippers whose state is a few small tensors on the device, changed in place and never looked at."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from gradguard.clip.clipper import Clipper
from gradguard.clip.lock_in import LockIn
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.layout import wide_dtype


class StatefulClipper(Clipper):
    """A clipper that remembers, in ``state``: a mapping from names to tensors, float64 where the device has it.

    **Guarantees.** The state is changed in place and on the device, so that the host never waits and a CUDA graph can
    hold the change. It goes to the gradients' device by itself, or by `to`; a run that is resumed from `state_dict`
    goes on bit by bit as the uninterrupted one.

    Attributes:
        state: What changes during training, and the counters.
        lock_in: The alarm.
    """

    def __init__(self, **state: Tensor) -> None:
        self.state: dict[str, Tensor] = {"counts": torch.zeros(3, dtype=torch.int64, device="cpu"), **state}
        self.lock_in = LockIn()

    @property
    def steps(self) -> Tensor:
        """The number of steps so far, 0-dim."""
        return self.state["counts"][0].clone()

    @property
    def clipped_steps(self) -> Tensor:
        """On how many of them the clip bound, 0-dim."""
        return self.state["counts"][1].clone()

    @property
    def nonfinite_steps(self) -> Tensor:
        """On how many of them a gradient held NaN or infinity, 0-dim."""
        return self.state["counts"][2].clone()

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return the clipper; it also follows the gradients by itself."""
        device = torch.device(device)
        for name, tensor in self.state.items():
            dtype = wide_dtype(device) if tensor.is_floating_point() else tensor.dtype
            self.state[name] = tensor.to(device, dtype)
        self.lock_in.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        return {name: tensor.clone() for name, tensor in self.state.items()} | {"lock_in": self.lock_in.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; training goes on as if it had not been interrupted.

        Raises:
            InvalidValueError: If it comes from another rule, or from one with other windows.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        came = {name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)}
        if shapes != came or "lock_in" not in state_dict:
            raise InvalidValueError(
                f"the state is not of this {type(self).__name__}: expected tensors of shapes {shapes}, came {came}. "
                "Construct the clipper with the arguments it had when the state was saved."
            )
        self.lock_in.load_state_dict(state_dict["lock_in"])
        for name, tensor in self.state.items():  # in place: a captured graph goes on using this memory
            tensor.copy_(state_dict[name])

    def _follow(self, device: torch.device) -> None:
        if self.state["counts"].device != device:
            self.to(device)

    def _set(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.state[name].copy_(value)

    def _count(self, clipped: Tensor, nonfinite: Tensor) -> None:
        self.state["counts"].add_(torch.stack([torch.ones_like(clipped), clipped, nonfinite]))


def scalar(value: float) -> Tensor:
    """Return a 0-dim state tensor."""
    return torch.full((), value, dtype=torch.float64, device="cpu")


def counter() -> Tensor:
    """Return a 0-dim count of 0."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def whole(name: str, value: int) -> int:
    """Return ``value``, a whole number >= 1.

    Raises:
        InvalidTypeError: If it is no whole number.
        InvalidValueError: If it is below 1.
    """
    if not isinstance(value, int):
        raise InvalidTypeError(f"{name}={value!r}: expected a whole number >= 1, got {type(value).__name__}.")
    check(value >= 1, "a whole number >= 1", lambda: f"{name}={value}")
    return value


def check(condition: bool, expected: str, came: Callable[[], str]) -> None:
    """Raise unless ``condition`` holds.

    Raises:
        InvalidValueError: Saying what was expected and what came.
    """
    if not condition:
        raise InvalidValueError(f"{came()}: expected {expected}.")
