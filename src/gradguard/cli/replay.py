"""`gradguard replay`: what other clipping rules would have done to a run."""

import argparse
from pathlib import Path

from gradguard.cli.records import progress, read, tell_notes

_REPLAY_HELP = (
    "norm=1.0, median, autoclip, zclip (zclip=inf without its ceiling of 1.0), clip_fraction=0.05 or adagc; "
    "may be given several times. Default: a choice of them and the recommended threshold"
)


def add_to(commands) -> None:
    """Add the command to those of the parser."""
    replay = commands.add_parser("replay", help="show what other clipping rules would have done to a run")
    replay.description = "Counterfactual: each rule is shown the recorded norms, without feedback into training."
    replay.add_argument("records", nargs="+", type=Path, metavar="run.jsonl", help="a record, or the folder it is in")
    replay.add_argument("--rule", action="append", metavar="RULE", help=_REPLAY_HELP)
    replay.set_defaults(call=_replay)


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
