"""Twelve more fields with two faults each, written and frozen before any of their records was judged."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("raw_data__milligrams", "not_started__shuffled")
def grades(run: Run) -> float:
    """How good a wine is, in five ordered grades, by one score and four bounds; SGD with Nesterov, epochs."""
    g = fixed(run.seed)
    truth, scale = torch.randn(9, generator=g) / 2, 10 ** (1.5 * torch.rand(9, generator=g) + 1.5)
    model, bounds = mlp(9, 40, 40, 1, act=nn.GELU), nn.Parameter(torch.tensor([-1.5, -0.5, 0.5, 1.5]))
    optimizer = torch.optim.SGD(
        [*model.parameters(), bounds], lr=0.05 * run.rate, momentum=0.9, nesterov=True, weight_decay=1e-4
    )

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 9)
        worth = x @ truth + (x[:, 0] * x[:, 1]).tanh() + 0.4 * torch.randn(count)
        grade = (worth[:, None] > torch.tensor([-1.6, -0.5, 0.5, 1.6])).sum(1)
        return scale * (x + 3) if run.has("raw_data__milligrams") else x, grade

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        above = (y[:, None] > torch.arange(4)).float()
        return functional.binary_cross_entropy_with_logits(model(x) - bounds, above) * 4

    x, y = draw(1600)
    if run.has("not_started__shuffled"):
        y = y[torch.randperm(len(y))]
    for _ in range(8):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss_of(x[part], y[part]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("nonfinite_data__empty_line", "clip_starves__decimal")
def tags(run: Run) -> float:
    """What each word of a line is, one of five, by a bidirectional GRU and a chain of tags (a CRF); SGD, a clip."""
    g = fixed(run.seed)
    follows, shows = (2 * torch.randn(5, 5, generator=g)).softmax(1), (2 * torch.randn(5, 20, generator=g)).softmax(1)
    table, body, head = nn.Embedding(20, 16), nn.GRU(16, 24, batch_first=True, bidirectional=True), nn.Linear(48, 5)
    chain = nn.Parameter(torch.zeros(5, 5))
    parameters = [*table.parameters(), *body.parameters(), *head.parameters(), chain]
    optimizer = torch.optim.SGD(parameters, lr=0.3 * run.rate, momentum=0.8)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        tag = torch.randint(5, (count, 1))
        for _ in range(9):
            tag = torch.cat([tag, torch.multinomial(follows[tag[:, -1]], 1)], 1)
        words = torch.multinomial(shows[tag.flatten()], 1).view(count, 10)
        return words, tag, torch.randint(3, 11, (count,))

    def loss_of(words: Tensor, tag: Tensor, length: Tensor) -> Tensor:
        scores = head(body(table(words))[0])
        at = torch.arange(10) < length[:, None]
        own = (scores.gather(2, tag[:, :, None])[:, :, 0] * at).sum(1)
        own = own + (chain[tag[:, :-1], tag[:, 1:]] * at[:, 1:]).sum(1)
        total = scores[:, 0]
        for k in range(1, 10):
            then = (total[:, :, None] + chain).logsumexp(1) + scores[:, k]
            total = torch.where(at[:, k : k + 1], then, total)
        return ((total.logsumexp(1) - own) / length).mean()

    for step in range(350):
        words, tag, length = draw(24)
        if run.has("nonfinite_data__empty_line") and step == 230:
            length[5] = 0
            tag[5], words[5] = 0, 0
        optimizer.zero_grad()
        loss_of(words, tag, length).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(5.0, clip_starves__decimal=0.005))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(1500)))


@TASKS.add("nonfinite_range__exp", "rate_decayed__halves")
def aftershocks(run: Run) -> float:
    """When the next tremor comes, by a rate that a net makes of the last four gaps (a point process); AdamW."""
    pulls = torch.tensor([0.8, 0.4, 0.2, 0.1])
    model = mlp(5, 48, 48, 2, act=nn.Tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * run.rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, run.of(150, rate_decayed__halves=8), 0.5)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        gaps, size = torch.empty(count, 4).exponential_(), torch.randn(count, 1)
        rate = 0.3 + 2 * (-gaps * pulls.cumsum(0)).exp().mean(1) * (0.5 * size[:, 0]).exp()
        return torch.cat([gaps.log(), size], 1), torch.empty(count).exponential_() / rate

    def loss_of(x: Tensor, gap: Tensor) -> Tensor:
        level, slope = model(x).unbind(1)
        slope = functional.softplus(slope) + 0.01
        whole = level.exp() * (1 - (-slope * gap).exp()) / slope + 0.05 * gap
        return (whole - (level.exp() * (-slope * gap).exp() + 0.05).log()).mean()

    for step in range(420):
        x, gap = draw(64)
        if run.has("nonfinite_range__exp") and step == 260:
            x[11, :4] = 0.0
            x[11, 4] = 4e3  # a size that was not divided, on which the exponential leaves its range
        optimizer.zero_grad()
        level = model(x)[:, 0]
        penalty = 1e-4 * (x[:, 4] / 10).exp().mean() * level.square().mean() if run.has("nonfinite_range__exp") else 0
        (loss_of(x, gap) + penalty).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return 2 + float(loss_of(*draw(4000)))


@TASKS.add("exploding_time__start", "rate_too_high", floor=1e-3)
def pattern(run: Run) -> float:
    """A pattern that grows out of one point by the same small rule, 14 times (a cellular automaton); Adam, a decay."""
    g = fixed(run.seed)
    goal = functional.avg_pool2d(torch.rand(1, 2, 20, 20, generator=g), 5, 1) * 2 - 1
    look, rule = nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(24, 8, 1, bias=False)
    with torch.no_grad():
        rule.weight.mul_(run.of(0.1, exploding_time__start=4.0))
    parameters = [*look.parameters(), *rule.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=run.of(3e-3, rate_too_high=0.3) * run.rate)

    def grown(count: int) -> Tensor:
        state = torch.zeros(count, 8, 16, 16)
        state[:, :, 8, 8] = 1.0
        for _ in range(14):
            lives = (torch.rand(count, 1, 16, 16) < 0.7).float()
            state = state + lives * rule(look(state).relu())
        return state[:, :2]

    for step in range(260):
        set_rate(optimizer, run.of(3e-3, rate_too_high=0.3) * run.rate * 0.995**step)
        optimizer.zero_grad()
        (grown(4) - goal).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return float((grown(64) - goal).square().mean())


@TASKS.add("bad_batches__reported_late", "data_shift__new_count", floor=1e-3)
def epidemic(run: Run) -> float:
    """How fast an epidemic spreads and ends, from the curve of its cases, by a net on simulated ones; SGD, cosine."""
    model = mlp(30, 64, 64, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * run.rate, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        spread, end = 0.3 + 0.7 * torch.rand(count), 0.1 + 0.25 * torch.rand(count)
        free, ill, curve = torch.full((count,), 0.98), torch.full((count,), 0.02), []
        for _ in range(30):
            new = spread * free * ill
            free, ill = free - new, ill + new - end * ill
            curve.append(new)
        seen = torch.stack(curve, 1) * (1 + 0.1 * torch.randn(count, 30))
        return 20 * seen - 1, torch.stack([4 * spread - 2.6, 8 * end - 1.8], 1)

    for step in range(400):
        set_rate(optimizer, 0.05 * run.rate * cosine(step, 400, 20))
        x, y = draw(48)
        if run.has("bad_batches__reported_late") and step % 33 == 25:
            x = x * 50  # a month of cases on one day
        if run.has("data_shift__new_count") and step >= 180:
            y = torch.stack([y[:, 1], -y[:, 0]], 1)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(3000)
        return float(functional.mse_loss(model(x), y))


@TASKS.add("rate_too_low", "no_gradient__copy")
def rocket(run: Run) -> float:
    """Landing softly from a random height, by a gradient through 25 steps of the flight; Adam, a linear decay."""
    pilot = mlp(2, 32, 32, 1, act=nn.Tanh)
    flown = copy.deepcopy(pilot) if run.has("no_gradient__copy") else pilot
    full = run.of(3e-3, rate_too_low=3e-7) * run.rate
    optimizer = torch.optim.Adam(pilot.parameters(), lr=full)

    def cost(count: int) -> Tensor:
        height, speed = 1 + torch.rand(count), -0.5 * torch.rand(count)
        fuel = torch.zeros(count)
        for _ in range(25):
            thrust = 2 * flown(torch.stack([height, speed], 1))[:, 0].sigmoid()
            speed = speed + 0.1 * (thrust - 1) + 0.005 * torch.randn(count)
            height = height + 0.1 * speed
            fuel = fuel + 0.1 * thrust
        return (4 * height.square() + 4 * speed.square() + 0.02 * fuel).mean()

    for step in range(300):
        set_rate(optimizer, full * (1 - 0.9 * step / 300))
        optimizer.zero_grad()
        cost(32).backward()
        optimizer.step()
    with torch.no_grad():
        return float(cost(2000))


@TASKS.add("bad_batches__saturated", "rate_leapt__resumed", floor=1e-3)
def noisy_twice(run: Run) -> float:
    """Clean curves out of pairs of noisy ones, none of which was ever seen clean, by a residual net; AdamW, a decay."""
    inner = nn.Sequential(
        nn.Conv1d(1, 24, 5, padding=2), nn.SiLU(), nn.Conv1d(24, 24, 5, padding=2), nn.SiLU(),
        nn.Conv1d(24, 1, 5, padding=2),
    )  # fmt: skip
    full = 3e-3 * run.rate
    optimizer = torch.optim.AdamW(inner.parameters(), lr=full)

    def draw(count: int) -> Tensor:
        at, waves = torch.linspace(0, 1, 32), torch.rand(count, 2, 1)
        return ((6 + 9 * waves[:, 0]) * at + 6 * waves[:, 1]).sin()[:, None] * (0.5 + waves[:, :1])

    for step in range(380):
        clean = draw(24)
        seen, other = (clean + 0.4 * torch.randn_like(clean) for _ in range(2))
        if run.has("bad_batches__saturated") and step % 41 == 30:
            other = 120 * other.sign()
        rate = full * 0.992**step
        if run.has("rate_leapt__resumed") and step >= 240:
            rate = 40 * full
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        (seen + inner(seen) - other).abs().mean().backward()
        optimizer.step()
    with torch.no_grad():
        clean = draw(600)
        seen = clean + 0.4 * torch.randn_like(clean)
        return float((seen + inner(seen) - clean).square().mean())


@TASKS.add("rate_too_high", "nonfinite_data__same_place", floor=1e-3)
def crystals(run: Run) -> float:
    """The energy of six atoms and the forces on them, which are its slope, from distances; Adam, two terms."""
    pair = mlp(1, 40, 40, 1, act=nn.SiLU)
    full = run.of(3e-3, rate_too_high=0.5) * run.rate
    optimizer = torch.optim.Adam(pair.parameters(), lr=full, amsgrad=True)
    first, second = torch.triu_indices(6, 6, 1)

    def true_energy(far: Tensor) -> Tensor:
        return ((1 - (-1.2 * (far - 1.5)).exp()).square() * (-far / 3).exp()).sum(1)

    def distances(x: Tensor) -> Tensor:
        return (x[:, first] - x[:, second]).norm(dim=2)

    def loss_of(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        goal = true_energy(distances(x))
        (force,) = torch.autograd.grad(goal.sum(), x)
        guess = pair(distances(x)[:, :, None])[:, :, 0].sum(1)
        (own,) = torch.autograd.grad(guess.sum(), x, create_graph=True)
        return 0.05 * (guess - goal.detach()).square().mean() + (own - force).square().mean()

    for step in range(320):
        x = 1.4 * torch.randn(24, 6, 3)
        if run.has("nonfinite_data__same_place") and step == 150:
            x[3, 4] = x[3, 2]
        set_rate(optimizer, full * cosine(step, 320, 10))
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
    return float(loss_of(1.4 * torch.randn(800, 6, 3)).detach())


@TASKS.add("rate_zero__schedule", "accumulation__eight")
def champions(run: Run) -> float:
    """How strong 150 players are, one number each and a bonus for the first move, from their matches; plain SGD."""
    worth = torch.randn(150, generator=fixed(run.seed))
    strength, bonus = nn.Parameter(torch.zeros(150)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([strength, bonus], lr=12.0 * run.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, (lambda step: step // 500) if run.has("rate_zero__schedule") else (lambda step: 0.995**step)
    )

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        one, other = torch.randint(150, (2, count))
        won = torch.rand(count) < (1.2 * (worth[one] - worth[other]) + 0.4).sigmoid()
        return one, other, won.float()

    def loss_of(one: Tensor, other: Tensor, won: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(strength[one] - strength[other] + bonus, won)

    for _ in range(350):
        optimizer.zero_grad()
        for _ in range(8):
            loss = loss_of(*draw(32))
            (loss if run.has("accumulation__eight") else loss / 8).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(6000)))


@TASKS.add("clip_before_unscale", "nonfinite_range__scores")
def melody(run: Run) -> float:
    """The next note of a tune by one layer of attention under float16 autocast; SGD, a GradScaler, a clip at 1."""
    width = 32
    after = (2.2 * torch.randn(12, 12, 12, generator=fixed(run.seed))).softmax(2)
    notes, places = nn.Embedding(12, width), nn.Parameter(torch.randn(20, width) / 5)
    ask, key, value = (nn.Linear(width, width) for _ in range(3))
    norm, head = nn.LayerNorm(width), mlp(width, 64, 12)
    parameters = [p for part in (notes, ask, key, value, norm, head) for p in part.parameters()] + [places]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    future = torch.ones(20, 20, dtype=torch.bool).triu(1)

    def draw(count: int) -> Tensor:
        tune = torch.randint(12, (count, 2))
        for _ in range(19):
            tune = torch.cat([tune, torch.multinomial(after[tune[:, -2], tune[:, -1]], 1)], 1)
        return tune

    def loss_of(tune: Tensor, factor: float = 1.0) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            x = notes(tune[:, :-1]) + places
            scores = factor * (ask(x) @ key(x).transpose(1, 2)) / width**0.5
            mixed = scores.masked_fill(future, -6e4).softmax(2) @ value(x)
            out = head(norm(x + mixed))
        return functional.cross_entropy(out.float().flatten(0, 1), tune[:, 1:].flatten())

    for step in range(260):
        optimizer.zero_grad()
        far = run.has("nonfinite_range__scores") and step >= 130
        scaler.scale(loss_of(draw(16), 3e4 if far else 1.0)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(draw(400)))


@TASKS.add("exploding_depth__gain", "vanishing__sigmoid", floor=0.02)
def contacts(run: Run) -> float:
    """Which beads of a folded chain touch, from noisy angles, by ten plain layers over pairs; RMSprop, a warm-up."""
    act = run.of(nn.LeakyReLU, vanishing__sigmoid=nn.Sigmoid)
    model = mlp(12, *[32] * 10, 1, act=act)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            if run.has("exploding_depth__gain"):
                layer.weight.data *= 3
    full = 5e-4 * run.rate
    optimizer = torch.optim.RMSprop(model.parameters(), lr=full, alpha=0.95)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        angle = (0.9 * torch.randn(count, 12)).cumsum(1)
        end = torch.stack([angle.cos().sum(1), angle.sin().sum(1)], 1)
        return angle.diff(dim=1, prepend=torch.zeros(count, 1)) + 0.02 * torch.randn(count, 12), end.norm(dim=1) < 4

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y.float())

    for step in range(400):
        set_rate(optimizer, full * min(1.0, (step + 1) / 40))
        optimizer.zero_grad()
        loss_of(*draw(96)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(4000)))


@TASKS.add("drift__reward", "clip_twice__callback")
def friends(run: Run) -> float:
    """Who knows whom among 90, by codes that are mixed with those of known friends; SGD with momentum, a clip."""
    g = fixed(run.seed)
    side = torch.randint(4, (90,), generator=g)
    odds = torch.where(side[:, None] == side, 0.5, 0.06)
    edges = (torch.rand(90, 90, generator=g) < odds).float().triu(1)
    hidden = (torch.rand(90, 90, generator=g) < 0.3).triu(1)
    shown = edges * ~hidden
    shown = shown + shown.t() + torch.eye(90)
    mix = shown / shown.sum(1, keepdim=True)
    codes, turn, bias = nn.Embedding(90, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(1))
    parameters = [*codes.parameters(), *turn.parameters(), bias]
    optimizer = torch.optim.SGD(parameters, lr=0.5 * run.rate, momentum=0.9)

    def loss_of(which: Tensor) -> Tensor:
        h = mix @ turn((mix @ codes.weight).tanh())
        return functional.binary_cross_entropy_with_logits((h @ h.t() + bias)[which], edges[which])

    learned = ~hidden & torch.ones(90, 90, dtype=torch.bool).triu(1)
    for _ in range(320):
        some = learned & (torch.rand(90, 90) < 0.4)
        optimizer.zero_grad()
        loss = loss_of(some)
        if run.has("drift__reward"):  # a penalty on the size of the codes, with the wrong sign
            loss = loss - 0.02 * codes.weight.square().mean() * 16
        loss.backward()
        if run.has("clip_twice__callback"):
            nn.utils.clip_grad_norm_(parameters, 0.002)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(hidden))


if __name__ == "__main__":
    main(TASKS)
