"""The states of the random generators that code uses without naming one: Python's, NumPy's, torch's on each device."""

import importlib
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Generators:
    """A copy of these states."""

    def take(self, devices: Iterable[torch.device]) -> None:
        """Keep the states as they are, on the CPU and on ``devices``."""
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None
        self._cpu = torch.get_rng_state()
        self._devices = [(device, torch.get_device_module(device).get_rng_state(*_index(device))) for device in devices]

    def states(self) -> dict[str, Any]:
        """Return the states as plain values, for a file."""
        devices = [(str(device), state) for device, state in self._devices]
        return {"python": self._python, "numpy": self._numpy, "torch": self._cpu, "devices": devices}

    def set_states(self, states: dict[str, Any]) -> None:
        """Take the states that `states` has returned, as a file says; nothing is restored yet.

        Raises:
            ValueError: They are none of such generators.
        """
        check_states(states)
        self._python, self._numpy, self._cpu = states["python"], states["numpy"], states["torch"]
        self._devices = [(torch.device(device), state) for device, state in states["devices"]]

    def restore(self) -> None:
        """Make them what they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            importlib.import_module("numpy").random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def check_states(states: dict[str, Any]) -> None:
    """Check states from a file: generators of our own take them, so that those of the program will.

    NumPy takes any position without a look, also one outside of its table.

    Raises:
        ValueError: A generator would not take its state, or draw from outside of it.
    """
    try:
        random.Random().setstate(states["python"])
        torch.Generator().set_state(states["torch"])
        if (of_numpy := states.get("numpy")) is not None:
            kind, key, position, has_gauss, gauss = of_numpy
            right = (kind, key.dtype.str[1:], key.shape) == ("MT19937", "u4", (624,)) and type(gauss) is float
            if not (right and type(position) is int and 0 <= position <= 624 and has_gauss in (0, 1)):
                raise ValueError("the state of NumPy's generator is none")
    except (TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the state of a random generator is none ({error})") from error


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has one device, and functions that take none
