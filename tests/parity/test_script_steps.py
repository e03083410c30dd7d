"""`gradguard run --save-gradients --at N --steps K`: whole steps of scripts, which are functions here."""

import copy
from functools import cache, partial

import pytest
import torch
from test_script_gradients import refusal, saved_from
from torch import nn
from torch.nn import functional as F

import gradguard as gg
from forked_python import run_python, run_ranks
from gradguard.parity import scales
from gradguard.parity.compare import compare
from gradguard.parity.saved import read

X, Y = torch.randn(2, 6, 24, 6, generator=torch.Generator().manual_seed(7))
"""Six batches."""

TAKES, UPDATE = "gradient that the optimizer takes at step", "update of step"


def network(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 6)).to(dtype)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), 1e-2, **{"weight_decay": 0.1, **options})


def plain(model, x, y, step):
    F.mse_loss(model(x), y).backward()


def in_three(model, x, y, step):
    for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
        (F.mse_loss(model(a), b) / 3).backward()


def clipped(model, optimizer, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def training(
    model=network, optimizer=adamw, backward=plain, update=clipped, *, first=0, resumed=lambda *_: None, wrapped=None
):
    """A script: it builds a model and an optimizer, and trains on batch after batch."""

    def script(world):
        net = model()
        steps = optimizer(net)
        resumed(net, steps)
        called = wrapped(net) if wrapped else net
        world.modules, world.optimizers = [net], [steps]
        for i in range(first, len(X)):
            backward(called, X[i], Y[i], i)
            update(net, steps, i)

    return script


def whole(script, folder, at=1, steps=2, perturbed=2):
    return saved_from(script, folder, perturbed, at=at, steps=steps)


@cache
def reference(folder, at=1, steps=2):
    return whole(training(), folder, at, steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("steps")


def test_it_is_what_save_gradients_says_of_the_same_steps(folder):
    model = network()
    optimizer = adamw(model)
    batches = []  # of a run, from its first step on

    def step():
        i = len(batches) % 2
        batches.append(i)
        F.mse_loss(model(X[i]), Y[i]).backward()

    def update():
        clipped(model, optimizer, 0)

    right, found = gg.save_gradients(None, model, step, optimizer=optimizer, update=update, steps=2), reference(folder)
    assert list(found.stages) == list(right.stages)
    assert found.settings == right.settings
    for name, stage in found.stages.items():
        assert stage.parameters == right.stages[name].parameters, name
        (a, *_), (b, *_) = (one.sketches["gradient"] for one in (stage, right.stages[name]))
        assert [list(map(list, a))] == [list(map(list, b))], name
    report = compare(right, found)
    assert report.verdict == "PASS", str(report)


# What is healthy.


def scaled(model, optimizer, scale=1024.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def update(model, _, step):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return scaler, update


def with_scaler(world, scale=1024.0):
    model = network()
    optimizer = adamw(model)
    world.modules, world.optimizers = [model], [optimizer]
    scaler, update = scaled(model, optimizer, scale)
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        if i == 1:  # a step that the scaler leaves out
            scaler.scale(F.mse_loss(model(x), y) * torch.inf).backward()
            update(model, optimizer, i)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        update(model, optimizer, i)


def evaluated(model, optimizer, step):
    clipped(model, optimizer, step)
    model.eval()
    with torch.no_grad():
        model(X[0])
    model.train()


def guarded(model):
    optimizer = adamw(model)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    return optimizer


def unclipped(model, optimizer, step):
    optimizer.step()
    optimizer.zero_grad()


def zeroed_before(model, x, y, step):
    model.zero_grad(set_to_none=False)
    plain(model, x, y, step)


def by_hand(model, optimizer, step):
    """A clip that nobody sees: twice the loss has not twice the gradient."""
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad *= (0.1 / norm).clamp(max=1)
    unclipped(model, optimizer, step)


exhaustive = pytest.mark.exhaustive
HEALTHY = {
    "in three micro-batches": training(backward=in_three),
    "fused": training(optimizer=lambda m: adamw(m, fused=True)),
    "compiled": training(wrapped=lambda m: torch.compile(m, backend="aot_eager")),
    "with a GradScaler, and a step left out": with_scaler,
    "evaluated between steps": training(update=evaluated),
    "clipped within the step": training(optimizer=guarded, update=unclipped),
    "gradients kept as zeros": training(backward=zeroed_before),
    "functional": training(wrapped=lambda m: lambda x: torch.func.functional_call(m, dict(m.named_parameters()), x)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "how",
    [pytest.param(n, marks=pytest.mark.slow if n == "compiled" else ()) for n in HEALTHY],
)
@pytest.mark.parametrize("at", [1, pytest.param(3, marks=exhaustive)])
def test_healthy_scripts_pass(how, at, folder):
    report = compare(reference(folder, at), whole(HEALTHY[how], folder, at))
    assert report.verdict == "PASS", str(report)
    assert {s.name for s in report.stages} >= {f"{TAKES} 2", f"{UPDATE} 2"}
    assert report.power < 1e-3


OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "Adam, tiny eps": lambda m: torch.optim.Adam(m.parameters(), 1e-2, eps=1e-15),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 1e-3),
    "LBFGS": None,
}


def test_loss_scales_that_differ_are_a_note(folder):
    report = compare(whole(with_scaler, folder), whole(partial(with_scaler, scale=64.0), folder))
    assert report.verdict == "PASS", str(report)
    assert "the loss scale is 512 in the reference and 32 in the new run" in report.notes


def closures(backward):
    def script(world):
        model = network()
        world.modules, world.optimizers = [model], [torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)]

        def closure():
            model.zero_grad()
            backward(model, X[0], Y[0], 0)
            return F.mse_loss(model(X[0]), Y[0])

        for _ in X:
            world.optimizers[0].step(closure)

    return script


@pytest.mark.parametrize("name", [n if n == "LBFGS" else pytest.param(n, marks=exhaustive) for n in OPTIMIZERS])
@pytest.mark.parametrize(("at", "steps"), [(2, 0), pytest.param(4, 2, marks=exhaustive)])
def test_rounding_is_no_fault_a_few_steps_in(name, at, steps, folder):
    optimizer = OPTIMIZERS[name]
    scripts = [training(optimizer=optimizer, backward=how) if optimizer else closures(how) for how in (plain, in_three)]
    report = compare(*(whole(script, folder, at, steps) for script in scripts))
    assert report.verdict == "PASS", str(report)


def signs(turned):
    """A gradient of 1000 numbers of size 1, but for one that is nearly zero, and of either sign."""

    def script(world):
        model = nn.Linear(1000, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 1000))
        numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        numbers[7] = -4e-8 if turned else 4e-8
        world.modules, world.optimizers = [model], [torch.optim.Adam(model.parameters(), 1e-3)]
        for _ in range(3):
            model(numbers).sum().backward()
            unclipped(model, world.optimizers[0], 0)

    return script


def test_an_update_that_jumps_where_a_gradient_is_nearly_zero_is_no_fault(folder, monkeypatch):
    for at in (1, 2):  # then the weights are those of either sign
        report = compare(*(whole(signs(turned), folder, at, at % 2) for turned in (False, True)))
        assert report.verdict == "PASS", str(report)
    monkeypatch.setattr(scales, "_LOUD", 0.0)
    report = compare(*(whole(signs(turned), folder) for turned in (False, True)))
    assert (report.verdict, report.findings[0].stage) == ("FAIL", f"{UPDATE} 1")


# Bugs, each at its stage.


def twice_the_schedule(model, optimizer, step):
    clipped(model, optimizer, step)
    optimizer.param_groups[0]["lr"] *= 0.25


def the_schedule(model, optimizer, step):
    clipped(model, optimizer, step)
    optimizer.param_groups[0]["lr"] *= 0.5


def decay_of_matrices(model):
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip(groups, (0.1, 0), strict=True)], 1e-2)


def without_zero_grad(model, optimizer, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def two_steps(model, optimizer, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def clamped(model, optimizer, step):
    clipped(model, optimizer, step)
    model[1].weight.clamp_(max=1.0)


def divided_at_first(model, x, y, step):
    for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
        (F.mse_loss(model(a), b) / (3 if step == 0 else 1)).backward()


def clipped_still_scaled(world):
    model = network()
    optimizer = adamw(model)
    world.modules, world.optimizers = [model], [optimizer]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in zip(X, Y, strict=True):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


BUGS = {
    "no clip": (training(update=unclipped), None, f"{TAKES} 1", "factor"),
    "weight decay of all": (training(), training(optimizer=decay_of_matrices), f"{UPDATE} 1", "different"),
    "another beta": (training(optimizer=lambda m: adamw(m, betas=(0.9, 0.99))), None, "state after step 1", "factor"),
    "a schedule stepped twice": (training(update=twice_the_schedule), training(update=the_schedule), f"{UPDATE} 2",
                                 "factor"),
    "gradients left over": (training(update=without_zero_grad), None, "gradient of step 2", "different"),
    "an optimizer that steps twice": (training(update=two_steps), None, "gradient of step 2", "different"),
    "weights changed behind the step": (training(update=clamped), None, f"{UPDATE} 1", "different"),
    "accumulation from the second step on": (training(backward=divided_at_first), None, "gradient of step 2", "factor"),
    "clipped before it is unscaled": (clipped_still_scaled, with_scaler, "", "factor"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_named_at_the_stage_where_they_are(name, folder):
    wrong, right, stage, kind = BUGS[name]
    report = compare(whole(right, folder) if right else reference(folder), whole(wrong, folder))
    assert report.verdict == "FAIL", str(report)
    assert {f.stage for f in report.findings if f.kind != "clip"} == {stage}, str(report)
    assert kind in {f.kind for f in report.findings}


def frozen_after(which):
    def update(model, optimizer, step):
        clipped(model, optimizer, step)
        if step == which:
            model[0].requires_grad_(False)

    return update


def test_a_layer_that_is_frozen_between_saved_steps_is_saved_and_compared(folder):
    frozen = whole(training(update=frozen_after(0)), folder)
    report = compare(frozen, whole(training(update=frozen_after(0), backward=in_three), folder))
    assert report.verdict == "PASS", str(report)
    report = compare(reference(folder), frozen)
    assert report.verdict == "FAIL"
    assert {(f.kind, f.stage, f.parameters) for f in report.findings} == {
        ("missing", "gradient of step 2", ("0.weight", "0.bias"))
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("update", "words"),
    [
        (frozen_after(1), "requires_grad after step 2 is 1 in the reference and 0 in the new run, of 0.bias, 0.weight"),
        (twice_the_schedule, "the optimizer's lr after step 1 is 0.01 in the reference and 0.0025 in the new run"),
    ],
    ids=["a frozen layer", "a schedule"],
)
def test_what_acts_after_the_last_saved_step_is_no_pass(update, words, folder):
    steps = 2 if update is not twice_the_schedule else 1
    report = compare(reference(folder, 1, steps), whole(training(update=update), folder, steps=steps))
    assert (report.verdict, [f.kind for f in report.findings]) == ("INCONCLUSIVE", ["settings"]), str(report)
    assert any(words in note for note in report.notes), str(report)


def estimated(model, optimizer, step):
    """A step size as Prodigy estimates it: of the gradients, and of use to the next step."""
    optimizer.param_groups[0]["d"] = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    clipped(model, optimizer, step)


def test_an_estimate_among_the_settings_is_no_difference(folder):
    report = compare(*(whole(training(update=estimated, backward=how), folder) for how in (plain, in_three)))
    assert report.verdict == "PASS", str(report)


def checkpoint(steps=2):
    model = network()
    optimizer = adamw(model)
    for i in range(steps):
        plain(model, X[i], Y[i], i)
        clipped(model, optimizer, i)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def loads(what):
    file = checkpoint()

    def resumed(model, optimizer):
        weights, state = copy.deepcopy(file)
        model.load_state_dict(weights)
        if what == "counters":
            for one in state["state"].values():
                one["step"] = torch.zeros(())
        if what != "weights":
            optimizer.load_state_dict(state)

    return resumed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "verdict", "missing"),
    [("all", "PASS", ""), ("weights", "FAIL", "exp_avg of 0.weight"), ("counters", "FAIL", "step of 0.weight")],
)
def test_a_resumed_script_is_compared_with_the_one_that_went_on(what, verdict, missing, folder):
    went_on, resumed = reference(folder, 3), whole(training(first=2, resumed=loads(what)), folder)
    report = compare(went_on, resumed)
    assert report.verdict == verdict, str(report)
    if missing:
        assert {f.stage for f in report.findings} == {"state before step 1"}
        assert missing in {p for f in report.findings for p in f.parameters}


@pytest.mark.parametrize(("is_lost", "verdict"), [(False, "PASS"), (True, "INCONCLUSIVE")])
def test_a_resume_without_its_scheduler_is_no_pass(is_lost, verdict, folder):
    """The learning rate is in the optimizer's state, and what a new scheduler makes of it differs after these steps."""
    schedulers, kept = [], []

    def scheduled(model, optimizer):
        schedulers[:] = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def loaded(model, optimizer):
        scheduled(model, optimizer)
        weights, states, counts = copy.deepcopy(kept[0])
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        if not is_lost:
            schedulers[0].load_state_dict(counts)

    def update(model, optimizer, step):
        clipped(model, optimizer, step)
        schedulers[0].step()
        if step == 1 and not kept:
            kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedulers[0].state_dict())))

    went_on = whole(training(update=update, resumed=scheduled), folder, at=3)
    report = compare(went_on, whole(training(update=update, resumed=loaded, first=2), folder))
    assert report.verdict == verdict, str(report)
    said = "the optimizer's StepLR.last_epoch after step 1 is 3 in the reference and 1 in the new run"
    assert any(said in note for note in report.notes) is is_lost
    assert not any("lr is" in note for note in report.notes)


def mixed_precision(stale=False, chunks=1, threshold=0.0):
    """Weights of 16 bits that are copied from master weights, which a resume leaves as they were."""

    def model():
        net = network(torch.bfloat16)
        for p in net.parameters():
            p.main_param = (p.detach().float() + 0.01 * stale).requires_grad_()
        return net

    def backward(net, x, y, step):
        for a, b in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (F.mse_loss(net(a.bfloat16()).float(), b) / chunks).backward()

    def update(net, optimizer, step):
        for p in net.parameters():
            p.main_param.grad = p.grad.float()
        if threshold:
            nn.utils.clip_grad_norm_([p.main_param for p in net.parameters()], threshold)
        optimizer.step()
        for p in net.parameters():
            p.data.copy_(p.main_param)
            p.grad = None

    return training(model, lambda net: torch.optim.AdamW([p.main_param for p in net.parameters()]), backward, update)


def test_stale_master_weights_are_found(folder):
    right, wrong = (whole(mixed_precision(stale), folder) for stale in (False, True))
    split = whole(mixed_precision(chunks=3), folder)
    assert compare(right, split).verdict == "PASS", str(compare(right, split))
    report = compare(right, whole(mixed_precision(threshold=0.01), folder))
    assert {f.stage for f in report.findings} == {f"{TAKES} 1"}, str(report)
    report = compare(right, wrong)
    assert (report.verdict, {f.stage for f in report.findings}) == ("FAIL", {"state before step 1"}), str(report)
    assert all(p.startswith("master weights of") for f in report.findings for p in f.parameters)


def averaging(decay):
    def script(world):
        net = network()
        optimizer = adamw(net)
        average = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        )
        world.modules, world.optimizers = [net, average], [optimizer]
        for i in range(len(X)):
            plain(net, X[i], Y[i], i)
            clipped(net, optimizer, i)
            average.update_parameters(net)

    return script


def test_an_average_of_the_weights_is_compared(folder):
    right = whole(averaging(0.9), folder)
    assert not right.left_out
    assert compare(right, whole(averaging(0.9), folder)).verdict == "PASS"
    report = compare(right, whole(averaging(0.5), folder))
    assert {f.stage for f in report.findings} == {"copies of the weights after step 2"}, str(report)
    assert all(p.startswith("AveragedModel.module of") for f in report.findings for p in f.parameters)


class Shadow:
    """An average in an object of no known class, in a dict by name or in a list."""

    def __init__(self, model, decay, kind):
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.decay, self.kind, self.shadow = decay, kind, kept if kind is dict else [*kept.values()]

    def update(self, model):
        kept = self.shadow.values() if self.kind is dict else self.shadow
        for average, p in zip(kept, model.parameters(), strict=True):
            average.lerp_(p.detach(), 1 - self.decay)


def shadowed(decay, kind=dict, lost=False):
    def script(world):
        net = network()
        optimizer, average = adamw(net), Shadow(net, decay, kind)
        best = {name: p.detach().clone() for name, p in net.named_parameters()}  # is no object's
        world.modules, world.optimizers = [net], [optimizer]
        if not lost:
            for kept in average.shadow.values() if kind is dict else average.shadow:
                kept.mul_(0.5)
        for i in range(len(X)):
            plain(net, X[i], Y[i], i)
            clipped(net, optimizer, i)
            average.update(net)
        assert best

    return script


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [dict, list])
def test_an_average_in_a_plain_object_is_compared(kind, folder):
    right = whole(shadowed(0.9, kind), folder)
    assert not right.left_out
    assert compare(right, whole(shadowed(0.9, kind), folder)).verdict == "PASS"
    for wrong, stage in (
        (shadowed(0.5, kind), "copies of the weights after step 1"),
        (shadowed(0.9, kind, lost=True), "state before step 1"),
    ):
        report = compare(right, whole(wrong, folder))
        assert {f.stage for f in report.findings} == {stage}, str(report)
        assert all(p.startswith("Shadow.shadow of") for f in report.findings for p in f.parameters)
    assert whole(shadowed(0.9, kind), folder, steps=0).left_out == ("Shadow.shadow",)


class Hidden(Shadow):
    """An object whose attributes cannot be listed, as of some classes of C."""

    @property
    def __dict__(self):
        raise AttributeError


def test_an_object_that_hides_its_attributes_is_no_average(folder):
    hidden = Hidden(network(), 0.9, dict)
    assert compare(whole(shadowed(0.9), folder), whole(shadowed(0.9), folder)).verdict == "PASS"
    assert hidden.decay == 0.9


class SAM(torch.optim.Optimizer):
    """Moves weights up along the gradient of a first pass, and steps by that of a second one, from where they began."""

    def __init__(self, model, restores=True):
        self.base = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        super().__init__(self.base.param_groups, {})
        self.base.param_groups, self.restores = self.param_groups, restores

    @torch.no_grad()
    def rise(self):
        self.weights = [p for group in self.param_groups for p in group["params"]]
        self.before = [p.clone() for p in self.weights]
        size = torch.stack([p.grad.norm() for p in self.weights]).norm()
        for p in self.weights:
            p.add_(0.05 * p.grad / size)
        self.zero_grad()

    @torch.no_grad()
    def fall(self):
        for p, kept in zip(self.weights, self.before if self.restores else self.weights, strict=True):
            p.copy_(kept)
        self.base.step()
        self.zero_grad()

    def step(self, closure):
        self.rise()
        closure()
        self.fall()


def sharpness_aware(restores=True, chunks=1, by_hand=False):
    def script(world):
        net = network()
        optimizer = SAM(net, restores)
        world.modules, world.optimizers = [net], [optimizer]
        for x, y in zip(X, Y, strict=True):

            def closure(x=x, y=y, net=net):
                for a, b in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
                    (F.mse_loss(net(a), b) / chunks).backward()

            closure()
            if by_hand:
                optimizer.rise()
                closure()
                optimizer.fall()
            else:
                optimizer.step(closure)

    return script


def test_weights_that_an_optimizer_moves_before_its_step_are_those_the_step_begins_with(folder):
    right = whole(sharpness_aware(), folder)
    for healthy in (sharpness_aware(chunks=2), sharpness_aware(by_hand=True)):
        report = compare(right, whole(healthy, folder))
        assert report.verdict == "PASS", str(report)
    report = compare(right, whole(sharpness_aware(restores=False), folder))
    assert report.verdict == "FAIL", str(report)


def with_closures(first=0):
    """A script whose forward passes are within the steps, as Lightning's are; resumed at batch ``first``."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)

    def train(batches, net, optimizer):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    pairs = [*zip(X, Y, strict=True)]
    train(pairs[:first], net, optimizer)

    def script(world):
        own, steps = copy.deepcopy((net, optimizer))
        world.modules, world.optimizers = [own], [steps]
        train(pairs[first:], own, steps)

    return script


def test_the_first_step_with_a_closure_is_compared_like_later_ones(folder):
    right = whole(with_closures(), folder, at=3)
    report = compare(right, whole(with_closures(2), folder))
    assert report.verdict == "PASS", str(report)
    assert f"{TAKES} 1" in {stage.name for stage in report.stages}


class Critic(nn.Linear):
    pass


def two_models(lr):
    def script(world):
        torch.manual_seed(0)
        first, second = Critic(6, 6), nn.Linear(6, 6)
        world.modules = [first, second]
        world.optimizers = [torch.optim.Adam(first.parameters(), 1e-2), torch.optim.Adam(second.parameters(), lr)]
        for x in X:
            for optimizer, sign in zip(world.optimizers, (1, -1), strict=True):
                (sign * second(first(x))).square().mean().backward()
                optimizer.step()
                for one in world.optimizers:
                    one.zero_grad()

    return script


def test_two_optimizers_step_in_turn(folder):
    right = whole(two_models(1e-2), folder, at=2)
    assert compare(right, right).verdict == "PASS"
    report = compare(right, whole(two_models(1e-2), folder, at=2))
    assert report.verdict == "PASS", str(report)
    report = compare(whole(two_models(1e-2), folder), whole(two_models(2e-2), folder))
    assert {f.stage for f in report.findings} == {f"{UPDATE} 1"}, str(report)
    assert {p for f in report.findings for p in f.parameters} == {"Linear.weight", "Linear.bias"}


# What is left behind, what is refused, and what nobody has measured.


def test_of_single_runs_only_what_no_rounding_makes_is_a_fault(folder):
    right, again = (whole(training(backward=how), folder, perturbed=0) for how in (plain, in_three))
    assert compare(right, again).verdict in ("PASS", "INCONCLUSIVE")
    report = compare(right, whole(training(update=unclipped), folder, perturbed=0))
    assert report.verdict == "FAIL"
    assert {f.stage for f in report.findings if f.kind == "factor"} == {f"{TAKES} 1"}


def one_of_two(world):
    torch.manual_seed(0)
    first, second = Critic(6, 6), nn.Linear(6, 6)
    world.modules = [first, second]
    world.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
    for x in X:
        second(first(x)).square().mean().backward()
        world.optimizers[0].step()


def test_steps_that_cannot_be_counted_are_refused(folder):
    words = r"SGD is about to make a second step before each trained parameter has had one"
    for how in ({"at": 2}, {"steps": 1}):
        assert words in refusal(one_of_two, folder, **how)


def test_a_script_is_left_as_it_was(folder):
    """Hooks of the run are gone: the optimizer of a script that has ended steps as before."""
    kept = []
    whole(lambda world: (training()(world), kept.append(world)), folder)

    def script(world):
        kept.append(world)
        training()(world)

    whole(script, folder)
    optimizer = kept[-1].optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


TRAIN = """
import sys, torch, torch.distributed as dist
kind = sys.argv[1]
rank, world = 0, 1
if kind != "alone":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), 2
torch.manual_seed(0)
model = net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 6))
x, y = torch.randn(2, 4, 16, 6)
if kind != "alone":
    model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for i, (a, b) in enumerate(zip(x, y)):
    own = slice(rank * 16 // world, (rank + 1) * 16 // world)
    torch.nn.functional.mse_loss(model(a[own]), b[own]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind == "drift" and rank == 1:
        net[2].weight.data += 1e-4
    print("a step was made")
    if rank == 0:
        open(f"weights {i}", "w").write(repr([p.tolist() for p in net.parameters()]))
"""


@pytest.mark.exhaustive
def test_the_command_saves_steps_and_names_the_first_that_parts(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    save = ["-m", "gradguard", "run", "--save-gradients"]
    done = run_python(
        *save, "alone", "--at", "2", "--steps", "2", "--perturbed", "1", "train.py", "alone", cwd=tmp_path, timeout=900
    )
    assert "steps 2 to 3 are in alone" in done.stderr
    assert done.stdout.count("a step was made") == 3
    assert len(read(tmp_path / "alone").sketches["gradient"]) == 4  # as it is, twice, changed, turned
    of_runs = (tmp_path / "weights 1").read_text(encoding="utf-8")
    run_python("train.py", "alone", cwd=tmp_path)
    assert of_runs == (tmp_path / "weights 1").read_text(encoding="utf-8")
    failed = run_python(*save, "none", "--at", "9", "train.py", "alone", cwd=tmp_path, check=False, timeout=900)
    assert failed.returncode == 2
    assert "before its optimizer step 9 was over" in " ".join(failed.stderr.split())
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verdict"), [pytest.param("ddp", "PASS", marks=exhaustive), ("drift", "FAIL")])
def test_replicas_have_the_steps_of_one_process(kind, verdict, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    save = ["-m", "gradguard", "run", "--steps", "2", "--perturbed", "0", "--save-gradients", "new", "train.py", kind]
    run_ranks(2, *save, cwd=tmp_path, timeout=900)

    def alone(world):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        x, y = torch.randn(2, 4, 16, 6)
        world.modules, world.optimizers = [model], [torch.optim.AdamW(model.parameters(), 1e-2)]
        for a, b in zip(x, y, strict=True):
            plain(model, a, b, 0)
            unclipped(model, world.optimizers[0], 0)

    report = compare(whole(alone, tmp_path), tmp_path / "new")
    assert report.verdict == verdict, str(report)
    if kind == "drift":
        assert {(f.kind, f.stage) for f in report.findings} == {("ranks", f"{UPDATE} 1")}, str(report)
        assert {p for f in report.findings for p in f.parameters} == {"2.weight"}
