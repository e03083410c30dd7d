"""Counts of the steps that a guard has skipped, in total and in a row; kept on the device to avoid host syncs."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradguard.clip.clipper import ClipResult
from gradguard.errors import NonFiniteGradientError
from gradguard.tensors.host_copy import refuse_capture
from gradguard.words import listed


class Counts:
    """Counts of real steps and of skipped ones, with the last results.

    Args:
        limit: The largest number of skips in a row that raises no error; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.steps = 0
        self.limit = limit
        self._skipped, self._in_a_row = 0, 0
        self._on_device: Tensor | None = None  # [skipped, in a row], once a device has decided about a skip
        self._history: deque[tuple[int, ClipResult]] = deque(maxlen=10)
        self._late = LateReader(lambda in_a_row: self.check(int(in_a_row[0])))

    @property
    def skipped(self) -> int:
        """Number of skipped steps; reading it may be a host sync."""
        return self._skipped if self._on_device is None else int(self._on_device[0])

    @property
    def in_a_row(self) -> int:
        """Number of skipped steps since the last taken one; reading it may be a host sync."""
        return self._in_a_row if self._on_device is None else int(self._on_device[1])

    def begin(self, result: ClipResult) -> None:
        """Record a real step that has ended, with the result of its clip; call `decided` next."""
        self.steps += 1
        self._history.append((self.steps, result))

    def decided(self, skip: bool | Tensor, spike: bool | Tensor = False) -> None:
        """Record a decision. If only the device knows it, the error about too many skips comes some steps late.

        Args:
            skip: Whether the step is skipped; 0-dim bool if only the device knows.
            spike: Whether the reason is a finite spike, which neither lengthens nor ends a row of skips.

        Raises:
            NonFiniteGradientError: If too many steps in a row were skipped.
        """
        counts = self._on_device
        if not isinstance(skip, bool):
            if counts is None:
                refuse_capture(skip.device, "the count of skipped steps")
                counts = self._on_device = torch.zeros(2, dtype=torch.int64, device=skip.device)
                counts[0] += self._skipped
                counts[1] += self._in_a_row
            counts[0].add_(skip)
            counts[1].add_(skip if spike is False else skip & ~spike).mul_(skip)
            self._late.push(counts[1].reshape(1))
        elif counts is not None:
            counts[0] += skip
            counts[1].add_(skip and not spike).mul_(skip)
        else:
            self._skipped += skip
            self._in_a_row = self._in_a_row + (not spike) if skip else 0
            if skip and not spike:
                self.check(self._in_a_row)

    def check(self, in_a_row: int) -> None:
        """Raise if ``in_a_row`` skips are too many.

        Raises:
            NonFiniteGradientError: With the norms and the non-finite parameters of the last skipped steps.
        """
        if self.limit is None or in_a_row <= self.limit:
            return
        lines = "\n  ".join(line for step, result in self._history if (line := _line(step, result)))
        raise NonFiniteGradientError(
            f"{in_a_row} optimizer steps in a row were skipped, because gradients were not finite; "
            f"max_consecutive_skips is {self.limit}. The last of them:\n  {lines}\n"
            "Training does not recover by itself: find the operation that makes NaN or infinity, "
            "go back to a checkpoint, or lower the learning rate. max_consecutive_skips=None never raises."
        )

    def state_dict(self) -> dict[str, int]:
        """Return the counts as Python numbers."""
        return {"steps": self.steps, "skipped": self.skipped, "skipped_in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load counts that `state_dict` returned."""
        self.steps, self._on_device = int(state["steps"]), None
        self._skipped, self._in_a_row = int(state["skipped"]), int(state["skipped_in_a_row"])
        self._history.clear()


class LateReader:
    """Reads small tensors of an accelerator without a host sync: each is used once its copy has arrived.

    Args:
        use: Called with the numbers, in order, some steps late.
    """

    def __init__(self, use: Callable[[list[float]], None]) -> None:
        self._use = use
        self._pending: deque[tuple[Tensor, torch.Event]] = deque(maxlen=8)

    def push(self, values: Tensor) -> None:
        """Start a copy of ``values`` to the host, and use the earlier copies that have arrived."""
        if values.is_cpu:
            self._use(values.tolist())
        elif values.device.type in ("cuda", "xpu"):
            backend = torch.get_device_module(values.device)
            with backend.device(values.device):  # the copy runs on a stream of this device, not of the current one
                capturing = getattr(backend, "is_current_stream_capturing", None)  # older torch.xpu has no graphs
                if capturing is None or not capturing():
                    self._copy(values)

    def _copy(self, values: Tensor) -> None:
        while self._pending and self._pending[0][1].query():
            self._use(self._pending.popleft()[0].tolist())
        copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        copy.copy_(values, non_blocking=True)
        event = torch.Event(values.device)
        event.record()
        self._pending.append((copy, event))


def _line(step: int, result: ClipResult) -> str:
    """Describe a step's non-finite gradients; empty if all were finite."""
    if not bool(result.nonfinite):
        return ""
    return f"step {step}: norm {float(result.norm)}, not finite: {listed(result.culprit_names(), 5)}"
