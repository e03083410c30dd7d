"""From clips as they are heard of, before a step and within it, to what a row says of them."""

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradguard.clip_events import ClipEvent
from gradguard.tensors.layout import are_readable
from gradguard.watch.applied import AppliedClip
from gradguard.watch.measure import Norms, gradient_norms, total, unscaled
from gradguard.watch.patches import ClipCall
from gradguard.watch.rows import Row
from gradguard.watch.script_clips import (
    CapturedNorms,
    PendingClips,
    RunningClip,
    ScriptClip,
    can_capture,
    clips_in,
    copied,
    norms_of,
    single_known_clip,
)
from gradguard.watch.shared_norms import Shared


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
        having = list(parameters) if spread else [p for p in parameters if p.grad is not None]
        known, norm = spread or tells_norms, None
        capture = False
        if call is not None:
            gradients = [p.grad for p in having if p.grad is not None]
            capture = not spread and call.norm_type == 2 and call.measures and can_capture(gradients)
            norm = copied(call.norm)
        norms = shared.norms if shared is not None else None if capture or known else _measured(having)
        if call is not None and norm is None and call.norm_type == 2 and norms is not None and not call.whole:
            norm = total(norms)
        clip = ScriptClip("", None, None) if call is None else ScriptClip(call.rule, copied(call.threshold), norm)
        running = self._pending.add(clip, having, norms)
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

    def row(
        self, index: int, optimizer: Optimizer, parameters: Sequence[Tensor], shared: Shared | None,
        applied: AppliedClip | None = None,
    ) -> Row:  # fmt: skip
        """Return the row of a step that begins: the norms before every clip, and what clipped.

        Args:
            index: Number of the step.
            optimizer: The optimizer.
            parameters: Its parameters that have gradients; all where processes hold parts.
            shared: What processes have measured together.
            applied: A clip that the watcher itself applies next.
        """
        self._running().clear()  # what raised
        clipped, scale = self._pending.take(parameters), getattr(optimizer, "grad_scale", None)
        clips = clips_in(clipped)
        alone = single_known_clip(clipped) if shared is None and len(clips) == 1 and applied is None else None
        norms = norms_of(clipped, None) if alone is not None else None
        post = told = None
        norm_after = False
        if alone is not None and norms is None and alone.rule == "norm" and alone.norm is not None:
            norms, told = [], unscaled(alone.norm, scale)  # the clip told the norm, and nothing else
        elif norms is None:
            now = _measured(parameters) if shared is None else shared.norms
            before = norms_of(clipped, now) if clips else now
            norms, norm_after = (now, True) if before is None else (before, False)
            post = unscaled(total(now), scale) if clips and not norm_after else None
            alone = alone if norm_after else None
        apart = len({tuple(map(id, entry.clips)) for entry in clipped if entry is not None}) > 1
        last = clips[-1] if clips and not apart else None
        return Row(
            index=index,
            norms=unscaled(norms, scale),
            places=(),
            post=post,
            clips=clips,
            applied_rule=applied.rule if applied else None,
            applied_threshold=applied.threshold if applied else None,
            user_threshold=last.threshold if last is not None else None,
            clips_apart=apart,
            norm_after=norm_after,
            total=told,
            late=bool(parameters) and not parameters[0].is_cpu,
            lost=None if shared is None else shared.lost,
        )


def note_guard(row: Row, event: ClipEvent) -> None:
    """Let the row of a step say what a guard did within it; of a closure, at its first evaluation."""
    if row.guard_rule is None:
        row.guard_rule, row.guard_threshold = event.rule, copied(event.threshold)
        row.guard_coefficient = copied(event.coefficient)
    if isinstance(event.skipped, Tensor):
        row.skipped = copied(event.skipped) if row.skipped is None else row.skipped
    elif event.skipped:
        row.skipped = True


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
