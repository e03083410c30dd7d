"""`gradguard run --save-gradients`: what a script's first step is, seen from outside; scripts as functions here."""

import copy
import json
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from language_models import accumulated, batch, language_model, loss_of
from torch import nn

import gradguard as gg
from forked_python import run_python, run_ranks
from gradguard.cli import main
from gradguard.cli.run import COMMAND
from gradguard.errors import RecordError
from gradguard.parity.compare import compare
from gradguard.parity.forked_runs import check_same
from gradguard.parity.judge import bar_of
from gradguard.parity.rounding_runs import merged, with_rounding
from gradguard.parity.saved import read
from gradguard.parity.scales import ScriptRun
from gradguard.parity.script_pair import ScriptGradients
from gradguard.script_events import listening
from one_run import InThisProcess
from parity.runs import drawn, rounded, saved


class Alone:
    """One run of a script: what exists is what the script has put into these lists."""

    def __init__(self, script):
        self.modules, self.optimizers, self.script = [], [], script

    def saved(self, file, how):
        run = InThisProcess(file, how)
        watch = ScriptGradients(run, lambda: self.modules, lambda: self.optimizers)
        try:
            with listening(watch):
                self.script(self)
                watch.finish()
        except SystemExit:
            pass
        return run


def refusal(script, tmp_path, **how):
    watch = Alone(script).saved(tmp_path / "file", ScriptRun(**how))
    assert not watch.done
    return watch.refusal


def saved_from(script, tmp_path, perturbed=2, used=None, **steps):
    """What `ForkedRuns` makes of a script, each run of which is a call here."""

    def run(how):
        watch = Alone(script).saved(tmp_path / "file", how)
        assert watch.done, watch.refusal
        if used is not None:
            used.append(how.scale)
        return read(tmp_path / "file")

    return with_rounding(run, ScriptRun(**steps), perturbed, check_same)


def training(
    seed=0, dtype=torch.float32, step=None, clip=lambda model: None, optimizer=torch.optim.AdamW, steps=3, **how
):
    """A script: a model, an optimizer, a loop of several steps."""

    def script(world):
        torch.manual_seed(seed)
        model = language_model(seed, dtype, **{"blocks": 1, **how})
        world.modules, world.optimizers = [model], [optimizer(model.parameters(), lr=0.1)]
        act = (step or one_batch)(model, batch(seed))
        for _ in range(steps):
            act()
            clip(model)
            world.optimizers[0].step()
            world.optimizers[0].zero_grad()
        raise AssertionError("it should have ended at its first step")

    return script


def clipped_by_itself(model, data):
    """A clip of the script's own, which is not seen: twice the loss has not twice the gradient."""

    def step():
        loss_of(model, *data).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= 1e-3 / norm

    return step


@pytest.mark.parametrize(
    ("how", "scales"), [("one_batch", [1.0, 2.0, 1.5859375, 1.1640625]), ("clipped", [1.0, 2.0, 1.0, 1.0, 1.0])]
)
def test_a_script_is_scaled_where_it_is_linear(tmp_path, how, scales):
    script, used = training(step=one_batch if how == "one_batch" else clipped_by_itself), []
    saved = saved_from(script, tmp_path, 2, used)
    assert used == scales
    assert len(saved.sketches["gradient"]) == 4
    report = compare(saved, saved)
    assert report.verdict == "PASS"
    assert report.power < 1e-4


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return saved_from(training(), tmp_path_factory.mktemp("reference"))


def one_batch(model, data):
    return lambda: loss_of(model, *data).backward()


def by_hand(model, data):
    for block in model.blocks:
        block.by_hand = True
    return one_batch(model, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_save_gradients_says_of_the_same_step(tmp_path, dtype):
    model = language_model(dtype=dtype, blocks=1)
    right = gg.save_gradients(None, model, one_batch(model, batch()), perturbed=2)
    found = saved_from(training(dtype=dtype), tmp_path)
    assert [list(map(list, run)) for run in found.sketches["gradient"]] == right.sketches["gradient"]
    assert [list(map(list, run)) for run in found.sketches["weights"]] == right.sketches["weights"]
    assert (found.parameters, found.epsilon, found.random) == (right.parameters, right.epsilon, False)


HEALTHY = {
    "the same": {},
    "accumulated": {"step": accumulated},
    "attention by hand": {"step": by_hand},
    "another optimizer": {"optimizer": torch.optim.SGD},
    "clipped by PyTorch": {"clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3)},
    "clipped by value": {"clip": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4)},
    "clipped by gradguard": {"clip": lambda m: gg.clip_grad_norm_(m.parameters(), 1e-3)},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", HEALTHY.values(), ids=HEALTHY)
def test_healthy_scripts_pass(tmp_path, how, reference):
    report = compare(reference, saved_from(training(**how), tmp_path))
    assert report.verdict == "PASS", str(report)


def times_8(model, data):
    return lambda: (8 * loss_of(model, *data)).backward()


@pytest.mark.parametrize("how", ["clipped by PyTorch", "clipped by value", "clipped by gradguard"])
def test_no_clip_hides_a_factor(tmp_path, how):
    right, wrong = (saved_from(training(step=step, **HEALTHY[how]), tmp_path) for step in (one_batch, times_8))
    (finding,) = compare(right, wrong).findings
    assert finding.factor == pytest.approx(8)


def test_micro_batches_are_counted_and_name_the_factor(tmp_path, reference):
    wrong = training(step=lambda m, d: accumulated(m, d, 4, scale=1.0))
    (finding,) = compare(reference, saved_from(wrong, tmp_path)).findings
    assert (finding.kind, finding.factor_name) == ("factor", "micro-batches")


def test_the_clip_of_deepspeeds_float32_engine_hides_no_factor(tmp_path, monkeypatch, reference):
    """It multiplies gradients by itself, and is looked up in the engine's module at each step."""
    engine = types.ModuleType("deepspeed.runtime.engine")

    def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
        norm = torch.stack([p.grad.norm(norm_type) for p in parameters]).norm()
        for p in parameters:
            p.grad.mul_(max_norm / norm)
        return norm

    engine.clip_grad_norm_ = clip_grad_norm_
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    script = training(clip=lambda m: engine.clip_grad_norm_(parameters=list(m.parameters()), max_norm=1e-3, mpu=None))
    assert compare(reference, saved_from(script, tmp_path)).verdict == "PASS"
    assert engine.clip_grad_norm_ is clip_grad_norm_


def clipped_between(model, data):
    def act():
        for tokens, targets in zip(*(part.chunk(2) for part in data), strict=True):
            loss_of(model, tokens, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    return act


def test_a_clip_between_micro_batches_is_never_a_pass(tmp_path):
    one = saved_from(training(step=clipped_between), tmp_path)
    report = compare(one, one)
    assert (report.verdict, [f.kind for f in report.findings]) == ("INCONCLUSIVE", ["clip"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("between", "verdict"), [("nothing", "PASS"), ("a second clip", "PASS"), ("a factor", "INCONCLUSIVE")]
)
@pytest.mark.parametrize("home", [nn.utils, gg], ids=["PyTorch", "gradguard"])
def test_what_happens_between_a_clip_and_the_step_is_not_hidden(tmp_path, home, between, verdict, reference):
    def act(model):
        home.clip_grad_norm_(model.parameters(), 1e-3)
        if between == "a factor":
            model.head.weight.grad *= 2
        elif between == "a second clip":
            home.clip_grad_norm_(model.head.parameters(), 1e-4)

    report = compare(reference, saved_from(training(clip=act), tmp_path))
    assert report.verdict == verdict, str(report)


def test_a_factor_between_two_clips_is_not_hidden(tmp_path, reference):
    def act(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.head.weight.grad *= 2
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    report = compare(reference, saved_from(training(clip=act), tmp_path))
    assert report.verdict == "INCONCLUSIVE"


def test_a_guard_acts_after_what_is_saved(tmp_path, reference):
    def guarded(parameters, lr):
        optimizer = torch.optim.SGD(parameters, lr)
        gg.Guard(optimizer, gg.ClipByGlobalNorm(1e-3))
        return optimizer

    report = compare(reference, saved_from(training(optimizer=guarded), tmp_path))
    assert report.verdict == "PASS", str(report)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_is_taken_off_as_the_optimizer_does(tmp_path, fused, overflows, reference):
    def scaled(world):
        model = language_model(blocks=1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        world.modules, world.optimizers = [model], [optimizer]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(2):
            scaler.scale(loss_of(model, *batch())).backward()
            if overflows and i == 0:
                model.head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    found = saved_from(scaled, tmp_path)
    assert found.facts["loss scale"] == (512.0 if overflows else 1024.0)
    assert found.facts["micro-batches"] == 1
    report = compare(reference, found)
    assert report.verdict == "PASS", str(report)


def test_a_clip_of_scaled_gradients_is_told(tmp_path, reference):
    """Lightning#9599."""

    def scaled(world):
        model = language_model(blocks=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        world.modules, world.optimizers = [model], [optimizer]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, *batch())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    report = compare(reference, saved_from(scaled, tmp_path))
    assert report.verdict == "FAIL"
    assert [(f.kind, f.factor_name) for f in report.findings] == [
        ("factor", "loss scale"),
        ("clip", ""),
    ]


class Generator(nn.Linear):
    pass


def two_models(kinds, factor=1.0):
    def script(world):
        torch.manual_seed(0)
        first, second = (kind(4, 4) for kind in kinds)
        world.modules = [first, second, nn.Linear(2, 2)]
        world.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
        for _ in range(2):
            second(first(torch.ones(2, 4)).detach()).square().sum().backward()
            world.optimizers[1].step()
            (factor * second(first(torch.ones(2, 4))).square().sum()).backward()
            world.optimizers[0].step()

    return script


def test_each_of_two_optimizers_is_taken_at_its_own_step(tmp_path):
    right = saved_from(two_models([Generator, nn.Linear]), tmp_path)
    assert {p.name for p in right.parameters} == {
        f"{m}.{p}" for m in ("Generator", "Linear") for p in ("weight", "bias")
    }
    assert compare(right, right).verdict == "PASS"
    wrong = saved_from(two_models([Generator, nn.Linear], 3.0), tmp_path)
    assert {p for f in compare(right, wrong).findings for p in f.parameters} == {"Generator.weight", "Generator.bias"}


def test_one_optimizer_that_steps_twice_ends_it(tmp_path):
    def script(world):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        world.modules = [model]
        world.optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            world.optimizers[0].step()
        raise AssertionError("it should have ended")

    assert [p.name for p in saved_from(script, tmp_path).parameters] == ["weight"]


def test_lbfgs_is_taken_after_its_first_evaluation(tmp_path, reference):
    def script(world):
        model = language_model(blocks=1)
        world.modules, world.optimizers = [model], [torch.optim.LBFGS(model.parameters())]

        def closure():
            world.optimizers[0].zero_grad()
            loss = loss_of(model, *batch())
            loss.backward()
            return loss

        world.optimizers[0].step(closure)

    assert compare(reference, saved_from(script, tmp_path)).verdict == "PASS"


def test_passes_before_there_is_an_optimizer_are_no_first_pass(tmp_path, reference):
    def script(world):
        model = language_model(blocks=1)
        world.modules = [model]
        loss_of(model, *batch())  # to see whether it fits
        with torch.no_grad():
            model.head.weight.add_(0)
        world.optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
        with torch.no_grad():
            loss_of(model, *batch())
        loss_of(model, *batch()).backward()
        world.optimizers[0].step()

    assert compare(reference, saved_from(script, tmp_path)).verdict == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("is_root", [True, False])
def test_a_compiled_model_is_the_model(tmp_path, is_root, reference):
    def script(world):
        model = language_model(blocks=1)
        compiled = torch.compile(model, backend="aot_eager")
        world.modules = [compiled if is_root else model]
        world.optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
        loss_of(compiled, *batch()).backward()
        world.optimizers[0].step()

    found = saved_from(script, tmp_path, 1)
    report = compare(reference, found)
    assert report.verdict == "PASS", str(report)
    assert found.epsilon == 2.0**-23


def test_dropout_is_noticed(tmp_path):
    assert saved_from(training(dropout=0.2), tmp_path).random


def left_out_of_the_optimizer(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kept = [p for name, p in model.named_parameters() if name != "1.bias"]
    world.modules, world.optimizers = [model], [torch.optim.SGD(kept, 0.1)]
    model(torch.ones(5, 3)).square().mean().backward()
    world.optimizers[0].step()


def test_a_parameter_that_is_in_no_optimizer_is_named(tmp_path):
    found = saved_from(left_out_of_the_optimizer, tmp_path, 1)
    assert found.left_out == ("1.bias, which is in no optimizer",)
    assert "1.bias, which is in no optimizer" in str(compare(found, found))


def averaged(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    average, other = torch.optim.swa_utils.AveragedModel(model), nn.Linear(3, 3)
    world.modules, world.optimizers = [model, average, other], [torch.optim.SGD(model.parameters(), 0.1)]
    model(torch.ones(5, 3)).square().mean().backward()
    world.optimizers[0].step()


def test_an_average_of_the_weights_is_named_as_not_compared(tmp_path):
    found = saved_from(averaged, tmp_path, 1)
    assert found.left_out == ("the weights of a second model, AveragedModel (an average, a target?)",)


def test_files_of_different_steps_are_told_to_begin_with_the_same(tmp_path, reference):
    later = saved_from(training(), tmp_path, 1, at=2)
    assert "begin with the same step of training in both (--at)" in str(compare(reference, later))


# Refusals.


def engine(world):
    model = nn.Linear(2, 2)
    flat = nn.Parameter(torch.zeros(6))
    world.modules, world.optimizers = [model], [torch.optim.SGD([flat, model.weight], 0.1)]
    model(torch.ones(2)).sum().backward()
    world.optimizers[0].step()


def temperature(world):
    model, scale = nn.Linear(2, 2), torch.ones((), requires_grad=True)
    world.modules, world.optimizers = [model], [torch.optim.SGD([*model.parameters(), scale], 0.1)]
    (model(torch.ones(2)).sum() * scale.exp()).backward()
    world.optimizers[0].step()


def without_forward(world):
    model = nn.Linear(2, 2)
    world.modules, world.optimizers = [model], [torch.optim.SGD(model.parameters(), 0.1)]
    model.weight.square().sum().backward()
    world.optimizers[0].step()


def without_gradient(world):
    model = nn.Linear(2, 2)
    world.modules, world.optimizers = [model], [torch.optim.SGD(model.parameters(), 0.1)]
    model(torch.ones(2))
    world.optimizers[0].step()


REFUSED = {
    "an engine's own weights": (
        engine,
        "1 of the 2 parameters of SGD belong to no model that was called before the step, or is saved, "
        "the first of shape [6]",
    ),
    "no forward pass of a model": (without_forward, "2 of the 2 parameters of SGD belong to no model"),
    "no gradient": (without_gradient, "no parameter has a gradient at the first optimizer step"),
    "a temperature beside the model": (temperature, "make it a parameter of a module that is called"),
    "two models of one class": (two_models([nn.Linear, nn.Linear]), "trains 2 models of the class Linear"),
}


@pytest.mark.parametrize(("script", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_from_outside_is_refused(tmp_path, script, words):
    assert words in refusal(script, tmp_path)


def test_a_script_that_begins_with_other_weights_is_refused(tmp_path):
    counter = iter(range(10))
    with pytest.raises(RecordError, match=r"other weights at its first step.*--seed 0"):
        saved_from(lambda world: training(seed=next(counter))(world), tmp_path)


def test_a_script_that_takes_other_samples_each_time_is_refused(tmp_path):
    counter = iter(range(10))

    def other(model, data):
        del data
        return lambda: loss_of(model, *batch(next(counter))).backward()

    with pytest.raises(RecordError, match=r"not the same twice: half of its gradients differ by .*Seed it"):
        saved_from(training(step=other), tmp_path)


def test_weights_that_are_set_after_the_first_pass_are_refused(tmp_path):
    def script(world):
        model = language_model(blocks=1)
        kept = copy.deepcopy(model.state_dict())
        world.modules, world.optimizers = [model], [torch.optim.SGD(model.parameters(), 0.1)]
        loss_of(model, *batch())
        model.load_state_dict(kept)  # and what was changed by rounding is lost
        loss_of(model, *batch()).backward()
        world.optimizers[0].step()

    with pytest.raises(RecordError, match="set no weights after"):
        saved_from(script, tmp_path)


def test_runs_with_other_parameters_are_refused(tmp_path):
    one, other = (saved_from(training(blocks=k), tmp_path, 0) for k in (1, 2))
    with pytest.raises(RecordError, match="other parameters from run to run"):
        merged([one, other])


# A single run, of which nobody knows what rounding does.


def test_of_a_single_run_only_what_no_rounding_makes_is_a_fault(tmp_path):
    right, again = (saved_from(training(), tmp_path, 0) for _ in range(2))
    assert compare(right, again).verdict == "PASS"
    other = saved_from(training(step=by_hand), tmp_path, 0)
    assert compare(right, other).verdict != "FAIL"  # as far apart as sums may round, or more
    report = compare(right, saved_from(training(step=times_8), tmp_path, 0))
    assert report.verdict == "FAIL"
    assert {f.factor_name for f in report.findings if f.kind == "factor"} == {""}
    dead = saved({"up": drawn((8, 32), 1) * 0}, runs=0)
    assert compare(saved({"up": drawn((8, 32), 1)}, runs=0), dead).verdict == "INCONCLUSIVE"  # may be rounding alone


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1e-7, 1e-2, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("shape", [(), (2,), (16,), (8, 32)], ids=str)
def test_no_rounding_of_whatever_size_is_a_factor(shape, size):
    names = [str(i) for i in range(200)]
    right = {n: drawn(shape, int(n)) for n in names}
    new = {n: rounded(g, size, 9_000 + int(n)) for n, g in right.items()}
    kinds = {o.kind for o in compare(saved(right, runs=0), saved(new, runs=0)).parameters}
    assert kinds <= {"unknown", "equal"}


# As a person types it.


def test_what_follows_the_options_is_the_script():
    line = ["run", "--save-gradients", "ref.safetensors", "--perturbed", "2", "train.py", "--lr", "1"]
    assert COMMAND.cut(line)[1].words == ["train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save-gradients", "x", "--steps", "3", "--out", "y"], "a separate command with --out"),
        (["--save-gradients", "x", "--at", "0"], "--at 0: expected a number of steps"),
        (["--at", "3"], "requires --save-gradients"),
        (["--save-gradients", "x", "--launch", "env", "--clip", "median"], "a separate command with --clip"),
        (["--save-gradients", "x", "--perturbed", "-1"], "expected a number of runs"),
        (["--save-gradients", "nowhere/x"], "there is no folder"),
        (["--perturbed", "3"], "requires --save-gradients"),
        (["--perturbed", "0"], "requires --save-gradients"),
        (["--launch", "torchrun"], "requires --save-gradients"),
        (["--launch", "torchrun", "--audit-norm"], "requires --save-gradients"),
        (["--save-gradients", "x", "--launch", "nosuchlauncher -n 2"], "there is no such command"),
        (["--save-gradients", "x", "--launch", ""], "there is no such command"),
    ],
)
def test_options_that_do_not_go_together(arguments, words, capsys):
    assert main(["run", *arguments, "train.py"]) == 2
    assert words in capsys.readouterr().err


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
rank, kind = 0, sys.argv[1]
if kind == "ddp":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
x, y = torch.randn(8, 6), torch.randn(8, 3)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
    x, y = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for a, b in DataLoader(TensorDataset(x, y), batch_size=len(x)):
    (torch.nn.functional.mse_loss(model(a), b) * (8 if kind == "wrong" else 1)).backward()
    optimizer.step()
    print("a step was made")
"""


def gradguard(folder, *arguments):
    return run_python("-m", "gradguard", *arguments, cwd=folder, check=False, timeout=900, starts_more=True)


@pytest.mark.slow
def test_the_command_saves_and_compares(tmp_path):
    tmp_path.joinpath("train.py").write_text(SCRIPT, encoding="utf-8")
    launcher = ["--launch", shlex.join([sys.executable, "-B"])]
    for name, perturbed, launch in (("alone", "1", []), ("wrong", "0", launcher)):
        done = gradguard(tmp_path, "run", "--save-gradients", name, "--perturbed", perturbed, *launch, "train.py", name)
        assert done.returncode == 0, done.stderr
        assert f"the gradients of step 1 are in {name}" in done.stderr
        assert "a step was made" not in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "train.py", "wrong"]
    done = gradguard(tmp_path, "parity", "--json", "alone", "wrong")
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["factor"] == pytest.approx(8)
    assert len(read(tmp_path / "alone").sketches["gradient"]) == 3


def test_several_processes_are_run_once(tmp_path, monkeypatch):
    tmp_path.joinpath("train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = gradguard(tmp_path, "run", "--save-gradients", "saved", "train.py", "alone")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "gradguard run --launch 'torchrun --nproc-per-node 2' --save-gradients FILE SCRIPT" in said
    assert "add --perturbed 0" in said
    done = gradguard(tmp_path, "run", "--save-gradients", "saved", "--launch", "torchrun", "train.py", "alone")
    assert done.returncode == 2
    assert "call gradguard run once, without torchrun" in " ".join(done.stderr.split())
    assert not (tmp_path / "saved").exists()


@pytest.mark.exhaustive
def test_a_launcher_starts_the_processes_of_each_run(tmp_path):
    """Of two processes that are started together for each run the bars are measured, as for one."""
    tmp_path.joinpath("train.py").write_text(SCRIPT, encoding="utf-8")
    launch = shlex.join([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    alone = gradguard(tmp_path, "run", "--perturbed", "1", "--save-gradients", "alone", "train.py", "alone")
    assert alone.returncode == 0, alone.stderr
    save = ["run", "--perturbed", "1", "--launch", launch, "--save-gradients"]
    done = gradguard(tmp_path, *save, "ddp", "train.py", "ddp")
    assert done.returncode == 0, done.stderr
    two = read(tmp_path / "ddp")
    assert (len(two.sketches["gradient"]), {p.copies for p in two.parameters}) == (3, {2})
    assert compare(tmp_path / "alone", tmp_path / "ddp").verdict == "PASS"
    for p, bar in zip(two.parameters, map(bar_of, two.measured().values()), strict=True):
        assert bar is not None, p.name
        assert bar > 0
    failed = gradguard(tmp_path, *save, "nothing", "train.py")  # sys.argv[1] is not there
    assert failed.returncode == 1
    assert "IndexError" in failed.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_torchrun_has_the_gradients_of_one_process(tmp_path):
    tmp_path.joinpath("train.py").write_text(SCRIPT, encoding="utf-8")
    save = ["run", "--perturbed", "0", "--save-gradients"]
    assert gradguard(tmp_path, *save, "alone", "train.py", "alone").returncode == 0
    run_ranks(2, "-m", "gradguard", *save, "ddp", "train.py", "ddp", cwd=tmp_path, starts_more=True)
    report = compare(tmp_path / "alone", tmp_path / "ddp")
    assert report.verdict == "PASS", str(report)
    assert {p.copies for p in read(tmp_path / "ddp").parameters} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "words"), [("print(1)", 2, "before its optimizer step 1"), ("1 / 0", 1, "ZeroDivision")]
)
def test_a_script_without_a_step_saves_nothing(tmp_path, script, code, words):
    tmp_path.joinpath("train.py").write_text(script, encoding="utf-8")
    done = gradguard(tmp_path, "run", "--save-gradients", "file", "train.py")
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_a_field_of_old_files_has_a_default():
    assert replace(saved({"a": drawn((3,), 1)}), clipped=True).clipped
    assert not saved({"a": drawn((3,), 1)}).clipped


_SWALLOWS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    try:
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    except BaseException:
        print("swallowed", step, flush=True)
print("ran to its end")
"""


def test_a_script_that_catches_all_is_ended_at_its_next_step(tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "file"
    script.write_text(_SWALLOWS)
    done = gradguard(tmp_path, "run", "--perturbed", "0", "--save-gradients", file, script)
    assert (done.returncode, done.stdout.split()) == (0, ["swallowed", "0"])
    assert len(read(file).parameters) == 2


_ONCE = """
import os, sys, tempfile, threading, torch
from torch.utils.data import DataLoader, TensorDataset
open("starts", "a").write("x")
how = sys.argv[1]
torch.manual_seed(0)
def note(worker):
    print(os.getpid(), file=open("workers", "a"))
with tempfile.TemporaryDirectory() as folder:
    if how == "OpenMP":
        torch.set_num_threads(2)
    if how == "thread":
        threading.Thread(target=print).start()
    a = torch.randn(600, 600)
    torch.save(torch.randn(4, 3) + (a @ a).sign().mean(), f"{folder}/x")
    model = torch.nn.Sequential(torch.nn.Linear(3, 600), torch.nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = TensorDataset(torch.load(f"{folder}/x"))
    for x, in DataLoader(rows, 1, num_workers=how == "worker", worker_init_fn=note):
        (model(x) @ a).square().mean().backward()
        optimizer.step()
print(os.path.exists(folder))
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["plain", "OpenMP", "thread", "worker"])
def test_a_script_is_started_once_and_cleans_up_once(tmp_path, how):
    """What it has made before the first forward pass is there for each run; none waits for threads that are not."""
    tmp_path.joinpath("train.py").write_text(_ONCE, encoding="utf-8")
    done = gradguard(tmp_path, "run", "--perturbed", "1", "--save-gradients", "file", "train.py", how)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["gradguard: the gradients of step 1 are in file"]
    assert (tmp_path / "starts").read_text() == "x"
    assert len(read(tmp_path / "file").sketches["gradient"]) == 3
    workers = (tmp_path / "workers").read_text().split() if how == "worker" else []
    assert len(workers) == (3 if how == "worker" else 0)
    assert not any(Path("/proc", pid).exists() for pid in workers)


_READS = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with open("data", "rb", buffering=0) as data:
    for step in range(4):
        x = torch.tensor(list(data.read(3))) / 100
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_each_run_reads_an_open_file_from_the_same_place(tmp_path):
    tmp_path.joinpath("train.py").write_text(_READS, encoding="utf-8")
    tmp_path.joinpath("data").write_bytes(bytes(range(7, 250, 5)))
    done = gradguard(tmp_path, "run", "--steps", "2", "--perturbed", "1", "--save-gradients", "file", "train.py")
    assert done.returncode == 0, done.stderr
    assert compare(tmp_path / "file", tmp_path / "file").power < 1e-4


def test_a_script_that_fails_before_the_step_leaves_a_line(tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "file"
    script.write_text(_SWALLOWS.replace("except BaseException", "except ZeroDivisionError").replace(
        "        optimizer.step()", "        raise RuntimeError('boom')"))  # fmt: skip
    done = gradguard(tmp_path, "run", "--perturbed", "0", "--save-gradients", file, script)
    assert done.returncode == 1
    assert "the script ended with exit code 1 before its optimizer step 1 ended: nothing is saved" in done.stderr
    assert not file.exists()
