"""Finds state that a forward carries from call to call, and that cannot be put back before it runs again.

A sample is judged by running it alone again, from the buffers and attributes that its batch started from. A running
maximum in a global variable, a closure or another object is not put back: after the batch it holds the maximum of all
samples, and the sample alone returns what the batch returned, though the other samples decided it. So one sample runs
alone before the batch and once more after it, and must return the same both times.

A mean that the first call stores, and that later calls subtract, agrees in both runs: the first of them has stored it.
So both runs are recorded. Neither may return what it made of a tensor that an earlier forward made of its samples; and
the second must read and write values of the sample as often as the first, which otherwise has stored some.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import (
    Batch,
    Skeleton,
    changes_of,
    is_inexact,
    versions_of,
    written,
)
from gradguard.per_sample.dry_run import WithoutDropout
from gradguard.per_sample.operation_trace import OperationTrace
from gradguard.per_sample.origins import MadeOfData
from gradguard.per_sample.refusals import KEEPS, refuse_carried
from gradguard.per_sample.rerun import (
    Draws,
    Quietly,
    UntoldDrawsError,
    copied_buffers,
    frozen,
    seed_generators,
    substituted,
    undisturbed,
)
from gradguard.tensors.matmul_precision import full_float32, outside_autocast

_SEED = 0
_ATOMIC = 1e-3
"""Share of its largest value by which an output of an accelerator may differ between two runs: atomic additions."""


@contextmanager
def as_called(
    module: nn.Module, batch: Batch, autocast: tuple[str, torch.dtype] | None
) -> Iterator[Callable[[], None]]:
    """Run a block under the call's autocast, without dropout, and restore the module afterwards.

    Args:
        module: The outermost module.
        batch: The arguments of the call.
        autocast: Device type and dtype of the autocast that the call ran under, or None.

    Yields:
        A function that restores the module's state at once.
    """
    device = batch.dims[0][0].device
    context = torch.autocast(*autocast) if autocast else outside_autocast(device)
    with undisturbed(module) as reset, WithoutDropout(), context:
        yield reset


class CarriedState:
    """Runs one sample of a call alone, before the call; `check` runs it once more, after the backward.

    The second run comes after the backward, because the user's hooks may store values of the latest run for the loss.

    Args:
        module: The outermost module.
        batch: Its arguments.
        autocast: Device type and dtype of the autocast that it runs under, or None.
        quietly: A block in which the clipper's own hooks do nothing.
        trace: Returns a trace of a call with the given arguments.
        made: The tensors that forwards made of their samples.
        is_trial: Whether to run a sample that is far from the largest and the smallest of its batch, because it changes
            no running extreme; otherwise a random sample runs.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Batch,
        autocast: tuple[str, torch.dtype] | None,
        quietly: Quietly,
        trace: Callable[[Batch], OperationTrace],
        made: MadeOfData,
        is_trial: bool,
    ) -> None:
        self._module, self._batch, self._autocast, self._quietly = module, batch, autocast, quietly
        self._sample = _central(batch) if is_trial else random.Random().randrange(batch.size)
        self._attributes, self._buffers = frozen(module, buffers=False), copied_buffers(module)
        self._later = batch.alone(self._sample)  # the call may write into its arguments
        self._new_trace, self._made = trace, made
        self._returns_carried, self._stored = False, Counter[str]()
        self._parameters = versions_of(module.parameters())
        self._draws: Draws | None = None  # of a generator that nothing puts back
        self._outputs = self._run(batch.alone(self._sample))

    def check(self) -> None:
        """Compare what the sample returns after the call with what it returned before.

        Raises:
            UnsupportedGradientError: If it returns something else, or if a run used what an earlier call has stored.
        """
        first = self._stored
        refuse_carried(self._module, self._returns_carried)
        if self._outputs is None or written(self._parameters):
            return
        try:
            again = self._run(self._later)
        except UntoldDrawsError:
            return
        refuse_carried(self._module, self._returns_carried, first - self._stored)
        alike = partial(_alike, precision=1.0 if self._draws is None else self._draws.precision)
        if again is None or len(again) != len(self._outputs) or not all(map(alike, self._outputs, again)):
            raise UnsupportedGradientError(
                f"{type(self._module).__name__} returns something else for sample {self._sample} after it was called "
                f"with the batch than before: {KEEPS}"
            )

    def _run(self, batch: Batch) -> list[Tensor] | None:
        """Return the tensors that the sample alone gives from the state before the call; None where it fails.

        Raises:
            UntoldDrawsError: If it draws other random numbers than before.
            OutOfMemoryError: If there is too little memory.
        """
        buffers: dict[int, Tensor] = {}
        fresh = {place: buffers.setdefault(id(one), one.clone()) for place, one in self._buffers.items()}
        args, kwargs = batch.arguments
        trace, returned = self._new_trace(batch), None
        with (
            self._quietly(),
            as_called(self._module, self._batch, self._autocast),
            torch.enable_grad(),
            full_float32(),
        ):
            self._attributes.restore()
            draws: AbstractContextManager[object]
            if self._draws is None:
                draws = self._draws = Draws()
            else:
                draws = self._draws.of_samples([0], 1)
            try:
                with substituted(fresh), draws:
                    seed_generators(_SEED)
                    trace.resume()
                    returned = self._module(*args, **kwargs)
            except (torch.OutOfMemoryError, UntoldDrawsError):
                raise
            except Exception:  # the rehearsal reports that a sample cannot run alone
                return None
            finally:
                trace.pause()
                outputs = Skeleton(returned).tensors
                self._made.add(trace.ends(outputs))
                self._returns_carried, self._stored = trace.returns_carried, trace.origins.stored
            return [tensor.detach() for tensor in outputs]


def _central(batch: Batch) -> int:
    """Return the sample whose largest values and sums have the most central ranks, counted over all tensors."""
    columns = []
    for tensor, dim in batch.dims:
        if dim is not None and tensor.numel() and not tensor.is_complex():
            rows = tensor.detach().movedim(dim, 0).reshape(batch.size, -1).cpu().double()
            columns += [rows.abs().amax(1), rows.sum(1)]
    ranks = [values.argsort().argsort() for values in columns if bool((values != values[0]).any())]
    distances = [torch.zeros(batch.size, device="cpu"), *[(2.0 * rank - (batch.size - 1)).abs() for rank in ranks]]
    return int(torch.stack(distances).amax(0).argmin())


def _alike(before: Tensor, after: Tensor, precision: float) -> bool:
    """Return whether two runs gave the same, but for the order in which they add up.

    Args:
        before: An output of the first run.
        after: Its counterpart in the second run.
        precision: Machine epsilon of the coarsest dtype that was computed in.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if torch.equal(before, after) or not is_inexact(before):
        return True
    bar = max(4 * precision, min(64 * precision, _ATOMIC) if before.is_cpu else _ATOMIC)
    largest = float(before.abs().nan_to_num(0, 0, 0).amax())
    return torch.allclose(after, before, rtol=0.0, atol=bar * largest, equal_nan=True)


class HeldTensors:
    """Tensors before a call, which must not write into them.

    Args:
        named: Tensors, with their names.
        others: Further tensors, without a name.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], others: Iterable[Tensor] = ()) -> None:
        tensors = {id(tensor): ("a tensor in one of its attributes", tensor) for tensor in others}
        tensors |= {id(tensor): (name, tensor) for name, tensor in named}
        self._before = [(name, tensor, changes_of(tensor), _address(tensor)) for name, tensor in tensors.values()]

    def written(self) -> str | None:
        """Return the name of a tensor that holds other values than before; None if there is none."""
        for name, tensor, version, address in self._before:
            if changes_of(tensor) != version or _address(tensor) != address:
                return name
        return None


def _address(tensor: Tensor) -> int:
    """Return where the values lie: ``tensor.data = other`` changes that and not the version."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided else 0
