"""What rounding in a low dtype does to each element of a gradient, by Monte Carlo arithmetic (Parker 1997).

The float64 function runs again and again, forward and backward, and the result of each operation is changed at random
by what rounding it to the low dtype would change: by up to half a unit in the last place, and a sum by what adding up
its terms one by one in that dtype would lose. How far the gradient scatters is the bar for a kernel of that dtype, for
each element by itself: errors that cancel, and small differences of large numbers, are in it.

Fused operations are taken apart where PyTorch knows of what they consist, because a kernel may round in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguard.check.function import Function
from gradguard.torch_private import (
    changes_its_arguments,
    decompositions,
    each_operation,
    returns_a_view,
    tree_leaves,
)

_RUNS = 16
_FUSED = (
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "fused_rms_norm", "fused_rms_norm_backward", "softmax", "softmax_backward_data",
    "log_softmax", "log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "gelu", "gelu_backward",
    "silu", "silu_backward", "glu", "glu_backward", "sigmoid_backward", "tanh_backward", "addmm", "baddbmm",
    "logsumexp",
)  # fmt: skip
_EXACT = frozenset(
    [
        "to_copy", "unsafe_view", "abs", "amax", "amin", "cat", "clamp", "clamp_max", "clamp_min", "clone",
        "constant_pad_nd", "copy", "empty", "empty_like", "fill", "flip", "full", "full_like", "gather", "index",
        "index_select", "embedding", "masked_fill", "max", "maximum", "min", "minimum", "neg", "ones", "ones_like",
        "relu", "repeat", "roll", "scalar_tensor", "select_backward", "slice_backward", "sort", "stack", "threshold",
        "threshold_backward", "topk", "tril", "triu", "where", "zeros", "zeros_like",
    ]
)  # fmt: skip
"""Operations that choose among numbers, and round none."""
_SUMS = frozenset(
    ["sum", "mean", "var", "std", "var_mean", "cumsum", "logsumexp", "prod", "norm", "linalg_vector_norm"]
)
_SCATTERED = frozenset(["embedding_dense_backward", "index_add", "scatter_add", "index_put", "scatter_reduce"])
_PRODUCTS = frozenset(["mm", "bmm", "mv", "dot", "convolution", "convolution_backward"])
_SEQUENTIAL = 0.2
"""Standard deviation of a sum of n terms that is added up one by one, over √n · eps · size of its partial sums."""


class Scatter:
    """The gradients that rounding in a low dtype gives.

    Args:
        function: The function in float64.
        vector: Where.
        cotangent: The gradient of the outputs.
        dtype: What is rounded to.
        generator: Of the rounding.

    Attributes:
        gradients: One in each row.
        is_seen: Whether the function computes with PyTorch's operations. What a kernel does inside cannot be seen.
    """

    def __init__(
        self, function: Function, vector: Tensor, cotangent: Tensor, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self._eps, self._least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        self._generator = generator
        self._decompositions = decompositions(_FUSED)
        exact = function.gradient(vector, cotangent)
        first = self._run(function, vector, cotangent)
        size = exact.abs().nan_to_num(0.0, 0.0, 0.0)
        self.is_seen = bool(((first - exact).abs().nan_to_num(0.0, 0.0, 0.0) > self._eps / 50 * size).any())
        runs = [
            self._run(function, self._rounded(vector), self._rounded(cotangent))
            for _ in range(_RUNS if self.is_seen else 0)
        ]
        self.gradients = torch.stack([first, *runs])

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
        lost = self._lost_in_sums(name, operation, args, kwargs)
        if isinstance(result, Tensor):
            return self._rounded(result, lost(result, 0))
        if isinstance(result, tuple | list):
            return type(result)(
                self._rounded(one, lost(one, i)) if isinstance(one, Tensor) else one for i, one in enumerate(result)
            )
        return result

    def _rounded(self, values: Tensor, lost: Tensor | float = 0.0) -> Tensor:
        if values.dtype not in (torch.float64, torch.complex128) or values.numel() == 0:
            return values
        steps = torch.view_as_real(values).clone() if values.is_complex() else values
        drawn = torch.rand(steps.shape, generator=self._generator, dtype=torch.float64).to(steps.device) * 2 - 1
        noise = drawn * (steps.abs() * (self._eps / 2) + self._least)
        if isinstance(lost, Tensor) and lost.shape == steps.shape:
            normal = torch.randn(steps.shape, generator=self._generator, dtype=torch.float64).to(steps.device)
            noise = noise + normal * lost
        steps = torch.where(noise.isfinite(), steps + noise, steps)
        return torch.view_as_complex(steps) if values.is_complex() else steps

    def _lost_in_sums(
        self, name: str, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Tensor, int], Tensor | float]:
        """Return what gives the standard deviation of a result that was added up in the low dtype."""
        given = [one for one in args if isinstance(one, Tensor)]
        if name in _SUMS and given and given[0].is_floating_point():
            squares = operation(given[0].square(), *args[1:], **kwargs) if name in ("sum", "mean", "cumsum") else None

            def of_sum(result: Tensor, which: int) -> Tensor | float:
                if not result.is_floating_point() or result.numel() == 0:
                    return 0.0
                terms = max(1.0, given[0].numel() / result.numel()) if name != "cumsum" else given[0].shape[args[1]]
                size = result.abs()
                if squares is not None:
                    size = size + (squares / (terms if name == "mean" else 1.0)).sqrt()
                return _SEQUENTIAL * self._eps * math.sqrt(terms) * size

            return of_sum
        if name in _SCATTERED:
            indices = [one for one in tree_leaves(args) if isinstance(one, Tensor) and one.dtype is torch.int64]
            counted = [one.flatten().bincount() for one in indices if one.numel() and one.min() >= 0]
            terms = max((int(counts.max()) for counts in counted), default=1)
            squared = [one.square() if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
            scattered = operation(*squared, **kwargs)
            return lambda result, which: _SEQUENTIAL * self._eps * math.sqrt(terms) * (scattered.sqrt() + result.abs())
        if name in _PRODUCTS and all(one.is_floating_point() for one in given):
            squared = [one.square() if isinstance(one, Tensor) else one for one in args]
            squares = operation(*squared, **kwargs)

            def of_product(result: Tensor, which: int) -> Tensor | float:
                own = squares[which] if isinstance(squares, tuple | list) else squares
                terms = given[0].numel() * given[1].numel() / max(1, result.numel())
                terms = math.sqrt(terms) if name in ("mm", "bmm", "mv", "dot") else max(one.numel() for one in given)
                return _SEQUENTIAL * self._eps * math.sqrt(terms) * (own.sqrt() + result.abs())

            return of_product
        return lambda result, which: 0.0
