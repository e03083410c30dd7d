"""Do updates and attention logits warn before the loss, and stay silent where nothing is wrong? Prints tables.

python benchmarks/updates.py [--part spikes healthy rules logits price ...] [--seeds 10] [--first 100]

Each run is watched by a `gg.Monitor` that measures the update of every step, as it does by default where a step takes
long enough; steps of these models take a few milliseconds. A *warning* is an event of the record that was told while
the run went on; its step is the one on which it was told. The loss *breaks* where it is above 1.5 times the median of
the last 50 (1.3 times under `logits`).

    spikes   transformers without normalisation, AdamW at a learning rate at which most diverge: the first ten seeds
             whose loss breaks. How many steps before that an `update_spike` was told
    healthy  the eight scenarios of `muon_and_clipping.py` without a clip, five seeds each: what was told of updates
             while a run went on, and what stands as a warning on its page, which knows the whole run
    rules    updates that are not what their rule makes of gradients, the two public bugs first, each beside its twin,
             at a learning rate that is constant after a warm-up
    price    a GPT of 10.8 million parameters: processor time of a step that measures its update over one that does not
    logits   Muon moves queries and keys too far, the first ten seeds whose loss breaks: whether `logits_grow` was told
             50 steps before or more; and ten healthy twins
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import gradguard as gg
from gradguard.monitoring.judge.diagnosis import weighed_findings
from gradguard.monitoring.observe import observer
from gradguard.monitoring.record.file import read_record
from muon_and_clipping import SCENARIOS, Chain, Language, muon_and_adamw
from pairs import compare

KINDS = ("update_spike", "update_rule", "logits_grow")
Event = dict[str, Any]


def broke(losses: Sequence[float], times: float) -> int | None:
    """The step on which the loss breaks."""
    places = range(60, len(losses))
    return next((k for k in places if not losses[k] <= times * statistics.median(losses[k - 50 : k])), None)


def trained(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loss: Callable[[int], Tensor],
    steps: int,
    schedule: Callable[[int], float],
    paths: Sequence[Path] = (),
) -> tuple[list[float], list[Event]]:
    """The losses, and the events on updates and logits that were told."""
    lines: list[Event] = []
    sinks: list[list[Any]] = [[lines.append, *([paths[place]] if paths else [])] for place in range(len(optimizers))]
    monitors = [gg.Monitor(one, sink=sink, model=model) for one, sink in zip(optimizers, sinks, strict=True)]
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    losses = []
    for step in range(steps):
        for one, its in zip(optimizers, rates, strict=True):
            for group, rate in zip(one.param_groups, its, strict=True):
                group["lr"] = rate * schedule(step)
        model.zero_grad()
        of_step = loss(step)
        of_step.backward()
        for monitor, one in zip(monitors, optimizers, strict=True):
            monitor.log(loss=of_step)
            one.step()
        losses.append(float(of_step.detach()))
    for monitor in monitors:
        monitor.close()
    return losses, [line for line in lines if line["t"] == "event" and line["kind"] in KINDS]


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 50)


def cosine(steps: int) -> Callable[[int], float]:
    return lambda step: warm_up(step) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def language(seed: int, normalised: bool = True) -> tuple[Language, Callable[[int], Tensor]]:
    torch.manual_seed(seed)
    model, chain, draws = Language(), Chain(), torch.Generator().manual_seed(1000 + seed)
    for block in () if normalised else model.blocks:
        block.norms = nn.ModuleList([nn.Identity(), nn.Identity()])  # type: ignore[assignment]
    return model, lambda step: chain(model, draws, step)


def first(events: Iterable[Event], kind: str) -> int | None:
    return min((event["i"] for event in events if event["kind"] == kind), default=None)


def spikes(seeds: int, first_seed: int) -> None:
    print("| seed | warned on step | the loss breaks on step | steps before |\n|---|---|---|---|")
    leads: list[int | None] = []
    for seed in range(first_seed, first_seed + 3 * seeds):
        model, loss = language(seed, normalised=False)
        losses, events = trained(model, [AdamW(model.parameters(), 0.025, weight_decay=0.0)], loss, 600, warm_up)
        told, at = first(events, "update_spike"), broke(losses, 1.5)
        if at is not None:
            leads.append(None if told is None else at - told)
            print(f"| {seed} | {told} | {at} | {leads[-1]} |", flush=True)
        if len(leads) == seeds:
            break
    print(f"\n{sum(lead is not None and lead >= 5 for lead in leads)} of {len(leads)} at least 5 steps before\n")


def healthy(seeds: int, first_seed: int) -> None:
    print("| scenario | runs | told while the run went on | stand as warnings |\n|---|---|---|---|")
    for name, make in SCENARIOS.items():
        told: list[Event] = []
        stand = 0
        for seed in range(first_seed, first_seed + seeds // 2):
            torch.manual_seed(seed)
            run, draws = make(), torch.Generator().manual_seed(1000 + seed)
            loss = lambda step, run=run, draws=draws: run.loss(run.model, draws, step)  # noqa: E731
            with tempfile.TemporaryDirectory() as folder:
                optimizers = run.optimizers()
                paths = [Path(folder) / f"{place}.jsonl" for place in range(len(optimizers))]
                told += trained(run.model, optimizers, loss, 300, cosine(300), paths)[1]
                pages = [weighed_findings(read_record(path)) for path in paths]
            stand += sum(one.kind in KINDS and one.severity != "info" for page in pages for one in page)
        words = "; ".join(f"{one['kind']} on step {one['i']}" for one in told)
        print(f"| {name} | {seeds // 2} | {words or 'none'} | {stand or 'none'} |", flush=True)
    print()


class Adafactor(Optimizer):
    """Adafactor without factors, with a clip of updates, and timm's momentum in bfloat16 behind it."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, clip: Callable[[Tensor], Tensor], momentum: float | None = 0.9
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.clip = clip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                square = state.setdefault("square", torch.zeros_like(p))
                square.lerp_(p.grad.square() + 1e-30, max(0.001, state["step"] ** -0.8))
                update = p.grad / square.sqrt()
                update /= self.clip(update.square().mean().sqrt())
                if group["momentum"]:
                    mean = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.bfloat16))
                    update = mean.lerp_(update.bfloat16(), 1 - group["momentum"]).to(p.dtype)
                p -= group["lr"] * update


def twice(kind: type[Optimizer]) -> Any:
    class Twice(kind):  # type: ignore[misc, valid-type]
        """Multiplies by the learning rate where it makes the update, and again where it subtracts it."""

        def step(self, closure: Any = None) -> None:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 30 * group["lr"] ** 2
            super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    return Twice


def clipped_by_norm(model: nn.Module) -> list[Optimizer]:
    made = muon_and_adamw(model)
    gg.ClipUpdate(made[0], gg.ClipByGlobalNorm(1.0))
    return made


RULES: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "DeepSpeed#8439: Muon's update is divided by its norm": clipped_by_norm,
    "Muon": muon_and_adamw,
    "timm#2790: the clip of Adafactor is inverted": lambda m: [
        Adafactor(m.parameters(), 5e-3, lambda rms: rms.clamp(max=1.0))
    ],
    "Adafactor": lambda m: [Adafactor(m.parameters(), 5e-3, lambda rms: rms.clamp(min=1.0))],
    "the same without momentum": lambda m: [Adafactor(m.parameters(), 5e-3, lambda rms: rms.clamp(max=1.0), None)],
    "Adafactor without momentum": lambda m: [Adafactor(m.parameters(), 5e-3, lambda rms: rms.clamp(min=1.0), None)],
    "the learning rate twice, AdamW": lambda m: [twice(AdamW)(m.parameters(), lr=5e-3)],
    "AdamW": lambda m: [AdamW(m.parameters(), lr=5e-3, weight_decay=0.1)],
    "the learning rate twice, SGD": lambda m: [twice(torch.optim.SGD)(m.parameters(), lr=0.1, momentum=0.9)],
    "SGD": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)],
    "weight decay of 20, AdamW": lambda m: [AdamW(m.parameters(), lr=1e-3, weight_decay=20.0)],
}


def rules(*_seeds: int) -> None:
    print("| optimizer | told on step | words |\n|---|---|---|")
    for name, make in RULES.items():
        model, loss = language(0)
        _, events = trained(model, make(model), loss, 300, warm_up)
        told = next((one for one in events if one["kind"] == "update_rule"), None)
        print(f"| {name} | {told['i'] if told else ''} | {told['message'] if told else 'none'} |", flush=True)
    print()


def of_logits(seed: int, rate: float, normalised: bool) -> tuple[list[float], list[Event]]:
    """A run whose queries and keys Muon moves at ``rate``."""
    model, loss = language(seed, normalised)
    of_pairs = [p for key, p in model.named_parameters() if "q_proj" in key or "k_proj" in key]
    known = set(map(id, of_pairs))
    others = AdamW([p for p in model.parameters() if id(p) not in known], 0.01, weight_decay=0.0)
    watch = gg.LogitWatch(model)
    found = trained(model, [Muon(of_pairs, rate, weight_decay=0.0), others], loss, 600, lambda _: 1.0)
    watch.detach()
    return found


def logits(seeds: int, first_seed: int) -> None:
    print("| queries and keys | seed | warned on step | the loss breaks on step |\n|---|---|---|---|")
    leads: list[bool] = []
    for seed in range(first_seed, first_seed + 3 * seeds):
        losses, events = of_logits(seed, 0.3, normalised=False)
        told, at = first(events, "logits_grow"), broke(losses, 1.3)
        print(f"| too far | {seed} | {told} | {at} |", flush=True)
        if at is not None:
            leads.append(told is not None and at - told >= 50)
        if len(leads) == seeds:
            break
    print(f"told 50 steps before the loss or more: {sum(leads)} of {len(leads)}")
    for seed in range(first_seed, first_seed + seeds):
        losses, events = of_logits(seed, 0.02, normalised=True)
        print(f"| as usual | {seed} | {first(events, 'logits_grow')} | {broke(losses, 1.3)} |", flush=True)


class Layer(nn.Module):
    """A layer of GPT-2 without attention's mask of padding, of width 384."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (6, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def price(*_seeds: int) -> None:
    """A GPT of 10.8 million parameters: processor time of steps that measure their update, over steps that do not."""
    width, words = 384, 256
    model = nn.Sequential(nn.Embedding(words, width), *(Layer() for _ in range(6)), nn.Linear(width, words))
    optimizer = AdamW(model.parameters(), 1e-4)
    monitor = gg.Monitor(optimizer, sink=lambda line: None, model=model)
    batch = torch.randint(words, (4, 65))

    def step(free: float) -> None:
        observer.FREE = free  # seconds for which updates are measured on every step
        model.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        monitor.log(loss=loss)
        optimizer.step()

    found = compare(lambda _: step(math.inf), lambda _: step(-math.inf), pairs=60, clock=time.process_time)
    monitor.close()
    numbers = f"{found.ours:.0f} ms and {found.theirs:.0f} ms, ratio {1 / found.ratio:.4f}"
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, a step with and without its update: {numbers}")


PARTS: dict[str, Callable[[int, int], None]] = {
    "spikes": spikes,
    "healthy": healthy,
    "rules": rules,
    "logits": logits,
    "price": price,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", type=int, default=10, help="runs that break, or runs of each kind")
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    options = parser.parse_args()
    observer.FREE = math.inf
    for part in options.part:
        PARTS[part](options.seeds, options.first)


if __name__ == "__main__":
    main()
