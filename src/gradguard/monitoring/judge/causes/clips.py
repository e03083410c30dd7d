"""A clip of the script's own that does harm: one that starves the optimizer, or two that work against each other."""

import statistics
from itertools import compress

from gradguard.monitoring.judge.acting_clips import acting_clips, clipped_twice, shares_in_words
from gradguard.monitoring.judge.cause import Cause, Evidence
from gradguard.monitoring.judge.followed import follows_clip
from gradguard.monitoring.judge.numbers import capital, percent, plain_threshold
from gradguard.monitoring.judge.signals import Signals
from gradguard.monitoring.record.lines import without_none
from gradguard.monitoring.record.steps import bound_on, taken_steps

ALWAYS = 0.5
"""Of the steps: a clip that binds on more sets their size."""

STARVING = 0.1
"""A coefficient below that leaves SGD a tenth of its learning rate."""

SEVERAL = 0.3
"""Of the steps: with more than one clip on more, no clip alone sets what the optimizer gets."""

OF_EPS = 3.0
"""Below so many eps an optimizer that divides by the size of the gradient hardly moves."""


def clip_starves(signals: Signals) -> Cause | None:
    """Return whether a clip leaves the optimizer too little: below its eps, or as a learning rate that is too low."""
    several = sum(map(bool, signals.record.steps.column("clips"))) > SEVERAL * signals.count
    if signals.bound_share <= ALWAYS or several or follows_clip(signals):
        return None
    coefficient = statistics.median(signals.bound)
    thresholds = without_none(signals.record.steps.column("threshold"))
    at = f" at {plain_threshold(thresholds[-1])}" if thresholds else ""
    bound = signals.seen(
        f"The clip{at} bound on {percent(signals.bound_share)} of the steps, and multiplied gradients by "
        f"{coefficient:.2g}."
    )
    if signals.eps is not None:
        return _below_eps(signals, coefficient, at, bound)
    curve = signals.curve
    slow = curve is not None and curve.fallen < 0.5 and (curve.is_falling or not curve.has_fallen)
    if coefficient > STARVING or not slow or signals.cancels_scale:
        return None
    return Cause(
        "clip_starves",
        "likely",
        f"The clip{at} starves the optimizer: it multiplies the learning rate by {coefficient:.2g}.",
        _raise_it(signals),
        (bound,),
        ("The learning rate that the script sets is not the one that acts: the clip sets it.",),
        threshold=_usual(signals),
    )


def _raise_it(signals: Signals) -> str:
    usual = _usual(signals)
    if usual is None:
        return "Take the clip away."
    return f"Raise the threshold to {plain_threshold(usual)}, which leaves ordinary steps alone, or take it away."


def _usual(signals: Signals) -> float | None:
    norms = sorted(norm for norm in signals.norms if norm)
    return float(f"{norms[int(0.9 * len(norms))]:.1e}") if norms else None


def _below_eps(signals: Signals, coefficient: float, at: str, bound: Evidence) -> Cause | None:
    """Whether most elements' gradients are below the eps of the optimizer after the clip, and were not before."""
    eps = signals.eps or 0.0
    before = {layer.name: layer.gradient for layer in signals.layers}
    floors = {layer.name: OF_EPS * signals.floor(layer) for layer in signals.layers}
    starved = [name for name, gradient in before.items() if gradient * coefficient < floors[name] < gradient]
    if not starved or 2 * len(starved) < len(before):
        return None
    words = (
        f"After the clip an element's gradient is {coefficient * statistics.median(before.values()):.1g} in the "
        f"usual weight; eps is {eps:g}."
    )
    return Cause(
        "clip_starves",
        "certain",
        f"The clip{at} starves the optimizer: what it leaves of the gradients drowns in eps, {eps:g}.",
        _raise_it(signals),
        (signals.seen(words, starved), bound),
        ("An optimizer that divides by the size of the gradients cancels a clip only above its eps.",),
        threshold=_usual(signals),
    )


def clip_twice(signals: Signals) -> Cause | None:
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
