"""What each way of clipping does to runs under Muon and AdamW: eight small scenarios, seven columns. Prints a table.

python benchmarks/muon_and_clipping.py [--seeds 3] [--scenarios NAME ...]
python benchmarks/muon_and_clipping.py --scenarios "a loud embedding" "a quiet matrix" "one batch in ten is bad"

The second command runs scenarios that were held out: nothing was chosen by them.

Each scenario is trained from the same seed, with the same batches, under each column. A number is the held-out loss
above the least one can reach (the entropy of the data; 0 for regressions), the mean over seeds. The best of a row and
those within 2 % of it, or within the spread of the best over seeds, are marked ``*``; more than twice the best, ``!``.

    none            no clip
    all             one norm over the gradients of the whole model, threshold 1.0
    sensitive       one norm over the gradients of the groups whose step depends on their size, as
                    `scale_sensitive_groups` measures: of Muon and AdamW none, so that nothing is clipped
    AdamW only      one norm over the gradients of AdamW, threshold 1.0; Muon's are left alone
    per tensor      AdaGC on both, without its global threshold at the start: each tensor against its own past
    update          ClipUpdate with ClipByRMS(1.0) on both: what a step does to the weights
    update by norm  ClipUpdate with ClipByGlobalNorm(1.0) on both: an update divided by its own norm
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import gradguard as gg

WORDS, WIDTH, LENGTH, BATCH = 32, 32, 12, 16


@dataclass
class Run:
    """A scenario that is ready to be trained: `optimizers` makes those of a (re)start."""

    model: nn.Module
    loss: Callable[
        [nn.Module, torch.Generator, int], Tensor
    ]  # of a training batch; of a held-out one if the step is -1
    optimizers: Callable[[], list[Optimizer]]
    least: float = 0.0
    steps: int = 200
    restarts: set[int] = field(default_factory=set)


class Block(nn.Module):
    """Attention and a feed-forward layer, or as many experts of which each token takes one."""

    def __init__(self, experts: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router = nn.Linear(WIDTH, experts) if experts > 1 else None
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        made = torch.stack([down(F.gelu(up(h))) for up, down in zip(self.up, self.down, strict=True)], -1)
        if self.router is None:
            return x + made[..., 0]
        shares = self.router(h).softmax(-1)
        taken = shares * F.one_hot(shares.argmax(-1), shares.shape[-1])
        return x + (made * taken[..., None, :]).sum(-1)


class Language(nn.Module):
    """A transformer of two blocks."""

    def __init__(self, experts: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(experts), Block(experts))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(words)))


class Chain:
    """Words of a Markov chain of which two words tell the next; ``noise`` is the share of batches of other words."""

    def __init__(self, noise: float = 0.0) -> None:
        draws = torch.Generator().manual_seed(7)
        self.table = (3 * torch.randn(WORDS, WORDS, generator=draws)).softmax(-1)
        self.noise = noise
        share = torch.linalg.matrix_power(self.table, 200)[0]
        self.entropy = float(-(share[:, None] * self.table * self.table.log()).sum())

    def __call__(self, model: nn.Module, draws: torch.Generator, step: int) -> Tensor:
        words = torch.randint(WORDS, (BATCH if step >= 0 else 512, 1), generator=draws)
        for _ in range(LENGTH):
            words = torch.cat([words, torch.multinomial(self.table[words[:, -1]], 1, generator=draws)], 1)
        if step >= 0 and float(torch.rand((), generator=draws)) < self.noise:
            words = torch.randint(4, words.shape, generator=draws)  # a batch that repeats few words
        return F.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())


def muon_and_adamw(model: nn.Module, rate: float = 1.0) -> list[Optimizer]:
    """Muon for the matrices of blocks, AdamW for the rest, as Muon's readme asks for."""
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and "router" not in name and p.dim() == 2]
    of_muon = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in of_muon]
    return [Muon(matrices, lr=0.02 * rate, weight_decay=0.0), AdamW(others, lr=0.005 * rate, weight_decay=0.0)]


def language(model: nn.Module, noise: float = 0.0, **more: object) -> Run:
    chain = Chain(noise)
    return Run(model, chain, lambda: muon_and_adamw(model), chain.entropy, **more)  # type: ignore[arg-type]


def one_loud_module() -> Run:
    """One module's gradients are 1e11 times as large, as of a weight in other units; Muon does not mind."""
    model = Language()
    model.get_parameter("blocks.0.up.0.weight").register_hook(lambda gradient: 1e11 * gradient)
    return language(model)


def lora() -> Run:
    """Adapters of a frozen network; the second sits behind activations of a hundred times the size."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    pairs = [(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)) for _ in layers]
    model = nn.ModuleList([*layers, *(one for pair in pairs for one in pair)])
    for layer, pair in zip(layers, pairs, strict=True):
        layer.requires_grad_(False)
        nn.init.zeros_(pair[1].weight)
    target = 0.5 * torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / WIDTH**0.5

    def run(x: Tensor, corrected: bool) -> Tensor:
        for i, (layer, (down, up)) in enumerate(zip(layers, pairs, strict=True)):
            x = x * (100.0 if i == 1 else 1.0)
            change = x @ target[i, :, :4] @ target[i, :4] if corrected else up(down(x))
            x = torch.tanh((layer(x) + change) / (100.0 if i == 1 else 1.0))
        return x

    def loss(model: nn.Module, draws: torch.Generator, step: int) -> Tensor:
        x = torch.randn(BATCH if step >= 0 else 512, WIDTH, generator=draws)
        return (run(x, False) - run(x, True).detach()).square().mean()

    return Run(model, loss, lambda: [AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003)])


def embeddings() -> Run:
    """A large embedding whose rare words come once in hundreds of steps, under AdamW alone."""
    count, draws = 2000, torch.Generator().manual_seed(5)
    meaning = torch.randn(count, generator=draws)
    common = 1.0 / torch.arange(1, count + 1) ** 1.2
    model = nn.ModuleList([nn.Embedding(count, 16), nn.Linear(16, 1)])

    def loss(model: nn.Module, draws: torch.Generator, step: int) -> Tensor:
        words = torch.multinomial(common, (64 if step >= 0 else 4096) * 4, replacement=True, generator=draws).view(
            -1, 4
        )
        made = model[1](model[0](words).mean(1))[:, 0]  # type: ignore[index]
        return (made - meaning[words].mean(1)).square().mean()

    return Run(model, loss, lambda: [AdamW(model.parameters(), lr=0.01, weight_decay=0.0)])


def left_out() -> Run:
    """The embedding is left out of the optimizers and not frozen: its gradient is never cleared, and grows."""
    model = Language()
    of_embedding = id(model.embed.weight)
    chain = Chain()

    def optimizers() -> list[Optimizer]:
        made = muon_and_adamw(model)
        made[1].param_groups[0]["params"] = [p for p in made[1].param_groups[0]["params"] if id(p) != of_embedding]
        return made

    return Run(model, chain, optimizers, chain.entropy)


SCENARIOS: dict[str, Callable[[], Run]] = {
    "one loud module": one_loud_module,
    "LoRA, an odd adapter": lora,
    "large embedding": embeddings,
    "experts": lambda: language(Language(experts=4), noise=0.02),
    "tied embedding": lambda: language(Language(tied=True), noise=0.02),
    "a part left out": left_out,
    "bfloat16": lambda: language(Language().bfloat16(), noise=0.02),
    "warm restart": lambda: language(Language(), noise=0.05, restarts={100}),
}


def scaled(name: str, times: float) -> Run:
    """A language model of which one weight's gradients have another size."""
    model = Language()
    model.get_parameter(name).register_hook(lambda gradient: times * gradient)
    return language(model)


HELD_OUT: dict[str, Callable[[], Run]] = {
    "a loud embedding": lambda: scaled("embed.weight", 1e11),
    "a quiet matrix": lambda: scaled("blocks.1.down.0.weight", 1e-6),
    "one batch in ten is bad": lambda: language(Language(), noise=0.1),
}
"""Run once, when the page's decision was written."""


def clip_of_all(model: nn.Module, optimizers: list[Optimizer]) -> Callable[[], object]:
    del optimizers
    return lambda: gg.clip_grad_norm_(model.parameters(), 1.0)


def of_each(rule: Callable[[Optimizer], object], kinds: type | tuple[type, ...] = Optimizer) -> Callable[..., object]:
    def attach(model: nn.Module, optimizers: list[Optimizer]) -> list[object]:
        return [rule(one) for one in optimizers if isinstance(one, kinds)]

    return attach


def clip_of_sensitive(one: Optimizer) -> object:
    groups = gg.scale_sensitive_groups(one)
    return gg.Guard(one, gg.Groups([(groups, gg.ClipByGlobalNorm(1.0))], rest=None)) if groups else None


COLUMNS: dict[str, Callable[[nn.Module, list[Optimizer]], object]] = {
    "none": lambda model, optimizers: None,
    "all": clip_of_all,
    "sensitive": of_each(clip_of_sensitive),
    "AdamW only": of_each(lambda one: gg.Guard(one, gg.ClipByGlobalNorm(1.0)), AdamW),
    "per tensor": of_each(lambda one: gg.Guard(one, gg.AdaGC(absolute=math.inf))),
    "update": of_each(lambda one: gg.ClipUpdate(one)),
    "update by norm": of_each(lambda one: gg.ClipUpdate(one, gg.ClipByGlobalNorm(1.0))),
}


def train(make: Callable[[], Run], column: str, seed: int) -> float:
    """The held-out loss above the least, at the end."""
    torch.manual_seed(seed)
    run, draws = make(), torch.Generator().manual_seed(1000 + seed)
    optimizers: list[Optimizer] = []
    rates: list[float] = []
    attached: object = None
    start = 0
    for step in range(run.steps):
        if step == 0 or step in run.restarts:
            optimizers, start = run.optimizers(), step
            attached = COLUMNS[column](run.model, optimizers)
            rates = [group["lr"] for one in optimizers for group in one.param_groups]
        end = min([restart for restart in run.restarts if restart > step], default=run.steps)
        groups = [group for one in optimizers for group in one.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))
        for one in optimizers:
            one.zero_grad()
        run.loss(run.model, draws, step).backward()
        if callable(attached):
            attached()
        for one in optimizers:
            one.step()
    with torch.no_grad():
        return float(run.loss(run.model, torch.Generator().manual_seed(99), -1)) - run.least


def marked(columns: dict[str, list[float]]) -> Iterable[str]:
    """Each column's mean, with what it is against the best."""
    means = {name: statistics.mean(values) for name, values in columns.items()}
    best = min(means, key=lambda name: means[name])
    spread = statistics.stdev(columns[best]) if len(columns[best]) > 1 else 0.0
    for mean in means.values():
        near = mean - means[best] <= max(0.02 * means[best], spread)
        yield f"{mean:.3g}{'*' if near else '!' if mean > 2 * means[best] else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    every = SCENARIOS | HELD_OUT
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=list(every))
    options = parser.parse_args()
    print("| scenario |", " | ".join(COLUMNS), "|")
    print("|---|" + "---|" * len(COLUMNS))
    for name in options.scenarios:
        columns = {c: [train(every[name], c, seed) for seed in range(options.seeds)] for c in COLUMNS}
        print(f"| {name} |", " | ".join(marked(columns)), "|", flush=True)


if __name__ == "__main__":
    main()
