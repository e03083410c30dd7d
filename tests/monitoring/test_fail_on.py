"""`gradguard report --fail-on`: what a build is told about a run."""

import math
import re

import pytest
from synthetic import log_normal, make_record, steps_of

from gradguard.cli import main
from gradguard.errors import CommandError
from gradguard.monitoring.judge.conditions import QUANTITIES, holding, parse_conditions
from gradguard.monitoring.record.file import RecordWriter

NORMS = [50 * norm if i % 100 == 50 else norm for i, norm in enumerate(log_normal(400))]


def steps(count=400, **more):
    lines = steps_of(NORMS[:count], loss=2.0, threshold=1.0, rule="norm")
    for line in lines:
        line |= {"coefficient": min(1.0, 1.0 / line["norm"])} | more
    return lines


def record_of(lines, **parts):
    meta = {"t": "meta", "params": [{"name": name} for name in "abc"]}
    return make_record(**({"meta": meta, "steps": lines} | parts))


SICK = steps()
SICK[7] |= {"norm": None, "nonfinite": 2, "loss": None}
SICK[9] |= {"skipped": True}
MEDIAN = ["median_norm<2: median_norm is 0.9853", "median_norm!=1: median_norm is 0.9853"]
SCALED = steps()  # a GradScaler that finds its scale: two overflows, both left out
for place in (0, 40):
    SCALED[place] |= {"norm": None, "nonfinite": 3, "amp_scale": 65536.0, "skipped": True}
GUARDED = steps()
GUARDED[7] |= {"norm": None, "nonfinite": 2, "skipped": True}  # by a guard, without a loss scale
LOCKED = steps_of([3.0] * 200, threshold=1.0, coefficient=1 / 3)
ZEROS = [{"t": "tensors", "i": i, "norm": [0.0, 0.0 if i >= 20 else 1.0, 1.0]} for i in range(40)]
DEAD = "the gradient of b was exactly 0 on 20 recorded steps"
END = {"t": "end", "steps": 400, "wall": 10.0, "overhead_ms": 200.0}


@pytest.mark.parametrize(
    ("text", "record", "said"),
    [
        ("faulty_steps>0", record_of(SICK), ["faulty_steps>0: faulty_steps is 1"]),
        ("faulty_steps>1", record_of(SICK), []),
        ("faulty_steps>0,nonfinite,errors>0,warnings>0", record_of(SCALED), []),
        ("faulty_steps>0,skipped_steps==2", record_of(SCALED), ["skipped_steps==2: skipped_steps is 2"]),
        ("faulty_steps>0", record_of(GUARDED), ["faulty_steps>0: faulty_steps is 1"]),
        ("skipped_steps==1", record_of(SICK), ["skipped_steps==1: skipped_steps is 1"]),
        ("clip_share > 40%, clip_share<=0.4", record_of(steps()), ["clip_share>0.4: clip_share is 0.485"]),
        ("clip_share>0", record_of(steps_of(NORMS)), []),
        ("max_norm>=40", record_of(steps()), [f"max_norm>=40: max_norm is {max(NORMS):.4g}"]),
        ("max_norm>1e6", record_of(SICK), ["max_norm>1e+06: max_norm is inf"]),
        ("median_norm<2,median_norm!=1", record_of(steps()), MEDIAN),
        ("spike_share>0.5%", record_of(steps()), ["spike_share>0.005: spike_share is 0.01111"]),
        ("drift>2", record_of(steps()), []),
        ("drift>2", record_of(steps_of([1.0] * 200 + [3.0] * 200)), ["drift>2: drift is 3"]),
        ("lock_in_share>0", record_of(LOCKED), ["lock_in_share>0: lock_in_share is 0.505"]),
        ("final_loss>3", record_of(steps()), []),
        ("final_loss>3", record_of(steps(loss=None)), ["final_loss>3: final_loss is inf"]),
        ("overhead_share>1%", record_of(steps(), end=END), ["overhead_share>0.01: overhead_share is 0.02"]),
        ("errors>0", record_of(SICK), ["errors>0: errors is 1"]),
        ("warnings>0", record_of(steps()), []),
        ("errors, warnings", record_of(SICK), ["errors: gradients were not finite on 1 step, first on step 7"]),
        ("nonfinite", record_of(SICK), ["nonfinite: gradients were not finite on 1 step, first on step 7"]),
        ("exploding, vanishing,clipping_always_on", record_of(SICK), []),
        ("exploding==0", record_of(SICK), ["exploding==0: exploding is 0"]),
        ("dead_layer", record_of(steps(), tensors=ZEROS), [f"dead_layer: {DEAD} (and 1 more)"]),
        ("dead_layer>1,dead_layer>2", record_of(steps(), tensors=ZEROS), ["dead_layer>1: dead_layer is 2"]),
        ("amp_scale_collapse", record_of(steps()), []),
        ("errors>0,faulty_steps>0", record_of(SICK), ["errors>0: errors is 1", "faulty_steps>0: faulty_steps is 1"]),
    ],
)  # fmt: skip
def test_conditions_that_hold_are_said_with_what_was_measured(text, record, said):
    assert holding(parse_conditions(text), record) == said


@pytest.mark.parametrize(
    ("quantity", "record"),
    [
        ("faulty_steps", make_record()),
        ("clip_share", make_record()),
        ("errors", make_record()),
        ("lock_in_share", make_record()),
        ("max_norm", record_of([{"t": "step", "i": i, "loss": 1.0} for i in range(50)])),
        ("median_norm", record_of(steps_of([None] * 50))),
        ("spike_share", record_of(steps(10))),
        ("drift", record_of(steps(50))),
        ("final_loss", record_of(steps_of(NORMS))),
        ("overhead_share", record_of(steps())),
        ("exploding", record_of([{"t": "step", "i": i, "loss": 1.0} for i in range(50)])),
        ("amp_scale_collapse", make_record()),
        ("dead_layer", record_of(steps())),
    ],
)
@pytest.mark.parametrize("comparison", [">0", "<0"])
def test_what_was_not_measured_is_neither_true_nor_false(quantity, record, comparison):
    with pytest.raises(CommandError, match=f"run.jsonl has no {quantity} .*: it was not measured, or"):
        holding(parse_conditions(quantity + comparison), record)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "",
            "expected a finding, as in exploding, or a quantity, one of the comparisons > >= < <= == !=, and a number, "
            "as in faulty_steps>0. Known quantities:",
        ),
        ("faulty_steps>0,", "'': expected a finding"),
        ("skipped_steps", "'skipped_steps': expected a number to compare it with, as in skipped_steps>0."),
        ("faulty_steps=0", "'faulty_steps=0': expected a finding"),
        ("faulty_steps>0>1", "'faulty_steps>0>1': expected a finding"),
        ("exploding>", "'exploding>': expected a finding"),
        ("clip_shares>0", "unknown quantity or finding 'clip_shares'. Did you mean clip_share?"),
        (
            "explodes",
            "unknown quantity or finding 'explodes'. Did you mean exploding? Known quantities: faulty_steps, ",
        ),
        ("fly>0", "unknown quantity or finding 'fly'. Known quantities"),
        ("fly", "overhead_share, errors, warnings. Known findings: nonfinite, exploding,"),
        ("faulty_steps>x", "expected a finite number, came 'x'"),
        ("final_loss>inf", "expected a finite number, came 'inf'"),
        ("final_loss<nan", "expected a finite number, came 'nan'"),
    ],
)
def test_a_condition_that_cannot_be_read_lists_what_can(text, words):
    with pytest.raises(CommandError, match=re.escape(words)):
        parse_conditions(text)


@pytest.mark.parametrize(
    "text", [" faulty_steps >= 1e3 ", "drift!=2.5", "overhead_share<-1", "clip_share>.5", "errors==+0"]
)
def test_spellings(text):
    (condition,) = parse_conditions(text)
    assert str(condition).startswith(condition.quantity)


def test_one_optimizer_of_several_is_enough_to_fail():
    mixed = [{"t": "step", "i": i, "norm": 1.0 if i % 2 else 9.0, "optimizer": i % 2, "loss": 1.0} for i in range(400)]
    mixed = [
        line | ({"threshold": 1.0, "coefficient": 1 / line["norm"]} if i % 2 == 0 else {})
        for i, line in enumerate(mixed)
    ]
    record = make_record(meta={"t": "meta", "optimizers": ["Adam", "SGD"]}, steps=mixed)
    assert holding(parse_conditions("clip_share>0.9,faulty_steps>0"), record) == [
        "clip_share>0.9: clip_share of optimizer 0 (Adam) is 1"
    ]
    assert holding(parse_conditions("clip_share>0.9,drift>2,max_norm>8"), record)[1:] == [
        "max_norm>8: max_norm of optimizer 0 (Adam) is 9"
    ]


@pytest.fixture
def records(tmp_path):
    for name, lines in (("well", steps()), ("sick", SICK)):
        with RecordWriter(tmp_path / name / "run.jsonl") as writer:
            writer.write("meta", optimizers=["SGD"])
            for line in lines:
                fields = {key: math.nan if value is None else value for key, value in line.items() if key != "t"}
                writer.write("step", **fields)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "condition", "code", "words"),
    [
        (["well"], "faulty_steps>0", 0, ""),
        (["sick"], "faulty_steps>0", 1, "gradguard: failed: {sick}: faulty_steps>0: faulty_steps is 1"),
        (["well", "sick"], "faulty_steps>0", 1, "{sick}: faulty_steps>0"),
        (["well"], "overhead_share>1", 2, "gradguard: error: --fail-on overhead_share>1: {well} has no overhead_share"),
        (["well"], "fly>1", 2, "Known quantities: faulty_steps, nonfinite_steps,"),
    ],
)
def test_the_exit_code_is_for_a_build(records, capsys, names, condition, code, words):
    paths = {name: str(records / name / "run.jsonl") for name in ("well", "sick")}
    arguments = [paths[name] for name in names]
    assert main(["report", *arguments, "--text", "--fail-on", condition]) == code
    captured = capsys.readouterr()
    assert words.format(**paths) in captured.err
    assert ("verdict:" in captured.out) == ("fly" not in condition)


def test_the_page_is_written_before_the_build_fails(records, capsys):
    assert main(["report", str(records / "sick"), "--fail-on", "faulty_steps>0"]) == 1
    assert (records / "sick" / "run.html").exists()
    capsys.readouterr()


def test_the_help_knows_every_quantity(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    shown = capsys.readouterr().out
    assert all(quantity in shown for quantity in QUANTITIES)
