"""The processes that the other tests use: results by rank, errors, hangs, deaths."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from pool import RemoteTraceback

from gradguard.errors import InvalidValueError


def add_up(x):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return x + total.item(), dist.get_rank(), torch.get_num_threads()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise InvalidValueError("on purpose")


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def fail_or_hang_on(rank):
    hang_on(rank)
    raise InvalidValueError("on purpose")


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def warn():
    warnings.warn("on purpose", stacklevel=1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_by_rank(pool, world):
    total = sum(range(world))
    assert pool(world).run(add_up, 0.5) == [(total + 0.5, rank, 1) for rank in range(world)]


def test_what_a_rank_raises_is_raised(pool):
    with pytest.raises(InvalidValueError, match=r"^on purpose\n") as caught:
        pool(2).run(fail_on, 1)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "on rank 1" in str(caught.value.__cause__)
    assert [type(x) for x in pool(2).outcomes(fail_on, 0)] == [InvalidValueError, type(None)]
    assert len(pool(2).run(add_up, 0)) == 2


def test_warnings_are_errors(pool):
    assert [type(x) for x in pool(2).outcomes(warn)] == [UserWarning] * 2


def test_a_hang_fails_with_the_stack(pool):
    with pool.fresh(2) as processes:
        processes.run(add_up, 0)  # both are there, so that what is waited for is the hang
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not(?s:.)*in hang_on"):
            processes.run(hang_on, 1, seconds=2.0)
        assert not processes.alive


def test_an_error_is_told_although_others_wait_for_ever(pool):
    with pool.fresh(2) as processes, pytest.raises(InvalidValueError, match=r"^on purpose\n") as caught:
        processes.run(fail_or_hang_on, 1)
    assert "on rank 0" in str(caught.value.__cause__)
    assert "ranks [1] did not come back" in str(caught.value.__cause__)


def test_a_death_is_told(pool):
    with pool.fresh(2) as processes, pytest.raises(RuntimeError, match="rank 1 has died with exit code 7"):
        processes.run(die_on, 1)


def say(words):
    return [("DistributedError", f"rank 1 came with another list. {words}: end the program.")]


def test_processes_that_are_out_of_step_are_not_used_again(pool):
    before = pool(2)
    before.run(say, "All can go on")
    assert pool(2) is before
    before.run(say, "The process group cannot be used any more, because its ranks still wait in different collectives")
    assert pool(2) is not before
    assert len(pool(2).run(add_up, 0)) == 2
