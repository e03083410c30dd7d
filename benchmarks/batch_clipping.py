"""Batch clipping against PyTorch and the published AGC loops, on this machine's CPU. Prints ratios and goals.

python benchmarks/batch_clipping.py [--only norm] [--model GPT]
GRADGUARD_NATIVE=0 python benchmarks/batch_clipping.py   # without the compiled kernels
"""

import argparse
import math
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradguard as gg
from pairs import compare
from shapes import gpt2_small, many_small, resnet50

MODELS = {"GPT-2 small": gpt2_small, "ResNet-50": resnet50, "2,000 x 1,000": many_small}
DECAY = 0.99
"""Each repetition lowers the threshold by this, so that a clip that binds goes on binding."""


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape).mul_(0.05).to(dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape).to(dtype)
    return made


def unit_norm(x: Tensor) -> Tensor:
    """As the published PyTorch loops take it: all dimensions but the first, or the whole of a vector."""
    return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


def timm_agc(params: list[nn.Parameter], factor: float, eps: float = 1e-3) -> None:
    """AGC by timm's formula: a loop of out-of-place steps."""
    for p in params:
        weight, grad = p.detach(), p.grad.detach()
        largest = unit_norm(weight).clamp_(min=eps).mul_(factor)
        norm = unit_norm(grad)
        clipped = grad * (largest / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < largest, grad, clipped))


def composer_agc(params: list[nn.Parameter], threshold: float) -> None:
    """AGC by Composer's formula, which has no eps."""
    for p in params:
        weight, grad = p.detach(), p.grad.detach()
        coefficient = threshold * unit_norm(weight) / unit_norm(grad)
        p.grad.detach().mul_(coefficient.nan_to_num_(nan=1.0).clamp_(max=1.0))


GOALS = {
    ("GPT-2 small", "float32"): {"norm": (2.2, 1.15), "value": (2.2, 1.9)},
    ("GPT-2 small", "bfloat16"): {"norm": (2.8, 1.2), "value": (3.0, 2.5)},
    ("ResNet-50", "float32"): {"norm": (2.3, 1.15), "AGC": (5.0, 4.0)},
    ("ResNet-50", "bfloat16"): {"norm": (2.5, 1.4), "AGC": (5.0, 4.0)},
    ("2,000 x 1,000", "float32"): {"norm": (4.0, 3.0), "value": (1.8, 1.6), "AGC": (5.0, 5.0)},
    ("2,000 x 1,000", "bfloat16"): {"norm": (4.0, 3.0), "value": (1.8, 1.6), "AGC": (5.0, 5.0)},
}
"""How many times faster than the peer: where nothing is clipped, and where everything is. Elsewhere: not slower."""

Call = Callable[[int], object]


def norm_rows(a: list[nn.Parameter], b: list[nn.Parameter]) -> dict[str, tuple[Call, Call]]:
    norm = float(gg.get_total_norm([p.grad for p in a]))
    return {
        "norm, does not bind": (lambda k: gg.clip_grad_norm_(a, 1e9), lambda k: nn.utils.clip_grad_norm_(b, 1e9)),
        "norm, binds": (
            lambda k: gg.clip_grad_norm_(a, norm * DECAY ** (k + 1)),
            lambda k: nn.utils.clip_grad_norm_(b, norm * DECAY ** (k + 1)),
        ),
    }


def value_rows(a: list[nn.Parameter], b: list[nn.Parameter]) -> dict[str, tuple[Call, Call]]:
    return {
        "value, does not bind": (lambda k: gg.clip_grad_value_(a, 1e3), lambda k: nn.utils.clip_grad_value_(b, 1e3)),
        "value, binds": (
            lambda k: gg.clip_grad_value_(a, 2 * DECAY**k),
            lambda k: nn.utils.clip_grad_value_(b, 2 * DECAY**k),
        ),
    }


def agc_rows(a: list[nn.Parameter], b: list[nn.Parameter]) -> dict[str, tuple[Call, Call]]:
    bind, free = 0.01, 1e6
    return {
        "AGC against timm's, does not bind": (lambda k: gg.clip_grad_adaptive_(a, free), lambda k: timm_agc(b, free)),
        "AGC against timm's, binds": (
            lambda k: gg.clip_grad_adaptive_(a, bind * DECAY**k),
            lambda k: timm_agc(b, bind * DECAY**k),
        ),
        "AGC against Composer's, does not bind": (
            lambda k: gg.clip_grad_adaptive_(a, free),
            lambda k: composer_agc(b, free),
        ),
        "AGC against Composer's, binds": (
            lambda k: gg.clip_grad_adaptive_(a, bind * DECAY**k),
            lambda k: composer_agc(b, bind * DECAY**k),
        ),
    }


def goal_of(name: str, dtype: str, call: str) -> float:
    free, binds = GOALS[name, dtype].get(call.split()[0].strip(","), (1.0, 1.0))
    return 1.0 if "Composer" in call else binds if call.endswith(" binds") else free


def limit(params: list[nn.Parameter], call: str) -> float:
    """Milliseconds that torch takes to read (or read and write) as many bytes in one block; weights too for AGC."""
    size = sum(p.numel() * p.element_size() for p in params)
    block = torch.ones(size // 4)
    read, write = (lambda k: block.sum()), (lambda k: block.mul_(1.0))
    binds = call.endswith(" binds")
    if "AGC" not in call:
        return compare(write if binds else read, read, 9).ours
    return compare(read, read, 9).ours + compare(write if binds else read, read, 9).ours


def accuracy(dtype: torch.dtype) -> None:
    gradients = [p.grad for p in parameters(gpt2_small(), dtype)]
    exact = math.sqrt(math.fsum(float(x.double().square().sum()) for g in gradients for x in g.split(1 << 12)))
    ours, theirs = (float(f(gradients)) / exact - 1 for f in (gg.get_total_norm, nn.utils.get_total_norm))
    print(f"relative error of the norm, GPT-2 small, {dtype}: gradguard {ours:+.1e}, torch {theirs:+.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows that contain this")
    parser.add_argument("--model", default="", help="models whose name contains this")
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    table = Table("gradients", "dtype", "call", "ours ms", "theirs ms", "times faster", "goal", "ours / limit")
    for dtype in (torch.float32, torch.bfloat16):
        for name, shapes in MODELS.items():
            a, b = parameters(shapes(), dtype), parameters(shapes(), dtype)
            rows = norm_rows(a, b) | value_rows(a, b) | agc_rows(a, b)
            short = str(dtype).removeprefix("torch.")
            for call, (ours, theirs) in rows.items():
                if args.only not in call or args.model not in name:
                    continue
                for p, q in zip(a, b, strict=True):
                    torch.manual_seed(p.numel())
                    q.grad = p.grad.normal_().clone()
                found, goal = compare(ours, theirs, args.pairs), goal_of(name, short, call)
                colour = "green" if found.ratio >= goal else "red"
                share = f"{found.ours / limit(a, call):.2f}" if len(a) < 1000 else ""
                cells = f"{found.ours:.2f}", f"{found.theirs:.2f}", f"[{colour}]{found.ratio:.2f}[/]", f"{goal}", share
                table.add_row(name, short, call, *cells)
    print(gg.native.status())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    Console(width=120).print(table)
    for dtype in (torch.float32, torch.bfloat16):
        accuracy(dtype)


if __name__ == "__main__":
    main()
