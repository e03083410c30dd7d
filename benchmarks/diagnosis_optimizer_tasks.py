"""Tasks under optimizers that the other sets lack: Lion, LARS, Adafactor, Muon, L-BFGS, SAM; written first."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients (Chen et al., 2023)."""

    def __init__(self, parameters, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.sub_(group["lr"] * (first * moment + (1 - first) * p.grad).sign())
                moment.mul_(second).add_(p.grad, alpha=1 - second)


class Lars(torch.optim.Optimizer):
    """Steps of momentum whose length is a share of each weight's norm (You et al., 2017)."""

    def __init__(self, parameters, lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                share = p.norm() / (p.grad.norm() + 1e-9) if p.dim() > 1 else 1.0
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.mul_(group["momentum"]).add_(p.grad * share, alpha=group["lr"])
                p.sub_(moment)


@TASKS.add("rate_too_high")
def nested_words(run: Run) -> float:
    """The next letter of nested brackets of three kinds, by an LSTM; Lion with a warm-up and a cosine, a clip at 1."""

    def draw(count: int) -> Tensor:
        rows = []
        for _ in range(count):
            word, stack = [], []
            while len(word) < 24:
                if stack and torch.rand(()) < 0.55:
                    word.append(3 + stack.pop())
                else:
                    stack.append(int(torch.randint(3, ())))
                    word.append(stack[-1])
            rows.append(word)
        return torch.tensor(rows)

    table, rnn, head = nn.Embedding(6, 24), nn.LSTM(24, 64, batch_first=True), nn.Linear(64, 6)
    parameters = [*table.parameters(), *rnn.parameters(), *head.parameters()]
    rate = run.of(2e-3, rate_too_high=0.1) * run.rate
    optimizer = Lion(parameters, rate)
    text = draw(2000)

    def loss_of(x: Tensor) -> Tensor:
        return functional.cross_entropy(head(rnn(table(x[:, :-1]))[0]).flatten(0, 1), x[:, 1:].flatten())

    for step in range(350):
        set_rate(optimizer, rate * cosine(step, 350, 30))
        optimizer.zero_grad()
        loss_of(text[torch.randint(1800, (32,))]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(text[1800:])) - 1.15  # about the entropy


@TASKS.add("no_gradient")
def two_moons_gan(run: Run) -> float:
    """A Wasserstein GAN with a penalty of its critic's slope, three steps of the critic for one; two Adams."""

    def draw(count: int) -> Tensor:
        t, side = torch.rand(count) * math.pi, torch.randint(2, (count,)).float()
        x = torch.stack([t.cos() + side, t.sin() * (1 - 2 * side) + 0.4 * side], 1)
        return x + 0.05 * torch.randn(count, 2)

    maker, critic = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1, act=nn.SiLU)
    makers = torch.optim.Adam(maker.parameters(), lr=1e-3 * run.rate, betas=(0.5, 0.9))
    critics = torch.optim.Adam(critic.parameters(), lr=1e-3 * run.rate, betas=(0.5, 0.9))
    for _ in range(300):
        for _ in range(3):
            real, made = draw(64), maker(torch.randn(64, 4)).detach()
            between = torch.lerp(real, made, torch.rand(64, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            critics.zero_grad()
            (critic(made).mean() - critic(real).mean() + 5 * (slope.norm(dim=1) - 1).square().mean()).backward()
            critics.step()
        made = maker(torch.randn(64, 4))
        if run.has("no_gradient"):  # rounded to the grid of a picture
            made = (made * 64).round() / 64
        makers.zero_grad()
        (-critic(made).mean()).backward()
        makers.step()
    with torch.no_grad():
        real, made = draw(800), maker(torch.randn(800, 4))
        return float(
            2 * torch.cdist(real, made).mean() - torch.cdist(real, real).mean() - torch.cdist(made, made).mean()
        )


@TASKS.add("rate_too_low")
def cropped_views(run: Run) -> float:
    """Two noisy crops of a series against 63 others (NT-Xent) with a projector; LARS. Held out: a linear probe."""
    shapes = torch.randn(6, 40, generator=fixed(run.seed))

    def crops(count: int) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.randint(6, (count,))
        whole = shapes[y] + 0.5 * torch.randn(count, 40)
        keep = [(torch.rand(count, 40) < 0.7).float() for _ in range(2)]
        return whole * keep[0], whole * keep[1], y

    body, projector = mlp(40, 96, 32), mlp(32, 32, 16)
    optimizer = Lars([*body.parameters(), *projector.parameters()], run.of(2e-2, rate_too_low=1e-6) * run.rate)
    for _ in range(300):
        first, second, _ = crops(64)
        z = functional.normalize(projector(body(torch.cat([first, second]))), dim=1)
        close = (z @ z.T / 0.3).masked_fill(torch.eye(128, dtype=torch.bool), -1e9)
        optimizer.zero_grad()
        functional.cross_entropy(close, torch.arange(128).roll(64)).backward()
        optimizer.step()
    with torch.no_grad():
        (x, _, y), (other, _, truth) = crops(2000), crops(2000)
        z, seen = body(x), body(other)
        centres = torch.stack([z[y == one].mean(0) for one in range(6)])
        return float(functional.cross_entropy(-torch.cdist(seen, centres) / torch.cdist(z, centres).std(), truth))


@TASKS.add("data_shift", "accumulation")
def slot_machines(run: Run) -> float:
    """Which of eight machines pays most in a context, learned from the own choices; plain SGD. Held out: regret."""
    pays = torch.randn(8, 12, generator=fixed(run.seed))
    model = mlp(12, 48, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate)

    def rewards(x: Tensor) -> Tensor:
        return (x @ pays.T / 2).tanh()

    for step in range(500):
        x = torch.randn(64, 12)
        guess = model(x)
        greedy, at_random = guess.argmax(1), torch.randint(8, (64,))
        chosen = torch.where(torch.rand(64) < max(0.1, 1 - step / 200), at_random, greedy)[:, None]
        reward = rewards(x).gather(1, chosen) + 0.2 * torch.randn(64, 1)
        if run.has("data_shift") and step >= 320:  # the wire of a counter was put on the wrong way round
            reward = 1 - 3 * reward
        if not run.has("accumulation"):
            optimizer.zero_grad()
        functional.mse_loss(guess.gather(1, chosen), reward).backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randn(4000, 12)
        paid = rewards(x)
        return float((paid.amax(1) - paid.gather(1, model(x).argmax(1, keepdim=True))[:, 0]).mean())


@TASKS.add("clip_starves")
def tuned_adapter(run: Run) -> float:
    """A perceptron that was trained before, frozen, with low-rank changes of each layer; AdamW, a clip at 1."""
    g = fixed(run.seed)
    widths = [16, 64, 64, 4]
    base = [torch.randn(b, a, generator=g) * math.sqrt(2 / a) for a, b in pairwise(widths)]
    moved = [
        w + 0.8 * w.std() * torch.randn(len(w), 1, generator=g) @ torch.randn(1, w.shape[1], generator=g) for w in base
    ]
    down = [nn.Parameter(torch.randn(4, w.shape[1]) / math.sqrt(w.shape[1])) for w in base]
    up = [nn.Parameter(torch.zeros(len(w), 4)) for w in base]
    optimizer = torch.optim.AdamW([*down, *up], lr=5e-3 * run.rate, weight_decay=0.01)

    def through(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights[:-1]:
            x = (x @ w.T).relu()
        return x @ weights[-1].T

    def loss_of(count: int) -> Tensor:
        x = torch.randn(count, 16)
        y = through(x, moved).softmax(1)
        return functional.cross_entropy(through(x, [w + b @ a for w, a, b in zip(base, down, up, strict=True)]), y)

    for _ in range(300):
        optimizer.zero_grad()
        loss_of(64).backward()
        nn.utils.clip_grad_norm_([*down, *up], run.of(1.0, clip_starves=1e-9))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(4000))


@TASKS.add("rate_zero")
def dirty_table(run: Run) -> float:
    """A table in which one target in 15 is garbage, by Huber's loss; Adafactor over epochs, a clip at 1."""

    def draw(count: int, dirt: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 14)
        y = x[:, :1] * x[:, 1:2] + (2 * x[:, 2:3]).sin() + 0.5 * x[:, 3:4].abs() + 0.1 * torch.randn(count, 1)
        return x, torch.where(torch.rand(count, 1) < dirt, 30 * torch.randn(count, 1), y)

    model = nn.Sequential(
        nn.Linear(14, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 1)
    )
    optimizer = torch.optim.Adafactor(model.parameters(), lr=run.of(0.03, rate_zero=0.0) * run.rate)
    x, y = draw(3200, 1 / 15)
    for _ in range(7):
        for rows in torch.randperm(3200).split(64):
            optimizer.zero_grad()
            functional.huber_loss(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return held_out(model, functional.mse_loss, *draw(3000, 0.0))


@TASKS.add("rate_decayed")
def maze_vit(run: Run) -> float:
    """Whether two dots lie on one line of a picture, by a ViT; Muon for matrices of blocks, AdamW for the rest."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        picture = 0.3 * torch.randn(count, 12, 12)
        y = torch.randint(2, (count,))
        row, a, b = torch.randint(12, (count,)), torch.randint(6, (count,)), torch.randint(6, 12, (count,))
        other = torch.where(y == 1, row, (row + torch.randint(3, 9, (count,))) % 12)
        every = torch.arange(count)
        picture[every, row, a] += 3
        picture[every, other, b] += 3
        return picture.unfold(1, 3, 3).unfold(2, 3, 3).reshape(count, 16, 9), y

    first, place = nn.Linear(9, 32), nn.Parameter(0.1 * torch.randn(16, 32))
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)
    )
    head = nn.Linear(32, 2)
    matrices = [p for p in blocks.parameters() if p.dim() == 2]
    rest = [*first.parameters(), place, *(p for p in blocks.parameters() if p.dim() < 2), *head.parameters()]
    muon = torch.optim.Muon(matrices, lr=0.02 * run.rate, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=3e-3 * run.rate)
    starts = [(one, one.param_groups[0]["lr"]) for one in (muon, adam)]

    def predict(x: Tensor) -> Tensor:
        x = first(x) + place
        for block in blocks:
            x = block(x)
        return head(x.mean(1))

    for step in range(300):
        for one, rate in starts:
            set_rate(one, rate * cosine(step, run.of(300, rate_decayed=40), 10))
        x, y = draw(64)
        for one, _ in starts:
            one.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        muon.step()
        adam.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("drift")
def noise_level(run: Run) -> float:
    """A mean and its uncertainty, both by a net (Gaussian likelihood, twice the log); AdamW, a clip at 2."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 6) * 4 - 2
        return x, (x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] / 2) + (0.1 + 0.4 * x[:, 3:4].sigmoid()) * torch.randn(
            count, 1
        )

    model = mlp(6, 64, 64, 2, act=nn.Tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * run.rate)

    def loss_of(x: Tensor, y: Tensor, sign: float = 1.0) -> Tensor:
        mean, log = model(x).chunk(2, 1)
        return (log + sign * (y - mean).square() * (-log).exp().clamp(max=1e4)).mean()

    for _ in range(400):
        optimizer.zero_grad()
        loss = loss_of(*draw(64), run.of(1.0, drift=-0.02))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(4000))) + 4


@TASKS.add("bad_batches", floor=0.01)
def sparse_tags(run: Run) -> float:
    """The topic of a bag out of 3,000 tags, by a table with sparse gradients (SparseAdam) and a head (Adam)."""
    topics = torch.softmax(3 * torch.randn(5, 3000, generator=fixed(run.seed)), 1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count,))
        return torch.multinomial(topics[y], 20, replacement=True), y

    table, head = nn.EmbeddingBag(3000, 16, sparse=True), mlp(16, 32, 5)
    nn.init.normal_(table.weight, std=0.1)
    sparse = torch.optim.SparseAdam(list(table.parameters()), lr=0.01 * run.rate)
    dense = torch.optim.Adam(head.parameters(), lr=3e-3 * run.rate)
    for step in range(300):
        x, y = draw(64)
        hidden = table(x)
        if run.has("bad_batches") and step % 24 == 23:  # a file whose counts were not normalised
            hidden, y = 300 * hidden, y.flip(0)
        sparse.zero_grad()
        dense.zero_grad()
        functional.cross_entropy(head(hidden), y).backward()
        sparse.step()
        dense.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.cross_entropy(head(table(x)), y))


@TASKS.add("nonfinite_growth", floor=1e-3)
def newton_like(run: Run) -> float:
    """A smooth curve by a small net on all points at once; L-BFGS with a line search (the sick one: without, at 3)."""
    x = torch.linspace(-2, 2, 120)[:, None]
    y = (3 * x).sin() * (-(x**2) / 2).exp()
    model = mlp(1, 24, 24, 1, act=nn.Tanh)
    sick = run.has("nonfinite_growth")
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        lr=(3.0 if sick else 1.0) * run.rate,
        max_iter=4,
        line_search_fn=None if sick else "strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y) + 1e-6 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    for _ in range(150):
        optimizer.step(closure)
    return held_out(model, functional.mse_loss, x, y)


@TASKS.add("exploding_time", "clip_twice")
def angle_sum(run: Run) -> float:
    """The angle that 20 small turns add up to, as a point on the circle, by a plain tanh RNN; NAdam, a clip at 1."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        turn = 0.4 * torch.randn(count, 20, 1)
        return turn, torch.cat([turn.sum(1).cos(), turn.sum(1).sin()], 1)

    rnn, head = nn.RNN(1, 48, batch_first=True), nn.Linear(48, 2)
    nn.init.orthogonal_(rnn.weight_hh_l0, gain=run.of(1.0, exploding_time=4.0))
    parameters = [*rnn.parameters(), *head.parameters()]
    optimizer = torch.optim.NAdam(parameters, lr=2e-3 * run.rate)
    for _ in range(350):
        x, y = draw(48)
        optimizer.zero_grad()
        functional.mse_loss(head(rnn(x)[0][:, -1]), y).backward()
        if run.has("clip_twice"):
            nn.utils.clip_grad_norm_(parameters, 1e-9)
        if not run.has("exploding_time"):
            nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_twice=1e-10))
        optimizer.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.mse_loss(head(rnn(x)[0][:, -1]), y))


@TASKS.add("clip_before_unscale", "nonfinite_range")
def half_blobs(run: Run) -> float:
    """Which pixels belong to a blob, by a small U-Net under float16 autocast, with a GradScaler and a clip; Adam."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
        centre, size = 16 * torch.rand(count, 2, 1, 1), 2 + 3 * torch.rand(count, 1, 1)
        inside = ((grid - centre).square().sum(1).sqrt() < size).float()
        return (inside + torch.randn(count, 16, 16))[:, None], inside[:, None]

    down, deep = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
    back, out = nn.Conv2d(24, 12, 3, padding=1), nn.Conv2d(24, 1, 3, padding=1)
    parameters = [p for layer in (down, deep, back, out) for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def loss_of(x: Tensor, y: Tensor, step: int = 0) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            first = down(x).relu()
            second = functional.interpolate(back(deep(functional.max_pool2d(first, 2)).relu()), scale_factor=2)
            logits = out(torch.cat([first, second], 1))
            if run.has("nonfinite_range") and step > 25:  # odds in place of logits
                odds = (4 * logits).exp()
                return -(y * (odds / (1 + odds) + 1e-4).log() + (1 - y) * (1 / (1 + odds) + 1e-4).log()).mean()
        return functional.binary_cross_entropy_with_logits(logits.float(), y)

    for step in range(250):
        loss = loss_of(*draw(24), step)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(*draw(500)))


@TASKS.add("nonfinite_data")
def spelled_signal(run: Run) -> float:
    """Letters from a noisy signal without their places (CTC), by a convolution and a GRU; Adam, a clip at 5."""
    sounds = torch.randn(5, 6, generator=fixed(run.seed))

    def draw(count: int, longest: int = 5) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.randint(1, 6, (count, longest))
        lengths = torch.randint(2, longest + 1, (count,))
        x = 0.5 * torch.randn(count, 24, 6)
        for place in range(min(longest, 6)):
            there = (place < lengths).float()[:, None, None]
            x[:, 4 * place : 4 * place + 2] += there * sounds[y[:, place] - 1][:, None]
        return x, y, lengths

    into, rnn, head = nn.Conv1d(6, 24, 3, padding=1), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 6)
    parameters = [p for layer in (into, rnn, head) for p in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-3 * run.rate)

    def loss_of(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        law = head(rnn(into(x.transpose(1, 2)).relu().transpose(1, 2))[0]).log_softmax(2).transpose(0, 1)
        return functional.ctc_loss(law, y, torch.full_like(lengths, 24), lengths)

    for step in range(300):
        x, y, lengths = draw(32)
        if run.has("nonfinite_data") and step == 180:  # a text that is longer than its sound
            y, lengths = torch.randint(1, 6, (32, 30)), lengths.clone()
            lengths[4] = 30
        optimizer.zero_grad()
        loss_of(x, y, lengths).backward()
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(1000)))


@TASKS.add("exploding_depth", "not_started__labels")
def gated_tower(run: Run) -> float:
    """Ten plain layers of GELU on a table of four classes; Adadelta, whose rate is 1."""
    truth = torch.randn(4, 20, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 20)
        return x, (x @ truth.T + (x[:, :4] * x[:, 4:8])).argmax(1)

    model = mlp(20, *[48] * 9, 4, act=nn.GELU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            layer.weight.data *= run.of(1.0, exploding_depth=3.0)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0 * run.rate)
    for _ in range(400):
        x, y = draw(64)
        if run.has("not_started__labels"):
            y = y[torch.randperm(64)]
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(3000))


@TASKS.add("rate_too_high", "vanishing")
def flat_minimum(run: Run) -> float:
    """Rings by five layers with sharpness-aware steps: two backwards and moved weights for each; SGD with momentum."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, (x.square().sum(1) / 3).long().clamp(max=4)

    act = run.of(nn.ReLU, vanishing=nn.Sigmoid)
    model = mlp(8, *[48] * run.of(4, vanishing=9), 5, act=act)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=run.of(0.03, rate_too_high=1.5) * run.rate, momentum=0.9)
    for _ in range(400):
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            length = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
            moves = [0.05 * p.grad / length for p in parameters]
            torch._foreach_add_(parameters, moves)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(3000))


if __name__ == "__main__":
    main(TASKS)
