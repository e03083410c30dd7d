"""Rehearsal: verify per-sample gradients on a few samples before the first call of each kind and size.

The rehearsal runs two samples together, and the first once more behind the second, with the clipper's hooks. Then it
runs each sample alone, with plain autograd. Both runs get the same random gradient of the output, so no loss function
is needed. They run in float64 where the model can, so the comparison shows the structure and not rounding. Each
parameter's gradient in each sample is compared relative to its own norm. The plain gradients of layers are not computed
here: the gradients of single samples verify more than their sum would.

Then the rehearsal runs the whole batch, from its last sample to its first, and a batch of copies of one sample. Each
sample must return the same as alone. This finds a capacity, or anything else that depends on the number or the order of
samples. Only outputs are compared here; the two samples above have shown whether the gradients belong to the outputs.

A module that cannot be followed layer by layer is rehearsed again sample by sample. If that fails too, it is refused.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Skeleton, Slot, changes_of, is_inexact
from gradguard.per_sample.call_tracker import CallTracker
from gradguard.per_sample.carried_state import as_called
from gradguard.per_sample.comparison import Comparison, SampleGradient
from gradguard.per_sample.contributions import Contribution, Contributions
from gradguard.per_sample.refusals import own_failure
from gradguard.per_sample.rerun import Draws, frozen, substituted, without_graph
from gradguard.per_sample.sample_loop import LoopedCall, OuterCall
from gradguard.state.generators import seeded_normal
from gradguard.tensors.matmul_precision import full_float32
from gradguard.torch_private import buffer_slots, parameter_slots

_LARGEST_IN_FLOAT64 = 1 << 30
"""The most bytes of a model's float64 copy that a rehearsal makes."""

_MUCH, _LITTLE = 20, 3
"""Exponents of two by which the rehearsal scales gradients up and down; the small one is for half precision, whose
range is small."""


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
    found = compare(tracker, call, samples, note=True, opened=follows)
    if found is None:
        if call.pattern.unowned:
            raise UnsupportedGradientError(next(iter(call.pattern.unowned.values())))
        raise UnsupportedGradientError(
            f"{type(call.pattern.module).__name__} returns no tensor that grows with the number of samples or is a "
            "loss, as far as gradguard can read its outputs, so nothing can be compared. Return tensors, tuples, lists "
            "or dicts."
        )
    if found.excess > 1:
        unscaled = compare(tracker, call, samples, scaled=False)
        if unscaled is not None and unscaled.excess <= 1:
            if found.largest <= _LINEAR:
                return
            raise UnsupportedGradientError(_not_linear(call.pattern.module))
        raise UnsupportedGradientError(
            f"the per-sample gradient of {found.parameter} is not the gradient of the sample alone (relative error "
            f"{found.largest:.2g}). Does the model mix samples (batch statistics, x - x.mean(0), routing that "
            "depends on the batch)? Is the batch in another dimension (batch_first=False)?"
            f"{call.batch.words_on_divided} Nothing was clipped."
        )


def _try_size(tracker: CallTracker, call: OuterCall) -> None:
    """Run the whole batch, and as many copies of one sample, and compare the outputs with those of smaller batches.

    The batch runs with the clipper's hooks, because a layer may get other rows than in the run of two samples. The
    batch is then split into two parts, one of them with an odd number of samples. Each sample must return the same in
    its part, and the first and the last sample also alone. Each copy must return the same as the sample alone: all
    copies are routed alike, so a limited capacity would leave one of them out.

    Raises:
        UnsupportedGradientError: If a sample returns something else in a smaller batch.
    """
    module, size = call.pattern.module, call.batch_size
    first = max(1, size // 2 - (size // 2 + 1) % 2)
    if call.autocast is not None:  # under which an earlier call may have returned 16 bits
        call = call.promoted(torch.float32)
    with as_called(module, call.batch, call.autocast) as reset, full_float32():
        with tracker.collect_separately(call.pattern), torch.enable_grad():
            try:
                whole, _ = _together(tracker, call, [*reversed(range(size))], reset)
            except UnsupportedGradientError:
                raise
            except Exception:  # the model may need the samples in order, such as by sorted lengths
                whole, _ = _together(tracker, call, [*range(size)], reset)
        with tracker.quietly(), without_graph(module):
            for part in ([*range(first)], [*range(first, size)]):
                whole.alone(part)
            lone = {whole.order[place]: whole.alone([place]) for place in (0, size - 1)}
            copies, _ = _together(tracker, call, [0] * size, reset)
            if whole.draws.drawn or copies.draws.drawn:  # each copy has random numbers of its own
                copies.alone([0])
                copies.alone([size - 1])
                return
            for i in range(size):
                copies.compare(lone[0], [i])


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
    scaled: bool = True,
    alone: int | None = None,
    opened: bool = False,
) -> Comparison | None:
    """Return the largest error of the per-sample gradients of ``samples``, run together and each alone.

    Args:
        tracker: Follows the module.
        call: The call that the samples are taken from.
        samples: The indices of the samples in the call.
        note: Whether to store in ``call.pattern`` the precision, and the refusals of outputs that no sample owns.
        scaled: Whether to scale the gradients of the outputs by powers of two, to verify that the backward is linear.
        alone: The number of samples, from the first, that run alone; None for all.
        opened: Whether to change parameters and buffers whose entries are all equal: a gate that is closed at 0, or
            open at 1, would hide what it lets through later. This applies only where the model runs in float64. The
            first sample also runs once more behind the others: a layer may sort samples by their values and return
            them in order again, and a sorting cannot keep two equal samples on both sides of another.

    Returns:
        The worst comparison; None if no output can be compared.

    Raises:
        UnsupportedGradientError: If the samples cannot be run alone, or the gradient of a sample is not finite.
    """

    def compared(one: OuterCall) -> Comparison | None:
        with torch.enable_grad(), as_called(one.pattern.module, one.batch, one.autocast) as reset, full_float32():
            pair = _RehearsedPair(tracker, one, samples, reset)
            found = pair.compare(scaled, len(samples) if alone is None else alone, opened and len(samples) > 1)
            unowned = pair.unowned() if note or found is None else {}
            if note:
                one.pattern.precision = pair.precision
                one.pattern.unowned |= unowned
            return Comparison(0.0, "", 0.0) if found is None and pair.owns_number else found

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

    Attributes:
        precision: Machine epsilon of the coarsest dtype of the computation.
        owns_number: Whether the module returned a number that is the reduction of the samples' own numbers.
    """

    def __init__(
        self, tracker: CallTracker, call: OuterCall, samples: Sequence[int], reset: Callable[[], None]
    ) -> None:
        self._tracker, self._call, self._samples, self._reset = tracker, call, samples, reset
        self._reduction, self._pattern = tracker.reduction, call.pattern
        held = [tracker.parameter(name) for name in tracker.aliases]
        self.precision = max(torch.finfo(p.dtype).eps for p in held if is_inexact(p))
        self.owns_number = False

    def compare(self, scaled: bool, alone: int, both_orders: bool) -> Comparison | None:
        """Compare the gradients that result from random gradients of the outputs' rows.

        Args:
            scaled: Whether to scale the gradients of the outputs by powers of two: up, down and not at all in turn in
                the batch, and inversely for a sample alone. In a linear backward this changes no bit of the comparison.
            alone: Number of samples that run alone.
            both_orders: Whether to run the first sample once more behind the others, so it comes both before and after
                each of them.

        Returns:
            The worst comparison; None if no output has rows of samples.
        """
        loop, found = self._run(self._random_grads, scaled, once_more=both_orders)
        if all(grad is None for grad in loop.grads):
            return None
        again = both_orders and bool(loop.draws.drawn)  # the repeated sample has drawn other random numbers
        own = map(SampleGradient, loop.run(range(alone + again)))
        return self._against(loop, found, own, repeated=both_orders and not again)

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
                    "gradient belongs to no single sample. Leave it out of the loss."
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

        def compared(scaled: bool) -> Comparison:
            loop, found = self._run(one, scaled, number=True)
            alone = map(SampleGradient, loop.run(range(len(self._samples))))
            return self._against(loop, found, alone, shared=self._reduction == "token_mean")

        try:
            scaled = compared(True)
            if scaled.excess <= 1:
                return None
            comparison = compared(False)
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
        scaled: bool,
        number: bool = False,
        once_more: bool = False,
    ) -> tuple[LoopedCall, Contributions]:
        """Run the samples together, with the clipper's hooks, and backward through them.

        Args:
            choose: Returns the gradients of the outputs.
            scaled: Whether to scale these gradients.
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
            factor = 2.0 ** (_LITTLE if self.precision > 1e-4 else _MUCH) if scaled else 1.0
            # The first three places have different scales, which distinguishes the two copies of the first sample.
            scales = [factor] * len(order)
            if not number:
                scales = [(factor, 1 / factor, 1.0)[place % 3] for place in range(len(order))]
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
        worst, shares, place = Comparison(0.0, "", 0.0), 0.0, 0
        for own in alone:
            if not math.isfinite(own.whole):
                raise UnsupportedGradientError(
                    f"the gradient of sample {loop.order[place]} alone is not finite, though its inputs are, so the "
                    f"clipper cannot verify that samples are separate. {_NOT_FINITE}"
                )
            for at in (0, len(loop.order) - 1) if repeated and not place else (place,):
                expected, scale = own, loop.scales[at]
                if shared:
                    share = own.share_in(found, at) * scale
                    shares += share
                    expected = SampleGradient({name: gradient * share for name, gradient in own.parts.items()})
                worst = max(worst, expected.compare(found, at, self.precision, scale), key=lambda c: c.excess)
            place += 1
            del own, expected  # as large as the model: the next sample's take their memory
        if shared and abs(shares - 1) > 1e-3:
            return Comparison(abs(shares - 1), "the whole", math.inf)
        return worst


def _not_linear(module: nn.Module) -> str:
    return (
        f"the backward of {type(module).__name__} is not linear in the gradient that it gets: a gradient twice as "
        "large does not give twice the gradient of the weights. A sample's gradient would then depend on the number "
        "of samples in the batch and on a GradScaler. Does a hook, an error clip or an autograd.Function inside "
        "clamp, normalise or quantize the gradient? Remove it. Nothing was clipped."
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
