"""`gradguard tune`: run a script briefly under several rules, and compare."""

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from gradguard.cli.program import Command, ProgramLine, flag, number, option
from gradguard.errors import CommandError, refuse
from gradguard.monitoring.record.text import encodable


def _tune(options: argparse.Namespace, program: ProgramLine) -> int:
    metric = _pattern(options)
    folder = options.out or Path("runs") / f"tune-{program.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    holds_records = not options.force and folder.exists() and any(folder.iterdir())
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    refuse(
        CommandError,
        (holds_records, f"{folder} is not empty: choose another --out, or add --force to replace its records."),
        (several, "tune starts its runs itself: start it once, without torchrun or another launcher."),
    )
    from gradguard.monitoring.observe.termination import BySignal, SignalHandlers
    from gradguard.monitoring.tune.show import print_summary, summary
    from gradguard.monitoring.tune.trials import TrialPlan, Trials

    plan = TrialPlan(
        program.typed, folder, options.steps, options.seeds, options.rule, options.record, metric, options.maximize
    )
    trials, code = Trials(plan, lambda line: print(line, file=sys.stderr, flush=True)), 0
    try:
        with SignalHandlers():
            trials.run()
    except KeyboardInterrupt:
        code = BySignal.of(signal.SIGINT)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    if trials.runs:
        with encodable(sys.stdout):
            if options.json:
                print(json.dumps(summary(trials), allow_nan=False))
            else:
                print_summary(trials)
    return code


def _pattern(options: argparse.Namespace) -> re.Pattern[str] | None:
    if options.metric is None:
        refuse(CommandError, (options.maximize, "--maximize requires --metric: a training loss is minimized."))
        return None
    try:
        found = re.compile(options.metric)
    except re.error as error:
        raise CommandError(f"--metric {options.metric!r} is not a regular expression: {error}.") from error
    words = (
        f"--metric {options.metric!r} has {found.groups} groups: put the part that matches the number into one pair of "
        r"parentheses, as in --metric 'val_loss=(\S+)'."
    )
    refuse(CommandError, (found.groups != 1, words))
    return found


_WHOLE = "a whole number, at least 1"

COMMAND = Command(
    "tune",
    "recommendation",
    _tune,
    "run a script briefly under several rules: which trains best?",
    [
        number("--steps", "optimizer steps of a run, 250", _WHOLE, 1, default=250),
        number("--seeds", "runs of each rule, 3", _WHOLE, 1, default=3, metavar="K"),
        option("--rule", "a rule as for run --clip, instead of the default ones", action="append", metavar="RULE"),
        option("--record", "take the rules from this record", type=Path, metavar="RECORD"),
        option("--metric", "judge by the last number that it matches in the script's output", metavar="REGEX"),
        flag("--maximize", "the highest metric is the best, not the lowest"),
        option("--out", "the folder for the records of all runs", type=Path, metavar="DIR"),
        flag("--force", "replace the records that DIR already holds"),
        flag("--json", "print one line of JSON instead of a table"),
    ],
    "Runs the script unmodified, with the rule that its record recommends and with three constants, with the same "
    "seeds, and compares the training losses, or a metric that the runs print. {seed} in an argument of the script is "
    "replaced by the seed.",
    runs_program=True,
)
