"""What steps do to the weights, and attention logits: measured as a slow twin does, and told where a rule is broken."""

import math

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.monitoring.judge.detectors.update_sizes import ELEMENTS
from gradguard.monitoring.judge.health import HealthMonitor
from gradguard.monitoring.observe import observer


@pytest.fixture(autouse=True)
def _each_step_is_measured(monkeypatch):
    """On a busy machine too."""
    monkeypatch.setattr(observer, "FREE", math.inf)


def watched(model, optimizer, steps, rate=None, loss=None, before=lambda i: None):
    """The lines of a run, and what each step did to each parameter, as a slow twin in float64 sees it."""
    lines, moves = [], []
    start = [group["lr"] for group in optimizer.param_groups]
    with gg.Monitor(optimizer, lines.append, model=model):
        for i in range(steps):
            for group, its in zip(optimizer.param_groups, start, strict=True):
                group["lr"] = its if rate is None else its * rate(i)
            optimizer.zero_grad()
            (loss or default_loss)(model, i).backward()
            before(i)
            old = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            moves.append([wide(p) - wide(was) for p, was in zip(model.parameters(), old, strict=True)])
    return lines, moves, [wide(p) for p in old]


def wide(tensor):
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def default_loss(model, i):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
    return (model(x).square().sum(1) - 1).square().mean()


def kinds(lines, *wanted):
    return [line["kind"] for line in lines if line["t"] == "event" and line["kind"] in wanted]


class Shapes(nn.Module):
    """Parameters of every layout and dtype; the last one gets no gradient."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.rows = nn.Parameter(torch.randn(7, 5, generator=draws))
        self.scalar = nn.Parameter(torch.randn((), generator=draws))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5, generator=draws).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(5, 7, generator=draws).T)
        self.of_16_bits = nn.Parameter(torch.randn(6, 4, generator=draws).bfloat16())
        self.of_64_bits = nn.Parameter(torch.randn(6, 4, generator=draws).double())
        self.complex = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64, generator=draws))
        self.long = nn.Parameter(torch.randn(300, 200, generator=draws))
        self.unused = nn.Parameter(torch.ones(3))


def of_all(model, i):
    weights = [p for name, p in model.named_parameters() if name != "unused"]
    return sum((p.abs().double() * (1 + 0.1 * i)).square().sum() for p in weights)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_what_a_step_moves_is_that_of_a_slow_twin(kind):
    model = Shapes()
    groups = [{"params": [model.rows, model.long]}, {"params": list(model.parameters())[1:8], "lr": 0.02}]
    groups.append({"params": [model.unused]})
    lines, moves, _ = watched(model, kind(groups, lr=0.01), 5, loss=of_all)
    order = {name: place for place, name in enumerate(dict(model.named_parameters()))}
    told = [line for line in lines if line["t"] == "tensors" and "moved" in line]
    assert [line["i"] for line in told] == [0, 2, 4]
    for line in told:
        assert line["rates"] == [0.01, 0.02, 0.01]
        for param, moved in zip(lines[0]["params"], line["moved"], strict=True):
            name = param["name"]
            if name in ("empty", "unused"):
                assert moved is None
                continue
            change = moves[line["i"]][order[name]]
            numel = change.numel() // (2 if name == "complex" else 1)
            expected = float(change.square().mean().sqrt())
            assert moved == pytest.approx(expected, rel=1e-5 if numel <= ELEMENTS else 0.1), name


def test_each_step_has_what_it_moved_over_the_norm_of_the_weights():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    lines, moves, _ = watched(model, torch.optim.AdamW(model.parameters()), 4)
    steps = [line for line in lines if line["t"] == "step"]
    weights = wide(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for step, changes in zip(reversed(steps), reversed(moves), strict=True):
        change = torch.cat([one.flatten() for one in changes])
        weights = weights - change
        assert step["update"] == pytest.approx(float(change.norm() / weights.norm()), rel=1e-4)


def test_a_clip_of_updates_that_came_later_is_seen():
    model = nn.Linear(8, 4)
    lines, optimizer = [], torch.optim.SGD(model.parameters(), lr=1.0)
    with gg.Monitor(optimizer, lines.append, model=model):
        gg.ClipUpdate(optimizer, gg.ClipByValue(1e-3))
        default_loss(model, 0).backward()
        optimizer.step()
    (moved,) = [line["moved"] for line in lines if line["t"] == "tensors"]
    assert max(moved) <= 1e-3 * (1 + 1e-6)


def test_training_is_the_same_bits():
    def trained(is_watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 70), nn.Dropout(0.5), nn.Linear(70, 80))
        optimizer = torch.optim.AdamW(model.parameters())
        monitor = gg.Monitor(optimizer, [], model=model) if is_watched else None
        for i in range(5):
            optimizer.zero_grad()
            default_loss(model, i).backward()
            optimizer.step()
        del monitor
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_parameter_of_a_class_of_its_own_is_left_out_and_the_others_are_watched():
    class Odd(nn.Parameter):
        pass

    model = nn.Linear(8, 4)
    model.weight = Odd(model.weight.detach())
    lines, *_ = watched(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert lines[1]["t"] == "step"
    assert not kinds(lines, "observer_failed")
    assert next(line["moved"] for line in lines if line["t"] == "tensors")[1] > 0


def test_only_steps_of_the_schedule_are_measured_where_time_is_up(monkeypatch):
    monkeypatch.setattr(observer, "FREE", -1.0)
    monkeypatch.setattr(observer, "SHARE", 0.0)
    model = nn.Linear(8, 4)
    lines, *_ = watched(model, torch.optim.SGD(model.parameters(), lr=0.01), 60)
    assert [line["i"] for line in lines if line["t"] == "step" and "update" in line] == [0, 50]


# --- rules that are broken, and their twins ---------------------------------------------------------------------------


class Adafactor(torch.optim.Optimizer):
    """Adafactor without factors, with a clip of updates, and a momentum in bfloat16 behind it as timm's has."""

    def __init__(self, parameters, clip, momentum=None):
        super().__init__(parameters, {"lr": 1e-2, "momentum": momentum})
        self.clip = clip

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            square = self.state[p].setdefault("square", torch.ones_like(p))
            square.lerp_(p.grad.square(), 0.1)
            update = p.grad / square.sqrt()
            update /= self.clip(update.square().mean().sqrt())
            if momentum := self.param_groups[0]["momentum"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p, dtype=torch.bfloat16))
                update = mean.lerp_(update.bfloat16(), 1 - momentum).to(p.dtype)
            p -= self.param_groups[0]["lr"] * update


def twice(kind):
    """Multiplies by the learning rate twice."""

    class Twice(kind):
        def step(self, closure=None):
            (group,) = self.param_groups
            rate, group["lr"] = group["lr"], 10 * group["lr"] ** 2
            super().step(closure)
            group["lr"] = rate

    return Twice


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01, weight_decay=0.0)


class Signs(torch.optim.Optimizer):
    """Descent along the signs of a momentum, each shape with a length of its own."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.add_(mean.sign() / p.shape[-1], alpha=-group["lr"])


def signs(parameters):
    return Signs([p for p in parameters if p.dim() == 2], {"lr": 0.02})


def by_norm(parameters):
    optimizer = muon(parameters)
    gg.ClipUpdate(optimizer, gg.ClipByGlobalNorm(0.1))
    return optimizer


def decayed(rate):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=rate)


BROKEN = {
    "an inverted clip": (lambda p: Adafactor(p, lambda rms: rms.clamp(max=1.0)), "and never less"),
    "its twin": (lambda p: Adafactor(p, lambda rms: rms.clamp(min=1.0)), None),
    "the same in front of a momentum": (
        lambda p: Adafactor(p, lambda rms: rms.clamp(max=1.0), 0.9), "adds to the momentum"),
    "its twin in front of one": (lambda p: Adafactor(p, lambda rms: rms.clamp(min=1.0), 0.9), None),
    "an update divided by its norm": (by_norm, "the same length on every step"),
    "Muon": (muon, None),
    "signs over the fan-in": (signs, None),
    "the rate twice": (lambda p: twice(torch.optim.SGD)(p, lr=0.05), "times the step that the optimizer's rule makes"),
    "once": (lambda p: torch.optim.SGD(p, lr=0.1), None),
    "a decay of 30": (decayed(30.0), "is weight decay, and the weights shrink with it"),
    "a decay of 0.1": (decayed(0.1), None),
    "a clip of gradients that always binds": (
        lambda p: gg.Guard(torch.optim.SGD(p, lr=0.1), gg.ClipByGlobalNorm(1e-3)).optimizer, None),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_is_broken_is_told_and_its_twin_is_not(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    make, words = BROKEN[name]
    lines, *_ = watched(model, make(list(model.parameters())), 260, rate=lambda i: 0.985**i)
    told = [line["message"] for line in lines if line["t"] == "event" and line["kind"] == "update_rule"]
    assert len(told) == (words is not None), told
    assert words is None or words in told[0]


KNOWN = {
    "Adam": lambda kind, p: kind(torch.optim.Adam)(p, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW": lambda kind, p: kind(torch.optim.AdamW)(p, lr=1e-2, weight_decay=1.0),
    "AdamW, maximize": lambda kind, p: kind(torch.optim.AdamW)(p, lr=1e-2, maximize=True),
    "SGD": lambda kind, p: kind(torch.optim.SGD)(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "SGD, momentum": lambda kind, p: kind(torch.optim.SGD)(p, lr=1e-2, momentum=0.9, dampening=0.2, fused=True),
    "SGD, nesterov": lambda kind, p: kind(torch.optim.SGD)(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Muon": lambda kind, p: kind(torch.optim.Muon)([q for q in p if q.dim() == 2], lr=1e-2),
    "Muon, plain": lambda kind, p: kind(torch.optim.Muon)(
        [q for q in p if q.dim() == 2], lr=1e-2, nesterov=False, adjust_lr_fn="match_rms_adamw"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", [lambda i: 1.0, lambda i: 0.97**i], ids=["constant", "falling"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_step_that_is_a_factor_off_its_rule_is_told_at_any_schedule_and_its_twin_is_not(name, schedule):
    def factors(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        lines, *_ = watched(model, KNOWN[name](kind, list(model.parameters())), 48, rate=schedule)
        steps = [line for line in lines if line["t"] == "step"]
        compared = [step for step in steps if "over_rule" in step]
        return [(step["lr"], step["over_rule"]) for step in compared], kinds(lines, "update_rule")

    found, told = factors(twice)
    assert told == ["update_rule"]
    assert len(found) == 6
    assert all(factor == pytest.approx(10 * rate, rel=0.01) for rate, factor in found)
    found, told = factors(lambda kind: kind)
    assert not told
    assert [factor for _, factor in found] == pytest.approx([1.0] * 6, rel=1e-3)


STOCK = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
HEALTHY = {
    **{name: lambda p, name=name: getattr(torch.optim, name)(p, lr=1e-3) for name in STOCK},
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
    "SGD, clipped": lambda p: gg.Guard(torch.optim.SGD(p, lr=0.1, momentum=0.9), gg.ClipByGlobalNorm(0.01)).optimizer,
    "AdamW, clipped and fused": lambda p: gg.Guard(
        torch.optim.AdamW(p, fused=True), gg.ClipByGlobalNorm(0.01)).optimizer,
    "SGD, clipped and fused": lambda p: gg.Guard(
        torch.optim.SGD(p, lr=0.1, fused=True), gg.ClipByGlobalNorm(0.01)).optimizer,
    "AdamW, its update clipped": lambda p: gg.ClipUpdate(torch.optim.AdamW(p, lr=1e-2)).optimizer,
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 1e-2}, {"params": p[2:], "weight_decay": 1.0}]),
}  # fmt: skip
WAYS = ("plain", "closure", "scaler", "compiled", "bfloat16")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEALTHY)
def test_no_step_of_a_healthy_run_is_said_to_break_its_rule(name, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = model.bfloat16() if way == "bfloat16" else model
    optimizer = HEALTHY[name](list(model.parameters()))
    lines, scaler = [], torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7, enabled=way == "scaler")
    torch.compiler.reset()
    run = torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step
    with gg.Monitor(optimizer, lines.append, model=model):
        for i in range(60):

            def closure(i=i):
                optimizer.zero_grad()
                loss = default_loss(model, i)
                scaler.scale(loss).backward()
                return loss

            if name == "LBFGS" or way == "closure":
                optimizer.step(closure)
                continue
            closure()
            if way == "scaler":
                scaler.step(optimizer)
                scaler.update()
            else:
                run()
    assert sum(line["t"] == "step" for line in lines) == 60
    assert all(line.get("over_rule", 1.0) == pytest.approx(1.0, abs=0.02) for line in lines if "clipped" not in name)
    assert not kinds(lines, "update_rule", "observer_failed")


def test_no_step_with_sparse_gradients_is_said_to_break_its_rule():
    model = nn.Embedding(30, 4, sparse=True)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SparseAdam(model.parameters())):
        lines, *_ = watched(model, optimizer, 30, loss=lambda model, i: model(torch.tensor([i % 30, 2])).square().sum())
        assert not kinds(lines, "update_rule", "observer_failed")


class Cautious(torch.optim.AdamW):
    """Another rule than its parent's, on purpose: elements whose update turns against the gradient stay."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        for p, was in zip(self.param_groups[0]["params"], before, strict=True):
            p.copy_(torch.where((was - p) * p.grad > 0, p, was))


class WithoutState(torch.optim.Adam):
    """Another state than its parent's."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * self.param_groups[0]["lr"] * p.grad)


@pytest.mark.parametrize("kind", [Cautious, WithoutState])
def test_nothing_is_claimed_of_a_subclass_with_a_rule_of_its_own(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    lines, *_ = watched(model, kind(model.parameters(), lr=1e-2), 60)
    assert not kinds(lines, "update_rule", "observer_failed")


# --- attention logits -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.dropout(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def of_attention(model, i):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(i))
    model(2 * x).square().mean().backward()
    return model(x).square().mean()


def test_each_step_has_the_largest_logit_of_its_forwards():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": Attention(), "second": Attention()})
    model.forward = lambda x: model["second"](model["first"](x))
    watch, largest = gg.LogitWatch(model), []

    def take(i):
        found = watch.max_logits
        name = max(found, key=lambda one: float(found[one].max()))
        largest.append((float(found[name].max()), name))
        watch.reset()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lines, *_ = watched(model, optimizer, 4, loss=of_attention, before=take)
    steps = [line for line in lines if line["t"] == "step"]
    assert [(step["logit"], step["logit_of"]) for step in steps] == largest
    watch.detach()
    lines, *_ = watched(model, optimizer, 2, loss=of_attention)
    assert not any("logit" in line for line in lines)


@pytest.mark.parametrize(("growth", "is_told"), [(1.02, True), (1.0, False)])
def test_logits_that_grow_are_told_while_the_run_goes_on(growth, is_told):
    torch.manual_seed(0)
    model = Attention()
    watch = gg.LogitWatch(model)

    def grow(i):
        with torch.no_grad():
            for layer in (model.q, model.k):
                layer.weight.mul_(growth)

    lines, *_ = watched(model, torch.optim.SGD(model.parameters(), lr=1e-3), 160, loss=of_attention, before=grow)
    watch.detach()
    assert kinds(lines, "logits_grow") == ["logits_grow"] * is_told


def test_a_spike_of_updates_is_told_before_it_is_over_and_one_large_batch_is_not():
    def told(update_of, loss_of=lambda i: 1.0):
        monitor = HealthMonitor({"optimizers": ["AdamW"]})
        found = []
        for i in range(300):
            rate, size = 1e-3 * (1 - i / 400), 1.0 + 0.02 * math.sin(7.0 * i)
            step = {
                "t": "step",
                "i": i,
                "norm": 1.0,
                "lr": rate,
                "update": rate * update_of(i, size),
                "loss": loss_of(i),
            }
            found += [(i, one.kind) for one in monitor.see(step) if one.kind == "update_spike"]
        return found

    def tail(i, size):
        return size * (1 + 2 * 0.9 ** (i - 200) if i >= 200 else 1)

    assert told(lambda i, size: size * (1.2 ** max(0, i - 200))) == [(205, "update_spike")]
    assert told(lambda i, size: size * (2 if i in (150, 200, 201) else 1)) == []
    assert told(lambda i, size: size * (3 if i < 40 else 1)) == []
    assert told(tail) == [(202, "update_spike")]
    assert told(tail, lambda i: 3.0 if i == 200 else 1.0) == []
    assert told(tail, lambda i: 1.3 if i == 200 else 1.0) == [(202, "update_spike")]
    assert told(tail, lambda i: 1.3 if i in (160, 200) else 1.0) == []  # a kind of batch that was seen before
    assert told(tail, lambda i: 1.3 if i == 160 else 1.0) == [(202, "update_spike")]


@pytest.mark.parametrize("kind", ["moved", "swapped", "transposed"])
def test_a_weight_that_gets_other_memory_between_steps_is_followed_there(kind):
    """Where weights lie is kept from step to step: of a stale place the record would say that nothing moves."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def before(i):
        first, last = model[0].weight, model[1].weight
        if kind == "swapped":
            first.data, last.data = last.data, first.data
        elif kind == "moved" or i == 1:
            first.data = first.data.clone() if kind == "moved" else first.data.double().float().t().contiguous().t()

    lines, moves, _ = watched(model, torch.optim.SGD(model.parameters(), lr=1e-3), 7, before=before)
    found = {line["i"]: line["moved"] for line in lines if line["t"] == "tensors" and "moved" in line}
    assert list(found) == [0, 2, 4, 6]
    for i, moved in found.items():
        assert moved == pytest.approx([move.square().mean().sqrt().item() for move in moves[i]], rel=1e-3)
        assert min(moved) > 0
