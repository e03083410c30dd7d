"""A finite spike does not happen: weights, state, counters and the clipper's memory stay to the bit."""

import math

import pytest
import torch
from guarded import ALL, FOLDING, PLAIN, assert_same, held, model, spoil
from torch.utils._python_dispatch import TorchDispatchMode

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, NonFiniteGradientError, UnsupportedGradientError
from gradguard.listeners import Listener, listen
from gradguard.state import weight_watch

WARM = 5
NAN = math.nan


def small(**options):
    return gg.SkipSpikes(gg.SpikeDetector(window=16, warmup=WARM, cap=3, alone=1), **options)


def put(net, step, size=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 0.2 * size


def trained(make, sizes, clipper=None, guarded=True, **options):
    """Train on gradients of these sizes, NaN for one that is not finite; leave ``None`` out."""
    net = model()
    optimizer = make(net.parameters())
    more = {"spikes": small()} if guarded else {}
    guard = gg.Guard(optimizer, clipper or gg.ClipByGlobalNorm(0.5), **(more | options))
    reasons = []
    for step, size in enumerate(sizes):
        if size is None:
            continue
        put(net, step, 1.0 if math.isnan(size) else size)
        if math.isnan(size):
            spoil(net)
        optimizer.step()
        reasons.append(guard.last_skip)
    return net, optimizer, guard, reasons


@pytest.fixture
def accelerator(monkeypatch):
    """Let the CPU pass for a device whose numbers the host cannot read."""
    for name in (
        "clip.guard",
        "clip.clipper",
        "clip.gradients",
        "tensors.nonfinite",
        "tensors.scaling",
        "spikes.detector",
    ):
        if hasattr(__import__(f"gradguard.{name}", fromlist=["x"]), "are_readable"):
            monkeypatch.setattr(f"gradguard.{name}.are_readable", lambda *tensors: False)


SIZES = [1.0] * 8 + [50.0, 1.0, 1.0, 80.0, 1.0]
WITHOUT = [None if size > 1 else size for size in SIZES]


@pytest.mark.parametrize("name", ALL)
def test_a_run_with_spikes_is_the_run_without_them_bit_by_bit(name):
    net, optimizer, guard, reasons = trained(ALL[name], SIZES)
    twin, other, _, _ = trained(ALL[name], WITHOUT)
    assert_same(held(net, optimizer), held(twin, other))
    assert reasons == ["spike" if size > 1 else None for size in SIZES]
    assert (guard.steps, guard.skipped_steps, guard.spikes.skipped, guard.spikes.seen) == (13, 2, 2, 2)


@pytest.mark.parametrize("name", FOLDING)
def test_the_same_where_only_the_device_decides(name, accelerator):
    net, optimizer, guard, reasons = trained(FOLDING[name], SIZES, gg.ClipByMedian(warmup=4))
    twin, other, clean, _ = trained(FOLDING[name], WITHOUT, gg.ClipByMedian(warmup=4))
    assert_same(held(net, optimizer), held(twin, other))
    assert_same(guard.clipper.state_dict(), clean.clipper.state_dict())
    assert reasons == ["spike" if size > 1 else None for size in SIZES]
    assert (guard.skipped_steps, guard.spikes.skipped) == (2, 2)


CLIPPERS = {
    "median": lambda: gg.ClipByMedian(warmup=4),
    "zclip": lambda: gg.ZClip(warmup=4),
    "auto": lambda: gg.AutoClip(50),
    "fraction": lambda: gg.ClipFraction(0.1),
    "adagc": lambda: gg.AdaGC(warmup=2),
    "chain": lambda: gg.Chain(gg.ClipByValue(5.0), gg.ClipByMedian(warmup=4)),
    "groups": lambda: gg.Groups({"*[[]0]": gg.ClipByMedian(warmup=4)}, rest=gg.ClipByGlobalNorm(0.5)),
    "agc": lambda: gg.ClipAdaptive(0.1),
}


@pytest.mark.parametrize("name", CLIPPERS)
def test_the_clipper_does_not_remember_a_skipped_step(name):
    make = PLAIN["Adam"]
    net, optimizer, guard, reasons = trained(make, SIZES, CLIPPERS[name]())
    twin, other, clean, _ = trained(make, WITHOUT, CLIPPERS[name]())
    assert reasons.count("spike") == 2
    assert_same(guard.clipper.state_dict(), clean.clipper.state_dict())
    assert_same(held(net, optimizer), held(twin, other))


@pytest.mark.parametrize("policy", ["skip", "propagate", "zero"])
@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum, fused", "AdamW", "a foreign one"])
@pytest.mark.parametrize("blind", [False, True], ids=["host", "device"])
def test_each_policy_keeps_its_meaning(policy, name, blind, request):
    if blind:
        request.getfixturevalue("accelerator")
    sizes = [*SIZES, NAN, 1.0]
    net, optimizer, _, reasons = trained(ALL[name], sizes, nonfinite=policy)
    twin, other, _, _ = trained(ALL[name], [*WITHOUT, NAN, 1.0], guarded=False, nonfinite=policy)
    assert_same(held(net, optimizer), held(twin, other))
    assert reasons[-2:] == ["nonfinite" if policy == "skip" else None, None]
    assert reasons.count("spike") == 2


def test_raise_still_raises_and_forgets_the_step():
    net, optimizer, guard, _ = trained(PLAIN["Adam"], SIZES, nonfinite="raise")
    before = held(net, optimizer), guard.spikes.detector.state_dict()
    put(net, 3)
    spoil(net)
    with pytest.raises(NonFiniteGradientError, match=r"param_groups\[0\]"):
        optimizer.step()
    assert_same((held(net, optimizer), guard.spikes.detector.state_dict()), before)


def closure_of(net, step, size, calls):
    def closure():
        put(net, step, size)
        calls.append(size)
        return torch.tensor(float(len(calls)))

    return closure


@pytest.mark.parametrize("name", PLAIN)
def test_with_a_closure(name):
    net = model()
    optimizer, calls = PLAIN[name](net.parameters()), []
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    for step, size in enumerate(SIZES):
        before = held(net, optimizer)
        optimizer.step(closure_of(net, step, size, calls))
        assert guard.last_skip == ("spike" if size > 1 else None)
        if size > 1:
            assert_same(held(net, optimizer), before)
    assert calls == SIZES


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_judged_once_a_step(search):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=3, line_search_fn=search)
    guard = gg.Guard(optimizer, gg.ClipByValue(1e9), spikes=small())
    factor = 1.0

    def closure():
        optimizer.zero_grad()
        loss = factor * ((weight - 0.3).square().sum() + 1)
        guard.record_loss(loss.detach())
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    assert int(guard.spikes.detector.state["count"][0]) == 8
    factor, before = 1e4, weight.detach().clone()
    optimizer.step(closure)
    assert guard.last_skip == "spike"
    assert torch.equal(weight.detach(), before)
    factor = 1.0
    optimizer.step(closure)
    assert guard.last_skip is None
    assert int(guard.spikes.detector.state["count"][0]) == 9


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum, fused", "Adam", "a foreign one"])
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled by the user"])
@pytest.mark.parametrize("blind", [False, True], ids=["host", "device"])
def test_a_grad_scaler_sees_a_finite_step(name, unscaled, blind, request):
    if blind:
        request.getfixturevalue("accelerator")
    net = model()
    optimizer = ALL[name](net.parameters())
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=len(SIZES))
    scaler.scale(torch.zeros(1))
    for step, size in enumerate(SIZES):
        put(net, step, size * scaler.get_scale())
        if step == 9:  # an overflow between, which is no spike
            spoil(net, math.inf)
        if unscaled:
            scaler.unscale_(optimizer)
        before = held(net, optimizer)
        scaler.step(optimizer)
        scaler.update()
        reason = "spike" if size > 1 else "grad_scaler" if step == 9 else None
        assert guard.last_skip == reason, step
        if reason:
            assert_same(held(net, optimizer), before)
        assert scaler.get_scale() == (1024.0 if step < 9 else 512.0)
    assert guard.skipped_steps == 3
    assert scaler._get_growth_tracker() == 3


def test_the_loss_is_the_weighted_mean_of_the_micro_batches():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    seen = []
    for step in range(3):
        loss = torch.tensor(2.0, requires_grad=True)
        assert guard.record_loss(loss, weight=30) is loss
        assert guard.record_loss(6.0, torch.tensor(10)) == 6.0
        put(net, step)
        optimizer.step()
        seen.append(float(guard.spikes.detector.state["history"][0, step]))
    assert seen == [3.0] * 3
    put(net, 5)
    optimizer.step()  # without a loss: it is not judged, and remembers nothing
    assert guard.spikes.detector.state["count"].tolist() == [3, 4]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "a tensor that the host cannot read"])
def test_a_micro_batch_without_tokens_counts_nothing(as_tensor, monkeypatch):
    if as_tensor:
        monkeypatch.setattr("gradguard.spikes.skip.are_readable", lambda *tensors: False)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=small())
    for size in [1.0] * WARM + [100.0]:
        put(net, 0)
        guard.record_loss(torch.tensor(NAN), weight=0.0)  # cross_entropy of targets that are all ignored
        guard.record_loss(torch.tensor(size), weight=5.0)
        optimizer.step()
    assert guard.last_skip == "spike"


def test_a_loss_alone_is_enough():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    for step, loss in enumerate([2.0] * 6 + [3.0, 2.0]):
        guard.record_loss(loss)
        put(net, step)
        optimizer.step()
        assert guard.last_skip == ("spike" if loss > 2 else None)


def test_losses_of_a_step_that_a_scaler_left_out_are_forgotten():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    for step, loss in enumerate([1.0, 99.0, 3.0]):
        guard.record_loss(loss)
        put(net, step)
        if loss == 99.0:
            spoil(net, math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert guard.spikes.detector.state["history"][0, :3].tolist() == [1.0, 3.0, math.inf]


def test_a_spike_of_one_group_is_enough():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    groups = gg.Groups({"0.*": gg.ClipByGlobalNorm(0.5)}, rest=None)
    guard = gg.Guard(optimizer, groups, model=net, spikes=small())
    reasons = []
    for step, size in enumerate([1.0] * 7 + [60.0, 1.0]):
        put(net, step)
        net[2].weight.grad.mul_(1000)  # so that the norm of all hardly moves
        net[0].weight.grad.mul_(size)
        optimizer.step()
        reasons.append(guard.last_skip)
    assert reasons == [None] * 7 + ["spike", None]
    assert guard.spikes.detector.last.scores.shape == (3,)


@pytest.mark.parametrize("blind", [False, True], ids=["host", "device"])
def test_spikes_neither_lengthen_nor_end_a_row_of_bad_steps(blind, request):
    if blind:
        request.getfixturevalue("accelerator")
    start, make = [1.0] * 7, FOLDING["AdamW"]
    *_, guard, _ = trained(make, [*start, 50.0, 50.0, NAN, 50.0, NAN], max_consecutive_skips=2)
    assert guard.state_dict()["skipped_in_a_row"] == 2
    assert guard.skipped_steps == 5
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row were skipped"):
        trained(make, [*start, NAN, NAN, 50.0, NAN], max_consecutive_skips=2)
    *_, guard, _ = trained(make, [*start, NAN, NAN, 1.0, NAN], max_consecutive_skips=2)
    assert guard.state_dict()["skipped_in_a_row"] == 1


def test_only_told():
    net, optimizer, guard, reasons = trained(PLAIN["Adam"], SIZES, spikes=small(act=False))
    twin, other, _, _ = trained(PLAIN["Adam"], SIZES, guarded=False)
    assert_same(held(net, optimizer), held(twin, other))
    assert reasons == [None] * len(SIZES)
    assert (guard.spikes.seen, guard.spikes.skipped) == (2, 0)


def test_after_the_cap_it_goes_on():
    *_, reasons = trained(PLAIN["Adam"], [1.0] * 7 + [50.0] * 6)
    assert reasons == [None] * 7 + ["spike"] * 3 + [None] * 3


def test_who_listens_hears_why():
    class Log(Listener):
        def on_clipped(self, event):
            heard.append((event.skipped, event.skip_reason, event.spike))

    heard = []
    end = listen(Log())
    trained(PLAIN["Adam"], [*SIZES[:9], NAN, 1.0])
    end()
    assert heard[-3:] == [(True, "spike", True), (True, "nonfinite", False), (False, "nonfinite", False)]


def test_a_resumed_run_goes_on_bit_by_bit():
    sizes = [1.0] * 8 + [50.0, 60.0, 50.0, 50.0, 1.0, 900.0]
    for cut in (6, 9, 10, 12):
        net, optimizer, guard, reasons = trained(PLAIN["Adam"], sizes)
        first, a, before, _ = trained(PLAIN["Adam"], sizes[:cut])
        saved = before.state_dict()
        again = model()
        again.load_state_dict(first.state_dict())
        b = PLAIN["Adam"](again.parameters())
        b.load_state_dict(a.state_dict())
        after = gg.Guard(b, gg.ClipByGlobalNorm(0.5), spikes=small())
        after.load_state_dict(saved)
        for step in range(cut, len(sizes)):
            put(again, step, sizes[step])
            b.step()
            assert after.last_skip == reasons[step]
        assert_same(held(again, b), held(net, optimizer))
        assert_same(after.state_dict(), guard.state_dict())


def test_states_with_and_without_spikes_are_told_apart():
    *_, with_spikes, _ = trained(PLAIN["Adam"], SIZES)
    *_, without, _ = trained(PLAIN["Adam"], SIZES, guarded=False)
    state = with_spikes.state_dict()
    with pytest.raises(InvalidValueError, match=r"not the state of a Guard like this: .* got .*'spikes'"):
        without.load_state_dict(state)
    state.pop("spikes")
    without.load_state_dict(state)
    with pytest.raises(InvalidValueError, match=r"not the state of a Guard like this: .*'spikes'.* got"):
        with_spikes.load_state_dict(without.state_dict())
    with_spikes.load_state_dict(without.state_dict() | {"spikes": small().state_dict()})
    assert with_spikes.spikes.seen == 0
    with pytest.raises(InvalidValueError, match="not the state of a SkipSpikes"):
        with_spikes.load_state_dict(without.state_dict() | {"spikes": {}})


def test_what_is_refused():
    optimizer, other = (torch.optim.SGD(model().parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(InvalidTypeError, match=r"spikes is SpikeDetector: expected SkipSpikes\(detector\)"):
        gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=gg.SpikeDetector())
    with pytest.raises(InvalidTypeError, match="detector is the class SpikeDetector"):
        gg.SkipSpikes(gg.SpikeDetector)
    spikes = small()
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0), spikes=spikes)
    for shared in (spikes, gg.SkipSpikes(spikes.detector)):
        with pytest.raises(InvalidValueError, match="belongs to the Guard of another optimizer"):
            gg.Guard(other, gg.ClipByGlobalNorm(1.0), spikes=shared)
    with pytest.raises(InvalidValueError, match="does not look for spikes"):
        gg.Guard(other, gg.ClipByGlobalNorm(1.0)).record_loss(1.0)
    for loss, weight, words in [
        (torch.ones(3), 1.0, r"loss is a tensor of shape \[3\].*loss.mean\(\)"),
        (torch.ones((), dtype=torch.complex64), 1.0, "loss is a tensor"),
        (1.0, -1, "weight=-1.0: expected a finite number >= 0"),
        (1.0, math.inf, "weight=inf"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            guard.record_loss(loss, weight)
    with pytest.raises(InvalidTypeError, match="loss='1': expected a number"):
        guard.record_loss("1")


def test_a_step_inside_a_backward_is_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gg.Guard(optimizer, gg.ClipByNorm(1.0), spikes=small())
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UnsupportedGradientError, match="so no spike can be detected"):
        weight.sum().backward()


def test_repr_is_the_call():
    guard = gg.Guard(torch.optim.SGD(model().parameters()), gg.ClipByGlobalNorm(1.0), spikes=gg.SkipSpikes(act=False))
    assert (
        repr(guard) == "Guard(optimizer, ClipByGlobalNorm(max_norm=1.0), spikes=SkipSpikes(SpikeDetector(), act=False))"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # its own
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step(fused):
    sizes = [1.0] * 7 + [50.0, 1.0]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), spikes=small())
    step = torch.compile(optimizer.step, backend="eager")
    for at, size in enumerate(sizes):
        put(net, at, size)
        before = held(net, optimizer)
        step()
        assert guard.last_skip == ("spike" if size > 1 else None)
        if size > 1:
            assert_same(held(net, optimizer), before)
    torch.compiler.reset()


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(attach):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    step = attach(net, optimizer)
    put(net, 0)
    for _ in range(4):
        step()
    with Operations() as counted:
        step()
    return counted.count


def plain(net, optimizer):
    gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), model=net)
    return optimizer.step


def skipping(net, optimizer):
    guard, loss = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.5), model=net, spikes=small()), torch.tensor(1.0)
    return lambda: (guard.record_loss(loss), optimizer.step())


def laddered(net, optimizer):
    ladder, loss = (
        gg.SpikeRecovery(net, optimizer, gg.ClipByGlobalNorm(0.5), detector=small().detector),
        torch.tensor(1.0),
    )
    return lambda: (ladder.record_loss(loss), optimizer.step(), ladder.step())


@pytest.mark.parametrize(("attach", "most"), [(skipping, 36), (laddered, 44)])
def test_on_the_cpu_a_step_costs_few_operations_more(monkeypatch, attach, most):
    """Each small one takes some microseconds: reading a number, or copying the clipper's state.

    `SpikeRecovery` takes checksums of the weights as well, some operations for each of their types, which are left out.
    """
    monkeypatch.setattr(weight_watch.WeightWatch, "_sums_of", lambda watch, weights: torch.zeros(1))
    assert 0 < operations_of_a_step(attach) - operations_of_a_step(plain) <= most


@pytest.mark.parametrize("device", ["host", "accelerator"])
def test_a_loss_that_is_not_finite_is_told_once_unless_the_gradients_are_not_finite_either(
    device, request, monkeypatch
):
    if device == "accelerator":
        request.getfixturevalue("accelerator")
        monkeypatch.setattr("gradguard.spikes.skip.are_readable", lambda *tensors: False)
    net = model()
    guard = gg.Guard(torch.optim.SGD(net.parameters(), lr=0.1), gg.ClipByGlobalNorm(0.5), spikes=small())
    losses = [(1.0, False), (NAN, True), (NAN, False), (math.inf, False), (1.0, False)]
    for step, (loss, broken) in enumerate(losses):
        put(net, step)
        if broken:
            spoil(net)
        guard.record_loss(torch.tensor(loss))
        if step == 2:
            with pytest.warns(RuntimeWarning, match="a loss that is NaN or infinite, and all gradients of its step"):
                guard.optimizer.step()
        else:
            guard.optimizer.step()
    assert guard.skipped_steps == 1


def test_a_loss_of_no_weight_is_none_that_is_not_finite():
    net = model()
    guard = gg.Guard(torch.optim.SGD(net.parameters(), lr=0.1), gg.ClipByGlobalNorm(0.5), spikes=small())
    put(net, 0)
    guard.record_loss(torch.tensor(NAN), weight=0)
    guard.optimizer.step()
