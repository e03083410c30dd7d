"""`gradguard check`: check the backward of a function."""

import argparse

from gradguard.cli.program import Command, flag, option
from gradguard.cli.verdict import JSON, print_report


def _check(parsed: argparse.Namespace) -> int:
    from gradguard.check.command import check_command

    options = {name: getattr(parsed, name) for name in ("reference", "seed", "exhaustive", "order", "rtol")}
    report = check_command(parsed.target, parsed.input, **options)
    return print_report(report, parsed.json)


COMMAND = Command(
    "check",
    "gradient_check",
    _check,
    "check the backward of a function against numerical differences",
    [
        option("target", "a function, a module or its class", metavar="package.module:name"),
        option(
            "--input",
            "an input of standard normal numbers (integers: 0 and 1), as in x=2,3:float32; float32 without a dtype, "
            "x= for a single number",
            action="append",
            default=[],
            metavar="NAME=SHAPE:DTYPE",
        ),
        option("--seed", "the seed of the inputs and the weights", type=int, default=0, metavar="N"),
        flag("--exhaustive", "check every element"),
        JSON,
        option("--rtol", "the relative error of a solver that stops early", type=float, default=0.0),
        option("--order", "2: check the second derivative too", type=int, choices=(1, 2), default=1),
        option("--reference", "the same function in float64, for half precision", metavar="module:name"),
    ],
    "Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 if the check cannot be carried out.",
)
