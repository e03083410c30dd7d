"""The base of all rules of the error clip: what a subclass writes, and how its thresholds reach compiled code."""

import ast
import copy
import itertools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradguard.arguments import check_number
from gradguard.errors import InvalidTypeError, InvalidValueError

_SERIAL = itertools.count()
_TENSOR = "tensor"
_PLAIN = (bool, int, float, str, bytes, type(None))
_CLASSES: dict[str, type["BaseErrorClip"]] = {}
_OBJECTS: dict[str, Any] = {}

Kind = tuple[str, tuple[tuple[str, str], ...]]
"""All of a rule but its thresholds, in texts: its class, and its attributes."""


class BaseErrorClip:
    r"""A rule for gradients of intermediate values: subclass it and write ``clip(grad) -> grad``.

    ``clip`` gets the gradient of one intermediate value, accumulated over all that use the value, and returns what
    the backward goes on with: a tensor of the same shape and dtype, made with tensor operations, not in place. The
    same method serves eager and compiled code, so it may not look at values from Python (``if grad.max() > 1``).

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
    _class_serial: ClassVar[str]
    _inputs: tuple[Tensor, ...] = ()
    """The thresholds as tensors, and attributes that are tensors: what compiled code reads."""
    _kind: Kind
    """The rest of the rule: compiled code is made anew when it changes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._class_serial = f"{cls.__qualname__} {next(_SERIAL)}"
        cls._kind = (cls._class_serial, ())
        _CLASSES[cls._class_serial] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        named = self.thresholds or ()
        object.__setattr__(self, name, self._checked(name, value) if name in named else value)
        if name in named or isinstance(value, Tensor):
            object.__setattr__(self, "_inputs", _inputs_of(self))
        if name not in named:
            object.__setattr__(self, "_kind", _kind_of(self))

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
        """Return (low, high) if the rule is the elementwise clamp to them, else None: only clamps can be pruned."""
        return None

    def with_thresholds(self, values: tuple[Any, ...]) -> "BaseErrorClip":
        """Return a copy that has ``values`` for its thresholds: scaled numbers, or tensors in compiled code."""
        other = copy.copy(self)
        other.__dict__.update(zip(self.thresholds or (), values, strict=True))
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
    return rule._kind, rule._inputs


def from_parts(kind: Kind, inputs: tuple[Tensor, ...]) -> BaseErrorClip:
    """Return the rule that was taken apart by `parts`, with tensors for its thresholds."""
    serial, state = kind
    rule = object.__new__(_CLASSES[serial])
    rule.__dict__.update({name: _decoded(text) for name, text in state if text != _TENSOR})
    names = [*(rule.thresholds or ()), *(name for name, text in state if text == _TENSOR)]
    rule.__dict__.update(zip(names, inputs, strict=True))
    return rule


def apply_rule(rule: BaseErrorClip, grad: Tensor, overflow_stays: bool = False) -> Tensor:
    """Return what ``rule`` makes of ``grad``, checked, with overflow left visible where a loss scale depends on it."""
    clipped = checked(rule, grad, rule.clip(grad))
    return keep_overflow(grad, clipped) if overflow_stays or grad.dtype is torch.float16 else clipped


def is_trusted(rule: BaseErrorClip) -> bool:
    """Tell whether the rule is one of ours, whose results need no check."""
    return type(rule).__module__.startswith("gradguard.error_clip.") and not isinstance(rule, _OnUnscaled)


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


def _kind_of(rule: BaseErrorClip) -> Kind:
    left_out = {*(rule.thresholds or ()), "_inputs", "_kind"}
    state = [(name, value) for name, value in rule.__dict__.items() if name not in left_out]
    return rule._class_serial, tuple((name, _encoded(value)) for name, value in state)


def _inputs_of(rule: BaseErrorClip) -> tuple[Tensor, ...]:
    named = rule.thresholds or ()
    thresholds = [torch.tensor(rule.__dict__.get(name, math.nan), dtype=torch.float64) for name in named]
    return (*thresholds, *(v for k, v in rule.__dict__.items() if isinstance(v, Tensor) and k not in named))


def _encoded(value: Any) -> str:
    """Return a text that stands for ``value``: the compiler might take a number for one that changes."""
    if isinstance(value, Tensor):
        return _TENSOR
    if _is_plain(value):
        return repr(value)
    _OBJECTS[str(id(value))] = value
    return f"object {id(value)}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) and one not in {math.inf, -math.inf} and one == one for one in value)
    return isinstance(value, _PLAIN)


def _decoded(text: str) -> Any:
    if text.startswith("object "):
        return _OBJECTS[text.removeprefix("object ")]
    return float(text) if text in {"inf", "-inf", "nan"} else ast.literal_eval(text)
