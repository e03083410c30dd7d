"""The clips of a run, as they are heard of before a step and within it, and what a step's measurement says of them."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.listeners import ClipCall, ClipEvent
from gradguard.monitoring.observe.measure import Norms, gradient_norms, total, unscaled
from gradguard.monitoring.observe.shared_norms import Shared
from gradguard.monitoring.observe.step import FIXED, ScriptClip, StepMeasurement, copied
from gradguard.monitoring.record.lines import without_none
from gradguard.tensors.layout import are_readable
from gradguard.torch_private import grads_of, version_of, versions_of

_PRECISE = {torch.float32, torch.float64}


@dataclass(slots=True)
class Clipped:
    """The gradients that one clip acted on, as far as they are still what the last clip left.

    Attributes:
        clip: The clip.
        gradients: The gradients, not kept alive.
        versions: How often each had been written when the last clip of all was done; where there are many clips, what
            counts that.
        norms: Their 2-norms before this clip; None where these are not known.
        covered: How many gradients the clip acted on.
    """

    clip: ScriptClip
    gradients: list[weakref.ref]
    versions: "Sequence[int | WriteCounter]"
    norms: Norms | None
    covered: int

    def living(self) -> list[Any]:
        """Return the gradients, None for one that is gone."""
        return [gradient() for gradient in self.gradients]

    def known(self) -> list[int]:
        """Return how often each had been written when the last clip of all was done."""
        return [one if isinstance(one, int) else one.itself().known for one in self.versions]

    def keep(self, places: Sequence[int]) -> None:
        """Forget all gradients but those at ``places``."""
        self.norms = _some(self.norms, places)
        self.gradients, self.versions = [self.gradients[k] for k in places], [self.versions[k] for k in places]

    def count_anew(self) -> None:
        """Take the present versions: what the clip that has just ended wrote is no change."""
        pairs = zip(self.living(), self.known(), strict=True)
        self.versions = [version if g is None else version_of(g) for g, version in pairs]


def _some(norms: Norms | None, places: Sequence[int]) -> Norms | None:
    if norms is None or isinstance(norms, Tensor):
        return None if norms is None else norms[list(places)]
    return [norms[k] for k in places]


@dataclass(frozen=True, slots=True)
class StepClips:
    """The clips of the gradients of one step.

    Attributes:
        count: Number of its gradients.
        parts: Of each clip, in their order, the gradients of this step, and the place of each of them in the step.
    """

    count: int
    parts: Sequence[tuple[Clipped, Sequence[int]]] = ()

    @property
    def clips(self) -> list[ScriptClip]:
        """The clips in their order, without those that raised and those that only measure (``max_norm=inf``)."""
        return [part.clip for part, _ in self._acting()]

    @property
    def reach(self) -> list[Sequence[int]]:
        """The places in the step that each clip acted on; empty where all acted on all of them."""
        reach = [places for _, places in self._acting()]
        return reach if any(len(set(places)) != self.count for places in reach) else []

    def _acting(self) -> list[tuple[Clipped, Sequence[int]]]:
        return [(part, places) for part, places in self.parts if part.clip.rule and not _only_measures(part.clip)]

    @property
    def single_known(self) -> ScriptClip | None:
        """The step's only clip, if it covered every gradient and its reported coefficient determines the result."""
        if len(self.parts) != 1 or len(self.parts[0][1]) != self.count:
            return None
        ((part, _),) = self.parts
        clip = part.clip
        if clip.rule == "norm":  # in half precision PyTorch's own clip does something else than it says
            known = clip.coefficient is not None or {g.dtype for g in part.living()} <= _PRECISE
        else:  # where it acted on more, its coefficient says nothing of these
            known = clip.coefficient is not None and (part.norms is None or part.covered == self.count)
        return clip if known else None

    def norms(self, now: Norms | None) -> Norms | None:
        """Return the norm of each gradient before its first clip, or ``now`` where it was not clipped.

        None if one of them is not known.
        """
        if len(self.parts) == 1 and self.parts[0][1] == range(self.count):  # as nearly always
            return self.parts[0][0].norms
        found: list[Any] = [None] * self.count if now is None else list(now)
        for _, places in self.parts:
            for place in places:
                found[place] = None
        for part, places in reversed(self.parts):  # the first clip that tells norms has the last word
            if part.norms is not None:
                for place, norm in zip(places, part.norms, strict=True):
                    found[place] = norm
        if any(norm is None for norm in found):
            return None
        if not (tensors := [norm for norm in found if isinstance(norm, Tensor)]):
            return found
        device = next((one.device for one in tensors if not one.is_cpu), tensors[0].device)
        return torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in found])


class WriteCounter:
    """A count of writes that some gradients have in common, as views and ``detach`` share it: autograd makes many such.

    Attributes:
        known: How many there had been when the last clip was done.
        example: One of the gradients, not kept alive.
    """

    def __init__(self, example: weakref.ref, known: int) -> None:
        self.known, self.example, self._same_as = known, example, self

    def itself(self) -> "WriteCounter":
        """Return the counter that this one turned out to be."""
        while self._same_as is not self:
            self = self._same_as
        return self

    def is_still(self) -> bool:
        """Tell whether nothing has been written since; False where nothing tells."""
        gradient = self.example()
        return gradient is not None and version_of(gradient) == self.known

    def becomes(self, other: "WriteCounter") -> None:
        """Be another one from now on."""
        self._same_as = other


class Writes:
    """The counters of the gradients of many clips.

    Gradients that count their writes together are in one memory, and a clip of one that moves the count of another
    shows that they do. A clip of one is then no write of the script's to the others.
    """

    def __init__(self) -> None:
        self._in_memory: dict[int, list[WriteCounter]] = {}
        self._of: dict[int, tuple[weakref.ref, WriteCounter]] = {}

    def counter_of(self, gradient: Tensor, known: int) -> WriteCounter:
        """Return the counter of a gradient, a new one where it is not noted yet."""
        ref, counter = self._of.get(id(gradient), (None, None))
        if ref is None or counter is None or ref() is not gradient:
            counter = WriteCounter(weakref.ref(gradient), known)
            self._in_memory.setdefault(_memory_of(gradient), []).append(counter)
            self._of[id(gradient)] = counter.example, counter
        return counter.itself()

    def note(self, gradients: Sequence[Tensor]) -> list[WriteCounter]:
        """Take the present counts as those that the last clip left; return the counter of each gradient."""
        counters = [self.counter_of(gradient, version_of(gradient)) for gradient in gradients]
        for memory in {_memory_of(gradient) for gradient in gradients}:
            beside = self._in_memory[memory]
            for other in beside if len(beside) > 1 else ():
                moved = other is not counters[0] and not other.is_still()
                if len(gradients) == 1 and moved and other.example() is not None:  # only this one was written
                    other.becomes(counters[0])
                elif (gradient := other.example()) is not None:
                    other.known = version_of(gradient)
            self._in_memory[memory] = [one for one in beside if one.itself() is one and one.example() is not None]
        for gradient, counter in zip(gradients, counters, strict=True):
            counter.known, counter.example = version_of(gradient), weakref.ref(gradient)
        return counters

    def are_still(self, gradients: Sequence[Tensor]) -> bool:
        """Tell whether nothing that was noted in the memory of ``gradients`` has been written since."""
        noted = [counter for gradient in gradients for counter in self._in_memory.get(_memory_of(gradient), ())]
        return all(map(WriteCounter.is_still, noted))


def _memory_of(gradient: Tensor) -> int:
    try:
        return gradient.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a sparse one, and of one of another class
        return 0


_FEW = 4
"""With fewer pending clips, all their gradients are looked at at each clip, which takes no time for each of them."""


class PendingClips:
    """Clips since the last step, in their order."""

    def __init__(self) -> None:
        self._clipped: list[Clipped] = []
        self._writes: Writes | None = None  # where there are more than `_FEW` clips
        self._lock = threading.RLock()  # several threads may train at once

    def drop_changed(self, unless_beside: Sequence[Tensor] | None = None) -> bool:
        """Forget gradients that were written or replaced since their clip.

        Args:
            unless_beside: Gradients; where nothing in their memory was written, no others need to be looked at. A
                script may clip each of hundreds alone.

        Returns:
            Whether there were any: the script skipped the step of their clip, or clips each micro-batch.
        """
        with self._lock:
            quick = self._writes is not None and unless_beside is not None and self._writes.are_still(unless_beside)
            if quick or self._are_unchanged():
                return False
            for part in self._clipped:
                pairs = zip(part.living(), part.known(), strict=True)
                part.keep([k for k, (g, version) in enumerate(pairs) if g is not None and version_of(g) == version])
                for ref, counter in zip(part.gradients, part.versions, strict=True):
                    if isinstance(counter, WriteCounter):
                        counter.itself().example = ref  # the last may be gone
            self._clipped = [part for part in self._clipped if part.gradients]
        return True

    def _are_unchanged(self) -> bool:
        """Tell in one pass whether no gradient was written or replaced."""
        living: list[Any] = [gradient() for part in self._clipped for gradient in part.gradients]
        known: list[Any] = [version for part in self._clipped for version in part.versions]
        if self._writes is not None:
            known = [version for part in self._clipped for version in part.known()]
        return all(map(is_not, living, repeat(None))) and versions_of(living) == known

    def has_norms_of(self, gradients: Sequence[Tensor]) -> bool:
        """Tell whether the first pending clip covered exactly ``gradients``, and their norms before it are known."""
        with self._lock:
            if not self._clipped or self._clipped[0].norms is None:
                return False
            known = self._clipped[0].gradients
            return len(known) == len(gradients) and all(map(is_, self._clipped[0].living(), gradients))

    def add(self, clip: ScriptClip, gradients: Sequence[Tensor], norms: Norms | None) -> None:
        """Note that ``clip`` has acted on ``gradients``, which had ``norms``."""
        refs = list(map(weakref.ref, gradients))
        with self._lock:
            versions = self._noted(gradients)
            if gradients:
                self._clipped.append(Clipped(clip, refs, versions, norms, len(gradients)))

    def _noted(self, gradients: Sequence[Tensor]) -> "Sequence[int | WriteCounter]":
        """Take what a clip of ``gradients`` has written as no change, also of others: some count writes together."""
        if len(self._clipped) < _FEW:
            for part in self._clipped if self._writes is not None else ():
                part.versions = part.known()
            self._writes = None
            if not self._are_unchanged():
                for part in self._clipped:
                    part.count_anew()
            return versions_of(gradients)
        if self._writes is None:
            self._writes = Writes()
            for part in self._clipped:
                part.versions = [
                    self._writes.counter_of(g, known) if g is not None else WriteCounter(ref, known)
                    for g, ref, known in zip(part.living(), part.gradients, part.known(), strict=True)
                ]
        return self._writes.note(gradients)

    def take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return what was clipped of ``gradients`` and is still so, and forget it: their step is here.

        With it goes all that has changed: what backward passes without a step brought, the step has taken.
        """
        with self._lock:
            self.drop_changed()
            pending, self._clipped = self._clipped, []
            found, own = [], dict[int, int]()
            for part in pending:
                living = part.living()
                if len(living) == len(gradients) and all(map(is_, living, gradients)):  # as nearly always
                    found.append((part, range(len(living))))
                    continue
                own = own or {id(gradient): k for k, gradient in enumerate(gradients) if gradient is not None}
                places = [own.get(id(gradient), -1) for gradient in living]
                if left := [k for k, place in enumerate(places) if place < 0]:
                    rest = Clipped(part.clip, part.gradients, part.versions, part.norms, part.covered)
                    rest.keep(left)
                    self._clipped.append(rest)
                if here := [k for k, place in enumerate(places) if place >= 0]:
                    part.keep(here)
                    found.append((part, [places[k] for k in here]))
            return StepClips(len(gradients), found)

    def clear(self) -> None:
        """Forget everything."""
        self._clipped = []


def _only_measures(clip: ScriptClip) -> bool:
    threshold = clip.threshold
    return clip.rule in FIXED and isinstance(threshold, int | float) and math.isinf(threshold)


@dataclass(slots=True)
class RunningClip:
    """A clip that has begun.

    Attributes:
        clip: What is known of it.
        parameters: Those that it acts on. Their gradients are not kept: a clip that raises never ends.
        norms: The 2-norms of the gradients before it, where these were measured.
    """

    clip: ScriptClip
    parameters: Sequence[Tensor]
    norms: Norms | None = None


@dataclass(slots=True)
class StepGradients:
    """The parts of a step.

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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[RunningClip] = []  # a clip within another one behind it


@dataclass(slots=True)
class HeardClips:
    """Clips whose optimizer step has not come yet.

    Attributes:
        count: Number of clips heard of.
        looked: Whether pending gradients have been looked at since the last backward; None where nobody tells of those.
    """

    count: int = 0
    looked: bool | None = None
    _pending: PendingClips = field(default_factory=PendingClips)
    _thread: _Thread = field(default_factory=_Thread)

    def begin(self, call: ClipCall, parameters: Sequence[Tensor], spread: bool, shared: Shared | None) -> bool:
        """Measure before a clip acts.

        Args:
            call: What is known of it.
            parameters: Its parameters.
            spread: Whether processes hold parts of them.
            shared: What these have measured together.

        Returns:
            Whether it replaces clips that no step followed.
        """
        self.count += 1
        there = [] if spread else without_none(grads_of(parameters))
        replaced = self._pending.drop_changed(there if self.looked and not spread else None)
        self.looked = None if self.looked is None else True
        clip = ScriptClip(call.rule, copied(call.threshold), copied(call.norm), one_factor=call.rule == "norm")
        running = RunningClip(clip, parameters)
        self._thread.running.append(running)
        if shared is not None:
            running.norms = shared.norms
            if call.rule and call.norm is None and call.norm_type == 2 and not call.whole:
                clip.norm = total(shared.norms)
        elif not spread:
            if len(there) < len(parameters):
                running.parameters = [p for p in parameters if p.grad is not None]
            if not (
                call.tells_norms or self._pending.has_norms_of(there)
            ):  # a step's norms are those before its first clip
                running.norms = gradient_norms(there)
        return replaced

    def end(self, event: ClipEvent) -> None:
        """The clip of the last `begin` is done and tells this."""
        if event.elements is None and self._thread.running:  # else an error clip, of gradients on their way
            running = self._thread.running.pop()
            if not running.clip.rule:  # one of gradguard's
                running.clip = ScriptClip.told(event)
                running.clip.norm = copied(event.norm) if event.norm_type == 2 else None
                running.norms = _norms_told(running.parameters, event) if running.norms is None else running.norms
            elif running.clip.norm is None:
                running.clip.norm = copied(event.norm)
            self._finish(running)

    def _finish(self, running: RunningClip) -> None:
        gradients = grads_of(running.parameters)  # which the clip may have replaced
        there = without_none(gradients)
        places = [k for k, gradient in enumerate(gradients) if gradient is not None]
        norms = running.norms if len(there) == len(gradients) else _some(running.norms, places)
        self._pending.add(running.clip, there, norms)

    def forget(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Forget what clipped ``parameters``, or everything."""
        if parameters is None:
            self._pending.clear()
        else:
            self._pending.take(grads_of(parameters))

    def take(self, gradients: Sequence[Tensor | None]) -> StepClips:
        """Return what was clipped of ``gradients``, for `step`, and forget it: their step is here."""
        self._thread.running.clear()  # what raised
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
        clipped = self.take(given.gradients) if clipped is None else clipped
        clips, reach, measured = clipped.clips, clipped.reach, now is None
        alone = clipped.single_known if shared is None and len(clips) <= 1 else None
        before = None if alone is None else clipped.norms(None)
        told = post = None
        if before is None and alone is not None and alone.rule == "norm" and alone.norm is not None:
            before, told = [], unscaled(alone.norm, scale)  # the clip told the norm, and nothing else
        elif before is None:
            if now is None:
                now = gradient_norms(without_none(given.gradients)) if shared is None else shared.norms
            before = clipped.norms(now) if clips else now
            post = unscaled(total(now), scale) if clips and before is not None else None
        norms = now if before is None else before
        return StepMeasurement(
            index=index,
            norms=unscaled(norms, scale),
            places=(),
            post=post,
            clips=clips,
            reach=reach,
            after=unscaled(now, scale) if len(reach) > 1 and before is not None else None,
            norm_after=before is None,
            total=told,
            late=(bool(parameters) and not parameters[0].is_cpu) or (measured and isinstance(norms, Tensor)),
            lost=None if shared is None else shared.lost,
        )


def note_guard(step: StepMeasurement, event: ClipEvent) -> None:
    """Let a step say what a guard did within it; of a closure, at its first evaluation."""
    only_measures = event.rule == "norm" and _is_infinite(event.threshold)
    if step.guard is None and not only_measures:
        step.guard = ScriptClip.told(event)
    if isinstance(event.skipped, Tensor):
        step.skipped = copied(event.skipped) if step.skipped is None else step.skipped
    elif event.skipped:
        step.skipped = True
    if event.spike is not False and step.spike is None:
        step.spike = copied(event.spike)


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
