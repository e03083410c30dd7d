"""Is what a record recommends, followed blindly, as good as the best constant? Prints a table.

python benchmarks/recommendation.py [--seeds 5] [--most-seeds 20] [--tasks "gpt spiky" gan] [--processes 2]

Each task of `recommendation_tasks.py` is run once without a clip, while `gradguard.watch` records it. Then it is run
again from the same seed under what `recommend` decides for that record, and under each of the constants that people
try: none, 0.1, 1, 5 and the 90th percentile of the recorded norms. Of a decision to fix the learning rate, both are
followed: the rate and the threshold. The numbers are held-out losses; one that is not finite counts as the worst finite
one of the task. A task is lost where the mean over the seeds is more than 5 % above that of the best constant, or above
it with p < 0.05 in a paired t-test. Where runs scatter so much that the standard error of the difference is above 2.5 %
of the loss, more seeds are run, up to `--most-seeds`. Fresh tasks were written after the rules.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gradguard as gg
from gradguard.clip.clipper import Clipper
from gradguard.monitoring.judge.recommend import Recommendation, recommend
from gradguard.monitoring.record.file import read_record
from recommendation_tasks import FRESH, TASKS, Task, make_task

FIXED = ("none", "0.1", "1", "5", "p90")
MARGIN = 1.05
SURE = 0.025  # of the best loss: the standard error of the difference from it
T_TWO_SIDED = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 15: 2.145, 20: 2.093}  # p = 0.05, by seeds

ClipperOf = Callable[[int], Clipper | None]


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
        return gg.ClipByMedian(k=float(value))
    return gg.ClipByGlobalNorm(float(value)) if name == "norm" else None


def one_seed(name: str, seed: int) -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        task = make_task(name, seed)
        with gg.watch(path):
            losses = {"none": train(task, lambda place: None)}
        record = read_record(path)
    decision = recommend(record)
    parts = [one for _, one in decision.parts] or [decision]
    norms = sorted(step["norm"] for step in record.steps if step.get("norm"))
    p90 = norms[int(0.9 * len(norms))]
    for label, threshold in (("0.1", 0.1), ("1", 1.0), ("5", 5.0), ("p90", p90)):
        losses[label] = train(make_task(name, seed), lambda place, c=threshold: gg.ClipByGlobalNorm(c))
    task = make_task(name, seed)
    task.rate = min((one.rate_factor for one in parts if one.rate_factor), default=1.0)
    losses["page"] = train(task, lambda place: clipper_of_rule(_part(parts, place).rule))
    said = [f"{one.kind} {one.rule or ''}".strip() for one in parts]
    return {"losses": losses, "said": " / ".join(dict.fromkeys(said))}


def _part(parts: list[Recommendation], place: int) -> Recommendation:
    return parts[min(place, len(parts) - 1)]


def judge(rows: list[dict]) -> dict:
    labels = [*FIXED, "page"]
    worst = max((loss for row in rows for loss in row["losses"].values() if math.isfinite(loss)), default=1.0)
    table = {k: [row["losses"][k] if math.isfinite(row["losses"][k]) else worst for row in rows] for k in labels}
    means = {label: statistics.fmean(values) for label, values in table.items()}
    best = min(FIXED, key=lambda label: means[label])
    gaps = [mine - other for mine, other in zip(table["page"], table[best], strict=True)]
    spread = statistics.stdev(gaps) if len(gaps) > 1 else math.inf
    error = spread / math.sqrt(len(gaps))
    limit = T_TWO_SIDED.get(len(gaps), 2.0) * error
    return {
        "means": means,
        "best": best,
        "ratio": means["page"] / means[best] if means[best] else 1.0,
        "significant": statistics.fmean(gaps) > limit and statistics.fmean(gaps) > 1e-3 * means[best],
        "error": error / means[best] if means[best] else 0.0,
        "said": [row["said"] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most-seeds", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where all numbers go")
    arguments = parser.parse_args()
    columns = ("task", "seeds", *FIXED, "page", "page ÷ best", "decisions")
    table = Table(*columns, title="held-out loss, mean over the seeds")
    rows: dict[str, list[dict]] = {name: [] for name in arguments.tasks}
    found, open_tasks = {}, list(arguments.tasks)
    with ProcessPoolExecutor(arguments.processes) as pool:
        while open_tasks:
            begun = len(rows[open_tasks[0]])
            jobs = [(name, seed) for name in open_tasks for seed in range(begun, begun + arguments.seeds)]
            for (name, seed), row in zip(jobs, pool.map(one_seed, *zip(*jobs, strict=True)), strict=True):
                rows[name].append(row)
                losses = {label: float(f"{loss:.3g}") for label, loss in row["losses"].items()}
                print(name, seed, row["said"], losses, file=sys.stderr)
            found |= {name: judge(rows[name]) for name in open_tasks}
            more = begun + 2 * arguments.seeds <= arguments.most_seeds
            open_tasks = [name for name in open_tasks if more and found[name]["error"] > SURE]
    for name in arguments.tasks:
        one = found[name]
        lost = "*" * one["significant"] + "!" * (one["ratio"] > MARGIN)
        cells = [f"{one['means'][label]:.3g}" for label in [*FIXED, "page"]]
        label = f"{name} (fresh)" if name in FRESH else name
        table.add_row(
            label, str(len(rows[name])), *cells, f"{one['ratio']:.2f}{lost}", "; ".join(sorted(set(one["said"])))
        )
    Console(width=160).print(table)
    print("* significantly worse than the best constant (p < 0.05)   ! more than 5 % above it")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
