"""What a backward owes whatever its formula: one answer, for any layout, linear, changing nothing that it is given.

No differences are taken here: backward runs are compared with one another. The gradient is linear in ``grad_output``
and belongs to the numbers, not to where they lie, nor to what else needs a gradient. So one gradient says what every
other run owes, and several properties can be probed by one run: only a run that goes wrong is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradguard.check.function import Function
from gradguard.check.layouts import FLAGGED, Layout, layouts_of
from gradguard.check.report import Finding
from gradguard.torch_private import each_operation

_REPEATS = 6
_TOLERANCE = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 8.0, torch.float16: 8.0}
"""How many machine epsilons two backward runs that should agree may differ by."""

_ONES = "a grad_output of stride 0, as sum() makes"
_POWERS = {torch.float64: (-20, 10), torch.float32: (-20, 4), torch.bfloat16: (-2, 2), torch.float16: (-2, -1)}
"""What cotangents are multiplied by, exactly, within the range of the dtype: in float16 more may overflow inside."""

_ROUNDED_TIMES = 3
_ROUNDING = 32
"""So many times what rounding the inputs changes may come of sums in another order."""

_MOST_SUBSETS = 4
"""Up to so many inputs, every subset is tried as those which need a gradient; of more, halves by the digits of their
numbers, so that each two inputs are apart once."""

_MOST_LENGTHS = 4
_FEW_OUTPUTS = 8
_NEARBY = {torch.float64: (1e-7, 1e-4), torch.float32: (1e-4, 1e-2)}
"""A point is regular if such a relative move of the inputs changes values and gradient by no more than that."""

_OF_RUNS = ("layout", "linearity", "outputs", "state", "needs_input_grad")
"""Kinds of findings that a backward with varying results may cause by itself."""

_AT_ONCE = 2**16
_LARGE = 1e250
"""From here on a product with a cotangent may overflow."""


class _Run(NamedTuple):
    """One backward run on a recorded graph, with what it is to give: ``times`` the usual gradient."""

    kind: str
    words: str
    cotangents: Callable[[], list[Tensor]]
    times: float = 1.0
    parts: tuple[_Run, ...] = ()
    """Runs with one property each, where this one has several."""


class _Call(NamedTuple):
    """A call of the function elsewhere, which must not matter to any other."""

    words: str
    attempts: list[list[Tensor]]
    """Inputs, to be tried until a call succeeds."""


class _Shared(NamedTuple):
    """Inputs that share memory: input i is ``slices[sources[i]]``, repeated to fill its shape."""

    words: str
    slices: list[Tensor]
    sources: list[int]


class Contract:
    """The probes of one function at its point.

    Args:
        function: What is probed.
        cotangents: Flat ones, one in each row; all are taken the gradient of, the first is probed with.
        generator: Of what rounds and moves inputs.
        rtol: The relative error that the function itself has.

    Attributes:
        gradients: That of each cotangent.
        findings: What is wrong.
        notes: What is worth knowing.
    """

    def __init__(self, function: Function, cotangents: Tensor, generator: torch.Generator, rtol: float = 0.0) -> None:
        self.function, self.cotangents, self.generator = function, cotangents, generator
        dtype = max((o.dtype.to_real() for o in function.outputs), key=lambda d: torch.finfo(d).eps)
        dtype = max((dtype, *(o.value.dtype.to_real() for o in function.inputs)), key=lambda d: torch.finfo(d).eps)
        self.dtype, self.relative = dtype, max(rtol, _TOLERANCE[dtype] * torch.finfo(dtype).eps)
        self.least = 8 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        """A few steps of the smallest numbers, below which a dtype has no digits."""
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self.gradients = torch.empty(len(cotangents), sum(function.sizes), dtype=torch.float64)
        self.is_odd = False
        """Whether the gradient of -1 times the first cotangent is known to be -1 times its own, bit for bit."""

    def probe(self) -> None:
        """Run all probes, the cheap ones first."""
        self._probe()
        if any(one.kind in _OF_RUNS for one in self.findings):
            self._repeat()

    def _probe(self) -> None:
        function = self.function
        self.shaped = function.shaped(self.cotangents[0])
        leaves, outputs = self._record()
        self.usual_values = function.flatten(outputs)
        overwritten = self._take_gradients(leaves, outputs)
        function.keeps_inputs = not self.findings
        calls = [] if self.findings else self._other_calls()
        before = self._after_calls(leaves, outputs)
        if not self.findings and before is not None and not self.is_odd:
            self._repeat()
        self.findings = self.findings or overwritten
        del outputs, leaves  # and the graph
        if self.findings:
            return
        leaves, outputs = self._record()
        if not self._is_undisturbed(calls, before, leaves, outputs):
            return
        for run in self._runs():
            self._try(run, leaves, outputs)
        self._zeros(leaves, outputs)
        self._stride_0(leaves, outputs)
        self._single_outputs(leaves, outputs)
        if self.findings and calls:
            wrong = self._lasting(calls, leaves, outputs)
            self.findings = [wrong] if wrong is not None else self.findings
        del outputs, leaves
        if not self.findings:
            for layout, needed in zip_longest(self._layouts(), self._needed()):
                if not self._try_inputs(layout, needed):
                    break
            self._shared_memory()
            if self.findings and self._draws_random_numbers():  # in the order of memory, which was another one
                self.findings = [one for one in self.findings if one.kind != "layout"]
        self._hidden_float32(self.first)

    def _after_calls(self, leaves: list[Tensor], outputs: list[Tensor]) -> Tensor | None:
        """Return the gradient again, now that the function was called elsewhere: -1 times that of -1 times grad_output.

        Where that is another one, the sign is probed by a run of its own.
        """
        with suppress(Exception):
            negative = -self._backward(outputs, leaves, [-v for v in self.shaped])
            self.is_odd = torch.equal(negative, self.first)
            if self.is_odd:
                return negative
        try:
            return self._backward(outputs, leaves, self.shaped)
        except Exception as error:
            if not self.findings:
                said = f"after another forward the backward raises {type(error).__name__}: {error}"
                self.findings.append(Finding("state", said, guess=self._stale()))
            return None

    def _record(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return new leaves, and the outputs with their graph."""
        leaves = self.function.leaves()
        return leaves, self.function.record(leaves)

    def _take_gradients(self, leaves: list[Tensor], outputs: list[Tensor]) -> list[Finding]:
        """Take the gradients: nothing that was given may change. Return what is wrong with those returned first."""
        function, fresh = self.function, [v.clone() for v in self.shaped]
        given = [one.value for one in function.inputs]  # leaves are copies of these
        self._unchanged(leaves, given, "the forward", "input")
        returned = function.gradients(outputs, leaves, fresh, keep=True)
        copies = [None if grad is None else grad.clone() for grad in returned]
        function.join(copies, out=self.gradients[0])
        self.first = self.gradients[0]
        self.usual = float(self.first.abs().nan_to_num_(0.0, 0.0).max()) if self.first.numel() else 0.0
        self._unchanged(leaves, given, "the backward", "input")
        self._unchanged(fresh, self.shaped, "the backward", "grad_output of output")
        for row, cotangent in zip(self.gradients[1:], self.cotangents[1:], strict=True):
            function.backward(outputs, leaves, function.shaped(cotangent), keep=True, out=row)
        if len(self.gradients) == 1:
            negative = self._backward(outputs, leaves, [-v for v in self.shaped])
            if not (self.findings or _are_the_same(-negative, self.first)):
                self._repeat()
        return [
            Finding(
                "mutation",
                f"a backward overwrites the gradient of {one.name} that the one before has returned",
                one.name,
            )
            for one, grad, copy in zip(function.inputs, returned, copies, strict=True)
            if grad is not None and copy is not None and not _are_the_same(grad.to_dense(), copy.to_dense())
        ]

    def _repeat(self) -> None:
        """Say by how much backward runs of one graph differ: in place of what else was found, if by much."""
        leaves, outputs = self._record()
        runs = [self._backward(outputs, leaves, self.shaped).clone() for _ in range(_REPEATS)]
        for run in runs:
            message = "the same backward, run again, gives something else"
            found = self._difference("non-determinism", message, run, runs[0])
            if found is not None:
                self.findings = [replace(found, guess=self._first_alone())]
                return
        if not self.findings and not all(_are_the_same(run, runs[0]) for run in runs):
            self.notes.append(Finding("non-determinism", "equal backward runs differ in the last bits"))

    def _first_alone(self) -> str:
        """Return a guess if the first backward of every graph agrees: then later ones see what it has overwritten."""
        for _ in range(_REPEATS - 1):
            leaves, outputs = self._record()
            alone = self.function.backward(outputs, leaves, [v.clone() for v in self.shaped])
            if not _are_the_same(alone, self.first):
                return ""
        return "only the first backward of a graph is right, it overwrites what was saved"

    def _other_calls(self) -> list[_Call]:
        """Call the function elsewhere, and with each length shorter by one; return the calls."""
        values, own = [one.value for one in self.function.inputs], self.function.are_arguments
        calls = [_Call("another forward in between", self._flipped())]
        lengths = dict.fromkeys(n for v, is_own in zip(values, own, strict=True) if is_own for n in v.shape if n > 1)
        for length in [*lengths][:_MOST_LENGTHS]:
            alone = [
                i
                for i in range(max(v.dim() for v in values))
                if any(is_own and i < v.dim() and v.shape[i] == length for v, is_own in zip(values, own, strict=True))
            ]
            attempts = [
                [_shorter(v, length, dim) if is_own else v for v, is_own in zip(values, own, strict=True)]
                for dim in (None, *(alone if len(alone) > 1 else ()))
            ]
            calls.append(_Call(f"a call with {length - 1} in place of {length}", attempts))
        return [call for call in calls if self._call(call)]

    def _call(self, call: _Call) -> bool:
        """Tell whether the function can be called so."""
        for inputs in call.attempts:
            leaves = [one.clone().requires_grad_() for one in inputs]
            try:
                outputs = self.function.record(leaves)
                self.function.gradients(outputs, leaves, [torch.ones_like(o) for o in outputs], keep=False)
            except Exception:  # outside of the domain, or the sizes belong together
                continue
            return True
        return False

    def _is_undisturbed(
        self, calls: list[_Call], before: Tensor | None, leaves: list[Tensor], outputs: list[Tensor]
    ) -> bool:
        """Compare the outputs of the forward after ``calls``, and the gradient of that before, with the usual ones."""
        values = self.function.flatten(outputs)
        if values.shape != self.usual_values.shape:
            self.findings.append(Finding("state", f"{_said(calls)} changes the shape of the next output"))
            return False
        words = f"the same inputs after {_said(calls)}"
        wrong = self._values_differ("state", values, self.usual_values, words) if calls else None
        if wrong is None and before is not None:
            wrong = self._difference("state", "another forward in between changes the backward", before, self.first)
            if wrong is not None:
                wrong = self._lasting(calls, leaves, outputs) or replace(wrong, guess=self._stale())
        self.findings += [wrong] if wrong is not None else []
        return wrong is None

    def _lasting(self, calls: list[_Call], leaves: list[Tensor], outputs: list[Tensor]) -> Finding | None:
        """Return what is wrong with the gradient of the forward after ``calls``."""
        words = f"{_said(calls)} changes the next backward"
        return self._difference("state", words, self._backward(outputs, leaves, self.shaped), self.first)

    def _stale(self) -> str:
        """Return a guess if the backward is that of the last forward."""
        function, (leaves, outputs) = self.function, self._record()
        (inputs,) = self._flipped()
        others = [one.clone().requires_grad_() for one in inputs]
        try:
            between = function.record(others)
            found = self._backward(outputs, leaves, self.shaped)
            is_last = _are_the_same(found, self._backward(between, others, self.shaped))
        except Exception:
            return ""
        return "stale saved tensor: that of the last forward" if is_last else ""

    def _flipped(self) -> list[list[Tensor]]:
        return [[one.value.flatten().flip(0).reshape(one.value.shape) for one in self.function.inputs]]

    def _runs(self) -> Iterator[_Run]:
        """Yield grad_outputs in all layouts, with other signs and sizes."""
        shaped = self.shaped
        times = {f"2^{power}": 2.0**power for power in _POWERS[self.dtype]}
        scaled = [
            _Run("linearity", f"grad_output times {name}", lambda t=t: [v * t for v in shaped], t)
            for name, t in (times if self.is_odd else {"-1": -1.0} | times).items()
        ]
        for layout, scale in zip_longest(layouts_of(shaped), scaled):
            if layout is None:
                yield scale
                continue
            alone = _laid_out(layout, shaped)
            if scale is None:
                yield alone
                continue
            words = f"{alone.words}, and times {scale.words.rpartition(' ')[2]}"
            cotangents = lambda place=layout.place, t=scale.times: [place(v * t) for v in shaped]  # noqa: E731
            yield _Run("layout", words, cotangents, scale.times, (scale, alone))

    def _try(self, run: _Run, leaves: list[Tensor], outputs: list[Tensor]) -> bool:
        """Note what is wrong with a run, or with the first of its parts that is."""
        try:
            gradient = self._backward(outputs, leaves, run.cotangents())
        except Exception:
            if not run.parts:
                raise
            return all([self._try(part, leaves, outputs) for part in run.parts])  # it refuses what they have not alone
        guess = "only when grad_output is strided" if run.kind == "layout" else ""
        found = self._difference(run.kind, run.words, gradient, self.first * run.times, run.times, guess)
        if found is not None and all([self._try(part, leaves, outputs) for part in run.parts]):
            self.findings.append(found)
        return found is None

    def _zeros(self, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        found = self._backward(outputs, leaves, [torch.zeros_like(v) for v in self.shaped])
        expected = torch.where(self.first.isfinite(), 0.0, self.first)
        self._compare("linearity", "a grad_output of zeros", found, expected, 0.0)

    def _stride_0(self, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        """Give a grad_output of stride 0, in all dimensions or along one, as sums make it.

        The gradients of all of these add up to that of their sum, which is dense.
        """
        shaped, guess = self.shaped, "only when grad_output is strided"
        others = {_ONES: [torch.ones((), dtype=v.dtype, device=v.device).expand(v.shape) for v in shaped]}
        for dim in range(max((v.dim() for v in shaped), default=0)):
            if any(v.dim() > 1 and dim < v.dim() and v.shape[dim] > 1 for v in shaped):
                message = f"a grad_output of stride 0 along dimension {dim}, as sum({dim}) makes"
                others[message] = [
                    v.narrow(dim, 0, 1).expand(v.shape) if dim < v.dim() and v.numel() else v for v in shaped
                ]
        found = {message: self._backward(outputs, leaves, other) for message, other in others.items()}
        if self.dtype in _NEARBY and len(others) > 1:
            sums = [torch.stack(one).sum(0) for one in zip(*others.values(), strict=True)]
            total = self._backward(outputs, leaves, sums)
            if self._difference("layout", "", sum(found.values(), torch.zeros(())), total) is None:
                return
        for message, other in others.items():
            dense = [v.clone(memory_format=torch.contiguous_format) for v in other]
            expected = self._backward(outputs, leaves, dense)
            if not self._compare("layout", message, found[message], expected, guess=guess):
                return

    def _single_outputs(self, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        """Use some of several outputs: the gradients of one each, the others zero or unused, add up to that of all."""
        shaped, used = self.shaped, [i for i, o in enumerate(outputs) if o.requires_grad]
        if len(used) < 2:
            return

        def gradient(some: Sequence[int], *, zeros: bool) -> Tensor:
            others = [torch.zeros_like(v) if zeros else None for v in shaped]
            return self._backward(outputs, leaves, [v if i in some else others[i] for i, v in enumerate(shaped)])

        singles = [gradient([i], zeros=True) for i in used]
        largest = float(max((_largest(one, one) for one in singles), default=0.0)) / max(self.usual, self.least)
        total = sum(singles, torch.zeros(()))
        for i, single in zip(used, singles, strict=True):
            if not self._compare("outputs", f"only output {i} used", gradient([i], zeros=False), single, largest):
                return
        words = "the gradients for one output each, zeros for the others, added up"
        if not self._compare("outputs", words, total, self.first, largest):
            return
        for i, single in zip(used, singles, strict=True) if 2 < len(used) <= _FEW_OUTPUTS else ():
            for words, zeros in ((f"output {i} unused", False), (f"zeros for output {i}", True)):
                found = gradient([j for j in used if j != i], zeros=zeros)
                if not self._compare("outputs", words, found, self.first - single, largest):
                    return

    def _layouts(self) -> list[Layout]:
        own = zip(self.function.inputs, self.function.are_arguments, strict=True)
        return layouts_of(arguments) if (arguments := [one.value for one, is_own in own if is_own]) else []

    def _needed(self) -> list[tuple[set[int], ...]]:
        """Return sets of inputs, each with its complement, which are to need a gradient."""
        count = len(self.function.inputs)
        everything = set(range(count))
        if count <= _MOST_SUBSETS:
            sets = [{i for i in everything if mask >> i & 1} for mask in range(1, 2 ** max(0, count - 1))]
        else:
            sets = [{i for i in everything if i >> bit & 1} for bit in range((count - 1).bit_length())]
        return [(one, everything - one) for one in sets]

    def _try_inputs(self, layout: Layout | None, needed: tuple[set[int], ...] | None) -> bool:
        """Give the same numbers in other places in memory, and let only some need a gradient.

        To refuse a layout is no fault.

        Returns:
            Whether nothing is wrong.
        """
        for some in needed or (None,):
            found, is_refused = self._of_inputs(layout, some)
            if found is None and not is_refused:
                continue
            if layout is not None and needed is not None:
                parts = self._try_inputs(None, needed) and self._try_inputs(layout, None)
            else:
                parts = all(self._try_inputs(part, None) for part in (layout.parts if layout is not None else ()))
            if found is not None and parts:
                self._note_or_find(found, is_rare=layout is FLAGGED)
            return parts and found is None
        return True

    def _of_inputs(self, layout: Layout | None, some: set[int] | None) -> tuple[Finding | None, bool]:
        """Return what is wrong with the gradient for ``some`` inputs, all if None, and whether that was refused."""
        function, leaves = self.function, self.function.leaves()
        if layout is not None:
            places = zip(leaves, function.are_arguments, strict=True)
            leaves = [layout.place(leaf.detach()).requires_grad_() if own else leaf for leaf, own in places]
        if some is not None:
            leaves = [leaf if i in some else leaf.detach() for i, leaf in enumerate(leaves)]
        positions = sorted(some) if some is not None else list(range(len(leaves)))
        names = ", ".join(function.inputs[i].name for i in positions[:3]) + (", …" if len(positions) > 3 else "")
        message = f"only {names} need{'s' if len(positions) == 1 else ''} a gradient"
        words = layout.words.format("inputs").replace("that begins", "that begin") if layout is not None else ""
        message = ", and ".join(part for part in (words, message if some is not None else "") if part)
        try:
            outputs = function.record(leaves)
        except Exception:  # it refuses them, or takes a derivative inside
            return None, True
        values = function.flatten(outputs)
        try:
            gradient = function.backward_of_some(outputs, [leaves[i] for i in positions], positions, self.shaped)
        except Exception as error:
            if layout is not None and layout.parts:
                return None, True
            said = f"{message}: the backward raises {type(error).__name__}: {error}"
            return Finding("layout" if some is None else "needs_input_grad", said), False
        del outputs
        expected = self.first
        if some is not None:
            needs = [torch.full((n,), i in some) for i, n in enumerate(function.sizes)]
            expected = torch.where(torch.cat(needs), expected, 0.0)
        guess = f"only for {words}" if some is None else ""
        kind = "layout" if some is None else "needs_input_grad"
        found = self._values_differ(kind, values, self.usual_values, message)
        found = found or self._difference(kind, message, gradient, expected, guess=guess)
        if found is not None and layout is not None and values.shape == self.usual_values.shape:
            off = values - self.usual_values, gradient - expected
            found = None if self._is_rounding(*off) else found
        return found, False

    def _shared_memory(self) -> None:
        """Give one tensor for several inputs, and inputs of stride 0: as if they were copies of it."""
        values = [one.value for one in self.function.inputs]
        own = [is_own and v.numel() > 0 for v, is_own in zip(values, self.function.are_arguments, strict=True)]
        same = list(range(len(values)))
        if self.findings or self.dtype not in _NEARBY:  # half precision may round copies otherwise
            return
        alike: dict[Any, int] = {}
        sources = [alike.setdefault((v.shape, v.dtype), i) if own[i] else i for i, v in enumerate(values)]
        tried = [_Shared("one tensor for several inputs", values, sources)] if sources != same else []
        for dim in range(max((v.dim() for v, is_own in zip(values, own, strict=True) if is_own), default=0)):
            slices = [
                v.narrow(dim, 0, 1) if is_own and dim < v.dim() else v for v, is_own in zip(values, own, strict=True)
            ]
            if any(one.shape != v.shape for one, v in zip(slices, values, strict=True)):
                tried.append(_Shared(f"inputs of stride 0 along dimension {dim}", slices, same))
        if len(tried) > 1 and sources != same and self._is_alike(_Shared("", tried[1].slices, sources)):
            del tried[:2]
        for one in tried:
            if not self._try_shared(one):
                return

    def _is_alike(self, shared: _Shared) -> bool:
        """Tell whether copies give the same, and finite numbers, which says as much of each property by itself."""
        try:
            found, expected = (self._of_shared(shared, is_copied=is_copied) for is_copied in (False, True))
        except Exception:
            return False
        pairs = zip(found, expected, strict=True)
        return all(torch.equal(one, other) and bool(other.isfinite().all()) for one, other in pairs)

    def _try_shared(self, shared: _Shared) -> bool:
        message = shared.words
        try:
            expected = self._of_shared(shared, is_copied=True)
            found = self._of_shared(shared, is_copied=False)
        except Exception:  # it refuses them, or the point is outside of the domain
            return True
        wrong = self._values_differ("layout", found[0], expected[0], message)
        which = 0 if wrong is not None else 1
        wrong = wrong or self._difference("layout", message, found[1], expected[1], guess=f"only for {message}")
        if wrong is None or not self._is_regular(shared, which, expected):
            return True
        self._note_or_find(wrong, is_rare=True)
        return False

    def _note_or_find(self, wrong: Finding, *, is_rare: bool) -> None:
        """Note what PyTorch's own operators do wrong with inputs that are rarely laid out so: no fault of ``fn``."""
        message = f"PyTorch's own operators are wrong here: {wrong.message}"
        if is_rare and not _has_own_code(self._record()[1]):
            self.notes.append(replace(wrong, message=message))
        else:
            self.findings.append(wrong)

    def _of_shared(self, shared: _Shared, *, is_copied: bool, moved: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return outputs and gradient."""
        shapes = [one.value.shape for one in self.function.inputs]
        leaves = [one.clone().requires_grad_() for one in shared.slices]
        inputs = [leaves[source] for source in shared.sources]
        inputs = [one if one.shape == shape else one.expand(shape) for one, shape in zip(inputs, shapes, strict=True)]
        if is_copied:
            inputs = [one.clone(memory_format=torch.contiguous_format) for one in inputs]
        if moved:
            inputs = [one + moved * self._drawn(one) for one in inputs]
        outputs = self.function.record(inputs)
        gradient = self.function.backward(outputs, leaves, self.shaped, shapes=shapes)
        return self.function.flatten(outputs), gradient

    def _drawn(self, like: Tensor) -> Tensor:
        """Return moves of a tensor relative to its elements, or to their mean where that is more."""
        signs = torch.rand(like.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        size = like.detach().abs()
        return (signs * torch.maximum(size, size.mean())).to(like)

    def _is_regular(self, shared: _Shared, which: int, expected: tuple[Tensor, Tensor]) -> bool:
        """Tell whether values (0) or gradient (1) are finite where inputs are alike, and nearly the same nearby."""
        move, allowed = _NEARBY[self.dtype]
        largest = float(expected[which].abs().max()) if expected[which].numel() else 0.0
        for _ in range(_ROUNDED_TIMES):
            try:
                nearby = self._of_shared(shared, is_copied=True, moved=move)[which]
            except Exception:
                return False
            if nearby.shape != expected[which].shape:
                return False
            if not bool(((nearby - expected[which]).abs() <= allowed * largest).all()):  # also where it is not finite
                return False
        return True

    def _is_rounding(self, off: Tensor, gradient_off: Tensor) -> bool:
        """Whether what differs is no more than what inputs that are rounded otherwise change: sums in another order."""
        usual, first = self.usual_values, self.first
        noise = [torch.zeros_like(usual), torch.zeros_like(first)]
        for _ in range(_ROUNDED_TIMES):
            leaves = []
            for leaf, own in zip(self.function.leaves(), self.function.are_arguments, strict=True):
                value = leaf.detach()
                if own and value.is_floating_point():
                    signs = torch.randint(-1, 2, value.shape, generator=self.generator).to(value)
                    value = value * (1 + signs * torch.finfo(value.dtype).eps)
                leaves.append(value.requires_grad_())
            outputs = self.function.record(leaves)
            found = self.function.flatten(outputs), self._backward(outputs, leaves, self.shaped)
            if found[0].shape != usual.shape:
                return False
            changes = (found[0] - usual, found[1] - first)
            noise = [torch.maximum(n, c.abs().nan_to_num(0.0)) for n, c in zip(noise, changes, strict=True)]
        bars = [
            n + n.mean() if n.shape == one.shape else n.max() for n, one in zip(noise, (off, gradient_off), strict=True)
        ]
        return all(bool((one.abs() <= _ROUNDING * n).all()) for one, n in zip((off, gradient_off), bars, strict=True))

    def _draws_random_numbers(self) -> bool:
        found = []

        def look(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(torch.Tag.nondeterministic_seeded in operation.tags)
            return operation(*args, **kwargs)

        with each_operation(look):
            self.function.record(self.function.leaves())
        return any(found)

    def _values_differ(self, kind: str, found: Tensor, expected: Tensor, message: str) -> Finding | None:
        """Compare outputs, where all have the size that they usually have."""
        usual = self.usual_values
        if found.shape != expected.shape or expected.shape != usual.shape or torch.equal(found, expected):
            return None
        both = found.isfinite() & expected.isfinite()
        size = torch.maximum(found.abs(), expected.abs())
        largest = torch.cat([size, usual.abs()]).nan_to_num(0.0, 0.0).max() if size.numel() else 0.0
        wrong = both & ((found - expected).abs() > self.relative * (size + largest) + self.least)
        if not bool(wrong.any()):
            return None
        at = int(torch.where(wrong, (found - expected).abs(), -1.0).argmax())
        said = f"the forward gives {float(found[at]):.6g} in place of {float(expected[at]):.6g} for {message}"
        return Finding(kind, f"{said}, {int(wrong.sum())} of {wrong.numel()} elements differ")

    def _hidden_float32(self, first: Tensor) -> None:
        """In float64 some bits of a gradient are beyond float32, unless it was computed in that."""
        dtypes = [*(one.value.dtype for one in self.function.inputs), *(o.dtype for o in self.function.outputs)]
        if not all(dtype in (torch.float64, torch.complex128) for dtype in dtypes):
            return
        telling = 0
        for part in first.split(_AT_ONCE):
            finite = part.isfinite()
            if bool(((part.float().double() != part) & finite).any()):
                return
            # Of few bits is a constant, or rounding.
            telling += int(((part.bfloat16().double() != part) & finite).sum())
        if telling >= 4:
            message = "all gradients are float32 numbers although inputs and outputs are float64"
            self.findings.append(Finding("precision", message, guess="float32 inside the backward"))

    def _backward(
        self, outputs: list[Tensor], leaves: list[Tensor], cotangents: list[Tensor | None] | list[Tensor]
    ) -> Tensor:
        return self.function.backward(outputs, leaves, cotangents, keep=True)

    def _compare(
        self, kind: str, message: str, found: Tensor, expected: Tensor, cotangent: float = 1, guess: str = ""
    ) -> bool:
        """Note what is wrong where two gradients should agree; tell whether they do."""
        wrong = self._difference(kind, message, found, expected, cotangent, guess)
        self.findings += [wrong] if wrong is not None else []
        return wrong is None

    def _difference(
        self, kind: str, message: str, found: Tensor, expected: Tensor, cotangent: float = 1, guess: str = ""
    ) -> Finding | None:
        """Compare two gradients that should agree, for cotangents of a size relative to the usual one.

        Under a cotangent of ones the sums of a normalization cancel: in half precision what remains is measured by the
        largest element of the usual gradient.

        Returns:
            What is wrong, if anything.
        """
        if torch.equal(found, expected):
            return None
        largest = max([abs(cotangent) * self.usual, *(_largest(*part) for part in _parts(found, expected))])
        small = 1e-2 if self.dtype in _NEARBY else 1.0 if message == _ONES else 0.2
        count, worst, position, start = 0, -1.0, 0, 0
        for one, other in _parts(found, expected):
            off = (one - other).abs()
            size = torch.maximum(one.abs(), other.abs())
            wrong = one.isfinite() & other.isfinite() & (off > self.relative * (size + small * largest) + self.least)
            wrong |= other.isfinite() & (other.abs() < _LARGE) & ~one.isfinite()
            if bool(wrong.any()):
                count += int(wrong.sum())
                most, at = torch.where(wrong, off.nan_to_num(torch.inf), -1.0).max(dim=0)
                worst, position = max((worst, position), (float(most), start + int(at)), key=lambda pair: pair[0])
            start += len(one)
        if not count:
            return None
        name, index = self.function.name_of(position)
        got, wanted = float(found[position]), float(expected[position])
        said = f"{message}: {got:.6g} in place of {wanted:.6g}, {count} of {found.numel()} elements differ"
        return Finding(kind, said, name, index, guess=guess)

    def _unchanged(self, now: list[Tensor], before: list[Tensor], who: str, what: str) -> None:
        for i, (a, b) in enumerate(zip(now, before, strict=True)):
            if not _are_the_same(a, b):
                name = self.function.inputs[i].name if what == "input" else str(i)
                self.findings.append(Finding("mutation", f"{who} overwrites {what} {name}"))


def _parts(found: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of two vectors, so that comparing them takes little memory."""
    return zip(found.split(_AT_ONCE), expected.split(_AT_ONCE), strict=True)


def _largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest |x| of either, where both are finite."""
    both = found.isfinite() & expected.isfinite()
    return float(torch.where(both, torch.maximum(found.abs(), expected.abs()), 0.0).max()) if found.numel() else 0.0


def _are_the_same(first: Tensor, second: Tensor) -> bool:
    """Compare bit for bit, NaN equal to itself."""
    if torch.equal(first, second):
        return True
    one, other = (torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t for t in (first, second))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _laid_out(layout: Layout, shaped: list[Tensor]) -> _Run:
    """Return the run with a grad_output in a layout."""
    parts = tuple(_laid_out(part, shaped) for part in layout.parts)
    return _Run("layout", layout.words.format("grad_output"), lambda: [layout.place(v) for v in shaped], 1.0, parts)


def _has_own_code(outputs: Sequence[Tensor]) -> bool:
    """Tell whether a node of the graph was written by somebody else than PyTorch."""
    seen: set[Any] = set()
    waiting = [o.grad_fn for o in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction) or "CppNode" in node.name():
                return True
            waiting += [other for other, _ in node.next_functions]
    return False


def _said(calls: Sequence[_Call]) -> str:
    return " and ".join(call.words for call in calls[1:] or calls)


def _shorter(value: Tensor, length: int, dim: int | None) -> Tensor:
    """Return a part of ``value``, shorter by one along each dimension of that length, or along one of them."""
    for i, size in enumerate(value.shape):
        if size == length and dim in (None, i):
            value = value.narrow(i, 0, length - 1)
    return value
