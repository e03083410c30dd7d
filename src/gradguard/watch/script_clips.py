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
        norm_type: The order of its norm.
        total: 2-norm of all gradients that it got, before it.
        returned: What it returned, copied.
    """

    rule: str
    threshold: Any
    norm_type: float
    total: Tensor
    returned: Any = None

    @property
    def norm(self) -> Any:
        """The norm that the coefficient of a norm clip was made of."""
        return self.total if self.norm_type == 2 or self.returned is None else self.returned


@dataclass(slots=True)
class Clipped:
    """A parameter that was clipped: its norm before the first clip since its backward, and all clips since.

    Attributes:
        parameter: The parameter, not kept alive.
        norm: 2-norm of its gradient before.
        clips: What was done to it.
        backward: Number of the backward pass after which that was.
    """

    parameter: weakref.ref
    norm: Tensor
    clips: list[ScriptClip]
    backward: int


class PendingClips:
    """What was clipped and not yet stepped. A clip after a new backward pass replaces what came before it."""

    def __init__(self) -> None:
        self._clipped: dict[int, Clipped] = {}
        self._backwards = 0
        self._last: ScriptClip | None = None

    def note_backward(self) -> None:
        """A backward pass began: gradients that were clipped before it are no longer what they were."""
        self._backwards += 1

    def add(self, clip: ScriptClip, parameters: Sequence[Tensor], norms: Tensor) -> bool:
        """Note that ``clip`` is about to act on ``parameters``, whose gradients have ``norms``.

        Returns:
            Whether it replaced clips that no step followed: the script skipped one, or clips each micro-batch.
        """
        replaced = False
        for parameter, norm in zip(parameters, norms.unbind(), strict=True):
            old = self._clipped.get(id(parameter))
            same = old is not None and old.parameter() is parameter
            if old is not None and same and old.backward == self._backwards:
                old.clips.append(clip)
                continue
            replaced = replaced or same
            self._clipped[id(parameter)] = Clipped(weakref.ref(parameter), norm, [clip], self._backwards)
        self._last = clip
        return replaced

    def note_returned(self, norm: Any) -> None:
        """The last clip returned ``norm``."""
        if self._last is not None:
            self._last.returned = copied(norm)

    def take(self, parameters: Sequence[Tensor]) -> list[Clipped | None]:
        """Return what was clipped of ``parameters``, and forget it: their step is here."""
        taken = [self._clipped.pop(id(parameter), None) for parameter in parameters]
        return [
            entry if entry is not None and entry.parameter() is parameter else None
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


def copied(value: Any) -> Any:
    """Return ``value``, or a copy of it if it is a tensor, which the script may change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
