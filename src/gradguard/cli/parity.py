"""`gradguard parity`: compare the gradients of two set-ups."""

import argparse
from pathlib import Path

from gradguard.cli.program import Command, option
from gradguard.cli.verdict import JSON, print_report


def _parity(parsed: argparse.Namespace) -> int:
    from gradguard.parity.compare import compare

    return print_report(compare(parsed.reference, parsed.new), parsed.json)


COMMAND = Command(
    "parity",
    "parity",
    _parity,
    "compare the gradients of two set-ups, parameter by parameter",
    [
        option("reference", "the file of the trusted set-up", type=Path, metavar="REFERENCE"),
        option("new", "the file of the other set-up", type=Path, metavar="NEW"),
        JSON,
    ],
    "Both files are written by gradguard run --save-gradients FILE script.py, or by "
    "gradguard.save_gradients(file, model, step). Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 if the "
    "comparison cannot be carried out.",
)
