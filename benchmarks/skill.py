"""Does the page for assistants lead to the cause? Prints a table: `python benchmarks/skill.py [--keep DIR]`.

Each script of `sick/` is an ordinary training script with one fault; with `--well` it is the same script without it.
`gradguard run` watches both, and `follow` does what `gradguard skill` says with the output of `gradguard report
--json`, mechanically: it reads the fields that the page names, in the order of the page, and looks the answer up with
`gradguard explain`. It knows nothing else of gradguard, of the record or of the script.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradguard.cli import main as gradguard

SICK = Path(__file__).parent / "sick"
CAUSES = {
    "letters": ("rate_too_high", "learning rate"),
    "houses": ("accumulation", "zero_grad()"),
    "frozen_backbone": ("no_gradient", "detach()"),
    "one_bad_file": ("bad_batches", "Check the batches of"),
    "likelihood": ("nonfinite_data", "logarithm"),
    "memory": ("exploding_time", "recurrent weight"),
    "mixed_precision": ("clip_before_unscale", "unscale_"),
    "schedule": ("rate_decayed", "scheduler.step()"),
}
"""The fault of each script, and words that the advice must have for the fault to be removed."""


@dataclass(frozen=True)
class Answer:
    """What an assistant would say.

    Attributes:
        cause: The name of the cause.
        said: What it quotes: the sentence and the advice.
        explained: What `gradguard explain` prints of the cause.
    """

    cause: str
    said: str
    explained: str


def printed(*words: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        gradguard(words)
    return out.getvalue()


def fields(skill: str) -> list[str]:
    """The fields that the page tells to read, in its order."""
    steps = re.findall(r"^\d\. \*\*`([\w.]+)`\*\*", skill.split("## How to read `--json`")[1], re.MULTILINE)
    return [*steps, *re.findall(r"Quote `([\w.]+)`", skill)]


def follow(skill: str, report: dict[str, Any]) -> Answer:
    """Read the fields that the page names: the first is the cause; a decision and a sentence say what to do."""
    read = {}
    for name in fields(skill):
        value: Any = report
        for part in name.split("."):
            value = value[part]
        read[name] = value
    cause = next(iter(read.values()))
    decision = read["decision"]
    said = f"{read['diagnosis.sentence']} {report['diagnosis']['advice']} {decision['headline']}"
    return Answer(cause, said, printed("explain", cause))


def report_of(script: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a script under watch, in this process, and read its report."""
    gradguard(["run", "--no-report", "--out", str(folder), str(script), *arguments])
    return json.loads(printed("report", "--json", str(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="keep the records here")
    chosen = parser.parse_args()
    skill = printed("skill")
    table = Table("script", "fault", "cause named", "advice", "without the fault")
    named = advised = well = 0
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for script, (cause, words) in CAUSES.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                sick, twin = (
                    follow(skill, report_of(SICK / f"{script}.py", folder / script / name, *arguments))
                    for name, arguments in {"sick": [], "well": ["--well"]}.items()
                )
            has_words = words in sick.said and words in sick.explained
            table.add_row(script, cause, sick.cause, "leads to it" if has_words else sick.said, twin.cause)
            named, advised, well = named + (sick.cause == cause), advised + has_words, well + (twin.cause == "healthy")
    Console(width=140, file=sys.stdout).print(table)
    print(
        f"{named} of {len(CAUSES)} causes named, {advised} with advice that removes the fault; {well} twins are healthy"
    )


if __name__ == "__main__":
    main()
