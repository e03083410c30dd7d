"""`gradguard parity`: compare the gradients of two set-ups."""

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gradguard.cli.verdict import add_json, print_report
from gradguard.errors import CommandError

if TYPE_CHECKING:
    from gradguard.parity.report import ParityReport
    from gradguard.parity.saved import SavedGradients


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
    parity.add_argument("--output", "-o", type=Path, metavar="PAGE", help="write an HTML page, which needs no network")
    parity.set_defaults(call=_parity)


def _parity(parsed: argparse.Namespace) -> int:
    from gradguard.parity.compare import compare
    from gradguard.parity.saved import read

    runs = read(parsed.reference), read(parsed.new)
    if parsed.output is not None and any(_is_same(parsed.output, file) for file in (parsed.reference, parsed.new)):
        raise CommandError(f"{parsed.output} is one of the runs, and a page would replace it: name another file.")
    report = compare(*runs)
    code = print_report(report, parsed.json)
    if parsed.output is not None:
        _draw(parsed, report, runs)
    return code


def _is_same(page: Path, file: Path) -> bool:
    return page.exists() and page.samefile(file)


def _draw(parsed: argparse.Namespace, report: "ParityReport", runs: "Sequence[SavedGradients]") -> None:
    from gradguard.monitoring.record.text import on_stderr
    from gradguard.parity.page import write_page

    css = files("gradguard.monitoring.show.report").joinpath("report.css").read_text(encoding="utf-8")
    names = [parsed.reference.stem, parsed.new.stem]
    on_stderr(f"page: {write_page(parsed.output, report, runs, names, css)}")
