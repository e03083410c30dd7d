"""What a record says to do, for records of every kind. That it is good to do: benchmarks/recommendation.py."""

import math
import re
from dataclasses import replace

import pytest
from synthetic import changed, log_normal, make_record, steps_of, write_char_rnn

from gradguard.monitoring.judge.numbers import plain_threshold
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.step_rows import usable_norms

CALM = log_normal(600, spread=0.2)
SPIKED = [50 * norm if i % 100 == 80 else norm for i, norm in enumerate(CALM)]
HEAVY = log_normal(600, spread=0.9)


def falling(norms, times):
    return [norm * times ** (-i / len(norms)) for i, norm in enumerate(norms)]


def run(norms, optimizer: str | None = "SGD", losses=None, **more):
    record = make_record(
        meta={"t": "meta", "optimizers": [optimizer] if optimizer else []}, steps=steps_of(list(norms), **more)
    )
    steps = list(record.steps)
    for step, loss in zip(steps, losses or (), strict=False):
        step["loss"] = loss
    return replace(record, steps=steps)


def clipped(norms, threshold, optimizer="SGD", rule="norm"):
    record = run(norms, optimizer, threshold=threshold, rule=rule)
    return changed(record, lambda step: step.update(coefficient=min(1.0, threshold / step["norm"])))


def blown(count=300, at=20, late=2.4, peak=9.0):
    """A run whose loss and norms jump at a step, and that learns nothing any more."""
    norms = [1.0 if i < at else 20.0 if i < at + 3 else 0.9 for i in range(count)]
    return norms, [2.3 if i < at else peak if i < at + 3 else late for i in range(count)]


NAN = [2.0**i for i in range(19)] + [None] * 200
DECISIONS = {
    # name: record, kind, rule, a part of headline and reason
    "nothing recorded": (run([]), "unknown", None, "holds no gradient norms"),
    "too short": (run(CALM[:100]), "unknown", None, r"90 usable steps; 200 are needed"),
    "all skipped": (run(CALM, skipped=True), "unknown", None, "0 usable steps"),
    "calm": (run(CALM), "constant", r"norm=\d", "As insurance, clip at .*needs no clip.*limits the next"),
    "calm, unknown optimizer": (run(CALM, optimizer=None), "constant", r"norm=\d", "As insurance"),
    "calm, Adam": (run(CALM, "Adam"), "constant", r"norm=\d", "As insurance"),
    "calm, Rprop": (run(CALM, "Rprop"), "nothing", None, "nothing to clip.*reads only the signs of gradients"),
    "lost to bad batches": (
        run([norm * (100 if i > 100 and i % 40 == 39 else 1) * (1 if i < 250 else 1e6) for i, norm in enumerate(CALM)],
            losses=[90.0 if i > 100 and i % 40 == 39 else 2.3 - i / 600 if i < 250 else 2e5 for i in range(600)]),
        "constant", r"norm=(0\.9|1\.)", "Clip at .*norm of an ordinary step"),
    "converging": (run(falling(CALM, 1e6)), "nothing", None, "nothing to clip.*went from .* would let jumps"),
    "heavy tails": (run(log_normal(600, spread=0.6)), "constant", r"norm=\d", "As insurance"),
    "NaN at step 19": (run(NAN), "fix", "norm=0.1", r"Multiply the learning rate by 0.3. Clip at 0.1 as well"),
    "NaN at step 19, Adam": (run(NAN, "Adam"), "fix", "norm=0.3", r"rate by 0.1. Clip at 0.3 as well"),
    "NaN at once": (run([None] * 50), "fix", None, "Check the batch of step 0.*gradguard explain nan"),
    "NaN out of calm": (run(CALM + [None] * 50), "fix", None, r"Check the batch of step 600"),
    "NaN after losses had grown": (
        run(CALM + [None] * 50, losses=[1.0] * 590 + [1.5**k for k in range(10)] + [None] * 50), "fix", r"norm=1\.0",
        "Multiply the learning rate by 0.3"),
    "jumped, learned nothing": (
        run(blown(at=3)[0], losses=blown(at=3)[1]), "fix", "norm=0.1", "Multiply the learning rate by 0.3"),
    "losses below 0": (run(CALM, losses=[-1.0 - i / 600 for i in range(600)]), "constant", r"norm=\d", "As insurance"),
    "losses never fall": (run(CALM, losses=[2.3] * 600), "fix", None, "Check that labels belong to their inputs"),
    "bad batches": (
        run(SPIKED, losses=[90.0 if i % 100 == 80 else 2.3 - i / 600 for i in range(600)]), "constant", r"norm=1\.\d",
        "Clip at 1.*It is the norm of an ordinary step, and would have acted on 5"),
    "a clip by hand": (run([min(norm, 0.5) for norm in CALM]), "unknown", None, "hand-written clip.*norms are equal"),
    "a guard": (clipped(SPIKED, 20.0), "keep", "norm=20", "Keep 20.*acted on 1 % of 600 steps, and the run is well"),
    "a clip that never bound": (clipped(CALM, 20.0), "constant", r"norm=\d", "As insurance"),
    "a shaping clip": (clipped(CALM, 1.0), "keep", "norm=1.0", "Keep 1.0"),
    "a rule in force": (clipped(SPIKED, 3.0, rule="ClipByMedian"), "keep", None, "Keep ClipByMedian=3.0"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "kind", "rule", "words"), DECISIONS.values(), ids=DECISIONS)
def test_decisions(record, kind, rule, words):
    found = recommend(record)
    said = f"{found.headline} {found.reason}"
    assert found.kind == kind, said
    assert found.rule is None if rule is None else re.match(rule, found.rule or ""), found.rule
    assert re.search(words, said), said
    assert recommend(record) == found


@pytest.mark.parametrize("record", [one[0] for one in DECISIONS.values()], ids=DECISIONS)
def test_every_decision_can_be_followed(record):
    found = recommend(record)
    assert found.headline.endswith(".")
    assert found.reason.endswith(".")
    assert "  " not in found.headline + found.reason
    if found.kind == "constant":
        norms = usable_norms(record)
        assert found.threshold is not None
        assert found.clip_share == sum(norm > found.threshold for norm in norms) / len(norms)
        assert found.rule == f"norm={plain_threshold(found.threshold)}"
    if found.kind in ("nothing", "unknown"):
        assert (found.threshold, found.rule) == (None, None)


@pytest.mark.parametrize("norms", [CALM, HEAVY])
def test_what_is_called_insurance_leaves_nearly_all_steps_alone(norms):
    found = recommend(run(norms))
    assert found.clip_share is not None
    assert ("insurance" in found.headline) == (found.clip_share <= 0.05)


def test_a_low_threshold_is_never_called_free():
    found = recommend(run(HEAVY, losses=[2 * math.exp(-i / 100) + 0.3 for i in range(600)]))
    assert found.clip_share is not None
    assert found.clip_share > 0.5
    assert found.experiment
    assert "needs no clip" not in found.reason
    assert "an experiment shows whether it does on yours: gradguard tune" in found.reason


@pytest.mark.parametrize(
    ("threshold", "kind", "words"), [(3.0, "keep", "Keep 3.0 as insurance"), (1e6, "constant", "As insurance, clip at")]
)
def test_a_clip_that_never_bound_is_kept_where_it_is_insurance(threshold, kind, words):
    found = recommend(clipped(CALM, threshold))
    assert found.kind == kind
    assert words in found.headline


@pytest.mark.parametrize("norms", [CALM, SPIKED, HEAVY, falling(SPIKED, 20)])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_scaling_every_norm_scales_the_threshold(norms, optimizer):
    one, large = (recommend(run([scale * norm for norm in norms], optimizer)) for scale in (1, 1024))
    assert one.kind == large.kind
    if one.threshold is not None:
        assert large.threshold == pytest.approx(1024 * one.threshold, rel=0.06)


def test_drift_never_makes_a_number_beyond_the_norms():
    """In the first version the threshold of such a run was 1.6e14."""
    norms = [math.exp(-i / 150) * norm for i, norm in enumerate(log_normal(5000, spread=0.3))]
    for optimizer in ("SGD", "Adam"):
        found = recommend(run(norms, optimizer))
        assert found.threshold is None
        assert found.drift is not None


@pytest.mark.parametrize("field", ["scaled_clip", "kept_gradients"])
def test_what_makes_norms_say_nothing_comes_first(field):
    record = clipped([300.0 * norm for norm in CALM], 1.0)
    found = recommend(changed(record, lambda step: step.update({"amp_scale": 256.0, field: True})))
    assert found.kind == "fix"
    assert found.rule is None
    assert found.headline.startswith("Call ")


def test_post_clip_norms_are_refused():
    record = make_record(steps=[{"t": "step", "i": i, "post_norm": 1.0} for i in range(500)])
    assert "Only norms after clipping" in recommend(record).reason


def test_huge_spread():
    norms = [10.0 ** ((i * 37) % 300 - 150) for i in range(500)]
    found = recommend(run(norms, optimizer=None))
    assert found.threshold is None or math.isfinite(found.threshold)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (100, 90), (999, 900), (1000, 900), (5000, 4900), (10000, 9800)])
def test_warm_up_is_left_out(count, kept):
    assert len(usable_norms(run([1.0] * count))) == kept


def test_what_has_no_logarithm_is_left_out():
    assert usable_norms(run([1.0, 0.0, None, 2.0])) == [1.0, 2.0]


def test_a_made_up_language_model_gets_the_rule_and_keeps_a_guard(tmp_path):
    found = recommend(write_char_rnn(tmp_path / "run.jsonl"))
    assert found.kind in ("constant", "nothing")
    kept = recommend(write_char_rnn(tmp_path / "clipped.jsonl", threshold=4.0))
    assert (kept.kind, kept.threshold) == ("keep", 4.0)


def test_steps_that_were_not_finite_or_skipped_do_not_count_in_the_share():
    record = clipped([2.0 if i == 250 else 0.5 for i in range(400)], 1.0)
    record = changed(record, lambda step: step.update(skipped=True, coefficient=0.1), slice(380, None))
    assert recommend(record).reason.startswith("It acted on 0.26 % of 380 steps")


def test_each_of_several_optimizers_has_a_decision():
    """The losses of networks that work against each other are no sign of a learning rate that is too high."""
    norms = [(60.0 if i % 90 == 60 else 1.0 + i % 7 / 10) for i in range(900)]
    steps = [
        {"t": "step", "i": i, "norm": norm * (1.0 if i % 3 else 100.0), "optimizer": int(i % 3 > 0), "loss": 1.0 + i}
        for i, norm in enumerate(norms)
    ]
    found = recommend(make_record(meta={"t": "meta", "optimizers": ["SGD", "Adam"]}, steps=steps))
    assert (found.kind, found.threshold, found.rule) == ("unknown", None, None)
    (first, sgd), (second, adam) = found.parts
    assert (first, second) == ("optimizer 0 (SGD)", "optimizer 1 (Adam)")
    assert (sgd.kind, adam.kind) == ("constant", "constant")
    assert sgd.threshold is not None
    assert adam.threshold is not None
    assert sgd.threshold > 30 * adam.threshold
    assert found.usable_steps == sgd.usable_steps + adam.usable_steps
    assert f"Optimizer 0 (SGD): {sgd.headline}" in found.reason


def test_one_of_several_optimizers_that_live_is_judged_by_its_own_name():
    steps = steps_of(list(SPIKED), optimizer=1)
    record = make_record(meta={"t": "meta", "optimizers": ["SGD", "Adam"]}, steps=steps)
    assert recommend(record) == recommend(run(SPIKED, "Adam"))
