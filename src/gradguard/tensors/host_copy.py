"""A copy from a device to the host without a host sync, and whether a CUDA graph is being captured."""

from typing import Protocol

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError


class DeviceEvent(Protocol):
    """An event that completes, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the event has completed."""
        ...

    def synchronize(self) -> None:
        """Wait until the event has completed."""


def copy_to_host(flat: Tensor) -> tuple[Tensor, DeviceEvent | None]:
    """Copy ``flat`` without a host sync if the device supports it (CUDA); on other devices the copy itself waits.

    Returns:
        The copy, and the event after which it holds the numbers. Before the event it holds garbage; without one (None)
        it holds the numbers already.
    """
    if not flat.is_cuda:
        return flat.cpu(), None
    with torch.cuda.device(flat.device):  # the copy runs on a stream of this device, not of the current one
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured; its replays repeat the kernels but run no Python."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Refuse to allocate ``what`` during CUDA graph capture, because each replay would allocate it again.

    Raises:
        UnsupportedGradientError: If a CUDA graph is being captured.
    """
    if is_captured(device):
        raise UnsupportedGradientError(
            f"{what} is made on its first step on {device}, and a CUDA graph is being recorded, which would make it "
            "again at each replay. Run at least one whole step before torch.cuda.graph(...), on a side stream, as "
            "PyTorch's notes on CUDA graphs ask for."
        )
