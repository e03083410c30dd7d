"""What watching costs: steps with and without an observer, in turn, in one process. Goal: at most 1 % more time.

python benchmarks/watching.py [--pairs 200] [--model char]

`ratio` is the median over pairs of neighbouring steps, one watched and one not; `own` is the observer's own clock,
which a noisy machine disturbs less. Steps with the extras are in the mean of `own` and not in the median of `ratio`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gradguard.monitoring.observe.observer import Observer, observe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import char_lm

GOAL = 0.01


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4, length: int = 128):
        super().__init__()
        self.characters, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.blocks(self.characters(characters) + self.places))


def gpt_step(clip: bool) -> Callable[[], None]:
    return training(GPT(), torch.randint(0, 256, (8, 129)), lambda model, x: model(x), clip)


def char_step(clip: bool) -> Callable[[], None]:
    model = char_lm.CharModel(128)
    return training(model, torch.randint(0, 90, (32, 101)), lambda model, x: model(x)[0], clip)


def training(model: nn.Module, data: Tensor, logits: Callable, clip: bool) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits(model, data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(step: Callable[[], None], pairs: int) -> tuple[float, float, float]:
    """Milliseconds of a plain step, the median ratio of watched to plain steps, and the observer's own share."""
    observer = Observer(Path(tempfile.mkdtemp()) / "run.jsonl", {})

    def watched() -> float:
        with observe(observer):  # outside the time: patching is no part of a step
            return timed(step)

    for _ in range(3):
        timed(step), watched()
    own, ratios, plain = observer.overhead, [], []
    for k in range(pairs):
        a, b = (watched(), timed(step)) if k % 2 else (timed(step), watched())[::-1]
        ratios.append(a / b)
        plain.append(b)
    own = (observer.overhead - own) / pairs
    observer.close(0, False)
    return 1e3 * statistics.median(plain), statistics.median(ratios), own / statistics.mean(plain)


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--model", default="", help="models whose name contains this")
    args = parser.parse_args()
    table = Table("model", "the script clips", "step ms", "ratio", "own", "goal")
    for name, make in {"char_lm": char_step, "GPT, 4 layers of 256": gpt_step}.items():
        for clip in (False, True):
            if args.model in name:
                plain, ratio, own = measure(make(clip), args.pairs)
                colour = "green" if own <= GOAL else "red"
                table.add_row(
                    name, str(clip), f"{plain:.1f}", f"{ratio:.4f}", f"[{colour}]{own:.2%}[/]", f"<= {GOAL:.0%}"
                )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
