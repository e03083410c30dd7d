"""The rule of convolutions of one to three dimensions, also transposed: one kernel for all samples' weight gradients.

On a CPU each sample becomes a group of channels, so a single weight-gradient kernel returns ``[B, *shape]``, about as
fast as the ordinary weight gradient. On an accelerator, inputs are unfolded, some samples at a time, and multiplied. If
a map has few positions and a weight is large (the last layers of most networks), norms come from pairs of positions of
the unfolded input instead, without any gradient.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import (
    Contributions,
    Materialized,
    Outer,
    Recomputed,
    as_computed,
    blank_rows,
    operands,
    scale_rows,
    wide,
)
from gradguard.per_sample.layers.call import LayerCall
from gradguard.torch_private import Convolution

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PATCHES, _PATCHES_OF_ACCELERATOR = 16 << 20, 512 << 20
"""Bytes of unfolded input in memory at a time."""

_CACHE, _FEW = 2 << 20, 8
"""The most bytes that one kernel of several samples reads and writes, and the number of samples from which a kernel
takes the whole batch."""


def convolution(call: LayerCall) -> Contributions:
    """Return the contributions of a convolution, ``torch.nn.Conv1d`` to ``ConvTranspose3d``.

    Every stride, dilation, padding, padding mode and number of groups is supported.
    """
    inputs, grad = channel_frames(call)
    contributions: Contributions = {}
    if "weight" in call.wanted:
        weight = ConvolutionWeight(call.module, inputs, grad)
        contributions["weight"] = Materialized(weight.correlations()) if weight.depthwise else weight
    if "bias" in call.wanted:
        dtype = torch.float64 if grad.dtype is torch.float64 else torch.float32
        contributions["bias"] = Materialized(grad.sum(dim=[1, *range(3, grad.dim())], dtype=dtype))
    return contributions


def channel_frames(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Return the input and its output's gradient as ``[B, k, C, ...]``, with k maps for each sample (mostly one).

    Raises:
        UnsupportedGradientError: If samples are not in the first dimension of both, as for an input without a batch.
    """
    inputs, grad = call.input(), call.grad()
    axes = (call.axes[0], call.grad_axes[0])
    if any(axis is None or axis.dim != 0 for axis in axes) or call.grads[0] is None:
        name = type(call.module).__name__
        raise UnsupportedGradientError(
            f"{name} expects its samples in dimension 0, [B, C, ...]; here they are in dimension "
            f"{' and '.join(str(axis and axis.dim) for axis in axes)} of its input and output. "
            "Move them to dimension 0 before the layer, with x.movedim(dim, 0)."
        )
    if grad.dim() == call.grads[0].dim():
        return inputs.unsqueeze(1), grad.unsqueeze(1)
    return inputs, grad


class ConvolutionWeight(Recomputed):
    """Per-sample gradients of a convolution's weight.

    Args:
        module: The convolution.
        inputs: ``[B, k, C, *size]``, with k maps for each sample.
        grad: The gradient of the output, likewise.

    Attributes:
        few_positions: Whether norms from pairs of positions take less time than norms from gradients.
    """

    def __init__(self, module: Any, inputs: Tensor, grad: Tensor) -> None:
        dimensions = len(module.kernel_size)
        if grad.dim() != dimensions + 3:
            raise UnsupportedGradientError(
                f"{type(module).__name__} got a gradient of shape {tuple(grad.shape[2:])} for each map; expected a "
                f"channel dimension and {dimensions} more. Give the layer an input with a batch dimension, "
                "x.unsqueeze(0)."
            )
        self.shape, self.batch_size, self.chunk = module.weight.shape, len(grad), len(grad)
        self._inputs, self._grad, self._groups = inputs, grad, module.groups
        self._stride, self._dilation = module.stride, module.dilation
        self._transposed = isinstance(module, _TRANSPOSED)
        self._padding, self._margins = _padding(module) if not self._transposed else (module.padding, [])
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self._output_padding = _output_padding(module, inputs, grad) if self._transposed else (0,) * dimensions
        # At T(l + r) = l r both methods need equally many products for the norms of [l, r]. The measured factor 3
        # accounts for the unfolding.
        height, width = self.shape[0] // self._groups, prod(self.shape[1:])
        self.few_positions = 3 * self._positions * (height + width) <= height * width

    def squared_norms(self) -> Tensor:
        """Return the squared norms, from pairs of positions if these are few, otherwise from chunks of gradients."""
        if not (self.few_positions and self.batch_size):
            return super().squared_norms()
        chunk = self._at_once
        return torch.cat([self._ghost_norms(i, i + chunk) for i in range(0, self.batch_size, chunk)])

    @property
    def _at_once(self) -> int:
        """The number of samples that are unfolded together."""
        unfolded = 4 * self._groups * self._positions * prod(self.shape[1:])
        return max(1, (_PATCHES if self._grad.is_cpu else _PATCHES_OF_ACCELERATOR) // max(1, unfolded))

    @property
    def _disjoint(self) -> bool:
        """Whether positions' windows are disjoint and T(l + r) <= l r; a product of unfolded inputs is then faster.

        The kernel takes up to five times as long in this case, as measured. With fewer channels, unfolding takes longer
        than the kernel.
        """
        apart = all(size <= step for size, step in zip(self.shape[2:], self._stride, strict=True))
        height, width = self.shape[0], prod(self.shape[1:])
        few = self._positions * (height + width) <= height * width
        return apart and few and self._groups == 1 and not self._transposed and self._grad.is_cpu

    @property
    def depthwise(self) -> bool:
        """Whether each channel has filters of its own, and `correlations` applies: one map per sample, on the CPU."""
        own = self._groups > 1 and self.shape[1] == 1 and not self._transposed
        return own and self._inputs.shape[1] == 1 and self._grad.is_cpu and self.batch_size > 0

    def correlations(self) -> Tensor:
        """Return all samples' gradients, by convolving each input channel with the channel of the output's gradient.

        Stride and dilation swap roles. PyTorch's own weight gradient of depthwise filters, which a plain step uses,
        takes 4 to 17 times as long on the CPU. The gradients are small compared with the maps.
        """
        samples, filters = len(self._grad), self.shape[0]
        inputs = self._with_margins(wide(self._inputs).flatten(0, 2).unsqueeze(0))
        filter_of = wide(self._grad).flatten(0, 2).unsqueeze(1)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self._stride) - 1]
        gradients = convolve(
            inputs, filter_of, None, self._dilation, self._padding, self._stride, groups=samples * self._groups
        )
        for dim, length in enumerate(self.shape[2:], 2):  # a stride may skip the end of the input
            gradients = gradients.narrow(dim, 0, length)
        return gradients.reshape(samples, filters, 1, *self.shape[2:])

    @property
    def _positions(self) -> int:
        left = self._inputs if self._transposed else self._grad
        return left.shape[1] * prod(left.shape[3:])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients of samples ``start`` to ``stop``, by one kernel or by products of unfolded inputs."""
        unfolded = self._disjoint or _unfolds(self._grad)
        chunk, parts = self._at_once if unfolded else self._in_cache, list[Tensor]()
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            if unfolded:
                outer = self._outer(first, last)
                parts.append(outer.rows(0, outer.batch_size))
                continue
            # The k maps of a sample become the batch, which the kernel sums over; samples become groups of channels.
            inputs, grad = (wide(x[first:last]).transpose(0, 1).flatten(1, 2) for x in (self._inputs, self._grad))
            parts.append(self._weight_gradient(self._with_margins(inputs), grad, last - first))
        rows = torch.cat(parts) if parts else wide(self._grad).new_zeros(0)
        return rows.view(stop - start, *self.shape)

    @property
    def _in_cache(self) -> int:
        """The number of samples for one kernel: as many as fit a core's cache if these are few, otherwise all."""
        maps = prod(self._inputs.shape[1:]) + prod(self._grad.shape[1:])
        fitting = _CACHE // (4 * (maps + self.shape.numel()))
        return max(1, fitting if fitting < _FEW else self.batch_size)

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the weighted sum, by the layer's own weight-gradient kernel with scaled output gradients."""
        if len(self._grad) == 0:
            return wide(self._grad).new_zeros(self.shape)
        if self._disjoint:
            return self._outer(0, len(self._grad)).weighted_sum(factors, bad).view(self.shape)
        inputs = self._with_margins(blank_rows(self._inputs, bad).flatten(0, 1))
        return self._weight_gradient(inputs, scale_rows(self._grad, factors, bad).flatten(0, 1), 1)

    def _ghost_norms(self, start: int, stop: int) -> Tensor:
        outer = self._outer(start, stop)
        outer.ghost = True
        return outer.with_recomputed(outer.squared_norms()).view(-1, self._groups).sum(1)

    def _weight_gradient(self, inputs: Tensor, grad: Tensor, samples: int) -> Tensor:
        # Only the shape of the weight is read; its values are not.
        weight = grad.new_empty(samples * self.shape[0], *self.shape[1:])
        return torch.ops.aten.convolution_backward(
            grad,
            inputs,
            weight,
            None,
            self._stride,
            self._padding,
            self._dilation,
            self._transposed,
            self._output_padding,
            samples * self._groups,
            [False, True, False],
        )[1]

    def _with_margins(self, inputs: Tensor) -> Tensor:
        return functional.pad(inputs, self._margins, self._mode) if any(self._margins) else inputs

    def _outer(self, start: int, stop: int) -> Outer:
        """Return the contribution as outer products over positions, with one pseudo-sample for each sample and group.

        For a transposed convolution, the input and the output's gradient swap roles.
        """
        grad = self._grad[start:stop]
        grad, inputs = operands(grad, as_computed(self._inputs[start:stop], grad))
        left, right = (inputs, grad) if self._transposed else (grad, inputs)
        samples, maps, size = left.shape[0], left.shape[1], left.shape[3:]
        patches = self._patches(right.flatten(0, 1), size).unflatten(0, (samples, maps))
        patches = patches.unflatten(2, (self._groups, -1))
        places, kernel = range(4, 4 + len(size)), range(4 + len(size), patches.dim())
        height, width = self.shape[0] // self._groups, prod(self.shape[1:])
        pseudo, count = samples * self._groups, maps * prod(size)
        # Positions are last in memory, as in the maps; writing whole patches as rows would be several times slower.
        columns = patches.permute(0, 2, 3, *kernel, 1, *places).reshape(pseudo, width, count)
        rows = left.unflatten(2, (self._groups, -1)).movedim(1, 3).reshape(pseudo, height, count)
        return Outer(rows.mT, columns.mT)

    def _patches(self, values: Tensor, size: torch.Size) -> Tensor:
        """Return the window of each output position, as a view ``[N, C, *size, *kernel]`` of the padded values."""
        values = self._with_margins(values)
        zeros = [amount for amount in reversed(self._padding) for _ in range(2)]
        values = functional.pad(values, zeros) if any(zeros) else values
        for i, length in enumerate(self.shape[2:]):
            span = self._dilation[i] * (length - 1) + 1
            windows = values.unfold(2 + i, span, self._stride[i])[..., :: self._dilation[i]]
            # With an output padding there may be more windows than the transposed convolution has inputs.
            values = windows.narrow(2 + i, 0, size[i])
        return values


def _unfolds(grad: Tensor) -> bool:
    """Return whether unfolding is faster than the kernel with a group for each sample: on every device but the CPU."""
    return not grad.is_cpu


def _padding(module: Convolution) -> tuple[tuple[int, ...], list[int]]:
    """Return the padding that the kernel adds, and the padding to add before it (last dimension first, both sides)."""
    amounts: list[int] = []
    for i in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[i] * (module.kernel_size[i] - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [0, 0] if module.padding == "valid" else [int(module.padding[i])] * 2
    if module.padding_mode == "zeros" and amounts[::2] == amounts[1::2]:
        return tuple(reversed(amounts[::2])), []
    return (0,) * len(module.kernel_size), amounts


def _output_padding(module: Convolution, inputs: Tensor, grad: Tensor) -> tuple[int, ...]:
    """Return the output padding of the call, from its sizes: ``output_size=`` may have overruled the module's own."""
    return tuple(
        grad.shape[3 + i]
        - (inputs.shape[3 + i] - 1) * module.stride[i]
        + 2 * int(module.padding[i])
        - module.dilation[i] * (length - 1)
        - 1
        for i, length in enumerate(module.kernel_size)
    )
