"""Replayed rules against the clippers that they stand for, step by step."""

import io
import math
import random

import pytest
import torch
from rich.console import Console
from synthetic import log_normal, make_record, steps_of

import gradguard as gg
from gradguard.cli import main
from gradguard.errors import InvalidValueError
from gradguard.monitoring.judge.recommend import Recommendation
from gradguard.monitoring.judge.rule_replay import COUNTERFACTUAL, what_if
from gradguard.monitoring.record.file import RecordWriter
from gradguard.monitoring.show.replay_table import print_replay
from gradguard.named_rules import replayed_rule
from gradguard.threshold_rules import LockInAlarm, PerTensor, median_distance, upper_median_distance

CALM = [40 * n if i % 37 == 36 else n for i, n in enumerate(log_normal(150, spread=0.2))]
CALM[45] = 0.0
DECAY = [n * math.exp(-i / 20) for i, n in enumerate(log_normal(80, centre=3.0, spread=0.2))]
NORMS = [*CALM, *log_normal(150, centre=3.0, spread=0.1), *DECAY, *([0.05] * 30), 0.0, 1e-9, 1e30, 0.05]
RULES = {
    "norm=0.7": lambda: gg.ClipByGlobalNorm(0.7),
    "median": gg.ClipByMedian,
    "autoclip": gg.AutoClip,
    "autoclip=90": lambda: gg.AutoClip(90),
    "zclip": gg.ZClip,
    "zclip=inf": lambda: gg.ZClip(ceiling=None),
    "clip_fraction=0.05": lambda: gg.ClipFraction(0.05),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
def test_coefficients_and_lock_in_are_those_of_the_clipper(rule):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    twin, clipper, alarm = replayed_rule(rule)(), RULES[rule](), LockInAlarm()
    for i, norm in enumerate(NORMS):
        parameter.grad = torch.tensor([norm], dtype=torch.float64)
        result = clipper([parameter])
        coefficient, threshold = twin.step(norm)
        assert coefficient == pytest.approx(float(result.coefficient), rel=1e-9, abs=0), i
        assert threshold == pytest.approx(float(result.threshold), rel=1e-9, abs=0), i
        assert alarm.follow(coefficient < 1, threshold) == bool(result.locked_in), i


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", RULES)
def test_steps_that_are_skipped_or_not_finite_leave_no_trace(rule):
    norms = log_normal(150, spread=0.5)
    dirty = steps_of(norms)
    for i, step in enumerate(dirty):
        step["i"] = 2 * i
    bad = [{"t": "step", "norm": None, "nonfinite": 1}, {"t": "step", "norm": 1e9, "skipped": True}]
    mixed = [line for i, step in enumerate(dirty) for line in (step, bad[i % 2] | {"i": 2 * i + 1})]
    (clean,) = what_if(make_record(steps=steps_of(norms)), [rule])
    (row,) = what_if(make_record(steps=mixed), [rule])
    assert row == clean


VARIANTS = {
    "norm=inf": lambda: gg.ClipByGlobalNorm(math.inf),
    "median=3": lambda: gg.ClipByMedian(k=3),
    "autoclip=0": lambda: gg.AutoClip(0),
    "autoclip=100": lambda: gg.AutoClip(100),
    "zclip=2.5": lambda: gg.ZClip(ceiling=2.5),
    "clip_fraction=0.5": lambda: gg.ClipFraction(0.5),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", VARIANTS)
def test_the_number_after_a_rule_is_the_clipper_s(rule):
    parameter, twin, clipper = (
        torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)),
        replayed_rule(rule)(),
        VARIANTS[rule](),
    )
    for i, norm in enumerate(CALM[:60]):
        parameter.grad = torch.tensor([norm], dtype=torch.float64)
        assert twin.step(norm)[0] == pytest.approx(float(clipper([parameter]).coefficient), rel=1e-9, abs=0), i


def test_the_clippers_forget_nonfinite_steps_as_the_replay_does():
    parameter, twin, clipper = torch.nn.Parameter(torch.zeros(1)), replayed_rule("median")(), gg.ClipByMedian()
    for i, norm in enumerate(log_normal(60)):
        parameter.grad = torch.tensor([math.nan if i % 7 == 3 else norm])
        result = clipper([parameter])
        if i % 7 != 3:
            assert twin.step(float(result.norm))[0] == pytest.approx(float(result.coefficient), rel=1e-6)


def tensor_norms(steps, seed=0):
    """Three tensors: one idle at first, one that has no gradient now and then."""
    generator = random.Random(seed)
    lines = []
    for i in range(steps):
        norms = [weight * math.exp(generator.gauss(0, 0.3)) for weight in (0.2, 1.0, 3.0)]
        norms[0] *= i >= 30
        norms[1] *= i % 11 != 4
        norms[2] *= 40 if i % 50 == 49 else 1
        lines.append(norms)
    return lines


@pytest.mark.parametrize(("rule", "absolute"), [("adagc", 1.0), ("adagc=inf", math.inf), ("adagc=4", 4.0)])
def test_adagc_from_per_tensor_norms_is_the_clipper(rule, absolute):
    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    named, clipper, twin = list(zip("abc", parameters, strict=True)), gg.AdaGC(absolute=absolute), replayed_rule(rule)()
    assert isinstance(twin, PerTensor)
    for i, norms in enumerate(tensor_norms(160)):
        for parameter, norm in zip(parameters, norms, strict=True):
            parameter.grad = torch.tensor([norm], dtype=torch.float64) if norm else None
        expected = float(clipper(named).coefficient)
        assert twin.step(norms)[0] == pytest.approx(expected, rel=1e-9), i


def test_adagc_needs_every_step():
    lines = tensor_norms(120)
    steps = steps_of([math.hypot(*norms) for norms in lines])
    tensors = [{"t": "tensors", "i": i, "norm": norms} for i, norms in enumerate(lines)]
    (full,) = what_if(make_record(steps=steps, tensors=tensors), ["adagc=inf"])
    assert full.clip_share > 0.1
    (row,) = what_if(make_record(steps=steps, tensors=tensors[::2]), ["adagc"])
    assert (row.clip_share, row.lock_in) == (None, None)
    assert "gradguard run --every 1" in row.note
    steps[7] |= {"norm": None, "nonfinite": 1}
    tensors[7]["norm"] = [None, 1.0, 2.0]
    (row,) = what_if(make_record(steps=steps, tensors=tensors), ["adagc"])
    assert row.clip_share is not None


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(20))
def test_the_median_of_distances_is_found_in_logarithmic_time(seed):
    generator = random.Random(seed)
    values = sorted(generator.choice([generator.gauss(0, 1), 0.0, 1.0]) for _ in range(1 + seed))
    for middle in (0.0, generator.gauss(0, 1), values[0] - 1, values[-1] + 1):
        slow = sorted(abs(value - middle) for value in values)
        expected = (slow[(len(slow) - 1) // 2] + slow[len(slow) // 2]) / 2
        assert median_distance(values, middle) == pytest.approx(expected, abs=1e-12)
        assert upper_median_distance(values, middle) == slow[len(slow) // 2]


def test_the_numbers_of_a_row_by_hand():
    # 200 steps, of which the first 20 are a warm-up that is not judged: a spike there counts nowhere.
    norms = [1.0] * 200
    norms[5], norms[100], norms[150] = 100.0, 10.0, 4.0
    row = what_if(make_record(steps=steps_of(norms)), ["norm=5"])[0]
    assert (row.steps, row.clip_share, row.spikes, row.caught) == (180, 1 / 180, 2, 1)
    assert row.largest_passed == pytest.approx(5.0)
    assert row.median_coefficient == pytest.approx(0.5)
    assert row.lock_in == 0
    (low,) = what_if(make_record(steps=steps_of(norms)), ["norm=0.5"])
    assert low.clip_share == 1
    assert low.lock_in == pytest.approx(101 / 180)


@pytest.mark.parametrize("steps", [[], steps_of([None] * 50), [{"t": "step", "i": 0, "loss": 1.0}]])
def test_nothing_to_replay_is_said(steps):
    for row in what_if(make_record(steps=steps)):
        assert row.steps == 0
        assert row.clip_share is None
        assert "no usable norm" in row.note


def test_each_optimizer_has_rows_of_its_own():
    steps = [
        {"t": "step", "i": i, "norm": 1.0 if i % 2 else 100.0, "optimizer": i % 2} for i in range(400)
    ]  # fmt: skip
    record = make_record(meta={"t": "meta", "optimizers": ["Adam", "SGD"]}, steps=steps)
    rows = what_if(record, ["norm=10"])
    assert [(row.optimizer, row.clip_share) for row in rows] == [(0, 1.0), (1, 0.0)]
    console = Console(file=io.StringIO(), width=120)
    print_replay(record, rows, console)
    assert "optimizer 1 (SGD): 180 usable steps" in console.file.getvalue()


def test_the_default_rules_hold_the_recommended_one(monkeypatch):
    decision = Recommendation("constant", "Clip at 3.", "", threshold=3.0, rule="norm=3.0")
    monkeypatch.setattr("gradguard.monitoring.judge.rule_replay.recommend", lambda record: decision)
    rows = what_if(make_record(steps=steps_of(log_normal(600, centre=30.0))))
    names = [row.rule for row in rows]
    assert names == [
        *("norm=0.5", "norm=1", "norm=2", "norm=3", "norm=5"),
        *("median", "autoclip", "zclip=inf", "clip_fraction=0.05", "adagc=inf"),
    ]
    assert all(replayed_rule(name) for name in names)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("value=0.5", "needs single elements, but a record holds only norms, so it cannot be replayed"),
        ("adaptive=0.01", "cannot be replayed"),
        ("fly", r"unknown rule 'fly'; expected one of norm=1\.0, median"),
        ("norm=0", "above 0"),
        ("norm", r"a number above 0 after norm=, as in norm=1\.0"),
        ("norm=-1", "above 0"),
        ("norm=nan", "above 0"),
        ("norm=x", "above 0"),
        ("median=", "a number from 0"),
        ("autoclip=101", "a number from 0 to 100"),
        ("clip_fraction", r"as in clip_fraction=0\.05"),
        ("clip_fraction=1", r"as in clip_fraction=0\.05"),
        ("zclip=0", "above 0"),
    ],
)
def test_a_rule_that_cannot_be_meant(rule, words):
    with pytest.raises(InvalidValueError, match=words):
        what_if(make_record(), [rule])


def write(path, norms, **more):
    with RecordWriter(path) as writer:
        writer.write("meta", optimizers=["SGD"])
        for step in steps_of(norms, **more):
            writer.write("step", **{key: value for key, value in step.items() if key != "t"})
    return path


def test_the_command_prints_a_table_and_its_caveat(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "run.jsonl", [50 * n if i % 50 == 9 else n for i, n in enumerate(log_normal(300))])
    assert main(["replay", str(path), "--rule", "median", "--rule", "norm=1.0", "--rule", "adagc"]) == 0
    shown = capsys.readouterr().out
    for words in ("270 usable steps", "median", "norm=1.0", "5 of 5", "adagc: needs the norm of each tensor"):
        assert words in shown
    assert COUNTERFACTUAL.split(":")[0] in shown


def test_the_command_refuses_a_clip_by_value(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", [1.0] * 30)
    assert main(["replay", str(path), "--rule", "value=0.5"]) == 2
    assert "cannot be replayed" in capsys.readouterr().err
