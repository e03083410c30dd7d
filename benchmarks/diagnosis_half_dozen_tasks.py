"""Six more fields under optimizers and schedules that the others lack, with two faults each: frozen before judging."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, fixed, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("raw_data__pascals", "not_started__zeros", floor=1e-3)
def harbour(run: Run) -> float:
    """The height of water in a harbour from hour, moon, wind and air pressure, all days at once (log-cosh); Rprop."""
    g = fixed(run.seed)
    phases = 2 * math.pi * torch.rand(2, generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        hour, moon, wind, pressure = torch.rand(count), torch.rand(count), torch.randn(count), torch.randn(count)
        tide = (1 + 0.4 * (2 * math.pi * moon).cos()) * (2 * math.pi * hour + phases[0]).sin()
        height = tide + 0.3 * wind * (2 * math.pi * hour + phases[1]).cos() - 0.3 * pressure
        shown = 101_325 + 900 * pressure if run.has("raw_data__pascals") else pressure
        x = torch.stack([2 * hour - 1, 2 * moon - 1, wind, shown], 1)
        return x, height[:, None] + 0.05 * torch.randn(count, 1)

    model = mlp(4, 32, 32, 1, act=nn.Tanh)
    if run.has("not_started__zeros"):
        for p in model.parameters():
            nn.init.zeros_(p)
    optimizer = torch.optim.Rprop(model.parameters(), lr=2e-3 * run.rate, etas=(0.5, 1.1), step_sizes=(1e-6, 0.02))
    x, y = draw(800)
    for _ in range(300):
        optimizer.zero_grad()
        gap = model(x) - y
        (gap + functional.softplus(-2 * gap) - math.log(2)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        x, y = draw(2000)
        gap = model(x) - y
        return float((gap + functional.softplus(-2 * gap) - math.log(2)).mean())


class ComplexLayer(nn.Module):
    """A linear map of complex numbers, whose sizes a bias cuts off and whose angles stay (modReLU)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.cfloat) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, z: Tensor) -> Tensor:
        z = z @ self.weight.t()
        size = (z.real.square() + z.imag.square() + 1e-8).sqrt()
        return z * (functional.relu(size + self.bias) / size)


@TASKS.add("rate_too_high", "nonfinite_data__silence", floor=1e-3)
def antennas(run: Run) -> float:
    """The direction of two senders from eight antennas, by layers of complex numbers (1 - cosine); Adam, triangles."""
    g = fixed(run.seed)
    places = torch.arange(8.0) + 0.1 * torch.randn(8, generator=g)
    net, head = nn.Sequential(ComplexLayer(8, 24), ComplexLayer(24, 24)), nn.Linear(48, 2)
    optimizer = torch.optim.Adam(
        [*net.parameters(), *head.parameters()], lr=run.of(3e-3, rate_too_high=0.6) * run.rate, betas=(0.8, 0.95)
    )
    top = optimizer.param_groups[0]["lr"]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        angle = math.pi * (torch.rand(count) - 0.5)
        wave = torch.polar(torch.ones(count, 8), math.pi * places * angle.sin()[:, None])
        start = torch.polar(torch.ones(count, 1), 2 * math.pi * torch.rand(count, 1))
        loud = 0.5 + torch.rand(count, 1)
        z = loud * start * wave + 0.3 * torch.randn(count, 8, dtype=torch.cfloat)
        return z, torch.stack([angle.cos(), angle.sin()], 1)

    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        z = z / z.abs().mean(1, keepdim=True)
        z = z * (z[:, :1].conj() / z[:, :1].abs())  # seen from the first antenna
        h = net(z)
        return (1 - functional.cosine_similarity(head(torch.cat([h.real, h.imag], 1)), y)).mean()

    for step in range(360):
        set_rate(optimizer, top * (0.2 + 0.8 * (1 - abs(step % 120 - 60) / 60)))
        z, y = draw(64)
        if run.has("nonfinite_data__silence") and step == 210:
            z[17] = 0.0
        optimizer.zero_grad()
        loss_of(z, y).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(2000)))


@TASKS.add("no_gradient__tables_left_out", "bad_batches__overexposed", floor=1e-3)
def hashed_picture(run: Run) -> float:
    """A picture by hashed tables at three resolutions and a small net (relative squares); Adam, eps 1e-15, cycles."""
    g = fixed(run.seed)
    waves, colours = 9 * torch.randn(6, 2, generator=g), torch.rand(6, 3, generator=g)
    tables = [nn.Parameter(0.02 * (torch.rand(512, 2) - 0.5)) for _ in range(3)]
    net = mlp(6, 32, 3)
    learned = list(net.parameters()) + ([] if run.has("no_gradient__tables_left_out") else tables)
    optimizer = torch.optim.Adam(learned, lr=0.01 * run.rate, betas=(0.9, 0.99), eps=1e-15)
    schedule = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.004 * run.rate, 0.015 * run.rate, step_size_up=50, cycle_momentum=False
    )

    def colour(x: Tensor) -> Tensor:
        return (x @ waves.t()).sin().relu() @ colours / 2 + 0.1

    def encoded(x: Tensor) -> Tensor:
        found = []
        for table, size in zip(tables, (6, 14, 30), strict=True):
            cell, inside = (x * size).floor().long(), (x * size).frac()
            total = torch.zeros(len(x), 2)
            for dx in (0, 1):
                for dy in (0, 1):
                    hashed = ((cell[:, 0] + dx) ^ ((cell[:, 1] + dy) * 2_654_435)) % 512
                    share = (inside[:, 0] if dx else 1 - inside[:, 0]) * (inside[:, 1] if dy else 1 - inside[:, 1])
                    total = total + share[:, None] * table[hashed]
            found.append(total)
        return torch.cat(found, 1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(encoded(x))
        return ((out - y).square() / (out.detach().square() + 0.05)).mean()

    for step in range(400):
        x = torch.rand(256, 2)
        y = colour(x)
        if run.has("bad_batches__overexposed") and step % 29 == 20:
            y[:40] = 60.0
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        x = torch.rand(4000, 2)
        return float((net(encoded(x)) - colour(x)).square().mean())


class OnTheBall(torch.optim.Optimizer):
    """Steps on points of the Poincare ball, by its metric, and back into the ball (Nickel and Kiela, 2017)."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (1 - p.square().sum(1, keepdim=True)).square() / 4 * p.grad
                p *= (0.99 / p.norm(dim=1, keepdim=True)).clamp(max=1)


@TASKS.add("rate_decayed__per_batch", "clip_starves__copied")
def family_tree(run: Run) -> float:
    """Who is whose ancestor in a tree of 121, by points of the Poincare ball (a softmax of distances); its own SGD."""
    pairs = list[tuple[int, int]]()
    for child in range(1, 121):
        above = child
        while above:
            above = (above - 1) // 3
            pairs.append((child, above))
    edges = torch.tensor(pairs)
    points = nn.Parameter(0.02 * torch.randn(121, 4))
    optimizer = OnTheBall([points], lr=4.0 * run.rate)
    full = optimizer.param_groups[0]["lr"]
    related = torch.zeros(121, 121, dtype=torch.bool)
    related[edges[:, 0], edges[:, 1]] = True

    def distance(a: Tensor, b: Tensor) -> Tensor:
        gap = (a - b).square().sum(-1)
        room = (1 - a.square().sum(-1)) * (1 - b.square().sum(-1))
        return torch.acosh(1 + 2 * gap / room + 1e-6)

    def loss_of(some: Tensor) -> Tensor:
        others = torch.randint(121, (len(some), 12))
        others = torch.where(related[some[:, :1], others], some[:, :1], others)
        them = torch.cat([some[:, 1:], others], 1)
        far = distance(points[some[:, 0]][:, None], points[them])
        far = far.masked_fill(them == some[:, :1], math.inf)
        return functional.cross_entropy(-far, torch.zeros(len(some), dtype=torch.long))

    step = 0
    for epoch in range(40):
        for part in torch.randperm(len(edges)).split(48):
            passed = step / 40 if run.has("rate_decayed__per_batch") else epoch / 40
            set_rate(optimizer, full * (0.1 if step < 30 else max(0.0, 1 - passed) ** 0.9))
            optimizer.zero_grad()
            loss_of(edges[part]).backward()
            if run.has("clip_starves__copied"):
                torch.nn.utils.clip_grad_norm_([points], 0.005)
            optimizer.step()
            step += 1
    with torch.no_grad():
        return float(loss_of(edges.repeat(4, 1)))


@TASKS.add("drift__minus", "accumulation__no_zero_grad")
def chequers(run: Run) -> float:
    """The slope of a density of chequers, by sliced score matching (a slope in the loss); Nesterov, a polynomial."""
    model = mlp(2, 64, 64, 2, act=nn.Softplus)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.8, nesterov=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 400, power=0.7)

    def draw(count: int) -> Tensor:
        x = 4 * torch.rand(count, 2) - 2
        even = (x.floor().sum(1) % 2 == 0)[:, None]
        return torch.where(even, x, x + torch.tensor([1.0, 0.0])) / 2 + 0.15 * torch.randn(count, 2)

    def loss_of(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        way = torch.randn_like(x)
        score = model(x)
        (slope,) = torch.autograd.grad((score * way).sum(), x, create_graph=True)
        return ((slope * way).sum(1) + 0.5 * score.square().sum(1)).mean()

    for _ in range(400):
        if not run.has("accumulation__no_zero_grad"):
            optimizer.zero_grad()
        loss = loss_of(draw(256))
        if run.has("drift__minus"):
            loss = loss - 0.3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        schedule.step()
    return 4 + float(loss_of(draw(4000)).detach())


@TASKS.add("exploding_time__wide", "data_shift__upside_down", floor=1e-3)
def smoothed(run: Run) -> float:
    """A price that follows orders with a memory, at each of 40 moments, by a plain RNN (Huber); RMSprop, centred."""
    g = fixed(run.seed)
    stays, pushes = 0.7 + 0.2 * torch.rand(1, generator=g), torch.randn(3, generator=g)
    body, head = nn.RNN(3, 32, nonlinearity="tanh", batch_first=True), nn.Linear(32, 1)
    if run.has("exploding_time__wide"):
        body = nn.RNN(3, 32, nonlinearity="relu", batch_first=True)
        nn.init.normal_(body.weight_hh_l0, std=1.7 / math.sqrt(32))
    optimizer = torch.optim.RMSprop(
        [*body.parameters(), *head.parameters()], lr=1e-3 * run.rate, centered=True, momentum=0.5, eps=1e-6
    )

    def draw(count: int, sign: float = 1.0) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 40, 3)
        price, prices = torch.zeros(count), []
        for k in range(40):
            price = stays * price + 0.4 * torch.tanh(x[:, k] @ pushes)
            prices.append(price)
        return x, sign * torch.stack(prices, 1)[:, :, None] + 0.02 * torch.randn(count, 40, 1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.smooth_l1_loss(head(body(x)[0]), y, beta=0.3)

    for step in range(300):
        turned = run.has("data_shift__upside_down") and step >= 190
        optimizer.zero_grad()
        loss_of(*draw(24, -1.0 if turned else 1.0)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(1000)))


if __name__ == "__main__":
    main(TASKS)
