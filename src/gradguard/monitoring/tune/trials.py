"""Runs the trials one after the other, each as a `gradguard run` in its own process, and reads their records."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradguard.errors import CommandError, RecordError
from gradguard.monitoring.judge.judgement import verdict
from gradguard.monitoring.record.file import FILE_NAME, read_record
from gradguard.monitoring.record.reader import JsonlReader
from gradguard.monitoring.tune.candidates import NONE, OTHERWISE, candidates, recommended
from gradguard.monitoring.tune.score import TrialRun, diverged_at, got_worse, last_loss, same_start, sound
from gradguard.named_rules import clipping_rule

RUN = (sys.executable, "-m", "gradguard", "run")
"""The command that runs a script."""

_LOOK_EVERY = 0.5  # seconds between two checks of a run
_PATIENCE = 10.0  # seconds that a run has to end after a signal
OUTPUT = "output.txt"
"""The file with the output of a run."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The plan of the trials.

    Attributes:
        target: The script, or the module after ``-m``, and its arguments; ``{seed}`` in these is replaced by the seed.
        folder: The folder for the records.
        steps: The number of optimizer steps of a run.
        seeds: The number of seeds.
        rules: The rules to try beside the unchanged script; None to choose them from a record.
        record: The record to choose the rules from; None for the record of the first run.
        metric: A pattern whose single group finds the metric in the script's output; None to judge by losses.
        maximize: Whether the highest metric is the best.
    """

    target: Sequence[str]
    folder: Path
    steps: int
    seeds: int
    rules: Sequence[str] | None = None
    record: Path | None = None
    metric: re.Pattern[str] | None = None
    maximize: bool = False


class Trials:
    """The runs of a plan.

    **Guarantees**: all rules run with one seed before the next seed begins; a run that has diverged is ended; finished
    runs stay in ``runs`` if Ctrl-C interrupts the trials.

    Args:
        plan: The plan.
        tell: Called with one line of text when a run has finished.

    Attributes:
        runs: The finished runs.
        rules: The rules; the first is the unchanged script.
        seeds_itself: Whether the second seed began with the same losses as the first, so other seeds would, too.
        clips_itself: Whether the script has its own clip.
        optimizers: The number of optimizers that step.
        suggested: A sentence on the rule that the record recommends; empty if the user named the rules.
    """

    def __init__(self, plan: TrialPlan, tell: Callable[[str], object]) -> None:
        self.plan, self._tell = plan, tell
        self.runs: list[TrialRun] = []
        self.rules: list[str] = [NONE]
        self.seeds_itself = self.clips_itself = False
        self.optimizers = 1
        self.suggested = ""
        self._given = None if plan.record is None else read_record(plan.record)  # fails before the first run
        for rule in plan.rules or ():
            clipping_rule(rule)

    def run(self) -> None:
        """Run all rules with all seeds.

        Raises:
            CommandError: If the script cannot be judged: it fails, prints no metric, or no optimizer steps on a loss.
        """
        for seed in range(1, self.plan.seeds + 1):
            for rule in self.rules:
                done = self._one(rule, seed)
                self.runs.append(done)
                if rule == NONE and seed == 1:
                    self._look_at_first(done)  # adds the other rules to the list that this loop iterates
                place = f"{len(self.runs)} of {self.plan.seeds * len(self.rules)}"
                self._tell(f"{rule}, seed {seed}: {_outcome(done)} ({place})")
                if rule == NONE and seed == 2 and same_start(self.runs[0].losses, done.losses):
                    self.seeds_itself = True
                    self.runs.pop()
                    return

    def folder_of(self, rule: str, seed: int) -> Path:
        """Return the folder of a run's record."""
        return self.plan.folder / f"{rule}-seed{seed}"

    def _look_at_first(self, done: TrialRun) -> None:
        folder = self.folder_of(NONE, 1)
        if done.failed and not (done.losses and last_loss(done.losses) is None):
            raise CommandError(
                f"{shlex.join(self.plan.target)} ended with an error in its first run, without a clip by gradguard:\n"
                f"{_tail(folder / OUTPUT)}\nIts whole output is in {folder / OUTPUT}."
            )
        record = read_record(folder)
        if self.plan.metric is not None and done.metric is not None and math.isnan(done.metric):
            raise CommandError(
                f"{self.plan.metric.pattern!r} found no finite number in the output of the script's first run, which "
                f"is in {folder / OUTPUT}."
            )
        if not done.losses and self.plan.metric is None:
            raise CommandError(
                f"nothing to compare: {len(record.steps)} steps of torch.optim optimizers were observed, but no loss "
                "on which backward() was called. Tuning needs such a loss, or --metric."
            )
        self.clips_itself = any(record.steps.column("rule"))
        self.optimizers = len(set(record.steps.column("optimizer")))
        if self.plan.rules:
            self.rules += dict.fromkeys(self.plan.rules)
        else:
            record = self._given or record
            rule = recommended(record)
            self.suggested = (
                f"The record of the unchanged script recommends {rule}."
                if rule
                else f"The record of the unchanged script recommends no rule: {OTHERWISE} was tried instead."
            )
            self.rules += candidates(record, got_worse(_losses(record.steps)))

    def _one(self, rule: str, seed: int) -> TrialRun:
        folder = self.folder_of(rule, seed)
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--out", str(folder), "--force", "--no-report", "--steps", str(self.plan.steps), "--seed", str(seed)]
        clip = [] if rule == NONE else ["--clip", rule]
        target = [word.replace("{seed}", str(seed)) for word in self.plan.target]
        command = [*RUN, *options, *clip, *target]
        environment = {"PYTHONHASHSEED": str(seed), "PYTHONUNBUFFERED": "1"} | os.environ
        (folder / FILE_NAME).unlink(missing_ok=True)
        with (folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            with process:
                stopped = self._wait(process, folder / FILE_NAME)
        try:
            record = read_record(folder)
        except RecordError:
            return TrialRun(rule, seed, [], failed=True, stopped=stopped)
        value = None if self.plan.metric is None else _last_number(self.plan.metric, folder / OUTPUT)
        failed = bool(process.returncode) and not stopped
        return TrialRun(rule, seed, _losses(record.steps), failed, verdict(record).clip_share or 0.0, stopped, value)

    def _wait(self, process: subprocess.Popen, path: Path) -> bool:
        """Wait until a run ends, or end it once it has diverged; return whether it was ended."""
        reader, losses = JsonlReader(path), list[float | None]()
        others = sound(self.runs)
        try:
            while True:
                try:
                    process.wait(_LOOK_EVERY)
                    return False
                except subprocess.TimeoutExpired:
                    looked = len(losses)
                    with suppress(RecordError):
                        losses += _losses([line for line in reader.poll() if line["t"] == "step"])
                if diverged_at(losses, others, looked) is not None:
                    process.terminate()
                    _end(process)
                    return True
        except (KeyboardInterrupt, SystemExit) as ended:
            if isinstance(ended, SystemExit):  # from SIGTERM, which the run may not have received
                process.terminate()
            _end(process)  # the run received Ctrl-C, too, and may be saving its work
            raise


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()


def _losses(steps: Sequence[dict]) -> list[float | None]:
    return [step["loss"] for step in steps if "loss" in step]


def _last_number(metric: re.Pattern[str], output: Path) -> float:
    """Return the last metric in the output; NaN if it is not finite, or there is none."""
    found = metric.findall(output.read_text(encoding="utf-8", errors="replace"))
    with suppress(ValueError, IndexError):
        return value if math.isfinite(value := float(found[-1])) else math.nan
    return math.nan


def _outcome(run: TrialRun) -> str:
    if run.stopped:
        return f"diverged, ended after {len(run.losses)} losses"
    if run.failed:
        return "ended with an error"
    if run.metric is not None:
        return "no finite metric" if math.isnan(run.metric) else f"metric {run.metric:.4g}"
    if not run.losses:
        return "no loss"
    loss = last_loss(run.losses)
    return "the last losses are not finite" if loss is None else f"loss {loss:.4g}"


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(lines[-8:])
