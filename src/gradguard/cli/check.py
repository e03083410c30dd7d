"""`gradguard check`: check the backward of a function."""

import argparse

from gradguard.cli.verdict import add_json, print_report

_INPUT_HELP = (
    "an input of standard normal numbers (integers: 0 and 1), as in x=2,3:float32; float32 without a dtype, x= for a "
    "single number"
)


def add_to(commands) -> None:
    """Add the command to those of the parser."""
    check = commands.add_parser("check", help="check the backward of a function against numerical differences")
    check.description = "Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 for what cannot be carried out."
    check.add_argument("target", metavar="package.module:name", help="a function, a module or its class")
    check.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE:DTYPE", help=_INPUT_HELP)
    check.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of the inputs and the weights")
    check.add_argument("--exhaustive", action="store_true", help="check every element")
    add_json(check)
    check.add_argument("--rtol", type=float, default=0.0, help="the relative error of a solver that stops early")
    check.add_argument("--order", type=int, choices=(1, 2), default=1, help="2: check the second derivative too")
    check.add_argument("--reference", metavar="module:name", help="the same function in float64, for half precision")
    check.set_defaults(call=_check)


def _check(parsed: argparse.Namespace) -> int:
    from gradguard.check.command import check_command

    options = {name: getattr(parsed, name) for name in ("reference", "seed", "exhaustive", "order", "rtol")}
    report = check_command(parsed.target, parsed.input, **options)
    return print_report(report, parsed.json)
