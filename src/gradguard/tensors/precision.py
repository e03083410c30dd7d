"""How many digits float32 products have on a GPU: 24 bits, or the 11 of TF32 where PyTorch is allowed to take it."""

from typing import Any, Literal

import torch

Kind = Literal["product", "convolution", "recurrent"]
"""The kind of computation: products of matrices, convolutions, or recurrent layers of cuDNN."""

TF32_EPSILON = 2.0**-10
"""The distance from 1 to the next number in TF32."""


def is_tf32_allowed(device: torch.device, *kinds: Kind) -> bool:
    """Tell whether operations of one of these kinds may round float32 to TF32 on ``device``.

    For convolutions and recurrent layers cuDNN may by default, for products only where the user allows it.

    Args:
        device: Where they run.
        kinds: What they are.

    Returns:
        Whether one of them may; never on another device than a CUDA one.
    """
    if device.type != "cuda":
        return False
    backends: Any = torch.backends
    switches = {
        "product": (backends.cuda.matmul, backends),
        "convolution": (backends.cudnn.conv, backends.cudnn, backends),
        "recurrent": (backends.cudnn.rnn, backends.cudnn, backends),
    }
    for kind in kinds:
        said = [switch.fp32_precision for switch in switches[kind]]  # the first that says something counts
        if next((one for one in said if one != "none"), "ieee") != "ieee":
            return True
    return False
