"""Signs that lie in the data: batches unlike the others, data that change, and numbers that drift."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from operator import mul

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.causes.rate import GROWN
from gradguard.monitoring.judge.health import lost_from
from gradguard.monitoring.judge.numbers import median, medians, number, plain_threshold
from gradguard.monitoring.judge.signals import FAR, OUTBURST_TIMES, Curve, Layer, RunSignals, middle, period_of

FEWEST_OUTBURSTS = 3
CALM_SHARE = 0.2
"""Of the steps: where more of them are out of the ordinary, no batch is the exception."""

ONE_TIMES, SEVERAL_TIMES = 1.7, 12
"""A loss that leaps more than once, and not so far, does so by its making: a target that is set anew now and then."""

TINY = 0.1
"""Of the first loss: leaps that stay below come of a loss that is nearly 0, and not of the data."""

LEARNED = 0.5
"""Of a loss that leapt: one step of learning leaves more, and the batch after one that was unlike the others less."""

STAYS = 0.2
"""Of the loss of a step that leapt: where the next dozen stays above it, and far above what was before, it stays up."""

EQUAL = 1.15
"""By how much the longest distance between two changes of level may exceed the shortest."""

FASTER = 1.5
"""From a quarter of the run to the next: a loss whose fall grows by more has no bound that it comes near."""

SETTLES = 0.3
"""Of its growth in the second half: a weight that grew less settles."""

CALMS = 0.7
"""From the second quarter of the run to the last: norms that fall below that share come of weights that settle."""

BOUNDLESS = 1e6
"""Times the first losses, below 0: no bound lies so far away."""

AS_FAST = 1.7
"""From the middle of the run to its end: a weight that grows as fast in both halves has twice that."""

SOARS = 5.0
"""From the second quarter of the run to the last: norms that rise so far under a falling loss come near no bound of it,
even where the rate decays."""

CARRIES_ON = 4.0
"""Times the root of the number of steps: a momentum of 0.9 takes steps of chance so far."""

UNLEARNED = 1.5
"""Times the first losses: more than an untrained model has, and less than one that has learned another class only."""

RISEN = 2.0
"""Times the first losses: batches of unequal losses reach less before they are learned."""

RECENT, THROWN, CARRIED = 24, 1.5, 4
"""Norms, times the largest of them, and steps: what such a gradient does to the loss is no change of the data."""

AT_ONCE = 0.8
"""Of the way from its best level to the highest one after it, from a twentieth of the run to the next but one (the
level in which the leap falls lies half-way): that was no drift."""

UNFALLEN = 0.9
"""Of its start: a loss above has not fallen, for all that weights have grown."""

JUST_BEFORE = 3
"""Steps above which a leap has to stand: those of a rate that is too high climb."""

_SHOWN = 4


def bad_batches(signals: RunSignals) -> Sign | None:
    """Return whether single batches are unlike the others: losses and norms leap out of calm, at once."""
    places = signals.outbursts
    period = period_of(places)
    if period is not None:  # what lies beside the grid is what such a batch left behind
        phase = max(places, key=lambda first: sum((place - first) % period == 0 for place in places)) % period
        places = [place for place in places if place % period == phase]
    if not places or _stay_up(signals, places) or _had_risen(signals, places[0]):
        return None
    if not _broken_by(signals, places):
        halfway = places[len(places) // 2]
        grown = median(signals.growths(signals.named(halfway))) or 1.0
        for_nothing = grown > GROWN and signals.loss.usual(halfway) > UNFALLEN * signals.curve.start > 0
        if (
            for_nothing
            or len(places) < FEWEST_OUTBURSTS
            or _is_usual(signals, places)
            or not _losses_leap(signals, places)
        ):
            return None
    certainty = "possible" if _are_harmless(signals, places) else "certain" if period else "likely"
    numbers = [signals.named(place) for place in places]
    times = statistics.median(signals.times(place) for place in places)
    steps = ", ".join(map(str, numbers[:_SHOWN])) + " …" * (len(numbers) > _SHOWN)
    which, those = f"{len(numbers)} batches are", f"those of steps {steps}"
    where = "wrong labels, inputs that are not normalised, or samples that are far too long"
    if len(numbers) == 1:
        which, those = "One batch is", f"that of step {steps}"
    if period:
        which = f"A batch every {period} steps is"
        where = f"something that comes back every {period} steps, such as one bad file or shard of an epoch"
    near = {place + k for place in places for k in range(4)}
    lost = lost_from(signals.record)  # what comes after the damage is no ordinary step
    known = [place for place, i in enumerate(signals.numbers) if place >= 5 and (lost is None or i < lost)]
    calm = median([norm for place in known if (norm := signals.norms[place]) and place not in near])
    threshold = float(f"{min(calm, signals.low_threshold):.1e}") if calm else None
    clip = f" Until then, clip at {plain_threshold(threshold)}." if threshold else ""
    words = (
        f"There the loss or the gradient norm, the size of all gradients together, leapt to {number(times)} times what "
        "it was just before."
    )
    return Sign(
        (Evidence((numbers[0], numbers[-1]), words),),
        {"which": which, "those": those, "where": where, "clip": clip},
        certainty,
        threshold=threshold,
    )


def _is_usual(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether from the first leap on so many steps are as high that none of them is an exception."""
    for series in (signals.norm, signals.loss):
        since = series.known(places[0])
        leap = middle([series[place] for place in places])
        if sum(value <= 0.5 * leap for value in since) >= (1 - CALM_SHARE) * len(since) > 0:
            return False
    return True


def _stay_up(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether losses stay where most of the leaps took them, and come down by learning: other data, and no batch."""
    stays, loss = 0, signals.loss
    for place in places:
        here = max(loss.known(place, place + signals.turn), default=math.nan)
        after = middle(loss.known(place + 1, place + 13))
        stays += here > after > max(STAYS * here, OUTBURST_TIMES * loss.usual(place))
    return stays > 0.6 * len(places)


def _are_harmless(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether the loss is back at once, and a clip bound on nearly all of them or the leaps were tiny: hard cases."""
    curve, loss = signals.curve, signals.loss
    near = [value for place in places for value in loss.known(place, place + 4)]
    if max([curve.final, *near]) < TINY * curve.start:
        return True
    clipped = sum((signals.coefficients[place] or 1.0) < 1 for place in places)
    harmed = sum(middle(loss.known(place + 1, place + 6)) > 1.25 * loss.usual(place) for place in places)
    return clipped >= 0.6 * len(places) and harmed < 0.4 * len(places)


def _losses_leap(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether loss and norm of most of these steps stand out, where losses are known: those of a bad batch do."""
    if not signals.curve.is_known:
        return True
    leaps, loss, norm = 0, signals.loss, signals.norm
    for place in places:
        recent = loss.known(place - RECENT, place)
        if len(recent) < 5 or norm[place] <= 2.5 * norm.usual(place):
            continue
        usual = statistics.median(recent)
        leaps += loss[place] - usual > 4 * statistics.median(abs(one - usual) for one in recent)
    return leaps >= 0.6 * len(places)


def _broken_by(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether the first leap, too far above the steps before it for any rate, threw the run for good."""
    place, curve, loss, length = places[0], signals.curve, signals.loss, signals.length
    before, after = loss.usual(place), loss.known(place, place + 6)
    ramp = max(map(signals.times, range(max(0, place - JUST_BEFORE), place)), default=1.0)
    if signals.times(place) < FAR * ramp or not curve.is_known:
        return False
    stays = curve.final > before + 0.1 * abs(before) or signals.ends_lost
    if not stays or length[place] < 2.5 * length.usual(place):  # heavy noise in the targets of a robust loss
        return False
    return max(after, default=math.nan) > 2 * loss[place] or any(later < 0.3 * one for one, later in pairwise(after))


def level_changes(signals: RunSignals) -> Sign | None:
    """Return whether losses are at another level from one step on: at once, and they stay there."""
    if signals.takes_turns:
        return None
    up, loss, norm = _level_shift(signals), signals.loss, signals.norm
    place = up or _learned_anew(signals)
    if place is None or _had_risen(signals, place):
        return None
    # a gradient larger than any recent one, in one of the steps before: a momentum moves the loss on
    just_before = range(place - CARRIED, place)
    if any(norm[one] > THROWN * max(norm.known(one - RECENT, one), default=math.inf) for one in just_before):
        return None
    rates = [rate for rate in signals.rates[place - 3 : place + 1] if rate]
    if rates and max(rates) > 2 * min(rates):
        return None
    low, high, step = middle(loss.known(place - 20, place)), middle(loss.known(place, place + 20)), signals.named(place)
    if max(high, loss[place]) < TINY * signals.curve.start:
        return None
    level = f"{number(high)} from step {step} on"
    if not up:
        level = f"leapt to {number(loss[place])} at step {step}, from where it came down step by step"
    words = f"The loss was {number(low)} up to step {signals.named(place - 1)} and {level}."
    return Sign((signals.seen(words, since=step),), {"step": step})


def _had_risen(signals: RunSignals, place: int) -> bool:
    """Whether the loss was far above its start before a step: the run was lost by then."""
    return signals.loss.usual(place) > RISEN * signals.curve.start > 0


def _learned_anew(signals: RunSignals) -> int | None:
    """The only place at which the loss leaps up out of calm, and comes down from there step by step, as by learning."""
    loss, found = signals.loss, list[int]()
    values = loss.values
    for place, first, second, third in zip(
        range(30, signals.count - 40), values[30:], values[31:], values[32:], strict=False
    ):
        if not first > second > max(third, LEARNED * first):
            continue
        before = loss.known(place - 20, place)
        if len(before) >= 15 and third > max(before) and first >= 2 * max(before) > 0:
            found.append(place)
    return found[0] if len(found) == 1 else None


def _level_shift(signals: RunSignals) -> int | None:
    """The place at which the loss leaps to another level within one step; None where that comes on a schedule."""
    loss = signals.loss
    leaps, found = list[int](), list[tuple[float, int]]()
    values = loss.values
    for place, one_before, here in zip(range(30, signals.count - 15), values[29:], values[30:], strict=False):
        if not here >= 1.3 * one_before:
            continue
        before, after = loss.known(place - 20, place), loss.known(place, place + 10)
        low, high = middle(before), statistics.median(after)
        if len(before) < 15 or not high >= 1.5 * low > 0:
            continue
        if not leaps or place - leaps[-1] > 10:
            leaps.append(place)
        if min(after) > max(before[-10:]):
            found.append((high / low, place))
    times, place = max(found, default=(0.0, 0))
    gaps = [after - before for before, after in pairwise(leaps)]
    untaught = UNLEARNED * max(loss.known(0, 5), default=math.inf)
    forgets = found and sum(loss[place] > untaught for place in leaps) >= FEWEST_OUTBURSTS  # classes in turn
    by_plan = len(gaps) >= 3 and max(gaps) < EQUAL * min(gaps)  # harder data, as sequences that grow every epoch
    if not forgets and (by_plan or times <= (SEVERAL_TIMES if gaps else ONE_TIMES)):
        return None
    return next(
        first for _, first in found if place - first < signals.turn
    )  # the mean over a turn takes it to get there


def grows_without_end(signals: RunSignals) -> Sign | None:
    """Return whether weights and norms grow step by step, without a jump, where they should settle."""
    curve = signals.curve
    if signals.count < 100 or not curve.is_known:
        return None
    grown, rising = _growing_weight(signals), _rising_norms(signals)
    runs_away = _runs_away(signals, curve)
    if not runs_away and _wander(signals):
        return None
    since = curve.levels[curve.levels.index(curve.best) :]
    leap = max((max(since[k + 1 : k + 3]) - since[k] for k in range(len(since) - 1)), default=0.0)
    above = max(statistics.median(since), curve.final) - curve.best
    at_once = leap > AT_ONCE * (max(since) - curve.best) or level_changes(signals) is not None
    lost = above > max(3 * curve.error, 0.25 * abs(curve.best)) and not at_once
    grows = grown and _norm_growth(signals) > CALMS and (lost or (rising and not curve.has_fallen))
    if not (grows or runs_away or (rising and lost)):
        return None
    evidence = [signals.seen(runs_away)] if runs_away else []
    if grown:
        name, times = grown
        evidence.append(signals.seen(f"The norm of {name} grew {number(times)} times, step by step.", (name,)))
    if rising:
        evidence.append(signals.seen(f"The median gradient norm rose {number(rising)} times, step by step."))
    end = "the loss falls without end" if runs_away else "the loss does not settle"
    return Sign(tuple(evidence), {"end": end}, "certain" if runs_away and signals.ends_lost else "")


def _wander(signals: RunSignals) -> bool:
    """Whether the usual weight grew by no more than steps to and fro take it: what rewards large ones pulls one way."""
    layers = [layer for layer in signals.sized_layers if len(layer.weights) > 1]
    ways = [statistics.fmean(map(mul, layer.ratios, layer.weights)) * signals.count for layer in layers]
    pairs = zip(layers, ways, strict=True)
    shares = [(layer.weights[-1] - layer.weights[0]) / way for layer, way in pairs if way]
    return bool(shares) and statistics.median(shares) < CARRIES_ON / math.sqrt(signals.count)


def _growing_weight(signals: RunSignals) -> tuple[str, float] | None:
    """The weight that grows most, step by step, and does not settle; one that began at nearly 0 has to grow."""
    found = []
    for layer in signals.layers:
        weights = layer.weights
        if len(weights) < 3 or layer.begins_at_zero or weights[-1] < 3 * weights[0]:
            continue
        logs = [math.log(weight) for weight in weights]
        steps = [after - before for before, after in pairwise(logs)]
        settles = weights[-1] - weights[len(weights) // 2] < SETTLES * (weights[-1] - weights[0])
        creeps = max(steps) < 0.7 * (logs[-1] - logs[0]) and sum(step > 0 for step in steps) > 0.8 * len(steps)
        if creeps and not settles:
            found.append((layer.name, weights[-1] / weights[0]))
    return max(found, key=lambda one: one[1]) if found else None


def _rising_norms(signals: RunSignals) -> float | None:
    """How many times the median norm rose, where it rises all through the run."""
    norms = signals.positive_norms(signals.first_lost)
    levels = medians(norms, max(1, len(norms) // 10))[1:]
    rises = sum(after > before for before, after in pairwise(levels))
    if len(levels) < 5 or rises < 0.75 * (len(levels) - 1) or levels[-1] < 1.5 * levels[0]:
        return None
    return levels[-1] / levels[0]


def _norm_growth(signals: RunSignals) -> float:
    """The median norm of the last quarter over that of the second one; NaN where there are none."""
    norms = signals.positive_norms(signals.first_lost)
    size = max(1, len(norms) // 4)
    return middle(norms[-size:]) / middle(norms[size : 2 * size])


def _grows_as_fast(signals: RunSignals, layer: Layer) -> bool:
    """Whether a weight grows as much in the second half of the run as in the first; one may begin at 0."""
    weights = [line["weight"][layer.place] for line in signals.measured]
    return len(weights) > 3 and weights[-1] > AS_FAST * weights[len(weights) // 2]


def _runs_away(signals: RunSignals, curve: Curve) -> str:
    """Whether the loss falls below 0 out of all bounds, ever faster, or no slower while norms or weights grow."""
    levels = curve.levels[: curve.levels.index(curve.best) + 1]
    quarter = len(levels) // 4
    if -curve.best > BOUNDLESS * abs(curve.start):
        return f"The loss falls below 0 without a floor in sight, to {number(curve.best)}."
    if curve.best >= 0 or quarter < 3:
        return ""
    second, third, last = (levels[-k * quarter - 1] - levels[(1 - k) * quarter - 1] for k in (3, 2, 1))
    rise = _norm_growth(signals)
    rose = rise > 1.2
    faster = second > curve.error and last > FASTER * third > FASTER**2 * second
    as_fast = third > curve.error and last > 0.9 * third and -curve.best > 3 * abs(curve.start)
    growing = [layer for layer in (*signals.layers, *signals.biases) if _grows_as_fast(signals, layer)]
    # a parameter that has most of the gradient, such as a logarithm of a variance, runs away alone
    main = max(signals.layers + signals.biases, key=lambda layer: layer.gradient * layer.root, default=None)
    grew = main in growing or (bool(signals.layers) and all(layer in growing for layer in signals.layers))
    if rise <= SOARS and not faster and not (as_fast and (rose or grew)):
        return ""
    pace = "faster and faster" if faster else "no slower in the end" if as_fast else "without a floor in sight"
    grows = "norms of gradients rise" if rose else "weights grow"
    return f"The loss falls below 0, {pace}, to {number(curve.best)}, while the {grows}."
