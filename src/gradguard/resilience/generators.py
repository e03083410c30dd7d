"""The states of the random generators that code uses without naming one: Python's, NumPy's, torch's on each device."""

import importlib
import random
import sys
from collections.abc import Iterable

import torch


class Generators:
    """A copy of these states."""

    def take(self, devices: Iterable[torch.device]) -> None:
        """Keep the states as they are, on the CPU and on ``devices``."""
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None
        self._cpu = torch.get_rng_state()
        self._devices = [(device, torch.get_device_module(device).get_rng_state(*_index(device))) for device in devices]

    def restore(self) -> None:
        """Make them what they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            importlib.import_module("numpy").random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has one device, and functions that take none
