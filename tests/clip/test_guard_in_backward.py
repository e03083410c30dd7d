"""Optimizers that step inside a backward pass, one for each parameter: what is clipped right, and what is refused."""

import copy
import math

import pytest
import torch
from guarded import assert_same, model, spoil
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from reference import EPSILON, total_norm

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
    with pytest.raises(UnsupportedGradientError, match=r"steps inside a backward pass.*ClipByPreviousNorm"):
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


# The norm of the step before


class Twin:
    """The rule in float64, on the gradients of a step that has come to its end."""

    def __init__(self, max_norm, p=2.0):
        self.max_norm, self.p, self.previous = max_norm, p, 0.0

    def clip_(self, gradients):
        norms = [total_norm([g], self.p) for g in gradients]
        for gradient, norm in zip(gradients, norms, strict=True):
            gradient.mul_(min(1.0, self.max_norm / (max(norm, self.previous) + EPSILON)))
        whole = total_norm([torch.tensor(norms)], self.p)
        self.previous = whole if math.isfinite(whole) else self.previous
        return whole


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("max_norm", [0.0, 0.8, INF])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_norm_of_the_step_before(optimizer, max_norm, p):
    ours, theirs = model(), model()
    clipper, twin = gg.ClipByPreviousNorm(max_norm, p), Twin(max_norm, p)
    guards, _ = step_in_backward(ours, OPTIMIZERS[optimizer], lambda: clipper)
    whole = OPTIMIZERS[optimizer](theirs.parameters())
    for step in range(5):
        loss_of(ours, step).backward()
        whole.zero_grad()
        loss_of(theirs, step).backward()
        norm = twin.clip_([p.grad for p in theirs.parameters()])
        whole.step()
        assert float(clipper.end_step()) == pytest.approx(norm, rel=1e-5, abs=0)
        assert float(clipper.previous_norm) == pytest.approx(twin.previous, rel=1e-5, abs=0)
        assert [bool(guard.last.clipped) for guard in guards] == [max_norm < INF] * 4 or max_norm == 0.8
    assert_same(list(ours.parameters()), list(theirs.parameters()), 2e-6)
    assert clipper.steps == 5


def test_direction_stays_and_no_tensor_exceeds_the_bound():
    net, clipper = model(), gg.ClipByPreviousNorm(1.0)
    seen = []
    for scale in (1.0, 1.1, 30.0):  # the last is a spike
        net.zero_grad()
        (scale * loss_of(net, 0)).backward()
        before = [p.grad.clone() for p in net.parameters()]
        clipper(net)
        clipper.end_step()
        ratios = [float(p.grad.norm() / g.norm()) for p, g in zip(net.parameters(), before, strict=True)]
        seen.append(max(ratios) / min(ratios))
        assert all(float(p.grad.norm()) <= 1 + 1e-5 for p in net.parameters())
    assert seen[1] == pytest.approx(1, rel=1e-5, abs=0)
    assert seen[2] > 2


def test_a_second_gradient_before_the_end_of_the_step_is_refused():
    net, clipper = model(), gg.ClipByPreviousNorm(1.0)
    step_in_backward(net, OPTIMIZERS["AdamW"], lambda: clipper)
    loss_of(net, 0).backward()
    with pytest.raises(InvalidValueError, match=r"`2.bias` has got a second gradient.*end_step\(\) after each"):
        loss_of(net, 1).backward()


def test_state_is_taken_between_steps_and_goes_on():
    nets = model(), model()
    clippers = gg.ClipByPreviousNorm(1.0), gg.ClipByPreviousNorm(1.0)
    for net, clipper in zip(nets, clippers, strict=True):
        loss_of(net, 1).backward()
        clipper(net)
    with pytest.raises(InvalidValueError, match=r"norms of 4 gradients: call end_step\(\)"):
        clippers[0].state_dict()
    clippers[0].end_step()
    resumed = gg.ClipByPreviousNorm(1.0)
    resumed.load_state_dict(copy.deepcopy(clippers[0].state_dict()))
    assert float(resumed.previous_norm) == float(clippers[0].previous_norm) > 0
    with pytest.raises(InvalidValueError, match="not of this ClipByPreviousNorm"):
        resumed.load_state_dict(gg.ClipByMedian().state_dict())


def test_a_guard_for_each_parameter_saves_and_loads_the_clipper_they_share():
    net, clipper = model(), gg.ClipByPreviousNorm(1.0)
    guards, _ = step_in_backward(net, OPTIMIZERS["AdamW"], lambda: clipper)
    loss_of(net, 0).backward()
    clipper.end_step()
    other, again = model(), gg.ClipByPreviousNorm(1.0)
    resumed, _ = step_in_backward(other, OPTIMIZERS["AdamW"], lambda: again)
    for guard, old in zip(resumed, guards, strict=True):
        guard.load_state_dict(old.state_dict())
    assert float(again.previous_norm) == float(clipper.previous_norm) > 0
    assert [guard.steps for guard in resumed] == [1] * 4


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


def test_groups_of_previous_norms_are_shared_and_each_follows_its_own():
    """As two rules on two halves of the model would, each by itself."""
    nets, bounds, seen = [model(), model()], {"0": 0.05, "rest": 0.2}, []
    names = [name for name, _ in nets[0].named_parameters()]
    groups = gg.Groups({"0": gg.ClipByPreviousNorm(0.05)}, rest=gg.ClipByPreviousNorm(0.2))
    alone = {label: gg.ClipByPreviousNorm(bound) for label, bound in bounds.items()}
    chosen = iter(alone["0"] if name.startswith("0.") else alone["rest"] for name in names)
    step_in_backward(nets[0], OPTIMIZERS["AdamW"], lambda: groups)
    step_in_backward(nets[1], OPTIMIZERS["AdamW"], lambda: next(chosen))
    for step in range(4):
        for net in nets:
            loss_of(net, step).backward()
        seen.append([[float(m.end_step()) for m in rules] for rules in (groups.members.values(), alone.values())])
    assert all(ours == theirs and min(ours) > 0 for ours, theirs in seen)
    torch.testing.assert_close(list(nets[0].parameters()), list(nets[1].parameters()), rtol=0, atol=0)


def test_a_run_that_goes_on_tells_of_the_lock_in_at_once():
    net, clipper, other = model(), gg.ClipByPreviousNorm(0.0), gg.ClipByPreviousNorm(0.0)
    other.load_state_dict(clipper.state_dict())
    assert other._locked_in is None  # nothing has been seen, as in a clipper that is new
    loss_of(net, 0).backward()
    for steps in (50, 60):
        for _ in range(steps):
            clipper(net)
            clipper.end_step()
        other.load_state_dict(clipper.state_dict())
        through, resumed = clipper(net).locked_in, other(net).locked_in
        clipper.end_step()
        assert bool(through) is bool(resumed) is (steps == 60)


def test_a_step_that_is_not_finite_and_one_without_gradients_leave_the_norm_known():
    net, clipper = model(), gg.ClipByPreviousNorm(INF)
    norms = []
    for bad in (False, True):
        net.zero_grad()
        loss_of(net, 0).backward()
        if bad:
            spoil(net)
        clipper(net)
        norms.append(float(clipper.end_step()))
    assert math.isnan(norms[1])
    assert float(clipper.previous_norm) == float(clipper.end_step()) == norms[0] > 0
    assert (int(clipper.steps), int(clipper.nonfinite_steps)) == (2, 1)


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
        with pytest.raises(NonFiniteGradientError, match="have stepped before in it stay stepped"):
            spoiled(net, 0).backward()
    else:
        spoiled(net, 0).backward()
        assert [guard.skipped_steps for guard in guards] == [int(policy == "skip"), 0, 0, 0]
    changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert changed[0] is False
    assert changed[2:] == [True, True]


def test_loading_a_state_forgets_what_has_come_of_a_failed_backward():
    weight = torch.nn.Parameter(torch.ones(2))
    clipper = gg.ClipByPreviousNorm(1.0)
    state = clipper.state_dict()
    weight.grad = torch.full((2,), 3.0)
    clipper([weight])
    clipper.load_state_dict(state)
    weight.grad = torch.full((2,), 4.0)
    clipper([weight])
    assert float(clipper.end_step()) == pytest.approx(4 * 2**0.5)


def test_processes_must_have_the_same_arguments():
    assert gg.ClipByPreviousNorm(1.0).settings() != gg.ClipByPreviousNorm(2.0).settings()
    assert gg.ClipByPreviousNorm(1.0).settings() != gg.ClipByPreviousNorm(1.0, 1.0).settings()
