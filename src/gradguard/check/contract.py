"""What a backward owes whatever its formula: one answer, for any layout, linear, changing nothing that it is given.

No differences are taken here: backward runs are compared with one another, on one recorded graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradguard.check.function import Function
from gradguard.check.report import Finding
from gradguard.torch_private import each_operation

_REPEATS = 6
_TOLERANCE = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 8.0, torch.float16: 8.0}
"""How many machine epsilons two backward runs that should agree may differ by."""

_ONES = "a grad_output of stride 0, as sum() makes"
_POWERS = {torch.bfloat16: (-2, 2), torch.float16: (-2, -1)}
"""What cotangents are multiplied by, exactly, within the range of the dtype: in float16 more may overflow inside."""

_ROUNDED_TIMES = 3
_ROUNDING = 32
"""So many times what rounding the inputs changes may come of sums in another order."""

_MOST_ALONE = 4
"""Up to so many inputs, each is tried as the only one that needs a gradient; else every second one."""

_AT_ONCE = 2**16
_LARGE = 1e250
"""From here on a product with a cotangent may overflow."""


class Contract:
    """The probes of one function at its point."""

    def __init__(self, function: Function, cotangent: Tensor, generator: torch.Generator, rtol: float = 0.0) -> None:
        self.function, self.cotangent, self.generator = function, cotangent, generator
        dtype = max((o.dtype.to_real() for o in function.outputs), key=lambda d: torch.finfo(d).eps)
        dtype = max((dtype, *(o.value.dtype.to_real() for o in function.inputs)), key=lambda d: torch.finfo(d).eps)
        self.dtype, self.relative = dtype, max(rtol, _TOLERANCE[dtype] * torch.finfo(dtype).eps)
        self.least = 8 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        """A few steps of the smallest numbers, below which a dtype has no digits."""
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []

    def probe(self) -> None:
        """Run all probes."""
        function, shaped = self.function, self.function.shaped(self.cotangent)
        leaves = function.leaves()
        given = [one.value for one in function.inputs]  # leaves are copies of these
        outputs = function.record(leaves)
        self._unchanged(leaves, given, "the forward", "input")
        fresh = [v.clone() for v in shaped]
        first = torch.empty(sum(function.sizes), dtype=torch.float64, device=leaves[0].device)
        function.backward(outputs, leaves, fresh, keep=True, out=first)
        self.usual = float(first.abs().nan_to_num_(0.0, 0.0).max()) if first.numel() else 0.0
        self._unchanged(leaves, given, "the backward", "input")
        self._unchanged(fresh, shaped, "the backward", "grad_output of output")
        function.keeps_inputs = not self.findings
        del fresh
        self._repeats(outputs, leaves, shaped, first)
        if not self.findings:
            self._leaves_results_alone(outputs, leaves, shaped)
            self._another_forward(shaped, first)
        if self.findings:
            return
        for kind, name, size, other, expected in self._cotangents(outputs, leaves, shaped, first):
            found = self._backward(outputs, leaves, other)
            self._compare(kind, name, found, expected() if callable(expected) else expected, size)
            del other
        self._expanded(outputs, leaves, shaped)
        self._single_outputs(outputs, leaves, shaped)
        usual = function.flatten(outputs)
        del outputs, leaves  # and the graph
        if not self.findings:
            self._other_inputs(shaped, first, usual)
            if self.findings and self._draws_random_numbers():  # in the order of memory, which was another one
                self.findings = []
            self._without_gradients(shaped, first)
        self._another_size(shaped, first)
        self._hidden_float32(first)

    def _repeats(self, outputs: list[Tensor], leaves: list[Tensor], shaped: list[Tensor], first: Tensor) -> None:
        bits = True
        for _ in range(_REPEATS - 1):
            again = self._backward(outputs, leaves, shaped)
            if torch.equal(again, first):
                continue
            message = "the same backward, run again, gives something else"
            guess = "" if _are_the_same(again, first) else self._first_alone(shaped, first)
            if not self._compare("non-determinism", message, again, first, guess=guess):
                return
            bits = bits and _are_the_same(again, first)
        if not bits:
            self.notes.append(Finding("non-determinism", "equal backward runs differ in the last bits"))

    def _leaves_results_alone(self, outputs: list[Tensor], leaves: list[Tensor], shaped: list[Tensor]) -> None:
        """What a backward has returned is its caller's: the next one must not write to it."""
        returned = self.function.gradients(outputs, leaves, [v.clone() for v in shaped], keep=True)
        before = [None if grad is None else grad.clone() for grad in returned]
        self._backward(outputs, leaves, [-v for v in shaped])
        for one, grad, was in zip(self.function.inputs, returned, before, strict=True):
            if grad is not None and was is not None and not _are_the_same(grad.to_dense(), was.to_dense()):
                message = f"a backward overwrites the gradient of {one.name} that the one before it has returned"
                self.findings.append(Finding("mutation", message, one.name))

    def _first_alone(self, shaped: list[Tensor], first: Tensor) -> str:
        """Tell whether the first backward of each graph is always the same: then it changes what was saved."""
        for _ in range(_REPEATS - 1):
            leaves = self.function.leaves()
            outputs = self.function.record(leaves)
            if not _are_the_same(self.function.backward(outputs, leaves, [v.clone() for v in shaped]), first):
                return ""
        return "only the first backward of a graph is right, it overwrites what was saved"

    def _cotangents(
        self, outputs: list[Tensor], leaves: list[Tensor], shaped: list[Tensor], first: Tensor
    ) -> Iterator[tuple[str, str, float, list[Tensor], Tensor | Callable[[], Tensor]]]:
        yield (
            "layout",
            "a grad_output that is every second element of a larger buffer",
            1,
            [_strided(v) for v in shaped],
            first,
        )
        if any(v.dim() > 1 for v in shaped):
            yield "layout", "a transposed grad_output", 1, [_transposed(v) for v in shaped], first
        ones = [torch.ones((), dtype=v.dtype, device=v.device).expand(v.shape) for v in shaped]
        dense = [one.clone(memory_format=torch.contiguous_format) for one in ones]
        yield "layout", _ONES, 1, ones, lambda: self._backward(outputs, leaves, dense)
        yield "linearity", "grad_output times -1", 1, [-v for v in shaped], -first
        for power in _POWERS.get(self.dtype, (-20, 10)):
            name = f"grad_output times 2^{power}"
            yield "linearity", name, 2.0**power, [v * 2.0**power for v in shaped], first * 2.0**power
        yield (
            "linearity",
            "a grad_output of zeros",
            0,
            [torch.zeros_like(v) for v in shaped],
            torch.where(first.isfinite(), 0.0, first),
        )

    def _expanded(self, outputs: list[Tensor], leaves: list[Tensor], shaped: list[Tensor]) -> None:
        """Give a grad_output of stride 0 along one dimension, as a sum over that dimension makes it."""
        for dim in range(max((v.dim() for v in shaped), default=0)):
            if not any(v.dim() > 1 and dim < v.dim() and v.shape[dim] > 1 for v in shaped):
                continue
            other = [v.narrow(dim, 0, 1).expand(v.shape) if dim < v.dim() and v.numel() else v for v in shaped]
            expected = self._backward(outputs, leaves, [v.clone(memory_format=torch.contiguous_format) for v in other])
            message = f"a grad_output of stride 0 along dimension {dim}, as sum({dim}) makes"
            if not self._compare("layout", message, self._backward(outputs, leaves, other), expected):
                return

    def _other_inputs(self, shaped: list[Tensor], first: Tensor, usual: Tensor) -> None:
        """Give the same numbers in other places in memory. To refuse them is no fault."""
        function = self.function
        for message, place in _PLACES.items():
            leaves = [
                place(leaf.detach()).requires_grad_() if is_argument else leaf
                for leaf, is_argument in zip(function.leaves(), function.are_arguments, strict=True)
            ]
            try:
                outputs = function.record(leaves)
            except Exception:  # it refuses them
                continue
            values, gradient = function.flatten(outputs), self._backward(outputs, leaves, shaped)
            del leaves, outputs
            if not self._has_values(message, values, usual, usual) or not self._compare(
                "layout", message, gradient, first, guess=f"only for {message}"
            ):
                if values.shape != usual.shape or not self._is_rounding(
                    values - usual, gradient - first, shaped, first
                ):
                    return
                self.findings.pop()
        if (
            self.dtype is torch.float64
        ):  # equal rows have no variance: in low precision a norm of them is rounding alone
            self._inputs_of_stride_0(shaped, usual, first)

    def _is_rounding(self, off: Tensor, gradient_off: Tensor, shaped: list[Tensor], first: Tensor) -> bool:
        """Whether what differs is no more than what inputs that are rounded otherwise change: sums in another order."""
        usual = self.function.flatten(self.function.record(self.function.leaves()))
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
            found = self.function.flatten(outputs), self._backward(outputs, leaves, shaped)
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

    def _inputs_of_stride_0(self, shaped: list[Tensor], usual: Tensor, first: Tensor) -> None:
        """Repeat the first slice of each input, with copies of it and without; the gradient is that of the slice."""
        function, message = self.function, "inputs of stride 0"
        values = [one.value for one in function.inputs]
        slices = [
            value.narrow(0, 0, 1) if own and value.dim() and value.numel() else value
            for own, value in zip(function.are_arguments, values, strict=True)
        ]
        try:
            expected, gradient = self._of_slices(slices, values, shaped, is_copied=True)
            values_found, gradient_found = self._of_slices(slices, values, shaped, is_copied=False)
        except Exception:  # it refuses them, or the point is outside of the domain
            return
        if not self._has_values(message, values_found, expected, usual) or not self._compare(
            "layout", message, gradient_found, gradient, guess=f"only for {message}"
        ):
            same = values_found.shape == expected.shape
            if same and self._is_rounding(values_found - expected, gradient_found - gradient, shaped, first):
                self.findings.pop()

    def _of_slices(
        self, slices: list[Tensor], values: list[Tensor], shaped: list[Tensor], *, is_copied: bool
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and gradient where ``slices`` are repeated to fill the inputs."""
        leaves = [one.clone().requires_grad_() for one in slices]
        inputs = [leaf.expand(value.shape) for leaf, value in zip(leaves, values, strict=True)]
        inputs = [one.clone(memory_format=torch.contiguous_format) for one in inputs] if is_copied else inputs
        outputs = self.function.record(inputs)
        gradient = self.function.backward(outputs, leaves, shaped, shapes=[value.shape for value in values])
        return self.function.flatten(outputs), gradient

    def _has_values(self, message: str, found: Tensor, expected: Tensor, usual: Tensor) -> bool:
        """Compare the outputs, where all have the size that they usually have."""
        if not found.shape == expected.shape == usual.shape or torch.equal(found, expected):
            return True
        both = found.isfinite() & expected.isfinite()
        size = torch.maximum(found.abs(), expected.abs())
        largest = torch.cat([size, usual.abs()]).nan_to_num(0.0, 0.0).max() if size.numel() else 0.0
        wrong = both & ((found - expected).abs() > self.relative * (size + largest) + self.least)
        if not bool(wrong.any()):
            return True
        at = int(torch.where(wrong, (found - expected).abs(), -1.0).argmax())
        said = f"the forward gives {float(found[at]):.6g} in place of {float(expected[at]):.6g} for {message}"
        self.findings.append(Finding("layout", f"{said}, {int(wrong.sum())} of {wrong.numel()} elements differ"))
        return False

    def _without_gradients(self, shaped: list[Tensor], first: Tensor) -> None:
        """Let some of the inputs need no gradient: the others have the same one."""
        function = self.function
        count = len(function.inputs)
        needed = [{i} for i in range(count)] if count <= _MOST_ALONE else [set(range(k, count, 2)) for k in (0, 1)]
        for some in needed if count > 1 else []:
            leaves = [leaf if i in some else leaf.detach() for i, leaf in enumerate(function.leaves())]
            try:
                outputs = function.record(leaves)
            except Exception:  # a derivative inside the function
                continue
            own = [leaf for i, leaf in enumerate(leaves) if i in some]
            parts = [torch.ones(n) if i in some else torch.zeros(n) for i, n in enumerate(function.sizes)]
            names = ", ".join(function.inputs[i].name for i in sorted(some)[:3])
            message = f"only {names} needs a gradient" if len(some) == 1 else f"only {names}, … need a gradient"
            try:
                found = function.backward_of_some(outputs, own, sorted(some), shaped)
            except Exception as error:
                said = f"{message}: the backward raises {type(error).__name__}: {error}"
                self.findings.append(Finding("needs_input_grad", said))
                return
            if not self._compare("needs_input_grad", message, found, torch.where(torch.cat(parts) > 0, first, 0.0)):
                return

    def _another_size(self, shaped: list[Tensor], first: Tensor) -> None:
        """Call it with fewer rows before the next forward: nothing kept from that may be used."""
        function = self.function
        values = [one.value for one in function.inputs]
        rows = max(
            (v.shape[0] for v, own in zip(values, function.are_arguments, strict=True) if own and v.dim()), default=0
        )
        if rows < 2:
            return
        fewer = [
            (v[: rows - 1] if own and v.dim() and v.shape[0] == rows else v).clone().requires_grad_()
            for v, own in zip(values, function.are_arguments, strict=True)
        ]
        try:
            outputs = [o for o in function.record(fewer) if o.requires_grad]
            torch.autograd.grad([o.real.sum() for o in outputs], fewer, allow_unused=True)
        except Exception:  # the sizes belong together
            return
        leaves = function.leaves()
        outputs = function.record(leaves)
        if function.flatten(outputs).numel() != function.size:
            self.findings.append(Finding("state", "a call with fewer rows changes the shape of the next output"))
            return
        message = "a call with fewer rows changes the next backward"
        self._compare("state", message, self._backward(outputs, leaves, shaped), first)

    def _single_outputs(self, outputs: list[Tensor], leaves: list[Tensor], shaped: list[Tensor]) -> None:
        """Leave the gradients of all outputs but one undefined: as if they were zeros."""
        if sum(o.requires_grad for o in outputs) < 2:
            return
        for i, output in enumerate(outputs):
            if output.requires_grad:
                alone = [v if j == i else None for j, v in enumerate(shaped)]
                zeros = [v if j == i else torch.zeros_like(v) for j, v in enumerate(shaped)]
                expected = self._backward(outputs, leaves, zeros)
                self._compare("outputs", f"only output {i} used", self._backward(outputs, leaves, alone), expected)

    def _another_forward(self, shaped: list[Tensor], first: Tensor) -> None:
        """Run another forward between the forward and its backward."""
        function = self.function
        leaves = function.leaves()
        outputs = function.record(leaves)
        others = [
            one.value.flatten().flip(0).reshape(one.value.shape).clone().requires_grad_() for one in function.inputs
        ]
        try:
            between = function.record(others)
        except Exception:  # the permuted point is outside the domain
            return
        found, message = self._backward(outputs, leaves, shaped), "another forward in between changes the backward"
        if torch.equal(found, first):
            return
        is_last = _are_the_same(found, self._backward(between, others, shaped))
        said = "stale saved tensor: that of the last forward" if is_last else ""
        self._compare("state", message, found, first, guess=said)

    def _hidden_float32(self, first: Tensor) -> None:
        """In float64 some bits of a gradient are beyond float32, unless it was computed in that."""
        dtypes = [*(one.value.dtype for one in self.function.inputs), *(o.dtype for o in self.function.outputs)]
        if not all(dtype in (torch.float64, torch.complex128) for dtype in dtypes):
            return
        telling = 0
        for part in first.split(_AT_ONCE):
            used = part[(part != 0) & part.isfinite()]
            if not torch.equal(used.float().double(), used):
                return
            telling += int((used.bfloat16().double() != used).sum())  # of few bits is a constant, or rounding
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
        """Compare two gradients that should agree, for cotangents of a size relative to the usual one.

        Under a cotangent of ones the sums of a normalization cancel: in half precision what remains is measured by the
        largest element of the usual gradient.

        Returns:
            Whether they do.
        """
        if torch.equal(found, expected):
            return True
        largest = max([cotangent * self.usual, *(_largest(*part) for part in _parts(found, expected))])
        small = 1e-2 if self.dtype not in _POWERS else 1.0 if message == _ONES else 0.2
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
            return True
        name, index = self.function.name_of(position)
        got, wanted = float(found[position]), float(expected[position])
        said = f"{message}: {got:.6g} in place of {wanted:.6g}, {count} of {found.numel()} elements differ"
        guess = guess or ("only when grad_output is strided" if kind == "layout" else "")
        self.findings.append(Finding(kind, said, name, index, guess=guess))
        return False

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
    one, other = (torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t for t in (first, second))
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _strided(v: Tensor) -> Tensor:
    buffer = torch.full((*v.shape, 2), torch.nan, dtype=v.dtype, device=v.device)
    view = buffer[..., 0]
    view.copy_(v)
    return view


def _transposed(v: Tensor) -> Tensor:
    return v if v.dim() < 2 else v.transpose(0, -1).contiguous().transpose(0, -1)


def _unaligned(v: Tensor) -> Tensor:
    """Return a copy that begins with the second element of its buffer."""
    buffer = torch.full((v.numel() + 1,), torch.nan, dtype=v.dtype, device=v.device)
    return buffer[1:].copy_(v.reshape(-1)).view(v.shape)


_PLACES = {
    "inputs that are every second element of a larger buffer": _strided,
    "transposed inputs": _transposed,
    "inputs that begin within a buffer": _unaligned,
}
"""What may be asked of the memory of inputs; PyTorch has no negative strides."""
