"""What each rule that chooses its own threshold does with the same sequences of norms. Prints a table.

python benchmarks/thresholds.py [--seeds 0 1 2 3 4]

The sequences are log-normal noise of standard deviation 0.15 about a level, with no feedback into a training run:

* **rise**: 300 steps at level 1, then 1000 at level 3;
* **spikes**: 300 steps at level 1, a spike of 200, 200 steps, five spikes of 200 in a row, 200 steps;
* **decay**: 1500 steps at level 5 exp(-i / 400), with a spike of 50 times the level at the last.

Every rule sees them as the norms of one float64 parameter. ZClip has no ceiling and AdaGC no absolute threshold. "2 x
median of 100" is the rule of icefall's ScaledAdam, for comparison. Numbers are medians over the seeds.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguard.clip.clipper import Clipper
from gradguard.clip.thresholds.adagc import AdaGC
from gradguard.clip.thresholds.autoclip import AutoClip
from gradguard.clip.thresholds.clip_fraction import ClipFraction
from gradguard.clip.thresholds.median import ClipByMedian
from gradguard.clip.thresholds.threshold_rule import ThresholdClipper
from gradguard.clip.thresholds.zclip import ZClip

SEEDS = (0, 1, 2, 3, 4)
NOISE = 0.15
PASSES, FOR_STEPS = 0.95, 20  # "passes again" means this share of the gradient, over this many steps


class TwiceTheMedian(ThresholdClipper):
    """icefall: each 100 steps, twice the median of the last 100 norms."""

    def __init__(self) -> None:
        super().__init__(threshold=torch.tensor(math.inf, dtype=torch.float64))
        self.norms: list[float] = []

    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        if self.norms and len(self.norms) % 100 == 0:
            self.state["threshold"].fill_(2 * sorted(self.norms[-100:])[50])
        self.norms.append(float(norm))
        return self.state["threshold"].clone()


RULES: dict[str, Callable[[], Clipper]] = {
    "ZClip 0.97 / 2.5": lambda: ZClip(ceiling=None),
    "AdaGC 1.05 / 0.98": lambda: AdaGC(absolute=math.inf),
    "AutoClip p10, all history": lambda: AutoClip(10),
    "AutoClip p90, window 1000": lambda: AutoClip(90, window=1000),
    "2 x median of 100": TwiceTheMedian,
    "ClipFraction 0.05": lambda: ClipFraction(0.05),
    "ClipByMedian": ClipByMedian,
}


def noisy(levels: list[float], seed: int) -> list[float]:
    draws = torch.randn(len(levels), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [level * math.exp(NOISE * z) for level, z in zip(levels, draws.tolist(), strict=True)]


def rise(seed: int) -> list[float]:
    return noisy([1.0] * 300 + [3.0] * 1000, seed)


SPIKES = [300, *range(501, 506)]


def spikes(seed: int) -> list[float]:
    norms = noisy([1.0] * 706, seed)
    return [200.0 if i in SPIKES else n for i, n in enumerate(norms)]


def decay(seed: int) -> list[float]:
    levels = [5 * math.exp(-i / 400) for i in range(1500)]
    return [*noisy(levels[:-1], seed), 50 * levels[-1]]


def replay(clipper: Clipper, norms: list[float]) -> list[float]:
    """Return what each gradient was multiplied by."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    coefficients = []
    for norm in norms:
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        coefficients.append(float(clipper([parameter]).coefficient))
    return coefficients


@dataclass(frozen=True)
class Row:
    """What a rule did; shares are of steps, but for `kept`, which is of the gradient."""

    steady: float
    risen: float
    kept: float
    until: float
    spike: float
    around: float
    falling: float
    late: float


def measure(rule: Callable[[], Clipper], seed: int) -> Row:
    risen = replay(rule(), rise(seed))
    after = risen[300:]
    spiky, norms = replay(rule(), spikes(seed)), spikes(seed)
    fallen = replay(rule(), decay(seed))
    last = decay(seed)[-1]
    return Row(
        steady=share(risen[100:300]),
        risen=share(after[-300:]),
        kept=statistics.mean(after[-300:]),
        until=steps_until(after),
        spike=norms[300] * spiky[300],
        around=share([c for i, c in enumerate(spiky) if i > 300 and i not in SPIKES]),
        falling=share(fallen[100:-1]),
        late=last * fallen[-1] / (last / 50),
    )


def share(coefficients: list[float]) -> float:
    return sum(c < 1 for c in coefficients) / len(coefficients)


def steps_until(coefficients: list[float]) -> float:
    """After how many steps the gradient passes again."""
    for i in range(len(coefficients) - FOR_STEPS):
        if statistics.mean(coefficients[i : i + FOR_STEPS]) >= PASSES:
            return i
    return math.inf


def middle(rows: list[Row]) -> Row:
    return Row(*(statistics.median(getattr(row, name) for row in rows) for name in Row.__dataclass_fields__))


def line(name: str, row: Row) -> str:
    until = "never" if math.isinf(row.until) else f"{row.until:.0f}"
    return (
        f"| {name} | {row.steady:.1%} | {row.risen:.0%} / {row.kept:.2f} / {until} | {row.spike:.1f} | "
        f"{row.around:.1%} | {row.falling:.1%} | {row.late:.1f} |"
    )


def main(seeds: list[int]) -> None:
    print(f"seeds {seeds}\n")
    print(
        "| rule | clipped, steady | after x3: clipped in the last 300 / kept / steps until it passes | "
        "spike of 200 passes as | clipped around spikes | clipped in decay | late spike of 50 passes as |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        print(line(name, middle([measure(rule, seed) for seed in seeds])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    main(parser.parse_args().seeds)
