"""The rules of the error clip: the base class, the encoding of a rule for compiled code, and the library's rules."""

import itertools
import math
from inspect import getattr_static
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from gradguard.arguments import check_bounds, check_number
from gradguard.backward_clip.rule_encoding import Kind, decode_attribute, encode_attributes, is_encoded_tensor
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError

_SERIAL = itertools.count()
_CLASSES: dict[str, type["BaseErrorClip"]] = {}
_ENCODING = ("_inputs", "_kind", "_references", "_encoded")


class BaseErrorClip:
    r"""The base class of rules for gradients of intermediate values: subclass it and write ``clip(grad) -> grad``.

    ``clip`` receives the gradient of one intermediate value, accumulated over all operations that use the value. It
    returns the gradient with which the backward continues: a tensor of the same shape and dtype, computed by tensor
    operations and not in place. The same method runs in eager and in compiled code. It must therefore not read values
    from Python (``if grad.max() > 1``) or count its calls: its result depends on ``grad`` and the rule's attributes
    alone.

    ``thresholds`` names the attributes in units of the gradient. They may be assigned later (a schedule), and are
    multiplied by the loss scale under ``scale=``. They enter compiled code as inputs, where ``clip`` reads 0-dim
    tensors, so a new threshold does not recompile. Attributes that are tensors are inputs too. Other attributes are
    constants of the compiled code: assigning one recompiles, and a change of a list in place has no effect.

    **Guarantees.**

    - A result whose shape, dtype or device differs from ``grad`` is refused: the backward never continues with it.
    - With a loss scale, and in float16, non-finite elements become NaN, whatever ``clip`` returns for them.
    - A rule without ``thresholds`` receives unscaled gradients.
    - A threshold that is NaN is refused when it is assigned.

    Example:
        >>> import gradguard as gg, torch
        >>> class HalveAbove(gg.BaseErrorClip):
        ...     thresholds = ("bound",)
        ...
        ...     def __init__(self, bound):
        ...         self.bound = bound
        ...
        ...     def clip(self, grad):
        ...         return torch.where(grad.abs() > self.bound, grad / 2, grad)
        >>> hidden = torch.tensor([1.0, 2.0], requires_grad=True) * 1.0
        >>> HalveAbove(1.0).clip(torch.tensor([0.5, 8.0]))
        tensor([0.5000, 4.0000])
    """

    thresholds: ClassVar[tuple[str, ...] | None] = None
    _class_serial: ClassVar[str] = "BaseErrorClip"
    _inputs: tuple[Tensor, ...] | None
    """The thresholds as tensors, and the attributes that are tensors: the inputs of compiled code."""
    _kind: Kind
    """The rest of the rule, a constant of compiled code: a change recompiles."""
    _references: tuple[object, ...]
    """References that keep alive the objects that `_kind` can only number."""
    _encoded: tuple[str, ...] = ()
    """The names of the encoded attributes: the compiler of torch 2.11 can read an attribute, but cannot list them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = cls.thresholds
        if names is not None and not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise InvalidTypeError(
                f"{cls.__name__}.thresholds is {names!r}: expected a tuple of names, as in ('bound',)."
            )
        if cls.__dict__.get("__slots__"):
            raise InvalidTypeError(
                f"{cls.__name__} has __slots__: leave it out, because rules store their attributes in __dict__."
            )
        for name in names or ():
            value = getattr_static(cls, name, None)
            if hasattr(type(value), "__set__"):
                raise InvalidTypeError(
                    f"{cls.__name__}.thresholds names {name!r}, a property: expected an attribute, assigned in "
                    f"__init__."
                )
            if value is not None:
                check_number(f"{cls.__name__}.{name}", value)
        cls._class_serial = f"{cls.__qualname__} {next(_SERIAL)}"
        _CLASSES[cls._class_serial] = cls

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create a rule and encode the attributes of its class; assignments in ``__init__`` are encoded later."""
        if getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
            raise InvalidTypeError(f"{cls.__name__} is a frozen dataclass: leave frozen=True out, rules may change.")
        rule = object.__new__(cls)
        rule._encode()
        return rule

    def __setattr__(self, name: str, value: Any) -> None:
        named = name in (self.thresholds or ())
        object.__setattr__(self, name, self._checked(name, value) if named else value)
        self._encode(name)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._encode()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _ENCODING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._encode()

    def __repr__(self) -> str:
        public = [(k, v) for k, v in sorted(self.__dict__.items()) if not k.startswith("_")]
        shown = ", ".join(f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in public)
        return f"{type(self).__name__}({shown})"

    def clip(self, grad: Tensor) -> Tensor:
        """Return the gradient with which the backward continues: a new tensor of the shape and dtype of ``grad``.

        Raises:
            NotImplementedError: Always; subclasses implement the method.
        """
        raise NotImplementedError(f"{type(self).__name__} has no clip(grad): write one that returns a tensor.")

    def bounds(self) -> tuple[float, float] | None:
        """Return (low, high) if the rule is the elementwise clamp to these bounds, else None.

        For a subclass that overrides ``clip``, inherited bounds are ignored.
        """
        return None

    def with_thresholds(self, values: tuple[Any, ...]) -> "BaseErrorClip":
        """Return a copy with ``values`` as its thresholds: scaled numbers, or tensors in compiled code."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **dict(zip(self.thresholds or (), values, strict=True)))
        return other

    def scaled(self, scale: float | Tensor) -> "BaseErrorClip":
        """Return the rule for gradients of a loss that was multiplied by ``scale``."""
        if self.thresholds is None:
            return _OnUnscaled(self, scale)
        return self.with_thresholds(tuple(getattr(self, name) * scale for name in self.thresholds))

    def _checked(self, name: str, value: Any) -> Any:
        number = check_number(f"{type(self).__name__}.{name}", value)
        if math.isnan(number):
            raise InvalidValueError(f"{type(self).__name__}: {name} is NaN, expected a number.")
        return number

    def _encode(self, assigned: str = "") -> None:
        """Recompute `_inputs` and `_kind`; ``assigned`` is the name of a newly assigned attribute."""
        named = self.thresholds or ()
        if torch.compiler.is_compiling():
            names = self._encoded if assigned in self._encoded else (*self._encoded, assigned)
        else:
            names = tuple(self.__dict__)
        state = {k: self.__dict__.get(k) for k in names if k not in (*named, *_ENCODING) and k in self.__dict__}
        texts, references = encode_attributes(state)
        values = [getattr(self, name, None) for name in named]
        inputs = None
        if all(value is not None for value in values):
            numbers = [torch.tensor(value, dtype=torch.float64, device="cpu") for value in values]
            inputs = (*numbers, *(v for v in state.values() if isinstance(v, Tensor)))
        object.__setattr__(self, "_inputs", inputs)
        object.__setattr__(self, "_kind", (self._class_serial, texts))
        object.__setattr__(self, "_references", references)
        object.__setattr__(self, "_encoded", tuple(state))


class _OnUnscaled(BaseErrorClip):
    """A rule without thresholds under a loss scale: it unscales in a wide dtype, clips, and scales again."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __init__(self, rule: BaseErrorClip, scale: float | Tensor) -> None:
        self.rule, self.scale = rule, scale

    def clip(self, grad: Tensor) -> Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        unscaled = (grad.to(wide) / self.scale).to(wide)
        return (checked(self.rule, unscaled, self.rule.clip(unscaled)) * self.scale).to(grad.dtype)


def encode_rule(rule: BaseErrorClip) -> tuple[Kind, tuple[Tensor, ...]]:
    """Return ``rule`` as strings and tensors, the forms in which compiled code accepts arguments."""
    inputs = rule._inputs
    assert inputs is not None, "checked_rule has verified that each threshold has a value"
    return rule._kind, inputs


def decode_rule(kind: Kind, inputs: tuple[Tensor, ...]) -> BaseErrorClip:
    """Return the rule that `encode_rule` encoded; its thresholds are tensors."""
    serial, state = kind
    rule = object.__new__(_CLASSES[serial])
    rule.__dict__.update({name: decode_attribute(text) for name, text in state if not is_encoded_tensor(text)})
    names = [*(rule.thresholds or ()), *(name for name, text in state if is_encoded_tensor(text))]
    rule.__dict__.update(zip(names, inputs, strict=True))
    return rule


def clamp_bounds(rule: BaseErrorClip) -> tuple[float, float] | None:
    """Return the bounds of a rule that is a clamp; None for another rule, such as a subclass with its own ``clip``."""
    if "clip" in rule.__dict__:
        return None
    owner = next(cls for cls in type(rule).__mro__ if "bounds" in cls.__dict__ or "clip" in cls.__dict__)
    return rule.bounds() if "bounds" in owner.__dict__ else None


def apply_rule(rule: BaseErrorClip, grad: Tensor, overflow_stays: bool = False) -> Tensor:
    """Clip ``grad`` and check the result; with ``overflow_stays``, or in float16, non-finite elements become NaN."""
    if grad.dim() == 0 and not is_trusted(rule):
        values = [getattr(rule, name) for name in rule.thresholds or ()]
        if any(isinstance(value, Tensor) for value in values):
            # A 0-dim float64 threshold would promote a 0-dim gradient to float64; a Python number would not.
            real = grad.dtype.to_real()
            rule = rule.with_thresholds(tuple(v.to(real) if isinstance(v, Tensor) else v for v in values))
    clipped = checked(rule, grad, rule.clip(grad))
    if overflow_stays or grad.dtype is torch.float16:
        return clipped + (grad - grad)  # NaN wherever ``grad`` is not finite: the GradScaler must detect the overflow
    return clipped


def is_trusted(rule: BaseErrorClip) -> bool:
    """Return whether the rule is one of the library's, whose results need no check."""
    return type(rule).__module__.startswith("gradguard.backward_clip.") and not isinstance(rule, _OnUnscaled)


def checked(rule: BaseErrorClip, grad: Tensor, clipped: Any) -> Tensor:
    """Return ``clipped`` after checking that it can replace ``grad``.

    Raises:
        InvalidTypeError: If ``clipped`` is not a tensor with the shape, dtype and device of ``grad``.
    """
    if is_trusted(rule):
        return clipped
    if not are_alike(grad, clipped):
        got = f"{type(rule).__name__}.clip returned {described(clipped)}"
        raise InvalidTypeError(f"{got}: expected {described(grad)}.")
    return clipped


def are_alike(old: Tensor | None, new: Any) -> bool:
    """Return whether ``new`` can replace ``old``: both None, or tensors of one shape, dtype and device."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return old is new
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def described(gradient: Any) -> str:
    """Return a description of a gradient, or of an object returned in its place, for an error message."""
    if isinstance(gradient, Tensor):
        return f"a tensor of shape {tuple(gradient.shape)}, {gradient.dtype}, on {gradient.device}"
    return "None" if gradient is None else type(gradient).__name__


def _not_negative(self: BaseErrorClip, name: str, value: Any) -> float:
    number = BaseErrorClip._checked(self, name, value)
    if number < 0:
        raise InvalidValueError(f"{type(self).__name__}: {name}={number}, expected a number >= 0.")
    return number


class ErrorClipByValue(BaseErrorClip):
    r"""Clamp each element to ``[min, max]``, the rule of PaddlePaddle's error clip.

    .. math:: g_i \leftarrow \min(\max(g_i, \text{min}), \text{max})

    **Edge cases.**

    - NaN stays NaN.
    - ±inf becomes the bound. In float16 and under ``scale=`` it becomes NaN, and a GradScaler detects the overflow.
    - Bounds are rounded to the gradient's dtype, and limited to its largest finite value.
    - A complex gradient is scaled to a modulus of at most ``max``. Bounds with ``min`` other than -``max`` refuse it.
    - Bounds that do not enclose 0 are allowed, and move every gradient to one side.

    Args:
        max: The upper bound, in units of the gradient of the unscaled loss. A mean loss over B samples and T steps
            has activation gradients of about 1/(B·T); the 5.0 of the literature is for sum losses.
            `ErrorClipStats` reports the largest gradient of a run.
        min: The lower bound; -``max`` if None, also after a later ``rule.max = …``.

    Raises:
        InvalidValueError: If ``max < min`` (also for a negative ``max`` alone), or a bound is NaN.
        InvalidTypeError: If an argument is not a number.

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
        self._symmetric = self._bounds_modulus = min is None
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
        object.__setattr__(self, "_bounds_modulus", low == -high)
        object.__setattr__(self, "_symmetric", symmetric)
        return number

    def clip(self, grad: Tensor) -> Tensor:
        """Return ``grad``, clipped."""
        low, high, dtype = self.min, self.max, grad.dtype
        if dtype.is_complex:
            if not self._bounds_modulus:
                raise InvalidValueError(f"{self} on a complex gradient: a modulus has one bound; give max alone.")
            modulus = grad.abs()
            bound = torch.as_tensor(self.max, dtype=modulus.dtype, device=modulus.device)
            return torch.where(modulus > bound, grad * (bound / modulus), grad)
        if isinstance(high, Tensor):
            return grad.clamp(low.to(grad), high.to(grad))  # type: ignore[union-attr]
        limit = torch.finfo(dtype).max
        return grad.clamp(_within(low, limit), _within(high, limit))

    def bounds(self) -> tuple[float, float]:
        """Return (min, max)."""
        return self.min, self.max


class ErrorClipByNorm(BaseErrorClip):
    r"""Scale each intermediate gradient by itself to a 2-norm of at most ``max_norm``.

    .. math:: g \leftarrow g \cdot \min\bigl(1, \text{max\_norm} / \lVert g \rVert_2\bigr)

    **Edge cases.** Norms are computed in at least float32, after division by the largest element, so no square
    overflows. A zero gradient and a gradient with NaN or inf are not changed. ``max_norm=0`` makes finite gradients 0.

    Args:
        max_norm: The bound, at least 0, in units of the gradient of the unscaled loss.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN.
        InvalidTypeError: If the argument is not a number.

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

    An outlier in one sample does not shrink the gradients of other samples. A value without dimension ``dim`` (a
    scalar) is scaled as a whole. The rule cannot check that dimension ``dim`` is the batch: choose the scope
    accordingly.

    Args:
        max_norm: The bound, at least 0, in units of the gradient of the unscaled loss.
        dim: The batch dimension, 0 by default.

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN.
        InvalidTypeError: If the argument is not a number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.rules.ErrorClipBySampleNorm(1.0).clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
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
    r"""Set each element above ``max`` in magnitude, and NaN, to 0: outliers are dropped instead of shortened.

    .. math:: g_i \leftarrow g_i \text{ if } \lvert g_i \rvert \le \text{max, else } 0

    lietorch, DROID-SLAM and DPVO use this rule, with 0.01. In float16 and under ``scale=``, NaN and inf become NaN, and
    a GradScaler lowers its scale: with a GradScaler, always give ``scale=``.

    Args:
        max: The bound, at least 0, in units of the gradient of the unscaled loss.

    Raises:
        InvalidValueError: If ``max`` is negative or NaN.
        InvalidTypeError: If the argument is not a number.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.rules.ErrorClipZeroAbove(1.0).clip(torch.tensor([0.5, -3.0, float("nan")]))
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
    """Apply ``policy`` to gradients with NaN or infinity; finite gradients are not changed.

    Args:
        policy: ``"keep"`` keeps them, to count them with ``stats=``. ``"zero"`` sets the non-finite elements to 0; with
            a GradScaler, give ``scale=``, or the zeros hide the overflow. ``"raise"`` raises an error that names the
            operation, and the module if ``stats=`` has a model. It reads each gradient from Python, which costs a host
            sync for each operation on an accelerator, and it cannot be compiled.

    Raises:
        InvalidValueError: If ``policy`` is none of the three.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.rules.ErrorClipNonfinite("zero").clip(torch.tensor([1.0, float("inf")]))
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
            if torch.compiler.is_compiling():
                raise InvalidTypeError(
                    'ErrorClipNonfinite("raise") cannot be compiled: use it in eager code, or "zero".'
                )
            wide = torch.promote_types(grad.dtype, torch.float32)
            is_finite = math.isfinite(abs(grad.detach().sum(dtype=wide).item()))  # cheap, but the sum may overflow
            bad = 0 if is_finite else int((~grad.isfinite()).sum())
            if bad:
                nan = int(grad.isnan().sum())
                raise NonFiniteGradientError(f"{nan} NaN and {bad - nan} infinite of {grad.numel()} elements")
        return grad


def _scale_to_norm(grad: Tensor, max_norm: float | Tensor, dims: tuple[int, ...]) -> Tensor:
    if grad.numel() == 0:
        return grad
    modulus = grad.detach().abs()
    modulus = modulus.to(torch.promote_types(modulus.dtype, torch.float32))
    peak = modulus.amax(dims, keepdim=True) if dims else modulus
    peak = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    small = grad / peak  # elements of at most 1: no square overflows, and the square of the largest does not underflow
    relative = torch.linalg.vector_norm(small, dim=dims, keepdim=True) if dims else small.abs()
    bound = max_norm.to(peak) if isinstance(max_norm, Tensor) else max_norm
    binds = (relative * peak > bound) & relative.isfinite()
    return torch.where(binds, small * (bound / torch.where(binds, relative, 1.0)), grad).to(grad.dtype)


def _within(number: float, limit: float) -> float:
    """Return ``number`` clamped to ±``limit``, the largest finite value of a dtype; infinity stays."""
    return number if math.isinf(number) else math.copysign(min(abs(number), limit), number)
