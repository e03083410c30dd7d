"""Ranks as threads of one process, joined by PyTorch's own threaded process group: thousands of cases in seconds.

What `pool` does with processes, where no test needs a real network: nothing is forked, nothing is sent.

    with ranks(4) as run:
        assert run(lambda rank: rank + dist.get_rank()) == [0, 2, 4, 6]
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

PATIENCE = 20.0
"""Seconds that the other ranks get when one has raised: where all refuse alike none of them waits."""

HANGS = 200.0
"""Seconds after which a call counts as hanging."""

Function = Callable[[int], Any]


class Ranks:
    """``world`` threads that stay, each a rank; use `ranks`."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._start()

    def _start(self) -> None:
        threaded.ProcessLocalGroup.reset()
        store = dist.HashStore()
        self._tasks = [queue.SimpleQueue[Function | None]() for _ in range(self._world)]
        self._found: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, store, self._tasks[rank], self._found), daemon=True)
            for rank in range(self._world)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int, store: dist.Store, tasks: Any, found: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=self._world, store=store)
        while (function := tasks.get()) is not None:
            try:
                outcome = function(rank)
            except SystemExit:  # how the threaded group ends those that wait in vain
                outcome = TimeoutError("it waited for another rank in vain")
            except BaseException as error:
                outcome = error
            found.put((rank, outcome))

    def __call__(self, function: Function, seconds: float = HANGS) -> list[Any]:
        """Return what ``function(rank)`` returns on every rank; what it raises stands among the results."""
        for tasks in self._tasks:
            tasks.put(function)
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(outcomes) < self._world:
            try:
                rank, outcome = self._found.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                threaded.ProcessLocalGroup.exception_handle(None)
                deadline = time.monotonic() + PATIENCE
                continue
            outcomes[rank] = outcome
            if isinstance(outcome, BaseException):
                deadline = min(deadline, time.monotonic() + PATIENCE)
        if any(isinstance(outcome, TimeoutError) for outcome in outcomes.values()):
            self.close()
            self._start()
        return [outcomes[rank] for rank in range(self._world)]

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join(PATIENCE)


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    """Threads as ranks while the block runs."""
    if torch.__version__.startswith("2.11"):
        pytest.skip("after torch 2.11's threaded process group a later backward pass of the process may crash")
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads = Ranks(world)
    try:
        yield threads
    finally:
        threads.close()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
