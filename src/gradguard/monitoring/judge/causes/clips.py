"""A clip of the script's own that does harm: one that starves the optimizer, or two that work against each other."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from gradguard.monitoring.judge.acting_clips import ActingClip, acting_clips, clipped_twice, shares_in_words
from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.followed import follows_clip
from gradguard.monitoring.judge.numbers import capital, from_to, percent, plain_threshold
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.monitoring.record.lines import without_none
from gradguard.monitoring.record.steps import bound_on, taken_steps

ALWAYS = 0.5
"""Of the steps: a clip that binds on more sets their size."""

STARVING = 0.1
"""A coefficient below that leaves SGD a tenth of its learning rate."""

SEVERAL = 0.3
"""Of the steps: with more than one clip on more, no clip alone sets what the optimizer gets."""


@dataclass(frozen=True)
class _Starving:
    """The clips that bind on most steps, where each gradient is clipped once.

    Attributes:
        clips: The clips; more than one where each is of other parameters.
        of_all: Whether there is one clip, which sees all gradients.
        signals: What the run shows.
    """

    clips: Sequence[ActingClip]
    of_all: bool
    signals: RunSignals

    @property
    def coefficient(self) -> float:
        """Return the factor by which the clips multiply gradients on a usual step."""
        return statistics.median(clip.coefficient or 1.0 for clip in self.clips)

    @property
    def share(self) -> float:
        """On which share of the steps they bind."""
        return statistics.median(clip.bound or 0 for clip in self.clips) / self.signals.taken

    def words(self, one: str, several: str) -> str:
        """Return a sentence whose subject they are: the first part in the singular, or in the plural."""
        known = without_none(clip.threshold for clip in self.clips)
        at = f" at {from_to(known)}" if known else ""
        subject = "The clip" if self.of_all else "The clip of some parameters"
        subject = subject if len(self.clips) == 1 else f"{len(self.clips)} clips of different parameters"
        return f"{subject}{at} {one if len(self.clips) == 1 else several}"

    @property
    def threshold(self) -> float | None:
        """The norm that leaves ordinary steps alone; None where no clip sees all gradients."""
        norms = sorted(norm for norm in self.signals.norms if norm)
        return float(f"{norms[int(0.9 * len(norms))]:.1e}") if norms and self.of_all else None

    @property
    def advice(self) -> str:
        """Return the advice."""
        if not self.of_all:
            away = "these clips" if len(self.clips) > 1 else "that clip"
            return f"Take {away} away, and clip all parameters together at the norm of an ordinary step, if at all."
        if self.threshold is None:
            return "Take the clip away."
        usual = plain_threshold(self.threshold)
        return f"Raise the threshold to {usual}, which leaves ordinary steps alone, or take the clip away."


def clip_starves(signals: RunSignals) -> Cause | None:
    """Return whether clips leave the optimizer too little: below its eps, or as a learning rate that is too low.

    Of clips that follow one another on the same gradients none sets alone what the optimizer gets.
    """
    clips = acting_clips(signals.record)
    binding = [clip for clip in clips if (clip.bound or 0) > ALWAYS * signals.taken]
    if len(clips) > 1:
        binding = [clip for clip in binding if (clip.coefficient or 1.0) <= STARVING]
    twice = len(clipped_twice(signals.record.steps)) > SEVERAL * signals.count
    if not binding or 2 * len(binding) < len(clips) or twice or follows_clip(signals):
        return None
    found, curve = _Starving(binding, len(clips) == 1, signals), signals.curve
    share, coefficient = percent(found.share), f"{found.coefficient:.2g}"
    bound = signals.seen(
        found.words("", "each ") + f"bound on {share} of the steps, and multiplied gradients by {coefficient}."
    )
    if signals.eps is not None:
        return _below_eps(signals, found, bound)
    slow = curve is not None and -0.5 < curve.fallen < 0.5 and (curve.is_falling or not curve.has_fallen)
    if found.coefficient > STARVING or not slow or signals.cancels_scale:
        return None
    return Cause(
        "clip_starves",
        "likely",
        found.words("starves the optimizer: it multiplies", "starve the optimizer: they multiply")
        + f" the learning rate by {coefficient}.",
        found.advice,
        (bound,),
        ("The learning rate that the script sets is not the one that acts: the clip sets it.",),
        threshold=found.threshold,
    )


def _below_eps(signals: RunSignals, found: _Starving, bound: Evidence) -> Cause | None:
    """Whether most elements' gradients are below the eps of the optimizer after the clip, and were not before."""
    # Of which parameters each of several clips is, no record says: the largest gradient stands for all of theirs.
    eps, layers = signals.eps or 0.0, signals.layers
    largest = max((layer.gradient for layer in layers), default=0.0)
    before = {layer.name: layer.gradient if found.of_all else largest for layer in layers}
    floors = {layer.name: signals.floor(layer) for layer in layers}
    starved = [name for name, gradient in before.items() if gradient * found.coefficient < floors[name] < gradient]
    if not starved or 2 * len(starved) < len(before):
        return None
    left = f"{found.coefficient * statistics.median(before.values()):.1g}"
    which = "in the usual weight" if found.of_all else "at most"
    words = (
        f"After the clip an element's gradient is {left} {which}; eps, a number that the optimizer adds where it "
        f"divides by the size of the gradients, is {eps:g}."
    )
    return Cause(
        "clip_starves",
        "certain",
        found.words("starves", "starve") + f" the optimizer: gradients below its eps, {eps:g}, hardly move a weight.",
        found.advice,
        (signals.seen(words, starved if found.of_all else ()), bound),
        ("An optimizer that divides by the size of the gradients cancels a clip only above its eps.",),
        threshold=found.threshold,
    )


def clip_twice(signals: RunSignals) -> Cause | None:
    """Return whether two clips act on the same gradients, and one of them binds."""
    if len(clipped_twice(signals.record.steps)) <= SEVERAL * signals.count:
        return None
    twice = clipped_twice(taken_steps(signals.record))
    clips = acting_clips(signals.record, twice)
    binding = [clip for clip in clips if (clip.bound or 0) > 0.05 * len(twice)]
    if not binding:
        return None
    coefficients = list(compress(twice.column("coefficient"), bound_on(twice)))
    coefficient = statistics.median(coefficients or [1.0])
    harmed = coefficient < STARVING or signals.fallen < 0.3
    words = f"{len(clips)} clips act on the same steps: {shares_in_words(clips, len(twice))}"
    words += f"; together they multiply gradients by {coefficient:.2g}." if coefficients else "."
    return Cause(
        "clip_twice",
        "likely" if len(binding) > 1 or harmed else "possible",
        f"Gradients are clipped {len(clips)} times for each step: the later clip sees what the earlier one has left.",
        f"Keep {binding[0].name} or the other, and take away the one that binds on most steps.",
        (signals.seen(capital(words)),),
    )
