"""Who made a spike, beside a search written otherwise, and with processes that gather."""

import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from gradguard.errors import InvalidValueError
from gradguard.resilience import Batches, find_culprit
from gradguard.resilience import culprit as module
from gradguard.resilience.culprit import deviations


def ring(last, earlier=((2.0, 2.1),) * 6):
    """A ring of steps with these losses of micro-batches; ids are 100 step + 10 micro-batch + 0 or 1."""
    batches = Batches()
    for step, losses in enumerate([*earlier, last]):
        for number, loss in enumerate(losses):
            batches.saw([100 * step + 10 * number, 100 * step + 10 * number + 1])
            if loss is not None:
                batches.record_loss(loss)
        batches.end_step()
    return batches, len(earlier)


CASES = {
    "one of two": ((2.0, 9.0), [1], "micro-batch 1 of rank 0 has a loss of 9, 2"),
    "one of four, and one a little": ((2.0, 2.3, 9.0, 2.0), [2], "micro-batch 2 of rank 0"),
    "two of four, the higher first": ((9.0, 2.0, 12.0, 2.0), [2, 0], "micro-batch 2 of rank 0"),
    "three of four": ((9.0, 9.0, 12.0, 2.0), [], "3 of 4 micro-batches stand out: the weights, or a change"),
    "both": ((9.0, 9.0), [], "2 of 2 micro-batches stand out"),
    "the only one": ((9.0,), [0], "It is the only one of the step: its data or the weights"),
    "none": ((2.0, 2.2), [], r"the loss of no micro-batch stands out \(the highest by 1\.\d deviations\)"),
    "a fall": ((2.0, 0.01), [], "no micro-batch stands out"),
    "NaN": ((2.0, math.nan), [1], "micro-batch 1 of rank 0 has a loss of nan, inf deviations"),
    "infinite": ((math.inf, 2.0), [0], "a loss of inf"),
    "nobody said": ((None, None), [], "no loss is known, but 8 are needed"),
    "one said nothing": ((None, 9.0), [1], r"above the usual ones\.$"),
    "no micro-batch": ((), [], "no loss is known"),
}


@pytest.mark.parametrize("name", CASES)
def test_only_who_stands_out_is_blamed(name):
    last, numbers, words = CASES[name]
    batches, step = ring(last)
    found = find_culprit(batches, step)
    assert [one.number for one in found.blamed] == numbers
    assert found.ids == tuple(100 * step + 10 * n + i for n in numbers for i in (0, 1))
    assert len(found.scores) == len(found.micro_batches) == len(last)
    assert re.search(words, found.reason), found.reason
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["ids"] == list(found.ids)


@pytest.mark.parametrize(
    ("earlier", "last", "blamed"),
    [
        (((2.0,),) * 7, (9.0,), 0),  # 7 + the one itself are 8 losses, and it cannot hide among them
        (((2.0,),) * 6, (9.0,), None),
        ((), (2.0,) * 7 + (9.0,), 7),
        ((), (2.0,) * 5 + (9.0,), None),
    ],
)
def test_few_losses_blame_nobody(earlier, last, blamed):
    batches, step = ring(last, earlier)
    found = find_culprit(batches, step)
    assert [one.number for one in found.blamed] == ([] if blamed is None else [blamed])
    if blamed is None:
        assert "only" in found.reason
        assert "8 are needed to define the usual level" in found.reason


def test_spikes_before_it_do_not_hide_it():
    batches, step = ring((2.0, 9.0), ((2.0, 2.1), (2.0, 50.0), (2.0, math.nan), (1.9, 2.2), (2.0, 60.0), (2.1, 2.0)))
    assert find_culprit(batches, step).ids == (610, 611)


def test_a_step_in_the_middle_is_compared_with_what_was_before_it():
    batches, step = ring((2.0, 9.0))
    for _ in range(20):  # the level rises afterwards
        batches.saw([1])
        batches.record_loss(50.0)
        batches.end_step()
    assert find_culprit(batches, step).ids == (610, 611)


def test_a_step_that_has_gone_from_the_ring():
    with pytest.raises(InvalidValueError, match="step 99 is not in the ring, which holds 0 to 7"):
        find_culprit(ring((2.0,))[0], 99)


@pytest.mark.parametrize("seed", range(30))
def test_deviations_are_those_of_numpy(seed):
    draw = random.Random(seed)
    usual = [draw.lognormvariate(0, 0.5) - (seed % 3 == 0) for _ in range(draw.randrange(1, 40))]
    value = draw.lognormvariate(1, 2) - (seed % 5 == 0) * 2
    x, v, least = np.array(usual), value, 0.05 * abs(np.median(usual))
    if (x > 0).all():
        with np.errstate(invalid="ignore", divide="ignore"):
            x, v, least = np.log(x), np.log(value) if value > 0 else -np.inf, 0.05
    expected = (v - np.median(x)) / max(1.4826 * np.median(np.abs(x - np.median(x))), least)
    assert deviations(value, usual) == pytest.approx(expected)


def test_deviations_where_there_is_no_measure():
    assert deviations(0.0, [0.0] * 9) == 0
    assert deviations(1.0, [0.0] * 9) == math.inf
    assert deviations(-1.0, [0.0] * 9) == -math.inf
    assert deviations(math.nan, [1.0]) == math.inf


# Several processes: their parts of what is gathered.


def of_ranks(monkeypatch, rings, step):
    parts = []
    for rank, batches in enumerate(rings):
        monkeypatch.setattr(module, "gather", lambda own, group, task: [own])
        (((here,),), losses) = module._of_all_ranks(batches, [step], None)
        here = here if isinstance(here, str) else tuple(replace(one, rank=rank) for one in here)
        parts.append(([here], losses))
    monkeypatch.setattr(module, "gather", lambda own, group, task: parts)
    return find_culprit(rings[0], step)


def test_the_rank_with_the_loss_is_blamed(monkeypatch):
    found = of_ranks(monkeypatch, [ring((2.0, 2.0))[0], ring((2.0, 2.1))[0], ring((9.0, 2.0))[0]], 6)
    assert [(one.rank, one.number) for one in found.blamed] == [(2, 0)]
    assert len(found.micro_batches) == 6


def test_a_rank_that_has_forgotten_the_step_stops_all(monkeypatch):
    other = Batches()
    with pytest.raises(InvalidValueError, match="step 6 is not in the ring, which holds 0 to 0"):
        of_ranks(monkeypatch, [ring((2.0, 9.0))[0], other], 6)
