"""`gradguard tail`: follow a run in progress."""

import argparse
import signal
from pathlib import Path

from gradguard.cli.program import Command, flag, option


def _tail(parsed: argparse.Namespace) -> int:
    from gradguard.monitoring.observe.termination import BySignal, SignalHandlers
    from gradguard.monitoring.show.live_tail import INTERRUPTED, tail

    with SignalHandlers():  # they restore the terminal
        code = tail(parsed.record, once=parsed.once, events=parsed.lines)
    return BySignal.of(signal.SIGINT) if code == INTERRUPTED else code


COMMAND = Command(
    "tail",
    "watching",
    _tail,
    "follow a run in progress in the terminal",
    [
        option("record", "a record, or its folder; if missing, wait for it", type=Path, metavar="run.jsonl"),
        flag("--once", "show the present state and return"),
        option("--lines", "number of last events to show, 5", type=int, default=5, metavar="N"),
    ],
    "Exit code: 0 when the run has ended or with --once. Ctrl-C ends it, and a shell loop around it.",
)
