"""The compiled model has the same loss, but a gradient of zero.

pytorch/pytorch#180771, #182012, #180164: Inductor dropped the gradient of the elements that a
`slice_scatter` does not change. The function below has the backward pass that Inductor generated::

    gradguard check compiled_slice_scatter:sick --input x=6 --input y=2
    gradguard check compiled_slice_scatter:healthy --input x=6 --input y=2
"""

import torch


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.length = len(y)
        return torch.slice_scatter(x, y, 0, 0, len(y))

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient), gradient[: ctx.length]


def sick(x, y):
    """Compute the backward that Inductor generated."""
    return _Compiled.apply(x, y)


def healthy(x, y):
    """Compute the backward of eager mode."""
    return torch.slice_scatter(x, y, 0, 0, len(y))
