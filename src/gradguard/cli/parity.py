"""`gradguard parity`: compare the gradients of two set-ups."""

import argparse
from pathlib import Path

from gradguard.cli.verdict import add_json, print_report


def add_to(commands) -> None:
    """Add the command to those of the parser."""
    parity = commands.add_parser("parity", help="compare the gradients of two set-ups, parameter by parameter")
    parity.description = (
        "Both files are written by gradguard run --save-gradients FILE script.py, or by "
        "gradguard.save_gradients(file, model, step). Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 for "
        "what cannot be carried out."
    )
    parity.add_argument("reference", type=Path, metavar="REFERENCE", help="of the set-up that is trusted")
    parity.add_argument("new", type=Path, metavar="NEW", help="of the other")
    add_json(parity)
    parity.set_defaults(call=_parity)


def _parity(parsed: argparse.Namespace) -> int:
    from gradguard.parity.compare import compare

    return print_report(compare(parsed.reference, parsed.new), parsed.json)
