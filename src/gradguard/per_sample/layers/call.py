"""What a layer's rule is given: one call of the layer, and the gradients of what it returned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import tree_leaves


class BatchAxis(NamedTuple):
    """Where the samples lie in a tensor.

    Attributes:
        dim: The dimension.
        last: The samples vary fastest there, as in a ``[T, B]`` block flattened to ``[T * B]``. Otherwise sample i
            owns one contiguous stretch, as in ``[B, T]`` flattened to ``[B * T]``.
        flattened: Each sample has several entries there, or may have.
    """

    dim: int
    last: bool = False
    flattened: bool = False


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        module: The layer.
        args: Its positional arguments; tensors are detached, otherwise as the layer got them.
        kwargs: Its keyword arguments, likewise.
        outputs: Tensor leaves of what it returned, in `tree_leaves` order, detached; None where a rule does not ask.
        grads: The gradient of each of ``outputs``; None where none came.
        batch_size: Number of samples B.
        axes: The batch axis of each tensor leaf of ``(args, kwargs)``; None where a leaf does not depend on samples.
        grad_axes: The same of each of ``outputs``.
        wanted: Names of the layer's parameters that are trained, such as ``"weight"`` or ``"out_proj.weight"``.
        generator_state: The state of the device's random generator before the call; None where a rule does not ask.
        precision: Machine epsilon of the autocast that it ran under; 0 for none.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor | None]
    grads: list[Tensor | None]
    batch_size: int
    axes: list[BatchAxis | None]
    grad_axes: list[BatchAxis | None]
    wanted: frozenset[str] = frozenset()
    generator_state: Tensor | None = field(default=None, repr=False)
    precision: float = 0.0

    def input(self) -> Tensor:
        """Return the first tensor argument with the samples first: ``[B, ...]``; see `samples_first`."""
        tensors = [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]
        return samples_first(tensors[0], self._axis(self.axes[0]), self.batch_size)

    def grad(self) -> Tensor:
        """Return the gradient of the first output with the samples first: ``[B, ...]``.

        Raises:
            UnsupportedGradientError: If no gradient came.
        """
        if self.grads[0] is None:
            raise UnsupportedGradientError(f"no gradient reached the output of {type(self.module).__name__}.")
        return samples_first(self.grads[0], self._axis(self.grad_axes[0]), self.batch_size)

    def _axis(self, axis: BatchAxis | None) -> BatchAxis:
        if axis is None:
            raise UnsupportedGradientError(f"{type(self.module).__name__} got an input that no sample owns.")
        return axis


def samples_first(values: Tensor, axis: BatchAxis, batch_size: int) -> Tensor:
    """Return ``values`` as ``[B, ...]``.

    A dimension that holds k entries for each sample (a flattened ``[B, T]``) becomes two, ``[B, k]``: so the input
    ``[B * T, d]`` of a linear layer becomes ``[B, T, d]``.
    """
    size = values.shape[axis.dim]
    if batch_size and size != batch_size:
        shape = (size // batch_size, batch_size) if axis.last else (batch_size, size // batch_size)
        values = values.unflatten(axis.dim, shape)
        return values.movedim(axis.dim + 1, 0) if axis.last else _first_two(values, axis.dim)
    return values.movedim(axis.dim, 0)


def _first_two(values: Tensor, dim: int) -> Tensor:
    return values if dim == 0 else values.movedim((dim, dim + 1), (0, 1))


def positions(values: Tensor) -> Tensor:
    """Return ``[B, ..., d]`` as ``[B, T, d]``, all dimensions between flattened into positions; T = 1 if none."""
    if values.dim() == 2:
        return values.unsqueeze(1)
    return values.flatten(1, -2)


def empty_like_parameter(parameter: Tensor, batch_size: int) -> Tensor:
    """Return zeros ``[B, *shape]`` in the dtype that is computed with."""
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    return torch.zeros(batch_size, *parameter.shape, dtype=dtype, device=parameter.device)
