"""Small training runs with bad batches at known steps, for `spikes.py`. Each takes a second or so on one core.

A run is made anew from a seed. Batch number ``i`` is the same whatever was trained before, spoiled or not, so that a
run and its twin without the spike see the same data at every other step. `evaluate` is a loss on held-out data.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
Spoil = Callable[[Batch, torch.Generator], Batch]


@dataclass
class Run:
    """One training run that has not begun.

    Attributes:
        loss_of: The training loss of batch ``i``, spoiled or not.
        evaluate: The held-out loss.
        schedule: What the learning rate is multiplied by at step ``i``.
        bad: The batches that are spoiled.
        clip: The constant that people clip such a model with; None where they do not.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[int, bool], Tensor]
    evaluate: Callable[[], float]
    steps: int
    schedule: Callable[[int], float] = lambda i: 1.0
    bad: frozenset[int] = frozenset()
    clip: float | None = None

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True)
class Scenario:
    """A run and what is asked of it.

    Attributes:
        make: The run, from a seed.
        kind: ``"spike"``: bad batches. ``"clean"``: nothing is wrong. ``"shift"``: the data changes, and it is right.
        goal: How far above the twin's the final loss may end, as a share of it; None where nothing was promised.
        most_false: How many good steps may be skipped; None where nothing was promised.
    """

    make: Callable[[int], Run]
    kind: str = "spike"
    goal: float | None = None
    most_false: int | None = None


def _decay(steps: int, warm_up: int = 20, last: float = 0.02) -> Callable[[int], float]:
    def factor(i: int) -> float:
        if i < warm_up:
            return (i + 1) / warm_up
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * (i - warm_up) / (steps - warm_up)))

    return factor


def _constant(i: int) -> float:
    return min(1.0, (i + 1) / 20)


def _draws(seed: int, i: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + i)


# -- a language model ------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, ROWS = 8, 8, 32


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class _Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.block, self.norm, self.head = _Block(width), nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])))


class _ThreeTokens(nn.Module):
    """A neural language model that sees the last three tokens (Bengio 2003): a tenth of a transformer's time."""

    def __init__(self, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(nn.Linear(3 * width, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(_last_three(tokens)).flatten(2)))


def _last_three(tokens: Tensor) -> Tensor:
    """Of ``[rows, length]`` the last three tokens at each place, ``[rows, length, 3]``; 0 before the first."""
    return functional.pad(tokens, (2, 0)).unfold(1, 3, 1)


def _text(table: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Sequences of a Markov chain of order 2, ``[rows, LENGTH + 1]``."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    for place in range(2, LENGTH + 1):
        chances = table[tokens[:, place - 2], tokens[:, place - 1]]
        tokens[:, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return tokens


def _chain(seed: int) -> Tensor:
    return (1.6 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=_draws(seed, -1))).softmax(-1)


def random_labels(batch: Batch, generator: torch.Generator) -> Batch:
    return batch[0], torch.randint(VOCABULARY, batch[1].shape, generator=generator)


def constant_tokens(batch: Batch, generator: torch.Generator) -> Batch:
    del generator
    return torch.zeros_like(batch[0]), torch.zeros_like(batch[1])


def one_rank_of_four(batch: Batch, generator: torch.Generator) -> Batch:
    """The quarter of the batch that one data-parallel rank read has random tokens."""
    inputs, targets = batch[0].clone(), batch[1].clone()
    bad = len(inputs) // 4
    inputs[:bad] = torch.randint(VOCABULARY, inputs[:bad].shape, generator=generator)
    targets[:bad] = torch.randint(VOCABULARY, targets[:bad].shape, generator=generator)
    return inputs, targets


def creeping(share_of: Callable[[int], float]) -> Callable[[int, Batch, torch.Generator], Batch]:
    def spoil(i: int, batch: Batch, generator: torch.Generator) -> Batch:
        hit = torch.rand(batch[1].shape, generator=generator) < share_of(i)
        return batch[0], torch.where(hit, torch.randint(VOCABULARY, batch[1].shape, generator=generator), batch[1])

    return spoil


def language_model(
    seed: int,
    *,
    bad: Iterable[int] = (),
    spoil: Spoil | None = None,
    scale: float = 1.0,
    always: Callable[[int, Batch, torch.Generator], Batch] | None = None,
    shift_at: int | None = None,
    steps: int = 300,
    schedule: Callable[[int], float] | None = None,
    rate: float = 1e-2,
    bf16: bool = False,
    rows: int = ROWS,
    full_batch: bool = False,
    transformer: bool = False,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> Run:
    torch.manual_seed(seed)
    model = _Transformer() if transformer else _ThreeTokens()
    chain, after = _chain(seed), _chain(seed + 500)
    corpus = _text(chain, rows if full_batch else 4000, _draws(seed, -2))
    later = corpus if shift_at is None else _text(after, 4000, _draws(seed, -3))
    held_out = _text(chain if shift_at is None else after, 500, _draws(seed, -4))
    optimizer = (make or torch.optim.AdamW)(model.parameters(), lr=rate, fused=True)
    bad = frozenset(bad)

    def batch(i: int, generator: torch.Generator) -> Batch:
        source = corpus if shift_at is None or i < shift_at else later
        tokens = source if full_batch else source[torch.randint(len(source), (rows,), generator=generator)]
        return tokens[:, :-1], tokens[:, 1:]

    def loss_of(i: int, spoiled: bool) -> Tensor:
        generator = _draws(seed, i)
        inputs, targets = batch(i, generator)
        if always is not None:
            inputs, targets = always(i, (inputs, targets), generator)
        if spoiled and spoil is not None:
            inputs, targets = spoil((inputs, targets), generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(inputs)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss * scale if spoiled else loss

    @torch.no_grad()
    def evaluate() -> float:
        return float(functional.cross_entropy(model(held_out[:, :-1]).flatten(0, 1), held_out[:, 1:].flatten()))

    return Run(model, optimizer, loss_of, evaluate, steps, schedule or _decay(steps), bad, clip=1.0)


# -- a regression ----------------------------------------------------------------------------------------------------


def _sgd(parameters: Iterable[Tensor], lr: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)


def regression(
    seed: int,
    *,
    bad: Iterable[int] = (),
    samples: int = 1,
    times: float = 100.0,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    rate: float = 1e-2,
    steps: int = 500,
    negative: bool = False,
    heavy: bool = False,
    rare: bool = False,
    shift_at: int | None = None,
) -> Run:
    """An MLP that learns a function of 8 features; spoiled: some samples' features and targets ``times`` too large.

    ``negative``: the loss is the Gaussian negative log-likelihood, and falls below 0. ``heavy``: the noise of the
    targets has a heavy tail. ``rare``: in one batch of 25 a quarter of the samples is far off, and is to be learned.
    """
    torch.manual_seed(seed)
    outputs = 2 if negative else 1
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs))
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=_draws(seed, -1)) * 0.4)
    bad = frozenset(bad)

    def batch(i: int, count: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(count, 8, generator=generator)
        if rare and i % 25 == 12:
            inputs[: count // 4] += 6.0
        targets = teacher(inputs) * (2.5 if shift_at is not None and i >= shift_at else 1.0)
        noise = torch.randn(count, 1, generator=generator)
        if heavy:
            noise = noise / torch.rand(count, 1, generator=generator).clamp_min(1e-4).sqrt()
        return inputs, targets + 0.1 * noise

    def loss_from(inputs: Tensor, targets: Tensor) -> Tensor:
        out = model(inputs)
        if negative:
            spread = functional.softplus(out[:, 1:]) + 1e-3
            return (spread.log() + 0.5 * ((targets - out[:, :1]) / spread) ** 2).mean()
        return functional.mse_loss(out, targets)

    def loss_of(i: int, spoiled: bool) -> Tensor:
        inputs, targets = batch(i, 32, _draws(seed, i))
        if spoiled:
            inputs[:samples] *= times
            targets[:samples] *= times
        return loss_from(inputs, targets)

    held_out = batch(12 if rare else steps, 2000, _draws(seed, -4))

    @torch.no_grad()
    def evaluate() -> float:
        return float(loss_from(*held_out))

    return Run(model, make(model.parameters(), lr=rate, fused=True), loss_of, evaluate, steps, _decay(steps), bad)


def outlier_parameter(seed: int) -> Run:
    """The regression, and at one step one weight of it has a gradient of 1e8."""
    run = regression(seed, bad=[250])
    weight, plain = next(run.model.parameters()), run.loss_of

    def loss_of(i: int, spoiled: bool) -> Tensor:
        loss = plain(i, False)
        return loss + 1e8 * (weight[0, 0] - weight[0, 0].detach()) if spoiled else loss

    run.loss_of = loss_of
    return run


def adversarial(seed: int) -> Run:
    """A small GAN that alternates its players in one optimizer: two losses of different size, never stationary."""
    torch.manual_seed(seed)
    makes = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    tells = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    model = nn.ModuleList([makes, tells])

    def loss_of(i: int, spoiled: bool) -> Tensor:
        del spoiled
        generator = _draws(seed, i)
        angle = 6.2832 * torch.rand(64, 1, generator=generator)
        real = torch.cat([angle.cos(), angle.sin()], 1)
        fake = makes(torch.randn(64, 4, generator=generator))
        if i % 2:
            return functional.softplus(-_frozen(tells, fake)).mean()
        return functional.softplus(-tells(real)).mean() + functional.softplus(tells(fake.detach())).mean()

    @torch.no_grad()
    def evaluate() -> float:
        fake = makes(torch.randn(2000, 4, generator=_draws(seed, -4)))
        return float((fake.norm(dim=1) - 1).abs().mean() + fake.mean(0).norm())

    return Run(model, torch.optim.Adam(model.parameters(), 1e-3, (0.5, 0.999), fused=True), loss_of, evaluate, 500)


def _frozen(module: nn.Module, inputs: Tensor) -> Tensor:
    return torch.func.functional_call(module, {k: v.detach() for k, v in module.named_parameters()}, (inputs,))


# -- the table -------------------------------------------------------------------------------------------------------

BURST = range(150, 170)
LM, MLP = language_model, regression


SCENARIOS: dict[str, Scenario] = {
    "LM: 1 batch, random labels": Scenario(lambda s: LM(s, bad=[150], spoil=random_labels), goal=0.01),
    "LM: 20 batches, random labels": Scenario(lambda s: LM(s, bad=BURST, spoil=random_labels), goal=0.01),
    "Transformer: 20 batches, random labels": Scenario(
        lambda s: LM(s, bad=BURST, spoil=random_labels, transformer=True), goal=0.01
    ),
    "LM: 20 batches, one token": Scenario(lambda s: LM(s, bad=BURST, spoil=constant_tokens), goal=0.01),
    "LM: loss x 1e4 once, constant rate": Scenario(
        lambda s: LM(s, bad=[150], scale=1e4, schedule=_constant), goal=0.01
    ),
    "LM: loss x 100 every 25, constant rate": Scenario(
        lambda s: LM(s, bad=range(50, 300, 25), scale=100.0, schedule=_constant), goal=0.01
    ),
    "MLP, SGD-m: a sample x 100 once": Scenario(lambda s: MLP(s, bad=[250], make=_sgd, rate=0.05), goal=0.01),
    "MLP, Adam: a sample x 1000 once": Scenario(lambda s: MLP(s, bad=[250], times=1000.0), goal=0.01),
    "MLP, Adam: a sample x 100 every 50": Scenario(lambda s: MLP(s, bad=range(50, 500, 50)), goal=0.01),
    "MLP, Adam: one weight's gradient 1e8": Scenario(outlier_parameter),
    "LM: full batch, natural spikes of Adam": Scenario(
        lambda s: LM(s, full_batch=True, rows=32, rate=3e-2, schedule=_constant), kind="clean"
    ),
    "LM: rate 10 times too high": Scenario(lambda s: LM(s, rate=1e-1, schedule=_constant), kind="clean"),
    "LM: other text from step 150": Scenario(lambda s: LM(s, shift_at=150), kind="shift", most_false=8),
    "LM: loss x 1e4 at step 10": Scenario(lambda s: LM(s, bad=[10], scale=1e4)),
    "LM: two bursts of 10": Scenario(
        lambda s: LM(s, bad=[*range(120, 130), *range(200, 210)], spoil=random_labels), goal=0.01
    ),
    "LM: burst of 20 late in the decay": Scenario(lambda s: LM(s, bad=range(260, 280), spoil=random_labels), goal=0.01),
    "LM: bad batch every 7": Scenario(lambda s: LM(s, bad=range(49, 300, 7), spoil=random_labels)),
    "LM: one rank of four, 20 steps": Scenario(lambda s: LM(s, bad=BURST, spoil=one_rank_of_four)),
    "LM, bf16: 20 batches, random labels": Scenario(
        lambda s: LM(s, bad=BURST, spoil=random_labels, bf16=True), goal=0.01
    ),
    "LM: burst of 60": Scenario(lambda s: LM(s, bad=range(150, 210), spoil=random_labels)),
    "LM, SGD-m: 20 batches, random labels": Scenario(
        lambda s: LM(s, bad=BURST, spoil=random_labels, make=_sgd, rate=0.1), goal=0.01
    ),
    "MLP, SGD-m: 20 batches with a sample x 100": Scenario(
        lambda s: MLP(s, bad=range(250, 270), make=_sgd, rate=0.05), goal=0.01
    ),
    "MLP, negative losses: a sample x 100 every 50": Scenario(
        lambda s: MLP(s, bad=range(50, 500, 50), negative=True), goal=0.01
    ),
    "LM: labels get worse, 0 to 30 %": Scenario(
        lambda s: LM(s, always=creeping(lambda i: 0.3 * i / 300)), kind="clean", most_false=0
    ),
    "LM: 30 % of labels wrong, always": Scenario(
        lambda s: LM(s, always=creeping(lambda i: 0.3)), kind="clean", most_false=0
    ),
    "LM: clean": Scenario(LM, kind="clean", most_false=0),
    "MLP, Adam: clean": Scenario(MLP, kind="clean", most_false=0),
    "MLP, SGD-m: clean": Scenario(lambda s: MLP(s, make=_sgd, rate=0.05), kind="clean", most_false=0),
    "MLP: noise with a heavy tail": Scenario(lambda s: MLP(s, heavy=True), kind="clean"),
    "MLP: rare samples that are right": Scenario(lambda s: MLP(s, rare=True), kind="clean"),
    "MLP: targets x 2.5 from step 250": Scenario(lambda s: MLP(s, shift_at=250), kind="shift", most_false=8),
    "GAN": Scenario(adversarial, kind="clean", most_false=0),
}
