"""`gradguard run` and `report` as a person types them, on scripts that know nothing of gradguard."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from forked_python import run_python
from gradguard.cli import main
from gradguard.errors import RecordError, UnsupportedGradientError
from gradguard.monitoring.record.file import Record, RecordWriter, read_record
from gradguard.monitoring.show import report

TRAIN = """
import json, sys, torch
from pathlib import Path
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
{setup}
norms = []
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 4)).square().mean() * 10
    loss.backward()
    {clip}
    optimizer.step()
    {end}
torch.save(model.state_dict(), "weights.pt")
Path("norms.json").write_text(json.dumps(norms))
"""


def empty_page(records: list[Record], path: Path) -> Path:
    path.touch()
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, capfd, others_unseen):
    """Run a script under observation in a folder of its own; returns the exit code and the record, if need be empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(source: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, Record]:
        Path("train.py").write_text(source)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "write_report", empty_page)  # drawing takes longer than all the rest
            code = main(["run", "--out", "out", "--force", *options, "train.py", *arguments])
        return code, read_record("out") if Path("out").exists() else Record(
            Path("out"), {}, [], [], [], None, torn=False
        )

    return go


STEP = "import torch; p = torch.nn.Parameter(torch.ones(1)); p.sum().backward(); torch.optim.SGD([p]).step()"


def script(setup: str = "", clip: str = "pass", end: str = "pass") -> str:
    return TRAIN.format(setup=setup, clip=clip, end=end)


def weights() -> dict[str, torch.Tensor]:
    return torch.load("weights.pt")


def saved() -> list:
    return json.loads(Path("norms.json").read_text(encoding="utf-8"))


def plain(source: str) -> dict[str, torch.Tensor]:
    """The weights of the same script, run by Python itself."""
    Path("plain.py").write_text(source)
    run_python("plain.py", cwd=Path.cwd())
    return weights()


CLIPS = {
    "none": "pass",
    "norm": "norms.append(float(clip_grad_norm_(model.parameters(), max_norm=0.5)))",
    "norm, p = 1": "norms.append(float(clip_grad_norm_(model.parameters(), 0.5, norm_type=1)))",
    "value": "clip_grad_value_(model.parameters(), 0.05)",
    "log only": "norms.append(float(clip_grad_norm_(model.parameters(), float('inf'))))",
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
def test_observing_leaves_the_weights_bit_identical(run, clip):
    source = script(clip=CLIPS[clip])
    expected = plain(source)
    code, record = run(source)
    assert code == 0
    torch.testing.assert_close(weights(), expected, rtol=0, atol=0)
    assert len(record.steps) == 6


def test_the_record_of_an_unclipped_run(run):
    code, record = run(script(end="norms.append((loss.item(), [float(p.grad.norm()) for p in model.parameters()]))"))
    assert code == 0
    assert record.names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert record.meta["optimizers"] == ["SGD"]
    assert record.meta["argv"] == ["train.py"]
    for step, tensors, (loss, norms) in zip(record.steps, record.tensors, saved(), strict=True):
        assert step["loss"] == pytest.approx(loss)
        assert step["norm"] == pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-5)
        assert tensors["norm"] == pytest.approx(norms, rel=1e-3)
        assert step["lr"] == 0.1
        assert "coefficient" not in step
        assert step["top"][0] == norms.index(max(norms))
    assert record.end["exit"] == 0
    assert record.end["steps"] == 6
    assert record.end["overhead_ms"] > 0


def test_the_script_s_own_norm_clip_is_learnt(run):
    _, record = run(script(clip=CLIPS["norm"]))
    for step, norm in zip(record.steps, saved(), strict=True):
        assert step["norm"] == pytest.approx(norm, rel=1e-5)
        assert step["user_max_norm"] == step["threshold"] == 0.5
        assert step["rule"] == "norm"
        assert step["coefficient"] == pytest.approx(min(1.0, 0.5 / norm), rel=1e-4)
        assert step["post_norm"] == pytest.approx(min(0.5, norm), rel=1e-4)


def test_the_coefficient_of_a_one_norm_clip_is_that_of_the_one_norm(run):
    _, record = run(script(clip=CLIPS["norm, p = 1"]))
    for step, norm in zip(record.steps, saved(), strict=True):
        assert step["coefficient"] == pytest.approx(min(1.0, 0.5 / norm), rel=1e-4)


def test_the_script_s_own_value_clip_is_learnt(run):
    after = "norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))"
    _, record = run(script(clip=CLIPS["value"], end=after))
    for step, norm in zip(record.steps, saved(), strict=True):
        assert step["rule"] == "value"
        assert step["threshold"] == 0.05
        assert step["post_norm"] == pytest.approx(norm, rel=1e-5)
        assert step["norm"] > norm


def test_measuring_with_an_infinite_threshold_is_no_clip(run):
    _, record = run(script(clip=CLIPS["log only"]))
    assert all("coefficient" not in step and "rule" not in step for step in record.steps)


KEYS = ("norm", "post_norm", "coefficient", "threshold")
FOLLOWING = {
    "autoclip": "gg.AutoClip()",
    "autoclip=50": "gg.AutoClip(percentile=50)",
    "zclip": "gg.ZClip()",
    "zclip=inf": "gg.ZClip(ceiling=None)",
    "clip_fraction=0.5": "gg.ClipFraction(target=0.5)",
    "adagc": "gg.AdaGC()",
    "adagc=inf": "gg.AdaGC(absolute=float('inf'))",
}
GUARDED = {"median": "gg.ClipByMedian()", "median=0.1": "gg.ClipByMedian(k=0.1)"}
"""Rules that look at the optimizer, which a guard knows."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("norm=0.5", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"),
        ("value=0.05", "torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)"),
        ("adaptive=0.01", "import gradguard; gradguard.clip_grad_adaptive_(model, 0.01)"),
        ("adaptive=0.01,exclude=3", "clipper(model)  # gg.ClipAdaptive(0.01, exclude=model[3])"),
        (
            "adaptive=1,exclude=0,exclude=3.b*",
            "clipper(model)  # gg.ClipAdaptive(1, exclude=[model[0], model[3].bias])",
        ),
        *[(option, f"clipper(model)  # {call}") for option, call in FOLLOWING.items()],
        *[(option, f"pass  # gg.Guard(optimizer, {call})") for option, call in GUARDED.items()],
    ],
)
def test_clip_does_what_the_call_in_the_script_would(run, option, call):
    made = f"import gradguard as gg; clipper = {call.split('# ')[-1]}" if "  # " in call else ""
    code, record = run(script(setup=made, clip=call))
    expected = weights()
    code, clipped = run(script(), "--clip", option)
    assert code == 0
    torch.testing.assert_close(weights(), expected, rtol=1e-6, atol=1e-7)
    assert clipped.meta["clip"] == option
    for ours, theirs in zip(clipped.steps, record.steps, strict=True):
        assert ours["rule"] == theirs["rule"]
        assert {key: ours[key] for key in KEYS if ours.get(key) is not None} == pytest.approx(
            {key: theirs[key] for key in KEYS if theirs.get(key) is not None}, rel=1e-3
        )


def test_an_exclusion_that_fits_nothing_ends_the_run(run, capfd):
    assert run(script(), "--clip", "adaptive=0.01,exclude=head")[0] == 1
    assert (
        "exclude has 'head', which matches no parameter; the parameters are 0.weight, 0.bias" in capfd.readouterr().err
    )


EACH_ITS_OWN = """
import torch
a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
opts = [torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)]
{setup}
for size in (4.0, 2.0, {odd}, 8.0):
    for opt in opts:
        opt.zero_grad()
    for p, factor, opt in ((a, 1.0, opts[0]), (b, 100.0, opts[1])):
        loss = (p * (size * factor)).sum()
        {step}
"""


@pytest.mark.parametrize(
    ("setup", "step", "odd"),
    [
        ("", "loss.backward(); opt.step()", 1.0),
        ("", "loss.backward(); opt.step()", "float('nan')"),
        (
            "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)",
            "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()",
            "float('inf')",
        ),
        (
            "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
            "opts = [torch.optim.SGD([p], lr=1.0, fused=True) for p in (a, b)]",
            "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()",
            "float('inf')",
        ),
    ],
    ids=["plain", "NaN", "scaled", "scaled and fused"],
)
def test_each_optimizer_has_a_memory_of_its_own_without_scale_and_without_what_is_not_finite(run, setup, step, odd):
    code, record = run(EACH_ITS_OWN.format(setup=setup, step=step, odd=odd), "--clip", "autoclip=0")  # the smallest
    assert code == 0
    for place, factor in ((0, 1.0), (1, 100.0)):
        steps = [step for step in record.steps if step["optimizer"] == place]
        rest = steps[:2] + steps[3:]
        smallest = [4.0, 2.0, 1.0 if odd == 1.0 else 2.0]
        assert [one["norm"] for one in rest] == pytest.approx([factor * size for size in (4.0, 2.0, 8.0)])
        assert [one["threshold"] for one in rest] == pytest.approx([factor * size for size in smallest])
        assert [one["post_norm"] for one in rest] == pytest.approx([factor * size for size in smallest])
        assert {one.get("rule") for one in rest} == {"AutoClip"}


def test_an_optimizer_that_steps_inside_a_backward_is_not_clipped_by_a_part_of_the_norm(run, capfd):
    source = """
import torch
model = torch.nn.Linear(2, 2)
for p in model.parameters():
    opt = torch.optim.SGD([p], lr=1.0)
    p.register_post_accumulate_grad_hook(lambda p, opt=opt: opt.step())
model(torch.ones(1, 2)).sum().backward()
"""
    assert run(source, "--clip", "median")[0] == 1
    assert "steps inside a backward pass" in capfd.readouterr().err
    assert run(source, "--clip", "value=0.5")[0] == 0


def test_adaptive_clip_knows_the_units_of_a_transposed_convolution(run):
    source = """
import torch
torch.manual_seed(0)
model = torch.nn.ConvTranspose1d(2, 3, 2, bias=False)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
before = model.weight.detach().clone()
(model(torch.randn(1, 2, 4)).square().sum() * 1e3).backward()
{}
opt.step()
torch.save({{"moved": before - model.weight.detach()}}, "weights.pt")
"""
    run(source.format("import gradguard; gradguard.clip_grad_adaptive_(model, 0.1)"))
    expected = weights()
    run(source.format(""), "--clip", "adaptive=0.1")
    torch.testing.assert_close(weights(), expected, rtol=1e-5, atol=1e-7)


def test_accumulation_two_optimizers_and_a_closure(run):
    code, record = run("""
import torch
from torch import nn
a, b = nn.Linear(2, 1), nn.Linear(3, 1)
opt_a, opt_b = torch.optim.Adam(a.parameters()), torch.optim.LBFGS(b.parameters(), max_iter=4)
for micro in range(3):
    a(torch.ones(1, 2)).sum().backward()
opt_a.step()
def closure():
    opt_b.zero_grad()
    loss = b(torch.ones(1, 3)).square().sum()
    loss.backward()
    return loss
for _ in range(2):
    opt_b.step(closure)
""")
    assert code == 0
    assert [step["optimizer"] for step in record.steps] == [0, 1, 1]
    assert record.meta["optimizers"] == ["Adam", "LBFGS"]
    assert sorted(record.names) == ["Linear#0.bias", "Linear#0.weight", "Linear#1.bias", "Linear#1.weight"]


def test_a_loss_scale_is_taken_out_and_an_overflow_is_told(run):
    _, record = run("""
import torch
w = torch.nn.Parameter(torch.tensor(3.0))
opt = torch.optim.SGD([w], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
for factor in (1.0, float("inf"), 1.0):
    opt.zero_grad()
    scaler.scale(w * factor).backward()
    scaler.step(opt)
    scaler.update()
""")
    assert [step["skipped"] for step in record.steps if "skipped" in step] == [True]
    assert [step["loss"] for step in record.steps] == [pytest.approx(3.0), None, pytest.approx(2.9)]
    assert [step["norm"] for step in record.steps] == [1.0, None, 1.0]
    assert [step["amp_scale"] for step in record.steps] == [1024.0, 2048.0, 1024.0]
    assert [event["i"] for event in record.events] == [1]
    assert [event["kind"] for event in record.events] == ["amp_skip"]


def test_nan_gradients_are_named_and_the_record_stays_json(run):
    _, record = run(script(setup="bad = [p for p in model.parameters()][1]", clip="bad.grad.mul_(float('nan'))"))
    assert record.steps[0]["norm"] is None
    assert record.steps[0]["nonfinite"] == 1
    assert record.events[0]["message"] == "gradients of 0.bias are not finite"


ENDINGS = {
    "plain": ("", "optimizer.step()", 4),
    "a closure": ("", "optimizer.step(lambda: loss)", 4),
    "an except clause": ("", "\n    try:\n        optimizer.step()\n    except Exception:\n        pass", 4),
    "a finally clause": ("", "\n    try:\n        optimizer.step()\n    finally:\n        norms.append(1)", 4),
    "workers": (
        "workers = iter(torch.utils.data.DataLoader(range(64), num_workers=2))",
        "next(workers); optimizer.step()",
        4,
    ),
    "two optimizers": (
        "other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "other.param_groups[0]['params'][0].grad = torch.ones(1)",
        "optimizer.step(); other.step()",
        4,
    ),
    "a script that ends before": ("", "optimizer.step() if step < 2 else sys.exit()", 2),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_ends_after_as_many_steps_as_were_asked_for(run, name):
    setup, step, expected = ENDINGS[name]
    source = script(setup=setup).replace("    optimizer.step()", f"    {step}")
    code, record = run(source, "--steps", "4")
    assert code == 0
    assert len(record.steps) == expected
    assert (record.end["steps"], record.end["exit"], record.end["interrupted"]) == (expected, 0, False)
    assert not Path("weights.pt").exists()


def test_a_seed_makes_a_run_that_can_be_repeated(run):
    source = "import random, numpy\n" + script(end="norms.append([random.random(), numpy.random.rand(), loss.item()])")
    source = source.replace("torch.manual_seed(0)", "")
    found = []
    for seed in ("1", "1", "2"):
        assert run(source, "--seed", seed, "--no-report")[0] == 0
        found.append(saved())
    assert found[0] == found[1]
    for first, other in zip(zip(*found[0], strict=True), zip(*found[2], strict=True), strict=True):
        assert set(first).isdisjoint(other)


def test_a_record_may_come_without_a_report(run, capfd):
    run(script(), "--no-report")
    assert not Path("out/report.html").exists()
    assert capfd.readouterr().out == ""


def test_arguments_reach_the_script_even_those_that_look_like_ours(run):
    source = (
        "import sys, json, pathlib; pathlib.Path('norms.json').write_text(json.dumps([sys.argv, __name__, __file__]))"
    )
    code, _ = run(source, arguments=("--clip", "x", "-m", "--out=y"))
    argv, name, file = saved()
    assert argv == ["train.py", "--clip", "x", "-m", "--out=y"]
    assert name == "__main__"
    assert Path(file) == Path("train.py").absolute()
    assert not Path("out").exists()
    assert code == 0


def test_a_module_and_a_package_run_as_python_runs_them(run, capfd):
    Path("pack").mkdir()
    Path("pack/__init__.py").touch()
    Path("pack/__main__.py").write_text("import sys; from . import other; print('args', sys.argv[1:])")
    Path("pack/other.py").write_text("print('other', __name__)")
    assert main(["run", "--out", "a", "-m", "pack", "--flag"]) == 0
    assert main(["run", "--out", "b", "-m", "pack.other"]) == 0
    out = capfd.readouterr().out
    assert "args ['--flag']" in out
    assert "other pack.other" in out
    assert "other __main__" in out


@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('said so')", 1, "said so"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_how_a_script_ends_is_passed_on_and_what_was_seen_is_kept(run, capfd, ending, code, shown):
    got, record = run(script(end=f"if step == 3: {ending}"))
    captured = capfd.readouterr()
    assert got == code
    assert shown in captured.err
    assert "gradguard/watch" not in captured.err
    assert len(record.steps) == 4
    assert record.end["exit"] == code
    assert record.end["interrupted"] == (code == 130)
    assert Path("out/run.html").exists()


NO_STEP = {
    "no torch": ("print('hello')", 0, "no optimizer step was observed, so there is no record"),
    "help": ("import argparse; argparse.ArgumentParser().parse_args(['-h'])", 0, "no optimizer step was observed"),
    "a missing import": ("import torch, no_such_package", 1, "the script ended before its first optimizer step"),
    "only clips": (
        "import torch; p = torch.ones(1, requires_grad=True); p.sum().backward(); "
        "torch.nn.utils.clip_grad_norm_([p], 1.0)",
        0,
        "1 clip calls were observed, but no optimizer step, so there is no record",
    ),
}


@pytest.mark.parametrize(("source", "code", "words"), NO_STEP.values(), ids=NO_STEP.keys())
def test_a_script_without_a_step_leaves_nothing_but_a_message(run, capfd, source, code, words):
    Path("out").mkdir()
    Path("out/run.jsonl").write_text("precious")
    with pytest.raises(RecordError, match="is not a gradguard record"):
        run(source)  # with --force
    assert os.listdir("out") == ["run.jsonl"]
    assert Path("out/run.jsonl").read_text(encoding="utf-8") == "precious"
    captured = capfd.readouterr()
    assert words in captured.err
    assert "report:" not in captured.out + captured.err
    assert main(["run", "--out", "other", "train.py"]) == code


def test_what_was_found_is_printed_where_the_page_cannot_be_written(run, capfd):
    Path("out/run.html").mkdir(parents=True)
    Path("train.py").write_text(script())
    assert main(["run", "--force", "--out", "out", "train.py"]) == 0
    told = capfd.readouterr().err
    assert "─ gradguard ─" in told
    assert re.search(r"record: out/run.jsonl\nno report: cannot write .*run.jsonl -o PAGE\n", told)


def test_a_record_that_cannot_be_written_is_told_once_and_no_step_is_denied(run, capfd):
    Path("file").touch()
    Path("train.py").write_text(script())
    assert main(["run", "--out", "file", "train.py"]) == 0
    told = capfd.readouterr().err
    assert "for example --out runs/first. The program runs without a record." in told
    assert "no optimizer step" not in told
    assert not Path("other").exists()


def test_force_replaces_and_without_it_a_record_that_comes_in_between_is_kept(run, capfd):
    for _ in range(2):
        run(STEP)
        assert "GRADGUARD" not in os.environ
    assert sorted(os.listdir("out")) == ["run.html", "run.jsonl"]
    Path("train.py").write_text(f"import pathlib; pathlib.Path('new/run.jsonl').write_text('precious')\n{STEP}")
    Path("new").mkdir()
    assert main(["run", "--out", "new", "train.py"]) == 0
    assert sorted(os.listdir("new")) == ["run-2.html", "run-2.jsonl", "run.jsonl"]
    assert Path("new/run.jsonl").read_text(encoding="utf-8") == "precious"
    captured = capfd.readouterr()
    assert "new/run.jsonl exists and is kept: this run is recorded in run-2.jsonl" in captured.err
    assert "report: new/run-2.html" in captured.err


def test_secrets_of_the_command_line_are_recorded_only_where_that_is_asked_for(run, capfd):
    arguments = ("--api-key", "sk-abc", f"--data={Path.cwd()}/here", "postgres://me:pw@host/db")
    _, record = run(STEP, arguments=arguments)
    assert record.meta["argv"] == ["train.py", "--api-key", "***", "--data=here", "postgres://me:***@host/db"]
    _, record = run(STEP, "--argv", arguments=arguments)
    assert record.meta["argv"] == ["train.py", *arguments]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "code", "ended"),
    [
        ("", -15, {"exit": 143, "interrupted": True}),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7, {"exit": 7, "interrupted": False}),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0, {"exit": 0, "interrupted": False}),
        ("threading.Thread(target=lambda: time.sleep(1)).start()", -15, {"exit": 143, "interrupted": True}),
    ],
)
def test_sigterm_ends_a_script_as_ctrl_c_does_unless_it_has_a_handler(tmp_path, before, code, ended):
    end = "if step == 3: os.kill(os.getpid(), 15); os.path.exists('.')"
    source = f"import os, signal, sys, threading, time\n{script(setup=before, end=end)}"
    tmp_path.joinpath("train.py").write_text(source)
    done = run_python("-m", "gradguard", "run", "--out", "out", "train.py", cwd=tmp_path, check=False)
    assert done.returncode == code, done.stderr
    assert "report: out/run.html" in done.stderr
    assert "Traceback" not in done.stderr
    record = read_record(tmp_path / "out")
    assert len(record.steps) == (6 if code == 0 else 4)
    assert {key: record.end[key] for key in ended} == ended


@pytest.mark.slow
def test_sigterm_ends_a_forked_child_as_it_would_without_us(tmp_path):
    source = f"""
import os, signal, time
{STEP}
child = os.fork()
if not child:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        os._exit(9)
print("ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    tmp_path.joinpath("train.py").write_text(source)
    done = run_python("-m", "gradguard", "run", "--out", "out", "train.py", cwd=tmp_path)
    assert "ended by -15" in done.stdout


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a job in the background
from gradguard.cli import main
{meanwhile}
main()
"""
HANGS = """
import atexit, os, signal, time
atexit.register(print, "the last word", flush=True)
{training}
try:
    os.kill(os.getpid(), {numbers}[0])
    time.sleep(600)
finally:
    for number in {numbers}[1:]:
        os.kill(os.getpid(), number)
"""


def interrupted(folder: Path, numbers: list[int], meanwhile: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script that gets signals while it hangs, and others while the page is drawn."""
    folder.joinpath("train.py").write_text(HANGS.format(training=script(), numbers=[*map(int, numbers)]))
    source = INTERRUPTIBLE.format(meanwhile=meanwhile)
    done = run_python("-c", source, "run", "--out", "out", "train.py", cwd=folder, check=False)
    record = read_record(folder / "out")
    assert len(record.steps) == 6
    assert {key: record.end[key] for key in ("exit", "interrupted")} == {"exit": 128 + numbers[0], "interrupted": True}
    return done


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGHUP] * 2])
def test_a_signal_keeps_record_and_page_and_then_ends_the_process(tmp_path, numbers):
    done = interrupted(tmp_path, numbers)
    assert done.returncode == -numbers[0], done.stderr
    assert "report: out/run.html" in done.stderr
    assert "the last word" in done.stdout  # Python ends in its own order
    assert tmp_path.joinpath("out/run.html").exists()
    shown = re.findall(r'File "(.*)", line', done.stderr)
    if numbers[0] == signal.SIGINT:  # where it hung
        assert shown == [str(tmp_path / "train.py")]
        assert "\nKeyboardInterrupt\n" in done.stderr
    else:
        assert shown == []


MEANWHILE = """
import os, jinja2
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.show.report import page
def signalled(work):
    def now(*arguments, **named):
        os.kill(os.getpid(), {number})
        return work(*arguments, **named)
    return now
{owner}.{name} = signalled({owner}.{name})
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("owner", "name"), [("jinja2.Template", "render"), ("page", "write_whole"), ("Observer", "_end")]
)
def test_a_second_signal_leaves_the_record_whole_and_gives_the_page_up_in_one_line(tmp_path, number, owner, name):
    meanwhile = MEANWHILE.format(number=int(number), owner=owner, name=name)
    done = interrupted(tmp_path, [signal.SIGINT], meanwhile)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "gradguard: interrupted: the page is not drawn. Draw it: gradguard report out/run.jsonl"
    )
    assert (done.stderr.count("Traceback"), done.stderr.count("  File ")) == (1, 1)  # that of the script
    assert os.listdir(tmp_path / "out") == ["run.jsonl"]


def test_a_signal_after_the_end_of_the_script_gives_up_the_page_and_ends_the_process(tmp_path):
    tmp_path.joinpath("train.py").write_text(script())
    meanwhile = MEANWHILE.format(number=int(signal.SIGINT), owner="jinja2.Template", name="render")
    source = INTERRUPTIBLE.format(meanwhile=meanwhile)
    done = run_python("-c", source, "run", "--out", "out", "train.py", cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "Traceback" not in done.stderr
    assert read_record(tmp_path / "out").end["exit"] == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_loop_of_the_shell(tmp_path):
    ctrl_c = "os.killpg(0, signal.SIGINT); time.sleep(60)"
    source = f"import os, signal, time; print('begins', flush=True)\n{STEP}\n{ctrl_c}"
    tmp_path.joinpath("train.py").write_text(source)
    loop = f"for i in 1 2 3; do {sys.executable} -m gradguard run --no-report --out $i train.py; done; echo survived"
    done = subprocess.run(
        ["bash", "-c", loop],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "begins\n"), done.stderr
    assert read_record(tmp_path / "1").end["interrupted"] is True


@pytest.mark.slow
def test_a_forked_child_writes_nothing_to_the_record_of_its_parent(run):
    code, record = run(
        script(
            end="""
    import os
    if step == 2:
        child = os.fork()
        if child == 0:
            loss = model(torch.ones(1, 4)).sum(); loss.backward(); optimizer.step(); os._exit(0)
        os.waitpid(child, 0)
"""
        )
    )
    assert code == 0
    assert [step["i"] for step in record.steps] == list(range(6))
    (of_child,) = Path("out").glob("run.*.jsonl")
    assert not read_record(of_child).steps  # os._exit() ends a process before it can write


@pytest.mark.parametrize("by_another", [False, True], ids=["old", "in progress"])
def test_force_replaces_the_record_that_was_there_and_none_that_is_being_written(run, by_another):
    Path("out").mkdir()
    Path("out/run.jsonl").write_text('{"t": "meta", "git": "old"}\n')
    writes = "import pathlib; p = pathlib.Path('out/run.jsonl'); p.write_text(p.read_text() * 2)" if by_another else ""
    assert run(f"{writes}\n{STEP}")[0] == 0
    kept = read_record("out/run.jsonl")
    assert (kept.meta.get("git") == "old") is by_another
    assert Path("out/run-2.jsonl").exists() is by_another


def test_a_failure_of_the_observer_never_reaches_the_script(run, monkeypatch, capfd):
    def broken(gradients):
        raise ZeroDivisionError("inside the observer")

    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.clips"], "gradient_norms", broken)
    code, record = run(script())
    assert code == 0
    assert record.steps == []
    (event,) = record.events
    assert event["kind"] == "observer_failed"
    assert "ZeroDivisionError: inside the observer" in event["message"]
    assert "so there is no report. gradguard stopped measuring: ZeroDivisionError" in capfd.readouterr().err
    assert not Path("out/run.html").exists()


def test_a_clip_that_cannot_be_made_stops_the_run(run, monkeypatch, capfd):
    def refuse(*arguments, **options):
        raise UnsupportedGradientError("sharded gradients (DTensor) are not supported yet")

    monkeypatch.setattr("gradguard.clip.guards_of_a_script.gradients_of", refuse)
    code, _ = run(script(), "--clip", "norm=1")
    assert code == 1
    assert "sharded gradients" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "nothing to run"),
        (["run", "missing.py"], "cannot read missing.py: No such file"),
        (["run", "-", "--lr", "1"], "cannot read -: No such file"),
        (["run", "."], "is a folder"),
        (["run", "broken.py"], "is not a Python script"),
        (["run", "-m", "no_such_module"], "no module no_such_module"),
        (["run", "-m", "no_such.module"], "cannot import no_such.module"),
        (["run", "--clip", "agc=1", "ok.py"], "unknown rule 'agc'; expected one of norm="),
        (["run", "--clip", "norm=1,exclude=fc", "ok.py"], "only adaptive takes more than a number"),
        (["run", "--clip", "adaptive=1,exclude=", "ok.py"], "as in adaptive=0.01,exclude=fc"),
        (["run", "--clip", "adaptive=1,eps=2", "ok.py"], "as in adaptive=0.01,exclude=fc"),
        (["run", "--clip", "norm=0", "ok.py"], "expected a number above 0 after norm="),
        (["run", "--clip", "norm=-1", "ok.py"], "expected a number above 0"),
        (["run", "--clip", "norm=nan", "ok.py"], "expected a number above 0"),
        (["run", "--clip", "norm=inf", "ok.py"], "norm=inf would clip nothing"),
        (["run", "--clip", "norm", "ok.py"], "expected a number above 0"),
        (["run", "--clip", "median=-1", "ok.py"], "a number from 0 to 1e\\+06 after median="),
        (["run", "--clip", "from=none.jsonl", "ok.py"], "no record at none.jsonl"),
        (
            ["run", "--clip", "from=short.jsonl", "ok.py"],
            "recommends no rule.*has 1 step, too few.*as in --clip median",
        ),
        (["run", "--every", "0", "ok.py"], "at least 1"),
        (["run", "--steps", "0", "ok.py"], "--steps 0: expected a number of steps, at least 1"),
        (["run", "--seed", "-1", "ok.py"], "--seed -1: expected a number from 0"),
        (["run", "--out", "taken", "ok.py"], "exists: choose another --out, or add --force"),
        (["report", "none.jsonl"], "no record at none.jsonl"),
        (["report", "ok.py"], "not a gradguard record"),
        (["report", "empty.jsonl"], "is empty"),
    ],
)
def test_bad_input_gets_a_clear_error_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("ok.py").write_text("print('ran')")
    Path("broken.py").write_text("def (")
    Path("empty.jsonl").touch()
    Path("short.jsonl").write_text('{"t": "meta"}\n{"t": "step", "i": 0, "norm": 1.0}\n')
    Path("taken").mkdir()
    Path("taken/run.jsonl").write_text("precious")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("gradguard: error: ")
    assert "Traceback" not in captured.err
    assert "ran" not in captured.out
    assert re.search(words, captured.err)
    assert Path("taken/run.jsonl").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--nonsense", "ok.py"], ["report"]])
def test_a_wrong_command_line_shows_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: gradguard" in capsys.readouterr().err


def test_what_is_to_be_known_of_a_record_is_said_wherever_its_numbers_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write_report", empty_page)
    steps = "".join(f'{{"t": "step", "i": {i}, "norm": 1.0}}\n' for i in range(30))
    Path("run.jsonl").write_text(f'{{"t": "meta"}}\n{steps}{{"t": "meta"}}\nbroken\n{steps}')
    told = (
        "run.jsonl: Invalid parts of the record were left out: 1 damaged line (the first: line 33: Expecting",
        "run.jsonl: The file contains 2 runs, one after the other: only the last is shown.",
    )
    for command in (["report", "run.jsonl"], ["replay", "run.jsonl"], ["run", "--clip", "from=run.jsonl", "none.py"]):
        main(command)
        err = capsys.readouterr().err
        assert all(words in err for words in told), command
    assert main(["report", "--text", "run.jsonl"]) == 0
    captured = capsys.readouterr()
    assert "notes_1: Invalid parts of the record were left out" in captured.out
    assert "steps: 30\n" in captured.out
    assert captured.err == ""


def test_report_redraws_one_run_or_several_and_tolerates_a_torn_line(run, capfd):
    run(script())
    with open("out/run.jsonl", "a") as file:
        file.write('{"t": "step", "i": 6, "no')
    Path("out/run.html").unlink()
    assert main(["report", "out/run.jsonl"]) == 0
    assert Path("out/run.html").exists()
    assert main(["report", "out", "out/run.jsonl", "-o", "both.html"]) == 0
    assert Path("both.html").exists()
    assert main(["report", "out", "--text"]) == 0
    assert "verdict" in capfd.readouterr().out


def test_clip_from_a_record_uses_its_recommendation(run):
    source = script().replace("range(6)", "range(260)").replace("lr=0.1", "lr=0.001")
    with RecordWriter(Path("first.jsonl")) as writer:
        writer.write("meta", optimizers=["SGD"])
        for i in range(260):
            writer.write("step", i=i, norm=60.0 if i % 90 == 60 else 1.0 + i % 7 / 10)
    code, record = run(source, "--clip", "from=first.jsonl")
    assert code == 0
    from gradguard.monitoring.judge.recommend import recommend

    assert record.meta["clip"] == recommend(read_record("first.jsonl")).rule


def test_a_run_knows_what_the_last_run_of_its_script_was_told(run):
    """The first one does not move: its learning rate is 0."""
    from gradguard.monitoring.judge.diagnosis import diagnose

    source = script().replace("range(6)", "range(120)")
    _, first = run(source.replace("lr=0.1", "lr=0.0"))
    assert "followed" not in first.meta
    assert diagnose(first).cause.key == "rate_zero"
    _, second = run(source.replace("lr=0.1", "lr=0.001"))
    assert (second.meta["followed"]["cause"], second.meta["followed"]["steps"]) == ("rate_zero", len(first.steps))
    assert second.dropped == 0
    assert diagnose(second).sentence.startswith("Compared with out/run.jsonl, which was sick (rate zero), ")
    for *arguments, follows in (("--task", "a", False), ("--task", "b", False), ("--task", "b", "--lr=1e-3", False),
                                ("--task", "b", "--lr=0.5", True)):  # fmt: skip
        _, other = run(source, arguments=arguments)
        assert ("followed" in other.meta) is follows, arguments
    Path("out/run.jsonl").write_text("{")  # one that cannot be read is none to follow
    _, third = run(source)
    assert "followed" not in third.meta


WRONG = """
import torch
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--out", "größe", "--force", "train.py"], 0, r"record: gr\?\?e/run\.jsonl"),
        (["report", "größe", "other", "-o", "page.html"], 0, r"\bgr\?\?e\b"),
        (["replay", "größe"], 0, r"usable steps of gr\?\?e"),
        (["check", "wrong_kernel:Wrong", "--input", "x=1:float64"], 1, r"FAIL .* numerical -?[\d.]+ \? "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_output_without_unicode_gets_question_marks(tmp_path, monkeypatch, others_unseen, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(report, "write_report", empty_page)
    lines = [{"t": "meta", "argv": ["größe.py"]}, *({"t": "step", "i": i, "norm": 1.0} for i in range(30))]
    for path in (Path("größe/run.jsonl"), Path("other/run.jsonl")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    Path("wrong_kernel.py").write_text(WRONG, encoding="utf-8")
    Path("train.py").write_text(STEP, encoding="utf-8")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr" if arguments[0] == "run" else "stdout", output)
    assert main(arguments) == code
    output.flush()
    assert re.search(words, output.buffer.getvalue().decode("ascii"))
    assert output.errors == "strict"


def test_version_and_module_entry(tmp_path):
    done = run_python("-W", "error", "-m", "gradguard", "--version", cwd=tmp_path)
    assert done.stdout.startswith("gradguard 0.")


# --- What a review found: the script does something that is not the ordinary loop -------------------------------------

LOOP = """
import torch
from torch.nn.utils import clip_grad_norm_
a, b = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
{}
"""


def norms(record: Record) -> list[tuple]:
    return [tuple(step.get(key) for key in ("norm", "coefficient", "threshold")) for step in record.steps]


def test_a_step_that_was_skipped_leaves_no_trace_in_the_next(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
for scale in (1.0, 1e4, 2.0):
    opt.zero_grad()
    (a * scale).sum().backward()
    if clip_grad_norm_([a], 1.0) < 100:
        opt.step()
""")
    )
    assert norms(record) == [
        (pytest.approx(2**0.5), pytest.approx(0.5**0.5), 1.0),
        (pytest.approx(8**0.5), pytest.approx(8**-0.5), 1.0),
    ]
    assert record.steps[1]["loss"] == pytest.approx(14.0)


def test_amp_skips_leave_no_trace_in_the_next_step(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for factor in (1.0, float("inf"), 2.0):
    opt.zero_grad()
    scaler.scale((a * factor).sum()).backward()
    scaler.unscale_(opt)
    clip_grad_norm_([a], 1.0)
    scaler.step(opt)
    scaler.update()
""")
    )
    assert [step.get("skipped") for step in record.steps] == [None, True, None]
    assert [step["norm"] for step in record.steps] == [pytest.approx(2**0.5), None, pytest.approx(8**0.5)]
    assert [step["loss"] for step in record.steps] == [pytest.approx(7.0), None, pytest.approx(14.0)]
    assert "clips" not in record.steps[2]
    assert [event["kind"] for event in record.events] == ["amp_skip"]


def test_two_optimizers_with_a_clip_each_before_both_step(run):
    _, record = run(
        LOOP.format("""
opts = [torch.optim.SGD([p], lr=0.0) for p in (a, b)]
(a.sum() + 10 * b.sum()).backward()
clip_grad_norm_([a], 1.0)
clip_grad_norm_([b], 0.5)
for opt in opts:
    opt.step()
""")
    )
    assert norms(record) == [
        (pytest.approx(2**0.5), pytest.approx(1 / 2**0.5, rel=1e-4), 1.0),
        (pytest.approx(200**0.5), pytest.approx(0.5 / 200**0.5, rel=1e-4), 0.5),
    ]


def test_one_clip_before_two_optimizers_has_one_coefficient(run):
    _, record = run(
        LOOP.format("""
opts = [torch.optim.SGD([p], lr=0.0) for p in (a, b)]
(a.sum() + 10 * b.sum()).backward()
clip_grad_norm_([a, b], 1.0)
for opt in opts:
    opt.step()
""")
    )
    total = 202**0.5
    assert [step["coefficient"] for step in record.steps] == pytest.approx([1 / total] * 2, rel=1e-4)
    assert [step["norm"] for step in record.steps] == pytest.approx([2**0.5, 200**0.5])


def test_a_clip_on_each_micro_batch_shows_the_last(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
for scale in (1.0, 3.0):
    (a * scale).sum().backward()
    clip_grad_norm_([a], 1.0)
opt.step()
""")
    )
    accumulated = 18**0.5 + 1.0  # the first was clipped to 1, in the same direction
    assert record.steps[0]["norm"] == pytest.approx(accumulated, rel=1e-4)


def test_a_value_clip_then_a_norm_clip(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
(a * 10).sum().backward()
torch.nn.utils.clip_grad_value_([a], 3.0)
clip_grad_norm_([a], 1.0)
opt.step()
""")
    )
    assert record.steps[0]["norm"] == pytest.approx(200**0.5)
    assert record.steps[0]["post_norm"] == pytest.approx(1.0, rel=1e-5)


def test_a_threshold_that_the_script_changes_in_place(run):
    _, record = run(
        LOOP.format("""
opt, threshold = torch.optim.SGD([a], lr=0.0), torch.tensor(1.0)
for _ in range(3):
    opt.zero_grad()
    a.sum().backward()
    clip_grad_norm_([a], threshold)
    opt.step()
    threshold.mul_(0.5)
""")
    )
    assert [step["threshold"] for step in record.steps] == [1.0, 0.5, 0.25]


def test_the_script_s_clip_and_ours(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
a.sum().backward()
clip_grad_norm_([a], 0.25)
opt.step()
"""),
        "--clip",
        "norm=1",
    )
    assert record.steps[0]["norm"] == pytest.approx(2**0.5)
    assert record.steps[0]["post_norm"] == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("clip", ["norm=0.1", "value=0.1", "adaptive=0.01"])
def test_a_fused_optimizer_under_a_loss_scale(run, clip):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=1.0, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
before = a.detach().clone()
scaler.scale(a.sum()).backward()
scaler.step(opt)
scaler.update()
torch.save({"moved": (before - a.detach()).norm()}, "weights.pt")
"""),
        "--clip",
        clip,
    )
    assert record.steps[0]["norm"] == pytest.approx(2**0.5)
    assert record.steps[0]["post_norm"] == pytest.approx(float(weights()["moved"]), rel=1e-4)


def test_a_step_that_raised_leaves_nothing_behind(run):
    _, record = run(
        LOOP.format("""
class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError
good, bad = torch.optim.SGD([a], lr=0.0), Fails([a], lr=0.0)
(a * 1e4).sum().backward()
try:
    bad.step()
except RuntimeError:
    pass
opt = good
opt.zero_grad()
a.sum().backward()
opt.step()
""")
    )
    assert [step["norm"] for step in record.steps] == pytest.approx([2**0.5])


def test_steps_without_gradients_are_no_steps(run):
    _, record = run(
        LOOP.format("""
opt_a, opt_b = (torch.optim.SGD([p], lr=0.0) for p in (a, b))
for _ in range(2):
    opt_a.zero_grad()
    a.sum().backward()
    clip_grad_norm_([a], 1.0)
    opt_b.step()
    opt_a.step()
""")
    )
    assert len(record.steps) == 2
    assert record.events == []


def test_other_ways_to_clip_are_seen(run):
    _, record = run(
        LOOP.format("""
import gradguard
opt = torch.optim.SGD([a], lr=0.0)
for clip in (
    lambda: gradguard.apply_gradient_clipping([a], "norm", 1.0),
    lambda: torch.nn.utils.clip_grads_with_norm_([a], 1.0, torch.nn.utils.get_total_norm([a.grad])),
    lambda: clip_grad_norm_(parameters=[a], max_norm=1.0),
):
    opt.zero_grad()
    a.sum().backward()
    clip()
    opt.step()
""")
    )
    assert norms(record) == [(pytest.approx(2**0.5), pytest.approx(0.5**0.5, rel=1e-4), 1.0)] * 3


def test_wrong_calls_fail_as_they_would(run, capfd):
    code, _ = run(LOOP.format("clip_grad_norm_([a])"))
    assert code == 1
    assert "TypeError" in capfd.readouterr().err


@pytest.mark.slow
def test_a_compiled_step_stays_compiled(run):
    code, _ = run(
        LOOP.format("""
a.grad = torch.tensor([3.0, 4.0])
step = torch.compile(lambda: clip_grad_norm_([a], 1.0), fullgraph=True, backend="eager")
assert float(step()) == 5.0
""")
    )
    assert code == 0


def test_a_script_that_changes_the_folder_keeps_its_report(tmp_path, run):
    Path("train.py").write_text(f"import os; os.makedirs('elsewhere'); os.chdir('elsewhere')\n{STEP}")
    assert main(["run", "--out", "out", "train.py"]) == 0
    assert (tmp_path / "out/run.html").exists()


def test_a_module_without_init_and_threads(run):
    code, record = run(
        LOOP.format("""
import threading
class Half(torch.nn.Module):
    def __init__(self):
        pass
half = Half()
opt = torch.optim.SGD([a], lr=0.0)
def train():
    for _ in range(3):
        opt.zero_grad()
        a.sum().backward()
        opt.step()
threading.Thread(target=train).start()
"""),
        "--clip",
        "norm=1",
    )
    assert code == 0
    assert len(record.steps) == 3


def test_a_full_disk_does_not_change_how_the_script_ends(run, capfd, monkeypatch):
    from gradguard.monitoring.record import file as records

    class Full(records.RecordWriter):
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["gradguard.monitoring.show.sinks.text_lines"], "RecordWriter", Full)
    Path("train.py").write_text(script())
    assert main(["run", "--out", "out", "train.py"]) == 0
    assert "No space left" in capfd.readouterr().err


def test_a_clip_that_a_later_backward_overtook_is_no_clip_of_this_step(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
a.sum().backward()
clip_grad_norm_([a], 0.1)
(a * 100).sum().backward()
opt.step()
a.sum().backward()
clip_grad_norm_([a], 0.1)
opt.zero_grad()
(a * 3).sum().backward()
opt.step()
""")
    )
    assert record.steps[0]["norm"] == pytest.approx(100 * 2**0.5 + 0.1, rel=1e-4)
    assert record.steps[1]["norm"] == pytest.approx(3 * 2**0.5)
    assert all("rule" not in step for step in record.steps)


def test_keywords_and_a_given_norm(run):
    _, record = run(
        LOOP.format("""
import gradguard
opt = torch.optim.SGD([a], lr=0.0)
for clip in (
    lambda: gradguard.apply_gradient_clipping(model=[a], clipping_type="norm", clipping_threshold=1.0),
    lambda: torch.nn.utils.clip_grads_with_norm_([a], 1.0, torch.tensor(4.0)),
):
    opt.zero_grad()
    a.sum().backward()
    clip()
    opt.step()
""")
    )
    assert [step["coefficient"] for step in record.steps] == pytest.approx([0.5**0.5, 0.25], rel=1e-4)


def test_two_clips_with_different_thresholds_have_none_in_common(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a, b], lr=0.0)
(a.sum() + 10 * b.sum()).backward()
clip_grad_norm_([a], 1.0)
clip_grad_norm_([b], 5.0)
opt.step()
""")
    )
    (step,) = record.steps
    assert "threshold" not in step
    assert [clip[:2] for clip in step["clips"]] == [["norm", 1.0], ["norm", 5.0]]
    assert step["post_norm"] == pytest.approx(26**0.5, rel=1e-4)
    assert step["coefficient"] == pytest.approx((26 / 202) ** 0.5, rel=1e-4)


def test_a_nan_step_has_no_coefficient(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
(a * float("nan")).sum().backward()
clip_grad_norm_([a], 1.0)
opt.step()
""")
    )
    assert "coefficient" not in record.steps[0]


def test_several_scaled_losses_are_unscaled_and_unknown_ones_left_out(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
losses = scaler.scale([a.sum(), 2 * a.sum()])
losses[0].backward()
losses[1].backward()
(scaler.scale(a.sum()) / 2).backward()
scaler.step(opt)
scaler.update()
""")
    )
    assert record.steps[0]["loss"] == pytest.approx(10.5)


def test_a_value_that_is_no_number_ends_nothing(run):
    code, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
opt.param_groups[0]["lr"] = (1, 2)
for _ in range(3):
    a.sum().backward()
    try:
        opt.step()
    except TypeError:
        pass
opt.param_groups[0]["lr"] = 0.0
opt.step()
""")
    )
    assert code == 0
    assert record.end["exit"] == 0


def test_the_command_for_a_module_names_the_module(run, capfd):
    Path("parcel").mkdir()
    Path("parcel/__init__.py").touch()
    Path("parcel/train.py").write_text(script())
    assert main(["run", "--out", "m", "-m", "parcel.train", "a b"]) == 0
    assert read_record("m").meta["argv"] == ["-m", "parcel.train", "a b"]


def test_paths_are_shown_from_where_the_user_stands(run, capfd):
    Path("train.py").write_text(f"import os; os.chdir('/')\n{STEP}")
    assert main(["run", "--out", "out", "train.py"]) == 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "report: out/run.html" in captured.err


def test_several_optimizers_get_no_common_threshold(run):
    from gradguard.monitoring.judge.recommend import recommend

    _, record = run(
        LOOP.format("""
opts = [torch.optim.SGD([p], lr=0.0) for p in (a, b)]
for _ in range(150):
    for p, opt in zip((a, b), opts):
        opt.zero_grad()
        p.sum().backward()
        opt.step()
""")
    )
    assert recommend(record).threshold is None
    assert "Several optimizers" in recommend(record).headline


def test_two_clips_of_the_script_and_then_ours(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a, b], lr=0.0)
(a.sum() + 10 * b.sum()).backward()
clip_grad_norm_([a], 1.0)
clip_grad_norm_([b], 5.0)
opt.step()
"""),
        "--clip",
        "norm=2",
    )
    assert record.steps[0]["post_norm"] == pytest.approx(2.0, rel=1e-4)


def test_a_parameter_that_came_later_is_nobody_s_namesake(run):
    _, record = run(
        LOOP.format("""
opt = torch.optim.SGD([a], lr=0.0)
a.sum().backward()
opt.step()
opt.add_param_group({"params": [b]})
(100 * b.sum()).backward()
opt.step()
""")
    )
    assert record.steps[1]["norm"] > 100
    assert "top" not in record.steps[1]


IDLE = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
assert pool.submit(lambda: 3).result() == 3  # and the pool is never shut down
"""


def test_idle_threads_of_an_executor_are_not_waited_for(run):
    with ThreadPoolExecutor(1) as others:  # the test's own, alive before the script
        others.submit(print).result()
        code, record = run(script(setup=IDLE))
    assert code == 0
    assert len(record.steps) == 6
