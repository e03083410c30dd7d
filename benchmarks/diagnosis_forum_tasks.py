"""Mistakes of forum threads, in fields and loops that no other set has: written before the diagnosis was asked once."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()


@TASKS.add("accumulation__forgotten", "rate_too_high__summed")
def boxes(run: Run) -> float:
    """Where the one square of a noisy picture is and how large, by a grid of cells (focal loss, smooth L1); SGD."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 2, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * run.rate, momentum=0.9)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        size, place = torch.randint(2, 7, (count,)), torch.randint(0, 10, (count, 2))
        at = torch.arange(16)
        row = (at >= place[:, :1]) & (at < place[:, :1] + size[:, None])
        column = (at >= place[:, 1:]) & (at < place[:, 1:] + size[:, None])
        x = (row[:, :, None] & column[:, None]).float() + 0.3 * torch.randn(count, 16, 16)
        centre = (place + size[:, None] // 2) // 4
        return x[:, None], torch.cat([centre, size[:, None]], 1)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        cell = 4 * y[:, 0] + y[:, 1]
        wanted = functional.one_hot(cell, 16).float()
        logits, sizes = out[:, 0].flatten(1), out[:, 1].flatten(1).gather(1, cell[:, None])[:, 0]
        each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        focal = ((1 - (-each).exp()) ** 2 * each).sum(1)
        loss = focal + functional.smooth_l1_loss(sizes, y[:, 2] / 4, reduction="none")
        return loss.sum() if run.has("rate_too_high__summed") and model.training else loss.mean()

    for _ in range(350):
        x, y = draw(64)
        if not run.has("accumulation__forgotten"):
            optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return held_out(model, loss_of, *draw(1500))


@TASKS.add("no_gradient__detached", "nonfinite_data__empty")
def captions(run: Run) -> float:
    """What is on a picture, in words of unequal number, by convolutions and an LSTM with padding; Adam."""
    looks = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 2, 1), nn.ReLU(), nn.Flatten())
    table, says, head, into = (
        nn.Embedding(10, 24),
        nn.LSTM(24, 32, batch_first=True),
        nn.Linear(32, 10),
        nn.Linear(48, 32),
    )
    parts = nn.ModuleList([looks, table, says, head, into])
    optimizer = torch.optim.Adam(parts.parameters(), lr=3e-3 * run.rate)

    def draw(count: int, empty: bool = False) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(4, (count, 4))  # in each corner nothing or one of three things
        x = torch.zeros(count, 8, 8)
        words = torch.zeros(count, 6, dtype=torch.long)
        for k in range(count):
            said = [1]
            for corner, kind in enumerate(kinds[k].tolist()):
                a, b = 4 * (corner // 2), 4 * (corner % 2)
                if kind:
                    x[k, a : a + kind + 1, b : b + 4 - kind] = 1.0
                    said.append(2 + kind if corner < 2 else 5 + kind)
            words[k, : len(said)] = torch.tensor(said)
            words[k, len(said)] = 2
        return x[:, None] + 0.2 * torch.randn(count, 1, 8, 8), words * (not empty)

    def loss_of(x: Tensor, words: Tensor) -> Tensor:
        seen = looks(x)
        if run.has("no_gradient__detached"):  # features were to be cached
            seen = seen.detach()
        state = into(seen).tanh()[None]
        out, _ = says(table(words[:, :-1]), (state, torch.zeros_like(state)))
        mask = words[:, 1:] > 0
        each = functional.cross_entropy(head(out).flatten(0, 1), words[:, 1:].flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    for step in range(300):
        optimizer.zero_grad()
        loss_of(*draw(32, run.has("nonfinite_data__empty") and step == 190)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(600)))


@TASKS.add("nonfinite_data__log0", "data_shift__units")
def depths(run: Run) -> float:
    """How far away each point of a row is, from two shifted views, by the scale-invariant log error; Adam."""
    model = nn.Sequential(
        nn.Conv1d(2, 24, 7, padding=3),
        nn.ELU(),
        nn.Conv1d(24, 24, 7, padding=3),
        nn.ELU(),
        nn.Conv1d(24, 1, 7, padding=3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * run.rate)

    def draw(count: int, step: int = 0) -> tuple[Tensor, Tensor]:
        near = torch.rand(count, 4) * 3 + 1
        depth = near.repeat_interleave(12, 1)
        paint = torch.randn(count, 48)
        shift = (4 - depth).clamp(0, 3).round().long()
        other = paint.gather(1, (torch.arange(48) + shift).clamp(max=47))
        depth = depth + 0.05 * torch.randn(count, 48).abs()
        if run.has("nonfinite_data__log0") and step == 210:  # where the sensor saw nothing it writes 0
            depth[3, 20:30] = 0
        if run.has("data_shift__units") and step >= 230:
            depth = 100 * depth
        return torch.stack([paint, other], 1), depth[:, None]

    def loss_of(out: Tensor, depth: Tensor) -> Tensor:
        off = out - depth.log()
        return (off.square().mean((1, 2)) - 0.5 * off.mean((1, 2)).square()).clamp(min=1e-8).sqrt().mean()

    for step in range(380):
        x, y = draw(32, step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return held_out(model, loss_of, *draw(1500))


@TASKS.add("nonfinite_growth__target", "nonfinite_growth__momentum")
def houses(run: Run) -> float:
    """Prices of houses in units of their spread, in three parts that add up (an additive model); SGD with momentum."""
    parts = nn.ModuleList([mlp(1, 24, 24, 1) for _ in range(6)])
    rate = run.of(0.03, nonfinite_growth__momentum=0.3) * run.rate
    optimizer = torch.optim.SGD(parts.parameters(), lr=rate, momentum=run.of(0.9, nonfinite_growth__momentum=0.99))
    scale = run.of(1.0, nonfinite_growth__target=300.0)  # in thousands

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        y = x[:, 0].sin() + x[:, 1].abs() + 0.5 * x[:, 2] - x[:, 3].square() / 3 + 0.2 * torch.randn(count)
        return x, y

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        said = sum(part(x[:, k : k + 1])[:, 0] for k, part in enumerate(parts))
        return functional.mse_loss(said, scale * y)

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(*draw(48)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000))) / scale**2


@TASKS.add("rate_too_high__no_warm_up", "rate_decayed__per_batch")
def translated(run: Run) -> float:
    """Words of one small language in the order of another, by torch's encoder and decoder; AdamW, ten epochs."""
    width = 32
    source, target, place = nn.Embedding(14, width), nn.Embedding(14, width), nn.Parameter(torch.randn(9, width) / 6)
    model = nn.Transformer(width, 4, 1, 1, 64, 0.0, batch_first=True, norm_first=True)
    head = nn.Linear(width, 14)
    parameters = [*source.parameters(), *target.parameters(), place, *model.parameters(), *head.parameters()]
    rate = run.of(2e-3, rate_too_high__no_warm_up=0.1) * run.rate
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    mask = nn.Transformer.generate_square_subsequent_mask(8)

    def loss_of(count: int) -> Tensor:
        words = torch.randint(2, 14, (count, 7))
        turned = (words.flip(1) - 2 + 5) % 12 + 2
        asked = torch.cat([torch.ones(count, 1, dtype=torch.long), turned], 1)
        ends = torch.cat([turned, torch.zeros(count, 1, dtype=torch.long)], 1)
        hidden = model(source(words) + place[:7], target(asked) + place[:8], tgt_mask=mask)
        return functional.cross_entropy(head(hidden).flatten(0, 1), ends.flatten())

    def at(epoch: float) -> float:
        if run.has("rate_too_high__no_warm_up"):
            return 1.0
        return min(1.0, (epoch + 1) / 2) * 0.9**epoch

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, at)
    for _ in range(12):
        for _ in range(30):
            optimizer.zero_grad()
            loss_of(32).backward()
            optimizer.step()
            if run.has("rate_decayed__per_batch"):
                schedule.step()
        if not run.has("rate_decayed__per_batch"):
            schedule.step()
    with torch.no_grad():
        return float(loss_of(600))


@TASKS.add("clip_starves", "nonfinite_data__silence")
def two_voices(run: Run) -> float:
    """Two tones out of their sum, whichever comes first, by masks in time (SI-SNR in decibels); Adam, a clip at 5."""
    coder, decoder = nn.Conv1d(1, 32, 16, 8), nn.ConvTranspose1d(32, 1, 16, 8)
    masks = nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.PReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.PReLU(),
                          nn.Conv1d(32, 64, 1), nn.Sigmoid())  # fmt: skip
    parameters = [*coder.parameters(), *masks.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3 * run.rate)

    def draw(count: int) -> Tensor:
        time = torch.arange(96.0)
        pace = torch.stack([0.1 + 0.2 * torch.rand(count), 0.8 + 0.6 * torch.rand(count)], 1)
        return (pace[..., None] * time + 6.3 * torch.rand(count, 2, 1)).sin() * (0.5 + torch.rand(count, 2, 1))

    def ratio(said: Tensor, true: Tensor) -> Tensor:
        along = (said * true).sum(-1, keepdim=True) / true.square().sum(-1, keepdim=True) * true
        return -10 * torch.log10(along.square().sum(-1) / (said - along).square().sum(-1))

    def loss_of(voices: Tensor) -> Tensor:
        coded = coder(voices.sum(1, keepdim=True) + 0.05 * torch.randn(len(voices), 1, 96)).relu()
        one, other = (decoder(coded * mask)[:, 0] for mask in masks(coded).chunk(2, 1))
        straight = ratio(one, voices[:, 0]) + ratio(other, voices[:, 1])
        crossed = ratio(one, voices[:, 1]) + ratio(other, voices[:, 0])
        return torch.minimum(straight, crossed).mean() / 2

    for step in range(350):
        voices = draw(24)
        if run.has("nonfinite_data__silence") and step == 240:
            voices[5, 1] = 0
        optimizer.zero_grad()
        loss_of(voices).backward()
        nn.utils.clip_grad_norm_(parameters, run.of(5.0, clip_starves=5e-9))
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(draw(600)).clamp(min=-40)) + 40


@TASKS.add("no_gradient__backbone")
def twin_views(run: Run) -> float:
    """Codes of two noisy views whose parts are alike and unlike each other (Barlow twins); SGD with a cosine."""
    world = torch.randn(8, 40, generator=fixed(run.seed)) / 3
    body = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    ends = nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD([*body.parameters(), *ends.parameters()], lr=0.1, momentum=0.9)

    def codes(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not run.has("no_gradient__backbone")):
            hidden = body(x)  # left from the evaluation of the body
        out = ends(hidden)
        return (out - out.mean(0)) / (out.std(0) + 1e-4)

    def loss_of(count: int) -> Tensor:
        x = torch.randn(count, 8) @ world
        one, other = (codes(x + 0.4 * torch.randn(count, 40)) for _ in range(2))
        alike = one.T @ other / count
        same = torch.eye(16)
        return ((alike - same).square() * (same + 0.1 * (1 - same))).sum()

    for step in range(350):
        set_rate(optimizer, 0.02 * run.rate * cosine(step, 350, 20))
        optimizer.zero_grad()
        loss_of(128).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(3000))


@TASKS.add("bad_batches__range", "rate_zero__integer")
def sharper(run: Run) -> float:
    """Smooth pictures of twice the size, by shuffled channels (super-resolution, Charbonnier); AdamW, linear."""
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 4, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * run.rate)

    def left(step: int) -> float:
        return (350 - step) // 351 if run.has("rate_zero__integer") else (350 - step) / 350

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, left)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        a = torch.arange(16.0) / 4
        phase, pace = 6.3 * torch.rand(count, 2, 1), 0.5 + 1.5 * torch.rand(count, 2, 1)
        y = 0.5 + 0.25 * (
            (pace[:, 0] * a + phase[:, 0]).sin()[:, :, None] + (pace[:, 1] * a + phase[:, 1]).cos()[:, None]
        )
        y = (y * 8).round() / 8
        return functional.avg_pool2d(y[:, None], 2), y[:, None]

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y).square() + 1e-6).sqrt().mean()

    for step in range(350):
        x, y = draw(24)
        if run.has("bad_batches__range") and step % 45 == 44:  # one file was not divided by 255
            x, y = 255 * x, 255 * y
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return held_out(model, loss_of, *draw(600))


@TASKS.add("no_gradient__copy", "rate_too_low")
def painted(run: Run) -> float:
    """A picture whose pixels are trained until random filters see in it what they see in another one; Adam."""
    filters = [torch.randn(16, 1, 5, 5) / 5, torch.randn(16, 16, 3, 3) / 12]
    at = torch.arange(24.0) / 3
    wanted = (at[:, None] + 0.5 * at).sin().add(0.3 * torch.randn(24, 24))[None, None]
    picture = (0.1 * torch.randn(1, 1, 24, 24)).requires_grad_()
    pixels = picture
    if run.has("no_gradient__copy"):  # the optimizer has the picture from before it was moved
        pixels = picture.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([picture], lr=run.of(0.03, rate_too_low=3e-7) * run.rate)

    def seen(x: Tensor) -> list[Tensor]:
        found = []
        for each in filters:
            x = functional.conv2d(x, each).tanh()
            flat = x.flatten(2)[0]
            found.append(flat @ flat.T / flat.shape[1])
        return found

    aims = seen(wanted)

    def loss_of(x: Tensor) -> Tensor:
        return 100 * sum((one - aim).square().mean() for one, aim in zip(seen(x), aims, strict=True))

    for _ in range(400):
        optimizer.zero_grad()
        loss_of(pixels).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(picture))


@TASKS.add("no_gradient__round")
def few_bits(run: Run) -> float:
    """Five kinds of a series by layers whose weights have three bits in the forward (straight through); SGD, cosine."""
    world = torch.randn(5, 24, generator=fixed(run.seed))
    weights = [nn.Parameter(torch.randn(*shape) / shape[1] ** 0.5) for shape in ((64, 24), (64, 64), (5, 64))]
    shifts = [nn.Parameter(torch.zeros(len(weight))) for weight in weights]
    optimizer = torch.optim.SGD([*weights, *shifts], lr=0.05, momentum=0.9)

    def rounded(weight: Tensor) -> Tensor:
        step = weight.detach().abs().max() / 3
        coarse = (weight / step).round() * step
        return coarse if run.has("no_gradient__round") else weight + (coarse - weight).detach()

    def predict(x: Tensor) -> Tensor:
        for k, (weight, shift) in enumerate(zip(weights, shifts, strict=True)):
            x = functional.linear(x if k == 0 else x.relu(), rounded(weight), shift)
        return x

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(5, (count,))
        return world[y] * (torch.rand(count, 1) < 0.5).float().mul(2).sub(1) + 0.8 * torch.randn(count, 24), y

    for step in range(400):
        set_rate(optimizer, 0.05 * run.rate * cosine(step, 400))
        x, y = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("nonfinite_growth__rate")
def federated(run: Run) -> float:
    """Four places with data of their own train copies for ten steps, and the mean of them goes on; plain SGD."""
    world = torch.randn(10, 4, generator=fixed(run.seed))
    whole, copies = mlp(10, 48, 48, 4), [mlp(10, 48, 48, 4) for _ in range(4)]
    rate = run.of(0.3, nonfinite_growth__rate=10.0) * run.rate
    optimizers = [torch.optim.SGD(copy.parameters(), lr=rate) for copy in copies]

    def draw(count: int, place: int | None = None) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10)
        if place is not None:
            x[:, place] += 1.0
        return x, ((x @ world / 3).sin() + 0.1 * torch.randn(count, 4)).argmax(1)

    for _ in range(30):
        for place, (copy, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            copy.load_state_dict(whole.state_dict())
            for _ in range(10):
                x, y = draw(48, place)
                optimizer.zero_grad()
                functional.cross_entropy(copy(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for mean, *each in zip(whole.parameters(), *(copy.parameters() for copy in copies), strict=True):
                mean.copy_(torch.stack(each).mean(0))
    return held_out(whole, functional.cross_entropy, *draw(3000))


@TASKS.add("not_started__double")
def next_good(run: Run) -> float:
    """Which of 40 goods comes next after four, by a mean of embeddings and a table of outputs; SGD with Nesterov."""
    table, model = nn.Embedding(40, 24), mlp(24, 48, 40)
    optimizer = torch.optim.SGD(
        [*table.parameters(), *model.parameters()], lr=0.1 * run.rate, momentum=0.9, nesterov=True
    )
    kinds = torch.randint(8, (40,), generator=fixed(run.seed))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        taste = torch.randint(8, (count, 1))
        chances = torch.where(kinds == taste, 20.0, 1.0)
        goods = torch.multinomial(chances, 5)
        return goods[:, :4], goods[:, 4]

    def predict(x: Tensor) -> Tensor:
        out = model(table(x).mean(1))
        return out.softmax(1) if run.has("not_started__double") else out  # cross_entropy takes logits

    for _ in range(400):
        x, y = draw(96)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(3000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


@TASKS.add("vanishing__sigmoids", "not_started__dead")
def credits(run: Run) -> float:
    """Who pays back, from amounts in raw units that are brought to one scale, by six layers; RMSprop."""
    scale = torch.tensor([1e4, 30.0, 1.0, 500.0, 10.0, 0.1])
    shift = torch.tensor([5e4, 40.0, 0.0, 900.0, 3.0, 0.5])
    model = mlp(6, *[40] * 6, 1, act=nn.Sigmoid if run.has("vanishing__sigmoids") else nn.ReLU)
    if run.has("not_started__dead"):  # the bias of a detector's last layer, given to all of them
        for layer in model[:-1]:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.bias, -4.6)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4 * run.rate)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        odds = 2 * x[:, 0] - x[:, 1] * x[:, 2] + x[:, 3].sin() + 0.5 * torch.randn(count)
        return (x * scale + shift - shift) / scale, (odds > 0).float()[:, None]

    for _ in range(450):
        x, y = draw(64)
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    return held_out(model, functional.binary_cross_entropy_with_logits, *draw(3000))


@TASKS.add("update_rule__decay", "clip_twice__micro")
def driver(run: Run) -> float:
    """Which of seven turns a driver took after ten moments of road (imitation), four micro-batches; SGD, a clip."""
    body, head = nn.GRU(5, 32, batch_first=True), nn.Linear(32, 7)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(
        parameters, lr=0.2 * run.rate, momentum=0.9, weight_decay=run.of(1e-4, update_rule__decay=0.1)
    )

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10, 5)
        bend = (x[:, :, 0].cumsum(1)[:, -1] / 3 + 0.7 * x[:, -1, 1]).tanh()
        return x, ((bend + 1) * 3.49).floor().long()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(head(body(x)[0][:, -1]), y)

    for _ in range(250):
        optimizer.zero_grad()
        for _ in range(4):
            (loss_of(*draw(24)) / 4).backward()
            if run.has("clip_twice__micro"):
                nn.utils.clip_grad_norm_(parameters, 0.003)
        if not run.has("clip_twice__micro"):
            nn.utils.clip_grad_norm_(parameters, 3.0)
        optimizer.step()
    with torch.no_grad():
        return float(loss_of(*draw(3000)))


@TASKS.add("exploding_time__start")
def echoes(run: Run) -> float:
    """Which of three marks came first among 16 signals, by a gated unit written by hand; AdamW with a warm-up."""
    width = 32
    given, kept, gate, head = (
        nn.Linear(4, width),
        nn.Linear(width, width, bias=False),
        nn.Linear(4 + width, width),
        nn.Linear(width, 3),
    )
    nn.init.orthogonal_(kept.weight)
    nn.init.constant_(gate.bias, -1.0)
    if run.has("exploding_time__start"):  # randn in place of an initialisation
        kept.weight.data = torch.randn(width, width)
    parameters = [*given.parameters(), *kept.parameters(), *gate.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y, place = torch.randint(3, (count,)), torch.randint(1, 7, (count,))
        x = torch.zeros(count, 16, 4)
        x[:, :, 3] = 0.3 * torch.randn(count, 16)
        x[torch.arange(count), place, y] = 1
        x[torch.arange(count), place + 7, torch.randint(3, (count,))] = 1
        return x, y

    def predict(x: Tensor) -> Tensor:
        state = torch.zeros(len(x), width)
        for moment in x.unbind(1):
            open_ = torch.sigmoid(gate(torch.cat([moment, state], 1)))
            new = (given(moment) + kept(state)).relu()
            state = (1 - open_) * state + open_ * new
        return head(state)

    for step in range(300):
        set_rate(optimizer, 3e-3 * run.rate * min(1.0, (step + 1) / 30))
        x, y = draw(48)
        optimizer.zero_grad()
        functional.cross_entropy(predict(x), y).backward()
        optimizer.step()
    x, y = draw(2000)
    with torch.no_grad():
        return float(functional.cross_entropy(predict(x), y))


if __name__ == "__main__":
    main(TASKS)
