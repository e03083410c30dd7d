import pytest
from synthetic import log_normal, make_record, steps_of

from gradguard.watch.verdict import verdict

CALM = log_normal(600, centre=0.42)


def clipped(norms, threshold, optimizer="SGD", rule="norm"):
    steps = steps_of(norms, threshold=threshold, rule=rule)
    for step in steps:
        step["coefficient"] = min(1.0, threshold / step["norm"])
    return make_record(meta={"t": "meta", "clip": f"{rule}={threshold}", "optimizers": [optimizer]}, steps=steps)


def share_of(share, count=1000):
    return [2.0 if i < share * count else 0.5 for i in range(count)]


@pytest.mark.parametrize(
    ("record", "regime", "words"),
    [
        (make_record(), "never", "No optimizer step was recorded."),
        (make_record(steps=[{"t": "step", "i": 0}]), "never", "No clipping in 1 step. No finite gradient norm"),
        (make_record(steps=steps_of(CALM)), "never", "No clipping in 600 steps. Pre-clip gradient norms: median 0.4"),
        (clipped(share_of(0), 1.0), "never", "Clipping at 1.0 never bound in 1,000 steps."),
        (clipped(share_of(0.01), 1.0), "guard", "at 1.0 bound on 1 % of 1,000 steps: a guard against rare"),
        (clipped(share_of(0.2), 1.0), "shaping", "bound on 20 % of 1,000 steps: it shapes training, with a median"),
        (
            clipped([20.0] * 4000, 1.0),
            "normalising",
            "Clipping at 1.0 bound on 100 % of 4,000 steps: it works as a learning-rate multiplier of 0.05, "
            "not as a guard.",
        ),
        (clipped([20.0] * 10, 1.0, "AdamW"), "normalising", "it normalises steps (median coefficient 0.05)"),
        (clipped(share_of(0.2), 1.0, rule="value"), "shaping", "Clipping by value at 1.0 bound on 20 %"),
    ],
)
def test_sentence_and_regime(record, regime, words):
    judged = verdict(record)
    assert judged.regime == regime
    assert words in judged.sentence


def test_spikes_are_counted_after_the_warm_up():
    norms = [100 * norm if i % 100 == 99 else norm for i, norm in enumerate(CALM)]
    judged = verdict(make_record(steps=steps_of(norms)))
    assert judged.spike_share == pytest.approx(6 / 540)
    assert "1.1 % of steps were spikes. 0 non-finite." in judged.sentence
    assert judged.max_norm == max(norms)


def test_a_coefficient_of_one_to_rounding_does_not_bind():
    record = clipped([1.0] * 100, 1.0)
    record.steps[3]["coefficient"] = 1 - 1e-12
    assert verdict(record).clip_share == 0


def test_nonfinite_and_skipped_steps_are_counted_and_kept_out_of_the_share():
    record = clipped(share_of(0.5, count=10), 1.0)
    record.steps[0] |= {"norm": None}
    record.steps[1] |= {"nonfinite": 7}
    record.steps[9] |= {"skipped": True}
    judged = verdict(record)
    assert (judged.nonfinite_steps, judged.skipped_steps) == (2, 1)
    assert judged.clip_share == 3 / 7
    assert judged.sentence.endswith("1 skipped. 2 non-finite.")


def test_all_norms_not_finite():
    judged = verdict(make_record(steps=steps_of([None] * 30)))
    assert (judged.nonfinite_steps, judged.median_norm, judged.spike_share) == (30, None, None)
    assert judged.sentence == "No clipping in 30 steps. No finite gradient norm was recorded. 30 non-finite."


@pytest.mark.parametrize(
    ("losses", "final", "best", "diverged"),
    [
        ([], None, None, False),
        ([3.0], 3.0, 3.0, False),
        ([4.0] * 10 + [1.0] * 10 + [2.0] * 10, 2.0, 1.0, False),
        ([4.0] * 380 + [1.0] * 20, 1.0, 1.0, False),
        ([1.0] * 20 + [None] * 5, None, 1.0, True),
        ([1.0] * 20 + [None] + [1.0] * 5, None, 1.0, False),
    ],
)
def test_losses(losses, final, best, diverged):
    judged = verdict(make_record(steps=[{"t": "step", "i": i, "loss": loss} for i, loss in enumerate(losses)]))
    assert (judged.final_loss, judged.best_loss, judged.diverged) == (final, best, diverged)
    assert ("The loss was not finite at the end." in judged.sentence) == diverged


@pytest.mark.parametrize(
    ("end", "share"),
    [
        (None, None),
        ({"t": "end"}, None),
        ({"t": "end", "wall": 0.0, "overhead_ms": 1.0}, None),
        ({"t": "end", "wall": 61.0, "overhead_ms": 305.0}, 0.005),
    ],
)
def test_overhead(end, share):
    assert verdict(make_record(end=end)).overhead_share == share
