"""`gg.gradcheck` over PyTorch's own checker: seconds, finding a wrong element, every element, memory. Prints goals.

python benchmarks/gradient_check.py [--slow] [--only LSTM]

One thread, float64, processor time. PyTorch's slow mode on the convolution and the MLPs takes 15 to 35 seconds each,
and 9 GB on the convolution: it runs there with --slow only.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import gradguard as gg

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/gradient_check"))

QUICK_ENOUGH = 2e7
"""Elements of a Jacobian up to which slow mode takes less than about 3 seconds."""


class Attention(nn.Module):
    """A norm, and attention with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(*self.qkv(self.norm(x)).chunk(3, -1)))


class Recurrent(nn.LSTM):
    """An LSTM that returns its outputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class HalvedElement(torch.autograd.Function):
    """Returns its input; halves one element of the gradient."""

    @staticmethod
    def forward(weight: Tensor, row: int, column: int) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.place = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        gradient[ctx.place] *= 0.5
        return gradient, None, None


class WrongLinear(nn.Linear):
    """Wrong in one element of the weight's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, HalvedElement.apply(self.weight, 300, 17), self.bias)


def mlp(activation: nn.Module, first: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(first(64, 512), activation, nn.Linear(512, 32))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(64, 64), (32, 64)),
    "Conv2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 16, 16)),
    "LayerNorm": (lambda: nn.LayerNorm(64), (32, 64)),
    "attention": (Attention, (2, 16, 32)),
    "MLP, tanh": (lambda: mlp(nn.Tanh()), (16, 64)),
    "MLP, ReLU": (lambda: mlp(nn.ReLU()), (16, 64)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (4, 8, 8, 8)),
    "LSTM": (lambda: Recurrent(8, 16, batch_first=True), (4, 10, 8)),
}


def problem(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = CASES[case]
    return make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)


def seconds(call: Callable[[], object], repetitions: int = 5) -> float:
    """The median, of processor time: others may use the machine too."""
    times = [time.process_time()]
    for _ in range(repetitions):
        call()
        times.append(time.process_time())
    return statistics.median(end - start for start, end in pairwise(times))


def torchs_check(net: nn.Module, x: Tensor, *, fast: bool) -> bool:
    """Whether PyTorch's checker accepts a module's gradients, its parameters' too."""
    names = [name for name, _ in net.named_parameters()]
    call = lambda x, *parameters: torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))  # noqa: E731
    try:
        return torch.autograd.gradcheck(call, (x, *net.parameters()), fast_mode=fast)
    except GradcheckError:
        return False


def colour(value: float, fulfilled: bool, form: str = ".1f") -> str:
    return f"[{'green' if fulfilled else 'red'}]{value:{form}}[/]"


def against_torch(only: str, slow_everywhere: bool) -> Table:
    table = Table("case", "N", "M", "verdict", "forwards", "ours ms", "fast ms", "slow s", "slow ÷ ours", "goal")
    for case in CASES:
        if only not in case:
            continue
        net, x = problem(case)
        elements, outputs = x.numel() + sum(p.numel() for p in net.parameters()), net(x).numel()
        report = gg.gradcheck(net, x)
        ours = seconds(lambda net=net, x=x: gg.gradcheck(net, x))
        fast = seconds(lambda net=net, x=x: torchs_check(net, x, fast=True))
        cells = [f"{elements}", f"{outputs}", report.verdict, f"{report.forwards}", f"{1e3 * ours:.1f}"]
        cells.append(f"{1e3 * fast:.1f}")
        if slow_everywhere or elements * outputs < QUICK_ENOUGH:
            slow = seconds(lambda net=net, x=x: torchs_check(net, x, fast=False), repetitions=1)
            cells += [f"{slow:.2f}", colour(slow / ours, slow / ours >= 50 or elements < 2000)]
        else:
            cells += ["--slow", "-"]
        table.add_row(case, *cells, "≥ 50" if elements >= 2000 else "-")
    return table


def locating() -> Table:
    """One halved element of 50,720."""
    torch.manual_seed(0)
    net, x = mlp(nn.Tanh(), WrongLinear).double(), torch.randn(16, 64, dtype=torch.float64, requires_grad=True)
    report = gg.gradcheck(net, x)
    spent = seconds(lambda: gg.gradcheck(net, x))
    places = [f"{finding.input}{list(finding.index or ())}" for finding in report.findings]
    exact = len(places) == 1 and tuple(report.findings[0].index or ()) == (300, 17)
    table = Table("locating one halved element", "found", "goal")
    table.add_row("verdict", report.verdict, "FAIL")
    table.add_row("findings", f"[{'green' if exact else 'red'}]{', '.join(places)}[/]", "0.weight[300, 17]")
    for finding in report.findings:
        table.add_row(f"  {finding.kind}", f"{finding.analytical:.8g}, numerically {finding.numerical:.8g}", "half")
    table.add_row("seconds", colour(spent, spent < 1, ".3f"), "< 1")
    table.add_row("forwards", colour(report.forwards, report.forwards < 1000, "d"), "< 1000")
    table.add_row("accepted by torch, fast mode", str(torchs_check(net, x, fast=True)), "-")
    return table


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


EVERY_ELEMENT = {
    "conv2d": (convolution, {"x": (4, 8, 16, 16), "weight": (16, 8, 3, 3), "bias": (16,)}),
    "linear": (linear, {"x": (32, 64), "weight": (64, 64), "bias": (64,)}),
}


def every_element(only: str) -> Table:
    table = Table("every element", "N", "verdict", "forwards", "ours s", "element loop s", "loop ÷ ours", "goal")
    for name, (fn, shapes) in EVERY_ELEMENT.items():
        if only.lower() not in name:
            continue
        torch.manual_seed(0)
        inputs = {key: torch.randn(s, dtype=torch.float64, requires_grad=True) for key, s in shapes.items()}
        report = gg.gradcheck(fn, *inputs.values(), exhaustive=True)
        ours = seconds(lambda fn=fn, inputs=inputs: gg.gradcheck(fn, *inputs.values(), exhaustive=True), 3)
        loop = seconds(
            lambda fn=fn, inputs=inputs: [gg.get_numerical_gradient(fn, inputs, "out", key) for key in inputs], 1
        )
        elements = sum(x.numel() for x in inputs.values())
        cells = (
            report.verdict,
            f"{report.forwards}",
            f"{ours:.3f}",
            f"{loop:.3f}",
            colour(loop / ours, loop / ours >= 5),
        )
        table.add_row(name, f"{elements}", *cells, "≥ 5")
    return table


LARGE: dict[str, tuple[Callable[[], Callable[..., Tensor]], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(16, 32, 3, padding=1).double(), (8, 16, 64, 64)),
    "attention": (lambda: lambda x: F.scaled_dot_product_attention(x, x, x), (4, 8, 256, 64)),
    "8 layers": (
        lambda: nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU()))).double(),
        (1024, 512),
    ),
    "cross entropy": (
        lambda: lambda x: F.cross_entropy(x, torch.arange(len(x)), reduction="sum"),
        (1000, 4000),
    ),
    "softmax": (lambda: lambda x: x.softmax(-1), (2000, 1000)),
    "sin": (lambda: torch.sin, (2_000_000,)),
}
"""Functions of which one forward and backward takes some 50 to 130 MB beside the input."""


def peak_megabytes(case: str, what: str) -> float:
    """How far a fresh process grows above what it needed to import, and to build the function and its input."""
    command = [sys.executable, __file__, "--measure-memory-of", case, what]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # so that freed tensors are freed
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def measure_memory(case: str, what: str) -> None:
    gg.gradcheck(nn.Linear(2, 2).double(), torch.ones(1, 2, dtype=torch.float64))  # loads what the first call needs
    fn, x = LARGE[case][0](), torch.randn(LARGE[case][1], dtype=torch.float64, requires_grad=True)
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    torch.autograd.grad(fn(x[:1]).sum(), [x, *parameters])
    Path("/proc/self/clear_refs").write_text("5")  # Linux: from here on the peak is counted anew
    before = resident("VmRSS")
    if what == "check":
        gg.gradcheck(fn, x)
    else:
        output = fn(x)
        torch.autograd.grad(output, [x, *parameters], torch.randn_like(output))
    print((resident("VmHWM") - before) / 1024)


def resident(line: str) -> int:
    """Return a number of kilobytes that Linux knows of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0])


def memory() -> Table:
    table = Table("peak memory, float64", "check MB", "forward + backward MB", "ratio", "goal")
    for case in LARGE:
        check, model = peak_megabytes(case, "check"), peak_megabytes(case, "model")
        table.add_row(case, f"{check:.0f}", f"{model:.0f}", colour(check / model, check <= 2 * model, ".1f"), "≤ 2")
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", action="store_true", help="PyTorch's slow mode on large cases too")
    parser.add_argument("--only", default="", help="cases whose names contain this, without locating and memory")
    parser.add_argument("--measure-memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.measure_memory_of:
        measure_memory(*args.measure_memory_of)
        return
    console = Console(width=120)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, float64")
    tables = [against_torch(args.only, args.slow), every_element(args.only)]
    if not args.only:
        tables += [locating(), memory()]
    for table in tables:
        if table.rows:
            console.print(table)


if __name__ == "__main__":
    main()
