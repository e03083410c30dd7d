"""Loops that are set up wrong, and loops that look like it: each is trained and watched as users do."""

import sys
from contextlib import ExitStack

import pytest
import torch
from synthetic import make_record
from torch import nn

import gradguard as gg
from forked_python import run_python
from gradguard.monitoring.judge.detectors import loop_faults as loop_setup
from gradguard.monitoring.judge.diagnosis import diagnose
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.observe.watch import stop_watching
from gradguard.monitoring.record.file import read_record

KEPT, NO_GRADIENT, NO_OPTIMIZER, SCALED_CLIP = (
    kind.name
    for kind in (
        loop_setup.KEPT,
        loop_setup.NO_GRADIENT,
        loop_setup.NO_OPTIMIZER,
        loop_setup.SCALED_CLIP,
    )
)
OWN = {KEPT, NO_GRADIENT, NO_OPTIMIZER, SCALED_CLIP}
STEPS = 24


@pytest.fixture(autouse=True)
def _alone(others_unseen):
    torch.manual_seed(0)
    yield
    stop_watching()


class Watching:
    """Watches a loop: the whole process, or each optimizer by a monitor."""

    def __init__(self, how, folder):
        self.how, self.folder, self.paths, self.monitors, self.stack = how, folder, [], [], ExitStack()
        if how == "watch":
            watch = self.stack.enter_context(gg.watch(folder / "run.jsonl", every=1))
            self.paths.append(watch.path)

    def __call__(self, model, *optimizers):
        """The loop is about to begin."""
        for optimizer in optimizers if self.how == "monitor" else ():
            path = self.folder / f"{len(self.paths)}.jsonl"
            monitor = gg.Monitor(optimizer, sink=str(path), model=model, every=1)
            self.monitors.append(self.stack.enter_context(monitor))
            self.paths.append(path)

    def log(self, **values):
        for monitor in self.monitors:
            monitor.log(**values)

    def end(self):
        self.stack.close()
        return [read_record(path) for path in self.paths]


def watched(loop, how, folder):
    watching = Watching(how, folder)
    loop(watching)
    return watching.end()


def own(record):
    return [found for found in findings(record) if found.kind in OWN]


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model):
    return (model(torch.randn(8, 6)) - 1).square().mean()


def train(model, *optimizers, steps=STEPS):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()


# -- loops that are set up wrong ---------------------------------------------------------------------------------------


def forgotten_layer(watching):
    model = mlp()
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.01)
    watching(model, optimizer)
    train(model, optimizer)


def replaced_head(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[4] = nn.Linear(model[4].in_features, model[4].out_features)
    if watching.how == "watch":  # a monitor refuses: the model lacks two of these
        watching(model, optimizer)
    train(model, optimizer)


def head_alone(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.01)
    watching(model, optimizer)
    train(model, optimizer)


def forgotten_encoder(watching, encoder=None):
    encoder, head = encoder or nn.Linear(6, 6), mlp()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    watching(head, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        head(encoder(torch.randn(8, 6))).square().mean().backward()
        optimizer.step()


def layers_in_a_plain_list(watching):
    layers = [nn.Linear(6, 6) for _ in range(3)]
    forgotten_encoder(watching, lambda x: layers[2](layers[1](layers[0](x))))


def trained_encoder(watching):
    encoder = nn.Linear(6, 6)
    for _ in range(5):  # as in a training before this one, whose optimizer is gone
        with torch.no_grad():
            encoder.weight.mul_(1.01)
    forgotten_encoder(watching, encoder)


def loaded_encoder(watching):
    encoder = nn.Linear(6, 6)
    encoder.load_state_dict({"weight": encoder.weight + 1.0, "bias": encoder.bias})  # it has learned one direction
    forgotten_encoder(watching, encoder)


def parameter_of_no_module(watching):
    model, temperature = mlp(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model) * temperature.exp()).backward()
        optimizer.step()


def optimizer_of_a_copy(watching):
    model, other = mlp(), mlp()
    optimizer = torch.optim.AdamW(other.parameters())
    watching(other, optimizer)
    train(model, optimizer)


def one_of_two_optimizers_of_a_copy(watching):
    model, other = mlp(), mlp()
    optimizers = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.01)
    watching(model, optimizers[0])
    watching(other, optimizers[1])
    train(model, *optimizers)


def zero_grad_before_step(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.zero_grad()
        optimizer.step()


def scaled(clip, unscale=False, overflow=(), optimizer=torch.optim.SGD, scale=2.0**10):
    def loop(watching):
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=scale)
        stepper = optimizer(model.parameters(), lr=0.01)
        watching(model, stepper)
        for step in range(STEPS):
            stepper.zero_grad()
            loss = loss_of(model) * (float("inf") if step in overflow else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(stepper)
            clip(model, watching)
            scaler.step(stepper)
            scaler.update()

    return loop


def clip_by_norm(model, watching):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    watching.log(norm=norm, max_norm=0.5)


def clip_by_value(model, watching):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


def clip_by_gradguard(model, watching):
    gg.clip_grad_norm_(model, 0.5)


def no_clip(model, watching):
    pass


def without_zero_grad(make, backwards=1):
    def loop(watching):
        model = mlp()
        optimizer = make(model.parameters())
        watching(model, optimizer)
        for _ in range(STEPS):
            for _ in range(backwards):
                loss_of(model).backward()
            optimizer.step()

    return loop


def zero_grad_of_the_last_layer(watching):
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], lr=0.001)
    watching(model, optimizer)
    for _ in range(STEPS):
        model[2:].zero_grad()
        loss_of(model).backward()
        optimizer.step()


def closure_without_zero_grad(watching):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def closure():
        loss = loss_of(model)
        loss.backward()
        return loss

    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.step(closure)


def scaler_without_zero_grad(watching):
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watching(model, optimizer)
    for _ in range(STEPS):
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()


def one_gradient_far_above_the_others(make, times=1e13):
    def loop(watching):
        model = mlp()
        optimizer = make(model.parameters())
        watching(model, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (loss_of(model) + times * model[4].weight.sum()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            watching.log(norm=norm, max_norm=1.0)
            optimizer.step()

    return loop


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.001)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.001)


def muon(parameters):
    matrices = [p for p in parameters if p.requires_grad_(p.dim() == 2).requires_grad]
    return torch.optim.Muon(matrices, lr=0.001)


BOTH = ("watch", "monitor")
SICK = [
    ("a forgotten layer", forgotten_layer, BOTH, NO_OPTIMIZER, "warning", "2.weight, 2.bias receive gradients"),
    ("a replaced head", replaced_head, ["watch"], NO_OPTIMIZER, "warning", "4.weight, 4.bias receive gradients"),
    ("a head alone", head_alone, BOTH, NO_OPTIMIZER, "info", "0.weight, 0.bias, 2.weight, 2.bias receive gradients"),
    ("a forgotten encoder", forgotten_encoder, ["watch"], NO_OPTIMIZER, "warning", "Linear.weight, Linear.bias rec"),
    ("layers in a list", layers_in_a_plain_list, ["watch"], NO_OPTIMIZER, "warning", "of 3) and 1 more receive"),
    ("a trained encoder", trained_encoder, ["watch"], NO_OPTIMIZER, "info", "Linear.weight, Linear.bias receive"),
    ("a loaded encoder", loaded_encoder, ["watch"], NO_OPTIMIZER, "info", "Linear.weight, Linear.bias receive"),
    ("a parameter of no module", parameter_of_no_module, ["watch"], NO_OPTIMIZER, "warning", "of shape () receives"),
    ("an optimizer of a copy", optimizer_of_a_copy, ["watch"], NO_GRADIENT, "error", "stepped 24 times and none"),
    ("an optimizer of a copy", optimizer_of_a_copy, ["monitor"], NO_GRADIENT, "warning", "stepped 24 times and none"),
    ("one of two", one_of_two_optimizers_of_a_copy, BOTH, NO_GRADIENT, "warning", "2.bias, "),
    ("zero_grad before step", zero_grad_before_step, ["watch"], NO_GRADIENT, "error", "none of its parameters ever"),
    ("a norm clip of scaled gradients", scaled(clip_by_norm), BOTH, SCALED_CLIP, "error", "of 0.5 acts like 0.00049"),
    ("gradguard's", scaled(clip_by_gradguard), BOTH, SCALED_CLIP, "error", "of 0.5 acts like 0.00049"),
    ("a value clip", scaled(clip_by_value), ["watch"], SCALED_CLIP, "error", "24 steps up to step 23"),
    ("with Adam", scaled(clip_by_norm, optimizer=torch.optim.Adam), BOTH, SCALED_CLIP, "error", "scale of 1,024"),
    ("no zero_grad", without_zero_grad(sgd), ["watch"], KEPT, "error", "10 steps in a row backward() added"),
    ("no zero_grad, Adam", without_zero_grad(adam), ["watch"], KEPT, "error", "not cleared"),
    ("no zero_grad, accumulation", without_zero_grad(sgd, backwards=3), ["watch"], KEPT, "error", "not cleared"),
    ("no zero_grad of one group", zero_grad_of_the_last_layer, ["watch"], KEPT, "error", "not cleared"),
    ("no zero_grad, closure", closure_without_zero_grad, ["watch"], KEPT, "error", "not cleared"),
    ("no zero_grad, scaler", scaler_without_zero_grad, ["watch"], KEPT, "error", "not cleared"),
]  # fmt: skip


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("loop", "how", "kind", "severity", "words"),
    [
        pytest.param(loop, how, kind, severity, words, id=f"{name}, {how}")
        for name, loop, ways, kind, severity, words in SICK
        for how in ways
    ],
)
def test_a_loop_that_is_set_up_wrong(loop, how, kind, severity, words, tmp_path):
    records = watched(loop, how, tmp_path)
    first, *others = [one for record in records for one in own(record)]
    assert (first.kind, first.severity) == (kind, severity)
    assert words in first.message
    assert [one.kind for one in others] in ([], [NO_OPTIMIZER])  # of what the loss is of instead
    told = {(event["kind"], event["severity"]) for record in records for event in record.events}
    assert {(one.kind, one.severity) for one in (first, *others)} <= told
    noticed = [event for record in records for event in record.events if event["kind"] in (NO_OPTIMIZER, NO_GRADIENT)]
    said = [(one.message, one.advice) for one in (first, *others) if one.kind in (NO_OPTIMIZER, NO_GRADIENT)]
    at_the_end = [
        (event["message"].replace("stepped 10 times", "stepped 24 times"), event["advice"]) for event in noticed
    ]
    assert sorted(said) == sorted(at_the_end)  # it was told when it was sure, and goes on


@pytest.mark.parametrize(
    ("loop", "starves"),
    [
        (one_gradient_far_above_the_others(adam), True),
        (one_gradient_far_above_the_others(muon), True),
        (one_gradient_far_above_the_others(sgd), False),
        (one_gradient_far_above_the_others(adam, times=100.0), False),
    ],
)
def test_a_clip_that_leaves_gradients_below_eps_is_the_cause(loop, starves, tmp_path):
    (record,) = watched(loop, "watch", tmp_path)
    causes = [cause for cause in diagnose(record).causes if "below its eps" in cause.sentence]
    assert [cause.key for cause in causes] == ["clip_starves"] * starves


@pytest.mark.parametrize("kind", [NO_OPTIMIZER, NO_GRADIENT])
@pytest.mark.parametrize(
    "broken", [{}, {"params": 3}, {"params": [None]}, {"value": "x"}, {"value": True}, {"severity": 1}]
)
def test_an_event_that_somebody_broke_is_told_all_the_same(kind, broken):
    event = {"t": "event", "i": 7, "kind": kind} | broken
    (found,) = findings(make_record(meta={"t": "meta", "eps": 3}, events=[event]))
    assert found.kind == kind


@pytest.mark.parametrize("broken", [{"absent": [-1, 9, "x"]}, {"absent": []}, {"norm": [1.0]}])
def test_arrays_that_do_not_fit_name_nothing(broken):
    meta = {"t": "meta", "optimizers": ["Adam"], "eps": [1e-8], "params": [{"name": "a", "numel": 4}, {"name": "b"}]}
    steps = [{"t": "step", "i": i, "norm": 1.0, "coefficient": 1e-9, "rule": "norm"} for i in range(30)]
    lines = [{"t": "tensors", "i": i, "norm": [0.0, 1.0]} | broken for i in range(30)]
    record = make_record(meta=meta, steps=steps, tensors=lines)
    assert own(record) == []


def test_where_numbers_are_read_later(tmp_path, monkeypatch):
    """As on an accelerator: nothing is looked at before it has been copied."""
    for name in ("kept_gradients", "record_copy"):
        module = sys.modules[f"gradguard.monitoring.observe.{name}"]
        monkeypatch.setattr(module, "are_readable", lambda *tensors: False)
    for loop, kinds in ((without_zero_grad(sgd), [KEPT]), (clearing(by_data), []), (forgotten_layer, [NO_OPTIMIZER])):
        (record,) = watched(loop, "watch", tmp_path)
        assert [found.kind for found in own(record)] == kinds


@pytest.mark.slow
def test_the_command_tells_it(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))\n"
        "optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.01)\n"
        "for _ in range(20):\n"
        "    model(torch.randn(4, 3)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    run_python("-m", "gradguard", "run", "--out", "out", "train.py", cwd=tmp_path)
    found = {one.kind: one for one in own(read_record(tmp_path / "out"))}
    assert found.keys() == {NO_OPTIMIZER, KEPT}
    assert found[NO_OPTIMIZER].params == ("1.weight", "1.bias")


# -- loops that look like it and are healthy ---------------------------------------------------------------------------


def clearing(clear):
    def loop(watching):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watching(model, optimizer)
        for _ in range(STEPS):
            loss_of(model).backward()
            optimizer.step()
            clear(model, optimizer)

    return loop


def by_data(model, optimizer):
    for p in model.parameters():
        p.grad.data.zero_()


def by_none(model, optimizer):
    for p in model.parameters():
        p.grad = None


def accumulation(watching):
    """The last one is not complete."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for batch in range(4 * STEPS + 2):
        (loss_of(model) / 4).backward()
        if batch % 4 == 3 or batch == 4 * STEPS + 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def two_backwards(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        (0.1 * loss_of(model)).backward()
        optimizer.step()


def gan(detach=True, late=0, waits=0):
    def loop(watching):
        generator, critic = mlp(), nn.Linear(2, 1)
        critics = torch.optim.Adam(critic.parameters(), lr=0.01)
        watching(critic, critics)
        generators = None
        for step in range(STEPS):
            fake = generator(torch.randn(4, 6))
            critics.zero_grad()
            (critic(fake.detach() if detach else fake) - critic(torch.randn(4, 2))).mean().backward()
            critics.step()
            if step < late:
                continue
            if generators is None:
                generators = torch.optim.Adam(generator.parameters(), lr=0.01)
                watching(generator, generators)
            if step < waits:
                continue
            generators.zero_grad()  # and the critic gets gradients that its own zero_grad clears later
            (-critic(generator(torch.randn(4, 6)))).mean().backward()
            generators.step()

    return loop


def optimizers_in_phases(watching):
    """Both step in each iteration; the second model is trained later."""
    first, second = mlp(), mlp()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        watching(model, optimizer)
    for step in range(2 * STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(first if step < STEPS else second).backward()
        for optimizer in optimizers:
            optimizer.step()


def optimizer_of_the_frozen(watching):
    model = mlp()
    model[0].requires_grad_(False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[2:])]
    watching(model, *optimizers)
    train(model, *optimizers)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = mlp().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def lora(everything):
    def loop(watching):
        model = Lora()
        trained = model.parameters() if everything else [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        watching(model, optimizer)
        train(model, optimizer)

    return loop


def teacher(watching):
    """A copy that no gradient reaches, and that follows the model."""
    model = nn.ModuleDict({"student": mlp(), "teacher": mlp()})
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 6)
        with torch.no_grad():
            target = model["teacher"](x)
        (model["student"](x) - target).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                old.lerp_(new, 0.1)


def unfrozen_later(watching):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    watching(model, optimizer)
    train(model, optimizer, steps=30)
    optimizer.add_param_group({"params": model[0].requires_grad_(True).parameters()})
    train(model, optimizer, steps=30)


def compiled(watching):
    model = torch.compile(mlp(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    train(model, optimizer)


def guarded_scaler(watching):
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), model=model)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    guard.detach()


def closure(watching):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.step(evaluate)


def groups_and_tied_weights(watching):
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False))
    model[2].weight = model[0].weight
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(9, (8,))
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def sparse_embedding(watching):
    model = nn.Sequential(nn.Embedding(50, 6, sparse=True), mlp())
    optimizers = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())
    watching(model, *optimizers)
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randint(50, (8,))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def updates_by_hand(watching):
    """The second half is trained without an optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        for p in model[4].parameters():
            p.data -= 0.01 * p.grad.data


def master_copies(watching):
    model = mlp().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.0)  # a warm-up: nothing changes yet
    if watching.how == "watch":  # a monitor refuses: the model has none of these
        watching(model, optimizer)
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 6).bfloat16()).float().square().mean().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data.copy_(master.data)


def step_in_backward(watching):
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    if watching.how == "watch":
        watching(model)
    for _ in range(STEPS):
        loss_of(model).backward()


def rare_experts(watching):
    model = nn.ModuleList([mlp() for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model[step % 4]).backward()
        optimizer.step()


def actor_and_critic(watching):
    """The actor's loss gives gradients to the critic, which nobody uses."""
    actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
    actors, critics = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    watching(actor, actors)
    watching(critic, critics)
    for _ in range(STEPS):
        state = torch.randn(8, 3)
        critics.zero_grad()
        critic(torch.cat([state, actor(state).detach()], 1)).square().mean().backward()
        critics.step()
        actors.zero_grad()
        (-critic(torch.cat([state, actor(state)], 1))).mean().backward()
        actors.step()


def higher_order(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 6, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss_of(model) + slope.square().mean()).backward()
        optimizer.step()


def decaying_gradients(watching):
    """Traces of reinforcement learning: gradients are carried over on purpose, and shrunk."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watching(model, optimizer)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(0.5)


def strong_clip(times):
    """A threshold far below the norms."""

    def loop(watching):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        watching(model, optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (times * loss_of(model) + model[4].weight.sum()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            watching.log(norm=norm, max_norm=1e-4)
            optimizer.step()

    return loop


def stale_gradients(watching):
    """A layer had one backward before the loop began, and its gradient is still there."""
    model, other = mlp(), mlp()
    loss_of(other).backward()
    both = nn.ModuleList([model, other])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(both, optimizer)
    train(model, optimizer)


def ordinary(watching):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    train(model, optimizer)


def perceptual_loss(watching):
    """A network that is only looked through; that it gets gradients is a waste, and no fault."""
    model, judge = mlp(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        judge(model(torch.randn(8, 6))).square().mean().backward()
        optimizer.step()


HEALTHY = {
    "ordinary": ordinary,
    "zero_grad behind the step": clearing(lambda model, optimizer: optimizer.zero_grad()),
    "zeros instead of None": clearing(lambda model, optimizer: optimizer.zero_grad(set_to_none=False)),
    "the model's zero_grad": clearing(lambda model, optimizer: model.zero_grad()),
    "zeros by hand": clearing(by_data),
    "None by hand": clearing(by_none),
    "accumulation": accumulation,
    "two backwards": two_backwards,
    "GAN": gan(),
    "GAN without detach": gan(detach=False),
    "GAN whose second optimizer comes later": gan(detach=False, late=15),
    "GAN whose second optimizer waits": gan(detach=False, late=5, waits=STEPS),
    "optimizers in phases": optimizers_in_phases,
    "an optimizer of what is frozen": optimizer_of_the_frozen,
    "LoRA": lora(everything=False),
    "LoRA, frozen ones in the optimizer": lora(everything=True),
    "teacher": teacher,
    "unfrozen later": unfrozen_later,
    "compiled": compiled,
    "scaler with unscale": scaled(clip_by_norm, unscale=True, overflow=(3, 9)),
    "scaler with unscale, value": scaled(clip_by_value, unscale=True),
    "scaler with unscale, gradguard": scaled(clip_by_gradguard, unscale=True),
    "scaler without a clip": scaled(no_clip),
    "scaler of scale 1": scaled(clip_by_norm, scale=1.0),
    "scaler with a guard": guarded_scaler,
    "closure": closure,
    "groups and tied weights": groups_and_tied_weights,
    "sparse embedding": sparse_embedding,
    "updates by hand": updates_by_hand,
    "master copies": master_copies,
    "step in backward": step_in_backward,
    "rare experts": rare_experts,
    "actor and critic": actor_and_critic,
    "higher order": higher_order,
    "decaying gradients": decaying_gradients,
    "stale gradients": stale_gradients,
    "a strong clip": strong_clip(times=1.0),
    "a strong clip, and layers that were below eps without it": strong_clip(times=1e-9),
    "a norm far above the others for a moment": one_gradient_far_above_the_others(adam, times=100.0),
    "SGD has no eps": one_gradient_far_above_the_others(sgd),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop(name, how, tmp_path):
    for record in watched(HEALTHY[name], how, tmp_path):
        assert own(record) == []


@pytest.mark.parametrize("how", BOTH)
def test_a_network_that_is_only_looked_through_is_no_warning(how, tmp_path):
    (record,) = watched(perceptual_loss, how, tmp_path)
    assert [(found.kind, found.severity) for found in own(record)] == [(NO_OPTIMIZER, "info")] * (how == "watch")
