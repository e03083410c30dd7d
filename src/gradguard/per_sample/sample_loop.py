"""Per-sample gradients from a loop that runs each sample alone: exact for every model that keeps samples separate.

The loop serves models that cannot be followed layer by layer (a position bias shared by layers, experts that get some
of the tokens, functional dropout beside bare parameters, complex parameters). The batch runs once, as always, and
backward stops at its outputs, with their gradients. Then each sample runs alone, with the random numbers that it had in
the batch. It must return the same outputs as in the batch.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import (
    Arguments,
    Batch,
    Gradients,
    Places,
    Skeleton,
    Slot,
    Versions,
    changes_of,
    is_inexact,
    promoted,
)
from gradguard.per_sample.contributions import Contribution, Contributions, Materialized, real_parts, row_squares, wide
from gradguard.per_sample.layer_plans import CallPattern
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.measured_rounding import movements_of
from gradguard.per_sample.operation_trace import OperationTrace
from gradguard.per_sample.plain_sum import Leaves, dense, magnitude, not_adding_up
from gradguard.per_sample.refusals import OWN_GENERATOR, CarriedValuesError, own_failure, refuse_carried
from gradguard.per_sample.rerun import LAYOUTS, Draws, Quietly, UntoldDrawsError, substituted, undisturbed
from gradguard.state.frozen import Frozen
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import parameter_slots, saving_hooks

_Key = TypeVar("_Key")

_FINE = 1e-4
"""Largest machine epsilon of a dtype with a wide range of exponents."""


@dataclass(frozen=True, eq=False)
class OuterCall:
    """One call of the outermost module.

    Attributes:
        pattern: How the clipper treats the call.
        batch: The arguments of the module, and the samples in them.
        autocast: Device type and dtype of the autocast that the call ran under, or None.
    """

    pattern: CallPattern
    batch: Batch
    autocast: tuple[str, torch.dtype] | None

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.batch.size

    @property
    def arguments(self) -> Arguments:
        """The arguments of the module."""
        return self.batch.arguments

    def promoted(self, dtype: torch.dtype) -> "OuterCall":
        """Return the call without autocast, with arguments promoted to at least the precision of ``dtype``."""
        return replace(self, batch=replace(self.batch, arguments=promoted(self.arguments, dtype)), autocast=None)


@dataclass(eq=False)
class LoopedCall:
    """A call that is repeated sample by sample.

    Attributes:
        call: The call that the samples are taken from.
        reduction: Relation of a returned number to the samples' own numbers: ``"mean"``, ``"sum"``, ``"token_mean"``
            or ``"share"``.
        places: The modules and attributes that hold each trained parameter.
        quietly: Makes a block in which the clipper's own hooks do nothing.
        precision: Machine epsilon of the coarsest dtype of the computation.
        order: The samples of ``call`` that ran together.
        draws: The random numbers that the call drew.
        before: The state of the module before the call.
        outputs: The tensors that the call returned, and the version of each.
        grads: The gradient of each tensor that the call returned.
        shares: The share of each sample in a mean over tokens, ``[B]``.
        scales: Factors of the outputs' gradients for each sample alone; empty for the scales of the samples' own loss.
        leaves: The plain gradients, on a step that is to be verified.
        taken: Copies of some samples' arguments from before the call, which may write into its arguments.
        recorded: The parameters with their versions; the call cannot be repeated once they have changed.
        saving: The `saving_hooks` round the call.
        trace: Records the next run; None to record none.
        measures: Whether to measure the rounding of outputs that differ, before they count as different.
        excused: Whether measured rounding has explained a difference of outputs.
    """

    call: OuterCall
    reduction: str
    places: Places
    quietly: Quietly
    precision: float
    order: Sequence[int]
    draws: Draws = field(default_factory=Draws)
    before: Frozen | None = None
    outputs: Versions = field(default_factory=list)
    grads: Gradients = ()
    leaves: Leaves | None = None
    shares: Tensor | None = None
    scales: Sequence[float] = ()
    taken: dict[int, Arguments] = field(default_factory=dict)
    recorded: Versions = field(default_factory=list)
    saving: tuple[Any, Any] | None = field(default_factory=saving_hooks)
    trace: OperationTrace | None = None
    measures: bool = True
    excused: bool = False
    _compares: bool = True
    _layout: str = ""
    _squares: dict[str, Tensor] = field(default_factory=dict)
    _sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The outermost module."""
        return self.call.pattern.module

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return len(self.order)

    def share_of(self, sample: int) -> float:
        """Return the factor of a sample's own number in a number that the module returned."""
        if self.reduction == "token_mean":
            return 0.0 if self.shares is None else float(self.shares[sample].nan_to_num(0.0))
        return 1 / self.batch_size if self.reduction == "mean" else 1.0

    def scale_of(self, sample: int) -> float:
        """Return the factor of the outputs' gradients where a sample runs alone; its own gradient is divided by it.

        The outputs then get the gradients of the sample's own loss, because a backward that is not linear depends on
        their size. In half precision the factor is 1, because larger gradients might overflow.
        """
        if self.scales:
            return self.scales[sample]
        share = self.share_of(sample)
        return 1 / share if share > 0 and self.precision <= _FINE else 1.0

    def contributions(self, budget: int) -> Contributions:
        """Return the per-sample gradients of each parameter, stored if they take at most ``budget`` bytes."""
        values = {name: _value(places) for name, places in self.places.items()}
        if self.batch_size * sum(max(4, value.element_size()) * value.numel() for value in values.values()) > budget:
            return {name: Looped(name, real_parts(value).shape, self) for name, value in values.items()}
        rows = [*self.run(range(self.batch_size))]
        return {name: Materialized(torch.stack([gradients[name] for gradients in rows])) for name in values}

    def verify(self, found: Mapping[str, Contribution]) -> None:
        """Compare the sums of per-sample gradients with the plain gradients, on a step that is to be verified.

        Raises:
            UnsupportedGradientError: If the samples' gradients do not add up to the plain gradients.
        """
        if self.leaves is None:
            return
        size = max(float(magnitude(contribution).nan_to_num(0.0, 0.0)) for contribution in found.values())
        if name := not_adding_up(found, self.leaves, self.precision, size):
            raise UnsupportedGradientError(
                f"{self.call.pattern.reason} Nor can samples be run one by one: the samples' gradients of {name} do "
                f"not add up to its plain gradient. Either a value inside {type(self.module).__name__} reaches the "
                "loss other than through its outputs (an attribute, a list, a hook), or the module mixes samples. "
                "Nothing was clipped."
            )

    def run(self, samples: Sequence[int]) -> Generator[dict[str, Tensor], None, None]:
        """Run samples one after the other, and yield their gradients.

        Yields:
            The gradient of each parameter for one sample, at least float32; complex ones as pairs of real values.

        Raises:
            UnsupportedGradientError: If a sample alone returns something else than in the batch, or a returned number
                is not the reduction of the samples' numbers.
        """
        numbers = [0.0] * len(self.outputs)
        with self.quietly(), undisturbed(self.module, drop_rate=None), torch.enable_grad():
            for sample in samples:
                yield self._run_one(sample, numbers)
        # The shares of a token mean were read from the loss's graph instead.
        if len(samples) < self.batch_size or self.reduction == "token_mean":
            return
        for (recorded, _), axis, grad, total in zip(
            self.outputs, self.call.pattern.output_axes, self.grads, numbers, strict=True
        ):
            if axis is None and grad is not None and recorded.dim() == 0:
                expected = total / (self.batch_size if self.reduction == "mean" else 1)
                bar = max(4 * self.precision, min(1e3 * self.precision, self.precision**0.5))
                if abs(float(recorded) - expected) > bar * abs(expected):
                    raise UnsupportedGradientError(not_the_reduction(float(recorded), expected, self.reduction))

    def alone(self, samples: Sequence[int]) -> list[Tensor]:
        """Run some samples without the others, with the random numbers that they had in the batch.

        Returns:
            The tensors that the module returned, which equal the samples' rows in the batch.

        Raises:
            UnsupportedGradientError: If they do not.
        """
        with self._alone(samples, {}) as (outputs, _):
            return outputs

    def weighted_alone(
        self, samples: Sequence[int], weights: Tensor, backward: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run some samples without the others, and backward from the outputs' gradients, each times a weight.

        Args:
            samples: The indices of the samples in the batch.
            weights: A number for each sample of the batch.
            backward: Whether to compute gradients.

        Returns:
            The tensors that the module returned; the sum of the samples' weighted gradients, for each parameter.

        Raises:
            UnsupportedGradientError: If the samples return something else than in the batch.
        """
        with self._alone(samples, self.places if backward else {}) as (outputs, leaves):
            roots, grads = [], []
            for output, grad, axis in zip(outputs, self.grads, self.call.pattern.output_axes, strict=True):
                if grad is None or axis is None or not output.requires_grad:
                    continue
                own = torch.empty_like(output)
                chosen = axis.split(grad, self.batch_size)[torch.tensor(samples, device=grad.device)]
                chosen.mul_(weights[samples].to(grad).view(-1, *[1] * (chosen.dim() - 1)))
                axis.split(own, len(samples)).copy_(chosen)
                roots.append(get_gradient_edge(output))
                grads.append(own)
            if roots and backward:
                with self.draws.again():
                    torch.autograd.backward(roots, grads)
            found = {name: _zeros(leaf) if leaf.grad is None else dense(leaf.grad) for name, leaf in leaves.items()}
            return [output.detach() for output in outputs], found

    @contextmanager
    def _alone(
        self, samples: Sequence[int], places: Places, moved: Mapping[int, Tensor] | None = None
    ) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
        """Run some samples with leaves in the places of parameters, until the block ends.

        Args:
            samples: The indices of the samples in the batch.
            places: The modules and attributes that hold each parameter.
            moved: How far rounding may move the samples' rows of each output; measured if outputs differ.

        Yields:
            The outputs, and the leaves by name.

        Raises:
            CarriedValuesError: If the samples use what an earlier call has made of its samples.
            UntoldDrawsError: If the samples' share of the random numbers cannot be determined.
            UnsupportedGradientError: If the outputs differ from those in the batch.
        """
        failure: UnsupportedGradientError | None = None
        layouts = LAYOUTS if self.draws.drawn and not self._layout else (self._layout or LAYOUTS[0],)
        for layout in layouts:
            args, kwargs = self.taken.get(samples[0]) or self.call.batch.samples([self.order[i] for i in samples])
            if self.before is not None:
                self.before.restore()
            leaves = {name: _value(slots).requires_grad_() for name, slots in places.items()}
            with substituted({slot: leaves[name] for name, slots in places.items() for slot in slots}):
                try:
                    with self.draws.of_samples(samples, self.batch_size, layout):
                        outputs = self._outputs(args, kwargs)
                    if self._compares:
                        self.compare(outputs, samples, moved or {})
                except CarriedValuesError:
                    raise
                except UnsupportedGradientError as error:
                    failure = failure or error
                    continue
                if self._compares:
                    self._layout = layout  # all samples of a batch share its random numbers in the same way
                yield outputs, leaves
                return
        assert failure is not None
        is_untold = isinstance(failure, UntoldDrawsError)
        if moved is None and self.measures and self._compares and not is_untold:
            moved = self.movements_of_outputs(samples)
            if any(bool(one.any()) for one in moved.values()):
                with self._alone(samples, places, moved) as found:  # anew, because measuring ran the module again
                    self.excused = True
                    yield found
                return
        if is_untold:
            raise UntoldDrawsError(f"{type(self.module).__name__}: {failure} Nothing of this step was taken.")
        raise failure

    def _differs(self, difference: str) -> str:
        drawn = (
            "It draws numbers of Python's or NumPy's generator, which cannot be divided among the samples: draw with "
            "torch.rand. "
        )
        return (
            f"{type(self.module).__name__} treats a sample alone in another way than in the batch of "
            f"{self.batch_size}: {difference}. {drawn if self.draws.drew_elsewhere else ''}Does the model mix samples "
            f"(batch statistics, x - x.mean(0), routing or a capacity that depends on the batch)? {OWN_GENERATOR} Is "
            f"the batch in another dimension (batch_first=False)?{self.call.batch.words_on_divided} Nothing was "
            "clipped."
        )

    def compare(
        self, outputs: Sequence[Tensor], samples: Sequence[int], moved: Mapping[int, Tensor] | None = None
    ) -> None:
        """Compare the outputs of some samples without the others with their outputs in the batch.

        Args:
            outputs: The tensors that the samples returned without the others.
            samples: The indices of the samples in the batch.
            moved: How far rounding may move the samples' rows of each output, if that was measured.

        Raises:
            UnsupportedGradientError: If they differ by more than rounding.
        """
        if len(outputs) != len(self.outputs):
            raise UnsupportedGradientError(self._differs("it returns other tensors"))
        for place, (output, (recorded, version), axis) in enumerate(
            zip(outputs, self.outputs, self.call.pattern.output_axes, strict=True)
        ):
            if axis is None or changes_of(recorded) != version:
                continue
            if not same_rows(recorded, output, axis, samples, self.precision, (moved or {}).get(place)):
                raise UnsupportedGradientError(self._differs("it returns other values"))

    def movements_of_outputs(self, samples: Sequence[int]) -> Mapping[int, Tensor]:
        """Return how far rounding may move each sample's rows of each output; nothing if that cannot be measured."""

        def run() -> dict[int, Tensor]:
            with self._alone(samples, {}) as (outputs, _):
                return {
                    place: wide(real_parts(axis.split(output.detach(), len(samples))))
                    for place, (output, axis) in enumerate(zip(outputs, self.call.pattern.output_axes, strict=True))
                    if axis is not None and is_inexact(output) and output.shape[axis.dim]
                }

        return self.moved(run, lambda rows: rows.flatten(1).abs().amax(1))

    def rounding_of(self, sample: int) -> dict[str, float]:
        """Return how far rounding may move the gradients that `run` yields for a sample, by parameter."""
        return self.rounding(lambda: next(iter([*self.run([sample])])))

    def rounding(self, run: Callable[[], Mapping[str, Tensor]]) -> dict[str, float]:
        """Return how far rounding may move each gradient that ``run`` computes from samples of this call alone."""
        return {name: float(size) for name, size in self.moved(run, lambda one: total_norm([one])).items()}

    def moved(
        self, run: Callable[[], Mapping[_Key, Tensor]], size: Callable[[Tensor], Tensor]
    ) -> Mapping[_Key, Tensor]:
        """Return how far rounding may move the results of ``run``, which runs samples of this call alone.

        Args:
            run: Returns results by name.
            size: The size of a difference.

        Returns:
            The sizes by name; nothing if a run failed.
        """
        before, self._compares = self._compares, False
        try:
            return movements_of(run, size)
        finally:
            self._compares = before

    def _run_one(self, sample: int, numbers: list[float]) -> dict[str, Tensor]:
        call, scale, axes = self.call, self.scale_of(sample), self.call.pattern.output_axes
        with ExitStack() as stack:
            if call.autocast:
                stack.enter_context(torch.autocast(*call.autocast))
            outputs, leaves = stack.enter_context(self._alone([sample], self.places))
            roots, grads = [], []
            for i, output in enumerate(outputs):
                grad, axis = self.grads[i], axes[i]
                if axis is not None:
                    if grad is not None:
                        grad = axis.split(grad, self.batch_size)[sample]
                elif output.dim() == 0 and output.is_floating_point() and grad is not None:
                    numbers[i] += float(output.detach())
                    grad = grad * self.share_of(sample)
                if grad is not None and output.requires_grad:
                    roots.append(get_gradient_edge(output))
                    grads.append(grad * scale)
            if roots:
                with self.draws.again():
                    torch.autograd.backward(roots, grads)
        found = {name: _zeros(leaf) if leaf.grad is None else dense(leaf.grad) for name, leaf in leaves.items()}
        return {name: gradient.div_(scale) for name, gradient in found.items()}

    def _outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Run the module; an error with one sample counts as a difference from the batch.

        Returns:
            The tensors in the module's output.

        Raises:
            UnsupportedGradientError: If the module raises an error, other than running out of memory.
        """
        trace, self.trace = self.trace, None
        try:
            with self.saved_alike(), trace or nullcontext():
                outputs = Skeleton(self.module(*args, **kwargs)).tensors
        except Exception as error:
            if isinstance(error, UnsupportedGradientError | torch.OutOfMemoryError):
                raise
            words = own_failure(error) or self._differs(f"it fails ({error})")
            raise UnsupportedGradientError(words) from error
        if trace is not None:
            trace.ends(outputs)
            refuse_carried(self.module, trace.returns_carried)
        return outputs

    def saved_alike(self) -> AbstractContextManager[object]:
        """Return a block in which operations save tensors for their backward by the functions that they did before."""
        return nullcontext() if self.saving is None else saved_tensors_hooks(*self.saving)

    def squares(self, name: str) -> Tensor:
        """Return the squared norms of one parameter's gradients, ``[B]``; one loop computes those of all parameters."""
        if not self._squares:
            found: dict[str, list[Tensor]] = {}
            for gradients in self.run(range(self.batch_size)):
                for key, gradient in gradients.items():
                    found.setdefault(key, []).append(row_squares(gradient.unsqueeze(0))[0])
            self._squares = {key: torch.stack(column) for key, column in found.items()}
        return self._squares[name]

    def sum_up(self, weights: Mapping[str, Tensor], bad: Tensor | None) -> None:
        """Compute the weighted sums of several parameters in one loop; `sum` then returns each."""
        samples = [i for i in range(self.batch_size) if bad is None or not bool(bad[i])]
        self._sums = {}
        for sample, gradients in zip(samples, self.run(samples), strict=True):
            for name, factors in weights.items():
                part = gradients[name] * factors[sample].to(gradients[name].dtype)
                self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def sum(self, name: str, factors: Tensor, bad: Tensor | None) -> Tensor:
        """Return the weighted sum of one parameter's gradients, from `sum_up` or from a loop of its own."""
        if name not in self._sums:
            self.sum_up({name: factors}, bad)
        if name in self._sums:
            return self._sums.pop(name)
        return _zeros(_value(self.places[name]))


class Looped(Contribution):
    """Per-sample gradients that a loop over samples computes again for each purpose."""

    def __init__(self, name: str, shape: torch.Size, loop: LoopedCall) -> None:
        self.name, self.loop = name, loop
        self.shape, self.batch_size = shape, loop.batch_size

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients of samples ``start`` to ``stop`` by running them."""
        return torch.stack([gradients[self.name] for gradients in self.loop.run(range(start, stop))])

    def squared_norms(self) -> Tensor:
        """Return the squared norms from the one loop for all parameters."""
        return self.loop.squares(self.name).clone()

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        """Return the sum that `sum_together` has computed, or run the loop."""
        return self.loop.sum(self.name, factors, bad)


def sum_together(contributions: Mapping[str, Contribution], weights: Mapping[str, Tensor], bad: Tensor | None) -> None:
    """Compute the weighted sums of all looped parameters in one loop for each looped call."""
    loops = {c.loop for c in contributions.values() if isinstance(c, Looped)}
    for loop in loops:
        own_weights = {n: weights[n] for n, c in contributions.items() if isinstance(c, Looped) and c.loop is loop}
        loop.sum_up(own_weights, bad)


def same_rows(
    recorded: Tensor,
    output: Tensor,
    axis: BatchAxis,
    samples: Sequence[int],
    precision: float,
    moved: Tensor | None = None,
) -> bool:
    """Return whether samples have the same rows without the others as in the batch, up to rounding.

    Args:
        recorded: A tensor that the batch returned.
        output: The tensor that ``samples`` returned without the others.
        axis: The batch axis of both tensors.
        samples: The indices of the samples in the batch, in order.
        precision: Machine epsilon of the coarsest dtype of the computation.
        moved: How far rounding may move the rows of each sample, if that was measured.
    """
    rows, rest = divmod(output.shape[axis.dim], len(samples))
    if rest or rows == 0 or recorded.shape[axis.dim] % rows:
        return output.shape[axis.dim] == recorded.shape[axis.dim] == 0
    own, output = (axis.split(each.detach(), each.shape[axis.dim] // rows) for each in (recorded, output))
    own = own[torch.tensor(samples, device=own.device)]
    if own.shape != output.shape:
        return False
    if own.is_complex():
        own, output = torch.view_as_real(own), torch.view_as_real(output)
    if not own.is_floating_point() or not own.numel():
        return True  # an index may differ by rounding, and no gradient passes through it
    own, output = wide(own).flatten(1), wide(output).flatten(1)
    tolerance = max(precision, min(1e3 * precision, precision**0.5))
    moved = own.new_zeros(len(own)) if moved is None else moved.to(own)
    bars = torch.linalg.vector_norm(own, torch.inf, dim=1) * tolerance + moved
    if bool(((torch.linalg.vector_norm(own - output, torch.inf, dim=1) <= bars) & bars.isfinite()).all()):
        return True
    # Some values may not be finite, or differ: compare element by element, by the largest finite value.
    bars = own.abs().masked_fill(~own.isfinite(), 0.0).amax(1, keepdim=True) * tolerance + moved[:, None]
    same = (own == output) | (own.isnan() & output.isnan()) | ((own - output).abs() <= bars)
    return bool(same.all())


def not_the_reduction(found: float, expected: float, reduction: str) -> str:
    """Return the message for a returned loss that is not the declared reduction of the samples' losses."""
    return (
        f"the loss that the model returns is not the {reduction} of the losses of the samples alone: expected "
        f"{expected:.6g}, got {found:.6g} ({found / (expected or math.nan):.3g} times the expected value). Is it "
        "another reduction (loss_reduction=), a mean over tokens where samples have different numbers of tokens, or "
        "divided by a number that was passed in, such as num_items_in_batch? Average within each sample first, then "
        "over samples; or let clipper.per_sample_losses compute the loss from the other outputs of the model."
    )


def _value(places: Sequence[Slot]) -> Tensor:
    module, slot = places[0]
    value = parameter_slots(module)[slot]
    assert value is not None
    return value.detach()


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(wide(real_parts(value.detach())))
