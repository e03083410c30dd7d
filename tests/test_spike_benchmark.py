"""The benchmark of spikes: its rules are as described, its table says what missed."""

import math
import random
import statistics
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import spikes
        import spikes_rules
        import spikes_scenarios

        yield spikes, spikes_rules, spikes_scenarios
        for name in ("spikes", "spikes_rules", "spikes_scenarios"):
            sys.modules.pop(name)


def small(scenarios, **options):
    return scenarios.regression(0, steps=80, make=scenarios._sgd, rate=0.05, **options)


def sequence(rng, length):
    """Noise about a level, with single outliers, bursts, steps up and down; the second signal by itself."""
    values, levels, left, factor = [], [1.0, 3.0], 0, 1.0
    for _ in range(length):
        if left == 0 and rng.random() < 0.04:
            left, factor = rng.choice([1, 1, 3, 7, 8, 9, 20]), math.exp(rng.uniform(0.2, 6.0))
        if rng.random() < 0.01:
            levels[rng.randrange(2)] *= rng.choice([0.2, 0.7, 1.5, 5.0])
        hit = [rng.random() < 0.8, rng.random() < 0.5] if left else [False, False]
        left = max(0, left - 1)
        values.append(
            [lv * math.exp(0.1 * rng.gauss(0, 1)) * (factor if h else 1) for lv, h in zip(levels, hit, strict=True)]
        )
    return values


def olmo(past, value):
    past = past[-128:]
    return len(past) >= 64 and value > statistics.mean(past) + 6 * statistics.stdev(past)


def lightning(past, value):
    mean = statistics.mean(past[-10:] or [math.inf])
    return bool(past) and abs(value - mean) >= abs(2 * mean) and value > past[-1]


@pytest.mark.parametrize(("theirs", "twin"), [("OLMo", olmo), ("Lightning", lightning)])
def test_the_rules_of_others_decide_as_their_sources(bench, theirs, twin):
    spikes = 0
    for seed in range(3):
        rule, losses, norms = getattr(bench[1], theirs)(small(bench[2])), [], []
        for i, (loss, norm) in enumerate(sequence(random.Random(seed), 250)):
            spike = twin(losses, loss) or (theirs == "OLMo" and twin(norms, norm))
            assert rule.is_spike(i, loss, norm) == spike, (seed, i)
            if theirs == "OLMo" or not spike:
                losses.append(loss)
                norms.append(norm)
            spikes += spike
    assert spikes > 5


def test_a_batch_is_the_same_whether_another_was_spoiled(bench):
    _, _, scenarios = bench
    for make in (lambda bad: small(scenarios, bad=bad), lambda bad: scenarios.language_model(0, bad=bad)):
        plain, spoiled = make([]), make([3])
        spoiled.loss_of(3, True)
        for i in (3, 4):
            torch.testing.assert_close(plain.loss_of(i, False), spoiled.loss_of(i, False), rtol=0, atol=0)


@pytest.mark.parametrize("rule", ["oracle", "OLMo", "SkipSpikes", "SpikeRecovery"])
def test_a_run_with_one_bad_sample_skips_it_and_nothing_else(bench, rule):
    spikes, rules, scenarios = bench
    run = small(scenarios, bad=[70])
    outcome = spikes.train(run, rules.RULES[rule](run))
    assert outcome.skipped == [70]
    assert outcome.losses[70] > 100 * outcome.losses[69]  # seen, and told apart from the good ones
    twin = small(scenarios)
    numbers = spikes.numbers_of(outcome, spikes.train(twin, rules.Rule(twin), spoiled=False))
    assert (numbers["false"], numbers["missed"]) == (0, 0)
    assert abs(numbers["above"]) < 0.2


def test_a_plain_run_takes_the_bad_batch_in(bench):
    spikes, rules, scenarios = bench
    run, twin = small(scenarios, bad=[70]), small(scenarios)
    numbers = spikes.numbers_of(spikes.train(run, rules.Rule(run)), spikes.train(twin, rules.Rule(twin), spoiled=False))
    assert numbers["missed"] == 1
    assert numbers["above"] > 1
    assert numbers["recovery"] == math.inf


def test_rules_of_others_have_their_bugs_where_they_are_named(bench):
    _, rules, scenarios = bench
    run = small(scenarios)
    noise = random.Random(0)

    def olmo(values, **options):
        rule = rules.OLMo(run, **options)
        return [rule.is_spike(i, value, 1.0 + 0.01 * noise.random()) for i, value in enumerate(values)]

    usual = [1.0 + 0.01 * noise.random() for _ in range(500)]
    once = [*usual[:200], math.nan, *usual[200:]]
    assert sum(olmo(once)) == 1
    assert sum(olmo(once, right=False)) == 1 + 128
    risen = olmo([*usual[:200], *(5 * v for v in usual[200:])])
    assert risen[200:204] == [True] * 4
    assert sum(risen) == 4
    masked = olmo([*usual[:200], 11.0, 6.2, *usual[200:]])
    assert masked[200:202] == [True, False]


def test_lightning_goes_back_and_leaves_two_batches_out(bench):
    spikes, rules, scenarios = bench
    run = small(scenarios, bad=[60])
    outcome = spikes.train(run, rules.Lightning(run))  # of 80 steps 61 until then, and 19 from batch 50 on
    assert outcome.events == [(60, "restart")]
    assert outcome.skipped == [59, 60]
    assert max(outcome.losses) == 68


def test_the_table_marks_missed_goals_and_who_was_better(bench):
    spikes, _, _ = bench
    fine = {"final": 1.0, "above": 0.001, "recovery": 0, "area": 0.0, "false": 0, "missed": 0, "events": []}
    late = fine | {"above": 0.05, "false": 9, "recovery": math.inf}
    name = "LM: 20 batches, random labels"
    done = [{"scenario": name, "seed": 0, "twin": 1.0, "rules": {"clip 1.0": fine, "SkipSpikes": late}}]
    text = list(spikes.table(done))
    assert len(text) == 5
    assert text[3] == "|  | SkipSpikes | +5.00% | +5.00% | never | 0.00 | 9 | 0.0 | ! loss |"
    assert "not best: clip 1.0" in text[4]
    shift = [done[0] | {"scenario": "LM: other text from step 150"}]
    assert "! skips" in list(spikes.table(shift))[3]
