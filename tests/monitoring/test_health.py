"""Sick runs give the finding, healthy ones give none, and the clippers' own alarm agrees with ours."""

import math
import random
import sys
from collections import Counter

import pytest
import torch
from synthetic import changed, log_normal, make_record, steps_of

from gradguard.clip.lock_in import LockIn
from gradguard.monitoring.judge.detectors import KINDS
from gradguard.monitoring.judge.detectors import loop_faults as loop_setup
from gradguard.monitoring.judge.findings import SEVERITIES
from gradguard.monitoring.judge.health import HealthMonitor, findings, lock_in_share
from gradguard.threshold_rules import LockInAlarm

PARAMS = [{"name": f"layers.{i}.weight", "shape": [8, 8], "numel": 64} for i in range(12)]


def run(norms=(), *, optimizer="SGD", steps=None, **parts):
    meta = {"t": "meta", "optimizers": [optimizer], "params": PARAMS}
    return make_record(**({"meta": meta, "steps": steps_of(list(norms)) if steps is None else steps} | parts))


def clipped(norms, threshold=1.0, rule="norm", **more):
    steps = steps_of(norms, threshold=threshold, rule=rule)
    for step in steps:
        step["coefficient"] = min(1.0, threshold / step["norm"])
    return run(steps=steps, **more)


def lines_of(count, change=lambda i, norms: None, every=5):
    """Per-tensor norms of a calm run, changed on each line."""
    lines = []
    for i in range(0, count, every):
        norms = log_normal(len(PARAMS), seed=i)
        change(i, norms)
        lines.append({"t": "tensors", "i": i, "norm": norms})
    return lines


def zero(*places, since=0, until=10**9):
    def change(i, norms):
        for place in places:
            norms[place] *= not since <= i < until

    return change


CALM = log_normal(600)


def updating(size, of_matrix=None):
    """A run at a rate of 0.1 whose updates have a root mean square of ``size(i, place)`` times that.

    Of one matrix they are 9 parts of weight decay to 1 part of others, and it falls.
    """
    meta = [one | {"weight_decay": 0.1} for one in PARAMS]
    tensors = lines_of(600)
    for line in tensors:
        line["moved"] = [0.1 * size(line["i"], place) for place in range(len(PARAMS))]
        if of_matrix is not None and line["i"] % 50 == 0:
            falling = 8.0 * (1 - 0.01 / 0.9) ** line["i"]
            line["weight"] = [falling if place == of_matrix else 80.0 for place in range(len(PARAMS))]
            line["update"] = [0.01 / 0.9 * falling if place == of_matrix else 0.8 for place in range(len(PARAMS))]
    steps = steps_of(CALM, lr=0.1)
    return run(steps=steps, tensors=tensors, meta={"t": "meta", "optimizers": ["SGD"], "params": meta})


EXPLODES = CALM[:400] + [50 * norm for norm in CALM[400:460]] + CALM[460:]
VANISHES = CALM[:400] + [1e-6 * norm for norm in CALM[400:]]
FAULTS = [
    ("nonfinite", "error", "not finite on 1 step, first on step 7", run([*CALM[:7], None, *CALM[7:]])),
    ("nonfinite", "error", "on 3 steps, first on step 9 (2 times in this run: on steps 9 to 10, 500)",
     run([None if i in (9, 10, 500) else n for i, n in enumerate(CALM)])),
    ("nonfinite", "error", "in layers.3.weight on", run(
        [None if i == 10 else n for i, n in enumerate(CALM)],
        tensors=[{"t": "tensors", "i": 10, "norm": [None if k == 3 else 1.0 for k in range(12)]}])),
    ("nonfinite", "error", "in a, b on", run(
        [None if i == 10 else n for i, n in enumerate(CALM)],
        events=[{"t": "event", "i": 10, "kind": "nonfinite", "params": ["a", "b"]}])),
    ("nonfinite", "error", "the norm before it was 900, 900 times the usual", run([*([1.0] * 300), 30.0, 900.0, None])),
    ("nonfinite", "warning", "all of these steps were skipped",
     run(steps=[*steps_of(CALM), {"t": "step", "i": 600, "norm": None, "nonfinite": 2, "skipped": True}])),
    ("exploding", "error", "10 times above its usual 0.964 for 60 steps from step 400 on, up to 103", run(EXPLODES)),
    ("exploding", "error", "more than 100 times above", run([*([1.0] * 100), *(3.0**k for k in range(40))])),
    ("exploding", "warning", "1,000 times its usual 1.00 on 3 steps, first on step 200, up to 90,000, and nothing",
     run([9e4 if i in (200, 230, 390) else 1.0 for i in range(400)])),
    ("exploding", "warning", "jumped above 1,000,000 times its usual 1.00 on 1 step, first on step 200, up to 1e+30; a",
     clipped([1e30 if i == 200 else 1.0 for i in range(400)], 2.0)),
    ("exploding", "error", "most of it in layers.5.weight", run(steps=[
        step | {"top": [5, 0.9] if i >= 400 else [i % 12, 0.2]} for i, step in enumerate(steps_of(EXPLODES))])),
    ("exploding", "error", "above its usual 1.00 for 34 steps from step 46 on", run(steps=[
        step | {"loss": 2.0 * max(1.0, 1.5 ** (step["i"] - 40))}
        for step in steps_of([1.0] * 40 + [1.5**k for k in range(40)])])),
    ("diverging_loss", "error", "median loss of 20 steps rose from 1.00, its best, to 9.00", run(steps=[
        step | {"loss": 3.0 if step["i"] < 100 else 1.0 if step["i"] < 300 else 9.0} for step in steps_of(CALM)])),
    ("diverging_loss", "error", "from 2.00, its best, to 64.0 from step 40 on", run(steps=[
        step | {"loss": 2.0 * 2.0 ** min(5, step["i"] // 20)} for step in steps_of(CALM)])),
    ("diverging_loss", "warning", "from 1.00, its best, to 3.50", run(steps=[
        step | {"loss": 5.0 if step["i"] < 100 else 1.0 if step["i"] < 300 else 3.5}
        for step in steps_of([norm * (8 if i >= 300 else 1) for i, norm in enumerate(CALM)])])),
    ("spike", "info", "was 20.0 times that of the steps around it on step 300, mostly in layers.7.weight", run(steps=[
        step | {"top": [7, 0.8]} for step in steps_of([20.0 if i == 300 else 1.0 for i in range(600)])])),
    ("spike", "info", "2 times in this run: on steps 100, 300", run(
        [20.0 if i in (100, 300) else 1.0 for i in range(600)])),
    ("recurring_spikes", "warning", "stood out from the steps around it 13 times, first on step 29",
     run([900.0 if i % 30 == 29 else 1.0 for i in range(400)])),
    ("recurring_spikes", "warning", "first on step 60, and was up to 16.0 times theirs", run(
        [16.0 if i % 60 == 0 and i else 1.0 for i in range(600)])),
    ("recurring_spikes", "info", "a clip bound on all of them", clipped(
        [16.0 if i % 60 == 0 and i else 1.0 for i in range(600)], 2.0)),
    ("detached_layer", "warning", "layers.4.weight has had no gradient at all since step 300", run(
        CALM, tensors=[line | ({"absent": [4]} if line["i"] >= 300 else {})
                       for line in lines_of(600, zero(4, since=300))])),
    ("vanishing", "warning", "below 0.0001, 0.0001 of the usual norm, for 200 steps from step 400 on",
     run([1.0] * 400 + [1e-6] * 200)),
    ("vanishing", "error", "exactly 0 for 100 steps from step 0 on", run([0.0] * 100)),
    ("vanishing", "warning", "of layers.2.weight is about 9e-10 of the usual", run(CALM, tensors=lines_of(
        600, lambda i, norms: norms.__setitem__(2, 1e-9)))),
    ("dead_layer", "warning", "layers.4.weight, layers.7.weight was exactly 0 on 60 recorded",
     run(CALM, tensors=lines_of(600, zero(4, 7, since=300)))),
    ("dead_layer", "warning", "exactly 0 on 80 recorded steps", run(  # on steps 100 to 495, one after the other
        CALM, tensors=lines_of(600, lambda i, norms: (zero(4, since=100, until=400)(i, norms),
                                                      zero(7, since=200, until=500)(i, norms))))),
    ("dead_layer", "info", "from the first one on", run(CALM, tensors=lines_of(600, zero(4)))),
    ("amp_scale_collapse", "error", "fell to 0.5 at step 600",
     run(steps=[*steps_of(CALM, amp_scale=2.0), {"t": "step", "i": 600, "norm": 1.0, "amp_scale": 0.5}])),
    ("amp_scale_collapse", "error", "12 steps in a row were skipped",
     run(CALM, events=[{"t": "event", "i": 40, "kind": "amp_skip"}] * 12)),
    ("amp_scale_collapse", "error", "steps in a row were skipped", run(steps=[
        *steps_of(CALM), *[{"t": "step", "i": 600 + k, "norm": None, "nonfinite": 1, "skipped": True, "amp_scale": 9.0}
                           for k in range(15)]])),
    ("clipping_always_on", "warning", "on 100 % of 600 steps: it acts like a learning rate 0.05 times as large",
     clipped([20.0] * 600)),
    ("clipping_always_on", "info", "usually multiplied gradients by 0.05", clipped([20.0] * 600, optimizer="AdamW")),
    ("clipped_twice", "warning", "the first (norm at 5.0) bound on 10 %, the second (AdaGC) bound on 20 %",
     run(steps=[{"t": "step", "i": i, "norm": 1.0, "coefficient": 1 - 0.1 * (i % 10 == 0) - 0.1 * (i % 5 == 0),
                 "rule": "norm", "threshold": 5.0,
                 "clips": [["norm", 5.0, 1 - 0.1 * (i % 10 == 0)], ["AdaGC", None, 1 - 0.1 * (i % 5 == 0)]]}
                for i in range(300)])),
    ("clipped_twice", "warning", "the script's own norm=1.0 bound on 50 %, --clip norm=4.0 bound on 0 %; "
     "--clip norm=4.0 had no effect; --clip norm=4.0 only got what the script's own norm=1.0 had left",
     make_record(meta={"t": "meta", "clip": "norm=4", "optimizers": ["SGD"]}, steps=[
         {"t": "step", "i": i, "norm": 1.0, "coefficient": 1 - 0.5 * (i % 2), "rule": "norm", "threshold": 1.0,
          "clips": [["norm", 1.0, 1 - 0.5 * (i % 2)], ["norm", 4.0, 1.0]]} for i in range(300)])),
    ("update_spike", "info", "weights by up to 3.00 times as much as usual at their learning rate, from step 400 on",
     run(steps=[step | {"lr": 0.1, "update": 3e-3 if 400 <= step["i"] < 403 else 1e-3} for step in steps_of(CALM)])),
    ("update_rule", "warning", "the update of all weights together has the same length", updating(
        lambda i, place: math.sqrt(0.5 + 0.2 * math.sin(i) * (-1) ** place))),
    ("update_rule", "warning", "root mean square of 1.00 times the learning rate or more, and never less", updating(
        lambda i, place: max(1.0, 1 + 0.3 * math.sin(1.7 * i + place)))),
    ("update_rule", "warning", "each step is 0.150 times the step that the optimizer's rule makes of its", run(
        steps=[step | {"lr": 0.1, "update": 1e-3, "over_rule": 0.15} for step in steps_of(CALM)])),
    ("update_rule", "warning", "90 % of each step of layers.2.weight is weight decay, and the weights shrink with it",
     updating(lambda i, place: 1.0, of_matrix=2)),
    ("logits_grow", "warning", "the largest attention logit grew from 2.20 to 96.4, in blocks.1.attn", run(steps=[
        step | {"logit": 2 * 1.01 ** step["i"], "logit_of": "blocks.1.attn"}
        for step in steps_of(CALM)][:400])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "severity", "words", "record"), FAULTS)
def test_a_fault_is_found_and_said_with_numbers(kind, severity, words, record):
    found = {one.kind: one for one in findings(record)}
    assert set(found) == {kind}, found
    assert words in found[kind].message
    assert found[kind].severity == severity
    assert len(found[kind].advice) > 20


def test_every_kind_has_a_fault_above():
    elsewhere = {kind.name for kind in loop_setup.KINDS}  # in test_setup_findings.py
    assert {kind for kind, *_ in FAULTS} == set(KINDS) - elsewhere


@pytest.mark.parametrize("norms", [[2.0] * 600 + [0.9] * 1000, [0.6] * 900 + [1.15] * 700])
def test_a_threshold_that_bound_for_a_while_is_no_fault(norms):
    assert findings(clipped(norms)) == []


HEALTHY = {
    "calm": lambda n, rng: [rng.gauss(0, 0.3) for _ in range(n)],
    "wild": lambda n, rng: [rng.gauss(0, 1.0) for _ in range(n)],
    "decaying": lambda n, rng: [math.log(5) - 4 * i / n + rng.gauss(0, 0.3) for i in range(n)],
    "fast at first": lambda n, rng: [4 * math.exp(-i / 30) + rng.gauss(0, 0.3) for i in range(n)],
    "warming up": lambda n, rng: [2.3 * min(i / 100, 1) + rng.gauss(0, 0.3) for i in range(n)],
    "few spikes": lambda n, rng: [rng.gauss(0, 0.3) + math.log(80) * (rng.random() < 0.003) for _ in range(n)],
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_raises_no_alarm(kind, seed):
    for count in (1, 30, 150, 300, 1500):
        rng = random.Random(1000 * seed + count)
        norms = [math.exp(value) for value in HEALTHY[kind](count, rng)]
        tensors = [
            {"t": "tensors", "i": i, "norm": [math.exp(rng.gauss(0, 1)) for _ in PARAMS]} for i in range(0, count, 10)
        ]
        steps = [
            step | {"loss": 3 * math.exp(-2 * step["i"] / count), "top": [rng.randrange(12), rng.random()]}
            for step in steps_of(norms, amp_scale=65536.0)
        ]
        assert [one for one in findings(run(steps=steps, tensors=tensors)) if one.kind != "spike"] == []
        if kind in ("calm", "few spikes"):  # with a clip that guards
            guard = sorted(norms)[-max(1, count // 100)] * 0.999
            for step in steps:
                step |= {"threshold": guard, "coefficient": min(1.0, guard / step["norm"]), "rule": "norm"}
            assert findings(run(steps=steps, tensors=tensors)) == []


@pytest.mark.parametrize(
    "record",
    [
        make_record(),
        run(),
        run(steps=[{"t": "step", "i": i} for i in range(500)]),
        run([0.5]),
        run(CALM, tensors=[{"t": "tensors", "i": 0, "norm": [1.0]}] * 20),
        run(CALM, tensors=lines_of(45, zero(4))),
        run(CALM, tensors=[line | {"absent": [4] * (k % 2)} for k, line in enumerate(lines_of(600, zero(4)))]),
        run(CALM, tensors=lines_of(600, lambda i, norms: zero(i // 5 % 12)(i, norms))),
        run(steps=[{"t": "step", "i": i, "norm": 1.0, "loss": 1.0} for i in range(400)]
            + [{"t": "step", "i": i, "norm": 1e-6, "loss": 0.01} for i in range(400, 600)]),
        run(steps=steps_of(CALM, top=[5, 0.97]), meta={"t": "meta", "params": PARAMS[:6]}),
        run(steps=steps_of(CALM, top=[5, 0.97]), meta={"t": "meta", "params": [
            p | {"numel": 10**6 if i == 5 else 64} for i, p in enumerate(PARAMS)]}),
        run(steps=steps_of(CALM, top=[-1, 0.99])),
        run(CALM, events=[{"t": "event", "i": i, "kind": "amp_skip"} for i in range(0, 600, 50)]),
        run(steps=[*steps_of(CALM), {"t": "step", "i": 600, "norm": None, "nonfinite": 1, "skipped": True,
                                     "amp_scale": 1024.0}]),
        run(CALM, meta={"t": "meta", "params": [{"name": f"b{i}", "shape": [9], "numel": 9} for i in range(12)]},
            tensors=lines_of(600, lambda i, norms: norms.__setitem__(2, 1e-9))),
        run([1e-3] * 20 + [1e-2] * 20 + [1.0] * 20 + [5.0] * 100),  # a warm-up: the first steps are not what is usual
        run([20.0, 9.0, 4.0, 2.0] + [1.0] * 200),  # nor are the first norms a spike
        clipped([20.0] * 49),
        clipped([9e4 if i in (200, 230, 390) else 0.9 for i in range(400)]),
        clipped(CALM[:199], 9.0),
    ],
)  # fmt: skip
def test_what_looks_like_a_fault_and_is_none(record):
    assert findings(record) == []


def told(record):
    monitor, found = HealthMonitor(record.meta), []
    for step in record.steps:
        found += [(step["i"], one) for one in monitor.see(step)]
        for line in record.tensors:
            if line["i"] == step["i"]:
                found += [(line["i"], one) for one in monitor.see(line)]
    return found


@pytest.mark.parametrize(
    ("record", "steps"),
    [
        (run(EXPLODES), [409]),
        (run(VANISHES), [419]),
        (run([None if i in (9, 10, 60, 300) else n for i, n in enumerate(CALM)]), [9, 300]),
        (run(CALM, tensors=lines_of(600, zero(4, since=100))), [145]),
        (
            run(CALM, tensors=lines_of(600, lambda i, n: (zero(4, since=100)(i, n), zero(9, since=300)(i, n)))),
            [145, 345],
        ),
        (run(CALM, tensors=lines_of(600, zero(4, since=100, until=300))), [145]),
        (run(steps=steps_of(CALM, amp_scale=0.25)), [0]),
    ],
)
def test_each_episode_is_told_once_as_it_happens(record, steps):
    assert [i for i, _ in told(record)] == steps


def test_a_live_line_may_hold_nan_where_a_record_holds_null():
    monitor = HealthMonitor({"params": PARAMS})
    assert monitor.see({"i": 0, "norm": 1.0, "loss": math.nan}) == []
    (found,) = monitor.see({"i": 1, "norm": math.inf, "loss": math.inf})
    monitor.see({"t": "tensors", "i": 1, "norm": [math.nan, *([1.0] * 11)]})
    assert (found.kind, found.first_step) == ("nonfinite", 1)
    assert monitor.episodes[0].finding().params == ("layers.0.weight",)


def test_a_gan_is_judged_optimizer_by_optimizer():
    steps = []
    for i in range(1200):
        calm = {"norm": CALM[i // 2], "optimizer": 0}
        clip = {"norm": 20.0, "optimizer": 1, "threshold": 1.0, "coefficient": 0.05, "rule": "norm"}
        steps.append({"t": "step", "i": i} | (clip if i % 2 else calm))
    meta = {"t": "meta", "optimizers": ["SGD", "Adam"], "params": PARAMS}
    # The lines of one optimizer hold zeros for the parameters of the other.
    tensors = lines_of(1200, lambda i, norms: zero(*(range(6) if i % 2 else range(6, 12)))(i, norms))
    (found,) = findings(make_record(meta=meta, steps=steps, tensors=tensors))
    assert (found.kind, found.severity, found.optimizer) == ("clipping_always_on", "info", 1)


@pytest.mark.parametrize("own", [False, True])
def test_the_one_loss_of_two_optimizers_is_judged_and_losses_of_their_own_are_not(own):
    steps = [{"t": "step", "i": i, "norm": CALM[i // 2], "optimizer": i % 2} for i in range(1200)]
    for step in steps if own else steps[::2]:
        step["loss"] = 9.0 if step["i"] >= 600 else 1.0 + 2.0 * (step["i"] < 100)
    record = make_record(meta={"t": "meta", "optimizers": ["Muon", "AdamW"], "params": PARAMS}, steps=steps)
    found = [] if own else [("diverging_loss", 0)]
    assert [(one.kind, one.optimizer) for one in findings(record) if one.kind == "diverging_loss"] == found
    told = [one.kind for monitor in [HealthMonitor(record.meta)] for step in steps for one in monitor.see(step)]
    assert ("diverging_loss" in told) is not own


def test_findings_are_sorted_and_repeatable():
    norms = [None if i == 500 else 60 * n if 300 <= i < 330 else n for i, n in enumerate(CALM)]
    record = run(norms, tensors=lines_of(600, zero(4, since=100)))
    found = findings(record)
    assert [one.kind for one in found] == ["exploding", "nonfinite", "dead_layer"]
    assert [SEVERITIES.index(one.severity) for one in found] == [0, 0, 1]
    assert found == findings(record)


@pytest.mark.parametrize("seed", range(3))
def test_the_alarm_is_the_clippers(seed):
    rng, ours, theirs = random.Random(seed), LockInAlarm(window=20), LockIn(window=20)
    verdicts = []
    for i in range(150):
        threshold = 1.0 + 0.008 * (i // 40) + (rng.random() if i > 120 else 0.0)
        binds, finite = rng.random() < 0.6, rng.random() < 0.9
        expected = bool(theirs.follow(torch.tensor(binds), threshold, torch.tensor(finite)))
        if finite:
            verdicts.append(ours.follow(binds, threshold))
            assert verdicts[-1] == expected
    assert True in verdicts
    assert False in verdicts[20:]


def test_the_share_of_steps_in_lock_in():
    assert lock_in_share(clipped([20.0] * 199)) == 100 / 199
    assert lock_in_share(run(CALM)) == 0
    assert lock_in_share(run()) is None


def test_a_step_costs_the_same_few_calls_however_long_the_run_is():
    record = clipped(CALM, 1.5)
    monitor, calls = HealthMonitor(record.meta), []
    for _ in range(10):
        counted = Counter()
        sys.setprofile(lambda frame, event, argument, counted=counted: counted.update([event]))
        try:
            for step in record.steps:
                monitor.see(step)
        finally:
            sys.setprofile(None)
        calls.append((counted["call"] + counted["c_call"]) / len(record.steps))
    assert max(calls) < 100
    assert calls[-1] < 1.2 * calls[1]


def test_one_optimizer_of_several_that_steps_alone_is_named_by_none():
    record = clipped([2.0] * 600 + [0.9] * 1000)
    record = changed(record, lambda step: step.update(optimizer=1))
    alone = make_record(meta=record.meta | {"optimizers": ["SGD", "Adam"]}, steps=record.steps)
    assert findings(alone) == []
    steps = [step | {"norm": 20.0, "coefficient": 0.05} for step in record.steps]
    (found,) = findings(make_record(meta=alone.meta, steps=steps))
    assert (found.kind, found.severity, found.optimizer) == ("clipping_always_on", "info", None)


def test_a_rule_without_a_threshold_yet_has_none_that_could_lock_in():
    steps = steps_of([1.0] * 60, threshold=None, rule="median", coefficient=1.0)
    steps += steps_of([1.0] * 99, threshold=0.5, rule="median", coefficient=0.5)
    for i, step in enumerate(steps):
        step["i"] = i
    assert lock_in_share(run(steps=steps)) == 0
    assert [one.kind for one in findings(run(steps=steps))] == ["clipping_always_on"]


def test_a_rule_that_says_only_its_coefficient_is_judged_by_it():
    (found,) = findings(run(steps=steps_of(CALM, coefficient=0.25, rule="adagc")))
    assert "acts like a learning rate 0.25 times as large" in found.message
