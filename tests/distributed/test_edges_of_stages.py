"""Stages at their edges: processes that hold different parameters, or do not act together."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from pool import HANGS, give_up_after
from refusals import check_refusals, refusal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradguard as gg
from cases import random
from gradguard.distributed import agreement, wrappers
from gradguard.distributed import norm_plan as plan
from reference import total_norm
from sharded import Entry, mesh, parameter

pytestmark = pytest.mark.sampled(1)  # rows of each table


def stage():
    """Two layers, of which both stages have the first one."""
    module = nn.ModuleDict({"both": nn.Linear(3, 2, bias=False), "own": nn.Linear(2, 2, bias=False)})
    module["both"].weight.grad = torch.full((2, 3), 1.0)
    module["own"].weight.grad = torch.full((2, 2), 1.0 + dist.get_rank())
    return module


# --- What is selected, by identity or by name -------------------------------------------------------------------------

SELECTING = {
    "groups": lambda chosen: gg.Groups([(chosen, gg.ClipByGlobalNorm(1.0))], rest=None),
    "adaptive": lambda chosen: gg.ClipAdaptive(0.1, exclude=chosen),
}


def select(how, chosen, guarded):
    """Clip the stages by a rule that is told of the own layer."""
    module = stage()
    chosen = {"parameter": [module["own"].weight], "module": [module["own"]], "name": "*own.weight"}[chosen]
    if how == "function":
        return refusal(lambda: gg.clip_grad_adaptive_(module, 0.1, exclude=chosen, mesh=mesh("row")))
    rule = SELECTING[how](chosen)
    if not guarded:
        return refusal(lambda: rule(module, mesh=mesh("row")))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gg.Guard(optimizer, rule, model=module, mesh=mesh("row"))
    return refusal(optimizer.step)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("chosen", ["parameter", "module", "name"])
@pytest.mark.parametrize(
    ("how", "guarded"),
    [("groups", False), ("groups", True), ("adaptive", False), ("adaptive", True), ("function", False)],
)
def test_stages_select_by_name(pool, how, guarded, chosen):
    """Each stage selected other tensors, so that norms and coefficients differed from rank to rank."""
    found = pool(2).run(select, how, chosen, guarded)
    if chosen == "name":
        assert found == [("no error", "")] * 2
    else:
        check_refusals(found, "InvalidTypeError", "modules themselves, which other pipeline.*name pattern")


SHARED = {
    "on one stage": (
        lambda m: {"both": m["both"].weight} if dist.get_rank() == 0 else {},
        r"shared has 'both' on stage 0 only: expected the same name on every stage",
    ),
    "two names": (
        lambda m: {f"both{dist.get_rank()}": m["both"].weight},
        r"shared has 'both0' on stage 0 only",
    ),
    "two shapes": (
        lambda m: {"both": m["both" if dist.get_rank() == 0 else "own"].weight},
        r"shared\['both'\] is not one weight: \(2, 3\) torch.float32 on stage 0, \(2, 2\) torch.float32 on stage 1",
    ),
}


def share(how):
    module = stage()
    wrong = refusal(lambda: gg.clip_grad_norm_(module, math.inf, mesh=mesh("row"), shared=SHARED[how][0](module)))
    norm = gg.clip_grad_norm_(module, math.inf, mesh=mesh("row"), shared={"both": module["both"].weight})
    return wrong, float(norm)


@pytest.mark.parametrize("how", SHARED)
def test_shared_weights_must_be_shared(pool, how):
    """A weight that one stage alone calls shared counted twice; two weights of one name, as one."""
    for wrong, norm in pool(2).run(share, how):
        check_refusals([wrong], "InvalidValueError", SHARED[how][1])
        assert norm == pytest.approx(math.sqrt(6 + 4 * 1 + 4 * 4))


def test_a_list_does_not_say_what_is_shared_with_what():
    with pytest.raises(gg.errors.InvalidTypeError, match="shared is list: expected a mapping from a name, the same on"):
        gg.clip_grad_norm_(torch.nn.Linear(2, 2), 1.0, shared=[torch.nn.Parameter(torch.zeros(2))])


def share_with_nobody():
    module = stage()
    return float(gg.clip_grad_norm_(module, math.inf, mesh=mesh("row"), shared={"both": module["both"].weight}))


def test_one_stage_alone_may_name_what_stages_share(pool):
    """The same script runs on one process."""
    assert pool(1).run(share_with_nobody) == pytest.approx([math.sqrt(6 + 4)])


# --- Where the stages lie ---------------------------------------------------------------------------------------------


def clip_stages_of_two_kinds(sharded, through):
    """One of two stages is in FSDP2, the other one plain: only the first one's parameters tell of a mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = grid["pp"].get_local_rank()
    layer = nn.Linear(4, 4, bias=False)
    if number == sharded:
        fully_shard(layer, mesh=grid["dp"])
    full = torch.full((4, 4), 1.0 + number)
    layer.weight.grad = distribute_tensor(full, grid["dp"], [Shard(0)]) if number == sharded else full
    if through == "guard":
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1e9), model=layer, mesh=grid["pp"])
        optimizer.step()
        return float(guard.last.norm)
    return float(gg.clip_grad_norm_(layer, math.inf, mesh=grid["pp"]))


@pytest.mark.parametrize(("sharded", "through"), [(0, "function"), (1, "function"), (1, "guard")])
def test_a_stage_without_shards_beside_one_with(pool, sharded, through):
    """The stages waited for one another in two groups: neither knew where the other's parameters lie."""
    found = pool(4).run(clip_stages_of_two_kinds, sharded, through)
    assert found == pytest.approx([math.sqrt(16 * 1 + 16 * 4)] * 4)


def clip_elsewhere(layout):
    """Ranks 2 and 3 hold nothing of one tensor, and are not on its mesh."""
    pair = DeviceMesh("cpu", [0, 1])
    elsewhere = nn.Parameter(distribute_tensor(torch.zeros(6), pair, layout, src_data_rank=None))
    listed = [parameter(Entry(random(7, 3))), elsewhere]
    return refusal(lambda: gg.clip_grad_norm_(listed, 1.0)) if dist.get_rank() > 1 else None


def test_a_mesh_that_this_process_is_not_on(pool):
    """An error of PyTorch's insides came."""
    for rank, found in enumerate(pool(4).run(clip_elsewhere, [Shard(0)])[2:], start=2):
        check_refusals([found], "InvalidValueError", rf"this process \(rank {rank}\) is not on .*DeviceMesh.*list ")


# --- Who is missing ---------------------------------------------------------------------------------------------------

TIMEOUT = 3.0
"""Of the process groups whose members wait in vain, from a moment at which all have come."""


def only_rank_0_comes(order):
    """What the first rank's clip says."""
    layer = nn.Linear(2, 2)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    gg.clip_grad_norm_(layer, 1.0, order, process_group=dist.group.WORLD)
    give_up_after(TIMEOUT)
    if dist.get_rank() > 0:
        return None
    agreement._PATIENCE = 0.5  # these processes are used once
    return refusal(lambda: gg.clip_grad_norm_(layer, 1.0, order, process_group=dist.group.WORLD))


@pytest.mark.slow
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_many_missing_ranks_are_told(pool, order):
    with pool.fresh(4) as processes:
        found, *_ = processes.run(only_rank_0_comes, order)
    check_refusals([found], "DistributedError", "rank 1, 2, 3 did not come")


def test_many_missing_ranks_take_no_longer_than_one(monkeypatch):
    """Each of them was waited for in turn."""
    clock = [0.0]
    later = lambda seconds: clock.append(clock.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=later))
    store = dist.HashStore()
    store.add("came", 1)
    agreement._wait_for_all(store, 1000)
    assert clock[0] == pytest.approx(agreement._PATIENCE, abs=0.2)
    assert agreement._missing(store, range(1000)) == list(range(1000))


def stage_1_is_late(seconds):
    """Stages of different shapes, known to all; then one does not come in time, or at all."""
    layer = nn.Linear(2 + dist.get_rank(), 2)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    gg.clip_grad_norm_(layer, math.inf, process_group=dist.group.WORLD)
    give_up_after(TIMEOUT)
    if dist.get_rank() == 1:
        if seconds is None:
            return None
        time.sleep(seconds)
    agreement._PATIENCE = 0.5 if seconds is None else HANGS / 2  # these processes are used once
    return refusal(lambda: gg.clip_grad_norm_(layer, math.inf, process_group=dist.group.WORLD))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5 * TIMEOUT, None])
def test_stages_are_not_blamed_for_having_other_parameters(pool, seconds):
    """What stages differ in on purpose was called the reason."""
    with pool.fresh(2) as processes:
        first, second = processes.run(stage_1_is_late, seconds)
    for found in [first] if seconds is None else [first, second]:
        check_refusals(
            [found], "DistributedError", "did not come" if seconds is None else "must clip on the same steps"
        )
        assert "another list" not in found[1]


# --- Plans ------------------------------------------------------------------------------------------------------------


def clip_many_lists(lists):
    """200 lists, and now and then one that must stay known; which collectives that one took."""
    known = [parameter(Entry(random(5, 2, seed=i))) for i in range(2)]
    others = [parameter(Entry(random(3, seed=i))) for i in range(8)]
    asked = []
    for number in range(1, lists + 1):
        gg.clip_grad_norm_([p for i, p in enumerate(others) if number >> i & 1], math.inf)
        if number % 20 == 1:
            with Collectives() as block:
                norm = gg.clip_grad_norm_(known, math.inf)
            asked.append(len(block.names))
    for number in range(lists):
        gg.get_total_norm([p.grad for p in known] + [None] * number)
    return asked, float(norm), len(plan._plans), len(plan._reducers)


def test_only_the_last_64_lists_are_remembered(pool):
    """Everything was kept for ever."""
    right = total_norm([random(5, 2, seed=i) for i in range(2)])
    for (first, *later), norm, plans, reducers in pool(2).run(clip_many_lists, 200):
        assert first == 2  # agreement and sum
        assert set(later) == {1}
        assert norm == pytest.approx(right, rel=1e-6)
        assert plans == reducers == 64


# --- Without shards ---------------------------------------------------------------------------------------------------

COMPILED = {
    "norm": lambda q: gg.clip_grad_norm_(q, 1.0),
    "value": lambda q: gg.clip_grad_value_(q, 0.5),
    "total": lambda q: gg.get_total_norm([p.grad for p in q]),
}


def plain_parameters():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.ones(3)
    return parameters


def clip_compiled(warm):
    """As one graph; ``warm``, what a process looks for once has been found."""
    known, found = wrappers._living, {}
    try:
        for name, call in COMPILED.items():
            torch._dynamo.reset()
            parameters, eager = plain_parameters(), plain_parameters()
            if warm:
                call(plain_parameters())
            else:
                wrappers._living = None
            clip = torch.compile(lambda call=call, q=parameters: call(q), fullgraph=True, backend="eager")
            found[name] = clip(), call(eager), [p.grad for p in parameters], [p.grad for p in eager]
    finally:
        wrappers._living = known
    return found


@pytest.mark.parametrize("warm", [False, True])
def test_plain_gradients_are_clipped_in_one_compiled_graph(pool, warm):
    """Where there are several processes, modules were looked for in the middle of the graph, which broke it."""
    for found in pool(2).run(clip_compiled, warm):
        for norm, right, after, expected in found.values():
            torch.testing.assert_close(after, expected, rtol=0, atol=0)
            assert (norm is right is None) or torch.equal(norm, right)
