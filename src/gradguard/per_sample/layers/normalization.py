"""Rules of normalization within a sample: the scale's gradient is a sum of normalized input times output gradient.

Batch normalization in evaluation mode belongs here, because its running statistics are constants. In training mode its
samples share statistics; the clipper refuses it before any rule runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contributions, Materialized, wide
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.layers.convolution import channel_frames

_DIMENSIONS = ((nn.InstanceNorm1d, 3), (nn.InstanceNorm2d, 4), (nn.InstanceNorm3d, 5))


def layer_norm(call: LayerCall) -> Contributions:
    r"""Return the contributions of a ``torch.nn.LayerNorm`` with normalized inputs x̂ and output gradients G.

    The weight's gradient is :math:`g_i = \sum_t \hat x_{it} \circ G_{it}`, and the bias's :math:`\sum_t G_{it}`.
    """
    module: Any = call.module
    return layer_norm_over(call, list(module.normalized_shape), module.eps)


def layer_norm_over(call: LayerCall, shape: list[int], eps: float) -> Contributions:
    """Return the contributions of ``torch.nn.functional.layer_norm`` over the last dimensions, of ``shape``."""
    return _over_last(call, shape, lambda values: torch.native_layer_norm(values, shape, None, None, eps)[0])


def rms_norm(call: LayerCall) -> Contributions:
    """Return the contribution of a ``torch.nn.RMSNorm``; ``eps=None`` means machine epsilon of the computing dtype."""
    module: Any = call.module
    return rms_norm_over(call, list(module.normalized_shape), module.eps)


def rms_norm_over(call: LayerCall, shape: list[int], eps: float | None) -> Contributions:
    """Return the contribution of ``torch.nn.functional.rms_norm`` over the last dimensions, of ``shape``."""
    return _over_last(call, shape, lambda values: torch.rms_norm(values, shape, None, eps))


def group_norm(call: LayerCall) -> Contributions:
    """Return the contributions of a ``torch.nn.GroupNorm``: sums over positions, one number for each channel."""
    module: Any = call.module
    # torch.nn.functional.group_norm refuses a single value for each channel; here only the forward should refuse it.
    return _over_positions(call, lambda x: torch.group_norm(x, module.num_groups, None, None, module.eps, False))


def instance_norm(call: LayerCall) -> Contributions:
    """Return the contributions of a ``torch.nn.InstanceNorm1d`` to ``3d``.

    The statistics are those of each channel of a sample, or the running statistics in evaluation mode.

    Returns:
        The contributions of weight and bias.

    Raises:
        UnsupportedGradientError: If the input has no batch dimension.
    """
    module: Any = call.module
    expected = next(count for kind, count in _DIMENSIONS if isinstance(module, kind))
    grad = call.grads[0]
    if grad is not None and grad.dim() != expected:
        raise UnsupportedGradientError(
            f"{call.name} got an output of shape {tuple(grad.shape)}; expected {expected} dimensions, "
            "[B, C, ...]. Give the layer an input with a batch dimension, x.unsqueeze(0)."
        )
    if module.training or module.running_mean is None or module.running_var is None:
        return _over_positions(call, lambda x: torch.group_norm(x, x.shape[1], None, None, module.eps, False))
    return batch_norm(call)


def batch_norm(call: LayerCall) -> Contributions:
    """Return the contributions of a ``torch.nn.BatchNorm1d`` to ``3d`` in evaluation mode, with running statistics."""
    module: Any = call.module
    mean, variance = wide(module.running_mean), wide(module.running_var)
    return _over_positions(call, lambda x: functional.batch_norm(x, mean, variance, eps=module.eps))


def _over_last(call: LayerCall, shape: list[int], normalise: Callable[[Tensor], Tensor]) -> Contributions:
    for axis in (call.axes[0], call.grad_axes[0]):
        if axis is not None and call.grads[0] is not None and axis.dim >= call.grads[0].dim() - len(shape):
            raise UnsupportedGradientError(
                f"{call.name} normalises over its last {len(shape)} dimensions, and the samples are "
                f"in one of them, dimension {axis.dim}, so they share one mean. Move them to the front before the "
                "layer, x.movedim(dim, 0)."
            )
    grad = wide(call.grad())
    return _affine(call, lambda: normalise(wide(call.input())), grad, range(1, grad.dim() - len(shape)))


def _over_positions(call: LayerCall, normalise: Callable[[Tensor], Tensor]) -> Contributions:
    inputs, grad = channel_frames(call)
    over = [1, *range(3, grad.dim())]
    normalised = lambda: normalise(wide(inputs).flatten(0, 1)).unflatten(0, inputs.shape[:2])  # noqa: E731
    return _affine(call, normalised, wide(grad), over)


def _affine(call: LayerCall, normalised: Callable[[], Tensor], grad: Tensor, over: Sequence[int]) -> Contributions:
    """Return the contributions of a weight and a bias of normalized inputs, summed over the dimensions ``over``."""
    factors = {"weight": lambda: normalised().mul_(grad), "bias": lambda: grad}
    values = {name: factor() for name, factor in factors.items() if name in call.wanted}
    return {name: Materialized(each.sum(list(over)) if over else each) for name, each in values.items()}
