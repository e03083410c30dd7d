import random
from dataclasses import replace
from fractions import Fraction

import pytest
from synthetic import changed, log_normal, make_record, steps_of

from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.judge.numbers import window_means
from gradguard.monitoring.record.step_rows import by_optimizer

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
        (make_record(steps=steps_of(CALM)), "never", "No clipping in 600 steps. Gradient norms before clipping: "),
        (
            make_record(steps=steps_of([min(norm, 0.3) for norm in CALM])),
            "never",
            "No clipping in 600 steps, but most norms are equal: code that was not observed scales gradients",
        ),
        (clipped(share_of(0), 1.0), "never", "Clipping at 1.0 never bound in 1,000 steps."),
        (clipped(share_of(0.01), 1.0), "guard", "at 1.0 bound on 1 % of 1,000 steps: a guard against rare"),
        (clipped(share_of(0.2), 1.0), "shaping", "bound on 20 % of 1,000 steps: it shapes training: where it binds"),
        (
            clipped([20.0] * 4000, 1.0),
            "normalising",
            "Clipping at 1.0 bound on 100 % of 4,000 steps: it acts like a learning rate 0.05 times as large, "
            "not like a guard.",
        ),
        (
            clipped([20.0] * 10, 1.0, "AdamW"),
            "normalising",
            "it makes all steps about equally long (gradients usually times 0.05)",
        ),
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
    assert "1.1 % of 540 steps after the warm-up were spikes. 0 non-finite." in judged.sentence
    assert judged.max_norm == max(norms)


def test_a_coefficient_of_one_to_rounding_does_not_bind():
    record = clipped([1.0] * 100, 1.0)
    record = changed(record, lambda step: step.update(coefficient=1 - 1e-12), slice(3, 4))
    assert verdict(record).clip_share == 0


def test_nonfinite_and_skipped_steps_are_counted_and_kept_out_of_the_share():
    record = clipped(share_of(0.5, count=10), 1.0)
    for place, odd in ((0, {"norm": None}), (1, {"nonfinite": 7}), (9, {"skipped": True})):
        record = changed(record, lambda step, odd=odd: step.update(odd), slice(place, place + 1))
    judged = verdict(record)
    assert (judged.nonfinite_steps, judged.skipped_steps) == (2, 1)
    assert judged.clip_share == 3 / 7
    assert "bound on 43 % of the 7 steps that were taken with finite gradients" in judged.sentence
    assert judged.sentence.endswith("Of 10 steps: 1 skipped. 2 non-finite.")
    assert (judged.taken_steps, judged.steps) == (7, 10)


def beside_its_own(own, applied, counts, *, named="norm=4"):
    """A script that clips itself under --clip: on so many steps both bind, the script's alone, --clip's alone, none."""
    kinds = [kind for kind, count in zip(("both", "own", "applied", "none"), counts, strict=True) for _ in range(count)]
    steps = []
    for i, kind in enumerate(kinds):
        first, second = 0.5 if kind in ("both", "own") else 1.0, 0.5 if kind in ("both", "applied") else 1.0
        strongest = own if first <= second else applied
        steps.append({"t": "step", "i": i, "norm": 3.0, "coefficient": first * second, "rule": strongest[0]}
                     | {"threshold": strongest[1], "clips": [[*own, first], [*applied, second]]})  # fmt: skip
    return make_record(meta={"t": "meta", "clip": named, "optimizers": ["SGD"]}, steps=steps)


@pytest.mark.parametrize(
    ("record", "words", "threshold"),
    [
        (
            beside_its_own(("norm", 1.0), ("norm", 4.0), (0, 77, 0, 23)),
            "2 clips, on 100 steps: the script's own norm=1.0 bound on 77 %, --clip norm=4.0 bound on 0 %. Together "
            "they bound on 77 %: it acts like a learning rate 0.5 times as large, not like a guard.",
            1.0,
        ),
        (
            beside_its_own(("norm", 8.0), ("norm", 4.0), (1, 2, 17, 80)),
            "2 clips, on 100 steps: the script's own norm=8.0 bound on 3 %, --clip norm=4.0 bound on 18 %. Together "
            "they bound on 20 %: it shapes training: where it binds it usually multiplies gradients by 0.5.",
            4.0,
        ),
        (
            beside_its_own(("norm", 8.0), ("norm", 4.0), (0, 0, 0, 10)),
            "2 clips, on 10 steps: the script's own norm=8.0 bound on 0 %, --clip norm=4.0 bound on 0 %: none of them "
            "changed a gradient.",
            8.0,
        ),
        (
            beside_its_own(("norm", 4.0), ("norm", 4.0), (0, 5, 0, 5)),
            "the script's own norm=4.0 bound on 50 %, --clip norm=4.0 bound on 0 %.",
            4.0,
        ),
        (
            beside_its_own(("ClipByMedian", 2.0), ("ClipFraction", 3.0), (0, 1, 3, 6), named="clip_fraction=0.1"),
            "the script's own ClipByMedian bound on 10 %, --clip ClipFraction bound on 30 %.",
            3.0,
        ),
        (
            beside_its_own(("norm", 1.0), ("value", 4.0), (0, 1, 0, 9), named="ClipByValue"),  # of a guard's monitor
            "the first (norm at 1.0) bound on 10 %, the second (value at 4.0) bound on 0 %.",
            1.0,
        ),
    ],
)
def test_two_clips_are_told_apart_and_the_threshold_is_of_the_one_that_bound_most(record, words, threshold):
    judged = verdict(record)
    assert words in judged.sentence
    assert judged.threshold == threshold


def test_a_clip_that_began_late_is_told_with_both_shares():
    record = clipped([2.0] * 100, 1.0)
    for key in ("threshold", "coefficient", "rule"):
        record = changed(record, lambda step, key=key: step.pop(key), slice(60))
    words = "Clipping at 1.0 bound on 40 % of 100 steps (100 % of the 40 that it acted on): it shapes"
    assert words in verdict(record).sentence


def test_all_norms_not_finite():
    judged = verdict(make_record(steps=steps_of([None] * 30)))
    assert (judged.nonfinite_steps, judged.median_norm, judged.spike_share) == (30, None, None)
    assert (
        judged.sentence == "No clipping in 30 steps. No finite gradient norm was recorded. Of 30 steps: 30 non-finite."
    )


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


def gan(count=400):
    """Adam's norms are 9, clipped at 1; SGD's are some 0.5 and are left alone."""
    adam = {"norm": 9.0, "optimizer": 0, "threshold": 1.0, "coefficient": 1 / 9, "rule": "norm", "loss": 3.0}
    sgd = {"norm": 0.5, "optimizer": 1, "loss": 1.0}
    steps = [
        {"t": "step", "i": i} | (adam if i % 2 == 0 else sgd | {"norm": 0.6 if i % 20 == 1 else 0.5})
        for i in range(count)
    ]
    return make_record(meta={"t": "meta", "optimizers": ["Adam", "SGD"]}, steps=steps)


def test_several_optimizers_are_judged_one_by_one():
    judged = verdict(gan())
    (first, adam), (second, sgd) = judged.parts
    assert (first, second) == ("optimizer 0 (Adam)", "optimizer 1 (SGD)")
    assert (adam.clip_share, adam.regime, adam.median_norm, adam.steps) == (1.0, "normalising", 9.0, 200)
    assert (sgd.clip_share, sgd.clipping, sgd.median_norm, sgd.final_loss) == (0.0, False, 0.5, 1.0)
    assert (judged.clip_share, judged.threshold, judged.steps) == (0.5, 1.0 if sgd.threshold else None, 400)
    assert judged.sentence.startswith(
        "Optimizer 0 (Adam): Clipping at 1.0 bound on 100 % of 200 steps: it makes all steps about equally long "
        "(gradients usually times 0.11), not rare ones shorter"
    )
    assert "Optimizer 1 (SGD): No clipping in 200 steps." in judged.sentence
    assert judged.spike_share == 0  # neither half is a spike of the other


def test_one_of_several_that_diverged_is_enough():
    record = gan()
    record = changed(record, lambda step: step.update(loss=None), slice(-1, None))
    assert verdict(record).diverged
    assert verdict(make_record(meta=record.meta, steps=[*record.steps, record.steps[0] | {"i": 400}])).diverged


def test_a_record_is_judged_once():
    record = gan()
    assert verdict(record) is verdict(record)
    assert verdict(replace(record)) is not verdict(record)
    assert verdict(replace(record, steps=[])).steps == 0


def test_one_optimizer_among_several_that_steps_alone_is_no_part():
    record = gan()
    alone = [step for step in record.steps if step["optimizer"] == 1]
    judged = verdict(make_record(meta=record.meta, steps=alone))
    assert judged.parts == ()
    assert judged.sentence.startswith("No clipping in 200 steps.")


def test_parts_share_events_and_tensors_by_step_and_keep_what_has_no_optimizer():
    record = gan(4)
    record.steps.append({"t": "step", "i": 4, "norm": 1.0})
    record.steps.append({"t": "step", "i": 5, "norm": 1.0, "optimizer": 7})
    record.events.extend({"t": "event", "i": i} for i in range(6))
    record.tensors.extend({"t": "tensors", "i": i, "norm": [1.0]} for i in range(0, 6, 2))
    parts = by_optimizer(record)
    assert [part.label for part in parts] == [
        "optimizer 0 (Adam)", "optimizer 1 (SGD)", "optimizer 7 (that came later)",
    ]  # fmt: skip
    assert [[event["i"] for event in part.record.events] for part in parts] == [[0, 2, 4], [1, 3], [5]]
    assert [len(part.record.tensors) for part in parts] == [3, 0, 0]
    assert [part.record.meta["optimizers"] for part in parts] == [["Adam"], ["SGD"], []]


@pytest.mark.parametrize("width", [1, 7, 50])
def test_window_means_are_those_of_each_window_whatever_came_before(width):
    generator = random.Random(0)
    values = [generator.choice([1.0, -1.0]) * 10.0 ** generator.uniform(-300, 308) for _ in range(120)]
    values[10], values[60] = 1.7e308, None
    values += [2.04] * 100
    windows = [values[end - width : end] for end in range(width, len(values) + 1)]
    expected = [None if None in w else float(sum(map(Fraction, w)) / width) for w in windows]
    found = window_means(values, width)
    assert [mean is None for mean in found] == [mean is None for mean in expected]
    assert [m for m in found if m is not None] == pytest.approx(
        [m for m in expected if m is not None], rel=1e-15, abs=0
    )
    assert found[-1] == pytest.approx(2.04, rel=1e-15)
