"""The gradient itself as a function, so that its own backward can be checked."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguard.check.function import Function


class GradientOf:
    """The function from inputs and cotangents to the gradient of Σ cotangent · output, which has a graph itself."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return the gradient for each input."""
        count = len(self.function.inputs)
        with torch.enable_grad():
            leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors[:count]]
            outputs = self.function.record(leaves)
            pairs = [(o, v) for o, v in zip(outputs, tensors[count:], strict=True) if o.requires_grad]
            grads = torch.autograd.grad(
                [o for o, _ in pairs], leaves, [v for _, v in pairs], create_graph=True, allow_unused=True
            )
        dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        return [leaf * 0.0 if grad is None else grad for grad, leaf in zip(dense, leaves, strict=True)]

    @property
    def names(self) -> list[str]:
        """The names of its inputs."""
        return [one.name for one in self.function.inputs] + [f"grad of {o.name}" for o in self.function.outputs]
