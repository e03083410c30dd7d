"""Small real training tasks, stable and not, for judging what a record recommends. Each is a second or two on one core.

A task is made anew from a seed: its models, optimizers, data and steps. `evaluate` is a loss on held-out data: lower is
better, and nothing in training has seen it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Clip = Callable[[torch.optim.Optimizer], None]


@dataclass
class Task:
    """One training run that has not begun.

    Attributes:
        optimizers: All of them, in the order in which they first step.
        step: Trains for one step; calls ``clip(optimizer)`` right before each ``optimizer.step()``, returns the loss.
        evaluate: The held-out loss.
        steps: How many steps it trains.
        floor: A held-out loss below it counts as this one: converged.
        rate: What all learning rates are multiplied by.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[[int, Clip], Tensor]
    evaluate: Callable[[], float]
    steps: int = 300
    floor: float = 0.0
    rate: float = 1.0


def _supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    held_out: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    spoil: Callable[[int, Tensor], Tensor] = lambda i, loss: loss,
    schedule: Callable[[int], float] = lambda i: 1.0,
    **more,
) -> Task:
    base = [group["lr"] for group in optimizer.param_groups]

    def step(i: int, clip: Clip) -> Tensor:
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * schedule(i) * task.rate
        inputs, targets = batch(i)
        optimizer.zero_grad()
        loss = spoil(i, loss_fn(model(inputs), targets))
        loss.backward()
        clip(optimizer)
        optimizer.step()
        return loss

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            return float(loss_fn(model(held_out[0]), held_out[1]))

    task = Task([optimizer], step, evaluate, **more)
    return task


def _decay(steps: int, warm_up: int = 0, last: float = 0.05) -> Callable[[int], float]:
    """A linear warm-up and a cosine decay, as a factor of the learning rate."""

    def factor(i: int) -> float:
        if i < warm_up:
            return (i + 1) / warm_up
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (i - warm_up) / (steps - warm_up)))

    return factor


def _clusters(seed: int, classes: int = 10, features: int = 20, noise: float = 2.2) -> Callable[[int], tuple]:
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(1000 + seed)) * 1.2

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,))
        return centres[labels] + noise * torch.randn(count, features), labels

    return draw


def _mlp(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def mlp_stable(seed: int) -> Task:
    """An MLP on noisy clusters; SGD with momentum at a rate that works."""
    return _mlp_task(seed, 0.02, schedule=_decay(300))


def mlp_bad_batches(seed: int) -> Task:
    """The same, with inputs 30 times too large in one batch of 100."""
    return _mlp_task(seed, 0.02, bad_every=100, steps=400, schedule=_decay(400))


def mlp_edge(seed: int) -> Task:
    """The same at a learning rate at the edge of what it bears."""
    return _mlp_task(seed, 0.5)


def mlp_hot(seed: int) -> Task:
    """The same with a learning rate far above it."""
    return _mlp_task(seed, 2.0)


def mlp_warm_up(seed: int) -> Task:
    """The same with Adam, and a warm-up before the decay."""
    return _mlp_task(seed, 3e-3, schedule=_decay(300, 60), make=torch.optim.Adam)


def _momentum(parameters, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _mlp_task(
    seed: int, rate: float, bad_every: int = 0, steps: int = 300, schedule=lambda i: 1.0, make=_momentum
) -> Task:
    draw, model = _clusters(seed), _mlp(20, 10)
    train, held_out = draw(20_000), draw(2000)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(train[1]), (32,))
        scale = 30.0 if bad_every and i % bad_every == bad_every // 2 else 1.0
        return train[0][chosen] * scale, train[1][chosen]

    optimizer = make(model.parameters(), lr=rate)
    return _supervised(model, optimizer, batch, held_out, functional.cross_entropy, schedule=schedule, steps=steps)


def diverges_at_once(seed: int) -> Task:
    """A deep ReLU regression whose learning rate is too high for its start: NaN within some twenty steps."""
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(16, 16), nn.ReLU())], nn.Linear(16, 1))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    teacher = torch.randn(16)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(64, 16)
        return inputs, torch.tanh(inputs @ teacher)[:, None]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return _supervised(model, optimizer, batch, batch(0), functional.mse_loss)


def linear_converging(seed: int) -> Task:
    """A linear regression without noise, which SGD solves to the last digit."""
    truth = torch.randn(3)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(16, 3)
        return inputs, (inputs @ truth)[:, None] + 1.5

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return _supervised(model, optimizer, batch, batch(0), functional.mse_loss, steps=400, floor=1e-3)


def mlp_interpolating(seed: int) -> Task:
    """An MLP that learns a small set by heart with Adam, until its gradients vanish."""
    draw, model = _clusters(seed, noise=1.2), _mlp(20, 10, 128)
    train, held_out = draw(256), draw(2000)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(256, (32,))
        return train[0][chosen], train[1][chosen]

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _supervised(model, optimizer, batch, held_out, functional.cross_entropy)


def _images(seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    patterns = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(2000 + seed))
    patterns = functional.avg_pool2d(patterns, 3, 1, 1) * 3

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(8, (count,))
        shifts = torch.randint(-2, 3, (2,)).tolist()
        return torch.roll(patterns[labels], shifts, (2, 3)) + 1.2 * torch.randn(count, 1, 12, 12), labels

    return draw


def _cnn(norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(216, 8),
    )  # fmt: skip


def cnn_stable(seed: int) -> Task:
    """A CNN with batch norm; SGD with momentum."""
    return _cnn_task(seed, _cnn(True), lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), schedule=_decay(240))


def cnn_hot(seed: int) -> Task:
    """A CNN without norms at a high learning rate."""
    return _cnn_task(seed, _cnn(False), lambda p: torch.optim.SGD(p, lr=0.4, momentum=0.9))


def cnn_bad_labels(seed: int) -> Task:
    """A CNN with Adam and bursts of batches whose labels are random."""
    return _cnn_task(seed, _cnn(True), lambda p: torch.optim.Adam(p, lr=2e-3), burst=True, schedule=_decay(240))


def _cnn_task(seed: int, model: nn.Module, make, burst: bool = False, schedule=lambda i: 1.0) -> Task:
    draw = _images(seed)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        inputs, labels = draw(32)
        return inputs, torch.randint(8, (32,)) if burst and i % 60 >= 30 and i % 60 < 35 else labels

    optimizer = make(model.parameters())
    shuffled = [draw(100) for _ in range(10)]
    held_out = torch.cat([each[0] for each in shuffled]), torch.cat([each[1] for each in shuffled])
    return _supervised(model, optimizer, batch, held_out, functional.cross_entropy, steps=240, schedule=schedule)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.cell, self.head = kind(2, width, batch_first=True), nn.Linear(width, 1)
        if gain != 1.0:
            nn.init.orthogonal_(self.cell.get_parameter("weight_hh_l0"), gain)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.cell(inputs)[0][:, -1])


def _adding(count: int, length: int = 30) -> tuple[Tensor, Tensor]:
    values, marks = torch.rand(count, length), torch.zeros(count, length)
    marks.scatter_(1, torch.rand(count, length).topk(2).indices, 1.0)
    return torch.stack([values, marks], 2), (values * marks).sum(1, keepdim=True)


def rnn_exploding(seed: int) -> Task:
    """The adding problem with a plain RNN whose recurrence amplifies; SGD."""
    model = _Recurrent(nn.RNN, 32, gain=1.4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    return _supervised(
        model, optimizer, lambda i: _adding(32), _adding(1000), functional.mse_loss, schedule=_decay(300)
    )


def lstm_adam(seed: int) -> Task:
    """The adding problem with an LSTM and Adam."""
    model = _Recurrent(nn.LSTM, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return _supervised(
        model,
        optimizer,
        lambda i: _adding(32, 15),
        _adding(1000, 15),
        functional.mse_loss,
        steps=400,
        schedule=_decay(400),
    )


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.norms[1](x))


class _GPT(nn.Module):
    def __init__(self, letters: int = 12, width: int = 32, length: int = 24) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks, self.head = nn.Sequential(_Block(width), _Block(width)), nn.Linear(width, letters)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(letters) + self.place[: letters.shape[1]])).transpose(1, 2)


def _text(seed: int) -> Callable[..., tuple[Tensor, Tensor]]:
    # A Markov chain of order two over 12 letters.
    chances = torch.randn(12, 12, 12, generator=torch.Generator().manual_seed(3000 + seed)).mul(2).softmax(2)

    letters = [torch.randint(12, (600,)), torch.randint(12, (600,))]
    for _ in range(48):
        letters.append(torch.multinomial(chances[letters[-2], letters[-1]], 1)[:, 0])
    text = torch.stack(letters, 1)

    def draw(count: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        row = torch.randint(500, 600, (count, 1)) if held_out else torch.randint(500, (count, 1))
        drawn = text[row, torch.randint(25, (count, 1)) + torch.arange(25)]
        return drawn[:, :-1], drawn[:, 1:]

    return draw


def gpt_stable(seed: int) -> Task:
    """A small GPT with AdamW, a warm-up and a cosine decay."""
    return _gpt_task(seed, lambda m: _adamw(m, 1e-2))


def gpt_hot(seed: int) -> Task:
    """The same at a constant rate that is too high."""
    return _gpt_task(seed, lambda m: _adamw(m, 0.2), schedule=lambda i: 1.0)


def gpt_spiky(seed: int) -> Task:
    """The same with a loss that is 1,000 times too large on each 50th step."""
    return _gpt_task(seed, lambda m: _adamw(m, 1e-2), spoil=lambda i, loss: loss * 1000 if i % 50 == 40 else loss)


def gpt_bad_batches(seed: int) -> Task:
    """The same with a burst of batches of random letters now and then."""
    return _gpt_task(seed, lambda m: _adamw(m, 1e-2), noise=lambda i: i % 75 >= 70)


def gpt_muon(seed: int) -> Task:
    """The same with Muon for the matrices of the blocks, and AdamW for the rest."""
    return _gpt_task(seed, _muon)


def gpt_sgd(seed: int) -> Task:
    """The same with SGD and momentum at a hot rate."""
    return _gpt_task(seed, lambda m: torch.optim.SGD(m.parameters(), lr=3.0, momentum=0.9), schedule=lambda i: 1.0)


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=2e-2)


def _gpt_task(seed: int, make, noise=lambda i: False, **more) -> Task:
    model, draw = _GPT(), _text(seed)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        inputs, targets = draw(16)
        return (torch.randint_like(inputs, 12), torch.randint_like(targets, 12)) if noise(i) else (inputs, targets)

    optimizer = make(model)
    return _supervised(
        model,
        optimizer,
        batch,
        draw(256, held_out=True),
        functional.cross_entropy,
        **{"steps": 250, "schedule": _decay(250, 20)} | more,
    )


def gan(seed: int) -> Task:
    """A GAN of two MLPs on a ring of eight points; held out: the energy distance to the truth."""
    generator, critic = _mlp(8, 2), _mlp(2, 1)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (critic, generator)]

    def real(count: int) -> Tensor:
        angle = torch.randint(8, (count,)) * math.pi / 4
        return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2)

    def step(i: int, clip: Clip) -> Tensor:
        critic_optimizer, generator_optimizer = optimizers
        fake = generator(torch.randn(64, 8))
        critic_optimizer.zero_grad()
        loss = functional.softplus(-critic(real(64))).mean() + functional.softplus(critic(fake.detach())).mean()
        loss.backward()
        clip(critic_optimizer)
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        clip(generator_optimizer)
        generator_optimizer.step()
        return loss

    def evaluate() -> float:
        with torch.no_grad():
            x, y = real(1000), generator(torch.randn(1000, 8))
            return float(2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean())

    return Task(optimizers, step, evaluate, steps=400)


def reinforce(seed: int) -> Task:
    """REINFORCE: a policy steers a point to a goal; held out: the mean distance of its path from there."""
    policy = _mlp(2, 5, 32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    moves = torch.tensor([[0.0, 0.0], [0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])

    def play(count: int) -> tuple[Tensor, Tensor]:
        place, chances, cost = 2 * torch.rand(count, 2) - 1, [], []
        for _ in range(10):
            drawn = torch.distributions.Categorical(logits=policy(place))
            action = drawn.sample()
            place = place + moves[action] + 0.05 * torch.randn(count, 2)
            chances.append(drawn.log_prob(action))
            cost.append(place.norm(dim=1))
        return torch.stack(chances), torch.stack(cost)

    def step(i: int, clip: Clip) -> Tensor:
        chances, cost = play(32)
        to_go = cost.flip(0).cumsum(0).flip(0)
        optimizer.zero_grad()
        loss = (chances * (to_go - to_go.mean(1, keepdim=True))).mean()
        loss.backward()
        clip(optimizer)
        optimizer.step()
        return loss

    def evaluate() -> float:
        with torch.no_grad():
            return float(play(2000)[1].mean())

    return Task([optimizer], step, evaluate, steps=250)


def autoencoder(seed: int) -> Task:
    """An autoencoder with AdamW."""
    draw, model = _clusters(seed, noise=0.5), nn.Sequential(_mlp(20, 4), _mlp(4, 20))

    def batch(i: int) -> tuple[Tensor, Tensor]:
        inputs, _ = draw(64)
        return inputs, inputs

    return _supervised(model, _adamw(model, 3e-3), batch, batch(0), functional.mse_loss, schedule=_decay(300))


def regression_heavy_noise(seed: int) -> Task:
    """A linear regression by SGD with momentum, under noise whose variance is infinite."""
    truth, model = torch.randn(30), nn.Linear(30, 1)

    def batch(i: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(16, 30)
        drawn = torch.distributions.StudentT(1.5).sample((16,)) * noise
        return inputs, (inputs @ truth + drawn)[:, None]

    inputs = torch.randn(2000, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    held_out = inputs, (inputs @ truth)[:, None]
    return _supervised(model, optimizer, batch, held_out, functional.mse_loss, steps=400, schedule=_decay(400))


def gru_hot(seed: int) -> Task:
    """The adding problem with a GRU and SGD at a high learning rate."""
    model = _Recurrent(nn.GRU, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return _supervised(model, optimizer, lambda i: _adding(32, 15), _adding(1000, 15), functional.mse_loss, steps=400)


def cnn_warm_restarts(seed: int) -> Task:
    """A CNN with batch norm, SGD, and a cosine schedule that starts anew three times."""
    cycle = _decay(80)
    return _cnn_task(seed, _cnn(True), lambda p: _momentum(p, 0.05), schedule=lambda i: cycle(i % 80))


def mlp_poisoned(seed: int) -> Task:
    """An MLP with Adam and one batch of 25 whose inputs are 10 times too large and whose labels are random."""
    draw, model = _clusters(seed), _mlp(20, 10)
    train, held_out = draw(20_000), draw(2000)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(train[1]), (32,))
        if i % 25 == 12:
            return 10 * train[0][chosen], torch.randint(10, (32,))
        return train[0][chosen], train[1][chosen]

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return _supervised(model, optimizer, batch, held_out, functional.cross_entropy, schedule=_decay(300))


def q_learning(seed: int) -> Task:
    """Q-learning with a target network on a ring of states; held out: the error of the values."""
    states, discount = 16, 0.9
    value, target = _mlp(states, 2, 32), _mlp(states, 2, 32)
    optimizer = torch.optim.Adam(value.parameters(), lr=3e-3)
    rewards, codes = torch.rand(states), torch.eye(states)
    truth = torch.zeros(states, 2)
    for _ in range(200):
        best = rewards + discount * truth.max(1).values
        truth = torch.stack([best.roll(1), best.roll(-1)], 1)

    def step(i: int, clip: Clip) -> Tensor:
        if i % 20 == 0:
            target.load_state_dict(value.state_dict())
        place, move = torch.randint(states, (32,)), torch.randint(2, (32,))
        after = (place + 2 * move - 1) % states
        with torch.no_grad():
            wanted = rewards[after] + discount * target(codes[after]).max(1).values
        optimizer.zero_grad()
        loss = functional.mse_loss(value(codes[place])[torch.arange(32), move], wanted)
        loss.backward()
        clip(optimizer)
        optimizer.step()
        return loss

    def evaluate() -> float:
        with torch.no_grad():
            return float(functional.mse_loss(value(codes), truth))

    return Task([optimizer], step, evaluate, steps=500)


def vae(seed: int) -> Task:
    """A variational autoencoder with Adam; held out: its bound."""
    draw, encoder, decoder = _clusters(seed, noise=0.5), _mlp(20, 8), _mlp(4, 20)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def bound(inputs: Tensor) -> Tensor:
        middle, log_variance = encoder(inputs).chunk(2, 1)
        drawn = middle + torch.randn_like(middle) * (log_variance / 2).exp()
        divergence = (middle.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        return ((decoder(drawn) - inputs).square().sum(1) / 2 + divergence).mean()

    def step(i: int, clip: Clip) -> Tensor:
        optimizer.param_groups[0]["lr"] = 3e-3 * task.rate
        optimizer.zero_grad()
        loss = bound(draw(64)[0])
        loss.backward()
        clip(optimizer)
        optimizer.step()
        return loss

    def evaluate() -> float:
        with torch.no_grad():
            return float(bound(draw(4000)[0]))

    task = Task([optimizer], step, evaluate, steps=400)
    return task


def factors(seed: int) -> Task:
    """Factors of a matrix of which few entries are known, by SGD with momentum: large where an entry is odd."""
    left, right = torch.randn(60, 4), torch.randn(40, 4)
    model = nn.ParameterList([0.3 * torch.randn(60, 8), 0.3 * torch.randn(40, 8)])

    def batch(i: int) -> tuple[Tensor, Tensor]:
        rows, columns = torch.randint(60, (32,)), torch.randint(40, (32,))
        wanted = (left[rows] * right[columns]).sum(1)
        return torch.stack([rows, columns]), wanted + 20 * torch.randn(32) * (torch.rand(32) < 0.01)

    def predict(places: Tensor) -> Tensor:
        return (model[0][places[0]] * model[1][places[1]]).sum(1)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = model

        def forward(self, places: Tensor) -> Tensor:
            return predict(places)

    every = torch.cartesian_prod(torch.arange(60), torch.arange(40)).T
    held_out = every, (left[every[0]] * right[every[1]]).sum(1)
    product = Product()
    optimizer = torch.optim.SGD(product.parameters(), lr=0.3, momentum=0.9)
    return _supervised(product, optimizer, batch, held_out, functional.mse_loss, steps=500, schedule=_decay(500))


def deep_hot(seed: int) -> Task:
    """A deep MLP with residual connections and no norms; SGD at a rate above what it bears."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _mlp(32, 32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    draw = _clusters(seed)
    model = nn.Sequential(nn.Linear(20, 32), *[Block() for _ in range(6)], nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return _supervised(model, optimizer, lambda i: draw(32), draw(2000), functional.cross_entropy)


def _named(*tasks: Callable[[int], Task]) -> dict[str, Callable[[int], Task]]:
    return {make.__name__.replace("_", " "): make for make in tasks}


CHOSEN_ON = _named(
    mlp_stable, mlp_warm_up, mlp_bad_batches, mlp_edge, mlp_hot, mlp_interpolating, linear_converging,
    diverges_at_once, cnn_stable, cnn_hot, cnn_bad_labels, rnn_exploding, lstm_adam, gpt_stable, gpt_hot,
    gpt_spiky, gpt_bad_batches, gpt_muon, gpt_sgd, gan, reinforce, autoencoder, regression_heavy_noise, gru_hot,
    cnn_warm_restarts, mlp_poisoned, q_learning,
)  # fmt: skip
"""The tasks on which the numbers in `gradguard.monitoring.judge.recommend` were chosen."""

FRESH = _named(vae, factors, deep_hot)
"""Tasks that were written afterwards, run once, and looked at by nobody who chose a number."""

TASKS = CHOSEN_ON | FRESH


def make_task(name: str, seed: int) -> Task:
    """Return a task whose weights, data and steps follow from ``seed``."""
    torch.manual_seed(seed)
    return TASKS[name](seed)
