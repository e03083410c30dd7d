"""`gradguard run --save-gradients`: a script's first step, again and again in processes of its own, made one file."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from gradguard.errors import RecordError
from gradguard.parity.rounding_runs import tables, with_rounding
from gradguard.parity.saved import GRADIENT, UPDATE, SavedGradients, read
from gradguard.parity.scales import ScriptRun, apart, same_twice
from gradguard.parity.vectors import Vector, minus, norm

VARIABLE = "GRADGUARD_SAVE_GRADIENTS"
"""The environment variable that names a file, which tells a process as JSON which run of the script it is."""

_SAME = 1e-9  # sketches of the same weights differ by what the order of additions does
_SECONDS_TO_END = 10


class RunFailedError(Exception):
    """A run of the script has saved nothing.

    Args:
        code: Its exit code; 0 if it has ended well without a step.
        said: Its output on stderr, where nobody has seen that.
    """

    def __init__(self, code: int, said: str) -> None:
        super().__init__(code, said)
        self.code, self.said = code, said


def saved_runs(command: Sequence[str], perturbed: int, as_it_is: ScriptRun) -> SavedGradients:
    """Run a script up to an optimizer step, several times, and return what was saved with what rounding does.

    Only the first of these runs prints what the script prints.

    Args:
        command: A command that runs the script, with `ScriptGradients` where it finds `VARIABLE`.
        perturbed: How many runs with changed weights.
        as_it_is: The first run, which says what is saved.

    Returns:
        The saved sketches, on every process that calls.

    Raises:
        RunFailedError: If a run saves nothing.
        RecordError: If the script does not begin with the same weights each time.
    """
    folder = Path(tempfile.mkdtemp(prefix="gradguard-"))
    try:
        numbers = count()

        def run(how: ScriptRun) -> SavedGradients:
            number = next(numbers)
            return _run(command, folder / f"{number}", how, again=number > 0)

        return with_rounding(run, as_it_is, perturbed, check_same)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_same(runs: Sequence[SavedGradients]) -> None:
    """Refuse runs that are not of one script that begins with the same weights each time, and does the same twice.

    Raises:
        RecordError: If they are not.
    """
    first, second = runs[0], dict(tables(runs[1]))
    for other in runs[1:]:
        pairs = zip(first.parameters, first.sketches["weights"][0], other.sketches["weights"][0], strict=True)
        if moved := [p.name for p, a, b in pairs if not _same(a, b)]:
            raise RecordError(
                f"the script has other weights at its first step from run to run (in {moved[0]}, say): seed it, as in "
                "gradguard run --seed 0 --save-gradients ..., or let it load a checkpoint, and set no weights after "
                "the first forward pass."
            )
    for name, one in tables(first):
        a, b = (run.sketches["gradient"][0] for run in (one, second[name]))
        if (not name or name.startswith((GRADIENT, UPDATE))) and not same_twice(a, b, first.epsilon):
            what = f"what is in {name}" if name else "its gradients"
            raise RecordError(
                f"the script is not the same twice: half of {what} differ by {apart(a, b):.2g} or more of themselves "
                "from run to run, with the same weights. Does it take other samples, or draw other random numbers? "
                "Seed it, as in gradguard run --seed 0 --save-gradients ..., and its data loader."
            )


def _same(a: Vector, b: Vector) -> bool:
    return list(a) == list(b) or norm(minus(a, b)) <= _SAME * norm(a)


def _run(command: Sequence[str], file: Path, how: ScriptRun, again: bool = False) -> SavedGradients:
    asked = file.with_suffix(".json")  # an environment variable is no place for the names of all parameters
    asked.write_text(json.dumps({"file": str(file), **asdict(how)}), encoding="utf-8")
    environment = {**os.environ, VARIABLE: str(asked)}
    with tempfile.TemporaryFile() as said:
        output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said} if again else {}
        process = subprocess.Popen(command, env=environment, **output)
        try:
            code = process.wait()
        finally:
            _end(process)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if code or not file.exists():
        raise RunFailedError(code, text)
    return read(file)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with suppress(OSError):
            process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
