"""The clips that a script made itself and whose optimizer step has not come yet."""

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.placements import is_sharded
from gradguard.monitoring.observe.measure import Norms, gradient_norms
from gradguard.torch_private import foreach_norm, replace_foreach_norm, version_of

EPSILON = 1e-6
"""What PyTorch's norm clip adds to the norm before it divides."""

FIXED = frozenset(["norm", "value", "adaptive"])
"""Rules with one threshold from the first step on."""


@dataclass(slots=True)
class ScriptClip:
    """One call of a clipping function.

    Attributes:
        rule: ``"norm"``, ``"value"`` or ``"adaptive"``.
        threshold: Its threshold, copied.
        norm: The norm that a norm clip compares with its threshold, copied: what it returned or was given, unless
            that is the 2-norm of all gradients that it got, which is measured here.
        coefficient: What it multiplied the gradients by, on the whole, copied; None if it does not tell.
    """

    rule: str
    threshold: Any
    norm: Any
    coefficient: Any = None


@dataclass(slots=True)
class Clipped:
    """A parameter whose gradient was clipped: its norm before the first clip, and all clips since.

    Attributes:
        norms: 2-norms of the gradients before, of all parameters of the first clip; None where they are not known.
        place: Where this parameter's is.
        clips: What was done to it.
        parameter: The parameter, not kept alive.
        gradient: Its gradient as the last clip left it, not kept alive, and
        version: how often that had been written by then: more writes mean that it is no longer what it was.
    """

    norms: Norms | None
    place: int
    clips: list[ScriptClip]
    parameter: weakref.ref
    gradient: weakref.ref | None = None
    version: int = -1

    def holds(self, parameter: Tensor) -> bool:
        """Tell whether the gradient of ``parameter`` is still the one that was clipped."""
        gradient = parameter.grad
        if gradient is None or self.gradient is None or self.gradient() is not gradient:
            return False
        return self.parameter() is parameter and version_of(gradient) == self.version


@dataclass(slots=True)
class RunningClip:
    """A clip that has begun.

    Attributes:
        clip: What is known of it.
        parameters: Those that it acts on.
        new: The entries whose norms before it are not known yet.
        replaced: Whether it replaced clips that no step followed: the script skipped one, or clips each micro-batch.
    """

    clip: ScriptClip
    parameters: list[Tensor]
    new: list[Clipped]
    replaced: bool


class PendingClips:
    """What was clipped and not yet stepped."""

    def __init__(self) -> None:
        self._clipped: dict[int, Clipped] = {}

    def add(self, clip: ScriptClip, parameters: Sequence[Tensor], norms: Norms | None) -> RunningClip:
        """Note that ``clip`` is about to act on ``parameters``, whose gradients have ``norms``."""
        running = RunningClip(clip, list(parameters), [], False)
        for place, parameter in enumerate(parameters):
            key = id(parameter)
            old = self._clipped.get(key)
            if old is not None and old.holds(parameter):
                old.clips.append(clip)
                if old.norms is None:  # the first clip did not tell them
                    old.norms, old.place = norms, place
                    running.new.append(old)
                continue
            if old is not None and old.parameter() is parameter:  # its weak reference serves again
                running.replaced, reference = True, old.parameter
            else:
                reference = weakref.ref(parameter, lambda _, key=key: self._clipped.pop(key, None))
            self._clipped[key] = entry = Clipped(norms, place, [clip], reference)
            running.new.append(entry)
        return running

    def finish(self, running: RunningClip, returned: Any, norms: Norms | None = None) -> None:
        """A clip is done and returned ``returned``; it measured ``norms``, if it was asked to."""
        for parameter in running.parameters:
            entry = self._clipped.get(id(parameter))
            gradient = parameter.grad
            if entry is not None and gradient is not None:
                entry.gradient, entry.version = weakref.ref(gradient), version_of(gradient)
        if running.clip.norm is None:
            running.clip.norm = copied(returned)
        for entry in running.new:
            entry.norms = norms if entry.norms is None else entry.norms

    def take(self, parameters: Sequence[Tensor]) -> list[Clipped | None]:
        """Return what was clipped of ``parameters`` and is still so, and forget it: their step is here."""
        if not self._clipped:
            return [None] * len(parameters)
        taken = [self._clipped.pop(id(parameter), None) for parameter in parameters]
        return [
            entry if entry is not None and entry.holds(parameter) else None
            for entry, parameter in zip(taken, parameters, strict=True)
        ]

    def clear(self) -> None:
        """Forget everything."""
        self._clipped.clear()


def norms_of(clipped: Sequence[Clipped | None], now: Norms | None) -> Norms | None:
    """Return the norm of each gradient before its first clip, or ``now`` where it was not clipped.

    None if one of them is not known.
    """
    first = clipped[0] if clipped else None
    norms = first.norms if first is not None else None
    if norms is not None and len(norms) == len(clipped):  # as nearly always: one clip of exactly these
        alike = [entry is not None and entry.norms is norms and entry.place == k for k, entry in enumerate(clipped)]
        if all(alike):
            return norms
    found: list[Any] = []
    for k, entry in enumerate(clipped):
        source, place = (now, k) if entry is None else (entry.norms, entry.place)
        if source is None:
            return None
        found.append(source[place])
    if any(isinstance(norm, Tensor) for norm in found):
        return torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in found])
    return found


def clips_in(clipped: Sequence[Clipped | None]) -> list[ScriptClip]:
    """Return the clips that acted on ``clipped``, each once, in their order.

    Without those that raised, and without those that only measure (``max_norm=inf``).
    """
    calls = {id(clip): clip for entry in clipped if entry is not None for clip in entry.clips}
    return [clip for clip in calls.values() if clip.rule and not _only_measures(clip)]


def _only_measures(clip: ScriptClip) -> bool:
    threshold = clip.threshold
    return clip.rule in FIXED and isinstance(threshold, int | float) and math.isinf(threshold)


def single_known_clip(clipped: Sequence[Clipped | None]) -> ScriptClip | None:
    """Return the one clip that acted on all of ``clipped`` and was alone, if what it did follows from what it told."""
    calls = {id(clip): clip for entry in clipped if entry is not None for clip in entry.clips}
    first = clipped[0] if clipped else None
    if len(calls) != 1 or first is None or not all([entry is not None for entry in clipped]):
        return None
    (clip,) = calls.values()
    if clip.rule == "norm":
        return clip
    exactly = first.norms is None or len(first.norms) == len(clipped)
    return clip if exactly and clip.coefficient is not None else None  # of more gradients it says nothing of these


def copied(value: Any) -> Any:
    """Return ``value``, or a copy of it if it is a tensor, which the script may change in place.

    None for a DTensor: to read it may need every process, and only one of them writes.
    """
    if not isinstance(value, Tensor):
        return value
    return None if is_sharded(value) else value.detach().clone()


class CapturedNorms:
    """The norms that PyTorch's own `clip_grad_norm_` takes of each gradient: measured once for the clip and for us.

    Inside the block `torch._foreach_norm` is the original that also keeps its results.
    """

    def __init__(self) -> None:
        self._found: list[tuple[list[Tensor], Sequence[Tensor]]] = []

    def __enter__(self) -> "CapturedNorms":
        replace_foreach_norm(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        replace_foreach_norm(None)  # not what it was: two threads may be in here

    def _call(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = foreach_norm(tensors, *args, **kwargs)
        with suppress(TypeError):  # a call that is none of the clip's
            self._found.append((list(tensors), result))
        return result

    def of(self, parameters: Sequence[Tensor], clip: ScriptClip, returned: Any) -> Norms | None:
        """Return the norm of the gradient of each of ``parameters`` before the clip that was watched."""
        found = {id(g): n for tensors, norms in self._found for g, n in zip(tensors, norms, strict=True)}
        gradients = [p.grad for p in parameters if p.grad is not None]
        try:
            stacked = torch.stack([found[id(gradient)] for gradient in gradients])
            return stacked.tolist() if stacked.is_cpu else stacked
        except (KeyError, RuntimeError):  # it went another way, or over several devices
            return _before(gradients, clip, returned)


_ORDINARY = [(Tensor, dtype, torch.strided) for dtype in (torch.float32, torch.float64)]


def _before(gradients: Sequence[Tensor], clip: ScriptClip, returned: Any) -> Norms | None:
    """What the norms were before a norm clip, from what they are after it."""
    if not isinstance(returned, Tensor) or not returned.is_cpu:
        return None
    coefficient = min(1.0, float(clip.threshold) / (float(returned) + EPSILON))
    after = gradient_norms(gradients)
    return [float(norm) / coefficient for norm in after] if coefficient > 0 else None


def can_capture(gradients: Sequence[Tensor]) -> bool:
    """Tell whether PyTorch's own norms of ``gradients`` are as good as ours: not in half precision, nor of shards."""
    kinds = {(type(g), g.dtype, g.layout, g.device) for g in gradients}
    if len(kinds) != 1:
        return False
    *kind, device = kinds.pop()
    return tuple(kind) in _ORDINARY and device.type in ("cpu", "cuda")
