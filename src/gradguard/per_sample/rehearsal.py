"""Tries out, before the first call of each kind and size, whether per-sample gradients will be right.

Two of its samples are run together, as the clipper sees them, and each by itself, with plain autograd; both get the
same random gradient of the output, so no loss function is needed. Then the whole batch is run, and a batch of copies,
whose samples must give what they give by themselves: so a capacity, or anything else that depends on how many there
are, is found. Everything runs in float64 where the model can, so that what is compared is the structure and not
rounding; each parameter of each sample is compared by its own norm.

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
from gradguard.per_sample.arithmetic import exact_products, real_parts, row_squares, wide
from gradguard.per_sample.contributions import Contribution
from gradguard.per_sample.draws import Draws
from gradguard.per_sample.dry_run import Slot, WithoutDropout
from gradguard.per_sample.following import Following, LastCall
from gradguard.per_sample.sample_loop import not_the_reduction, rows_of, same_rows
from gradguard.per_sample.samples import Arguments, to_float64
from gradguard.per_sample.substitution import substituted
from gradguard.per_sample.trees import Skeleton
from gradguard.per_sample.undisturbed import undisturbed
from gradguard.per_sample.way import Way
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

    def __call__(self, following: Following, call: LastCall) -> None:
        """Try out one call.

        Raises:
            UnsupportedGradientError: If its per-sample gradients are not those of the samples by themselves.
        """
        if following.planning.sharded:
            return  # a second run would be a collective
        try:
            self._try(following, call)
        except UnsupportedGradientError as error:
            if not self._only_warn:
                following.planning.forget()
                raise
            warnings.warn(f"gradguard could not verify the model, and goes on: {error}", stacklevel=6)
            call.way.sizes.add(call.batch_size)

    def _try(self, following: Following, call: LastCall) -> None:
        way = call.way
        if not way.sizes:
            if not way.looped:
                try:
                    self._try_pair(following, call)
                except _CAUGHT as error:
                    _raise_what_no_model_causes(error)
                    following.planning.loop(way, call.arguments, call.batch_size, str(error))
            if way.looped:
                try:
                    self._try_pair(following, call)
                except _CAUGHT as error:
                    _raise_what_no_model_causes(error)
                    if isinstance(error, UnsupportedGradientError) and str(error) in way.reason:
                        raise
                    raise UnsupportedGradientError(
                        f"{way.reason} Nor can samples be run one by one: {error}"
                    ) from error
        if call.batch_size > 1:
            if not way.looped:
                try:
                    self._try_size(following, call)
                    return
                except _CAUGHT as error:
                    _raise_what_no_model_causes(error)
                    following.planning.loop(way, call.arguments, call.batch_size, str(error))
                    way.sizes.clear()
            self._try_size(following, call)

    def _try_pair(self, following: Following, call: LastCall) -> None:
        found = compare(following, call, [0, 1] if call.batch_size > 1 else [0], self._reduction, note=True)
        if found is None:
            raise UnsupportedGradientError(
                f"no tensor can be seen in what {type(call.way.module).__name__} returns that grows with the number of "
                "samples or is a loss, so nothing can be compared. Return tensors, tuples, lists or dicts."
            )
        if found.excess > 1:
            raise UnsupportedGradientError(
                f"the per-sample gradient of {found.parameter} is not what the sample gives by itself (relative error "
                f"{found.largest:.2g}). Does the model mix samples (batch statistics, x - x.mean(0), routing that "
                "looks at the batch)? Is the batch in another dimension (batch_first=False)? Nothing was clipped."
            )

    def _try_size(self, following: Following, call: LastCall) -> None:
        """Run the whole batch, and copies of one sample beside another, and compare with samples by themselves."""
        size, way = call.batch_size, call.way
        spread = sorted({i * (size - 1) // (_MOST_ALONE - 1) for i in range(_MOST_ALONE)})
        copies = [0] * (size - 1) + [size - 1]
        with _as_called(call, autocast=False) as reset, exact_products():
            for indices, alone in ((list(range(size)), spread), (copies, [0, size - 1])):
                arguments = call.samples(following.batch_first, indices)
                torch.manual_seed(0)
                reset()
                # With its hooks, as the clipper sees it: a layer may get other rows than in the trial of two samples.
                with following.apart(way), torch.enable_grad(), Draws() as draws:
                    together = Skeleton(way.module(*arguments[0], **arguments[1])).tensors
                precision = max(draws.precision, way.precision)
                for i in alone:
                    arguments = call.samples(following.batch_first, [indices[i]])
                    with following.quietly(), torch.no_grad():
                        outputs = _with_draws(way, arguments, draws, i, size, reset)
                    for recorded, output, axis in zip(together, outputs, way.output_axes, strict=True):
                        if axis is not None and not same_rows(recorded, output, axis, i, precision):
                            raise UnsupportedGradientError(
                                f"a sample gives {type(way.module).__name__} something else in a batch of {size} than "
                                "by itself. Does the model mix samples (batch statistics, a capacity, the largest of "
                                "the batch)? Let each sample be computed by itself. Nothing was clipped."
                            )


_CAUGHT = (UnsupportedGradientError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError,
           AssertionError, NotImplementedError)  # fmt: skip
"""What models that cannot be followed have been seen to end in."""


def _raise_what_no_model_causes(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        raise error


def compare(
    following: Following, call: LastCall, samples: Sequence[int], reduction: str, note: bool = False
) -> Comparison | None:
    """Return the largest error over ``samples``, run together in both orders and each by itself.

    Args:
        following: What follows the module.
        call: The call that the samples are taken from.
        samples: Which.
        reduction: What a number that the module returns is over samples.
        note: Take note in ``call.way`` of the precision, and of numbers that are not the mean (or sum) of samples.

    Returns:
        None if nothing that is returned can be compared.
    """
    with ExitStack() as stack:
        call, precision = stack.enter_context(_in_float64(following, call))
        stack.enter_context(torch.enable_grad())
        reset = stack.enter_context(_as_called(call, autocast=precision is None))
        with exact_products():
            if precision is None:
                held = map(following.parameter, following.aliases)
                dtypes = [p.dtype for p in held if p.is_floating_point() or p.is_complex()]
                dtypes += [call.autocast[1]] if call.autocast else []
                precision = max(torch.finfo(dtype).eps for dtype in dtypes)
            if note:
                call.way.precision = precision
            worst: Comparison | None = None
            known: dict[int, tuple[list[Tensor | None], dict[str, Tensor]]] = {}
            for order in [list(samples), list(samples)[::-1]] if len(samples) > 1 else [list(samples)]:
                pair = _Pair(following, call, order, reduction, precision, known, reset)
                found = pair.compare()
                if note:
                    call.way.unowned |= pair.unowned()
                if found is not None:
                    worst = max(worst or found, found, key=lambda c: c.excess)
                elif pair.owned_numbers:
                    worst = worst or Comparison(0.0, "", 0.0)
    return worst


class _Pair:
    """A few samples, run together and each by itself.

    Args:
        following: What follows the module.
        call: The call that the samples are taken from.
        samples: Which, in order.
        reduction: What a number that the module returns is over samples.
        precision: Machine epsilon.
        known: For each sample, the gradient of what it returned, and what it gave by itself; filled here.
        reset: Puts the module back as it was.
    """

    def __init__(
        self,
        following: Following,
        call: LastCall,
        samples: list[int],
        reduction: str,
        precision: float,
        known: "dict[int, tuple[list[Tensor | None], dict[str, Tensor]]]",
        reset: Callable[[], None],
    ) -> None:
        self._known, self._reset = known, reset
        self._following, self._call, self._samples = following, call, samples
        self._reduction, self._precision = reduction, precision
        self._way = call.way
        self._together = call.samples(following.batch_first, samples)
        self._alone = [call.samples(following.batch_first, [i]) for i in samples]
        self._draws = Draws()
        self.owned_numbers: list[int] = []

    def compare(self) -> Comparison | None:
        """Compare the gradients that rows of the outputs give; None if there are none."""
        self._outputs, found, grads = self._run_together(self._random_grads)
        return self._against_alone(found, grads) if any(grad is not None for grad in grads) else None

    def unowned(self) -> dict[int, str]:
        """Return what to say of gradients of outputs that no sample owns; numbers that are the reduction are owned."""
        words = {}
        for position, (output, axis) in enumerate(zip(self._outputs, self._way.output_axes, strict=True)):
            if axis is not None or not output.requires_grad:
                continue
            if output.dim():
                words[position] = (
                    f"{type(self._way.module).__name__} returns a tensor of shape {tuple(output.shape)} that does not "
                    "grow with the number of samples, and the loss uses it: its gradient belongs to no single sample. "
                    "Leave it out of the loss."
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
            with self._following.quietly(), torch.no_grad():
                values.append(
                    float(_with_draws(self._way, arguments, self._draws, i, len(self._samples), self._reset)[position])
                )
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
            f"the gradient of the number that {type(self._way.module).__name__} returns is not the {self._reduction} "
            f"of what samples give by themselves (relative error {comparison.largest:.2g} in {comparison.parameter}): "
            "it mixes samples. Nothing was clipped."
        )

    def _random_grads(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """A random gradient for each output that grows with samples; a sample has the same in either order."""
        generator = torch.Generator().manual_seed(0)
        grads: list[Tensor | None] = []
        for k, (output, axis) in enumerate(zip(outputs, self._way.output_axes, strict=True)):
            if axis is None or not output.requires_grad or not (output.is_floating_point() or output.is_complex()):
                grads.append(None)
                continue
            dtype = torch.complex128 if output.is_complex() else torch.float64
            grad = torch.randn(output.shape, generator=generator, dtype=dtype).to(output)
            for i, sample in enumerate(self._samples):
                if sample in self._known:
                    part = self._known[sample][0][k]
                    assert part is not None
                    rows_of(grad, axis, output.shape[axis.dim] // len(self._samples), i).copy_(part)
            grads.append(grad)
        return grads

    def _run_together(
        self, choose: Callable[[Sequence[Tensor]], list[Tensor | None]]
    ) -> tuple[list[Tensor], dict[str, Contribution], list[Tensor | None]]:
        """The samples together, as the clipper sees them; its per-sample gradients."""
        module, (args, kwargs) = self._way.module, self._together
        torch.manual_seed(0)
        self._reset()
        with self._following.apart(self._way) as gathering:
            self._draws = Draws()
            with self._draws:
                outputs = Skeleton(module(*args, **kwargs)).tensors
            grads = choose(outputs)
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            mini_batch = gathering.mini_batch
            device = outputs[0].device if outputs else torch.device("cpu")
            found = mini_batch.finish(device) if mini_batch is not None else {}
        return outputs, found, grads

    def _against_alone(self, found: Mapping[str, Contribution], grads: Sequence[Tensor | None]) -> Comparison:
        worst = Comparison(0.0, "", 0.0)
        for i, arguments in enumerate(self._alone):
            sample = self._samples[i]
            if self._draws.drawn or sample not in self._known or not self._keeps(grads):
                parts, expected = self._run_alone(i, arguments, grads)
                if self._keeps(grads):
                    self._known[sample] = parts, expected
            else:
                expected = self._known[sample][1]
            whole = math.sqrt(sum(float(row_squares(g.unsqueeze(0))) for g in expected.values()))
            for name, gradient in expected.items():
                rows = found[name].rows(i, i + 1)[0] if name in found else torch.zeros_like(gradient)
                error = math.sqrt(float(row_squares((wide(gradient) - rows).unsqueeze(0))))
                own = math.sqrt(float(row_squares(gradient.unsqueeze(0))))
                worst = max(worst, self._judge(name, error, own, whole), key=lambda c: c.excess)
        return worst

    def _keeps(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether these are the gradients of rows, which samples have in either order."""
        return all(grad is None or axis is not None for grad, axis in zip(grads, self._way.output_axes, strict=True))

    def _judge(self, name: str, error: float, own: float, whole: float) -> Comparison:
        """Judge one parameter of one sample by its own norm, and by what is rounding beside the whole gradient."""
        bars = _bars(self._precision)
        allowed = bars[0] * own + bars[1] * whole
        return Comparison(error / max(own, 1e-2 * whole, 1e-300), name, error / max(allowed, 1e-300))

    def _run_alone(
        self, i: int, arguments: Arguments, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Plain autograd of one sample by itself: the gradients of what it returned, and of parameters."""
        following, way = self._following, self._way
        aliases = following.aliases
        values = {name: following.parameter(name).detach().requires_grad_() for name in sorted(following.trained)}
        places = {place: value for name, value in values.items() for place in aliases[name]}
        with following.quietly():
            outputs = _with_draws(way, arguments, self._draws, i, len(self._samples), self._reset, places)
        with following.quietly(), substituted(places):  # a checkpoint runs forward again
            parts: list[Tensor | None] = []
            for output, grad, axis in zip(outputs, grads, way.output_axes, strict=True):
                if grad is not None and axis is None:
                    grad = grad / len(self._samples) if self._reduction == "mean" else grad
                elif grad is not None and axis is not None:
                    grad = rows_of(grad, axis, output.shape[axis.dim], i)
                parts.append(grad)
            pairs = [(o, g) for o, g in zip(outputs, parts, strict=True) if g is not None and o.requires_grad]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return parts, {
            name: real_parts(torch.zeros_like(value.detach()) if value.grad is None else _dense(value.grad))
            for name, value in values.items()
        }


def _with_draws(
    way: Way,
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
                return Skeleton(way.module(*arguments[0], **arguments[1])).tensors
        except UnsupportedGradientError:
            if last or not draws.drawn:
                raise
    raise AssertionError


@contextmanager
def _as_called(call: LastCall, autocast: bool) -> Iterator[Callable[[], None]]:
    """Run as the call ran, but without dropout, and leave no trace; gives what puts the module back for another run."""
    with undisturbed(call.way.module) as reset, WithoutDropout(), ExitStack() as stack:
        if call.autocast:
            stack.enter_context(
                torch.autocast(*call.autocast) if autocast else torch.autocast(call.autocast[0], enabled=False)
            )
        yield reset


@contextmanager
def _in_float64(following: Following, call: LastCall) -> Iterator[tuple[LastCall, float | None]]:
    """Let the model be in float64 in a block, if it can; give the call to make, and machine epsilon or None if not."""
    module = call.way.module
    places = {(m, slot): t for m in module.modules() for held in (parameter_slots(m), buffer_slots(m))
              for slot, t in held.items() if t is not None}  # fmt: skip
    floats = {id(t): t for t in places.values() if t.is_floating_point() or t.is_complex()}
    if sum(8 * t.numel() for t in floats.values()) > _LARGEST_IN_FLOAT64:
        yield call, None
        return
    copies = {key: _float64(t) for key, t in floats.items()}
    doubled = {place: copies[id(t)] for place, t in places.items() if id(t) in copies}
    other = LastCall(call.way, to_float64(call.arguments), call.batch_size, call.autocast)
    with substituted(doubled):
        precision = _precision_in_float64(following, other)
        if precision is not None:
            yield other, precision
            return
    yield call, None


def _float64(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _precision_in_float64(following: Following, call: LastCall) -> float | None:
    """Run a sample; return the coarsest machine epsilon on the way, None if the model does not run in float64."""
    arguments = call.samples(following.batch_first, [0])
    try:
        with following.quietly(), _as_called(call, autocast=False), torch.no_grad(), Draws() as draws:
            call.way.module(*arguments[0], **arguments[1])
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


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient
