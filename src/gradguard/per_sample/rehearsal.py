"""Rehearsal: verify per-sample gradients on a few samples before the first call of each kind and size.

The rehearsal runs two samples together, and the first once more behind the second, with the clipper's hooks. Then it
runs each sample alone, with plain autograd. Both runs get the same random gradient of the output, so no loss function
is needed. They run in float64 where the model can, so the comparison shows the structure and not rounding. Each
parameter's gradient in each sample is compared relative to its own norm. The plain gradients of layers are not computed
here: the gradients of single samples verify more than their sum would.

Then the rehearsal runs the whole batch, from its last sample to its first, and a batch of copies of one sample. Each
sample must return the same as in a smaller batch, and in the whole batch get the same gradient. This finds a capacity,
or anything else that depends on the number or the order of samples, in forward or in backward alone. All samples'
gradients are compared at once: the sum of the clipper's per-sample gradients, each times a random number of its own,
must be the plain gradient of the same outputs in two parts of the batch.

A module that cannot be followed layer by layer is rehearsed again sample by sample. If that fails too, or if the module
is sharded, it is refused. The processes of a sharded module gather it first (`gradguard.distributed.together`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Skeleton, Slot, changes_of, is_inexact
from gradguard.per_sample.call_tracker import CallTracker
from gradguard.per_sample.carried_state import as_called
from gradguard.per_sample.comparison import Comparison, SampleGradient
from gradguard.per_sample.contributions import Contribution, Contributions, Materialized
from gradguard.per_sample.layers.call import Axes
from gradguard.per_sample.refusals import OWN_GENERATOR, own_failure
from gradguard.per_sample.rerun import Draws, frozen, substituted, without_graph
from gradguard.per_sample.sample_loop import LoopedCall, OuterCall
from gradguard.state.generators import seeded_normal
from gradguard.tensors.matmul_precision import full_float32
from gradguard.torch_private import buffer_slots, parameter_slots

_LARGEST_IN_FLOAT64 = 1 << 30
"""The most bytes of a model's float64 copy that a rehearsal makes."""

_MOST, _MUCH, _LITTLE = 60, 20, 3
"""Exponents of two by which the rehearsal scales gradients: up by the first, where nothing overflows, otherwise by the
second, and down by the second. The small one is for half precision, whose range is small."""


def rehearse(tracker: CallTracker, call: OuterCall) -> None:
    """Rehearse a call of a new kind or size.

    Raises:
        UnsupportedGradientError: If its per-sample gradients are not the gradients of the samples alone.
    """
    try:
        with full_float32():
            _try(tracker, call)
    except UnsupportedGradientError:
        tracker.planner.forget()
        raise


def _try(tracker: CallTracker, call: OuterCall) -> None:
    pattern = call.pattern
    trials = [] if pattern.sizes else [_try_pair]
    if call.batch_size > 1:
        trials.append(_try_size)
    for trial in trials:
        try:
            trial(tracker, call)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError):  # not a property of the model
                raise
            name = f"{type(error).__name__}: {error}."
            followed = f"gradguard could not follow the module: its trial run of some samples ended in {name}"
            refused = isinstance(error, UnsupportedGradientError)
            words = str(error) if refused else own_failure(error) or followed
            if not pattern.looped and not tracker.planner.sharded:
                tracker.planner.run_one_by_one(pattern, call.batch, words)
                pattern.sizes.clear()
                _try(tracker, call)
                return
            if pattern.looped and words not in pattern.reason:
                words = f"{pattern.reason} Nor can samples be run one by one: {words}"
            raise UnsupportedGradientError(words) from error


def _try_pair(tracker: CallTracker, call: OuterCall) -> None:
    number = min(2, call.batch_size)
    samples = call.batch.finite_samples(number)  # a sample with NaN or inf would hide any difference
    if len(samples) < number:
        raise UnsupportedGradientError(
            f"only {len(samples)} of the {call.batch_size} samples that {type(call.pattern.module).__name__} was "
            f"called with are finite: {number} are needed to verify that samples are separate. {_NOT_FINITE}"
        )
    follows = not call.pattern.looped  # where samples run one by one, they are compared on every step
    far = None if tracker.planner.sharded else _far_up(tracker, call, samples, follows)
    found = far
    if far is None or far.excess > 1:
        found = compare(tracker, call, samples, note=True, opened=follows)
    if found is None:
        if call.pattern.unowned:
            raise UnsupportedGradientError(next(iter(call.pattern.unowned.values())))
        raise UnsupportedGradientError(
            f"{type(call.pattern.module).__name__} returns no tensor that grows with the number of samples or is a "
            "loss, as far as gradguard can read its outputs, so nothing can be compared. Return tensors, tuples, lists "
            "or dicts. Fields of an object, such as a dataclass, are not read: return a NamedTuple with these fields."
        )
    if found.excess > 1:
        unscaled = compare(tracker, call, samples, up=0)
        if unscaled is not None and unscaled.excess <= 1:
            if found.largest <= _LINEAR:
                return
            raise UnsupportedGradientError(_not_linear(call.pattern.module))
        raise UnsupportedGradientError(_mixes(found, words=call.batch.words_on_divided))
    # In float32 `torch.matrix_exp` cannot be told from a clamp here: samples then run one by one, which is exact.
    if far is not None and far.excess > 1 and (follows or call.pattern.precision < 1e-10):
        raise UnsupportedGradientError(_not_linear(call.pattern.module))


def _far_up(tracker: CallTracker, call: OuterCall, samples: Sequence[int], opened: bool) -> Comparison | None:
    """Compare samples with gradients so large that few clamps let them pass.

    Returns:
        The worst comparison; None if it shows nothing: a linear backward may overflow, and a hook may raise an error.
    """
    try:
        found = compare(tracker, call, samples, note=True, up=_MOST, opened=opened)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        return None
    return found if found is not None and math.isfinite(found.largest) else None


def _try_size(tracker: CallTracker, call: OuterCall) -> None:
    """Compare the outputs and gradients of the whole batch with those of smaller batches.

    Rounding may open a ReLU in the batch that stays closed in a part of it, so float64 decides where gradients differ,
    and where outputs differ by no more than measured rounding.

    Raises:
        UnsupportedGradientError: If a sample has other outputs or gradients in a smaller batch.
    """
    if call.autocast is not None:  # under which an earlier call may have returned 16 bits
        call = call.promoted(torch.float32)

    def compared(one: OuterCall, up: int = _MUCH, measures: bool = True) -> tuple[Comparison, bool]:
        with torch.enable_grad(), as_called(one.pattern.module, one.batch, one.autocast) as reset, full_float32():
            pair = _RehearsedPair(tracker, one, [*reversed(range(one.batch_size))], reset, measures)
            return pair.compare_with_parts(up), pair.excused

    found, excused = compared(call, measures=False)
    if found.excess <= 1 and not excused:
        return
    found, _ = _in_full(call, compared)
    if found.excess <= 1:
        return
    unscaled, _ = _in_full(call, lambda one: compared(one, 0))
    if unscaled.excess > 1:
        raise UnsupportedGradientError(_mixes(found, call.batch_size, call.batch.words_on_divided))
    if found.largest > _LINEAR:
        raise UnsupportedGradientError(_not_linear(call.pattern.module))


def _mixes(found: Comparison, size: int = 0, words: str = "") -> str:
    where = f" in the batch of {size}" if size else ""
    return (
        f"the per-sample gradient of {found.parameter}{where} is not the gradient of the sample alone (relative error "
        f"{found.largest:.2g}). Does the model mix samples (batch statistics, x - x.mean(0), routing that depends on "
        f"the batch)? {OWN_GENERATOR} Is the batch in another dimension (batch_first=False)?{words} Nothing "
        "was clipped."
    )


def _together(
    tracker: CallTracker, call: OuterCall, order: Sequence[int], reset: Callable[[], None]
) -> tuple[LoopedCall, list[Tensor]]:
    """Run some samples of a call together.

    Args:
        tracker: Follows the module.
        call: The call.
        order: The samples, in the order in which they run.
        reset: Restores the module's state.

    Returns:
        The call of these samples, which can repeat each alone; the tensors that the module returned.
    """
    module = call.pattern.module
    reset()
    loop = tracker.looped_call(call, order)
    loop.before = frozen(module)
    args, kwargs = call.batch.samples(order)
    with Draws() as loop.draws:
        outputs = Skeleton(module(*args, **kwargs)).tensors
    loop.precision = max(loop.precision, loop.draws.precision)
    loop.outputs = [(output.detach(), changes_of(output)) for output in outputs]
    return loop, outputs


_LINEAR = 1e-6
"""The relative change of a gradient that is accepted when the gradient of the outputs is scaled: `torch.matrix_exp`
chooses its series by the size of the gradient, and truncates it at 1e-10."""
_NOT_FINITE = "Begin with another batch, or repair the model where it makes NaN or inf. Nothing was clipped."


def compare(
    tracker: CallTracker,
    call: OuterCall,
    samples: Sequence[int],
    note: bool = False,
    up: int = _MUCH,
    alone: int | None = None,
    opened: bool = False,
    outputs: bool = False,
) -> Comparison | None:
    """Return the largest error of the per-sample gradients of ``samples``, run together and each alone.

    Args:
        tracker: Follows the module.
        call: The call that the samples are taken from.
        samples: The indices of the samples in the call.
        note: Whether to store in ``call.pattern`` the precision, and the refusals of outputs that no sample owns.
        up: Exponent of two by which the gradients of some outputs are scaled, to verify that the backward is linear;
            0 to scale none.
        alone: The number of samples, from the first, that run alone; None for all.
        opened: Whether to change parameters and buffers whose entries are all equal: a gate that is closed at 0, or
            open at 1, would hide what it lets through later. This applies only where the model runs in float64. The
            first sample also runs once more behind the others: a layer may sort samples by their values and return
            them in order again, and a sorting cannot keep two equal samples on both sides of another.
        outputs: Whether each sample alone must also return the same as in the batch.

    Returns:
        The worst comparison; None if no output can be compared.

    Raises:
        UnsupportedGradientError: If the samples cannot be run alone, or the gradient of a sample is not finite.
    """

    def compared(one: OuterCall) -> Comparison | None:
        with torch.enable_grad(), as_called(one.pattern.module, one.batch, one.autocast) as reset, full_float32():
            pair = _RehearsedPair(tracker, one, samples, reset)
            found = pair.compare(up, len(samples) if alone is None else alone, opened and len(samples) > 1, outputs)
            unowned = pair.unowned() if note or found is None else {}
            if note:
                one.pattern.precision = pair.precision
                one.pattern.unowned |= unowned
            return Comparison(0.0, "", 0.0) if found is None and pair.owns_number else found

    return _in_full(call, compared, opened)


_Found = TypeVar("_Found")


def _in_full(call: OuterCall, compared: Callable[[OuterCall], _Found], opened: bool = False) -> _Found:
    """Return what ``compared`` returns for a call in float64, or in its own precision where float64 is impossible."""
    doubled = _in_float64(call.pattern.module, opened)
    if doubled is not None:
        try:
            with substituted(doubled):
                return compared(call.promoted(torch.float64))
        except UnsupportedGradientError:
            raise
        except Exception:
            pass  # the model does not run in float64, or needs more memory there
    return compared(call)


class _RehearsedPair:
    """A few samples, run together and each alone.

    Args:
        tracker: Follows the module.
        call: The call that the samples are taken from.
        samples: The indices of the samples in the call.
        reset: Restores the module's state.
        measures: Whether to measure the rounding of gradients that differ.

    Attributes:
        precision: Machine epsilon of the coarsest dtype of the computation.
        owns_number: Whether the module returned a number that is the reduction of the samples' own numbers.
        excused: Whether measured rounding has explained a difference of outputs.
    """

    def __init__(
        self,
        tracker: CallTracker,
        call: OuterCall,
        samples: Sequence[int],
        reset: Callable[[], None],
        measures: bool = True,
    ) -> None:
        self._measures, self.excused = measures, False
        self._tracker, self._call, self._samples, self._reset = tracker, call, samples, reset
        self._reduction, self._pattern = tracker.reduction, call.pattern
        held = [tracker.parameter(name) for name in tracker.aliases]
        self.precision = max(torch.finfo(p.dtype).eps for p in held if is_inexact(p))
        self.owns_number = False

    def compare(self, up: int, alone: int, both_orders: bool, outputs: bool = False) -> Comparison | None:
        """Compare the gradients that result from random gradients of the outputs' rows.

        Args:
            up: Exponent of two by which to scale the gradients of the outputs: up, down and not at all in turn in the
                batch, and inversely for a sample alone. In a linear backward this changes no bit of the comparison.
            alone: Number of samples that run alone.
            both_orders: Whether to run the first sample once more behind the others, so it comes both before and after
                each of them.
            outputs: Whether each sample alone must also return the same as in the batch.

        Returns:
            The worst comparison; None if no output has rows of samples.
        """
        loop, found = self._run(self._random_grads, up, once_more=both_orders)
        if outputs:
            loop.outputs = [(output, changes_of(output)) for output, _ in loop.outputs]
        if all(grad is None for grad in loop.grads):
            return None
        again = both_orders and bool(loop.draws.drawn)  # the repeated sample has drawn other random numbers
        with closing(loop.run(range(alone + again))) as runs:  # an error would leave the clipper's hooks silent
            return self._against(loop, found, map(SampleGradient, runs), repeated=both_orders and not again)

    def compare_with_parts(self, up: int) -> Comparison:
        """Compare the whole batch, and as many copies of one sample, with smaller batches.

        The batch runs with the clipper's hooks, because a layer may get other rows than in the run of two samples. The
        batch is then split into two parts, one of them with an odd number of samples. Each sample must return the same
        in its part, and the first and the last sample also alone. Each copy must return the same as the sample alone:
        all copies are routed alike, so a limited capacity would leave one of them out.

        Where the module is followed layer by layer, the samples' gradients in the batch are compared with the plain
        gradients of the parts, all at once: each gradient is multiplied by a random number, and they are added up.

        Returns:
            The worst comparison of gradients.

        Raises:
            UnsupportedGradientError: If a sample returns something else in a smaller batch.
        """
        choose: Callable[[Sequence[Tensor]], list[Tensor | None]] = self._random_grads
        if self._pattern.looped:  # their sum is compared on the first step of a size
            choose = _no_grads
        try:
            loop, found = self._run(choose, up)
        except UnsupportedGradientError:
            raise
        except Exception:  # the model may need the samples in order, such as by sorted lengths
            self._samples = sorted(self._samples)
            loop, found = self._run(choose, up)
        size, module = len(self._samples), self._pattern.module
        first = max(1, size // 2 - (size // 2 + 1) % 2)
        loop.outputs = [(output, changes_of(output)) for output, _ in loop.outputs]  # these are compared too
        weights = _weights(size)
        factors = (weights * torch.tensor(loop.scales, dtype=torch.float64, device="cpu")).tolist()
        backward = any(grad is not None for grad in loop.grads)
        worst, lone = Comparison(0.0, "", 0.0), dict[int, list[Tensor]]()
        with self._tracker.quietly(), nullcontext() if backward else without_graph(module):
            for place in (0, size - 1):
                lone[loop.order[place]], own = loop.weighted_alone([place], weights, backward)
                one = SampleGradient(own)
                if math.isfinite(one.whole):
                    rounding = partial(self._rounding, loop, [[place]], weights)
                    judged = one.compare(found, place, self.precision, factors[place], rounding)
                    worst = max(worst, judged, key=lambda c: c.excess)
            sums, bad = self._weighted(found, factors)
            found, self._outputs = {}, []  # frees memory for the parts
            total: dict[str, Tensor] = {}
            parts = list[list[int]]()
            for part in ([*range(first)], [*range(first, size)]):
                if bad is not None:
                    loop.alone(part)
                    part = [place for place in part if not bool(bad[place])]
                parts.append(part)
                own = loop.weighted_alone(part, weights, backward)[1] if part else {}
                for name in own:
                    total[name] = total[name].add_(own[name]) if name in total else own[name]
            rounding = partial(self._rounding, loop, [part for part in parts if part], weights)
            judged = SampleGradient(total).compare(sums, 0, self.precision, 1.0, rounding)
            worst = max(worst, judged, key=lambda c: c.excess)
        with self._tracker.quietly(), without_graph(module):
            copies, _ = _together(self._tracker, self._call, [0] * size, self._reset)
            if loop.draws.drawn or copies.draws.drawn:  # each copy has random numbers of its own
                copies.alone([0])
                copies.alone([size - 1])
                self.excused = loop.excused or copies.excused
                return worst
            for some in torch.arange(size, device="cpu").split(-(-size // 4)):  # a quarter at a time takes less memory
                repeated = _repeated(lone[0], self._pattern.output_axes, len(some))
                try:
                    copies.compare(repeated, some.tolist())
                except UnsupportedGradientError:
                    copies.compare(repeated, some.tolist(), loop.movements_of_outputs([loop.order.index(0)]))
                    loop.excused = True
        self.excused = loop.excused
        return worst

    def _rounding(self, loop: LoopedCall, parts: Sequence[Sequence[int]], weights: Tensor) -> Mapping[str, float]:
        """Return how far rounding may move the weighted sum of gradients of some parts of the batch."""
        if not self._measures:
            return {}
        each = [loop.rounding(lambda part=part: loop.weighted_alone(part, weights, True)[1]) for part in parts]
        return {name: math.fsum(one.get(name, 0.0) for one in each) for name in each[0]}

    def _weighted(self, found: Contributions, factors: Sequence[float]) -> tuple[Contributions, Tensor | None]:
        """Return the weighted sum of each parameter's per-sample gradients, and which samples are not finite.

        Args:
            found: The per-sample gradients.
            factors: One number for each sample.

        Returns:
            Each sum as the gradient of one sample; a mask of the samples that were left out, None if none was.
        """

        def added_up(bad: Tensor | None) -> Contributions:
            sums = Contributions()
            for name, contribution in found.items():
                device = self._tracker.parameter(name).device
                weights = torch.tensor(factors, dtype=torch.float32, device=device)
                each = contribution.weighted_sum(weights, None if bad is None else bad.to(device))
                sums[name] = Materialized(each.unsqueeze(0))
            return sums

        sums = added_up(None)
        if all(math.isfinite(float(one.rows(0, 1).sum())) for one in sums.values()):
            return sums, None
        squares = torch.stack([contribution.squared_norms().cpu() for contribution in found.values()])
        bad = ~squares.sum(0).isfinite()
        return added_up(bad), bad

    def unowned(self) -> dict[int, str]:
        """Return the refusals of the gradients of outputs that no sample owns, by position of the output.

        A number that is the reduction of the samples' own numbers is no such output.
        """
        words, count = {}, self._count
        for position, (output, axis) in enumerate(zip(self._outputs, self._pattern.output_axes, strict=True)):
            if axis is not None or not output.requires_grad:
                continue
            if output.dim():
                words[position] = (
                    f"{type(self._pattern.module).__name__} returns a tensor of shape {tuple(output.shape)} for "
                    f"{count} samples, in which no dimension belongs to samples alone, and the loss uses it: its "
                    "gradient belongs to no single sample. If it is the same for each sample, such as learned scales, "
                    "return it with one row for each, as scale.expand(len(x), *scale.shape); else leave it out of the "
                    "loss."
                )
            elif (refusal := self._number(position)) is not None:
                words[position] = refusal
            else:
                self.owns_number = True
        return words

    def _number(self, position: int) -> str | None:
        """Use a returned number as the loss; return a refusal, or None if it is the reduction of samples' numbers."""
        if self._reduction == "share":
            return (
                f"{type(self._pattern.module).__name__} returns a number that the loss uses, and its gradient belongs "
                "to no single sample. If it is the loss, compute it outside, from what the module returns for each "
                "token or sample. If it is a scale, such as CLIP's logit_scale, multiply by it inside the module."
            )
        if self._reduction == "token_mean" and self._pattern.looped:
            return (
                f"{type(self._pattern.module).__name__} returns the mean over its tokens as a number, and its samples "
                f"run one by one ({self._pattern.reason}), so each sample's tokens cannot be counted. "
                "Compute the loss outside, from what the module returns for each token."
            )

        def one(outputs: Sequence[Tensor]) -> list[Tensor | None]:
            return [torch.ones_like(o) if i == position else None for i, o in enumerate(outputs)]

        def compared(up: int) -> Comparison:
            loop, found = self._run(one, up, number=True)
            with closing(loop.run(range(len(self._samples)))) as runs:
                return self._against(loop, found, map(SampleGradient, runs), shared=self._reduction == "token_mean")

        try:
            scaled = compared(_MUCH)
            if scaled.excess <= 1:
                return None
            comparison = compared(0)
        except UnsupportedGradientError as error:
            return str(error)
        if comparison.excess <= 1:
            if scaled.largest <= _LINEAR:
                return None
            raise UnsupportedGradientError(_not_linear(self._pattern.module))
        return (
            f"the gradient of the number that {type(self._pattern.module).__name__} returns is not the "
            f"{self._reduction} of the gradients of the samples alone (relative error {comparison.largest:.2g} in "
            f"{comparison.parameter}): the number mixes samples. Nothing was clipped."
        )

    def _random_grads(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return a random gradient for each output with a batch axis that requires grad, and None for the others."""
        grads: list[Tensor | None] = []
        for place, (output, axis) in enumerate(zip(outputs, self._pattern.output_axes, strict=True)):
            if axis is None or not output.requires_grad or not is_inexact(output):
                grads.append(None)
            else:
                grads.append(seeded_normal(output.shape, output.dtype, output.device, place))
        return grads

    def _run(
        self,
        choose: Callable[[Sequence[Tensor]], list[Tensor | None]],
        up: int,
        number: bool = False,
        once_more: bool = False,
    ) -> tuple[LoopedCall, Contributions]:
        """Run the samples together, with the clipper's hooks, and backward through them.

        Args:
            choose: Returns the gradients of the outputs.
            up: Exponent of two by which to scale these gradients; 0 to scale none.
            number: Whether all samples have the scale of the first, as for a returned number.
            once_more: Whether the first sample also runs behind the others, with the same gradients at another scale.

        Returns:
            The call of the samples together, which can repeat each alone; their per-sample gradients.
        """
        axes, order = self._pattern.output_axes, [*self._samples, *([self._samples[0]] if once_more else ())]
        with self._tracker.collect_separately(self._pattern) as collector:
            loop, outputs = _together(self._tracker, self._call, order, self._reset)
            loop.shares = torch.ones(len(order), device="cpu")  # of tokens; `_against` finds the actual shares
            self.precision = loop.precision = max(self.precision, loop.draws.precision)
            self._outputs, self._count, loop.outputs = outputs, len(order), [(output, -1) for output, _ in loop.outputs]
            coarse = self.precision > 1e-4
            factor = 2.0 ** min(up, _LITTLE if coarse else up)
            down = 2.0 ** -min(up, _LITTLE if coarse else _MUCH)
            # The first three places have different scales, which distinguishes the two copies of the first sample.
            scales = [factor] * len(order)
            if not number:
                scales = [(factor, down, 1.0)[place % 3] for place in range(len(order))]
            loop.scales = [1 / scale for scale in scales]
            loop.grads = choose(outputs)
            if once_more:
                for grad, axis in zip(loop.grads, axes, strict=True):
                    if grad is not None and axis is not None:
                        rows = axis.split(grad, len(order))
                        rows[-1].copy_(rows[0])
            edges, scaled_grads = [], []
            for output, grad, axis in zip(outputs, loop.grads, axes, strict=True):
                if grad is None:
                    continue
                if axis is None:
                    grad = grad * scales[0]
                else:
                    grad = grad.clone()
                    for rows, scale in zip(axis.split(grad, len(order)), scales, strict=True):
                        rows.mul_(scale)
                edges.append(get_gradient_edge(output))
                scaled_grads.append(grad)
            if edges:
                torch.autograd.backward(edges, scaled_grads)
            device = outputs[0].device if outputs else torch.device("cpu")
            found = {} if collector.mini_batch is None else collector.mini_batch.finish(device)
        return loop, found

    def _against(
        self,
        loop: LoopedCall,
        found: Mapping[str, Contribution],
        alone: Iterable[SampleGradient],
        *,
        repeated: bool = False,
        shared: bool = False,
    ) -> Comparison:
        """Compare the per-sample gradients of the batch with those of single samples.

        Args:
            loop: The call of the samples together.
            found: Their per-sample gradients.
            alone: The gradients of the first samples alone; each is dropped before the next sample runs.
            repeated: Whether the last sample of the batch is the first one once more.
            shared: Whether each sample has a share of its own in a returned number; the shares must add up to 1.

        Returns:
            The worst comparison.

        Raises:
            UnsupportedGradientError: If the gradient of a sample is not finite.
        """
        worst, shares, places = Comparison(0.0, "", 0.0), 0.0, itertools.count()
        for own in alone:  # not by `enumerate`, which holds one while the next one is computed
            place = next(places)
            if not math.isfinite(own.whole):
                raise UnsupportedGradientError(
                    f"the gradient of sample {loop.order[place]} alone is not finite, though its inputs are, so the "
                    f"clipper cannot verify that samples are separate. {_NOT_FINITE}"
                )
            expected = own
            for at in (0, len(loop.order) - 1) if repeated and not place else (place,):
                scale, share = loop.scales[at], 1.0
                if shared:
                    share = own.share_in(found, at) * scale
                    shares += share
                    expected = SampleGradient({name: gradient * share for name, gradient in own.parts.items()})
                rounding = partial(_rounding_of, loop, place, abs(share))
                judged = expected.compare(found, at, self.precision, scale, rounding)
                worst = max(worst, judged, key=lambda c: c.excess)
            del own, expected
        if shared and abs(shares - 1) > 1e-3:
            return Comparison(abs(shares - 1), "the whole", math.inf)
        return worst


def _rounding_of(loop: LoopedCall, place: int, share: float) -> dict[str, float]:
    """Return how far rounding may move a multiple of the gradient of one sample alone."""
    return {name: share * size for name, size in loop.rounding_of(place).items()}


def _no_grads(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    return [None] * len(outputs)


def _repeated(outputs: Sequence[Tensor], axes: Axes, number: int) -> list[Tensor]:
    """Return the tensors that ``number`` copies of a sample return together, from those of the sample alone."""
    found = []
    for output, axis in zip(outputs, axes, strict=True):
        if axis is not None:
            shape = list(output.shape)
            shape[axis.dim] *= number
            one, output = axis.split(output, 1), output.new_empty(shape)
            axis.split(output, number).copy_(one)
        found.append(output)
    return found


def _weights(size: int) -> Tensor:
    """Return different numbers from 1 to 2 in random order, which bfloat16 represents for up to 128 samples."""
    number = max(128, 1 << (size - 1).bit_length())
    order = torch.randperm(number, generator=torch.Generator().manual_seed(size), device="cpu")
    return 1 + order[:size].double() / number


def _not_linear(module: nn.Module) -> str:
    return (
        f"the backward of {type(module).__name__} is not linear in the gradient that it gets: a gradient twice as "
        "large does not give twice the gradient of the weights. A sample's gradient would then depend on the number "
        "of samples in the batch and on a GradScaler. Does a hook, an error clip or an autograd.Function inside "
        f"clamp, normalise or quantize the gradient? Remove it. {OWN_GENERATOR} Nothing was clipped."
    )


def _in_float64(module: nn.Module, opened: bool) -> dict[Slot, Tensor] | None:
    """Return float64 copies of parameters and buffers, by module and attribute; None if they are too large."""
    places = {
        (m, slot): tensor
        for m in module.modules()
        for slot, tensor in (parameter_slots(m) | buffer_slots(m)).items()
        if tensor is not None and is_inexact(tensor)
    }
    tensors = {id(tensor): tensor for tensor in places.values()}
    if sum(8 * tensor.numel() for tensor in tensors.values()) > _LARGEST_IN_FLOAT64:
        return None
    generator = torch.Generator().manual_seed(0) if opened else None
    copies = {key: _float64(tensor, generator) for key, tensor in tensors.items()}
    return {place: copies[id(tensor)] for place, tensor in places.items()}


def _float64(tensor: Tensor, opens: torch.Generator | None) -> Tensor:
    copied = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    flat = copied.flatten()
    # The last entry first: few tensors need a pass over all of them.
    if opens is not None and bool((flat[-1:] == flat[:1]).all()) and bool((flat == flat[:1]).all()):
        copied += 0.25 * torch.rand(copied.shape, generator=opens, dtype=torch.float64, device="cpu").to(copied.device)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
