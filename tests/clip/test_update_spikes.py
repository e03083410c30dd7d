"""`SkipSpikes(updates=True)`: a step whose update spikes is left out, before it is taken or by undoing it."""

import copy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradguard as gg
from gradguard.errors import InvalidTypeError

WARMUP = 12


class Own(torch.optim.Optimizer):
    """Of no library: a step that keeps a buffer and counts on itself."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * buffer)
        return loss


REHEARSED = {
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9),
    "Muon": lambda ps: torch.optim.Muon(ps, 0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
}
UNDONE = {"own": Own, "AdamW, by value": REHEARSED["AdamW, fused"], "SGD, closure": REHEARSED["SGD"]}
RULES = {"AdamW, by value": lambda: gg.ClipByValue(0.05)}


def made(kind, **options):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(3, 5))]
    optimizer = (REHEARSED | UNDONE)[kind](weights)
    spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=WARMUP, alone=1), **options)
    return weights, optimizer, gg.Guard(optimizer, RULES.get(kind, lambda: gg.ClipByGlobalNorm(1.0))(), spikes=spikes)


def step(kind, weights, optimizer, seed):
    """One step with gradients of norm 1 and a usual loss."""

    def gradients():
        draws = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(p.shape, generator=draws) for p in weights]
        whole = torch.cat([g.flatten() for g in drawn]).norm()
        for p, g in zip(weights, drawn, strict=True):
            p.grad = g / whole
        return torch.tensor(1.0)

    if "closure" in kind:
        optimizer.step(gradients)
    else:
        gradients()
        optimizer.step()


def held(weights, optimizer):
    """Weights, state and what the optimizer counts on itself."""
    state = {f"{i} {key}": value for i, p in enumerate(weights) for key, value in optimizer.state[p].items()}
    return copy.deepcopy({"weights": [w.detach() for w in weights], **state, "taken": getattr(optimizer, "taken", 0)})


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*REHEARSED, *UNDONE])
def test_a_step_whose_update_spikes_leaves_no_trace(kind):
    weights, optimizer, guard = made(kind, updates=True)
    for seed in range(20):
        step(kind, weights, optimizer, seed)
    assert guard.skipped_steps == 0
    before, rate = held(weights, optimizer), optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] = 30 * rate  # loss and gradients are as usual
    step(kind, weights, optimizer, 20)
    for group in optimizer.param_groups:
        group["lr"] = rate
    assert guard.last_skip == "spike"
    assert_same(held(weights, optimizer), before)
    step(kind, weights, optimizer, 21)
    assert (guard.skipped_steps, guard.last_skip, guard.steps) == (1, None, 22)
    assert not torch.equal(held(weights, optimizer)["weights"][0], before["weights"][0])


@pytest.mark.parametrize("kind", ["Adam", "own"])
def test_without_it_loss_and_gradients_tell_nothing(kind):
    weights, optimizer, guard = made(kind)
    for seed in range(20):
        step(kind, weights, optimizer, seed)
    optimizer.param_groups[0]["lr"] *= 30
    step(kind, weights, optimizer, 20)
    assert guard.skipped_steps == 0


def test_adam_spikes_where_its_squares_are_small():
    """Gradients that move to elements whose average of squares is still near 0, at the same norm."""
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.Adam([weight], 0.01)
    spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=WARMUP, alone=1), updates=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=spikes)
    for seed in range(61):
        signs = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        weight.grad = torch.zeros(64)
        weight.grad[32:] = 1e-6 * signs
        weight.grad[:32] = 0.1 * signs
        if seed == 60:
            weight.grad = weight.grad.flip(0)
        optimizer.step()
    assert guard.last_skip == "spike"
    assert guard.skipped_steps == 1


@pytest.mark.parametrize("kind", [*REHEARSED, *UNDONE])
def test_the_signal_is_the_size_of_the_step(kind):
    weights, optimizer, guard = made(kind, updates=True)
    calls = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(optimizer))
    try:
        for seed in range(5):
            before = [w.detach().clone() for w in weights]
            step(kind, weights, optimizer, seed)
            moved = (
                torch.cat([(w.detach() - b).flatten() for w, b in zip(weights, before, strict=True)]).double().norm()
            )
            seen = guard.spikes.detector.state["history"][-1, seed]
            torch.testing.assert_close(seen, moved, rtol=1e-6, atol=0)
    finally:
        handle.remove()
    assert calls == [optimizer] * 5


@pytest.mark.parametrize("kind", ["Adam", "own"])
def test_who_only_wants_to_know_is_told(kind):
    weights, optimizer, guard = made(kind, updates=True, act=False)
    for seed in range(21):
        optimizer.param_groups[0]["lr"] = 0.3 if seed == 20 else 0.01
        step(kind, weights, optimizer, seed)
    assert (guard.spikes.seen, guard.skipped_steps) == (1, 0)
    assert repr(guard.spikes) == "SkipSpikes(SpikeDetector(warmup=12, alone=1.0), updates=True, act=False)"


@pytest.mark.parametrize("kind", ["Adam", "own"])
def test_a_step_that_is_not_finite_is_no_spike(kind):
    weights, optimizer, guard = made(kind, updates=True)
    for seed in range(15):
        step(kind, weights, optimizer, seed)
    before = held(weights, optimizer)
    for p in weights:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert guard.last_skip == "nonfinite"
    assert_same(held(weights, optimizer), before)
    assert guard.spikes.seen == 0


def test_the_clipper_forgets_a_step_that_is_undone():
    weights, optimizer = [torch.nn.Parameter(torch.ones(4))], None
    optimizer = Own(weights)
    spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=WARMUP, alone=1), updates=True)
    guard = gg.Guard(optimizer, gg.ClipByMedian(warmup=4), spikes=spikes)
    for seed in range(20):
        step("own", weights, optimizer, seed)
    before = guard.clipper.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    step("own", weights, optimizer, 20)
    assert guard.last_skip == "spike"
    assert_same(guard.clipper.state_dict(), before)


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_loss_scale_the_signal_is_that_of_the_unscaled_step(fused):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = torch.optim.AdamW([weight], 0.01, fused=fused)
    spikes = gg.SkipSpikes(gg.SpikeDetector(warmup=4, alone=1), updates=True)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=spikes)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(8):
        before, optimizer.param_groups[0]["lr"] = weight.detach().clone(), 1.0 if seed == 7 else 0.01
        optimizer.zero_grad()
        drawn = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        scaler.scale((weight * drawn).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = (weight.detach() - before).double().norm()
        if seed < 7:
            torch.testing.assert_close(spikes.detector.state["history"][-1, seed], moved, rtol=1e-6, atol=0)
    assert guard.last_skip == "spike"
    assert moved == 0


class Mixed(torch.optim.Optimizer):
    """Two rules in one optimizer, by a setting of the group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad.sign() if group["by_sign"] else p.grad))


@pytest.mark.parametrize(
    ("name", "is_sensitive"),
    [
        ("SGD", True),
        ("ASGD", True),
        *((name, False) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adafactor", "RMSprop", "Muon")),
    ],
)
@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_groups_whose_step_depends_on_the_size_of_gradients_are_measured(name, is_sensitive, rate):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = getattr(torch.optim, name)([weight], lr=rate, weight_decay=0.1)
    before = weight.detach().clone()
    assert gg.scale_sensitive_groups(optimizer) == (optimizer.param_groups if is_sensitive else [])
    assert torch.equal(weight, before)
    assert weight.grad is None
    assert not optimizer.state


def test_a_clip_acts_on_the_groups_that_were_measured_alone():
    one, other = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = Mixed([{"params": [one], "by_sign": True}, {"params": [other], "by_sign": False}], {"lr": 1.0})
    (group,) = groups = gg.scale_sensitive_groups(optimizer)
    assert group["params"] == [other]
    gg.Guard(optimizer, gg.Groups([(groups, gg.ClipByGlobalNorm(1.0))], rest=None))
    one.grad, other.grad = torch.full((4,), 50.0), torch.full((4,), 50.0)
    optimizer.step()
    torch.testing.assert_close(one.grad, torch.full((4,), 50.0))
    torch.testing.assert_close(other.detach(), torch.full((4,), -0.5))


class Waiting(torch.optim.Optimizer):
    """Descends on every n-th step by the sum of gradients, which it keeps outside of its state."""

    def __init__(self, parameters, every):
        super().__init__(parameters, {"lr": 1.0})
        self.every, self.sums, self.calls = every, {}, [0]

    @torch.no_grad()
    def step(self, closure=None):
        self.calls[0] += 1
        for p in self.param_groups[0]["params"]:
            self.sums[p] = self.sums.get(p, 0) + p.grad
            if self.calls[0] % self.every == 0:
                p.sub_(self.sums.pop(p))


def test_an_optimizer_whose_first_steps_move_nothing_is_measured_later_and_stays_as_it_was():
    optimizer = Waiting([torch.nn.Parameter(torch.ones(2))], every=4)
    assert gg.scale_sensitive_groups(optimizer) == optimizer.param_groups
    assert (optimizer.sums, optimizer.calls) == ({}, [0])


def test_an_optimizer_that_moves_nothing_is_not_said_to_cancel_the_size_of_gradients():
    optimizer = Waiting([torch.nn.Parameter(torch.ones(2))], every=100)
    with pytest.raises(InvalidTypeError, match="or moves nothing: float division by zero"):
        gg.scale_sensitive_groups(optimizer)


def test_an_optimizer_that_cannot_be_stepped_on_a_tensor_is_refused():
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(InvalidTypeError, match="a trial step of this LBFGS on one tensor of ones is not possible"):
        gg.scale_sensitive_groups(optimizer)
