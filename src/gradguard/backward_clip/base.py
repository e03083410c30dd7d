"""The base of all rules of the error clip: what a subclass writes, and how its thresholds reach compiled code."""

import itertools
import math
from inspect import getattr_static
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradguard.arguments import check_number
from gradguard.backward_clip.rule_encoding import Kind, decoded, encoded, is_encoded_tensor
from gradguard.errors import InvalidTypeError, InvalidValueError

_SERIAL = itertools.count()
_CLASSES: dict[str, type["BaseErrorClip"]] = {}
_OURS = ("_inputs", "_kind", "_held")


def _check_class(cls: type) -> None:
    """Refuse at once what would later go unnoticed."""
    names = cls.thresholds
    if names is not None and not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
        raise InvalidTypeError(f"{cls.__name__}.thresholds is {names!r}: expected a tuple of names, as in ('bound',).")
    if cls.__dict__.get("__slots__"):
        raise InvalidTypeError(f"{cls.__name__} has __slots__: rules keep their attributes in __dict__, leave it out.")
    for name in names or ():
        value = getattr_static(cls, name, None)
        if hasattr(type(value), "__set__"):
            raise InvalidTypeError(
                f"{cls.__name__}.thresholds names {name!r}, a property: expected an attribute, assigned in __init__."
            )
        if value is not None:
            check_number(f"{cls.__name__}.{name}", value)


class BaseErrorClip:
    r"""A rule for gradients of intermediate values: subclass it and write ``clip(grad) -> grad``.

    ``clip`` gets the gradient of one intermediate value, accumulated over all that use the value, and returns what
    the backward goes on with: a tensor of the same shape and dtype, made with tensor operations, not in place. The
    same method serves eager and compiled code, so it may not look at values from Python (``if grad.max() > 1``), nor
    count its calls: what it returns depends on ``grad`` and the rule's attributes alone.

    ``thresholds`` names the attributes that are in units of the gradient. They may be assigned later (a schedule),
    are multiplied by the loss scale under ``scale=``, and enter compiled code as inputs, so that a new one does not
    recompile; there ``clip`` finds 0-dim tensors in them. Attributes that are tensors enter likewise. Others are
    constants of the compiled code: assigning one recompiles, changing a list in place goes unnoticed. A rule that
    leaves ``thresholds`` undefined is handed unscaled gradients.

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
    """The thresholds as tensors, and attributes that are tensors: what compiled code reads."""
    _kind: Kind
    """The rest of the rule: compiled code is made anew when it changes."""
    _held: tuple[object, ...]
    """Keeps alive what `_kind` names but cannot spell out."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_class(cls)
        cls._class_serial = f"{cls.__qualname__} {next(_SERIAL)}"
        _CLASSES[cls._class_serial] = cls

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Return a rule that has what its class gives it; ``__init__`` adds the rest."""
        if getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
            raise InvalidTypeError(f"{cls.__name__} is a frozen dataclass: rules may change, leave frozen=True out.")
        rule = object.__new__(cls)
        rule._take_apart()
        return rule

    def __setattr__(self, name: str, value: Any) -> None:
        named = name in (self.thresholds or ())
        object.__setattr__(self, name, self._checked(name, value) if named else value)
        self._take_apart()

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._take_apart()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OURS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_apart()

    def __repr__(self) -> str:
        public = [(k, v) for k, v in sorted(self.__dict__.items()) if not k.startswith("_")]
        shown = ", ".join(f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in public)
        return f"{type(self).__name__}({shown})"

    def clip(self, grad: Tensor) -> Tensor:
        """Return what the backward goes on with in place of ``grad``: same shape, same dtype, not changed in place.

        Raises:
            NotImplementedError: Always; a subclass says what to do.
        """
        raise NotImplementedError(f"{type(self).__name__} has no clip(grad): write one that returns a tensor.")

    def bounds(self) -> tuple[float, float] | None:
        """Return (low, high) if the rule is the elementwise clamp to them, else None: only clamps can be pruned.

        Counts only where it is written together with `clip`, or below: a subclass with a ``clip`` of its own has none.
        """
        return None

    def with_thresholds(self, values: tuple[Any, ...]) -> "BaseErrorClip":
        """Return a copy that has ``values`` for its thresholds: scaled numbers, or tensors in compiled code."""
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

    def _take_apart(self) -> None:
        """Bring `_inputs` and `_kind` up to date."""
        named = self.thresholds or ()
        state = {k: v for k, v in self.__dict__.items() if k not in named and k not in _OURS}
        tensors = [v for v in state.values() if isinstance(v, Tensor)]
        texts, held = encoded(state)
        values = [getattr(self, name, None) for name in named]
        inputs = None
        if all(value is not None for value in values):
            inputs = (*(torch.tensor(value, dtype=torch.float64) for value in values), *tensors)
        object.__setattr__(self, "_inputs", inputs)
        object.__setattr__(self, "_kind", (self._class_serial, texts))
        object.__setattr__(self, "_held", held)


class _OnUnscaled(BaseErrorClip):
    """A rule that knows nothing of loss scales, under one: unscale in a wide dtype, clip, scale."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __init__(self, rule: BaseErrorClip, scale: float | Tensor) -> None:
        self.rule, self.scale = rule, scale

    def clip(self, grad: Tensor) -> Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        unscaled = (grad.to(wide) / self.scale).to(wide)
        return (checked(self.rule, unscaled, self.rule.clip(unscaled)) * self.scale).to(grad.dtype)


def parts(rule: BaseErrorClip) -> tuple[Kind, tuple[Tensor, ...]]:
    """Return ``rule`` as texts and tensors, the two things that compiled code can be handed."""
    inputs = rule._inputs
    assert inputs is not None, "check_thresholds comes first"
    return rule._kind, inputs


def from_parts(kind: Kind, inputs: tuple[Tensor, ...]) -> BaseErrorClip:
    """Return the rule that was taken apart by `parts`, with tensors for its thresholds."""
    serial, state = kind
    rule = object.__new__(_CLASSES[serial])
    rule.__dict__.update({name: decoded(text) for name, text in state if not is_encoded_tensor(text)})
    names = [*(rule.thresholds or ()), *(name for name, text in state if is_encoded_tensor(text))]
    rule.__dict__.update(zip(names, inputs, strict=True))
    return rule


def check_thresholds(rule: BaseErrorClip) -> None:
    """Refuse a rule one of whose thresholds has no value.

    Raises:
        InvalidValueError: If so.
    """
    for name in rule.thresholds or ():
        if not hasattr(rule, name):
            raise InvalidValueError(
                f"{type(rule).__name__}.thresholds names {name!r}, and the rule has no such attribute: assign it in "
                f"__init__, or correct the name."
            )


def clamp_bounds(rule: BaseErrorClip) -> tuple[float, float] | None:
    """Return the bounds of a rule that is a clamp, and None for a rule that inherits them with another ``clip``."""
    if "clip" in rule.__dict__:
        return None
    for cls in type(rule).__mro__:
        if "bounds" in cls.__dict__:
            return rule.bounds()
        if "clip" in cls.__dict__:
            return None
    return None


def apply_rule(rule: BaseErrorClip, grad: Tensor, overflow_stays: bool = False) -> Tensor:
    """Return what ``rule`` makes of ``grad``, checked, with overflow left visible where a loss scale depends on it."""
    if grad.dim() == 0 and not is_trusted(rule):
        rule = _of_dtype(rule, grad)
    clipped = checked(rule, grad, rule.clip(grad))
    return keep_overflow(grad, clipped) if overflow_stays or grad.dtype is torch.float16 else clipped


def is_trusted(rule: BaseErrorClip) -> bool:
    """Tell whether the rule is one of ours, whose results need no check."""
    return type(rule).__module__.startswith("gradguard.backward_clip.") and not isinstance(rule, _OnUnscaled)


def keep_overflow(grad: Tensor, clipped: Tensor) -> Tensor:
    """Return ``clipped`` with NaN wherever ``grad`` is not finite, so that a GradScaler sees the overflow."""
    return clipped + (grad - grad)


def checked(rule: BaseErrorClip, grad: Tensor, clipped: Any) -> Tensor:
    """Return ``clipped`` if the backward can go on with it.

    Raises:
        InvalidTypeError: If it is no tensor of the same shape, dtype and device.
    """
    if is_trusted(rule):
        return clipped
    expected = f"tensor of shape {tuple(grad.shape)}, {grad.dtype}, on {grad.device}"
    if not isinstance(clipped, Tensor):
        raise InvalidTypeError(f"{type(rule).__name__}.clip returned {type(clipped).__name__}: expected a {expected}.")
    if (clipped.shape, clipped.dtype, clipped.device) != (grad.shape, grad.dtype, grad.device):
        got = f"one of shape {tuple(clipped.shape)}, {clipped.dtype}, on {clipped.device}"
        raise InvalidTypeError(f"{type(rule).__name__}.clip returned {got}: expected a {expected}.")
    return clipped


def _of_dtype(rule: BaseErrorClip, grad: Tensor) -> BaseErrorClip:
    """Return ``rule`` with thresholds that do not lend a 0-dim gradient their dtype, as numbers would not."""
    values = [getattr(rule, name) for name in rule.thresholds or ()]
    if not any(isinstance(value, Tensor) for value in values):
        return rule
    real = grad.dtype.to_real()
    return rule.with_thresholds(tuple(v.to(real) if isinstance(v, Tensor) else v for v in values))
