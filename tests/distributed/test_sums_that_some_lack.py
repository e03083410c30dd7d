"""A gradient that only some processes have, or can take: all refuse, in words, and go on together."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from rules import RULES
from torch.distributed.tensor import DTensor, Partial, Shard

import gradguard as gg
from cases import random
from sharded import Entry, mesh, parameter

FULL = [random(6, 2), random(5, seed=1), random(3, seed=2)]


def listed():
    return [(f"layer{i}.weight", parameter(Entry(full))) for i, full in enumerate(FULL)]


def is_right(clip):
    """Tell whether the processes still measure together."""
    gradients = [p.grad for _, p in listed()]
    return math.isclose(float(clip(gradients)), float(torch.cat([f.flatten() for f in FULL]).norm()), rel_tol=1e-6)


LENGTHS = itertools.count(100)
"""Lengths of lists, each of which is new to the processes."""


def total_without(kind, who, other, order, first, length):
    """A sum that ``who`` lacks, or has laid out as ``other``; then what all have."""
    gradients = [p.grad for _, p in listed()] + [None] * (length - len(FULL))
    rows = gradients[0]
    if first == "known":
        gg.get_total_norm(gradients, order)
    summed = DTensor.from_local(torch.ones(6, 2), mesh("row"), [Partial(kind)])
    gradients[0] = {"None": None, "shard": rows}[other] if dist.get_rank() == who else summed
    said = [refusal(lambda: gg.get_total_norm(gradients, order)) for _ in range(2)]
    gradients[0] = summed
    summed, plain = torch.full((12,), 2.0 if kind == "sum" else 1.0), FULL[0].flatten()
    expected = [float(torch.cat([whole, *FULL[1:]]).norm(p=order)) for whole in (summed, plain)]
    found = [float(gg.get_total_norm(gradients, order)), float(gg.get_total_norm([rows, *gradients[1:]], order))]
    return said, all(map(partial(math.isclose, rel_tol=1e-6), found, expected))


@pytest.mark.parametrize("first", ["new", "known"])
@pytest.mark.parametrize("other", ["None", "shard"])
@pytest.mark.parametrize(("kind", "who", "order"), [("sum", 0, 2.0), ("avg", 1, 1.0), ("max", 1, math.inf)])
def test_a_total_norm_of_a_sum_that_one_lacks(pool, kind, who, other, order, first):
    """One process added it up with the other's norms, and both got a number; if it knew the list, they met no more."""
    for said, goes_on in pool(2).run(total_without, kind, who, other, order, first, next(LENGTHS)):
        for name, words in said:
            assert (name, "tensor 0 is a Partial sum on some of the ranks, and None" in words) == (
                "DistributedError",
                True,
            )
        assert goes_on


def total_of_integers(order):
    """Rank 1 has a gradient that cannot be measured."""
    gradients = [p.grad for _, p in listed()]
    if dist.get_rank() == 1:
        gradients[0] = DTensor.from_local(torch.ones(3, 2, dtype=torch.int32), mesh("row"), [Shard(0)])
    return refusal(lambda: gg.get_total_norm(gradients, order)), is_right(gg.get_total_norm)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_total_norm_that_one_process_refuses_is_refused_by_all(pool, order):
    """The other waited until the time-out of the process group."""
    (others, goes_on), (own, also) = pool(2).run(total_of_integers, order)
    assert (own[0], others[0]) == ("UnsupportedGradientError", "DistributedError"), (own, others)
    assert others[1] == f"rank 1 refuses, and so do the others: {own[1]}"
    assert (goes_on, also) == (True, True)


def value_then(after):
    """Rank 1 lacks a sum at one clip by value; ``after`` is the call to which it comes next."""
    named = listed()
    weight = named[0][1]
    for step in range(2):
        weight.grad = (
            None
            if dist.get_rank() == 1 and step == 0
            else DTensor.from_local(torch.ones(6, 2), mesh("row"), [Partial()])
        )
        call = gg.clip_grad_value_ if step == 0 or after == "value" else gg.clip_grad_norm_
        said = refusal(lambda call=call: call(named, 1.0))
        if said[0] != "no error":
            return said
    return said


@pytest.mark.parametrize("after", ["value", "norm"])
def test_a_clip_by_value_of_a_sum_that_one_lacks(pool, after):
    """Each process added up its gradients of this step with the other's of the next, from then on."""
    for name, words in pool(2).run(value_then, after):
        assert (name, "another rank clipped another list of gradients in this place" in words) == (
            "DistributedError",
            True,
        )


def guarded(named):
    optimizer = torch.optim.SGD(named, lr=0.0, foreach=False)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    optimizer.step()


CALLS = {
    "function": lambda named: gg.clip_grad_norm_(named, 1.0),
    "function, inf": lambda named: gg.clip_grad_norm_(named, 1.0, math.inf),
    "value, zero": lambda named: gg.clip_grad_value_(named, 1.0, nonfinite="zero"),
    "adaptive": lambda named: gg.clip_grad_adaptive_(named, 0.01),
    "guard": guarded,
    **{name: lambda named, make=make: make()(named) for name, make in RULES.items()},
}

BAD = {
    "an ordinary tensor": lambda p: torch.ones(6, 2),
    "another mesh": lambda p: DTensor.from_local(torch.ones(6, 2), mesh("hsdp")["shard"], [Shard(0)], run_check=False),
    "another dtype": lambda p: p.grad.to(torch.int32),
}


WAYS = [
    ("an ordinary tensor", "known"),
    ("another mesh", "new"),
    ("an ordinary tensor", "with a sum"),  # of which all processes ask each other at each clip
    ("another dtype", "with a sum"),
]


def refuse_one(call):
    return [refuse(call, bad, first) for bad, first in WAYS]


def refuse(call, bad, first):
    named, _ = listed(), mesh("hsdp")  # which all make
    if first != "new":
        CALLS[call](named)
    weight, last = named[0][1], named[-1][1]
    if first == "with a sum":
        last.grad = DTensor.from_local(FULL[-1], mesh("row"), [Partial("avg")])
        CALLS[call](named)
        last.grad = DTensor.from_local(FULL[-1], mesh("row"), [Partial("avg")])
    before = last.grad.full_tensor()
    if dist.get_rank() == 1:
        weight.grad_dtype = None
        weight.grad = BAD[bad](weight)
    said = refusal(lambda: CALLS[call](named))
    return said, torch.equal(last.grad.full_tensor(), before), is_right(gg.get_total_norm)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_that_one_process_refuses_is_refused_by_all(pool, call):
    """The others waited until the time-out of the process group."""
    for others, own in zip(*pool(2).run(refuse_one, call), strict=True):
        assert (own[0][0], others[0][0]) == ("UnsupportedGradientError", "DistributedError"), (own, others)
        assert others[0][1] == f"rank 1 refuses, and so do the others: {own[0][1]}"
        assert own[1:] == others[1:] == (True, True)
