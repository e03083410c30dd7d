"""What finite spikes cost a run under each rule, against its twin without the spike. Prints a table.

python benchmarks/spikes.py [--seeds 5] [--scenarios "LM: clean" GAN] [--rules plain oracle] [--keep FILE]
python benchmarks/spikes.py --cost

Each scenario of `spikes_scenarios.py` is trained without its spike, under the clip that people would use (the twin),
and with it under each rule of `spikes_rules.py`, from the same seed, with the same batches. Columns, means over seeds:
the final held-out loss above the twin's, that of the worst seed, good batches from the first bad one until the mean of
20 training losses is within 2 % of the twin's (the median), the sum of what training losses are above the twin's, good
steps that were skipped (the most), bad ones that were not. The oracle skips the bad batches and no other: what no rule
can know. A goal that is missed is marked ``!``, and a row ends with who was better than ours.

``--keep`` writes each seed of a scenario to a file as it ends, and what the file holds is not trained again. ``--cost``
prints what a step costs more, in pairs of steps with and without.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradguard as gg
from spikes_rules import RULES, Rule
from spikes_scenarios import SCENARIOS, Run, Scenario

RECOVERED, SMOOTH = 1.02, 20
OURS = ("SkipSpikes", "SkipSpikes, cap 32", "SpikeRecovery")
NOT_PEERS = (*OURS, "oracle")
ALIKE = 0.002
"""Differences of this share of the twin's loss are none."""


@dataclass
class Outcome:
    """One run: its final held-out loss, its training losses by batch, and what was done."""

    final: float
    losses: dict[int, float]
    skipped: list[int]
    events: list[tuple[int, str]]
    bad: list[int]


def train(run: Run, rule: Rule, *, spoiled: bool = True) -> Outcome:
    rates = [group["lr"] for group in run.optimizer.param_groups]
    losses: dict[int, float] = {}
    at = 0
    for i in range(run.steps):
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * run.schedule(i)
        run.optimizer.zero_grad()
        loss = run.loss_of(at, spoiled and at in run.bad)
        loss.backward()
        losses[at] = float(loss.detach())
        rule.step(at, loss)
        at, rule.cursor = (at + 1 if rule.cursor is None else rule.cursor), None
    final = run.evaluate()
    bad = sorted(run.bad) if spoiled else []
    return Outcome(final if math.isfinite(final) else math.inf, losses, rule.skipped, rule.events, bad)


def recovery(mine: Outcome, twin: Outcome) -> float:
    """Good batches from the first bad one until a mean of 20 losses is within 2 % of the twin's."""
    good = _good_after(mine, twin)
    for at in range(len(good) - SMOOTH + 1):
        near = good[at : at + SMOOTH]
        theirs = statistics.fmean(twin.losses[i] for i in near)
        if statistics.fmean(mine.losses[i] for i in near) <= theirs + (RECOVERED - 1) * abs(theirs):
            return at
    return math.inf


def area(mine: Outcome, twin: Outcome) -> float:
    return sum(mine.losses[i] - twin.losses[i] for i in _good_after(mine, twin))


def _good_after(mine: Outcome, twin: Outcome) -> list[int]:
    begin, bad = min(mine.bad, default=-1), {*mine.bad}
    return [i for i in sorted(mine.losses) if i > begin and i not in bad and i in twin.losses]


def numbers_of(mine: Outcome, twin: Outcome) -> dict[str, Any]:
    return {
        "final": mine.final,
        "above": (mine.final - twin.final) / abs(twin.final),
        "recovery": recovery(mine, twin),
        "area": area(mine, twin),
        "false": len({*mine.skipped} - {*mine.bad}),
        "missed": len({*mine.bad} - {*mine.skipped}),
        "events": mine.events,
    }


def one_seed(name: str, seed: int, rules: Sequence[str]) -> dict[str, Any]:
    """The twin's final loss and what each rule made of this seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = SCENARIOS[name].make(seed)
    twin = train(run, Rule(run, run.clip), spoiled=False)
    found: dict[str, Any] = {}
    for rule in rules:
        run = SCENARIOS[name].make(seed)
        found[rule] = numbers_of(train(run, RULES[rule](run)), twin)
    return {"scenario": name, "seed": seed, "twin": twin.final, "rules": found}


# -- the table -------------------------------------------------------------------------------------------------------


def row(seeds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one rule's numbers, seed by seed, those of the table."""
    return {
        "above": statistics.fmean(one["above"] for one in seeds),
        "worst": max(one["above"] for one in seeds),
        "recovery": statistics.median(one["recovery"] for one in seeds),
        "area": statistics.fmean(one["area"] for one in seeds),
        "false": max(one["false"] for one in seeds),
        "missed": statistics.fmean(one["missed"] for one in seeds),
    }


def missed_goals(scenario: Scenario, found: dict[str, float]) -> list[str]:
    missed = []
    if scenario.goal is not None and not found["above"] <= scenario.goal:
        missed.append("loss")
    if scenario.most_false is not None and found["false"] > scenario.most_false:
        missed.append("skips")
    return missed


def better_than_ours(rows: dict[str, dict[str, float]]) -> list[str]:
    """Whose final loss is lower than that of the best of ours."""
    ours = [rows[rule]["above"] for rule in OURS if rule in rows]
    peers = {rule: found["above"] for rule, found in rows.items() if rule not in NOT_PEERS}
    return [rule for rule, above in peers.items() if ours and above < min(ours) - ALIKE]


def table(done: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| scenario | rule | above twin | worst | recovery | area | false | missed | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, scenario in SCENARIOS.items():
        seeds = [one for one in done if one["scenario"] == name]
        rules = [rule for rule in RULES if seeds and all(rule in one["rules"] for one in seeds)]
        rows = {rule: row([one["rules"][rule] for one in seeds]) for rule in rules}
        title = (
            f"{name} ({len(seeds)} seeds, twin {statistics.fmean(one['twin'] for one in seeds):.4g})" if seeds else ""
        )
        for rule, found in rows.items():
            yield line(title, rule, found, missed_goals(scenario, found) if rule in OURS else [])
            title = ""
        better = better_than_ours(rows)
        if better:
            yield f"| | **not best: {', '.join(better)}** | | | | | | | |"


def line(title: str, rule: str, found: dict[str, float], missed: Sequence[str]) -> str:
    recovered = "never" if math.isinf(found["recovery"]) else f"{found['recovery']:.0f}"
    marks = ", ".join(f"! {what}" for what in missed)
    return (
        f"| {title} | {rule} | {found['above']:+.2%} | {found['worst']:+.2%} | {recovered} | {found['area']:.2f} | "
        f"{found['false']:.0f} | {found['missed']:.1f} | {marks} |"
    )


def kept(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """What the file holds, by scenario and seed; later lines add rules to earlier ones."""
    done: dict[tuple[str, int], dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    for one in map(json.loads, lines):
        _add(done, one)
    return done


def _add(done: dict[tuple[str, int], dict[str, Any]], one: dict[str, Any]) -> None:
    before = done.get((one["scenario"], one["seed"]), {"rules": {}})
    done[one["scenario"], one["seed"]] = one | {"rules": before["rules"] | one["rules"]}


def train_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    done = kept(arguments.keep)
    waiting = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for seed in range(arguments.seeds):
            for name in arguments.scenarios:
                known = done[name, seed]["rules"] if (name, seed) in done else {}
                missing = [rule for rule in arguments.rules if rule not in known]
                if missing:
                    waiting.append(pool.submit(one_seed, name, seed, missing))
        for each in waiting:
            _add(done, each.result())
            if arguments.keep is not None:
                with arguments.keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(each.result()) + "\n")
    return list(done.values())


# -- what a step costs -----------------------------------------------------------------------------------------------


def cost(pairs: int = 400, tensors: int = 18) -> Iterator[str]:
    """Steps of the same weights and gradients, in turn with a guard, one that skips spikes, and `SpikeRecovery`."""
    torch.set_num_threads(1)
    ways = {"guard": _guarded, "with SkipSpikes": _skipping, "SpikeRecovery": _laddered}
    steps = {name: make(tensors) for name, make in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, step in steps.items():
            begin = time.process_time_ns()
            step()
            times[name].append((time.process_time_ns() - begin) / 1e3)
    for name in list(ways)[1:]:
        more = statistics.median(a - b for a, b in zip(times[name], times["guard"], strict=True))
        yield f"{name}: {more:.0f} µs more a step than a guard, {more / 15_000:.1%} of 15 ms"


def _model(tensors: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(64, 64) for _ in range(tensors)])
    for parameter in model:
        parameter.grad = torch.randn(64, 64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.tensor(1.0)


def _guarded(tensors: int) -> Any:
    _, optimizer, _ = _model(tensors)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    return optimizer.step


def _skipping(tensors: int) -> Any:
    _, optimizer, loss = _model(tensors)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=gg.SkipSpikes())

    def step() -> None:
        guard.record_loss(loss)
        optimizer.step()

    return step


def _laddered(tensors: int) -> Any:
    model, optimizer, loss = _model(tensors)
    ladder = gg.SpikeRecovery(model, optimizer, gg.ClipByGlobalNorm(1.0))

    def step() -> None:
        ladder.record_loss(loss)
        optimizer.step()
        ladder.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where each seed goes as it ends, and is taken from")
    parser.add_argument("--cost", action="store_true", help="only what a step costs")
    arguments = parser.parse_args()
    for text in cost() if arguments.cost else table(train_all(arguments)):
        print(text, flush=True)


if __name__ == "__main__":
    main()
