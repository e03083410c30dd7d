"""`gradguard run`: observe an unmodified training script, and draw the record."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gradguard.cli.program import Command, ProgramLine, first_given, flag, number, option
from gradguard.cli.records import tell_notes
from gradguard.cli.save_gradients import save_gradients_of
from gradguard.errors import CommandError, refuse

if TYPE_CHECKING:
    from gradguard.named_rules import NamedRule

_RECORDING = ("out", "force", "argv", "every", "clip", "resilient", "no_report")
"""The options of a recorded run."""


def _run(options: argparse.Namespace, program: ProgramLine) -> int:
    others, saves = first_given(options, *_RECORDING, "audit_norm"), options.save_gradients is not None
    of_saving = first_given(options, "at", "perturbed", "launch")
    refuse(
        CommandError,
        (of_saving and not saves, f"{of_saving} requires --save-gradients FILE, which is missing."),
        (
            saves and others and options.steps is not None,
            f"--steps with --save-gradients and {others}: does it count saved steps, or end the script? Type a "
            f"separate command with {others}.",
        ),
    )
    if saves:
        code = save_gradients_of(options, program, others)
        if code or not others:
            return code
    rule = _rule(options.clip) if options.clip is not None else None
    folder = options.out or Path("runs") / f"{program.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    from gradguard.cli import script_run

    if others == "--audit-norm":  # it is the last of `first_given`'s names, so no option asks for a record
        return script_run.audit_norm(options, program)
    return script_run.record(options, program, rule, folder)


def _rule(text: str) -> "NamedRule":
    """Return the rule ``norm=1.0``, or the rule that the record in ``from=run.jsonl`` recommends."""
    from gradguard.named_rules import clipping_rule

    name, _, path = text.partition("=")
    if name != "from" or not path:
        return clipping_rule(text)
    from gradguard.monitoring.judge.recommend import recommend
    from gradguard.monitoring.record.file import read_record

    record = read_record(Path(path))
    tell_notes([record])
    found = recommend(record)
    if found.rule is None:
        raise CommandError(
            f"--clip from={path}: that record recommends no rule. {found.headline} {found.reason} Or name a rule "
            "yourself, as in --clip median."
        )
    return clipping_rule(found.rule)


_STEPS = "a number of steps, at least 1"

COMMAND = Command(
    "run",
    "watching",
    _run,
    "observe a training script without changing it",
    [
        option("--out", "the folder for run.jsonl and run.html", type=Path, metavar="DIR"),
        flag("--force", "replace the record that DIR already holds"),
        flag("--argv", "record the arguments unchanged: secrets are not hidden"),
        number("--every", "record each parameter's norm every N steps", _STEPS, 1),
        option(
            "--clip",
            "clip before each step: by a threshold (norm=1.0, value=0.5, adaptive=0.01, or adaptive=0.01,exclude=fc "
            "to exclude the module or parameter fc), by a rule that follows the norms of each optimizer (median, "
            "autoclip, zclip=inf, clip_fraction=0.05, adagc=inf), or from=RECORD, as RECORD's report recommends. "
            "Default: observe only; the weights are bit-identical",
            metavar="RULE",
        ),
        flag(
            "--resilient",
            "skip the steps of each optimizer whose loss, or norm before any clip, is far above its recent past, "
            "and those that are not finite; all others are bit-identical",
        ),
        number(
            "--steps", "end the script after N optimizer steps; with --save-gradients, save N whole steps", _STEPS, 1
        ),
        number(
            "--seed",
            "seed random, numpy and torch before the script starts",
            "a number from 0 to 4294967295",
            0,
            2**32 - 1,
        ),
        flag("--no-report", "write only the record"),
        flag(
            "--audit-norm",
            "compare the norm that the script clips by with the true one, for 3 steps or --steps, record nothing, and "
            "then end the script; with an option of a record, such as --out, record the whole run too. Exit code: 0 "
            "for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 if the script fails first",
        ),
        option(
            "--save-gradients",
            "save the gradients of the first optimizer step for `gradguard parity`: the script is started once, and "
            "forks for each of six runs that differ by rounding. With --at N save those of step N. With --steps K save "
            "whole steps: gradients after the clip, the optimizer's state and the weights; in nine runs. With another "
            "option, such as --out, the script is then run once more for it",
            type=Path,
            metavar="FILE",
        ),
        number("--at", "save the gradients of optimizer step N (default: 1)", _STEPS, 1),
        number("--perturbed", "runs that differ by rounding (default: 4)", "a number of runs, 0 or more", 0),
        option(
            "--launch",
            "with --save-gradients: start the processes with this command, such as 'torchrun --nproc-per-node 8', or "
            "'mpirun -n 8 python'",
            metavar="COMMAND",
        ),
    ],
    runs_program=True,
)
