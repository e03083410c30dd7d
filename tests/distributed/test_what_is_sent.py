"""What a clip sends: what its decision needs; the norm of each tensor only if a rule or the user asks for it."""

import math

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from refusals import refusal
from torch import nn

import gradguard as gg
from cases import random
from gradguard.errors import DistributedError
from sharded import Entry, laid_out, parameter

COUNT = 6
ENTRIES = [Entry(random(5, 3, seed=i), "rows" if i % 2 else "hsdp") for i in range(COUNT)]
NOT_SENT = r"the norm of each tensor is not known: .* clipper\(model, tensor_norms=True\) or Guard"


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
    "global norm": (lambda: gg.ClipByGlobalNorm(0.1), {}, 2 * 2 + 5),  # two replication factors
    "a rule that remembers": (lambda: gg.ClipByMedian(), {}, 2 * 2 + 5),
    "chain": (lambda: gg.Chain(gg.ClipByGlobalNorm(0.1), gg.ClipByMedian(norm_type=1.0)), {}, 3 * 2 + 5),
    "value": (lambda: gg.ClipByValue(0.1), {}, 4 * 2 + 5),
    "three groups and the rest": (lambda: gg.Groups(GROUPS, rest=None), {}, 2 * (3 + 2) + 5),
    "a group whose rule needs each": (
        lambda: gg.Groups({"layer[0-3]": gg.ClipByNorm(0.1)}, rest=gg.ClipByGlobalNorm(0.1)),
        {},
        2 * (4 + 2) + 5,
    ),
    "rows that are whole": (lambda: gg.ClipAdaptive(0.01), {}, 2 * (2 + 2 + 1) + 5),
    "a rule that needs each": (lambda: gg.ClipByNorm(0.1), {}, EACH),
    "another one": (lambda: gg.AdaGC(), {}, EACH),
    "on demand": (lambda: gg.ClipByGlobalNorm(0.1), {"tensor_norms": True}, EACH),
    "groups, on demand": (lambda: gg.Groups(GROUPS, rest=None), {"tensor_norms": True}, EACH),
}


def sent(name):
    make, options, _ = SENT[name]
    model, clipper = Model(), make()
    clipper(model, **options)
    model.renew()
    return lengths(lambda: clipper(model, **options))


@pytest.mark.parametrize("name", SENT)
def test_how_many_numbers_a_clip_sends(pool, name):
    assert pool(4).run(sent, name) == [[SENT[name][2]]] * 4


def read_on_one_rank():
    """The others do not wait for it, and it does not wait for them."""
    model, clipper = Model(), gg.ClipByGlobalNorm(0.1)
    result = clipper(model)
    said = None
    if dist.get_rank() == 0:
        with Collectives() as ran:
            said = refusal(lambda: result.tensor_norms)
        assert ran.names == []
    model.renew()
    asked = clipper(model, tensor_norms=True)
    return said, result.culprits(), asked.tensor_norms.tolist(), float(result.norm)


def test_reading_what_was_not_sent_is_an_error_in_words(pool):
    first, *_ = found = pool(4).run(read_on_one_rank)
    assert first[0][0] == "DistributedError"
    with pytest.raises(DistributedError, match=NOT_SENT):
        raise DistributedError(first[0][1])
    expected = [e.gradient.norm().item() for e in ENTRIES]
    for _, culprits, norms, norm in found:
        assert culprits == {}
        assert norms == pytest.approx(expected, rel=1e-6)
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


def guarded(asks, policy="skip", bad=False, limit=20):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(
        optimizer,
        gg.ClipByGlobalNorm(0.1),
        model=model,
        nonfinite=policy,
        tensor_norms=dist.get_rank() in asks,
        max_consecutive_skips=limit,
    )
    model.renew()
    if bad:
        model.spoil()
    if policy == "raise" or limit == 0:
        return refusal(optimizer.step)
    optimizer.step()
    return (
        refusal(lambda: guard.last.tensor_norms),
        guard.last.culprits(),
        refusal(lambda: setattr(guard, "tensor_norms", True)),
    )


@pytest.mark.parametrize("asks", [(), (0,), (0, 1, 2, 3)])
def test_a_guard_sends_norms_of_each_if_any_rank_wants_them_at_its_first_step(pool, asks):
    """Rank 0 alone may have a monitor."""
    for norms, culprits, late in pool(4).run(guarded, asks):
        assert norms[0] == ("no error" if asks else "DistributedError")
        assert culprits == {}
        assert late[0] == ("no error" if asks else "InvalidValueError")
        assert asks or "this Guard has stepped already" in late[1]


def test_what_a_guard_skips_is_named(pool):
    for rank, (_, culprits, _) in enumerate(pool(4).run(guarded, (), "skip", True)):
        assert culprits == {"layer3.weight": int(rank == 1)}


@pytest.mark.parametrize(
    ("policy", "limit", "words"),
    [("raise", 20, "`layer3.weight`: "), ("skip", 0, "norm nan, not finite: layer3.weight")],
)
def test_errors_of_a_guard_name_what_was_not_finite(pool, policy, limit, words):
    for kind, said in pool(4).run(guarded, (), policy, True, limit):
        assert kind == "NonFiniteGradientError"
        assert words in said


def monitored_on_rank_0():
    model, lines = Model(), []
    guard = gg.Guard(torch.optim.SGD(model.parameters(), lr=0.1), gg.ClipByGlobalNorm(0.1), model=model)
    monitor = gg.Monitor(guard, lines.append, model=model, every=1) if dist.get_rank() == 0 else None
    for _ in range(2):
        model.renew()
        guard.optimizer.step()
    if monitor is not None:
        monitor.close()
    late = refusal(lambda: gg.Monitor(unwatched(), [].append))
    return [line["norm"] for line in lines if line["t"] == "tensors"], late


def unwatched():
    model = Model()
    guard = gg.Guard(torch.optim.SGD(model.parameters(), lr=0.1), gg.ClipByGlobalNorm(0.1), model=model)
    guard.optimizer.step()
    return guard


def test_a_monitor_of_a_guard_on_rank_0_gets_the_norms(pool):
    expected = [e.gradient.norm().item() for e in ENTRIES]
    (tensors, _), *others = found = pool(4).run(monitored_on_rank_0)
    assert tensors == [pytest.approx(expected, rel=1e-3)] * 2
    assert [t for t, _ in others] == [[]] * 3
    for _, (kind, said) in found:
        assert kind == "InvalidValueError"
        assert "this Guard has stepped already" in said
