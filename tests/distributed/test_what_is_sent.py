"""What a clip sends: the norm and the share of each tensor, in one all-reduce; so every rank can name what was bad."""

import math

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from refusals import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import gradguard as gg
from cases import random
from sharded import Entry, laid_out, parameter

COUNT = 36
ENTRIES = [Entry(random(5, 3, seed=i), "rows" if i % 2 else "hsdp") for i in range(COUNT)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for i, entry in enumerate(ENTRIES):
            layer = nn.Module()
            layer.weight = parameter(entry)
            self.add_module(f"layer{i}", layer)

    def renew(self):
        for p, entry in zip(self.parameters(), ENTRIES, strict=True):
            p.grad = laid_out(entry.gradient, entry.layout)

    def spoil(self):
        """NaN in what rank 1 holds of one gradient."""
        if dist.get_rank() == 1:
            self.layer3.weight.grad.to_local().view(-1)[0] = math.nan


def lengths(call):
    """How many numbers each all-reduce of ``call`` takes."""
    found, real = [], dist.all_reduce

    def noted(tensor, *args, **kwargs):
        found.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        call()
    finally:
        dist.all_reduce = real
    return found


GROUPS = {f"layer{i}": gg.ClipByGlobalNorm(0.1) for i in range(3)}
EACH = 2 * COUNT + 5
"""A norm and a share of each tensor; whether replicas agree; which list it is, and by which rule."""

SENT = {
    "global norm": (lambda: gg.ClipByGlobalNorm(0.1), EACH),
    "a rule that remembers": (lambda: gg.ClipByMedian(), EACH),
    "chain": (lambda: gg.Chain(gg.ClipByGlobalNorm(0.1), gg.ClipByMedian(norm_type=1.0)), EACH + COUNT),
    "value": (lambda: gg.ClipByValue(0.1), EACH + 2 * COUNT),
    "three groups and the rest": (lambda: gg.Groups(GROUPS, rest=None), EACH),
    "rows that are whole": (lambda: gg.ClipAdaptive(0.01), 2 * (2 * COUNT + 1) + 5),
    "a rule for each": (lambda: gg.ClipByNorm(0.1), EACH),
    "another one": (lambda: gg.AdaGC(), EACH),
}


def sent(name):
    make, _ = SENT[name]
    model, clipper = Model(), make()
    clipper(model)
    model.renew()
    return lengths(lambda: clipper(model))


@pytest.mark.parametrize("name", SENT)
def test_how_many_numbers_a_clip_sends(pool, name):
    assert pool(4).run(sent, name) == [[SENT[name][1]]] * 4


def read_on_one_rank():
    """The others do not wait for it, and it does not wait for them."""
    model, clipper = Model(), gg.ClipByGlobalNorm(0.1)
    result = clipper(model)
    norms = None
    if dist.get_rank() == 0:
        with Collectives() as ran:
            norms = result.tensor_norms.tolist()
        assert ran.names == []
    return norms, result.culprits(), float(result.norm)


def test_one_rank_may_read_the_norm_of_each_tensor_alone(pool):
    expected = [e.gradient.norm().item() for e in ENTRIES]
    found = pool(4).run(read_on_one_rank)
    assert found[0][0] == pytest.approx(expected, rel=1e-6)
    for _, culprits, norm in found:
        assert culprits == {}
        assert norm == pytest.approx(math.hypot(*expected), rel=1e-6)


POLICIES = ["propagate", "raise", "zero"]


def culprits_of(policy):
    model, clipper = Model(), gg.ClipByGlobalNorm(0.1)
    model.spoil()
    if policy == "raise":
        return refusal(lambda: clipper(model, nonfinite=policy))
    return clipper(model, nonfinite=policy).culprits()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sick_step_names_its_parameters_on_every_rank(pool, policy):
    for rank, found in enumerate(pool(4).run(culprits_of, policy)):
        if policy == "raise":
            assert found[0] == "NonFiniteGradientError"
            assert "`layer3.weight`: " + ("1 of" if rank == 1 else "in the part of another process") in found[1]
        else:
            assert found == {"layer3.weight": int(rank == 1)}


def guarded(policy="skip", limit=20):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.1), model=model, nonfinite=policy, max_consecutive_skips=limit)
    model.renew()
    model.spoil()
    if policy == "raise" or limit == 0:
        return refusal(optimizer.step)
    optimizer.step()
    return guard.last.culprits()


def test_what_a_guard_skips_is_named(pool):
    for rank, culprits in enumerate(pool(4).run(guarded)):
        assert culprits == {"layer3.weight": int(rank == 1)}


@pytest.mark.parametrize(
    ("policy", "limit", "words"),
    [("raise", 20, "`layer3.weight`: "), ("skip", 0, "norm nan, not finite: layer3.weight")],
)
def test_errors_of_a_guard_name_what_was_not_finite(pool, policy, limit, words):
    for kind, said in pool(4).run(guarded, policy, limit):
        assert kind == "NonFiniteGradientError"
        assert words in said


def monitored_on_rank_0():
    model, lines = Model(), []
    guard = gg.Guard(torch.optim.SGD(model.parameters(), lr=0.1), gg.ClipByGlobalNorm(0.1), model=model)
    monitor = None
    for _ in range(2):
        model.renew()
        guard.optimizer.step()
        if dist.get_rank() == 0 and monitor is None:  # from the second step on
            monitor = gg.Monitor(guard, lines.append, model=model, every=1)
    if monitor is not None:
        monitor.close()
    return [line["norm"] for line in lines if line["t"] == "tensors"]


def test_a_monitor_of_a_guard_on_rank_0_gets_the_norms_whenever_it_is_made(pool):
    expected = [e.gradient.norm().item() for e in ENTRIES]
    tensors, *others = pool(4).run(monitored_on_rank_0)
    assert tensors == [pytest.approx(expected, rel=1e-3)]
    assert others == [[]] * 3


def sent_of_partial(kind):
    mesh = init_device_mesh("cpu", (4,))
    weight = nn.Parameter(distribute_tensor(random(8, 3), mesh, [Shard(0)]))
    weight.grad = DTensor.from_local(torch.ones(8, 3), mesh, [Partial(kind)], run_check=False)
    gg.clip_grad_norm_([weight], 1.0)  # agrees on the list
    weight.grad = DTensor.from_local(torch.ones(8, 3), mesh, [Partial(kind)], run_check=False)
    with Collectives() as ran:
        gg.clip_grad_norm_([weight], 1.0)
    return ran.names


@pytest.mark.parametrize(
    ("kind", "first"), [("sum", "reduce_scatter_tensor"), ("avg", "reduce_scatter_tensor"), ("max", "all_reduce")]
)
def test_partial_sums_of_a_shard_are_reduced_and_scattered_at_once(pool, kind, first):
    for names in pool(4).run(sent_of_partial, kind):
        assert names == ["allreduce_", first, "allreduce_"]
