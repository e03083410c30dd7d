"""Running a layer a second time inside backward, for layers whose parameters act in the middle of their forward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.arithmetic import wide
from gradguard.per_sample.contributions import Contribution, Kept
from gradguard.per_sample.layers.call import BatchAxis, LayerCall, empty_like_parameter, samples_first
from gradguard.torch_private import tree_leaves


def layer_name(call: LayerCall) -> str:
    """Return the layer's class for a message."""
    return type(call.module).__name__


def zeros(call: LayerCall) -> dict[str, Contribution]:
    """Return a zero gradient for each sample and each wanted parameter."""
    return {name: Kept(empty_like_parameter(call.module.get_parameter(name), call.batch_size)) for name in call.wanted}


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
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield
    else:
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            torch.get_device_module(device).set_rng_state(state, device)
            yield


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
