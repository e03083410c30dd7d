"""Spikes stand out from their neighbourhood; drift, noise and a change of level are none."""

import math
import random
import statistics
import time

import pytest
from synthetic import log_normal

from gradguard.monitoring.judge.spikes import find_spikes


def with_spikes(norms, places, times):
    return [norm * (times if i in places else 1.0) for i, norm in enumerate(norms)]


CALM = log_normal(600, seed=1)
DECAY = [norm * math.exp(-i / 150) for i, norm in enumerate(CALM)]
EIGHT = [40, 150, 151, 260, 333, 402, 555, 590]
SPIKES = [
    ("eight in a calm run", with_spikes(CALM, EIGHT, 16), EIGHT),
    ("eight where the norms fall by 50", with_spikes(DECAY, EIGHT, 16), EIGHT),
    ("every eighth", with_spikes(CALM, range(0, 600, 8), 30), [*range(0, 600, 8)]),
    ("a burst", with_spikes(CALM, range(300, 325), 30), [*range(300, 325)]),
    ("a small one beside a large one", with_spikes(with_spikes(CALM, [300], 1e30), [310], 12), [300, 310]),
    ("of norms that hardly differ", with_spikes([1.0] * 300, [100], 1.4), [100]),
    ("at the ends", with_spikes(CALM, [0, 599], 16), [0, 599]),
    ("positions count what has no logarithm", [0.0, math.nan, *with_spikes(CALM, [200], 16), math.inf, -1.0], [202]),
    ("in a short run", with_spikes([1.0] * 21, [7], 9), [7]),
]
NONE = [
    ("nothing", []),
    ("one norm", [1.0]),
    ("too few", with_spikes([1.0] * 20, [7], 9)),
    ("zeros", [0.0] * 300),
    ("one norm for ever", [2.0] * 300),
    ("noise as wild as 0.8", log_normal(20_000, spread=0.8, seed=2)),
    ("noise as wild as 1.5", log_normal(20_000, spread=1.5, seed=3)),
    ("a decay", DECAY),
    ("a steep decay from the first norm on", [max(0.65**i, 1e-5) for i in range(60)]),
    ("a smooth rise", [norm * math.exp(i / 100) for i, norm in enumerate(CALM)]),
    ("a level that changes for good", [norm * (50 if i >= 300 else 1) for i, norm in enumerate(CALM)]),
    ("a level that changes near the start", [norm * (50 if i < 60 else 1) for i, norm in enumerate(CALM)]),
]


@pytest.mark.parametrize(("norms", "expected"), [case[1:] for case in SPIKES], ids=[case[0] for case in SPIKES])
def test_spikes_are_found_where_they_are(norms, expected):
    assert find_spikes(norms) == expected


@pytest.mark.parametrize("norms", [case[1] for case in NONE], ids=[case[0] for case in NONE])
def test_what_is_no_spike(norms):
    assert find_spikes(norms) == []


def slowly(norms):
    """The definition, norm by norm."""
    logs, found = [math.log(norm) for norm in norms], []
    for i in range(len(norms)):
        begin = min(max(i - 50, 0), max(len(norms) - 101, 0))
        near = logs[begin : begin + 101]
        middle = sorted(near)[len(near) // 2]
        deviation = 1.4826 * sorted(abs(x - middle) for x in near)[len(near) // 2]
        if logs[i] > middle + 6 * max(deviation, 0.05):
            found.append(i)
    return found


@pytest.mark.parametrize("count", [21, 22, 60, 100, 101, 102, 103, 150, 151, 152, 203, 400])
def test_it_is_what_the_definition_says(count):
    rng = random.Random(count)
    norms = [math.exp(rng.gauss(0, 0.2) + (rng.random() < 0.1) * rng.uniform(0.5, 3)) for _ in range(count)]
    assert find_spikes(norms) == slowly(norms)
    assert statistics.fmean(norms) > 0


def test_many_norms_take_little_time():
    norms = log_normal(100_000, spread=0.8, seed=5)
    started = time.process_time()
    find_spikes(norms)
    assert time.process_time() - started < 10  # 0.3 s where nothing else runs
