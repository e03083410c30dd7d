"""The contract of a backward, whatever its formula: deterministic, linear, independent of layout, without side effects.

Backward runs are compared with one another, not with numerical differences. The gradient is linear in ``grad_output``.
It depends on the values of tensors alone, not on their memory layout or on which inputs need a gradient. One gradient
therefore determines the gradient that every other run must return.

If all nodes of the graph are PyTorch's own, only two properties are probed. The first: the forward does not decide by
strides, by state, or by which inputs need a gradient. The second: the backward is linear, which a hook could break.
PyTorch's own tests cover the memory layouts that PyTorch's backwards read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradguard.check.flat_vectors import are_the_same, drawn, joined, largest
from gradguard.check.function import Function
from gradguard.check.gradient_report import GradientFinding
from gradguard.check.layouts import FLAGGED, LAYOUTS, InputLayout, layouts_of, orders_of
from gradguard.torch_private import each_operation

_REPEATS = 6
_TOLERANCE = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 8.0, torch.float16: 8.0}
"""Two backward runs that should agree may differ by this many machine epsilons."""

_ONES = "a grad_output of stride 0, as sum() makes"
_POWERS = {torch.float64: (-20, 10), torch.float32: (-20, 4), torch.bfloat16: (-2, 2), torch.float16: (-2, -1)}
"""Cotangents are multiplied by these powers of two, which is exact. Those for float16 are small, against overflow."""

_ROUNDED_TIMES = 3
_ROUNDING = 32
"""A sum in another order may change a result by this multiple of the change caused by rounding the inputs."""

_MOST_SUBSETS = 4
"""Up to this many inputs, the probe tries every subset as the inputs that need a gradient.

With more inputs, half of them need a gradient in each run, chosen by one binary digit of their positions. For any two
inputs, at least one run then needs the gradient of one and not of the other."""

_MOST_LENGTHS = 4
_NEARBY = {torch.float64: (1e-7, 1e-4), torch.float32: (1e-4, 1e-2)}
"""A point is regular if moving the inputs by the first share changes values and gradient by at most the second."""

_OF_RUNS = ("layout", "linearity", "outputs", "state", "needs_input_grad")
"""Kinds of findings that a non-deterministic backward also causes."""

_LARGE = 1e250
"""Above this value, a product with a cotangent may overflow."""


Findings = list[GradientFinding]
"""The faults found by one comparison; empty if the two sides agree."""


class BackwardRun(NamedTuple):
    """The gradient of a backward, and the outputs of its forward."""

    gradient: Tensor
    values: Tensor


class RecordedForward(NamedTuple):
    """The leaves and the outputs of a recorded forward."""

    leaves: list[Tensor]
    outputs: list[Tensor]


_NO_GRAPH = RecordedForward([], [])


class OwedGradient(NamedTuple):
    """A backward run of the recorded graph, and the gradient that it must return."""

    words: str
    cotangents: Sequence[Tensor | None]
    owed: Tensor
    size: float = 1.0
    """The size of the cotangents, relative to the usual one."""
    may_refuse: bool = False
    """Whether an exception of the backward is allowed."""


class Contract:
    """The probes of one function at its point.

    Args:
        function: The function to probe.
        cotangent: The cotangent of the backward runs, as one vector.
        generator: The generator for random moves of the inputs.
        rtol: The relative error of the function itself.

    Attributes:
        first: The gradient of the first backward run.
        findings: The faults found.
        notes: Remarks that are not faults.
    """

    def __init__(self, function: Function, cotangent: Tensor, generator: torch.Generator, rtol: float = 0.0) -> None:
        self.function, self.generator = function, generator
        dtypes = (one.dtype for one in [*function.outputs, *function.inputs])
        self.dtype = max(dtypes, key=lambda d: torch.finfo(d).eps)
        limits = torch.finfo(self.dtype)
        self.relative = max(rtol, _TOLERANCE[self.dtype] * limits.eps)
        self.least = 8 * limits.smallest_normal * limits.eps
        """Eight steps of the smallest subnormal number, a difference that is always allowed."""
        self.findings: Findings = []
        self.notes: Findings = []
        self.shaped = function.shaped(cotangent)
        self._varies = False
        """Whether two backward runs of one graph differed in any bit."""
        self._graph = _NO_GRAPH
        """The recorded forward whose backward the probes run."""

    def probe(self) -> None:
        """Run all probes, starting with the cheap ones."""
        self._probe()
        if self._varies or any(one.kind in _OF_RUNS for one in self.findings):
            self._repeat()

    @torch.no_grad()
    def probe_needs(self) -> None:
        """Probe only runs in which some inputs need a gradient and others do not."""
        self._record()
        self.first, self.usual_values = self._run()
        self.usual = largest(self.first)
        self._some_needed()

    def _probe(self) -> None:
        self._record()
        self.usual_values = joined(self._graph.outputs)
        overwritten = self._take_gradient()
        if self.findings:
            return
        calls = self._other_calls()
        try:
            again = self._backward()
        except Exception as error:
            self.findings = _raised("state", "after another forward", error)
            return
        self._varies |= not are_the_same(again, self.first)
        self.findings += overwritten
        if self.findings:
            return
        self._record()
        self.findings += self._after(calls, again)
        if self.findings:
            return
        self._hold("linearity", self._scaled())
        if self.function.has_own_code:
            self._hold("layout", self._laid_out())
            self._hold("layout", self._stride_0())
        self._hold("outputs", self._single_outputs())
        if self.findings:
            self.findings = self._lasting(calls) or self.findings
        self._graph = _NO_GRAPH
        if not self.findings:
            self._other_inputs()
        self._hidden_float32()

    def _record(self, leaves: list[Tensor] | None = None) -> None:
        """Record a new forward from these leaves, or from the function's own inputs if None."""
        self._graph = _NO_GRAPH  # release the old graph first: two graphs may not fit into memory
        leaves = self.function.leaves() if leaves is None else leaves
        self._graph = RecordedForward(leaves, self.function.record(leaves))

    def _run(self) -> BackwardRun:
        """Return the gradient and the outputs of the recorded graph."""
        return BackwardRun(self._backward(), joined(self._graph.outputs))

    def _backward(self, cotangents: Sequence[Tensor | None] | None = None) -> Tensor:
        leaves, outputs = self._graph
        return self.function.backward(outputs, leaves, self.shaped if cotangents is None else cotangents, keep=True)

    def _take_gradient(self) -> Findings:
        """Run the backward with the cotangent and with its negative, and report changed inputs and cotangents.

        Returns:
            A finding for each gradient returned by the first backward and overwritten by the second.
        """
        function, fresh, (leaves, outputs) = self.function, [v.clone() for v in self.shaped], self._graph
        given, names = function.given, [one.name for one in function.inputs]
        self.findings += _changed("the forward overwrites input", names, leaves, given)
        returned = function.gradients(outputs, leaves, fresh, keep=True)
        self.first = joined(returned)
        self.usual = largest(self.first)
        self.findings += _changed("the backward overwrites input", names, leaves, given)
        numbers = map(str, range(len(fresh)))
        self.findings += _changed("the backward overwrites grad_output of output", numbers, fresh, self.shaped)
        self._varies = not (self.findings or are_the_same(-self._backward([-v for v in self.shaped]), self.first))
        words, sizes = "a backward overwrites the gradient that the previous backward returned for", function.sizes
        return _changed(words, names, joined(returned).split(sizes), self.first.split(sizes))

    def _repeat(self) -> None:
        """Compare repeated backward runs of one graph; a large difference replaces all other findings."""
        self._record()
        first, *others = [self._backward() for _ in range(_REPEATS)]
        message = "the same backward, run again, gives something else"
        found = (self._difference("non-determinism", message, run, first) for run in others)
        self.findings = next(filter(None, found), self.findings)
        if not (self.findings or all(are_the_same(run, first) for run in others)):
            self.notes = [GradientFinding("non-determinism", "equal backward runs differ in the last bits")]

    def _other_calls(self) -> str:
        """Call the function with flipped inputs and with shorter ones; return a description of calls that worked."""
        given, shorter = self.function.inputs, []
        flipped = [one.value.flatten().flip(0).reshape(one.value.shape) for one in given]
        elsewhere = "another forward in between" if self._call(flipped) else ""
        arguments = [one.value for one in given if one.is_argument]
        lengths = dict.fromkeys(n for v in arguments for n in v.shape if n > 1)
        tried = {tuple(one.value.shape for one in given)}
        for length in [*lengths][:_MOST_LENGTHS]:
            for dim in (None, *range(max(v.dim() for v in arguments))):
                inputs = [_shorter(one.value, length, dim) if one.is_argument else one.value for one in given]
                shapes = tuple(v.shape for v in inputs)
                if shapes not in tried and self._call(inputs):
                    shorter.append(f"a call with {length - 1} in place of {length}")
                    break
                tried.add(shapes)
        return " and ".join(shorter) or elsewhere

    def _call(self, inputs: list[Tensor]) -> bool:
        """Return whether the function accepts these inputs."""
        leaves = [one.clone().requires_grad_() for one in inputs]
        try:
            outputs = self.function.record(leaves)
            if self.function.has_own_code:
                self.function.gradients(outputs, leaves, [torch.ones_like(o) for o in outputs], keep=False)
        except Exception:  # the inputs are outside of the domain, or their sizes do not fit together
            return False
        return True

    def _after(self, calls: str, again: Tensor) -> Findings:
        """Return the faults caused by other ``calls``.

        The forward recorded after the calls must have the usual outputs. ``again``, the gradient of the forward
        recorded before the calls, must be the usual gradient.
        """
        found = joined(self._graph.outputs)
        if wrong := self._values_differ("state", f"the same inputs after {calls}", found, self.usual_values):
            return wrong
        wrong = self._difference("state", "another forward in between changes the backward", again, self.first)
        return wrong and (self._lasting(calls) or wrong)

    def _lasting(self, calls: str) -> Findings:
        """Return the faults in the gradient of the forward recorded after ``calls``; none if no call was possible."""
        words = f"{calls} changes the next backward"
        return self._difference("state", words, self._backward(), self.first) if calls else []

    def _hold(self, kind: str, claims: Iterator[OwedGradient]) -> None:
        """Run the backward for each claim, and stop at the first gradient that differs from the owed one."""
        for claim in claims:
            try:
                found = self._backward(claim.cotangents)
            except Exception as error:
                wrong = [] if claim.may_refuse else _raised(kind, claim.words, error)
            else:
                wrong = self._difference(kind, claim.words, found, claim.owed, claim.size)
            if wrong:
                self.findings += wrong
                return

    def _scaled(self) -> Iterator[OwedGradient]:
        """Yield scaled, negated and zero grad_outputs."""
        factors = {f"2^{power}": 2.0**power for power in _POWERS[self.dtype]}
        for shown, times in ({"-1": -1.0} | factors if self._varies else factors).items():
            scaled = [v * times for v in self.shaped]
            yield OwedGradient(f"grad_output times {shown}", scaled, self.first * times, times)
        if self.function.has_own_code:
            zeros = [torch.zeros_like(v) for v in self.shaped]
            yield OwedGradient("a grad_output of zeros", zeros, self.first * 0.0, 0.0)

    def _laid_out(self) -> Iterator[OwedGradient]:
        """Yield the grad_output in each layout."""
        for layout in layouts_of(self.shaped, LAYOUTS):
            placed = [layout.place(v) for v in self.shaped]
            yield OwedGradient(layout.words.format("grad_output"), placed, self.first, may_refuse=layout is FLAGGED)

    def _stride_0(self) -> Iterator[OwedGradient]:
        """Yield grad_outputs of stride 0 in all dimensions or along one, such as the backward of a sum creates."""
        shaped = self.shaped
        others = {_ONES: [v.new_ones(()).expand(v.shape) for v in shaped]}
        for dim in range(max((v.dim() for v in shaped if v.dim() > 1), default=0)):
            rows = [v.narrow(dim, 0, 1).expand(v.shape) if dim < v.dim() and v.numel() else v for v in shaped]
            others[f"a grad_output of stride 0 along dimension {dim}, as sum({dim}) makes"] = rows
        for words, other in others.items():
            in_full = [v.clone(memory_format=torch.contiguous_format) for v in other]
            yield OwedGradient(words, other, self._backward(in_full))

    def _single_outputs(self) -> Iterator[OwedGradient]:
        """Yield cotangents for some of the outputs: the gradients of single outputs add up to the gradient of all."""
        used = [i for i, o in enumerate(self._graph.outputs) if o.requires_grad]
        if len(used) < 2:
            return

        def only(some: Sequence[int], zeros: bool = False) -> list[Tensor | None]:
            return [v if i in some else torch.zeros_like(v) if zeros else None for i, v in enumerate(self.shaped)]

        singles = {i: self._backward(only([i], zeros=True)) for i in used}
        size = max(map(largest, singles.values())) / max(self.usual, self.least)
        for i, single in singles.items():
            yield OwedGradient(f"only output {i} used", only([i]), single, size)
        for i, single in singles.items():
            others, rest = [j for j in used if j != i], self.first - single
            yield OwedGradient(f"output {i} unused", only(others), rest, size)
            yield OwedGradient(f"zeros for output {i}", only(others, zeros=True), rest, size)

    def _other_inputs(self) -> None:
        """Probe other memory layouts of the inputs, inputs without a gradient, and inputs that share memory."""
        function = self.function
        arguments = [one.value for one in function.inputs if one.is_argument]
        for layout in layouts_of(arguments, LAYOUTS) if function.has_own_code else orders_of(arguments):
            if not self.findings:
                pairs = zip(function.leaves(), function.inputs, strict=True)
                leaves = [layout.place(v.detach()).requires_grad_() if one.is_argument else v for v, one in pairs]
                self._hold_with("layout", layout.words.format("inputs"), leaves, self.first, layout)
        if not self.findings:
            self._some_needed()
        if not self.findings and function.has_own_code and self.dtype in _NEARBY:  # half precision may round copies
            self._shared_memory()
        # Random numbers are drawn in the order of memory, so another layout changes the results rightly.
        if self.findings and self._draws_random_numbers():
            self.findings = [one for one in self.findings if one.kind != "layout"]

    def _some_needed(self) -> None:
        """Compare the gradients of runs in which only some inputs need one."""
        names, count = [one.name for one in self.function.inputs], len(self.function.inputs)
        if count <= _MOST_SUBSETS:
            subsets = [[i for i in range(count) if mask >> i & 1] for mask in range(1, 2**count - 1)]
        else:
            digits = range((count - 1).bit_length())
            subsets = [[i for i in range(count) if i >> bit & 1 == digit] for bit in digits for digit in (1, 0)]
        for some in subsets:
            if self.findings:
                return
            shown = ", ".join([names[i] for i in some[:3]] + ["…"] * (len(some) > 3))
            words = f"only {shown} need{'s' if len(some) == 1 else ''} a gradient"
            leaves = [leaf.requires_grad_(i in some) for i, leaf in enumerate(self.function.leaves())]
            expected = [part * (i in some) for i, part in enumerate(self.first.split(self.function.sizes))]
            self._hold_with("needs_input_grad", words, leaves, torch.cat(expected))

    def _hold_with(
        self, kind: str, words: str, leaves: list[Tensor], expected: Tensor, layout: InputLayout | None = None
    ) -> None:
        """Run the function with these leaves, and compare its outputs and gradient with the usual ones.

        ``expected`` is the gradient that the run must return. The function may also refuse the leaves. With another
        ``layout``, results may differ by as much as sums in another order do.
        """
        try:
            self._record(leaves)
        except Exception:  # the function refuses the leaves, or takes a derivative inside
            return
        try:
            found = self._run()
        except Exception as error:
            self.findings += [] if layout is FLAGGED else _raised(kind, words, error)
            return
        wrong = self._run_differs(kind, words, found, BackwardRun(expected, self.usual_values))
        if wrong and not (layout is not None and self._is_rounding(found)):
            self.findings += wrong

    def _shared_memory(self) -> None:
        """Compare inputs that share memory with copies of them: one tensor for several inputs, inputs of stride 0.

        Input i is slice ``sources[i]``, broadcast to the shape of the input.
        """
        values, alike = self.function.given, {}
        same = list(range(len(values)))
        own = [one.is_argument and one.size > 0 for one in self.function.inputs]
        sources = [alike.setdefault((v.shape, v.dtype), i) if own[i] else i for i, v in enumerate(values)]
        tried = [("one tensor for several inputs", values, sources)] if sources != same else []
        for dim in range(max((v.dim() for v in values), default=0)):
            slices = [v.narrow(dim, 0, 1) if own[i] and dim < v.dim() else v for i, v in enumerate(values)]
            if any(one.shape != v.shape for one, v in zip(slices, values, strict=True)):
                tried.append((f"inputs of stride 0 along dimension {dim}", slices, same))
        moved, share = _NEARBY[self.dtype]
        for words, slices, sources in tried:
            try:
                expected = self._of_slices(slices, sources, moved=0.0)
                found = self._of_slices(slices, sources)
            except Exception:  # the function refuses the inputs, or the point is outside of the domain
                continue
            wrong = self._run_differs("layout", words, found, expected)
            changes = self._changes(slices, sources, expected, moved) if wrong else None
            if changes is not None:
                which = 0 if wrong[0].input else 1  # a finding about the values names no input
                if bool((changes[which] <= share * expected[which].abs().max()).all()):
                    self.findings += wrong
                    return

    def _of_slices(self, slices: list[Tensor], sources: list[int], moved: float | None = None) -> BackwardRun:
        """Return the gradient and the outputs for inputs that share memory.

        With ``moved``, the inputs are copies instead. Each element moves at random by this share of its size, or of
        the mean size of its tensor if the mean is larger.
        """
        shapes = [one.shape for one in self.function.given]
        leaves = [one.clone().requires_grad_() for one in slices]
        inputs = [leaves[source].expand(shape) for source, shape in zip(sources, shapes, strict=True)]
        if moved is not None:
            inputs = [one.clone(memory_format=torch.contiguous_format) for one in inputs]
        if moved:
            sizes = [torch.maximum(one.detach().abs(), one.detach().abs().mean()) for one in inputs]
            moves = [drawn(size.shape, self.generator).to(size.device) * size for size in sizes]
            inputs = [one + moved * move.to(one) for one, move in zip(inputs, moves, strict=True)]
        outputs = self.function.record(inputs)
        grads = zip(self.function.gradients(outputs, leaves, self.shaped, keep=False), shapes, strict=True)
        return BackwardRun(joined(grad.to_dense().expand(shape) for grad, shape in grads), joined(outputs))

    def _changes(
        self, slices: list[Tensor], sources: list[int], usual: BackwardRun, moved: float
    ) -> list[Tensor] | None:
        """Return how far gradient and values depart from ``usual`` when the inputs move; None if the function fails."""
        try:
            runs = [self._of_slices(slices, sources, moved) for _ in range(_ROUNDED_TIMES)]
            both = [torch.stack(each) for each in zip(*runs, usual, strict=True)]
        except Exception:  # the point is outside of the domain, or the number of outputs depends on the inputs
            return None
        return [(one[:-1] - one[-1]).abs().amax(0) for one in both]

    def _is_rounding(self, found: BackwardRun) -> bool:
        """Return whether a run differs by no more than the effect of rounding the inputs, as reordered sums do."""
        values, usual = self.function.given, BackwardRun(self.first, self.usual_values)
        changes = self._changes(values, list(range(len(values))), usual, torch.finfo(self.dtype).eps)
        if changes is None or found.values.shape != usual.values.shape:
            return False
        noise = [one.nan_to_num(0.0) for one in changes]
        triples = zip(found, usual, noise, strict=True)
        return all(bool(((one - other).abs() <= _ROUNDING * (n + n.mean())).all()) for one, other, n in triples)

    def _draws_random_numbers(self) -> bool:
        found = []

        def look(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(torch.Tag.nondeterministic_seeded in operation.tags)
            return operation(*args, **kwargs)

        with each_operation(look):
            self.function.record(self.function.leaves())
        return any(found)

    def _hidden_float32(self) -> None:
        """Report a float64 gradient that was computed in float32: each of its elements is a float32 number."""
        # Numbers such as 0.5 are exact in bfloat16 and prove nothing.
        telling = int((self.first.bfloat16().double() != self.first).sum())
        if self.dtype is torch.float64 and telling >= 4 and torch.equal(self.first.float().double(), self.first):
            message = "all gradients are float32 numbers although inputs and outputs are float64"
            self.findings.append(GradientFinding("precision", message))

    def _run_differs(self, kind: str, words: str, found: BackwardRun, expected: BackwardRun) -> Findings:
        """Compare the outputs, then the gradients, of two runs that should agree."""
        wrong = self._values_differ(kind, words, found.values, expected.values)
        return wrong or self._difference(kind, words, found.gradient, expected.gradient)

    def _values_differ(self, kind: str, words: str, found: Tensor, expected: Tensor) -> Findings:
        """Compare the outputs of two forwards that should agree."""
        if found.shape != expected.shape:
            given = f"{len(found)} numbers in place of {len(expected)}"
        else:
            _, given = self._worst(found, expected, largest(self.usual_values))
        return [GradientFinding(kind, f"the forward gives {given} for {words}")] if given else []

    def _difference(self, kind: str, message: str, found: Tensor, expected: Tensor, size: float = 1) -> Findings:
        """Compare two gradients that should agree; ``size`` is the cotangents' size relative to the usual one."""
        most = max(abs(size) * self.usual, largest(found), largest(expected))
        # With a cotangent of ones, the sums in a normalization's backward cancel. In half precision, the remainder is
        # therefore compared with the largest element of the usual gradient.
        small = 1e-2 if self.dtype in _NEARBY else 1.0 if message == _ONES else 0.2
        place, words = self._worst(found, expected, small * most)
        return [GradientFinding(kind, f"{message}: {words}", *self.function.name_of(place))] if words else []

    def _worst(self, found: Tensor, expected: Tensor, size: float) -> tuple[int, str]:
        """Return the position of the element that differs most, and a description, which is empty if all agree.

        The tolerance of an element is relative to the sum of its own size and ``size``.
        """
        if torch.equal(found, expected):
            return 0, ""
        off, own = (found - expected).abs(), torch.maximum(found.abs(), expected.abs())
        wrong = found.isfinite() & (off > self.relative * (own + size) + self.least)
        wrong = expected.isfinite() & (wrong | (~found.isfinite() & (expected.abs() < _LARGE)))
        if not bool(wrong.any()):
            return 0, ""
        at = int(torch.where(wrong, off.nan_to_num(torch.inf), -1.0).argmax())
        differ = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        return at, f"{float(found[at]):.6g} in place of {float(expected[at]):.6g}, {differ}"


def _raised(kind: str, words: str, error: Exception) -> Findings:
    return [GradientFinding(kind, f"{words}: the backward raises {type(error).__name__}: {error}")]


def _changed(words: str, names: Iterable[str], now: Sequence[Tensor], before: Sequence[Tensor]) -> Findings:
    """Return a finding for each changed tensor; its message is ``words`` and the tensor's name."""
    triples = zip(names, now, before, strict=True)
    return [
        GradientFinding("mutation", f"{words} {name}") for name, one, other in triples if not are_the_same(one, other)
    ]


def _shorter(value: Tensor, length: int, dim: int | None) -> Tensor:
    """Return ``value`` without the last entry of each dimension of this ``length``, or of dimension ``dim`` only."""
    for i, size in enumerate(value.shape):
        if size == length and dim in (None, i):
            value = value.narrow(i, 0, length - 1)
    return value
