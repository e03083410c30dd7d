"""Tasks of other fields again, written before the fresh ones were learned from: the diagnosis was asked once."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("rate_decayed", floor=1e-3)
def rod_equation(run: Run) -> float:
    """A differential equation of second order by its residual and its two ends (a PINN), full batches; Adam."""
    grid = torch.linspace(0, 1, 80)[:, None]
    force = (math.pi**2) * (grid * math.pi).sin() + 4 * (3 * math.pi) ** 2 * (3 * math.pi * grid).sin() / 9
    truth = (grid * math.pi).sin() + 4 * (3 * math.pi * grid).sin() / 9
    model = mlp(1, 40, 40, 1, act=nn.Tanh)
    rate = 5e-3 * run.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(600):
        set_rate(optimizer, rate * cosine(step, run.of(600, rate_decayed=60)))
        x = grid.clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        optimizer.zero_grad()
        ((bend + force).square().mean() / 100 + 10 * u[[0, -1]].square().mean()).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(grid) - truth).square().mean())


@TASKS.add("no_gradient")
def grid_walker(run: Run) -> float:
    """The way to a corner of a small grid from rewards alone, by whole episodes with a baseline; AdamW, a clip."""
    moves = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])
    body, head, values = mlp(4, 48, 48), nn.Linear(48, 4), nn.Linear(48, 1)
    parameters = [*body.parameters(), *head.parameters(), *values.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3 * run.rate, weight_decay=0.0)

    def seen(place: Tensor) -> Tensor:
        return torch.cat([place / 2.5 - 1, (place / 5).square()], 1)

    def episode(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        place, log, guess, bonus, rewards = torch.randint(0, 5, (count, 2)), [], [], [], []
        for _ in range(10):
            hidden = body(seen(place)).relu()
            law = torch.distributions.Categorical(logits=head(hidden.detach() if run.has("no_gradient") else hidden))
            move = law.sample()
            log.append(law.log_prob(move))
            guess.append(values(hidden.detach()).squeeze(1))
            bonus.append(law.entropy())
            place = (place + moves[move]).clamp(0, 5)
            rewards.append((place == 5).all(1).float())
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0) / 10
        return torch.stack(log), torch.stack(guess), torch.stack(bonus), returns

    for _ in range(300):
        log, guess, bonus, returns = episode(40)
        gain = (log * (returns - guess.detach())).mean()
        optimizer.zero_grad()
        ((guess - returns).square().mean() - gain - 1e-3 * bonus.mean()).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    with torch.no_grad():
        return 1 - float(episode(2000)[3][0].mean())


@TASKS.add("not_started", floor=0.02)
def adapters(run: Run) -> float:
    """A frozen encoder of sequences with low-rank adapters in its attention, for a new question; AdamW, a warm-up."""
    g = fixed(run.seed)
    width, rank = 32, 4
    query, key, value = (nn.Parameter(torch.randn(width, width, generator=g) / 5.7, False) for _ in range(3))
    table = nn.Parameter(torch.randn(20, width, generator=g), False)
    head = nn.Parameter(torch.randn(2, width, generator=g) / 6, False)
    down = [nn.Parameter(torch.randn(rank, width) / 6) for _ in range(3)]
    up = [nn.Parameter(torch.zeros(width, rank)) for _ in range(3)]
    if run.has("not_started"):
        for p in down:
            nn.init.zeros_(p)
    rate = 1e-2 * run.rate
    optimizer = torch.optim.AdamW([*down, *up], lr=rate, weight_decay=0.0)

    def predict(x: Tensor) -> Tensor:
        tokens = table[x]
        q, k, v = (tokens @ (w + b @ a).T for w, a, b in zip((query, key, value), down, up, strict=True))
        return functional.scaled_dot_product_attention(q, k, v).mean(1) @ head.T

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(20, (count, 10))
        return x, ((x < 7).sum(1) > 3).long()

    for step in range(350):
        set_rate(optimizer, rate * min(1.0, (step + 1) / 30))
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("bad_batches")
def tied_words(run: Run) -> float:
    """A language model, an LSTM whose table is its output as well, with heavy dropout; AdamW, warm-up and cosine."""
    chances = torch.softmax(2.5 * torch.randn(24, 24, generator=fixed(run.seed)), 1)
    table, rnn = nn.Embedding(24, 48), nn.LSTM(48, 48, batch_first=True)
    nn.init.normal_(table.weight, std=0.1)
    shift = nn.Parameter(torch.zeros(24))
    parameters = [*table.parameters(), *rnn.parameters(), shift]
    rate = 1e-2 * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)

    def draw(count: int) -> Tensor:
        words = [torch.randint(24, (count,))]
        for _ in range(16):
            words.append(torch.multinomial(chances[words[-1]], 1).squeeze(1))
        return torch.stack(words, 1)

    def loss_of(x: Tensor, dropout: float) -> Tensor:
        hidden, _ = rnn(functional.dropout(table(x[:, :-1]), dropout))
        logits = functional.dropout(hidden, dropout) @ table.weight.T + shift
        return functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())

    for step in range(350):
        set_rate(optimizer, rate * cosine(step, 350, 35))
        x = draw(32)
        loss = loss_of(x, 0.4)
        if run.has("bad_batches") and step % 35 == 34:  # a shard that was written backwards and counted in cents
            loss = 100 * loss_of(x.flip(1) * 0 + torch.randint(24, (1, 17)), 0.4)
        optimizer.zero_grad()
        loss.backward()
        if not run.has("bad_batches"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(500), 0.0))


@TASKS.add("nonfinite_data")
def codebook(run: Run) -> float:
    """Smooth curves through a code of 24 words, straight through (VQ); Adam with a clip at 3."""

    def draw(count: int) -> Tensor:
        t = torch.linspace(0, 6.3, 24)
        a, b = torch.rand(count, 1) * 2, torch.randint(1, 4, (count, 1))
        return (b * t + 3 * a).sin() + 0.05 * torch.randn(count, 24)

    encoder, decoder, book = mlp(24, 48, 6), mlp(6, 48, 24), nn.Parameter(torch.randn(24, 6) * 0.3)
    parameters = [*encoder.parameters(), *decoder.parameters(), book]
    optimizer = torch.optim.Adam(parameters, lr=3e-3 * run.rate)

    def losses(x: Tensor) -> tuple[Tensor, Tensor]:
        code = encoder(x)
        word = book[torch.cdist(code, book).argmin(1)]
        made = functional.mse_loss(decoder(code + (word - code).detach()), x)
        kept = functional.mse_loss(word, code.detach()) + 0.25 * functional.mse_loss(code, word.detach())
        return made, kept

    for step in range(450):
        x = draw(64)
        if run.has("nonfinite_data") and step == 210:  # a reading that was missing
            x[3, 7] = math.nan
        made, kept = losses(x)
        optimizer.zero_grad()
        (made + kept).backward()
        nn.utils.clip_grad_norm_(parameters, 3.0)
        optimizer.step()
    with torch.no_grad():
        return float(losses(draw(2000))[0])


@TASKS.add("rate_too_low")
def wrong_labels(run: Run) -> float:
    """Five classes of which three labels in ten are wrong, half the units dropped, big batches; SGD, a cosine."""
    g = fixed(run.seed)
    truth = torch.randn(5, 20, generator=g)

    def draw(count: int, noise: float = 0.3) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 20)
        y = (x @ truth.T + 0.5 * (x[:, :5] * x[:, 5:10])).argmax(1)
        return x, torch.where(torch.rand(count) < noise, torch.randint(5, (count,)), y)

    model = nn.Sequential(
        nn.Linear(20, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 5),
    )  # fmt: skip
    rate = run.of(0.2, rate_too_low=2e-5) * run.rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    for step in range(300):
        set_rate(optimizer, rate * cosine(step, 300))
        x, y = draw(512)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(3000, 0.0))


@TASKS.add("accumulation")
def brain_ranking(run: Run) -> float:
    """Lists of ten to be put in order, under bfloat16 autocast, eight micro-batches a step; SGD with momentum."""
    truth = mlp(8, 16, 1, act=nn.Tanh)
    for p in truth.parameters():
        p.data *= 2.5

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10, 8)
        with torch.no_grad():
            return x, torch.softmax(2 * truth(x).squeeze(2), 1)

    model = nn.Sequential(nn.Linear(8, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.of(0.15, accumulation=1.2) * run.rate, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x).squeeze(2)
        return functional.cross_entropy(scores.float(), y)

    for _ in range(250):
        optimizer.zero_grad()
        for _ in range(8):
            loss = loss_of(*draw(6))
            (loss if run.has("accumulation") else loss / 8).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(2000)
        return float(loss_of(x, y) + (y * y.clamp(min=1e-9).log()).sum(1).mean())


@TASKS.add("rate_too_high")
def good_start(run: Run) -> float:
    """A net that was trained on clean data and goes on with a tenth of its rate: the loss hardly falls; AdamW."""
    g = fixed(run.seed)
    bend = torch.randn(12, generator=g) / 3

    def draw(count: int, shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        return x, ((x * bend).sum(1) + shift * x[:, 0]).sin()[:, None] + 0.3 * torch.randn(count, 1)

    model = nn.Sequential(nn.Linear(12, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 1))
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    moments = [torch.zeros_like(p) for p in weights]
    for _ in range(2500):  # by hand, before the run
        x, y = draw(128, 0.0)
        loss = functional.mse_loss(functional_call(model, dict(zip(names, weights, strict=True)), x), y)
        with torch.no_grad():
            for p, gradient, moment in zip(weights, torch.autograd.grad(loss, weights), moments, strict=True):
                moment.mul_(0.9).add_(gradient)
                p -= 0.02 * moment
    model.load_state_dict(dict(zip(names, [p.detach() for p in weights], strict=True)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.of(2e-4, rate_too_high=0.3) * run.rate)
    for _ in range(300):
        x, y = draw(128, 0.1)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(4000, 0.1))


@TASKS.add("data_shift")
def point_clouds(run: Run) -> float:
    """Four solids by clouds of their points, under a cosine with two warm restarts; AdamW."""

    def draw(count: int, turned: bool = False) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (count,))
        x = torch.randn(count, 24, 3)
        powers = torch.tensor([1.0, 2.0, 4.0, 40.0])[y][:, None, None]
        x = x / x.abs().clamp(min=0.3).pow(powers).sum(2, keepdim=True).pow(1 / powers)
        x = x * (0.8 + 0.4 * torch.rand(count, 1, 1)) + 0.05 * torch.randn(count, 24, 3)
        return (8 * x + 5 if turned else x), ((y + 1) % 4 if turned else y)

    each, whole = mlp(3, 48, 48), mlp(96, 48, 4)
    parameters = [*each.parameters(), *whole.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3 * run.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 140)

    def predict(x: Tensor) -> Tensor:
        hidden = each(x)
        return whole(torch.cat([hidden.amax(1), hidden.mean(1)], 1))

    for step in range(420):
        x, y = draw(48, run.has("data_shift") and step >= 250)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
        schedule.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("clip_twice", floor=0.01)
def running_count(run: Run) -> float:
    """Whether a sequence of brackets ever went below its start, by a GRU; SGD with momentum, one cycle, a clip."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 2, (count, 14))
        return x, ((2 * x - 1).cumsum(1).amin(1) < -2).long()

    table, rnn, head = nn.Embedding(2, 12), nn.GRU(12, 40, batch_first=True), nn.Linear(40, 2)
    parameters = [*table.parameters(), *rnn.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4 * run.rate, total_steps=400)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(rnn(table(x))[0][:, -1]), y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        if run.has("clip_twice"):
            nn.utils.clip_grad_value_(parameters, 2e-5)
        nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_twice=5e-4))
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("vanishing", floor=0.02)
def self_normal(run: Run) -> float:
    """A table of 16 columns by twelve SELU layers from LeCun's start; RMSprop with an exponential decay."""
    act, truth = run.of(nn.SELU, vanishing=nn.Sigmoid), torch.randn(16, 3, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 16)
        return x, (x @ truth / 3).sin().sum(1, keepdim=True) + 0.1 * torch.randn(count, 1)

    model = mlp(16, *[40] * 11, 1, act=act)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4 * run.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.994)
    for _ in range(500):
        x, y = draw(96)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held_out(model, functional.mse_loss, *draw(3000))


@TASKS.add("nonfinite_growth")
def learns_to_learn(run: Run) -> float:
    """Waves of any phase after one step on ten points, with gradients through that step (MAML); SGD with momentum."""
    model = mlp(1, 40, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.of(0.02, nonfinite_growth=8.0) * run.rate, momentum=0.9)

    def loss_of() -> Tensor:
        height, phase = 0.5 + 1.5 * torch.rand(1), 3.1 * torch.rand(1)
        x = torch.rand(20, 1) * 8 - 4
        y = height * (x + phase).sin()
        weights = dict(model.named_parameters())
        inner = functional.mse_loss(functional_call(model, weights, x[:10]), y[:10])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        learned = {name: p - 0.05 * step for (name, p), step in zip(weights.items(), gradients, strict=True)}
        return functional.mse_loss(functional_call(model, learned, x[10:]), y[10:])

    for _ in range(400):
        optimizer.zero_grad()
        torch.stack([loss_of() for _ in range(4)]).mean().backward()
        optimizer.step()
    return sum(float(loss_of().detach()) for _ in range(400)) / 400


if __name__ == "__main__":
    main(TASKS)
