"""`gradguard run --save-gradients`: save the gradients of a script's step, or whole steps, for `gradguard parity`."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gradguard.cli.program import ProgramLine
from gradguard.errors import CommandError, refuse
from gradguard.monitoring.record.text import on_stderr

_DEFAULT_RUNS = 4
_FOLDER = "GRADGUARD_SAVE_GRADIENTS"
"""The environment variable for the folder that the processes of a launch share."""


def save_gradients_of(options: argparse.Namespace, program: ProgramLine, others: str) -> int:
    """Run the program up to the saved steps, forking once for each run; or launch processes that do so.

    Args:
        options: The options of ``gradguard run``.
        program: The program.
        others: An option for which the program then runs once more, to its end; "" if there is none.

    Returns:
        The exit code of the program, or of the launcher.

    Raises:
        CommandError: If the options contradict each other or the system, or the program makes no step.
    """
    perturbed = _DEFAULT_RUNS if options.perturbed is None else options.perturbed
    launched = os.environ.pop(_FOLDER, None)  # hidden from the script's own processes, which belong to no run
    launcher = shlex.split(options.launch or "")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    started_together = world > 1 and not launched  # such processes cannot start again together for several runs
    ranks = os.environ.get("LOCAL_WORLD_SIZE", world)
    file = options.save_gradients.absolute()
    refuse(
        CommandError,
        (
            started_together and launcher,
            "--launch starts all processes itself, for each run: call gradguard run once, without torchrun.",
        ),
        (
            started_together and perturbed,
            "processes that are started together run a script once. Type gradguard run "
            f"--launch 'torchrun --nproc-per-node {ranks}' --save-gradients FILE SCRIPT, which starts them for each "
            "run; or add --perturbed 0, without measured error bars.",
        ),
        (
            options.launch is not None and not any(map(shutil.which, launcher[:1])),
            f"--launch {options.launch!r}: there is no such command. Expected the words before -m MODULE, as in "
            "'torchrun --nproc-per-node 8'.",
        ),
        (
            others and (launcher or world > 1),
            f"{others} with --save-gradients of several processes: these run the script once. Type a separate "
            f"command with {others}.",
        ),
        (not file.parent.is_dir(), f"--save-gradients {file}: there is no folder {file.parent}."),
        (
            not hasattr(os, "fork"),
            "--save-gradients forks the process of the script, which this system cannot. Call "
            "gradguard.save_gradients(file, model, step) in the script.",
        ),
    )
    if launched:
        return _saved(file, perturbed, Path(launched), options, program)
    with tempfile.TemporaryDirectory(prefix="gradguard-") as folder:
        if launcher:
            return _launched(launcher, file, perturbed, folder, options, program)
        if not others:
            return _saved(file, perturbed, Path(folder), options, program)
        if not (child := os.fork()):  # this process runs the program afterwards, from its first line
            code = 2
            try:
                code = _saved(file, perturbed, Path(folder), options, program)
            except CommandError as error:
                on_stderr(str(error))
            sys.stdout.flush()
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _launched(
    launcher: list[str], file: Path, perturbed: int, folder: str, options: argparse.Namespace, program: ProgramLine
) -> int:
    """Start the processes once; each of them forks for each run."""
    given = {"perturbed": perturbed, "at": options.at, "steps": options.steps, "seed": options.seed}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    command = [*launcher, "-m", "gradguard", "run", "--save-gradients", str(file), *words, *program.typed]
    from gradguard.monitoring.observe.termination import SignalHandlers

    with SignalHandlers(), subprocess.Popen(command, env={**os.environ, _FOLDER: folder}) as process:
        try:
            code = process.wait()
        finally:
            process.terminate()
    return code if code >= 0 else 128 - code


def _saved(file: Path, perturbed: int, folder: Path, options: argparse.Namespace, program: ProgramLine) -> int:
    from gradguard.monitoring.observe.meta import all_optimizers, living_modules
    from gradguard.monitoring.observe.script import load, run, seed_generators
    from gradguard.parity.forked_runs import ForkedRuns
    from gradguard.parity.saved import SavedGradients, write
    from gradguard.parity.scales import ScriptRun
    from gradguard.parity.script_pair import ScriptGradients
    from gradguard.script_events import listening

    loaded = load(program.words, program.is_module)
    wanted = ScriptRun(options.at or 1, options.steps or 0)

    def keep(saved: SavedGradients) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            write(file, saved)
            what = f"steps {wanted.at} to {wanted.last}" if wanted.steps else f"the gradients of step {wanted.at}"
            on_stderr(f"{what} are in {os.path.relpath(file, start)}")

    start, runs = Path.cwd(), ForkedRuns(perturbed, wanted, folder, keep)
    gradients = ScriptGradients(runs, living_modules, all_optimizers)
    seed_generators(options.seed)
    code = 0
    try:
        if not runs.fork_late:
            runs.which()
        with listening(gradients):
            code = run(loaded)
            if code == 0:
                gradients.finish()
    except SystemExit as end:
        code = int(end.code or 0)
    if code and not runs.is_over:
        on_stderr(
            f"the script ended with exit code {code} before its optimizer step {wanted.last} ended: nothing is saved"
        )
    runs.leave(code)
    if runs.refusal or not (code or runs.is_over):
        raise CommandError(runs.refusal or runs.ended_early)
    return code
