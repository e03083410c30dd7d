"""Tasks written when those held out before were about to be learned from: the diagnosis was asked about them once."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


class Stripes:
    """Pictures of 12 by 12 pixels with a bar in one of six directions, in noise."""

    def draw(self, count: int, noise: float = 0.6) -> tuple[Tensor, Tensor]:
        y = torch.randint(6, (count,))
        angle, offset = y * math.pi / 6, torch.rand(count) * 4 - 2
        grid = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")) - 5.5
        across = torch.einsum("bc,chw->bhw", torch.stack([angle.cos(), angle.sin()], 1), grid)
        x = (across - offset[:, None, None]).abs() < 1.2
        return (x + noise * torch.randn(count, 12, 12))[:, None], y


@TASKS.add("rate_too_high", "no_gradient", "rate_decayed", floor=0.02)
def patch_transformer(run: Run) -> float:
    """The direction of a bar by a transformer over nine patches; AdamW with a warm-up and a cosine."""
    draw = Stripes().draw
    patches = nn.Conv2d(1, 32, 4, stride=4)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    body, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 6)
    places = nn.Parameter(0.02 * torch.randn(9, 32))
    parameters = [*patches.parameters(), places, *body.parameters(), *head.parameters()]
    rate = run.of(4e-3, rate_too_high=0.2) * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)

    def predict(x: Tensor) -> Tensor:
        tokens = patches(x).flatten(2).transpose(1, 2) + places
        tokens = body(tokens)
        return head((tokens.detach() if run.has("no_gradient") else tokens).mean(1))

    for step in range(400):
        set_rate(optimizer, rate * cosine(step, run.of(400, rate_decayed=60), 20))
        x, y = draw(48)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(1500)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("rate_too_low", "bad_batches", "not_started__labels")
def neighbours(run: Run) -> float:
    """Which words stand beside one another, by two tables and sampled negatives; Adagrad."""
    g = fixed(run.seed)
    place = torch.randn(60, 3, generator=g)
    near = torch.softmax(place @ place.T * 1.5, 1)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.randint(60, (count,))
        b = torch.multinomial(near[a], 1).squeeze(1)
        y = (torch.rand(count) < 0.5).float()
        other = torch.randint(60, (count,))
        return a, torch.where(y > 0, b, other), y

    left, right = nn.Embedding(60, 10), nn.Embedding(60, 10)
    nn.init.normal_(left.weight, std=0.3)
    nn.init.normal_(right.weight, std=0.3)
    parameters = [*left.parameters(), *right.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=run.of(0.2, rate_too_low=2e-5) * run.rate)

    def loss_of(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits((left(a) * right(b)).sum(1), y)

    for step in range(600):
        a, b, y = draw(256)
        if run.has("not_started__labels"):
            y = y[torch.randperm(256)]
        optimizer.zero_grad()
        loss = loss_of(a, b, y)
        if run.has("bad_batches") and step % 60 == 59:  # a file whose answers are turned round and weigh too much
            loss = 300 * loss_of(a, b, 1 - y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(6000)))


@TASKS.add("accumulation", "data_shift", "rate_zero")
def survival(run: Run) -> float:
    """Who lives longer, by Cox's partial likelihood of each batch; SGD with momentum."""
    truth = torch.randn(9, generator=fixed(run.seed)) * 0.8

    def draw(count: int, sign: float = 1.0) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 9)
        risk = sign * (x @ truth + 0.7 * x[:, 0] * x[:, 1])
        return x, -torch.rand(count).clamp(min=1e-6).log() / risk.exp()

    model = mlp(9, 40, 1, act=nn.SiLU)
    rate = run.of(0.05, rate_zero=0.0) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def loss_of(x: Tensor, time: Tensor) -> Tensor:
        risk = model(x).squeeze(1)[time.argsort(descending=True)]
        return (torch.logcumsumexp(risk, 0) - risk).mean()

    for step in range(350):
        x, time = draw(48, -1.0 if run.has("data_shift") and step >= 230 else 1.0)
        if not run.has("accumulation"):
            optimizer.zero_grad()
        loss_of(x, time).backward()
        optimizer.step()
    with torch.no_grad():
        return float(torch.stack([loss_of(*draw(48)) for _ in range(40)]).mean())


@TASKS.add("nonfinite_growth", "rate_too_high", "clip_starves", floor=1e-3)
def pendulum(run: Run) -> float:
    """The way of a pendulum, by a learned field that is followed for 16 small steps; SGD with momentum and a clip."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        state = torch.rand(count, 2) * 4 - 2
        first, way = state, []
        for _ in range(16):
            for _ in range(4):
                state = state + 0.05 * torch.stack([state[:, 1], -3 * state[:, 0].sin() - 0.3 * state[:, 1]], 1)
            way.append(state)
        return first, torch.stack(way)

    field = mlp(2, 48, 48, 2, act=nn.Tanh)
    parameters = list(field.parameters())
    rate = run.of(0.05, nonfinite_growth=300.0, rate_too_high=0.25) * run.rate
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    def loss_of(state: Tensor, way: Tensor) -> Tensor:
        losses = []
        for target in way:
            state = state + 0.2 * field(state)
            losses.append((state - target).square().mean())
        return torch.stack(losses).mean()

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(2.0, nonfinite_growth=1e9, rate_too_high=1e9, clip_starves=2e-4))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(2000)))


@TASKS.add("exploding_depth", "vanishing", "not_started", floor=0.02)
def plain_convolutions(run: Run) -> float:
    """The direction of a bar by ten convolutions without normalisation, from Kaiming's start; SGD with momentum."""
    draw = Stripes().draw
    widths, act = [1, *[12] * 10], run.of(nn.ReLU, vanishing=nn.Sigmoid)
    layers: list[nn.Module] = []
    for k in range(10):
        convolution = nn.Conv2d(widths[k], widths[k + 1], 3, stride=2 if k in (2, 5) else 1, padding=1)
        nn.init.kaiming_normal_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        if run.has("vanishing"):
            nn.init.normal_(convolution.weight, std=0.05)
        if run.has("exploding_depth"):
            convolution.weight.data *= 2.1
        if run.has("not_started"):
            nn.init.zeros_(convolution.weight)
        layers += [convolution, act()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.9)
    for _ in range(450):
        x, y = draw(48, 0.3)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(1500, 0.3))


@TASKS.add("exploding_time", "vanishing", "clip_twice", floor=0.01)
def first_of_sequence(run: Run) -> float:
    """The first of 18 letters, told at the end, by a plain RNN that starts near the identity; Adam with a clip."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(5, (count, 18))
        return x, x[:, 0]

    table, rnn, head = nn.Embedding(5, 24), nn.RNN(24, 48, nonlinearity="relu", batch_first=True), nn.Linear(48, 5)
    nn.init.eye_(rnn.weight_hh_l0)
    rnn.weight_ih_l0.data *= 0.1
    if run.has("exploding_time"):
        rnn.weight_hh_l0.data *= 2.2
    if run.has("vanishing"):
        rnn.weight_hh_l0.data *= 0.15
    parameters = [*table.parameters(), *rnn.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3 * run.rate)
    if run.fault in ("clip_twice", "exploding_time"):
        optimizer = torch.optim.SGD(parameters, lr=0.05 * run.rate, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(rnn(table(x))[0][:, -1]), y)

    for _ in range(500):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
            nn.utils.clip_grad_value_(parameters, 1e-5)
        elif not run.fault:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(2000)))


@TASKS.add("clip_before_unscale", "nonfinite_range", "rate_too_low", floor=0.01)
def half_surface(run: Run) -> float:
    """A rough surface by a residual MLP under float16 autocast, with a GradScaler and a clip at 1; SGD, a cosine."""
    truth = mlp(6, 24, 1, act=nn.Tanh)
    for p in truth.parameters():
        p.data *= 2.0

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        with torch.no_grad():
            return x, truth(x)

    inner, blocks, head = nn.Linear(6, 48), nn.ModuleList(mlp(48, 48, 48) for _ in range(2)), nn.Linear(48, 1)
    parameters = [*inner.parameters(), *blocks.parameters(), *head.parameters()]
    rate = run.of(0.05, rate_too_low=2e-5) * run.rate
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)

    def predict(x: Tensor, step: int = 999) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            hidden = inner(x)
            if run.has("nonfinite_range") and 150 <= step < 999:
                hidden = hidden * (4e5 / hidden.detach().abs().max()) / 10
            for block in blocks:
                hidden = hidden + block(functional.silu(hidden))
            if run.has("nonfinite_range") and 150 <= step < 999:
                hidden = hidden * 30
            return head(hidden).squeeze(1)

    for step in range(400):
        set_rate(optimizer, rate * cosine(step, 400))
        x, y = draw(64)
        optimizer.zero_grad()
        scaler.scale(functional.mse_loss(predict(x, step).float(), y.squeeze(1))).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.mse_loss(predict(x).float(), y.squeeze(1)))


@TASKS.add("data_shift", "rate_too_high", "drift")
def quantiles(run: Run) -> float:
    """Three quantiles of a noisy wave by the pinball loss; Adam, epochs over 2,000 points."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 1) * 6 - 3
        return x, (2 * x).sin() + 0.3 * (1 + x.abs()) * torch.randn(count, 1)

    shares = torch.tensor([0.1, 0.5, 0.9])
    model = mlp(1, 48, 48, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.of(5e-3, rate_too_high=0.3) * run.rate)

    def pinball(out: Tensor, y: Tensor) -> Tensor:
        gap = y - out
        return torch.maximum(shares * gap, (shares - 1) * gap).mean()

    x, y = draw(2000)
    for epoch in range(10):
        for chosen in torch.randperm(2000).split(50):
            inputs, targets = x[chosen], y[chosen]
            if run.has("data_shift") and epoch >= 7:
                targets = 6 - 2 * targets
            optimizer.zero_grad()
            loss = pinball(model(inputs), targets)
            if run.has("drift"):  # the sign of a penalty
                loss = loss - 2e-2 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
    return held_out(model, pinball, *draw(3000))


@TASKS.add("nonfinite_data", "rate_too_high", "rate_decayed")
def spirals_flow(run: Run) -> float:
    """The density of two spirals by six affine couplings; AdamW with an exponential decay."""

    def draw(count: int) -> Tensor:
        angle = torch.rand(count, 1).sqrt() * 7
        sign = torch.randint(2, (count, 1)) * 2.0 - 1
        x = sign * angle / 3 * torch.cat([angle.cos(), angle.sin()], 1)
        return x + 0.12 * torch.randn(count, 2)

    nets = nn.ModuleList(mlp(1, 32, 32, 2, act=nn.Tanh) for _ in range(6))
    rate = run.of(4e-3, rate_too_high=0.5) * run.rate
    optimizer = torch.optim.AdamW(nets.parameters(), lr=rate, weight_decay=1e-3)

    def loss_of(x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        a, b = x[:, :1], x[:, 1:]
        for net in nets:
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            a, b = b * scale.exp() + shift, a
            total = total + scale.squeeze(1)
        return (0.5 * (a.square() + b.square()).squeeze(1) - total).mean() + math.log(2 * math.pi)

    for step in range(400):
        set_rate(optimizer, rate * run.of(0.995, rate_decayed=0.6) ** step)
        x = draw(128)
        if run.has("nonfinite_data") and step == 170:  # two coordinates measured as a share of an empty count
            x[5] = x[5] / 0.0 * 0.0
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(4000)))


@TASKS.add("rate_too_low", "accumulation", "no_gradient", floor=0.02)
def beats(run: Run) -> float:
    """How fast a noisy series beats, one of five, by convolutions in time with GroupNorm; SGD, four micro-batches."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count,))
        time = torch.arange(40.0)
        x = torch.sin(time * (0.3 + 0.22 * y[:, None]) + 6.3 * torch.rand(count, 1))
        return (x + 0.7 * torch.randn(count, 40))[:, None], y

    body = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(),
    )  # fmt: skip
    model = nn.Sequential(body, nn.Linear(32, 5))
    rate = run.of(0.2, rate_too_low=2e-5, accumulation=1.0) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    if run.has("no_gradient"):  # a head and a layer made anew after the optimizer
        model = nn.Sequential(nn.Sequential(*body[:4], nn.Conv1d(16, 16, 5, padding=2), *body[5:]), nn.Linear(32, 5))
        for p in model[1].parameters():
            p.data *= 0.1
    for _ in range(350):
        optimizer.zero_grad()
        for _ in range(4):
            x, y = draw(12)
            loss = functional.cross_entropy(model(x), y)
            (loss if run.has("accumulation") else loss / 4).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(2000))


# --- without a fault --------------------------------------------------------------------------------------------------


@TASKS.add()
def denoising(run: Run) -> float:
    """The noise in points of a ring at a random level, as in diffusion; AdamW, a loss that starts near 1 and stays."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        angle, level, noise = 6.3 * torch.rand(count, 1), torch.rand(count, 1), torch.randn(count, 2)
        x = 2 * torch.cat([angle.cos(), angle.sin()], 1)
        return torch.cat([(1 - level).sqrt() * x + level.sqrt() * noise, level], 1), noise

    model = mlp(3, 64, 64, 2, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * run.rate)
    for _ in range(500):
        x, noise = draw(128)
        optimizer.zero_grad()
        functional.mse_loss(model(x), noise).backward()
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(4000))


@TASKS.add()
def growing_window(run: Run) -> float:
    """The next value of a chaotic series, farther ahead every 100 steps; Adam with a clip at 1."""

    def draw(count: int, ahead: int) -> tuple[Tensor, Tensor]:
        x = 0.2 + 0.6 * torch.rand(count, 1)
        way = [x]
        for _ in range(3 + ahead):
            way.append(3.6 * way[-1] * (1 - way[-1]))
        return torch.cat(way[:4], 1) + 0.005 * torch.randn(count, 4), way[3 + ahead]

    model = mlp(5, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * run.rate)

    def loss_of(count: int, ahead: int) -> Tensor:
        x, y = draw(count, ahead)
        return functional.mse_loss(model(torch.cat([x, torch.full((count, 1), ahead / 4)], 1)), y) * 10

    for step in range(500):
        ahead = 1 + min(3, step // 100)
        optimizer.zero_grad()
        loss_of(64, 1 + int(torch.randint(ahead, ()))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(torch.stack([loss_of(2000, ahead) for ahead in (1, 2, 3, 4)]).mean())


if __name__ == "__main__":
    main(TASKS)
