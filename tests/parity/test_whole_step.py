"""The whole step: what the optimizer takes, its state, by how much weights change; the first that parts is named."""

import copy
import gc
from functools import cache

import pytest
import torch
from language_models import accumulated, batch, language_model, step_of
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from forked_python import run_ranks
from gradguard import living
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.parity import scales
from gradguard.parity.compare import compare
from gradguard.parity.saved import read
from gradguard.testing import assert_parity

X, Y = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(7))


def network(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 6)).to(dtype)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), 1e-2, **{"weight_decay": 0.1, **options})


def train(model, optimizer, update, steps):
    for _ in range(steps):
        F.mse_loss(model(X), Y).backward()
        update()


def saved(optimizer_of=adamw, *, clip=0.1, before=0, resumed=None, changed=lambda model: None, file=None, steps=2):
    """A training loop's step after ``before`` others; ``resumed`` changes what a checkpoint has brought back."""
    model = network()
    optimizer = optimizer_of(model)

    def update():
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        changed(model)
        optimizer.zero_grad()

    train(model, optimizer, update, before)
    if resumed:
        resumed(model, optimizer)
    step = lambda: F.mse_loss(model(X), Y).backward()  # noqa: E731
    return gg.save_gradients(file, model, step, optimizer=optimizer, update=update, steps=steps, perturbed=2)


@cache
def reference(**options):
    return saved(**options)


def only(report):
    (finding,) = report.findings
    return finding


# What is healthy.


HEALTHY = {
    "the same": lambda: (reference(), saved()),
    "one tensor after the other": lambda: (reference(), saved(lambda m: adamw(m, foreach=False))),
    "fused": lambda: (reference(), saved(lambda m: adamw(m, fused=True))),
    "after a resume": lambda: (reference(before=3), saved(before=3, resumed=lambda m, o: reloaded(o))),
    "without a state": lambda: [saved(lambda m: torch.optim.SGD(m.parameters(), 0.1)) for _ in range(2)],
    "with a clipper of gradguard": lambda: (reference(), guarded()),
}


def reloaded(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def guarded():
    model = network()
    optimizer = adamw(model)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    step = lambda: F.mse_loss(model(X), Y).backward()  # noqa: E731
    return gg.save_gradients(None, model, step, optimizer=optimizer, steps=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", HEALTHY)
def test_healthy_pairs_pass(how):
    report = compare(*HEALTHY[how]())
    assert report.verdict == "PASS", str(report)
    assert {s.name.rstrip(" 123") for s in report.stages} >= {
        "gradient that the optimizer takes at step",
        "update of step",
    }


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.sub_(mean.lerp(p.grad, 0.1).sign(), alpha=1e-3)
            mean.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "Adam, tiny eps": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-15),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Lion": Lion,
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


def permuted(model, data):
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(5))
    return step_of(model, tuple(part[order] for part in data))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(1, 20))])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize(
    "name", [n if n in ("AdamW", "Lion") else pytest.param(n, marks=pytest.mark.exhaustive) for n in OPTIMIZERS]
)
def test_rounding_is_no_fault(name, dtype, seed):
    def run(how):
        model = language_model(seed, dtype, blocks=1)
        return gg.save_gradients(
            None, model, how(model, batch(seed)), optimizer=OPTIMIZERS[name](model.parameters()), steps=2, perturbed=2
        )

    right = run(step_of)
    for how in (permuted, accumulated):
        report = compare(right, run(how))
        assert report.verdict != "FAIL", str(report)
        assert report.verdict == "PASS" or dtype == torch.bfloat16, str(report)


def signs(turned):
    """A gradient of 1000 numbers of size 1, but for one that is nearly zero, and of either sign."""
    model = nn.Linear(1000, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 1000))
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    numbers[7] = -4e-8 if turned else 4e-8
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return gg.save_gradients(None, model, lambda: (model.weight * numbers).sum().backward(), optimizer=optimizer)


def test_an_update_that_jumps_where_a_gradient_is_nearly_zero_is_no_fault(monkeypatch):
    report = compare(signs(turned=False), signs(turned=True))
    assert report.verdict == "PASS", str(report)
    monkeypatch.setattr(scales, "_LOUD", 0.0)
    report = compare(signs(turned=False), signs(turned=True))
    assert (report.verdict, report.findings[0].stage) == ("FAIL", "update of step 1")


# Bugs, each at its stage.


def no_decay_of_vectors(model):
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], 1e-2
    )


def counters(value):
    def change(model, optimizer):
        for state in optimizer.state.values():
            state["step"].fill_(value)

    return change


def swapped(model, optimizer):
    one, other = (optimizer.state[model[i].bias] for i in (0, 1))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def other_model(model, optimizer):
    with torch.no_grad():
        model[0].weight += 0.01


def not_stepped(model):
    return torch.optim.AdamW([p for n, p in model.named_parameters() if n != "3.bias"], 1e-2, weight_decay=0.1)


@torch.no_grad()
def half_of_the_norm(model):
    model[1].weight[6:] = 1.0


BUGS = {
    "no clip": ({"clip": 0}, {}, "gradient that the optimizer takes at step 1", "factor"),
    "half the learning rate": ({"optimizer_of": lambda m: torch.optim.AdamW(m.parameters(), 5e-3, weight_decay=0.1)},
                               {}, "update of step 1", "factor"),
    "weight decay of all": ({}, {"optimizer_of": no_decay_of_vectors}, "update of step 1", "different"),
    "another beta": ({"optimizer_of": lambda m: adamw(m, betas=(0.9, 0.99))}, {}, "state after step 1", "factor"),
    "not stepped": ({"optimizer_of": not_stepped}, {}, "gradient that the optimizer takes at step 1", "missing"),
    "weights set back": ({"changed": half_of_the_norm}, {}, "update of step 1", "different"),
    "moments lost": ({"before": 3, "resumed": lambda m, o: o.state.clear()}, {"before": 3},
                     "state before step 1", "missing"),
    "counters lost": ({"before": 3, "resumed": counters(0)}, {"before": 3}, "state before step 1", "dead"),
    "counters one ahead": ({"before": 3, "resumed": counters(4)}, {"before": 3}, "state before step 1", "different"),
    "moments of another weight": ({"before": 3, "resumed": swapped}, {"before": 3}, "state before step 1", "different"),
    "another model": ({"before": 3, "resumed": other_model}, {"before": 3}, "", "weights"),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_named_at_the_stage_where_they_are(name):
    wrong, right, stage, kind = BUGS[name]
    report = compare((saved if "optimizer_of" in right else reference)(**right), saved(**wrong))
    assert report.verdict == "FAIL", str(report)
    assert {f.stage for f in report.findings} == {stage}, str(report)
    assert kind in {f.kind for f in report.findings}
    assert any("what may follow from it" in note for note in report.notes)


def test_state_that_is_there_as_zeros_is_not_called_missing():
    report = compare(saved(before=3), saved(before=3, resumed=counters(0)))
    assert {f.message for f in report.findings} == {"all zeros in the new run"}, str(report)

    def zeros(model, optimizer):
        for p in model.parameters():
            optimizer.state[p] |= {"step": torch.zeros(()), "exp_avg": p * 0, "exp_avg_sq": p * 0}

    made = saved(resumed=torch.no_grad()(zeros))
    assert compare(saved(), made).verdict == "PASS", "zeros are what a new optimizer begins with"


def test_what_follows_is_folded_and_settings_that_differ_are_named():
    report = compare(saved(no_decay_of_vectors), saved())
    found = {p for f in report.findings for p in f.parameters}
    assert found == {"0.bias", "1.weight", "3.bias"}  # the norm's bias is zero
    assert any("weight_decay is 0 in the reference and 0.1 in the new run, of 0.bias" in note for note in report.notes)
    assert {f.stage for f in report.findings} == {"update of step 1"}


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"weight_decay": 0.101}, "update of step 1"),
        ({"eps": 3e-8}, "update of step 1"),
        ({"betas": (0.9, 0.99901)}, "state after step 1"),
    ],
    ids=str,
)
def test_small_errors_show_and_the_pass_says_how_small(options, stage):
    report = compare(reference(), saved(lambda m: adamw(m, **options)))
    assert {f.stage for f in report.findings} == {stage}, str(report)
    passed = compare(reference(), reference())
    assert all(s.power < 3e-5 for s in passed.stages if s.name.startswith("update"))
    assert "of an update would show in the median one" in str(passed)


def test_a_forgotten_zero_grad_shows_in_the_second_step():
    def run(zeroes):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        update = lambda: (optimizer.step(), zeroes and optimizer.zero_grad())  # noqa: E731
        return gg.save_gradients(
            None, model, lambda: F.mse_loss(model(X), Y).backward(), optimizer=optimizer, update=update
        )

    report = compare(run(True), run(False))
    assert {f.stage for f in report.findings} == {"gradient of step 2"}


def test_master_weights_that_a_resume_forgets():
    def run(forgets):
        model = network(torch.bfloat16)
        for p in model.parameters():
            p.main_param = (p.detach().float() + 0.01 * forgets).requires_grad_()
        optimizer = torch.optim.AdamW([p.main_param for p in model.parameters()], 1e-2)

        def update():
            for p in model.parameters():
                p.main_param.grad = p.grad.float()
            optimizer.step()
            for p in model.parameters():
                p.data.copy_(p.main_param)
                p.grad = None

        step = lambda: F.mse_loss(model(X.bfloat16()).float(), Y).backward()  # noqa: E731
        return gg.save_gradients(None, model, step, optimizer=optimizer, update=update)

    assert_parity(run(False), run(False))
    found = compare(run(False), run(True)).findings[0]
    assert found.stage == "state before step 1"
    assert all(p.startswith("master weights of") for p in found.parameters)


RANKS = """
import sys, torch, torch.distributed as dist, gradguard as gg
from torch.distributed.fsdp import fully_shard
how, file = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 6))
x, y = torch.randn(2, 16, 6)
if how == "fsdp2":
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
def step():
    torch.nn.functional.mse_loss(model(x[8 * rank:][:8]), y[8 * rank:][:8]).backward()
    if how != "fsdp2":
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
def update():
    optimizer.step()
    optimizer.zero_grad()
    if how == "drift" and rank == 1:
        model[2].weight.data += 1e-4
gg.save_gradients(file, model, step, optimizer=optimizer, update=update, steps=2)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["replicas", "drift", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks(how, tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    run_ranks(2, "train.py", how, "new", cwd=tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    x, y = torch.randn(2, 16, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    right = gg.save_gradients(None, model, lambda: F.mse_loss(model(x), y).backward(), optimizer=optimizer, steps=2)
    report = compare(right, tmp_path / "new")
    if how != "drift":
        assert report.verdict == "PASS", str(report)
        return
    found = report.findings[0]
    assert (found.kind, found.stage) == ("ranks", "update of step 1")
    assert found.parameters == ("2.weight",)


# What is left behind, and what is refused.


def bits(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_all_is_as_before(before, raises):
    model, calls = network(), []
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, lambda: (optimizer.step(), optimizer.zero_grad(), scheduler.step()), before)
    holders = (model, optimizer, scheduler)
    kept = [bits(one.state_dict()) for one in holders]

    def update():
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        calls.append(1)
        if raises and len(calls) == 8:
            raise RuntimeError("out of memory")

    save = lambda: gg.save_gradients(  # noqa: E731
        None,
        model,
        lambda: F.mse_loss(model(X), Y).backward(),
        optimizer=optimizer,
        update=update,
        others=[scheduler],
    )
    if raises:
        with pytest.raises(RuntimeError, match="out of memory"):
            save()
    else:
        assert compare(save(), save()).verdict == "PASS"
    assert [bits(one.state_dict()) for one in holders] == kept
    assert all(p.grad is None for p in model.parameters())


def test_a_file_has_all_of_it(tmp_path):
    one = saved(file=tmp_path / "ref")
    other = read(tmp_path / "ref")
    assert list(other.stages) == list(one.stages)
    assert other.settings == one.settings
    report = compare(one, tmp_path / "ref")
    assert (report.verdict, report.largest) == ("PASS", 0)
    assert len(report.as_dict()["stages"]) == len(report.stages) == 7  # before the first step there is no state


def test_what_one_run_alone_has_is_no_pass():
    model = network()
    alone = gg.save_gradients(None, model, lambda: F.mse_loss(model(X), Y).backward())
    for other, words in ((alone, "one run alone has saved"), (saved(steps=1), "gradient of step 2")):
        report = compare(reference(), other)
        assert report.verdict == "INCONCLUSIVE"
        assert words in only(report).message


def test_a_learning_rate_of_zero_is_no_evidence():
    runs = [saved(lambda m: torch.optim.SGD(m.parameters(), 0.0)) for _ in range(2)]
    report = compare(*runs)
    assert (report.verdict, only(report).kind, only(report).stage) == ("INCONCLUSIVE", "blind", "update of step 1")


def test_other_optimizers_state_is_a_note_and_one_step_does_not_show_it():
    plain = lambda m: torch.optim.SGD(m.parameters(), 0.1)  # noqa: E731
    momentum = lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)  # noqa: E731
    report = compare(saved(momentum), saved(plain))
    assert {f.stage for f in report.findings} == {"update of step 2"}
    assert any("only the reference has it in its optimizer's state" in note for note in report.notes)
    assert compare(saved(momentum, steps=1), saved(plain, steps=1)).verdict == "INCONCLUSIVE"


def refused(optimizer=None, *, foreign=False, update=None, others=(), steps=1, drift=False):
    model = network()
    own = adamw(network() if foreign else model)
    calls = []

    def drifting():
        own.param_groups[0]["lr"] = 1e-2 / (1 + len(calls))
        calls.append(1)
        own.step()

    gg.save_gradients(
        None,
        model,
        lambda: F.mse_loss(model(X), Y).backward(),
        optimizer=own if optimizer is None else optimizer,
        update=drifting if drift else update,
        others=others,
        steps=steps,
    )


REFUSED = {
    "no optimizer": ({"optimizer": [3]}, InvalidTypeError, "optimizer is int: expected a torch.optim.Optimizer"),
    "an update alone": ({"optimizer": (), "update": print}, InvalidTypeError, "and with it optimizer="),
    "no steps": ({"steps": 0}, InvalidValueError, "steps=0: expected at least 1"),
    "no state": ({"others": [3]}, InvalidTypeError, "int has no state_dict and load_state_dict"),
    "parameters of another model": ({"foreign": True}, UnsupportedGradientError, "6 of the 6 parameters of AdamW"),
    "no step in it": ({"update": lambda: None}, InvalidValueError, "made no step of the optimizer"),
    "something else changes": ({"drift": True}, UnsupportedGradientError, "not the same twice: which objects"),
}


@pytest.mark.parametrize(("options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_in_words(options, error, words):
    with pytest.raises(error, match=words):
        refused(**options)


def scaled(unscaled_in_step=0, *, clips_in_step=False, enabled=True):
    """Two optimizers under one GradScaler, of which ``step`` unscales the first ones and ``update`` the others."""
    model = network()
    optimizers = [torch.optim.AdamW(part.parameters(), 1e-2) for part in (model[:2], model[3:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731

    def step():
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        for one in optimizers[:unscaled_in_step]:
            scaler.unscale_(one)
        if clips_in_step:
            clip()

    def update():
        for one in optimizers[unscaled_in_step:]:
            scaler.unscale_(one)
        if not clips_in_step:
            clip()
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        model.zero_grad()

    result = gg.save_gradients(
        None, model, step, optimizer=optimizers, update=update, others=[scaler], steps=2, rows=["0.weight"], perturbed=2
    )
    step()  # raises if the scaler has not been put back
    return result


@pytest.mark.parametrize(
    ("unscaled_in_step", "clips_in_step"), [(0, False), (1, False), (2, False), (2, True)], ids=str
)
def test_a_loss_scale_is_taken_off_once_wherever_the_loop_takes_it_off(unscaled_in_step, clips_in_step):
    right = scaled(unscaled_in_step, clips_in_step=clips_in_step, enabled=False)
    new = scaled(unscaled_in_step, clips_in_step=clips_in_step)
    report = compare(right, new)
    assert report.verdict == "PASS", str(report)
    assert any("not compared: the state of GradScaler" in note for note in report.notes)
    assert torch.allclose(*(torch.tensor(run.rows["0.weight"][0]) for run in (right, new)), rtol=1e-4, atol=1e-7)


def test_a_scaler_is_put_back_where_a_step_raises():
    model, calls = network(), []
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        scaler.unscale_(optimizer)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    update = lambda: (scaler.step(optimizer), scaler.update())  # noqa: E731
    with pytest.raises(RuntimeError, match="out of memory"):
        gg.save_gradients(None, model, step, optimizer=optimizer, update=update)
    step()


def test_a_scheduler_that_the_collector_has_frozen_is_put_back(monkeypatch):
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    update = lambda: (optimizer.step(), scheduler.step(), optimizer.zero_grad())  # noqa: E731
    step = lambda: F.mse_loss(model(X), Y).backward()  # noqa: E731
    made = gc.get_objects()
    gc.freeze()  # as servers do before they fork
    monkeypatch.setattr(living, "all_objects", lambda: made)
    gg.save_gradients(None, model, step, optimizer=optimizer, update=update, steps=2, perturbed=1)
    assert scheduler.last_epoch == 0


def test_schedulers_in_a_chain_are_put_back():
    model = network()
    optimizer = adamw(model)
    parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    chain = torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer)
    update = lambda: (optimizer.step(), chain.step(), optimizer.zero_grad())  # noqa: E731
    step = lambda: F.mse_loss(model(X), Y).backward()  # noqa: E731
    gg.save_gradients(None, model, step, optimizer=optimizer, update=update, steps=2, perturbed=1)
    assert [one.last_epoch for one in parts] == [0, 0]


# What a state is besides the optimizer's, and what is left out.


def normed(
    *, resumed=lambda model: None, momentum=0.1, beta=None, steps=1, frozen=1.0, decay=None, scheduled=False, whole=True
):
    """A step of a model with a BatchNorm and a frozen weight; checks that all is put back."""
    model = network()
    model[1] = nn.BatchNorm1d(12, momentum=momentum)
    model[0].unused = nn.Parameter(torch.full((3,), frozen), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-2) if beta is None else torch.optim.SGD(trained, 0.1, momentum=beta)
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(decay or 0.5)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging) if decay else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None

    def update():
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if averaged:
            averaged.update_parameters(model)

    resumed(model)
    holders = [one for one in (model, optimizer, scheduler, averaged) if one]
    kept = [bits(one.state_dict()) for one in holders]
    step = lambda: F.mse_loss(model(X), Y).backward()  # noqa: E731
    others = [averaged] if averaged else []
    options = {"optimizer": optimizer, "update": update, "steps": steps, "others": others} if whole else {}
    result = gg.save_gradients(None, model, step, perturbed=1, **options)
    assert [bits(one.state_dict()) for one in holders] == kept
    return result


STATES = {
    "a mean": ({"resumed": lambda m: m[1].running_mean.fill_(7.0)}, "state before step 1", "buffer 1.running_mean"),
    "a counter": (
        {"resumed": lambda m: m[1].num_batches_tracked.fill_(7)},
        "state before step 1",
        "buffer 1.num_batches_tracked",
    ),
    "momentum of the norm": ({"momentum": 0.9}, "state after step 1", "buffer 1.running_mean"),
    "a frozen weight": ({"frozen": 2.0}, "", "0.unused"),
}


@pytest.mark.parametrize("name", STATES)
def test_buffers_and_frozen_weights_are_compared(name):
    wrong, stage, tensor = STATES[name]
    report = compare(normed(), normed(**wrong))
    assert report.verdict == "FAIL", str(report)
    assert {f.stage for f in report.findings} == {stage}
    assert tensor in report.findings[0].parameters


def test_equal_buffers_pass_and_other_frozen_weights_of_gradients_alone_do_not():
    assert compare(normed(), normed()).verdict == "PASS"
    report = compare(normed(whole=False), normed(whole=False, frozen=2.0))
    assert (report.verdict, only(report).kind, only(report).parameters) == ("INCONCLUSIVE", "weights", ("0.unused",))


def test_a_buffer_that_a_step_replaces_is_put_back():
    model = nn.Linear(6, 6)
    model.register_buffer("seen", torch.zeros(()))
    kept = model.seen

    def step():
        model.seen = model.seen + 1
        F.mse_loss(model(X), Y).backward()

    gg.save_gradients(None, model, step, perturbed=1)
    assert model.seen is kept
    assert kept == 0


def test_a_scheduler_that_is_not_named_is_put_back():
    report = compare(normed(scheduled=True, steps=2), normed(scheduled=True, steps=2))
    assert report.verdict == "PASS", str(report)


def test_an_average_of_the_weights_is_compared():
    assert compare(normed(decay=0.9, steps=2), normed(decay=0.9, steps=2)).verdict == "PASS"
    report = compare(normed(decay=0.9, steps=2), normed(decay=0.5, steps=2))  # the first update copies the weights
    assert (report.verdict, report.findings[0].stage) == ("FAIL", "copies of the weights after step 2"), str(report)
    assert report.findings[0].parameters[0].startswith("AveragedModel.module of ")
    assert not any("not compared" in note for note in report.notes)


def test_an_average_follows_from_the_update_it_averages():
    report = compare(normed(decay=0.9, steps=2, scheduled=True), normed(decay=0.9, steps=2))
    assert {(f.stage, f.kind) for f in report.findings} == {("update of step 2", "factor")}, str(report)
    assert "what may follow from it: 5 of 6 in copies of the weights after step 2" in str(report)


def test_what_others_hold_is_named_as_not_compared(tmp_path):
    class Counter:
        state_dict, load_state_dict = staticmethod(lambda: {"count": torch.ones(2)}), staticmethod(lambda state: None)

    def step():
        F.mse_loss(model(X), Y).backward()

    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = gg.save_gradients(None, model, step, perturbed=1, optimizer=optimizer, others=[Counter()])
    assert found.left_out == ("the state of Counter",)
    saved(file=tmp_path / "ref")
    assert read(tmp_path / "ref").left_out == ()


def test_settings_that_no_step_has_shown_are_no_pass():
    report = compare(normed(beta=0.9), normed(beta=0.8))
    assert (report.verdict, only(report).kind) == ("INCONCLUSIVE", "settings")
    assert "momentum differ, which the saved steps may not show" in only(report).message
    report = compare(normed(scheduled=True), normed())
    assert (report.verdict, only(report).kind) == ("INCONCLUSIVE", "settings")
    assert any("lr after step 1 is 0.009 in the reference and 0.01 in the new run" in note for note in report.notes)
    assert compare(normed(beta=0.9, steps=2), normed(beta=0.8, steps=2)).verdict == "FAIL"
