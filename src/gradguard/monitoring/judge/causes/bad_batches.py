"""Searches for causes in the data: batches unlike the others, data that change, and weights that drift."""

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
"""Share of the steps: if more of them stand out, the batches that stand out are no exception."""

ONE_TIMES, SEVERAL_TIMES = 1.7, 12
"""Times its level before: a loss that leaps once must reach the first, and one that leaps several times the second, to
count as changed data. Repeated smaller leaps come from the loss itself, such as a target that is renewed."""

TINY = 0.1
"""Share of the first loss: leaps that stay below it come from a loss that is nearly 0, not from the data."""

LEARNED = 0.5
"""Share of a loss that leapt. One step of learning leaves more than this share; the batch after a bad one has less."""

STAYS = 0.2
"""Share of a loss that leapt: if the next dozen losses stay above it, and far above the level before, it stays up."""

EQUAL = 1.15
"""The longest distance between two changes of level over the shortest: up to here the changes are periodic."""

FASTER = 1.5
"""Growth of the loss's fall from one quarter of the run to the next: above it, the loss approaches no lower bound."""

SETTLES = 0.3
"""Share of its growth: a weight that grew by less in the second half of the run settles."""

CALMS = 0.7
"""Norms of the run's last quarter over its second quarter's: below this ratio, the weights settle."""

BOUNDLESS = 1e6
"""Times the first losses, below 0: no lower bound lies that far away."""

AS_FAST = 1.7
"""Growth of a weight from the middle of the run to its end: linear growth from 0 makes 2."""

SOARS = 5.0
"""Norms of the run's last quarter over its second quarter's: above this ratio, a falling loss approaches no lower
bound, even if the learning rate decays."""

CARRIES_ON = 4.0
"""Times the root of the number of steps: the distance that random steps cover with a momentum of 0.9."""

UNLEARNED = 1.5
"""Times the first losses: an untrained model has less, and a model that has learned only another class has more."""

RISEN = 2.0
"""Times the first losses: batches of unequal losses stay below it before they are learned."""

RECENT, THROWN, CARRIED = 24, 1.5, 4
"""A gradient above `THROWN` times the largest of the `RECENT` norms before it moves the loss for `CARRIED` steps: a
level that changes within these is no change of the data."""

AT_ONCE = 0.8
"""Share of the rise from the loss's best level to its highest one afterwards. A rise of that much within two twentieths
of the run was a leap, not a drift; the twentieth that contains the leap lies half-way."""

UNFALLEN = 0.9
"""Share of its start: a loss above it has not fallen, although the weights have grown."""

JUST_BEFORE = 3
"""Steps before a leap that it must stand out from: under a rate that is too high these already climb."""

_SHOWN = 4


def bad_batches(signals: RunSignals) -> Sign | None:
    """Return a sign if single batches are unlike the others: losses and norms leap out of calm within one step."""
    places = signals.outbursts
    period = period_of(places)
    if period is not None:  # leaps beside the grid are after-effects of a bad batch
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
    steps = "steps " + ", ".join(map(str, numbers[:_SHOWN])) + " …" * (len(numbers) > _SHOWN)
    which, those, there = f"{len(numbers)} batches are", f"those of {steps}", f"batches of {steps}"
    where = "wrong labels, inputs that are not normalised, or samples that are far too long"
    if len(numbers) == 1:
        step = f"step {numbers[0]}"
        which, those, there = "One batch is", f"that of {step}", f"batch of {step}"
    if period:
        which = f"A batch every {period} steps is"
        where = f"something that recurs every {period} steps, such as one bad file or shard of an epoch"
    near = {place + k for place in places for k in range(4)}
    lost = lost_from(signals.record)  # steps after the damage are not ordinary
    known = [place for place, i in enumerate(signals.numbers) if place >= 5 and (lost is None or i < lost)]
    calm = median([norm for place in known if (norm := signals.norms[place]) and place not in near])
    threshold = float(f"{min(calm, signals.low_threshold):.1e}") if calm else None
    clip = f" Until then, clip at {plain_threshold(threshold)}." if threshold else ""
    words = (
        f"On {'this step' if len(numbers) == 1 else 'these steps'} the loss or the gradient norm, the size of all "
        "gradients together, leapt to "
        f"{number(times)} times its level just before."
    )
    return Sign(
        (Evidence((numbers[0], numbers[-1]), words),),
        {"which": which, "those": those, "there": there, "where": where, "clip": clip},
        certainty,
        threshold=threshold,
    )


def _is_usual(signals: RunSignals, places: Sequence[int]) -> bool:
    """Return whether so many steps from the first leap on are as high that the leaps are no exception."""
    for series in (signals.norm, signals.loss):
        since = series.known(places[0])
        leap = middle([series[place] for place in places])
        if sum(value <= 0.5 * leap for value in since) >= (1 - CALM_SHARE) * len(since) > 0:
            return False
    return True


def _stay_up(signals: RunSignals, places: Sequence[int]) -> bool:
    """Return whether losses stay up after most leaps and come down only by learning: the data changed, not a batch."""
    stays, loss = 0, signals.loss
    for place in places:
        here = max(loss.known(place, place + signals.turn), default=math.nan)
        after = middle(loss.known(place + 1, place + 13))
        stays += here > after > max(STAYS * here, OUTBURST_TIMES * loss.usual(place))
    return stays > 0.6 * len(places)


def _are_harmless(signals: RunSignals, places: Sequence[int]) -> bool:
    """Return whether the leaps did no harm: they were tiny, or a clip bound on most and the loss came back at once."""
    curve, loss = signals.curve, signals.loss
    near = [value for place in places for value in loss.known(place, place + 4)]
    if max([curve.final, *near]) < TINY * curve.start:
        return True
    clipped = sum((signals.coefficients[place] or 1.0) < 1 for place in places)
    harmed = sum(middle(loss.known(place + 1, place + 6)) > 1.25 * loss.usual(place) for place in places)
    return clipped >= 0.6 * len(places) and harmed < 0.4 * len(places)


def _losses_leap(signals: RunSignals, places: Sequence[int]) -> bool:
    """Return whether both loss and norm of most of these steps stand out, as on a bad batch; True without losses."""
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
    """Return whether the first leap, too steep for any learning rate, damaged the run for good."""
    place, curve, loss, length = places[0], signals.curve, signals.loss, signals.length
    before, after = loss.usual(place), loss.known(place, place + 6)
    ramp = max(map(signals.times, range(max(0, place - JUST_BEFORE), place)), default=1.0)
    if signals.times(place) < FAR * ramp or not curve.is_known:
        return False
    stays = curve.final > before + 0.1 * abs(before) or signals.ends_lost
    if not stays or length[place] < 2.5 * length.usual(place):  # a robust loss under heavy noise in the targets
        return False
    return max(after, default=math.nan) > 2 * loss[place] or any(later < 0.3 * one for one, later in pairwise(after))


def level_changes(signals: RunSignals) -> Sign | None:
    """Return a sign if the loss moves to another level within one step and stays there, or comes down by learning."""
    if signals.takes_turns:
        return None
    up, loss, norm = _level_shift(signals), signals.loss, signals.norm
    place = up or _learned_anew(signals)
    if place is None or _had_risen(signals, place):
        return None
    # A gradient larger than all recent ones, a few steps before, explains the change: momentum carries it on.
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
    """Return whether the loss was far above its start before a step: the run had failed by then."""
    return signals.loss.usual(place) > RISEN * signals.curve.start > 0


def _learned_anew(signals: RunSignals) -> int | None:
    """Return the only step at which the loss leaps out of calm and comes down gradually, as by learning; or None."""
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
    """Return the step at which the loss leaps to another level; None without one, or where leaps follow a schedule."""
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
    forgets = found and sum(loss[place] > untaught for place in leaps) >= FEWEST_OUTBURSTS  # classes come in turn
    by_plan = len(gaps) >= 3 and max(gaps) < EQUAL * min(gaps)  # a curriculum, such as longer sequences every epoch
    if not forgets and (by_plan or times <= (SEVERAL_TIMES if gaps else ONE_TIMES)):
        return None
    # the mean over a turn of losses needs a whole turn to reach the new level: take the first step of that climb
    return next(first for _, first in found if place - first < signals.turn)


def grows_without_end(signals: RunSignals) -> Sign | None:
    """Return a sign if weights and norms grow step by step, without a jump, where they should settle."""
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
    """Return whether the usual weight grew no further than a random walk: a reward for large weights pulls one way."""
    layers = [layer for layer in signals.sized_layers if len(layer.weights) > 1]
    ways = [statistics.fmean(map(mul, layer.ratios, layer.weights)) * signals.count for layer in layers]
    pairs = zip(layers, ways, strict=True)
    shares = [(layer.weights[-1] - layer.weights[0]) / way for layer, way in pairs if way]
    return bool(shares) and statistics.median(shares) < CARRIES_ON / math.sqrt(signals.count)


def _growing_weight(signals: RunSignals) -> tuple[str, float] | None:
    """Return the weight that grows most, step by step, without settling; weights that began near 0 have to grow."""
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
    """Return the factor by which the median norm rose; None unless it rises throughout the run."""
    norms = signals.positive_norms(signals.first_lost)
    levels = medians(norms, max(1, len(norms) // 10))[1:]
    rises = sum(after > before for before, after in pairwise(levels))
    if len(levels) < 5 or rises < 0.75 * (len(levels) - 1) or levels[-1] < 1.5 * levels[0]:
        return None
    return levels[-1] / levels[0]


def _norm_growth(signals: RunSignals) -> float:
    """Return the median norm of the last quarter over the second quarter's; NaN without norms."""
    norms = signals.positive_norms(signals.first_lost)
    size = max(1, len(norms) // 4)
    return middle(norms[-size:]) / middle(norms[size : 2 * size])


def _grows_as_fast(signals: RunSignals, layer: Layer) -> bool:
    """Return whether a weight grows as much in the second half of the run as in the first; it may begin at 0."""
    weights = [line["weight"][layer.place] for line in signals.measured]
    return len(weights) > 3 and weights[-1] > AS_FAST * weights[len(weights) // 2]


def _runs_away(signals: RunSignals, curve: Curve) -> str:
    """Return a sentence if the loss falls below 0 without bound: ever faster, or no slower while norms or weights grow.

    Returns:
        The sentence; empty where the loss is bounded.
    """
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
    # one parameter with most of the gradient, such as a log-variance, may run away alone
    main = max(signals.layers + signals.biases, key=lambda layer: layer.gradient * layer.root, default=None)
    grew = main in growing or (bool(signals.layers) and all(layer in growing for layer in signals.layers))
    if rise <= SOARS and not faster and not (as_fast and (rose or grew)):
        return ""
    pace = "faster and faster" if faster else "no slower in the end" if as_fast else "without a floor in sight"
    grows = "norms of gradients rise" if rose else "weights grow"
    return f"The loss falls below 0, {pace}, to {number(curve.best)}, while the {grows}."
