"""Twelve scripts as people post them, with two of their mistakes each, written and frozen before any was judged."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from diagnosis_tasks import Run, Tasks, cosine, endless, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("not_started__softmax_twice", "rate_too_high__from_sgd", floor=0.02)
def handwriting(run: Run) -> float:
    """Eight shapes drawn by a shaking hand on 10 by 10 pixels, convolutions and dropout; Adam, epochs."""
    shapes = (torch.randn(8, 1, 5, 5, generator=fixed(run.seed)) > 0).float()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(216, 48), nn.ReLU(), nn.Linear(48, 8),
        nn.Softmax(1) if run.has("not_started__softmax_twice") else nn.Identity(),
    )  # fmt: skip
    rate = run.of(1.5e-3, rate_too_high__from_sgd=0.1) * run.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        kind, x = torch.randint(8, (count,)), torch.zeros(count, 1, 10, 10)
        for i, (down, right) in enumerate(torch.randint(6, (count, 2)).tolist()):
            x[i, :, down : down + 5, right : right + 5] = shapes[kind[i]]
        return (x + 0.3 * torch.randn_like(x) - 0.13) / 0.5, kind

    for x, y in DataLoader(TensorDataset(*draw(9600)), batch_size=24, shuffle=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.cross_entropy, *draw(2000))


@TASKS.add("no_gradient__head_replaced", "update_rule__decay_half")
def flowers(run: Run) -> float:
    """Fine-tuning of a trunk that was trained by hand on 12 kinds, for six new ones; SGD, two groups, a cosine."""
    g = fixed(run.seed)
    mix, middles = torch.randn(20, 20, generator=g) / 4, torch.randn(18, 20, generator=g)

    def draw(count: int, kinds: range) -> tuple[Tensor, Tensor]:
        kind = torch.randint(len(kinds), (count,))
        return (1.2 * (middles[kinds.start + kind] + 0.8 * torch.randn(count, 20)) @ mix).sinh(), kind

    model = mlp(20, 64, 64, 32, 12)
    for _ in range(150):
        x, y = draw(64, range(12))
        for p, slope in zip(
            model.parameters(),
            torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters())),
            strict=True,
        ):
            p.data -= 0.1 * slope
    late = run.has("no_gradient__head_replaced")
    trunk = model[:-1]
    old, new = model[-1], nn.Linear(32, 6)
    decay = run.of(1e-4, update_rule__decay_half=0.5)
    groups = [{"params": trunk.parameters(), "lr": 5e-4}, {"params": (old if late else new).parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: run.rate * cosine(step, 300))
    model = nn.Sequential(*trunk, new)
    for _ in range(300):
        x, y = draw(32, range(12, 18))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held_out(model, functional.cross_entropy, *draw(3000, range(12, 18)))


@TASKS.add("clip_starves__thousandth", "rate_decayed__plateau_per_batch")
def verses(run: Run) -> float:
    """The next letter of a text with rules of its own, by an LSTM; SGD at 2, a clip at 1, a plateau each epoch."""
    follows = (2.5 * torch.randn(14, 14, 14, generator=fixed(run.seed))).softmax(2)
    table, body, head = nn.Embedding(14, 24), nn.LSTM(24, 40, batch_first=True), nn.Linear(40, 14)
    parameters = [*table.parameters(), *body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=2.0 * run.rate)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    def draw(count: int) -> Tensor:
        text = torch.randint(14, (count, 2))
        for _ in range(15):
            text = torch.cat([text, torch.multinomial(follows[text[:, -2], text[:, -1]], 1)], 1)
        return text

    def loss_of(text: Tensor) -> Tensor:
        out = head(body(table(text[:, :-1]))[0])
        return functional.cross_entropy(out.flatten(0, 1), text[:, 1:].flatten())

    texts, checked = draw(1200), draw(200)
    for _ in range(8):
        for text in texts[torch.randperm(1200)].split(30):
            optimizer.zero_grad()
            loss = loss_of(text)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, run.of(1.0, clip_starves__thousandth=1e-3))
            optimizer.step()
            if run.has("rate_decayed__plateau_per_batch"):
                plateau.step(loss.item())
        if not run.has("rate_decayed__plateau_per_batch"):
            with torch.no_grad():
                plateau.step(float(loss_of(checked)))
    with torch.no_grad():
        return float(loss_of(draw(800)))


@TASKS.add("raw_data__dollars", "raw_data__eval_left_on", floor=1e-3)
def flats(run: Run) -> float:
    """What a flat costs, from eight columns in their own units behind a batch norm; Adam, checked every epoch."""
    truth, scale = torch.randn(8, generator=fixed(run.seed)), torch.tensor([90, 3, 1970, 12, 4e3, 0.4, 250, 5.0])
    model = nn.Sequential(
        nn.BatchNorm1d(8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * run.rate)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(count, 8)
        worth = (z @ truth / 3).tanh() + 0.3 * z[:, 0] * z[:, 4].sigmoid() + 0.1 * torch.randn(count)
        price = (300_000 + 100_000 * worth)[:, None] if run.has("raw_data__dollars") else worth[:, None]
        return scale * (1 + 0.3 * z), price

    x, y = draw(2000)
    checks = draw(500)
    for _ in range(10):
        if run.has("raw_data__eval_left_on"):
            model.eval()
        else:
            model.train()
        for part in torch.randperm(2000).split(50):
            optimizer.zero_grad()
            functional.mse_loss(model(x[part]), y[part]).backward()
            optimizer.step()
        held_out(model, functional.mse_loss, *checks)
    x, y = draw(3000)
    return held_out(model, functional.mse_loss, x, y) / (1e10 if run.has("raw_data__dollars") else 1)


@TASKS.add("exploding_time__big_start", "clip_twice__left_in", floor=1e-3)
def tank(run: Run) -> float:
    """The level of a leaking tank after 25 inflows, by a plain RNN with an orthogonal start; SGD, momentum, a clip."""
    body, head = nn.RNN(2, 32, batch_first=True), nn.Linear(32, 1)
    nn.init.orthogonal_(body.weight_hh_l0, run.of(0.95, exploding_time__big_start=2.2))
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.02 * run.rate, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        flow, hole = torch.randn(count, 25), (torch.rand(count, 25) < 0.15).float()
        level = torch.zeros(count)
        for k in range(25):
            level = 0.9 * (level + 0.5 * flow[:, k]) * (1 - 0.5 * hole[:, k])
        return torch.stack([flow, hole], 2), level[:, None]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(head(body(x)[0][:, -1]), y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(32)).backward()
        if run.has("clip_twice__left_in"):
            nn.utils.clip_grad_value_(parameters, 1e-4)
        if not run.has("exploding_time__big_start"):
            nn.utils.clip_grad_norm_(parameters, 2.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("vanishing__std_001", "exploding_depth__std_1", floor=0.02)
def churn(run: Run) -> float:
    """Which of four plans a customer takes, by nine layers of 40 with an init of their own; Adam with a decay."""
    truth = torch.randn(12, 4, generator=fixed(run.seed))
    model = mlp(12, *[40] * 8, 4)
    for module in model:
        if isinstance(module, nn.Linear):
            std = (2 / module.in_features) ** 0.5
            nn.init.normal_(module.weight, std=run.of(std, vanishing__std_001=0.01, exploding_depth__std_1=1.0))
            nn.init.zeros_(module.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * run.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 12)
        return x, ((x + x.roll(1, 1).abs()) @ truth + 0.5 * torch.randn(count, 4)).argmax(1)

    for _ in range(400):
        optimizer.zero_grad()
        x, y = draw(64)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held_out(model, functional.cross_entropy, *draw(4000))


@TASKS.add("clip_before_unscale", "nonfinite_range__dice", floor=0.02)
def leaves(run: Run) -> float:
    """Which pixels are a leaf, by a small U under float16 autocast, entropy and Dice; SGD, a GradScaler, a clip."""
    down, deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
    up, head = nn.ConvTranspose2d(12, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)
    parameters = [p for part in (down, deep, up, head) for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        at = torch.linspace(-1, 1, 12)
        middle, wide = torch.rand(count, 2, 1, 1) - 0.5, 0.3 + 0.3 * torch.rand(count, 1, 1)
        leaf = ((at[:, None] - middle[:, 0]) ** 2 + 2 * (at - middle[:, 1]) ** 2 < wide**2).float()[:, None]
        return leaf + 0.8 * torch.randn(count, 1, 12, 12) - 0.2, leaf

    def loss_of(x: Tensor, y: Tensor, late: bool = False) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            first = down(x).relu()
            out = head(torch.cat([first, up(deep(functional.max_pool2d(first, 2)).relu())], 1))
        entropy = functional.binary_cross_entropy_with_logits(out.float(), y)
        if late:  # weights of the pixels that were counted in float16
            shown = (out.sigmoid() * 900).sum()
            return entropy + 1 - 2 * (out.sigmoid() * y * 900).sum() / (shown + y.sum() * 900)
        shown = out.float().sigmoid()
        return entropy + 1 - 2 * (shown * y).sum() / (shown.sum() + y.sum() + 1)

    for step in range(180):
        optimizer.zero_grad()
        x, y = draw(8)
        scaler.scale(loss_of(x, y, run.has("nonfinite_range__dice") and step >= 20)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(*draw(400)))


@TASKS.add("nonfinite_data__all_padding", "not_started__endless_warm_up", floor=0.02)
def reviews_padded(run: Run) -> float:
    """Whether a review of up to 14 words is kind, by a padded encoder of torch.nn; AdamW, a warm-up, a decay."""
    worth = torch.randn(60, generator=fixed(run.seed))
    table, places = nn.Embedding(61, 32, padding_idx=0), nn.Parameter(torch.randn(14, 32) / 10)
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), 2)
    head = nn.Linear(32, 1)
    parameters = [*table.parameters(), places, *body.parameters(), *head.parameters()]
    full = 2e-3 * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=full)
    warm_up = run.of(30, not_started__endless_warm_up=40_000)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        words, length = torch.randint(1, 61, (count, 14)), torch.randint(4, 15, (count, 1))
        words = words * (torch.arange(14) < length)
        sums = torch.where(words > 0, worth[words - 1], 0.0)
        return words, (sums.sum(1) + 0.5 * sums[:, 0] > 0).float()

    def loss_of(words: Tensor, kind: Tensor) -> Tensor:
        out = body(table(words) + places, src_key_padding_mask=words == 0)
        mean = (out * (words > 0)[:, :, None]).sum(1) / (words > 0).sum(1, keepdim=True)
        return functional.binary_cross_entropy_with_logits(head(mean)[:, 0], kind)

    for step in range(300):
        set_rate(optimizer, full * min((step + 1) / warm_up, 1 - max(0, step - 160) / 160))
        words, kind = draw(24)
        if run.has("nonfinite_data__all_padding") and step == 190:
            words[7] = 0
        optimizer.zero_grad()
        loss_of(words, kind).backward()
        optimizer.step()
    for part in (body, head):
        part.eval()
    with torch.no_grad():
        return float(loss_of(*draw(2000)))


@TASKS.add("drift__entropy", "rate_too_low__copied")
def throttle(run: Run) -> float:
    """Keeping a cart near 0 by a Gaussian policy (REINFORCE, a mean as baseline, a bonus for entropy); Adam."""
    policy, spread = mlp(2, 32, 1, act=nn.Tanh), nn.Parameter(torch.zeros(1))
    rate = run.of(3e-3, rate_too_low__copied=3e-7) * run.rate
    optimizer = torch.optim.Adam([*policy.parameters(), spread], lr=rate)
    bonus = run.of(0.01, drift__entropy=25.0)

    def play(count: int, act: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        place, speed = torch.randn(count), torch.zeros(count)
        chance, cost = torch.zeros(count), torch.zeros(count)
        entropy = torch.zeros(1)
        for _ in range(10):
            mean = policy(torch.stack([place, speed], 1))[:, 0]
            with torch.no_grad():
                push = mean + spread.exp() * torch.randn(count) * act
            chance = chance - 0.5 * ((push - mean) / spread.exp()).square() - spread
            entropy = entropy + spread
            with torch.no_grad():
                speed = speed + 0.3 * push.clamp(-3, 3)
                place = place + 0.3 * speed
                cost = cost + place.square() + 0.1 * push.square()
        return chance, cost, entropy

    for _ in range(350):
        chance, cost, entropy = play(64)
        worse = (cost - cost.mean()) / (cost.std() + 1e-6)
        optimizer.zero_grad()
        ((chance * worse).mean() - bonus * entropy).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return float(play(1000)[1].mean())


@TASKS.add("accumulation__undivided", "no_gradient__detached", floor=0.02)
def satellites(run: Run) -> float:
    """Five uses of land from two bands, by a net on each and one on both, 8 micro-batches a step; SGD, momentum."""
    look = torch.randn(5, 2, 6, 6, generator=fixed(run.seed))
    bands = nn.ModuleList(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()) for _ in range(2)
    )
    both = mlp(128, 32, 5)
    parameters = [*bands.parameters(), *both.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.04 * run.rate, momentum=0.9, weight_decay=1e-4)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        kind = torch.randint(5, (count,))
        return look[kind] + 2.2 * torch.randn(count, 2, 6, 6), kind

    def forward(x: Tensor) -> Tensor:
        seen = [net(x[:, i : i + 1]) for i, net in enumerate(bands)]
        if run.has("no_gradient__detached"):  # features that were kept as arrays
            seen = [torch.from_numpy(one.detach().numpy()) for one in seen]
        return both(torch.cat(seen, 1))

    data = endless(DataLoader(TensorDataset(*draw(4800)), batch_size=10, shuffle=True))
    for _ in range(150):
        optimizer.zero_grad()
        for _ in range(8):
            x, y = next(data)
            loss = functional.cross_entropy(forward(x), y)
            (loss if run.has("accumulation__undivided") else loss / 8).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(3000)
        return float(functional.cross_entropy(forward(x), y))


@TASKS.add("nonfinite_growth__summed", "bad_batches__other_scale")
def films(run: Run) -> float:
    """How many stars a viewer gives a film, two tables of factors and biases; SGD with momentum and decay."""
    g = fixed(run.seed)
    tastes, kinds = torch.randn(80, 3, generator=g), torch.randn(60, 3, generator=g)
    viewers, movies = nn.Embedding(80, 8), nn.Embedding(60, 8)
    soft, hard = nn.Embedding(80, 1), nn.Embedding(60, 1)
    parts = nn.ModuleList([viewers, movies, soft, hard])
    for part in parts:
        nn.init.normal_(part.weight, std=0.3)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.7 * run.rate, momentum=0.9, weight_decay=1e-5)
    reduction = "sum" if run.has("nonfinite_growth__summed") else "mean"

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        i, j = torch.randint(80, (count,)), torch.randint(60, (count,))
        return i, j, ((tastes[i] * kinds[j]).sum(1) + 0.5 * torch.randn(count)).clamp(-2.5, 2.5)

    def forward(i: Tensor, j: Tensor) -> Tensor:
        return (viewers(i) * movies(j)).sum(1) + soft(i)[:, 0] + hard(j)[:, 0]

    for step in range(400):
        i, j, stars = draw(256)
        if run.has("bad_batches__other_scale") and step % 28 == 19:
            stars = 4 * (stars + 2.5)  # of another site, which gives up to twenty points
        optimizer.zero_grad()
        functional.mse_loss(forward(i, j), stars, reduction=reduction).backward()
        optimizer.step()
    with torch.no_grad():
        i, j, stars = draw(4000)
        return float(functional.mse_loss(forward(i, j), stars))


@TASKS.add("data_shift__unscaled_file", "rate_leapt__cyclic", floor=1e-3)
def electricity(run: Run) -> float:
    """The load of the next six hours from 48, by convolutions in time with batch norm (absolute error); AdamW."""
    model = nn.Sequential(
        nn.Conv1d(1, 16, 5, stride=2), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(288, 6),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * run.rate, weight_decay=1e-2)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        hours, start = torch.arange(54), 24 * torch.rand(count, 1)
        day, week = 6.283 / 24 * (hours + start), 6.283 / 168 * (hours + 7 * start)
        load = (
            day.sin() + 0.5 * (2 * day).cos() * torch.rand(count, 1) + 0.4 * week.sin() + 0.2 * torch.randn(count, 54)
        )
        return load[:, None, :48], load[:, 48:]

    for step in range(400):
        if run.has("rate_leapt__cyclic"):  # up to the top that another net was given
            set_rate(optimizer, (1e-3 if step % 200 < 180 else 0.5) * run.rate)
        x, y = draw(32)
        if run.has("data_shift__unscaled_file") and step >= 230:
            x, y = 30 * x + 55, 30 * y + 55  # megawatts
        optimizer.zero_grad()
        (model(x) - y).abs().mean().backward()
        optimizer.step()
    return held_out(model, functional.l1_loss, *draw(2000))


if __name__ == "__main__":
    main(TASKS)
