"""A fused kernel passes its test, whose tolerance was chosen until it did.

fla-org/flash-linear-attention#836, triton-lang/triton#7216 in kind: the backward of a fused gate
omits one of two terms where both are small::

    gradguard check fused_kernel:sick --input x=4,8 --input gate=4,8
    gradguard check fused_kernel:healthy --input x=4,8 --input gate=4,8
"""

import torch


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return x * gate.sigmoid() * gate

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        s = gate.sigmoid()
        return gradient * s * gate, gradient * x * s  # the right factor is x * s * (1 + gate * (1 - s))


def sick(x, gate):
    """Call the kernel."""
    return _Fused.apply(x, gate)


def healthy(x, gate):
    """Compute the right result."""
    return x * gate.sigmoid() * gate
