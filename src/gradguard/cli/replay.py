"""`gradguard replay`: show how other clipping rules would have acted on a run."""

import argparse

from gradguard.cli.program import Command, option
from gradguard.cli.records import RECORDS, progress, read, tell_notes


def _replay(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.judge.rule_replay import what_if
    from gradguard.monitoring.show.replay_table import print_replay

    with progress() as say:
        records = read(parsed.records, say)
        say(f"replaying {sum(len(record.steps) for record in records):,} steps")
        tables = [what_if(record, parsed.rule) for record in records]
    tell_notes(records)
    for record, rows in zip(records, tables, strict=True):
        print_replay(record, rows)
    return 0


COMMAND = Command(
    "replay",
    "recommendation",
    _replay,
    "show how other clipping rules would have acted on a run",
    [
        RECORDS,
        option(
            "--rule",
            "norm=1.0, median, autoclip, zclip (zclip=inf without its ceiling of 1.0), clip_fraction=0.05 or adagc; "
            "may be repeated. Default: a selection of them and the recommended threshold",
            action="append",
            metavar="RULE",
        ),
    ],
    "Counterfactual: each rule receives the recorded norms, without feedback into training.",
)
