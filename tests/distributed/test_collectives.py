"""One all-reduce a clip, the same on every rank whatever gradients it has, and none for a clamp."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives

import gradguard as gg
from gradguard.distributed import norm_plan as plan
from sharded import LISTS, laid_out, mesh, parameter

pytestmark = pytest.mark.sampled(2)  # rows of each table

ONE = ["allreduce_"]
LIST = "experts"  # three meshes, and plain tensors


def named(entries):
    return [(f"layer{i}.weight", parameter(entry)) for i, entry in enumerate(entries)]


def renew(parameters, entries, absent=()):
    """Fresh gradients; None at the positions ``absent``."""
    for i, ((_, p), entry) in enumerate(zip(parameters, entries, strict=True)):
        p.grad = None if i in absent else laid_out(entry.gradient, entry.layout)


CALLS = {
    **{
        f"norm of order {p}": lambda q, p=p: gg.clip_grad_norm_(q, 0.1, p) for p in (0.5, 1.0, 2.0, 3.0, 10.0, math.inf)
    },
    "norm, measured only": lambda q: gg.clip_grad_norm_(q, math.inf),
    "norm, raise": lambda q: gg.clip_grad_norm_(q, 0.1, nonfinite="raise"),
    "norm, zero": lambda q: gg.clip_grad_norm_(q, 0.1, nonfinite="zero"),
    "get_total_norm": lambda q: gg.get_total_norm([p.grad for _, p in q]),
    "get_total_norm, inf": lambda q: gg.get_total_norm([p.grad for _, p in q], math.inf),
    "value, raise": lambda q: gg.clip_grad_value_(q, 0.1, nonfinite="raise"),
    "apply, norm": lambda q: gg.apply_gradient_clipping(q, "norm", 0.1),
    "apply, value": lambda q: gg.apply_gradient_clipping(q, "value", 0.1),
}

CLIPPERS = {
    "global norm": lambda: gg.ClipByGlobalNorm(0.1),
    "global norm, inf": lambda: gg.ClipByGlobalNorm(0.1, math.inf),
    "norm": lambda: gg.ClipByNorm(0.1, 1.0),
    "value": lambda: gg.ClipByValue(0.1),
    "median": lambda: gg.ClipByMedian(),
    "AutoClip": lambda: gg.AutoClip(),
    "ZClip": lambda: gg.ZClip(),
    "AdaGC": lambda: gg.AdaGC(),
    "fraction": lambda: gg.ClipFraction(0.1),
    "groups": lambda: gg.Groups({"layer0": gg.ClipByGlobalNorm(0.1), "layer1": gg.ClipByMedian()}, rest=None),
    "groups of two orders": lambda: gg.Groups(
        {"layer0": gg.ClipByGlobalNorm(0.1, 1.0), "layer1": gg.ClipByNorm(0.1)}, rest=gg.ClipByGlobalNorm(1.0, 3.0)
    ),
    "groups of every layer": lambda: gg.Groups({f"layer{i}": gg.ClipByGlobalNorm(0.1) for i in range(5)}),
    "chain": lambda: gg.Chain(gg.ClipByGlobalNorm(0.1), gg.ClipByMedian(), gg.ClipByGlobalNorm(0.1, 1.0)),
}


def ran_by(call, entries, warm=True):
    """The collectives of one call, after another that has made the plan."""
    parameters = named(entries)
    if warm:
        call(parameters)
        renew(parameters, entries)
    with Collectives() as ran:
        call(parameters)
    return ran.names


def ran_by_call(name):
    return ran_by(CALLS[name], LISTS[LIST])


def ran_by_clipper(name, nonfinite="propagate"):
    clipper = CLIPPERS[name]()
    return ran_by(lambda parameters: clipper(parameters, nonfinite=nonfinite), LISTS[LIST])


def assert_all(by_rank, expected):
    assert by_rank == [expected] * len(by_rank)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
def test_one_all_reduce_for_each_call(pool, name):
    assert_all(pool(4).run(ran_by_call, name), ONE)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CLIPPERS)
def test_one_all_reduce_for_each_clipper(pool, name):
    assert_all(pool(4).run(ran_by_clipper, name), ONE)


@pytest.mark.parametrize("name", ["global norm", "norm", "AdaGC", "groups of every layer", "groups of two orders"])
def test_raise_takes_no_second_look(pool, name):
    assert_all(pool(4).run(ran_by_clipper, name, "raise"), ONE)


def ran_by_mixed_groups():
    """Of the 2-norm and the inf-norm: one sum, one maximum."""
    clipper = gg.Groups({"layer0": gg.ClipByGlobalNorm(0.1, math.inf), "layer1": gg.ClipByGlobalNorm(0.1)}, rest=None)
    kinds, real = [], dist.all_reduce

    def noted(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        kinds.append(str(op))
        return real(tensor, op, *args, **kwargs)

    dist.all_reduce = noted
    try:
        return ran_by(clipper, LISTS[LIST]), kinds[2:]
    finally:
        dist.all_reduce = real


def test_an_inf_rule_among_others_costs_one_maximum(pool):
    for names, kinds in pool(4).run(ran_by_mixed_groups):
        assert names == ONE * 2
        assert sorted(kinds) == ["RedOpType.MAX", "RedOpType.SUM"]


COSTLIER = {
    "a clamp, then a norm": (2, lambda: gg.Chain(gg.ClipByValue(0.1), gg.ClipByGlobalNorm(0.1))),
    "a clamp among groups": (2, lambda: gg.Groups({"layer0": gg.ClipByValue(0.1)}, rest=gg.ClipByGlobalNorm(0.1))),
    "groups, then a norm": (
        2,
        lambda: gg.Chain(gg.Groups({"layer0": gg.ClipByGlobalNorm(0.1)}, rest=None), gg.ClipByGlobalNorm(0.1)),
    ),
}
"""A clamp measures what it leaves, and a chain measures again behind each rule that is no factor."""


def ran_by_costlier(name):
    return ran_by(COSTLIER[name][1](), LISTS[LIST])


@pytest.mark.parametrize("name", COSTLIER)
def test_what_needs_more_than_one(pool, name):
    assert_all(pool(4).run(ran_by_costlier, name), ONE * COSTLIER[name][0])


def ran_by_clamp(name):
    return ran_by(lambda q: gg.clip_grad_value_(q, 0.1), LISTS[name], warm=False)


@pytest.mark.parametrize("name", ["rows, even", "fsdp x tp", "experts", "None on some ranks", "all None"])
def test_a_clamp_needs_no_other_process(pool, name):
    assert_all(pool(4).run(ran_by_clamp, name), [])


def ran_at_first():
    return ran_by(lambda q: gg.clip_grad_norm_(q, 0.1), LISTS[LIST], warm=False)


def test_a_plan_costs_one_all_gather(pool):
    assert_all(pool(4).run(ran_at_first), ["allgather_", "allreduce_"])


def unions_looked_for():
    """How often two calls work out who takes part, on a mesh of two dimensions; another list has another mesh."""
    gradients = [p.grad for _, p in named(LISTS["fsdp x tp"])]
    plan._unions.clear()
    with mock.patch.object(plan, "reduction_group_of", wraps=plan.reduction_group_of) as looked:
        norms = {float(gg.get_total_norm(gradients)) for _ in range(3)}
        first = looked.call_count
        gg.get_total_norm([p.grad for _, p in named(LISTS["hsdp"])])
    return len(norms), first, looked.call_count


def test_get_total_norm_keeps_who_takes_part(pool):
    assert pool(4).run(unions_looked_for) == [(1, 1, 2)] * 4


PRESENT = [(), (0,), (0, 1, 2, 3, 4), (1, 3), (4,), ()]
"""Positions without a gradient, step by step; two ranks also leave out rows of the third, theirs alone."""


def ran_while_gradients_come_and_go(call):
    entries = LISTS[LIST]
    parameters, ran = named(entries), []
    clipper = CLIPPERS[call]() if call in CLIPPERS else None
    for absent in PRESENT:
        renew(parameters, entries, {*absent, 2} if dist.get_rank() % 2 else {*absent})
        with Collectives() as block:
            (clipper or CALLS[call])(parameters)
        ran.append(block.names)
    return ran


@pytest.mark.parametrize("call", ["norm of order 2.0", "norm of order inf", "norm", "groups of two orders", "median"])
def test_the_collectives_do_not_depend_on_which_gradients_are_there(pool, call):
    for first, *later in pool(4).run(ran_while_gradients_come_and_go, call):
        assert first == ["allgather_", "allreduce_"]
        assert later == [ONE] * (len(PRESENT) - 1)


def ran_by_guard(optimizer, clipper, nonfinite, bad):
    entries = LISTS["hsdp"]
    parameters = named(entries)
    tensors = [p for _, p in parameters]
    make = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[optimizer]
    step = torch.optim.AdamW(tensors, lr=0.1, **make)
    guard = gg.Guard(step, CLIPPERS[clipper](), nonfinite=nonfinite, model=Module(parameters))
    ran = []
    for number in range(3):
        renew(parameters, entries)
        if bad and number == 1 and dist.get_rank() == 1:
            tensors[0].grad.to_local()[0, 0] = math.nan
        with Collectives() as block:
            step.step()
        ran.append(block.names)
    return ran, guard.skipped_steps


class Module(torch.nn.Module):
    def __init__(self, parameters):
        super().__init__()
        for name, p in parameters:
            layer = torch.nn.Module()
            layer.weight = p
            self.add_module(name.partition(".")[0], layer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("clipper", ["global norm", "groups of every layer", "value"])
@pytest.mark.parametrize("optimizer", ["plain", "foreach", "fused"])
def test_one_all_reduce_for_each_guarded_step(pool, optimizer, clipper, bad):
    for (first, *later), skipped in pool(4).run(ran_by_guard, optimizer, clipper, "skip", bad):
        assert first == ["allgather_", "allreduce_"]  # a plan, the clip
        assert later == [ONE, ONE]  # on a sick step too: the norm of each tells which gradients are not finite
        assert skipped == bad


def ran_over_one_process():
    parameters = [parameter(entry) for entry in LISTS["hsdp"]]
    with Collectives() as ran:
        gg.clip_grad_norm_(parameters, 0.1)
    return ran.names


def test_one_process_needs_no_collective(pool):
    assert_all(pool(1).run(ran_over_one_process), [])


def ran_by_summands():
    """How many all-reduces a list of two Partial gradients takes."""
    entries = LISTS["partial"]
    parameters = [parameter(entry) for entry in entries]
    gg.clip_grad_norm_(parameters, 0.1)
    for entry, p in zip(entries, parameters, strict=True):
        p.grad = parameter(entry).grad
    assert mesh("row").size() == dist.get_world_size()
    with Collectives() as ran:
        gg.clip_grad_norm_(parameters, 0.1)
    return ran.names


def test_summands_are_added_up_first(pool):
    """As documented: one that tells which there are, one for each Partial gradient, and the one of the norm."""
    for names in pool(4).run(ran_by_summands):
        assert len(names) == 1 + 4 + 1
        assert names[-1] == "allreduce_"
