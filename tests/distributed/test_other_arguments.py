"""A rank that clips by another rule, or by other numbers: an error on every rank that names it; nothing is written."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from refusals import refusal

import gradguard as gg
from sharded import LISTS, local, parameter

WHO = 2
"""The rank that passes something else."""


def mine(usual, other):
    return other if dist.get_rank() == WHO else usual


def guarded(named, usual, other, policies=("skip", "skip")):
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    gg.Guard(optimizer, mine(usual, other), nonfinite=mine(*policies))
    optimizer.step()


def holder(parameter):
    """A module whose type does not tell which parameter it has."""
    module = torch.nn.Module()
    module.weight = parameter
    return module


CASES = {
    "max_norm": (lambda q: gg.clip_grad_norm_(q, mine(0.1, 0.2)), r"\('clip_grad_norm_', 0\.2, 2\.0, 'propagate'\)"),
    "max_norm, measured only": (lambda q: gg.clip_grad_norm_(q, mine(0.1, math.inf)), r"\('clip_grad_norm_', inf, "),
    "max_norm, a tensor": (
        lambda q: gg.clip_grad_norm_(q, torch.tensor(mine(1.0, 2.0))),
        r"\('clip_grad_norm_', 2\.0, 2\.0",
    ),
    "max_norm of the inf-norm": (
        lambda q: gg.clip_grad_norm_(q, mine(0.1, 0.2), math.inf),
        r"\('clip_grad_norm_', 0\.2, inf",
    ),
    "policy": (
        lambda q: gg.clip_grad_norm_(q, 0.1, nonfinite=mine("zero", "raise")),
        r"\(.*, 'raise'\) where .*'zero'\)",
    ),
    "bounds": (
        lambda q: gg.clip_grad_value_(q, mine(1.0, 2.0), nonfinite="zero"),
        r"\('clip_grad_value_', -2\.0, 2\.0, 'zero'\) where .* -1\.0, 1\.0",
    ),
    "adaptive": (lambda q: gg.clip_grad_adaptive_(q, mine(0.01, 0.02)), r"\('ClipAdaptive', 0\.02, 0\.001"),
    "a clipper's argument": (lambda q: gg.ClipByMedian(k=mine(3.0, 4.0))(q), r"\('ClipByMedian', 4\.0, 128"),
    "a member's argument": (
        lambda q: gg.Groups({"layer0": gg.ClipByNorm(mine(1.0, 2.0))}, rest=None)(q),
        r"\('Groups', 'layer0', 'ClipByNorm', 2\.0, 2\.0, 'rest', 'choice \w+ of parameters', 'propagate'\)",
    ),
    "a threshold to begin with": (
        lambda q: gg.ClipFraction(0.3, initial=mine(None, 2.0))(q),
        r"\('ClipFraction', 0\.3, 0\.2, 2\.0,",
    ),
    "what is excluded, by name": (
        lambda q: gg.ClipAdaptive(exclude=mine("layer0", "layer1"))(q),
        r"\('ClipAdaptive', 0\.01, 0\.001, 'layer1', 'choice .*'layer0'",
    ),
    "what is excluded, by identity": (
        lambda q: gg.ClipAdaptive(exclude=holder(q[mine(0, 1)][1]))(q),
        r"\('ClipAdaptive', 0\.01, 0\.001, 'a Module', 'choice \w{8} of parameters', 'propagate'\)",
    ),
    "what a member excludes, by identity": (
        lambda q: gg.Chain(gg.ClipByValue(1.0), gg.ClipAdaptive(exclude=holder(q[mine(0, 1)][1])))(q),
        r"\('Chain', 'ClipByValue'.*'choice \w{8} of parameters', 'propagate'\)",
    ),
    "what is in a group, by identity": (
        lambda q: gg.Groups([(holder(q[mine(0, 1)][1]), gg.ClipByNorm(1.0))], rest=None)(q),
        r"\('Groups', 'group 0', 'a Module', 'ClipByNorm', .*'choice \w{8} of parameters', 'propagate'\)",
    ),
    "what is exempt in a guard, by identity": (
        lambda q: guarded(q, *(gg.Groups([(q[i][1], None)], rest=gg.ClipByGlobalNorm(1.0)) for i in (0, 1))),
        r"\('Groups', 'group 0', 'a parameter of shape",
    ),
    "a guard's clipper": (
        lambda q: guarded(q, gg.ClipByGlobalNorm(1.0), gg.ClipByGlobalNorm(2.0)),
        r"\('ClipByGlobalNorm', 2\.0, 2\.0, 'skip'\) where rank 0 has \('ClipByGlobalNorm', 1\.0, 2\.0, 'skip'\)",
    ),
    "a guard's policy": (
        lambda q: guarded(q, gg.ClipByGlobalNorm(1.0), gg.ClipByGlobalNorm(1.0), ("skip", "propagate")),
        r"\(.*, 'propagate'\) where .*'skip'\)",
    ),
}


def clip(case):
    named = [(f"layer{i}", parameter(entry)) for i, entry in enumerate(LISTS["rows, uneven"])]
    before = [local(p.grad).clone() for _, p in named]
    said = refusal(CASES[case][0], named)
    assert all(torch.equal(local(p.grad), g) for (_, p), g in zip(named, before, strict=True))
    return said, float(gg.clip_grad_norm_(named, math.inf))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_clips_in_another_way_is_named(pool, case):
    expected = torch.cat([e.gradient.flatten() for e in LISTS["rows, uneven"]]).norm().item()
    for (kind, said), norm in pool(4).run(clip, case):
        assert kind == "DistributedError"
        assert re.search(rf"^rank {WHO} came with {CASES[case][1]}", said), said
        assert "every rank must clip by the same rule with the same arguments" in said
        assert norm == pytest.approx(expected, rel=1e-6)  # they go on to work together


ALIKE = {"a whole number": (1, 1.0), "a tensor": (1.0, torch.tensor(1.0)), "two zeros": (0.0, -0.0)}


def clip_alike(case):
    return float(gg.clip_grad_norm_([parameter(LISTS["rows, uneven"][0])], mine(*ALIKE[case])))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ALIKE)
def test_the_same_number_in_another_type_is_the_same(pool, case):
    assert len(set(pool(4).run(clip_alike, case))) == 1
