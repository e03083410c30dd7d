"""`gradguard run --save-gradients`: start a script once, and fork its process for each run of its first steps."""

import multiprocessing.synchronize
import os
import signal
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch

from gradguard.distributed.processes import meet_under
from gradguard.errors import RecordError
from gradguard.parity.rounding_runs import ALL, not_same_twice, with_rounding
from gradguard.parity.saved import GRADIENT, UPDATE, SavedGradients, read, write
from gradguard.parity.scales import ScriptRun
from gradguard.parity.vectors import Vector, distance, norm
from gradguard.replacements import Replacement

_SAME = 1e-9  # sketches of equal weights differ by the order of additions

_NO_FORK_AFTER = (
    ("torch.distributed", "init_process_group"),  # connections
    ("multiprocessing.synchronize", "SemLock.__init__"),  # a queue to a worker
    ("multiprocessing.process", "BaseProcess.__init__"),
    ("threading", "Thread.__init__"),  # Python 3.13.0 to 3.13.3 cannot start a thread created before a fork
    ("torch", "set_num_threads"),  # OpenMP's threads
)


class ForkedRuns:
    """The runs of one script that differ by rounding alone; each run is a fork of the original process.

    The process forks as late as possible: at the first forward pass of a trained model, or before the script connects
    processes or starts threads or workers. `fork_late` is False with an accelerator, whose driver does not survive a
    fork, and on other systems than Linux: the process then forks before the script's first line.

    If optimizers change weights, a last fork runs the script unchanged, and its files overwrite the files of the
    others. A fork ends without cleaning up, because it shares temporary files with the other forks; the original
    process cleans up.

    Args:
        perturbed: The number of runs with changed weights.
        as_it_is: The description of the first run: the steps to save.
        folder: A folder that all processes of a launch share.
        keep: A function that receives the merged run after all runs have ended.

    Attributes:
        refusal: The reason for saving nothing; empty otherwise.
        is_over: Whether this is the original process, and all runs have ended.
    """

    def __init__(
        self, perturbed: int, as_it_is: ScriptRun, folder: Path, keep: Callable[[SavedGradients], None]
    ) -> None:
        self._perturbed, self._as_it_is, self._folder, self._keep = perturbed, as_it_is, folder, keep
        self._numbers, self._threads, self._stack = count(), torch.get_num_threads(), ExitStack()
        self._file: Path | None = None  # the file that this process writes if it is a fork
        self._how = as_it_is
        self.refusal, self.is_over, self._code = "", False, 0
        kind = torch.accelerator.current_accelerator()  # does not initialize the driver
        has_accelerator = kind is not None and (kind.type != "cuda" or torch.cuda.device_count() > 0)
        self.fork_late = sys.platform == "linux" and not has_accelerator
        torch.set_num_threads(1)  # a fork does not copy OpenMP's threads, and would wait for them
        for module, name in _NO_FORK_AFTER:
            self._stack.callback(Replacement(module, name, self._before, everywhere=name.islower()).use())
        self._stack.callback(Replacement("torch.utils.data.dataloader", "DataLoader.__iter__", self._loading).use())

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.which()
        return original(*args, **kwargs)

    def _loading(self, original: Callable[..., Any], loader: Any) -> Any:
        return self._before(original, loader) if loader.num_workers else original(loader)

    def which(self) -> ScriptRun:
        """Fork once for each run, and return the description of the run in each fork.

        Returns:
            How this process differs from the other runs.

        Raises:
            SystemExit: In the original process, after all runs have ended.
        """
        if self._file is not None:
            return self._how
        if self.is_over:  # the script has caught the SystemExit
            _end(self._code)
        self._stack.close()
        try:
            saved = with_rounding(self._run, self._as_it_is, self._perturbed, check_same)
            if self._perturbed and not self._as_it_is.is_first_step_alone:
                self._run(self._as_it_is)  # overwrites the checkpoints of runs with changed weights
            self._keep(saved)
        except _IsForked:
            torch.set_num_threads(self._threads)
            return self._how
        except RecordError as error:
            raise self._stopped(2, str(error)) from error
        raise self._stopped(0)

    def _stopped(self, code: int, refusal: str = "") -> SystemExit:
        """Return the exception that ends the script in the original process, and record the outcome."""
        self.is_over, self._code, self.refusal = True, code, refusal
        return SystemExit(code)

    @property
    def ended_early(self) -> str:
        """The message for a script that ends before the steps to save."""
        return (
            f"the script ended before its optimizer step {self._as_it_is.last} was over, so there is nothing to save."
        )

    def end(self, saved: SavedGradients | None, refusal: str = "") -> NoReturn:
        """Write the saved gradients, or print the reason for saving nothing, and end this fork."""
        if self.is_over:  # the script has caught the SystemExit
            _end(self._code)
        if self._file is None:  # this process has not forked yet: no run can begin
            raise self._stopped(2, refusal)
        if saved is not None:
            write(self._file, saved)
        else:
            sys.stderr.write(f"gradguard: {refusal}\n")
        _end(2 if refusal else 0)

    def leave(self, code: int) -> None:
        """End this process if it is a fork; called when the script has ended."""
        if self._file is not None:
            _end(code)
        self._stack.close()
        torch.set_num_threads(self._threads)

    def _run(self, how: ScriptRun) -> SavedGradients:
        """Fork, wait for the fork, and return the run that it has saved."""
        import fcntl  # not available on Windows

        number = next(self._numbers)
        file = self._folder / f"{os.environ.get('RANK', '0')}-{number}"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with open(self._folder / f"{number}.lock", "wb") as lock, tempfile.TemporaryFile() as stderr:
            fcntl.flock(lock, fcntl.LOCK_SH)
            offsets = _offsets()
            with warnings.catch_warnings(action="ignore"):  # Python warns of threads; OpenBLAS handles forks itself
                child = os.fork()
            if not child:
                self._begin(file, how, number, stderr.fileno())
                raise _IsForked
            try:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            except BaseException:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
            for descriptor, offset in offsets.items():
                os.lseek(descriptor, offset, os.SEEK_SET)
            if code or not file.exists():
                stderr.seek(0)
                sys.stderr.write(stderr.read().decode(errors="replace"))
                raise self._stopped(code if code > 0 else 128 - code if code else 2, "" if code else self.ended_early)
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait until this run has ended in all processes of the launch
        return read(file)

    def _begin(self, file: Path, how: ScriptRun, number: int, stderr: int) -> None:
        """Set up this fork: only run 0 prints, and the ranks of a run rendezvous under the run's own number."""
        self._file, self._how = file, how
        meet_under(f"run {number}")
        os.environ["TMPDIR"], tempfile.tempdir = str(self._folder), None  # temporary files are removed with the folder
        if number:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor, instead in enumerate((nowhere, nowhere, stderr)):
                os.dup2(instead, descriptor)


class _IsForked(BaseException):
    """Unwinds the stack of a fork to the point at which the script continues."""


def _offsets() -> dict[int, int]:
    """Return the offset of each open file of the script, which forks share; standard streams are left out."""
    streams, found = [], {}
    for descriptor in sorted(map(int, os.listdir("/dev/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            about = os.fstat(descriptor)
            if descriptor < 3:
                streams.append(about)
            elif stat.S_ISREG(about.st_mode) and not any(os.path.samestat(about, one) for one in streams):
                found[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return found


def _end(code: int) -> NoReturn:
    # End the fork's workers first: a worker that ends later would fail to clean up in the removed folder.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when a worker is killed
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def check_same(runs: Sequence[SavedGradients]) -> None:
    """Refuse runs of a script that begins with different weights, or whose unchanged run differs when repeated.

    Raises:
        RecordError: If weights or repeated runs differ by more than rounding.
    """
    first = runs[0]
    for other in runs[1:]:
        pairs = zip(first.parameters, first.sketches["weights"][0], other.sketches["weights"][0], strict=True)
        if moved := [p.name for p, a, b in pairs if not _same(a, b)]:
            raise RecordError(
                f"the script has other weights at its first step from run to run (in {moved[0]}, for instance): seed "
                "it, as in gradguard run --seed 0 --save-gradients ..., or let it load a checkpoint, and set no "
                "weights after the first forward pass."
            )
    for name, share in not_same_twice(runs):
        if name.startswith((ALL, GRADIENT, UPDATE)):
            raise RecordError(
                f"the script is not the same twice: half of {name} differ by {share:.2g} or more of themselves "
                "from run to run, with the same weights. Does it take other samples, or draw other random numbers? "
                "Seed it, as in gradguard run --seed 0 --save-gradients ..., and its data loader."
            )


def _same(a: Vector, b: Vector) -> bool:
    return list(a) == list(b) or distance(a, b) <= _SAME * norm(a)
