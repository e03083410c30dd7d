"""`ClipByMedian` under a guard that knows what a step does to the weights, against a twin in plain floats."""

import copy
import math
import statistics

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.clip.guards_of_a_script import ClipEachOptimizer
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.threshold_rules import Median


class Twin:
    """The rule as its docstring has it, in lists and plain floats, from the weights and the groups of each step."""

    def __init__(self, update=0.1, warmup=32, order=2.0):
        self.update, self.warmup, self.order = update, warmup, order
        self.norms, self.held = [], 0

    def norm(self, values):
        values = [abs(v) for v in values]
        return max(values) if math.isinf(self.order) else sum(v**self.order for v in values) ** (1 / self.order)

    def rate(self, group):
        damped = (1 - group["dampening"]) / math.sqrt(1 - group["momentum"] ** 2) if group["momentum"] else 1.0
        return float(group["lr"]) * max(1.0, damped)

    def step(self, groups):
        with_grad = [(p, g) for g in groups for p in g["params"] if p.grad is not None]
        n = self.norm([v for p, _ in with_grad for v in p.grad.flatten().tolist()])
        moving = [v for p, g in with_grad if self.rate(g) > 0 for v in p.detach().flatten().tolist()]
        longest = self.norm(moving) / max(map(self.rate, groups)) if moving else 0.0
        bound = self.update / (1 + self.held / 16) * longest if 0 < longest < math.inf else math.inf
        logs = [math.log(x) for x in self.norms[-128:]]
        middle = statistics.median(logs) if logs else math.log(n)
        if len(self.norms) < self.warmup:
            threshold = 3 * math.exp(middle) if logs else n
            self.norms.append(min(n, threshold))
        else:
            spread = 1.4826 * statistics.median(abs(x - middle) for x in logs)
            threshold = math.exp(middle + 6 * max(spread, 0.05))
            self.norms.append(n)
        self.held = self.held + 1 if n > bound else max(0, self.held - 1)
        return min(threshold, bound)


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def backward(model, step, scale=1.0):
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=draws, dtype=torch.float64).to(next(model.parameters()).dtype)
    model.zero_grad()
    (scale * (model(3 * x) - x.sum(1, keepdim=True)).square().mean()).backward()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **options)


OPTIMIZERS = {
    "plain": lambda m: sgd(m, lr=0.05),
    "momentum": lambda m: sgd(m, lr=0.02, momentum=0.9),
    "dampening": lambda m: sgd(m, lr=0.05, momentum=0.9, dampening=0.5),
    "dampening without momentum": lambda m: sgd(m, lr=0.05, dampening=0.5),
    "nesterov": lambda m: sgd(m, lr=0.02, momentum=0.5, nesterov=True),
    "a tensor": lambda m: sgd(m, lr=torch.tensor(0.05, dtype=torch.float64)),
    "two rates": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.2}, {"params": m[2].parameters(), "momentum": 0.9}], lr=0.01
    ),
    "a group at rest": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2].parameters()}], lr=0.1
    ),
    "fused": lambda m: sgd(m, lr=0.05, fused=True),
}


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_the_twins(name, order):
    model = network()
    optimizer, twin = OPTIMIZERS[name](model), Twin(update=0.02, warmup=6, order=order)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=0.02, warmup=6, norm_type=order))
    held = []
    for step in range(40):
        for group in optimizer.param_groups:  # a schedule
            group["lr"] = group["lr"] * (0.5 if step == 20 else 1.0)
        backward(model, step, 50.0 if step == 30 else 1.0)
        expected = twin.step(optimizer.param_groups)
        optimizer.step()
        assert float(guard.last.threshold) == pytest.approx(expected, rel=1e-9)
        assert bool(guard.last.clipped) == (float(guard.last.norm) > expected)
        held.append(twin.held)
    assert float(guard.clipper.state["held"]) == twin.held
    assert max(held) > 3


def test_the_rule_on_plain_numbers_is_the_clippers():
    model = network()
    optimizer, plain = sgd(model, lr=0.05), Median(update=0.02)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=0.02))
    for step in range(60):
        backward(model, step)
        longest = math.hypot(*[float(p.detach().norm()) for p in model.parameters()]) / 0.05
        optimizer.step()
        norm = float(guard.last.norm)
        assert float(guard.last.threshold) == pytest.approx(plain.choose(norm, longest=longest), rel=1e-9)


def losses(rule, scale, steps=150):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = sgd(model, lr=0.05)
    guard = None if rule is None else gg.Guard(optimizer, rule)
    told, bound = [], 0
    for _ in range(steps):
        x = scale * torch.randn(32, 10)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(float(loss.detach()))
        bound += guard is not None and bool(guard.last.clipped)
    return statistics.median(told[-20:]), bound


def test_a_run_that_diverges_from_its_first_step_is_held():
    free, habit, ours, by_norms = (
        losses(rule, 5.0)[0]
        for rule in (None, gg.ClipByGlobalNorm(1.0), gg.ClipByMedian(), gg.ClipByMedian(update=None))
    )
    assert not free < 1e3
    assert ours < 2 * habit
    assert not by_norms < 10 * ours


def test_a_run_at_a_rate_that_it_bears_is_left_alone():
    free, _ = losses(None, 0.5)
    assert losses(gg.ClipByMedian(), 0.5) == (free, 0)


class Foreign(torch.optim.SGD.__base__):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.0, "dampening": 0.0})

    def step(self, closure=None):
        return None


@pytest.mark.parametrize("kind", [Foreign, torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, 1.0)])
def test_another_optimizer_starts_gently(kind):
    model = network()
    optimizer, plain = kind(model.parameters()), Median()
    guard = gg.Guard(optimizer, gg.ClipByMedian())
    backward(model, 0)
    optimizer.step()
    assert float(guard.last.threshold) == pytest.approx(plain.choose(float(guard.last.norm)), rel=1e-6)
    assert float(guard.last.coefficient) == pytest.approx(0.1, rel=1e-6)


def test_without_a_guard_and_without_a_bound_the_rule_knows_norms_alone():
    model, other = network(), network()
    by_hand, plain = gg.ClipByMedian(), Median()
    optimizer = sgd(other, lr=0.05)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=None))
    for step in range(40):
        backward(model, step)
        backward(other, step)
        result = by_hand(model)
        optimizer.step()
        assert torch.equal(result.threshold, guard.last.threshold)
        assert float(result.threshold) == pytest.approx(plain.choose(float(result.norm)), rel=1e-9)
        other.load_state_dict(model.state_dict())


def test_a_clipper_that_has_left_its_guard_forgets_what_that_knew():
    model = network()
    clipper = gg.ClipByMedian()
    with gg.Guard(sgd(model, lr=1e-9), clipper):
        pass
    backward(model, 0)
    assert float(clipper(model).coefficient) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrap", [lambda c: gg.Chain(c), lambda c: gg.Chain(gg.ClipByValue(1e9), c), lambda c: gg.Groups({"*": c})]
)
def test_inside_other_clippers(wrap):
    model, alone = network(), network()
    clipper = gg.ClipByMedian(update=0.01)
    optimizers = sgd(model, lr=0.05), sgd(alone, lr=0.05)
    gg.Guard(optimizers[0], wrap(clipper), model=model)
    gg.Guard(optimizers[1], gg.ClipByMedian(update=0.01), model=alone)
    for step in range(12):
        backward(model, step)
        backward(alone, step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-9, atol=0)
    assert float(clipper.state["held"]) > 3


def test_a_group_is_bounded_by_its_own_weights():
    model = network()
    optimizer = sgd(model, lr=0.05)
    clippers = {"0": gg.ClipByMedian(update=0.01), "2": gg.ClipByMedian(update=0.01)}
    gg.Guard(optimizer, gg.Groups(clippers), model=model)
    backward(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    for part in (slice(0, 2), slice(2, 4)):
        length = math.hypot(*[float(m.norm()) for m in moved[part]])
        assert length == pytest.approx(0.01 * math.hypot(*[float(b.norm()) for b in before[part]]), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_short_numbers_the_step_is_as_long_as_allowed(dtype):
    model = network(dtype)
    optimizer = sgd(model, lr=0.125)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=0.125))
    backward(model, 0, 8.0)
    length = math.hypot(*[float(p.detach().double().norm()) for p in model.parameters()])
    optimizer.step()
    assert float(guard.last.threshold) == pytest.approx(length, rel=1e-4)


def test_under_a_gradscaler_the_rate_is_that_of_unscaled_gradients():
    model, twin = network(torch.float32), network(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = sgd(model, lr=0.05, fused=True), sgd(twin, lr=0.05)
    guards = [gg.Guard(one, gg.ClipByMedian(update=0.01)) for one in (scaled, plain)]
    for step in range(6):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for one, optimizer in ((model, scaled), (twin, plain)):
            optimizer.zero_grad()
            loss = (one(3 * x) - x.sum(1, keepdim=True)).square().mean()
            (scaler.scale(loss) if one is model else loss).backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
        assert float(guards[0].last.threshold) == pytest.approx(float(guards[1].last.threshold), rel=1e-5)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("spoil", ["zero", "nan", "rate 0"])
def test_where_weights_or_rates_say_nothing_there_is_no_bound(spoil):
    model = network()
    optimizer = sgd(model, lr=0.05)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=1e-6))
    backward(model, 0)
    with torch.no_grad():
        for p in model.parameters() if spoil == "zero" else [model[0].bias] if spoil == "nan" else []:
            p.fill_(0.0 if spoil == "zero" else math.nan)
    optimizer.param_groups[0]["lr"] = 0.0 if spoil == "rate 0" else 0.05
    optimizer.step()
    assert float(guard.last.coefficient) == 1.0
    assert float(guard.clipper.state["held"]) == 0


def test_a_step_that_is_not_finite_leaves_the_bound_alone():
    model = network()
    optimizer = sgd(model, lr=0.05)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=0.01))
    for step in range(4):
        backward(model, step)
        optimizer.step()
    state = copy.deepcopy(guard.clipper.state_dict())
    backward(model, 4, math.nan)
    optimizer.step()
    assert guard.skipped_steps == 1
    assert torch.equal(guard.clipper.state["held"], state["held"])
    assert float(state["held"]) == 4


def test_a_resumed_run_goes_on_bit_by_bit():
    def start():
        model = network(torch.float32)
        optimizer = sgd(model, lr=0.05, momentum=0.9)
        return model, optimizer, gg.Guard(optimizer, gg.ClipByMedian(update=0.01))

    def go_on(run, steps):
        for step in steps:
            backward(run[0], step)
            run[1].step()

    one, other = start(), start()
    go_on(one, range(12))
    for mine, its in zip(other, one, strict=True):
        mine.load_state_dict(copy.deepcopy(its.state_dict()))
    go_on(one, range(12, 20))
    go_on(other, range(12, 20))
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))
    assert float(one[2].clipper.state["held"]) > 12


def test_the_state_of_a_version_without_a_bound_is_taken():
    clipper = gg.ClipByMedian()
    old = {name: value for name, value in clipper.state_dict().items() if name != "held"}
    clipper.state["held"].fill_(5.0)
    clipper.load_state_dict(old)
    assert float(clipper.state["held"]) == 0


@pytest.mark.parametrize(
    ("update", "error"), [(0.0, InvalidValueError), (-1, InvalidValueError), ("1", InvalidTypeError)]
)
def test_a_bound_that_is_none_is_refused(update, error):
    with pytest.raises(error, match=f"update={update!r}"):
        gg.ClipByMedian(update=update)


def test_parameters_that_come_later_are_known():
    model, later = network(), nn.Linear(2, 1).double()
    optimizer = sgd(model, lr=0.05)
    guard = gg.Guard(optimizer, gg.ClipByMedian(update=0.01))
    optimizer.add_param_group({"params": later.parameters(), "lr": 0.5})
    backward(model, 0)
    later(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    expected = Twin(update=0.01).step(optimizer.param_groups)
    optimizer.step()
    assert float(guard.last.threshold) == pytest.approx(expected, rel=1e-9)


def test_gradguard_run_knows_the_optimizer_too():
    model, guarded = network(), network()
    optimizers = [sgd(one, lr=0.05, momentum=0.9) for one in (model, guarded)]
    clip = ClipEachOptimizer(lambda: gg.ClipByMedian(update=0.01))
    guard = gg.Guard(optimizers[1], gg.ClipByMedian(update=0.01))
    for step in range(6):
        backward(model, step)
        backward(guarded, step)
        event = clip(optimizers[0], list)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(event.threshold, guard.last.threshold)
        assert bool(guard.last.clipped)


@pytest.mark.parametrize("seed", range(12))
def test_no_step_moves_the_weights_by_more_than_their_share(seed):
    draws = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(5, generator=draws, dtype=torch.float64)) for _ in range(4)]
    rates = (10.0 ** (4 * torch.rand(4, generator=draws) - 3)).tolist()
    groups = [{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)]
    guard = gg.Guard(torch.optim.SGD(groups), gg.ClipByMedian(update=0.1))
    for _ in range(8):
        for w in weights:
            size = 10.0 ** (3 * torch.rand((), generator=draws))
            w.grad = size * torch.randn(5, generator=draws, dtype=torch.float64)
        before = torch.cat([w.detach().clone() for w in weights])
        guard.optimizer.step()
        moved = torch.cat([w.detach() for w in weights]) - before
        assert float(moved.norm()) <= 0.1 * float(before.norm()) * (1 + 1e-9)
