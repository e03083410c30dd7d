"""`ClipUpdate` under every kind of parallelism: each step is that of the same network on one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import WAYS, backward, models, whole

import gradguard as gg

RULES = {
    "rms": lambda: gg.ClipByRMS(0.3),
    "global norm": lambda: gg.ClipByGlobalNorm(2.0),
    "value": lambda: gg.ClipByValue(0.5),
    "adaptive": lambda: gg.ClipAdaptive(0.05),
    "median, a share of the weights": lambda: gg.ClipByMedian(update=0.003),
    "groups": lambda: gg.Groups({"first": gg.ClipByRMS(0.1)}, rest=gg.ClipByGlobalNorm(2.0)),
    "chain": lambda: gg.Chain(gg.ClipByValue(0.5), gg.ClipByGlobalNorm(1.0)),
}


def train(way, rule):
    """What each step's clip did here and on the twin, and the weights in the end."""
    model, twin = models(way)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.02, eps=1e-3, foreach=False) for m in (inner, twin))
    updates = [
        gg.ClipUpdate(ours, RULES[rule](), model=inner),
        gg.ClipUpdate(theirs, RULES[rule](), model=twin),
    ]
    steps = []
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        backward(model, way, step)
        backward(twin, "whole", step)
        ours.step()
        theirs.step()
        steps.append([(float(u.last.norm), float(u.last.coefficient), bool(u.last.clipped)) for u in updates])
    return steps, [[whole(p).detach().clone() for p in m.parameters()] for m in (inner, twin)]


def check(by_rank, rtol):
    steps, (weights, twins) = by_rank[0]
    for other, (others, _) in by_rank[1:]:
        assert other == steps
        torch.testing.assert_close(others, weights, rtol=0, atol=0)
    for ours, theirs in steps:
        assert ours[:2] == pytest.approx(theirs[:2], rel=rtol)
        assert ours[2] == theirs[2]
    assert any(ours[2] for ours, _ in steps)
    for weight, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(weight, twin, rtol=rtol, atol=rtol / 10)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", [way for way in WAYS if "precision" not in way])
def test_each_step_is_that_of_one_process(pool, way, rule):
    check(pool(4).run(train, way, rule), 2e-4)


def rms_of_a_shard():
    model, _ = models("FSDP2")
    for p in model.parameters():
        p.grad = torch.ones_like(p) * 3.0
    result = gg.ClipByRMS(1.0)(model)
    left = [float(whole(p.grad).square().mean().sqrt()) for p in model.parameters()]
    return dist.get_rank(), left, float(result.coefficient)


def test_the_mean_is_over_all_elements_of_a_tensor_that_processes_share(pool):
    for _, left, coefficient in pool(4).run(rms_of_a_shard):
        assert left == pytest.approx([1.0] * len(left), rel=1e-5)
        assert coefficient == pytest.approx(1 / 3, rel=1e-5)
