"""A guard acts once at each real step, whatever calls it: the rows of the optimizer-hook table."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from guarded import ALL, MAX_NORM, assert_same, clipper, held, model, put_gradients, spoil
from torch import nn

import gradguard as gg
from gradguard import ClipByGlobalNorm, ClipByValue, Guard
from gradguard.errors import GradguardError, InvalidTypeError, InvalidValueError
from gradguard.rules import Clipper, Decision, describe, norms_of

TORCHS_OWN = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Watched(ClipByGlobalNorm):
    """Notes the norm at each decision."""

    def __init__(self, max_norm: float = MAX_NORM) -> None:
        super().__init__(max_norm)
        self.norms: list[float] = []

    def decide(self, grads, scale=1.0):
        decision = super().decide(grads, scale)
        self.norms.append(float(decision.result.norm))
        return decision


class MovingAverage(Clipper):
    """A user's rule that remembers, and takes no care that gradients may have a graph."""

    def __init__(self) -> None:
        self.average, self.with_graph = torch.zeros(()), []

    def decide(self, grads, scale=1.0):
        norm = torch.stack([g.square().sum() for g in grads.gradients]).sum().sqrt()
        self.average = 0.9 * self.average + 0.1 * norm
        self.with_graph.append(torch.is_grad_enabled() or norm.requires_grad)
        coefficient = (self.average / norm).clamp(max=1.0).double()
        return Decision(grads, describe(grads, norms_of(grads), coefficient, coefficient < 1), coefficient)


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_a_rule_decides_without_a_graph(name):
    """As penalties on gradients need them: `create_graph=True`, whose graph a rule must not keep from step to step."""
    net, rule = model(), MovingAverage()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01) if name == "SGD" else torch.optim.LBFGS(net.parameters())
    gg.Guard(optimizer, rule)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().sum()
        loss.backward(create_graph=True)
        assert any(p.grad.requires_grad for p in net.parameters())
        return loss

    with warnings.catch_warnings(action="ignore"):  # torch's, of the cycle between a parameter and its gradient
        for _ in range(3):
            optimizer.step(closure)
    assert set(rule.with_graph) == {False}
    assert not rule.average.requires_grad


def clip_and_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
    optimizer.step()


@pytest.mark.parametrize("name", ALL)
def test_a_plain_step(name):
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    guard = Guard(a, clipper(), model=ours)
    for step in range(3):
        put_gradients(ours, step)
        put_gradients(theirs, step)
        norm = gg.get_total_norm([p.grad for p in ours.parameters()])
        a.step()
        clip_and_step(theirs, b)
        assert float(guard.last.norm) == pytest.approx(float(norm))
    assert_same(held(ours, a)[0], held(theirs, b)[0], 1e-6)
    assert guard.last.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert (guard.steps, guard.skipped_steps) == (3, 0)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: bool, spelling: str) -> None:
    inputs = torch.linspace(-2, 2, 12, dtype=net[0].weight.dtype).view(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = 50 * net(inputs).square().sum()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure) if spelling == "positional" else optimizer.step(closure=closure)
        assert loss > 0


@pytest.mark.parametrize("spelling", ["positional", "keyword"])
@pytest.mark.parametrize("name", [*ALL, "LBFGS"])
def test_a_closure_is_clipped_at_each_evaluation(name, spelling):
    """As Lightning steps too: backward inside the closure, with gradients of the last step still there."""
    make = ALL.get(name, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    dtype = torch.float64 if name == "LBFGS" else torch.float32  # a search makes much of the last digit
    ours, theirs = model().to(dtype), model().to(dtype)
    a, b = make(ours.parameters()), make(theirs.parameters())
    rule = Watched()
    guard = Guard(a, rule)
    train(ours, a, 3, clip=False, spelling=spelling)
    train(theirs, b, 3, clip=True, spelling=spelling)
    assert_same(held(ours, a)[0], held(theirs, b)[0], 2e-5)
    assert guard.steps == 3
    assert len(rule.norms) == (b.state_dict()["state"][0]["func_evals"] if name == "LBFGS" else 3)


class Outer(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Outermost(Outer):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Outer, Outermost])
@pytest.mark.parametrize("bad", [False, True])
def test_a_subclass_that_calls_super_counts_once(kind, bad):
    net = model()
    optimizer, rule = kind(net.parameters(), lr=1.0), Watched()
    guard = Guard(optimizer, rule)
    before = [p.detach().clone() for p in net.parameters()]
    put_gradients(net, 0)
    if bad:
        spoil(net)
    optimizer.step()
    assert len(rule.norms) == guard.steps == 1
    moved = gg.get_total_norm([p.detach() - q for p, q in zip(net.parameters(), before, strict=True)])
    assert float(moved) == pytest.approx(0 if bad else MAX_NORM, rel=1e-5, abs=0)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@TORCHS_OWN
def test_zero_redundancy_optimizer(one_process):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    ours, theirs = model(), model()
    a = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.05)
    b = torch.optim.Adam(theirs.parameters(), lr=0.05)
    rule = Watched()
    guard = Guard(a, rule)
    for step in range(4):
        put_gradients(ours, step)
        if step == 1:
            spoil(ours)
        before = held(ours, a.optim)
        a.step()
        if step == 1:
            assert_same(held(ours, a.optim), before)
            continue
        put_gradients(theirs, step)
        clip_and_step(theirs, b)
    assert len(rule.norms) == 4
    assert guard.skipped_steps == 1
    assert_same(held(ours, a.optim)[:2], held(theirs, b)[:2], 1e-6)


def test_accumulation_clips_the_sum_once():
    net, rule = model(), Watched()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Guard(optimizer, rule)
    inputs = torch.ones(2, 3)
    for _ in range(4):
        net(inputs).sum().backward()
    norm = float(gg.get_total_norm([p.grad for p in net.parameters()]))
    optimizer.step()
    assert rule.norms == [pytest.approx(norm)]


def test_two_optimizers_of_one_model_are_clipped_each_by_itself():
    net = model()
    rules = Watched(), Watched(1e6)
    parts = [torch.optim.Adam(net[0].parameters(), fused=True), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    guards = [Guard(o, rule, model=net) for o, rule in zip(parts, rules, strict=True)]
    put_gradients(net, 0)
    norms = [float(gg.get_total_norm([p.grad for p in net[i].parameters()])) for i in (0, 2)]
    for optimizer in parts:
        optimizer.step()
    assert [rule.norms[0] for rule in rules] == pytest.approx(norms)
    assert [g.last.names for g in guards] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]


@pytest.mark.sampled(4)
@pytest.mark.slow
@TORCHS_OWN
@pytest.mark.parametrize("attach", ["before compiling", "after compiling", "after a compiled step"])
@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum, fused", "AdamW", "a foreign one"])
def test_a_compiled_step(name, attach):
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    rule = Watched()
    guard = Guard(a, rule) if attach == "before compiling" else None
    compiled = torch.compile(a.step, backend="eager")
    if attach == "after a compiled step":
        for net in (ours, theirs):
            put_gradients(net, 9)
        compiled()
        b.step()
    guard = guard or Guard(a, rule)
    for step in range(5):
        put_gradients(ours, step)
        if step == 2:
            spoil(ours)
            before = held(ours, a)
            compiled()
            assert_same(held(ours, a), before)
            continue
        compiled()
        put_gradients(theirs, step)
        clip_and_step(theirs, b)
    torch.compiler.reset()
    assert len(rule.norms) == guard.steps == 5
    assert guard.skipped_steps == 1
    assert_same(held(ours, a)[0], held(theirs, b)[0], 5e-6)  # a compiled AdamW rounds otherwise
    for group, of_twin in zip(a.param_groups, b.param_groups, strict=True):
        of_twin |= {"capturable": group["capturable"]} if "capturable" in group else {}  # the compiler adds it
    assert_same(held(ours, a)[2:], held(theirs, b)[2:])


def test_a_copy_of_the_optimizer_has_no_guard():
    net, rule = model(), Watched()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    Guard(optimizer, rule)
    put_gradients(net, 0)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    for group in copied.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, torch.nan)
    copied.step()
    assert len(rule.norms) == 1
    Guard(copied, Watched())


class Remembers(ClipByGlobalNorm):
    """A rule with a state: the largest norm so far is its threshold."""

    def __init__(self):
        super().__init__(1.0)
        self.largest = torch.zeros((), dtype=torch.float64)

    def decide(self, grads, scale=1.0):
        decision = super().decide(grads, scale)
        self.largest = torch.maximum(self.largest, decision.result.norm.nan_to_num().double())
        return decision

    def state_dict(self):
        return {"largest": self.largest.clone()}

    def load_state_dict(self, state_dict):
        self.largest = state_dict["largest"].clone()


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum", "a foreign one"])
def test_a_run_goes_on_after_resume(name):
    def run(net, optimizer, guard, steps):
        for step in steps:
            put_gradients(net, step)
            if step in (1, 3):
                spoil(net)
            optimizer.step()
        return guard

    through, first = model(), model()
    a = ALL[name](through.parameters())
    whole = run(through, a, Guard(a, Remembers()), range(6))
    b = ALL[name](first.parameters())
    stopped = run(first, b, Guard(b, Remembers()), range(4))
    second = model(seed=1)
    c = ALL[name](second.parameters())
    second.load_state_dict(first.state_dict())
    c.load_state_dict(b.state_dict())
    resumed = Guard(c, Remembers())
    resumed.load_state_dict(stopped.state_dict())
    assert (resumed.steps, resumed.skipped_steps, resumed.state_dict()["skipped_in_a_row"]) == (4, 2, 1)
    run(second, c, resumed, range(4, 6))
    assert_same(held(through, a), held(second, c))
    assert_same(whole.state_dict(), resumed.state_dict())


def test_the_state_of_something_else_is_refused():
    net = model()
    guard = Guard(torch.optim.SGD(net.parameters(), lr=0.1), clipper())
    with pytest.raises(InvalidValueError, match=r"not the state of a Guard .* the keys \['clipper', 'skipped'"):
        guard.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("order", ["scheduler first", "guard first"])
def test_a_scheduler_sees_its_steps(order):
    """It patches `step` on the optimizer, and warns if it is called before one was taken."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    make = lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    scheduler = make() if order == "scheduler first" else None
    Guard(optimizer, clipper())
    scheduler = scheduler or make()
    put_gradients(net, 0)
    spoil(net)
    optimizer.step()
    scheduler.step()
    put_gradients(net, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_group_that_is_added_is_clipped_too():
    net, more = model(), nn.Linear(2, 2)
    optimizer, rule = torch.optim.SGD(net.parameters(), lr=0.1), Watched()
    guard = Guard(optimizer, rule)
    put_gradients(net, 0)
    optimizer.step()
    assert guard.last.names[1] == "param_groups[0]['params'][1]"
    optimizer.add_param_group({"params": more.parameters()})
    put_gradients(net, 0)
    put_gradients(more, 1)
    optimizer.step()
    assert guard.last.names[4:] == ("param_groups[1]['params'][0]", "param_groups[1]['params'][1]")


def test_parameters_are_called_as_the_optimizer_calls_them():
    net = model()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    guard = Guard(optimizer, clipper())
    put_gradients(net, 0)
    optimizer.step()
    assert guard.last.names == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_parameters_without_a_gradient_are_left_out():
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    guard = Guard(optimizer, clipper(), model=net)
    optimizer.step()
    assert guard.last.names == ()
    net[2].bias.grad = torch.ones(2)
    optimizer.step()
    assert guard.last.names == ("2.bias",)
    assert len(optimizer.state) == 1


def test_a_rule_that_writes_by_itself():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    guard = Guard(optimizer, ClipByValue(0.1))
    put_gradients(net, 0)
    optimizer.step()
    assert max(float(p.grad.abs().max()) for p in net.parameters()) == pytest.approx(0.1)
    assert bool(guard.last.clipped)


def test_the_clipper_learns_the_parameters_before_the_first_step():
    seen = []

    class Learns(ClipByGlobalNorm):
        def learn(self, parameters):
            seen.append(parameters)

    net = model()
    Guard(torch.optim.SGD(net.parameters(), lr=0.1), Learns(1.0), model=net)
    Guard(torch.optim.SGD(net[0].named_parameters(), lr=0.1), Learns(1.0))
    assert seen[0] is net
    assert [name for name, _ in seen[1]] == ["weight", "bias"]


@pytest.mark.parametrize("leave", ["detach", "with", "an error inside with"])
@pytest.mark.parametrize("name", ["AdamW, fused", "AdamW", "a foreign one"])
def test_detached_it_does_nothing(name, leave):
    ours, theirs = model(), model()
    a, b = ALL[name](ours.parameters()), ALL[name](theirs.parameters())
    if leave == "detach":
        guard = Guard(a, clipper())
        guard.detach()
        guard.detach()
    elif leave == "with":
        with Guard(a, clipper()) as guard:
            pass
    else:
        with pytest.raises(ZeroDivisionError, match="inside"), Guard(a, clipper()) as guard:
            raise ZeroDivisionError("inside")
    for net, optimizer in ((ours, a), (theirs, b)):
        put_gradients(net, 0)
        optimizer.step()
    assert_same(held(ours, a), held(theirs, b))
    assert guard.last is None
    assert not a._optimizer_step_pre_hooks
    assert not a._optimizer_step_post_hooks
    Guard(a, clipper())


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum", "a foreign one"])
def test_detach_from_another_thread_while_a_step_runs(name):
    net, inside, go_on = model(), threading.Event(), threading.Event()
    optimizer = ALL[name](net.parameters())

    class Waits(ClipByGlobalNorm):
        def decide(self, grads, scale=1.0):
            inside.set()
            assert go_on.wait(200)
            return super().decide(grads, scale)

    guard, errors = Guard(optimizer, Waits(MAX_NORM)), []

    def step():
        try:
            optimizer.step()
        except BaseException as error:
            errors.append(error)

    put_gradients(net, 0)
    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(200)
    guard.detach()
    go_on.set()
    thread.join()
    assert errors == []
    assert guard.steps == 1
    if "AdamW" not in name:
        assert float(gg.get_total_norm([p.grad for p in net.parameters()])) == pytest.approx(MAX_NORM, rel=1e-5, abs=0)
    put_gradients(net, 0)
    optimizer.step()
    assert guard.steps == 1


def test_a_guard_that_nobody_keeps_goes_on():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Guard(optimizer, clipper())
    put_gradients(net, 0)
    optimizer.step()
    assert float(gg.get_total_norm([p.grad for p in net.parameters()])) == pytest.approx(MAX_NORM, rel=1e-5, abs=0)


def test_a_guard_goes_with_its_optimizer():

    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    guard = weakref.ref(Guard(optimizer, clipper()))
    assert guard() is not None
    del optimizer
    gc.collect()
    assert guard() is None


class Wrapper:
    """Has an optimizer inside, and none of its hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class LooksLikeOne(torch.optim.SGD):
    """Has hooks of its own and an optimizer inside, as Fabric's wrapper has."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups[0]["params"], lr=0.1)
        self.optimizer = optimizer


class InAnEngine(torch.optim.SGD):
    """Stands for what DeepSpeed returns."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"


REFUSED = {
    "two guards": (lambda o, m: (Guard(o, clipper()), Guard(o, clipper())), "has a Guard already.*Chain.*Groups"),
    "a wrapper": (lambda o, m: Guard(Wrapper(o), clipper()), "optimizer is Wrapper.*wrapper.optimizer"),
    "an optimizer round one": (
        lambda o, m: Guard(LooksLikeOne(o), clipper()),
        r"LooksLikeOne.*pass wrapper\.optimizer\.\n",
    ),
    "an engine's": (
        lambda o, m: Guard(InAnEngine(m.parameters()), clipper()),
        r"DeepSpeed engine.*last_clip\(engine\)",
    ),
    "a model": (lambda o, m: Guard(m, clipper()), "optimizer is Sequential.*expected a torch.optim.Optimizer"),
    "a number": (lambda o, m: Guard(o, 1.0), r"clipper is float: expected a clipper, such as ClipByGlobalNorm\(1.0\)"),
    "a class": (lambda o, m: Guard(o, ClipByGlobalNorm), "clipper is the class ClipByGlobalNorm: expected a clipper"),
    "another model": (lambda o, m: Guard(o, clipper(), model=model()), "has none of the optimizer's parameters"),
    "a policy": (lambda o, m: Guard(o, clipper(), nonfinite="ignore"), 'expected one of "skip", "propagate"'),
    "a cap": (lambda o, m: Guard(o, clipper(), max_consecutive_skips=-1), "max_consecutive_skips=-1: expected"),
    "half a skip": (lambda o, m: Guard(o, clipper(), max_consecutive_skips=2.5), "max_consecutive_skips=2.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_words(case):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    call, words = REFUSED[case]
    with pytest.raises(GradguardError, match=words):
        call(optimizer, net)


def test_every_stock_optimizer_is_covered():
    """Those that a stand-in serves are tested: a new one in PyTorch must be added to the table."""
    tested = {type(make(model().parameters())) for make in ALL.values()}
    stock = {v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    assert {k.__name__ for k in stock - tested} == {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


@pytest.mark.parametrize("bad", [False, True])
def test_muon_and_sparse_adam(bad):
    weight = nn.Parameter(torch.ones(3, 2))
    table = nn.Embedding(4, 2, sparse=True)
    for p, optimizer in (
        (weight, torch.optim.Muon([weight])),
        (table.weight, torch.optim.SparseAdam(table.parameters())),
    ):
        guard = Guard(optimizer, clipper())
        (10 * table(torch.tensor([1, 1]))).sum().backward()
        weight.grad = torch.ones(3, 2)
        if bad:
            (p.grad._values() if p.grad.is_sparse else p.grad)[0] = torch.nan
        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p, before) == bad
        assert guard.skipped_steps == bad
        assert bad == (not optimizer.state)


def test_a_clipper_that_remembers_belongs_to_one_guard():
    rule = gg.ClipByMedian()
    first = gg.Guard(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), rule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(InvalidValueError, match=r"ClipByMedian belongs to the Guard of another.*copy.deepcopy"):
        gg.Guard(optimizer, rule)
    first.detach()
    gg.Guard(optimizer, rule).detach()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_guard_cannot_be_copied(duplicate):
    guard = gg.Guard(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), gg.ClipByGlobalNorm(1.0))
    with pytest.raises(InvalidTypeError, match="cannot be copied or pickled"):
        duplicate(guard)


def test_the_result_of_a_sick_step_can_be_pickled():
    weight = nn.Parameter(torch.ones(2))
    guard = gg.Guard(torch.optim.SGD([weight], lr=0.1), gg.ClipByGlobalNorm(1.0))
    weight.grad = torch.tensor([1.0, torch.nan])
    guard.optimizer.step()
    assert pickle.loads(pickle.dumps(guard.last)).culprits() == guard.last.culprits()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("deepspeed.runtime.zero.stage3", "part of a DeepSpeed engine.*expected no Guard.*last_clip"),
        ("accelerate.utils.deepspeed", "part of a DeepSpeed engine"),
        ("accelerate.optimizer", r"wraps another: pass wrapper.optimizer. gradguard.integrations.accelerate.guard\("),
        ("lightning.fabric.wrappers", r"wraps another.*guard_fabric\("),
        ("lightning.pytorch.core.optimizer", r"wraps another.*GradGuardCallback\("),
        ("of_somebody", r"wraps another: pass wrapper.optimizer\.\n"),
    ],
)
def test_a_trainer_s_wrapper_is_refused_with_what_serves_it(module, words):
    kind = type("Wrapped", (torch.optim.SGD,), {"__module__": module})
    optimizer = kind(model().parameters(), lr=0.1)
    optimizer.optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(InvalidTypeError, match=words):
        Guard(optimizer, clipper())


def test_a_group_that_the_clipper_refuses_is_refused_on_each_step():
    class Picky(gg.ClipByGlobalNorm):
        def learn(self, parameters):
            if len(parameters) > 1:
                raise gg.errors.InvalidValueError("too many")

    first, later = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    first.grad, later.grad = torch.ones(3), torch.ones(3)
    optimizer = torch.optim.SGD([first], lr=0.1)
    gg.Guard(optimizer, Picky(1.0))
    optimizer.step()
    optimizer.add_param_group({"params": [later]})
    kept = first.detach().clone()
    for _ in range(3):
        with pytest.raises(gg.errors.InvalidValueError, match="too many"):
            optimizer.step()
        assert torch.equal(first, kept)


def test_culprits_of_one_name_are_all_named():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.full((2,), torch.nan)
    result = gg.ClipByGlobalNorm(1.0)(list(zip(["w", "w", "v"], parameters, strict=True)))
    assert result.culprit_names() == ["w", "w", "v"]
