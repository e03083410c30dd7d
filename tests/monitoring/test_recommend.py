import math
import re

import pytest
from synthetic import log_normal, make_record, steps_of, write_char_rnn

from gradguard.monitoring.judge.recommend import (
    centre_and_spread,
    drift_ends,
    drift_ratio,
    guard_threshold,
    has_drifted,
    recommend,
    usable_norms,
)


def run(norms, optimizer="SGD", **more):
    return make_record(
        meta={"t": "meta", "optimizers": [optimizer] if optimizer else []}, steps=steps_of(norms, **more)
    )


def test_the_three_candidates_by_hand():
    # 90 % of the norms are 1 or 2 by turns; the log-median lies between them and the MAD is half of log 2.
    norms = [1.0, 2.0] * 250
    guard, shaping, reference = recommend(run(norms)).candidates
    assert guard.threshold == float(f"{math.exp(math.log(2) / 2 + 6 * 1.4826 * math.log(2) / 2):.1e}")
    assert (shaping.threshold, reference.threshold) == (2.0, 7.5)
    assert (guard.clip_share, guard.interval) == (0.0, (0.0, 0.0))


def test_spikes_do_not_move_the_guard_and_are_what_it_clips():
    calm = log_normal(1000)
    spiked = [50 * norm if i % 100 == 50 else norm for i, norm in enumerate(calm)]
    recommendation = recommend(run(spiked))
    guard = recommendation.candidates[0]
    assert recommendation.threshold == guard.threshold == pytest.approx(guard_threshold(calm), rel=0.1)
    assert guard.clip_share == 0.01
    low, high = guard.interval
    assert 0 <= low < 0.01 < high < 0.03
    assert "would have clipped 1 % of 900 steps" in recommendation.reason
    assert "With SGD" in recommendation.reason


@pytest.mark.parametrize(
    ("norms", "more", "reason"),
    [
        ([], {}, "no gradient norms"),
        ([1.0] * 100, {}, r"not enough steps (90 of 200)"),
        ([None] * 500, {}, "not enough steps (0 of 200)"),
        ([1.0] * 500, {"skipped": True}, "not enough steps (0 of 200)"),
    ],
)
def test_no_threshold_without_data(norms, more, reason):
    recommendation = recommend(run(norms, **more))
    assert recommendation.threshold is None
    assert recommendation.candidates == ()
    assert reason in recommendation.reason


def test_post_clip_norms_are_refused():
    record = make_record(steps=[{"t": "step", "i": i, "post_norm": 1.0} for i in range(500)])
    assert "Only norms after clipping" in recommend(record).reason


def test_a_guard_above_every_norm_is_insurance():
    recommendation = recommend(run(log_normal(500), optimizer="AdamW"))
    assert recommendation.threshold is not None
    assert "would not have clipped any step of this run: insurance, not a cure" in recommendation.reason
    assert "With AdamW a constant scaling nearly cancels" in recommendation.reason


def test_a_heavy_tail_is_called_one():
    norms = [1000.0 if i % 10 == 0 else norm for i, norm in enumerate(log_normal(500))]
    assert "heavy-tailed" in recommend(run(norms)).reason


def test_drift_shows_both_ends():
    norms = [norm * math.exp(-3 * i / 1000) for i, norm in enumerate(log_normal(1000))]
    recommendation = recommend(run(norms))
    assert recommendation.drift is not None
    early, late = recommendation.drift
    assert early > 4 * late
    assert f"the first tenth asks for {early:g}, the last for {late:g}" in recommendation.reason
    assert recommend(run(log_normal(1000))).drift is None


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (100, 90), (999, 900), (1000, 900), (5000, 4900), (10000, 9800)])
def test_warm_up_is_left_out(count, kept):
    assert len(usable_norms(run([1.0] * count))) == kept


def test_what_has_no_logarithm_is_left_out():
    assert usable_norms(run([1.0, 0.0, None, 2.0])) == [1.0, 2.0]


def test_constant_norms_have_the_least_spread():
    assert centre_and_spread([2.0] * 10) == (math.log(2.0), 0.05)


def test_scaling_every_norm_scales_every_threshold():
    norms = log_normal(500)
    small, large = (recommend(run([scale * norm for norm in norms])).candidates for scale in (1, 1024))
    for a, b in zip(small, large, strict=True):
        assert b.threshold == pytest.approx(1024 * a.threshold, rel=0.1)
        assert b.clip_share == pytest.approx(a.clip_share, abs=0.03)


def test_huge_spread_and_mixed_optimizers():
    norms = [10.0 ** ((i * 37) % 300 - 150) for i in range(500)]
    recommendation = recommend(run(norms, optimizer=None))
    assert recommendation.threshold is not None
    assert math.isfinite(recommendation.threshold)
    assert "With" not in recommendation.reason


def test_the_same_record_gives_the_same_answer():
    record = run(log_normal(500, spread=2.0))
    assert recommend(record) == recommend(record)


def test_a_clip_that_already_guards_is_kept(tmp_path):
    record = write_char_rnn(tmp_path / "run.jsonl", threshold=4.0)
    found = recommend(record)
    assert found.threshold == 4.0
    assert found.reason.startswith("Keep it: 4 bound on ")
    assert len(found.candidates) == 3


def test_drift_recommends_the_rule_that_follows():
    norms = [norm * math.exp(-3 * i / 1000) for i, norm in enumerate(log_normal(1000))]
    assert "A threshold that follows the norms fits both: gg.ClipByMedian()." in recommend(run(norms)).reason


def test_drift_is_told_of_a_threshold_that_is_kept():
    norms = [(1.0 if i < 500 else 0.2) * norm for i, norm in enumerate(log_normal(1000, spread=0.1))]
    norms[300] = norms[700] = 40.0
    found = recommend(run_clipped(norms, 10.0))
    assert found.reason.startswith("Keep it: 10 bound on 0.2 % of 1,000 steps")
    assert "drift by more than 2x" in found.reason
    assert found.drift is not None


def run_clipped(norms, threshold):
    record = run(norms, threshold=threshold, rule="norm")
    for step in record.steps:
        step["coefficient"] = min(1.0, threshold / step["norm"]) if step["norm"] else None
    return record


def test_a_hump_in_the_middle_shows_its_own_two_ends():
    norms = [(9.0 if 400 <= i < 600 else 1.0) * norm for i, norm in enumerate(log_normal(1000, spread=0.1))]
    found = recommend(run(norms))
    assert found.drift is not None
    assert max(found.drift) > 5 * min(found.drift)
    assert re.search(r"tenth [456] of 10 (asks )?for", found.reason)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 1.5])
def test_noise_is_no_drift(spread, seed):
    for count in (200, 1000):
        assert not has_drifted(log_normal(count, spread=spread, seed=seed))


@pytest.mark.parametrize(
    ("norms", "ratio", "ends"),
    [
        ([1.0] * 99, None, None),
        ([1.0] * 100, 1.0, None),
        ([1.0] * 50 + [2.0] * 50, 2.0, None),
        ([1.0] * 50 + [2.1] * 50, 2.1, (1.0, 2.1)),
        ([4.0] * 50 + [1.0] * 50, 4.0, (4.0, 1.0)),
        ([1.0] * 40 + [4.0] * 20 + [1.0] * 40, 4.0, (1.0, 4.0)),
    ],
)
def test_drift_by_hand(norms, ratio, ends):
    assert (drift_ratio(norms), drift_ends(norms)) == (ratio, ends)


def test_the_present_regime_and_the_number_of_steps_are_stated():
    found = recommend(run_clipped(log_normal(500), 1.0))
    assert "At present clipping binds on 49 % of the steps (regime: shaping)." in found.reason
    assert "insurance, not a cure (counted on 450 usable steps)" in recommend(run(log_normal(500))).reason
    assert "At present" not in recommend(run(log_normal(500))).reason


def test_a_share_is_labelled_as_counterfactual():
    norms = [50 * norm if i % 50 == 20 else norm for i, norm in enumerate(log_normal(500))]
    assert "counted on the recorded norms, without feedback" in recommend(run(norms)).reason


def test_steps_that_were_not_finite_or_skipped_do_not_count_in_the_present_share():
    record = run_clipped([2.0 if i == 50 else 0.5 for i in range(400)], 1.0)
    for step in record.steps[100:]:
        step |= {"skipped": True, "coefficient": 0.1}
    for step in record.steps[:200]:
        step.pop("skipped", None)
    record.steps[120] |= {"norm": None, "nonfinite": 3}
    assert len(usable_norms(record)) == 159
    record = run_clipped([2.0 if i == 250 else 0.5 for i in range(400)], 1.0)
    for step in record.steps[380:]:
        step |= {"skipped": True, "coefficient": 0.1}
    assert recommend(record).reason.startswith("Keep it: 1 bound on 0.26 % of 380 steps")


def test_each_of_several_optimizers_has_a_recommendation():
    steps = [{"t": "step", "i": i, "norm": (1.0 if i % 3 else 100.0), "optimizer": int(i % 3 > 0)} for i in range(900)]
    found = recommend(make_record(meta={"t": "meta", "optimizers": ["SGD", "Adam"]}, steps=steps[:700]))
    assert (found.threshold, found.candidates) == (None, ())
    (first, sgd), (second, adam) = found.parts
    assert (first, second) == ("optimizer 0 (SGD)", "optimizer 1 (Adam)")
    assert (sgd.threshold, sgd.usable_steps) == (130.0, 211)
    assert adam.threshold == 1.3
    assert found.usable_steps == 211 + adam.usable_steps
    for words in (
        "one threshold cannot fit",
        "optimizer 0 (SGD): 130. It is six",
        "optimizer 1 (Adam): 1.3. It is six",
    ):
        assert words in found.reason
    assert "With SGD" in sgd.reason
    assert "With Adam a constant scaling nearly cancels" in adam.reason
    short = recommend(make_record(meta={"t": "meta", "optimizers": ["SGD", "Adam"]}, steps=steps[:450]))
    assert "optimizer 0 (SGD): none. not enough steps (135 of 200)" in short.reason
