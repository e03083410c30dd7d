"""The gradient itself as a function, so that its own backward can be checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradguard.check.function import Function


def gradient_of(function: Function) -> Callable[..., list[Tensor]]:
    """Return the function from inputs and cotangents to the gradients of Σ cotangent · output, which have a graph."""

    def gradient(*tensors: Tensor) -> list[Tensor]:
        count = len(function.inputs)
        with torch.enable_grad():
            leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors[:count]]
            outputs = function.record(leaves)
            pairs = [(o, v) for o, v in zip(outputs, tensors[count:], strict=True) if o.requires_grad]
            grads = torch.autograd.grad(
                [o for o, _ in pairs], leaves, [v for _, v in pairs], create_graph=True, allow_unused=True
            )
        found = [leaf * 0.0 if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
        return [grad.to_dense() if grad.is_sparse else grad for grad in found]

    return gradient
