"""`gradguard tune`: which rule trains best, judged on numbers; what is run, by a stand-in for `gradguard run`."""

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import make_record, steps_of

from forked_python import run_python
from gradguard.cli import main
from gradguard.monitoring.judge.recommend import Recommendation
from gradguard.monitoring.record.file import read_record
from gradguard.monitoring.tune import trials
from gradguard.monitoring.tune.candidates import candidates
from gradguard.monitoring.tune.score import TrialRun, diverged_at, last_loss, mean_of, scores, student_t
from gradguard.monitoring.tune.show import sentence


def run(rule: str, seed: int, last: float | None, *, steps: int = 40, **more) -> TrialRun:
    losses = [1.0] * (steps - steps // 10) + [last] * (steps // 10)
    return TrialRun(rule, seed, losses, **more)


def runs_of(**last: list[float | None]) -> list[TrialRun]:
    """Runs of rules by the last loss of each seed."""
    return [run(rule, seed, loss) for rule, losses in last.items() for seed, loss in enumerate(losses, start=1)]


# Two-sided 95 %, from printed tables.
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "expected"), QUANTILES.items())
def test_student_t_is_that_of_the_tables(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, abs=6e-4)


def test_an_interval_holds_what_it_promises():
    generator, held = random.Random(0), 0
    for _ in range(2000):
        found = mean_of([generator.gauss(3.0, 2.0) for _ in range(3)])
        held += abs(found.value - 3.0) <= found.margin
    assert 0.93 < held / 2000 < 0.97


RANKINGS = {
    "a clear winner": (
        {"none": [0.5, 0.6, 0.7], "median": [0.4, 0.5, 0.6]},
        [("median", False), ("none", True)],
        "median wins: 0.500 ± 0.25 against 0.600 ± 0.25 without a clip.",
    ),
    "no clip wins": (
        {"none": [0.4, 0.5, 0.6], "norm=0.1": [0.8, 0.9, 1.1]},
        [("none", False), ("norm=0.1", True)],
        "no clip wins: 0.500 ± 0.25 against 0.933 ± 0.38 with norm=0.1.",
    ),
    "one cannot be told": (
        {"none": [0.9, 0.8, 0.9], "median": [0.4, 0.5, 0.6], "norm=1": [0.5, 0.4, 0.66]},
        [("median", False), ("norm=1", False), ("none", True)],
        "median is among the best: 0.500 ± 0.25 against 0.867 ± 0.14 without a clip; the experiment does not separate "
        "it from norm=1.",
    ),
    "none can be told": (
        {"none": [0.4, 0.6], "median": [0.5, 0.45]},
        [("median", False), ("none", False)],
        "The experiment does not separate median and no clip: median has 0.475 ± 0.32.",
    ),
    "the same runs": (
        {"none": [0.4, 0.6], "norm=9": [0.4, 0.6]},
        [("none", False), ("norm=9", False)],
        "The experiment does not separate no clip and norm=9: no clip has 0.500 ± 1.3.",
    ),
    "one seed": (
        {"none": [0.6], "median": [0.4]},
        [("median", False), ("none", False)],
        "One seed cannot show a difference: median has the lowest loss, 0.400.",
    ),
    "a low loss does not make up for a run that diverged": (
        {"none": [0.1, None, 0.1], "median": [0.4, 0.5, 0.6]},
        [("median", False), ("none", True)],
        "median wins: 0.500 ± 0.25 against 1 of 3 runs that diverged without a clip.",
    ),
    "all diverged": (
        {"none": [None, None], "median": [None, None]},
        [("none", False), ("median", False)],
        "Every run diverged or failed, whatever the clip: try rules that clip harder, or a lower learning rate.",
    ),
    "one rule": ({"none": [0.5]}, [("none", False)], "Only no clip was tried: 0.500."),
}


@pytest.mark.parametrize("name", RANKINGS)
def test_the_ranking_and_its_sentence(name):
    last, ranking, words = RANKINGS[name]
    ranked = scores(runs_of(**last))
    assert [(score.rule, score.worse) for score in ranked] == ranking
    assert sentence(ranked) == words


def test_differences_are_of_the_same_seeds():
    """A spread over seeds that all rules share does not hide a small difference."""
    wide = {"none": [0.11, 1.115, 5.112], "median": [0.1, 1.1, 5.1]}
    median, none = scores(runs_of(**wide))
    assert (none.difference.value, none.worse) == (pytest.approx(0.037 / 3), True)
    assert median.loss.margin > 1
    assert scores(runs_of(**wide)[::-1])[1].difference == none.difference
    lost = runs_of(none=[None, 1.11, 5.12], median=[0.1, 1.1, 5.1])
    assert scores(lost)[1].difference.count == 2


def test_a_run_that_ended_with_an_error_counts_as_lost():
    ranked = scores([*runs_of(median=[0.5, 0.6]), run("none", 1, 0.1, failed=True), run("none", 2, 0.1)])
    assert [(score.rule, score.diverged, score.failed, score.worse) for score in ranked] == [
        ("median", 0, 0, False),
        ("none", 0, 1, True),
    ]


@pytest.mark.parametrize("exploding", [("none",), ("none", "norm=9"), ("median", "none", "norm=9")])
def test_runs_that_explode_with_finite_losses_have_diverged_however_many_they_are(exploding):
    rules = [*exploding, "norm=1"]
    ranked = scores([TrialRun(rule, 1, RISING if rule in exploding else FLAT) for rule in rules])
    assert {score.rule: score.diverged for score in ranked} == {rule: int(rule in exploding) for rule in rules}
    assert ranked[0].rule == "norm=1"


FLAT, RISING = [1.0] * 40, [2.0**i for i in range(40)]
DIVERGED = {
    "not finite": ([1.0] * 15 + [None] * 25, [], 24),
    "not finite now and then": ([1.0, None] * 20, [], None),
    "far above the others": ([1.0] * 20 + [7.0] * 20, [FLAT] * 3, 24),
    "far above, alone": (RISING, [], None),
    "far above one that is far above": (RISING, [FLAT, FLAT, [9.0 * x for x in RISING]], 19),
    "one batch": ([1.0] * 20 + [1e9] + [1.0] * 19, [FLAT], None),
    "learns slowly": ([1.0] * 40, [[1.0] * 10 + [0.01] * 30], None),
    "learns slowly, with noise": ([1.0] * 20 + [1.3] * 20, [[1.0] * 10 + [0.01] * 30], None),
    "losses below 0": ([-1.0] * 20 + [9.0] * 20, [[-1.0] * 40], None),
    "others were shorter": ([1.0] * 20 + [7.0] * 20, [[1.0] * 20], None),
    "nothing": ([], [FLAT], None),
    "few": ([None] * 9, [FLAT], None),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_when_a_run_has_diverged(name):
    losses, others, expected = DIVERGED[name]
    assert diverged_at(losses, others) == expected
    for seen in range(len(losses)):  # as it is looked at while it runs
        assert diverged_at(losses[:seen], others) == (expected if expected is not None and seen > expected else None)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([], None), ([3.0], 3.0), ([9.0] * 18 + [1.0, 2.0], 1.5), ([1.0] * 19 + [None], None), ([1e308] * 30, 1e308)],
)
def test_the_last_loss(losses, expected):
    assert last_loss(losses) == (None if expected is None else pytest.approx(expected))


CANDIDATES = {
    "steady": (steps_of([1.0 + i / 100 for i in range(100)]), False, ["norm=1.9", "norm=0.15", "norm=1"]),
    "clips itself": (
        [s | {"post_norm": 0.25} for s in steps_of([1.0] * 50)],
        False,
        ["norm=0.25", "norm=0.025", "norm=1"],
    ),
    "diverged": (steps_of([30.0 * 5**i for i in range(19)]), True, ["norm=30", "norm=3", "norm=1"]),
    "diverged, skipped first": (
        [{"t": "step", "i": 0, "norm": None, "skipped": True}, *steps_of([3.0, 3.0, 3e9])],
        True,
        ["norm=1", "norm=0.1"],
    ),
    "diverged at once": ([{"t": "step", "i": 0, "norm": None}], True, ["norm=1"]),
    "no norms": ([], False, ["norm=1"]),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_rules_that_are_tried(name):
    steps, diverged, constants = CANDIDATES[name]
    assert candidates(make_record(steps=steps), diverged) == ["median", *constants]


# What is run, by a stand-in for `gradguard run` that writes a record without training anything.

STAND_IN = """
import json, os, random, sys, time
from pathlib import Path

words, options, i = sys.argv[1:], {}, 0
while words[i].startswith("--"):
    flag = words[i] in ("--force", "--no-report")
    options[words[i]] = True if flag else words[i + 1]
    i += 1 if flag else 2
script, arguments = words[i], words[i + 1:]
Path(options["--out"], "seen.json").write_text(json.dumps([options, script, arguments, os.environ["PYTHONHASHSEED"]]))
print("hello from", script)
seed, clip, steps = int(options["--seed"]), options.get("--clip", "none"), int(options["--steps"])
record = open(Path(options["--out"], "run.jsonl"), "w", buffering=1)
def write(**line):
    record.write(json.dumps(line) + "\\n")
write(t="meta", argv=[script], optimizers=["SGD"], **({"clip": clip} if "--clip" in options else {}))
generator = random.Random(0 if script == "fixed.py" else seed)
for i in range(steps if script != "short.py" else 7):
    loss = 2.0 / (1 + i) + generator.random() / 10 + (0.5 if clip == "none" else 0.0)
    if script == "nan.py" and clip == "none" and i >= 5 or script == "all_nan.py":
        loss = None
    if script == "hangs.py" and clip == "none" and i >= 12:
        loss = None
    line = {"t": "step", "i": i, "loss": loss, "norm": 1.0 + i / 100, "nonfinite": 0}
    if script == "clips.py":
        line |= {"rule": "norm", "threshold": 1.0, "coefficient": 0.5, "post_norm": 0.5, "user_max_norm": 1.0}
    elif clip != "none":
        line |= {"rule": "norm", "threshold": 1.0, "coefficient": 0.5 if i % 2 else 1.0}
    if script == "gan.py":
        line["optimizer"] = i % 2
    if script == "no_loss.py":
        del line["loss"]
    write(**line)
if script == "no_loss.py":
    print("score 3")
if script == "prints.py":  # the losses are lowest with a clip, what counts without
    print("error 9.5")
    print("error", "inf" if clip == "norm=1" and seed == 1 else 0.25 if clip == "none" else 0.5, "after", steps)
if script in ("hangs.py", "waits.py") and (clip == "none") == (script == "hangs.py"):
    print("waiting", flush=True)
    time.sleep(600)
if script == "breaks.py" or script == "breaks_clipped.py" and clip == "median" and seed == 2:
    sys.exit("no data")
write(t="end", steps=steps)
"""


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Call `gradguard tune` with the stand-in; returns the exit code, what was printed, and the errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    Path("stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(trials, "RUN", (sys.executable, "-S", "stand_in.py"))
    monkeypatch.setattr(trials, "_LOOK_EVERY", 0.05)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["tune", "--out", "out", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def flat(text: str) -> str:
    return " ".join(text.split())


def seen(folder: str) -> list:
    return json.loads(Path("out", folder, "seen.json").read_text(encoding="utf-8"))


def test_rules_take_turns_under_the_same_seeds(tune):
    code, out, err = tune(
        "--steps", "20", "--seeds", "2", "--rule", "median", "--rule", "norm=1", "train.py", "--lr", "1"
    )
    assert code == 0
    turns = [line.partition(":")[0] for line in err.splitlines()]
    assert turns == [f"{rule}, seed {seed}" for seed in (1, 2) for rule in ("none", "median", "norm=1")]
    options, script, arguments, hash_seed = seen("median-seed2")
    assert {"--clip": "median", "--steps": "20", "--seed": "2", "--no-report": True}.items() <= options.items()
    assert (script, arguments, hash_seed) == ("train.py", ["--lr", "1"], "2")
    assert "--clip" not in seen("none-seed1")[0]
    assert Path("out/none-seed1/output.txt").read_text(encoding="utf-8") == "hello from train.py\n"
    assert len(read_record("out/norm=1-seed2").steps) == 20
    assert "median is among the best" in out
    assert "the same" in out  # norm=1 gave the losses of median
    assert out.rstrip().endswith("gradguard run --clip median train.py --lr 1")
    assert max(map(len, out.splitlines())) <= 80


def test_without_rules_those_of_the_first_record_are_tried(tune):
    code, out, err = tune("--steps", "20", "--seeds", "1", "train.py")
    assert code == 0
    assert [line.split(",")[0] for line in err.splitlines()] == ["none", "median", "norm=1.2", "norm=0.11", "norm=1"]
    assert "recommends no rule: median was tried instead" in flat(out)


def test_the_recommended_rule_is_tried_first(tune, monkeypatch):
    made = Recommendation("rule", "Clip by a percentile.", "It is so.", rule="autoclip=50")
    monkeypatch.setattr("gradguard.monitoring.tune.candidates.recommend", lambda record: made)
    code, out, err = tune("--steps", "20", "--seeds", "1", "train.py")
    assert code == 0
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "none",
        "autoclip=50",
        "norm=1.2",
        "norm=0.11",
        "norm=1",
    ]
    assert "The record of the unchanged script recommends autoclip=50." in flat(out)


def test_rules_may_come_from_another_record(tune):
    tune("--steps", "20", "--seeds", "1", "--rule", "median", "clips.py")
    code, _, err = tune("--force", "--steps", "20", "--seeds", "1", "--record", "out/none-seed1", "train.py")
    assert code == 0
    assert [line.split(",")[0] for line in err.splitlines()] == ["none", "median", "norm=0.5", "norm=0.05", "norm=1"]


WORDS = {
    "fixed.py": "fixed.py sets its seed itself: another seed gave the same losses, so there are no error bars",
    "clips.py": 'clips.py clips itself: its clip stays, "none" is the unchanged script, and each rule acts after it',
    "gan.py": "2 optimizers step: each has its own clipper, and the losses of all are pooled",
    "nan.py": "against 2 of 2 runs that diverged without a clip",
    "all_nan.py": "Every run diverged or failed, whatever the clip",
    "breaks_clipped.py": "An error ended median with seed 2, which counts as diverged: see",
    "short.py": "median wins",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("script", WORDS)
def test_what_is_said_of_odd_scripts(tune, script):
    code, out, _ = tune("--steps", "20", "--seeds", "2", "--rule", "median", script)
    assert code == 0
    assert WORDS[script] in flat(out)


def test_a_script_that_sets_its_seed_itself_may_be_given_it(tune):
    code, _, err = tune("--steps", "20", "--seeds", "2", "--rule", "median", "fixed.py", "--seed", "{seed}")
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["none, seed 1", "median, seed 1", "none, seed 2"]
    assert [seen(f"none-seed{seed}")[2] for seed in (1, 2)] == [["--seed", "1"], ["--seed", "2"]]


def test_a_run_that_has_diverged_is_ended(tune):
    code, _, err = tune("--steps", "40", "--seeds", "1", "--rule", "median", "hangs.py")
    assert code == 0
    assert err.splitlines()[0] == "none, seed 1: diverged, ended after 40 losses (1 of 2)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to run. Usage: gradguard tune"),
        (["--steps", "0", "train.py"], "--steps 0: expected a whole number, at least 1"),
        (["--seeds", "0", "train.py"], "--seeds 0: expected a whole number, at least 1"),
        (["--rule", "fly", "train.py"], "unknown rule 'fly'"),
        (["--record", "none.jsonl", "train.py"], "no record at none.jsonl"),
        (["breaks.py"], r"breaks.py ended with an error in its first run[^$]*no data"),
        (["--metric", "(", "train.py"], r"--metric '\(' is not a regular expression: "),
        (["--metric", "loss", "train.py"], "has 0 groups: put the part that matches the number into one pair"),
        (["--maximize", "train.py"], "--maximize requires --metric"),
        (["--metric", "(hello)", "train.py"], r"'\(hello\)' found no finite number in the output of"),
        (["--metric", "loss (.*)", "no_loss.py"], r"'loss \(\.\*\)' found no finite number"),
        (["no_loss.py"], "nothing to compare: 250 steps .* but no loss"),
    ],
)
def test_what_cannot_be_carried_out(tune, arguments, words):
    code, out, err = tune(*arguments)
    assert (code, out) == (2, "")
    assert re.search(words, err)


METRICS = {
    "lowest": ([], "no clip wins: 0.250 ± 0 against 0.500 ± 0 with median.", "none", "gradguard run prints.py"),
    "highest": (["--maximize"], "median wins: 0.500 ± 0 against 0.250 ± 0 without a clip.", "median", "--clip median"),
}


@pytest.mark.parametrize("name", METRICS)
def test_rules_are_judged_by_what_the_script_prints(tune, name):
    options, words, winner, command = METRICS[name]
    arguments = ["--seeds", "2", "--steps", "20", "--rule", "median", "--metric", r"error (\S+)", *options, "prints.py"]
    code, out, err = tune(*arguments)
    assert (code, out.splitlines()[0]) == (0, words)
    assert "none, seed 1: metric 0.25" in err
    assert "training loss" not in out
    assert command in out.splitlines()[-1]
    found = json.loads(tune("--force", "--json", *arguments)[1])
    assert (found["winner"], found["metric"]) == (winner, r"error (\S+)")


def test_a_run_whose_metric_is_not_finite_is_lost(tune):
    code, out, err = tune(
        "--seeds", "2", "--steps", "20", "--rule", "norm=1", "--rule", "median", "--metric", r"error (\S+)", "prints.py"
    )
    assert code == 0
    assert "norm=1, seed 1: no finite metric" in err
    assert "norm=1 with seed 1 printed no finite metric and counts as diverged: see" in flat(out)
    [line] = [line for line in out.splitlines() if line.startswith("norm=1 ") and "of 2" in line]
    assert "1 of 2" in line


def test_a_script_without_losses_may_print_a_metric(tune):
    code, out, _ = tune("--steps", "9", "--seeds", "1", "--rule", "median", "--metric", r"from no_(.)oss", "no_loss.py")
    assert (code, out) == (2, "")  # a letter is no number
    code, out, _ = tune(
        "--force", "--steps", "9", "--seeds", "1", "--rule", "median", "--metric", r"score (\d+)", "no_loss.py"
    )
    assert (code, out.splitlines()[0]) == (0, "One seed cannot show a difference: no clip has the lowest loss, 3.00.")


def test_records_are_not_replaced_unasked(tune):
    Path("out").mkdir()
    Path("out/precious").touch()
    code, _, err = tune("train.py")
    assert code == 2
    assert "out is not empty: choose another --out, or add --force" in err


def test_a_launcher_is_refused(tune, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in tune("train.py")[2]


def test_json_has_all_numbers(tune):
    code, out, _ = tune("--json", "--steps", "20", "--seeds", "2", "--rule", "median", "nan.py")
    found = json.loads(out)
    assert code == 0
    assert found["winner"] == "median"
    assert [rule["rule"] for rule in found["rules"]] == ["median", "none"]
    assert found["rules"][1]["losses"] == {"1": None, "2": None}
    assert found["rules"][0]["clip_share"] == 0.5
    assert found["command"] == "gradguard run --clip median nan.py"


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a job in the background
from gradguard.cli import main
from gradguard.monitoring.tune import trials
trials.RUN, trials._PATIENCE = (sys.executable, "-S", "stand_in.py"), 0.1
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_was_done_and_ends_the_process(tmp_path, number):
    tmp_path.joinpath("stand_in.py").write_text(STAND_IN)
    arguments = ["tune", "--out", "out", "--seeds", "1", "--steps", "20", "--rule", "median", "waits.py"]
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments]
    waiting = tmp_path / "out/median-seed1/output.txt"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "none, seed 1" in process.stderr.readline()
        while not (waiting.exists() and "waiting" in waiting.read_text(encoding="utf-8")):
            assert process.poll() is None
        process.send_signal(number)
        out, _ = process.communicate(timeout=240)
    assert process.returncode == -number
    assert "Only no clip was tried" in out


@pytest.mark.slow
def test_a_script_that_diverges_is_cured(tmp_path):
    """With real runs: two optimizers, a GradScaler, and a learning rate that is too high without a clip."""
    (tmp_path / "train.py").write_text("""
import torch
models = [torch.nn.Linear(8, 1) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=2.0) for model in models]
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(1000):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""")
    command = ["-m", "gradguard", "tune", "--out", "out", "--seeds", "1", "--steps", "60", "--rule", "norm=0.3"]
    done = run_python(*command, "train.py", cwd=tmp_path, starts_more=True)
    assert done.stderr.splitlines()[1].split(":")[0] == "norm=0.3, seed 1"
    assert "norm=0.3 wins" in done.stdout
    assert "1 of 1 runs that diverged without a clip" in flat(done.stdout)
    clipped, plain = (read_record(tmp_path / f"out/{rule}-seed1") for rule in ("norm=0.3", "none"))
    assert len(clipped.steps) == 60
    assert clipped.steps[0]["loss"] == plain.steps[0]["loss"]
    assert not (tmp_path / "out/none-seed1/report.html").exists()
