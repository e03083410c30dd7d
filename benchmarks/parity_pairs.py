"""Healthy pairs of set-ups, drawn by number, and a broken twin of each: how often `gradguard parity` is right.

    python benchmarks/parity_pairs.py --first 0 --last 199

A pair is a model, a size of the batch, an optimizer with 0 (gradients alone), 1 or 3 whole steps, and a way in which
the second run differs. Healthy pairs are to be PASS; INCONCLUSIVE counts as unclear, and what is no PASS is printed.
The broken twin differs in the same way and has one fault besides. Of it is counted: named (FAIL, and a finding or a
note has the parameter at fault), elsewhere (FAIL of others), unclear, hidden (PASS, whose own number says that so small
an error would not show) and missed (PASS). Pairs on two processes share one pool of gloo; all else is this process.
Sparse gradients are not drawn: `save_gradients` refuses them.

Slices are independent of each other. 2,000 pairs on 14 cores:

    for i in $(seq 0 13); do
        python benchmarks/parity_pairs.py --first $((i * 143)) --last $((i * 143 + 142)) > pairs-$i.txt &
    done; wait; grep -hE "^(healthy|broken):" pairs-*.txt
"""

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from gradguard.parity.compare import compare
from gradguard.results import ParityReport, SavedGradients

WIDTH, LENGTH, VOCABULARY, CLASSES = 8, 16, 20, 5
MANY_TOKENS = 65_536


# Models and batches.


class Adapter(nn.Linear):
    """A linear layer with an update of rank 2 whose second factor is zero at first, and so the first one's gradient."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.a.T @ self.b.T


class Transformer(nn.Module):
    """A block of attention, with its output tied to its embedding or not."""

    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.dropout, self.by_hand = nn.Dropout(dropout), False
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attend = attention_by_hand if self.by_hand else F.scaled_dot_product_attention
        x = x + self.dropout(self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return self.head(self.after(x))


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() | (not is_causal)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class Recurrent(nn.Module):
    """A GRU or an LSTM over vectors, and a head on its last output."""

    def __init__(self, kind: type, dropout: float) -> None:
        super().__init__()
        self.body, self.dropout, self.head = kind(WIDTH, 12, batch_first=True), nn.Dropout(dropout), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x)[0][:, -1]))


class Words(nn.Module):
    """The mean of the embeddings of a few words, of which most of the vocabulary is not in the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(200, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.dropout(self.embed(words).mean(1)))


def perceptron(dropout: float) -> nn.Module:
    layers = [nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), Adapter(32, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(16, CLASSES))


def images(norm: Callable[[int], nn.Module]) -> Callable[[float], nn.Module]:
    def build(dropout: float) -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), norm(8), nn.GELU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, CLASSES))

    return build


def of_tokens(samples: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(VOCABULARY, (2, samples, LENGTH))
    for i in range(0, samples, 2):  # padding
        targets[i, 1 + 7 * i % (LENGTH - 1) :] = -100
    return tokens, targets


def of_vectors(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, *shape), torch.randint(CLASSES, (samples,)))


MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "perceptron": (perceptron, of_vectors(16)),
    "convolutions, group norms": (images(lambda c: nn.GroupNorm(2, c)), of_vectors(3, 8, 8)),
    "convolutions, batch norms": (images(nn.BatchNorm2d), of_vectors(3, 8, 8)),
    "transformer": (lambda dropout: Transformer(dropout, False), of_tokens),
    "tied transformer": (lambda dropout: Transformer(dropout, True), of_tokens),
    "GRU": (lambda dropout: Recurrent(nn.GRU, dropout), of_vectors(6, WIDTH)),
    "LSTM": (lambda dropout: Recurrent(nn.LSTM, dropout), of_vectors(6, WIDTH)),
    "words": (Words, lambda n: (torch.randint(60, (n, 12)), torch.randint(CLASSES, (n,)))),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda groups, **kernel: torch.optim.SGD(groups, 0.1, **kernel),
    "momentum": lambda groups, **kernel: torch.optim.SGD(groups, 0.05, momentum=0.9, **kernel),
    "Nesterov": lambda groups, **kernel: torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, **kernel),
    "Adam": lambda groups, **kernel: torch.optim.Adam(groups, 1e-3, **kernel),
    "AMSGrad": lambda groups, **kernel: torch.optim.Adam(groups, 1e-3, amsgrad=True, **kernel),
    "AdamW": lambda groups, **kernel: torch.optim.AdamW(groups, 1e-3, **kernel),
    "Adagrad": lambda groups, **kernel: torch.optim.Adagrad(groups, 1e-2, **kernel),
    "RMSprop": lambda groups, **kernel: torch.optim.RMSprop(groups, 1e-3, **kernel),
    "Adadelta": lambda groups, **kernel: torch.optim.Adadelta(groups, **kernel),
    "NAdam": lambda groups, **kernel: torch.optim.NAdam(groups, 1e-3, **kernel),
    "RAdam": lambda groups, **kernel: torch.optim.RAdam(groups, 1e-3, **kernel),
    "Adamax": lambda groups, **kernel: torch.optim.Adamax(groups, 1e-3, **kernel),
    "Adafactor": lambda groups, **kernel: torch.optim.Adafactor(groups, 1e-2, **kernel),
}
FUSED = ("SGD", "momentum", "Nesterov", "Adam", "AMSGrad", "AdamW", "Adagrad")


# Ways in which the second run differs, and faults.

SAME_MASKS = (
    "the same",
    "two threads",
    "compiled, eager",
    "channels last",
    "the optimizer's loop",
    "a fused optimizer",
)
MICRO_BATCHES = {"2 micro-batches": 2, "4 micro-batches": 4}
LOW = {"bfloat16 in both", "bfloat16 against float32"}
FAULTS = ("a factor of 1.01", "an element dropped", "not averaged", "a bias decayed")


@dataclass(frozen=True)
class Pair:
    """One pair of set-ups, as drawn: the same number is always the same pair.

    Attributes:
        number: The seed of weights and batch.
        model: Which model.
        samples: The size of the batch.
        optimizer: Which optimizer.
        steps: How many whole steps; 0 for gradients alone.
        way: How the second run differs.
        dropout: The probability with which an activation is dropped.
        fault: The fault of the broken twin.
    """

    number: int
    model: str
    samples: int
    optimizer: str
    steps: int
    way: str
    dropout: float
    fault: str

    def __str__(self) -> str:
        steps = f"{self.steps} steps of {self.optimizer}" if self.steps else "gradients"
        dropped = ", dropout" if self.dropout else ""
        return f"{self.number}: {self.model}, {self.samples} samples, {steps}, {self.way}{dropped}"


def drawn(number: int) -> Pair:
    """Return the pair of this number."""
    draws = random.Random(number)
    model, steps = draws.choice([*MODELS]), draws.choice((0, 1, 3, 3))
    optimizer = draws.choice([*OPTIMIZERS])
    ways = ["the same", "permuted", "reversed", "a sum, divided", "float64", "two threads", "transposed weights"]
    ways += [*LOW, *MICRO_BATCHES, "two processes"] if "batch norms" not in model else []
    ways += ["attention by hand"] if "transformer" in model else []
    ways += ["channels last"] if "convolutions" in model else []
    ways += ["the optimizer's loop"] if steps else []
    ways += ["a fused optimizer"] if steps and optimizer in FUSED else []
    way = draws.choice(ways)
    if draws.random() < 0.04:  # which takes seconds
        way = draws.choice(("compiled, eager", "compiled, aot_eager"))
    dropout = 0.2 if way in SAME_MASKS and draws.random() < 0.4 else 0.0
    samples = draws.choice((8, 16, 64))
    if "transformer" in model and draws.random() < 0.06:
        samples, steps = MANY_TOKENS // LENGTH, min(steps, 1)
    fault = draws.choice(FAULTS[: 4 if steps else 3])
    return Pair(number, model, samples, optimizer, steps, way, dropout, fault)


class Run:
    """One run of a pair: its model, its batch, and its steps.

    Args:
        pair: The pair.
        way: How this run differs.
        fault: What is wrong with it; empty for nothing.
        rank: Which process of two this is; None for one process.
    """

    def __init__(self, pair: Pair, way: str = "", fault: str = "", rank: int | None = None) -> None:
        self.pair, self.way, self.fault, self.rank = pair, way, fault, rank
        torch.manual_seed(pair.number)
        build, draw = MODELS[pair.model]
        self.model = build(pair.dropout)
        for p in self.model.parameters():  # biases and norms as after some training
            nn.init.normal_(p, float(p.detach().mean()), 0.1) if p.dim() == 1 else None
        self.batch = draw(pair.samples)
        trained = [name for name, p in self.model.named_parameters() if not name.endswith(".a")]
        self.culprit = random.Random(pair.number).choice(trained)
        if fault == "a bias decayed":
            self.culprit = [name for name in trained if "bias" in name][-1]
        self._differ()
        self.parameters = dict(self.model.named_parameters())
        self.called: Callable[[Tensor], Tensor] = self.model
        if rank is not None:
            self.called = DistributedDataParallel(self.model)
        elif way.startswith("compiled"):
            torch.compiler.reset()
            self.called = torch.compile(self.model, backend=way.rpartition(" ")[2])

    def _differ(self) -> None:
        x, y = self.batch
        if self.way == "permuted":
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
            x, y = x[order], y[order]
        elif self.way == "reversed":
            x, y = x.flip(0), y.flip(0)
        elif self.way == "float64":
            self.model, x = self.model.double(), x.double() if x.is_floating_point() else x
        elif self.way == "channels last":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.to(memory_format=torch.channels_last)
        elif self.way == "transposed weights":
            for p in self.model.parameters():
                p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1) if p.dim() == 2 else p.data
        elif self.way == "attention by hand":
            self.model.by_hand = True  # type: ignore[assignment]
        self.batch = x, y

    def _loss(self, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.way in LOW else nullcontext():
            output = self.called(x)
        wide = (output.float() if output.dtype == torch.bfloat16 else output).flatten(0, -2)
        if self.way == "a sum, divided":
            return F.cross_entropy(wide, y.flatten(), reduction="sum") / (y >= 0).sum() * share
        return F.cross_entropy(wide, y.flatten()) * share

    def step(self) -> None:
        """Forward and backward, with this run's fault."""
        x, y = self.batch
        total = (y >= 0).sum()
        count = MICRO_BATCHES.get(self.way, 1)
        if self.rank is not None:
            x, y, total = x.chunk(2)[self.rank], y.chunk(2)[self.rank], total / 2  # DDP averages
        unshared = self.fault == "not averaged"
        count = 2 if unshared and self.rank is None and count == 1 and "batch norms" not in self.pair.model else count
        parts = [*zip(x.chunk(count), y.chunk(count), strict=True)]
        for i, (a, b) in enumerate(parts):
            share = (b >= 0).sum() / total
            last_unshared = unshared and i == len(parts) - 1 and self.rank is None
            self._loss(a, b, torch.tensor(1.0) if last_unshared and count > 1 else share).backward()
        self._spoil(self.parameters[self.culprit].grad)

    def _spoil(self, grad: Tensor | None) -> None:
        assert grad is not None
        alone = self.fault == "not averaged" and "batch norms" in self.pair.model
        if self.fault == "a factor of 1.01":
            grad.mul_(1.01)
        elif self.fault == "an element dropped":
            grad[tuple(int(i) for i in torch.unravel_index(grad.abs().argmax(), grad.shape))] = 0.0
        elif alone or (self.fault == "not averaged" and self.rank == 1):
            grad.mul_(2.0)

    def optimizer(self) -> torch.optim.Optimizer:
        """Vectors are not decayed, but for the fault."""
        wrong = self.parameters[self.culprit] if self.fault == "a bias decayed" else None
        vectors = [p for p in self.parameters.values() if p.dim() == 1 and p is not wrong]
        groups = [
            {"params": [p for p in self.parameters.values() if p.dim() > 1 or p is wrong], "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        kernel = {"the optimizer's loop": {"foreach": False}, "a fused optimizer": {"fused": True}}.get(self.way, {})
        return OPTIMIZERS[self.pair.optimizer](groups, **kernel)

    def saved(self, file: Path | None = None) -> SavedGradients:
        """Return what `save_gradients` says of this run."""
        whole: dict[str, Any] = {}
        if self.pair.steps:
            whole = {"optimizer": self.optimizer(), "steps": self.pair.steps}
        threads = torch.get_num_threads()
        torch.set_num_threads(2 if self.way == "two threads" else 1)
        torch.manual_seed(self.pair.number)
        try:
            model = self.called if self.rank is not None else self.model
            return gg.save_gradients(file, model, self.step, **whole)  # type: ignore[arg-type]
        finally:
            torch.set_num_threads(threads)


# Two processes.


def _serve(rank: int, folder: str, requests: Any, done: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    while (asked := requests.get()) is not None:
        number, fault, file = asked
        try:
            Run(drawn(number), "two processes", fault, rank).saved(Path(file))
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        done.put(said)
    dist.destroy_process_group()


class TwoProcesses:
    """A pool of two processes of gloo, started with the first pair that needs it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[Any] = []

    def saved(self, pair: Pair, fault: str) -> Path:
        """Return the file that two processes have saved."""
        if not self._started:
            context = mp.get_context("spawn")
            self._requests, self._done = [context.SimpleQueue() for _ in range(2)], context.SimpleQueue()
            for rank, requests in enumerate(self._requests):
                arguments = (rank, self._folder.name, requests, self._done)
                self._started.append(context.Process(target=_serve, args=arguments, daemon=True))
                self._started[-1].start()
        file = Path(self._folder.name) / f"{pair.number}{bool(fault)}"
        for requests in self._requests:
            requests.put((pair.number, fault, str(file)))
        if said := max(self._done.get() for _ in range(2)):
            raise RuntimeError(said)
        return file

    def close(self) -> None:
        """End both."""
        for requests, process in zip(getattr(self, "_requests", ()), self._started, strict=True):
            requests.put(None)
            process.join()
        self._folder.cleanup()


# Verdicts.


def judged(pair: Pair, processes: TwoProcesses) -> tuple[ParityReport, ParityReport, str]:
    """Return what is said of the healthy pair and of its broken twin, and the parameter at fault."""
    reference = Run(pair, pair.way if pair.way == "bfloat16 in both" else "").saved()
    if pair.way == "two processes":
        news: list[Any] = [processes.saved(pair, fault) for fault in ("", pair.fault)]
    else:
        way = pair.way
        news = [Run(pair, way, fault).saved() for fault in ("", pair.fault)]
    healthy, broken = (compare(reference, new) for new in news)
    return healthy, broken, Run(pair, "", pair.fault).culprit


def class_of(report: ParityReport, pair: Pair, culprit: str) -> str:
    """Return how right a verdict on a broken twin is."""
    if report.verdict == "INCONCLUSIVE":
        return "unclear"
    if report.verdict == "PASS":
        shown = next((o.shows for o in report.parameters if o.name == culprit), math.nan)
        small = {"a factor of 1.01": 0.01, "an element dropped": 0.5}.get(pair.fault, 0.0)
        return "hidden" if small and not shown <= small else "missed"
    of_all = pair.fault == "not averaged" and pair.way != "two processes" and "batch norms" not in pair.model
    blamed = {name.rpartition(" of ")[2] for f in report.findings for name in f.parameters}
    said = culprit in blamed or of_all or any(culprit in note for note in report.notes)
    return "named" if said else "elsewhere"


def _counted(counts: Counter[str], names: Sequence[str]) -> str:
    others = [name for name in counts if name not in names]
    return ", ".join(f"{counts[name]} {name}" for name in (*names, *others))


def main(arguments: Iterable[str] | None = None) -> int:
    """Print each pair that is no PASS and each twin that is not named, and at last how many of each there were."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--last", type=int, default=199, help="number of the last pair")
    parsed = parser.parse_args(None if arguments is None else [*arguments])
    torch.set_num_threads(1)
    healthy, broken, processes, began = Counter[str](), Counter[str](), TwoProcesses(), time.process_time()
    try:
        for number in range(parsed.first, parsed.last + 1):
            pair = drawn(number)
            try:
                of_healthy, of_broken, culprit = judged(pair, processes)
            except Exception as error:
                healthy["refused"] += 1
                print(f"refused  {pair}: {type(error).__name__}: {error}", flush=True)
                continue
            healthy[{"INCONCLUSIVE": "unclear"}.get(of_healthy.verdict, of_healthy.verdict)] += 1
            if of_healthy.verdict != "PASS":
                print(f"healthy  {pair}\n{of_healthy}", flush=True)
            found = class_of(of_broken, pair, culprit)
            broken[found] += 1
            if found != "named":
                print(f"{found:<8} {pair}, {pair.fault} of {culprit}\n{of_broken}", flush=True)
    finally:
        processes.close()
    took = (time.process_time() - began) / max(1, parsed.last - parsed.first + 1)
    print(f"healthy: {_counted(healthy, ('PASS', 'FAIL', 'unclear', 'refused'))}")
    print(f"broken: {_counted(broken, ('named', 'elsewhere', 'unclear', 'hidden', 'missed'))}")
    print(f"{took:.2f} s of this process a pair")
    return int(healthy["FAIL"] or healthy["refused"] or broken["missed"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
