"""The lock-in alarm: a clip that binds on most steps at one threshold normalises the gradient, or is stuck."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from gradguard.errors import InvalidValueError
from gradguard.tensors.host_copy import refuse_capture
from gradguard.tensors.layout import move, move_state
from gradguard.threshold_formulas import LOCK_IN_WINDOW, locked_in


class LockIn:
    r"""Tells whether a clip has bound on more than half of the last N steps at one threshold; counts on the device.

    .. math:: \#\{t : \text{clipped}_t\} > N/2 \quad\text{and}\quad
              \max_t c_t \le 1.01 \, \min_t c_t \quad\text{over the last } N \text{ steps}

    **Guarantees.** There is no host sync, and the state is updated in place, so a step can be captured in a CUDA graph.
    The state moves to the device of the arguments of `follow`.

    **Edge cases.** The verdict is False until N finite steps have been counted. A non-finite step does not change the
    state. A constant threshold of 0 counts as one threshold.

    Args:
        window: N.

    Example:
        >>> import torch
        >>> from gradguard.clip.lock_in import LockIn
        >>> alarm, yes = LockIn(window=4), torch.tensor(True)
        >>> [bool(alarm.follow(clipped=yes, threshold=1.0, finite=yes)) for step in range(5)]
        [False, False, False, True, True]
    """

    def __init__(self, window: int = LOCK_IN_WINDOW) -> None:
        # One row of thresholds, and one of whether the clip bound; the next step goes to column "seen" modulo window.
        steps = torch.zeros(2, window, dtype=torch.float64, device="cpu")
        self._state = {"steps": steps, "seen": torch.zeros(1, dtype=torch.int64, device="cpu")}

    @torch.no_grad()
    def follow(self, clipped: Tensor, threshold: float | Tensor, finite: Tensor) -> Tensor:
        """Return the verdict after one more step, 0-dim bool.

        Args:
            clipped: Whether the clip binds on this step, 0-dim bool.
            threshold: The threshold of this step, at least 0.
            finite: Whether all gradients were finite, 0-dim bool; a non-finite step changes nothing.
        """
        if self._state["seen"].device != clipped.device:
            self.to(clipped.device)
        steps, seen = self._state.values()
        if isinstance(threshold, Tensor):
            bound = move(threshold.detach(), steps.device, steps.dtype)
        else:
            bound = torch.full((), threshold, dtype=steps.dtype, device=steps.device)
        place = (seen % steps.shape[1]).expand(2, 1)
        new = torch.stack([bound, clipped])[:, None]
        steps.scatter_(1, place, torch.where(finite, new, steps.gather(1, place)))
        seen.add_(finite)
        return self.verdict()

    def verdict(self) -> Tensor:
        """Return the verdict after the last step, 0-dim bool."""
        steps, seen = self._state.values()
        thresholds, bound_on = steps.unbind()
        return locked_in(seen[0], bound_on.sum(), *thresholds.aminmax(), len(thresholds))

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device``."""
        refuse_capture(torch.device(device), "the memory of the lock-in alarm")
        move_state(self._state, device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the state."""
        return {name: tensor.clone() for name, tensor in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned, from any device.

        Raises:
            InvalidValueError: If it is not the state of a `LockIn` with this window.
        """
        if set(state_dict) != {"steps", "seen"}:
            raise InvalidValueError(
                f"the state of the lock-in alarm has {sorted(state_dict)}: expected 'seen' and 'steps', as "
                "state_dict() returns them."
            )
        if state_dict["steps"].shape != self._state["steps"].shape:
            raise InvalidValueError(
                f"the state of the lock-in alarm has a window of {state_dict['steps'].shape[-1]} steps, but this one "
                f"has {self._state['steps'].shape[1]}: it comes from another version or another rule."
            )
        for name, tensor in self._state.items():  # in place: a captured graph keeps using these tensors
            tensor.copy_(state_dict[name])
