"""The rounding error of each element of a gradient in a low dtype, measured by Monte Carlo arithmetic (Parker 1997).

The float64 function runs many times, forward and backward. Each operation's result is perturbed at random by the error
of rounding it to the low dtype: up to half a unit in the last place. A sum is also perturbed by the error of
accumulating its terms one by one in that dtype. The scatter of each element of the gradient is its bar for a kernel of
that dtype. It includes the effects of cancelling errors and of small differences of large numbers.

A fused operation is decomposed if PyTorch has a decomposition, because a kernel may round its intermediate results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguard.check.flat_vectors import drawn, finite, normal
from gradguard.check.function import Function
from gradguard.torch_private import (
    changes_its_arguments,
    decompositions,
    each_operation,
    returns_a_view,
    tree_leaves,
)

_RUNS = 16
_FUSED = """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    fused_rms_norm fused_rms_norm_backward softmax softmax_backward_data log_softmax log_softmax_backward_data
    nll_loss_forward nll_loss_backward gelu gelu_backward silu silu_backward glu glu_backward sigmoid_backward
    tanh_backward addmm baddbmm logsumexp
"""
_CHOOSING = """
    to_copy unsafe_view abs amax amin cat clamp clamp_max clamp_min clone constant_pad_nd copy empty empty_like fill
    flip full full_like gather index index_select embedding masked_fill max maximum min minimum neg ones ones_like relu
    repeat roll scalar_tensor select_backward slice_backward sort stack threshold threshold_backward topk tril triu
    where zeros zeros_like
"""
_EXACT = frozenset(_CHOOSING.split())
"""Operations that select or move numbers, or negate them, and never round."""
_SEQUENTIAL = 0.2
"""The standard deviation of a sum of n terms accumulated one by one, divided by √n · eps · size of the partial sums."""


def _of_scatters(args: Sequence[Any], result: Tensor) -> float:
    indices = [one for one in tree_leaves(args) if isinstance(one, Tensor) and one.dtype is torch.int64 and one.numel()]
    return max((float(one.flatten().bincount().max()) for one in indices if one.min() >= 0), default=1.0)


_NONLINEAR = "var std var_mean logsumexp prod norm linalg_vector_norm"
_NOT_LINEAR = _NONLINEAR.split()
_SCATTERED = "embedding_dense_backward index_add scatter_add index_put scatter_reduce"
_TERMS: dict[str, Callable[[Sequence[Any], Tensor], float]] = {
    **dict.fromkeys(
        ["sum", "mean", *_NOT_LINEAR], lambda args, result: max(1.0, args[0].numel() / max(1, result.numel()))
    ),
    "cumsum": lambda args, result: args[0].shape[args[1]] if args[0].dim() else 1,
    **dict.fromkeys(
        ["mm", "bmm", "mv", "dot"],
        lambda args, result: math.sqrt(args[0].numel() * args[1].numel() / max(1, result.numel())),
    ),
    **dict.fromkeys(
        ["convolution", "convolution_backward"],
        lambda args, result: max(one.numel() for one in args if isinstance(one, Tensor)),
    ),
    **dict.fromkeys(_SCATTERED.split(), _of_scatters),
}
"""For each operation, the number of terms summed into each element of the result."""


class Scatter:
    """The scatter of a gradient under random rounding to a low dtype.

    Args:
        function: The function in float64.
        vector: The point.
        cotangent: The gradient of the outputs.
        dtype: The low dtype to which results are rounded.
        generator: The generator of the random rounding.

    Attributes:
        gradients: The gradients, one run per row; a single row if ``is_seen`` is False.
        is_seen: Whether the rounding changed the gradient. False if a custom kernel hides its operations.
    """

    def __init__(
        self, function: Function, vector: Tensor, cotangent: Tensor, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        limits = torch.finfo(dtype)
        self._eps, self._least = limits.eps, limits.smallest_normal * limits.eps
        self._generator = generator
        self._decompositions = decompositions(_FUSED.split())
        exact = function.gradient(vector, cotangent)
        runs = [self._run(function, vector, cotangent)]
        self.is_seen = bool((finite(runs[0] - exact).abs() > self._eps / 50 * finite(exact).abs()).any())
        if self.is_seen:
            runs += [self._run(function, self._rounded(vector), self._rounded(cotangent)) for _ in range(_RUNS)]
        self.gradients = torch.stack(runs)

    def _run(self, function: Function, vector: Tensor, cotangent: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), each_operation(self._operation):
            return function.gradient(vector, cotangent)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._decompositions.get(operation)
        if parts is not None:
            with each_operation(self._operation):
                return parts(*args, **kwargs)
        result = operation(*args, **kwargs)
        name = operation.name().partition("::")[2].partition(".")[0].lstrip("_")
        if name in _EXACT or returns_a_view(operation) or changes_its_arguments(operation):
            return result
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, tuple | list):
            return result
        pairs = zip(results, self._lost_in_sums(name, operation, args, kwargs, results), strict=True)
        rounded = [self._rounded(one, off) if isinstance(one, Tensor) else one for one, off in pairs]
        return rounded[0] if isinstance(result, Tensor) else type(result)(rounded)

    def _rounded(self, values: Tensor, lost: Tensor | float = 0.0) -> Tensor:
        if values.dtype not in (torch.float64, torch.complex128) or values.numel() == 0:
            return values
        steps = torch.view_as_real(values).clone() if values.is_complex() else values
        rounding = drawn(steps.shape, self._generator).to(steps.device)
        noise = rounding * (steps.abs() * (self._eps / 2) + self._least)
        if isinstance(lost, Tensor) and lost.shape == steps.shape:
            noise = noise + normal(steps.shape, self._generator).to(steps.device) * lost
        steps = torch.where(noise.isfinite(), steps + noise, steps)
        return torch.view_as_complex(steps) if values.is_complex() else steps

    def _lost_in_sums(
        self, name: str, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]
    ) -> Sequence[Tensor | float]:
        """Return the standard deviation of each result if its terms were accumulated in the low dtype; 0 if no sum.

        The size of the partial sums is estimated by the size of the result plus the 2-norm of the terms.
        """
        count = _TERMS.get(name)
        nothing = [0.0] * len(results)
        tensors = [one for one in args if isinstance(one, Tensor)]
        if count is None or not tensors[0].is_floating_point():
            return nothing
        squares: Sequence[Any] = nothing
        if name not in _NOT_LINEAR:
            squared = [one.square() if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
            found = operation(*squared, **kwargs)
            squares = [found] if isinstance(found, Tensor) else found
        lost: list[Tensor | float] = []
        for one, square in zip(results, squares, strict=True):
            if isinstance(one, Tensor):
                terms = count(args, one)
                size = one.abs() + (square / (terms if name == "mean" else 1.0)) ** 0.5
                lost.append(_SEQUENTIAL * self._eps * math.sqrt(terms) * size)
            else:
                lost.append(0.0)
        return lost
