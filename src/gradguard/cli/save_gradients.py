"""`gradguard run --save-gradients`: the gradients of a script's step, or whole steps, for `gradguard parity`."""

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from gradguard.cli.program import ProgramLine
from gradguard.errors import CommandError
from gradguard.monitoring.record.text import on_stderr

_DEFAULT_RUNS = 4


def save_gradients_of(options: argparse.Namespace, program: ProgramLine, others: str) -> int:
    """Run the program as often as it takes, or once where a process that does so has asked.

    Args:
        options: Those of ``gradguard run``.
        program: The program.
        others: One of the options for which this process then runs the program itself; "" if there is none.

    Returns:
        An exit code.

    Raises:
        CommandError: If that cannot be done, or the program makes no step.
    """
    from gradguard.parity.repeated import VARIABLE, RunFailedError, saved_runs
    from gradguard.parity.saved import write
    from gradguard.parity.scales import ScriptRun

    if (asked := os.environ.get(VARIABLE)) is not None:
        return _one_run(json.loads(Path(asked).read_text(encoding="utf-8")), options, program)
    perturbed = _DEFAULT_RUNS if options.perturbed is None else options.perturbed
    if perturbed < 0:
        raise CommandError(f"--perturbed {perturbed}: expected a number of runs, 0 or more.")
    launcher = _launcher(options, perturbed)
    if others and (launcher or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise CommandError(
            f"{others} with --save-gradients of several processes: these are started once for each run. Type a command "
            f"of its own with {others}."
        )
    file = options.save_gradients.absolute()
    if not file.parent.is_dir():
        raise CommandError(f"--save-gradients {file}: there is no folder {file.parent}.")
    wanted = ScriptRun(options.at or 1, options.steps or 0)
    seed = [] if options.seed is None else ["--seed", str(options.seed)]
    ours = [*(launcher or [sys.executable]), "-m", "gradguard", "run", "--save-gradients", str(file)]
    first = int(os.environ.get("RANK", "0")) == 0
    from gradguard.monitoring.observe.termination import SignalHandlers

    try:
        with SignalHandlers():
            saved = saved_runs([*ours, *seed, *program.typed], perturbed, wanted)
            if first:
                write(file, saved)
    except RunFailedError as failed:
        sys.stderr.write(failed.said)
        if failed.code == 0:
            raise CommandError(
                f"the script ended before its optimizer step {wanted.last} was over, so there is nothing to save."
            ) from None
        return failed.code if failed.code > 0 else 128 - failed.code
    if first:
        what = f"steps {wanted.at} to {wanted.last}" if wanted.steps else f"the gradients of step {wanted.at}"
        on_stderr(f"{what} are in {os.path.relpath(file, Path.cwd())}")
    return 0


def _launcher(options: argparse.Namespace, perturbed: int) -> list[str]:
    """The words of ``--launch``. Processes of one launch cannot meet again in several runs, so each run is a launch."""
    launcher = shlex.split(options.launch or "")
    inside = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if inside and launcher:
        raise CommandError(
            "--launch starts all processes itself, for each run: call gradguard run once, without torchrun."
        )
    if inside and perturbed:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        raise CommandError(
            "processes that are started together run a script once. Type gradguard run "
            f"--launch 'torchrun --nproc-per-node {ranks}' --save-gradients FILE SCRIPT, which starts them for each "
            "run; or add --perturbed 0, and bars are not measured."
        )
    if options.launch is not None and not (launcher and shutil.which(launcher[0])):
        raise CommandError(
            f"--launch {options.launch!r}: there is no such command. Expected what stands before -m MODULE, as in "
            "'torchrun --nproc-per-node 8'."
        )
    return launcher


def _one_run(asked: dict, options: argparse.Namespace, program: ProgramLine) -> int:
    from gradguard.monitoring.observe.meta import all_optimizers, living_modules
    from gradguard.monitoring.observe.script import load, run, seed_generators
    from gradguard.parity.scales import ScriptRun
    from gradguard.parity.script_pair import ScriptGradients
    from gradguard.script_events import listening

    os.environ.pop("GRADGUARD_SAVE_GRADIENTS")  # what the script starts is no run of its own
    loaded = load(program.words, program.is_module)
    file, how = asked.pop("file"), ScriptRun(**asked)
    gradients = ScriptGradients(file, living_modules, all_optimizers, how)
    seed_generators(options.seed)
    with listening(gradients):
        code = run(loaded)
        if code == 0:
            gradients.finish()
    if gradients.refusal:
        raise CommandError(gradients.refusal)
    if code and not gradients.done:
        on_stderr(
            f"the script ended with exit code {code} before its optimizer step {how.last} was over: nothing is saved"
        )
    return code
