"""Signs of gradients that shrink or grow along the depth of a model, or along time."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from gradguard.monitoring.judge.cause import Sign
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import number, plain_threshold
from gradguard.monitoring.judge.signals import Layer, RunSignals

FEWEST_LAYERS = 4
"""Fewer weights have no depth to speak of, but where each of them multiplies sizes."""

VANISHED = 1e-4
"""A gradient this many times that of the top, element by element, where the optimizer does not cancel a scale."""

SLOPE = 3e-3
"""Vanishing gradients in the first steps of a run whose loss stands still, whatever the optimizer is."""

EXPLODED, EXPLODED_AT_ONCE = 1e3, 50.0
"""Of the gradients of the first layers over those of the last; and where the weights are too large for them as well."""

AMPLIFIES, DAMPS = 1.2, 0.3
"""Factors of a recurrent weight for each step: over 50 steps the first makes 10^4, the second nothing."""

ABOVE, FAR_ABOVE = 4.0, 1000.0
"""Times its weight: a first gradient as the usual weight hardly has, and none whose layers keep the size of values, not
even where the loss is a sum over the batch."""

LARGE_GAIN = 2.0
"""By which the usual weight begins to multiply sizes: the largest in use for plain layers is 1.7."""

RECURRENT_USES = 5
"""Operations that take one weight in one forward: fewer may be a shared layer."""


def vanishes_along_depth(signals: RunSignals) -> Sign | None:
    """Return whether gradients die out on the way down, judged absolutely and along depth."""
    layers = signals.layers
    if len(layers) < FEWEST_LAYERS:
        return None
    gradients = [layer.gradient for layer in layers]
    top = max(gradients[-max(2, len(layers) // 4) :])
    least = [VANISHED * top if signals.eps is None else signals.floor(layer) for layer in layers]
    last = next((k for k, size in enumerate(gradients) if size >= least[k]), len(layers))
    if last < 2 and signals.is_stuck:
        gradients = [statistics.median(layer.gradients[:3]) for layer in layers]
        # a layer that begins at 0 lets nothing through, and soon does
        falls = _rising_share(gradients) >= 0.75 and all(gradients)
        below = SLOPE * max(gradients)
        last = next((k for k, size in enumerate(gradients) if size > below), len(layers)) if falls else 0
    if last < 2 or not top:
        return None
    below, edge = layers[:last], layers[min(last, len(layers) - 1)].name
    top = max(gradients)
    share = statistics.median(gradients[:last]) / top
    words = f"An element's gradient is {number(gradients[0])} in {below[0].name} and {number(top)} at the top."
    evidence = [signals.seen(words, [layer.name for layer in below])]
    if signals.eps is not None:
        evidence.append(signals.seen(f"The optimizer's eps is {signals.eps:g}."))
    gaps = {"edge": edge, "share": f"{share:.0e}".replace("e-0", "e-")}
    return Sign(tuple(evidence), gaps)


def _rising_share(gradients: Sequence[float]) -> float:
    """On which share of the steps from a layer to the next gradients are larger."""
    return sum(low < high for low, high in pairwise(gradients)) / (len(gradients) - 1)


def explodes_along_depth(signals: RunSignals) -> Sign | None:
    """Return whether gradients grow from layer to layer on the way down, from the first steps on."""
    if any(layer.uses >= RECURRENT_USES for layer in signals.layers):
        return None
    measured = [layer for layer in signals.layers if layer.weights and not layer.begins_at_zero]
    gain = statistics.median_low([layer.gain() or 0.0 for layer in measured] or [0.0])
    for layers in (signals.biases, signals.layers):
        first = [layer.gradients[0] for layer in layers]
        if len(layers) < FEWEST_LAYERS or not all(first):
            continue
        quarter = len(first) // 4
        times = statistics.median(first[:quarter]) / statistics.median(first[-quarter:])
        large = gain > LARGE_GAIN or signals.begins_exploded(layers)
        least, share = (EXPLODED_AT_ONCE, 0.65) if large else (EXPLODED, 0.7)
        if times > least and _rising_share(first[::-1]) >= share:
            each = math.exp(math.log(times) / (len(layers) - 1))
            return _exploding(
                signals,
                layers,
                f"In the first step an element's gradient is {number(first[0])} in {layers[0].name} and "
                f"{number(first[-1])} in {layers[-1].name}: {each:.2g} times more with each layer down.",
                times,
            )
    # values may grow upwards as gradients do downwards: no layer has more than another
    fewest, least = (2, ABOVE) if gain > LARGE_GAIN else (FEWEST_LAYERS, FAR_ABOVE)
    if len(measured) < fewest:
        return None
    times = statistics.median_low(one.gradients[0] * one.root / one.weights[0] for one in measured)
    if times < least:
        return None
    words = f"In the first step the gradient of the usual weight is {number(times)} times as large as the weight."
    return _exploding(signals, measured, words, times)


def _exploding(signals: RunSignals, layers: list[Layer], words: str, times: float) -> Sign:
    seen = signals.seen(words, [layer.name for layer in layers])
    return Sign((seen,), certainty="certain" if times > 10 * EXPLODED else "likely")


LEARNED = 0.1
"""Of the first loss: norms of steps whose loss is below it say nothing of what a norm usually is."""

EXPLODES_IN_TIME = 1e4
"""Times the smallest norms: a rate that is too high takes a run that learns not so far."""


def explodes_in_time(signals: RunSignals) -> Sign | None:
    """Return whether a recurrence multiplies gradients, and the loss does not fall with them."""
    recurrent = _recurrent(signals)
    known = signals.positive_norms()
    radius = max((_radius(signals, layer) or 0.0 for layer in recurrent), default=0.0)
    begins = signals.begins_exploded(recurrent)
    broke = signals.ends_lost and (radius > AMPLIFIES or begins)
    if not recurrent or not known or (len(known) < 20 and not broke):
        return None
    largest, least = max(known), LEARNED * signals.curve.start
    pairs = zip(signals.norms, signals.loss.values, strict=True)  # norms are small where all has been learned
    unlearned = sorted(norm for norm, loss in pairs if norm and not loss < least) or known
    low, places = unlearned[len(unlearned) // 10], {layer.place for layer in recurrent}
    tops = zip(signals.norms, signals.record.steps.column("top"), strict=True)
    are_theirs = [top[0] in places for norm, top in tops if norm and top and norm > 3 * low]
    differs = len(recurrent) < len(signals.layers)  # else the largest share is always theirs
    leaps = differs and largest > 30 * low and 2 * sum(are_theirs) > len(are_theirs)
    explodes = begins or (leaps and largest > EXPLODES_IN_TIME * low)  # so far that it hurts a run that learns as well
    amplifies = radius > AMPLIFIES and max(known[:10]) > 3 * statistics.median(known)
    fails = signals.ends_lost or signals.curve.fallen <= 0.5  # neither where the loss means no progress
    if not amplifies and not explodes and not (leaps and fails):
        return None
    names = tuple(layer.name for layer in recurrent)
    words = f"Gradient norms run from {number(low)} to {number(largest)}."
    if low == largest:
        words = f"The first gradient has a norm of {number(low)}."
    evidence = [signals.seen(words, names)]
    if radius > 1:
        evidence.append(signals.seen(_multiplies(names[0], radius), names))
    threshold = None if broke else float(f"{statistics.median(known):.1e}")
    clip = "" if threshold is None else f", and clip at {plain_threshold(threshold)}"
    return Sign(tuple(evidence), {"params": named(names), "clip": clip}, threshold=threshold)


def _recurrent(signals: RunSignals) -> list[Layer]:
    """The square weights that a sequence runs through again and again, and those of gates."""
    return [layer for layer in signals.layers if layer.uses >= RECURRENT_USES or "weight_hh" in layer.name]


def _radius(signals: RunSignals, layer: Layer) -> float | None:
    """By how much a random square matrix of this norm multiplies a vector; None for a weight that is not square."""
    shape = signals.shape(layer.place)
    if len(shape) != 2 or shape[0] != shape[1] or not layer.weights:
        return None
    return layer.weights[0] / math.sqrt(shape[0])


def _multiplies(name: str, radius: float) -> str:
    return f"The weight {name} multiplies what runs through it by about {radius:.2g} at each step of a sequence."


def vanishes_in_time(signals: RunSignals) -> Sign | None:
    """Return whether a recurrence multiplies by so little that nothing comes through, while the loss does not fall."""
    radii = {layer.name: _radius(signals, layer) for layer in _recurrent(signals)}
    weak = {name: radius for name, radius in radii.items() if radius is not None and radius < DAMPS}
    after_start = signals.curve.levels[:3][-1]  # an output's bias is learned without any gradient in time
    if not weak or not signals.curve.final >= 0.7 * after_start:
        return None
    names, (radius, *_) = tuple(weak), weak.values()
    return Sign((signals.seen(_multiplies(named(names), radius), names),), {"params": named(names)})
