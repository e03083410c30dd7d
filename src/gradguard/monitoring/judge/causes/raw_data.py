"""Signs of inputs or targets in units of their own, far from a size of 1, which no learning rate fits."""

import math
import statistics
from collections.abc import Iterator

from gradguard.monitoring.judge.cause import Sign
from gradguard.monitoring.judge.causes.depth import LARGE_GAIN, explodes_along_depth
from gradguard.monitoring.judge.causes.rate import too_long
from gradguard.monitoring.judge.numbers import number
from gradguard.monitoring.judge.signals import Layer, RunSignals

LARGE, SURE = 20.0, 100.0
"""The size of inputs that are not normalised; and one that leaves no other reading of a run that fails. Targets need
that one: less may be a sum over a batch."""

OWN = 0.2
"""Of what the first outputs are off by: outputs of that size are large whatever the targets are. And of the inputs: a
first loss above that comes of outputs that are as large as they are."""

FEWEST_UNITS = 8
"""Of one alone the bias's gradient may be nearly 0 by chance."""

_LINES = 5  # of the first ones
_AT_LIMIT = 1e-3  # so near to 1 is what an activation at its limit gives on
_ROUNDED = 1e-4  # times that of the vectors beside it: a gradient of 0 but for rounding, as before a normalisation


def inputs(signals: RunSignals) -> Sign | None:
    """Return whether the first layer reads numbers that are far from 1, in a run that fails.

    The gradient of a weight is that of its bias times what comes in, so that the two together say how large that is.
    Where they put the first loss above `OWN` of their own size, its fall from there is no excuse: it comes down from
    what they made of the outputs.
    """
    # an embedding, which has no bias, reads no numbers
    pair = next((pair for pair in _with_bias(signals) if _learns(signals, pair[1])), None)
    if pair is None:
        return None
    (layer, bias), fails = pair, _fails(signals)
    size = _size_read(layer, bias, _LINES)
    if size < LARGE or not (fails or (size >= SURE and signals.curve.start > OWN * size)):
        return None
    words = f"A number that {layer.name} reads is some {number(size)}: so many times its bias's gradient is its own."
    return _sign(signals, "inputs", size, words, layer, sure=fails)


def flattening(signals: RunSignals) -> Sign | None:
    """Return whether a first layer of ordinary weights has no gradient, and the next one reads 1 or -1 throughout.

    So does a tanh at its limit: what the first layer reads drives it there whatever the sample is. A sign or a rounded
    number, which let no gradient through either, differ from sample to sample.
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
    """Return whether the first outputs are far from their targets by a squared error, in a run that fails.

    Outputs that are large themselves are numbers that the last layer reads, times its weights.
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
    words = f"The first loss, {number(loss)}, is that of outputs that are off by about {number(size)}."
    return _sign(signals, "targets", size, words, bias) if 0.03 < slope < 1.02 else None


def _sign(signals: RunSignals, which: str, size: float, words: str, layer: Layer, *, sure: bool = True) -> Sign:
    seen = signals.seen(words, [layer.name])
    pixels = ", or divide pixels by 255" if which == "inputs" else ""
    gaps = {"which": which, "size": number(size), "pixels": pixels}
    return Sign((seen,), gaps, "certain" if sure and size >= SURE else "likely")


def _fails(signals: RunSignals) -> bool:
    """Whether a run is lost, hardly learns, stands still half-way, or would be blamed for its rate or its weights."""
    curve = signals.curve
    fails = curve.fallen < 0.3 or signals.is_stuck or curve.final - curve.best > 3 * curve.error
    return signals.first_lost is not None or fails or any(look(signals) for look in (too_long, explodes_along_depth))


def _with_bias(signals: RunSignals) -> Iterator[tuple[Layer, Layer]]:
    """Weights, each with the vector of the same module that is added to what it makes, where it has one."""
    for layer in signals.layers:
        module, size = layer.name.rpartition(".")[0], signals.shape(layer.place)[:1]
        own = (one for one in signals.biases if one.name.startswith(f"{module}.bias".lstrip(".")))
        yield from ((layer, one) for one in own if signals.shape(one.place) == size)


def _learns(signals: RunSignals, vector: Layer) -> bool:
    """Whether a vector has enough units, and a gradient that is not 0 but for rounding beside its neighbours'."""
    place = signals.biases.index(vector)
    beside = max(one.gradients[0] for one in signals.biases[max(0, place - 1) : place + 2])
    return signals.elements([vector.place]) >= FEWEST_UNITS and vector.gradients[0] > _ROUNDED * beside


def _size_read(layer: Layer, bias: Layer, lines: int) -> float:
    """The usual size of a number that a layer reads; 0 where so many of the first lines do not say."""
    pairs = zip(layer.gradients[:lines], bias.gradients[:lines], strict=False)
    sizes = [weight / vector for weight, vector in pairs if vector]
    return statistics.median(sizes) if sizes else 0.0
