"""The base class of spike detectors: it takes signals, returns a verdict, and keeps its state on the device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.host_copy import refuse_capture
from gradguard.tensors.layout import move_state


@dataclass(frozen=True, slots=True, eq=False)
class SpikeVerdict:
    """The verdict of a detector on one step, as tensors on the detector's device; reading one is a host sync.

    Attributes:
        spike: Whether the step is a spike; 0-dim bool.
        scores: How far each signal is above the usual level, in the rule's deviations; ``[signals]``, NaN for a signal
            that was not judged.
        in_a_row: Number of consecutive spikes, this one included; 0-dim int64.
        adopted: Whether this spike is the last to be rejected: the rejected values are the usual ones from now on;
            0-dim bool.
        stands_out: Whether a signal is far above the usual level; 0-dim bool. A single such step need not be a spike.
            None for a rule that treats every such step as a spike.
    """

    spike: Tensor
    scores: Tensor
    in_a_row: Tensor
    adopted: Tensor
    stands_out: Tensor | None = None


_AS_BEFORE = (
    ", as on earlier steps or in the loaded state. Under a guard the signals are the loss, the norm of each group and, "
    "with updates=True, the update: use the earlier settings, or call the detector's reset()."
)


class Detector(ABC):
    """Base class of rules that recognise spikes: call `observe` once a step. Subclasses write `_empty` and `_judge`.

    **Guarantees.**

    - All state is in tensors on one device. On an accelerator it is changed in place, by a fixed sequence of operations
      without a host sync, so a CUDA graph can capture it.
    - Ranks that observe the same bits make the same decisions.
    - The state moves to the device of the observed values.
    - A run that is resumed from `state_dict` makes bit-identical decisions to an uninterrupted one.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._weight: Tensor | float = math.nan  # the weight of the current step
        self._fewer: set[int] = set()  # earlier numbers of signals, before `grow`
        self._verdict: SpikeVerdict | None = None
        self._before: tuple[Mapping[str, Any], SpikeVerdict | None] | None = None  # state to restore in `take_back`
        self._is_new = False  # after `reset`: the next step may have another number of signals

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that change during training, by name; empty before the first step."""
        return self._tensors

    @property
    def last(self) -> SpikeVerdict | None:
        """The verdict on the last step; None before the first."""
        return self._verdict

    @abstractmethod
    def _empty(self, signals: int) -> dict[str, Tensor]:
        """Return the state before the first step, on the CPU; the first dimension of ``history`` is ``signals``."""

    @abstractmethod
    def _judge(self, values: Tensor) -> SpikeVerdict:
        """Judge ``values`` by the state, and update the state in place."""

    @torch.no_grad()
    def observe(self, values: Tensor, weight: Tensor | float = math.nan) -> Tensor:
        """Return whether this step is a spike, a 0-dim bool on ``values``' device, and update the history.

        Args:
            values: One number a signal, the same signals in the same order each step; ``[signals]``, floating-point.
                A NaN or infinite value is unknown: its signal is not judged on this step.
            weight: The step's weight, such as its number of samples; NaN if it is not known. `SpikeDetector` uses it;
                other rules need not.

        Raises:
            InvalidTypeError: If ``values`` is not a floating-point tensor.
            InvalidValueError: If it has another shape than before.
        """
        self._check(values)
        self._is_new, self._before = False, None
        if not self._tensors or len(self._tensors["history"]) != len(values):
            refuse_capture(values.device, "the memory of the spike detector")
            self._tensors = self._empty(len(values))
        if self._tensors["history"].device != values.device:
            self.to(values.device)
        self._weight = weight
        self._verdict = self._judge(values.detach().to(self._tensors["history"].dtype))
        return self._verdict.spike

    def take_back(self) -> bool:
        """Forget the last observed step, if the detector kept its previous state; `SpikeDetector` does so on the CPU.

        Returns:
            Whether the step was forgotten. On an accelerator, or the second time, nothing changes.
        """
        if self._before is None:
            return False
        (numbers, self._verdict), self._before = self._before, None
        for name, tensor in self._tensors.items():
            if name in numbers:
                tensor.copy_(torch.as_tensor(numbers[name], dtype=tensor.dtype))
        return True

    def grow(self, signals: int) -> None:
        """Add more signals after the present ones; does nothing before the first step.

        Args:
            signals: The number of signals from now on.
        """
        state = self._tensors
        if not state:
            return
        before = len(state["history"])
        if signals > before:
            refuse_capture(state["history"].device, "the memory of the spike detector")
            self._fewer.add(before)
            state.update(self._grown(state, signals))

    def _grown(self, state: Mapping[str, Tensor], signals: int) -> dict[str, Tensor]:
        """Return ``state`` with new signals appended to the present ones."""
        fresh = {name: tensor.to(state[name]) for name, tensor in self._empty(signals).items()}
        return {
            name: state[name] if state[name].shape == new.shape else torch.cat([state[name], new[len(state[name]) :]])
            for name, new in fresh.items()
        }

    def _check(self, values: Tensor) -> None:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            given = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise InvalidTypeError(f"values is {given}: expected a floating-point tensor with one number a signal.")
        is_known = self._tensors and not self._is_new
        known = len(self._tensors["history"]) if is_known else None
        if values.dim() != 1 or len(values) == 0 or known not in (None, len(values)):
            raise InvalidValueError(
                f"values has the shape {list(values.shape)}: expected [{known or 'signals'}], one number a signal"
                + (_AS_BEFORE if is_known else ".")
            )

    def reset(self) -> None:
        """Forget all history, for instance for another data set; call it on all ranks at once."""
        self._verdict, self._before, self._is_new = None, None, True
        if state := self._tensors:
            fresh = self._empty(len(state["history"]))
            for name, tensor in state.items():  # in place: a captured graph goes on using this memory
                tensor.copy_(fresh[name])

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return the detector; `observe` also moves it to the observed values."""
        refuse_capture(torch.device(device), "the memory of the spike detector")
        self._before = None
        move_state(self._tensors, device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state; empty before the first step."""
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; decisions continue as in an uninterrupted run.

        Raises:
            InvalidValueError: If ``state_dict`` is not the state of a detector of this class with the same windows. The
                other arguments may differ; this detector's own arguments apply from now on.
        """
        self._verdict, self._before = None, None
        if not state_dict:
            self.reset()
            return
        expected = self._expected(state_dict)
        if self._tensors and state_dict.keys() == expected.keys() and len(state_dict["history"]) in self._fewer:
            state_dict = self._grown(state_dict, len(self._tensors["history"]))  # saved before a new kind appeared
        given = {name: list(t.shape) for name, t in state_dict.items() if isinstance(t, Tensor)}
        if given != {name: list(t.shape) for name, t in expected.items()} or len(given) != len(state_dict):
            raise InvalidValueError(
                f"the state does not fit this {self!r}: expected tensors of shapes "
                f"{ {name: list(t.shape) for name, t in expected.items()} }, got {given or sorted(state_dict)}. Create "
                "the detector with the arguments it had when the state was saved."
            )
        if not self._tensors:
            self._tensors = expected
        for name, tensor in self._tensors.items():  # in place: a captured graph goes on using this memory
            tensor.copy_(state_dict[name])
        self._is_new = False

    def _expected(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        if self._tensors:
            return self._tensors
        history = state_dict.get("history")
        return self._empty(len(history) if isinstance(history, Tensor) and history.dim() else 1)
