"""`gradguard run --save-gradients`: a script's first step, again and again in processes of its own, made one file."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gradguard.errors import RecordError
from gradguard.parity.saved import GRADIENT, START, UPDATE, SavedGradients, read, write
from gradguard.parity.scales import (
    DOUBLED,
    ScriptRun,
    alike_settings,
    apart,
    is_linear,
    mean_of,
    same_twice,
    scale_of,
    turned_sizes,
)
from gradguard.parity.vectors import Vector, minus, norm

VARIABLE = "GRADGUARD_SAVE_GRADIENTS"
"""The environment variable that names a file, which tells a process as JSON which run of the script it is."""

_SAME = 1e-9  # sketches of the same weights differ by what the order of additions does
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


def saved_runs(command: Sequence[str], perturbed: int, as_it_is: ScriptRun) -> SavedGradients:
    """Run a script up to an optimizer step, several times, and return what was saved with what rounding does.

    The script runs as it is, then with twice the gradient at its loss, and then with weights that are changed by
    rounding at the first forward pass and with gradients at the loss of other scales. Where twice the one gradient does
    not make twice the other, the scale stays 1. Where an optimizer changes weights, it runs twice more, with gradients
    that are moved up and down: an update may jump where a gradient is nearly zero. With ``perturbed=0`` there is the
    first run alone. Only that one prints what the script prints.

    Args:
        command: A command that runs the script, with `ScriptGradients` where it finds `VARIABLE`.
        perturbed: How many runs with changed weights.
        as_it_is: The first run, which says what is saved.

    Returns:
        What was saved, on every process that calls.

    Raises:
        RunFailedError: If a run saves nothing.
        RecordError: If the script does not begin with the same weights each time.
    """
    folder = Path(tempfile.mkdtemp(prefix="gradguard-"))
    try:
        first = _run(command, folder / "first", as_it_is)
        if not perturbed:
            return merged([first])
        runs = [first, _run(command, folder / "doubled", replace(as_it_is, scale=DOUBLED), again=True)]
        if not _is_linear(runs):
            runs = [first, _run(command, folder / "again", as_it_is, again=True), runs[1]]
        scaled = _is_linear(runs)
        runs = runs if scaled else runs[:2]
        for k in range(1, perturbed + 1):
            changed = replace(as_it_is, change=k, epsilon=first.epsilon, scale=scale_of(k) if scaled else 1.0)
            runs.append(_run(command, folder / str(k), changed, again=True))
        sizes = {} if as_it_is.is_first_step_alone else _sizes(runs)
        turned = []
        for sign in (1, -1) if sizes else ():
            signed = {name: {p: sign * size for p, size in of_step.items()} for name, of_step in sizes.items()}
            turned.append(_run(command, folder / f"turned {sign}", replace(as_it_is, sizes=signed), again=True))
        return merged(runs, scaled, turned)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_linear(runs: Sequence[SavedGradients]) -> bool:
    """Whether the last of these runs, the one with twice the gradient at the loss, has all that the first one has."""
    first, *again, doubled = ([v for _, one in _tables(run) for v in one.sketches["gradient"][0]] for run in runs)
    return len(first) == len(doubled) and is_linear(first, doubled, *again)


def _tables(run: SavedGradients) -> list[tuple[str, SavedGradients]]:
    """Return the gradients, and the stages after them, each with its name."""
    return [("", run), *((name, one) for name, one in run.stages.items() if name != START)]


def _sizes(runs: Sequence[SavedGradients]) -> dict[str, dict[str, float]]:
    """Return by how much to move gradients, for each step by its name."""
    names = [name for name in runs[0].stages if name.startswith(GRADIENT)]
    _check_alike(runs)
    of_runs = {name: [run.stages[name].sketches["gradient"][0] for run in runs] for name in names}
    return {name: turned_sizes(runs[0].stages[name].parameters, of_runs[name]) for name in names}


def merged(
    runs: Sequence[SavedGradients], scaled: bool = False, turned: Sequence[SavedGradients] = ()
) -> SavedGradients:
    """Return one saved run of several of one script: the first, with the gradients and stages of all.

    Args:
        runs: The first as the script is, the second with the same weights.
        scaled: Whether the later ones have gradients at the loss of other scales.
        turned: Two whose gradients were moved up and down, of which the mean counts.

    Raises:
        RecordError: If they are not of one script that begins with the same weights each time.
    """
    first, every = runs[0], [*runs, *turned]
    _check_alike(every)
    for other in every[1:]:
        pairs = zip(first.parameters, first.sketches["weights"][0], other.sketches["weights"][0], strict=True)
        if moved := [p.name for p, a, b in pairs if not _same(a, b)]:
            raise RecordError(
                f"the script has other weights at its first step from run to run (in {moved[0]}, say): seed it, as in "
                "gradguard run --seed 0 --save-gradients ..., or let it load a checkpoint, and set no weights after "
                "the first forward pass."
            )
    for name, one in _tables(first) if len(runs) > 1 else ():
        a, b = (run.sketches["gradient"][0] for run in (one, dict(_tables(runs[1]))[name]))
        if (not name or name.startswith((GRADIENT, UPDATE))) and not same_twice(a, b, first.epsilon):
            what = f"what is in {name}" if name else "its gradients"
            raise RecordError(
                f"the script is not the same twice: half of {what} differ by {apart(a, b):.2g} or more of themselves "
                "from run to run, with the same weights. Does it take other samples, or draw other random numbers? "
                "Seed it, as in gradguard run --seed 0 --save-gradients ..., and its data loader."
            )
    doubts = {"random": any(run.random for run in runs), "clipped": any(run.clipped for run in runs)}
    settings = alike_settings([run.settings for run in every])
    is_later = len(first.sketches["weights"]) > 1  # of those, the weights of its own first step
    weights = _all_runs("weights", runs, turned, -1) if is_later else first.sketches["weights"]
    stages = {
        name: _joined(one, [run.stages[name] for run in runs], [run.stages[name] for run in turned], scaled)
        for name, one in first.stages.items()
        if not (name.startswith(GRADIENT) and int(name.removeprefix(GRADIENT)) <= 1)
    }
    whole = _joined(first, runs, turned if is_later else (), scaled)
    return replace(whole, sketches={**whole.sketches, "weights": weights}, stages=stages, settings=settings, **doubts)


def _joined(
    first: SavedGradients, runs: Sequence[SavedGradients], turned: Sequence[SavedGradients], scaled: bool
) -> SavedGradients:
    """Return one table with the numbers of all runs."""
    tables = _all_runs("gradient", runs, turned, 0)
    parameters = tuple(replace(p, one_sided=0.0) for p in first.parameters) if scaled else first.parameters
    return replace(first, parameters=parameters, sketches={**first.sketches, "gradient": tables})


def _all_runs(
    kind: str, runs: Sequence[SavedGradients], turned: Sequence[SavedGradients], which: int
) -> list[Sequence[Vector]]:
    """Return one table of sketches of each run; of those that are turned up and down the mean."""
    means = [mean_of([run.sketches[kind][which] for run in turned])] if turned else []
    return [*(run.sketches[kind][which] for run in runs), *means]


def _check_alike(runs: Sequence[SavedGradients]) -> None:
    """Refuse runs of other parameters, or of an optimizer that keeps other things."""
    described = [
        [(name, [(p.name, p.shape) for p in one.parameters]) for name, one in (("", run), *run.stages.items())]
        for run in runs
    ]
    if any(other != described[0] for other in described[1:]):
        raise RecordError(
            "the script trains other parameters from run to run, or its optimizer keeps other things, so that nothing "
            "can be compared."
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


def save_from_script(
    file: str | os.PathLike[str],
    options: Sequence[str],
    perturbed: int,
    writes: bool,
    launcher: Sequence[str],
    as_it_is: ScriptRun,
) -> None:
    """Run a script as `saved_runs` does, and write the file.

    Args:
        file: Where to.
        options: What follows ``gradguard run`` for the script itself: a seed, the script and its arguments.
        perturbed: How many runs with changed weights.
        writes: Whether this process writes: that of rank 0.
        launcher: A command that starts several processes of the module that is named behind it, anew for each run.
        as_it_is: The first run, which says what is saved.
    """
    saved = saved_runs([*(launcher or [sys.executable]), "-m", "gradguard", "run", *options], perturbed, as_it_is)
    if writes:
        write(file, saved)
