"""A step with per-sample clipping over the plain step, in time and in memory. Prints ratios and goals.

python benchmarks/per_sample.py [MLP CNN GPT "GPT 512" "GPT tied" Llama BERT ConvNeXt] [--peers] [--memory] [--first]
    [--pairs 21] [--threads 1]

A step is forward, backward, whatever clips and adds noise, and SGD's step. Time: processor time, both steps in pairs in
one process, the median of the pairs' ratios. The first step of a clipper, with its checks, is taken by a new clipper on
a new model, between plain steps that are warm. Memory: the highest resident set (VmHWM) during five steps, the first
with its checks among them, over the resident set once model and data are there; each in fresh processes, which have
stepped a tiny model before, so that lazily imported code does not count. Linux only.
"""

import argparse
import functools
import gc
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from pairs import Comparison

Step = Callable[[], float]
"""Takes a step, and returns its processor seconds."""

NOISE_MULTIPLIER = 1.0
FIRST_STEP = 3.0
"""Goal: the first step of a clipper, times a plain one, at most."""
_STEPS_FOR_MEMORY = 5
_PAIRS_OF_PEERS = 5
_CHILDREN = 3


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Gpt(nn.Module):
    """A decoder with learned positions.

    Attributes:
        repeat_positions: Look each position up once for each sample. Most code looks it up once; Opacus needs this.
    """

    def __init__(
        self, length: int, width: int = 256, layers: int = 4, vocabulary: int = 5000, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.repeat_positions = False
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        places = places.repeat(len(ids), 1) if self.repeat_positions else places
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Logits(nn.Module):
    """A model of transformers that returns the logits alone.

    Attributes:
        repeat_positions: Give the model position ids for each sample. It makes one row of them otherwise; for Opacus.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.repeat_positions = model, False

    def forward(self, x: Tensor) -> Tensor:
        places = (
            {"position_ids": torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)}
            if self.repeat_positions
            else {}
        )
        return self.model(x, **places).logits


def llama() -> nn.Module:
    """RMSNorm written by hand, gated feed-forward, rotary positions, head apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def bert() -> nn.Module:
    """A classifier of sentences, without dropout, which Opacus and the plain step would pay for as well."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10
    return Logits(BertForSequenceClassification(config))


def convnext() -> nn.Module:
    """Depthwise convolutions, LayerNorm on channels, a scale for each channel of a block."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 4, 2])
    config.num_labels = 10
    return Logits(ConvNextForImageClassification(config))


def mlp() -> nn.Module:
    hidden = [module for width in (784, 2048, 2048) for module in (nn.Linear(width, 2048), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


def cnn() -> nn.Module:
    def convolution(channels: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]

    maps = [*convolution(3, 32), *convolution(32, 64), nn.MaxPool2d(2), *convolution(64, 128), nn.MaxPool2d(2)]
    return nn.Sequential(*maps, nn.Flatten(), nn.Linear(8192, 128), nn.ReLU(), nn.Linear(128, 10))


@dataclass(frozen=True)
class Problem:
    """A model and the shape of what it is trained on.

    Attributes:
        make: Builds the model.
        shape: Of the inputs: random numbers, or ids where ``vocabulary`` is given, and then each has a target.
        vocabulary: Number of ids.
        classify: The target is one class of ten for each sample, although the inputs are ids.
        time: Goal: times the plain step, at most.
        memory: Goal: times what the plain step needs beside model and data, at most.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0
    classify: bool = False
    time: float = 0.0
    memory: float = 0.0

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Make model, inputs and targets, the same ones each time."""
        torch.manual_seed(0)
        if self.vocabulary:
            inputs, targets = torch.randint(self.vocabulary, (2, *self.shape)).unbind()
        else:
            inputs, targets = torch.randn(self.shape), torch.randint(10, self.shape[:1])
        if self.classify:
            targets = torch.randint(10, self.shape[:1])
        return self.make(), inputs, targets


PROBLEMS = {
    "MLP": Problem(mlp, (64, 784), time=1.15, memory=1.3),
    "CNN": Problem(cnn, (64, 3, 32, 32), time=1.3, memory=1.5),
    "GPT": Problem(lambda: Gpt(128), (16, 128), 5000, time=1.2, memory=1.5),
    "GPT 512": Problem(lambda: Gpt(512), (4, 512), 5000, time=1.1, memory=1.4),
    "GPT tied": Problem(lambda: Gpt(128, tied=True), (16, 128), 5000, time=1.25, memory=1.5),
    "Llama": Problem(llama, (16, 128), 5000, time=1.2, memory=1.5),
    "BERT": Problem(bert, (16, 128), 5000, classify=True, time=1.15, memory=1.5),
    "ConvNeXt": Problem(convnext, (16, 3, 64, 64), time=1.5, memory=1.5),
}
TINY = Problem(lambda: Gpt(4, width=8, layers=1, vocabulary=10), (2, 4), 10)


# The ways to take a step


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def plain(problem: Problem) -> Step:
    model, inputs, targets = problem.build()
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()

    return lambda: timed(step)


def clipped(problem: Problem) -> Step:
    model, inputs, targets = problem.build()
    optimizer = sgd(model)
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        optimizer.step()

    return lambda: timed(step)


def private(problem: Problem) -> Step:
    """Clip, and add noise, as users do: with make_private, whose loader has fetched the batch before time counts."""
    model, inputs, targets = problem.build()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs))
    training = gg.private.make_private(
        model,
        sgd(model),
        loader,
        gg.private.FixedNoise(noise_multiplier=NOISE_MULTIPLIER, delta=1e-5),
        poisson_sampling=False,
    )

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        training.step()

    return lambda: sum(timed(functools.partial(step, x, y)) for x, y in training.loader)


def opacus_model(problem: Problem) -> tuple[nn.Module, Tensor, Tensor]:
    model, inputs, targets = problem.build()
    if isinstance(model, Gpt) or (isinstance(model, Logits) and problem.vocabulary):
        model.repeat_positions = True
    return model, inputs, targets


def opacus_hooks(problem: Problem, noise_multiplier: float = 0.0) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, inputs, targets = opacus_model(problem)
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        sgd(model), noise_multiplier=noise_multiplier, max_grad_norm=1.0, expected_batch_size=len(inputs)
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_of(wrapped(inputs), targets).backward()
        optimizer.step()

    return lambda: timed(step)


def opacus_ghost(problem: Problem, noise_multiplier: float = 0.0) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, inputs, targets = opacus_model(problem)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        sgd(model), noise_multiplier=noise_multiplier, max_grad_norm=1.0, expected_batch_size=len(inputs)
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    tokens = targets.shape if targets.dim() > 1 else None

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(inputs).flatten(0, -2), targets.flatten(), shape=tokens).backward()
        optimizer.step()

    return lambda: timed(step)


WAYS: dict[str, Callable[[Problem], Step]] = {"plain": plain, "gradguard": clipped, "gradguard, noise": private}
PEERS: dict[str, Callable[[Problem], Step]] = {
    "Opacus hooks": opacus_hooks,
    "Opacus hooks, noise": functools.partial(opacus_hooks, noise_multiplier=NOISE_MULTIPLIER),
    "Opacus ghost": opacus_ghost,
    "Opacus ghost, noise": functools.partial(opacus_ghost, noise_multiplier=NOISE_MULTIPLIER),
}


# Time


def slowdown(ours: Step, theirs: Step, pairs: int) -> Comparison:
    """Step both in pairs, in an order drawn for each; the ratio is how many times slower ours is."""
    order = random.Random(0)
    for warm_up in (ours, theirs) * 2:
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


def first_step(problem: Problem, way: Callable[[Problem], Step], repetitions: int = 5) -> float:
    """The first step of a new clipper on a new model, times a plain step: the median of some."""
    step = plain(problem)
    for _ in range(2):
        step()
    ratios = []
    for _ in range(repetitions):
        first = way(problem)
        before, own, after = step(), first(), step()
        ratios.append(2 * own / (before + after))
        del first
        gc.collect()
    return statistics.median(ratios)


# Memory


def status(field: str) -> int:
    """Bytes of a field of this process: VmRSS is what is resident, VmHWM what was at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def peak_of_steps(problem: Problem, way: Callable[[Problem], Step]) -> int:
    """Bytes by which the resident set grows at most in some steps; to be called in a fresh process."""
    way(TINY)()
    step = way(problem)
    gc.collect()
    with suppress(OSError):  # forget the peak so far; where that is not allowed, it is below that of the steps
        Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for _ in range(_STEPS_FOR_MEMORY):
        step()
    return status("VmHWM") - before


def memory(problem: str, way: str, threads: int) -> float:
    """Megabytes, the median over fresh processes.

    The peak comes from VmHWM, because getrusage's ru_maxrss is not below that of the process that started this one.
    """
    command = [sys.executable, __file__, problem, "--threads", str(threads), "--peak-of", way]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True) for _ in range(_CHILDREN)]
    return statistics.median(int(run.stdout) for run in runs) / 1e6


# The table


@dataclass(frozen=True)
class Row:
    """What was found for one way to step one model.

    Attributes:
        time: Against the plain step; None if it was not asked for.
        first: The first step over a plain one; None if it was not asked for.
        megabytes: At most, beside model and data.
        refused: The error, if the way cannot step this model.
    """

    time: Comparison | None = None
    first: float | None = None
    megabytes: float | None = None
    refused: str = ""


def measure(problem: str, way: str, args: argparse.Namespace) -> Row:
    if way == "plain":
        return Row(megabytes=memory(problem, way, args.threads) if args.memory else None)
    pairs = min(args.pairs, _PAIRS_OF_PEERS) if way in PEERS else args.pairs
    try:
        step = (WAYS | PEERS)[way](PROBLEMS[problem])
        found = slowdown(step, plain(PROBLEMS[problem]), pairs)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if way not in PEERS:
            raise
        return Row(refused=f"{type(error).__name__}: {error}".splitlines()[0][:60])
    first = first_step(PROBLEMS[problem], WAYS[way]) if args.first and way == "gradguard" else None
    return Row(found, first, memory(problem, way, args.threads) if args.memory else None)


def judged(ratio: float, goal: float | None) -> tuple[str, str]:
    colour = "default" if goal is None else "green" if ratio <= goal else "red"
    return f"[{colour}]{ratio:.3f}[/]", f"{goal or '-'}"


def add_rows(table: Table, name: str, args: argparse.Namespace) -> None:
    problem, plain_megabytes = PROBLEMS[name], None
    for way in [*WAYS, *(PEERS if args.peers else ())]:
        row = measure(name, way, args)
        gc.collect()
        if row.refused:
            table.add_row(name, way, row.refused)
            continue
        goal = way == "gradguard"
        cells = ["-", "-", "-", "-"]
        if row.time is not None:
            found = judged(row.time.ratio, problem.time if goal else None)
            cells = [f"{row.time.ours:.1f}", f"{row.time.theirs:.1f}", *found]
        if args.first:
            cells += judged(row.first, FIRST_STEP) if row.first is not None else ("-", "-")
        if row.megabytes is not None:
            plain_megabytes = plain_megabytes or row.megabytes
            cells += [
                f"{row.megabytes:.0f}",
                *judged(row.megabytes / plain_megabytes, problem.memory if goal else None),
            ]
        table.add_row(name, way, *cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("problems", nargs="*", metavar="MODEL", help=f"of {', '.join(PROBLEMS)}; all without")
    parser.add_argument("--peers", action="store_true", help="Opacus too")
    parser.add_argument("--memory", action="store_true", help="peaks too, each in three processes of its own")
    parser.add_argument("--first", action="store_true", help="the first step of a clipper too, with its checks")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak-of", choices=[*WAYS, *PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.problems) - set(PROBLEMS):
        parser.error(f"no model {sorted(unknown)}: expected some of {list(PROBLEMS)}")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # of Opacus
    if args.peak_of:
        print(peak_of_steps(PROBLEMS[args.problems[0]], (WAYS | PEERS)[args.peak_of]))
        return
    columns = ["model", "step", "ms", "plain ms", "times slower", "goal"]
    columns += ["first step", "goal"] if args.first else []
    table = Table(*columns, *(["MB", "times plain's", "goal"] if args.memory else []))
    before = os.getloadavg()[0]
    for name in args.problems or PROBLEMS:
        add_rows(table, name, args)
    load = f"load average {before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    print(f"torch {torch.__version__}, {args.threads} threads, medians of {args.pairs} pairs; {load}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
