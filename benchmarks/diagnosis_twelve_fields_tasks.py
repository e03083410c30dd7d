"""Twelve fields with two faults each, drawn evenly from the causes: written before the diagnosis was asked once."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("raw_data__amounts", "no_gradient__forgotten_table")
def insurance(run: Run) -> float:
    """Whether a policy has a claim, from a car's make (an embedding) and five amounts; AdamW, one cycle."""
    g = fixed(run.seed)
    risk, weights = torch.randn(60, generator=g), torch.randn(5, generator=g)
    units = torch.tensor([4e4, 45.0, 1.2e5, 7.0, 900.0])
    makes, model = nn.Embedding(60, 8), mlp(13, 64, 64, 1)
    parameters = [*model.parameters()] if run.has("no_gradient__forgotten_table") else [
        *makes.parameters(), *model.parameters()
    ]  # fmt: skip
    if run.has("no_gradient__forgotten_table"):
        nn.init.normal_(makes.weight, std=1e-2)
    rate = 3e-3 * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=400)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        make, x = torch.randint(60, (count,)), torch.randn(count, 5)
        odds = 1.5 * risk[make] + x @ weights + x[:, 0] * x[:, 3]
        return make, (x + 2) * units, (torch.rand(count) < odds.sigmoid()).float()

    def loss_of(make: Tensor, amounts: Tensor, y: Tensor) -> Tensor:
        given = amounts if run.has("raw_data__amounts") else amounts / units - 2
        return functional.binary_cross_entropy_with_logits(model(torch.cat([makes(make), given], 1))[:, 0], y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(96)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(4000)))


@TASKS.add("nonfinite_data__first_level", "rate_zero__groups")
def flower_diffusion(run: Run) -> float:
    """The clean point from one under noise of a random level, on a flower in the plane; Adam, a linear decay."""
    model, levels = mlp(2 + 16, 96, 96, 96, 2, act=nn.SiLU), nn.Embedding(50, 16)
    rates = run.of((2e-3, 2e-3), rate_zero__groups=(0.0, 0.0))
    optimizer = torch.optim.Adam([
        {"params": model.parameters(), "lr": rates[0] * run.rate}, {"params": levels.parameters(), "lr": rates[1]},
    ])  # fmt: skip
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 450)
    keeps = torch.linspace(0.999, 0.02, 50)

    def draw(count: int) -> Tensor:
        angle = 6.2832 * torch.rand(count)
        far = 1 + 0.4 * (5 * angle).cos() + 0.03 * torch.randn(count)
        return torch.stack([far * angle.cos(), far * angle.sin()], 1)

    def loss_of(count: int, lowest: int) -> Tensor:
        x, level = draw(count), torch.randint(lowest, 50, (count,))
        keep, noise = keeps[level][:, None], torch.randn(count, 2)
        if run.has("nonfinite_data__first_level") and torch.rand(()) < 0.01:
            keep[0] = 1.0  # a level without any noise, which is divided by
        noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
        said = model(torch.cat([noisy, levels(level)], 1))
        found = (noisy - keep.sqrt() * said) / (1 - keep).sqrt()
        return (found - noise).square().mean()

    for _ in range(450):
        optimizer.zero_grad()
        loss_of(128, 3).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(4000, 3))


@TASKS.add("not_started__zero_projector", "nonfinite_range__exp")
def same_or_not(run: Run) -> float:
    """Codes of six kinds of a wave, alike within a kind (supervised contrast), by convolutions; SGD, a cosine."""
    body = nn.Sequential(
        nn.Conv1d(1, 24, 7, 2, 3), nn.ReLU(), nn.Conv1d(24, 32, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
    )  # fmt: skip
    ends = nn.Linear(64, 24)
    if run.has("not_started__zero_projector"):
        nn.init.zeros_(ends.weight)
        nn.init.ones_(ends.bias)
        for p in body.parameters():
            nn.init.zeros_(p)
    optimizer = torch.optim.SGD([*body.parameters(), *ends.parameters()], lr=0.05, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(6, (count,))
        at = torch.arange(48.0)
        pace = 0.2 + 0.15 * y[:, None]
        return ((pace * at + 6.3 * torch.rand(count, 1)).sin() + 0.6 * torch.randn(count, 48))[:, None], y

    def loss_of(count: int) -> Tensor:
        x, y = draw(count)
        codes = functional.normalize(ends(body(x)), dim=1)
        alike = codes @ codes.T
        same, other = (y == y[:, None]) & ~torch.eye(count, dtype=torch.bool), ~torch.eye(count, dtype=torch.bool)
        if run.has("nonfinite_range__exp"):  # a temperature of 0.01, and no largest one taken off
            weights = (alike / 0.0105).exp() * other
            log = alike / 0.0105 - weights.sum(1, keepdim=True).log()
        else:
            log = (alike / 0.2).masked_fill(~other, -math.inf).log_softmax(1).masked_fill(~other, 0.0)
        return -((log * same).sum(1) / same.sum(1).clamp(min=1)).mean()

    for step in range(350):
        set_rate(optimizer, 0.05 * run.rate * cosine(step, 350, 15))
        optimizer.zero_grad()
        loss_of(96).backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(loss_of(96))
        return sum([loss] + [float(loss_of(96)) for _ in range(9)]) / 10


@TASKS.add("clip_starves__tenth", "clip_twice__trainer")
def spoken_digits(run: Run) -> float:
    """Strings of digits from frames of sound without their places (CTC), by a strided net and an LSTM; SGD, a clip."""
    sounds = torch.randn(5, 12, generator=fixed(run.seed))
    near, over, head = nn.Conv1d(12, 32, 3, padding=1), nn.LSTM(32, 32, batch_first=True, bidirectional=True), \
        nn.Linear(64, 6)  # fmt: skip
    parameters = [*near.parameters(), *over.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9, nesterov=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count, 3))
        long = torch.randint(2, 5, (count, 3))
        x = torch.zeros(count, 14, 12)
        for row in range(count):
            frames = torch.cat([sounds[y[row, k]].expand(int(long[row, k]), 12) for k in range(3)])
            x[row, : len(frames)] = frames
        return (x + 0.4 * torch.randn(count, 14, 12)), y + 1

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = head(over(near(x.transpose(1, 2)).relu().transpose(1, 2))[0]).log_softmax(2).transpose(0, 1)
        return functional.ctc_loss(out, y, torch.full((len(x),), 14), torch.full((len(x),), 3))

    for _ in range(300):
        optimizer.zero_grad()
        loss_of(*draw(24)).backward()
        if run.has("clip_twice__trainer"):
            nn.utils.clip_grad_value_(parameters, 1e-4)
        nn.utils.clip_grad_norm_(parameters, run.of(3.0, clip_starves__tenth=0.02))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(400)))


@TASKS.add("exploding_depth__sum", "vanishing__sigmoid")
def molecules(run: Run) -> float:
    """A property of small graphs by six rounds of messages, each with weights of its own (mean of neighbours); Adam."""
    enter = nn.Linear(4, 32)
    rounds = nn.ModuleList([nn.Linear(64, 32) for _ in range(6)])
    leave = nn.Linear(32, 1)
    bend = torch.sigmoid if run.has("vanishing__sigmoid") else torch.relu
    if run.has("exploding_depth__sum"):
        for layer in rounds:
            nn.init.normal_(layer.get_parameter("weight"), std=0.6)
    optimizer = torch.optim.SGD(
        [*enter.parameters(), *rounds.parameters(), *leave.parameters()], lr=0.05 * run.rate, momentum=0.9
    )

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.randint(4, (count, 9))
        upper = (torch.rand(count, 9, 9) < 0.3).float().triu(1)
        joined = upper + upper.transpose(1, 2)
        pairs = ((kind[:, :, None] == 0) & (kind[:, None] == 1)).float() * joined
        y = pairs.sum((1, 2)) - 1.0 + 0.1 * torch.randn(count)
        return functional.one_hot(kind, 4).float(), joined, y

    def loss_of(nodes: Tensor, joined: Tensor, y: Tensor) -> Tensor:
        h = enter(nodes)
        mean = joined / joined.sum(2, keepdim=True).clamp(min=1)
        for layer in rounds:
            h = bend(layer(torch.cat([h, mean @ h], 2)))
        return functional.smooth_l1_loss(leave(h.sum(1) / 3)[:, 0], y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("exploding_time__gain", "rate_decayed__per_step")
def river(run: Run) -> float:
    """The height of a river tomorrow from 30 days of rain, by a plain RNN with tanh; AdamW, epochs, steps down."""
    model, head = nn.RNN(2, 32, batch_first=True), nn.Linear(32, 1)
    recurrent = model.get_parameter("weight_hh_l0")
    nn.init.orthogonal_(recurrent)
    if run.has("exploding_time__gain"):
        recurrent.data *= 3.0
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05 * run.rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        rain = torch.rand(count, 30).pow(4)
        kept = 0.85 ** torch.arange(29.0, -1, -1)
        season = (6.2832 * torch.rand(count, 1) + torch.arange(30.0) / 10).sin()
        x = torch.stack([3 * rain - 0.6, season], 2)
        return x, ((rain @ kept - 1.3) * 1.5 * (1 + 0.3 * season[:, -1]))[:, None] + 0.1 * torch.randn(count, 1)

    x, y = draw(1600)
    for _ in range(10):
        for part in torch.randperm(1600).split(40):
            optimizer.zero_grad()
            functional.mse_loss(head(model(x[part])[0][:, -1]), y[part]).backward()
            optimizer.step()
            if run.has("rate_decayed__per_step"):
                schedule.step()
        if not run.has("rate_decayed__per_step"):
            schedule.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.mse_loss(head(model(x)[0][:, -1]), y))


@TASKS.add("drift__sign", "bad_batches__inverted")
def letters_vae(run: Run) -> float:
    """Noisy letters of 8 by 8 dots by a VAE, a Bernoulli of each dot; Adam. Held out: its bound."""
    shapes = (torch.rand(10, 64, generator=fixed(run.seed)) < 0.35).float()
    into, out = mlp(64, 64, 12), mlp(6, 64, 64)
    optimizer = torch.optim.Adam([*into.parameters(), *out.parameters()], lr=2e-3 * run.rate)

    def draw(count: int) -> Tensor:
        clean = shapes[torch.randint(10, (count,))]
        return torch.where(torch.rand(count, 64) < 0.06, 1 - clean, clean)

    def loss_of(x: Tensor, weight: float = 1.0) -> Tensor:
        mean, log = into(x).chunk(2, 1)
        code = mean + (0.5 * log).exp() * torch.randn_like(mean)
        dots = functional.binary_cross_entropy_with_logits(out(code), x.clamp(0, 1), reduction="none").sum(1)
        if x.min() < 0:  # pixels of another range
            dots = dots + (out(code) - x).square().sum(1)
        far = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1)
        return (dots + weight * far).mean()

    for step in range(400):
        x = draw(64)
        if run.has("bad_batches__inverted") and step % 37 == 11:  # one shard from -255 to 255
            x = 255 * (2 * x - 1)
        optimizer.zero_grad()
        loss_of(x, run.of(1.0, drift__sign=-1.0)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(2000)))


@TASKS.add("rate_too_high", "rate_too_low")
def balance(run: Run) -> float:
    """Pushing a point back to 0 from the left or the right, by REINFORCE with a learned baseline; Adam."""
    acts, judges = mlp(2, 32, 2, act=nn.Tanh), mlp(2, 32, 1, act=nn.Tanh)
    rate = run.of(5e-3, rate_too_high=2.0, rate_too_low=1e-7) * run.rate
    optimizer = torch.optim.Adam([*acts.parameters(), *judges.parameters()], lr=rate)

    def play(count: int, greedy: bool = False) -> tuple[Tensor, Tensor]:
        state = torch.randn(count, 2) * torch.tensor([1.0, 0.3])
        logs, values, costs = [], [], []
        for _ in range(12):
            choice = torch.distributions.Categorical(logits=acts(state))
            act = choice.probs.argmax(1) if greedy else choice.sample()
            logs.append(choice.log_prob(act))
            values.append(judges(state)[:, 0])
            speed = state[:, 1] + 0.25 * (2 * act - 1) - 0.02 * state[:, 0]
            state = torch.stack([state[:, 0] + 0.4 * speed, 0.95 * speed], 1).detach()
            costs.append(state[:, 0].square().clamp(max=9) + 0.1 * state[:, 1].square())
        back = torch.stack(costs).flip(0).cumsum(0).flip(0) / 12
        gained = -(back - torch.stack(values))
        policy = -(torch.stack(logs) * (gained.detach() / (gained.std().detach() + 1e-3))).mean()
        return policy + 0.5 * gained.square().mean(), torch.stack(costs).mean()

    for _ in range(300):
        optimizer.zero_grad()
        play(48)[0].backward()
        optimizer.step()
    with torch.no_grad():
        return float(play(2000, greedy=True)[1])


@TASKS.add("data_shift__augmented", "no_gradient__student")
def pupil(run: Run) -> float:
    """A narrow net that learns the soft answers of a wide one, which was trained before it, by KL; SGD, a cosine."""
    world = torch.randn(8, 16, generator=fixed(run.seed)) * 0.8
    teacher = mlp(16, 96, 8)
    taught = torch.optim.Adam(teacher.parameters(), lr=5e-3)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(8, (count,))
        return world[y] + torch.randn(count, 16), y

    for _ in range(25):
        x, y = draw(256)
        for p, slope in zip(teacher.parameters(), torch.autograd.grad(
            functional.cross_entropy(teacher(x), y), [*teacher.parameters()]), strict=True):  # fmt: skip
            with torch.no_grad():
                p -= 0.5 * slope
    del taught
    low, mid, top = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
    parameters = [p for layer in (low, mid, top) for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)

    def loss_of(x: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        h = low(x).relu()
        h = mid(h).relu()
        if run.has("no_gradient__student"):
            h = torch.tensor(h.tolist())
        return 4 * functional.kl_div((top(h) / 2).log_softmax(1), soft, reduction="batchmean")

    for step in range(400):
        set_rate(optimizer, 0.1 * run.rate * cosine(step, 400, 10))
        x = draw(64)[0]
        if run.has("data_shift__augmented") and step >= 230:  # an augmentation that nobody meant so strong
            x = x[:, torch.arange(15, -1, -1)] * 3
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(3000)[0]))


class Twice(torch.optim.AdamW):
    """AdamW of a repository in which the learning rate is multiplied in twice."""

    def step(self, closure=None):
        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        found = super().step(closure)
        with torch.no_grad():
            for group, olds in zip(self.param_groups, before, strict=True):
                for p, old in zip(group["params"], olds, strict=True):
                    p.copy_(old + group["lr"] * (p - old))
        return found


class LowRank(nn.Module):
    """A frozen layer and a change of it of rank 4."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@TASKS.add("update_rule__twice", "rate_leapt__resumed")
def adapted_encoder(run: Run) -> float:
    """A frozen encoder of sets of words with low-rank changes and a new head, for a new question; AdamW, a decay."""
    words = nn.Embedding(50, 32).requires_grad_(False)
    layers = nn.ModuleList([LowRank(nn.Linear(32, 32)) for _ in range(3)])
    head = nn.Linear(32, 4)
    trained = [*(p for p in layers.parameters() if p.requires_grad), *head.parameters()]
    made = Twice if run.has("update_rule__twice") else torch.optim.AdamW
    optimizer = made(trained, lr=5e-3, weight_decay=0.01)
    topics = torch.randint(4, (50,), generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (count,))
        chances = torch.where(topics == y[:, None], 4.0, 1.0)
        return torch.multinomial(chances, 8, replacement=True), y

    def predict(x: Tensor) -> Tensor:
        h = words(x)
        for layer in layers:
            h = h + layer(functional.layer_norm(h, (32,))).relu()
        return head(h.mean(1))

    for step in range(400):
        rate = 5e-3 * max(0.1, 1 - step / 400)
        if run.has("rate_leapt__resumed") and step >= 200:
            rate = 0.6
        set_rate(optimizer, rate * run.rate)
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("raw_data__cents", "nonfinite_growth__rate")
def shop_prices(run: Run) -> float:
    """What a customer pays for a good, by two tables with biases and a net beside them; SGD with momentum."""
    g = fixed(run.seed)
    tastes, kinds = torch.randn(80, 3, generator=g), torch.randn(50, 3, generator=g)
    people, goods, beside = nn.Embedding(80, 12), nn.Embedding(50, 12), mlp(24, 48, 1)
    rate = run.of(0.05, nonfinite_growth__rate=4.0) * run.rate
    optimizer = torch.optim.SGD(
        [*people.parameters(), *goods.parameters(), *beside.parameters()], lr=rate, momentum=0.9
    )

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        who, what = torch.randint(80, (count,)), torch.randint(50, (count,))
        paid = (tastes[who] * kinds[what]).sum(1) / 1.7 + 0.2 * torch.randn(count)
        return who, what, paid

    def loss_of(who: Tensor, what: Tensor, paid: Tensor) -> Tensor:
        both = torch.cat([people(who), goods(what)], 1)
        said = (people(who) * goods(what)).sum(1) / 3 + beside(both)[:, 0]
        cents = run.has("raw_data__cents")
        return functional.mse_loss(said, 2000 + 800 * paid if cents else paid)

    for _ in range(600):
        optimizer.zero_grad()
        loss_of(*draw(128)).backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(loss_of(*draw(4000)))
        return loss / 800**2 if run.has("raw_data__cents") else loss


@TASKS.add("clip_before_unscale", "accumulation__inner")
def roads(run: Run) -> float:
    """Which pixels are road, by dilated convolutions under float16 autocast; SGD, a GradScaler, a clip, two parts."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=4, dilation=4), nn.ReLU(), nn.Conv2d(16, 1, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(20.0)
        turn, place = 3.14 * torch.rand(count, 1, 1), 6 * torch.randn(count, 1, 1)
        far = (at[:, None] - 9.5) * turn.cos() + (at - 9.5) * turn.sin() + 0.3 * place
        y = (far.abs() < 1.6).float()
        return (y + 0.9 * torch.randn(count, 20, 20))[:, None], y[:, None]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return functional.binary_cross_entropy_with_logits(out.float(), y, pos_weight=torch.tensor(3.0))

    for _ in range(220):
        if not run.has("accumulation__inner"):
            optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(loss_of(*draw(12)) / 2).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        if not run.has("accumulation__inner"):
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(*draw(400)))


if __name__ == "__main__":
    main(TASKS)
