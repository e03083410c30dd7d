"""The clips of a run, as they are heard of before a step and within it, and what a step's measurement says of them."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.clip_events import ClipEvent
from gradguard.monitoring.observe.intercept import ClipCall
from gradguard.monitoring.observe.measure import Norms, gradient_norms, look_again, total, unscaled
from gradguard.monitoring.observe.shared_norms import Shared
from gradguard.monitoring.observe.step import EPSILON, FIXED, ScriptClip, StepMeasurement, copied
from gradguard.monitoring.record.lines import without_none
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import foreach_norm, replace_norms, vector_norm, version_of, versions_of


@dataclass(slots=True)
class ClippedGradients:
    """Gradients that the same clips acted on.

    Attributes:
        gradients: They, not kept alive.
        versions: How often each had been written when the last clip was done: more writes mean that it is no longer
            what it was.
        norms: Their 2-norms before the first clip; None where these are not known.
        whole: On how many gradients the first clip acted.
        clips: The clips, in their order.
    """

    gradients: list[weakref.ref]
    versions: list[int]
    norms: Norms | None
    whole: int
    clips: list[ScriptClip]

    def unchanged(self) -> list[int]:
        """Return the places of those that are still what the last clip left."""
        living = self.living()
        if all(map(is_not, living, repeat(None))) and versions_of(living) == self.versions:
            return list(range(len(living)))
        pairs = zip(living, self.versions, strict=True)
        return [k for k, (g, version) in enumerate(pairs) if g is not None and version_of(g) == version]

    def living(self) -> list[Any]:
        """Return the gradients, None for one that is gone."""
        return [gradient() for gradient in self.gradients]

    def is_precise(self) -> bool:
        """Tell whether none of them is in half precision."""
        return {g.dtype for g in self.living() if g is not None} <= set(_PRECISE)

    def part(self, places: Sequence[int]) -> "ClippedGradients":
        """Return some of them."""
        if len(places) == len(self.gradients):
            return self
        gradients, versions = [self.gradients[k] for k in places], [self.versions[k] for k in places]
        return ClippedGradients(gradients, versions, _some(self.norms, places), self.whole, list(self.clips))


def _some(norms: Norms | None, places: Sequence[int]) -> Norms | None:
    if norms is None or isinstance(norms, Tensor):
        return None if norms is None else norms[list(places)]
    return [norms[k] for k in places]


@dataclass(frozen=True, slots=True)
class StepClips:
    """What was clipped of the gradients of one step.

    Attributes:
        count: Number of its gradients.
        parts: Those of them that were clipped, and the place of each in the step.
    """

    count: int
    parts: Sequence[tuple[ClippedGradients, Sequence[int]]] = ()

    @property
    def clips(self) -> list[ScriptClip]:
        """The clips, each once, in their order.

        Without those that raised, and without those that only measure (``max_norm=inf``).
        """
        return [clip for clip in self._calls() if clip.rule and not _only_measures(clip)]

    @property
    def are_apart(self) -> bool:
        """Whether some were clipped by other clips than others."""
        return len({tuple(map(id, part.clips)) for part, _ in self.parts}) > 1

    @property
    def single_known(self) -> ScriptClip | None:
        """The one clip that acted on all of them and was alone, if what it did follows from what it told."""
        calls = self._calls()
        if len(calls) != 1 or sum(len(places) for _, places in self.parts) != self.count:
            return None
        first, _ = self.parts[0]
        if calls[0].rule == "norm":
            told = calls[0].coefficient is not None or all(part.is_precise() for part, _ in self.parts)
            return calls[0] if told else None  # in half precision PyTorch's own clip does something else than it says
        exactly = first.norms is None or first.whole == self.count
        return calls[0] if exactly and calls[0].coefficient is not None else None  # of more it says nothing of these

    def norms(self, now: Norms | None) -> Norms | None:
        """Return the norm of each gradient before its first clip, or ``now`` where it was not clipped.

        None if one of them is not known.
        """
        if len(self.parts) == 1:
            part, places = self.parts[0]
            if places == range(self.count) or list(places) == list(range(self.count)):  # as nearly always
                return part.norms
        found: list[Any] = [None] * self.count if now is None else list(now)
        for part, places in self.parts:
            if part.norms is None:
                return None
            for k, norm in zip(places, part.norms, strict=True):
                found[k] = norm
        if any(norm is None for norm in found):
            return None
        if any(isinstance(norm, Tensor) for norm in found):
            return torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in found])
        return found

    def _calls(self) -> list[ScriptClip]:
        return list({id(clip): clip for part, _ in self.parts for clip in part.clips}.values())


_MOST_LISTS = 64  # of parameters that clips are called with, remembered


class PendingClips:
    """What was clipped and not yet stepped: gradients by the clips that acted on them."""

    def __init__(self) -> None:
        self._parts: list[ClippedGradients] = []

    def drop_changed(self) -> bool:
        """Forget gradients that were written or replaced since their clip.

        Returns:
            Whether there were any: the script skipped the step of their clip, or clips each micro-batch.
        """
        if self._are_unchanged():
            return False
        kept = [part.part(part.unchanged()) for part in self._parts]
        self._parts = [part for part in kept if part.gradients]
        return True

    def _are_unchanged(self) -> bool:
        living: list[Any] = [gradient() for part in self._parts for gradient in part.gradients]
        known = [version for part in self._parts for version in part.versions]
        return all(map(is_not, living, repeat(None))) and versions_of(living) == known

    def add(self, clip: ScriptClip, gradients: Sequence[Tensor], norms: Norms | None) -> None:
        """Note that ``clip`` has acted on ``gradients``, which had ``norms``."""
        whole, own = len(gradients), {id(g): k for k, g in enumerate(gradients)} if self._parts else {}
        if own and own.keys().isdisjoint(id(g()) for part in self._parts for g in part.gradients):
            self._count_anew()
        elif own:
            new = set(own.values())
            for part in self._parts:
                places = [own.get(id(g), -1) if g is not None else -1 for g in part.living()]
                new.difference_update(places)
                self._clip_again(part, places, clip, norms)
            self._count_anew()
            gradients, norms = [gradients[k] for k in sorted(new)], _some(norms, sorted(new))
        if gradients:
            refs = list(map(weakref.ref, gradients))
            self._parts.append(ClippedGradients(refs, versions_of(gradients), norms, whole, [clip]))

    def _count_anew(self) -> None:
        """Views of one buffer count their writes together: what a clip has written next to them is no change."""
        if self._are_unchanged():
            return
        for part in self._parts:
            living = part.living()
            pairs = zip(living, part.versions, strict=True)
            part.versions = [version if g is None else version_of(g) for g, version in pairs]

    def _clip_again(self, part: ClippedGradients, places: Sequence[int], clip: ScriptClip, norms: Norms | None) -> None:
        """Gradients of ``part`` that are at ``places`` (-1: nowhere) among those that ``clip`` has acted on."""
        again = [k for k, place in enumerate(places) if place >= 0]
        if not again:
            return
        both = part.part(again)
        if both is part:
            both = replace(part, clips=list(part.clips))
        both.clips.append(clip)
        both.versions = versions_of(both.living())
        if both.norms is None:  # the first clip did not tell them, as one for each sample does not
            both.norms = _some(norms, [places[k] for k in again])
        self._replace(part, both, part.part([k for k, place in enumerate(places) if place < 0]))

    def take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return what was clipped of ``gradients`` and is still so, and forget it: their step is here.

        With it goes all that has changed: what backward passes without a step brought, the step has taken.
        """
        if len(self._parts) == 1:  # as nearly always: one clip of exactly these
            (part,) = self._parts
            living = part.living()
            alike = (
                len(living) == len(gradients)
                and all(map(is_, living, gradients))
                and all(map(is_not, living, repeat(None)))
            )
            if alike and versions_of(living) == part.versions:
                self._parts = []
                return StepClips(len(living), [(part, range(len(living)))])
        if not self._parts:
            return StepClips(len(gradients))
        own = {id(gradient): k for k, gradient in enumerate(gradients) if gradient is not None}
        found, kept = [], []
        for part in self._parts:
            places = [own.get(id(g), -1) if g is not None else -1 for g in part.living()]
            unchanged = part.unchanged()
            if here := [k for k in unchanged if places[k] >= 0]:
                found.append((part.part(here), [places[k] for k in here]))
            kept.append(part.part([k for k in unchanged if places[k] < 0]))
        self._parts = [part for part in kept if part.gradients]
        return StepClips(len(gradients), found)

    def clear(self) -> None:
        """Forget everything."""
        self._parts = []

    def _replace(self, part: ClippedGradients, *others: ClippedGradients) -> None:
        """Put others in the place of one; those without gradients are left out."""
        parts: list[ClippedGradients] = []
        for one in self._parts:
            parts += [other for other in others if other.gradients] if one is part else [one]
        self._parts = parts


def _only_measures(clip: ScriptClip) -> bool:
    threshold = clip.threshold
    return clip.rule in FIXED and isinstance(threshold, int | float) and math.isinf(threshold)


class CapturedNorms:
    """The norms that PyTorch's own `clip_grad_norm_` takes of each gradient: measured once for the clip and for us.

    Inside the block `torch._foreach_norm` and `torch.linalg.vector_norm` are the originals that also keep what they
    are given: the gradients, and the norm of each in one vector.
    """

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self._norms: Sequence[Tensor] | None = None
        self._vector: Tensor | None = None
        self._listed: list[float] | None = None
        self._calls, self._thread = 0, threading.get_ident()

    def __enter__(self) -> "CapturedNorms":
        replace_norms(self._foreach_norm, self._vector_norm)
        return self

    def __exit__(self, *exception: object) -> None:
        replace_norms(None, None)  # not what it was: two threads may be in here

    def _foreach_norm(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = foreach_norm(tensors, *args, **kwargs)
        if threading.get_ident() == self._thread:
            self.gradients, self._norms, self._vector, self._listed = tensors, result, None, None
            self._calls += 1
        return result

    def _vector_norm(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if self._vector is None and threading.get_ident() == self._thread:
            self._vector = x
            if isinstance(x, Tensor) and x.is_cpu and x.shape == (len(self.gradients),):
                self._listed = x.tolist()
                look_again(self._listed, self.gradients)  # while these are what they were
        return vector_norm(x, *args, **kwargs)

    def norms(self, count: int) -> Norms | None:
        """Return the norm of each of ``count`` gradients; None if the clip took them another way, or too coarsely.

        One call of `torch._foreach_norm` is for one device and one dtype, which is that of the results.
        """
        norms, vector = self._norms, self._vector
        if self._calls != 1 or norms is None or len(norms) != count or norms[0].dtype not in _PRECISE:
            return None
        if vector is None or vector.shape != (count,) or vector.dtype is not norms[0].dtype:
            vector = torch.stack(list(norms))
        elif self._listed is not None:
            return self._listed
        return vector.tolist() if vector.is_cpu else vector


_PRECISE = (torch.float32, torch.float64)
_ORDINARY = [(Tensor, dtype, torch.strided) for dtype in _PRECISE]


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


@dataclass(slots=True)
class RunningClip:
    """A clip that has begun.

    Attributes:
        clip: What is known of it.
        parameters: Those that it acts on.
        norms: The 2-norms of their gradients before it, where these were measured.
        captured: What it measures itself.
    """

    clip: ScriptClip
    parameters: list[Tensor]
    norms: Norms | None = None
    captured: CapturedNorms | None = None


@dataclass(slots=True)
class StepGradients:
    """What a step is made of.

    Attributes:
        parameters: Those that have gradients; all where processes hold parts.
        gradients: Their gradients, which are kept alive: for no longer than the step begins.
        spread: Whether processes hold parts of them.
        shared: What these have measured together.
    """

    parameters: list[Tensor]
    gradients: Sequence[Tensor | None]
    spread: bool = False
    shared: Shared | None = None


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
        self._capturable: dict[tuple[int, ...], bool] = {}  # by lists of parameters
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
        replaced = self._pending.drop_changed()
        running = RunningClip(ScriptClip("", None, None), list(parameters))
        self._running().append(running)
        if call is not None:
            running.clip = ScriptClip(call.rule, copied(call.threshold), copied(call.norm))
            if not spread and call.norm_type == 2 and call.measures and self._can_capture(parameters):
                running.captured = CapturedNorms()
                return running.captured, replaced
        if shared is not None:
            running.norms = shared.norms
        elif not spread:
            running.parameters = [p for p in parameters if p.grad is not None]
            running.norms = None if tells_norms else _norms_at([p.grad for p in running.parameters])
        if call is not None and call.norm is None and call.norm_type == 2 and running.norms is not None:
            running.clip.norm = None if call.whole else total(running.norms)
        return None, replaced

    def end_foreign(self, returned: Any) -> None:
        """The clip of the last `begin` is done and returned this."""
        running = self._taken()
        if running is None:
            return
        if running.clip.norm is None:
            running.clip.norm = copied(returned)
        captured = running.captured
        if captured is None:
            self._finish(running)
            return
        norms, gradients = captured.norms(len(captured.gradients)), captured.gradients
        if norms is None:  # it went another way, or over several devices
            self._capturable.clear()
            gradients = [p.grad for p in running.parameters if p.grad is not None]
            norms = _before(gradients, running.clip, returned)
        self._pending.add(running.clip, gradients, norms)

    def end(self, event: ClipEvent) -> None:
        """The clip of the last `begin` is done and tells this."""
        if event.elements is not None:  # an error clip, of gradients on their way: none that was begun here
            return
        if (running := self._taken()) is not None:
            clip = running.clip
            clip.rule, clip.threshold, clip.coefficient = event.rule, copied(event.threshold), copied(event.coefficient)
            clip.norm = copied(event.norm) if event.norm_type == 2 else None
            told = _norms_told(running.parameters, event)
            running.norms = told if running.norms is None else running.norms
            self._finish(running)

    def _finish(self, running: RunningClip) -> None:
        gradients = [p.grad for p in running.parameters]
        there = [k for k, gradient in enumerate(gradients) if gradient is not None]
        norms = running.norms if len(there) == len(gradients) else _some(running.norms, there)
        self._pending.add(running.clip, without_none(gradients), norms)

    def _can_capture(self, parameters: Sequence[Tensor]) -> bool:
        """Remembers `can_capture` of lists that come again; what has been captured shows whether it is still so."""
        key = len(parameters), *map(id, [*parameters[:1], *parameters[-1:]])
        if (known := self._capturable.get(key)) is None:
            if len(self._capturable) >= _MOST_LISTS:
                self._capturable.clear()
            known = self._capturable[key] = can_capture([p.grad for p in parameters if p.grad is not None])
        return known

    def _running(self) -> list[RunningClip]:
        if not hasattr(self._thread, "clips"):
            self._thread.clips = []
        return self._thread.clips

    def _taken(self) -> RunningClip | None:
        running = self._running()
        return running.pop() if running else None

    def forget(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Forget what clipped ``parameters``, or everything."""
        if parameters is None:
            self._pending.clear()
        else:
            self._pending.take([p.grad for p in parameters])

    def take(self, parameters: Sequence[Tensor]) -> StepClips:
        """Return what was clipped of ``parameters``, for `step`, and forget it: their step is here."""
        return self._take([p.grad for p in parameters])

    def _take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        self._running().clear()  # what raised
        return self._pending.take(gradients)

    def step(
        self, index: int, optimizer: Optimizer, given: StepGradients, now: Norms | None = None,
        clipped: StepClips | None = None,
    ) -> StepMeasurement:  # fmt: skip
        """Return what is known of a step that begins: the norms before every clip, and what clipped.

        Args:
            index: Number of the step.
            optimizer: The optimizer.
            given: Its gradients.
            now: The norm of each gradient as it is now, if that has been measured.
            clipped: What `take` returned, if it has been called for this step.
        """
        parameters, shared, scale = given.parameters, given.shared, getattr(optimizer, "grad_scale", None)
        clipped = self._take(given.gradients) if clipped is None else clipped
        clips, apart = clipped.clips, clipped.are_apart
        alone = clipped.single_known if shared is None and len(clips) <= 1 else None
        norms = clipped.norms(None) if alone is not None else None
        post = told = None
        norm_after, unmeasured = False, now is None
        if alone is not None and norms is None and alone.rule == "norm" and alone.norm is not None:
            norms, told = [], unscaled(alone.norm, scale)  # the clip told the norm, and nothing else
        elif norms is None:
            if now is None:
                now = _norms_at(given.gradients) if shared is None else shared.norms
            before = clipped.norms(now) if clips else now
            norms, norm_after = (now, True) if before is None else (before, False)
            post = unscaled(total(now), scale) if clips and not norm_after else None
            alone = alone if norm_after else None
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
    only_measures = event.rule == "norm" and _is_infinite(event.threshold)
    if step.guard_rule is None and not only_measures:
        step.guard_rule, step.guard_threshold = event.rule, copied(event.threshold)
        step.guard_coefficient = copied(event.coefficient)
    if isinstance(event.skipped, Tensor):
        step.skipped = copied(event.skipped) if step.skipped is None else step.skipped
    elif event.skipped:
        step.skipped = True
    if event.spike is not False and step.spike is None:
        step.spike = copied(event.spike) if isinstance(event.spike, Tensor) else True


def _is_infinite(threshold: float | Tensor | None) -> bool:
    """Tell whether no norm is above it, where the host may look: then a clip is none."""
    if isinstance(threshold, Tensor):
        return are_readable(threshold) and threshold.numel() == 1 and math.isinf(float(threshold))
    return threshold is not None and math.isinf(threshold)


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


def _norms_at(gradients: Sequence[Tensor | None]) -> Norms:
    return gradient_norms(without_none(gradients))
