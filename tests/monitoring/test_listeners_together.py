"""`gradguard run` does what it does by listeners of one run: alone or in pairs they leave a script's numbers alone.

Each script writes its weights and what its own clips returned; the twin is the script run by Python itself.
"""

import gc
import sys
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradguard as gg
from forked_python import run_python
from gradguard.audit.in_script import ScriptAudit
from gradguard.listeners import Listener
from gradguard.monitoring.observe.meta import living_modules
from gradguard.monitoring.observe.observer import Observer
from gradguard.monitoring.record.file import read_record
from gradguard.replacements import Replacement, place_waiting
from gradguard.resilience.recovery_of_a_script import GuardEachOptimizer
from gradguard.script_events import listening

HEAD = """
import torch, gradguard as gg
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
told, everything = [], lambda: list(model.parameters())
def loss(): return model(torch.randn(5, 6)).square().mean()
def closure():
    opt.zero_grad()
    its = loss()
    its.backward()
    told.append(clip_grad_norm_(everything(), 0.1))
    return its
"""
NOTHING_MADE = "made = lambda *_: None"
TAIL = """
torch.save({"weights": model.state_dict(), "told": told}, "out.pt")
"""
LOOPS = {
    "plain": "loss().backward()",
    "torch.autograd.backward": "torch.autograd.backward([loss(), loss()])",
    "clipped": "loss().backward(); told.append(clip_grad_norm_(everything(), 0.1))",
    "each alone": "loss().backward(); told.extend(clip_grad_norm_(p, 0.05) for p in everything())",
    "with a norm": "loss().backward(); n = get_total_norm([p.grad for p in everything()]);"
    " clip_grads_with_norm_(everything(), 0.1, n)",
    "by value": "loss().backward(); clip_grad_value_(everything(), 0.01)",
    "gradguard": "loss().backward(); told.append(gg.clip_grad_norm_(model, 0.1))",
    "both": "loss().backward(); gg.clip_grad_norm_(model[0], 0.1); told.append(clip_grad_norm_(everything(), 0.1))",
    "accumulated": "[loss().backward() for _ in range(3)]; told.append(clip_grad_norm_(everything(), 0.1))",
    "scaled": "scaler.scale(loss()).backward(); scaler.unscale_(opt); told.append(clip_grad_norm_(everything(), 0.1))",
}


OTHERS = {
    # more programs: what is made before the loop, and a round of it
    "closure": ("", "opt.step(closure)"),
    "L-BFGS": ("opt = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)", "opt.step(closure)"),
    "fused": (
        "opt = torch.optim.AdamW(model.parameters(), 0.01, fused=True)",
        "scaler.scale(loss()).backward(); scaler.step(opt); scaler.update()",
    ),
    "overflows": (
        "",
        "scaler.scale(loss() * (float('inf') if i == 3 else 1)).backward(); scaler.step(opt); scaler.update()",
    ),
    "guarded": (
        "guard = gg.Guard(opt, gg.ClipByMedian(), model=model)",
        "(loss() / (i != 3)).backward() if i == 3 else loss().backward(); opt.step()",
    ),
    "skips spikes": (
        "guard = gg.Guard(opt, gg.ClipByGlobalNorm(0.1), spikes=gg.SkipSpikes())",
        "guard.record_loss(loss()).backward(); opt.step()",
    ),
    "two optimizers": (
        "opt = torch.optim.SGD(model[0].parameters(), 0.1); second = torch.optim.SGD(model[3].parameters(), 0.1)",
        "second.zero_grad(); loss().backward(); clip_grad_norm_(everything(), 0.1); opt.step(); second.step()",
    ),
    "frozen": (
        "opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9); model[0].bias.requires_grad_(False)",
        "loss().backward(); told.append(clip_grad_norm_(everything(), 0.1)); opt.step()",
    ),
    "error clip": (
        "",
        "its = loss(); block = gg.error_clip(its, gg.ErrorClipByValue(0.01)); block.__enter__(); its.backward();"
        " block.__exit__(None, None, None); opt.step()",
    ),
    "never cleared": ("opt.zero_grad = lambda: None", "loss().backward(); opt.step()"),
}


def script(loop):
    if loop in OTHERS:
        before, body = OTHERS[loop]
        return f"{HEAD}{before}\nmade(opt, model)\nfor i in range(7):\n    opt.zero_grad()\n    {body}\n{TAIL}"
    step = "scaler.step(opt); scaler.update()" if loop == "scaled" else "opt.step()"
    return f"{HEAD}made(opt, model)\nfor _ in range(7):\n    opt.zero_grad()\n    {LOOPS[loop]}\n    {step}\n{TAIL}"


LISTENERS = {
    "record": lambda path: Observer(path, {}),
    "audit": lambda path: ScriptAudit(living_modules, 2, goes_on=True),
    "spikes": lambda path: GuardEachOptimizer(),
}


def outcome(source, path, monkeypatch, *names):
    monkeypatch.chdir(path)
    gc.collect()  # a record looks at all optimizers that live, also those of the script before
    made = [LISTENERS[name](path / f"{name}.jsonl") for name in names if name in LISTENERS]
    monitors = []

    def monitored(optimizer, model):
        if "monitor" in names:
            monitors.append(gg.Monitor(optimizer, sink=path / "monitor.jsonl", model=model))

    with listening(*made):
        exec(compile(source, "train.py", "exec"), {"made": monitored})
    for monitor in monitors:
        monitor.close()
    names = [name for name in names if name in LISTENERS]
    for one in made:
        if isinstance(one, Observer):
            one.close(0, False)
    return torch.load("out.pt"), dict(zip(names, made, strict=True))


def same(a, b):
    assert a["weights"].keys() == b["weights"].keys()
    assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
    assert all(torch.equal(x, y) for x, y in zip(a["told"], b["told"], strict=True))


PAIRS = [("record", "audit"), ("audit", "spikes"), ("spikes", "record")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("loop", LOOPS)
def test_listeners_and_pairs_of_them_change_no_bit(loop, tmp_path, monkeypatch):
    twin, _ = outcome(script(loop), tmp_path, monkeypatch)
    for names in PAIRS + [(name,) for name in LISTENERS if loop in ("plain", "both")]:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        found, made = outcome(script(loop), folder, monkeypatch, *names)
        same(found, twin)
        if "audit" in made:
            assert made["audit"].done
        if "record" in made:
            steps = read_record(folder / "record.jsonl").steps
            assert len(steps) == 7
            assert all("loss" in step for step in steps)


EVERY = [*LISTENERS, "monitor"]
ALONE_AND_PAIRS = [names for size in (1, 2) for names in combinations(EVERY, size)]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("loop", [*OTHERS, *LOOPS])
def test_every_listener_and_pair_of_them_on_twenty_programs_changes_no_bit(loop, tmp_path, monkeypatch):
    twin, _ = outcome(script(loop), tmp_path, monkeypatch)
    known = list(map(set, PAIRS if loop in LOOPS else []))  # which the test above takes
    for names in [names for names in ALONE_AND_PAIRS if set(names) not in known]:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        found, _ = outcome(script(loop), folder, monkeypatch, *names)
        same(found, twin)
        for name in {"record", "monitor"}.intersection(names):
            assert len(read_record(folder / f"{name}.jsonl").steps) >= 7
            assert not [e for e in read_record(folder / f"{name}.jsonl").events if e["kind"] == "observer_failed"]


@pytest.mark.parametrize("loop", ["plain", "clipped", "gradguard", "scaled", "each alone"])
def test_a_record_says_the_same_beside_an_audit(loop, tmp_path, monkeypatch):
    found = []
    for names in (("record",), ("audit", "record")):
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        outcome(script(loop), folder, monkeypatch, *names)
        steps = read_record(folder / "record.jsonl").steps
        found.append([{key: value for key, value in step.items() if key != "wall"} for step in steps])
    assert found[0] == found[1]


SEVERAL_LOSSES = {
    "two": ("torch.autograd.backward([loss(), 3 * loss()])", "(loss() + 3 * loss()).backward()"),
    "of one element": ("torch.autograd.backward((loss().reshape(1), loss()))", "(loss() + loss()).backward()"),
    "twice": (
        "[torch.autograd.backward([loss(), loss()]) for _ in range(2)]",
        "[(loss() + loss()).backward() for _ in 'ab']",
    ),
    "weighted": (
        "torch.autograd.backward([loss(), loss()], [torch.tensor(2.0), torch.tensor(0.5)])",
        "(2 * loss() + 0.5 * loss()).backward()",
    ),
    "one, weighted": ("loss().backward(torch.tensor(3.0))", "(3 * loss()).backward()"),
    "scaled": ("torch.autograd.backward(scaler.scale([loss(), loss()]))", "scaler.scale(loss() + loss()).backward()"),
    "one not scaled": ("torch.autograd.backward([scaler.scale(loss()), 64 * loss()])", None),
    "one no scalar": ("torch.autograd.backward([loss(), model(torch.ones(3, 6))], [None, torch.ones(3, 1)])", None),
}


@pytest.mark.parametrize("case", SEVERAL_LOSSES)
def test_a_backward_from_several_losses_has_their_sum(case, tmp_path, monkeypatch):
    found = []
    for loop in filter(None, SEVERAL_LOSSES[case]):
        monkeypatch.setitem(LOOPS, "scaled" if "scale" in loop else "several", loop)
        folder = tmp_path / str(len(found))
        folder.mkdir()
        outcome(script("scaled" if "scale" in loop else "several"), folder, monkeypatch, "record")
        steps = read_record(folder / "record.jsonl").steps
        found.append([(step.get("loss"), step.get("backwards")) for step in steps])
    if len(found) == 1:
        assert found == [[(None, None)] * 7]
        return
    for ours, twin in zip(*found, strict=True):
        assert (ours[0], ours[1]) == (pytest.approx(twin[0], rel=1e-5), twin[1])


OPTIONS = {
    "--out": ["--out", "out", "--no-report"],
    "--audit-norm": ["--audit-norm"],
    "--resilient": ["--resilient", "--out", "out", "--no-report"],
    "--save-gradients": ["--save-gradients", "saved.safetensors", "--perturbed", "0"],
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NOTHING_MADE + script("clipped"))

    def go(*options):
        Path("out.pt").unlink(missing_ok=True)
        return run_python("-m", "gradguard", "run", "--force", *options, "train.py", cwd=tmp_path, check=False)

    return go


PAIRS_OF_OPTIONS = combinations(["--out", "--audit-norm", "--resilient"], 2)
TOGETHER = [*(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in PAIRS_OF_OPTIONS), tuple(OPTIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
def test_options_that_work_alone_work_together(names, command, tmp_path):
    exec(compile(script("clipped"), "train.py", "exec"), {"made": lambda *_: None})
    twin = torch.load("out.pt")
    said = command(*(word for name in names for word in OPTIONS[name]))
    assert said.returncode == 0, said.stderr
    same(torch.load("out.pt"), twin)
    assert ("PASS" in said.stderr) == ("--audit-norm" in names)
    assert said.stdout == ""
    assert ("--resilient skipped 0 of 7 steps" in said.stderr) == ("--resilient" in names)
    assert (tmp_path / "saved.safetensors").exists() == ("--save-gradients" in names)
    assert (tmp_path / "out" / "run.jsonl").exists()


def test_an_audit_beside_a_record_has_its_exit_code_and_lets_the_script_go_on(command):
    Path("train.py").write_text(
        NOTHING_MADE
        + script("with a norm").replace("n = get_total_norm", "n = 2 * get_total_norm")
        + "print('to the end')"
    )
    said = command("--audit-norm", "--out", "out", "--no-report")
    assert (said.returncode, "FAIL" in said.stderr, said.stdout) == (1, True, "to the end\n")
    assert len(read_record(Path("out/run.jsonl")).steps) == 7


def test_a_script_that_fails_behind_its_audit_has_its_own_exit_code(command):
    Path("train.py").write_text(NOTHING_MADE + script("clipped") + "raise SystemExit(5)")
    said = command("--audit-norm", "--out", "out", "--no-report")
    assert (said.returncode, "PASS" in said.stderr) == (5, True)


@pytest.mark.filterwarnings("ignore")
def test_a_clip_of_fsdp1_on_one_process_is_one_clip(tmp_path):
    """There it calls PyTorch's function, which is replaced, too."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu"))
        optimizer, observer = torch.optim.SGD(model.parameters(), 0.1), Observer(tmp_path / "run.jsonl", {})
        with listening(observer):
            model(torch.ones(2, 3)).sum().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
        observer.close(0, False)
    finally:
        torch.distributed.destroy_process_group()
    [step] = read_record(tmp_path / "run.jsonl").steps
    assert (step["rule"], step["threshold"], "clips" in step) == ("norm", 0.1, False)


def test_nobody_hears_of_what_an_audit_tries():
    """An audit calls a clip again, to see what it does: another listener hears of one clip a step."""

    class Count(Listener):
        clips = 0

        def on_clipped(self, event):
            self.clips += 1

    model = torch.nn.Linear(3, 2)
    optimizer, count = torch.optim.SGD(model.parameters(), 0.1), Count()
    with listening(ScriptAudit(living_modules, 2, goes_on=True), count):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            gg.clip_grad_norm_(model, 0.05)
            optimizer.step()
    assert count.clips == 6


def test_a_block_that_ends_gives_back_what_it_replaced_and_tells_the_listener():
    heard, listener = [], Listener()
    listener.on_begin, listener.on_end = lambda: heard.append("begin"), lambda: heard.append("end")

    def places():
        return torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler.step, torch.autograd._engine_run_backward

    before = places()
    with suppress(ValueError), listening(listener):
        pairs = zip(places(), before, strict=True)  # what another test has left may listen already
        assert all(now is not then or hasattr(then, "_replaced_by_gradguard") for now, then in pairs)
        raise ValueError
    assert (places(), heard) == (before, ["begin", "end"])


def test_a_function_of_a_package_that_is_imported_later_is_replaced_then(monkeypatch):
    later = Replacement("engine_of_a_test", "Engine.clip", lambda original, *args: ("ours", original(*args)))
    end = later.use()
    module = ModuleType("engine_of_a_test")
    module.Engine = type("Engine", (), {"clip": lambda self: "theirs"})
    monkeypatch.setitem(sys.modules, "engine_of_a_test", module)
    assert module.Engine().clip() == "theirs"
    place_waiting()
    assert module.Engine().clip() == ("ours", "theirs")
    end()
    end()
    assert module.Engine().clip() == "theirs"


def test_uses_that_have_ended_before_the_package_is_imported_leave_it_alone(monkeypatch):
    later = Replacement("engine_of_a_test", "clip", lambda original: ("ours", original()))
    for end in [later.use(), later.use()]:
        end()
    module = ModuleType("engine_of_a_test")
    module.clip = lambda: "theirs"
    monkeypatch.setitem(sys.modules, "engine_of_a_test", module)
    place_waiting()
    assert module.clip() == "theirs"
    assert not hasattr(module.clip, "_replaced_by_gradguard")
