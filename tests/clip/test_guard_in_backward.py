"""Optimizers that step inside a backward pass, one for each parameter: what is clipped right, and what is refused."""

import math

import pytest
import torch
from guarded import assert_same, model
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import InvalidValueError, NonFiniteGradientError, UnsupportedGradientError

INF = math.inf
OPTIMIZERS = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
}
PER_TENSOR = {
    "value": lambda: gg.ClipByValue(0.3),
    "norm": lambda: gg.ClipByNorm(0.5),
    "adaptive": lambda: gg.ClipAdaptive(0.05, exclude="2.bias"),
    "AdaGC": lambda: gg.AdaGC(absolute=INF, warmup=3),
    "chain": lambda: gg.Chain(gg.ClipByValue(2.0), gg.ClipByNorm(0.5)),
    "groups": lambda: gg.Groups({"0": gg.ClipByNorm(0.5), "2.bias": None}, rest=gg.ClipByValue(0.1)),
}
NEEDS_ALL = {
    "global norm": lambda: gg.ClipByGlobalNorm(1.0),
    "median": lambda: gg.ClipByMedian(),
    "AdaGC with its absolute threshold": lambda: gg.AdaGC(),
    "chain": lambda: gg.Chain(gg.ClipByValue(2.0), gg.ClipByGlobalNorm(1.0)),
    "groups": lambda: gg.Groups({"0": gg.ClipByNorm(0.5)}, rest=gg.ClipByGlobalNorm(0.1)),
}


def step_in_backward(net, optimizer, clipper_of, **options):
    """An optimizer and a guard for each parameter; returns the guards, and what takes the hooks away."""
    optimizers = {p: optimizer([p]) for p in net.parameters()}
    guards = [gg.Guard(o, clipper_of(), model=net, **options) for o in optimizers.values()]

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in net.parameters()]
    return guards, handles


def loss_of(net, step):
    inputs = torch.linspace(-2, 2, 12).view(4, 3) * (1 + step % 3)
    return 3 * net(inputs).square().sum()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PER_TENSOR)
def test_rules_for_each_tensor_do_what_they_do_after_the_backward(rule, optimizer):
    ours, theirs = model(), model()
    guards, _ = step_in_backward(ours, OPTIMIZERS[optimizer], PER_TENSOR[rule])
    whole = OPTIMIZERS[optimizer](theirs.parameters())
    twin = gg.Guard(whole, PER_TENSOR[rule](), model=theirs)
    for step in range(5):
        loss_of(ours, step).backward()
        whole.zero_grad()
        loss_of(theirs, step).backward()
        whole.step()
        norms = torch.stack([guard.last.norm for guard in guards]).double()
        torch.testing.assert_close(norms, twin.last.tensor_norms, rtol=1e-5, atol=1e-7)
        assert any(guard.last.clipped for guard in guards) or rule == "AdaGC"
        assert [guard.steps for guard in guards] == [step + 1] * 4
    assert_same(list(ours.parameters()), list(theirs.parameters()), 1e-6)


@pytest.mark.parametrize("rule", NEEDS_ALL)
def test_rules_that_need_all_gradients_are_refused(rule):
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    step_in_backward(net, OPTIMIZERS["AdamW"], NEEDS_ALL[rule])
    with pytest.raises(UnsupportedGradientError, match=r"steps inside a backward pass.*Use a rule for each tensor"):
        loss_of(net, 0).backward()
    assert_same(list(net.parameters()), before)


def test_the_backward_inside_a_reentrant_checkpoint_is_noticed():
    net = model()
    step_in_backward(net[0], OPTIMIZERS["AdamW"], lambda: gg.ClipByGlobalNorm(1.0))
    inner = checkpoint(net[0], torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    with pytest.raises(UnsupportedGradientError, match="steps inside a backward pass"):
        net[2](net[1](inner)).sum().backward()


def test_a_closure_that_computes_gradients_is_not_inside_a_backward():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert guard.steps == 1


def test_other_clippers_that_remember_are_not_shared():
    net, rule = model(), gg.ClipByNorm(1.0)
    with pytest.raises(InvalidValueError, match="belongs to the Guard of another optimizer"):
        step_in_backward(net, OPTIMIZERS["AdamW"], lambda: rule)


def test_members_that_remember_are_not_shared_either():
    rule = gg.ClipByMedian()
    together = [lambda: gg.Groups({"*": rule}), lambda: gg.Chain(rule, gg.ClipByValue(1.0))]
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(5)]
    first = gg.Guard(optimizers.pop(), together[0]())
    for make, optimizer in zip(together * 2, optimizers, strict=True):
        assert first.clipper is not make()
        with pytest.raises(InvalidValueError, match="this ClipByMedian belongs to the Guard of another optimizer"):
            gg.Guard(optimizer, make())


# Gradients that are not finite


class SpoilsWeight(torch.autograd.Function):
    """NaN for the gradient of the weight, and nothing for anybody else."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


def spoiled(net, step):
    weight = SpoilsWeight.apply(net[0].weight)
    inputs = torch.linspace(-2, 2, 12).view(4, 3) * (1 + step)
    return 3 * net[2](torch.tanh(nn.functional.linear(inputs, weight, net[0].bias))).square().sum()


@pytest.mark.parametrize("policy", ["skip", "zero", "raise"])
def test_what_is_not_finite_stops_the_step_of_its_own_tensor(policy):
    net = model()
    guards, _ = step_in_backward(net, OPTIMIZERS["SGD, momentum"], lambda: gg.ClipByNorm(1.0), nonfinite=policy)
    before = [p.detach().clone() for p in net.parameters()]
    if policy == "raise":
        with pytest.raises(NonFiniteGradientError, match="stepped earlier in it stay stepped"):
            spoiled(net, 0).backward()
    else:
        spoiled(net, 0).backward()
        assert [guard.skipped_steps for guard in guards] == [int(policy == "skip"), 0, 0, 0]
    changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert changed[0] is False
    assert changed[2:] == [True, True]
