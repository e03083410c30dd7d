"""`Guard` under every kind of parallelism: each step is that of the same network on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import WAYS, Network, backward, memory, models, whole

import gradguard as gg
from gradguard.errors import NonFiniteGradientError, UnsupportedGradientError
from reference import total_norm
from sharded import local, mesh

pytestmark = pytest.mark.sampled(1)  # rows of each table

STEPS, BAD = 6, 3
"""How many steps, and the one that holds a NaN."""

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}
CLIPPERS = {
    "global norm": lambda: gg.ClipByGlobalNorm(0.3),
    "median": lambda: gg.ClipByMedian(k=0.0, warmup=2),
    "median, what steps do": lambda: gg.ClipByMedian(update=0.003),
    "median, what steps do, inf": lambda: gg.ClipByMedian(update=0.003, norm_type=math.inf),
    "groups": lambda: gg.Groups(
        {"first": gg.ClipByGlobalNorm(0.2), "*head.*": gg.ClipByNorm(0.1)}, rest=gg.ClipByGlobalNorm(0.3, math.inf)
    ),
}


def spoil(model, way):
    """A NaN in what one process holds of one gradient; where it is no part of a larger whole, in each copy."""
    if dist.get_rank() in {"whole": range(4), "DDP": range(4), "TP": (1, 3)}.get(way.partition(",")[0], (1,)):
        part = next(part for p in model.parameters() if (part := local(p.grad)).numel())
        part.view(-1)[0] = math.nan


def train(way, optimizer, clipper, micro_batches=1, zero=False):
    """What each step did here, and on the twin; and the weights in the end."""
    model, twin = models(way)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    ours, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (inner, twin))
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns; pool.py has done it

        ours = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    guards = [
        gg.Guard(ours, CLIPPERS[clipper](), model=inner),
        gg.Guard(theirs, CLIPPERS[clipper](), model=twin),
    ]
    steps = []
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        backward(model, way, step, micro_batches)
        backward(twin, "whole", step)
        if step == BAD:
            spoil(inner, way)
            spoil(twin, "whole")
        expected = total_norm([whole(p.grad) for p in inner.parameters()])
        before = memory(ours)
        ours.step()
        theirs.step()
        if step == BAD:
            torch.testing.assert_close(memory(ours), before, rtol=0, atol=0)
        steps.append((expected, *(told(guard) for guard in guards)))
    weights = [[whole(p).detach().clone() for p in m.parameters()] for m in (inner, twin)]
    return steps, weights, guards[0].skipped_steps


def told(guard):
    last = guard.last
    return float(last.norm), float(last.coefficient), bool(last.clipped), list(last.culprits())


def check(by_rank, rtol):
    """The norms are true, the decisions those of all ranks and of the twin, and so are the weights."""
    steps, (weights, twins), skipped = by_rank[0]
    for other, (others, _), its_skipped in by_rank[1:]:
        assert [repr(s[1]) for s in other] == [repr(s[1]) for s in steps]
        torch.testing.assert_close(others, weights, rtol=0, atol=0)
        assert its_skipped == skipped
    assert skipped == 1
    for number, (expected, ours, theirs) in enumerate(steps):
        if number == BAD:
            assert math.isnan(ours[0])
            assert len(ours[3]) == 1
            continue
        assert ours[3] == []
        assert ours[0] == pytest.approx(theirs[0], rel=rtol)
        if expected is not None:
            assert ours[0] == pytest.approx(expected, rel=1e-6)
        assert ours[1] == pytest.approx(theirs[1], rel=rtol)
        assert ours[2] == theirs[2]
    assert {ours[2] for _, ours, _ in steps} >= {True}
    torch.testing.assert_close(weights, twins, rtol=rtol, atol=rtol / 10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_each_step_is_that_of_one_process(pool, way):
    check(pool(4).run(train, way, "SGD", "global norm"), 0.05 if "precision" in way else 2e-5)


@pytest.mark.parametrize("clipper", ["median", "groups"])
@pytest.mark.parametrize("way", ["FSDP2", "FSDP2 x TP", "DDP"])
def test_rules_that_remember_and_groups(pool, way, clipper):
    check(pool(4).run(train, way, "SGD", clipper), 2e-5)


@pytest.mark.parametrize("way", ["FSDP2 x TP", "HSDP", "TP, sequence", "DDP"])
def test_a_bound_on_what_steps_do_to_the_weights(pool, way):
    check(pool(4).run(train, way, "SGD", "median, what steps do"), 2e-5)


def test_such_a_bound_in_another_norm(pool):
    by_rank = pool(4).run(train, "FSDP2", "SGD", "median, what steps do, inf")
    check([([(None, *told) for _, *told in steps], *rest) for steps, *rest in by_rank], 2e-5)


@pytest.mark.parametrize("optimizer", ["AdamW, foreach", "AdamW, fused"])
@pytest.mark.parametrize("way", ["HSDP", "FSDP2 x TP"])
def test_every_optimizer(pool, way, optimizer):
    check(pool(4).run(train, way, optimizer, "global norm"), 2e-4)


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "HSDP"])
def test_accumulation(pool, way):
    check(pool(2).run(train, way, "SGD", "global norm", 2), 2e-5)


def test_zero_redundancy_optimizer(pool):
    check(pool(2).run(train, "DDP", "SGD", "global norm", 1, True), 2e-5)


def gradient_layouts():
    model, _ = models("TP, sequence")
    backward(model, "TP, sequence", 0)
    return {str(p.grad.placements) for name, p in model.named_parameters() if "norm" in name}


def test_gradients_of_norms_are_summands_under_sequence_parallelism(pool):
    """What the case above is there for."""
    assert pool(4).run(gradient_layouts) == [{"(Partial(sum),)"}] * 4


def raise_at_nan(way, optimizer):
    model, _ = models(way)
    step = OPTIMIZERS[optimizer](model.parameters())
    gg.Guard(step, gg.ClipByGlobalNorm(0.3), model=model, nonfinite="raise")
    backward(model, way, 0)
    spoil(model, way)
    before, gradients = memory(step), [local(p.grad).clone() for p in model.parameters()]
    try:
        step.step()
    except NonFiniteGradientError as error:
        torch.testing.assert_close(memory(step)[: len(gradients)], before[: len(gradients)], rtol=0, atol=0)
        after = [local(p.grad) for p in model.parameters()]
        torch.testing.assert_close(after, gradients, rtol=0, atol=0, equal_nan=True)
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("way", "optimizer"), [("FSDP2", "AdamW, fused"), ("HSDP", "SGD"), ("FSDP2 x TP", "AdamW, fused"), ("TP", "SGD")]
)
def test_raise_names_the_parameter_on_every_rank(pool, way, optimizer):
    for said in pool(4).run(raise_at_nan, way, optimizer):
        assert "`first.norm.weight`" in said
        assert "head" not in said


def resume():
    """A guard that goes on with the state of another after three steps."""
    found = []
    for stop in (None, 3):
        model, _ = models("FSDP2 x TP")
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        guard = gg.Guard(optimizer, CLIPPERS["median"](), model=model)
        norms = []
        for step in range(STEPS):
            if step == stop:
                state = guard.state_dict()
                guard.detach()
                guard = gg.Guard(optimizer, CLIPPERS["median"](), model=model)
                guard.load_state_dict(state)
            optimizer.zero_grad()
            backward(model, "FSDP2 x TP", step)
            optimizer.step()
            norms.append((told(guard), float(guard.last.threshold), guard.steps))
        found.append(norms)
    return found


def test_the_state_goes_on(pool):
    for through, resumed in pool(4).run(resume):
        assert repr(through) == repr(resumed)


def clip_inside_no_sync(call):
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if call == "guard":
        gg.Guard(optimizer, gg.ClipByGlobalNorm(0.3), model=model)
    with model.no_sync():
        model(torch.ones(2, 4, 6)).sum().backward()
        if call == "guard":
            optimizer.step()
        else:
            gg.clip_grad_norm_(model.parameters() if call == "parameters" else model, 0.3)


@pytest.mark.parametrize("call", ["module", "parameters", "guard"])
def test_gradients_that_are_not_averaged_yet_are_refused(pool, call):
    for error in pool(2).outcomes(clip_inside_no_sync, call):
        with pytest.raises(UnsupportedGradientError, match=r"inside DistributedDataParallel\.no_sync\(\).*Clip after"):
            raise error


def step_with_strides(fused, transposing):
    """The weight after steps on gradients that some ranks assigned transposed."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 8, bias=False)
    fully_shard(linear, mesh=mesh("row"))
    weight = linear.weight
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5))
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        part = torch.randn(local(weight).shape[::-1]).t()
        part = part if dist.get_rank() in transposing else part.contiguous()
        layout = {"shape": weight.shape, "stride": weight.stride()}
        weight.grad = DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False, **layout)
        optimizer.step()
    return whole(weight).detach().clone()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transposing", [(0, 1), (1,)])
def test_shards_laid_out_unlike_their_parameters_give_the_step_of_an_optimizer_that_is_not_fused(pool, transposing):
    fused, plain = (pool(2).run(step_with_strides, fused, transposing)[0] for fused in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
