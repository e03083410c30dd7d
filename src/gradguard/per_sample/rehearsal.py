"""Tries out, before the first call of each kind and size, whether per-sample gradients will be right.

Two of its samples are run together, in both orders, as the clipper sees them, and each by itself, with plain autograd;
both get the same random gradient of the output, so no loss function is needed. This runs in float64 where the model
can, so that what is compared is the structure and not rounding; each parameter of each sample is compared by its own
norm. Plain gradients of the layers are not made for it: the gradients of the samples by themselves are more than their
sum.

Then the whole batch is run, from its last sample to its first, and a batch of copies, whose samples must return what
they return by themselves: so a capacity, or anything else that depends on how many there are, or on which comes first,
is found. What is compared there are outputs; a wrong gradient behind right outputs shows in the two samples.

What cannot be followed layer by layer is tried again sample by sample; what fails there too is refused.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Arguments, Skeleton, to_float64
from gradguard.per_sample.call_tracker import CallTracker, LastCall
from gradguard.per_sample.contributions import Contribution, exact_products, real_parts, wide
from gradguard.per_sample.dry_run import Slot, WithoutDropout
from gradguard.per_sample.layer_plans import CallPattern
from gradguard.per_sample.rerun import Draws, substituted, undisturbed, without_graph
from gradguard.per_sample.sample_loop import not_the_reduction, rows_of, same_rows
from gradguard.tensors.layout import wide_dtype
from gradguard.torch_private import buffer_slots, parameter_slots

_LARGEST_IN_FLOAT64 = 1 << 30
"""Bytes of float64 copies of a model that are made for the trial."""

_MOST_ALONE = 4
"""Samples of the whole batch that are run by themselves."""


@dataclass(frozen=True)
class Comparison:
    """How far the per-sample gradients are from those of single samples.

    Attributes:
        largest: Largest error of a parameter's gradient in one sample, relative to its own norm there; a hundred times
            smaller if it is small beside the sample's whole gradient.
        parameter: The name of the parameter where it is.
        excess: That error as a multiple of what rounding explains.
    """

    largest: float
    parameter: str
    excess: float


class Rehearsal:
    """Tries out calls of a new kind or size.

    Args:
        reduction: What the loss is over samples, ``"mean"`` or ``"sum"``.
        only_warn: Warn of what cannot be verified, and go on.
    """

    def __init__(self, reduction: str, only_warn: bool = False) -> None:
        self._reduction, self._only_warn = reduction, only_warn

    def __call__(self, tracker: CallTracker, call: LastCall) -> None:
        """Try out one call.

        Raises:
            UnsupportedGradientError: If its per-sample gradients are not those of the samples by themselves.
        """
        if tracker.planner.sharded:
            return  # a second run would be a collective
        try:
            self._try(tracker, call)
        except UnsupportedGradientError as error:
            if not self._only_warn:
                tracker.planner.forget()
                raise
            warnings.warn(f"gradguard could not verify the model, and goes on: {error}", stacklevel=6)
            call.pattern.sizes.add(call.batch_size)

    def _try(self, tracker: CallTracker, call: LastCall) -> None:
        pattern = call.pattern
        trials = [self._try_pair] if not pattern.sizes else []
        for trial in [*trials, self._try_size] if call.batch_size > 1 else trials:
            if not pattern.looped:
                try:
                    trial(tracker, call)
                    continue
                except Exception as error:
                    tracker.planner.run_one_by_one(pattern, call.arguments, call.batch_size, _words_of(error))
                    pattern.sizes.clear()
            try:
                trial(tracker, call)
            except Exception as error:
                words = _words_of(error)
                if words in pattern.reason:
                    raise UnsupportedGradientError(words) from error
                raise UnsupportedGradientError(
                    f"{pattern.reason} Nor can samples be run one by one: {words}"
                ) from error

    def _try_pair(self, tracker: CallTracker, call: LastCall) -> None:
        samples = _finite_samples(tracker, call, min(2, call.batch_size))
        found = compare(tracker, call, samples, self._reduction, note=True)
        if found is not None and found.excess <= 1 and call.batch_size > 1 and not call.pattern.looped:
            # A layer may get samples in an order that depends on their values, and give them back in theirs.
            found = compare(tracker, call, samples[::-1], self._reduction)
        if found is None:
            raise UnsupportedGradientError(
                f"no tensor can be seen in what {type(call.pattern.module).__name__} returns that grows with the "
                "number of samples or is a loss, so nothing can be compared. Return tensors, tuples, lists or dicts."
            )
        if found.excess > 1:
            raise UnsupportedGradientError(
                f"the per-sample gradient of {found.parameter} is not what the sample gives by itself (relative error "
                f"{found.largest:.2g}). Does the model mix samples (batch statistics, x - x.mean(0), routing that "
                "looks at the batch)? Is the batch in another dimension (batch_first=False)? Nothing was clipped."
            )

    def _try_size(self, tracker: CallTracker, call: LastCall) -> None:
        """Run the whole batch, and copies of one sample beside another, and compare with samples by themselves.

        The batch runs with the clipper's hooks, because a layer may get other rows than in the trial of two samples;
        the copies run without, and without a graph: only what they return counts.

        Raises:
            UnsupportedGradientError: If a sample returns something else by itself.
        """
        size, pattern = call.batch_size, call.pattern
        last = size - 1
        spread = sorted({last - i * last // (_MOST_ALONE - 1) for i in range(_MOST_ALONE)})
        known: dict[int, list[Tensor]] = {}
        with _as_called(call, autocast=False) as reset, exact_products(), WithoutDropout():

            def run(indices: Sequence[int], hooks: bool) -> tuple[list[Tensor], Draws]:
                args, kwargs = call.samples(tracker.batch_first, indices)
                torch.manual_seed(0)
                reset()
                with (
                    tracker.collect_separately(pattern) if hooks else tracker.quietly(),
                    torch.enable_grad() if hooks else without_graph(pattern.module),
                    Draws() as draws,
                ):
                    return [t.detach() for t in Skeleton(pattern.module(*args, **kwargs)).tensors], draws

            for order, alone in ((range(last, -1, -1), spread), ([0] * last + [last], [0, last])):
                indices: Sequence[int] = order
                try:
                    together, draws = run(indices, hooks=alone is spread)
                except UnsupportedGradientError:
                    raise
                except Exception:  # the model asks for an order, as of sorted lengths
                    indices = sorted(order)
                    together, draws = run(indices, hooks=alone is spread)
                precision = max(draws.precision, pattern.precision)
                for i in alone:
                    sample = indices[i]
                    if draws.drawn or sample not in known:
                        arguments = call.samples(tracker.batch_first, [sample])
                        with tracker.quietly(), without_graph(pattern.module):
                            known[sample] = _with_draws(pattern, arguments, draws, i, size, reset)
                    for recorded, output, axis in zip(together, known[sample], pattern.output_axes, strict=True):
                        if axis is not None and not same_rows(recorded, output, axis, i, precision):
                            raise UnsupportedGradientError(
                                f"a sample gives {type(pattern.module).__name__} something else in a batch of {size} "
                                "than by itself. Does the model mix samples (batch statistics, a capacity, the largest "
                                "of the batch)? Let each sample be computed by itself. Nothing was clipped."
                            )


_NOT_FINITE = "Begin with another batch, or repair the model where it makes NaN or inf. Nothing was clipped."


def _finite_samples(tracker: CallTracker, call: LastCall, number: int) -> list[int]:
    """Return the first samples without NaN or inf, beside which any others would look right.

    Raises:
        UnsupportedGradientError: If there are fewer than ``number``.
    """
    found: list[int] = []
    for i in range(call.batch_size):
        if all(bool(t.isfinite().all()) for t in Skeleton(call.samples(tracker.batch_first, [i])).tensors):
            found.append(i)
            if len(found) == number:
                return found
    raise UnsupportedGradientError(
        f"only {len(found)} of the {call.batch_size} samples that {type(call.pattern.module).__name__} is called with "
        f"are finite: it takes {number} to see whether samples are separate. {_NOT_FINITE}"
    )


def _words_of(error: Exception) -> str:
    """Return what to say of an error that ended a trial; one that no model causes is raised again."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        raise error
    if isinstance(error, UnsupportedGradientError):
        return str(error)
    return f"gradguard could not follow the module: its trial of some samples ended in {type(error).__name__}: {error}."


def compare(
    tracker: CallTracker, call: LastCall, samples: Sequence[int], reduction: str, note: bool = False
) -> Comparison | None:
    """Return the largest error over ``samples``, run together and each by itself.

    Args:
        tracker: What follows the module.
        call: The call that the samples are taken from.
        samples: Which.
        reduction: What a number that the module returns is over samples.
        note: Take note in ``call.way`` of the precision, and of numbers that are not the mean (or sum) of samples.

    Returns:
        None if nothing that is returned can be compared.
    """
    with ExitStack() as stack:
        call, precision = stack.enter_context(_in_float64(tracker, call))
        stack.enter_context(torch.enable_grad())
        reset = stack.enter_context(_as_called(call, autocast=precision is None))
        with exact_products():
            if precision is None:
                held = map(tracker.parameter, tracker.aliases)
                dtypes = [p.dtype for p in held if p.is_floating_point() or p.is_complex()]
                dtypes += [call.autocast[1]] if call.autocast else []
                precision = max(torch.finfo(dtype).eps for dtype in dtypes)
            if note:
                call.pattern.precision = precision
            pair = _Pair(tracker, call, list(samples), reduction, precision, reset)
            found = pair.compare()
            if note:
                call.pattern.unowned |= pair.unowned()
            if found is None and pair.owned_numbers:
                return Comparison(0.0, "", 0.0)
            return found


class _Pair:
    """A few samples, run together and each by itself.

    Args:
        tracker: What follows the module.
        call: The call that the samples are taken from.
        samples: Which, in order.
        reduction: What a number that the module returns is over samples.
        precision: Machine epsilon.
        reset: Puts the module back as it was.
    """

    def __init__(
        self,
        tracker: CallTracker,
        call: LastCall,
        samples: list[int],
        reduction: str,
        precision: float,
        reset: Callable[[], None],
    ) -> None:
        self._reset = reset
        self._tracker, self._call, self._samples = tracker, call, samples
        self._reduction, self._precision = reduction, precision
        self._pattern = call.pattern
        self._together = call.samples(tracker.batch_first, samples)
        self._alone = [call.samples(tracker.batch_first, [i]) for i in samples]
        self._draws = Draws()
        self.owned_numbers: list[int] = []

    def compare(self) -> Comparison | None:
        """Compare the gradients that rows of the outputs give; None if there are none."""
        self._outputs, found, grads = self._run_together(self._random_grads)
        return self._against_alone(found, grads) if any(grad is not None for grad in grads) else None

    def unowned(self) -> dict[int, str]:
        """Return what to say of gradients of outputs that no sample owns; numbers that are the reduction are owned."""
        words = {}
        for position, (output, axis) in enumerate(zip(self._outputs, self._pattern.output_axes, strict=True)):
            if axis is not None or not output.requires_grad:
                continue
            if output.dim():
                words[position] = (
                    f"{type(self._pattern.module).__name__} returns a tensor of shape {tuple(output.shape)} for "
                    f"{len(self._samples)} samples in which no dimension is that of samples alone, and the loss uses "
                    "it: its gradient belongs to no single sample. Leave it out of the loss."
                )
            elif (said := self._number(position)) is not None:
                words[position] = said
            else:
                self.owned_numbers.append(position)
        return words

    def _number(self, position: int) -> str | None:
        """Try out a number as the loss: None if it is the mean (or sum) of what samples give by themselves."""
        values = []
        for i, arguments in enumerate(self._alone):
            with self._tracker.quietly(), without_graph(self._pattern.module), WithoutDropout():
                alone = _with_draws(self._pattern, arguments, self._draws, i, len(self._samples), self._reset)
                values.append(float(alone[position]))
        expected = sum(values) / (len(values) if self._reduction == "mean" else 1)
        recorded = float(self._outputs[position].detach())
        bar = min(1e3 * self._precision, math.sqrt(self._precision))
        if abs(recorded - expected) > bar * max(abs(expected), abs(recorded), 1e-300):
            return not_the_reduction(recorded, expected, self._reduction)

        def one(outputs: Sequence[Tensor]) -> list[Tensor | None]:
            return [torch.ones_like(o) if i == position else None for i, o in enumerate(outputs)]

        _, found, grads = self._run_together(one)
        comparison = self._against_alone(found, grads)
        if comparison.excess <= 1:
            return None
        return (
            f"the gradient of the number that {type(self._pattern.module).__name__} returns is not the "
            f"{self._reduction} of what samples give by themselves (relative error {comparison.largest:.2g} in "
            f"{comparison.parameter}): it mixes samples. Nothing was clipped."
        )

    def _random_grads(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """A random gradient for each output that grows with samples."""
        generator = torch.Generator().manual_seed(0)
        grads: list[Tensor | None] = []
        for output, axis in zip(outputs, self._pattern.output_axes, strict=True):
            if axis is None or not output.requires_grad or not (output.is_floating_point() or output.is_complex()):
                grads.append(None)
                continue
            dtype = torch.complex128 if output.is_complex() else torch.float64
            grads.append(torch.randn(output.shape, generator=generator, dtype=dtype).to(output))
        return grads

    def _run_together(
        self, choose: Callable[[Sequence[Tensor]], list[Tensor | None]]
    ) -> tuple[list[Tensor], dict[str, Contribution], list[Tensor | None]]:
        """The samples together, as the clipper sees them; its per-sample gradients."""
        module, (args, kwargs) = self._pattern.module, self._together
        torch.manual_seed(0)
        self._reset()
        # Dropout is off in backward too, where a checkpoint runs forward again, and where samples are run one by one.
        with self._tracker.collect_separately(self._pattern) as collector, WithoutDropout():
            self._draws = Draws()
            with self._draws:
                outputs = Skeleton(module(*args, **kwargs)).tensors
            grads = choose(outputs)
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            mini_batch = collector.mini_batch
            device = outputs[0].device if outputs else torch.device("cpu")
            found = mini_batch.finish(device) if mini_batch is not None else {}
        return outputs, found, grads

    def _against_alone(self, found: Mapping[str, Contribution], grads: Sequence[Tensor | None]) -> Comparison:
        worst = Comparison(0.0, "", 0.0)
        for i, arguments in enumerate(self._alone):
            expected = self._run_alone(i, arguments, grads)
            own = {name: _norm(gradient) for name, gradient in expected.items()}
            whole = math.hypot(*own.values())
            if not math.isfinite(whole):
                raise UnsupportedGradientError(
                    f"the gradient of sample {self._samples[i]} by itself is not finite, though its inputs are: "
                    f"nothing shows whether samples are separate. {_NOT_FINITE}"
                )
            for name, gradient in expected.items():
                error = _norm(wide(gradient) - found[name].rows(i, i + 1)[0]) if name in found else own[name]
                worst = max(worst, self._judge(name, error, own[name], whole), key=lambda c: c.excess)
        return worst

    def _judge(self, name: str, error: float, own: float, whole: float) -> Comparison:
        """Judge one parameter of one sample by its own norm, and by what is rounding beside the whole gradient."""
        bars = _bars(self._precision)
        allowed = bars[0] * own + bars[1] * whole
        return Comparison(error / max(own, 1e-2 * whole, 1e-300), name, error / max(allowed, 1e-300))

    def _run_alone(self, i: int, arguments: Arguments, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Plain autograd of one sample by itself: the gradients of parameters."""
        tracker, pattern = self._tracker, self._pattern
        aliases = tracker.aliases
        values = {name: tracker.parameter(name).detach().requires_grad_() for name in sorted(tracker.trained)}
        places = {place: value for name, value in values.items() for place in aliases[name]}
        with tracker.quietly(), WithoutDropout():
            outputs = _with_draws(pattern, arguments, self._draws, i, len(self._samples), self._reset, places)
        with tracker.quietly(), substituted(places), WithoutDropout():  # a checkpoint runs forward again
            parts: list[Tensor | None] = []
            for output, grad, axis in zip(outputs, grads, pattern.output_axes, strict=True):
                if grad is not None and axis is None:
                    grad = grad / len(self._samples) if self._reduction == "mean" else grad
                elif grad is not None and axis is not None:
                    grad = rows_of(grad, axis, output.shape[axis.dim], i)
                parts.append(grad)
            pairs = [(o, g) for o, g in zip(outputs, parts, strict=True) if g is not None and o.requires_grad]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return {
            name: real_parts(torch.zeros_like(value.detach()) if value.grad is None else _dense(value.grad))
            for name, value in values.items()
        }


def _with_draws(
    pattern: CallPattern,
    arguments: Arguments,
    draws: Draws,
    sample: int,
    size: int,
    reset: Callable[[], None],
    places: Mapping[Slot, Tensor] = MappingProxyType({}),
) -> list[Tensor]:
    """What a sample returns by itself, with the random numbers that it had in the batch, and ``places`` substituted."""
    for last in (False, True):
        try:
            torch.manual_seed(0)
            reset()
            with substituted(places), draws.of_sample(sample, size, last):
                return Skeleton(pattern.module(*arguments[0], **arguments[1])).tensors
        except UnsupportedGradientError:
            if last or not draws.drawn:
                raise
    raise AssertionError


@contextmanager
def _as_called(call: LastCall, autocast: bool) -> Iterator[Callable[[], None]]:
    """Run as the call ran, with dropout of layers off, and leave no trace; gives what puts the module back."""
    with undisturbed(call.pattern.module) as reset, ExitStack() as stack:
        if call.autocast:
            stack.enter_context(
                torch.autocast(*call.autocast) if autocast else torch.autocast(call.autocast[0], enabled=False)
            )
        yield reset


@contextmanager
def _in_float64(tracker: CallTracker, call: LastCall) -> Iterator[tuple[LastCall, float | None]]:
    """Let the model be in float64 in a block, if it can; give the call to make, and machine epsilon or None if not."""
    module = call.pattern.module
    places = {(m, slot): t for m in module.modules() for held in (parameter_slots(m), buffer_slots(m))
              for slot, t in held.items() if t is not None}  # fmt: skip
    floats = {id(t): t for t in places.values() if t.is_floating_point() or t.is_complex()}
    if sum(8 * t.numel() for t in floats.values()) > _LARGEST_IN_FLOAT64:
        yield call, None
        return
    copies = {key: _float64(t) for key, t in floats.items()}
    doubled = {place: copies[id(t)] for place, t in places.items() if id(t) in copies}
    other = LastCall(call.pattern, to_float64(call.arguments), call.batch_size, call.autocast)
    with substituted(doubled):
        precision = _precision_in_float64(tracker, other)
        if precision is not None:
            yield other, precision
            return
    yield call, None


def _float64(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _precision_in_float64(tracker: CallTracker, call: LastCall) -> float | None:
    """Run a sample; return the coarsest machine epsilon on the way, None if the model does not run in float64."""
    arguments = call.samples(tracker.batch_first, [0])
    try:
        with (
            tracker.quietly(),
            _as_called(call, autocast=False),
            without_graph(call.pattern.module),
            WithoutDropout(),
            Draws() as draws,
        ):
            call.pattern.module(*arguments[0], **arguments[1])
    except Exception:
        return None
    return draws.precision


def _bars(precision: float) -> tuple[float, float]:
    """What rounding may make of a parameter's gradient: shares of its own norm, and of the whole gradient's.

    Sums run in another order, through a network of some depth; rounding in the whole gradient also reaches parameters
    whose own gradient cancels to zero, such as the bias of a key.

    Returns:
        Both shares.
    """
    if precision > 1e-4:
        return 16 * precision, 4 * precision
    return 1e4 * precision, 1e2 * precision


def _norm(values: Tensor) -> float:
    dtype = None if values.is_complex() else wide_dtype(values.device)
    return float(torch.linalg.vector_norm(values, dtype=dtype))


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient
