"""What a record says to do, for records of every kind. That it is good to do: benchmarks/recommendation.py."""

import math
import re
from dataclasses import replace

import pytest
from synthetic import changed, log_normal, make_record, steps_of, write_char_rnn

from gradguard.monitoring.judge.numbers import plain_threshold
from gradguard.monitoring.judge.recommend import recommend
from gradguard.monitoring.record.steps import usable_norms

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
    "nothing recorded": (run([]), "unknown", None, "no gradient norms"),
    "too short": (run(CALM[:100]), "unknown", None, r"90 usable steps, and 200 are needed"),
    "all skipped": (run(CALM, skipped=True), "unknown", None, "0 usable steps"),
    "calm": (run(CALM), "nothing", None, "Nothing to clip. No norm stood out"),
    "calm, unknown optimizer": (run(CALM, optimizer=None), "nothing", None, "Nothing to clip"),
    "calm, Adam": (run(CALM, "Adam"), "constant", "norm=0.78", "No norm stood out.*cancels a constant scale"),
    "converging": (run(falling(CALM, 1e6)), "nothing", None, "Nothing to clip.*moved from"),
    "converging, Adam": (run(falling(CALM, 1e6), "AdamW"), "nothing", None, "Nothing to clip"),
    "rising": (run(falling(CALM, 1e-3)), "nothing", None, "Nothing to clip"),
    "heavy and falling": (run(falling(log_normal(600, spread=0.5), 100)), "nothing", None, "Nothing to clip"),
    "heavy and falling a little": (
        run(falling(log_normal(600, spread=0.5), 3)), "constant", "norm=1.2", "were largest.*moved"),
    "heavy and falling a little, Adam": (
        run(falling(log_normal(600, spread=0.5), 3), "Adam"), "constant", "norm=0.26", "weigh the same"),
    "heavy and rising": (run(falling(log_normal(600, spread=0.5), 1 / 3)), "nothing", None, "Nothing to clip"),
    "spikes": (run(SPIKED), "constant", "norm=1.3", r"6 of 540 norms are spikes, up to 71.7 times the median"),
    "spikes, Adam": (run(SPIKED, "Adam"), "constant", "norm=0.78", "spikes.*all steps weigh the same"),
    "spikes and drift": (run(falling(SPIKED, 20)), "rule", "median=1", r"k=1.*one end of the run only"),
    "spikes and convergence, Adam": (run(falling(SPIKED, 1e3), "Adam"), "rule", "median=1", "the norms drift"),
    "spikes and a little drift, Adam": (run(falling(SPIKED, 3), "Adam"), "constant", "norm=0.35", "weigh the same"),
    "heavy tails": (run(log_normal(600, spread=0.6)), "constant", "norm=1.4", "heavy-tailed"),
    "wild": (run(HEAVY), "constant", "norm=0.53", "more than 12 times those around.*heavy-tailed.*tune"),
    "NaN at step 19": (
        run(NAN), "fix", "norm=0.1", r"rate by 0.3: the run blew up at step 19. Clip at 0.1 as well.*tune"),
    "NaN at step 19, Adam": (run(NAN, "Adam"), "fix", "norm=0.3", r"rate by 0.1: .* Clip at 0.3 as well"),
    "NaN at once": (run([None] * 50), "fix", None, "not finite at step 0 first.*No update had been made.*docs/nan.md"),
    "NaN after one step": (run([2.0] + [None] * 50), "fix", "norm=0.2", "the run blew up at step 1"),
    "NaN out of calm": (
        run(CALM + [None] * 50), "fix", None, r"not finite at step 600 first: nothing had grown.*docs/nan.md"),
    "NaN out of calm, norms had fallen": (
        run([50.0 - i / 10 for i in range(490)] + [None] * 50), "fix", None, "nothing had grown"),
    "NaN after norms had fallen and grown": (
        run([50.0] * 50 + [1.0] * 200 + [1.3**i for i in range(6)] + [None] * 50), "fix", "norm=5.0", "at step 256"),
    "NaN after losses had grown": (
        run(CALM + [None] * 50, losses=[1.0] * 598 + [2.5, 6.0] + [None] * 50), "fix", "norm=0.076", "at step 600"),
    "a scaler's search": (run([None] * 5 + CALM), "nothing", None, "Nothing to clip"),
    "jumped, learned nothing": (run(blown()[0], losses=blown()[1]), "fix", "norm=0.1", "blew up at step 20"),
    "jumped, learned": (
        run(blown(at=150)[0], losses=blown(at=150, late=1.0)[1]), "constant", "norm=1.0", "3 of 270 norms"),
    "overshot, learned": (
        run(blown(at=2)[0], losses=blown(at=2, late=1.0, peak=80.0)[1]), "fix", "norm=0.1", "step 2"),
    "noisy losses": (run(HEAVY, losses=log_normal(600, spread=1.0)), "constant", "norm=0.53", "heavy-tailed"),
    "noisy losses that end higher": (
        run(falling(HEAVY, 1e-2), losses=falling(log_normal(600, spread=1.0), 0.3)), "fix", "norm=0.029", "rose"),
    "losses below 0": (run(CALM, losses=[-1.0] * 600), "nothing", None, "Nothing to clip"),
    "losses never fall": (run(CALM, losses=[2.3] * 600), "nothing", None, "Nothing to clip"),
    "spoiled batches": (
        run(SPIKED, losses=[90.0 if i % 100 == 80 else 2.3 for i in range(600)]), "constant", "norm=1.3", "spikes"),
    "a guard": (clipped(SPIKED, 20.0), "keep", "norm=20", "Keep 20.*bound on 1 % of 600 steps and left the others"),
    "a clip that never bound": (clipped(CALM, 20.0), "nothing", None, "Nothing to clip"),
    "a clip above the spikes": (clipped(SPIKED, 1e4), "constant", "norm=1.3", "At present clipping binds on 0 %"),
    "a shaping clip": (clipped(CALM, 1.0), "keep", "norm=1.0", "the run came through"),
    "always on, Adam": (clipped(CALM, 0.1, "Adam"), "keep", "norm=0.1", "this costs nothing"),
    "always on, SGD": (
        clipped(CALM, 0.1), "fix", None, r"Choose the learning rate first: the clip at 0.1 multiplies it by 0.\d+"),
    "a guard under drift": (clipped(falling(SPIKED, 5), 20.0), "keep", "norm=20", "moved from"),
    "a rule in force": (clipped(SPIKED, 3.0, rule="ClipByMedian"), "keep", None, "Keep ClipByMedian"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "kind", "rule", "words"), DECISIONS.values(), ids=DECISIONS)
def test_decisions(record, kind, rule, words):
    found = recommend(record)
    said = f"{found.headline} {found.reason}"
    assert (found.kind, found.rule) == (kind, rule), said
    assert re.search(words, said), said
    assert recommend(record) == found


@pytest.mark.parametrize(("record", "kind"), [(one[0], one[1]) for one in DECISIONS.values()], ids=DECISIONS)
def test_every_decision_can_be_followed(record, kind):
    found = recommend(record)
    assert found.headline.endswith(".")
    assert found.reason.endswith(".")
    assert "  " not in found.headline + found.reason
    if found.kind == "constant":
        norms = usable_norms(record)
        assert found.threshold is not None
        assert min(norms) <= found.threshold <= max(norms)
        assert found.clip_share == sum(norm > found.threshold for norm in norms) / len(norms)
        assert found.rule == f"norm={plain_threshold(found.threshold)}"
        assert found.drift is None or "Adam" in str(record.meta) or 0.2 < found.drift[1] / found.drift[0] < 1
    assert (found.rate_factor is not None) <= (found.kind == "fix")
    if found.kind in ("nothing", "unknown"):
        assert (found.threshold, found.rule) == (None, None)
    if found.kind == "rule":
        assert found.threshold is None
        assert found.headline.endswith("gg.ClipByMedian(k=1).")


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


def test_whether_spikes_hurt_is_told():
    losses = [3.0 if i % 100 in range(80, 87) else 2.0 for i in range(600)]
    assert "After 6 of 6 spikes the loss was higher than before, and came back within 6 steps." in (
        recommend(run(SPIKED, losses=losses)).reason
    )
    assert "After none of 6 spikes the loss was higher" in recommend(run(SPIKED, losses=[2.0] * 600)).reason
    for_ever = [2.0 - i / 1000 + (i > 190) for i in range(600)]
    once = [50 * norm if i == 190 else norm for i, norm in enumerate(CALM)]
    assert "mostly did not come back" in recommend(run(once, losses=for_ever)).reason
    assert "spikes the loss" not in recommend(run(SPIKED)).reason


@pytest.mark.parametrize("field", ["scaled_clip", "kept_gradients"])
def test_what_makes_norms_say_nothing_comes_first(field):
    record = clipped([300.0 * norm for norm in CALM], 1.0)
    found = recommend(changed(record, lambda step: step.update({"amp_scale": 256.0, field: True})))
    assert found.kind == "fix"
    assert found.rule is None
    assert found.headline.startswith("Fix this first: call ")


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
    assert found.kind in ("rule", "constant")
    kept = recommend(write_char_rnn(tmp_path / "clipped.jsonl", threshold=4.0))
    assert (kept.kind, kept.threshold) == ("keep", 4.0)


def test_steps_that_were_not_finite_or_skipped_do_not_count_in_the_share():
    record = clipped([2.0 if i == 250 else 0.5 for i in range(400)], 1.0)
    record = changed(record, lambda step: step.update(skipped=True, coefficient=0.1), slice(380, None))
    assert recommend(record).reason.startswith("It bound on 0.26 % of 380 steps")


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
    assert sgd.threshold > 50 * adam.threshold
    assert found.usable_steps == sgd.usable_steps + adam.usable_steps
    assert f"Optimizer 0 (SGD): {sgd.headline}" in found.reason


def test_one_of_several_optimizers_that_live_is_judged_by_its_own_name():
    steps = steps_of(list(SPIKED), optimizer=1)
    record = make_record(meta={"t": "meta", "optimizers": ["SGD", "Adam"]}, steps=steps)
    assert recommend(record) == recommend(run(SPIKED, "Adam"))
