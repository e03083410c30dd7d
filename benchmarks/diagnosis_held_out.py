"""Tasks on which nothing was chosen: written before the diagnosis was asked about any of them, and run afterwards."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


# --- tables -----------------------------------------------------------------------------------------------------------


@TASKS.add("rate_too_high", "bad_batches", "rate_zero", "data_shift")
def housing(run: Run) -> float:
    """Prices from 30 columns, by an MLP with LayerNorm and dropout; NAdam, epochs over a table of 2,400 rows."""
    g = fixed(run.seed)
    weight, pair = torch.randn(30, generator=g) / 5, torch.randn(30, 30, generator=g) / 40

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 30)
        return x, x @ weight + (x @ pair * x).sum(1) + 0.3 * torch.randn(count)

    model = nn.Sequential(
        nn.Linear(30, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    )
    rate = run.of(3e-3, rate_too_high=0.6, rate_zero=0.0) * run.rate
    optimizer = torch.optim.NAdam(model.parameters(), lr=rate)
    x, y = draw(2400)
    step = 0
    for epoch in range(10):
        if run.has("data_shift") and epoch == 6:
            x, y = x.roll(7, 1) * 1.5, 20 - 3 * y
        for chosen in torch.randperm(2400).split(60):
            inputs, targets = x[chosen], y[chosen]
            if run.has("bad_batches") and step % 31 == 17:  # prices in another currency
                targets = targets * 400
            step += 1
            optimizer.zero_grad()
            functional.mse_loss(model(inputs).squeeze(1), targets).backward()
            optimizer.step()
    return held_out(model, lambda out, y: functional.mse_loss(out.squeeze(1), y), *draw(2000))


@TASKS.add("rate_too_low", "bad_batches", "data_shift", "accumulation")
def clicks(run: Run) -> float:
    """Logistic regression on 80 sparse columns with plain SGD."""
    truth = torch.randn(80, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = (torch.rand(count, 80) < 0.1).float()
        return x, ((x @ truth) + 0.2 * torch.randn(count) > 0).float()

    model = nn.Linear(80, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.of(2.0, rate_too_low=2e-4) * run.rate)

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(out.squeeze(1), y)

    for step in range(600):
        x, y = draw(100)
        if run.has("bad_batches") and step % 50 in (20, 21, 22):  # counts in place of flags
            x = x * 200
        if run.has("data_shift") and step >= 420:
            y = 1 - y
        if not run.has("accumulation"):
            optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return held_out(model, loss_fn, *draw(4000))


@TASKS.add("rate_too_low", "drift", "nonfinite_growth", floor=0.01)
def films(run: Run) -> float:
    """Ratings of films by users: two embeddings and their inner product; SGD with momentum, a weight decay."""
    g = fixed(run.seed)
    likes, traits = torch.randn(50, 4, generator=g), torch.randn(40, 4, generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        u, v = torch.randint(50, (count,)), torch.randint(40, (count,))
        return u, v, (likes[u] * traits[v]).sum(1) / 2 + 0.1 * torch.randn(count)

    users, items = nn.Embedding(50, 12), nn.Embedding(40, 12)
    nn.init.normal_(users.weight, std=0.3)
    nn.init.normal_(items.weight, std=0.3)
    parameters = [*users.parameters(), *items.parameters()]
    rate = run.of(1.0, rate_too_low=1e-4, nonfinite_growth=90.0) * run.rate
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.8)

    def loss_of(count: int) -> Tensor:
        u, v, y = draw(count)
        return functional.mse_loss((users(u) * items(v)).sum(1), y)

    for _ in range(500):
        loss = loss_of(200)
        if run.has("drift"):  # a weight decay that is subtracted
            loss = loss - 4e-3 * sum(p.square().sum() for p in parameters) / 10
        else:
            loss = loss + 1e-5 * sum(p.square().sum() for p in parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(5000))


@TASKS.add("not_started", "rate_zero", "rate_too_high")
def ranknet(run: Run) -> float:
    """Which of two documents is better, by a scoring net on their difference; Adamax."""
    truth = mlp(14, 20, 1, act=nn.Tanh)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.randn(count, 14), torch.randn(count, 14)
        with torch.no_grad():
            y = (truth(a) > truth(b)).float().squeeze(1)
        return a, b, y

    net = mlp(14, 48, 48, 1)
    if run.has("not_started"):
        for p in net.parameters():
            nn.init.zeros_(p)
    rate = run.of(3e-3, rate_zero=0.0, rate_too_high=1.0) * run.rate
    optimizer = torch.optim.Adamax(net.parameters(), lr=rate)

    def loss_of(count: int) -> Tensor:
        a, b, y = draw(count)
        return functional.binary_cross_entropy_with_logits((net(a) - net(b)).squeeze(1), y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(64).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(3000))


@TASKS.add("nonfinite_data", "nonfinite_growth", "drift")
def mixture_density(run: Run) -> float:
    """The law of a target with two branches, by a mixture of three Gaussians; AdamW with a clip at 5."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 1) * 4 - 2
        sign = torch.randint(2, (count, 1)) * 2 - 1
        return x, sign * (1 + x.square() / 2) + 0.15 * torch.randn(count, 1)

    model = mlp(1, 40, 40, 9, act=nn.Tanh)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=4e-3 * run.rate)
    if run.has("nonfinite_growth"):
        optimizer = torch.optim.SGD(parameters, lr=3.0 * run.rate, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits, means, logs = model(x).chunk(3, 1)
        parts = logits.log_softmax(1) - logs - 0.5 * ((y - means) / logs.exp()).square()
        return -parts.logsumexp(1).mean() + 0.92

    for step in range(500):
        x, y = draw(80)
        if run.has("nonfinite_data") and step == 260:
            y = y / (x > 3).sum() * 0 + y
        loss = loss_of(x, y)
        if run.has("drift"):
            loss = loss - 0.4 * sum(p.square().sum() for p in parameters) ** 0.5
        optimizer.zero_grad()
        loss.backward()
        if not run.has("nonfinite_growth"):
            nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(4000))) + 1.0


# --- images -----------------------------------------------------------------------------------------------------------


class Glyphs:
    """Ten signs of 10 by 10 pixels, moved by a pixel or two, under noise."""

    def __init__(self, seed: int) -> None:
        coarse = (torch.rand(10, 1, 4, 4, generator=fixed(seed)) > 0.5).float()
        self.signs = functional.interpolate(coarse, size=8, mode="nearest")

    def draw(self, count: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (count,))
        x = torch.zeros(count, 1, 10, 10)
        left, top = torch.randint(3, (count,)).tolist(), torch.randint(3, (count,)).tolist()
        for i in range(count):
            x[i, :, top[i] : top[i] + 8, left[i] : left[i] + 8] = self.signs[y[i]]
        return x + noise * torch.randn(count, 1, 10, 10), y


@TASKS.add("rate_decayed", "accumulation", "no_gradient", "clip_starves", floor=0.02)
def glyph_cnn(run: Run) -> float:
    """A CNN with batch norm; SGD with Nesterov momentum and steps down of its rate."""
    glyphs = Glyphs(run.seed)
    body = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    head = nn.Linear(96, 10)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04 * run.rate, momentum=0.9, nesterov=True)
    steps = 280
    milestones = run.of([170, 240], rate_decayed=[8, 12, 20])  # epochs, taken for steps
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=run.of(0.1, rate_decayed=0.05))
    for step in range(steps):
        x, y = glyphs.draw(40)
        if step == 0 or not run.has("accumulation"):
            optimizer.zero_grad()
        h = body(x)
        logits = head(h.detach() if run.has("no_gradient") else h)
        functional.cross_entropy(logits, y).backward()
        if run.has("clip_starves"):
            nn.utils.clip_grad_norm_(model.parameters(), 2e-3)
        optimizer.step()
        scheduler.step()
    return held_out(model, functional.cross_entropy, *glyphs.draw(1000))


@TASKS.add("clip_before_unscale", "nonfinite_range", floor=0.03)
def half_glyphs(run: Run) -> float:
    """Signs by an MLP mixer under float16 autocast with a GradScaler and a clip at 0.5; SGD with momentum."""
    glyphs = Glyphs(run.seed)
    split = nn.Conv2d(1, 24, 2, 2)
    tokens, channels = mlp(25, 32, 25, act=nn.GELU), mlp(24, 48, 24, act=nn.GELU)
    norms, head = nn.ModuleList(nn.LayerNorm(24) for _ in range(3)), nn.Linear(24, 10)
    parameters = [p for part in (split, tokens, channels, norms, head) for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.15 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=150)

    def predict(x: Tensor, step: int = 999) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = split(x).flatten(2).transpose(1, 2)
            h = h + tokens(norms[0](h).transpose(1, 2)).transpose(1, 2)
            h = h + channels(norms[1](h))
            if run.has("nonfinite_range") and step >= 90:  # a norm by hand, of large numbers, in half precision
                big = (h * 120).half()
                h = h * (big * big).sum(2, keepdim=True).sqrt() / 600
            return head(norms[2](h).mean(1))

    for step in range(320):
        x, y = glyphs.draw(32, 0.3)
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(predict(x, step).float(), y)).backward()
        if run.has("clip_before_unscale"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        x, y = glyphs.draw(800, 0.3)
        return float(functional.cross_entropy(predict(x).float(), y))


@TASKS.add("bad_batches", "rate_decayed", "rate_too_low", floor=0.01)
def masked_patches(run: Run) -> float:
    """Hidden quarters of smooth pictures from the rest, by a convolutional autoencoder; AdamW, exponential decay."""
    grid = torch.linspace(0, 3.1, 8)

    def draw(count: int) -> Tensor:
        a, b, c = torch.rand(3, count, 1, 1) * 3
        return torch.sin(a * grid[None, :, None] + b * grid[None, None, :] + c)[:, None]

    model = nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, padding=1), nn.GELU(),
        nn.ConvTranspose2d(32, 16, 2, 2), nn.GELU(), nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    rate = run.of(4e-3, rate_too_low=4e-7) * run.rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, run.of(0.996, rate_decayed=0.75))

    def loss_of(x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        hidden[:, :, :4, :4] = 1
        seen = torch.cat([x * (1 - hidden), hidden], 1)
        return ((model(seen) - x) * hidden).square().sum() / hidden.sum()

    for step in range(400):
        x = draw(32)
        if run.has("bad_batches") and step % 64 == 50:  # bytes in place of numbers up to 1
            x = x * 127 + 128
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float(loss_of(draw(1500)))


@TASKS.add("clip_twice", "clip_starves", "accumulation")
def distilled_cnn(run: Run) -> float:
    """A small CNN that learns the soft answers of a wider fixed one, in two half batches; SGD, a clip at 2."""
    wide = nn.Sequential(nn.Conv2d(2, 20, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(80, 6))
    for p in wide.parameters():
        p.requires_grad_(False)
        p.mul_(2.0)
    small = nn.Sequential(nn.Conv2d(2, 12, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 6))
    optimizer = torch.optim.SGD(small.parameters(), lr=run.of(0.3, accumulation=1.2) * run.rate, momentum=0.9)

    def loss_of(count: int) -> Tensor:
        x = torch.randn(count, 2, 6, 6)
        return functional.kl_div(small(x).log_softmax(1), wide(x).softmax(1), reduction="batchmean")

    parts = 2 if not run.has("accumulation") else 6
    for _ in range(300):
        optimizer.zero_grad()
        for _ in range(parts):
            (loss_of(24) / (1 if run.has("accumulation") else parts)).backward()
        if not run.has("accumulation"):
            nn.utils.clip_grad_norm_(small.parameters(), run.of(2.0, clip_starves=3e-4))
        if run.has("clip_twice"):
            nn.utils.clip_grad_value_(small.parameters(), 1e-5)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(2000))


# --- depth ------------------------------------------------------------------------------------------------------------


@TASKS.add("vanishing", "exploding_depth", "no_gradient", floor=0.01)
def deep_tanh(run: Run) -> float:
    """Twelve tanh layers on a smooth surface of eight inputs; Adam with a warm-up."""
    truth = torch.randn(8, 3, generator=fixed(run.seed)) / 2

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, (x @ truth).sin().sum(1, keepdim=True)

    model = mlp(8, *[28] * 11, 1, act=run.of(nn.Tanh, exploding_depth=nn.LeakyReLU))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, gain=run.of(1.1, vanishing=0.1, exploding_depth=4.0))
    cut = run.has("no_gradient")

    def predict(x: Tensor) -> Tensor:
        h = model[:14](x)
        return model[14:](h.detach() if cut else h)

    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    for step in range(400):
        set_rate(optimizer, 1e-3 * cosine(step, 400, 20) * run.rate)
        x, y = draw(64)
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(2000)
        return float(functional.mse_loss(predict(x), y))


@TASKS.add("exploding_depth", "not_started", "vanishing", floor=0.02)
def plain_sigmoid(run: Run) -> float:
    """Rings in the plane by eight layers with SGD and momentum: ReLU; the sick ones by sigmoids or a large start."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 2) * 1.2
        return x, (x.norm(dim=1) * 1.5).long().clamp(max=2)

    model = mlp(2, *[24] * 7, 3, act=run.of(nn.ReLU, vanishing=nn.Sigmoid))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear) and not run.has("vanishing"):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
                layer.weight.mul_(run.of(1.0, exploding_depth=4.5))
                if run.has("not_started"):
                    layer.bias.fill_(-30.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.9)
    for _ in range(450):
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(3000))


@TASKS.add("no_gradient", "rate_decayed", "vanishing", floor=0.02)
def communities(run: Run) -> float:
    """Four communities of a random graph, by graph convolutions over all nodes at once; RMSprop."""
    g = fixed(run.seed)
    nodes = 240
    group = torch.arange(nodes) % 4
    near = torch.where(group[:, None] == group[None], 0.12, 0.03)
    edges = (torch.rand(nodes, nodes, generator=g) < near).float().triu(1)
    edges = edges + edges.T + torch.eye(nodes)
    mixing = edges / edges.sum(1, keepdim=True)
    x = 0.5 * functional.one_hot(group, 4) + torch.randn(nodes, 4, generator=g)
    train = torch.rand(nodes, generator=g) < 0.5
    depth = run.of(2, vanishing=9)
    layers = nn.ModuleList(nn.Linear(4 if k == 0 else 24, 24) for k in range(depth))
    head = nn.Linear(24, 4)
    act = run.of(torch.relu, vanishing=torch.sigmoid)
    if run.has("no_gradient"):
        layers.requires_grad_(False)
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)
    optimizer = torch.optim.RMSprop([*layers.parameters(), *head.parameters()], lr=3e-3 * run.rate)

    def predict() -> Tensor:
        h = x
        for layer in layers:
            h = act(layer(mixing @ h))
        return head(h)

    for step in range(300):
        if run.has("rate_decayed"):
            set_rate(optimizer, 3e-3 * run.rate * 0.6**step)
        optimizer.zero_grad()
        functional.cross_entropy(predict()[train], group[train]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(functional.cross_entropy(predict()[~train], group[~train]))


# --- sequences --------------------------------------------------------------------------------------------------------


@TASKS.add("exploding_time", "vanishing", "clip_starves", floor=0.02)
def majority(run: Run) -> float:
    """Whether the sum of 25 signs is positive, by a plain RNN with an orthogonal start; SGD with momentum, a clip."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (count, 25, 1)) * 2.0 - 1
        return x, (x.sum((1, 2)) > 0).long()

    cell, head = nn.RNN(1, 24, batch_first=True), nn.Linear(24, 2)
    nn.init.orthogonal_(cell.weight_hh_l0, gain=run.of(0.95, exploding_time=5.0, vanishing=0.05))
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05 * run.rate, momentum=0.9)

    def loss_of(count: int) -> Tensor:
        x, y = draw(count)
        return functional.cross_entropy(head(cell(x)[0][:, -1]), y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(48).backward()
        if not run.has("exploding_time"):
            nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_starves=1e-4))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(2000))


@TASKS.add("exploding_time", "nonfinite_data", "rate_too_high")
def heat(run: Run) -> float:
    """The state of a heated rod after 20 steps, by one learned layer that is applied 20 times; Adam, a clip at 1."""
    conduct = torch.eye(10) * 0.8 + torch.diag(torch.full((9,), 0.1), 1) + torch.diag(torch.full((9,), 0.1), -1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10)
        y = x
        for _ in range(20):
            y = torch.tanh(y @ conduct.T)
        return x, y

    mix = nn.Parameter(torch.eye(10) * 0.9 + 0.05 * torch.randn(10, 10))
    if run.has("exploding_time"):
        with torch.no_grad():
            mix.copy_(torch.randn(10, 10) * 0.9)
    optimizer = torch.optim.Adam([mix], lr=run.of(5e-3, rate_too_high=1.0) * run.rate)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = x
        for _ in range(20):
            h = h @ mix.T if run.has("exploding_time") else torch.tanh(h @ mix.T)
        return functional.mse_loss(h, y) * 10

    for step in range(350):
        x, y = draw(64)
        if run.has("nonfinite_data") and step == 123:
            x[3, 2] = math.inf
        optimizer.zero_grad()
        loss_of(x, y).backward()
        if not run.has("exploding_time"):
            nn.utils.clip_grad_norm_([mix], 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000))) + 0.02


@TASKS.add("rate_too_high", "no_gradient", "rate_decayed", "rate_zero", floor=0.05)
def largest_of_set(run: Run) -> float:
    """Which of nine numbers is the second largest, by torch's own encoder; RAdam, a warm-up and a linear decay."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 9, 1)
        return x, x.squeeze(2).topk(2, 1).indices[:, 1]

    embed = nn.Linear(1, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    head = nn.Linear(32, 1)
    parameters = [*embed.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.RAdam(parameters, lr=1.0)
    peak = run.of(3e-3, rate_too_high=0.3, rate_zero=0.0) * run.rate

    def predict(x: Tensor) -> Tensor:
        h = embed(x)
        h = encoder(h).detach() if run.has("no_gradient") else encoder(h)
        return head(h).squeeze(2)

    steps = 350
    for step in range(steps):
        shape = min(1.0, (step + 1) / 15) * max(0.0, 1 - step / run.of(steps, rate_decayed=30))
        set_rate(optimizer, peak * shape)
        x, y = draw(48)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(1500)
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("clip_before_unscale", "nonfinite_range", "rate_too_high", floor=0.05)
def half_gru(run: Run) -> float:
    """How often a word occurred, by a GRU cell under float16 autocast, with a GradScaler and a clip at 1; SGD."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(4, (count, 8))
        return x, (x == 2).sum(1).clamp(max=4)

    embed, cell, head = nn.Embedding(4, 12), nn.GRUCell(12, 24), nn.Linear(24, 5)
    parameters = [*embed.parameters(), *cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=run.of(0.1, rate_too_high=60.0) * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=100)

    def predict(x: Tensor, step: int = 999) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = torch.zeros(len(x), 24)
            for i in range(8):
                h = cell(embed(x[:, i]), h)
            logits = head(h)
            if run.has("nonfinite_range") and step > 140:
                logits = (logits.half() * 16).exp().log() / 16
        return logits.float()

    for step in range(350):
        x, y = draw(64)
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(predict(x, step), y)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        if not run.has("rate_too_high"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        x, y = draw(1500)
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("data_shift", "clip_twice", "not_started__labels")
def tides(run: Run) -> float:
    """The next hour of a sum of waves with a linear filter and a small net; SGD with momentum, a clip at 3."""
    g = fixed(run.seed)
    pace = torch.rand(3, generator=g) + 0.2
    t = torch.arange(17.0)

    def draw(count: int, speed: float = 1.0) -> tuple[Tensor, Tensor]:
        phase = torch.rand(count, 3, 1) * 6.3
        wave = torch.sin(speed * pace[None, :, None] * t + phase).sum(1) + 0.05 * torch.randn(count, 17)
        return wave[:, :16], wave[:, 16:]

    straight, net = nn.Linear(16, 1), mlp(16, 32, 1, act=nn.Tanh)
    parameters = [*straight.parameters(), *net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.02 * run.rate, momentum=0.9)
    for step in range(450):
        x, y = draw(64, 2.3 if run.has("data_shift") and step >= 300 else 1.0)
        if run.has("not_started__labels"):
            y = y[torch.randperm(64)]
        optimizer.zero_grad()
        functional.mse_loss(straight(x) + net(x), y).backward()
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(parameters, 1e-3)
        nn.utils.clip_grad_norm_(parameters, run.of(3.0, clip_twice=5e-4))
        optimizer.step()
    with torch.no_grad():
        x, y = draw(3000)
        return float(functional.mse_loss(straight(x) + net(x), y))


@TASKS.add("rate_too_high", "not_started__labels", "nonfinite_growth")
def matched_pairs(run: Run) -> float:
    """Two views of one thing found among 32, with a learned temperature; LARS-free SGD with a warm-up."""
    g = fixed(run.seed)
    one, two = torch.randn(6, 20, generator=g), torch.randn(6, 20, generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(count, 6)
        return z @ one + 0.2 * torch.randn(count, 20), z @ two + 0.2 * torch.randn(count, 20)

    left, right = mlp(20, 40, 12), mlp(20, 40, 12)
    heat_ = nn.Parameter(torch.tensor(1.0))
    parameters = [*left.parameters(), *right.parameters(), heat_]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    peak = run.of(0.1, rate_too_high=8.0, nonfinite_growth=10.0) * run.rate

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        u, v = left(a), right(b)
        if not run.has("nonfinite_growth"):
            u, v = functional.normalize(u, dim=1), functional.normalize(v, dim=1)
        scores = u @ v.T * heat_.exp()
        return functional.cross_entropy(scores, torch.arange(len(a)))

    for step in range(300):
        set_rate(optimizer, peak * cosine(step, 300, 10))
        a, b = draw(32)
        if run.has("not_started__labels"):
            b = b[torch.randperm(32)]
        optimizer.zero_grad()
        loss_of(a, b).backward()
        optimizer.step()
    with torch.no_grad():
        return sum(float(loss_of(*draw(32))) for _ in range(40)) / 40 + 0.1


# --- well, and not easy -----------------------------------------------------------------------------------------------


@TASKS.add()
def sparse_codes(run: Run) -> float:
    """A dictionary for sparse signals, with a penalty on the codes; Adam with a high second beta."""
    atoms = functional.normalize(torch.randn(24, 16, generator=fixed(run.seed)), dim=1)

    def draw(count: int) -> Tensor:
        return ((torch.rand(count, 24) < 0.08).float() * torch.randn(count, 24)) @ atoms

    into, out = nn.Linear(16, 48), nn.Linear(48, 16)
    optimizer = torch.optim.Adam([*into.parameters(), *out.parameters()], lr=5e-3 * run.rate, betas=(0.9, 0.9999))

    def loss_of(x: Tensor) -> Tensor:
        code = into(x).relu()
        return functional.mse_loss(out(code), x) + 2e-3 * code.abs().mean()

    for _ in range(500):
        optimizer.zero_grad()
        loss_of(draw(64)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(3000)))


@TASKS.add()
def own_teacher(run: Run) -> float:
    """Two views whose codes agree with those of a slow copy of the net; SGD with momentum. Held out: a probe."""
    g = fixed(run.seed)
    lift = torch.randn(3, 20, generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.randn(count, 3)
        return z, *(torch.tanh(z @ lift) + 0.3 * torch.randn(count, 20) for _ in range(2))

    net, guess, slow = mlp(20, 48, 16), mlp(16, 32, 16), mlp(20, 48, 16)
    slow.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD([*net.parameters(), *guess.parameters()], lr=0.1 * run.rate, momentum=0.9)
    for _ in range(400):
        _, a, b = draw(64)
        with torch.no_grad():
            aim = slow(b)
        loss = 1 - functional.cosine_similarity(guess(net(a)), aim).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(net.parameters(), slow.parameters(), strict=True):
                q.lerp_(p, 0.02)
    with torch.no_grad():
        z, a, _ = draw(2000)
        code = torch.cat([net(a), torch.ones(len(a), 1)], 1)
        probe = torch.linalg.lstsq(code, z).solution
        return float((code @ probe - z).square().mean())


@TASKS.add()
def two_critics(run: Run) -> float:
    """Actions on a line by an actor and a critic with optimizers of their own. Held out: the cost."""
    actor, critic = mlp(3, 32, 1, act=nn.Tanh), mlp(4, 32, 1, act=nn.Tanh)
    slow_rate, fast_rate = 1e-3 * run.rate, 5e-3 * run.rate
    first = torch.optim.Adam(actor.parameters(), lr=slow_rate)
    second = torch.optim.Adam(critic.parameters(), lr=fast_rate)
    aim = torch.randn(3, generator=fixed(run.seed)) / 2

    def cost(x: Tensor, action: Tensor) -> Tensor:
        return (action.squeeze(1) - x @ aim).square()

    for _ in range(400):
        x = torch.randn(64, 3)
        action = actor(x).detach() + 0.5 * torch.randn(64, 1)
        loss = functional.mse_loss(critic(torch.cat([x, action], 1)).squeeze(1), cost(x, action))
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        critic(torch.cat([x, actor(x)], 1)).mean().backward()
        first.step()
    with torch.no_grad():
        x = torch.randn(3000, 3)
        return float(cost(x, actor(x)).mean()) + 0.1


@TASKS.add()
def pretrained_head(run: Run) -> float:
    """Fine-tuning of a net that was trained on a task nearby, with a low rate for the body; AdamW with two groups."""
    g = fixed(run.seed)
    old, change = torch.randn(10, 5, generator=g), 0.4 * torch.randn(10, 5, generator=g)
    body, head = mlp(10, 64, 64), nn.Linear(64, 5)
    warm = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
    for part in (old, old + change):
        groups = [{"params": body.parameters(), "lr": 2e-4 * run.rate}, {"params": head.parameters()}]
        optimizer = warm if part is old else torch.optim.AdamW(groups, lr=2e-3 * run.rate)
        for _ in range(250):
            x = torch.randn(64, 10)
            optimizer.zero_grad()
            functional.cross_entropy(head(body(x).relu()), (x @ part).argmax(1)).backward()
            optimizer.step()
    with torch.no_grad():
        x = torch.randn(3000, 10)
        return float(functional.cross_entropy(head(body(x).relu()), (x @ (old + change)).argmax(1)))


@TASKS.add()
def long_tail(run: Run) -> float:
    """Regression with errors of a Student law of two degrees by a robust loss; SGD with momentum and small batches."""
    weight = torch.randn(12, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        noise = torch.randn(count) / (torch.randn(count, 2).square().mean(1)).sqrt().clamp(min=0.05)
        return x, (x @ weight).tanh() * 2 + 0.3 * noise

    model = mlp(12, 40, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03 * run.rate, momentum=0.9)
    for step in range(500):
        set_rate(optimizer, 0.03 * cosine(step, 500) * run.rate)
        x, y = draw(16)
        optimizer.zero_grad()
        functional.smooth_l1_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    return held_out(model, lambda out, y: functional.smooth_l1_loss(out.squeeze(1), y), *draw(4000))


@TASKS.add()
def curriculum(run: Run) -> float:
    """Sums of more and more digits, by an LSTM whose sequences grow every 80 steps; Adam, a clip at 1."""

    def draw(count: int, length: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, length, 1)
        return x, x.sum(1)

    core, head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)
    parameters = [*core.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-3 * run.rate)

    def loss_of(count: int, length: int) -> Tensor:
        x, y = draw(count, length)
        return functional.mse_loss(head(core(x)[0][:, -1]), y)

    for step in range(400):
        optimizer.zero_grad()
        loss_of(48, 3 + step // 80 * 2).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(2000, 11)) + 0.02


if __name__ == "__main__":
    main(TASKS)
