"""One call of a layer with the gradients of its outputs: the argument of the layer's rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Gradients, tensor_leaves
from gradguard.per_sample.contributions import Contributions, Materialized, wide


class BatchAxis(NamedTuple):
    """The batch axis of a tensor.

    Attributes:
        dim: The dimension.
        last: Whether the samples vary fastest in the dimension, as in ``[T, B]`` flattened to ``[T * B]``. Otherwise
            each sample has one contiguous stretch, as in ``[B, T]`` flattened to ``[B * T]``.
        flattened: Whether a sample may have several entries in the dimension.
    """

    dim: int
    last: bool = False
    flattened: bool = False

    def split(self, values: Tensor, batch_size: int) -> Tensor:
        """Return ``values`` as ``[B, ...]``, with each sample's entries in the place of the dimension."""
        sizes = (-1, batch_size) if self.last else (batch_size, -1)
        return values.unflatten(self.dim, sizes).movedim(self.dim + self.last, 0)


Axes = Sequence[BatchAxis | None]
"""The batch axis of each of some tensors; None for a tensor that belongs to no sample."""


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        module: The layer.
        args: The positional arguments of the call; tensors are detached, otherwise as the layer got them.
        kwargs: The keyword arguments, likewise.
        outputs: Tensor leaves of the layer's output, in `tree_leaves` order, detached; None for a rule that does not
            replay the layer.
        grads: The gradient of each of ``outputs``; None where autograd gave none.
        batch_size: Number of samples B.
        axes: The batch axis of each tensor leaf of ``(args, kwargs)``; None for a leaf that does not depend on samples.
        grad_axes: The batch axis of each of ``outputs``.
        wanted: Names of the layer's parameters that are trained, such as ``"weight"`` or ``"out_proj.weight"``.
        generator_state: The state of the device's random generator before the call, for a rule that replays a layer
            with dropout; otherwise None.
        precision: Machine epsilon of the autocast dtype of the call; 0 for no autocast.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor | None]
    grads: Gradients
    batch_size: int
    axes: Axes
    grad_axes: Axes
    wanted: frozenset[str] = frozenset()
    generator_state: Tensor | None = field(default=None, repr=False)
    precision: float = 0.0

    @property
    def name(self) -> str:
        """The name of the layer's class, for messages."""
        return type(self.module).__name__

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments, in the order of ``axes``."""
        return tensor_leaves((self.args, dict(self.kwargs)))

    def axis_of(self, tensor: Tensor) -> BatchAxis | None:
        """Return the batch axis of a tensor argument."""
        return next((axis for leaf, axis in zip(self.tensors, self.axes, strict=True) if leaf is tensor), None)

    def input(self) -> Tensor:
        """Return the first tensor argument with the samples first: ``[B, ...]``; see `samples_first`."""
        return samples_first(self.tensors[0], self._axis(self.axes[0]), self.batch_size)

    def grad(self) -> Tensor:
        """Return the gradient of the first output with the samples first: ``[B, ...]``.

        Raises:
            UnsupportedGradientError: If the output got no gradient.
        """
        if self.grads[0] is None:
            raise UnsupportedGradientError(f"no gradient reached the output of {self.name}.")
        return samples_first(self.grads[0], self._axis(self.grad_axes[0]), self.batch_size)

    def _axis(self, axis: BatchAxis | None) -> BatchAxis:
        if axis is None:
            raise UnsupportedGradientError(
                f"{self.name} got an input, or returned an output, without a batch dimension, which belongs to no "
                "single sample."
            )
        return axis


def samples_first(values: Tensor, axis: BatchAxis, batch_size: int) -> Tensor:
    """Return ``values`` as ``[B, ...]``.

    A dimension with k entries for each sample (a flattened ``[B, T]``) becomes two dimensions, B and k. For example,
    the input ``[B * T, d]`` of a linear layer becomes ``[B, T, d]``.
    """
    return values.movedim(axis.dim, 0) if values.shape[axis.dim] == batch_size else axis.split(values, batch_size)


def positions(values: Tensor) -> Tensor:
    """Return ``[B, ..., d]`` as ``[B, T, d]``, with all middle dimensions flattened into positions; T = 1 if none."""
    if values.dim() == 2:
        return values.unsqueeze(1)
    return values.flatten(1, -2)


def zeros(call: LayerCall) -> Contributions:
    """Return a zero gradient for each sample and each wanted parameter."""
    parameters = {name: wide(call.module.get_parameter(name).detach()) for name in call.wanted}
    return {name: Materialized(values.new_zeros(call.batch_size, *values.shape)) for name, values in parameters.items()}


def sample_axis(call: LayerCall, dimensions: Mapping[str, tuple[Tensor, int]], layout: str) -> BatchAxis:
    """Return how the rows of the layer's batch dimension belong to samples.

    Usually each sample is one row. Where a sample has several rows (windows of an image), the number of rows is a
    multiple of B.

    Args:
        call: The call.
        dimensions: Each input tensor, and the dimension that the layer takes as its batch.
        layout: The option that decides this dimension, for the message.

    Raises:
        UnsupportedGradientError: If the samples are in another dimension, or the tensors differ in their rows.
    """
    known: set[bool] = set()
    sizes = {tensor.shape[dim] for tensor, dim in dimensions.values()}
    for name, (tensor, dim) in dimensions.items():
        axis = call.axis_of(tensor)
        if axis is not None and axis.dim % tensor.dim() != dim:
            raise UnsupportedGradientError(
                f"the samples of the {name} of {call.name} are in dimension {axis.dim}, but {layout} takes its "
                f"batch from dimension {dim}, so samples would be mixed. Transpose the {name}, or build the layer with "
                "the other batch_first."
            )
        if axis is not None:
            known.add(axis.last)
    rows = max(sizes)
    if len(sizes) > 1 or rows % call.batch_size or (rows != call.batch_size and len(known) > 1):
        raise UnsupportedGradientError(
            f"{call.name} got {' and '.join(map(str, sorted(sizes)))} rows for {call.batch_size} samples; "
            "expected one row, or the same number of rows, for each sample in every input."
        )
    return BatchAxis(0, last=True in known)


def by_sample(values: Tensor, axis: BatchAxis, batch_size: int) -> Tensor:
    """Return ``[T, rows, d]`` as ``[B, positions, d]``; all rows of a sample become positions."""
    owned = samples_first(values.transpose(0, 1), axis, batch_size)
    return owned.flatten(1, 2) if owned.dim() == 4 else owned
