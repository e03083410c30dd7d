"""How often a guard's clip bound of late."""

from typing import Any

import torch
from torch import Tensor

import gradguard as gg

WINDOW = 100
"""The binding share is that of so many steps."""


class BindingShare:
    """The share of a guard's last 100 steps that were clipped, on the device until it is read."""

    def __init__(self) -> None:
        self.steps = 0
        self._seen = 0  # steps of the guard
        self._clipped = torch.zeros(WINDOW, dtype=torch.bool, device="cpu")

    def follow(self, guard: gg.Guard) -> None:
        """Take in the guard's last step, unless that has been done."""
        if guard.last is None or guard.steps == self._seen:
            return
        self._seen = guard.steps
        self._clipped = self._clipped.to(guard.last.clipped.device)
        self._clipped[self.steps % WINDOW] = guard.last.clipped & ~guard.last.nonfinite
        self.steps += 1

    def value(self) -> Tensor:
        """Return the share; 0-dim."""
        return self._clipped[: max(1, min(self.steps, WINDOW))].float().mean()

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {"steps": self.steps, "seen": self._seen, "clipped": self._clipped.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.steps, self._seen = int(state_dict["steps"]), int(state_dict["seen"])
        self._clipped = state_dict["clipped"].clone()
