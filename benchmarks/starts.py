"""Does a clip hold a run that diverges from its first step on, and leave a healthy warm-up alone? Prints two tables.

python benchmarks/starts.py [--seeds 2] [--tasks "deep relu"] [--keep FILE]

**Diverging starts** are small regressions, classifications and a GRU by SGD, with and without momentum, at learning
rates that they do not bear. **Healthy ones** are warm-ups, rates that are usual, norms that grow 21-fold in 100 steps,
weights that start at zero, and Adam. Each is trained from the same seed without a clip, and by `gg.Guard` with
`ClipByGlobalNorm(1.0)`, with `ClipByMedian(update=None)`, which knows norms alone, and with `ClipByMedian()`. The
numbers are held-out losses, and the share of the steps on which the clip bound.

A start is *missed* where `ClipByMedian()` ends above twice what norm 1.0 ends at, and a warm-up is *cut* where it binds
on more than 2 % of the steps. `--keep FILE` goes on where an earlier call stopped.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradguard as gg
import recommendation_tasks as known
from gradguard.clip.clipper import Clipper
from recommendation_tasks import Task

Make = Callable[[int], Task]


def regression(
    scale: float,
    rate: float,
    *,
    momentum: float = 0.0,
    widths: tuple[int, ...] = (64, 64),
    truth: str = "sum",
    zero: bool = False,
    steps: int = 300,
) -> Make:
    """An MLP of ten inputs, ``scale`` times too large, by SGD."""

    def make(seed: int) -> Task:
        sizes = [10, *widths]
        hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        model, teacher = nn.Sequential(*hidden, nn.Linear(sizes[-1], 1)), torch.randn(10)
        if zero:
            nn.init.zeros_(model[-1].weight)
            nn.init.zeros_(model[-1].bias)

        def batch(i: int, count: int = 32) -> tuple[Tensor, Tensor]:
            inputs = scale * torch.randn(count, 10)
            wanted = inputs @ teacher
            return inputs, {"sum": wanted, "square": wanted.square() / 10, "sine": torch.sin(wanted)}[truth][:, None]

        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        return known._supervised(model, optimizer, batch, batch(0, 512), functional.mse_loss, steps=steps)

    return make


def far_targets(rate: float, offset: float) -> Make:
    """Targets far from what the network says at first."""

    def make(seed: int) -> Task:
        model, teacher = known._mlp(10, 1), torch.randn(10)

        def batch(i: int) -> tuple[Tensor, Tensor]:
            inputs = torch.randn(32, 10)
            return inputs, (offset + inputs @ teacher)[:, None]

        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        return known._supervised(model, optimizer, batch, batch(0), functional.mse_loss)

    return make


def classification(kind: str, rate: float, *, ramp: bool = False, small_head: bool = False, warm_up: int = 60) -> Make:
    """The MLP of `recommendation_tasks`; ``ramp`` lets its norms grow 21-fold in the first 100 steps."""

    def make(seed: int) -> Task:
        draw, model = known._clusters(seed), known._mlp(20, 10)
        if small_head:
            nn.init.normal_(model[-1].weight, std=1e-3)
        optimizers = {
            "SGD": partial(torch.optim.SGD, momentum=0.0),
            "momentum": partial(torch.optim.SGD, momentum=0.9),
            "Adam": torch.optim.Adam,
            "RMSprop": torch.optim.RMSprop,
        }
        return known._supervised(
            model,
            optimizers[kind](model.parameters(), lr=rate),
            lambda i: draw(32),
            draw(1000),
            functional.cross_entropy,
            spoil=lambda i, loss: loss * min(1.0, 21 ** (i / 100 - 1)) if ramp else loss,
            schedule=known._decay(300, warm_up) if warm_up else lambda i: 1.0,
        )

    return make


DIVERGING: dict[str, Make] = {
    f"{truth} x {scale}, {rate}": regression(scale, rate, truth=truth)
    for truth in ("sum", "square")
    for scale in (3, 4, 5, 6)
    for rate in (0.02, 0.05)
} | {
    "sum x 3, 0.005, momentum": regression(3, 0.005, momentum=0.9),
    "sum x 6, 0.005, momentum": regression(6, 0.005, momentum=0.9),
    "sum x 4, 0.02, wide": regression(4, 0.02, widths=(256, 256)),
    "sum x 4, 0.02, deep": regression(4, 0.02, widths=(64, 64, 64, 64, 64)),
    "sum x 4, 0.05, zero head": regression(4, 0.05, zero=True),
    "linear x 4, 0.1": regression(4, 0.1, widths=()),
    "far targets, 0.01": far_targets(0.01, 50.0),
    "far targets, 0.05": far_targets(0.05, 20.0),
    "deep relu": known.diverges_at_once,
    "deep residual": known.deep_hot,
    "cnn": known.cnn_hot,
    "gru": known.gru_hot,
    "factors": known.factors,
}

HEALTHY: dict[str, Make] = {
    f"{kind}, {what}": classification(kind, rate, **more)
    for kind, rate in (("SGD", 0.1), ("momentum", 0.02), ("Adam", 3e-3), ("RMSprop", 1e-3))
    for what, more in (("norms x 21", {"ramp": True}), ("small head", {"small_head": True}), ("warm-up", {}))
} | {
    "constant rate, SGD": classification("SGD", 0.1, warm_up=0),
    "constant rate, Adam": classification("Adam", 3e-3, warm_up=0),
    "sum x 1, 0.01": regression(1, 0.01),
    "sum x 3, 0.001": regression(3, 0.001),
    "sine x 1, 0.05": regression(1, 0.05, truth="sine"),
    "zero head": regression(1, 0.01, zero=True),
    "linear from zero": regression(1, 0.02, widths=(), zero=True),
    "cnn, batch norm": known.cnn_stable,
    "cnn, restarts": known.cnn_warm_restarts,
    "autoencoder": known.autoencoder,
    "lstm, Adam": known.lstm_adam,
}

RULES: dict[str, Callable[[], Clipper] | None] = {
    "none": None,
    "norm 1.0": lambda: gg.ClipByGlobalNorm(1.0),
    "median, by norms": lambda: gg.ClipByMedian(update=None),
    "median": gg.ClipByMedian,
}


def run(make: Make, seed: int, rule: Callable[[], Clipper] | None) -> tuple[float, float]:
    """The held-out loss, and the share of the steps on which the clip bound."""
    torch.manual_seed(seed)
    task = make(seed)
    guards = [] if rule is None else [gg.Guard(one, rule(), max_consecutive_skips=None) for one in task.optimizers]
    bound = 0
    for i in range(task.steps):
        task.step(i, lambda optimizer: None)
        bound += sum(bool(guard.last.clipped) for guard in guards if guard.last is not None)
    loss = task.evaluate()
    return (loss if math.isfinite(loss) else math.inf), bound / task.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=[*DIVERGING, *HEALTHY])
    parser.add_argument("--keep", type=Path, help="where the numbers are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept: dict[str, list[float]] = {}
    if arguments.keep is not None and arguments.keep.exists():
        kept = dict(json.loads(line) for line in arguments.keep.read_text().splitlines())
    for title, tasks in (("diverging", DIVERGING), ("healthy", HEALTHY)):
        print(f"\n| {title} | seed | " + " | ".join(RULES) + " | |\n|" + "---|" * (len(RULES) + 3))
        starts = failed = 0
        for name, make in tasks.items():
            for seed in range(arguments.seeds) if name in arguments.tasks else ():
                rows = {}
                for label, rule in RULES.items():
                    key = f"{name}; {seed}; {label}"
                    if key not in kept:
                        kept[key] = list(run(make, seed, rule))
                        if arguments.keep is not None:
                            with arguments.keep.open("a") as file:
                                file.write(json.dumps([key, kept[key]]) + "\n")
                    rows[label] = kept[key]
                words = verdict(title, rows)
                starts, failed = starts + 1, failed + bool(words)
                cells = " | ".join(f"{loss:.3g} ({share:.0%})" for loss, share in rows.values())
                print(f"| {name} | {seed} | {cells} | {words} |", flush=True)
        print(f"\n{starts} starts, of which {failed} failed")


def verdict(title: str, rows: dict[str, list[float]]) -> str:
    (free, _), (habit, _), (ends, share) = rows["none"], rows["norm 1.0"], rows["median"]
    if title == "diverging":
        return "missed" if ends > 2 * habit else ""
    return ", ".join(["cut"] * (share > 0.02) + ["worse"] * (ends > 1.05 * free and ends > 1e-3))


if __name__ == "__main__":
    main()
