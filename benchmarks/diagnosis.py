"""Does the diagnosis name what is wrong with a run, and nothing where all is well? Prints a table.

python benchmarks/diagnosis.py [--seeds 3] [--only PATTERN] [--records DIR] [--follow]
                               [--set developed more held_out fresh unseen optimizers new_fields common_mistakes forum
                                     twelve_fields second_dozen third_dozen half_dozen tenth_set eleventh_set]

Each scenario of the files `diagnosis_*.py` beside this one is trained by `gradguard run`, in a fork of this process,
and judged by what `gradguard report --json` says. Its *label* is the fault that was built into it, or *healthy*. A sick
scenario counts where its held-out loss is clearly worse than that of the same run without the fault, a healthy one
where neither half nor twice the learning rate is better by a factor; with `--verify` that is measured, and what fails
is named. The columns: the cause in first place, by seed; the warnings and errors that stand on a healthy one;
*contradictions*, where a decision says to keep or to do nothing beside an error, or where a page that says the run is
well warns.

With `--follow` the first advice is followed to the letter: the learning rate times the factor that it gives, the clip
that it proposes, and, where it names the right cause and that is no matter of numbers, the fault removed. It *helps*
where the held-out loss falls by a tenth or more of what the fault has cost, and *harms* where it rises by 5 % or more,
and does so in the geometric mean of four other seeds, which leave out the chance that chose this one. A clip that
binds on no step of the record leaves the run as it is, bit for bit, and is not run. A followed run is judged again:
*told again* where the same cause stands first though it helped.

Runs that lie in DIR already are not made again. Each scenario has a folder of its own there: a run takes the newest
record beside its own for the one that it follows.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (which the first step of an optimizer imports: the forks have it)
from rich.console import Console
from rich.table import Table

import diagnosis_common_mistakes_tasks
import diagnosis_eleventh_set_tasks
import diagnosis_forum_tasks
import diagnosis_fresh_tasks
import diagnosis_half_dozen_tasks
import diagnosis_held_out
import diagnosis_more_tasks
import diagnosis_new_fields_tasks
import diagnosis_optimizer_tasks
import diagnosis_second_dozen_tasks
import diagnosis_tasks
import diagnosis_tenth_set_tasks
import diagnosis_third_dozen_tasks
import diagnosis_twelve_fields_tasks
import diagnosis_unseen_tasks
from gradguard.cli import main as gradguard
from gradguard.monitoring.observe import observer, script, termination  # noqa: F401  (for the forks)
from gradguard.monitoring.show import report as _report  # noqa: F401

HERE = Path(__file__).parent
SETS = {
    "developed": diagnosis_tasks,
    "more": diagnosis_more_tasks,
    "held_out": diagnosis_held_out,
    "fresh": diagnosis_fresh_tasks,
    "unseen": diagnosis_unseen_tasks,
    "optimizers": diagnosis_optimizer_tasks,
    "new_fields": diagnosis_new_fields_tasks,
    "common_mistakes": diagnosis_common_mistakes_tasks,
    "forum": diagnosis_forum_tasks,
    "twelve_fields": diagnosis_twelve_fields_tasks,
    "second_dozen": diagnosis_second_dozen_tasks,
    "third_dozen": diagnosis_third_dozen_tasks,
    "half_dozen": diagnosis_half_dozen_tasks,
    "tenth_set": diagnosis_tenth_set_tasks,
    "eleventh_set": diagnosis_eleventh_set_tasks,
}

CLEARLY = 1.15
"""A sick run's held-out loss is at least so many times its twin's."""

BETTER_RATE = 0.6
"""A healthy run's loss is not below so much of itself with half or twice the learning rate."""


WORSE = 1.05
"""Times the loss before: what was followed harms."""

ASKED_AGAIN = (101, 102, 103, 104)
"""Seeds that say whether a run that ended worse did so by chance."""

BY_NUMBERS = ("rate_too_high", "rate_too_low", "nonfinite_growth", "bad_batches")
"""Causes whose advice is a learning rate or a clip; that of the others removes the fault."""


@dataclass(frozen=True)
class Scenario:
    """A task with one of its faults, or none, and a seed."""

    set_name: str
    task: str
    fault: str
    seed: int

    @property
    def label(self) -> str:
        return self.fault.partition("__")[0] or "healthy"

    @property
    def variant(self) -> str:
        """The label, and what tells two faults of one label apart."""
        return self.fault or "healthy"

    @property
    def folder(self) -> str:
        return f"{self.variant}__{self.task}__{self.seed}"

    @property
    def floor(self) -> float:
        return SETS[self.set_name].TASKS.by_name[self.task].floor


@dataclass(frozen=True)
class Followed:
    """What of an advice can be followed from outside: a rate, a clip, or the fault removed."""

    rate: float = 1.0
    clip: str | None = None
    fixed: bool = False

    @property
    def words(self) -> str:
        """What was followed, for people."""
        return " and ".join(filter(None, ("the fault removed" * self.fixed, self.numbers)))

    @property
    def numbers(self) -> str:
        return ",".join(filter(None, (f"rate={self.rate:g}" * (self.rate != 1), self.clip)))


def run(scenario: Scenario, records: Path, followed: Followed = Followed()) -> tuple[Path, float]:
    """The record and the held-out loss; infinite where it is not finite."""
    if followed.fixed:
        scenario = Scenario(scenario.set_name, scenario.task, "", scenario.seed)
    folder = records / scenario.folder / (followed.numbers or "first")
    outcome = folder / "loss.txt"
    if not outcome.exists():
        script = HERE / f"{SETS[scenario.set_name].__name__}.py"
        own = ["run", "--no-report", "--force", "--out", str(folder), "--seed", str(scenario.seed)]
        clip = ["--clip", followed.clip] if followed.clip else []
        told = [scenario.task, scenario.fault, "--seed", str(scenario.seed), "--rate", str(followed.rate)]
        said = forked([*own, *clip, str(script), *told])
        folder.mkdir(parents=True, exist_ok=True)
        outcome.write_text(said.rpartition("held_out ")[2].strip() or "nan")
    loss = float(outcome.read_text())
    return folder / "run.jsonl", max(loss, scenario.floor) if math.isfinite(loss) else math.inf


def forked(arguments: Sequence[str]) -> str:
    """What `gradguard ARGUMENTS` prints, in a child of this process: warm, and with nothing of another run."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            code = gradguard(arguments)
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        if status:
            errors.seek(0)
            print(f"gradguard {' '.join(arguments)}: ended with {status}:\n{errors.read()[-1500:]}", file=sys.stderr)
        return out.read()


def report(record: Path) -> dict[str, Any]:
    """What `gradguard report --json` says; no step at all is a record that holds nothing."""
    if not record.exists():
        return {"diagnosis": {"cause": "no record"}, "decision": {"kind": "unknown"}, "findings": []}
    return json.loads(forked(["report", "--json", str(record)]))


def cause_of(page: dict[str, Any]) -> str:
    return page.get("diagnosis", {}).get("cause", "none")


def alarms(page: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in page["findings"] if one["severity"] in ("warning", "error")]


def contradictions(page: dict[str, Any]) -> list[str]:
    """Where severity and decision, or severity and diagnosis, say opposite things."""
    kind, cause = page["decision"]["kind"], cause_of(page)
    calm = kind in ("keep", "nothing")
    found = [f"{kind} beside {one['kind']}" for one in page["findings"] if calm and one["severity"] == "error"]
    if cause == "healthy":
        found += [f"healthy beside {alarm}" for alarm in alarms(page)]
        found += ["healthy beside fix"] * (kind == "fix")
    elif calm and cause not in ("none", "unknown"):
        found.append(f"{kind} beside {cause}")
    return found


def advice_of(page: dict[str, Any], scenario: Scenario) -> Followed:
    """What the page says to do: its numbers, and the fault removed where it names the right cause."""
    decision, cause = page["decision"], cause_of(page)
    rate, rule = decision.get("rate_factor") or 1.0, decision.get("rule")
    if cause == scenario.label and cause not in (*BY_NUMBERS, "healthy"):
        said = rule is not None and rule.partition("=")[2] in page["diagnosis"]["advice"]
        return Followed(rate, rule if said else None, fixed=True)
    return Followed(rate, None if decision["kind"] == "keep" else rule)


def scenarios(sets: Iterable[str], seeds: int, only: str) -> list[Scenario]:
    found = [
        Scenario(name, task, fault, seed)
        for name in sets
        for task, made in SETS[name].TASKS.by_name.items()
        for fault in ("", *made.faults)
        for seed in range(seeds)
    ]
    return [one for one in found if only in f"{one.task} {one.variant}"]


def verified(scenario: Scenario, records: Path) -> str:
    """Why the label does not hold; empty where it does."""
    loss = run(scenario, records)[1]
    if scenario.fault:
        twin = run(scenario, records, Followed(fixed=True))[1]
        return "" if loss > CLEARLY * twin else f"{loss:.3g} where the twin has {twin:.3g}"
    others = {rate: run(scenario, records, Followed(rate))[1] for rate in (0.5, 2.0)}
    better = [f"{other:.3g} at {rate} times the rate" for rate, other in others.items() if other < BETTER_RATE * loss]
    return f"{loss:.3g}, but {' and '.join(better)}" if better else ""


def follow(scenario: Scenario, page: dict[str, Any], loss: float, records: Path) -> dict[str, Any]:
    advice = advice_of(page, scenario)
    if advice == Followed():
        return {"outcome": "nothing to follow", "advice": "", "after": loss}
    if advice == Followed(clip=advice.clip) and float(advice.clip.partition("=")[2]) >= (page["max_norm"] or math.inf):
        return {"outcome": "no change", "advice": advice.words, "after": loss, "again": False}  # it binds nowhere
    record, after = run(scenario, records, advice)
    twin = run(scenario, records, Followed(fixed=True))[1]
    gained = loss - after if math.isfinite(loss) else math.inf * (1 if math.isfinite(after) else 0)
    helps = scenario.label != "healthy" and gained >= 0.1 * (loss - twin if math.isfinite(loss) else 1.0)
    outcome = "helps" if helps else "harms" if worse(scenario, advice, loss, after, records) else "no change"
    again = helps and not advice.fixed and cause_of(report(record)) == cause_of(page)
    return {"outcome": outcome, "advice": advice.words, "after": after, "again": again}


def worse(scenario: Scenario, advice: Followed, loss: float, after: float, records: Path) -> bool:
    """Whether an advice made a run worse: with this seed, and in the mean of others."""
    if after <= WORSE * loss:
        return False
    others = [replace(scenario, seed=seed) for seed in ASKED_AGAIN]
    ratios = [run(one, records, advice)[1] / run(one, records)[1] for one in others]
    print(f"asked again: {scenario.folder} {advice.words}: {ratios}", file=sys.stderr)
    return math.prod(ratios) > WORSE ** len(ratios) or any(map(math.isnan, ratios))


def judge(scenario: Scenario, options: argparse.Namespace, records: Path) -> dict[str, Any]:
    began = time.perf_counter()
    record, loss = run(scenario, records)
    page = report(record)
    found = {
        "label": scenario.label,
        "loss": loss,
        "cause": cause_of(page),
        "others": [one["cause"] for one in page.get("diagnosis", {}).get("others", [])],
        "alarms": alarms(page),
        "contradictions": contradictions(page),
        "decision": page["decision"]["kind"],
    }
    if options.verify:
        found["unverified"] = verified(scenario, records)
    if options.follow:
        found |= follow(scenario, page, loss, records)
    mark = "" if found["cause"] == scenario.label else "   <-- "
    print(f"{time.perf_counter() - began:5.1f} s {scenario.folder}{mark}", json.dumps(found), file=sys.stderr)
    return found


Rows = dict[Scenario, dict[str, Any]]


def rates(rows: Rows, follows: bool) -> list[list[str]]:
    """How often the cause stands in first place, by label, below the titles."""
    table = [["label", "runs", "cause in first place", "taken for"] + ["helps", "no change", "harms"] * follows]
    labels = sorted({one.label for one in rows}, key=lambda label: (label == "healthy", label))
    groups = {label: [row for one, row in rows.items() if one.label == label] for label in labels}
    groups["all sick"] = [row for row in rows.values() if row["label"] != "healthy"]
    groups["all"] = list(rows.values())
    for name, mine in groups.items():
        right = sum(row["cause"] == row["label"] for row in mine)
        wrong = Counter(row["cause"] for row in mine if row["cause"] != row["label"])
        taken = "" if name.startswith("all") else ", ".join(f"{cause} {count}" for cause, count in wrong.most_common())
        outcomes = Counter(row.get("outcome") for row in mine)
        unchanged = outcomes["no change"] + outcomes["nothing to follow"]
        followed = [str(count) for count in (outcomes["helps"], unchanged, outcomes["harms"])] if follows else []
        table.append([name, str(len(mine)), f"{right} ({right / max(1, len(mine)):.0%})", taken, *followed])
    return table


def markdown(table: list[list[str]]) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def details(rows: Rows) -> Table:
    table = Table("task", "label", "held-out loss", "cause in first place", "warnings and errors", "contradictions")
    places = dict.fromkeys((one.task, one.variant) for one in rows)
    for task, variant in places:
        mine = [row for one, row in rows.items() if (one.task, one.variant) == (task, variant)]
        causes = Counter(row["cause"] for row in mine)
        said = ", ".join(name if len(causes) == 1 else f"{name} {count}" for name, count in causes.most_common())
        on_page = sorted({alarm for row in mine for alarm in row["alarms"]}) if variant == "healthy" else []
        opposed = sorted({one for row in mine for one in row["contradictions"]})
        losses = [row["loss"] for row in mine]
        table.add_row(task, variant, f"{statistics.median(losses):.3g}", said, ", ".join(on_page), ", ".join(opposed))
    return table


def totals(rows: Rows) -> list[str]:
    healthy = [row for row in rows.values() if row["label"] == "healthy"]
    opposed = sum(bool(row["contradictions"]) for row in rows.values())
    helped = [row for row in rows.values() if row.get("outcome") == "helps"]
    lines = [
        f"healthy runs with a warning or an error: {sum(bool(row['alarms']) for row in healthy)} of {len(healthy)}",
        f"pages that contradict themselves: {opposed} of {len(rows)}",
    ]
    if helped:
        lines.append(f"told again though it helped: {sum(bool(row['again']) for row in helped)} of {len(helped)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of 'TASK LABEL'")
    parser.add_argument("--set", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--records", type=Path, help="where the records go, and are taken from")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the table by label as it stands in the documentation")
    parser.add_argument("--json", type=Path, help="where all that was found goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        records = options.records or Path(scratch)
        chosen = scenarios(options.set, options.seeds, options.only)
        rows = {one: judge(one, options, records) for one in chosen}
    found = rates(rows, options.follow)
    by_label = Table(*found[0])
    for line in found[1:]:
        by_label.add_row(*line)
    Console(width=200).print(details(rows), markdown(found) if options.markdown else by_label)
    for line in totals(rows):
        print(line)
    for one, row in rows.items():
        if row.get("unverified"):
            print(f"not verified: {one.folder}: {row['unverified']}")
    if options.json:
        options.json.write_text(json.dumps({one.folder: row for one, row in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
