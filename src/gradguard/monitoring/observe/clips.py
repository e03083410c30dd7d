"""Collect the clips before and within each step, and add them to the step's measurement."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, call, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.listeners import ClipCall, ClipEvent
from gradguard.monitoring.observe.measure import Norms, gradient_norms, total, unscaled
from gradguard.monitoring.observe.shared_norms import Shared
from gradguard.monitoring.observe.step import FIXED, Clips, GradientNorms, ScriptClip, Skip, StepMeasurement, copied
from gradguard.monitoring.record.record_lines import without_none
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import grads_of, version_of, versions_of

_PRECISE, _DTYPE = {torch.float32, torch.float64}, attrgetter("dtype")
_GONE = torch.empty(0, device="cpu")


def _are_same(living: Sequence[Any], gradients: Sequence[Any]) -> bool:
    return len(living) == len(gradients) and all(map(is_, living, gradients))


@dataclass(slots=True)
class PendingClips:
    """The clips that no step has used yet: a table with one row for each clipped gradient.

    Attributes:
        gradients: Weak references to the gradients.
        versions: The version counter of each gradient after the last clip.
        norms: The 2-norm of each gradient before its first clip; None if it is unknown.
        clips: The clips in their order, each with the rows that it acted on, and the number of gradients it covered.
    """

    gradients: list[weakref.ref] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    norms: Any = ()
    clips: list[tuple[ScriptClip, Sequence[int], int]] = field(default_factory=list)

    def living(self) -> list[Any]:
        """Return the gradients; None for a gradient that was deleted."""
        return list(map(call, self.gradients))

    def only(self, rows: Sequence[int]) -> "PendingClips":
        """Return a table with only the given rows, and the clips that acted on them."""
        place = {row: k for k, row in enumerate(rows)}
        clips = [(clip, [place[row] for row in its if row in place], count) for clip, its, count in self.clips]
        gradients, versions = [self.gradients[row] for row in rows], [self.versions[row] for row in rows]
        return PendingClips(gradients, versions, [self.norms[row] for row in rows], [one for one in clips if one[1]])

    def unchanged(self) -> "PendingClips":
        """Return the table without gradients written or deleted since the last clip; itself if there are none."""
        if not self.clips:
            return self
        living = self.living()
        if all(map(is_not, living, repeat(None))) and versions_of(living) == self.versions:
            return self
        pairs = enumerate(zip(living, self.versions, strict=True))
        return self.only([row for row, (g, version) in pairs if g is not None and version_of(g) == version])

    def has_norms_of(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether the table has exactly these gradients, with their norms before the first clip."""
        return _are_same(self.living(), gradients) and all(map(is_not, self.norms, repeat(None)))

    def add(self, clip: ScriptClip, gradients: Sequence[Tensor], norms: Norms | None) -> None:
        """Add a clip of ``gradients`` whose norms before it were ``norms``, and store the gradients' new versions."""
        known = [None] * len(gradients) if norms is None else norms
        rows: Sequence[int] = range(len(gradients))
        if not self.clips:
            self.gradients, self.norms, living = list(map(weakref.ref, gradients)), known, gradients
        elif not _are_same(living := self.living(), gradients) or norms is not None:
            rows = self._rows_of(gradients, known, living)
            living = [_GONE if g is None else g for g in self.living()]
        # read all version counters, because some gradients share one
        self.versions = versions_of(living)
        self.clips.append((clip, rows, len(gradients)))

    def _rows_of(self, gradients: Sequence[Tensor], norms: Any, living: Sequence[Any]) -> list[int]:
        """Return the row of each gradient, adding rows for new gradients, and fill in missing norms."""
        row_of = {id(gradient): row for row, gradient in enumerate(living)}
        rows, self.norms = [], list(self.norms)
        for gradient, norm in zip(gradients, norms, strict=True):
            row = row_of.setdefault(id(gradient), len(self.gradients))
            if row == len(self.gradients):
                self.gradients.append(weakref.ref(gradient))
                self.norms.append(norm)
            elif self.norms[row] is None:
                self.norms[row] = norm
            rows.append(row)
        return rows

    def split(self, gradients: Sequence[Tensor | None]) -> "tuple[StepClips, PendingClips]":
        """Return the clips of a step's ``gradients``, and a table of all other gradients."""
        living = self.living()
        if _are_same(living, gradients):  # the usual case
            return StepClips(len(gradients), range(len(living)), self.norms, self.clips), PendingClips()
        place_of = {id(gradient): k for k, gradient in enumerate(gradients) if gradient is not None}
        rows = [row for row, gradient in enumerate(living) if id(gradient) in place_of]
        own, places = self.only(rows), [place_of[id(living[row])] for row in rows]
        clips = [(clip, [places[row] for row in its], count) for clip, its, count in own.clips]
        return StepClips(len(gradients), places, own.norms, clips), self.only(sorted({*range(len(living))} - {*rows}))


@dataclass(frozen=True, slots=True)
class StepClips:
    """The clips of the gradients of one step.

    Attributes:
        count: The number of the step's gradients.
        places: The index in the step of each clipped gradient.
        known: The norm of each clipped gradient before its first clip; None if it is unknown.
        clips: The clips in their order, each with the indices that it acted on, and the number of gradients it covered.
    """

    count: int
    places: Sequence[int]
    known: Any
    clips: Sequence[tuple[ScriptClip, Sequence[int], int]]

    @property
    def acting(self) -> list[tuple[ScriptClip, Sequence[int]]]:
        """The clips without those that raised and those that only measure (``max_norm=inf``)."""
        return [
            (clip, places)
            for clip, places, _ in self.clips
            if clip.rule and not (clip.rule in FIXED and _is_infinite(clip.threshold))
        ]

    def single_known(self, gradients: Sequence[Tensor | None]) -> ScriptClip | None:
        """Return the only clip, if it covered every gradient and its reported coefficient determines the result."""
        if len(self.clips) != 1 or len(self.clips[0][1]) != self.count:
            return None
        ((clip, _, covered),) = self.clips
        if clip.rule == "norm":  # in half precision, PyTorch's clip rounds: its norm does not determine the result
            known = clip.coefficient is not None or _PRECISE.issuperset(map(_DTYPE, without_none(gradients)))
        else:  # the coefficient of a clip that covered other gradients too is not the coefficient of these
            known = clip.coefficient is not None and covered == self.count
        return clip if known else None

    def norms(self, now: Norms | None) -> Norms | None:
        """Return the norm of each gradient before its first clip, or its norm in ``now`` if it was not clipped.

        Return None if one of the norms is unknown.
        """
        found: Any = self.known
        if self.places != range(self.count):  # rare: the clips covered a part of the gradients, or in another order
            found = [None] * self.count if now is None else list(now)
            for place, norm in zip(self.places, self.known, strict=True):
                found[place] = norm
        if isinstance(found, Tensor) or set(map(type, found)) <= {float}:
            return found
        if any(norm is None for norm in found):
            return None
        device = next((one.device for one in found if isinstance(one, Tensor) and not one.is_cpu), None)
        return torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in found])


@dataclass(slots=True)
class StepGradients:
    """The parameters and gradients at the beginning of a step.

    Attributes:
        parameters: The parameters that have gradients; all parameters if processes hold shards.
        gradients: The gradients of these parameters, None for a missing one (only if processes hold shards). The object
            keeps them alive and must not outlive the beginning of the step.
        spread: Whether processes hold shards of the gradients.
        shared: The norms that the processes measured together.
    """

    parameters: list[Tensor]
    gradients: Sequence[Any]
    spread: bool = False
    shared: Shared | None = None


AppliedClip = Callable[[Optimizer, Callable[[], Sequence[nn.Module]]], ClipEvent]
"""A clip that the observer applies before each step, if the user asked for one.

It takes the optimizer and a function that returns the script's modules, and returns the event of the clip.
"""


class _Thread(threading.local):
    def __init__(self) -> None:
        # A stack of nested clips that have begun, with their parameters and the norms before. It must not keep
        # gradients alive: a clip that raises stays on it until the next step.
        self.running: list[tuple[ScriptClip, Sequence[Tensor], Any]] = []


@dataclass(slots=True)
class HeardClips:
    """Collect the clips for the next step of each optimizer.

    Attributes:
        count: The number of clips that have begun.
    """

    count: int = 0
    _pending: PendingClips = field(default_factory=PendingClips)
    _lock: Any = field(default_factory=threading.RLock)  # several threads may train at once
    _thread: _Thread = field(default_factory=_Thread)

    def begin(self, call: ClipCall, given: StepGradients) -> bool:
        """Measure the gradients before a clip acts on them.

        Args:
            call: The call of the clip.
            given: The gradients that it clips.

        Returns:
            Whether earlier clips were discarded because their gradients changed without a step.
        """
        self.count += 1
        with self._lock:
            before, self._pending = self._pending, self._pending.unchanged()
        clip, norms = ScriptClip(call.rule, copied(call.threshold), copied(call.norm)), None
        if given.shared is not None:
            norms = given.shared.norms
            if call.rule and call.norm is None and call.norm_type == 2 and not call.whole:
                clip = clip._replace(norm=total(norms))
        elif not (given.spread or call.tells_norms or self._pending.has_norms_of(given.gradients)):
            norms = gradient_norms(given.gradients)
        self._thread.running.append((clip, given.parameters, norms))
        return before is not self._pending

    def end(self, event: ClipEvent) -> None:
        """Add the clip of the last `begin` to the table, with the facts of its event."""
        if event.elements is not None or not self._thread.running:  # an error clip acts within backward
            return
        clip, parameters, norms = self._thread.running.pop()
        if not clip.rule:  # a clip of gradguard; the event has the rule
            clip = ScriptClip.from_event(event)._replace(norm=copied(event.norm) if event.norm_type == 2 else None)
            norms = _reported_norms(parameters, event) if norms is None else norms
        elif clip.norm is None:
            clip = clip._replace(norm=copied(event.norm))
        gradients = grads_of(parameters)  # read again: the clip may have replaced the gradients
        there = without_none(gradients)
        if norms is not None and len(there) < len(gradients):
            pairs: Any = zip(norms, gradients, strict=True)
            norms = [norm for norm, gradient in pairs if gradient is not None]
        if there:
            with self._lock:
                self._pending.add(clip, there, norms)

    def forget(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Discard the clips of ``parameters``; all clips by default."""
        if parameters is None:
            self._pending = PendingClips()
        else:
            self.take(grads_of(parameters))

    def take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Remove and return the clips of ``gradients``, for their `step`; discard those of changed gradients."""
        self._thread.running.clear()  # clips that raised
        if not self._pending.clips:
            return StepClips(len(gradients), (), (), ())
        with self._lock:
            own, self._pending = self._pending.unchanged().split(gradients)
        return own

    def within(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return the clips of ``gradients`` since `take`, which acted within their step."""
        with self._lock:
            return self._pending.unchanged().split(gradients)[0]

    def step(
        self,
        optimizer: Optimizer,
        given: StepGradients,
        places: Sequence[int],
        now: Norms | None = None,
        clipped: StepClips | None = None,
    ) -> tuple[GradientNorms, Clips]:
        """Return the norms before all clips, and the clips, of a step that begins.

        Args:
            optimizer: The optimizer.
            given: The gradients of the step.
            places: The indices of the parameters in the record's names.
            now: The current norm of each gradient, if it has been measured.
            clipped: The result of `take`, if it has been called for this step.
        """
        parameters, shared, scale = given.parameters, given.shared, getattr(optimizer, "grad_scale", None)
        clipped, measured = self.take(given.gradients) if clipped is None else clipped, now is None
        if measured and scale is None and shared is None and not clipped.clips:  # the usual case
            norms = gradient_norms(given.gradients)
            return GradientNorms(norms, places, late=isinstance(norms, Tensor)), Clips()
        before, reported, post, found = now, None, None, Clips()
        if clipped.clips:
            acting = clipped.acting
            clips, reach = [clip for clip, _ in acting], [its for _, its in acting]
            found = Clips(clips, reach if any(len(set(its)) != clipped.count for its in reach) else ())
            alone = clipped.single_known(given.gradients) if shared is None else None
            before = None if alone is None else clipped.norms(None)
            if before is None and alone is not None and alone.rule == "norm" and alone.norm is not None:
                before, reported, places = [], unscaled(alone.norm, scale), ()  # only the total norm is known
            elif before is None:
                if now is None:
                    now = gradient_norms(given.gradients) if shared is None else shared.norms
                before = clipped.norms(now) if clips else now
                post = unscaled(total(now), scale) if clips and before is not None else None
        elif now is None:
            before = gradient_norms(given.gradients) if shared is None else shared.norms
        norms = unscaled(now if before is None else before, scale)
        late = (bool(parameters) and not parameters[0].is_cpu) or (measured and isinstance(norms, Tensor))
        lost = None if shared is None else shared.lost
        return GradientNorms(norms, places, reported, post, are_after=before is None, lost=lost, late=late), found


def clipped_within(
    step: StepMeasurement, optimizer: Optimizer, given: StepGradients, own: StepClips
) -> StepMeasurement:
    """Return a step with the script's clips within it, for example by a wrapper that clips in its own ``step``.

    Args:
        step: The step, with the clips before it.
        optimizer: The optimizer.
        given: The gradients after the clips within the step.
        own: The clips within the step.

    Returns:
        A copy with the clips, or ``step`` itself if none acted.
    """
    acting, clips, gradients = own.acting, step.clips, step.gradients
    if not acting or len(gradients.norms) not in (0, own.count):
        return step
    alone = not clips.script and own.single_known(given.gradients) is not None
    if not (alone or given.spread or clips.applied is not None or clips.guard is not None):
        now = total(gradient_norms(given.gradients))
        gradients = gradients._replace(post=unscaled(now, getattr(optimizer, "grad_scale", None)))
    script, everywhere = [*clips.script, *(clip for clip, _ in acting)], range(own.count)
    reach = [*(clips.reach or [everywhere] * len(clips.script)), *(places for _, places in acting)]
    apart = any(len(set(places)) != own.count for places in reach)
    return step._replace(gradients=gradients, clips=clips._replace(script=script, reach=reach if apart else ()))


def with_guard_event(clips: Clips, skip: Skip, event: ClipEvent) -> tuple[Clips, Skip]:
    """Add a guard's clip and skip within the step; with a closure, those of its first evaluation."""
    if clips.guard is None and not (event.rule == "norm" and _is_infinite(event.threshold)):  # inf only measures
        clips = clips._replace(guard=ScriptClip.from_event(event))
    if not isinstance(event.skipped, Tensor):
        skip = skip._replace(by_guard=True) if event.skipped else skip
    elif skip.by_guard is None:
        skip = skip._replace(by_guard=copied(event.skipped))
    if event.spike is not False and skip.spike is None:
        skip = skip._replace(spike=copied(event.spike))
    return clips, skip


def _is_infinite(threshold: float | Tensor | None) -> bool:
    """Return whether a threshold that the host can read is infinite: such a clip only measures."""
    if isinstance(threshold, Tensor):
        return are_readable(threshold) and threshold.numel() == 1 and math.isinf(float(threshold))
    return threshold is not None and math.isinf(threshold)


def _reported_norms(parameters: Sequence[Tensor], event: ClipEvent) -> Norms | None:
    """Return the norm of each parameter's gradient as the clip reported it; None if one is missing."""
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
