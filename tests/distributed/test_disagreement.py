"""Processes that do not act together: an error that says who and what, within the time-out, never a hang."""

import math
import os
import re

import pytest
import torch
import torch.distributed as dist
from pool import give_up_after
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import gradguard as gg
from cases import random
from gradguard.distributed import agreement
from gradguard.errors import DistributedError, InvalidTypeError, InvalidValueError, UnsupportedGradientError
from sharded import LISTS, Entry, laid_out, mesh, parameter

pytestmark = pytest.mark.sampled(2)  # rows of each table

TIMEOUT = 3.0
"""Of the process groups whose members wait in vain, from a moment at which all have come."""


# --- Another list on one rank: told at once ---------------------------------------------------------------------------


def plain_list():
    return [(f"layer{i}.weight", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]


def other_layout(named):
    return [*named[:2], (named[2][0], parameter(Entry(random(5, 3, seed=2), "columns")))]


def other_shape(named):
    return [named[0], ("layer1.weight", parameter(Entry(random(6)))), named[2]]


def other_dtype(named):
    return [*named[:2], (named[2][0], parameter(Entry(random(5, 3, dtype=torch.bfloat16))))]


CHANGES = {
    "order": (
        lambda q: [q[1], q[0], q[2]],
        r"parameter 0 is `layer1\.weight` \(shape \(9,\).* instead of `layer0",
    ),
    "fewer": (lambda q: q[:2], r"2 parameters instead of 3: it lacks `layer2\.weight` \(shape \(5, 3\), float32"),
    "one in the middle": (
        lambda q: [q[0], q[2]],
        r"parameter 1 is `layer2\.weight` .* instead of `layer1\.weight` .*\(of 2 instead of 3\)",
    ),
    "more": (lambda q: [*q, ("more", parameter(Entry(random(4))))], r"4 parameters instead of 3: it also has `more`"),
    "name": (lambda q: [*q[:2], ("other", q[2][1])], r"parameter 2 is `other` .* instead of `layer2\.weight`"),
    "shape": (other_shape, r"parameter 1 is .*shape \(6,\), float32.* instead of .*shape \(9,\), float32"),
    "dtype": (other_dtype, r"parameter 2 is .*shape \(5, 3\), bfloat16.* instead of .*shape \(5, 3\), float32"),
    "layout": (
        other_layout,
        r"parameter 2 is .*Shard\(dim=1\) over mesh dimension dp of 4.* instead of .*Shard\(dim=0\) over mesh",
    ),
}


def step_guarded(named):
    optimizer = torch.optim.SGD(named, lr=0.1)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1))
    optimizer.step()


CALLS = {
    "function": lambda named: gg.clip_grad_norm_(named, 0.1),
    "clipper": lambda named: gg.ClipByNorm(0.1)(named),
    "guard": step_guarded,
}


def clip_another_list(change, call):
    named = plain_list()
    before = [p.grad.to_local().clone() for _, p in named]
    tried = CHANGES[change][0](named) if dist.get_rank() == 2 else named
    try:
        CALLS[call](tried)
        said = "no error"
    except DistributedError as error:
        said = str(error)
    assert all(torch.equal(p.grad.to_local(), g) for (_, p), g in zip(named, before, strict=True))
    after = float(gg.clip_grad_norm_(plain_list(), math.inf))
    return said, after


@pytest.mark.sampled(12)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["function", "clipper", "guard"])
def test_another_list_on_one_rank_is_named(pool, change, call):
    """Nothing is written, no time-out waited for (`pool` does not wait that long), and they go on to work together."""
    after = torch.cat([e.gradient.flatten() for e in LISTS["rows, uneven"]]).norm().item()
    for said, norm in pool(4).run(clip_another_list, change, call):
        assert re.search(rf"rank 2 came with .* than rank 0: {CHANGES[change][1]}", said), said
        assert norm == pytest.approx(after, rel=1e-6)


def measure_another_number():
    gradients = [p.grad for _, p in plain_list()]
    gg.get_total_norm(gradients[: 2 + (dist.get_rank() == 0)])


def test_get_total_norm_of_another_number_of_gradients(pool):
    for error in pool(2).outcomes(measure_another_number):
        with pytest.raises(DistributedError, match=r"rank 1 came with .*: parameter 0 is 2 gradients instead of 3"):
            raise error


def frozen_on_one_rank():
    """A list of what requires a gradient differs where something is frozen."""
    named = plain_list()
    if dist.get_rank() == 1:
        named[0][1].requires_grad_(False)
    gg.clip_grad_norm_([(n, p) for n, p in named if p.requires_grad], 1.0)


def test_a_list_without_what_one_rank_has_frozen(pool):
    for error in pool(2).outcomes(frozen_on_one_rank):
        with pytest.raises(DistributedError, match=r"rank 1 came with .* parameter 0 is `layer1\.weight`"):
            raise error


# --- A rank that does not come ----------------------------------------------------------------------------------------


def one_stays_away(when, how):
    """Rank 1 does not clip in step ``when``; the others get an error."""
    if how != "leaves":  # then some learn of it before the time-out
        agreement._PATIENCE = TIMEOUT  # these processes are used once
    named = plain_list()
    for step in range(when + 1):
        if step == when:
            give_up_after(TIMEOUT)
        if step == when and dist.get_rank() == 1:
            if how == "leaves":
                os._exit(3)
            elif how == "raises":
                raise ArithmeticError("a loss that is not finite")
            else:
                return "went on"
        try:
            gg.clip_grad_norm_(named, 0.1)
        except DistributedError as error:
            return str(error)
    return "no error"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how", "kind"), [(0, "raises", ArithmeticError), (1, "leaves", RuntimeError), (1, "goes on", str)]
)
def test_a_rank_that_does_not_come_is_named(pool, when, how, kind):
    with pool.fresh(4) as processes:
        found = processes.outcomes(one_stays_away, when, how)
    assert isinstance(found.pop(1), kind)
    for said in found:
        assert "rank 1 did not come" in said
        assert "Every rank of the group must clip on the same steps" in said


def two_lists(crossed, same_length):
    """Two optimizers' lists, both known already; rank 1 clips the second first."""
    first = [parameter(entry) for entry in LISTS["rows, uneven"]]
    second = [parameter(Entry(random(6, 2))) for _ in range(3 if same_length else 2)]
    for listed in (first, second):
        gg.clip_grad_norm_(listed, math.inf)
    if not crossed:
        return "fine"
    if not same_length:  # nobody may notice before the time-out
        give_up_after(TIMEOUT)
    lists = (second, first) if dist.get_rank() == 1 else (first, second)
    try:
        for listed in lists:
            gg.clip_grad_norm_(listed, 0.1)
    except DistributedError as error:
        return str(error)
    return "no error"


def test_two_lists_in_another_order_on_one_rank(pool):
    with pool.fresh(2) as processes:
        assert processes.run(two_lists, False, True) == ["fine"] * 2
        found = processes.outcomes(two_lists, True, True)
    for said in found:
        assert "another rank clipped another list of gradients in this place" in said
        assert "the same order" in said


def test_two_lists_of_different_length_in_another_order(pool):
    with pool.fresh(2) as processes:
        found = processes.outcomes(two_lists, True, False)
    for said in found:
        assert "no error" not in str(said)
        assert "list of gradients" in said or "did not come" in said


# --- Arguments that cannot be meant: told before any collective -------------------------------------------------------


def one():
    return [parameter(Entry(random(7, 5)))]


def on_a_destroyed_mesh():
    named = plain_list()
    dist.destroy_process_group()
    gg.clip_grad_norm_(named, 1.0)


def on_a_destroyed_mesh_that_was_known():
    named = plain_list()
    gg.clip_grad_norm_(named, 1.0)
    dist.destroy_process_group()
    gg.clip_grad_norm_(named, 1.0)


def with_a_destroyed_group():
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    gg.clip_grad_norm_(one(), 1.0, process_group=group)


@pytest.mark.parametrize("function", [on_a_destroyed_mesh, on_a_destroyed_mesh_that_was_known, with_a_destroyed_group])
def test_a_destroyed_group(pool, function):
    with pool.fresh(2) as processes:
        for error in processes.outcomes(function):
            with pytest.raises(InvalidValueError, match=r"is destroyed.*destroy_process_group\(\)"):
                raise error


def without_me(call):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return
    if call == "function":
        gg.clip_grad_norm_(one(), 1.0, process_group=group)
    elif call == "clipper":
        gg.ClipByMedian()(one(), process_group=group)
    else:
        gg.Guard(torch.optim.SGD(one(), lr=0.1), gg.ClipByMedian(), process_group=group)


@pytest.mark.parametrize("call", ["function", "clipper", "guard"])
def test_a_group_without_this_process(pool, call):
    _, error = pool(2).outcomes(without_me, call)
    with pytest.raises(InvalidValueError, match=r"process_group does not contain this process \(rank 1\)"):
        raise error


def on_meshes_without_a_union():
    """Only rank 0, which both meshes hold, calls: it must not wait for anybody."""
    large, small = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 3])
    if dist.get_rank() > 0:
        return
    from torch.distributed.tensor import Shard, distribute_tensor

    parameters = []
    for where in (large, small):
        p = nn.Parameter(distribute_tensor(torch.zeros(6), where, [Shard(0)], src_data_rank=None))
        p.grad = distribute_tensor(torch.ones(6), where, [Shard(0)], src_data_rank=None)
        parameters.append(p)
    gg.clip_grad_norm_(parameters, 1.0)


def test_meshes_without_a_union(pool):
    error, *others = pool(4).outcomes(on_meshes_without_a_union)
    assert others == [None] * 3
    with pytest.raises(
        InvalidValueError, match=r"\[0, 1, 2\] and \[0, 3\], on meshes that are no slices of one.*init_device_mesh"
    ):
        raise error


def other_parameter():
    return {"embedding": nn.Parameter(torch.zeros(2))}


WRONG = {
    "two dimensions": (lambda: {"mesh": mesh("grid")}, InvalidValueError, r"mesh has 2 dimensions.*mesh\['pp'\]"),
    "both": (
        lambda: {"mesh": mesh("row"), "process_group": dist.group.WORLD},
        InvalidValueError,
        "process_group and mesh both name the pipeline stages: leave one out",
    ),
    "no mesh": (lambda: {"mesh": "pp"}, InvalidTypeError, r"mesh is str: expected a DeviceMesh"),
    "no group": (lambda: {"process_group": 1}, InvalidTypeError, "process_group is int: expected what dist.new_gr"),
    "shared alone": (
        lambda: {"shared": other_parameter()},
        InvalidValueError,
        "shared lists .* name the stages with process_group= or mesh=",
    ),
    "shared, not listed": (
        lambda: {"shared": other_parameter(), "mesh": mesh("row")},
        InvalidValueError,
        r"shared\['embedding'\] is not among the parameters",
    ),
    "shared, no tensors": (
        lambda: {"shared": "embedding", "mesh": mesh("row")},
        InvalidTypeError,
        "shared is str: expected a mapping from a name",
    ),
}


def clip_wrongly(name):
    gg.clip_grad_norm_(one(), 1.0, **WRONG[name][0]())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_cannot_be_meant(pool, name):
    for error in pool(2).outcomes(clip_wrongly, name):
        with pytest.raises(WRONG[name][1], match=WRONG[name][2]):
            raise error
    assert len(pool(2).run(two_lists, False, True)) == 2  # nobody waits for anybody


@pytest.mark.parametrize("argument", ["process_group", "mesh"])
def test_stages_on_one_process_without_groups(argument):
    with pytest.raises(InvalidValueError, match=r"not initialized: call init_process_group first, or omit"):
        gg.clip_grad_norm_(nn.Linear(2, 2), 1.0, **{argument: object()})


def on_another_mesh():
    p = parameter(Entry(random(6, 3)))
    with torch.no_grad():
        p.grad = laid_out(random(6, 3), "fsdp, tp columns")
    gg.clip_grad_norm_([("weight", p), ("other", parameter(Entry(random(3))))], 1.0)


def test_a_gradient_on_another_mesh(pool):
    for error in pool(2).outcomes(on_another_mesh):
        with pytest.raises(UnsupportedGradientError, match="the gradient of `weight` lies on another device mesh"):
            raise error
