"""Searches for clips that do harm: a clip that starves the optimizer, or two clips of the same gradients."""

import statistics
from itertools import compress

from gradguard.monitoring.judge.acting_clips import (
    acting_clips,
    clipped_twice,
    clips_on,
    shares_in_words,
)
from gradguard.monitoring.judge.cause import Sign
from gradguard.monitoring.judge.followed import follows_clip
from gradguard.monitoring.judge.norm_statistics import are_scaled
from gradguard.monitoring.judge.numbers import capital, from_to, number, percent, plain_threshold
from gradguard.monitoring.judge.signals import RunSignals
from gradguard.monitoring.record.record_lines import without_none
from gradguard.monitoring.record.step_rows import bound_on, taken_steps, usable_norms

ALWAYS = 0.5
"""Share of the steps: a clip that binds on more of them sets the size of steps."""

STARVING = 0.2
"""A coefficient below this leaves SGD less than a fifth of its learning rate."""

HARDLY_MOVED = 0.5
"""Share of itself: a weight that all steps together cannot have moved further has not reached the loss's minimum."""

SEVERAL = 0.3
"""Share of the steps: if several clips act on more of them, no single clip sets the size of steps."""


def _binding(signals: RunSignals) -> tuple[Sign | None, float, bool]:
    """Return the clips that set the size of most steps, provided that each gradient is clipped once.

    Returns:
        A sign whose threshold leaves ordinary steps alone, the factor by which these clips usually multiply gradients,
        and whether the run has a single clip, of all gradients. Without such clips, or where several clips act on the
        same gradients, the sign is None and the factor 1.
    """
    clips = acting_clips(signals.record)
    is_single = len(clips) == 1
    binding = [clip for clip in clips if (clip.bound or 0) > ALWAYS * signals.taken]
    if not is_single:
        binding = [clip for clip in binding if (clip.coefficient or 1.0) <= STARVING]
    twice = len(clipped_twice(signals.record.steps)) > SEVERAL * signals.count
    if not binding or 2 * len(binding) < len(clips) or twice or follows_clip(signals):
        return None, 1.0, is_single
    coefficient = statistics.median(clip.coefficient or 1.0 for clip in binding)
    share = percent(statistics.median(clip.bound or 0 for clip in binding) / signals.taken)
    known = without_none(clip.threshold for clip in binding)
    if len(binding) > 1:
        clip = f"Each of {len(binding)} clips of different parameters"
    else:
        clip = "The clip" if is_single else "The clip of some parameters"
    clip += f" at {from_to(known)}" if known else ""
    norms = sorted(signals.positive_norms())
    threshold = float(f"{norms[int(0.9 * len(norms))]:.1e}") if norms and is_single else None
    if threshold:
        usual = plain_threshold(threshold)
        advice = f"Raise the threshold to {usual}, which leaves ordinary steps alone, or remove the clip."
    else:
        advice = "Remove that clip, and clip all parameters together at the norm of an ordinary step, if at all."
    words = {"clip": clip, "coefficient": f"{coefficient:.2g}", "advice": advice}
    seen = f"{clip} bound on {share} of the steps, and multiplied gradients by {coefficient:.2g}."
    return Sign((signals.seen(seen),), words, threshold=threshold), coefficient, is_single


def starves_rate(signals: RunSignals) -> Sign | None:
    """Return a sign if clips act like a learning rate that is too low, and the loss falls slowly or not at all."""
    sign, coefficient, _ = _binding(signals)
    return sign if coefficient <= STARVING and _is_slow(signals) and not signals.cancels_scale else None


def _is_slow(signals: RunSignals) -> bool:
    """Return whether the loss falls slowly or not at all, or still falls by steps that hardly move the weights."""
    curve = signals.curve
    slow = -0.5 < curve.fallen < 0.5 and (curve.is_falling or not curve.has_fallen or _hardly_moves(signals))
    return slow or (curve.is_falling and _hardly_moves(signals))  # such a loss would fall for much longer


def _hardly_moves(signals: RunSignals) -> bool:
    return signals.travel is not None and signals.travel < HARDLY_MOVED


def starves_unseen(signals: RunSignals) -> Sign | None:
    """Return a sign if unobserved code scales gradients to one norm, and such steps hardly move a weight."""
    if not are_scaled(signals.record) or signals.bound:
        return None
    below = sum(layer.gradient < signals.floor(layer) for layer in signals.layers)
    starves = 2 * below > len(signals.layers) if signals.cancels_scale else _hardly_moves(signals)
    if not starves or not _is_slow(signals):
        return None
    norm = number(statistics.median(usable_norms(signals.record)))
    seen = f"The norm of most steps is {norm}, to three digits: some code scales gradients before the step."
    return Sign((signals.seen(seen),), {"norm": norm})


def starves_below_eps(signals: RunSignals) -> Sign | None:
    """Return a sign if the gradients of most layers are below the optimizer's eps after the clip, but not before it."""
    (sign, coefficient, is_single), eps, layers = _binding(signals), signals.eps, signals.layers
    if sign is None or eps is None:
        return None
    # The record does not say which parameters each of several clips covers: assume the largest gradient for all.
    largest = max((layer.gradient for layer in layers), default=0.0)
    before = {layer.name: layer.gradient if is_single else largest for layer in layers}
    floors = {layer.name: signals.floor(layer) for layer in layers}
    starved = [name for name, size in before.items() if size * coefficient < floors[name] < size]
    if not starved or 2 * len(starved) < len(before):
        return None
    left = f"{coefficient * statistics.median(before.values()):.1g}"
    which = "in the usual weight" if is_single else "at most"
    words = (
        f"After the clip an element's gradient is {left} {which}; eps, which the optimizer adds to the divisor where "
        f"it divides by the size of the gradients, is {eps:g}."
    )
    evidence = (signals.seen(words, starved if is_single else ()), *sign.evidence)
    return Sign(evidence, {**sign.words, "eps": f"{eps:g}"}, threshold=sign.threshold)


def clips_twice(signals: RunSignals) -> Sign | None:
    """Return a sign if two clips act on the same gradients, and one of them binds."""
    if len(clipped_twice(signals.record.steps)) <= SEVERAL * signals.count:
        return None
    twice = clipped_twice(taken_steps(signals.record))
    clips = clips_on(signals.record, twice)
    binding = [clip for clip in clips if (clip.bound or 0) > 0.05 * len(twice)]
    if not binding:
        return None
    coefficient = statistics.median([*compress(twice.column("coefficient"), bound_on(twice))] or [1.0])
    words = f"{len(clips)} clips act on the same steps: {shares_in_words(clips, len(twice))}"
    seen = signals.seen(capital(f"{words}; together they multiply gradients by {coefficient:.2g}."))
    return Sign((seen,), {"count": len(clips), "clip": binding[0].name}, "" if coefficient < STARVING else "possible")
