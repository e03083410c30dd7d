r"""Tell whether each value that a loss is computed from depends on one sample only, by backwards from these values.

Let rows r be computed from a module's outputs o with Jacobian J, and let row k be claimed to be sample s(k)'s. For a
cotangent c, sample i's outputs get :math:`g_i = (J^T c)_i`. Multiply the cotangent of each sample's rows by that
sample's power of two, :math:`c'_k = 2^{d(s(k))} c_k`. Where every row depends on its own sample alone,
:math:`g'_i = 2^{d(i)} g_i` to the last bit, whatever the operations in between. A row that depends on another sample
breaks this equality, unless both samples have the same d; so d runs through the digits of the sample's number.
"""

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradguard.per_sample.capture import silent_taps
from gradguard.per_sample.layers.call import Axes, BatchAxis, samples_first
from gradguard.per_sample.loss.loss_graph import Dependence, Unreadable, Value, nodes_below, parents, walk
from gradguard.state.generators import seeded_normal
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import input_metadata_of, version_of

_BITS = 3
_BASE = 1 << _BITS

_AT_ONCE = 1 << 18
"""Number of elements of a gradient that are read at a time."""


class Silent(Unreadable):
    """Some values have a derivative of 0, which does not show to which sample they belong.

    Attributes:
        samples: The sample of each value; -1 where the derivative is 0.
    """

    def __init__(self, samples: Tensor, message: str) -> None:
        super().__init__(message)
        self.samples = samples


class _Output(NamedTuple):
    """A tensor that a call returned, the axis of its samples, its detached values, and its version at that time."""

    given: Tensor
    axis: BatchAxis
    values: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """True if the tensor was changed in place since the call."""
        return version_of(self.values) != self.version


class Outputs:
    """The values that a module returned to the code that computes the loss.

    Args:
        batch_size: Number of samples B.
        batch_first: Whether samples are assumed to lie along the first dimension of the outputs.

    Attributes:
        conclusive: False once `are_separate` could decide nothing: gradients were not finite, or of one sample only.
        constant_sizes: Sizes of constants that are known not to be made of the samples.
        repeated: Sizes of constants along which values were repeated.
        values_of_each: Number of values of each sample.
        declared: Values that the user has declared as not made of the samples.
        depends: Tells which operations depend on the samples.
        results: Among what its call returned, the number of each value.
        coincide: Whether a constant in the loss counts as each sample's own because of its shape only; the next batch
            may have another shape.
    """

    def __init__(self, batch_size: int, batch_first: bool = True) -> None:
        self.batch_size, self.batch_first = batch_size, batch_first
        self.conclusive = True
        self.constant_sizes: Set[int] = frozenset()
        self.repeated: set[int] = set()
        self.values_of_each = 0.0
        self.declared: Sequence[Tensor | float] = ()
        self.coincide = False
        self.depends = Dependence(batch_size)
        self.results: dict[Value, int] = {}
        self._outputs: dict[Value, _Output] = {}
        self._numbers: list[Value] = []

    def add(self, tensors: Sequence[Tensor], axes: Axes) -> None:
        """Add the tensors that a call returned.

        Args:
            tensors: The tensors.
            axes: The axis of the samples in each tensor; None for a tensor that belongs to no sample.
        """
        for number, (tensor, axis) in enumerate(zip(tensors, axes, strict=True)):
            if tensor.requires_grad and axis is None:
                self._numbers.append(Value.of(tensor))
            elif tensor.requires_grad and axis is not None:
                self.values_of_each += tensor.numel() / self.batch_size
                self.results[Value.of(tensor)] = number
                self._outputs[Value.of(tensor)] = _Output(tensor, axis, tensor.detach(), version_of(tensor))

    @property
    def tensors(self) -> dict[Value, Tensor]:
        """The tensors of the values, without those that were changed in place since."""
        return {value: output.values for value, output in self._outputs.items() if not output.is_written}

    @property
    def are_changed(self) -> bool:
        """True if an output was changed in place without a record in the graph: its node is still the same."""
        return any(one.is_written and Value.of(one.given).node is at.node for at, one in self._outputs.items())

    @property
    def values(self) -> Set[Value]:
        """The values with samples."""
        return self._outputs.keys()

    @property
    def axes(self) -> dict[Value, BatchAxis]:
        """The axis of the samples in each of the values with samples."""
        return {value: output.axis for value, output in self._outputs.items()}

    def usual_dim(self, shape: Sequence[int]) -> int:
        """Return the dimension along which samples usually lie in values of a shape."""
        return 0 if self.batch_first or len(shape) == 1 else 1

    def are_behind(self, value: Value) -> bool:
        """Tell whether a backward from a value reaches any of these outputs."""
        return bool(_reached(value, dict.fromkeys([*self._outputs, *self._numbers])))

    def operations_behind(self, value: Tensor) -> frozenset[str]:
        """Return the names of the operations between these outputs and a value."""
        ends = {at.node for at in self._outputs}
        nodes = walk([Value.of(value).node], lambda n: [] if n in ends else [one.node for one in parents(n)])
        return frozenset({node.name() for node in nodes if node not in ends})

    def and_of(self, other: "Outputs") -> "Outputs":
        """Return these outputs together with those of another call."""
        both = Outputs(self.batch_size, self.batch_first and other.batch_first)
        both._outputs, both._numbers = self._outputs | other._outputs, self._numbers + other._numbers
        both.results = self.results | other.results
        both.values_of_each = self.values_of_each + other.values_of_each
        return both

    def are_separate(self, value: Value, samples: Tensor) -> bool | None:
        """Tell whether each element of a value depends only on the outputs of the sample that it is claimed to be of.

        Args:
            value: The value.
            samples: The claimed sample of each element; can be broadcast to the value's shape.

        Returns:
            The answer; None where the value does not depend on these outputs.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        samples = samples.to(value.meta.device)
        cotangent = _normal(value.meta, self._size(value))
        once = self._pull(value, cotangent)
        if not once:
            return None
        are_finite = bool(total_norm([*once.values()]).isfinite())
        tells = are_finite and len(self._samples_in(once)) >= min(2, len(samples.unique()))
        self.conclusive = self.conclusive and tells  # samples that meet show only if two of them have a gradient
        for digit in range(self._digits):
            multiplied = self._pull(value, cotangent * _power(samples, digit).to(cotangent.dtype))
            if self._are_multiples(once, once, multiplied, digit):
                continue
            if not self._are_multiples(once, self._pull(value, cotangent), multiplied, digit):
                return False
        return True

    def is_scaled(self, value: Value, cotangent: Tensor, nearest: bool = False) -> bool:
        """Tell whether a backward passes on a power of two that multiplies its incoming gradient.

        A linear backward does, to the last bit. One that clamps, normalizes, or adds an eps to a norm does not.

        Args:
            value: The value from which the backward runs.
            cotangent: The gradient of the value.
            nearest: Whether to look at no output that lies behind another one, so that the backward passes through no
                call of the module. In a sharded model such a call communicates.

        Returns:
            The answer; True where overflow leaves nothing to compare.

        Raises:
            Unreadable: If a backward from the value cannot be run.
        """
        narrow = not self._kinds_behind(value).isdisjoint(_NARROW)
        limits = torch.finfo(torch.float16 if narrow else torch.float32)
        least = limits.smallest_normal * (limits.eps if narrow else 1.0)
        ends = _reached(value, self._outputs)
        if nearest and len(ends) > 1:
            behind = {node for end in ends for node in nodes_below(end.node, ()) if node is not end.node}
            ends = [end for end in ends if end.node not in behind]
        once = self._scaled(value, cotangent, 1.0, ends)
        for power in (2.0**4,) if narrow else (2.0**60, 2.0**-30):  # beyond the factors of a batch or a GradScaler
            multiplied = self._scaled(value, cotangent, power, ends)
            if _are_scaled(once, once, multiplied, power, least):
                continue
            if not _are_scaled(once, self._scaled(value, cotangent, 1.0, ends), multiplied, power, least):
                return False
        return True

    def _scaled(self, value: Value, cotangent: Tensor, power: float, ends: Sequence[Value]) -> dict[Value, Tensor]:
        """Return the gradients of some outputs for ``power`` times a cotangent.

        A run with the opposite sign follows, so that the sums of `retain_grad` end as they were.
        """
        pulled = self._pull(value, cotangent * power, ends=ends)
        self._pull(value, cotangent * -power, ends=ends)
        return pulled

    def samples_of(self, value: Value) -> Tensor:
        """Return the sample on which each element of a value seems to depend, from derivatives of J^T c.

        An element whose derivative is 0, such as the loss of a perfectly classified sample, shows no sample.

        Raises:
            Silent: If the derivative of an element is 0.
            Unreadable: If an element depends on no sample or on several, or an operation cannot be differentiated
                twice.
        """
        meta, name = value.meta, value.node.name()
        if value.shape.numel() == 1 and (reached := self._samples_reached(value)):
            if len(reached) > 1:  # the derivative of a single number may look like the derivative of one sample
                raise Unreadable(f"the value from {name} depends on {len(reached)} samples")
            return torch.full(meta.shape, reached[0], device=meta.device)
        cotangent = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device, requires_grad=True)
        pulled = self._pull(value, cotangent, create_graph=True)
        used = {at: gradient for at, gradient in pulled.items() if gradient.requires_grad}
        if not used:
            raise Unreadable(f"the gradients of values from {name} do not show which sample each value belongs to")
        size = self._size(value)
        gradients, directions = [*used.values()], [_normal(one, size) for one in used.values()]
        try:
            [one] = torch.autograd.grad(gradients, cotangent, directions, retain_graph=True)
            multiplied = []
            for digit in range(self._digits):
                turned = [d.clone() for d in directions]
                for direction, at in zip(turned, used, strict=True):
                    first = samples_first(direction, self._outputs[at].axis, self.batch_size)  # a view
                    first *= self._powers(digit, first)
                multiplied += torch.autograd.grad(gradients, cotangent, turned, retain_graph=True)
        except RuntimeError as error:
            raise Unreadable(f"{name} cannot be differentiated twice ({_sentence(error)})") from error
        tells = one != 0
        exponents = [(many.double() / one.double()).log2().where(tells, 0.0) for many in multiplied]
        digits = [exponent.round() for exponent in exponents]
        near = all(bool(((a - b).abs() < 0.05).all()) for a, b in zip(exponents, digits, strict=True))
        samples = torch.stack([each * _BASE**digit for digit, each in enumerate(digits)]).sum(0)
        if not near or not bool(((samples >= 0) & (samples < self.batch_size)).all()):
            raise Unreadable(
                f"the gradients of values from {name} do not show to which of the {self.batch_size} samples each value "
                "belongs"
            )
        if not bool(tells.all()):
            raise Silent(
                samples.long().where(tells, -1),
                f"{int((~tells).sum())} of the {one.numel()} values from {name} have a derivative of 0 in this "
                "batch, as the loss of a perfectly classified sample has, so their gradients do not show which sample "
                "they belong to. Leave the samples in their order, or begin with another batch",
            )
        return samples.long()

    @property
    def _digits(self) -> int:
        """Number of digits, in base 8, of the largest sample's number."""
        return max(1, math.ceil((self.batch_size - 1).bit_length() / _BITS))

    def _powers(self, digit: int, like: Tensor) -> Tensor:
        """Return the power of two of each sample, to be broadcast to a tensor with the samples first."""
        return _along(_power(torch.arange(self.batch_size, device=like.device), digit).to(like.dtype), like)

    def only_sample(self, value: Value) -> int | None:
        """Return the one sample that a value depends on; None if it depends on none or several."""
        reached = self._samples_reached(value)
        return reached[0] if len(reached) == 1 else None

    def _samples_reached(self, value: Value) -> list[int]:
        """Return the samples that a value depends on."""
        return self._samples_in(self._pull(value, _normal(value.meta, self._size(value))))

    def _size(self, value: Value) -> float:
        """Return a magnitude of cotangents that no dtype between a value and the outputs rounds to 0.

        The magnitude is tiny where possible: a hook that clips gradients, such as an error clip's, leaves the
        cotangents alone, and gradients that `retain_grad` accumulates do not change. For float16 the magnitude is 1,
        because float16 does not represent tiny numbers.
        """
        return max(_SIZES.get(kind, 2.0**-50) for kind in self._kinds_behind(value))

    def _kinds_behind(self, value: Value) -> Set[torch.dtype]:
        """Return the dtypes of the values between these outputs and a value, both included."""
        ends = self._outputs
        nodes = nodes_below(value.node, ends)
        return {meta.dtype for node in nodes for meta in input_metadata_of(node)} | {end.meta.dtype for end in ends}

    def _samples_in(self, pulled: Mapping[Value, Tensor]) -> list[int]:
        """Return the samples whose outputs have a gradient."""
        size = self.batch_size
        reached = [
            torch.cat([_finite(part).reshape(len(part), -1).any(1) for part in _in_parts(rows)])
            for rows in (samples_first(gradient, self._outputs[at].axis, size) for at, gradient in pulled.items())
        ]
        return torch.stack(reached).any(0).nonzero().flatten().tolist() if reached else []

    def _pull(
        self, value: Value, cotangent: Tensor, create_graph: bool = False, ends: Sequence[Value] | None = None
    ) -> dict[Value, Tensor]:
        """Return the gradients of the outputs, or of ``ends``, for a cotangent of the value."""
        reached = _reached(value, self._outputs) if ends is None else ends
        if not reached:
            return {}
        given = [output.given for output in self._outputs.values() if output.given.retains_grad]
        retained = [(tensor, tensor.grad) for tensor in given]
        try:
            with torch.autocast(cotangent.device.type, enabled=False), silent_taps(value.node):
                found = torch.autograd.grad(
                    [GradientEdge(*value)],  # pyright: ignore[reportArgumentType]
                    [GradientEdge(*at) for at in reached],  # pyright: ignore[reportArgumentType]
                    [cotangent],
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                )
        except (RuntimeError, TypeError, NotImplementedError) as error:
            words = f"a backward from {value.node.name()} cannot be run twice ({_sentence(error)})"
            raise Unreadable(words) from error
        finally:
            for tensor, gradient in retained:  # this backward has added to them
                tensor.grad = gradient
        return {at: one for at, one in zip(reached, found, strict=True) if one is not None}

    def _are_multiples(
        self,
        once: Mapping[Value, Tensor],
        again: Mapping[Value, Tensor],
        multiplied: Mapping[Value, Tensor],
        digit: int,
    ) -> bool:
        """Tell whether each sample's gradients were multiplied by its power of two.

        Args:
            once: The gradients of a cotangent.
            again: The gradients of the same cotangent, ``once`` itself or another run: what differs is rounding.
            multiplied: The gradients of the cotangent times each sample's power of two.
            digit: The digit of the samples' numbers that gives the powers.

        Returns:
            The answer.
        """
        return once.keys() <= again.keys() & multiplied.keys() and all(
            self._is_multiple(first, again[at], multiplied[at], self._outputs[at].axis, digit)
            for at, first in once.items()
        )

    def _is_multiple(self, first: Tensor, again: Tensor, second: Tensor, axis: BatchAxis, digit: int) -> bool:
        """Tell whether ``second`` is ``first`` times each sample's power of two, up to rounding shown by ``again``."""
        exact = first is again or torch.equal(_finite(first), _finite(again))
        first, second = (samples_first(g, axis, self.batch_size) for g in (first, second))
        powers = self._powers(digit, first)
        parts = zip(_in_parts(first), _in_parts(second), _in_parts(powers, first), strict=True)
        if all(torch.equal(after, before * power) for before, after, power in parts):
            return True
        first, second = _finite(first), _finite(second)
        expected = first * powers
        limits = torch.finfo(first.dtype)
        bar = _BASE * 2.0**_BASE * limits.smallest_normal * limits.eps  # subnormal products are rounded
        if not exact:  # the kernel adds in an order that changes from run to run
            bar = bar + 16 * limits.eps * _along(expected.abs().flatten(1).amax(1), expected)
        return bool(((second - expected).abs() <= bar).all())


def of_several(calls: Sequence[Outputs]) -> Outputs | None:
    """Return the outputs of all calls together; None if their numbers of samples differ."""
    if len({call.batch_size for call in calls}) != 1:
        return None
    return functools.reduce(Outputs.and_of, calls)


def _reached(value: Value, ends: Mapping[Value, object]) -> list[Value]:
    """Return the ends that a backward from a value reaches, without those that it reaches only through other ends."""
    if value in ends:
        return [value]
    nodes = nodes_below(value.node, ends)
    found = {edge for one in nodes for edge in parents(one) if edge in ends}
    return [end for end in ends if end in found]


_SIZES = {torch.float16: 1.0, torch.complex32: 1.0, torch.float64: 2.0**-200, torch.complex128: 2.0**-200}

_NARROW = {torch.float16, torch.complex32}
"""Dtypes whose range is too small for large powers of two."""


def _normal(like: Any, size: float) -> Tensor:
    """Return normal random numbers like a tensor, times ``size``, without using the program's generators."""
    return seeded_normal(like.shape, like.dtype, like.device).mul_(size)


def _are_scaled(
    once: Mapping[Value, Tensor],
    again: Mapping[Value, Tensor],
    multiplied: Mapping[Value, Tensor],
    power: float,
    least: float,
) -> bool:
    """Tell whether gradients were multiplied by a power of two, up to rounding shown by ``again`` and underflow."""
    return once.keys() == multiplied.keys() and all(
        _is_scaled(first, again[at], multiplied[at], power, least) for at, first in once.items() if at in again
    )


def _is_scaled(first: Tensor, again: Tensor, second: Tensor, power: float, least: float) -> bool:
    expected = first * power
    if torch.equal(second, expected):
        return True
    near = 2.0**11 * max(1.0, power) * least  # underflow loses ``least``, and later operations may multiply it
    if first is not again:  # the kernel adds in an order that changes from run to run
        near = near + 16 * torch.finfo(first.dtype).eps * _finite(expected).abs().amax()
    tells = first.isfinite() & expected.isfinite() & second.isfinite()
    return bool((~tells | ((second - expected).abs() <= near)).all())


def _power(samples: Tensor, digit: int) -> Tensor:
    """Return the power of two that belongs to one digit of each sample's number."""
    return 2.0 ** (samples // _BASE**digit % _BASE)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value for each sample so that it broadcasts to a tensor with the samples first."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _in_parts(values: Tensor, like: Tensor | None = None) -> Sequence[Tensor]:
    """Return ``values`` cut into groups of samples, as many as fit the cache of tensors ``like`` them."""
    like = values if like is None else like
    return values.split(max(1, _AT_ONCE * len(like) // max(1, like.numel())))


def _finite(values: Tensor) -> Tensor:
    """Return values with 0 for those that are not finite."""
    return values.nan_to_num(0.0, 0.0, 0.0)


def _sentence(error: Exception) -> str:
    """Return the first sentence of an error's message."""
    return str(error).split(".")[0]
