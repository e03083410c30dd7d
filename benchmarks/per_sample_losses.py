"""Per-sample clipping under everyday losses whose inputs are large: a step over the plain step. Prints ratios.

python benchmarks/per_sample_losses.py [NAME ...] [--pairs 7]

Where a vocabulary has 5,000 words, or an image is restored pixel by pixel, the outputs are what a small model spends
its time on, and a check of the loss that goes over them a few dozen times costs more than the model. The models here
are so small that they hide nothing. Time: processor time of one thread, both steps in pairs in one process, from the
fifth step on, the median of the pairs' ratios; *first* is the first step of a clipper, in plain steps.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradguard as gg

B, T, V, SIDE = 16, 128, 5000, 192
_EARLY = 4


class Scores(nn.Module):
    """The scores of 5,000 words at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, 64), nn.Linear(64, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))


torch.manual_seed(0)
IDS, NEXT = torch.randint(V, (2, B, T)).unbind()
IMAGES, TARGETS = torch.randn(B, 3, SIDE, SIDE), torch.rand(B, 8, SIDE, SIDE)
CLASSES, TEACHER = torch.randint(8, (B, SIDE, SIDE)), torch.full((B, T, V), 1 / V)


def dice(outputs: Tensor) -> Tensor:
    chances = outputs.sigmoid()
    both = (chances * TARGETS).sum((1, 2, 3))
    return (1 - (2 * both + 1) / (chances.sum((1, 2, 3)) + TARGETS.sum((1, 2, 3)) + 1)).mean()


def focal(outputs: Tensor) -> Tensor:
    chances = outputs.sigmoid()
    return -((1 - chances) ** 2 * chances.clamp_min(1e-6).log()).mean()


Loss = Callable[[Tensor], Tensor]
OF_WORDS: dict[str, Loss] = {
    "cross entropy": lambda o: F.cross_entropy(o.flatten(0, 1), NEXT.flatten()),
    "cross entropy, shifted": lambda o: F.cross_entropy(o[:, :-1].reshape(-1, V), NEXT[:, 1:].flatten()),
    "cross entropy, temperature": lambda o: F.cross_entropy((o / 2.0).flatten(0, 1), NEXT.flatten()),
    "cross entropy, capped scores": lambda o: F.cross_entropy((30 * (o / 30).tanh()).flatten(0, 1), NEXT.flatten()),
    "cross entropy, label smoothing": lambda o: F.cross_entropy(o.flatten(0, 1), NEXT.flatten(), label_smoothing=0.1),
    "cross entropy in float64": lambda o: F.cross_entropy(o.double().flatten(0, 1), NEXT.flatten()),
    "distillation": lambda o: F.kl_div(o.log_softmax(-1), TEACHER, reduction="batchmean") / T,
    "z-loss beside": lambda o: (
        F.cross_entropy(o.flatten(0, 1), NEXT.flatten()) + 1e-4 * o.logsumexp(-1).square().mean()
    ),
}
OF_PIXELS: dict[str, Loss] = {
    "mse": lambda o: F.mse_loss(o, TARGETS),
    "mse by hand": lambda o: (o - TARGETS).square().mean(),
    "mse, scaled outputs": lambda o: F.mse_loss(o * 0.5 + 0.1, TARGETS),
    "l1": lambda o: F.l1_loss(o, TARGETS),
    "huber": lambda o: F.huber_loss(o, TARGETS),
    "segmentation": lambda o: F.cross_entropy(o, CLASSES),
    "bce of sigmoid": lambda o: F.binary_cross_entropy(o.sigmoid(), TARGETS),
    "dice": dice,
    "focal": focal,
}


def stepper(make: Callable[[], nn.Module], inputs: Tensor, loss: Loss, clipped: bool) -> Callable[[], float]:
    """Return a training step, which returns its processor seconds."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0)) if clipped else None

    def step() -> float:
        start = time.process_time()
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        if clipper is not None:
            clipper.clip_and_accumulate()
            clipper.pre_step()
        optimizer.step()
        return time.process_time() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="a part of the names of losses; all without")
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("loss", "plain ms", "times slower", "first")
    rows = [(name, Scores, IDS, loss) for name, loss in OF_WORDS.items()]
    rows += [(name, pixels, IMAGES, loss) for name, loss in OF_PIXELS.items()]
    for name, make, inputs, loss in rows:
        if args.names and not any(part in name for part in args.names):
            continue
        ours, plain = (stepper(make, inputs, loss, clipped) for clipped in (True, False))
        plain()
        early = [(ours(), plain()) for _ in range(_EARLY)]
        order, times = random.Random(0), list[tuple[float, float]]()
        for _ in range(args.pairs):
            first, second = (ours, plain) if order.random() < 0.5 else (plain, ours)
            one, other = first(), second()
            times.append((one, other) if first is ours else (other, one))
        middle = statistics.median(other for _, other in times)
        ratio = statistics.median(one / other for one, other in times)
        table.add_row(name, f"{middle * 1e3:.0f}", f"{ratio:.2f}", f"{early[0][0] / middle:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
