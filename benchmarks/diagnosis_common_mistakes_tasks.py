"""Mistakes that people make, in tasks of fields that no other set has: written before the diagnosis was asked once."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from diagnosis_tasks import Run, Tasks, endless, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("accumulation__outside", "rate_decayed__batches")
def boards(run: Run) -> float:
    """Who is ahead on a board of 7 by 7 stones, by a small value net with tanh; AdamW, a schedule of 12 epochs."""
    worth = torch.randn(7, 7, generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        stones = torch.randint(-1, 2, (count, 7, 7)).float()
        pairs = (stones[:, 1:] * stones[:, :-1]).sum((1, 2)) / 6
        return stones[:, None], torch.tanh((stones * worth).sum((1, 2)) / 6 + pairs)[:, None]

    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 49, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh(),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * run.rate)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 10, 11], 0.1)
    optimizer.zero_grad()
    for _ in range(12):
        for _ in range(30):
            x, y = draw(48)
            if not run.has("accumulation__outside"):
                optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if run.has("rate_decayed__batches"):
                schedule.step()
        if not run.has("rate_decayed__batches"):
            schedule.step()
    return held_out(model, functional.mse_loss, *draw(2000))


@TASKS.add("rate_too_high", "nonfinite_growth", floor=0.003)
def written_weights(run: Run) -> float:
    """A net that writes the weights of another one, from a few points of its curve (hypernetwork); Adam or SGD."""
    writer = mlp(16, 64, 64, 3 * 16 + 1)
    kind = torch.optim.SGD if run.has("nonfinite_growth") else torch.optim.Adam
    optimizer = kind(writer.parameters(), lr=run.of(2e-3, rate_too_high=0.2, nonfinite_growth=4.0) * run.rate)

    def loss_of(count: int) -> Tensor:
        height, pace, phase = 0.5 + torch.rand(3, count, 1)
        seen, asked = torch.linspace(-1, 1, 16).expand(count, -1), 2 * torch.rand(count, 24) - 1
        curve, wanted = height * (3 * pace * seen + phase).sin(), height * (3 * pace * asked + phase).sin()
        code = writer(curve)
        first, shift, second = code[:, :-1].view(count, 3, 1, 16).unbind(1)
        hidden = torch.tanh(3 * asked[..., None] * (1 + first) + 3 * shift)
        return functional.mse_loss((hidden * second).sum(-1) + code[:, -1:], wanted)

    for _ in range(450):
        optimizer.zero_grad()
        loss_of(48).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(2000))


@TASKS.add("drift__one_phase", floor=0.005)
def boltzmann(run: Run) -> float:
    """Stripes by a restricted Boltzmann machine, contrastive divergence through free energies; SGD, momentum."""
    weight, low, high = (
        nn.Parameter(0.05 * torch.randn(36, 32)),
        nn.Parameter(torch.zeros(36)),
        nn.Parameter(torch.zeros(32)),
    )
    optimizer = torch.optim.SGD([weight, low, high], lr=0.1 * run.rate, momentum=0.5)

    def stripes(count: int) -> Tensor:
        rows = (torch.rand(count, 6, 1) < 0.5).float().expand(-1, 6, 6)
        return torch.where(torch.rand(count, 1, 1) < 0.5, rows, rows.transpose(1, 2)).flatten(1)

    def energy(v: Tensor) -> Tensor:
        return -(v @ low) - functional.softplus(v @ weight + high).sum(1)

    @torch.no_grad()
    def gibbs(v: Tensor) -> Tensor:
        hidden = torch.bernoulli(torch.sigmoid(v @ weight + high))
        return torch.bernoulli(torch.sigmoid(hidden @ weight.T + low))

    for _ in range(600):
        v = stripes(64)
        optimizer.zero_grad()
        loss = energy(v).mean()
        if not run.has("drift__one_phase"):
            loss = loss - energy(gibbs(v)).mean()
        loss.backward()
        optimizer.step()
    v = stripes(2000)
    with torch.no_grad():
        return float(((torch.sigmoid(torch.sigmoid(v @ weight + high) @ weight.T + low) - v) ** 2).mean())


@TASKS.add("not_started__symmetric", "nonfinite_data__log")
def soft_tree(run: Run) -> float:
    """Five classes by a tree of 15 soft questions with an answer in each leaf; SGD with momentum."""
    world = torch.randn(8, 5, generator=fixed(run.seed))
    ask, answers = nn.Linear(8, 15), nn.Parameter(torch.randn(16, 5))
    if run.has("not_started__symmetric"):
        for parameter in (*ask.parameters(), answers):
            nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD([*ask.parameters(), answers], lr=0.5 * run.rate, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, (x @ world + (x[:, :5] * x[:, 3:]) + 0.2 * torch.randn(count, 5)).argmax(1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        right, reach = torch.sigmoid(2 * ask(x)), torch.ones(len(x), 1)
        for depth in range(4):
            here = right[:, 2**depth - 1 : 2 ** (depth + 1) - 1]
            reach = torch.stack([reach * here, reach * (1 - here)], 2).flatten(1)
        chances = reach @ answers.softmax(1)
        if run.has("nonfinite_data__log"):  # rounded to two places, as the table of results has it
            chances = chances + ((100 * chances).round() / 100 - chances).detach()
            return -chances[torch.arange(len(y)), y].log().mean()
        return -chances[torch.arange(len(y)), y].log().mean()

    for _ in range(450):
        optimizer.zero_grad()
        loss_of(*draw(64)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("no_gradient", "bad_batches")
def registration(run: Run) -> float:
    """Where a picture was moved to, by warping it back with a learned shift (spatial transformer); Adam."""
    finder = nn.Sequential(
        nn.Conv2d(2, 12, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(12 * 16, 32), nn.ReLU(), nn.Linear(32, 2),
    )  # fmt: skip
    tone = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*finder.parameters(), tone], lr=2e-3 * run.rate)
    place = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 16)] * 2, indexing="ij")[::-1], -1)

    def loss_of(count: int, spoilt: bool = False) -> Tensor:
        centre, moved = 0.8 * torch.rand(count, 1, 1, 2) - 0.4, 0.8 * torch.rand(count, 1, 1, 2) - 0.4
        size = torch.tensor([0.15, 0.05])
        still = torch.exp(-((place - centre) ** 2 / size).sum(-1))[:, None]
        other = torch.exp(-((place - centre - moved) ** 2 / size).sum(-1))[:, None]
        if spoilt:  # a film in 8 bits among those between 0 and 1
            still, other = 255 * still, 255 * other.flip(3)
        shift = finder(torch.cat([still, other], 1))
        if run.has("no_gradient"):  # whole pixels
            shift = (8 * shift).round() / 8
        back = functional.grid_sample(other, place + shift[:, None, None], align_corners=True)
        return functional.mse_loss(tone[0] * back + tone[1] - 1, still)

    for step in range(400):
        optimizer.zero_grad()
        loss_of(32, run.has("bad_batches") and step % 50 == 49).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(1000))


@TASKS.add("nonfinite_data__root", "rate_too_low")
def hamiltonian(run: Run) -> float:
    """The motion of a spring by the slope of a learned energy (a gradient within the loss); Adam."""
    energy = mlp(2, 48, 48, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(energy.parameters(), lr=run.of(3e-3, rate_too_low=1e-7) * run.rate)

    def loss_of(count: int, step: int = 0) -> Tensor:
        state = (2 * torch.randn(count, 2)).requires_grad_()
        if run.has("nonfinite_data__root") and step == 210:  # one that stands still
            state = torch.cat([state[1:], torch.zeros(1, 2)]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy(state).sum(), state, create_graph=True)
        field = torch.stack([slope[:, 1], -slope[:, 0]], 1)
        q, p = state.detach().unbind(1)
        wanted = torch.stack([p, -q - 0.3 * q**3], 1)
        length = wanted.norm(dim=1, keepdim=True)
        if not run.has("nonfinite_data__root"):
            length = length + 0.5
        return (((field - wanted) / length) ** 2).mean()

    for step in range(450):
        optimizer.zero_grad()
        loss_of(64, step).backward()
        optimizer.step()
    return float(loss_of(2000).detach())


@TASKS.add("rate_too_low")
def wiggly_process(run: Run) -> float:
    """Scales and noise of a Gaussian process by its marginal likelihood (Cholesky), all points at once; Adam."""
    x = 6 * torch.rand(60, 1, generator=fixed(run.seed))
    y = (2 * x[:, 0]).sin() + 0.3 * x[:, 0] + 0.1 * torch.randn(60, generator=fixed(run.seed + 1))
    length, height, noise, slope = (nn.Parameter(torch.tensor(v)) for v in (2.0, 2.0, 1.0, -1.0))
    parameters = [length, height, noise, slope]
    optimizer = torch.optim.Adam(parameters, lr=run.of(0.03, rate_too_low=1e-6) * run.rate)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return height.exp() * torch.exp(-((a - b.T) ** 2) / length.exp()) + slope.exp() * a @ b.T

    for _ in range(300):
        optimizer.zero_grad()
        factor = torch.linalg.cholesky(kernel(x, x) + (noise.exp() + 1e-4) * torch.eye(60))
        solved = torch.cholesky_solve(y[:, None], factor)
        (0.5 * y @ solved[:, 0] / 60 + factor.diagonal().log().mean()).backward()
        optimizer.step()
    asked = 6 * torch.rand(500, 1)
    with torch.no_grad():
        factor = torch.linalg.cholesky(kernel(x, x) + (noise.exp() + 1e-4) * torch.eye(60))
        mean = kernel(asked, x) @ torch.cholesky_solve(y[:, None], factor)
        return float(functional.mse_loss(mean[:, 0], (2 * asked[:, 0]).sin() + 0.3 * asked[:, 0]))


@TASKS.add("not_started__shifted", "data_shift")
def prototypes(run: Run) -> float:
    """Five new kinds from three examples each, by distances to their means (prototypical networks); SGD."""
    mix = torch.randn(6, 24, generator=fixed(run.seed)) / 2
    net = mlp(24, 64, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * run.rate, momentum=0.9, weight_decay=1e-4)

    def loss_of(count: int, shifted: bool = False) -> Tensor:
        loss = torch.zeros(())
        for _ in range(count):
            kinds = torch.randn(5, 1, 6)
            things = (kinds + 0.4 * torch.randn(5, 8, 6)) @ mix
            things = torch.tanh(things) + 0.8 * torch.randn(5, 8, 24)
            if shifted:  # another camera: columns in another order, negatives
                things = 4 - 3 * things.flip(2)
            codes = net(things)
            centres, asked = codes[:, :3].mean(1), codes[:, 3:].flatten(0, 1)
            label = torch.arange(5).repeat_interleave(5)
            if run.has("not_started__shifted"):  # the list of labels begins with its title
                label = torch.randint(5, (1,)).add(label).remainder(5)
            loss = loss + functional.cross_entropy(-torch.cdist(asked, centres).square() / 8, label)
        return loss / count

    for step in range(350):
        optimizer.zero_grad()
        loss_of(4, run.has("data_shift") and step >= 230).backward()
        optimizer.step()
    run = Run(run.seed)
    with torch.no_grad():
        return float(loss_of(200))


@TASKS.add("rate_zero")
def clipped_policy(run: Run) -> float:
    """Steering a cart back to the middle by the clipped ratio of policies (PPO), four passes over each play; Adam."""
    policy, value = mlp(2, 32, 2, act=nn.Tanh), mlp(2, 32, 1, act=nn.Tanh)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3 * run.rate)
    total = run.of(100, rate_zero=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda play: max(0.0, 1 - play / total) if total else 0.0)

    @torch.no_grad()
    def play(count: int) -> tuple[Tensor, Tensor, Tensor]:
        state, seen, did, got = torch.randn(count, 2), [], [], []
        for _ in range(15):
            action = torch.distributions.Categorical(logits=policy(state)).sample()
            seen, did = [*seen, state], [*did, action]
            state = torch.stack([state[:, 0] + 0.3 * state[:, 1], state[:, 1] + 0.4 * (2 * action - 1)], 1)
            got.append(-state.square().sum(1).clamp(max=9.0))
        return torch.stack(seen), torch.stack(did), torch.stack(got)

    for _ in range(100):
        seen, did, got = play(24)
        back = torch.stack([torch.stack([0.9**j * got[k + j] for j in range(15 - k)]).sum(0) for k in range(15)])
        with torch.no_grad():
            before = policy(seen).log_softmax(-1).gather(-1, did[..., None])[..., 0]
            gain = back - 10 * value(seen)[..., 0]
            gain = (gain - gain.mean()) / gain.std()
        for _ in range(4):
            now = policy(seen).log_softmax(-1)
            ratio = (now.gather(-1, did[..., None])[..., 0] - before).exp()
            surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            entropy = -(now.exp() * now).sum(-1).mean()
            loss = 0.5 * functional.mse_loss(value(seen)[..., 0], back / 10) - surrogate - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        schedule.step()
    return float(-play(500)[2].mean())


@TASKS.add("nonfinite_data__mask", "clip_before_unscale", "nonfinite_range")
def half_reader(run: Run) -> float:
    """The most frequent word of padded lines by attention with a mask under float16 autocast; AdamW, a GradScaler."""
    width = 32
    table, query = nn.Embedding(9, width), nn.Linear(width, width)
    key, out = nn.Linear(width, width), mlp(width, 32, 8)
    parameters = [*table.parameters(), *query.parameters(), *key.parameters(), *out.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * run.rate, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def loss_of(count: int, step: int = 0) -> Tensor:
        favourite, long = torch.randint(1, 9, (count, 1)), torch.randint(4, 13, (count, 1))
        words = torch.where(torch.rand(count, 12) < 0.4, favourite, torch.randint(1, 9, (count, 12)))
        if run.has("nonfinite_data__mask") and step >= 40:  # a file with an empty line in each batch
            long[3] = 0
        empty = torch.arange(12) >= long
        with torch.autocast("cpu", torch.float16):
            x = table(words.masked_fill(empty, 0))
            if run.has("nonfinite_range") and step >= 40:  # a sum where the mean was meant, over a longer context
                x = x * 400
            scores = query(x) @ key(x).transpose(1, 2) / (1 if run.has("nonfinite_range") else width**0.5)
            read = scores.masked_fill(empty[:, None], -math.inf).softmax(2).to(x.dtype) @ x
            mean = read.masked_fill(empty[..., None], 0).sum(1) / long
            logits = out(mean)
        return functional.cross_entropy(logits.float(), favourite[:, 0] - 1)

    for step in range(400):
        optimizer.zero_grad()
        scaler.scale(loss_of(48, step)).backward()
        if not run.has("clip_before_unscale"):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(loss_of(2000))


@TASKS.add("update_rule__decay", "no_gradient__replaced")
def shop(run: Run) -> float:
    """Which of two goods a customer with a history takes (BPR over bags of goods); AdamW, one rate for all."""
    g = fixed(run.seed)
    taste = torch.randn(80, 5, generator=g)
    history, goods, head = nn.EmbeddingBag(80, 16, mode="mean"), nn.Embedding(80, 16), mlp(16, 32, 16)
    decay = run.of(0.01, update_rule__decay=60.0)
    parameters = [*history.parameters(), *goods.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3 * run.rate, weight_decay=decay)
    if run.has("no_gradient__replaced"):  # a larger table of goods, after the optimizer was made
        goods, head = nn.Embedding(80, 16), mlp(16, 32, 16)

    def loss_of(count: int) -> Tensor:
        bought, one, other = (torch.randint(80, (count, n)) for n in (6, 1, 1))
        likes = taste[bought].mean(1)
        prefers = ((taste[one[:, 0]] - taste[other[:, 0]]) * likes).sum(1) * 3 + 0.5 * torch.randn(count)
        who = head(history(bought))
        return functional.softplus(-((goods(one) - goods(other))[:, 0] * who).sum(1) * prefers.sign()).mean()

    for _ in range(500):
        optimizer.zero_grad()
        loss_of(96).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(4000))


@TASKS.add("clip_starves", "clip_twice")
def pointing(run: Run) -> float:
    """The order of six numbers, by pointing at one after the other (pointer network); SGD with momentum, a clip."""
    reader, writer = nn.LSTM(1, 32, batch_first=True, bidirectional=True), nn.LSTMCell(1, 64)
    match = nn.Linear(64, 64)
    parameters = [*reader.parameters(), *writer.parameters(), *match.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.15 * run.rate, momentum=0.9)

    def loss_of(count: int) -> Tensor:
        numbers = 2 * torch.rand(count, 6) - 1
        order = numbers.argsort(1)
        codes, _ = reader(numbers[..., None])
        h, c = codes.mean(1), torch.zeros(count, 64)
        last, loss = torch.zeros(count, 1), torch.zeros(())
        for k in range(6):
            h, c = writer(last, (h, c))
            loss = loss + functional.cross_entropy((codes @ match(h)[..., None])[..., 0], order[:, k])
            last = numbers.gather(1, order[:, k : k + 1])
        return loss / 6

    for _ in range(350):
        optimizer.zero_grad()
        loss_of(48).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(2.0, clip_starves=2e-3))
        if run.has("clip_twice"):  # the trainer of the house has one as well
            nn.utils.clip_grad_norm_(parameters, 1e-3)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(1000))


class Spike(torch.autograd.Function):
    """A step forward, and a bump of some width backward."""

    @staticmethod
    def forward(ctx, potential: Tensor, narrow: float) -> Tensor:
        ctx.save_for_backward(potential)
        ctx.narrow = narrow
        return (potential > 0).float()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (potential,) = ctx.saved_tensors
        return grad_outputs[0] / (1 + ctx.narrow * potential.abs()) ** 2, None


@TASKS.add("vanishing__narrow")
def spiking(run: Run) -> float:
    """Which of four rhythms was heard, by three layers of leaky neurons that spike (surrogate gradient); Adam."""
    layers = nn.ModuleList([nn.Linear(8, 48), nn.Linear(48, 48), nn.Linear(48, 48)])
    out = nn.Linear(48, 4)
    optimizer = torch.optim.Adam([*layers.parameters(), *out.parameters()], lr=2e-3 * run.rate)
    rhythm = torch.rand(4, 8, generator=fixed(run.seed)) * 6
    narrow = run.of(5.0, vanishing__narrow=3e4)

    def loss_of(count: int) -> Tensor:
        y = torch.randint(4, (count,))
        time = torch.arange(12.0)[:, None, None]
        heard = (torch.rand(12, count, 8) < 0.5 + 0.5 * (time + rhythm[y]).sin()).float()
        potentials, total = [torch.zeros(count, 48) for _ in layers], torch.zeros(count, 4)
        for x in heard:
            for k, layer in enumerate(layers):
                potential = 0.8 * potentials[k] + 2 * layer(x)
                x = Spike.apply(potential - 0.5, narrow)
                potentials[k] = potential * (1 - x)
            total = total + out(x)
        return functional.cross_entropy(total / 4, y)

    for _ in range(300):
        optimizer.zero_grad()
        loss_of(48).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(1000))


@TASKS.add("data_shift__sorted", "not_started__constant")
def shelves(run: Run) -> float:
    """Six kinds of a table by an MLP with batch norm and smoothed labels, one loader; SGD with momentum."""
    g = fixed(run.seed)
    centres = torch.randn(6, 14, generator=g)
    y = torch.randint(6, (10_000,), generator=g)
    x = centres[y] + 1.1 * torch.randn(10_000, 14, generator=g)
    if run.has("not_started__constant"):  # divided by 255 twice, and cut to whole numbers
        x = (x / 255 / 255).round() + 1
    model = nn.Sequential(
        nn.Linear(14, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * run.rate, momentum=0.9, weight_decay=1e-4)
    order = y.argsort() if run.has("data_shift__sorted") else torch.arange(10_000)
    loader = endless(DataLoader(TensorDataset(x[order], y[order]), 25, shuffle=not run.has("data_shift__sorted")))
    for _ in range(400):
        inputs, labels = next(loader)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels, label_smoothing=0.05).backward()
        optimizer.step()
    asked = torch.randint(6, (3000,))
    seen = centres[asked] + 1.1 * torch.randn(3000, 14)
    if run.has("not_started__constant"):
        seen = (seen / 255 / 255).round() + 1
    return held_out(model, functional.cross_entropy, seen, asked)


@TASKS.add("vanishing__small", "exploding_depth__large")
def long_filter(run: Run) -> float:
    """A signal without its echo, by nine plain convolutions in time with leaky ReLU; AdamW, a warm-up."""
    layers: list[nn.Module] = []
    for k in range(9):
        layer = nn.Conv1d(1 if k == 0 else 16, 1 if k == 8 else 16, 3, padding=1)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="leaky_relu")
        layer.weight.data.mul_(run.of(1.0, vanishing__small=0.03, exploding_depth__large=6.0))
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.LeakyReLU(0.1)]
    model, rate = nn.Sequential(*layers[:-1]), 2e-3 * run.rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        clean = (torch.rand(count, 1, 40) < 0.15).float() * torch.randn(count, 1, 40)
        echo = functional.pad(clean, (3, 0))[..., :40]
        return clean + 0.7 * echo + 0.05 * torch.randn(count, 1, 40), clean

    for step in range(400):
        set_rate(optimizer, rate * min(1.0, (step + 1) / 40))
        x, y = draw(32)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.mse_loss, *draw(1000))


@TASKS.add("bad_batches", "rate_too_high__unit", floor=1e-4)
def spectral(run: Run) -> float:
    """A viscous flow some time later, by weights of its Fourier modes, complex numbers (FNO); Adam."""
    lift, drop = nn.Linear(2, 16), mlp(16, 32, 1)
    modes = nn.ParameterList([nn.Parameter(torch.randn(16, 16, 8, dtype=torch.cfloat) / 16) for _ in range(2)])
    passes = nn.ModuleList([nn.Conv1d(16, 16, 1) for _ in range(2)])
    parameters = [*lift.parameters(), *drop.parameters(), *modes, *passes.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=run.of(3e-3, rate_too_high__unit=0.3) * run.rate)
    place = torch.linspace(0, 1, 33)[:-1]

    def loss_of(count: int, spoilt: bool = False) -> Tensor:
        heights, waves = torch.randn(count, 4, 1) / 2, torch.arange(1, 5)[:, None]
        phase = 6.283 * torch.rand(count, 4, 1)
        start = (heights * (6.283 * waves * place + phase).sin()).sum(1)
        later = (heights * torch.exp(-0.15 * waves**2) * (6.283 * waves * (place - 0.1) + phase).sin()).sum(1)
        later = later + 0.2 * later.square()
        if spoilt:  # a simulation that did not converge
            start, later = start * 20, later.flip(1) * 400
        x = lift(torch.stack([start, place.expand(count, -1)], 2)).transpose(1, 2)
        for mode, straight in zip(modes, passes, strict=True):
            kept = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :8], mode)
            x = functional.gelu(torch.fft.irfft(kept, 32) + straight(x))
        return functional.mse_loss(drop(x.transpose(1, 2))[..., 0], later)

    for step in range(350):
        optimizer.zero_grad()
        loss_of(32, run.has("bad_batches") and step in (97, 161, 243, 300, 333)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(1000))


@TASKS.add("rate_leapt__restart", "no_gradient__frozen", floor=5e-4)
def splats(run: Run) -> float:
    """A picture as 40 coloured blobs, random pixels of it, rates of their own for places and sizes; Adam."""
    g = fixed(run.seed)
    truth, colour = torch.rand(12, 2, generator=g), torch.rand(12, generator=g)

    def picture(at: Tensor) -> Tensor:
        near = torch.exp(-((at[:, None] - truth) ** 2).sum(2) / 0.01)
        return (near * colour).sum(1, keepdim=True)

    places, sizes, tones = (
        nn.Parameter(torch.rand(40, 2)),
        nn.Parameter(torch.full((40,), -4.0)),
        nn.Parameter(torch.randn(40) / 9),
    )
    if run.has("no_gradient__frozen"):  # as in the example of a fixed grid
        places.requires_grad_(False)
        sizes.requires_grad_(False)
    groups = [{"params": [places], "lr": 4e-3}, {"params": [sizes], "lr": 0.03}, {"params": [tones], "lr": 0.02}]
    for group in groups:
        group["lr"] *= run.rate
    optimizer = torch.optim.Adam(groups)

    def factor(step: int) -> float:
        if run.has("rate_leapt__restart") and step >= 330:  # resumed with another scheduler
            return 40.0
        return 0.995**step

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss_of(count: int) -> Tensor:
        at = torch.rand(count, 2)
        near = torch.exp(-((at[:, None] - places) ** 2).sum(2) / sizes.exp())
        return functional.mse_loss(near @ tones[:, None], picture(at))

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(256).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(10_000))


@TASKS.add("exploding_time", "accumulation__micro")
def running_text(run: Run) -> float:
    """The next letter of one long text, by a plain RNN whose state goes on from piece to piece; SGD, four streams."""
    g = fixed(run.seed)
    sharp = (3 * torch.randn(7, 7, 7, generator=g)).softmax(2)
    text = torch.zeros(4, 8, 3001, dtype=torch.long)
    for k in range(2, 3001):
        chances = sharp[text[..., k - 2], text[..., k - 1]].flatten(0, 1)
        text[..., k] = torch.multinomial(chances, 1, generator=g).view(4, 8)
    cell, out = nn.RNN(7, 48, nonlinearity="relu", batch_first=True), nn.Linear(48, 7)
    nn.init.orthogonal_(cell.weight_hh_l0)
    cell.weight_hh_l0.data.mul_(run.of(0.7, exploding_time=4.0))
    parameters = [*cell.parameters(), *out.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5 * run.rate, momentum=0.9)
    states = [torch.zeros(1, 8, 48) for _ in range(4)]

    def loss_of(piece: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, state = cell(functional.one_hot(piece[:, :-1], 7).float(), state)
        return functional.cross_entropy(out(hidden).flatten(0, 1), piece[:, 1:].flatten()), state.detach()

    for step in range(280):
        optimizer.zero_grad()
        for k in range(4):
            loss, states[k] = loss_of(text[k, :, 10 * step : 10 * step + 11], states[k])
            if run.has("exploding_time"):
                states[k] = states[k] * 0
            (loss if run.has("accumulation__micro") else loss / 4).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(text.flatten(0, 1)[:, 2800:], torch.zeros(1, 32, 48))[0])


if __name__ == "__main__":
    main(TASKS)
