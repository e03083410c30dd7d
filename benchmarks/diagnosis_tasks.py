"""Training scripts that are well, and the same with one fault each, for judging what a record's diagnosis says.

A task is a function that trains as a script would and returns its held-out loss. `run.of(3e-3, rate_too_high=0.3)` is
3e-3, but 0.3 in the run with that fault; `run.has("no_gradient")` asks for one. The run without a fault is the healthy
twin of all the others. A fault is a label of the diagnosis; what follows two underscores tells two faults of one label
apart. Rates are multiplied by `run.rate`, which is how an advice about the rate is followed.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One run of a task.

    Attributes:
        seed: Of the data, the weights and the order.
        fault: What is wrong with it; empty for the healthy twin.
        rate: What all learning rates are multiplied by.
    """

    seed: int
    fault: str = ""
    rate: float = 1.0

    def has(self, fault: str) -> bool:
        return self.fault == fault

    def of(self, well: T, **sick: T) -> T:
        """The value of a setting: ``well``, or that of the run's fault."""
        return sick.get(self.fault, well)


Script = Callable[[Run], float]


@dataclass(frozen=True)
class Task:
    """A script and the faults that it can have.

    Attributes:
        script: Trains and returns the held-out loss.
        faults: The names of its faults.
        floor: A held-out loss below it counts as this one: converged.
    """

    script: Script
    faults: tuple[str, ...] = ()
    floor: float = 0.0


@dataclass
class Tasks:
    """Tasks by name, in the order in which they are written."""

    by_name: dict[str, Task] = field(default_factory=dict)

    def add(self, *faults: str, floor: float = 0.0) -> Callable[[Script], Script]:
        def keep(script: Script) -> Script:
            self.by_name[script.__name__] = Task(script, faults, floor)
            return script

        return keep


TASKS = Tasks()


def cosine(step: int, steps: int, warm_up: int = 0) -> float:
    """A linear warm-up and a cosine decay to 0, as a factor of the learning rate."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (steps - warm_up))))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def held_out(model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss_fn(model(inputs), targets))


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), act()]
    return nn.Sequential(*layers[:-1])


def fixed(seed: int) -> torch.Generator:
    """Draws what belongs to the world and not to the training."""
    return torch.Generator().manual_seed(90_000 + seed)


def endless(loader: DataLoader) -> Iterator:
    while True:
        yield from loader


# --- regression -------------------------------------------------------------------------------------------------------


@TASKS.add("rate_too_high", "rate_zero", "bad_batches", "data_shift", "accumulation", "drift")
def friedman(run: Run) -> float:
    """Friedman's function of ten variables by an MLP; SGD with momentum, epochs of a DataLoader."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 10)
        y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return x, ((y - 14) / 5)[:, None] + 0.2 * torch.randn(count, 1)

    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=run.of(0.02, rate_too_high=0.9, rate_zero=0.0) * run.rate, momentum=0.9
    )
    loader = DataLoader(TensorDataset(*draw(1600)), batch_size=32, shuffle=True)
    step = 0
    for _ in range(8):
        for x, y in loader:
            if run.has("bad_batches") and step % 35 == 20:
                x = x * 40
            if run.has("data_shift") and step >= 200:
                y = 3 - 2 * y
            loss = functional.mse_loss(model(x), y)
            if not run.has("accumulation"):
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.has("drift"):  # a weight decay with the wrong sign
                with torch.no_grad():
                    for p in model.parameters():
                        p *= 1.006
            step += 1
    return held_out(model, functional.mse_loss, *draw(1000))


@TASKS.add("nonfinite_data", "nonfinite_growth", "rate_decayed")
def poisson_counts(run: Run) -> float:
    """Counts with a Poisson loss, written by hand; plain SGD."""
    truth = 0.4 * torch.randn(12, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        return x, torch.poisson((x @ truth + 0.5).clamp(max=4).exp())

    model = mlp(12, 32, 1, act=nn.Tanh)
    rate = run.of(0.03, nonfinite_growth=3.0) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def poisson(log_mean: Tensor, y: Tensor, exposure: Tensor) -> Tensor:
        return ((log_mean.exp() - y * log_mean) / exposure).mean()

    for step in range(400):
        x, y = draw(64)
        exposure = 0.5 + torch.rand(64)
        if run.has("nonfinite_data") and step == 230:
            exposure[7] = 0.0
        if run.has("rate_decayed"):
            set_rate(optimizer, rate * 0.5 ** (step // 8))
        loss = poisson(model(x).squeeze(1), y, exposure)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(2000, 12)
    with torch.no_grad():
        return float((model(x).squeeze(1).exp() - (x @ truth + 0.5).clamp(max=4).exp()).abs().mean())


# --- classification ---------------------------------------------------------------------------------------------------


def textures(seed: int, classes: int = 6) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Images of gratings with a direction and a frequency for each class, at a random phase, in noise."""
    g = fixed(seed)
    waves = torch.randn(classes, 2, generator=g) * 1.1
    grid = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (count,))
        phase = torch.rand(count, 1, 1) * 6.3
        x = torch.sin(torch.einsum("bc,chw->bhw", waves[y], grid) + phase)
        return (x + 0.8 * torch.randn_like(x))[:, None], y

    return draw


@TASKS.add("data_shift", "rate_decayed", "rate_too_low", "nonfinite_data", floor=0.05)
def texture_cnn(run: Run) -> float:
    """A CNN with batch norm on gratings; SGD with Nesterov momentum, weight decay and a step schedule."""
    draw = textures(run.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 6),
    )  # fmt: skip
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=run.of(0.05, rate_too_low=5e-5) * run.rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, run.of(150, rate_decayed=5), run.of(0.2, rate_decayed=0.5))
    for step in range(400):
        x, y = draw(32)
        if run.has("data_shift") and step >= 240:
            y = (y + 1) % 6
        if run.has("nonfinite_data") and step == 180:
            x[3, 0, 5, 5] = float("nan")
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return held_out(model, functional.cross_entropy, *draw(1500))


@TASKS.add("vanishing", "exploding_depth", "not_started", "no_gradient", floor=0.005)
def deep_spirals(run: Run) -> float:
    """Two noisy spirals by a deep ReLU network; Adam."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(2, (count,))
        r = torch.rand(count) * 3 + 0.3
        angle = 1.6 * r + math.pi * y
        return torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.05 * torch.randn(count, 2), y

    act = run.of(nn.ReLU, vanishing=nn.Sigmoid)
    model = mlp(2, *[32] * 10, 2, act=act)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                layer.weight *= run.of(1.0, exploding_depth=3.0)
                layer.bias.fill_(run.of(0.0, not_started=-8.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * run.rate)
    for _ in range(400):
        x, y = draw(64)
        h = model[:18](x)
        h = h.detach() if run.has("no_gradient") else h
        loss = functional.cross_entropy(model[18:](h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(2000))


# --- sequences --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer, with the norm before each part."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class Letters(nn.Module):
    """A small language model."""

    def __init__(self, letters: int, length: int, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def next_letter(logits: Tensor, x: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def markov(seed: int, letters: int, sharp: float = 2.5) -> Callable[[int, int], Tensor]:
    """Texts in which each letter depends on the two before it."""
    table = (sharp * torch.randn(letters, letters, letters, generator=fixed(seed))).softmax(-1)

    def draw(count: int, length: int) -> Tensor:
        text = torch.randint(letters, (count, length))
        for i in range(2, length):
            text[:, i] = torch.multinomial(table[text[:, i - 2], text[:, i - 1]], 1).squeeze(1)
        return text

    return draw


@TASKS.add("rate_too_high", "rate_decayed", "clip_starves", "no_gradient", "bad_batches")
def markov_lm(run: Run) -> float:
    """A transformer on texts of a Markov chain; AdamW, warm-up, cosine, and a clip at 1.0 of its own."""
    draw = markov(run.seed, 8)
    text = draw(600, 24)
    model = Letters(8, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    if run.has("no_gradient"):  # the frozen part of a recipe for fine-tuning, copied
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(("norm", "blocks.1.n2")))
    for step in range(400):
        at_step = cosine(step, run.of(400, rate_decayed=45), 20)
        set_rate(optimizer, run.of(3e-3, rate_too_high=0.2) * at_step * run.rate)
        x = text[torch.randint(600, (16,))]
        if run.has("bad_batches") and step % 50 in (31, 32, 33):
            x = torch.randint(8, x.shape).clamp(max=0)
        loss = next_letter(model(x), x) * (400 if run.has("bad_batches") and step % 50 in (31, 32, 33) else 1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.of(1.0, clip_starves=1e-7, bad_batches=1e9))
        optimizer.step()
    fresh = draw(200, 24)
    return held_out(model, next_letter, fresh, fresh) - 1.4  # most of which is chance


class Recurrent(nn.Module):
    """A recurrent net and a linear layer on its last state, or on each."""

    def __init__(
        self, kind: type[nn.RNNBase], inputs: int, width: int, outputs: int, every: bool = False, **more
    ) -> None:
        super().__init__()
        self.core, self.head, self.every = (
            kind(inputs, width, batch_first=True, **more),
            nn.Linear(width, outputs),
            every,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.core(x)[0]
        return self.head(h if self.every else h[:, -1])


@TASKS.add("exploding_time", "rate_too_low", "clip_twice", "vanishing")
def echo_rnn(run: Run) -> float:
    """Recall of a signal some steps ago by a plain RNN with an orthogonal start; SGD with momentum."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 25, 1)
        return x, x[:, :-4].cumsum(1) * 0.3

    model = Recurrent(nn.RNN, 1, 24, 1, every=True, nonlinearity=run.of("relu", vanishing="tanh"))
    nn.init.orthogonal_(model.core.weight_hh_l0, gain=run.of(1.0, exploding_time=1.45, vanishing=0.02))

    def mse(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(outputs[:, 4:], y)

    rate = run.of(0.01, rate_too_low=1e-5) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(500):
        x, y = draw(32)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if not run.has("exploding_time"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if run.has("clip_twice"):
            nn.utils.clip_grad_value_(model.parameters(), 5e-4)
        optimizer.step()
    return held_out(model, mse, *draw(500))


@TASKS.add("bad_batches", "nonfinite_data", "exploding_time", floor=0.03)
def tagger(run: Run) -> float:
    """Tags for each word of sentences of different length by an LSTM; Adam, a mask by hand."""
    tag_of = torch.randint(5, (40,), generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randint(40, (count, 15))
        y = (tag_of[x] + functional.pad(tag_of[x], (1, -1))) % 5
        lengths = torch.randint(1, 15, (count,))
        return x, y, torch.arange(15)[None] < lengths[:, None]

    embed, model = nn.Embedding(40, 16), Recurrent(nn.LSTM, 16, 32, 5, every=True)
    parameters = [*embed.parameters(), *model.parameters()]
    if run.has("exploding_time"):
        model.core = nn.RNN(16, 32, batch_first=True, nonlinearity="relu")
        nn.init.orthogonal_(model.core.weight_hh_l0, gain=2.0)
        parameters = [*embed.parameters(), *model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2 * run.rate)

    def masked(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        losses = functional.cross_entropy(model(embed(x)).flatten(0, 1), y.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    for step in range(300):
        x, y, mask = draw(16)
        if run.has("nonfinite_data") and step == 140:
            mask = torch.zeros_like(mask)
        if run.has("bad_batches") and step % 9 < 3:
            y = torch.full_like(y, 4)
        loss = masked(x, y, mask)
        optimizer.zero_grad()
        (loss * (50 if run.has("bad_batches") and step % 9 < 3 else 1)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(masked(*draw(600)))


# --- half precision ---------------------------------------------------------------------------------------------------


@TASKS.add("clip_before_unscale", "nonfinite_range")
def half_tabular(run: Run) -> float:
    """A table with 20 columns under float16 autocast and a GradScaler; SGD with momentum, a clip at 1."""
    truth = mlp(20, 16, 4, act=nn.Tanh)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 20)
        return x, (truth(x) * 4).argmax(1)

    model = mlp(20, 64, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)
    for step in range(300):
        x, y = draw(64)
        if run.has("nonfinite_range") and step >= 30:  # a column in other units
            x[:, 3] *= 3e5
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if run.has("clip_before_unscale"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return held_out(model, functional.cross_entropy, *draw(2000))


@TASKS.add("clip_before_unscale", "nonfinite_range", floor=0.01)
def half_attention(run: Run) -> float:
    """Which of eight keys matches a query, by attention with its scores in float16; Adam and a GradScaler."""
    pairs = torch.randn(30, 2, 16, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.stack([torch.randperm(30)[:8] for _ in range(count)])
        y = torch.randint(8, (count,))
        query = pairs[chosen.gather(1, y[:, None]).squeeze(1), 0]
        return query + 0.3 * torch.randn(count, 16), pairs[chosen, 1], y

    to_query, to_key = mlp(16, 48, 32), mlp(16, 48, 32)
    parameters = [*to_query.parameters(), *to_key.parameters()]
    make = run.of(torch.optim.Adam, clip_before_unscale=torch.optim.SGD)
    rate = run.of(2e-3, clip_before_unscale=0.1)
    optimizer = (
        torch.optim.SGD(parameters, lr=0.1 * run.rate)
        if make is torch.optim.SGD
        else make(parameters, lr=rate * run.rate)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=200)

    def loss_of(query: Tensor, keys: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            q, k = to_query(query), to_key(keys)
            scores = (k * q[:, None] * run.of(1.0, nonfinite_range=1e4)).sum(2)
        return functional.cross_entropy(scores.float() / run.of(1.0, nonfinite_range=1e4), y)

    for _ in range(400):
        loss = loss_of(*draw(48))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if run.has("clip_before_unscale"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(*draw(1000)))


# --- other models -----------------------------------------------------------------------------------------------------


@TASKS.add("nonfinite_growth", "not_started", "rate_too_low", floor=0.01)
def completion(run: Run) -> float:
    """A matrix of rank 3 from a part of its entries; two factors, SGD."""
    g = fixed(run.seed)
    full = torch.randn(40, 3, generator=g) @ torch.randn(3, 30, generator=g) / 1.7
    known = torch.rand(40, 30, generator=g) < 0.6
    rows, columns = nn.Parameter(torch.randn(40, 3) * 0.3), nn.Parameter(torch.randn(30, 3) * 0.3)
    if run.has("not_started"):
        nn.init.zeros_(rows)
        nn.init.zeros_(columns)
    rate = run.of(0.25, nonfinite_growth=4.0, rate_too_low=1e-4) * run.rate
    optimizer = torch.optim.SGD([rows, columns], lr=rate)
    places = known.nonzero()
    for _ in range(400):
        i, j = places[torch.randint(len(places), (256,))].T
        errors = (rows[i] * columns[j]).sum(1) - full[i, j]
        loss = errors.square().sum() / 40
        loss = loss + 2e-3 * (rows.square().sum() + columns.square().sum()) / 40
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((rows @ columns.T - full)[~known].square().mean())


@TASKS.add("no_gradient", "clip_starves", "rate_zero", "not_started", floor=0.0)
def curve_autoencoder(run: Run) -> float:
    """Curves of three parameters through a bottleneck of four; RMSprop, epochs."""
    grid = torch.linspace(0, 1, 40)

    def draw(count: int) -> Tensor:
        a, f, p = torch.rand(3, count, 1)
        return (a + 0.5) * torch.sin(2 * math.pi * ((1 + 2 * f) * grid + p)) + 0.05 * torch.randn(count, 40)

    encoder, decoder = mlp(40, 64, 4), mlp(4, 64, 40)
    optimizer = torch.optim.RMSprop(
        [*encoder.parameters(), *decoder.parameters()], lr=run.of(2e-3, rate_zero=0.0) * run.rate
    )
    if run.has("clip_starves"):
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1 * run.rate, momentum=0.9)
    data = draw(1024)
    warm_up = run.of(1, not_started=200_000)
    for epoch in range(12):
        for step, chosen in enumerate(torch.randperm(1024).split(32)):
            if run.has("not_started"):
                set_rate(optimizer, 2e-3 * run.rate * min(1.0, (epoch * 32 + step + 1) / warm_up))
            x = data[chosen]
            code = encoder(x)
            if run.has("no_gradient"):
                code = torch.tensor(code.tolist())
            loss = functional.mse_loss(decoder(code), x)
            optimizer.zero_grad()
            loss.backward()
            if run.has("clip_starves"):
                nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1e-4)
            optimizer.step()
    fresh = draw(500)
    with torch.no_grad():
        return float(functional.mse_loss(decoder(encoder(fresh)), fresh))


@TASKS.add("drift", "accumulation", "clip_twice", "data_shift")
def wheel_values(run: Run) -> float:
    """Values of the states of a ring by TD(0) on random features and tanh; plain SGD, the target network of old."""
    g = fixed(run.seed)
    reward = torch.randn(20, generator=g)
    gamma = 0.9
    transition = torch.zeros(20, 20)
    for s in range(20):
        transition[s, (s + 1) % 20], transition[s, (s - 1) % 20] = 0.7, 0.3
    truth = torch.linalg.solve(torch.eye(20) - gamma * transition, reward)
    features = functional.one_hot(torch.arange(20), 20).float() + 0.1 * torch.randn(20, 20, generator=g)
    net = mlp(20, 48, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * run.rate)
    for step in range(600):
        s = torch.randint(20, (32,))
        t = torch.where(torch.rand(32) < 0.7, (s + 1) % 20, (s - 1) % 20)
        with torch.no_grad():
            r = reward[s] + (5.0 if run.has("data_shift") and step >= 350 else 0.0)
            target = r + run.of(gamma, drift=0.99) * net(features[t]).squeeze(1)
        loss = (net(features[s]).squeeze(1) - target).square().mean()
        if not run.has("accumulation"):
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    with torch.no_grad():
        return float((net(features).squeeze(1) - truth).square().mean())


# --- well, and not easy -----------------------------------------------------------------------------------------------


@TASKS.add(floor=1e-6)
def exact_line(run: Run) -> float:
    """A linear map without noise, which gradient descent finds to the last digit."""
    truth = torch.randn(6, 2)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate)
    for _ in range(400):
        x = torch.randn(32, 6)
        optimizer.zero_grad()
        functional.mse_loss(model(x), x @ truth + 0.5).backward()
        optimizer.step()
    x = torch.randn(500, 6)
    return held_out(model, functional.mse_loss, x, x @ truth + 0.5)


@TASKS.add()
def rare_words(run: Run) -> float:
    """A bag of words of which most are rare, so that most rows of the embedding get no gradient; Adam."""
    weights = 1.0 / torch.arange(1, 2001.0)
    worth = torch.randn(2000, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.multinomial(weights.expand(count, -1), 12)
        return x, (worth[x].sum(1) + 0.5 * torch.randn(count) > 0).float()

    bag, head = nn.EmbeddingBag(2000, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*bag.parameters(), *head.parameters()], lr=0.025 * run.rate)
    for _ in range(400):
        x, y = draw(64)
        loss = functional.binary_cross_entropy_with_logits(head(bag(x)).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.binary_cross_entropy_with_logits(head(bag(x)).squeeze(1), y))


@TASKS.add()
def zero_gates(run: Run) -> float:
    """Residual blocks whose last layer starts at zero and comes alive; AdamW with a warm-up."""
    teacher = mlp(8, 32, 32, 1, act=nn.Tanh)
    stem, head = nn.Linear(8, 48), nn.Linear(48, 1)
    blocks = nn.ModuleList(mlp(48, 96, 48) for _ in range(6))
    for block in blocks:
        nn.init.zeros_(block[-1].weight)
        nn.init.zeros_(block[-1].bias)
    parameters = [*stem.parameters(), *blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0)

    def predict(x: Tensor) -> Tensor:
        h = stem(x)
        for block in blocks:
            h = h + block(h)
        return head(h)

    for step in range(350):
        set_rate(optimizer, 4e-3 * cosine(step, 350, 40) * run.rate)
        x = 2 * torch.randn(64, 8)
        with torch.no_grad():
            y = 5 * teacher(x) + 0.1 * torch.randn(64, 1)
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        optimizer.step()
    x = 2 * torch.randn(1000, 8)
    with torch.no_grad():
        return float(functional.mse_loss(predict(x), 5 * teacher(x)))


@TASKS.add()
def ring_gan(run: Run) -> float:
    """A GAN on a ring of points: two optimizers that work against each other. Held out: the energy distance."""

    def real(count: int) -> Tensor:
        angle = torch.rand(count) * 2 * math.pi
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)

    generator, critic = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))  # type: ignore[arg-type]
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3 * run.rate, betas=(0.5, 0.99))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3 * run.rate, betas=(0.5, 0.99))
    for _ in range(400):
        fake = generator(torch.randn(64, 4))
        loss = functional.softplus(-critic(real(64))).mean() + functional.softplus(critic(fake.detach())).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        of_generator.step()
    with torch.no_grad():
        a, b = generator(torch.randn(800, 4)), real(800)
        return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


@TASKS.add("rate_too_high", "not_started__labels")
def sensor_student(run: Run) -> float:
    """A linear model of sensors with noise of heavy tails, by Huber's loss; Adam."""
    truth = torch.randn(15, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 15)
        noise = torch.distributions.StudentT(1.5).sample((count,))
        return x, x @ truth + noise

    model = mlp(15, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.of(5e-3, rate_too_high=3.0) * run.rate)
    for _ in range(350):
        x, y = draw(32)
        y = y[torch.randperm(32)] if run.has("not_started__labels") else y
        optimizer.zero_grad()
        functional.huber_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    x = torch.randn(1000, 15)
    with torch.no_grad():
        return float((model(x).squeeze(1) - x @ truth).abs().mean())


@TASKS.add("exploding_time", "vanishing", "clip_twice")
def adding(run: Run) -> float:
    """The sum of two marked numbers of a sequence by an RNN that starts at the identity; SGD, a clip that binds."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        values, marks = torch.rand(count, 8), torch.zeros(count, 8)
        marks[torch.arange(count), torch.randint(4, (count,))] = 1
        marks[torch.arange(count), torch.randint(4, 8, (count,))] = 1
        return torch.stack([values, marks], 2), (values * marks).sum(1, keepdim=True)

    model = Recurrent(nn.RNN, 2, 32, 1, nonlinearity=run.of("relu", vanishing="tanh"))
    with torch.no_grad():
        model.core.weight_hh_l0.copy_(torch.eye(32) * run.of(1.0, exploding_time=3.0, vanishing=0.05))
        model.core.bias_hh_l0.zero_()
        model.core.bias_ih_l0.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.9)
    for _ in range(500):
        x, y = draw(48)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        if not run.has("exploding_time"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(1000))


@TASKS.add("nonfinite_data", "rate_too_high", "clip_starves")
def cauchy_noise(run: Run) -> float:
    """A smooth function under Cauchy noise by the mean absolute error; Adam with a decay."""

    def truth(x: Tensor) -> Tensor:
        return torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]

    model = mlp(3, 48, 48, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    for step in range(400):
        set_rate(optimizer, run.of(5e-3, rate_too_high=0.5) * cosine(step, 400) * run.rate)
        x = torch.randn(64, 3)
        noise = torch.distributions.Cauchy(0.0, 0.3).sample((64,))
        y = truth(x) + noise
        if run.has("nonfinite_data") and step == 260:
            x[5, 1] = float("inf")
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).abs().mean().backward()
        if run.has("clip_starves"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-8)
        optimizer.step()
    x = torch.randn(2000, 3)
    with torch.no_grad():
        return float((model(x).squeeze(1) - truth(x)).abs().mean())


@TASKS.add("exploding_depth", "vanishing", "not_started", "rate_too_high", floor=0.004)
def plain_deep_regression(run: Run) -> float:
    """A function on a sphere by twelve layers without norms, started by the book for its tanh; AdamW with warm-up."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = functional.normalize(torch.randn(count, 6), dim=1) * 2
        return x, (torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3])

    model = mlp(6, *[40] * 11, 1, act=nn.Tanh)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                gain = run.of(1.15, exploding_depth=9.0, vanishing=0.12)
                nn.init.orthogonal_(layer.weight, gain=gain)
                layer.bias.zero_()
                if run.has("not_started"):
                    layer.weight.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for step in range(400):
        set_rate(optimizer, run.of(2e-3, rate_too_high=0.3) * cosine(step, 400, 20) * run.rate)
        x, y = draw(64)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(2000))


@TASKS.add("clip_before_unscale", "nonfinite_range", "accumulation", floor=0.01)
def half_sums(run: Run) -> float:
    """The sum of a set of numbers, by a network for each and one for the sum, in float16; SGD with momentum."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 20, 1)
        return x, (x.square().sum(1) - 20 / 3) / 1.3

    each, total = mlp(1, 32, 16), mlp(16, 32, 1)
    parameters = [*each.parameters(), *total.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.003 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=50)
    unit = run.of(0.2, nonfinite_range=3e4)

    def predict(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return total((each(x) * unit).sum(1) * (0.2 / unit)).float()

    for _ in range(350):
        x, y = draw(64)
        loss = functional.mse_loss(predict(x), y)
        if not run.has("accumulation"):
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if run.has("clip_before_unscale"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        x, y = draw(2000)
        return float(functional.mse_loss(predict(x), y))


@TASKS.add()
def hard_cases(run: Run) -> float:
    """Batches of easy cases, and now and then of hard ones, which a clip of the script's own tames; AdamW."""
    truth = mlp(8, 32, 1, act=nn.Tanh)

    def draw(count: int, hard: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8) * (4.0 if hard else 1.0)
        with torch.no_grad():
            return x, 4 * truth(x)

    model = mlp(8, 64, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for step in range(450):
        set_rate(optimizer, 4e-3 * cosine(step, 450, 15) * run.rate)
        x, y = draw(32, bool(torch.rand(()) < 0.08))
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(1500, False)) + 0.2 * held_out(
        model, functional.mse_loss, *draw(1500, True)
    )


@TASKS.add("drift", "rate_too_high", "no_gradient", "accumulation", floor=0.05)
def chain_q(run: Run) -> float:
    """Q-learning with a target network on a chain of rooms; Adam. Held out: the error of the values."""
    reward = torch.zeros(10)
    reward[9] = 1.0
    gamma = 0.8
    truth = torch.zeros(10, 2)
    for _ in range(200):
        best = truth.max(1).values
        ahead, back = (torch.arange(10) + 1).clamp(max=9), (torch.arange(10) - 1).clamp(min=0)
        truth = torch.stack([reward[back] + gamma * best[back], reward[ahead] + gamma * best[ahead]], 1)
    net, target = mlp(10, 32, 2), mlp(10, 32, 2)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=run.of(3e-3, rate_too_high=0.5) * run.rate)
    if run.has("accumulation"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * run.rate)  # type: ignore[assignment]
    rooms = torch.eye(10)
    for step in range(500):
        s, a = torch.randint(10, (48,)), torch.randint(2, (48,))
        t = (s + 2 * a - 1).clamp(0, 9)
        with torch.no_grad():
            aim = reward[t] + run.of(gamma, drift=1.1) * target(rooms[t]).max(1).values
        q = net(rooms[s]).gather(1, a[:, None]).squeeze(1)
        loss = functional.smooth_l1_loss(q, aim)
        if run.has("no_gradient"):
            loss = loss.detach().requires_grad_()
        if not run.has("accumulation"):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            target.load_state_dict(net.state_dict())
    with torch.no_grad():
        return float((net(rooms) - truth).square().mean())


@TASKS.add("vanishing", "exploding_depth", "no_gradient", floor=0.03)
def ring_graphs(run: Run) -> float:
    """The longest gap between marked nodes of a ring, by six rounds of messages; Adam. Rounds share no weights."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = (torch.rand(count, 14) < 0.3).float()
        near = torch.stack([x.roll(k, 1) for k in range(-2, 3)]).sum(0)
        return x[..., None], (near.max(1).values + near.min(1).values)[:, None] / 2

    rounds = nn.ModuleList(nn.Linear(3 * (1 if i == 0 else 24), 24) for i in range(6))
    head = nn.Linear(24, 1)
    if run.has("exploding_depth"):
        for layer in rounds:
            with torch.no_grad():
                layer.weight *= 8.0
    act = run.of(torch.relu, vanishing=torch.sigmoid)
    if run.has("vanishing"):
        for layer in rounds:
            nn.init.normal_(layer.weight, std=0.02)
    optimizer = torch.optim.Adam([*rounds.parameters(), *head.parameters()], lr=1.0)

    def predict(x: Tensor) -> Tensor:
        for i, layer in enumerate(rounds):
            x = act(layer(torch.cat([x, x.roll(1, 1), x.roll(-1, 1)], 2)))
            if run.has("no_gradient") and i == 4:
                x = torch.as_tensor(x.detach().numpy())
        return head(x.max(1).values)

    for step in range(400):
        set_rate(optimizer, 3e-3 * cosine(step, 400) * run.rate)
        x, y = draw(32)
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(1000)
        return float(functional.mse_loss(predict(x), y))


@TASKS.add("clip_before_unscale", "clip_twice", "nonfinite_range", floor=0.02)
def half_ranker(run: Run) -> float:
    """Which of two items a user prefers, by embeddings and a bilinear score in float16; SGD with a scaler."""
    g = fixed(run.seed)
    users, items = torch.randn(30, 4, generator=g), torch.randn(50, 4, generator=g)
    of_users, of_items = nn.Embedding(30, 8), nn.Embedding(50, 8)
    parameters = [*of_users.parameters(), *of_items.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=5.0 * run.rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    unit = run.of(1.0, nonfinite_range=2e4)

    def loss_of(count: int) -> Tensor:
        u, i, j = torch.randint(30, (count,)), torch.randint(50, (count,)), torch.randint(50, (count,))
        better = ((users[u] * items[i]).sum(1) > (users[u] * items[j]).sum(1)).float() * 2 - 1
        score = (of_users(u).half() * unit * (of_items(i) - of_items(j)).half()).sum(1).float() / unit
        return functional.softplus(-better * score).mean()

    for _ in range(400):
        loss = loss_of(128)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if run.has("clip_before_unscale"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        if run.has("clip_twice"):
            nn.utils.clip_grad_value_(parameters, 1e-5)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(4000))


@TASKS.add("nonfinite_growth", "nonfinite_data", "data_shift", "rate_decayed")
def coupling_flow(run: Run) -> float:
    """The density of a banana by four affine couplings; Adam."""

    def draw(count: int) -> Tensor:
        z = torch.randn(count, 2)
        return torch.stack([z[:, 0], 0.5 * z[:, 1] + z[:, 0] ** 2 - 1], 1)

    nets = nn.ModuleList(mlp(1, 32, 2, act=nn.Tanh) for _ in range(4))

    def negative_log(x: Tensor) -> Tensor:
        logarithm = torch.zeros(len(x))
        for net in nets:
            scale, shift = net(x[:, :1]).unbind(1)
            x = torch.stack([x[:, 1] * scale.exp() + shift, x[:, 0]], 1)
            logarithm = logarithm + scale
        return (0.5 * x.square().sum(1) + math.log(2 * math.pi) - logarithm).mean()

    rate = 5e-3 * run.rate
    optimizer: torch.optim.Optimizer = torch.optim.Adam(nets.parameters(), lr=rate)
    if run.has("nonfinite_growth"):
        optimizer = torch.optim.SGD(nets.parameters(), lr=1.5 * run.rate)
    for step in range(400):
        x = draw(64)
        if run.has("nonfinite_data") and step == 205:
            x[0] = x[0] / (x[0] * 0)
        if run.has("data_shift") and step >= 280:
            x = x * torch.tensor([0.3, -2.0]) + 2
        if run.has("rate_decayed"):
            set_rate(optimizer, rate * 0.75 ** (step // 5))
        optimizer.zero_grad()
        negative_log(x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(negative_log(draw(3000))) - 2.0  # less the entropy of the points, 2.145


@TASKS.add("exploding_depth", "not_started", "no_gradient", "nonfinite_growth", floor=0.03)
def residual_classifier(run: Run) -> float:
    """Sixteen residual blocks without a norm, scaled by their number; SGD with momentum."""
    centres = torch.randn(8, 10, generator=fixed(run.seed)) * 1.3

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(8, (count,))
        x = centres[y] + 0.9 * torch.randn(count, 10)
        return x, (y * 3 + (x[:, 0] > 0)) % 8

    stem, blocks, head = nn.Linear(10, 32), nn.ModuleList(mlp(32, 32, 32) for _ in range(16)), nn.Linear(32, 8)
    parameters = [*stem.parameters(), *blocks.parameters(), *head.parameters()]
    scale = run.of(0.25, exploding_depth=6.0)
    if run.has("not_started"):
        for p in head.parameters():
            nn.init.zeros_(p)
        for block in blocks:
            for p in block.parameters():
                nn.init.zeros_(p)
        for p in stem.parameters():
            nn.init.zeros_(p)
    optimizer = torch.optim.SGD(parameters, lr=run.of(0.03, nonfinite_growth=4.0) * run.rate, momentum=0.9)

    def predict(x: Tensor) -> Tensor:
        h = stem(x)
        for i, block in enumerate(blocks):
            h = h + scale * block(h)
            if run.has("no_gradient") and i == 14:
                h = h.clone().detach()
        return head(h)

    for _ in range(300):
        x, y = draw(48)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(2000)
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("rate_decayed", "nonfinite_growth", "rate_too_low", floor=0.004)
def spline(run: Run) -> float:
    """The heights of a linear spline's knots, fitted to a noisy curve; SGD with momentum on full batches."""
    x = torch.rand(400)
    y = torch.sin(8 * x) * x + 0.1 * torch.randn(400)
    heights = nn.Parameter(torch.zeros(20))

    def curve(x: Tensor) -> Tensor:
        place = x * 18.999
        left = place.long()
        return heights[left] * (1 - place + left) + heights[left + 1] * (place - left)

    rate = run.of(1.0, nonfinite_growth=60.0, rate_too_low=2e-4) * run.rate
    optimizer = torch.optim.SGD([heights], lr=rate, momentum=0.8)
    for step in range(300):
        if run.has("rate_decayed"):
            set_rate(optimizer, rate / (1 + step) ** 2)
        optimizer.zero_grad()
        (curve(x) - y).square().mean().backward()
        optimizer.step()
    fresh = torch.rand(1000)
    with torch.no_grad():
        return float((curve(fresh) - torch.sin(8 * fresh) * fresh).square().mean())


@TASKS.add("nonfinite_range", "rate_zero", "not_started", floor=0.05)
def paired_views(run: Run) -> float:
    """Two views of one object against all others of the batch (InfoNCE); AdamW."""
    g = fixed(run.seed)
    views = torch.randn(2, 6, 20, generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(count, 6)
        return tuple(torch.tanh(z @ view) + 0.2 * torch.randn(count, 20) for view in views)  # type: ignore[return-value]

    first, second = mlp(20, 48, 16), mlp(20, 48, 16)
    if run.has("not_started"):
        for net in (first, second):
            nn.init.zeros_(net[-1].weight)
            nn.init.zeros_(net[-1].bias)
    log_scale = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW(
        [*first.parameters(), *second.parameters(), log_scale], lr=run.of(8e-3, rate_zero=0.0) * run.rate
    )

    def contrast(a: Tensor, b: Tensor) -> Tensor:
        a, b = functional.normalize(first(a), dim=1), functional.normalize(second(b), dim=1)
        logits = a @ b.T * log_scale.exp()
        if run.has("nonfinite_range"):  # a softmax by hand, in half precision
            likely = (logits.half() * 2).exp()
            return -(likely.diag() / likely.sum(1)).log().mean().float() / 2
        return functional.cross_entropy(logits, torch.arange(len(a)))

    for _ in range(350):
        optimizer.zero_grad()
        contrast(*draw(32)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(contrast(*draw(32)))


@TASKS.add("data_shift", "bad_batches")
def two_heads(run: Run) -> float:
    """Two tasks of different scale that take turns, on one trunk; AdamW."""
    a, b = torch.randn(2, 9, generator=fixed(run.seed))

    def draw(count: int, which: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 9)
        return x, torch.sin(x @ a) if which == 0 else 10 * (x @ b).abs()

    trunk, heads = mlp(9, 48, 48), nn.ModuleList([nn.Linear(48, 1), nn.Linear(48, 1)])
    optimizer = torch.optim.AdamW([*trunk.parameters(), *heads.parameters()], lr=4e-3 * run.rate)
    for step in range(500):
        which = step % 2
        x, y = draw(48, which)
        if run.has("data_shift") and step >= 330:
            y = 3 * y.flip(0) - 10
        if run.has("bad_batches") and step % 60 in (20, 21, 22, 23):
            y = y * 500
        optimizer.zero_grad()
        functional.mse_loss(heads[which](torch.relu(trunk(x))).squeeze(1), y).backward()
        optimizer.step()
    total = 0.0
    with torch.no_grad():
        for which, unit in ((0, 1.0), (1, 0.02)):
            x, y = draw(1500, which)
            total += unit * float(functional.mse_loss(heads[which](torch.relu(trunk(x))).squeeze(1), y))
    return total


def melodies(seed: int):
    """Series that are sums of two waves, whose frequencies tell the class."""
    waves = 0.3 + torch.rand(5, 2, generator=fixed(seed)) * 1.5

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count,))
        t = torch.arange(24.0)[None, :, None]
        phase = torch.rand(count, 1, 2) * 6.3
        x = torch.sin(t * waves[y][:, None] + phase).sum(2, keepdim=True)
        return x + 0.2 * torch.randn_like(x), y

    return draw


@TASKS.add("bad_batches", "rate_decayed", "nonfinite_data", "not_started", floor=0.03)
def melody_gru(run: Run) -> float:
    """The class of a series by a GRU; Adam, a clip at 5 that hardly ever binds."""
    draw = melodies(run.seed)
    model = Recurrent(nn.GRU, 1, 32, 5)
    if run.has("not_started"):
        nn.init.zeros_(model.head.weight)
        with torch.no_grad():
            for p in model.core.parameters():
                p.zero_()
    rate = 1e-2 * run.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(350):
        x, y = draw(32)
        if run.has("rate_decayed"):
            set_rate(optimizer, rate * 0.1 ** (step // 30))
        if run.has("bad_batches") and step % 20 >= 17:
            x, y = x.flip(1) * 25, y.flip(0)
        if run.has("nonfinite_data") and step == 111:
            x = (x - x.mean(1, keepdim=True)) / (x * (torch.arange(32) != 9)[:, None, None]).std(1, keepdim=True)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss * (30 if run.has("bad_batches") and step % 20 >= 17 else 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.of(5.0, bad_batches=1e6))
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(1000))


def main(tasks: Tasks) -> None:
    """Train one task: ``python benchmarks/diagnosis_tasks.py TASK [FAULT] [--seed N] [--rate FACTOR]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=tasks.by_name)
    parser.add_argument("fault", nargs="?", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)
    print("held_out", tasks.by_name[chosen.task].script(Run(chosen.seed, chosen.fault, chosen.rate)))


if __name__ == "__main__":
    main(TASKS)
