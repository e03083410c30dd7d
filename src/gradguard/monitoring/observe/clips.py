"""The clips of a run, as they are heard of before a step and within it, and what a step's measurement says of them."""

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
    """Clips that no step has used yet: a table with a row for each gradient that was clipped.

    Attributes:
        gradients: The gradients, not kept alive.
        versions: How often each had been written when the last clip was done.
        norms: Their 2-norms before the first clip of each; None for one that is not known.
        clips: The clips in their order, each with the rows that it acted on and how many these were at first.
    """

    gradients: list[weakref.ref] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    norms: Any = ()
    clips: list[tuple[ScriptClip, Sequence[int], int]] = field(default_factory=list)

    def living(self) -> list[Any]:
        """Return the gradients, None for one that is gone."""
        return list(map(call, self.gradients))

    def only(self, rows: Sequence[int]) -> "PendingClips":
        """Return the table of some rows, with the clips that acted on them."""
        place = {row: k for k, row in enumerate(rows)}
        clips = [(clip, [place[row] for row in its if row in place], count) for clip, its, count in self.clips]
        gradients, versions = [self.gradients[row] for row in rows], [self.versions[row] for row in rows]
        return PendingClips(gradients, versions, [self.norms[row] for row in rows], [one for one in clips if one[1]])

    def unchanged(self) -> "PendingClips":
        """Return the table without gradients that were written or replaced since the last clip; itself if none was."""
        if not self.clips:
            return self
        living = self.living()
        if all(map(is_not, living, repeat(None))) and versions_of(living) == self.versions:
            return self
        pairs = enumerate(zip(living, self.versions, strict=True))
        return self.only([row for row, (g, version) in pairs if g is not None and version_of(g) == version])

    def has_norms_of(self, gradients: Sequence[Tensor]) -> bool:
        """Tell whether these are the gradients of the table, and their norms before the first clip are known."""
        return _are_same(self.living(), gradients) and all(map(is_not, self.norms, repeat(None)))

    def add(self, clip: ScriptClip, gradients: Sequence[Tensor], norms: Norms | None) -> None:
        """Note that ``clip`` has acted on ``gradients``, which had ``norms``; what it wrote is no change."""
        known = [None] * len(gradients) if norms is None else norms
        rows: Sequence[int] = range(len(gradients))
        if not self.clips:
            self.gradients, self.norms, living = list(map(weakref.ref, gradients)), known, gradients
        elif not _are_same(living := self.living(), gradients) or norms is not None:
            rows = self._rows_of(gradients, known, living)
            living = [_GONE if g is None else g for g in self.living()]
        # after all of them are written: some gradients count writes together
        self.versions = versions_of(living)
        self.clips.append((clip, rows, len(gradients)))

    def _rows_of(self, gradients: Sequence[Tensor], norms: Any, living: Sequence[Any]) -> list[int]:
        """Return the row of each gradient, new ones for those that are not in the table; fill in norms."""
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
        """Return the clips of ``gradients``, those of a step, and the table of all others."""
        living = self.living()
        if _are_same(living, gradients):  # as nearly always
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
        count: Number of its gradients.
        places: The place in the step of each gradient that was clipped.
        known: The norm of each of these before its first clip; None for one that is not known.
        clips: The clips in their order, each with the places that it acted on and of how many gradients these were.
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
        if clip.rule == "norm":  # in half precision PyTorch's own clip does something else than it says
            known = clip.coefficient is not None or _PRECISE.issuperset(map(_DTYPE, without_none(gradients)))
        else:  # where it acted on more, its coefficient says nothing of these
            known = clip.coefficient is not None and covered == self.count
        return clip if known else None

    def norms(self, now: Norms | None) -> Norms | None:
        """Return the norm of each gradient before its first clip, or ``now`` where it was not clipped.

        None if one of them is not known.
        """
        found: Any = self.known
        if self.places != range(self.count):  # as hardly ever
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
    """The parts of a step.

    Attributes:
        parameters: Those that have gradients; all where processes hold parts.
        gradients: Their gradients, which are kept alive: for no longer than the step begins. None only where processes
            hold parts.
        spread: Whether processes hold parts of them.
        shared: Norms that these have measured together.
    """

    parameters: list[Tensor]
    gradients: Sequence[Any]
    spread: bool = False
    shared: Shared | None = None


AppliedClip = Callable[[Optimizer, Callable[[], Sequence[nn.Module]]], ClipEvent]
"""A clip that the observer applies before each step, where the user asked for one.

It is given the optimizer, and what returns the modules of the script, and tells what it did.
"""


class _Thread(threading.local):
    def __init__(self) -> None:
        # Clips that have begun, one within another behind it, with their parameters and the norms before. Gradients are
        # not kept: a clip that raises never ends.
        self.running: list[tuple[ScriptClip, Sequence[Tensor], Any]] = []


@dataclass(slots=True)
class HeardClips:
    """Clips whose optimizer step has not come yet.

    Attributes:
        count: Number of clips heard of.
    """

    count: int = 0
    _pending: PendingClips = field(default_factory=PendingClips)
    _lock: Any = field(default_factory=threading.RLock)  # several threads may train at once
    _thread: _Thread = field(default_factory=_Thread)

    def begin(self, call: ClipCall, given: StepGradients) -> bool:
        """Measure before a clip acts.

        Args:
            call: The call.
            given: The gradients that it clips.

        Returns:
            Whether it replaces clips that no step followed.
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
            norms = gradient_norms(given.gradients)  # those before the first clip
        self._thread.running.append((clip, given.parameters, norms))
        return before is not self._pending

    def end(self, event: ClipEvent) -> None:
        """The clip of the last `begin` is done and tells this."""
        if event.elements is not None or not self._thread.running:  # an error clip, of gradients on their way
            return
        clip, parameters, norms = self._thread.running.pop()
        if not clip.rule:  # one of gradguard's
            clip = ScriptClip.told(event)._replace(norm=copied(event.norm) if event.norm_type == 2 else None)
            norms = _norms_told(parameters, event) if norms is None else norms
        elif clip.norm is None:
            clip = clip._replace(norm=copied(event.norm))
        gradients = grads_of(parameters)  # which the clip may have replaced
        there = without_none(gradients)
        if norms is not None and len(there) < len(gradients):
            pairs: Any = zip(norms, gradients, strict=True)
            norms = [norm for norm, gradient in pairs if gradient is not None]
        if there:
            with self._lock:
                self._pending.add(clip, there, norms)

    def forget(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Forget what clipped ``parameters``, or everything."""
        if parameters is None:
            self._pending = PendingClips()
        else:
            self.take(grads_of(parameters))

    def take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return what was clipped of ``gradients`` and is still so, for `step`, and forget it: their step is here.

        With it goes all that has changed: what backward passes without a step brought, the step has taken.
        """
        self._thread.running.clear()  # what raised
        if not self._pending.clips:
            return StepClips(len(gradients), (), (), ())
        with self._lock:
            own, self._pending = self._pending.unchanged().split(gradients)
        return own

    def within(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return the clips of ``gradients`` since `take`: those within their step."""
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
        """Return what is known of a step that begins: the norms before every clip, and what clipped.

        Args:
            optimizer: The optimizer.
            given: Its gradients.
            places: Their places in the names.
            now: The norm of each gradient as it is now, if that has been measured.
            clipped: The result of `take`, if it has been called for this step.
        """
        parameters, shared, scale = given.parameters, given.shared, getattr(optimizer, "grad_scale", None)
        clipped, measured = self.take(given.gradients) if clipped is None else clipped, now is None
        if measured and scale is None and shared is None and not clipped.clips:  # as on most steps
            norms = gradient_norms(given.gradients)
            return GradientNorms(norms, places, late=isinstance(norms, Tensor)), Clips()
        before, told, post, found = now, None, None, Clips()
        if clipped.clips:
            acting = clipped.acting
            clips, reach = [clip for clip, _ in acting], [its for _, its in acting]
            found = Clips(clips, reach if any(len(set(its)) != clipped.count for its in reach) else ())
            alone = clipped.single_known(given.gradients) if shared is None else None
            before = None if alone is None else clipped.norms(None)
            if before is None and alone is not None and alone.rule == "norm" and alone.norm is not None:
                before, told, places = [], unscaled(alone.norm, scale), ()  # the clip told the norm, and nothing else
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
        return GradientNorms(norms, places, told, post, are_after=before is None, lost=lost, late=late), found


def clipped_within(
    step: StepMeasurement, optimizer: Optimizer, given: StepGradients, own: StepClips
) -> StepMeasurement:
    """Return a step with the clips within it, such as those of an optimizer that clips for another one inside it.

    Args:
        step: The step, with what clipped before it.
        optimizer: The optimizer.
        given: Its gradients after these clips.
        own: The clips.

    Returns:
        A copy, or it itself where none acted.
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


def told_by_guard(clips: Clips, skip: Skip, event: ClipEvent) -> tuple[Clips, Skip]:
    """Add what a guard did within the step; of a closure, at its first evaluation."""
    if clips.guard is None and not (event.rule == "norm" and _is_infinite(event.threshold)):  # which only measures
        clips = clips._replace(guard=ScriptClip.told(event))
    if not isinstance(event.skipped, Tensor):
        skip = skip._replace(by_guard=True) if event.skipped else skip
    elif skip.by_guard is None:
        skip = skip._replace(by_guard=copied(event.skipped))
    if event.spike is not False and skip.spike is None:
        skip = skip._replace(spike=copied(event.spike))
    return clips, skip


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
