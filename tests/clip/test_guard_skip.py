"""A step that is not finite does not happen: weights, state and counters stay to the bit, and training goes on."""

import dataclasses

import pytest
import torch
from guarded import ALL, PLAIN, Third, assert_same, clipper, held, model, put_gradients, spoil
from torch import nn

import gradguard as gg
from gradguard import Guard
from gradguard.clip.guard_counts import Counts
from gradguard.errors import NonFiniteGradientError, UnsupportedGradientError


@pytest.mark.parametrize("bad_steps", [(0, 1), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_leaves_every_bit(name, bad_steps):
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    guard, _ = Guard(a, clipper()), Guard(b, clipper())
    for step in range(5):
        put_gradients(ours, step)
        if step in bad_steps:
            spoil(ours, float("inf") if step % 2 else float("nan"))
            gradients = [p.grad for p in ours.parameters()]
            before = held(ours, a)
            a.step()
            assert_same(held(ours, a), before)
            assert all(p.grad is g for p, g in zip(ours.parameters(), gradients, strict=True))
        else:
            a.step()
            put_gradients(theirs, step)
            b.step()
    assert_same(held(ours, a), held(theirs, b))
    assert guard.skipped_steps == len(bad_steps)
    assert guard.steps == 5


@pytest.mark.parametrize("name", PLAIN)
def test_the_same_with_a_closure(name):
    net = model()
    optimizer = PLAIN[name](net.parameters())
    guard = Guard(optimizer, clipper())
    calls = []

    def closure(bad=False):
        calls.append(bad)
        put_gradients(net, len(calls))
        if bad:
            spoil(net)
        return torch.tensor(float(len(calls)))

    for bad in (True, False, True):
        before = held(net, optimizer)
        loss = optimizer.step(lambda bad=bad: closure(bad))
        assert float(loss) == len(calls)
        if bad:
            assert_same(held(net, optimizer), before)
    assert calls == [True, False, True]
    assert guard.skipped_steps == 2


class Quadratic(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self):
        curvature = torch.linspace(1, 9, 6)
        return (curvature * (self.weight - 0.3).square()).sum() + self.weight.pow(4).sum()


def lbfgs(net, **options):
    return torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=4, history_size=3, **options)


def search(net, optimizer, bad_at: int | None = None) -> int:
    """One step of LBFGS, with NaN at one of its evaluations; return how many there were."""
    evaluations = 0

    def closure():
        nonlocal evaluations
        optimizer.zero_grad()
        loss = net()
        loss.backward()
        if evaluations == bad_at:
            spoil(net)
        evaluations += 1
        return loss

    optimizer.step(closure)
    return evaluations


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad_at", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_lbfgs_is_undone_from_inside_its_search(line_search, bad_at, after):
    ours, theirs = Quadratic(), Quadratic()
    a, b = lbfgs(ours, line_search_fn=line_search), lbfgs(theirs, line_search_fn=line_search)
    guard, _ = Guard(a, clipper()), Guard(b, clipper())
    for _ in range(after):
        search(ours, a)
        search(theirs, b)
    before = held(ours, a)
    assert search(ours, a, bad_at) > bad_at
    assert_same(held(ours, a), before)
    assert guard.skipped_steps == 1
    for _ in range(3):  # and training goes on
        assert search(ours, a) == search(theirs, b)
    assert_same(held(ours, a), held(theirs, b))


def test_lbfgs_is_undone_though_its_first_step_had_nothing_to_do():
    net = Quadratic()
    optimizer = lbfgs(net)
    Guard(optimizer, clipper())

    def nothing():
        net.weight.grad = torch.zeros(6)
        return torch.zeros(())

    optimizer.step(nothing)
    before = held(net, optimizer)
    assert search(net, optimizer, bad_at=2) > 2
    assert_same(held(net, optimizer), before)


class Twice(Third):
    """Evaluates its closure a second time, at other weights, as SAM does; on some steps only."""

    often = True

    def step(self, closure=None):
        if self.often:
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(0.1)
                    self.state[p].setdefault("kept", [torch.zeros(2)])[0].add_(1)
        return super().step(closure)


def spoiled_at(net, bad_at: int | None):
    evaluations = []

    def closure():
        put_gradients(net, len(evaluations))
        if bad_at is not None and len(evaluations) >= bad_at:
            spoil(net)
        evaluations.append(1)
        return torch.zeros(())

    return closure


@pytest.mark.parametrize("bad_at", [0, 1])
def test_a_foreign_optimizer_that_evaluates_twice_is_undone(bad_at):
    net = model()
    optimizer = Twice(net.parameters())
    guard = Guard(optimizer, clipper())
    for _ in range(2):
        before = held(net, optimizer)
        optimizer.step(spoiled_at(net, bad_at))
        assert_same(held(net, optimizer), before)
        optimizer.step(spoiled_at(net, None))
    assert guard.skipped_steps == 2


def test_a_second_evaluation_that_nobody_expected_is_undone_too():
    net = model()
    optimizer = Twice(net.parameters())
    Guard(optimizer, clipper())
    optimizer.often = False
    optimizer.step(spoiled_at(net, None))
    optimizer.often = True
    before = held(net, optimizer)
    optimizer.step(spoiled_at(net, 1))
    assert_same(held(net, optimizer), before)


class DecaysFirst(torch.optim.Optimizer):
    """Touches weights and state without a look at the gradient, and asks for none to be there."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9).sub_(p.grad, alpha=0.1)
            self.state[p]["average"] = p * 0.5 + self.state[p].get("average", 0)


class Perturbs(torch.optim.Optimizer):
    """Like SAM: moves the weights, evaluates the closure once, moves them back where there is a gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.add_(1)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(1).sub_(p.grad, alpha=0.1)


def test_a_foreign_optimizer_that_decays_first_is_undone():
    net = model()
    optimizer = DecaysFirst(net.parameters())
    guard = Guard(optimizer, clipper())
    for bad in (None, 0, None, 0):
        net.zero_grad()
        spoiled_at(net, bad)()
        before = held(net, optimizer)
        optimizer.step()
        if bad is not None:
            assert_same(held(net, optimizer), before)
    assert guard.skipped_steps == 2


def test_an_optimizer_that_perturbs_the_weights_first_is_undone():
    net = model()
    optimizer = Perturbs(net.parameters())
    Guard(optimizer, clipper())
    for bad in (None, 0, None, 0):
        before = held(net, optimizer)
        optimizer.step(spoiled_at(net, bad))
        if bad is not None:
            assert_same(held(net, optimizer), before)


def test_a_line_search_that_meets_nan_is_undone():
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([weight], lr=0.5, line_search_fn="strong_wolfe")
    guard = Guard(optimizer, clipper(), max_consecutive_skips=3)
    evaluations = []

    def closure():
        optimizer.zero_grad()
        evaluations.append(1)
        loss = weight.pow(4).sum() * (float("nan") if len(evaluations) > 2 else 1.0)
        loss.backward()
        return loss

    before = weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(weight, before)
    assert guard.skipped_steps == 1


def test_what_hooks_set_on_the_optimizer_in_a_step_stays():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.steps_seen = 0
    optimizer.register_step_post_hook(
        lambda o, args, kwargs: setattr(optimizer, "steps_seen", optimizer.steps_seen + 1)
    )
    Guard(optimizer, clipper())
    for _ in range(3):
        net.zero_grad()
        spoiled_at(net, None)()
        optimizer.step()
    assert optimizer.steps_seen == 3


def test_a_closure_that_raises_leaves_the_guard_ready():
    net = model()
    optimizer = Third(net.parameters())
    guard = Guard(optimizer, clipper())

    def closure():
        raise ZeroDivisionError("in the closure")

    with pytest.raises(ZeroDivisionError, match="in the closure"):
        optimizer.step(closure)
    put_gradients(net, 0)
    optimizer.step()
    assert guard.steps == 1


def test_culprits_are_named_and_counted():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    guard = Guard(optimizer, clipper(), model=net)
    put_gradients(net, 0)
    net[0].weight.grad[:2, 0] = float("nan")
    net[2].bias.grad[1] = float("inf")
    optimizer.step()
    assert guard.last.culprits() == {"0.weight": 2, "2.bias": 1}
    assert bool(guard.last.nonfinite)


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum", "a foreign one"])
def test_a_cap_on_skips_in_a_row_raises_with_the_history(name):
    net = model()
    optimizer = ALL[name](net.parameters())
    guard = Guard(optimizer, clipper(), model=net, max_consecutive_skips=2)
    for bad in (True, True, False, True, True):
        put_gradients(net, 0)
        if bad:
            spoil(net)
        optimizer.step()
    put_gradients(net, 0)
    spoil(net)
    before = held(net, optimizer)
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row were skipped") as raised:
        optimizer.step()
    message = str(raised.value)
    assert "max_consecutive_skips is 2" in message
    assert "step 6: norm nan, not finite: 0.weight" in message
    assert "step 3" not in message
    assert_same(held(net, optimizer), before)
    assert next(net.parameters()).grad is not None
    assert guard.skipped_steps == 5


@pytest.mark.parametrize(("bad", "end"), [(5, "4.bias"), (7, "4.bias and 2 more")])
def test_the_history_names_five_gradients_and_counts_the_others(bad, end):
    net = nn.ModuleList(nn.Linear(1, 1) for _ in range(8))
    optimizer = torch.optim.SGD(net.parameters())
    Guard(optimizer, clipper(), model=net, max_consecutive_skips=0)
    for i, layer in enumerate(net):
        layer.bias.grad = torch.full((1,), torch.nan if i < bad else 1.0)
    with pytest.raises(NonFiniteGradientError, match=rf"not finite: 0\.bias, 1\.bias, 2\.bias, 3\.bias, {end}\n"):
        optimizer.step()


def test_the_cap_holds_on_the_device_path(monkeypatch):
    monkeypatch.setattr("gradguard.clip.guard.are_readable", lambda *tensors: False)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    Guard(optimizer, clipper(), model=net, max_consecutive_skips=1)
    put_gradients(net, 0)
    spoil(net)
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match="2 optimizer steps in a row"):
        optimizer.step()


def test_decisions_of_the_host_and_of_the_device_are_counted_together():
    counts, seen = Counts(limit=None), []
    for skip in (True, True, torch.tensor(True), True, torch.tensor(False), False, torch.tensor(True)):
        counts.decided(skip)
        seen.append((counts.skipped, counts.in_a_row))
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (4, 0), (4, 0), (5, 1)]


def test_a_spike_neither_lengthens_nor_ends_a_row_of_skips_once_the_device_counts():
    counts, seen = Counts(limit=None), []
    counts.decided(torch.tensor(True))
    for skip, spike in ((True, True), (True, False), (False, False), (True, True)):
        counts.decided(skip, spike)
        seen.append((counts.skipped, counts.in_a_row))
    assert seen == [(2, 1), (3, 2), (3, 0), (4, 0)]


def test_the_history_ends_where_a_state_is_loaded():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = Guard(optimizer, clipper(), model=net, max_consecutive_skips=2)
    state = guard.state_dict()

    def bad_step():
        put_gradients(net, 0)
        spoil(net)
        optimizer.step()

    bad_step()
    bad_step()
    guard.load_state_dict(state)
    bad_step()
    bad_step()
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row were skipped") as raised:
        bad_step()
    assert [str(raised.value).count(f"step {number}: norm nan") for number in (1, 2, 3)] == [1, 1, 1]


def test_without_a_cap_it_never_raises():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = Guard(optimizer, clipper(), max_consecutive_skips=None)
    put_gradients(net, 0)
    spoil(net)
    for _ in range(40):
        optimizer.step()
    assert guard.skipped_steps == 40


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam", "a foreign one"])
def test_propagate_is_what_pytorch_does(name):
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    Guard(a, clipper(), nonfinite="propagate")
    for net in (ours, theirs):
        put_gradients(net, 0)
        spoil(net)
    a.step()
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    b.step()
    assert_same(held(ours, a), held(theirs, b))


@pytest.mark.parametrize("name", ["AdamW, fused", "Adam", "a foreign one"])
def test_raise_names_the_parameters_and_changes_nothing(name):
    net = model()
    optimizer = ALL[name](net.parameters())
    Guard(optimizer, clipper(), model=net, nonfinite="raise")
    put_gradients(net, 0)
    spoil(net)
    before, gradients = held(net, optimizer), [p.grad.clone() for p in net.parameters()]
    with pytest.raises(NonFiniteGradientError, match=r"`0\.weight`: 1 of 12 elements NaN"):
        optimizer.step()
    assert_same(held(net, optimizer), before)
    assert_same([p.grad for p in net.parameters()], gradients)
    put_gradients(net, 0)
    optimizer.step()


def test_raise_inside_a_search_undoes_it():
    net = Quadratic()
    optimizer = lbfgs(net)
    Guard(optimizer, clipper(), nonfinite="raise")
    before = held(net, optimizer)
    with pytest.raises(NonFiniteGradientError, match="elements NaN"):
        search(net, optimizer, bad_at=2)
    assert_same(held(net, optimizer), before)


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("name", ["SGD, momentum, fused", "SGD, momentum", "a foreign one"])
def test_zero_steps_with_gradients_of_zero(name, readable, monkeypatch):
    if not readable:
        for place in ("clip.guard", "tensors.nonfinite"):
            monkeypatch.setattr(f"gradguard.{place}.are_readable", lambda *tensors: False)
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    Guard(a, clipper(), nonfinite="zero")
    for step in range(3):
        put_gradients(ours, step)
        put_gradients(theirs, step)
        if step == 1:
            spoil(ours)
            for p in theirs.parameters():
                p.grad.zero_()
        a.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        b.step()
    assert_same(held(ours, a), held(theirs, b), 1e-6)


def test_parameters_of_one_name_are_told_apart():
    first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    groups = [{"params": list(first.named_parameters())}, {"params": list(second.named_parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    guard = Guard(optimizer, gg.AdaGC(warmup=1))
    for size in (1.0, 1.0):
        first.weight.grad, second.weight.grad = torch.full((1, 2), size), torch.full((1, 2), 100 * size)
        optimizer.step()
    assert guard.last.names == ("param_groups[0]['params'][0]", "param_groups[1]['params'][0]")


LEARNING = {
    "median": lambda: gg.ClipByMedian(warmup=2),
    "zclip": lambda: gg.ZClip(warmup=2),
    "auto": lambda: gg.AutoClip(50),
    "fraction": lambda: gg.ClipFraction(0.1),
    "adagc": lambda: gg.AdaGC(warmup=2),
}


@pytest.mark.parametrize("bad_step", [0, 1, 4])
@pytest.mark.parametrize("rule", LEARNING)
def test_a_clipper_counts_what_is_not_finite_and_learns_nothing_of_it(rule, bad_step):
    """AdaGC's ``step`` is a count too, which only ``strict_paper=True`` goes by."""

    def learnt(state):
        return {name: one for name, one in state.items() if name not in ("counts", "step", "names")}

    net = model()
    guard = Guard(torch.optim.SGD(net.parameters(), lr=0.0), LEARNING[rule]())
    for step in range(6):
        put_gradients(net, step)
        before = guard.clipper.state_dict()
        if step == bad_step:
            spoil(net)
        guard.optimizer.step()
        after = guard.clipper.state_dict()
        if step == bad_step:
            counted = (after["counts"] - before["counts"]).tolist()
            assert counted[0] == counted[2] == 1
            if step:  # before that AdaGC has no averages
                torch.testing.assert_close(learnt(after), learnt(before), rtol=0, atol=0, equal_nan=True)
    assert guard.skipped_steps == 1
    assert repr(learnt(before)) != repr(learnt(after))


@dataclasses.dataclass
class Average:
    count: int
    mean: torch.Tensor
    of: torch.Tensor
    handle: object = None


class Averaging(torch.optim.Optimizer):
    """An optimizer whose state is an object of its own."""

    def __init__(self, params, handle=None):
        super().__init__(params, {"lr": 0.1})
        self.handle = handle

    @torch.no_grad()
    def step(self, closure=None):
        shared = self.state[self.param_groups[0]["params"][0]].setdefault("all", Average(0, torch.zeros(()), None))
        for p in self.param_groups[0]["params"]:
            self.state[p]["all"] = shared
            shared.count += 1
            held = self.state[p].setdefault("average", Average(0, torch.zeros_like(p), p, self.handle))
            held.count += 1
            held.mean.mul_(0.9).add_(p.grad)
            held.of.sub_(0.1 * held.mean / (1 - 0.9**held.count))


def test_a_skipped_step_leaves_objects_in_the_state():
    net, other = model(), model()
    guarded, plain = Averaging(net.parameters()), Averaging(other.parameters())
    guard = Guard(guarded, gg.ClipByGlobalNorm(1e9))
    for step in range(4):
        put_gradients(net, step)
        if step == 2:
            spoil(net)
        else:
            put_gradients(other, step)
            plain.step()
        guarded.step()
    assert guard.skipped_steps == 1
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert guarded.state[p]["average"].count == 3
        assert guarded.state[p]["average"].of is p
        assert guarded.state[p]["all"] is guarded.state[next(net.parameters())]["all"]
    assert guarded.state[p]["all"].count == plain.state[q]["all"].count


def test_an_object_in_the_state_that_cannot_be_copied_is_refused():
    net = model()
    optimizer = Averaging(net.parameters(), handle=(one for one in ()))
    Guard(optimizer, clipper())
    put_gradients(net, 0)
    optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    put_gradients(net, 1)
    spoil(net)
    with pytest.raises(UnsupportedGradientError, match="type Average in the optimizer's state cannot be copied"):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before))
