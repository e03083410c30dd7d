"""Searches for gradients that vanish or explode along the depth of a model, or along the time of a sequence."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from gradguard.monitoring.judge.cause import Sign
from gradguard.monitoring.judge.findings import named
from gradguard.monitoring.judge.numbers import number, plain_threshold
from gradguard.monitoring.judge.signals import Layer, RunSignals

FEWEST_LAYERS = 4
"""A model with fewer weights has no depth to judge, except where each weight amplifies values (`LARGE_GAIN`)."""

VANISHED = 1e-4
"""Share of the top layers' gradient, per element, below which a gradient has vanished; for an optimizer without eps."""

SLOPE = 3e-3
"""Share of the largest gradient in the first steps of a run whose loss stands still, for every optimizer."""

EXPLODED, EXPLODED_AT_ONCE = 1e3, 50.0
"""Gradients of the first layers over the last layers' gradients: above the first value they explode; above the second
one they do if the weights are too large as well."""

AMPLIFIES, DAMPS = 1.2, 0.3
"""Factors of a recurrent weight at each step of a sequence: over 50 steps the first makes 10^4, the second 10^-26."""

ABOVE, FAR_ABOVE = 4.0, 1000.0
"""Norm of the first gradient over the norm of the weight. `ABOVE` is rare for the usual weight. `FAR_ABOVE` does not
occur in layers that preserve the size of values, even if the loss is a sum over the batch."""

LARGE_GAIN = 2.0
"""Initial gain of the usual weight above which layers amplify values: the largest in use for plain layers is 1.7."""

RECURRENT_USES = 5
"""Operations of one forward pass that use a weight, from which on it is recurrent: fewer may be a shared layer."""


def vanishes_along_depth(signals: RunSignals) -> Sign | None:
    """Return a sign if gradients of the lower layers vanish, absolutely or relative to the upper layers."""
    layers = signals.layers
    if len(layers) < FEWEST_LAYERS:
        return None
    gradients = [layer.gradient for layer in layers]
    top = max(gradients[-max(2, len(layers) // 4) :])
    least = [VANISHED * top if signals.eps is None else signals.floor(layer) for layer in layers]
    last = next((k for k, size in enumerate(gradients) if size >= least[k]), len(layers))
    if last < 2 and signals.is_stuck:
        gradients = [statistics.median(layer.gradients[:3]) for layer in layers]
        # all(gradients): a layer that begins at 0 passes no gradient on at first, but soon does
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
    """Return the share of neighbouring layers in which the upper one has the larger gradient."""
    return sum(low < high for low, high in pairwise(gradients)) / (len(gradients) - 1)


def explodes_along_depth(signals: RunSignals) -> Sign | None:
    """Return a sign if gradients grow from layer to layer on the way down, in the first step already."""
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
    # Values may grow upwards as fast as gradients grow downwards: then all layers have equally large gradients.
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
"""Share of the first loss. Norms of steps whose loss is lower do not show what a norm usually is."""

EXPLODES_IN_TIME = 1e4
"""Times the smallest norms: further than a rate that is too high takes the norms of a run that learns."""


def explodes_in_time(signals: RunSignals) -> Sign | None:
    """Return a sign if a recurrent weight multiplies gradients at each step of a sequence, and harms the run."""
    recurrent = _recurrent(signals)
    known = signals.positive_norms()
    radius = max((_radius(signals, layer) or 0.0 for layer in recurrent), default=0.0)
    begins = signals.begins_exploded(recurrent)
    broke = signals.ends_lost and (radius > AMPLIFIES or begins)
    if not recurrent or not known or (len(known) < 20 and not broke):
        return None
    largest, least = max(known), LEARNED * signals.curve.start
    pairs = zip(signals.norms, signals.loss.values, strict=True)  # norms are small once everything is learned
    unlearned = sorted(norm for norm, loss in pairs if norm and not loss < least) or known
    low, places = unlearned[len(unlearned) // 10], {layer.place for layer in recurrent}
    tops = zip(signals.norms, signals.record.steps.column("top"), strict=True)
    are_theirs = [top[0] in places for norm, top in tops if norm and top and norm > 3 * low]
    differs = len(recurrent) < len(signals.layers)  # without other layers the largest share is always theirs
    leaps = differs and largest > 30 * low and 2 * sum(are_theirs) > len(are_theirs)
    explodes = begins or (leaps and largest > EXPLODES_IN_TIME * low)  # this harms even a run that learns
    amplifies = radius > AMPLIFIES and max(known[:10]) > 3 * statistics.median(known)
    fails = signals.ends_lost or signals.curve.fallen <= 0.5  # an unknown loss (NaN) is not a failure
    if not amplifies and not explodes and not (leaps and fails):
        return None
    names = tuple(layer.name for layer in recurrent)
    words = f"Gradient norms range from {number(low)} to {number(largest)}."
    if low == largest:
        words = f"The first gradient has a norm of {number(low)}."
    evidence = [signals.seen(words, names)]
    if radius > 1:
        evidence.append(signals.seen(_multiplies(names[0], radius), names))
    threshold = None if broke else float(f"{statistics.median(known):.1e}")
    clip = "" if threshold is None else f", and clip at {plain_threshold(threshold)}"
    return Sign(tuple(evidence), {"params": named(names), "clip": clip}, threshold=threshold)


def _recurrent(signals: RunSignals) -> list[Layer]:
    """Return the weights that a sequence uses at each of its steps, by use count or by name (``weight_hh``)."""
    return [layer for layer in signals.layers if layer.uses >= RECURRENT_USES or "weight_hh" in layer.name]


def _radius(signals: RunSignals, layer: Layer) -> float | None:
    """Return the factor by which a random square matrix of this norm scales a vector; None for other weights."""
    shape = signals.shape(layer.place)
    if len(shape) != 2 or shape[0] != shape[1] or not layer.weights:
        return None
    return layer.weights[0] / math.sqrt(shape[0])


def _multiplies(name: str, radius: float) -> str:
    return f"The weight {name} multiplies its input by about {radius:.2g} at each step of a sequence."


def vanishes_in_time(signals: RunSignals) -> Sign | None:
    """Return a sign if a recurrent weight is so small that it passes hardly anything on, and the loss does not fall."""
    radii = {layer.name: _radius(signals, layer) for layer in _recurrent(signals)}
    weak = {name: radius for name, radius in radii.items() if radius is not None and radius < DAMPS}
    after_start = signals.curve.levels[:3][-1]  # the output bias is learned first, without gradients through time
    if not weak or not signals.curve.final >= 0.7 * after_start:
        return None
    names, (radius, *_) = tuple(weak), weak.values()
    return Sign((signals.seen(_multiplies(named(names), radius), names),), {"params": named(names)})
