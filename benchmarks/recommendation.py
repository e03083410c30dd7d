"""Is what a record recommends, followed blindly, as good as the best constant? Prints a table.

python benchmarks/recommendation.py [--seeds 5] [--most-seeds 20] [--tasks "gpt spiky" gan] [--processes 2] [--keep DIR]

Each task of `recommendation_tasks.py` is run once without a clip, while `gradguard.watch` records it. Then it is run
again from the same seed under what `recommend` decides for that record, and under each of the constants that people
try: none, 0.1, 1, 5 and the 90th percentile of the recorded norms. Of a decision to fix the learning rate, both are
followed: the rate and the threshold. Where the decision leaves it to an experiment, *tuned* is what won it: of the
rules that `gradguard tune --metric` tries and the page's own decision, the one with the lowest mean held-out loss with
five other seeds; elsewhere it is the page's decision. The numbers are held-out losses; one that is not finite counts
as the worst finite one of the task. A task is lost where the mean over the seeds is more than 5 % above that of the
best constant, or above it with p < 0.05 in a paired t-test. Where runs scatter so much that the standard error of the
difference is above 2.5 % of the loss, more seeds are run, up to `--most-seeds`. Fresh tasks were written after the
rules. `--keep DIR` keeps each record and each loss: a second call trains only what is not there, so that a benchmark
that was interrupted goes on, and a changed decision costs only the runs that it changes. `--also p99 max` trains with
more quantiles of the recorded norms.
"""

import argparse
import gc
import json
import math
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gradguard as gg
from gradguard.clip.clipper import Clipper
from gradguard.monitoring.judge.recommend import Recommendation, recommend
from gradguard.monitoring.record.file import Record, read_record
from gradguard.monitoring.tune.candidates import candidates
from gradguard.monitoring.tune.score import got_worse
from recommendation_tasks import FRESH, TASKS, Task, make_task

FIXED = ("none", "0.1", "1", "5", "p90")
FOLLOWED = ("page", "tuned")
TUNING = (1001, 1002, 1003, 1004, 1005)
"""The seeds of experiments."""

MARGIN = 1.05
SURE = 0.025  # of the best loss: the standard error of the difference from it
T_TWO_SIDED = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 15: 2.145, 20: 2.093}  # p = 0.05, by seeds

ClipperOf = Callable[[int], Clipper | None]


@dataclass(frozen=True)
class Kept:
    """What has been run already: records, and held-out losses by task, seed, rules and learning rate.

    Attributes:
        folder: Where it is kept; None for nowhere.
        also: Quantiles of the recorded norms that are tried besides, such as ``"p99"``; ``"max"`` is the largest.
    """

    folder: Path | None
    also: tuple[str, ...] = ()

    def loss(self, name: str, seed: int, rules: Sequence[str | None], rate: float, run: Callable[[], float]) -> float:
        """The loss of a run that has been made, or of ``run()``."""
        if self.folder is None:
            return run()
        path, key = self.folder / "losses.jsonl", [name, seed, list(rules), rate]
        for line in path.read_text().splitlines() if path.exists() else ():
            *found, loss = json.loads(line)
            if found == key:
                return loss
        loss = run()
        with path.open("a") as file:
            file.write(json.dumps([*key, loss]) + "\n")
        return loss


def train(task: Task, clipper_of: ClipperOf) -> float:
    clippers = [clipper_of(place) for place in range(len(task.optimizers))]
    places = {id(optimizer): place for place, optimizer in enumerate(task.optimizers)}

    def clip(optimizer: torch.optim.Optimizer) -> None:
        clipper = clippers[places[id(optimizer)]]
        if clipper is not None:
            clipper([p for group in optimizer.param_groups for p in group["params"]])

    for i in range(task.steps):
        task.step(i, clip)
    loss = task.evaluate()
    return max(loss, task.floor) if math.isfinite(loss) else math.inf


def clipper_of_rule(rule: str | None) -> Clipper | None:
    name, _, value = (rule or "").partition("=")
    if name == "median":
        return gg.ClipByMedian(k=float(value)) if value else gg.ClipByMedian()
    return gg.ClipByGlobalNorm(float(value)) if name == "norm" else None


def watched(kept: Kept, name: str, seed: int) -> tuple[float, Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = (kept.folder or Path(folder)) / f"{name}-{seed}.jsonl"
        if path.exists():
            return kept.loss(name, seed, [None], 1.0, lambda: math.nan), read_record(path)
        written = Path(folder) / "run.jsonl"
        gc.collect()  # the optimizers of tasks before this one would be in its record
        task = make_task(name, seed)
        with gg.watch(written):
            loss = train(task, lambda place: None)
        kept.loss(name, seed, [None], 1.0, lambda: loss)
        part = path.with_suffix(".part")
        shutil.copy(written, part)
        part.rename(path)
        return loss, read_record(path)


def train_by(kept: Kept, name: str, seed: int, parts: Sequence[Recommendation]) -> float:
    """The held-out loss of a run under a decision, or one for each optimizer."""
    rate = min((one.rate_factor for one in parts if one.rate_factor), default=1.0)
    return _trained(kept, name, seed, [one.rule for one in parts], rate)


def _trained(kept: Kept, name: str, seed: int, rules: Sequence[str | None], rate: float = 1.0) -> float:
    def run() -> float:
        task = make_task(name, seed)
        task.rate = rate
        return train(task, lambda place: clipper_of_rule(rules[min(place, len(rules) - 1)]))

    return kept.loss(name, seed, rules, rate, run)


def experiment(kept: Kept, name: str) -> tuple[str, list[Recommendation]]:
    """The winner of what `gradguard tune --metric` tries, with seeds of its own, and of the page's own decision."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in TUNING:
        _, record = watched(kept, name, seed)
        decision = recommend(record)
        if decision.experiment:
            break
    else:
        return "", []
    rules = ["none", *candidates(record, got_worse([step["loss"] for step in record.steps if "loss" in step]))]
    tried = {rule: [replace(decision, rule=rule, rate_factor=None)] for rule in rules} | {"page": _parts(decision)}
    losses = {rule: [train_by(kept, name, seed, one) for seed in TUNING] for rule, one in tried.items()}
    best = min(tried, key=lambda rule: statistics.fmean(losses[rule]))
    return best, tried[best]


def _parts(decision: Recommendation) -> list[Recommendation]:
    return [one for _, one in decision.parts] or [decision]


def one_seed(kept: Kept, name: str, seed: int, winner: tuple[str, list[Recommendation]]) -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    unclipped, record = watched(kept, name, seed)
    losses = {"none": unclipped}
    norms = sorted(step["norm"] for step in record.steps if step.get("norm"))
    for label in (*FIXED[1:], *kept.also):
        threshold = float(label) if label[0].isdigit() else _quantile(norms, label)
        losses[label] = _trained(kept, name, seed, [f"norm={threshold!r}"])
    decision = recommend(record)
    parts = _parts(decision)
    losses["page"] = train_by(kept, name, seed, parts)
    said = [f"{one.kind} {one.rule or ''}".strip() for one in parts]
    rule, tuned = winner
    losses["tuned"] = train_by(kept, name, seed, tuned) if rule else losses["page"]
    return {"losses": losses, "said": " / ".join(dict.fromkeys(said))}


def _quantile(norms: list[float], label: str) -> float:
    return norms[-1] if label == "max" else norms[int(float(label[1:]) / 100 * len(norms))]


def judge(rows: list[dict]) -> dict:
    labels = [*FIXED, *FOLLOWED]
    worst = max((loss for row in rows for loss in row["losses"].values() if math.isfinite(loss)), default=1.0)
    table = {k: [row["losses"][k] if math.isfinite(row["losses"][k]) else worst for row in rows] for k in labels}
    means = {label: statistics.fmean(values) for label, values in table.items()}
    best = min(FIXED, key=lambda label: means[label])
    followed = {label: against(table[label], table[best]) for label in FOLLOWED}
    return {"means": means, "best": best, "said": [row["said"] for row in rows], **followed}


def against(mine: list[float], best: list[float]) -> dict:
    """Of the losses of the same seeds: the ratio of the means, whether it is surely above 1, and its standard error."""
    gaps = [one - other for one, other in zip(mine, best, strict=True)]
    error = (statistics.stdev(gaps) if len(gaps) > 1 else math.inf) / math.sqrt(len(gaps))
    gap, usual = statistics.fmean(gaps), statistics.fmean(best)
    return {
        "ratio": 1 + gap / usual if usual else 1.0,
        "significant": gap > T_TWO_SIDED.get(len(gaps), 2.0) * error and gap > 1e-3 * usual,
        "error": error / usual if usual else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most-seeds", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where records and losses are kept")
    parser.add_argument("--also", nargs="*", default=[], help="more quantiles of the norms as thresholds")
    parser.add_argument("--no-experiments", action="store_true", help="leave the column tuned out")
    parser.add_argument("--json", type=Path, help="where all numbers go")
    arguments = parser.parse_args()
    kept = Kept(arguments.keep, tuple(arguments.also))
    if kept.folder is not None:
        kept.folder.mkdir(parents=True, exist_ok=True)
    columns = ("task", "seeds", *FIXED, *FOLLOWED, "page ÷ best", "tuned ÷ best", "decisions", "winner")
    table = Table(*columns, title="held-out loss, mean over the seeds")
    rows: dict[str, list[dict]] = {name: [] for name in arguments.tasks}
    found, open_tasks = {}, list(arguments.tasks)
    with ProcessPoolExecutor(arguments.processes) as pool:
        winners = dict.fromkeys(open_tasks, ("", []))
        if not arguments.no_experiments:
            winners = dict(zip(open_tasks, pool.map(partial(experiment, kept), open_tasks), strict=True))
        for name, (rule, _) in winners.items():
            print(name, "winner:", rule, file=sys.stderr)
        while open_tasks:
            begun = len(rows[open_tasks[0]])
            seeds = range(begun, begun + arguments.seeds)
            jobs = [(name, seed, winners[name]) for name in open_tasks for seed in seeds]
            for (name, seed, _), row in zip(
                jobs, pool.map(partial(one_seed, kept), *zip(*jobs, strict=True)), strict=True
            ):
                rows[name].append(row)
                losses = {label: float(f"{loss:.3g}") for label, loss in row["losses"].items()}
                print(name, seed, row["said"], losses, file=sys.stderr)
            found |= {name: judge(rows[name]) for name in open_tasks}
            more = begun + 2 * arguments.seeds <= arguments.most_seeds
            unsure = [name for name in open_tasks if max(found[name][label]["error"] for label in FOLLOWED) > SURE]
            open_tasks = unsure if more else []
    for name in arguments.tasks:
        one = found[name]
        ratios = [
            f"{one[k]['ratio']:.2f}{'*' * one[k]['significant']}{'!' * (one[k]['ratio'] > MARGIN)}" for k in FOLLOWED
        ]
        cells = [f"{one['means'][label]:.3g}" for label in [*FIXED, *FOLLOWED]]
        label = f"{name} (fresh)" if name in FRESH else name
        said = "; ".join(sorted(set(one["said"])))
        table.add_row(label, str(len(rows[name])), *cells, *ratios, said, winners[name][0])
    Console(width=180).print(table)
    print("* significantly worse than the best constant (p < 0.05)   ! more than 5 % above it")
    if arguments.json:
        winning = {name: {"winner": rule} for name, (rule, _) in winners.items()}
        arguments.json.write_text(json.dumps({name: found[name] | winning[name] for name in found}, indent=1))


if __name__ == "__main__":
    main()
