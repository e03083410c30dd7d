"""Backward with an error clip over the same backward without, on this machine's CPU. Prints ratios and goals.

python benchmarks/error_clip.py [--compiled] [--only GPT] [--threads 2] [--pairs 41]

A sample is the time of entering the block, of the backward, and of leaving the block; the forward is not in it.
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradguard as gg
from pairs import Comparison

Sample = Callable[[], float]
"""Runs one forward and one backward, and returns the seconds of what is compared."""


class Mlp(nn.Sequential):
    """8 layers of 512."""

    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())][:-1])
        self.data = torch.randn(128, 512), torch.randn(128, 512)

    def loss(self) -> Tensor:
        return F.mse_loss(self(self.data[0]), self.data[1])


class Recurrent(nn.Module):
    """An LSTM cell, unrolled over 100 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 64), nn.Linear(64, 1)
        self.data = torch.randn(100, 32, 16), torch.randn(100, 32, 1)

    def loss(self) -> Tensor:
        state = torch.zeros(32, 64), torch.zeros(32, 64)
        outputs = []
        for x in self.data[0].unbind():
            state = self.cell(x, state)
            outputs.append(state[0])
        return F.mse_loss(self.head(torch.stack(outputs)), self.data[1])


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(256), nn.LayerNorm(256)])
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """4 layers of 256, sequences of 128, batch 8."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 256), nn.Embedding(128, 256)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)], nn.LayerNorm(256), nn.Linear(256, 256))
        self.data = torch.randint(256, (8, 129))

    def loss(self) -> Tensor:
        x = self.tokens(self.data[:, :-1]) + self.places.weight
        return F.cross_entropy(self.blocks(x).flatten(0, 1), self.data[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.convolutions[0](x)).relu()
        return (x + self.norms[1](self.convolutions[1](y))).relu()


class Cnn(nn.Module):
    """6 residual blocks, batch 16, images of 32 × 32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*[Residual() for _ in range(6)])
        self.head, self.data = nn.Linear(16, 10), (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))

    def loss(self) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(self.data[0])).mean((2, 3))), self.data[1])


NETS = {"MLP": Mlp, "LSTM": Recurrent, "GPT": Gpt, "CNN": Cnn}
GOALS = {
    "value": {"MLP": 1.05, "GPT": 1.05, "CNN": 1.15},  # an unrolled cell of small operations pays Python: no goal
    "with statistics": {"MLP": 1.15, "GPT": 1.15, "CNN": 1.15},
    "compiled": dict.fromkeys(NETS, 1.03),
    "time to compile": dict.fromkeys(("MLP", "GPT", "CNN"), 2.0),
}


CLOCK = time.perf_counter


def usual_threshold(net: nn.Module) -> float:
    """A tenth of the normal size of gradients: it binds somewhere, not everywhere."""
    stats = gg.ErrorClipStats()
    loss = net.loss()
    with gg.error_clip(loss, None, stats=stats):
        loss.backward()
    return 0.1 * max(float(row.largest) for row in stats.rows()[:10])


def sample(net: nn.Module, loss_of: Callable[[], Tensor], block: Callable[[Tensor], AbstractContextManager]) -> float:
    net.zero_grad()
    loss = loss_of()
    start = CLOCK()
    with block(loss):
        loss.backward()
    return CLOCK() - start


def slowdown(ours: Sample, theirs: Sample, pairs: int) -> Comparison:
    """Sample both in pairs, in an order drawn for each; the ratio is how many times slower ours is."""
    order = random.Random(0)
    for warm_up in (ours, theirs) * 3:
        warm_up()
    times = []
    for _ in range(pairs):
        if order.random() < 0.5:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        times.append((mine, other))
    return Comparison(
        ratio=statistics.median(mine / other for mine, other in times),
        ours=1e3 * statistics.median(mine for mine, _ in times),
        theirs=1e3 * statistics.median(other for _, other in times),
    )


def eager_rows(net: nn.Module, pairs: int) -> dict[str, Comparison]:
    threshold = usual_threshold(net)
    rule, stats = gg.ErrorClipByValue(threshold), gg.ErrorClipStats(net)
    blocks = {
        "value": lambda loss: gg.error_clip(loss, rule),
        "with statistics": lambda loss: gg.error_clip(loss, rule, stats=stats),
        "norm": lambda loss: gg.error_clip(loss, gg.ErrorClipByNorm(threshold)),
        "non-finite watch": lambda loss: gg.error_clip(loss, gg.rules.ErrorClipNonfinite("raise")),
    }
    plain = lambda: sample(net, net.loss, nullcontext)  # noqa: E731
    return {
        name: slowdown(lambda block=block: sample(net, net.loss, block), plain, pairs) for name, block in blocks.items()
    }


def seconds_of_first_step(net: nn.Module, loss_of: Callable[[], Tensor]) -> float:
    """Compile, for the first time as far as the compiler knows: what it keeps on disk is switched off."""
    net.zero_grad()
    start = time.perf_counter()
    loss_of().backward()
    return time.perf_counter() - start


def compiled_rows(net: nn.Module, pairs: int) -> dict[str, Comparison]:
    rule = gg.ErrorClipByValue(usual_threshold(net))
    torch._dynamo.reset()
    plain = torch.compile(net.loss, fullgraph=True)
    ours = torch.compile(lambda: gg.attach_error_clip(net.loss(), rule), fullgraph=True)
    times = [seconds_of_first_step(net, step) for step in (ours, plain)]
    running = [lambda step=step: sample(net, step, nullcontext) for step in (ours, plain)]
    return {
        "compiled": slowdown(*running, pairs),
        "time to compile": Comparison(times[0] / times[1], *(1e3 * seconds for seconds in times)),
    }


def warm_the_compiler_up() -> None:
    """Import all of it, and let it look for its tools."""
    weight = torch.ones(3, requires_grad=True)
    torch.compile(lambda: weight.sin().sum())().backward()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="nets whose names contain this")
    parser.add_argument("--compiled", action="store_true", help="attach_error_clip under Inductor over plain Inductor")
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="for a machine that has other work too")
    args = parser.parse_args()
    if args.processor_time:
        globals()["CLOCK"] = time.process_time
    torch.set_num_threads(args.threads)
    if args.compiled:
        torch._inductor.config.force_disable_caches = True
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        warm_the_compiler_up()
    table = Table("net", "clip", "with ms", "without ms", "times slower", "goal, at most")
    for name, make in NETS.items():
        if args.only not in name:
            continue
        torch.manual_seed(0)
        for clip, found in (compiled_rows if args.compiled else eager_rows)(make(), args.pairs).items():
            goal = GOALS.get(clip, {}).get(name)
            colour = "default" if goal is None else "green" if found.ratio <= goal else "red"
            cells = f"{found.ours:.2f}", f"{found.theirs:.2f}", f"[{colour}]{found.ratio:.3f}[/]", f"{goal or '-'}"
            table.add_row(name, clip, *cells)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {args.pairs} pairs")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
