"""Does the judgement hold what was asked of it? Diagnosis, advice and recommendation in one table, with the goals.

python benchmarks/judgement.py --keep DIR [--seeds 3] [--set unseen optimizers ...] [--processes 2]

Calls `diagnosis.py --follow` on the sets that were written before the diagnosis was asked about them, and
`recommendation.py`, and adds up what both found. Both keep what they trained in DIR: a second call trains only what is
not there. A sick run counts if its held-out loss is more than 15 % above that of the same script without the fault. A
healthy run counts unless it is called sick and the advice brings its loss below 0.6 times what it was: then it was
lost on that seed, and the page is right.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UNSEEN = ("unseen", "optimizers", "new_fields", "common_mistakes", "forum", "twelve_fields", "second_dozen",
          "third_dozen", "half_dozen", "tenth_set", "eleventh_set")  # fmt: skip
CLEARLY = 1.15
LOST = 0.6
Rows = dict[str, dict[str, Any]]


def counted(rows: Rows) -> tuple[Rows, Rows]:
    """The sick runs that are clearly worse than their twins, and the healthy ones but those that were lost."""
    healthy = {name: row for name, row in rows.items() if row["label"] == "healthy"}
    twins = {name.removeprefix("healthy__"): row["loss"] for name, row in healthy.items()}

    def twin(name: str) -> float:
        return next((loss for task, loss in twins.items() if name.endswith(f"__{task}")), math.nan)

    others = {name: row for name, row in rows.items() if name not in healthy}
    lost = [name for name, row in healthy.items() if row["cause"] != "healthy" and row["after"] < LOST * row["loss"]]
    well = {name: row for name, row in healthy.items() if name not in lost}
    return {name: row for name, row in others.items() if row["loss"] > CLEARLY * twin(name)}, well


def bars(rows: Rows, ratios: dict[str, float]) -> list[list[str]]:
    """What was asked, what was found, and the failures."""
    sick, healthy = counted(rows)

    def share(what: str, goal: str, of: Rows, failed: list[str], *, left: bool = True) -> list[str]:
        count = len(of) - len(failed) if left else len(failed)
        return [what, goal, f"{count} of {len(of)} ({count / max(1, len(of)):.0%})", ", ".join(failed)]

    def where(of: Rows, *outcomes: str) -> list[str]:
        return [name for name, row in of.items() if row.get("outcome") in outcomes]

    missed = [f"{name} ({row['cause']})" for name, row in sick.items() if row["cause"] != row["label"]]
    alarmed = [
        f"{name} ({', '.join(row['alarms']) or row['cause']})"
        for name, row in healthy.items()
        if row["alarms"] or row["cause"] != "healthy"
    ]
    found = [
        ["", "goal", "found", "failures"],
        share("cause in first place", "90 %", sick, missed),
        share("healthy runs with a false warning or cause", "none", healthy, alarmed, left=False),
        share("pages that contradict themselves", "none", rows, [k for k, v in rows.items() if v["contradictions"]],
              left=False),
        share("advice helps sick runs", "80 %", sick, where(sick, "no change", "nothing to follow", "harms")),
        share("advice harms", "none", rows, where(rows, "harms"), left=False),
    ]  # fmt: skip
    if ratios:
        mean, name = math.exp(statistics.fmean(map(math.log, ratios.values()))), max(ratios, key=ratios.__getitem__)
        found.append(["recommendation over the best of the grid, geometric mean", "1.03", f"{mean:.2f}", ""])
        found.append(["recommendation over the best of the grid, worst", "1.5", f"{ratios[name]:.2f}", name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="where records and losses are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-seeds", type=int, default=20, help="for tasks of the recommendation that scatter")
    parser.add_argument("--set", nargs="*", default=list(UNSEEN), choices=UNSEEN)
    parser.add_argument("--processes", type=int, default=2, help="of the recommendation's runs")
    parser.add_argument("--no-recommendation", action="store_true", help="leave the tasks of the recommendation out")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    rows: Rows = {}
    for name in options.set:
        found = options.keep / f"{name}.json"
        asked = ["--follow", "--set", name, "--seeds", str(options.seeds)]
        called("diagnosis.py", *asked, "--records", options.keep / "records", "--json", found)
        rows |= json.loads(found.read_text())
    ratios: dict[str, float] = {}
    if not options.no_recommendation:
        found = options.keep / "recommendation.json"
        asked = ["--no-experiments", "--seeds", str(options.seeds), "--most-seeds", str(options.most_seeds)]
        kept = ["--processes", str(options.processes), "--keep", options.keep / "recommendation", "--json", found]
        called("recommendation.py", *asked, *kept)
        ratios = {name: one["page"]["ratio"] for name, one in json.loads(found.read_text()).items()}
    titles, *lines = bars(rows, ratios)
    for line in (titles, ["---"] * len(titles), *lines):
        print(f"| {' | '.join(line)} |")


def called(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, HERE / script, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
