"""`gg.gradcheck` on PyTorch's own operators: flags on them as they are, and the share of planted errors that it sees.

python benchmarks/gradient_check_operators.py [--torch] [--only softmax] [--per-operator 3] [--max-inputs 300]
python benchmarks/gradient_check_operators.py --time --per-operator 1 --max-inputs 30

An error is planted in the gradient of a sample's first input: the largest element is 10 % too large, or everything is
too large by a factor of 1 + 1e-4. Samples whose gradient is 0 everywhere get none, nor do those which the checker
flags as they are: their FAIL would say nothing.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.gradcheck import GradcheckError

import gradguard as gg
from pairs import compare

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/gradient_check"))
from operators import Sample, planted_factor, planted_one_element, samples

Checker = Callable[[Sample], tuple[str, str]]
"""Returns "PASS", "FAIL" or "INCONCLUSIVE", and a text for people."""

AS_THEY_ARE, ONE_ELEMENT, FACTOR = "unmodified", "one element +10 %", "all × (1 + 1e-4)"
ERRORS: dict[str, Callable[[Sample], Sample | None]] = {
    ONE_ELEMENT: lambda sample: planted_one_element(sample, seed=0),
    FACTOR: lambda sample: planted_factor(sample, 1 + 1e-4),
}
VERDICTS = "PASS", "FAIL", "INCONCLUSIVE", "error"


def ours(sample: Sample) -> tuple[str, str]:
    report = gg.gradcheck(sample.fn, *sample.inputs)
    return report.verdict, str(report)


def torchs(*, fast: bool) -> Checker:
    def check(sample: Sample) -> tuple[str, str]:
        try:
            torch.autograd.gradcheck(sample.fn, sample.inputs, fast_mode=fast)
        except GradcheckError as wrong:
            return "FAIL", str(wrong)
        return "PASS", ""

    return check


@dataclass
class Tally:
    """What one checker said.

    Attributes:
        verdicts: How often each verdict fell, for each kind of sample.
        unusual: Name, verdict and text, for unmodified samples that did not pass and for errors.
        missed: Names of planted samples that did not fail, with the verdict.
        seconds: In checks of unmodified samples.
    """

    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: {k: Counter() for k in (AS_THEY_ARE, *ERRORS)})
    unusual: list[tuple[str, str, str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, check: Checker, kind: str, sample: Sample) -> str:
        start = time.perf_counter()
        try:
            verdict, text = check(sample)
        except Exception as error:  # is counted, and the other samples go on
            verdict, text = "error", f"{type(error).__name__}: {error}"
        if kind == AS_THEY_ARE:
            self.seconds += time.perf_counter() - start
        self.verdicts[kind][verdict] += 1
        if verdict == "error" or (kind == AS_THEY_ARE and verdict != "PASS"):
            self.unusual.append((sample.name, verdict, text))
        elif kind != AS_THEY_ARE and verdict != "FAIL":
            self.missed.append(f"{sample.name}: {verdict}")
        return verdict

    def cells(self) -> list[str]:
        counts = self.verdicts[AS_THEY_ARE]
        shares = [
            f"{planted['FAIL']} of {planted.total()} ({planted['FAIL'] / max(planted.total(), 1):.1%})"
            for planted in (self.verdicts[ONE_ELEMENT], self.verdicts[FACTOR])
        ]
        return [*(str(counts[verdict]) for verdict in VERDICTS), *shares, f"{self.seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="also torch.autograd.gradcheck, slow and fast")
    parser.add_argument("--only", default="", help="operators whose names contain this")
    parser.add_argument("--per-operator", type=int, default=3, help="samples of each operator")
    parser.add_argument("--max-inputs", type=int, default=300, help="elements of a sample's inputs")
    parser.add_argument("--time", action="store_true", help="only the time beside torch's slow mode, by size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.time:
        show_times(samples(per_operator=args.per_operator, max_inputs=args.max_inputs, only=args.only))
        return
    checkers: dict[str, Checker] = {"gradguard": ours}
    if args.torch:
        checkers |= {"torch slow": torchs(fast=False), "torch fast": torchs(fast=True)}
    tallies = {name: Tally() for name in checkers}
    found = list(samples(per_operator=args.per_operator, max_inputs=args.max_inputs, only=args.only))
    for sample in found:
        wrong = {kind: plant(sample) for kind, plant in ERRORS.items()}
        for name, check in checkers.items():
            if tallies[name].add(check, AS_THEY_ARE, sample) in {"FAIL", "error"}:
                continue
            for kind, planted in wrong.items():
                if planted is not None:
                    tallies[name].add(check, kind, planted)
    show(found, tallies)


PAIRS = 7
UP_TO = 2, 6, 12, 23, sys.maxsize
"""Elements of a sample's inputs, by which times are put together."""


def show_times(found: Iterable[Sample]) -> None:
    """Print processor times of samples that both pass, over those of `torch.autograd.gradcheck`: medians of pairs."""
    both = ours, torchs(fast=False)
    times = []
    for sample in found:
        try:
            if {check(sample)[0] for check in both} != {"PASS"}:
                continue
        except Exception:  # torch refuses some
            continue
        own, theirs = (lambda _, check=check, sample=sample: check(sample) for check in both)
        times.append((sum(x.numel() for x in sample.inputs), compare(own, theirs, PAIRS, time.process_time)))
    table = Table("elements", "samples", "ours ms", "torch ms", "geometric mean of ratios", "ratio of sums")
    for least, most in [*pairwise((0, *UP_TO)), (0, sys.maxsize)]:
        of_size = [one for size, one in times if least < size <= most]
        if of_size:
            sums = sum(one.ours for one in of_size) / sum(one.theirs for one in of_size)
            medians = (statistics.median(ms) for ms in zip(*((one.ours, one.theirs) for one in of_size), strict=True))
            mean = 1 / statistics.geometric_mean(one.ratio for one in of_size)
            cells = f"{least + 1} to {most}", str(len(of_size)), *(f"{ms:.1f}" for ms in medians), f"{mean:.2f}"
            table.add_row(*cells, f"{sums:.2f}")
    Console(width=120).print(table)


def show(found: list[Sample], tallies: dict[str, Tally]) -> None:
    for name, verdict, text in tallies["gradguard"].unusual:
        print(f"── {name}: {verdict}\n{text}\n")
    for missed in tallies["gradguard"].missed:
        print(f"missed: {missed}")
    for name, tally in tallies.items():
        flagged = sorted({sample.rpartition("#")[0] for sample, verdict, _ in tally.unusual if verdict == "FAIL"})
        print(f"{name} flags {len(flagged)} unmodified operators: {', '.join(flagged)}")
    table = Table("checker", *VERDICTS, f"FAIL, {ONE_ELEMENT}", f"FAIL, {FACTOR}", "seconds, unmodified")
    for name, tally in tallies.items():
        table.add_row(name, *tally.cells())
    print(f"torch {torch.__version__}, {len({s.operator for s in found})} operators, {len(found)} samples")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
