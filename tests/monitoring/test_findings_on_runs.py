"""Real training runs, watched as users do: sick ones give their finding, healthy ones no warning and no error."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.observe import schedule
from gradguard.monitoring.record.file import read_record

pytestmark = pytest.mark.usefixtures("others_unseen")


def mlp(*widths, activation=nn.ReLU):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def sgd(lr, **more):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **more)


def adamw(lr, **more):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **more)


TEACHER = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))


def noisy(i, batch=32):
    """A batch that is never seen again: a linear rule, with noise on what it says."""
    del i
    x = torch.randn(batch, 8)
    return x, x @ TEACHER + 0.3 * torch.randn(batch, 4)


def classes(i, batch=32):
    del i
    x = torch.randn(batch, 8)
    return x, (x @ TEACHER).argmax(1)


def fixed(make, batches, batch=16):
    """A data set of so many batches, in the same order each time."""
    kept = [make(i, batch) for i in range(batches)]
    return lambda i: kept[i % batches]


def train(
    path, model=None, optimizer=None, data=noisy, loss=nn.functional.mse_loss, steps=300, clip=None, before=None,
    after_backward=None, schedule=None,
):  # fmt: skip
    """Train as a script would, watched; ``before`` a step and ``after_backward`` are where it goes wrong."""
    model = mlp(8, 32, 32, 4) if model is None else model
    optimizer = (optimizer or adamw(3e-3))(model.parameters())
    plan = schedule(optimizer) if schedule else None
    with gg.watch(path, every=1) as watched:
        for i in range(steps):
            if before:
                before(i, model, optimizer)
            x, y = data(i)
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            if after_backward:
                after_backward(i, model)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if plan:
                plan.step()
    return read_record(watched.path)


def at(step, act):
    return lambda i, *rest: act(*rest) if i == step else None


def scaled_input(make, when, times):
    def data(i):
        x, y = make(i)
        return (times * x, y) if when(i) else (x, y)

    return data


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(16, 24), nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0]).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        return self.head(self.block(self.embedding(x))).transpose(1, 2)


def text(i, batch=8):
    del i
    start, pace = torch.randint(16, (batch, 1)), torch.randint(1, 4, (batch, 1))
    sequence = (start + pace * torch.arange(17)) % 16
    return sequence[:, :-1], sequence[:, 1:]


class LowRank(nn.Module):
    """LoRA: a frozen layer, and two factors of which the second begins at zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Experts(nn.Module):
    """Of eight experts each batch goes to two."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), nn.Linear(8, 4)

    def forward(self, x):
        chosen = torch.randperm(8)[:2].tolist()
        return self.head(sum(self.experts[k](x) for k in chosen))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def images(i, batch=16):
    del i
    y = torch.randint(4, (batch,))
    return torch.randn(batch, 1, 8, 8) * (1 + y.view(-1, 1, 1, 1)), y


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)


def restarts(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 75)


def drops(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.1)


ENTROPY = nn.functional.cross_entropy
HEALTHY = {
    "an MLP": {},
    "without noise, to the floor": {
        "data": lambda i: (x := torch.randn(32, 8), x @ TEACHER),
        "model": lambda: mlp(8, 4),
    },
    "by SGD": {"optimizer": sgd(0.05)},
    "by SGD with momentum": {"optimizer": sgd(0.02, momentum=0.9)},
    "by Adam at 1e-2": {"optimizer": adamw(1e-2)},
    "by RMSprop": {"optimizer": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3)},
    "by Adagrad": {"optimizer": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)},
    "classes": {"data": classes, "loss": ENTROPY},
    "classes, one sample a batch": {"data": lambda i: classes(i, 1), "loss": ENTROPY},
    "one sample a batch by SGD": {"data": lambda i: noisy(i, 1), "optimizer": sgd(0.01)},
    "a wide layer, one sample a batch": {"data": lambda i: noisy(i, 1), "model": lambda: mlp(8, 256, 4)},
    "one full batch": {"data": lambda: fixed(noisy, 1)},
    "one full batch by SGD": {"data": lambda: fixed(noisy, 1), "optimizer": sgd(0.1)},
    "few batches, shuffled": {
        "data": lambda: (lambda data: lambda i: data(int(torch.randint(8, ()))))(fixed(noisy, 8))
    },
    "two batches in turn": {"data": lambda: fixed(noisy, 2)},
    "an LSTM with a clip that guards": {"model": Recurrent, "data": text, "loss": ENTROPY, "clip": 5.0},
    "attention with dropout": {"model": Attention, "data": text, "loss": ENTROPY},
    "attention with a warm-up": {"model": Attention, "data": text, "loss": ENTROPY, "schedule": warm_up},
    "a convolution": {"model": Convolution, "data": images, "loss": ENTROPY},
    "low rank from zero": {"model": LowRank, "optimizer": adamw(1e-2)},
    "experts used now and then": {"model": Experts},
    "a cosine": {"schedule": cosine},
    "a cosine with restarts": {"schedule": restarts, "optimizer": adamw(1e-2)},
    "a learning rate that drops": {"schedule": drops, "optimizer": sgd(0.05)},
    "harder data later": {"data": scaled_input(noisy, lambda i: i >= 150, 1.6)},
    "tanh": {"model": lambda: mlp(8, 32, 32, 4, activation=nn.Tanh)},
    "deep": {"model": lambda: mlp(8, *[32] * 6, 4, activation=nn.GELU)},
}


def run_of(case, path, seed=7):
    torch.manual_seed(seed)
    made = {key: case[key] for key in case}
    if "model" in made:
        made["model"] = made["model"]()
    if "data" in made and made["data"].__code__.co_argcount == 0:
        made["data"] = made["data"]()
    return train(path, **made)


@pytest.fixture(autouse=True)
def _measured_on_schedule(monkeypatch):
    """However fast the machine is."""
    monkeypatch.setattr(schedule, "SHARE", math.inf)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_warning_and_no_error(name, tmp_path):
    record = run_of(HEALTHY[name], tmp_path / "run.jsonl")
    assert len(record.steps) == 300
    assert [one for one in findings(record) if one.severity != "info"] == []
    assert [event for event in record.events if event["severity"] != "info"] == []


def raise_rate(rate):
    def act(model, optimizer):
        optimizer.param_groups[0]["lr"] = rate

    return act


SLOW = {"optimizer": sgd(1e-3)}
LINEAR = {"model": lambda: mlp(8, 4)}
SICK = {  # the run, the kind and its severity, and where it may begin
    "a batch 5 times too large": (
        {"data": scaled_input(noisy, lambda i: i == 200, 5)}, "spike", "info", {200}),
    "a batch 40 times too large": (
        {"data": scaled_input(noisy, lambda i: i == 200, 40)}, "exploding", "warning", {200}),
    "a bad batch in each epoch": (
        SLOW | {"data": scaled_input(noisy, lambda i: i % 25 == 24, 20)}, "recurring_spikes", "warning", range(20, 50)),
    "the learning rate raised a hundredfold": (
        {"before": at(150, raise_rate(1.0))}, "diverging_loss", "error", range(150, 200)),
    "far too large a learning rate": (LINEAR | {"optimizer": sgd(6.0), "steps": 80}, "exploding", "error", range(90)),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_what_it_has(name, tmp_path):
    case, kind, severity, since = SICK[name]
    record = run_of(case, tmp_path / "run.jsonl")
    (named,) = [one for one in findings(record) if one.kind == kind]
    assert named.severity == severity, named
    assert named.first_step in since
    told = {event["kind"] for event in record.events}
    assert kind in told
