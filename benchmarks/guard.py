"""A guard on fused AdamW against `clip_grad_norm_` and fused AdamW, on this machine's CPU. Prints ratios and goals.

python benchmarks/guard.py [--pairs 21] [--model "GPT-2 small"]
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gradguard.clip.clip_rules import ClipByGlobalNorm
from gradguard.clip.guard import Guard
from pairs import compare
from shapes import gpt2_small, many_small, resnet50

MODELS = {"GPT-2 small": gpt2_small, "ResNet-50": resnet50, "2,000 x 1,000": many_small}
GOAL = 0.9
"""Time with a guard over time without, for the step with its clip; for many small tensors there is none."""


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape).mul_(0.05)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape)
    return made


def fused(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-6, fused=True)


def calls(shapes: list[tuple[int, ...]], binds: bool) -> tuple[Callable, Callable]:
    ours, theirs = parameters(shapes), parameters(shapes)
    a, b = fused(ours), fused(theirs)
    # Both clip the same gradients again and again: a threshold that falls by 1 % a step goes on binding.
    rule = ClipByGlobalNorm(1e9)
    Guard(a, rule, nonfinite="skip")
    norm = float(nn.utils.get_total_norm([p.grad for p in ours]))

    def threshold(k: int) -> float:
        return norm * 0.99 ** (k + 1) if binds else 1e9

    def guarded(k: int) -> None:
        rule.max_norm = threshold(k)
        a.step()

    def by_hand(k: int) -> None:
        nn.utils.clip_grad_norm_(theirs, threshold(k))
        b.step()

    return guarded, by_hand


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="models whose name contains this")
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    table = Table("gradients", "clip", "guard ms", "clip_grad_norm_ ms", "time", "goal")
    for name, shapes in MODELS.items():
        if args.model not in name:
            continue
        for binds in (False, True):
            found = compare(*calls(shapes(), binds), args.pairs)
            time, goal = 1 / found.ratio, GOAL if len(shapes()) < 1000 else 1.0
            colour = "green" if time <= goal else "red"
            cells = f"{found.ours:.2f}", f"{found.theirs:.2f}", f"[{colour}]{time:.2f}[/]", f"<= {goal}"
            table.add_row(name, "binds" if binds else "does not bind", *cells)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, AdamW(fused=True)")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
