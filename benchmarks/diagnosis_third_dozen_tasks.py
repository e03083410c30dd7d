"""Twelve more fields, losses and optimizers with two faults each: written before the diagnosis was asked once."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("bad_batches__missing_code", "raw_data__year", floor=0.02)
def rainfall(run: Run) -> float:
    """How much rain falls in an hour, many hours with none (Tweedie's deviance), from eight readings; AMSGrad."""
    truth = 0.5 * torch.randn(8, generator=fixed(run.seed))
    model = mlp(8, 48, 48, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 * run.rate, amsgrad=True)

    def mean_of(x: Tensor) -> Tensor:
        return ((x @ truth).sin() + 0.5 * x[:, 0]).exp()

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(count, 8)
        mean = mean_of(x)
        y = mean * torch.poisson(torch.full((count,), 2.0)) / 2
        if run.has("raw_data__year"):
            x = torch.cat([x[:, :7], 2000 + 10 * x[:, 7:]], 1)
        return x, y, mean

    def deviance(log_mean: Tensor, y: Tensor) -> Tensor:
        return 2 * ((0.5 * log_mean).exp() * 2 + 2 * y * (-0.5 * log_mean).exp()).mean()

    for step in range(400):
        x, y, _ = draw(64)
        if run.has("bad_batches__missing_code") and step % 37 == 30:
            y[::3] = 9999.0
        optimizer.zero_grad()
        deviance(model(x)[:, 0], y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y, mean = draw(4000)
        return float(deviance(model(x)[:, 0], y) - deviance(mean.log(), y))


@TASKS.add("no_gradient__argmax", "rate_zero__whole_epochs")
def dialects(run: Run) -> float:
    """Which of four dialects a line of 24 signs is in, by codes of signs and convolutions (focal loss); ASGD."""
    g = fixed(run.seed)
    habits = (1.5 * torch.randn(4, 12, 12, generator=g)).softmax(2)
    codes, mix = nn.Embedding(12, 6), nn.Embedding(6, 16)
    soft = nn.Linear(6, 16)
    body = nn.Sequential(nn.Conv1d(16, 32, 3), nn.ReLU(), nn.Conv1d(32, 32, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1))
    head = nn.Linear(32, 4)
    hard = run.has("no_gradient__argmax")
    parts = [codes, mix if hard else soft, body, head]
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.ASGD(parameters, lr=0.15 * run.rate, lambd=1e-5, t0=1e6)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, (lambda epoch: epoch // 5) if run.has("rate_zero__whole_epochs") else (lambda epoch: 0.9**epoch)
    )

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y, text = torch.randint(4, (count,)), torch.randint(12, (count, 24))
        for i in range(1, 24):
            text[:, i] = torch.multinomial(habits[y, text[:, i - 1]], 1)[:, 0]
        return text, y

    def loss_of(text: Tensor, y: Tensor) -> Tensor:
        code = codes(text)
        h = mix(code.argmax(2)) if hard else soft(code)
        right = functional.log_softmax(head(body(h.transpose(1, 2))[:, :, 0]), 1).gather(1, y[:, None])[:, 0]
        return -((1 - right.exp()).square() * right).mean()

    text, y = draw(2000)
    for _ in range(4):
        for part in torch.randperm(2000).split(25):
            optimizer.zero_grad()
            loss_of(text[part], y[part]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(1500)))


class Lamb(torch.optim.Optimizer):
    """Adam whose step on each tensor is as long as a share of its weights (You et al., 2020)."""

    def __init__(self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - first)
                state["square"].lerp_(p.grad.square(), 1 - second)
                root = (state["square"] / (1 - second ** state["step"])).sqrt() + group["eps"]
                step = state["mean"] / (1 - first ** state["step"]) / root
                p -= group["lr"] * p.norm().clamp(0.1, 10) / step.norm().clamp(min=1e-8) * step


class Averaged(torch.optim.AdamW):
    """AdamW with an average of the weights, which someone copies back into the model after each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        super().step()
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.copy_(0.995 * old + 0.005 * p)


@TASKS.add("update_rule__averaged", "data_shift__gravity", floor=1e-3)
def springs(run: Run) -> float:
    """How a chain of ten balls on springs speeds up, by messages between neighbours (log-cosh); LAMB."""
    edge, node = mlp(4, 32, 16), mlp(2 + 16, 32, 2)
    parameters = [*edge.parameters(), *node.parameters()]
    if run.has("update_rule__averaged"):
        optimizer: torch.optim.Optimizer = Averaged(parameters, lr=3e-3 * run.rate)
    else:
        optimizer = Lamb(parameters, lr=0.01 * run.rate)

    def pull(x: Tensor, gravity: float) -> Tensor:
        gap = x[:, 1:] - x[:, :-1]
        length = gap.norm(dim=2, keepdim=True)
        force = gap / length * (length - 1) * 2
        total = functional.pad(force, (0, 0, 0, 1)) - functional.pad(force, (0, 0, 1, 0))
        return total + torch.tensor([0.0, -gravity])

    def draw(count: int, gravity: float = 0.5) -> tuple[Tensor, Tensor]:
        line = torch.stack([torch.arange(10.0), torch.zeros(10)], 1)
        x = line + 0.3 * torch.randn(count, 10, 2)
        return x, pull(x, gravity)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        ahead, back = x[:, 1:] - x[:, :-1], x[:, :-1] - x[:, 1:]
        m, n = edge(torch.cat([ahead, back], 2)), edge(torch.cat([back, ahead], 2))
        heard = functional.pad(m, (0, 0, 0, 1)) + functional.pad(n, (0, 0, 1, 0))
        wrong = node(torch.cat([torch.zeros_like(x), heard], 2)) - y
        return (wrong + functional.softplus(-2 * wrong) - math.log(2)).mean()

    for step in range(350):
        gravity = -4.0 if run.has("data_shift__gravity") and step >= 220 else 0.5
        optimizer.zero_grad()
        loss_of(*draw(16, gravity)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(500)))


@TASKS.add("clip_starves__values", "rate_leapt__second_stage")
def gaps(run: Run) -> float:
    """Missing stretches of a two-tone series by a transformer of torch.nn (Charbonnier's loss); SGD, epochs."""
    inner = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    enter, body, leave = nn.Linear(2, 32), nn.TransformerEncoder(inner, 2, enable_nested_tensor=False), nn.Linear(32, 1)
    place = nn.Parameter(0.1 * torch.randn(30, 32))
    parameters = [place, *enter.parameters(), *body.parameters(), *leave.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.03 * run.rate, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        t, start = torch.arange(30.0), torch.randint(5, 18, (count, 1))
        x = (0.5 * t + 6.3 * torch.rand(count, 1)).sin() + 0.7 * (0.9 * t + 6.3 * torch.rand(count, 1)).cos()
        return x, ((t >= start) & (t < start + 6)).float()

    def loss_of(x: Tensor, gone: Tensor) -> Tensor:
        h = enter(torch.stack([x * (1 - gone), gone], 2)) + place
        wrong = (leave(body(h))[:, :, 0] - x) * gone
        return ((wrong.square() + 1e-4).sqrt() * gone).sum() / gone.sum()

    for step in range(400):
        if run.has("rate_leapt__second_stage") and step == 230:
            set_rate(optimizer, 3.0 * run.rate)
        optimizer.zero_grad()
        loss_of(*draw(24)).backward()
        if run.has("clip_starves__values"):
            nn.utils.clip_grad_value_(parameters, 1e-5)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(500)))


class Signum(torch.optim.Optimizer):
    """The sign of a mean of the gradients (Bernstein et al., 2018)."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p -= group["lr"] * mean.sign()


@TASKS.add("rate_too_high__copied", "drift__no_margin")
def duplicates(run: Run) -> float:
    """Whether two adverts are of one flat, by the distance of their codes (contrastive, a margin of 1); Signum."""
    views = torch.randn(2, 5, 16, generator=fixed(run.seed))
    model = mlp(16, 48, 48, 8)
    rate = run.of(1e-3, rate_too_high__copied=0.1) * run.rate
    optimizer = Signum(model.parameters(), lr=rate)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        a, b, alike = torch.randn(count, 5), torch.randn(count, 5), torch.rand(count) < 0.5
        b = torch.where(alike[:, None], a, b)
        return (a @ views[0]).tanh(), (b @ views[1]).tanh() + 0.1 * torch.randn(count, 16), alike

    def loss_of(a: Tensor, b: Tensor, alike: Tensor, margin: bool = True) -> Tensor:
        far = (model(a) - model(b)).square().sum(1)
        apart = (1 - (far + 1e-6).sqrt()).clamp(min=0).square() if margin else -far
        return torch.where(alike, far, apart).mean()

    for step in range(400):
        set_rate(optimizer, rate * cosine(step, 400))
        optimizer.zero_grad()
        loss_of(*draw(64), margin=not run.has("drift__no_margin")).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


class LowRank(nn.Module):
    """A frozen convolution and a change of it of rank 4."""

    def __init__(self, whole: nn.Conv2d, both_zero: bool) -> None:
        super().__init__()
        self.whole = whole.requires_grad_(False)
        self.down = nn.Conv2d(whole.in_channels, 4, 3, padding=1, bias=False)
        self.up = nn.Conv2d(4, whole.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        if both_zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + 2 * self.up(self.down(x))


@TASKS.add("not_started__both_zero", "accumulation__each_epoch")
def adapters(run: Run) -> float:
    """A frozen net of waves on pictures of 8 by 8, changed by low-rank convolutions, hinge loss; SGD, Nesterov."""
    g = fixed(run.seed)
    waves, turned = torch.randn(5, 8, 8, generator=g), torch.randn(5, 8, 8, generator=g)

    def draw(count: int, of: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count,))
        return (of[y] + 0.8 * torch.randn(count, 8, 8))[:, None], y

    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    head = nn.Linear(64, 5)

    def out(x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
        return head(functional.adaptive_avg_pool2d(two(one(x).relu()).relu(), 2).flatten(1))

    layers = (first, second, head)
    for _ in range(150):  # what was learned before, by hand, outside any optimizer
        x, y = draw(64, waves)
        parameters = [p for layer in layers for p in layer.parameters()]
        slopes = torch.autograd.grad(functional.cross_entropy(out(x, first, second), y), parameters)
        with torch.no_grad():
            for p, slope in zip(parameters, slopes, strict=True):
                p -= 0.2 * slope
    head.requires_grad_(False)
    one, two = (LowRank(layer, run.has("not_started__both_zero")) for layer in (first, second))
    changed = [p for layer in (one, two) for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(changed, lr=0.02 * run.rate, momentum=0.9, nesterov=True)
    x, y = draw(1600, turned)
    for _ in range(6):
        optimizer.zero_grad()
        for part in torch.randperm(1600).split(25):
            if not run.has("accumulation__each_epoch"):
                optimizer.zero_grad()
            functional.multi_margin_loss(out(x[part], one, two), y[part]).backward()
            optimizer.step()
    with torch.no_grad():
        x, y = draw(1500, turned)
        return float(functional.multi_margin_loss(out(x, one, two), y))


@TASKS.add("exploding_time__identity", "vanishing__scaled")
def reviews(run: Run) -> float:
    """How much praise a review of 24 words holds, by a recurrence that is written by hand; AdamW, amsgrad, a clip."""
    worth = torch.randn(30, generator=fixed(run.seed))
    table, enter = nn.Embedding(30, 16), nn.Linear(16, 32)
    again, leave = nn.Linear(32, 32, bias=False), nn.Linear(32, 1)
    nn.init.orthogonal_(again.weight)
    if run.has("exploding_time__identity"):
        again.weight.data.copy_(torch.eye(32) * 1.4 + 0.1 * torch.randn(32, 32))
    parameters = [p for part in (table, enter, again, leave) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3 * run.rate, amsgrad=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(30, (count, 24))
        return x, worth[x].sum(1, keepdim=True) / 5

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros(len(x), 32)
        for word in enter(table(x)).unbind(1):
            past = again(h) * run.of(1.0, vanishing__scaled=0.05)
            h = (past + word).relu() if run.has("exploding_time__identity") else (past + word).tanh()
        return functional.smooth_l1_loss(leave(h), y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(32)).backward()
        if not run.has("exploding_time__identity"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(1000)))


@TASKS.add("exploding_depth__unit_weights", "no_gradient__data", floor=0.01)
def unrolled(run: Run) -> float:
    """Sparse causes of mixed signals by ten steps of a solver whose matrices are learned (LISTA), L1; Adam."""
    mixes = torch.randn(16, 20, generator=fixed(run.seed)) / 4
    enter = nn.Linear(20, 40)
    steps = nn.ModuleList(nn.Linear(40, 40) for _ in range(8))
    leave = nn.Linear(40, 16)
    if run.has("exploding_depth__unit_weights"):
        for step in steps:
            step.weight.data = torch.randn(40, 40)
    optimizer = torch.optim.Adam([*enter.parameters(), *steps.parameters(), *leave.parameters()], lr=2e-3 * run.rate)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        causes = torch.randn(count, 16) * (torch.rand(count, 16) < 0.4)
        return causes @ mixes, causes

    def loss_of(x: Tensor, causes: Tensor) -> Tensor:
        first = h = enter(x)
        for place, step in enumerate(steps):
            h = functional.leaky_relu(step(h), 0.2) + (0 if run.has("exploding_depth__unit_weights") else h)
            if run.has("no_gradient__data") and place == 6:
                h, first = h.data, first.data  # to save memory
        return (leave(h + 0 * first) - causes).abs().mean() * 10

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(2000)))


@TASKS.add("clip_before_unscale", "nonfinite_range__sum")
def solar(run: Run) -> float:
    """The output of a roof over a day, from weather, by a net that halves and doubles time; float16, SGD, a scaler."""
    down = nn.Sequential(
        nn.Conv1d(3, 24, 5, stride=2, padding=2), nn.GELU(), nn.Conv1d(24, 24, 3, padding=1), nn.GELU()
    )
    up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(24, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 1, 1))
    model = nn.Sequential(down, up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        t = torch.arange(48.0) / 48
        sun = (math.pi * t).sin().expand(count, 48)
        cloud = functional.avg_pool1d(torch.rand(count, 1, 52), 5, 1)[:, 0]
        heat = sun + 0.3 * torch.randn(count, 48)
        return torch.stack([sun, cloud, heat], 1) * 2 - 1, sun * (1 - 0.8 * cloud.square()) * 2

    def loss_of(x: Tensor, y: Tensor, step: int = 0) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x)[:, 0]
            if run.has("nonfinite_range__sum"):  # an energy over the batch, as large as the weights allow
                energy = ((out * (4.0 + 0.2 * step)).square()).half().sum(dtype=torch.float16)
                return functional.mse_loss(out.float(), y) + 1e-7 * energy.float()
        return functional.mse_loss(out.float(), y)

    for step in range(300):
        optimizer.zero_grad()
        scaler.scale(loss_of(*draw(32), step)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(*draw(1000)))


@TASKS.add("clip_twice__hooks", "rate_too_low__of_another")
def clicks(run: Run) -> float:
    """Whether an advert is clicked, by hashed pairs of features beside a net (wide and deep); SGD, two groups."""
    g = fixed(run.seed)
    taste, crossed = torch.randn(20, generator=g), 2 * torch.randn(20, 20, generator=g)
    wide, table, deep = nn.Embedding(400, 1), nn.Embedding(20, 12), mlp(24, 48, 1)
    nn.init.zeros_(wide.weight)
    rate = run.of(0.2, rate_too_low__of_another=2e-5) * run.rate
    groups = [{"params": wide.parameters(), "lr": 10 * rate}, {"params": [*table.parameters(), *deep.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
    parameters = [*wide.parameters(), *table.parameters(), *deep.parameters()]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(20, (count, 2))
        score = taste[x[:, 0]] + crossed[x[:, 0], x[:, 1]] - 0.5
        return x, (torch.rand(count) < score.sigmoid()).float()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = wide(x[:, 0] * 20 + x[:, 1])[:, 0] + deep(table(x).flatten(1))[:, 0]
        return functional.binary_cross_entropy_with_logits(out, y)

    for _ in range(450):
        optimizer.zero_grad()
        loss_of(*draw(128)).backward()
        if run.has("clip_twice__hooks"):  # one in the trainer, and an older one that nobody knew of
            nn.utils.clip_grad_norm_(parameters, 1.0)
            nn.utils.clip_grad_norm_(parameters, 1e-3)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(4000)))


@TASKS.add("nonfinite_growth__rate", "rate_too_high__tenfold")
def glucose(run: Run) -> float:
    """The blood sugar of the next hour and how sure that is (Student's likelihood), by a GRU; Adamax, plateaus."""
    model, head = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 2)
    parameters = [*model.parameters(), *head.parameters()]
    rate = run.of(8e-3, rate_too_high__tenfold=0.6) * run.rate
    optimizer: torch.optim.Optimizer = torch.optim.Adamax(parameters, lr=rate)
    if run.has("nonfinite_growth__rate"):
        optimizer = torch.optim.SGD(parameters, lr=20.0 * run.rate)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        meal = (torch.rand(count, 30) < 0.1).float() * (1 + torch.rand(count, 30))
        level, seen = torch.zeros(count), []
        for i in range(30):
            level = 0.85 * level + meal[:, i] + 0.05 * torch.randn(count)
            seen.append(level)
        sugar = torch.stack(seen, 1)
        return torch.stack([sugar[:, :-1], meal[:, 1:]], 2), sugar[:, 1:]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        where, log_width = head(model(x)[0]).unbind(2)
        if run.has("nonfinite_growth__rate"):
            return (0.5 * ((y - where) * (-log_width).exp()).square() + log_width).mean()
        off = (y - where) * (-log_width).exp()
        return (2.5 * (1 + off.square() / 4).log() + log_width).mean()

    for step in range(400):
        optimizer.zero_grad()
        loss = loss_of(*draw(32))
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            schedule.step(loss.detach())
    with torch.no_grad():
        return float(loss_of(*draw(500))) + 3.0


@TASKS.add("nonfinite_data__constant_row", "rate_decayed__twice")
def sorting(run: Run) -> float:
    """The order of eight noisy numbers as a soft permutation (Sinkhorn), by a net on each; Adam, eps of 1e-4."""
    model = mlp(9, 64, 64, 8, act=nn.ELU)
    rate = 4e-3 * run.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1e-4)
    kinds = torch.optim.lr_scheduler.ExponentialLR
    schedules = [kinds(optimizer, run.of(0.995, rate_decayed__twice=0.9)) for _ in range(2)]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 8) * 10 ** torch.rand(count, 1)
        return x, x.argsort(1).argsort(1)

    def loss_of(x: Tensor, rank: Tensor) -> Tensor:
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        rows = torch.cat([x[:, :, None], x[:, None, :].expand(-1, 8, -1).sort(2).values], 2)
        scores = model(rows)
        for _ in range(6):
            scores = scores - scores.logsumexp(2, keepdim=True)
            scores = scores - scores.logsumexp(1, keepdim=True)
        return -scores.gather(2, rank[:, :, None]).mean()

    for step in range(400):
        x, rank = draw(32)
        if run.has("nonfinite_data__constant_row") and step == 150:
            x[5] = 3.0
        optimizer.zero_grad()
        loss_of(x, rank).backward()
        optimizer.step()
        for schedule in schedules[: run.of(1, rate_decayed__twice=2)]:
            schedule.step()
    with torch.no_grad():
        return float(loss_of(*draw(1500)))


if __name__ == "__main__":
    main(TASKS)
