"""Searches for inputs or targets that are not normalised: numbers far from 1, which no learning rate fits."""

import math
import statistics
from collections.abc import Iterator

from gradguard.monitoring.judge.cause import Sign
from gradguard.monitoring.judge.causes.depth import LARGE_GAIN, explodes_along_depth
from gradguard.monitoring.judge.causes.rate import too_long
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import Layer, RunSignals

LARGE, SURE = 20.0, 100.0
"""Inputs of size `LARGE` are not normalised. In a run that fails, size `SURE` allows no other explanation. Targets must
reach `SURE`: a smaller error may be a loss that is summed over a batch."""

OWN = 0.2
"""Share of the outputs' first error: if the outputs themselves are that large, the targets need not be. And share of
the inputs' size: a first loss above it comes from outputs that are as large as the inputs."""

FEWEST_UNITS = 8
"""Units that a layer needs: with fewer, its bias's gradient may be nearly 0 by chance."""

_LINES = 5  # the first per-tensor lines, which show the size of inputs
_AT_LIMIT = 1e-3  # distance from 1 of the output of a saturated activation
_ROUNDED = 1e-4  # share of the neighbours' gradient: a smaller one is rounding, as of a bias before a normalisation


def inputs(signals: RunSignals) -> Sign | None:
    """Return a sign if the first layer reads numbers far from 1, in a run that fails.

    The gradient of a weight is the gradient of its bias times the input, so the two gradients give the size of the
    input. If the first loss is above `OWN` times that size, a falling loss does not show that the run is well: the loss
    falls from the level that the large inputs produced.
    """
    # layers without a bias are left out; embeddings are among them, and read no numbers
    pair = next((pair for pair in _with_bias(signals) if _learns(signals, pair[1])), None)
    if pair is None:
        return None
    (layer, bias), fails = pair, _fails(signals)
    size = _size_read(layer, bias, _LINES)
    if size < LARGE or not (fails or (size >= SURE and signals.curve.start > OWN * size)):
        return None
    words = (
        f"The inputs of {layer.name} have a size of about {number(size)}: its gradient is that many times the gradient "
        "of its bias."
    )
    return _sign(signals, "inputs", size, words, layer, sure=fails)


def flattening(signals: RunSignals) -> Sign | None:
    """Return a sign if a first layer of ordinary weights has no gradient, and the next one reads only 1 or -1.

    A saturated tanh does this: the inputs of the first layer saturate it for every sample. A sign or a rounded number
    passes no gradient on either, but differs from sample to sample.
    """
    pair = next(_with_bias(signals), None)
    if pair is None or not signals.matrices or not signals.measured:
        return None
    (layer, bias), first = pair, signals.matrices[0]
    if any(line["norm"][first] or first in line.get("absent", ()) for line in signals.lines):
        return None
    gain = signals.measured[0]["weight"][first] / math.sqrt(signals.shape(first)[0])
    if not 0 < gain < LARGE_GAIN or abs(_size_read(layer, bias, len(layer.gradients)) - 1) > _AT_LIMIT:
        return None
    name = signals.names[first]
    words = f"The gradient of {name} is exactly 0, and {layer.name} reads numbers of size 1 for every sample."
    return Sign((signals.seen(words, [name]),))


def targets(signals: RunSignals) -> Sign | None:
    """Return a sign if a squared error puts the first outputs far from their targets, in a run that fails.

    If the outputs themselves are large (the inputs of the last layer times its weights), the targets need not be.
    """
    loss, bias = next(iter(signals.losses), None), next(iter(signals.biases[::-1]), None)
    outputs = 0 if bias is None else signals.elements([bias.place])
    if bias is None or not loss or loss < outputs * SURE**2 or not _fails(signals):
        return None
    size = math.sqrt(loss / outputs)
    slope = bias.gradients[0] / (2 * size)  # 1 or less for a mean of squares
    last = (layer for layer, its in _with_bias(signals) if its is bias and layer.weights)
    if any(_size_read(layer, bias, 1) * (layer.gain() or 1.0) > OWN * size for layer in last):
        return None
    words = f"The first loss, {number(loss)}, means that the outputs are off by about {number(size)}."
    return _sign(signals, "targets", size, words, bias) if 0.03 < slope < 1.02 else None


def _sign(signals: RunSignals, which: str, size: float, words: str, layer: Layer, *, sure: bool = True) -> Sign:
    seen = signals.seen(words, [layer.name])
    pixels = ", or divide pixels by 255" if which == "inputs" else ""
    gaps = {"which": which, "size": number(size), "pixels": pixels}
    return Sign((seen,), gaps, "certain" if sure and size >= SURE else "likely")


def _fails(signals: RunSignals) -> bool:
    """Return whether a run lost its numbers, hardly learns, is stuck, or would be blamed on its rate or its weights."""
    curve = signals.curve
    fails = curve.fallen < 0.3 or signals.is_stuck or curve.final - curve.best > 3 * curve.error
    return signals.first_lost is not None or fails or any(look(signals) for look in (too_long, explodes_along_depth))


def _with_bias(signals: RunSignals) -> Iterator[tuple[Layer, Layer]]:
    """Yield each weight that has a bias in the same module, with that bias."""
    for layer in signals.layers:
        module, size = layer.name.rpartition(".")[0], signals.shape(layer.place)[:1]
        own = (one for one in signals.biases if one.name.startswith(f"{module}.bias".lstrip(".")))
        yield from ((layer, one) for one in own if signals.shape(one.place) == size)


def _learns(signals: RunSignals, vector: Layer) -> bool:
    """Return whether a vector has enough units, and a gradient that is more than rounding beside its neighbours'."""
    place = signals.biases.index(vector)
    beside = max(one.gradients[0] for one in signals.biases[max(0, place - 1) : place + 2])
    return signals.elements([vector.place]) >= FEWEST_UNITS and vector.gradients[0] > _ROUNDED * beside


def _size_read(layer: Layer, bias: Layer, lines: int) -> float:
    """Return the usual size of a layer's inputs on the first lines; 0 where its bias never had a gradient there."""
    pairs = zip(layer.gradients[:lines], bias.gradients[:lines], strict=False)
    sizes = [weight / vector for weight, vector in pairs if vector]
    return statistics.median(sizes) if sizes else 0.0
