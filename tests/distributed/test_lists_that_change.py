"""A list that changes after the first call is named in seconds, where the host waits: not after the time-out."""

import re
import time

import pytest
from refusals import refusal
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import gradguard as gg
from cases import random
from sharded import Entry, mesh, parameter


def clip_then_another(how):
    """All clip one list; then rank 1 comes with another one, new or known."""
    first = [("one", parameter(Entry(random(6, 2)))), ("two", parameter(Entry(random(5, seed=1))))]
    second = first[:1]
    gg.clip_grad_norm_(first, 1.0)
    if how == "known":
        gg.clip_grad_norm_(second, 1.0)
    if mesh("row").get_local_rank() != 1:
        second = first
        first[0][1].grad = first[0][1].grad if how != "a sum on one" else None
    elif how == "a sum on one":
        second = first
        first[0][1].grad = DTensor.from_local(random(6, 2), mesh("row"), [Partial()])
    elif how == "new parameters":
        p = nn.Parameter(distribute_tensor(random(6, 2), mesh("row"), first[0][1].placements, src_data_rank=None))
        p.grad = first[0][1].grad
        second = [("one", p), first[1]]
    start = time.monotonic()
    return refusal(lambda: gg.clip_grad_norm_(second, 1.0)), time.monotonic() - start


SAYS = {
    "shorter": r"rank 1 came with another list of gradients than rank 0: 1 parameters instead of 2: it lacks `two`",
    "known": "another rank clipped another list of gradients in this place",
    "a sum on one": r"rank 1 has gradients laid out anew, .* rank 0 has none.*cannot be used any more",
    "new parameters": r"rank 1 came with new parameters, rank 0 with those that it has clipped before",
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", SAYS)
def test_a_list_that_changes_is_named_in_seconds(pool, how):
    """Ranks waited for the time-out: half an hour, as groups are made."""
    with pool.fresh(2) as processes:
        found = processes.run(clip_then_another, how)
    for (kind, said), seconds in found:
        assert kind == "DistributedError"
        assert seconds < 60, said  # the time-out here is longer than 200
    assert any(re.search(SAYS[how], said) for (_, said), _ in found), found
