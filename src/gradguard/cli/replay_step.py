"""`gradguard replay-step`: compute a spike again, and tell whether the data or the weights caused it."""

import argparse
from pathlib import Path

from gradguard.cli.program import Command, option
from gradguard.cli.verdict import JSON, print_report


def _replay_step(parsed: argparse.Namespace) -> int:
    from gradguard.resilience.step_replay import replay_step

    report = replay_step(parsed.file, parsed.target, parsed.state)
    return print_report(report, parsed.json)


COMMAND = Command(
    "replay-step",
    "which_batch",
    _replay_step,
    "compute a spike again: was it the data or the weights?",
    [
        option("file", "the batch, the random generators and the weights", type=Path, metavar="FILE"),
        option(
            "target",
            "a function without arguments that returns (model, step): the model as built for training, and "
            "step(batch), which returns the loss as in training",
            metavar="package.module:name",
        ),
        option(
            "--state", "weights of an earlier time to compare", type=Path, action="append", default=[], metavar="FILE"
        ),
        JSON,
    ],
    "FILE is written by gradguard.resilience.write_evidence. Exit code: 0 if the spike comes back and its cause is "
    "known, 1 if it does not come back on the same weights, 3 if that is undecided, 2 if it cannot be computed.",
)
