"""What the detector must not skip, and what it must: whole trainings, of `benchmarks/`, in which a skip is a skip."""

import sys
from pathlib import Path

import pytest
import torch

import gradguard as gg

FOLDER = Path(__file__).parents[2] / "benchmarks"
TELLING = ("tasks of mixed scale, one rare", "a rare task every 40")
"""Kinds of which the rule that skips each step that stands out skips many."""

BURSTS = (
    "LM: 20 batches, random labels",
    "LM: two bursts of 10",
    "MLP, SGD-m: 20 batches with a sample x 100",
)
ALONE_TOO = ("LM: loss x 1e4 once, constant rate", "MLP, Adam: a sample x 100 every 50")


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import spikes
        import spikes_clean_runs
        import spikes_rules
        import spikes_scenarios

        yield spikes, spikes_clean_runs, spikes_rules, spikes_scenarios
        for name in ("spikes", "spikes_clean_runs", "spikes_rules", "spikes_scenarios"):
            sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TELLING)
def test_what_is_rare_and_right_is_not_skipped(bench, kind):
    assert bench[1].skips_of(kind, 2, steps=300) == 0
    assert bench[1].skips_of(kind, 2, steps=300, alone=1) > 2  # or it proves nothing


@pytest.mark.exhaustive
@pytest.mark.parametrize("told", [False, True])
def test_a_hundred_clean_runs_have_at_most_ten_false_skips(bench, told):
    assert len(bench[1].KINDS) == 20
    found = {kind: bench[1].skips_of(kind, 5, told=told) for kind in bench[1].KINDS}
    assert sum(found.values()) <= 10, found


@pytest.mark.exhaustive
def test_what_is_rare_and_large_is_not_skipped_where_it_is_named(bench):
    assert {kind: bench[1].skips_of(kind, 5, told=True) for kind in bench[1].HARDER} == dict.fromkeys(
        bench[1].HARDER, 0
    )


def caught(bench, name, **options):
    spikes, _, rules, scenarios = bench
    run = scenarios.SCENARIOS[name].make(0)
    outcome = spikes.train(run, rules.Skipping(run, run.clip, **options))
    return len({*outcome.skipped} & {*outcome.bad}), len({*outcome.skipped} - {*outcome.bad})


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BURSTS)
def test_as_many_of_a_burst_are_skipped_as_by_the_rule_that_skips_each(bench, name):
    """The first one of a burst is not: the eight that are skipped come one step later."""
    before = caught(bench, name, alone=1)
    assert before[0] >= 8
    assert caught(bench, name) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE_TOO)
def test_what_is_far_out_is_skipped_alone(bench, name):
    bad = bench[3].SCENARIOS[name].make(0).bad
    assert caught(bench, name) == (len(bad), 0)


def told(sizes, **options):
    detector = gg.SpikeDetector(**options)
    return [at for at, size in enumerate(sizes) if detector.observe(torch.tensor([size], dtype=torch.float64))]


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("alone", [*[1.0] * 100, 9.0, *[1.0] * 30], []),
        ("alone and far", [*[1.0] * 100, 51.0, 1.0], [100]),
        ("alone and almost far", [*[1.0] * 100, 49.0, 1.0], []),
        ("two in a row", [*[1.0] * 100, 9.0, 9.0, 1.0], [101]),
        ("three, of which two stood out early", [*[1.0] * 40, 9.0, 9.0, 9.0, 1.0], [42]),
        ("every other", [*[1.0] * 100, *[9.0, 1.0] * 6], [104, 106, 108, 110]),
        ("every fortieth", [*[*[1.0] * 39, 9.0] * 12], []),
        ("every seventh from the first on", [*[1.0] * 6, 9.0] * 30, []),
        ("a lasting rise costs the cap", [*[1.0] * 100, *[9.0] * 50], [*range(101, 109)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_burst_is_told_by_how_often_steps_stand_out(name, sizes, expected):
    assert told(sizes) == expected


def test_a_batch_of_few_samples_is_judged_by_its_size():
    detector = gg.SpikeDetector(alone=1)
    usual = torch.tensor([1.0], dtype=torch.float64)
    for _ in range(50):
        assert not detector.observe(usual, 64.0)
    for weight, expected in ((64.0, True), (256.0, True), (4.0, False), (float("nan"), True), (1.0, False)):
        assert bool(detector.observe(usual * 2.7, weight)) is expected, weight
    assert detector.observe(usual * 1e6, 1.0)  # one sample is no licence
