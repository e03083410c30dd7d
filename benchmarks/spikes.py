"""What finite spikes cost a run under each rule, against its twin without the spike. Prints a table.

python benchmarks/spikes.py [--seeds 5] [--scenarios "LM: clean" GAN] [--rules plain oracle] [--processes 2]
"""

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from spikes_rules import RULES, Rule
from spikes_scenarios import SCENARIOS, Run

RECOVERED, SMOOTH = 1.02, 20


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


def one(name: str, rule: str, seed: int) -> Outcome:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = SCENARIOS[name].make(seed)
    if rule == "twin":
        return train(run, Rule(run, run.clip), spoiled=False)
    return train(run, RULES[rule](run))


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
    begin = min(mine.bad, default=0)
    return [i for i in sorted(mine.losses) if i > begin and i not in mine.bad and i in twin.losses]


def row(outcomes: Sequence[Outcome], twins: Sequence[Outcome]) -> dict:
    pairs = list(zip(outcomes, twins, strict=True))
    above = [o.final / t.final - 1 if t.final > 0 else (o.final - t.final) / abs(t.final) for o, t in pairs]
    return {
        "final": statistics.fmean(o.final for o in outcomes),
        "above": statistics.fmean(above),
        "worst": max(above),
        "recovery": statistics.median(recovery(o, t) for o, t in pairs),
        "area": statistics.fmean(area(o, t) for o, t in pairs),
        "false": statistics.fmean(len({*o.skipped} - {*o.bad}) for o in outcomes),
        "most false": max(len({*o.skipped} - {*o.bad}) for o in outcomes),
        "missed": statistics.fmean(len({*o.bad} - {*o.skipped}) for o in outcomes),
        "events": [o.events for o in outcomes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where all numbers go")
    arguments = parser.parse_args()
    numbers = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = [(n, r, s) for n in arguments.scenarios for r in ["twin", *arguments.rules] for s in range(arguments.seeds)]
        done = dict(zip(jobs, [pool.submit(one, *job) for job in jobs]))
        for name in arguments.scenarios:
            seeds = range(arguments.seeds)
            twins = [done[name, "twin", s].result() for s in seeds]
            print(f"\n{name}: twin {statistics.fmean(t.final for t in twins):.4f}")
            for rule in arguments.rules:
                found = row([done[name, rule, s].result() for s in seeds], twins)
                numbers[f"{name} | {rule}"] = found
                print(
                    f"  {rule:16s} {found['above']:+8.2%} worst {found['worst']:+8.2%} recovery {found['recovery']:5} "
                    f"area {found['area']:8.2f} false {found['false']:5.1f} ({found['most false']}) missed {found['missed']:4.1f} "
                    f"{found['events'][0][:4]}", flush=True
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
