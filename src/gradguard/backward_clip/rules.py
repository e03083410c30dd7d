"""The rules of the error clip: each a pure function of one gradient on its way back."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from gradguard.arguments import check_bounds
from gradguard.backward_clip.base import BaseErrorClip
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError


def _not_negative(self: BaseErrorClip, name: str, value: Any) -> float:
    number = BaseErrorClip._checked(self, name, value)
    if number < 0:
        raise InvalidValueError(f"{type(self).__name__}: {name}={number}, expected a number >= 0.")
    return number


class ErrorClipByValue(BaseErrorClip):
    r"""Clamp each element to ``[min, max]``; the rule that the error clip began with.

    .. math:: g_i \leftarrow \min(\max(g_i, \text{min}), \text{max})

    **Edge cases.** NaN stays NaN. ±inf becomes the bound, except in float16 and under ``scale=``, where it becomes
    NaN so that a GradScaler sees the overflow. Bounds are rounded to the gradient's dtype, and to its largest finite
    value. A complex gradient is scaled to a modulus of at most ``max``; bounds that are not symmetric refuse it.
    Bounds that do not enclose 0 push every gradient to one side, and are obeyed.

    Args:
        max: The upper bound, in units of the gradient of the unscaled loss. A mean loss over B samples and T steps
            has activation gradients of about 1/(B·T); the 5.0 of the literature is for sum losses. See `calibrate`.
        min: The lower bound; -``max`` if None, and then also after ``rule.max = …``.

    Raises:
        InvalidValueError: If ``max < min`` (so also for ``max < 0`` alone), or one is NaN.
        InvalidTypeError: If one is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.ErrorClipByValue(max=5.0).clip(torch.tensor([-9.0, 2.0, 9.0]))
        tensor([-5.,  2.,  5.])
        >>> gg.ErrorClipByValue(max=5.0, min=-1.0).clip(torch.tensor([-9.0, 2.0, 9.0]))
        tensor([-1.,  2.,  5.])

    Reference:
        PaddlePaddle, Error Clip (2018); Graves (2013), Generating sequences with recurrent neural networks,
        arXiv 1308.0850.
    """

    thresholds = ("max", "min")
    max: float
    min: float

    def __init__(self, max: float, min: float | None = None) -> None:
        self._symmetric = min is None
        if min is not None:
            self.min = min
        self.max = max

    def _checked(self, name: str, value: float) -> float:
        number = super()._checked(name, value)
        symmetric = self._symmetric and name == "max"
        low = number if name == "min" else -number if symmetric else self.min
        high = number if name == "max" else self.__dict__.get("max", math.inf)
        check_bounds(low, high, ("min", "max"))
        object.__setattr__(self, "min", low)
        if self._symmetric and not symmetric:
            self._symmetric = False
        return number

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        low, high, dtype = self.min, self.max, grad.dtype
        if dtype.is_complex:
            return self._clip_modulus(grad)
        if isinstance(high, Tensor):
            return grad.clamp(low.to(grad), high.to(grad))  # type: ignore[union-attr]
        limit = torch.finfo(dtype).max
        return grad.clamp(_within(low, limit), _within(high, limit))

    def _clip_modulus(self, grad: Tensor) -> Tensor:
        if not self._symmetric:
            raise InvalidValueError(f"{self} on a complex gradient: a modulus has one bound; give max alone.")
        modulus = grad.abs()
        bound = torch.as_tensor(self.max, dtype=modulus.dtype, device=modulus.device)
        return torch.where(modulus > bound, grad * (bound / modulus), grad)

    def bounds(self) -> tuple[float, float]:
        """Return (min, max)."""
        return self.min, self.max


class ErrorClipByNorm(BaseErrorClip):
    r"""Scale each intermediate gradient by itself to a 2-norm of at most ``max_norm``.

    .. math:: g \leftarrow g \cdot \min\bigl(1, \text{max\_norm} / \lVert g \rVert_2\bigr)

    **Edge cases.** Norms are accumulated in at least float32, after division by the largest element, so that no square
    overflows. A zero gradient and a gradient with NaN or inf stay as they are; ``max_norm=0`` makes finite ones 0.

    Args:
        max_norm: The bound, at least 0, in units of the gradient of the unscaled loss.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN.
        InvalidTypeError: If it is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.ErrorClipByNorm(1.0).clip(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    thresholds = ("max_norm",)
    max_norm: float
    _checked = _not_negative

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        return _scale_to_norm(grad, self.max_norm, tuple(range(grad.dim())))


class ErrorClipBySampleNorm(BaseErrorClip):
    r"""Scale each sample's part of an intermediate gradient to a 2-norm of at most ``max_norm``.

    .. math:: g_b \leftarrow g_b \cdot \min\bigl(1, \text{max\_norm} / \lVert g_b \rVert_2\bigr)
              \quad\text{for each index } b \text{ of dimension } \text{dim}

    No sample's outlier shrinks another's signal. A value without dimension ``dim`` (a scalar) is scaled as a whole; a
    value whose dimension ``dim`` is no batch is scaled along it all the same: choose the scope accordingly.

    Args:
        max_norm: The bound, at least 0, in units of the gradient of the unscaled loss.
        dim: The batch dimension, 0 by default.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN.
        InvalidTypeError: If it is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.ErrorClipBySampleNorm(1.0).clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    thresholds = ("max_norm",)
    max_norm: float
    _checked = _not_negative

    def __init__(self, max_norm: float, dim: int = 0) -> None:
        if not isinstance(dim, int):
            raise InvalidTypeError(f"dim is {type(dim).__name__}: expected the number of the batch dimension.")
        self.dim = dim
        self.max_norm = max_norm

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        batch = self.dim % grad.dim() if -grad.dim() <= self.dim < grad.dim() else None
        return _scale_to_norm(grad, self.max_norm, tuple(d for d in range(grad.dim()) if d != batch))


class ErrorClipZeroAbove(BaseErrorClip):
    r"""Set each element beyond ``max``, and NaN, to 0: an outlier is dropped rather than shortened.

    .. math:: g_i \leftarrow g_i \text{ if } \lvert g_i \rvert \le \text{max, else } 0

    The recipe of lietorch, DROID-SLAM and DPVO, there with 0.01. In float16 and under ``scale=`` NaN and inf stay
    visible as NaN, so that a GradScaler backs off: with one, always give ``scale=``.

    Args:
        max: The bound, at least 0, in units of the gradient of the unscaled loss.

    Raises:
        InvalidValueError: If ``max`` is negative or NaN.
        InvalidTypeError: If it is no number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.ErrorClipZeroAbove(1.0).clip(torch.tensor([0.5, -3.0, float("nan")]))
        tensor([0.5000, 0.0000, 0.0000])
    """

    thresholds = ("max",)
    max: float
    _checked = _not_negative

    def __init__(self, max: float) -> None:
        self.max = max

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        bound = self.max.to(grad.abs()) if isinstance(self.max, Tensor) else self.max
        return torch.where(grad.abs() <= bound, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))


class ErrorClipNonfinite(BaseErrorClip):
    """Do nothing to finite gradients, and ``policy`` to those with NaN or infinity.

    Args:
        policy: ``"keep"`` them (to only count them: give ``stats=``), ``"zero"`` the elements that are not finite, or
            ``"raise"`` an error that names the operation and, where ``stats=`` knows it, the module. Raising looks at
            each gradient from Python: at once on the CPU, with a wait for the device at each operation on an
            accelerator. It cannot be compiled. With a GradScaler give ``scale=``, or zeroing hides the overflow.

    Raises:
        InvalidValueError: If ``policy`` is none of the three.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.ErrorClipNonfinite("zero").clip(torch.tensor([1.0, float("inf")]))
        tensor([1., 0.])
    """

    thresholds = ()

    def __init__(self, policy: Literal["keep", "zero", "raise"] = "zero") -> None:
        if policy not in ("keep", "zero", "raise"):
            raise InvalidValueError(f"policy={policy!r}: expected 'keep', 'zero' or 'raise'.")
        self.policy = policy

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        if self.policy == "zero":
            return torch.where(grad.isfinite(), grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
        if self.policy == "raise":
            _refuse_nonfinite(grad)
        return grad


def _scale_to_norm(grad: Tensor, max_norm: float | Tensor, dims: tuple[int, ...]) -> Tensor:
    if grad.numel() == 0:
        return grad
    modulus = grad.detach().abs()
    modulus = modulus.to(torch.promote_types(modulus.dtype, torch.float32))
    peak = modulus.amax(dims, keepdim=True) if dims else modulus
    peak = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    small = grad / peak  # of elements up to 1, so that no square overflows and the largest does not vanish
    relative = torch.linalg.vector_norm(small, dim=dims, keepdim=True) if dims else small.abs()
    bound = max_norm.to(peak) if isinstance(max_norm, Tensor) else max_norm
    binds = (relative * peak > bound) & relative.isfinite()
    return torch.where(binds, small * (bound / torch.where(binds, relative, 1.0)), grad).to(grad.dtype)


def _refuse_nonfinite(grad: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise InvalidTypeError('ErrorClipNonfinite("raise") cannot be compiled: use it in eager code, or "zero".')
    if math.isfinite(abs(grad.detach().sum(dtype=torch.promote_types(grad.dtype, torch.float32)).item())):
        return
    bad = int((~grad.isfinite()).sum())
    if bad:
        nan = int(grad.isnan().sum())
        raise NonFiniteGradientError(f"{nan} NaN and {bad - nan} infinite of {grad.numel()} elements")


def _within(number: float, limit: float) -> float:
    """Return ``number``, or the nearest to it up to ``limit``, the largest finite value of a dtype."""
    return number if math.isinf(number) else math.copysign(min(abs(number), limit), number)
