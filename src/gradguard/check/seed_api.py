"""`get_numerical_gradient` and `check_grad`, the interface of PaddlePaddle's gradient check design."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguard.arguments import check_number
from gradguard.check.admission import WIDE, refuse_unless
from gradguard.check.flat_vectors import index_of, joined, numbers
from gradguard.check.function import Function, name_of
from gradguard.check.gradient_report import place_of
from gradguard.check.named_call import NamedCall
from gradguard.errors import GradientCheckError, InvalidValueError
from gradguard.tensors.matmul_precision import full_float32

if TYPE_CHECKING:
    import numpy as np

_DELTA = 0.005
_FLOOR = 1e-3
"""The error of an element is absolute if its numerical gradient is smaller than this, and relative otherwise."""


def get_numerical_gradient(
    op: Callable[..., Any],
    input_values: Mapping[str, Any],
    output_name: str | int,
    input_to_check: str,
    delta: float = _DELTA,
    local_scope: Mapping[str, Any] | None = None,
) -> np.ndarray:
    r"""Return the numerical gradient of the sum of one output with respect to one input, element by element.

    .. math:: g_i = \frac{y(x + h_i^+ e_i) - y(x - h_i^- e_i)}{h_i^+ + h_i^-}, \qquad
              y = \sum_j \mathrm{output}_j

    The sum is computed in float64. :math:`h_i^\pm` are the steps after rounding: in float32 they differ from ``delta``,
    and the difference is divided by the rounded steps. The error is of order ``delta``\ :sup:`2` where the function is
    smooth, and large if a kink is within ``delta``. `gradguard.gradcheck` chooses its own steps, computes an error bar
    and recognises kinks.

    **Guarantees.**

    - The caller's values, buffers and random number generators do not change.
    - Each call of ``op`` starts from the same values, buffers and random numbers: dropout draws one mask, and the
      running statistics of BatchNorm do not drift.
    - TF32 is off.

    **Edge cases.** If a step leaves the domain of ``op``, the element is NaN. An empty input yields an empty array. For
    complex inputs the gradient follows PyTorch's convention, :math:`\partial y / \partial \mathrm{Re}\, x_i +
    \mathrm{i}\, \partial y / \partial \mathrm{Im}\, x_i`, with y the real part of the sum. Tied weights move together,
    under their first name.

    Args:
        op: A function or a module. It receives the values by name, or in the order of ``input_values`` if it accepts
            positional arguments only, such as `torch.mul`.
        input_values: The inputs by name: NumPy arrays or tensors of any shape. Numbers and other objects are passed on
            unchanged. Dotted names such as ``"fc.weight"`` replace parameters and buffers of a module; the others keep
            their values.
        output_name: The key of an output, its attribute, or its position (``1`` or ``"1"``). A single tensor matches
            any name.
        input_to_check: The input of the gradient: a key of ``input_values`` or a parameter of the module.
        delta: The distance that each element moves to either side, in units of the input.
        local_scope: Further inputs of ``op`` by name, which are not checked.

    Returns:
        The gradient with the shape of the input: float64, or complex128 for complex inputs.

    Raises:
        InvalidValueError: If a name is unknown, ``delta`` is not above 0 or too small to change an element, or the
            input or the output is NaN or infinite.
        InvalidTypeError: If the input to check holds integers, or the output is not a floating or complex tensor.

    Example:
        >>> import gradguard as gg, numpy as np, torch
        >>> x, y = np.array([1.0, 2.0]), np.array([3.0, -4.0])
        >>> gg.get_numerical_gradient(torch.mul, {"x": x, "y": y}, "out", "x").round(6)
        array([ 3., -4.])
        >>> layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        >>> gg.get_numerical_gradient(layer, {"input": x}, "out", "weight").round(6)
        array([[1., 2.]])

    Reference:
        PaddlePaddle, Auto Gradient Check Design, 2017.
    """
    step = check_number("delta", delta)
    if not 0 < step < math.inf:
        raise InvalidValueError(f"delta={delta}: expected a finite number above 0, such as {_DELTA}.")
    call = NamedCall(op, input_values, output_name, local_scope)
    name = call.name_of(input_to_check, "input_to_check")
    with full_float32():
        return _numerical(call, name, step).numpy()


def check_grad(
    forward_op: Callable[..., Any],
    input_vars: Mapping[str, Any],
    inputs_to_check: Iterable[str],
    output_name: str | int,
    no_grad_set: Iterable[str] | None = None,
    only_cpu: bool = False,
    max_relative_error: float = _DELTA,
) -> None:
    r"""Raise unless autograd's gradient of the sum of one output equals the numerical one, on the CPU and on the GPU.

    .. math:: \max_i \frac{|n_i - a_i|}{s_i} \le \text{max\_relative\_error}, \qquad
              s_i = |n_i| \text{ where } |n_i| \ge 10^{-3}, \text{ else } 1

    n is `get_numerical_gradient` with ``delta=0.005``, and a is autograd's gradient. The formula printed in the design
    subtracts a from |n|: it rejects every right negative gradient and accepts a gradient of the wrong sign. The formula
    above is the intended one. With a GPU, the GPU's gradient is compared with n and with the CPU's gradient.

    Floating inputs below float64 are converted to float64 for n, if the operator then works. The check is as strict as
    ``delta`` and ``max_relative_error`` allow. `gradguard.gradcheck` uses an error bar instead, detects smaller errors
    and recognises kinks.

    **Guarantees.**

    - NaN never passes: an element that is NaN on one side only, or on both, is an error.
    - The caller's values, buffers, ``.grad`` and random number generators do not change.
    - The error names the worst element, with both values.
    - TF32 is off.

    **Edge cases.** An input that does not affect the output has the gradient 0. A warning is raised if more than half
    of the elements of an input's gradient are below 1e-3, unless they are exactly 0. Only errors above
    ``max_relative_error`` itself show there; the sum of a softmax, for instance, is constant. Dropout draws a different
    mask on each device: use ``only_cpu=True``.

    Args:
        forward_op: A function or a module, as ``op`` of `get_numerical_gradient`.
        input_vars: The inputs by name, as ``input_values`` of `get_numerical_gradient`.
        inputs_to_check: The inputs whose gradients are checked: keys of ``input_vars`` or parameters of the module.
        output_name: The output, as for `get_numerical_gradient`.
        no_grad_set: The inputs that are constants for autograd.
        only_cpu: Whether to skip the GPU.
        max_relative_error: The tolerance, without a unit.

    Raises:
        GradientCheckError: If an error is above the tolerance; the message names the worst element and both values.
        InvalidValueError: If a name is unknown, in both ``inputs_to_check`` and ``no_grad_set``, or none is given; if
            the output has no graph; or if a value at the point is NaN or infinite.
        InvalidTypeError: If an input to check holds integers, or the output is not a floating or complex tensor.

    Example:
        >>> import gradguard as gg, numpy as np, torch
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2  # forgets the factor x
        >>> gg.check_grad(Square.apply, {"x": np.array([1.0, -3.0])}, ["x"], "out", only_cpu=True)
        Traceback (most recent call last):
            ...
        gradguard.errors.GradientCheckError: x[1] on the CPU: analytical 2, numerical -6: relative error 1.33, above
        max_relative_error=0.005; 1 of 2 elements are above it. ...

    Reference:
        PaddlePaddle, Auto Gradient Check Design, 2017.
    """
    tolerance = check_number("max_relative_error", max_relative_error)
    if not 0 <= tolerance < math.inf:
        raise InvalidValueError(f"max_relative_error={max_relative_error}: expected a finite number >= 0.")
    call = NamedCall(forward_op, input_vars, output_name)
    names = [call.name_of(name, "inputs_to_check") for name in _listed(inputs_to_check)]
    constants = [call.name_of(name, "no_grad_set") for name in _listed(no_grad_set or ())]
    if not names:
        raise InvalidValueError(f"inputs_to_check is empty: expected some of {call.names}.")
    if both := [name for name in names if name in constants]:
        raise InvalidValueError(f"{both} are in inputs_to_check and in no_grad_set: list them in one of them only.")
    with full_float32():
        try:
            numerical = {name: _numerical(call, name, _DELTA, wide=True, device="cpu") for name in names}
        except Exception:  # a kernel for float32 only may raise anything here; it is then checked in its own dtype
            numerical = {name: _numerical(call, name, _DELTA, device="cpu") for name in names}
        gradients = {"CPU": _analytical(call, names, constants)}
        if torch.cuda.is_available() and not only_cpu:
            gradients["GPU"] = _on_gpu(call, names, constants)
    for name in names:
        right = {"numerical": numerical[name], **{device: found[name] for device, found in gradients.items()}}
        for expected, device in combinations(right, 2):
            _compare(name, (expected, right[expected]), (device, right[device]), tolerance)
        is_small = right["numerical"].abs() < _FLOOR
        is_zero = (right["numerical"] == 0) & (right["CPU"] == 0)
        if int(is_small.sum()) * 2 > is_small.numel() and not bool(is_zero[is_small].all()):
            warnings.warn(
                f"more than half of the gradient of {name} lies below {_FLOOR:g}, where check_grad detects only "
                f"absolute errors above {tolerance:g}: use gradguard.gradcheck.",
                stacklevel=2,
            )


def _numerical(call: NamedCall, name: str, delta: float, *, wide: bool = False, device: str | None = None) -> Tensor:
    """Return the numerical gradient, float64 or complex128; the input moves one element at a time."""
    with call.function([name], wide=wide, device=device) as function:
        value, point = function.inputs[0].value, function.point
        with torch.no_grad():
            function.learn_outputs([output := function.call(function.split(point.clone()))[0]])
        what = f"output {call.output_name!r} of {name_of(call.op)}"
        refuse_unless(output.isfinite(), what, output, "expected finite numbers; choose another point")
        gradient, summed = torch.zeros_like(point), _sum(function)
        for i in range(len(point)):
            both = point.repeat(2, 1)
            both[:, i] += numbers([delta, -delta])
            upper, lower = function.rounded(both)[:, i].tolist()
            if upper == lower:
                place = place_of(*function.name_of(i))
                raise InvalidValueError(
                    f"{place} = {float(point[i]):g} in {value.dtype} is not changed by delta={delta:g}: give a larger "
                    f"delta or float64 values."
                )
            above, below = (function.values_at(both) @ summed).tolist()
            gradient[i] = (above - below) / (upper - lower)
    return _shaped(gradient, value)


def _analytical(call: NamedCall, names: list[str], constants: list[str], device: str = "cpu") -> dict[str, Tensor]:
    """Return autograd's gradients of the sum of the output; zeros for an input that does not affect the output."""
    others = [name for name in call.names if name not in constants and _is_plain(call.values[name])]
    with call.function(list(dict.fromkeys([*names, *others])), device=device) as function:
        leaves = function.leaves()
        function.learn_outputs(outputs := function.record(leaves))
        if not outputs[0].requires_grad:
            raise InvalidValueError(
                f"output {call.output_name!r} of {name_of(call.op)} has no graph: expected the result of "
                f"differentiable operations; is there a detach(), a torch.no_grad() or a .data in it?"
            )
        parts = function.backward(outputs, leaves, function.shaped(_sum(function))).split(function.sizes)
        return {one.name: _shaped(part, one.value) for part, one in zip(parts, function.inputs, strict=True)}


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a dense tensor of finite numbers."""
    is_dense = isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided
    return is_dense and value.dtype in WIDE and bool(value.isfinite().all())


def _on_gpu(call: NamedCall, names: list[str], constants: list[str]) -> dict[str, Tensor]:
    try:
        return _analytical(call, names, constants, "cuda")
    except RuntimeError as error:
        error.add_note("The error was raised by check_grad on the GPU: only_cpu=True skips the GPU.")
        raise


def _listed(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _compare(name: str, expected: tuple[str, Tensor], found: tuple[str, Tensor], tolerance: float) -> None:
    """Raise for the worst element of ``found``, if its error is above the tolerance."""
    reference, right = expected
    device, value = found
    if value.numel() == 0:
        return
    size = right.abs()
    error = (right - value).abs() / torch.where(size < _FLOOR, 1.0, size)
    error = torch.where(error.isnan(), math.inf, error).reshape(-1)  # NaN never passes
    worst = int(error.argmax())
    if float(error[worst]) <= tolerance:
        return
    kind = "absolute" if float(size.reshape(-1)[worst]) < _FLOOR else "relative"
    what = "numerical" if reference == "numerical" else f"on the {reference}"
    raise GradientCheckError(
        f"{place_of(name, index_of(worst, value.shape))} on the {device}: analytical {_shown(value, worst)}, {what} "
        f"{_shown(right, worst)}: {kind} error {float(error[worst]):.3g}, above max_relative_error={tolerance:g}; "
        f"{int((error > tolerance).sum())} of {error.numel()} elements are above it."
    )


def _shown(tensor: Tensor, position: int) -> str:
    return f"{tensor.reshape(-1)[position].item():.6g}"


def _sum(function: Function) -> Tensor:
    """Return the cotangent of the sum of the output, or of the real part of the sum for a complex output."""
    return joined([torch.ones_like(one.value) for one in function.outputs])


def _shaped(gradient: Tensor, value: Tensor) -> Tensor:
    """Reshape a flat gradient to the input's shape, as complex numbers if the input is complex."""
    if value.is_complex():
        return torch.view_as_complex(gradient.reshape(*value.shape, 2))
    return gradient.view(value.shape)
