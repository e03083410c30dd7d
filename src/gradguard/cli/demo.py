"""`gradguard demo`: the story of a real run and of its repaired twin, from two records that come with gradguard."""

import argparse
import gzip
import sys
import textwrap
import webbrowser
from pathlib import Path

from gradguard.cli.program import Command, flag, option
from gradguard.errors import CommandError
from gradguard.monitoring.record.text import encodable

_RECORDS = ("unclipped", "clipped")


def _demo(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.judge.diagnosis import diagnose
    from gradguard.monitoring.judge.recommend import recommend
    from gradguard.monitoring.record.file import read_record
    from gradguard.monitoring.show.report import write_report

    records = []
    for name in _RECORDS:
        folder = parsed.out / name
        content = gzip.decompress((Path(__file__).with_name("demo_records") / f"{name}.jsonl.gz").read_bytes())
        file = folder / "run.jsonl"
        if folder.exists() and not (file.is_file() and file.read_bytes() == content):
            raise CommandError(f"{folder} exists and is not the record of this demo: choose another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        records.append(read_record(folder))
    page = write_report(records, parsed.out / "demo.html")
    sick, healed = records
    decision = recommend(sick)
    story = [
        f"A language model of characters (examples/char_lm.py) was trained for {len(sick.steps):,} steps, unclipped.",
        "gradguard's diagnosis of the record:",
        "",
        f"  {diagnose(sick).sentence}",
        f"  {decision.headline}",
        "",
        f"The same script again, as `gradguard run --clip {decision.rule} char_lm.py`:",
        "",
        f"  {diagnose(healed).sentence}",
        "",
        f"The page, with every norm: {page}",
        "On your own script, without changing it: gradguard run train.py",
    ]
    with encodable(sys.stdout):
        for line in story:
            indent = line[: len(line) - len(line.lstrip())]
            print(textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False))
    if not parsed.no_open and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    return 0


COMMAND = Command(
    "demo",
    "index",
    _demo,
    "a failing run and its cure, from records that come with gradguard: takes seconds",
    [
        option("--out", "the folder for the page", type=Path, default=Path("gradguard-demo"), metavar="DIR"),
        flag("--no-open", "do not open the page in a browser"),
    ],
)
