"""The clips that a script made itself and whose optimizer step has not come yet."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class ScriptClip:
    """One call of a clipping function.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold, copied.
        norm: The norm that a norm clip compares with its threshold, copied: what it returned or was given, unless
            that is the 2-norm of all gradients that it got, which is measured here.
    """

    rule: str
    threshold: Any
    norm: Any


@dataclass(slots=True)
class Clipped:
    """A parameter whose gradient was clipped: its norm before the first clip, and all clips since.

    Attributes:
        norm: 2-norm of the gradient before.
        clips: What was done to it.
        parameter: The parameter, not kept alive.
        gradient: Its gradient as the last clip left it, not kept alive, and
        version: how often that had been written by then: more writes mean that it is no longer what it was.
    """

    norm: Tensor
    clips: list[ScriptClip]
    parameter: weakref.ref
    gradient: weakref.ref | None = None
    version: int = -1

    def holds(self, parameter: Tensor) -> bool:
        """Tell whether the gradient of ``parameter`` is still the one that was clipped."""
        gradient = parameter.grad
        if gradient is None or self.gradient is None or self.gradient() is not gradient:
            return False
        return self.parameter() is parameter and gradient._version == self.version


class PendingClips:
    """What was clipped and not yet stepped."""

    def __init__(self) -> None:
        self._clipped: dict[int, Clipped] = {}
        self._open: list[Tensor] = []  # the parameters of the clip that is running

    def add(self, clip: ScriptClip, parameters: Sequence[Tensor], norms: Tensor) -> bool:
        """Note that ``clip`` is about to act on ``parameters``, whose gradients have ``norms``.

        Returns:
            Whether it replaced clips that no step followed: the script skipped one, or clips each micro-batch.
        """
        replaced = False
        self._open = list(parameters)
        for parameter, norm in zip(parameters, norms.unbind(), strict=True):
            key = id(parameter)
            old = self._clipped.get(key)
            if old is not None and old.holds(parameter):
                old.clips.append(clip)
                continue
            replaced = replaced or (old is not None and old.parameter() is parameter)
            forget = weakref.ref(parameter, lambda _, key=key: self._clipped.pop(key, None))
            self._clipped[key] = Clipped(norm, [clip], forget)
        return replaced

    def finish(self, returned: Any) -> None:
        """The clip of the last `add` is done and returned ``returned``."""
        for parameter in self._open:
            entry = self._clipped.get(id(parameter))
            if entry is not None and parameter.grad is not None:
                entry.gradient, entry.version = weakref.ref(parameter.grad), parameter.grad._version
                if entry.clips[-1].norm is None:
                    entry.clips[-1].norm = copied(returned)
        self._open = []

    def take(self, parameters: Sequence[Tensor]) -> list[Clipped | None]:
        """Return what was clipped of ``parameters`` and is still so, and forget it: their step is here."""
        taken = [self._clipped.pop(id(parameter), None) for parameter in parameters]
        return [
            entry if entry is not None and entry.holds(parameter) else None
            for entry, parameter in zip(taken, parameters, strict=True)
        ]

    def clear(self) -> None:
        """Forget everything."""
        self._clipped.clear()


def single_norm_clip(clipped: Sequence[Clipped | None]) -> ScriptClip | None:
    """Return the one norm clip that acted on all of ``clipped`` and was alone, if that is what happened."""
    calls = {id(clip): clip for entry in clipped if entry is not None for clip in entry.clips}
    alone = all(entry is not None and len(entry.clips) == 1 for entry in clipped)
    if len(calls) != 1 or not alone:
        return None
    (clip,) = calls.values()
    return clip if clip.rule == "norm" else None


def last_clip(clipped: Sequence[Clipped | None]) -> ScriptClip | None:
    """Return the clip that acted last, without a threshold where different calls acted on different parameters."""
    last = {id(entry.clips[-1]): entry.clips[-1] for entry in clipped if entry is not None}
    if not last:
        return None
    clip = next(iter(last.values()))
    return clip if len(last) == 1 else ScriptClip(clip.rule, None, None)


def copied(value: Any) -> Any:
    """Return ``value``, or a copy of it if it is a tensor, which the script may change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
