"""`gradguard report`: draw or print the records of one or several runs, and test conditions on them."""

import argparse
from pathlib import Path

from gradguard.cli.program import Command, option
from gradguard.cli.records import RECORDS, progress, read, tell_notes
from gradguard.errors import CommandError
from gradguard.monitoring.record.text import on_stderr, printable


def _report(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.judge.conditions import holding, parse_conditions
    from gradguard.monitoring.show.report import (
        json_summary,
        page_beside,
        print_comparison,
        text_summary,
        write_report,
    )

    if parsed.form is not None and parsed.output is not None:
        raise CommandError(f"--{parsed.form} prints: redirect it to a file instead of -o {parsed.output}.")
    conditions = parse_conditions(parsed.fail_on) if parsed.fail_on is not None else []
    with progress() as say:
        records = read(parsed.records, say)
        say(f"judging {sum(len(record.steps) for record in records):,} steps")
        if parsed.form == "text":
            text = "\n\n".join(text_summary(record) for record in records)
        elif parsed.form == "json":
            text = json_summary(records)
        else:
            first = records[0].path
            page = parsed.output or (page_beside(first) if len(records) == 1 else first.with_name("report.html"))
            text = f"report: {printable(write_report(records, page))}"
    if parsed.form is None:
        tell_notes(records)
        if len(records) > 1:
            print_comparison(records)
    print(text)
    said = [f"{record.path}: {words}" for record in records for words in holding(conditions, record)]
    for words in said:  # after the report, which shows the reason
        on_stderr(f"failed: {words}")
    return 1 if said else 0


COMMAND = Command(
    "report",
    "report",
    _report,
    "draw the record of a run, or of several side by side",
    [
        RECORDS,
        option(
            "-o --out",
            "the HTML file; by default beside the record, with its name: run.html; report.html for several records",
            dest="output",
            type=Path,
            metavar="PAGE",
        ),
        [
            option(
                "--text",
                "print a few lines of key: value instead of drawing",
                dest="form",
                action="store_const",
                const="text",
            ),
            option(
                "--json",
                "print a JSON object instead of drawing; for several records, a list of objects",
                dest="form",
                action="store_const",
                const="json",
            ),
        ],
        option(
            "--fail-on",
            'exit code 1 if one of these holds, as in "exploding,faulty_steps>0,clip_share>0.5"; 2 if one is not '
            "measured. A finding holds if the report has it. Numbers to compare, named as in --json: "
            "faulty_steps, nonfinite_steps, skipped_steps, clip_share, max_norm, median_norm, spike_share, drift, "
            "lock_in_share, final_loss, overhead_share, errors, warnings, or findings of a kind",
            metavar="CONDITIONS",
        ),
    ],
)
