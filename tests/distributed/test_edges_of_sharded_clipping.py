"""Sharded clipping at its edges: partial sums, tied gradients, changed dtypes, FSDP1 inside out."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from refusals import check_refusals, refusal
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from cases import random
from gradguard.distributed.reduction import buckets
from reference import clip_norm, total_norm
from sharded import Entry, local, mesh, parameter

# --- Gradients laid out unlike their parameters -----------------------------------------------------------------------

# A vector as long as the one that is added up: the two collectives, mixed up, would not even fail.
AS_LONG_AS_THE_SUMS = len(buckets(2.0, True)) + 3


def clip_partial_sums(numel, beside, dtype):
    """Summands on rank 0; rank 1 has no gradient until the clip gives it its part of the sum."""
    p = nn.Parameter(distribute_tensor(torch.zeros(numel, dtype=dtype), mesh("row"), [Replicate()]))
    norms = []
    for _ in range(3):
        summands = DTensor.from_local(torch.ones(numel, dtype=dtype), mesh("row"), [Partial()])
        p.grad = summands if dist.get_rank() == 0 else None
        others = [parameter(Entry(random(7, 3)))] if beside else []
        norms.append(float(gg.clip_grad_norm_([p, *others], 1.0)))
    return norms, local(p.grad)


@pytest.mark.parametrize(
    ("numel", "beside", "dtype"), [(16, True, torch.float32), (AS_LONG_AS_THE_SUMS, False, torch.float64)]
)
def test_partial_sums_that_another_rank_lacks(pool, numel, beside, dtype):
    """They timed out, or came out wrong: the sum of the gradients was taken for that of the norms."""
    (norms, gradient), (others, replica) = pool(2).run(clip_partial_sums, numel, beside, dtype)
    right = [torch.ones(numel, dtype=dtype), *([random(7, 3)] if beside else [])]
    assert norms == others == pytest.approx([total_norm(right)] * 3, rel=1e-6)
    torch.testing.assert_close(gradient, clip_norm(right, 1.0)[0].to(dtype))
    torch.testing.assert_close(replica, gradient)  # both hold the whole parameter, and step alike


def clip_one_gradient_of_two():
    one, two = parameter(Entry(random(7, 3))), parameter(Entry(random(7, 3)))
    two.grad = one.grad
    norm, measured = gg.clip_grad_norm_([one, two], 1.0), gg.get_total_norm([one.grad, two.grad])
    return float(norm), float(measured), float(one.grad.full_tensor().norm()), two.grad is one.grad


def test_one_gradient_of_two_parameters_counts_for_each_and_is_scaled_once(pool):
    for norm, measured, after, same in pool(2).run(clip_one_gradient_of_two):
        assert norm == pytest.approx(total_norm([random(7, 3)] * 2), rel=1e-6)
        assert measured == pytest.approx(1.0, rel=1e-5)
        assert after == pytest.approx(math.sqrt(0.5), rel=1e-5)
        assert not same


def clip_before_and_after_double(spread):
    """As float64, powers leave its range unless the plan is made anew."""
    layer = nn.Linear(4, 4, bias=False)
    if spread:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh("row"), [Shard(0)]))
    where = {} if spread else {"mesh": mesh("row")}
    norms = []
    for value in (1.0, 1e200):
        full = torch.full((4, 4), value, dtype=layer.weight.dtype)
        layer.weight.grad = distribute_tensor(full, mesh("row"), [Shard(0)]) if spread else full
        norms.append(float(gg.clip_grad_norm_(layer, math.inf, **where)))
        layer.double()
    return norms


@pytest.mark.parametrize(("spread", "copies"), [(True, 1), (False, 2)])
def test_a_model_that_becomes_float64_between_two_clips(pool, spread, copies):
    expected = [4.0 * math.sqrt(copies), 4e200 * math.sqrt(copies)]
    for norms in pool(2).run(clip_before_and_after_double, spread):
        assert norms == pytest.approx(expected, rel=1e-6)


# --- Wrappers that have not synchronized ------------------------------------------------------------------------------


def quietly(build, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return build(*args, **kwargs)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def fsdp1(original):
    """The network in FSDP1, its middle layer in one of its own; no gradients yet."""
    model = network()
    arguments = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model[1] = quietly(FullyShardedDataParallel, model[1], **arguments)
    return quietly(FullyShardedDataParallel, model, **arguments)


def ran(model, scale=1.0):
    quietly(model(torch.full((2, 5), scale)).square().sum().backward)
    return model


def step_guarded(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), model=model)
    optimizer.step()


CALLS = {
    "module": lambda m: gg.clip_grad_norm_(m, 1.0),
    "parameters": lambda m: gg.clip_grad_norm_(m.parameters(), 1.0),
    "value": lambda m: gg.clip_grad_value_(m, 1.0),
    "clipper": lambda m: gg.ClipByNorm(1.0)(m),
    "adaptive": lambda m: gg.clip_grad_adaptive_(m, 0.1),
    "guard": step_guarded,
    "mesh": lambda m: gg.clip_grad_norm_(m, 1.0, mesh=mesh("row")),
    "process_group": lambda m: gg.ClipByGlobalNorm(1.0)(m, process_group=dist.group.WORLD),
    "beside a DTensor": lambda m: gg.clip_grad_norm_([*m.parameters(), parameter(Entry(random(4, 2)))], 1.0),
}


def clip_in_no_sync(build, calls):
    model = build()
    with model.no_sync():
        ran(model, 1.0 + dist.get_rank())
        found = [refusal(CALLS[call], model) for call in calls]
    model.zero_grad()
    gg.clip_grad_norm_(ran(model), 1.0)  # and outside nothing is refused
    return found


def replicated_late():
    model = ran(network())
    gg.clip_grad_norm_(model, 1.0)
    model.zero_grad()
    return DistributedDataParallel(model)


def fsdp1_flat():
    return fsdp1(False)


def fsdp1_original():
    return fsdp1(True)


FSDP1_CALLS = ["module", "parameters", "value", "clipper", "guard"]


@pytest.mark.parametrize(
    ("build", "calls"),
    [(fsdp1_flat, FSDP1_CALLS), (fsdp1_original, FSDP1_CALLS), (replicated_late, list(CALLS))],
)
def test_nothing_is_clipped_inside_no_sync(pool, build, calls):
    """Norms differed from rank to rank: with FSDP1 and, of DistributedDataParallel, where it was wrapped late, was
    named with stages or listed beside shards."""
    kind = "FullyShardedDataParallel" if "fsdp1" in build.__name__ else "DistributedDataParallel"
    for found in pool(2).run(clip_in_no_sync, build, calls):
        check_refusals(found, "UnsupportedGradientError", rf"inside {kind}\.no_sync\(\).*outside no_sync\(\)")


def name_replicas_as_stages(argument):
    model = ran(DistributedDataParallel(network()))
    named = {"mesh": mesh("row")} if argument == "mesh" else {"process_group": model.process_group}
    return [refusal(lambda m=m: gg.clip_grad_norm_(m, 1.0, **named)) for m in (model, list(model.parameters()))]


@pytest.mark.parametrize("argument", ["mesh", "process_group"])
def test_replicas_are_no_stages(pool, argument):
    """Each gradient counted once for each replica."""
    for found in pool(2).run(name_replicas_as_stages, argument):
        check_refusals(found, "InvalidValueError", r"ranks \[0, 1\].*replicates them: leave process_group out")


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def measure_fsdp1(original):
    model = ran(fsdp1(original))
    lists = [[p.grad for p in model.parameters()], list(model.parameters()), dict(model.named_parameters())]
    return [refusal(gg.get_total_norm, listed) for listed in lists]


@pytest.mark.parametrize("original", [False, True])
def test_get_total_norm_refuses_what_fsdp1_keeps(pool, original):
    """It was the norm of one process' part."""
    for found in pool(2).run(measure_fsdp1, original):
        match = r"belongs to FullyShardedDataParallel \(FSDP1\).*clip_grad_norm_\(model, float\(\"inf\"\)\)"
        check_refusals(found, "UnsupportedGradientError", match)


EACH_BY_ITSELF = {
    "ClipByNorm": lambda: gg.ClipByNorm(0.05),
    "AdaGC": lambda: gg.AdaGC(warmup=1),
    "AdaGC in groups": lambda: gg.Groups({"*": gg.AdaGC(warmup=1)}),
}


def clip_each_of_fsdp1(rule):
    flat = refusal(EACH_BY_ITSELF[rule](), ran(fsdp1(False)))
    ours, theirs = EACH_BY_ITSELF[rule](), EACH_BY_ITSELF[rule]()
    model, twin, steps = fsdp1(True), network(), []
    for scale in (1.0, 3.0):
        for m in (model, twin):
            m.zero_grad()
            ran(m, scale)
        steps.append([(r.names, float(r.norm), float(r.coefficient)) for r in (ours(model), theirs(twin))])
    left = [float(gg.clip_grad_norm_(m, math.inf)) for m in (model, twin)]
    return flat, steps, left


@pytest.mark.parametrize("rule", EACH_BY_ITSELF)
def test_rules_that_need_each_parameter_by_itself(pool, rule):
    """FSDP1's flat parameter was clipped as one tensor. Names had FSDP1's additions, which no pattern fits."""
    for flat, steps, left in pool(2).run(clip_each_of_fsdp1, rule):
        check_refusals([flat], "UnsupportedGradientError", r"needs each parameter by itself.*use_orig_params=True")
        for (names, *ours), (right, *theirs) in steps:
            assert names == right
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert steps[-1][0][2] < 1
        assert left[0] == pytest.approx(left[1], rel=1e-5)


def names_of_fsdp1():
    return [gg.ClipByGlobalNorm(1.0)(ran(fsdp1(original))).names for original in (False, True)]


def test_names_are_without_what_fsdp1_adds(pool):
    for flat, original in pool(2).run(names_of_fsdp1):
        assert flat == ("_flat_param", "1._flat_param")
        assert sorted(original) == sorted(name for name, _ in network().named_parameters())


def clamp_fsdp1(original):
    listed = list(ran(fsdp1(original)).parameters())
    before = [None if p.grad is None else p.grad.clone() for p in listed]
    with Collectives() as block:
        gg.clip_grad_value_(listed, 0.05)
    pairs = [(p.grad, b.clamp(-0.05, 0.05)) for p, b in zip(listed, before, strict=True) if b is not None]
    return block.names, pairs, any((b.abs() > 0.05).any() for b in before if b is not None)


@pytest.mark.parametrize("original", [False, True])
def test_a_list_of_fsdp1s_parameters_can_be_clamped(pool, original):
    """It was refused, though a clamp needs no other process."""
    for collectives, pairs, clipped in pool(2).run(clamp_fsdp1, original):
        assert collectives == []
        assert clipped
        for gradient, right in pairs:
            torch.testing.assert_close(gradient, right, rtol=0, atol=0)


# --- Sums of squares and coefficients out of range -------------------------------------------------------------------

FAR = {
    "squares beyond float64 together": (torch.float64, [2e152, 2e152, 5e152], 1.0),
    "squares beyond float64 alone": (torch.float64, [1e200, 3e170, 1e-200], 1e-3),
    "squares below float64": (torch.float64, [3e-163, 2e-164, 1e-170], 1e-170),
    "a coefficient at the end of float64": (torch.float64, [1e300, 1e290, 1e300], 1e-4),
    "a coefficient beyond float32": (torch.float32, [3e38, 1e38, 3e38], 1e-4),
}


def clip_far(case, rule):
    dtype, sizes, bound = FAR[case]
    entries = [
        Entry(torch.full((96, 128), size, dtype=dtype), layout)
        for size, layout in zip(sizes, ("rows", "columns", "copies"), strict=True)
    ]
    parameters = [parameter(entry) for entry in entries]
    if rule == "norm":
        gg.clip_grad_norm_(parameters, bound)
    else:
        {"all": gg.ClipByGlobalNorm, "each": gg.ClipByNorm}[rule](bound)(parameters)
    return [local(p.grad) for p in parameters]


@pytest.mark.parametrize("rule", ["norm", "all", "each"])
@pytest.mark.parametrize("case", FAR)
def test_magnitudes_out_of_range(pool, case, rule):
    dtype, sizes, bound = FAR[case]
    square, spacing = 96 * 128, 2.0**-149 if dtype is torch.float32 else 2.0**-1074
    for rank in pool(2).run(clip_far, case, rule):
        for found, size in zip(rank, sizes, strict=True):
            largest = max(sizes)
            alone = size * math.sqrt(square)
            together = largest * math.sqrt(sum((s / largest) ** 2 * square for s in sizes))
            norm = alone if rule == "each" else together
            right = size / (norm + 1e-6) * bound if norm + 1e-6 > bound else size
            wanted = torch.full_like(found, right, dtype=torch.float64)
            torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=spacing)
