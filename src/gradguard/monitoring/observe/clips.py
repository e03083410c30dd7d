"""The clips of a run, as they are heard of before a step and within it, and what a step's measurement says of them."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip_events import ClipEvent
from gradguard.monitoring.observe.intercept import ClipCall
from gradguard.monitoring.observe.measure import Norms, gradient_norms, total, unscaled
from gradguard.monitoring.observe.shared_norms import Shared
from gradguard.monitoring.observe.step import EPSILON, FIXED, ScriptClip, StepMeasurement, copied
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import foreach_norm, replace_foreach_norm, version_of


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


AppliedClip = Callable[[Optimizer, Callable[[], Sequence[nn.Module]]], ClipEvent]
"""A clip that the observer applies before each step, where the user asked for one.

It is given the optimizer, and what returns the modules of the script, and tells what it did.
"""


class HeardClips:
    """Clips whose optimizer step has not come yet.

    Attributes:
        count: Number of clips heard of.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pending = PendingClips()
        self._thread = threading.local()  # .clips: those that are running, a clip within another one behind it

    def begin(
        self,
        parameters: Sequence[Tensor],
        spread: bool,
        shared: Shared | None,
        call: ClipCall | None = None,
        tells_norms: bool = False,
    ) -> tuple[CapturedNorms | None, bool]:
        """A clip is about to act: measure, or let it measure.

        Args:
            parameters: Its parameters.
            spread: Whether processes hold parts of them.
            shared: What these have measured together.
            call: What a call of a foreign function says; None for a clip of gradguard's, which tells when it is done.
            tells_norms: Whether that will have the norm of each gradient.

        Returns:
            What the clip has to run in, if anything; and whether it replaces clips that no step followed.
        """
        self.count += 1
        with_grad = list(parameters) if spread else [p for p in parameters if p.grad is not None]
        known, norm = spread or tells_norms, None
        capture = False
        if call is not None:
            gradients = [p.grad for p in with_grad if p.grad is not None]
            capture = not spread and call.norm_type == 2 and call.measures and can_capture(gradients)
            norm = copied(call.norm)
        norms = shared.norms if shared is not None else None if capture or known else _measured(with_grad)
        if call is not None and norm is None and call.norm_type == 2 and norms is not None and not call.whole:
            norm = total(norms)
        clip = ScriptClip("", None, None) if call is None else ScriptClip(call.rule, copied(call.threshold), norm)
        running = self._pending.add(clip, with_grad, norms)
        captured = CapturedNorms() if capture else None
        self._running().append((captured, running))
        return captured, running.replaced

    def end_foreign(self, returned: Any) -> None:
        """The clip of the last `begin` is done and returned this."""
        captured, running = self._taken()
        if running is not None:
            norms = captured.of(running.parameters, running.clip, returned) if captured is not None else None
            self._pending.finish(running, returned, norms)

    def end(self, event: ClipEvent) -> None:
        """The clip of the last `begin` is done and tells this."""
        if event.elements is not None:  # an error clip, of gradients on their way: none that was begun here
            return
        _, running = self._taken()
        if running is not None:
            clip = running.clip
            clip.rule, clip.threshold, clip.coefficient = event.rule, copied(event.threshold), copied(event.coefficient)
            clip.norm = copied(event.norm) if event.norm_type == 2 else None
            self._pending.finish(running, None, _norms_told(running.parameters, event))

    def _running(self) -> list[tuple[CapturedNorms | None, RunningClip]]:
        if not hasattr(self._thread, "clips"):
            self._thread.clips = []
        return self._thread.clips

    def _taken(self) -> tuple[CapturedNorms | None, RunningClip | None]:
        running = self._running()
        return running.pop() if running else (None, None)

    def forget(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Forget what clipped ``parameters``, or everything."""
        if parameters is None:
            self._pending.clear()
        else:
            self._pending.take(parameters)

    def take(self, parameters: Sequence[Tensor]) -> list[Clipped | None]:
        """Return what was clipped of ``parameters``, for `step`, and forget it: their step is here."""
        self._running().clear()  # what raised
        return self._pending.take(parameters)

    def step(
        self, index: int, optimizer: Optimizer, parameters: Sequence[Tensor], shared: Shared | None,
        now: Norms | None = None, clipped: Sequence[Clipped | None] | None = None,
    ) -> StepMeasurement:  # fmt: skip
        """Return what is known of a step that begins: the norms before every clip, and what clipped.

        Args:
            index: Number of the step.
            optimizer: The optimizer.
            parameters: Its parameters that have gradients; all where processes hold parts.
            shared: What processes have measured together.
            now: The norm of each gradient as it is now, if that has been measured.
            clipped: What `take` returned, if it has been called for this step.
        """
        clipped, scale = self.take(parameters) if clipped is None else clipped, getattr(optimizer, "grad_scale", None)
        clips = clips_in(clipped)
        alone = single_known_clip(clipped) if shared is None and len(clips) <= 1 else None
        norms = norms_of(clipped, None) if alone is not None else None
        post = told = None
        norm_after, unmeasured = False, now is None
        if alone is not None and norms is None and alone.rule == "norm" and alone.norm is not None:
            norms, told = [], unscaled(alone.norm, scale)  # the clip told the norm, and nothing else
        elif norms is None:
            if now is None:
                now = _measured(parameters) if shared is None else shared.norms
            before = norms_of(clipped, now) if clips else now
            norms, norm_after = (now, True) if before is None else (before, False)
            post = unscaled(total(now), scale) if clips and not norm_after else None
            alone = alone if norm_after else None
        apart = len({tuple(map(id, entry.clips)) for entry in clipped if entry is not None}) > 1
        last = clips[-1] if clips and not apart else None
        return StepMeasurement(
            index=index,
            norms=unscaled(norms, scale),
            places=(),
            post=post,
            clips=clips,
            user_threshold=last.threshold if last is not None else None,
            clips_apart=apart,
            norm_after=norm_after,
            total=told,
            late=(bool(parameters) and not parameters[0].is_cpu) or (unmeasured and isinstance(norms, Tensor)),
            lost=None if shared is None else shared.lost,
        )


def note_applied(step: StepMeasurement, event: ClipEvent) -> None:
    """Let a step say what the watcher's own clip did before it."""
    step.applied_rule, step.applied_threshold = event.rule, copied(event.threshold)
    step.applied_coefficient = copied(event.coefficient)


def note_guard(step: StepMeasurement, event: ClipEvent) -> None:
    """Let a step say what a guard did within it; of a closure, at its first evaluation."""
    if step.guard_rule is None:
        step.guard_rule, step.guard_threshold = event.rule, copied(event.threshold)
        step.guard_coefficient = copied(event.coefficient)
    if isinstance(event.skipped, Tensor):
        step.skipped = copied(event.skipped) if step.skipped is None else step.skipped
    elif event.skipped:
        step.skipped = True


def _norms_told(parameters: Sequence[Tensor], event: ClipEvent) -> Norms | None:
    """The norms that a clip tells, for each of ``parameters``; None if it does not tell all."""
    if event.norms is None:
        return None
    place = {id(p): k for k, p in enumerate(event.parameters)}
    places = [place.get(id(p), -1) for p in parameters]
    if -1 in places:
        return None
    norms = event.norms.detach()
    if are_readable(norms):
        listed = norms.tolist()
        return [listed[k] for k in places]
    return norms.clone() if places == list(range(len(norms))) else norms[places]


def _measured(parameters: Sequence[Tensor]) -> Norms:
    return gradient_norms([p.grad for p in parameters if p.grad is not None])
