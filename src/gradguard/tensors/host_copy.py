"""A copy from a device to the host without a host sync, and whether a CUDA graph is being recorded."""

from typing import Protocol

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError


class DeviceEvent(Protocol):
    """Something that completes, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether it has completed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""


def copy_to_host(flat: Tensor) -> tuple[Tensor, DeviceEvent | None]:
    """Copy ``flat`` without a wait where the device can (CUDA); on others the copy itself waits.

    Returns:
        The copy, and the event after which it holds the numbers (None: it holds them now); before, it holds garbage.
    """
    if not flat.is_cuda:
        return flat.cpu(), None
    with torch.cuda.device(flat.device):  # not the current one, whose stream the copy does not run on
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being recorded: its replays repeat the kernels and run no Python."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Refuse to make ``what`` while a CUDA graph is recorded, because each replay would make it anew.

    Raises:
        UnsupportedGradientError: If a CUDA graph is being recorded.
    """
    if is_captured(device):
        raise UnsupportedGradientError(
            f"{what} is made on its first step on {device}, and a CUDA graph is being recorded, which would make it "
            "anew at each replay. Run at least one whole step before torch.cuda.graph(...), on a side stream, as "
            "PyTorch's notes on CUDA graphs ask for."
        )
