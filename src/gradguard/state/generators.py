"""The states of the random generators that code uses implicitly: Python's, NumPy's, torch's on each device.

================================  ============================================================================
generator                         kept
================================  ============================================================================
Python's ``random``               always
NumPy's global one                if the program has imported NumPy
torch's on the CPU                always
torch's on accelerators           on the given devices; by default on all of the current accelerator (CUDA, XPU,
                                  MPS ...), once the program has used it
a named ``torch.Generator``       no: the object that holds it must save its state
================================  ============================================================================
"""

import importlib
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

States = dict[str, Any]
"""``python``, ``numpy`` (None if NumPy is not imported), ``torch``, and ``devices``: pairs of a name and a state."""


def generator_states(devices: Iterable[torch.device] | None = None) -> States:
    """Return the states of all generators, as plain values and tensors on the CPU.

    Args:
        devices: Accelerators to include; None for all of the current kind that the program has used.
    """
    numpy, states = sys.modules.get("numpy"), states_of_torch(_used() if devices is None else devices)
    states["python"] = random.getstate()
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def states_of_torch(devices: Iterable[torch.device]) -> States:
    """Return the states of torch's generators alone, on the CPU and ``devices``; a hundred times faster to read."""
    of_devices = [(str(device), device_state(device)) for device in devices]
    return {"python": None, "numpy": None, "torch": torch.get_rng_state(), "devices": of_devices}


def restore_generators(states: States) -> None:
    """Set the generators to these states."""
    if states["python"] is not None:
        random.setstate(states["python"])
    if states["numpy"] is not None:
        importlib.import_module("numpy").random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in states["devices"]:
        set_device_state(torch.device(device), state)


def have_drawn(before: States) -> bool:
    """Tell whether random numbers have been drawn since ``before``."""
    now = generator_states([torch.device(device) for device, _ in before["devices"]])
    kept = before.keys() if before["numpy"] is not None else before.keys() - {"numpy"}  # NumPy was imported since
    return not all(_same(before[name], now[name]) for name in kept)


def accelerators_of(parameters: Iterable[Tensor]) -> set[torch.device]:
    """Return the devices of ``parameters`` that have a generator of their own."""
    return {parameter.device for parameter in parameters} - {torch.device("cpu"), torch.device("meta")}


def device_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator on one device; for the meta device, the CPU's."""
    module, where = _generator_of(device)
    return module.get_rng_state(*where)


def set_device_state(device: torch.device, state: Tensor) -> None:
    """Set torch's generator on one device to ``state``."""
    module, where = _generator_of(device)
    module.set_rng_state(state, *where)


def check_states(states: States) -> None:
    """Check states from a file on new generators, so that the program's own will accept them.

    NumPy accepts any position without a check, even one outside of its table.

    Raises:
        ValueError: If a generator would reject its state, or read outside of it.
    """
    try:
        random.Random().setstate(states["python"])
        torch.Generator().set_state(states["torch"])
        if (of_numpy := states["numpy"]) is not None:
            importlib.import_module("numpy").random.RandomState().set_state(of_numpy)
            if not 0 <= of_numpy[2] <= 624:
                raise ValueError("the position in the state of NumPy's generator is invalid")
        for device, state in states["devices"]:
            torch.device(device)
            if not isinstance(state, Tensor) or state.dtype is not torch.uint8:
                raise ValueError("the state of a device's generator is invalid")
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the state of a random generator is invalid ({error})") from error


def _used() -> list[torch.device]:
    """Return the devices of the current accelerator; empty before the program has used one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _generator_of(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return the module of a device's generator, and the arguments that select the device in its functions."""
    if device.type in ("cpu", "meta"):
        return torch, ()
    module = torch.get_device_module(device)
    return module, () if device.type == "mps" else (device,)  # MPS has one device, and its functions take none


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else a == b  # a NumPy array has `all`


def seeded_normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Return normal random numbers, drawn on ``device`` if possible, without using the program's generators.

    For a language model's logits, drawing on the CPU for a GPU would take seconds.
    """
    home = device if device.type in ("cuda", "xpu") else torch.device("cpu")
    generator = torch.Generator(home).manual_seed(seed)
    drawn = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    return torch.randn(tuple(shape), generator=generator, dtype=drawn, device=home).to(device, dtype)
