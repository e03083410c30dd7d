"""Signs that lie in the data: batches unlike the others, data that change, and numbers that drift."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from gradguard.monitoring.judge.cause import Evidence, Sign
from gradguard.monitoring.judge.numbers import median, medians, number, plain_threshold
from gradguard.monitoring.judge.signals import FAR, OUTBURST_TIMES, Curve, RunSignals, period_of
from gradguard.monitoring.record.lines import without_none

FEWEST_OUTBURSTS = 3
CALM_SHARE = 0.2
"""Of the steps: where more of them are out of the ordinary, no batch is the exception."""

ONE_TIMES, SEVERAL_TIMES = 1.7, 12
"""A loss that leaps more than once, and not so far, does so by its making: a target that is set anew now and then."""

TINY = 0.1
"""Of the first loss: leaps that stay below come of a loss that is nearly 0, and not of batches."""

FALLEN = 0.1
"""Of the level before: data that have become so easy, right after they surprised the model, are others."""

STAYS = 0.2
"""Of the loss of a step that leapt: where the next dozen stays above it, and far above what was before, it stays up."""

APART, EQUAL = 30, 1.15
"""Steps between two changes of level; and by how much the longest distance between two may exceed the shortest."""

FASTER = 1.5
"""From a quarter of the run to the next: a loss whose fall grows by more has no bound that it comes near."""

SETTLES, FAR_GROWN = 0.3, 10.0
"""Of its growth in the second half: a weight that grew less settles, unless it is so many times its start."""

RECENT, THROWN = 24, 1.5
"""Norms, and times the largest of them: what a gradient above that does to the loss is no change of the data."""

AT_ONCE = 0.8
"""Of the way from its best level to the highest one after it, within a twentieth of the run: that was no drift."""

_SHOWN = 4


def bad_batches(signals: RunSignals) -> Sign | None:
    """Return whether single batches are unlike the others: losses and norms leap out of calm, at once."""
    places = signals.outbursts
    period = period_of(places)
    if period is not None:  # what lies beside the grid is what such a batch left behind
        phase = max(places, key=lambda first: sum((place - first) % period == 0 for place in places)) % period
        places = [place for place in places if place % period == phase]
    if not places or _was_lost_before(signals, places[0]) or _stay_up(signals, places):
        return None
    broken = _broken_by(signals, places)
    if not broken and not _are_exceptions(signals, places):
        return None
    sure = period or (broken and signals.ends_lost and signals.leaps_out_of_calm(places[0]))
    certainty = "possible" if _are_harmless(signals, places) else "certain" if sure else "likely"
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
    calm = median([norm for place, norm in enumerate(signals.norms) if norm and place not in near and place >= 5])
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


def _are_exceptions(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether enough of these steps leap at once, and others stay far below."""
    at_once = sum(_comes_at_once(signals, place) for place in places)
    if _is_usual(signals, places) or at_once < max(FEWEST_OUTBURSTS, 0.5 * len(places)):
        return False
    return _losses_leap(signals, places)


def _is_usual(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether from the first leap on so many steps are as high that none of them is an exception."""
    for values in (signals.norms, signals.losses):
        since = without_none(values[places[0] :])
        leap = median(without_none(values[place] for place in places))
        if leap is not None and sum(value > 0.5 * leap for value in since) <= CALM_SHARE * len(since):
            return False
    return True


def _was_lost_before(signals: RunSignals, place: int) -> bool:
    """Whether the loss was thrown up before the first leap, and never came below its start: not by a batch."""
    curve = signals.curve
    if not curve.best > 0.85 * curve.start > 0:
        return False
    highest = max(without_none(signals.losses[1:place]), default=0.0)
    return highest > 1.5 * curve.start + 6 * min(curve.noise, curve.start)


def _stay_up(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether losses stay where most of the leaps took them, and come down by learning: other data, and no batch."""
    stays = 0
    for place in places:
        here, before = signals.losses[place], signals.usual(place, signals.losses)
        after = without_none(signals.losses[place + 1 : place + 13])
        if here is not None and before is not None and after:
            stays += here > statistics.median(after) > max(STAYS * here, OUTBURST_TIMES * before)
    return stays > 0.6 * len(places)


def _are_harmless(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether the loss is back at once, and a clip bound on nearly all of them or the leaps were tiny: hard cases."""
    curve = signals.curve
    near = [loss or 0.0 for place in places for loss in signals.losses[place : place + 4]]
    if max(curve.final, *near) < TINY * curve.start:
        return True
    if sum((signals.coefficients[place] or 1.0) < 1 for place in places) < 0.6 * len(places):
        return False
    harmed = 0
    for place in places:
        before = signals.usual(place, signals.losses)
        after = without_none(signals.losses[place + 1 : place + 6])
        harmed += before is not None and bool(after) and statistics.median(after) > 1.25 * before
    return harmed < 0.4 * len(places)


def _losses_leap(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether loss and norm of most of these steps stand out, where losses are known: those of a bad batch do."""
    if not signals.curve.is_known:
        return True
    leaps = 0
    for place in places:
        recent = without_none(signals.losses[max(0, place - 24) : place])
        loss, norm, usual = signals.losses[place], signals.norms[place], signals.usual(place, signals.norms)
        if loss is not None and len(recent) >= 5 and (norm is None or usual is None or norm > 2.5 * usual):
            middle = statistics.median(recent)
            leaps += loss - middle > 4 * statistics.median(abs(one - middle) for one in recent)
    return leaps >= 0.6 * len(places)


def _broken_by(signals: RunSignals, places: Sequence[int]) -> bool:
    """Whether the first leap, out of calm and too far for any rate, threw the run to where it never came back from."""
    if not _comes_at_once(signals, places[0]) or signals.times(places[0]) < FAR:
        return False
    place, curve, before = places[0], signals.curve, signals.usual(places[0], signals.losses)
    here, norm, usual = signals.losses[place], signals.lengths[place], signals.usual(place, signals.lengths)
    if not curve.is_known or before is None or here is None or before <= 0:
        return False
    if curve.final <= 1.1 * before and not signals.ends_lost:
        return False
    if norm is not None and usual is not None and norm < 2.5 * usual:  # heavy noise in the targets of a robust loss
        return False
    after = without_none(signals.losses[place : place + 6])
    return max(after) > 2 * here or any(loss < 0.3 * before for before, loss in pairwise(after))  # else other data


def _comes_at_once(signals: RunSignals, place: int) -> bool:
    """Whether the steps before were far below: what a rate does grows from step to step."""
    pairs = ((values[place] or 0.0, values[max(0, place - 3) : place]) for values in (signals.norms, signals.losses))
    return any(value > 3 * max(filter(None, before), default=math.inf) for value, before in pairs)


def level_changes(signals: RunSignals) -> Sign | None:
    """Return whether losses are at another level from one step on: at once, and they stay there."""
    if signals.takes_turns or signals.count < 60:
        return None
    up, down = _level_shift(signals), _fall(signals)
    place = up if up is not None else down
    if place is None:
        return None
    rates = [rate for rate in signals.rates[max(0, place - 3) : place + 1] if rate]
    if (rates and max(rates) > 2 * min(rates)) or _was_thrown(signals, place):
        return None
    before, after = signals.losses[max(0, place - 20) : place], signals.losses[place : place + 20]
    low, high = (statistics.median(without_none(values)) for values in (before, after))
    step = signals.named(place)
    level = (
        f"{number(high)} from step {step} on"
        if up is not None
        else f"leapt to {number(signals.losses[place])} at step {step}, and has been far below what it was ever since"
    )
    words = f"The loss was {number(low)} up to step {signals.named(place - 1)} and {level}."
    return Sign((signals.seen(words, since=step),), {"step": step})


def _was_thrown(signals: RunSignals, place: int) -> bool:
    """Whether one of the two steps before took a gradient larger than any recent one: it moved the loss itself."""
    norms = signals.norms
    for before in range(max(0, place - 2), place):
        recent = without_none(norms[max(0, before - RECENT) : before])
        if recent and (norms[before] or 0.0) > THROWN * max(recent):
            return True
    return False


def _fall(signals: RunSignals) -> int | None:
    """The place at which the loss leaps up out of calm and soon falls to a fraction of what it was, and stays there."""
    values = signals.losses
    for place in range(30, signals.count - 40):
        here, previous = values[place], values[place - 1]
        if here is None or (previous is not None and here < 2 * previous):
            continue
        before = without_none(values[place - 20 : place])
        if len(before) < 15 or min(before) <= 0 or here < 2 * max(before):
            continue
        later = without_none(values[place + 20 :])
        if later and max(later[: len(later) // 2 + 1]) < FALLEN * statistics.median(before):
            return place
    return None


def _level_shift(signals: RunSignals) -> int | None:
    """The place at which the loss leaps to another level within one step; None where that comes on a schedule."""
    values = signals.losses
    leaps, found = list[int](), list[tuple[float, int]]()
    for place in range(30, signals.count - 15):
        here, previous = values[place], values[place - 1]
        if here is None or previous is None or here < 1.3 * previous:
            continue
        before = without_none(values[place - 20 : place])
        after = without_none(values[place : place + 10])
        if len(before) < 15 or len(after) < 8:
            continue
        low, high = statistics.median(before), statistics.median(after)
        if high < 1.5 * low or low <= 0:
            continue
        if not leaps or place - leaps[-1] > 10:
            leaps.append(place)
        spread = statistics.median(abs(one - low) for one in before) or 1e-12
        if min(after) > max(before[-10:]) and (high - low) / spread > 6:
            found.append((high / low, place))
    times, place = max(found, default=(0.0, None))
    if _recur(leaps):
        return None
    return place if times > (ONE_TIMES if len(leaps) == 1 else SEVERAL_TIMES) else None


def _recur(leaps: Sequence[int]) -> bool:
    """Whether the level leaps at equal distances: harder data by plan, as sequences that grow every epoch."""
    firsts = [place for before, place in pairwise([-math.inf, *leaps]) if place - before > APART]
    gaps = [after - before for before, after in pairwise(firsts)]
    return len(gaps) >= 3 and max(gaps) < EQUAL * min(gaps)


def grows_without_end(signals: RunSignals) -> Sign | None:
    """Return whether weights and norms grow step by step, without a jump, where they should settle."""
    curve = signals.curve
    if signals.count < 100 or not curve.is_known:
        return None
    grown, runs_away, rising = _growing_weight(signals), _runs_away(signals, curve), _rising_norms(signals)
    since = curve.levels[curve.levels.index(curve.best) :]
    leap = max((after - before for before, after in pairwise(since)), default=0.0)
    above = max(statistics.median(since), curve.final) - curve.best
    lost = above > max(3 * curve.error, 0.25 * abs(curve.best)) and leap <= AT_ONCE * (max(since) - curve.best)
    grows = grown and (lost or (rising and not curve.has_fallen))
    if not (grows or runs_away or (rising and lost and curve.fallen < 0.5)):
        return None
    evidence = [signals.seen(runs_away)] if runs_away else []
    if grown:
        name, times = grown
        evidence.append(signals.seen(f"The norm of {name} grew {number(times)} times, step by step.", (name,)))
    if rising:
        evidence.append(signals.seen(f"The median gradient norm rose {number(rising)} times, step by step."))
    end = "the loss falls without end" if runs_away else "the loss does not settle"
    return Sign(tuple(evidence), {"end": end})


def _growing_weight(signals: RunSignals) -> tuple[str, float] | None:
    """The weight that grows most, step by step, and does not settle; one that began at nearly 0 has to grow."""
    found = []
    for layer in signals.layers:
        weights = layer.weights
        if len(weights) < 3 or signals.begins_at_zero(layer) or weights[-1] < 3 * weights[0]:
            continue
        logs = [math.log(weight) for weight in weights]
        steps = [after - before for before, after in pairwise(logs)]
        settles = weights[-1] - weights[len(weights) // 2] < SETTLES * (weights[-1] - weights[0])
        if settles and weights[-1] < FAR_GROWN * weights[0]:
            continue
        if max(steps) < 0.7 * (logs[-1] - logs[0]) and sum(step > 0 for step in steps) > 0.8 * len(steps):
            found.append((layer.name, weights[-1] / weights[0]))
    return max(found, key=lambda one: one[1]) if found else None


def _rising_norms(signals: RunSignals) -> float | None:
    """How many times the median norm rose, where it rises all through the run."""
    norms = [norm for norm in signals.norms[: signals.first_lost] if norm]
    levels = medians(norms, max(1, len(norms) // 10))[1:]
    rises = sum(after > before for before, after in pairwise(levels))
    if len(levels) < 5 or rises < 0.75 * (len(levels) - 1) or levels[-1] < 1.5 * levels[0]:
        return None
    return levels[-1] / levels[0]


def _runs_away(signals: RunSignals, curve: Curve) -> str:
    """Whether the loss falls below 0, in the end as fast as before or faster, while norms rise: nothing bounds it."""
    levels = curve.levels[: curve.levels.index(curve.best) + 1]
    quarter = len(levels) // 4
    if curve.best >= 0 or quarter < 3:
        return ""
    second, third, last = (levels[-k * quarter - 1] - levels[(1 - k) * quarter - 1] for k in (3, 2, 1))
    norms = [norm for norm in signals.norms[: signals.first_lost] if norm]
    size = max(1, len(norms) // 4)
    rose = statistics.median(norms[size : 2 * size]) * 1.2 < statistics.median(norms[-size:])
    faster = second > curve.error and last > FASTER * third > FASTER**2 * second
    as_fast = third > curve.error and last > 0.9 * third and -curve.best > 3 * abs(curve.start)
    if not (faster or as_fast) or not rose:
        return ""
    pace = "faster and faster" if faster else "no slower in the end"
    return f"The loss falls below 0, {pace}, to {number(curve.best)}, while the norms of gradients rise."
