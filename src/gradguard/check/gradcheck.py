"""`gradcheck`: check that the backward of a function is the derivative of its forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradguard.check.admission import WIDE, refuse_unless
from gradguard.check.contract import Contract
from gradguard.check.differences import Differences, directions
from gradguard.check.flat_vectors import clear_of_zero, joined, largest
from gradguard.check.forward_mode import ForwardMode, check_forward_mode
from gradguard.check.function import Function, is_autograd_function, name_of, nodes_of
from gradguard.check.gradient_report import GradientFinding, GradientReport, Power, Verdict
from gradguard.check.mistake_guesses import with_guesses
from gradguard.check.other_sizes import with_other_sizes
from gradguard.check.precision import Conditioning, compare_backends
from gradguard.check.search import Search
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.state.generators import generator_states, restore_generators
from gradguard.tensors.matmul_precision import full_float32
from gradguard.torch_private import tree_map

_UNLIKE_THE_CALLERS = 7_919_190_301
"""Added to the seed: otherwise a cotangent drawn with the caller's seed could equal the caller's inputs."""
_LOW = (torch.float16, torch.bfloat16)


def gradcheck(
    fn: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    inputs_to_check: Iterable[str] | None = None,
    reference: Callable[..., Any] | None = None,
    backends: Mapping[str, Callable[..., Any]] | None = None,
    exhaustive: bool = False,
    order: int = 1,
    rtol: float = 0.0,
    sizes: Mapping[int, int | Sequence[int]] | None = None,
    seed: int = 0,
) -> GradientReport:
    r"""Check the backward of ``fn`` against differences of its forward, and name each wrong element.

    .. math:: v \cdot \frac{f(x + hu) - f(x - hu)}{2h} \;\to\; (\nabla_x\, v \cdot f) \cdot u

    The check draws a random cotangent v and random directions u over all inputs together. It takes the limit over a
    ladder of steps (Richardson extrapolation), which also yields an error bar: the caller chooses no step and no
    tolerance. If a direction disagrees, the check halves it until it finds the element. The derivatives from above and
    from below then tell a wrong gradient from a kink, a tie, a jump or a pole. Before that, the check compares backward
    runs with one another: layout and linearity in ``grad_output``, repetition, mutation, state, undefined gradients,
    float32 inside float64.

    In bfloat16 and float16, each element is compared with the float64 gradient under an error bar of its own. The bar
    is six times the element's scatter when the float64 results of all operations, and their partial sums, are rounded
    at random (Monte Carlo arithmetic). A kernel that rounds after each operation and accumulates in its own dtype
    passes.

    **Guarantees.**

    - ``"FAIL"``: a gradient or the ``jvp`` is wrong, or forward or backward breaks the contract. ``report.findings``
      says where.
    - ``"PASS"``: no direction disagreed. A wrong element of typical size would have shown from a relative error of
      ``report.power`` on, and in a lower dtype of the inputs from ``report.low_power`` on.
    - ``"INCONCLUSIVE"``: noise hides the answer, or the check has nothing to compare with.
    - A kink or a tie excuses a gradient only where two derivatives prove it: each settles as the steps get smaller, and
      they differ by more than their error bars.
    - A function that accepts float64 is checked in float64 first, whatever the dtype of its inputs.
    - TF32 is off during the check, and values on a GPU are compared on the CPU.
    - Inputs and outputs that cannot be checked raise an error and never pass.
    - The caller's inputs, their ``.grad``, buffers and random number generators do not change.
    - Equal seeds yield equal reports.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    float32, bfloat16, float16        checked in float64 if ``fn`` accepts it; the low dtype may then differ by rounding
    float32 alone                     checked in float32, with less power
    bfloat16 or float16 alone         INCONCLUSIVE, unless ``reference`` is given
    ReLU at 0, ties of max or sort    any subgradient is right, and noted
    rounding, sign, gates             the continuous side counts; a jump is noted
    pole, gradient of ±inf            noted; a NaN gradient fails if the function has a derivative
    complex                           as two real numbers, PyTorch's convention
    dropout, BatchNorm in training    random numbers and buffers are the same in each call
    random in another way             INCONCLUSIVE
    straight-through estimators       fail: their gradient is not the derivative
    sparse gradients                  checked like dense ones; sparse inputs and outputs are refused
    ``fn`` refuses a memory layout    no fault for a layout of inputs, a failure for a layout of ``grad_output``
    PyTorch's own nodes alone         not probed: forward mode, layouts of ``grad_output``, most layouts of inputs
    reentrant checkpoints             refused
    ================================  ==========================================================================

    Args:
        fn: Any callable, or a module. The parameters of a module are inputs too, under their dotted names.
        *inputs: The arguments of ``fn``; tensors may be nested in tuples, lists and dicts. Of the floating and complex
            tensors, those that require a gradient are checked, or all if none does. A single tuple is unpacked into
            the arguments, as in `torch.autograd.gradcheck`.
        kwargs: Keyword arguments for ``fn``; tensors among them count as inputs.
        inputs_to_check: The names of the inputs to check; all if None.
        reference: A float64 version of ``fn``, for an ``fn`` that does not accept float64.
        backends: Versions of ``fn`` on other devices or as other kernels, by name. Each gradient is compared with the
            float64 gradient and with the other versions. If the name is a device, the inputs move to that device.
        exhaustive: Also compare every element with its own derivative, until five are wrong. Elements that affect
            disjoint outputs share a forward.
        order: 2 to check the gradient of the gradient too: its values in float64, and which inputs need a gradient.
        rtol: The relative error of the function itself, such as of a solver that stops at a tolerance. The gradient may
            have the same error. A report that fails by little proposes a value.
        sizes: Other lengths to check. ``{7: 16}`` replaces each length of 7 in the arguments by 1, 15, 16 and 17, the
            edges of a tile of 16. ``{7: [1, 100]}`` tries 1 and 100.
        seed: The seed of the directions and the cotangent; equal seeds yield equal reports.

    Returns:
        The report: print it, or read ``verdict``, ``findings``, ``notes`` and ``power``.

    Raises:
        InvalidTypeError: If ``fn`` is not callable or returns no floating tensor, or there is nothing to check.
        InvalidValueError: If the outputs have no graph, an input or output contains NaN, or a name is not among the
            inputs.

    Example:
        >>> import gradguard as gg, torch
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad_output):
        ...         (x,) = ctx.saved_tensors
        ...         return grad_output * x  # forgot the 2
        >>> def square(x):
        ...     return Square.apply(x)
        >>> report = gg.gradcheck(square, torch.linspace(1, 2, 4, dtype=torch.float64))
        >>> report.verdict, report.findings[0].place, report.findings[0].guess
        ('FAIL', 'x[0]', 'ratio 0.5000')

    Reference:
        PaddlePaddle, Auto Gradient Check Design (2017); Richardson (1911), the deferred approach to the limit; Clarke
        (1983), subgradients; Parker (1997), Monte Carlo arithmetic.
    """
    started = time.perf_counter()
    if not 0 <= rtol < 1:
        raise InvalidValueError(f"rtol is {rtol!r}: expected the relative error of a solver, at least 0 and below 1.")
    if order not in (1, 2):
        raise InvalidValueError(f"order is {order!r}: expected 1, or 2 for the gradient of the gradient too.")
    kernels = dict(backends or {})
    for name, kernel in kernels.items():
        if not callable(kernel):
            raise InvalidTypeError(f"backends[{name!r}] is {type(kernel).__name__}: expected a function or a module.")
    if is_autograd_function(fn):
        fn = fn.apply
    if len(inputs) == 1 and type(inputs[0]) is tuple:
        inputs = inputs[0]
    if not callable(fn):
        raise InvalidTypeError(f"fn is {type(fn).__name__}: expected a function or a module, then its inputs.")
    chosen = [inputs_to_check] if isinstance(inputs_to_check, str) else inputs_to_check
    chosen = None if chosen is None else list(chosen)
    given, options = (inputs, dict(kwargs or {})), (chosen, reference, exhaustive, order, rtol, seed)
    randomness = generator_states()
    with full_float32():
        check = _Check(fn, *given, *options)
        try:
            check.run(kernels)
            drawn = torch.Generator().manual_seed(seed)
            for said, other in with_other_sizes(given, sizes or {}, drawn):
                if not check.findings:
                    check.include(_Check(fn, *other, *options), said)
        finally:
            check.put_back()
            restore_generators(randomness)
    return check.report(time.perf_counter() - started)


@dataclass
class _Check:
    """One call of `gradcheck`: the arguments, and the outcome so far."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    chosen: list[str] | None
    reference: Any
    exhaustive: bool
    order: int
    rtol: float
    seed: int
    findings: list[GradientFinding] = field(default_factory=list)
    notes: list[GradientFinding] = field(default_factory=list)
    undecided: list[GradientFinding] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    power: float = float("inf")
    directions: int = 0
    dtype: str = "float64"
    low_power: Power | None = None
    forward_mode: ForwardMode = "not checked"

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(_UNLIKE_THE_CALLERS + self.seed)

    def run(self, backends: dict[str, Any]) -> None:
        """Run the checks that the arguments ask for."""
        low = self._function(self.fn, wide=False)
        exact = self._exact(low)
        self.dtype = str((exact or low).inputs[0].value.dtype).removeprefix("torch.")
        taken = self._contract(exact or low)
        if exact is None:  # differences of half-precision outputs are too coarse
            message = f"the check needs more precision than {self.dtype}: give reference=, the same function in float64"
            self.undecided.append(GradientFinding("precision", message))
            return
        if taken is None:
            return
        self._search(exact, taken)
        if exact is not low and self._is_the_same(exact, low) and self._contract(low) and not self.findings:
            self._low_precision(exact, low)
        if backends:
            self._backends(exact, backends)
        if self.order > 1 and not self.findings:
            self._second_order(exact)

    def include(self, other: _Check, sizes: str) -> None:
        """Run the check of the same function with other ``sizes``, and add its findings to this one."""
        try:
            other.run({})
        except Exception as error:
            self.findings.append(GradientFinding("error", f"{sizes} it raises {type(error).__name__}: {error}"))
        finally:
            other.put_back()
        self.functions += other.functions
        for own, found in ((self.findings, other.findings), (self.undecided, other.undecided)):
            own += [replace(one, message=f"{sizes}: {one.message}".removesuffix(": ")) for one in found]

    def put_back(self) -> None:
        """Restore the buffers of the modules that were called."""
        for function in self.functions:
            function.state.restore()

    def report(self, seconds: float) -> GradientReport:
        """Return the report; ``seconds`` is the duration of the check."""
        verdict: Verdict = "FAIL" if self.findings else "INCONCLUSIVE" if self.undecided else "PASS"
        found = tuple(self.findings or self.undecided)
        return GradientReport(
            verdict=verdict,
            findings=found,
            notes=tuple(self.notes),
            power=self.power,
            low_power=self.low_power,
            dtype=self.dtype,
            forward_mode=self.forward_mode,
            directions=self.directions,
            forwards=sum(f.forwards for f in self.functions),
            backwards=sum(f.backwards for f in self.functions),
            seconds=seconds,
        )

    def _function(self, fn: Any, wide: bool, device: torch.device | None = None) -> Function:
        there = lambda one: one.to(device) if isinstance(one, Tensor) and device is not None else one  # noqa: E731
        args, kwargs = tree_map(there, (self.args, self.kwargs))
        function = Function(fn, args, kwargs, wide, chosen=self.chosen)
        if not function.inputs:
            raise InvalidTypeError(
                "there is nothing to check: expected a floating or complex tensor among the inputs, such as x.double() "
                "in place of integers, or a module with parameters that require a gradient."
            )
        self.functions.append(function)
        return function

    def _exact(self, low: Function) -> Function | None:
        """Return the float64 function if there is one; else ``low``, or None if ``low`` has half-precision inputs."""
        is_low = any(one.value.dtype is not WIDE[one.value.dtype] for one in low.inputs)
        if self.reference is None and not is_low:
            self._learn(low)
            return low
        exact = self._function(self.fn if self.reference is None else self.reference, wide=True)
        self._learn(low)
        try:
            self._learn(exact)
        except Exception:
            if self.reference is not None:
                raise
            exact.outputs = []
        if self.reference is not None or {one.dtype for one in exact.outputs} == {torch.float64}:
            return exact
        exact.state.restore()
        self.functions.remove(exact)
        return None if any(one.dtype in _LOW for one in low.inputs) else low

    def _learn(self, function: Function) -> list[Tensor]:
        """Call the function once and return its outputs with their graph; refuse outputs that cannot be checked."""
        outputs = function.record(function.leaves())
        if not outputs:
            raise InvalidTypeError(
                f"{name_of(function.fn)} returned no floating or complex tensor: expected a tensor, or tensors in a "
                f"tuple, a list, a dict or a dataclass."
            )
        function.learn_outputs(outputs)
        if not any(o.requires_grad for o in outputs):
            raise InvalidValueError(
                f"the outputs of {name_of(function.fn)} have no graph: expected the result of differentiable "
                f"operations; is there a detach(), a torch.no_grad() or a .data in it?"
            )
        for layout, output in zip(function.outputs, outputs, strict=True):
            refuse_unless(~output.isnan(), f"{layout.name} of {name_of(function.fn)}", output, "choose another point")
        return outputs

    def _is_the_same(self, exact: Function, low: Function, name: str = "it") -> bool:
        """Return whether ``low`` has the values of ``exact`` at the point, within the lower precision.

        False adds a note with the reason: other random numbers, or rounding at this point.

        Raises:
            InvalidValueError: If the shapes of inputs or outputs differ, or the values differ by more than rounding.
        """
        shapes, expected_shapes = (
            [[tuple(one.value.shape) for one in slots] for slots in (f.outputs, f.inputs)] for f in (low, exact)
        )
        if shapes != expected_shapes:
            raise InvalidValueError(
                f"{name} is not the same function as the float64 one: it has outputs of shape {shapes[0]} and inputs "
                f"of shape {shapes[1]}, expected {expected_shapes[0]} and {expected_shapes[1]}."
            )
        low.state.generators = exact.state.generators
        eps = max(torch.finfo(o.dtype).eps for o in low.outputs)
        found, expected = low.values(low.point), exact.values(low.point)
        low.base = found  # computed with the random numbers of ``exact``
        off, size = largest(found - expected), largest(expected)
        if off <= 100 * eps**0.5 * size:
            return True
        if exact.state.generators is not None:
            message = f"{name} draws other random numbers than in float64, and was not compared"
            self.notes.append(GradientFinding("random", message))
            return False
        nearby = low.point + next(directions(exact, self.generator)) * eps
        if low.fn is exact.fn and off <= 100 * largest(exact.values(nearby) - expected):
            message = f"at this point the values in {low.outputs[0].dtype} are off by {off / size:.1g} relative, by "
            self.notes.append(GradientFinding("precision", f"{message}rounding: only the float64 gradient was judged"))
            return False
        raise InvalidValueError(
            f"{name} and the float64 function have different values: expected the same function, or inputs in float64."
        )

    def _contract(self, function: Function, who: str = "") -> tuple[Tensor, Tensor] | None:
        """Check everything except the values of the gradient; ``who`` is a prefix of the findings.

        Returns:
            A cotangent and its gradient, if the backward is good enough to check their values; None otherwise.

        Raises:
            InvalidValueError: If the backward goes through a reentrant checkpoint.
        """
        if not self._is_repeatable(function):
            return None
        for layout in function.outputs:
            if not layout.has_graph:
                note = GradientFinding("outputs", f"{layout.name} has no graph and is not checked")
                self.notes += [] if note in self.notes else [note]
        cotangent = self._cotangent(function)
        contract = Contract(function, cotangent, self.generator, self.rtol)
        try:
            contract.probe()
        except Exception as error:
            if "use_reentrant" in str(error):  # torch's checkpoint, whose backward fills .grad and returns nothing
                raise InvalidValueError(
                    f"{name_of(function.fn)} has a reentrant checkpoint, which torch.autograd.grad cannot go through: "
                    f"expected torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
                ) from error
            self.findings.append(GradientFinding("error", f"the backward raises {type(error).__name__}: {error}"))
            return None
        self.findings += [replace(one, message=who + one.message) for one in contract.findings]
        self.notes += [one for one in contract.notes if one not in self.notes]
        is_one = not any(one.kind in ("non-determinism", "mutation") for one in contract.findings)
        return (cotangent, contract.first) if is_one else None

    def _is_repeatable(self, function: Function) -> bool:
        """Return whether two calls return the same outputs; if they differ, restore random generators and try again."""
        base, again = function.base, function.values(function.point)
        if torch.equal(base.nan_to_num(), again.nan_to_num()):
            return True
        function.state.generators = generator_states()
        function.base, again = function.values(function.point), function.values(function.point)
        size = function.rounding_of(function.base).nan_to_num()
        is_random = bool(((again - function.base).abs().nan_to_num() > 2e3 * size + 1e-300).any())
        if is_random:
            message = "two forwards at one point differ: seed what makes them random inside the function"
            self.undecided.append(GradientFinding("random", message))
        return not is_random

    def _cotangent(self, function: Function) -> Tensor:
        """Return a random cotangent whose elements have sizes between 0.5 and 1.5, so that each output counts."""
        drawn = clear_of_zero([function.size], self.generator)
        drawn.masked_fill_(~(function.base.isfinite() & function.with_graph()), 0.0)
        return joined(function.shaped(drawn))

    def _search(self, function: Function, taken: tuple[Tensor, Tensor], what: str = "") -> None:
        differences = Differences(function, *taken, self.rtol)
        search = Search(differences, self.generator)
        search.run(self.exhaustive)
        if not what and function.has_own_code and search.smooth is not None and not search.findings:
            self.forward_mode, remarks = check_forward_mode(differences, *search.smooth)
            added = self.findings if self.forward_mode == "wrong" else self.notes
            added += remarks
        self.findings += with_guesses(search, what)
        self.notes += search.notes
        self.undecided += search.undecided
        self.power, self.directions = min(self.power, search.power), self.directions + len(search.agreed)

    def _low_precision(self, exact: Function, low: Function) -> None:
        by_inputs = Conditioning(exact, low, self.generator, self.rtol)
        gradient = low.gradient(None, by_inputs.cotangent)
        units, found = by_inputs, by_inputs.compare(gradient, by_inputs.gradient, "against float64", "precision")
        if found:
            units = Conditioning(exact, low, self.generator, self.rtol, looks_inside=True)
            again = low.gradient(None, units.cotangent)
            found = units.compare(again, units.gradient, "against float64", "precision")
        if found:
            units, found = by_inputs, by_inputs.judge(gradient, "against float64", "precision")
        self.notes += units.remarks("")
        self.findings += found
        self.low_power = units.power

    def _backends(self, exact: Function, backends: dict[str, Any]) -> None:
        functions = {}
        for name, fn in backends.items():
            try:
                device = torch.device(name)
            except RuntimeError:  # the name denotes a kernel, not a device
                device = None
            try:
                torch.empty(0, device=device or "cpu")
            except (RuntimeError, AssertionError, NotImplementedError):
                self.notes.append(GradientFinding("backends", f"the device {name} is not available and was skipped"))
                continue
            functions[name] = self._function(fn, wide=False, device=device)
            self._learn(functions[name])
            self._is_the_same(exact, functions[name], f"backends[{name!r}]")
            self._contract(functions[name], f"{name}: ")
        findings, notes = compare_backends(exact, functions, self.generator, self.rtol)
        self.findings += findings
        self.notes += notes

    def _second_order(self, function: Function) -> None:
        cotangents = function.shaped(self._cotangent(function))
        point = (*function.given, *cotangents)
        names = [*(one.name for one in function.inputs), *(f"grad of {one.name}" for one in function.outputs)]
        second = Function(function.gradient_function, point, {}, wide=False, names=names)
        self.functions.append(second)
        try:
            if any(node.name() == "torch::autograd::Error" for node in nodes_of(self._learn(second))):
                raise InvalidValueError("it is marked once_differentiable, or it calls a function that is.")
            cotangent = self._cotangent(second)
            needs = Contract(second, cotangent, self.generator, self.rtol)
            needs.probe_needs()
            self._search(second, (cotangent, needs.first), "second order")
            self.findings += [replace(one, message=f"second order: {one.message}") for one in needs.findings]
        except (InvalidValueError, RuntimeError) as error:
            self.findings.append(GradientFinding("error", f"the backward cannot be differentiated: {error}"))
