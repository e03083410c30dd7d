"""What a layer's rule is given: one call of the layer, the gradients of its outputs, and a second run of the call."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contribution, Materialized, wide
from gradguard.state.generators import device_state, set_device_state
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


def layer_name(call: LayerCall) -> str:
    """Return the layer's class for a message."""
    return type(call.module).__name__


def zeros(call: LayerCall) -> dict[str, Contribution]:
    """Return a zero gradient for each sample and each wanted parameter."""
    return {
        name: Materialized(empty_like_parameter(call.module.get_parameter(name), call.batch_size))
        for name in call.wanted
    }


def sample_axis(call: LayerCall, dimensions: Mapping[str, tuple[Tensor, int]], layout: str) -> BatchAxis:
    """Return how the rows of the layer's batch dimension belong to samples.

    A row is usually a sample; where a sample owns several rows (windows of an image), their number is a multiple of B.

    Args:
        call: The call.
        dimensions: Each tensor that holds samples, and the dimension where the layer takes its batch.
        layout: What decides that dimension, for the message.

    Raises:
        UnsupportedGradientError: If the samples lie elsewhere, or the tensors disagree.
    """
    leaves = [leaf for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Tensor)]
    axes = {id(leaf): axis for leaf, axis in zip(leaves, call.axes, strict=True)}
    known: set[bool] = set()
    sizes = {tensor.shape[dim] for tensor, dim in dimensions.values()}
    for name, (tensor, dim) in dimensions.items():
        axis = axes.get(id(tensor))
        if axis is not None and axis.dim % tensor.dim() != dim:
            raise UnsupportedGradientError(
                f"the samples of the {name} of {layer_name(call)} lie in dimension {axis.dim}, but {layout} takes its "
                f"batch from dimension {dim}, so samples would be mixed. Transpose the {name}, or build the layer with "
                "the other batch_first."
            )
        if axis is not None:
            known.add(axis.last)
    rows = max(sizes)
    if len(sizes) > 1 or rows % call.batch_size or (rows != call.batch_size and len(known) > 1):
        raise UnsupportedGradientError(
            f"{layer_name(call)} got {' and '.join(map(str, sorted(sizes)))} rows for {call.batch_size} samples; "
            "expected one row, or the same number of rows, for each sample in every input."
        )
    return BatchAxis(0, last=True in known)


def by_sample(values: Tensor, axis: BatchAxis, batch_size: int) -> Tensor:
    """Return ``[T, rows, d]`` as ``[B, positions, d]``: all rows of one sample are positions of it."""
    owned = samples_first(values.transpose(0, 1), axis, batch_size)
    return owned.flatten(1, 2) if owned.dim() == 4 else owned


@contextmanager
def replaying(call: LayerCall, device: torch.device, random: bool) -> Iterator[None]:
    """Compute with gradients, without autocast, and with the random numbers that the forward drew.

    Args:
        call: The call that is repeated.
        device: Where its parameters are.
        random: Whether the forward drew any.

    Raises:
        UnsupportedGradientError: If it drew numbers and the generator's state was not recorded.
    """
    if random and call.generator_state is None:
        raise UnsupportedGradientError(
            f"the dropout of {layer_name(call)} could not be repeated: the random generator's state before the forward "
            f"is not known. Set {layer_name(call)}.dropout = 0 and apply torch.nn.Dropout outside of it."
        )
    restored = _restored(call.generator_state, device) if random and call.generator_state is not None else nullcontext()
    with restored, torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _restored(state: Tensor, device: torch.device) -> Iterator[None]:
    """Put the generator into ``state``, and back afterwards."""
    before = device_state(device)
    set_device_state(device, state)
    try:
        yield
    finally:
        set_device_state(device, before)


def require_same(call: LayerCall, repeated: list[Tensor], batch_dims: list[int]) -> None:
    """Check that the forward was repeated up to rounding, sample by sample.

    Args:
        call: The call, with what it returned.
        repeated: What the second run returned.
        batch_dims: The batch dimension of each.

    Raises:
        UnsupportedGradientError: If they differ.
    """
    recorded = [output for output in call.outputs if output is not None]
    tolerance = max((rounding(output, call.precision) for output in recorded), default=0.0)
    shapes_agree = [output.shape for output in recorded] == [output.shape for output in repeated]
    pairs = zip(recorded, repeated, batch_dims, strict=False)
    if shapes_agree and all(_agree(a.movedim(dim, 0), b.movedim(dim, 0), tolerance) for a, b, dim in pairs):
        return
    raise UnsupportedGradientError(
        f"the forward of {layer_name(call)} could not be repeated: a second run in backward gave other outputs. Its "
        "parameters, inputs or mode were changed between forward and backward: call backward first. Or its dropout "
        "draws numbers that cannot be drawn again: set its dropout to 0 and use torch.nn.Dropout. Or it "
        "magnifies rounding errors until they drown its outputs, so that no gradient of it means anything."
    )


def _agree(recorded: Tensor, repeated: Tensor, tolerance: float) -> bool:
    """Whether all samples agree; one that was not finite in the forward counts as zero later, whatever it holds."""
    if not recorded.numel():
        return True
    recorded, repeated = wide(recorded).flatten(1), wide(repeated.detach()).to(wide(recorded).dtype).flatten(1)
    finite = recorded.isfinite().all(1)
    scale = recorded.abs().amax(1)
    return bool(((recorded - repeated).abs().amax(1) <= tolerance * scale)[finite].all())


def rounding(values: Tensor, least: float = 0.0) -> float:
    """Return how far two runs may differ, as a share of the sample's largest output.

    Kernels sum in another order, and a recurrence amplifies that. Accelerators multiply float32 in 10-bit mantissas
    where PyTorch allows it, as it does by default inside cuDNN.

    Args:
        values: Of the first run.
        least: Machine epsilon of what was computed in on the way.
    """
    precision = max(torch.finfo(values.dtype).eps, least)
    if not values.is_cpu and values.dtype is torch.float32:
        precision = max(2.0**-10, least)
    return min(2**11 * precision, precision**0.5)
