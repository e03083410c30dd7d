"""More tasks for `diagnosis.py`: held out from the one who wrote the diagnosis at first, and learned from since."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Block, Recurrent, Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


# --- tables -----------------------------------------------------------------------------------------------------------


@TASKS.add("rate_too_low", "data_shift", "accumulation", "rate_zero", floor=0.02)
def moons(run: Run) -> float:
    """Two half moons by an MLP with batch norm; Adam, epochs of shuffled slices."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(2, (count,))
        angle = torch.rand(count) * math.pi
        x = torch.stack([angle.cos() + y, angle.sin() * (1 - 2 * y) + 0.3 * y], 1)
        return x + 0.15 * torch.randn(count, 2), y

    model = nn.Sequential(
        nn.Linear(2, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )
    rate = run.of(5e-3, rate_too_low=1e-6, rate_zero=0.0) * run.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    if run.has("accumulation"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3 * run.rate)
    x, y = draw(1600)
    for epoch in range(8):
        if run.has("data_shift") and epoch == 5:
            x, y = x.flip(1) * 2.0, 1 - y
        for chosen in torch.randperm(1600).split(32):
            functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            if not run.has("accumulation"):
                optimizer.zero_grad()
    return held_out(model, functional.cross_entropy, *draw(2000))


@TASKS.add("bad_batches", "accumulation", "clip_starves")
def rare_class(run: Run) -> float:
    """One case in thirty is positive; weighted logistic loss, SGD with momentum and weight decay."""
    truth = torch.randn(12, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        return x, ((x @ truth) + 0.7 * torch.randn(count) > 6.5).float()

    weight = torch.tensor(10.0)

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits.squeeze(1), y, pos_weight=weight)

    model = mlp(12, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.9, weight_decay=1e-3)
    for step in range(400):
        x, y = draw(64)
        if run.has("bad_batches") and (step * 7919) % 97 < 4:  # a file whose columns are in other units
            x = x * 60
        if step == 0 or not run.has("accumulation"):
            optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if run.has("clip_starves"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    return held_out(model, loss_fn, *draw(4000))


@TASKS.add()
def weak_signal(run: Run) -> float:
    """A linear signal under noise twice as large: the loss falls by a fifth, and that is all there is; SGD."""
    truth = functional.normalize(torch.randn(8, generator=fixed(run.seed)), dim=0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * run.rate)
    for step in range(500):
        set_rate(optimizer, 0.02 * cosine(step, 500) * run.rate)
        x = torch.randn(128, 8)
        y = x @ truth + 2 * torch.randn(128)
        optimizer.zero_grad()
        functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    x = torch.randn(2000, 8)
    return held_out(model, lambda out, y: (out.squeeze(1) - y).square().mean(), x, x @ truth) + 4


# --- images -----------------------------------------------------------------------------------------------------------


def strokes(count: int) -> tuple[Tensor, Tensor]:
    """Images of a bright bar at one of four angles, with a place and a length of its own."""
    y = torch.randint(4, (count,))
    angle = y * math.pi / 4 + 0.15 * torch.randn(count)
    grid = torch.linspace(-1, 1, 12)
    u, v = grid[None, :, None] - 0.3 * torch.randn(count, 1, 1), grid[None, None, :] - 0.3 * torch.randn(count, 1, 1)
    across = u * angle.cos()[:, None, None] - v * angle.sin()[:, None, None]
    x = (-((across / 0.2) ** 2)).exp() + 0.35 * torch.randn(count, 12, 12)
    return x[:, None], y


class PatchViT(nn.Module):
    """A vision transformer on patches of 4 by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(9, 24))
        self.blocks = nn.Sequential(*[Block(24, 3, causal=False) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 4)

    def embed(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).transpose(1, 2) + self.place

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))).mean(1))


@TASKS.add("rate_too_high", "no_gradient", "clip_twice", "rate_zero", floor=0.02)
def stroke_vit(run: Run) -> float:
    """A small ViT; AdamW, warm-up, cosine."""
    model = PatchViT()
    if run.has("clip_twice"):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    peak = run.of(2e-3, rate_too_high=0.15, clip_twice=0.05, rate_zero=0.0) * run.rate
    for step in range(350):
        set_rate(optimizer, peak * cosine(step, 350, 30))
        x, y = strokes(32)
        h = model.embed(x)
        if run.has("no_gradient"):
            with torch.no_grad():
                h = model.blocks(h)
        else:
            h = model.blocks(h)
        loss = functional.cross_entropy(model.head(model.norm(h).mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for p in model.parameters():
                nn.utils.clip_grad_norm_([p], 2e-4)
        optimizer.step()
    return held_out(model, functional.cross_entropy, *strokes(1500))


@TASKS.add("accumulation", "rate_too_low", "clip_twice", "rate_decayed", floor=0.02)
def stroke_cnn_accumulated(run: Run) -> float:
    """A CNN with group norm whose batches are put together of four; SGD with momentum, its own clip."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16),
        nn.ReLU(), nn.Flatten(), nn.Linear(144, 4),
    )  # fmt: skip
    rate = run.of(0.05, rate_too_low=1e-5) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for step in range(250):
        if run.has("rate_decayed"):
            set_rate(optimizer, rate * 0.8**step)
        if not run.has("accumulation"):
            optimizer.zero_grad()
        for _ in range(4):
            x, y = strokes(12)
            (functional.cross_entropy(model(x), y) / 4).backward()
            if run.has("clip_twice"):
                nn.utils.clip_grad_value_(model.parameters(), 1e-5)
        if not run.has("accumulation"):
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
    return held_out(model, functional.cross_entropy, *strokes(1500))


@TASKS.add("no_gradient", "rate_too_high", "data_shift", floor=0.02)
def frozen_stem(run: Run) -> float:
    """Fine-tuning: filters that are frozen, norms and a head that train; AdamW."""
    g = torch.Generator().manual_seed(5)
    angles = torch.arange(8) * math.pi / 8
    grid = torch.linspace(-1, 1, 5)
    filters = torch.stack([torch.cos(4 * (grid[:, None] * a.cos() - grid[None] * a.sin())) for a in angles])[:, None]
    stem = nn.Conv2d(1, 8, 5, padding=2, bias=False)
    stem.weight = nn.Parameter(filters / 5 + 0.02 * torch.randn(filters.shape, generator=g), requires_grad=False)
    model = nn.Sequential(stem, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), mlp(128, 32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.of(2e-3, rate_too_high=0.6) * run.rate)
    for step in range(300):
        x, y = strokes(32)
        if run.has("data_shift") and step >= 190:
            y = y * 0
        loss = functional.cross_entropy(model(x), y)
        if run.has("no_gradient"):
            loss = functional.cross_entropy(model(x).detach().requires_grad_(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *strokes(1500))


# --- half precision ---------------------------------------------------------------------------------------------------


@TASKS.add("clip_before_unscale", "nonfinite_range", floor=0.05)
def half_stroke_cnn(run: Run) -> float:
    """A CNN under float16 autocast with a GradScaler; SGD with Nesterov momentum, a clip at 1."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    for step in range(300):
        x, y = strokes(32)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
            if run.has("nonfinite_range") and step > 20:
                logits = (logits * 90).square().sqrt() * logits.sign() / 90
            loss = functional.cross_entropy(logits, y)
        if run.has("nonfinite_range"):
            loss.backward()
        else:
            scaler.scale(loss).backward()
            if not run.has("clip_before_unscale"):
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if run.has("nonfinite_range"):
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return held_out(model, functional.cross_entropy, *strokes(1500))


@TASKS.add("rate_too_high", "clip_starves", "rate_decayed", "no_gradient")
def bfloat_copy_lm(run: Run) -> float:
    """A transformer that learns to repeat what came eight letters before, under bfloat16 autocast; AdamW."""
    length, letters = 16, 10

    def draw(count: int) -> Tensor:
        first = torch.randint(letters, (count, length // 2))
        return torch.cat([first, first], 1)

    embed, place = nn.Embedding(letters, 32), nn.Parameter(0.1 * torch.randn(length, 32))
    blocks, head = nn.Sequential(Block(32, 4), Block(32, 4)), nn.Linear(32, letters)
    parameters = [*embed.parameters(), place, *blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.98))

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = blocks(embed(x) + place)
            if run.has("no_gradient"):
                h = h.data
            logits = head(h)
        return functional.cross_entropy(logits[:, 7:-1].flatten(0, 1).float(), x[:, 8:].flatten())

    for step in range(400):
        shape = run.of(cosine(step, 400, 25), rate_decayed=0.5 ** (step / 15), rate_too_high=1.0)
        set_rate(optimizer, run.of(4e-3, rate_too_high=0.3) * shape * run.rate)
        loss = loss_of(draw(32))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_starves=1e-8))
        optimizer.step()
    with torch.no_grad():
        return max(0.05, float(loss_of(draw(300))))


# --- sequences --------------------------------------------------------------------------------------------------------


@TASKS.add("no_gradient", "exploding_time", "rate_too_high", floor=0.05)
def reversing(run: Run) -> float:
    """Letters to be said backwards: an encoder and a decoder, GRUs, teacher forcing; Adam."""
    embed, encoder, decoder, head = (
        nn.Embedding(9, 16),
        nn.GRU(16, 48, batch_first=True),
        nn.GRU(16, 48, batch_first=True),
        nn.Linear(48, 8),
    )
    if run.has("exploding_time"):
        encoder = nn.RNN(16, 48, batch_first=True, nonlinearity="relu")  # type: ignore[assignment]
        nn.init.orthogonal_(encoder.weight_hh_l0, gain=12.0)
    modules = nn.ModuleList([embed, encoder, decoder, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=run.of(1e-2, rate_too_high=0.5) * run.rate)

    def loss_of(x: Tensor) -> Tensor:
        _, state = encoder(embed(x))
        if run.has("no_gradient"):
            state = state.detach()
        back = x.flip(1)
        before = functional.pad(back[:, :-1], (1, 0), value=8)
        return functional.cross_entropy(head(decoder(embed(before), state)[0]).flatten(0, 1), back.flatten())

    for _ in range(400):
        loss = loss_of(torch.randint(8, (48, 5)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(torch.randint(8, (500, 5))))


@TASKS.add("drift", "data_shift", "rate_zero", "bad_batches")
def weather(run: Run) -> float:
    """The next value of a noisy oscillator by an LSTM; RMSprop with momentum."""

    def draw(count: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        t, phase = torch.arange(26.0), torch.rand(count, 1) * 6.3
        speed = 0.4 + 0.3 * torch.rand(count, 1)
        return (torch.sin(speed * t + phase) + 0.1 * torch.randn(count, 26)) * scale + offset

    model = Recurrent(nn.LSTM, 1, 24, 1, every=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=run.of(2e-3, rate_zero=0.0) * run.rate, momentum=0.5)

    def loss_of(x: Tensor) -> Tensor:
        return functional.mse_loss(model(x[:, :-1, None]).squeeze(2)[:, 5:], x[:, 6:])

    for step in range(400):
        if run.has("data_shift") and step >= 260:
            x = draw(32, 0.3, -2.0)
        elif run.has("bad_batches") and torch.rand(()) < 0.06:
            x = draw(32, 300.0)
        else:
            x = draw(32)
        loss = loss_of(x)
        if run.has("drift"):  # a penalty with the wrong sign
            loss = loss - 4e-3 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(500)))


# --- depth ------------------------------------------------------------------------------------------------------------


@TASKS.add("rate_too_high", "rate_too_low", "exploding_depth", floor=1e-3)
def sine_network(run: Run) -> float:
    """A picture as a function of its coordinates by sine layers; Adam, random pixels."""
    g = fixed(run.seed)
    centres, widths = torch.rand(6, 2, generator=g) * 2 - 1, 0.2 + 0.3 * torch.rand(6, generator=g)

    def picture(x: Tensor) -> Tensor:
        return (-((torch.cdist(x, centres) / widths) ** 2)).exp().sum(1, keepdim=True)

    layers = nn.ModuleList([nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 1)])
    frequency = 5.0
    with torch.no_grad():
        for i, layer in enumerate(layers):
            bound = 0.5 if i == 0 else (6 / 48) ** 0.5 / frequency
            layer.weight.uniform_(-bound, bound).mul_(run.of(1.0, exploding_depth=12.0))
    optimizer = torch.optim.Adam(layers.parameters(), lr=run.of(1e-3, rate_too_high=0.3, rate_too_low=1e-7) * run.rate)

    def predict(x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = torch.sin(frequency * layer(x))
        return layers[-1](x)

    for _ in range(400):
        x = torch.rand(128, 2) * 2 - 1
        optimizer.zero_grad()
        functional.mse_loss(predict(x), picture(x)).backward()
        optimizer.step()
    x = torch.rand(2000, 2) * 2 - 1
    with torch.no_grad():
        return float(functional.mse_loss(predict(x), picture(x)))


# --- densities, codes, rewards ----------------------------------------------------------------------------------------


@TASKS.add("rate_too_high", "nonfinite_data", "nonfinite_growth")
def bump_vae(run: Run) -> float:
    """Bumps at two places by a VAE with a Gaussian code; Adam with a decay. Held out: its bound."""
    grid = torch.linspace(0, 1, 24)

    def draw(count: int) -> Tensor:
        places = torch.rand(2, count, 1)
        return (-((grid - places) ** 2) / 0.01).exp().sum(0) + 0.05 * torch.randn(count, 24)

    encoder, decoder = mlp(24, 48, 8), mlp(4, 48, 24)

    def bound(x: Tensor) -> Tensor:
        mean, log_var = encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        fit = (decoder(code) - x).square().sum(1) / (2 * 0.1**2)
        return (fit + 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)).mean()

    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=1.0)
    peak = run.of(5e-3, rate_too_high=0.2) * run.rate
    if run.has("nonfinite_growth"):
        optimizer, peak = torch.optim.SGD(parameters, lr=1.0, momentum=0.9), 0.01 * run.rate
    for step in range(400):
        set_rate(optimizer, peak * cosine(step, 400, 10))
        x = draw(48)
        if run.has("nonfinite_data") and step == 77:
            x = torch.log(x)
        optimizer.zero_grad()
        bound(x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(bound(draw(1500)))


@TASKS.add("rate_too_high", "bad_batches", "rate_zero", "rate_too_low")
def bandit_policy(run: Run) -> float:
    """A policy that learns from rewards alone which of six actions a context asks for; Adam. Held out: regret."""
    worth = torch.randn(8, 6, generator=fixed(run.seed))
    policy = mlp(8, 32, 6)
    optimizer = torch.optim.Adam(
        policy.parameters(), lr=run.of(1e-2, rate_too_high=2.0, rate_zero=0.0, rate_too_low=1e-6) * run.rate
    )
    for step in range(500):
        x = torch.randn(64, 8)
        logits = policy(x)
        chosen = torch.distributions.Categorical(logits=logits).sample()
        reward = (x @ worth).gather(1, chosen[:, None]).squeeze(1) + torch.randn(64)
        if run.has("bad_batches") and step % 25 == 24:
            reward = reward * -400
        advantage = reward - reward.mean()
        loss = -(advantage * functional.log_softmax(logits, 1).gather(1, chosen[:, None]).squeeze(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(2000, 8)
    with torch.no_grad():
        values = x @ worth
        return float((values.max(1).values - (policy(x).softmax(1) * values).sum(1)).mean())


@TASKS.add("clip_starves", "rate_too_high", "data_shift")
def four_experts(run: Run) -> float:
    """A mixture of four experts with one chosen for each input; AdamW with a warm-up."""
    teachers = [torch.randn(6, 1, generator=fixed(run.seed * 10 + k)) for k in range(3)]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        kind = (x[:, 0] > 0.4).long() + (x[:, 1] > 0.8).long()
        return x, torch.stack([x @ t for t in teachers], 0)[kind, torch.arange(count)] + 0.1 * torch.randn(count, 1)

    gate, experts = nn.Linear(6, 4), nn.ModuleList(mlp(6, 24, 1) for _ in range(4))
    parameters = [*gate.parameters(), *experts.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0)

    def predict(x: Tensor) -> Tensor:
        weights = gate(x).softmax(1)
        best, which = weights.max(1)
        out = torch.zeros(len(x), 1)
        for k, expert in enumerate(experts):
            chosen = (which == k).nonzero().squeeze(1)
            if len(chosen):
                out = out.index_add(0, chosen, expert(x[chosen]) * best[chosen, None])
        return out

    for step in range(400):
        set_rate(optimizer, run.of(8e-3, rate_too_high=1.5) * cosine(step, 400, 20) * run.rate)
        x, y = draw(64)
        if run.has("data_shift") and step >= 200:
            y = -y + 4
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(5.0, clip_starves=3e-9))
        optimizer.step()
    with torch.no_grad():
        x, y = draw(2000)
        return float(functional.mse_loss(predict(x), y))


@TASKS.add("not_started", "rate_too_low", "no_gradient", floor=0.02)
def low_rank_adapter(run: Run) -> float:
    """A linear map that is frozen and a low-rank change of it that starts at zero; Adam."""
    g = fixed(run.seed)
    base = torch.randn(24, 24, generator=g) / 5
    change = torch.randn(24, 2, generator=g) @ torch.randn(2, 24, generator=g) / 5
    frozen = nn.Linear(24, 24, bias=False)
    frozen.weight = nn.Parameter(base, requires_grad=False)
    down, up = nn.Parameter(torch.randn(2, 24) / 5), nn.Parameter(torch.zeros(24, 2))
    if run.has("not_started"):
        nn.init.zeros_(down)
    optimizer = torch.optim.Adam([down, up], lr=run.of(2e-2, rate_too_low=2e-6) * run.rate)

    def predict(x: Tensor) -> Tensor:
        a, b = (down.data, up.data) if run.has("no_gradient") else (down, up)
        return frozen(x) + x @ a.T @ b.T

    if run.has("no_gradient"):
        frozen.weight.requires_grad_(True)  # what trains is the matrix that the optimizer does not have
    for _ in range(300):
        x = torch.randn(64, 24)
        y = x @ (base + change).T + 0.1 * torch.randn(64, 24)
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        optimizer.step()
    x = torch.randn(500, 24)
    with torch.no_grad():
        return float(functional.mse_loss(predict(x), x @ (base + change).T))


@TASKS.add("nonfinite_growth", "exploding_time", "nonfinite_range", floor=3e-3)
def pendulum(run: Run) -> float:
    """The law of a damped pendulum from its paths, integrated by Euler steps through a small network; Adam."""

    def true_path(state: Tensor, count: int) -> Tensor:
        found = []
        for _ in range(count):
            state = state + 0.1 * torch.stack([state[:, 1], -state[:, 0].sin() - 0.2 * state[:, 1]], 1)
            found.append(state)
        return torch.stack(found, 1)

    net = mlp(2, 32, 2, act=run.of(nn.Tanh, exploding_time=nn.ReLU, nonfinite_growth=nn.ReLU, nonfinite_range=nn.Tanh))
    with torch.no_grad():
        net[-1].weight *= run.of(0.3, exploding_time=40.0)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-2 * run.rate)
    if run.has("nonfinite_growth") or run.has("exploding_time"):
        optimizer = torch.optim.SGD(net.parameters(), lr=run.of(1e-3, nonfinite_growth=2.0) * run.rate)

    def loss_of(start: Tensor) -> Tensor:
        state, found = start, []
        for _ in range(15):
            state = state + 0.1 * net(state)
            found.append(state)
        errors = torch.stack(found, 1) - true_path(start, 15)
        if run.has("nonfinite_range"):
            return (errors.half() * 600).square().float().mean() / 600**2
        return errors.square().mean()

    for _ in range(300):
        optimizer.zero_grad()
        loss_of(torch.randn(32, 2)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(torch.randn(500, 2)))


@TASKS.add("drift", "accumulation", "vanishing")
def soft_teacher(run: Run) -> float:
    """A student that learns a teacher's soft answers; SGD with momentum, a dropout, two groups of rates."""
    teacher = mlp(10, 24, 6, act=nn.Tanh)
    act = run.of(nn.ReLU, vanishing=nn.Sigmoid)
    student = nn.Sequential(
        nn.Linear(10, 48), act(), nn.Dropout(0.05), *mlp(48, 48, *[48] * run.of(0, vanishing=8), 6, act=act)
    )
    first = [p for name, p in student.named_parameters() if name.startswith("0.")]
    rest = [p for name, p in student.named_parameters() if not name.startswith("0.")]
    groups = [{"params": first, "lr": 0.3 * run.rate}, {"params": rest, "lr": 0.1 * run.rate}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.0)

    def loss_of(x: Tensor) -> Tensor:
        with torch.no_grad():
            aims = (3 * teacher(x)).softmax(1)
        return functional.kl_div(student(x).log_softmax(1), aims, reduction="batchmean")

    for _ in range(400):
        loss = loss_of(torch.randn(64, 10))
        if run.has("accumulation"):
            for p in rest:
                p.grad = None
        else:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run.has("drift"):  # a decay with the wrong sign, written by hand
            with torch.no_grad():
                for p in student.parameters():
                    p *= 1.008
    student.eval()
    with torch.no_grad():
        return float(loss_of(torch.randn(2000, 10)))


# --- written in place of tasks that went over to the developed set ----------------------------------------------------


@TASKS.add("exploding_time", "rate_zero", "drift", floor=0.02)
def leaky_filter(run: Run) -> float:
    """A linear recurrence with eight states, written by hand, that has to find two decay rates; Adam."""
    rates = torch.tensor([0.95, 0.6])

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x, state, found = torch.randn(count, 30), torch.zeros(count, 2), []
        for i in range(30):
            state = rates * state + x[:, i, None]
            found.append(state[:, 0] - state[:, 1])
        return x, torch.stack(found, 1)

    mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0] * run.of(0.8, exploding_time=1.7))
    into, out = nn.Parameter(torch.randn(8) / 3), nn.Parameter(torch.randn(8) / 3)
    optimizer = torch.optim.Adam([mix, into, out], lr=run.of(1e-2, rate_zero=0.0) * run.rate)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        state, found = torch.zeros(len(x), 8), []
        for i in range(30):
            state = state @ mix.T + x[:, i, None] * into
            found.append(state @ out)
        return functional.mse_loss(torch.stack(found, 1), y)

    for _ in range(350):
        loss = loss_of(*draw(32))
        if run.has("drift"):  # a penalty on the weights, with the wrong sign
            loss = loss - 0.6 * (into.square().sum() + out.square().sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(500)))


@TASKS.add("vanishing", "bad_batches", floor=0.02)
def first_letter(run: Run) -> float:
    """The first letter of a word has to be recalled at its end, by a plain RNN that starts orthogonal; Adam."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(6, (count, 14))
        return functional.one_hot(x, 6).float(), x[:, 0]

    model = Recurrent(nn.RNN, 6, 32, 6)
    nn.init.orthogonal_(model.core.weight_hh_l0, gain=run.of(1.0, vanishing=0.05))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * run.rate)
    for step in range(400):
        x, y = draw(48)
        bad = run.has("bad_batches") and step % 30 > 25
        if bad:  # a file whose labels are those of another task
            y = (y * 5 + 1) % 6
        loss = functional.cross_entropy(model(x), y) * (40 if bad else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(1500))


@TASKS.add("vanishing", "exploding_depth", "drift", "rate_too_low", floor=0.05)
def deep_autoencoder(run: Run) -> float:
    """Points near a curved surface through ten layers and a bottleneck, by tanh; Adam with a decay."""
    lift = torch.randn(2, 16, generator=fixed(run.seed))

    def draw(count: int) -> Tensor:
        return torch.tanh(torch.randn(count, 2) @ lift) + 0.05 * torch.randn(count, 16)

    model = mlp(16, 32, 32, 32, 32, 4, 32, 32, 32, 32, 16, act=run.of(nn.Tanh, exploding_depth=nn.ReLU))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight, gain=run.of(1.2, vanishing=0.08, exploding_depth=5.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    for step in range(350):
        set_rate(optimizer, run.of(3e-3, rate_too_low=3e-7) * cosine(step, 350) * run.rate)
        x = draw(48)
        loss = functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run.has("drift"):  # a decay of the weights, with the wrong sign
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p, alpha=0.01)
    fresh = draw(1000)
    return held_out(model, functional.mse_loss, fresh, fresh)


@TASKS.add("clip_before_unscale", "nonfinite_range", "rate_decayed", floor=0.03)
def half_keyword(run: Run) -> float:
    """Whether a keyword was in a stream, by convolutions under float16 autocast; SGD, a GradScaler, a clip at 2."""
    word = torch.randn(4, 5, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(count, 4, 20), torch.randint(2, (count,))
        for i in y.nonzero().squeeze(1).tolist():
            at = int(torch.randint(15, (1,)))
            x[i, :, at : at + 5] += 1.5 * word
        return x, y

    body = nn.Sequential(nn.Conv1d(4, 16, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
    head = nn.Linear(16, 2)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def predict(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = head(body(x))
        if run.has("nonfinite_range"):  # a softmax by hand, in half precision
            likely = (logits.half() * 4).exp()
            return (likely / likely.sum(1, keepdim=True)).log() / 4
        return logits

    for step in range(300):
        x, y = draw(32)
        if run.has("rate_decayed"):
            set_rate(optimizer, 0.1 * run.rate * max(1e-4, 1 - step / 25))
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(predict(x).float(), y)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 2.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        x, y = draw(1000)
        return float(functional.cross_entropy(predict(x).float(), y))


@TASKS.add("data_shift", "bad_batches", "rate_too_high")
def denoiser(run: Run) -> float:
    """The noise in a point of a spiral, at a random level of it, by an MLP (a small diffusion model); AdamW."""

    def draw(count: int) -> Tensor:
        angle = torch.rand(count) * 9 + 1
        return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 5

    embed, body = nn.Linear(1, 16), mlp(18, 64, 64, 2, act=nn.SiLU)
    rate = run.of(3e-3, rate_too_high=0.5) * run.rate
    optimizer = torch.optim.AdamW([*embed.parameters(), *body.parameters()], lr=rate)

    def loss_of(x: Tensor) -> Tensor:
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        code = torch.sin(6 * embed(level))
        seen = (1 - level).sqrt() * x + level.sqrt() * noise
        return functional.mse_loss(body(torch.cat([seen, code], 1)), noise)

    for step in range(400):
        x = draw(64)
        if run.has("data_shift") and step >= 250:
            x = x * 6 + 20
        if run.has("bad_batches") and step % 45 in (11, 12):
            x = x * 1000
        loss = loss_of(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(3000)))


@TASKS.add("rate_decayed", "bad_batches", "nonfinite_data")
def turns(run: Run) -> float:
    """Sentiment and topic of a bag of words in turn, with losses of different size; RMSprop with a decay."""
    g = fixed(run.seed)
    feeling, topic = torch.randn(60, generator=g), torch.randn(60, 7, generator=g)
    bag, say_feeling, say_topic = nn.EmbeddingBag(60, 24), nn.Linear(24, 1), nn.Linear(24, 7)
    parameters = [*bag.parameters(), *say_feeling.parameters(), *say_topic.parameters()]
    rate = 2.5e-2 * run.rate
    optimizer = torch.optim.RMSprop(parameters, lr=rate)

    def loss_of(x: Tensor, kind: int) -> Tensor:
        h = bag(x)
        if kind == 0:
            return 3 * functional.mse_loss(say_feeling(h).squeeze(1), feeling[x].mean(1) * 2)
        return functional.cross_entropy(say_topic(h), topic[x].mean(1).argmax(1))

    for step in range(450):
        shape = 0.7 ** (step // 4) if run.has("rate_decayed") else cosine(step, 450)
        set_rate(optimizer, rate * shape)
        x = torch.randint(60, (48, 8))
        loss = loss_of(x, step % 3 % 2)
        if run.has("bad_batches") and step % 55 > 50:
            loss = 80 * functional.cross_entropy(say_topic(bag(x)), (topic[x].mean(1).argmax(1) + 3) % 7)
        if run.has("nonfinite_data") and step == 222:
            loss = loss * (x == 60).sum() / (x == 60).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randint(60, (2000, 8))
        return float(loss_of(x, 0) + loss_of(x, 1))


@TASKS.add("nonfinite_data", "rate_decayed", "clip_twice", floor=0.05)
def series_tcn(run: Run) -> float:
    """Which of four rhythms a series has, by dilated convolutions; SGD with momentum, one cycle, a clip at 5."""
    periods = torch.tensor([5, 7, 9, 11])

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (count,))
        t = torch.arange(32)[None] + torch.randint(11, (count, 1))
        x = (t % periods[y][:, None] == 0).float() * 2 + 0.5 * torch.randn(count, 32)
        return x[:, None], y

    model = nn.Sequential(
        nn.Conv1d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 24, 3, dilation=2, padding=2), nn.ReLU(),
        nn.Conv1d(24, 24, 3, dilation=4, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate, momentum=0.9)
    steps = 450
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2 * run.rate, total_steps=steps)
    for step in range(steps):
        x, y = draw(48)
        if run.has("nonfinite_data") and step == 171:
            x[7] = (x[7] - x[7].mean()) / (x[7] * 0).std()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(model.parameters(), 2e-3)
        if run.has("rate_decayed") and step >= 40:
            set_rate(optimizer, 1e-3 * run.rate * 0.9 ** (step - 40))
        optimizer.step()
        scheduler.step()
    return held_out(model, functional.cross_entropy, *draw(1500))


# --- well, and not easy -----------------------------------------------------------------------------------------------


@TASKS.add()
def hinge_triplets(run: Run) -> float:
    """Triplets with a margin, most of which have no loss in the end; SGD with momentum, small batches."""
    centres = torch.randn(12, 16, generator=fixed(run.seed))
    net = mlp(16, 32, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.003 * run.rate, momentum=0.9)

    def loss_of(count: int) -> Tensor:
        a = torch.randint(12, (count,))
        b = (a + torch.randint(1, 12, (count,))) % 12
        one, same, other = (centres[k] + 0.8 * torch.randn(count, 16) for k in (a, a, b))
        near, far = (net(one) - net(same)).square().sum(1), (net(one) - net(other)).square().sum(1)
        return functional.relu(near - far + 1).mean()

    for _ in range(400):
        loss = loss_of(8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(3000))


@TASKS.add()
def muon_mixer(run: Run) -> float:
    """A mixer of tokens and channels: Muon for its matrices, AdamW for the rest."""
    tokens, width = 8, 16
    key = torch.randn(width, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, tokens, width)
        return x, (x @ key).argmax(1)

    mix = nn.ModuleList(mlp(tokens, 24, tokens, act=nn.GELU) for _ in range(2))
    channels = nn.ModuleList(mlp(width, 48, width, act=nn.GELU) for _ in range(2))
    norms, head = nn.ModuleList(nn.LayerNorm(width) for _ in range(4)), nn.Linear(width, 1)

    def predict(x: Tensor) -> Tensor:
        for i in range(2):
            x = x + mix[i](norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels[i](norms[2 * i + 1](x))
        return head(x).squeeze(2)

    inner = [*mix.parameters(), *channels.parameters()]
    matrices = [p for p in inner if p.ndim == 2]
    others = [*[p for p in inner if p.ndim != 2], *norms.parameters(), *head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=1.0), torch.optim.AdamW(others, lr=1.0)]
    for step in range(300):
        set_rate(optimizers[0], 0.02 * cosine(step, 300, 10) * run.rate)
        set_rate(optimizers[1], 5e-3 * cosine(step, 300, 10) * run.rate)
        x, y = draw(48)
        loss = functional.cross_entropy(predict(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        x, y = draw(1500)
        return float(functional.cross_entropy(predict(x), y)) + 0.1


@TASKS.add("rate_decayed")
def factored_lm(run: Run) -> float:
    """Word pairs by two embeddings, with Adafactor."""
    table = (2.5 * torch.randn(30, 30, generator=fixed(run.seed))).softmax(1)
    embed, net = nn.Embedding(30, 16), mlp(16, 48, 30)
    optimizer = torch.optim.Adafactor([*embed.parameters(), *net.parameters()], lr=0.02 * run.rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, run.of(1.0, rate_decayed=0.85))
    for _ in range(400):
        x = torch.randint(30, (64,))
        y = torch.multinomial(table[x], 1).squeeze(1)
        optimizer.zero_grad()
        functional.cross_entropy(net(embed(x)), y).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float(-(table * net(embed.weight).log_softmax(1)).sum(1).mean())


@TASKS.add()
def warm_restarts(run: Run) -> float:
    """An MLP on noisy clusters under a cosine that starts anew twice; SGD with momentum."""
    centres = torch.randn(6, 12, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(6, (count,))
        return centres[y] + 1.3 * torch.randn(count, 12), y

    model = mlp(12, 48, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 150)
    for _ in range(450):
        x, y = draw(48)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return held_out(model, functional.cross_entropy, *draw(3000))


@TASKS.add()
def tiny_start(run: Run) -> float:
    """A transformer whose outputs start at zero, under a warm-up of a third of the run."""
    embed, blocks, head = nn.Embedding(12, 24), nn.Sequential(Block(24, 4), Block(24, 4)), nn.Linear(24, 12)
    for block in blocks:
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.mlp[-1].weight)
    nn.init.zeros_(head.weight)
    parameters = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1.0)

    def loss_of(count: int) -> Tensor:
        start, stride = torch.randint(12, (count, 1)), torch.randint(1, 4, (count, 1))
        x = (start + stride * torch.arange(10)) % 12
        return functional.cross_entropy(head(blocks(embed(x)))[:, 1:-1].flatten(0, 1), x[:, 2:].flatten())

    for step in range(360):
        set_rate(optimizer, 3e-3 * cosine(step, 360, 120) * run.rate)
        optimizer.zero_grad()
        loss_of(24).backward()
        optimizer.step()
    with torch.no_grad():
        return max(0.05, float(loss_of(500)))


if __name__ == "__main__":
    main(TASKS)
