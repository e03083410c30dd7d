"""Tasks of fields that no other set has, written after causes became a table: the diagnosis was asked once."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("accumulation", "nonfinite_data")
def graded_wines(run: Run) -> float:
    """Grades from 0 to 4 of a table by ordered thresholds (cumulative logits); SGD with momentum."""
    world = torch.randn(12, generator=fixed(run.seed)) / 3

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        hidden = (x @ world + 0.5 * (x[:, 0] * x[:, 1]) + 0.3 * torch.randn(count)) * 1.5
        return x, torch.bucketize(hidden, torch.tensor([-1.5, -0.5, 0.5, 1.5]))

    model, gaps = mlp(12, 48, 48, 1), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([*model.parameters(), gaps], lr=0.03 * run.rate, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        edges = functional.softplus(gaps).cumsum(0) - 2
        above = torch.sigmoid(model(x) - edges)
        chances = torch.cat([torch.ones(len(x), 1), above], 1) - torch.cat([above, torch.zeros(len(x), 1)], 1)
        return -(chances.gather(1, y[:, None]) + 1e-6).log().mean()

    for step in range(400):
        x, y = draw(48)
        if run.has("nonfinite_data") and step == 260:  # an empty cell of the table
            x[5, 3] = float("nan")
        if not run.has("accumulation"):
            optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("bad_batches", "rate_zero")
def cells_in_a_row(run: Run) -> float:
    """Which points of a noisy line belong to a cell, by convolutions and the overlap (Dice); AdamW with a cosine."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        place, start, width = torch.arange(64), torch.randint(0, 44, (count, 1)), torch.randint(6, 20, (count, 1))
        inside = ((place >= start) & (place < start + width)).float()
        return (inside + 0.8 * torch.randn(count, 64))[:, None], inside[:, None]

    model = nn.Sequential(
        nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv1d(16, 16, 7, padding=3), nn.ReLU(),
        nn.Conv1d(16, 1, 7, padding=3),
    )  # fmt: skip
    rate = run.of(4e-3, rate_zero=0.0) * run.rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def loss_of(logits: Tensor, y: Tensor) -> Tensor:
        p = logits.sigmoid()
        overlap = (2 * (p * y).sum((1, 2)) + 1) / ((p + y).sum((1, 2)) + 1)
        return (1 - overlap).mean() + functional.binary_cross_entropy_with_logits(logits, y)

    for step in range(360):
        set_rate(optimizer, rate * cosine(step, 360, 20))
        x, y = draw(32)
        if run.has("bad_batches") and step % 30 == 29:  # one scanner writes inverted pictures in other units
            x, y = 60 * x, 1 - y
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return held_out(model, loss_of, *draw(1500))


@TASKS.add("rate_decayed", "not_started")
def voices(run: Run) -> float:
    """Twenty speakers by the angle to one vector for each, with a margin; SGD with momentum, steps down of its rate."""
    centres = functional.normalize(torch.randn(20, 24, generator=fixed(run.seed)), dim=1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(20, (count,))
        return centres[y] + 0.22 * torch.randn(count, 24), y

    body, vectors = mlp(24, 64, 32), nn.Parameter(torch.randn(20, 32))
    optimizer = torch.optim.SGD([*body.parameters(), vectors], lr=0.05 * run.rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, run.of(150, rate_decayed=5), 0.3)

    def loss_of(x: Tensor, y: Tensor, margin: float) -> Tensor:
        near = functional.normalize(body(x), dim=1) @ functional.normalize(vectors, dim=1).T
        return functional.cross_entropy(12 * (near - margin * functional.one_hot(y, 20)), y)

    for _ in range(400):
        x, y = draw(64)
        if run.has("not_started"):  # the list of names was sorted, and the sounds were not
            y = y[torch.randperm(64)]
        optimizer.zero_grad()
        loss_of(x, y, 0.15).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000), 0.0))


@TASKS.add("clip_starves", "rate_too_high")
def hidden_words(run: Run) -> float:
    """Words that were masked in noisy cycles of a small language, by two blocks with their norm first; AdamW."""
    width = 32
    table, place = nn.Embedding(13, width), nn.Parameter(torch.randn(16, width) / 6)
    blocks = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    )
    head = nn.Linear(width, 12)
    parameters = [*table.parameters(), place, *blocks.parameters(), *head.parameters()]
    rate = run.of(3e-3, rate_too_high=0.3) * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=rate)

    def loss_of(count: int) -> Tensor:
        start, stride = torch.randint(12, (count, 1)), torch.randint(1, 4, (count, 1))
        words = (start + stride * torch.arange(16)) % 12
        masked = torch.rand(count, 16) < 0.2
        hidden = blocks(table(words.masked_fill(masked, 12)) + place)
        return functional.cross_entropy(head(hidden)[masked], words[masked])

    for step in range(350):
        set_rate(optimizer, rate * cosine(step, 350, 30))
        optimizer.zero_grad()
        loss_of(32).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_starves=1e-9))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(500))


@TASKS.add("rate_too_low", "no_gradient")
def baskets(run: Run) -> float:
    """Whether a basket of five goods is bought, by a factorization machine; Adagrad over fresh baskets."""
    g = fixed(run.seed)
    truth, kind = torch.randn(60, 4, generator=g), torch.randn(60, generator=g) / 2

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.stack([torch.randint(12, (count,)) + 12 * k for k in range(5)], 1)
        total = truth[x].sum(1)
        score = (total.square() - truth[x].square().sum(1)).sum(1) / 6 + kind[x].sum(1)
        return x, (score + 0.3 * torch.randn(count) > 0).float()

    factors, weights, shift = nn.Embedding(60, 8), nn.Embedding(60, 1), nn.Parameter(torch.zeros(()))
    nn.init.normal_(factors.weight, std=0.1)
    rate = run.of(0.15, rate_too_low=1e-6) * run.rate
    optimizer = torch.optim.Adagrad([*factors.parameters(), *weights.parameters(), shift], lr=rate)

    def logits(x: Tensor) -> Tensor:
        each = factors(x).detach() if run.has("no_gradient") else factors(x)
        pairs = (each.sum(1).square() - each.square().sum(1)).sum(1) / 2
        return pairs + weights(x).sum((1, 2)) + shift

    for _ in range(500):
        x, y = draw(96)
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(logits(x), y).backward()
        optimizer.step()
    x, y = draw(4000)
    with torch.no_grad():
        return float(functional.binary_cross_entropy_with_logits(logits(x), y))


@TASKS.add("nonfinite_growth", "exploding_time", floor=1e-3)
def hidden_dial(run: Run) -> float:
    """Two turning dials through a code that one matrix moves on, 15 times (Koopman); Adam with a clip at 1."""
    coder, decoder, move = mlp(4, 32, 8), mlp(8, 32, 4), nn.Linear(8, 8, bias=False)
    nn.init.orthogonal_(move.weight)
    if run.has("exploding_time"):
        move.weight.data.mul_(2.5)
    parameters = [*coder.parameters(), *decoder.parameters(), *move.parameters()]
    kind = torch.optim.SGD if run.has("nonfinite_growth") else torch.optim.Adam
    optimizer = kind(parameters, lr=run.of(3e-3, nonfinite_growth=2.0) * run.rate)

    def loss_of(count: int) -> Tensor:
        phase, pace = 6.3 * torch.rand(count, 2), torch.tensor([0.3, 0.5])
        angle = phase[:, None] + pace * torch.arange(16)[:, None]
        seen = torch.cat([angle.cos(), angle.sin()], -1)
        code, loss = coder(seen[:, 0]), torch.zeros(())
        for k in range(1, 16):
            code = move(code)
            loss = loss + functional.mse_loss(decoder(code), seen[:, k])
        return loss / 15

    for _ in range(350):
        optimizer.zero_grad()
        loss_of(32).backward()
        if not run.has("nonfinite_growth"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(500))


@TASKS.add("clip_twice")
def long_memory(run: Run) -> float:
    """A pulse that has to be said again 20 steps later, by 16 decays that are learned as a filter; RMSprop, a clip."""
    decay, mix_in, mix_out = nn.Parameter(torch.rand(16) * 3), nn.Parameter(torch.randn(16) / 4), mlp(16, 32, 1)
    parameters = [decay, mix_in, *mix_out.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=3e-3 * run.rate)
    times = torch.arange(40.0)

    def predict(x: Tensor) -> Tensor:
        kernel = torch.exp(-torch.nn.functional.softplus(decay)[:, None] * times / 10)
        padded = functional.pad(x[:, None].expand(-1, 16, -1), (39, 0))
        state = functional.conv1d(padded, kernel.flip(1)[:, None], groups=16) * mix_in[:, None]
        return mix_out(state.transpose(1, 2)).squeeze(-1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = (torch.rand(count, 40) < 0.15).float()
        kept = functional.conv1d(functional.pad(x[:, None], (19, 0)), torch.ones(1, 1, 20) / 4).squeeze(1)
        return x, kept

    for _ in range(400):
        x, y = draw(32)
        optimizer.zero_grad()
        functional.mse_loss(predict(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, 2.0)
        if run.has("clip_twice"):  # left over from another script
            nn.utils.clip_grad_value_(parameters, 1e-10)
        optimizer.step()
    x, y = draw(1000)
    with torch.no_grad():
        return float(functional.mse_loss(predict(x), y))


@TASKS.add("rate_too_high", "accumulation__micro")
def fixed_points(run: Run) -> float:
    """A smooth map by a layer that is repeated to its fixed point (12 times); SGD with momentum, four micro-batches."""
    state, given, out = nn.Linear(40, 40), nn.Linear(5, 40), nn.Linear(40, 1)
    state.weight.data.mul_(0.7)
    parameters = [*state.parameters(), *given.parameters(), *out.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=run.of(0.03, rate_too_high=0.3) * run.rate, momentum=0.9)
    world = torch.randn(5, 3, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5)
        return x, (x @ world).tanh().sum(1, keepdim=True) + 0.1 * torch.randn(count, 1)

    def predict(x: Tensor) -> Tensor:
        z, fed = torch.zeros(len(x), 40), given(x)
        for _ in range(12):
            z = (state(z) + fed).tanh()
        return out(z)

    for _ in range(300):
        optimizer.zero_grad()
        for _ in range(4):
            x, y = draw(16)
            loss = functional.mse_loss(predict(x), y)
            (loss if run.has("accumulation__micro") else loss / 4).backward()
        optimizer.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.mse_loss(predict(x), y))


@TASKS.add("data_shift")
def few_points(run: Run) -> float:
    """Curves from the few points that are known of each, with an uncertainty (neural process); Adam."""
    coder, decoder = mlp(2, 48, 48), mlp(49, 48, 2)
    optimizer = torch.optim.Adam([*coder.parameters(), *decoder.parameters()], lr=2e-3 * run.rate)

    def loss_of(count: int, shifted: bool = False) -> Tensor:
        x = 4 * torch.rand(count, 20, 1) - 2
        height, phase = 0.5 + torch.rand(count, 1, 1), 6.3 * torch.rand(count, 1, 1)
        y = height * (2 * x + phase).sin()
        if shifted:  # the second half of the archive is in other units
            y = 6 * y + 4
        code = coder(torch.cat([x, y], 2)[:, :8]).mean(1, keepdim=True).expand(-1, 20, -1)
        mean, spread = decoder(torch.cat([code, x], 2)).chunk(2, 2)
        spread = 0.1 + functional.softplus(spread)
        return (((y - mean) / spread).square() / 2 + spread.log()).mean() + 2.5

    for step in range(400):
        optimizer.zero_grad()
        loss_of(24, run.has("data_shift") and step >= 250).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(1000))


@TASKS.add("drift")
def true_or_noise(run: Run) -> float:
    """The density of three rings by telling their points from noise (NCE); AdamW with weight decay, a cosine."""
    model = mlp(2, 64, 64, 1, act=nn.SiLU)
    rate = 4e-3 * run.rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer.param_groups[0]["weight_decay"] = run.of(0.01, drift=-4.0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        radius, angle = torch.randint(1, 4, (count,)) + 0.1 * torch.randn(count), 6.283 * torch.rand(count)
        rings = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        y = (torch.rand(count, 1) < 0.5).float()
        return torch.where(y > 0, rings, 2 * torch.randn(count, 2)), y

    for step in range(450):
        set_rate(optimizer, rate * run.of(cosine(step, 450, 20), drift=1.0))
        x, y = draw(96)
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.binary_cross_entropy_with_logits, *draw(4000))


@TASKS.add("clip_before_unscale", "nonfinite_range")
def half_matches(run: Run) -> float:
    """Which of eight pictures belongs to a text, by two towers under float16 autocast; Adam, a GradScaler, a clip."""
    texts, pictures = mlp(20, 48, 24), mlp(30, 48, 24)
    parameters = [*texts.parameters(), *pictures.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    g = fixed(run.seed)
    to_text, to_picture = torch.randn(6, 20, generator=g), torch.randn(6, 30, generator=g)

    def loss_of(groups: int, step: int = 0) -> Tensor:
        things = torch.randn(groups, 8, 6)
        a = (things @ to_text + 0.5 * torch.randn(groups, 8, 20)) / 3
        b = (things @ to_picture + 0.5 * torch.randn(groups, 8, 30)) / 3
        with torch.autocast("cpu", torch.float16):
            one, other = texts(a), pictures(b)
            if run.has("nonfinite_range") and step >= 220:  # a temperature that somebody turned the wrong way round
                one = one * 2e4
            scores = one @ other.transpose(1, 2) / 5
        return functional.cross_entropy(scores.float().flatten(0, 1), torch.arange(8).repeat(groups))

    for step in range(350):
        optimizer.zero_grad()
        scaler.scale(loss_of(8, step)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(300))


@TASKS.add("vanishing", "exploding_depth")
def deep_table(run: Run) -> float:
    """Three classes of a table by twelve plain ReLU layers from Kaiming's start; Adam with an exponential decay."""
    world = torch.randn(10, 3, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10)
        return x, ((x @ world).sin() + 0.2 * torch.randn(count, 3)).argmax(1)

    act = nn.Sigmoid if run.has("vanishing") else nn.ReLU
    model = mlp(10, *[32] * 11, 3, act=act)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            layer.weight.data.mul_(run.of(1.0, exploding_depth=4.0, vanishing=0.7))
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * run.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.996)
    for _ in range(500):
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held_out(model, functional.cross_entropy, *draw(3000))


if __name__ == "__main__":
    main(TASKS)
