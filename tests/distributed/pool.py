"""Processes that stay: 1, 2 or 4 of them, joined by gloo, to which a test sends functions.

    def double(x):
        return 2 * x + dist.get_rank()

    def test_it(pool):
        assert pool(2).run(double, 3) == [6, 7]

A function must be at the top of its module, so that the processes find it. They are started once and kept. A call
that does not come back in time fails with the stack of every process; they are killed then, as they are when a call
raises, or says that their group cannot be used any more, and the next one gets new ones.
"""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = [
    "pytest",
    "torch._dynamo",  # which the first operation on a DTensor imports
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "gradguard",
]
"""What the processes share from the start: importing it takes seconds, forking after that milliseconds."""

HANGS = 200.0
"""Seconds after which a call counts as hanging: far more than the slowest machine takes."""

_FOR_A_STACK = 20.0
"""Seconds that a process gets to say where it hangs."""

_AFTER_AN_ERROR = 3.0
"""Seconds that the other processes get when one has raised: most of them wait for it in vain."""

_OUT_OF_STEP = b"The process group cannot be used any more"
"""What gradguard says of processes that wait in different collectives; a test may catch it and go on."""


class RemoteTraceback(Exception):  # noqa: N818
    """Where an error happened in another process; the cause of what is raised here."""


class Pool:
    """``world`` processes in one gloo process group.

    Args:
        world: How many.
        folder: An empty folder of their own.
    """

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.world, self.alive, self._in_step = world, True, True
        self._folder = folder
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, str(folder)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = HANGS) -> list[Any]:
        """Call ``function(*args)`` in every process and return the results by rank; what one raises is raised here."""
        outcomes = self._call(function, args, seconds, _AFTER_AN_ERROR)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            self.close()
            raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, seconds: float = HANGS) -> list[Any]:
        """Do the same where errors are expected: they stand among the results. The processes are kept."""
        return self._call(function, args, seconds, seconds)

    def _call(self, function: Callable[..., Any], args: tuple, seconds: float, patience: float) -> list[Any]:
        assert self.alive, "these processes have been stopped: ask for a pool in each test"
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < self.world and time.monotonic() < deadline:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            for pipe in multiprocessing.connection.wait(waiting, deadline - time.monotonic()):
                rank = self._pipes.index(pipe)
                found[rank] = self._received(rank)
                if isinstance(found[rank], BaseException):
                    deadline = min(deadline, time.monotonic() + patience)
        missing = sorted(set(range(self.world)) - set(found))
        if missing:
            stacks = self._stacks(missing)
            self.close()
            errors = [e for e in found.values() if isinstance(e, BaseException)]
            late = f"ranks {missing} did not come back from {function.__name__}:\n{stacks}"
            if not errors:
                raise TimeoutError(late)
            raise errors[0] from RemoteTraceback(f"{errors[0].__cause__ or ''}\n{late}")
        if not self._in_step:
            self.close()
        return [found[rank] for rank in range(self.world)]

    def _received(self, rank: int) -> Any:
        try:
            answer = self._pipes[rank].recv_bytes()
            self._in_step &= _OUT_OF_STEP not in answer
            kind, value, text = pickle.loads(answer)
        except (EOFError, OSError):
            self._processes[rank].join(HANGS)
            self.alive = False
            last = (self._folder / f"stack{rank}").read_text(encoding="utf-8")
            return RuntimeError(f"rank {rank} has died with exit code {self._processes[rank].exitcode}\n{last}")
        if kind == "error":
            value.__cause__ = RemoteTraceback(f"on rank {rank}:\n{text}")
        return value

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        return "\n".join(f"rank {rank}:\n{self._stack(rank)}" for rank in ranks)

    def _stack(self, rank: int) -> str:
        """What a process has written of its stack, once it has come to that."""
        file, until = self._folder / f"stack{rank}", time.monotonic() + _FOR_A_STACK
        while not (text := file.read_text(encoding="utf-8")).endswith("\n") and time.monotonic() < until:
            time.sleep(0.05)
        return text

    def close(self) -> None:
        """Stop the processes; may be repeated."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            pipe.close()
        self._processes, self._pipes = [], []


class Pools:
    """The pools of a test session, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pools = folder, dict[int, Pool]()

    def __call__(self, world: int) -> Pool:
        """Return the pool of ``world`` processes; a new one if it was stopped."""
        if world not in self._pools or not self._pools[world].alive:
            self._pools[world] = self._new(world)
        return self._pools[world]

    @contextmanager
    def fresh(self, world: int) -> Iterator[Pool]:
        """Give processes to one test alone, for whatever breaks them."""
        pool = self._new(world)
        try:
            yield pool
        finally:
            pool.close()

    def _new(self, world: int) -> Pool:
        return Pool(world, Path(tempfile.mkdtemp(dir=self._folder)))

    def close(self) -> None:
        """Stop all processes."""
        for pool in self._pools.values():
            pool.close()


def join(rank: int, world: int, folder: str) -> None:
    """Make the default process group of this process; a call counts as hanging before its collectives give up."""
    limit = timedelta(seconds=HANGS + 50)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)


@contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """What processes need in their environment to meet, as torchrun gives it: a store that is there, on a port in use.

    A port that was free a moment ago may be somebody else's by the time that a process opens it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def give_up_after(seconds: float) -> None:
    """Let collectives fail after ``seconds`` from here on, where all have come: none is late for its start.

    They meet at the store: one that dies as soon as it returns takes no message with it that another one waits for.
    """
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    come = store.add("come", 1)
    all_have_come = f"all have come {(come - 1) // world}"
    if come % world == 0:
        store.set(all_have_come, "")
    store.wait([all_have_come], timedelta(seconds=HANGS))
    private = dist.distributed_c10d._set_pg_timeout  # until torch 2.15 made it public
    getattr(dist, "set_timeout", private)(timedelta(seconds=seconds), dist.group.WORLD)


def _serve(pipe: Any, rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # or gradguard would look through what was imported
    with open(Path(folder) / f"stack{rank}", "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # as in pyproject.toml
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        try:
            join(rank, world, folder)
            while True:
                try:
                    message = pipe.recv_bytes()
                except EOFError:  # the tests have ended
                    os._exit(0)
                pipe.send_bytes(_answer(message))
        except BaseException:
            traceback.print_exc(file=stack)  # nobody sees the standard error of this process
            raise


def _answer(message: bytes) -> bytes:
    random.seed(0)
    torch.manual_seed(0)
    try:
        function, args = pickle.loads(message)
        return pickle.dumps(("result", function(*args), ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return pickle.dumps(("error", pickle.loads(pickle.dumps(error)), text))
        except Exception:  # some errors cannot be sent
            return pickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), text))
