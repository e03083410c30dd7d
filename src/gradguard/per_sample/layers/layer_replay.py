r"""Replay: run the forward of an attention or recurrent layer a second time in backward.

All parameters of such a layer are weights and biases of linear maps inside it. The second run records the inputs A of
each map. One backward through this run computes the gradients G of the maps' results, and
:math:`g_i = \sum_t G_{it} \otimes A_{it}`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contributions, Materialized, Outer, Recomputed, wide
from gradguard.per_sample.layers.call import BatchAxis, LayerCall, by_sample, zeros
from gradguard.state.generators import device_state, set_device_state


class _Map(NamedTuple):
    """The parameters of one linear map, by name.

    Attributes:
        weight: The weight; None for a bias that is repeated for each row.
        bias: The bias; None for a map without one.
        third: The part of packed parameters (``"in_proj_weight"``) that the map uses, 0 to 2; None for the whole.
    """

    weight: str | None
    bias: str | None
    third: int | None = None


class LayerReplay:
    """The linear maps in a second run of a layer's forward.

    Tensors are ``[rows, d]``, or ``[T, rows, d]`` with time first.

    Args:
        call: The call of the layer.
    """

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._uses: dict[_Map, list[tuple[Tensor, Tensor | None]]] = defaultdict(list)

    def linear(self, values: Tensor, weight: str, bias: str | None = None, third: int | None = None) -> Tensor:
        """Apply ``torch.nn.functional.linear`` with the layer's parameters of these names, and record the map."""
        used = _Map(weight, bias, third)
        output = F.linear(values, self._rows(weight, third), None if bias is None else self._rows(bias, third))
        return self._noted(used, output, values.detach())

    def repeated(self, bias: str, rows: int) -> Tensor:
        """Return a parameter ``[1, 1, d]`` expanded to all rows, and record its use."""
        return self._noted(_Map(None, bias), self._rows(bias, None).expand(1, rows, -1), None)

    def _rows(self, name: str, third: int | None) -> Tensor:
        values = attrgetter(name)(self._call.module).detach()  # with an old-style weight_norm it is no parameter
        return values.chunk(3)[third] if third is not None and name.startswith("in_proj_") else values

    def _noted(self, used: _Map, output: Tensor, values: Tensor | None) -> Tensor:
        self._uses[used].append((output.requires_grad_(), values))
        return output

    def contributions(self, outputs: list[Tensor], axis: BatchAxis) -> Contributions:
        """Return the contributions to the wanted parameters, by one backward from the outputs of the second run."""
        call = self._call
        reached = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, call.grads, strict=True) if grad is not None]
        maps = {used: uses for used, uses in self._uses.items() if call.wanted.intersection(used[:2])}
        if not reached or not maps:
            return zeros(call)
        tensors, grads = zip(*reached, strict=True)
        targets = [output for uses in maps.values() for output, _ in uses]
        found = torch.autograd.grad(tensors, targets, grads, allow_unused=True, materialize_grads=True)
        gradients = iter(found)
        weights: dict[str, list[Outer]] = defaultdict(list)
        biases: dict[str, list[Tensor]] = defaultdict(list)
        for used, uses in maps.items():
            left = self._positions([next(gradients) for _ in uses], axis)
            if used.weight in call.wanted:
                right = self._positions([values for _, values in uses if values is not None], axis)
                weights[used.weight].append(Outer(left, right))
            if used.bias in call.wanted:
                biases[used.bias].append(wide(left).sum(1))
        contributions: Contributions = {n: b[0] if len(b) == 1 else _Stacked(b) for n, b in weights.items()}
        for name, sums in biases.items():
            shape = call.module.get_parameter(name).shape
            contributions[name] = Materialized(torch.cat(sums, 1).view(call.batch_size, *shape))
        return contributions

    def _positions(self, values: list[Tensor], axis: BatchAxis) -> Tensor:
        """Return the tensors of all uses of a map as ``[B, positions, d]``."""
        whole = values[0] if values[0].dim() == 3 else torch.stack(values)
        return by_sample(whole, axis, self._call.batch_size)


class _Stacked(Recomputed):
    """The contribution to a weight whose blocks of rows act on different inputs."""

    def __init__(self, blocks: list[Outer]) -> None:
        self._blocks, self.batch_size, self.chunk = blocks, blocks[0].batch_size, blocks[0].batch_size
        self.shape = torch.Size((sum(block.shape[0] for block in blocks), blocks[0].shape[1]))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients of samples ``start`` to ``stop``, concatenated from all blocks."""
        return torch.cat([block.rows(start, stop) for block in self._blocks], 1)

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the weighted sum, concatenated from all blocks."""
        return torch.cat([block.weighted_sum(factors, bad) for block in self._blocks])


def replayed(
    call: LayerCall, axis: BatchAxis, dropout: float, forward: Callable[[LayerReplay], list[Tensor]]
) -> Contributions:
    """Return the contribution to each wanted parameter of a layer, by running its forward again.

    Args:
        call: The call of the layer.
        axis: How rows belong to samples.
        dropout: Dropout rate of the forward; with 0 the forward drew no random numbers.
        forward: Runs the forward again; returns the tensors that the layer returned.

    Raises:
        UnsupportedGradientError: If the second run returns other outputs than the first.
    """
    device = next(call.module.parameters()).device
    replay = LayerReplay(call)
    with _random_numbers_of(call, device, dropout), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        outputs = forward(replay)
        _require_same(call, outputs)
        return replay.contributions(outputs, axis)


@contextmanager
def _random_numbers_of(call: LayerCall, device: torch.device, dropout: float) -> Iterator[None]:
    """Draw the same random numbers in a block as the forward, if it drew any."""
    if not dropout:
        yield
        return
    if call.generator_state is None:
        raise UnsupportedGradientError(
            f"the dropout of {call.name} could not be repeated: the random generator's state before the forward "
            f"is not known. Set {call.name}.dropout = 0 and apply torch.nn.Dropout outside of the layer."
        )
    before = device_state(device)
    set_device_state(device, call.generator_state)
    try:
        yield
    finally:
        set_device_state(device, before)


def _require_same(call: LayerCall, repeated: list[Tensor]) -> None:
    """Check that the second run returned the same outputs up to rounding, sample by sample.

    Raises:
        UnsupportedGradientError: If it did not.
    """
    recorded = [output for output in call.outputs if output is not None]
    if [output.shape for output in recorded] == [output.shape for output in repeated]:
        tolerance = max(_rounding(output, call.precision) for output in recorded)
        dims = [0 if axis is None else axis.dim for axis in call.grad_axes]
        pairs = zip(recorded, repeated, dims, strict=True)
        if all(_agree(a.movedim(dim, 0), b.movedim(dim, 0), tolerance) for a, b, dim in pairs):
            return
    raise UnsupportedGradientError(
        f"the forward of {call.name} could not be repeated: a second run in backward gave other outputs. Either its "
        "parameters, inputs or mode were changed between forward and backward: call backward first. Or its dropout "
        "draws numbers that cannot be drawn again: set its dropout to 0 and use torch.nn.Dropout. Or the layer "
        "amplifies rounding errors until they dominate its outputs, so its gradients are meaningless."
    )


def _agree(recorded: Tensor, repeated: Tensor, tolerance: float) -> bool:
    """Return whether all samples agree, except those that were not finite in the forward: these count as zero later."""
    if not recorded.numel():
        return True
    recorded, repeated = wide(recorded).flatten(1), wide(repeated.detach()).to(wide(recorded).dtype).flatten(1)
    finite = recorded.isfinite().all(1)
    scale = recorded.abs().amax(1)
    return bool(((recorded - repeated).abs().amax(1) <= tolerance * scale)[finite].all())


def _rounding(values: Tensor, least: float) -> float:
    """Return the largest accepted difference of two runs, relative to the sample's largest output.

    Kernels may sum in another order, and a recurrence amplifies the difference. Accelerators multiply float32 with
    10-bit mantissas where PyTorch allows it, as it does by default inside cuDNN.

    Args:
        values: The values of the first run.
        least: Machine epsilon of the autocast dtype of the call; 0 for no autocast.
    """
    precision = max(torch.finfo(values.dtype).eps, least)
    if not values.is_cpu and values.dtype is torch.float32:
        precision = max(2.0**-10, least)
    return min(2**11 * precision, precision**0.5)
