"""The base of the rules that call a step a spike: signals in, a verdict out, state on the device."""

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
    """The verdict of a detector on one step. Tensors on the detector's device: nothing waits until one is read.

    Attributes:
        spike: Whether the step is a spike; 0-dim bool.
        scores: How far each signal is above what is usual, in the rule's deviations; ``[signals]``, NaN where a signal
            was not judged.
        in_a_row: How many spikes have come in a row, this one included; 0-dim int64.
        adopted: Whether this spike was the last that is rejected: what was rejected is usual from now on; 0-dim bool.
        stands_out: Whether a signal is far above what is usual, also alone, which is no spike; 0-dim bool. None for a
            rule that calls each such step a spike.
    """

    spike: Tensor
    scores: Tensor
    in_a_row: Tensor
    adopted: Tensor
    stands_out: Tensor | None = None


_AS_BEFORE = (
    ", as on the steps before or in the state that was loaded. Under a guard the signals are the loss, the norm of "
    "each group and, with updates=True, the update: give the settings of before, or call reset() of the detector."
)


class Detector(ABC):
    """A rule that recognises spikes: `observe` it once a step. Subclasses write `_empty` and `_judge`.

    **Guarantees.**

    - All state is in tensors on one device. On an accelerator it is changed in place, by a fixed sequence of operations
      without a host sync: a CUDA graph can hold it.
    - Ranks that observe the same bits decide the same.
    - The state moves to the device of the observed values.
    - A run that is resumed from `state_dict` decides bit by bit as the uninterrupted one.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._weight: Tensor | float = math.nan  # of the step that is judged
        self._fewer: set[int] = set()  # how many signals there were before `grow`
        self._verdict: SpikeVerdict | None = None
        self._before: tuple[Mapping[str, Any], SpikeVerdict | None] | None = None  # numbers and verdict, if kept
        self._is_new = False  # since `reset`: the next step may have another number of signals

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
        """Judge ``values`` by the state, and let the state follow in place."""

    @torch.no_grad()
    def observe(self, values: Tensor, weight: Tensor | float = math.nan) -> Tensor:
        """Return whether this step is a spike, 0-dim bool on the device of ``values``; the history follows.

        Args:
            values: One number a signal, the same signals in the same order each step; ``[signals]``, floating-point.
                NaN or infinite where it is not known: that signal is not judged on this step.
            weight: The step's weight, such as its number of samples; NaN where that is not known. `SpikeDetector`
                looks at it, other rules need not.

        Raises:
            InvalidTypeError: If ``values`` is no floating-point tensor.
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
        """Forget the step observed last. `SpikeDetector` can do so on the CPU.

        Returns:
            Whether the step was forgotten; on an accelerator, or the second time, nothing changes.
        """
        if self._before is None:
            return False
        (numbers, self._verdict), self._before = self._before, None
        for name, tensor in self._tensors.items():
            if name in numbers:
                tensor.copy_(torch.as_tensor(numbers[name], dtype=tensor.dtype))
        return True

    def grow(self, signals: int) -> None:
        """Make room for more signals, behind the present ones; before the first step nothing is to be done.

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
        """Return ``state`` with fresh signals behind the present ones."""
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
        """Forget all history, as for another data set; call it on all ranks at once."""
        self._verdict, self._before, self._is_new = None, None, True
        if state := self._tensors:
            fresh = self._empty(len(state["history"]))
            for name, tensor in state.items():  # in place: a captured graph goes on using this memory
                tensor.copy_(fresh[name])

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return the detector; it also follows the observed values by itself."""
        refuse_capture(torch.device(device), "the memory of the spike detector")
        self._before = None
        move_state(self._tensors, device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state; empty before the first step."""
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; decisions go on as if nothing had been interrupted.

        Raises:
            InvalidValueError: If ``state_dict`` is not the state of a detector of this class with the same windows. The
                other arguments may differ: those of this detector hold from here on.
        """
        self._verdict, self._before = None, None
        if not state_dict:
            self.reset()
            return
        expected = self._expected(state_dict)
        if self._tensors and state_dict.keys() == expected.keys() and len(state_dict["history"]) in self._fewer:
            state_dict = self._grown(state_dict, len(self._tensors["history"]))  # of before a new kind of step
        given = {name: list(t.shape) for name, t in state_dict.items() if isinstance(t, Tensor)}
        if given != {name: list(t.shape) for name, t in expected.items()} or len(given) != len(state_dict):
            raise InvalidValueError(
                f"the state is not of this {self!r}: expected tensors of shapes "
                f"{ {name: list(t.shape) for name, t in expected.items()} }, came {given or sorted(state_dict)}. Make "
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
