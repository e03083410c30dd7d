"""`gradguard run --save-gradients`: a script's first step, again and again in processes of its own, made one file."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradguard.errors import RecordError
from gradguard.parity.saved import SavedGradients, read, write
from gradguard.parity.scales import DOUBLED, is_linear, scale_of
from gradguard.parity.vectors import Vector, minus, norm

VARIABLE = "GRADGUARD_SAVE_GRADIENTS"
"""The environment variable that tells a process which run of the script it is, as JSON."""

_SAME = 1e-9  # sketches of the same weights differ by what the order of additions does
_MOST_CHANCE, _FARTHEST = 1000, 0.1  # what kernels that add in any order do to a gradient is some epsilon
_SECONDS_TO_END = 10


class RunFailedError(Exception):
    """A run of the script has saved nothing.

    Args:
        code: Its exit code; 0 if it has ended well without a step.
        said: What it has printed on stderr, where nobody has seen that.
    """

    def __init__(self, code: int, said: str) -> None:
        super().__init__(code, said)
        self.code, self.said = code, said


def saved_runs(command: Sequence[str], perturbed: int) -> SavedGradients:
    """Run a script up to its first optimizer step, several times, and return its gradients with what rounding does.

    The script runs as it is, then with twice the gradient at its loss, and then with weights that are changed by
    rounding at the first forward pass and with gradients at the loss of other scales. Where twice the one gradient does
    not make twice the other, the scale stays 1. With ``perturbed=0`` there is the first run alone. Only that one
    prints what the script prints.

    Args:
        command: A command that runs the script, with `ScriptGradients` where it finds `VARIABLE`.
        perturbed: How many runs with changed weights.

    Returns:
        What was saved, on every process that calls.

    Raises:
        RunFailedError: If a run saves nothing.
        RecordError: If the script does not begin with the same weights each time.
    """
    folder = Path(tempfile.mkdtemp(prefix="gradguard-"))
    try:
        first = _run(command, folder / "first")
        if not perturbed:
            return first
        runs = [first, _run(command, folder / "doubled", scale=DOUBLED, again=True)]
        if not _is_linear(runs):
            runs = [first, _run(command, folder / "again", again=True), runs[1]]
        scaled = _is_linear(runs)
        runs = runs if scaled else runs[:2]
        for k in range(1, perturbed + 1):
            scale = scale_of(k) if scaled else 1.0
            runs.append(_run(command, folder / str(k), k, first.epsilon, scale, again=True))
        return merged(runs, scaled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_linear(runs: Sequence[SavedGradients]) -> bool:
    """Whether the last of these runs, the one with twice the gradient at the loss, has the first one's gradients."""
    first, *again, doubled = (run.sketches["gradient"][0] for run in runs)
    return len(first) == len(doubled) and is_linear(first, doubled, *again)


def merged(runs: Sequence[SavedGradients], scaled: bool = False) -> SavedGradients:
    """Return one saved run of several of one script: the first, with the gradients of all.

    Args:
        runs: The first as the script is, the second with the same weights.
        scaled: Whether the later ones have gradients at the loss of other scales.

    Raises:
        RecordError: If they are not of one script that begins with the same weights each time.
    """
    first = runs[0]
    for other in runs[1:]:
        if [(p.name, p.shape) for p in other.parameters] != [(p.name, p.shape) for p in first.parameters]:
            raise RecordError("the script trains other parameters from run to run, so that nothing can be compared.")
        pairs = zip(first.parameters, first.sketches["weights"][0], other.sketches["weights"][0], strict=True)
        if moved := [p.name for p, a, b in pairs if not _same(a, b)]:
            raise RecordError(
                f"the script has other weights at its first step from run to run (in {moved[0]}, say): seed it, as in "
                "gradguard run --seed 0 --save-gradients ..., or let it load a checkpoint, and set no weights after "
                "the first forward pass."
            )
    if len(runs) > 1 and (apart := _apart(first, runs[1])) > min(_MOST_CHANCE * first.epsilon, _FARTHEST):
        raise RecordError(
            f"the script is not the same twice: half of its gradients differ by {apart:.2g} or more of themselves from "
            "run to run, with the same weights. Does it take other samples, or draw other random numbers? Seed it, as "
            "in gradguard run --seed 0 --save-gradients ..., and its data loader."
        )
    sketches = {**first.sketches, "gradient": [run.sketches["gradient"][0] for run in runs]}
    parameters = tuple(replace(p, one_sided=0.0) for p in first.parameters) if scaled else first.parameters
    doubts = {"random": any(run.random for run in runs), "clipped": any(run.clipped for run in runs)}
    return replace(first, parameters=parameters, sketches=sketches, **doubts)


def _apart(first: SavedGradients, again: SavedGradients) -> float:
    """By what part of themselves the gradients differ: the median of those that are not zero."""
    pairs = zip(first.sketches["gradient"][0], again.sketches["gradient"][0], strict=True)
    shares = [norm(minus(a, b)) / norm(a) for a, b in pairs if norm(a)]
    return statistics.median(shares) if shares else 0.0


def _same(a: Vector, b: Vector) -> bool:
    return list(a) == list(b) or norm(minus(a, b)) <= _SAME * norm(a)


def _run(
    command: Sequence[str], file: Path, change: int = 0, epsilon: float = 0.0, scale: float = 1.0, again: bool = False
) -> SavedGradients:
    about = {"file": str(file), "run": change, "epsilon": epsilon, "scale": scale}
    environment = {**os.environ, VARIABLE: json.dumps(about)}
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


def save_from_script(
    file: str | os.PathLike[str], options: Sequence[str], perturbed: int, writes: bool, launcher: Sequence[str] = ()
) -> None:
    """Run a script as `saved_runs` does, and write the file.

    Args:
        file: Where to.
        options: What follows ``gradguard run`` for the script itself: a seed, the script and its arguments.
        perturbed: How many runs with changed weights.
        writes: Whether this process writes: that of rank 0.
        launcher: A command that starts several processes of the module that is named behind it, anew for each run.
    """
    saved = saved_runs([*(launcher or [sys.executable]), "-m", "gradguard", "run", *options], perturbed)
    if writes:
        write(file, saved)
