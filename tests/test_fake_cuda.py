"""What every function and rule asks of a GPU, seen without one: no wait, no mix of devices, few kernels.

`FakeTensorMode` gives tensors that say "cuda:0" and have no memory: reading a value raises, so does an operation over
two devices, and every call is listed. It works on a build of PyTorch for the CPU too. Values are tested elsewhere.
"""

import os
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradguard as gg
from gradguard.backward_clip import statistics
from gradguard.clip.gradients import gradients_of
from gradguard.clip.guard_counts import Counts, LateReader
from gradguard.clip.lock_in import LockIn
from gradguard.clip.optimizer_proxy import OptimizerProxy
from gradguard.clip.reach import Reach
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import row_squares
from gradguard.tensors import host_copy, norms, scaling, units
from gradguard.torch_private import capturable_warning_mark

FIRST, SECOND = "cuda:0", "cuda:1"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="the second GPU would be looked for")

VIEWS = {
    "detach", "view", "_unsafe_view", "alias", "unbind", "split", "split_with_sizes", "slice", "select", "t",
    "transpose", "permute", "expand", "unsqueeze", "squeeze", "empty", "empty_strided", "empty_like", "as_strided",
    "view_as_real", "lift_fresh", "is_same_size", "movedim",
}  # fmt: skip
"""What runs on no device."""


class Launches(TorchDispatchMode):
    """Counts what runs on the device; a copy between host and device for which the host waits fails."""

    def __init__(self, waits=False, copies=True):
        super().__init__()
        self.seen, self.waits, self.copies = Counter(), waits, copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        out = func(*args, **kwargs)
        ends = args[1::-1] if name == "copy_" else (args[0], out) if name == "_to_copy" else ()
        if len({end.is_cpu for end in ends}) == 2 and not self.waits:
            assert self.copies, f"{name} from {ends[0].device} to {ends[1].device} would be replayed"
            asynchronous = kwargs.get("non_blocking") or args[2:3] == (True,)
            assert asynchronous, f"{name} from {ends[0].device} to {ends[1].device} waits"
        if func.namespace == "aten" and name not in VIEWS:
            self.seen[name] += 1
        return out


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """As torch has it; its own goes through a kernel that a build for the CPU does not make fakes of."""
    for holder, name in ((torch, "isfinite"), (torch.Tensor, "isfinite")):
        monkeypatch.setattr(holder, name, lambda x: (x.abs() != torch.inf) & (x == x))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def parameters(count, *devices, dtype=torch.float32):
    """Inside of the mode: ``count`` matrices, with gradients, on each device in turn."""
    made = [torch.nn.Parameter(torch.zeros(4, 5, dtype=dtype, device=devices[i % len(devices)])) for i in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def tensor(value=1.0, device=SECOND):
    return torch.full((), value, device=device)


def by_name(rule):
    return lambda ps: rule([(str(i), p) for i, p in enumerate(ps)])


# Of each: what makes it, and how many kernels each further tensor may cost on one device in float32 and in half.
def under_sgd(clipper):
    """Decide as a guard of SGD does."""

    def act(ps):
        reach = Reach([{"params": ps}], [0.1])
        return clipper.decide(replace(gradients_of(None, ps), reach=reach))

    return act


CALLS = {
    "clip_grad_norm_": (lambda: lambda ps: gg.clip_grad_norm_(ps, 1.0), 0, 0),
    "clip_grad_norm_, tensor": (lambda: lambda ps: gg.clip_grad_norm_(ps, tensor()), 0, 0),
    "clip_grad_norm_, p=1": (lambda: lambda ps: gg.clip_grad_norm_(ps, 1.0, 1.0), 0, 0),
    "clip_grad_norm_, p=3": (lambda: lambda ps: gg.clip_grad_norm_(ps, 1.0, 3.0), 0, 0),
    "clip_grad_norm_, p=inf": (lambda: lambda ps: gg.clip_grad_norm_(ps, 1.0, torch.inf), 0, 0),
    "clip_grad_norm_, zero": (lambda: lambda ps: gg.clip_grad_norm_(ps, 1.0, nonfinite="zero"), 1, 1),
    "clip_grad_value_": (lambda: lambda ps: gg.clip_grad_value_(ps, 1.0), 0, 0),
    "clip_grad_value_, zero": (lambda: lambda ps: gg.clip_grad_value_(ps, 1.0, nonfinite="zero"), 1, 1),
    "clip_grad_value_, tensor": (lambda: lambda ps: gg.clip_grad_value_(ps, tensor()), 1, 1),
    "clip_grad_adaptive_": (lambda: lambda ps: gg.clip_grad_adaptive_(ps, 0.01), 5, 5),
    "get_total_norm": (lambda: lambda ps: gg.get_total_norm([p.grad for p in ps]), 0, 0),
    "ClipByGlobalNorm": (lambda: gg.ClipByGlobalNorm(1.0), 0, 0),
    "ClipByNorm": (lambda: gg.ClipByNorm(1.0), 2, 2),
    "ClipByRMS": (lambda: gg.ClipByRMS(1.0), 2, 2),
    "ClipByValue": (lambda: gg.ClipByValue(1.0), 0, 0),
    "ClipByValue, tensor": (lambda: gg.ClipByValue(tensor()), 2, 2),
    "ClipByValue, lopsided": (lambda: gg.ClipByValue(1.0, -2.0), 4, 4),
    "ClipAdaptive": (lambda: gg.ClipAdaptive(0.01), 5, 5),
    "ClipByMedian": (lambda: gg.ClipByMedian(), 0, 0),
    "ClipByMedian, what steps do": (lambda: under_sgd(gg.ClipByMedian()), 0, 2),
    "ZClip": (lambda: gg.ZClip(), 0, 0),
    "AdaGC": (lambda: by_name(gg.AdaGC()), 2, 2),
    "AutoClip": (lambda: gg.AutoClip(window=100), 0, 0),
    "ClipFraction": (lambda: gg.ClipFraction(0.1), 0, 0),
    "Chain": (lambda: gg.Chain(gg.ClipByValue(1.0), gg.ClipByGlobalNorm(1.0)), 0, 0),
}


@contextmanager
def skip_without_cuda_build():
    """Some operators ask the driver's library which device is current, fakes or not."""
    try:
        yield
    except RuntimeError as error:
        if torch.version.cuda is None and "not linked with support for cuda" in str(error):
            if os.environ.get("GRADGUARD_CUDA_BUILD") == "1":
                pytest.fail("make versions asks for a build of PyTorch for CUDA, and this is one for the CPU")
            pytest.skip("needs a build of PyTorch for CUDA, and no GPU: make versions has some")
        if "hasPrimaryContext expects a valid device index" in str(error):
            pytest.skip("from torch 2.15 on a backward asks the driver for the device, fakes or not")
        raise


def launches(name, count, devices, dtype):
    """Launches of the second step: on the first, state goes to the device, which is a wait."""
    with FakeTensorMode(), skip_without_cuda_build():
        call, ps = CALLS[name][0](), parameters(count, *devices, dtype=dtype)
        with Launches(waits=True):
            call(ps)
        with Launches() as seen:
            call(ps)
    return seen.seen


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [((FIRST,), torch.float32), ((FIRST,), torch.bfloat16), ((FIRST, SECOND), torch.float32)],
    ids=["one", "one, half", "two"],
)
@pytest.mark.parametrize("call", CALLS)
def test_no_wait_no_mix_of_devices_and_few_launches(call, devices, dtype):
    few, many = (launches(call, count, devices, dtype) for count in (4, 10))
    each = (many.total() - few.total()) / 6
    assert each <= CALLS[call][1 if dtype is torch.float32 else 2] + (len(devices) == 2), (each, many - few)


@pytest.mark.parametrize("call", CALLS)
def test_what_a_cuda_graph_records_copies_nothing_between_host_and_device(call, monkeypatch):
    """A replay would copy from memory that the host has used for something else since; and the host must not wait."""
    with FakeTensorMode(), skip_without_cuda_build():
        act, ps = CALLS[call][0](), parameters(4, SECOND)
        with Launches(waits=True):
            act(ps)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with Launches(copies=False):
            act(ps)


def test_a_copy_in_a_cuda_graph_is_caught():
    with FakeTensorMode(), pytest.raises(AssertionError, match="_to_copy from cpu to cuda:0"), Launches(copies=False):
        torch.zeros(3, device="cpu").to(FIRST, non_blocking=True)


def test_a_wait_is_caught():
    with FakeTensorMode(), pytest.raises(AssertionError, match="_to_copy from cpu to cuda:0 waits"), Launches():
        torch.zeros(3).to(FIRST)
    with FakeTensorMode(), Launches() as seen:
        torch.zeros(3).to(FIRST, non_blocking=True)
    assert seen.seen["_to_copy"] == 1


def test_a_mix_of_devices_is_caught():
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"two (different )?devices,? cuda:0"):
        tensor(device=FIRST) + tensor(device=SECOND)


def test_the_scale_of_a_grad_scaler_may_lie_on_another_device_than_the_gradients():
    with FakeTensorMode(), Launches():
        weight = torch.nn.Parameter(torch.zeros(3, device=FIRST))
        proxy = OptimizerProxy(torch.optim.SGD([weight], lr=0.1))
        stepped = proxy.enter()
        proxy.fold(tensor(0.5, FIRST).double(), tensor(65536.0, SECOND))
    assert stepped.grad_scale.device == torch.device(FIRST)


def test_a_guard_of_an_optimizer_that_is_not_fused_reads_the_device_once(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    reads = Counter()
    for name in ("__bool__", "__float__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, counted(reads, getattr(torch.Tensor, name)))
    monkeypatch.setattr("gradguard.clip.guard.are_readable", lambda *_: False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    reads_of = guard._act

    def act(*args):
        reads.clear()
        monkeypatch.setattr("gradguard.clip.guard.Decision.apply", lambda _: None)
        outcome = reads_of(*args)
        reads["of the guard"] = reads.total()
        return outcome

    monkeypatch.setattr(guard, "_act", act)
    scaler.step(optimizer)
    assert reads["of the guard"] == 1, reads


def counted(reads, original):
    def read(self):
        reads[original.__name__] += 1
        return original(self)

    return read


on_the_device = SimpleNamespace(device=torch.device(FIRST))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: LockIn().to(FIRST), "the memory of the lock-in alarm"),
        (
            lambda: Counts(3).decided(on_the_device),
            "the count of skipped steps",
        ),
        (lambda: gg.ZClip()._follow(torch.device(FIRST)), "the state of ZClip"),
    ],
)
def test_no_state_is_made_while_a_graph_is_recorded(make, what, monkeypatch):
    """Its replays would begin anew each time."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedGradientError, match=f"{what} is made on its first step on cuda:0, and a CUDA graph"):
        make()


class Landing:
    """Copies that land when ``here`` says so."""

    def __init__(self):
        self.here, self.waits = False, 0

    def query(self):
        return self.here

    def synchronize(self):
        self.waits += not self.here


def test_error_clip_statistics_look_at_counts_once_they_have_landed(monkeypatch):
    event = Landing()
    monkeypatch.setattr(statistics, "copy_to_host", lambda flat: (flat, event))
    stats = gg.ErrorClipStats()
    for _ in range(20):
        stats.begin(None)
        stats.note(statistics._OpCounts("MulBackward0", ""), "", 4, torch.tensor(2))
        stats.end()
    assert stats._first is None
    assert event.waits == 0
    assert len(stats._unread) == 20
    event.here = True
    stats.end()
    assert stats._first is not None
    assert stats._first.block == 1
    assert not stats._unread


def test_pinned_memory_is_on_the_host_whatever_the_default_device_is(monkeypatch):
    made = []

    def empty(shape, **options):
        made.append(options)
        return torch.zeros(shape, device="cpu")

    backend = SimpleNamespace(device=lambda _: nullcontext(), Event=lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(host_copy, "torch", SimpleNamespace(empty=empty, cuda=backend))
    flat = SimpleNamespace(is_cuda=True, device=FIRST, shape=(2,), dtype=torch.float32)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: None)
    host_copy.copy_to_host(flat)
    assert made == [{"dtype": torch.float32, "device": "cpu", "pin_memory": True}]


@pytest.mark.parametrize("p", [2.0, 3.0])
def test_norms_convert_a_bounded_part_at_a_time(p, monkeypatch):
    monkeypatch.setattr(norms, "CONVERTED", 64)
    monkeypatch.setattr(units, "CONVERTED", 64)
    sizes = []
    taken = norms.foreach_norm

    def foreach_norm(tensors, order, dtype):
        sizes.extend(x.numel() for x in tensors if order not in norms._FAST)
        assert all(x.is_contiguous() for x in tensors), "one strided tensor sends all down the slow route"
        return taken(tensors, order, dtype)

    monkeypatch.setattr(norms, "foreach_norm", foreach_norm)
    values = [torch.arange(300.0), torch.arange(40.0).view(4, 10)[:, ::2]]
    got = norms._device_norms(values, p, torch.device("cpu"))
    assert got.tolist() == pytest.approx([float(torch.linalg.vector_norm(x.double(), p)) for x in values], rel=1e-14)
    assert max(sizes, default=0) <= 64


def test_squares_of_samples_are_converted_a_bounded_part_at_a_time(monkeypatch):
    monkeypatch.setattr(units, "CONVERTED", 64)
    seen = []
    original = torch.linalg.vector_norm

    def vector_norm(x, *args, **kwargs):
        seen.append(x.numel())
        return original(x, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", vector_norm)
    row_squares(torch.ones(20, 16, device="meta"))
    assert max(seen) <= 64
    assert sum(seen) == 320


CHECKS = {
    "gradcheck": lambda f: gg.gradcheck(f, torch.ones(2, requires_grad=True)),
    "check_grad": lambda f: gg.check_grad(f, {"x": torch.ones(2)}, ["x"], 0, only_cpu=True),
    "get_numerical_gradient": lambda f: gg.get_numerical_gradient(f, {"x": torch.ones(2)}, 0, "x", delta=0.1),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_gradient_check_is_without_tf32_and_puts_it_back(precision, check, monkeypatch):
    def switches():
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    def kinds():
        backends = torch.backends
        own = (
            backends.cuda.matmul,
            backends.cudnn.conv,
            backends.cudnn.rnn,
            backends.mkldnn.matmul,
            backends.mkldnn.conv,
        )
        return [one.fp32_precision for one in own]

    def f(x):
        seen.add(switches())
        return x * x

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen, before = set(), switches()
    torch.set_float32_matmul_precision(precision)
    try:
        each = kinds()
        check(f)
        assert switches() == (before[0], precision)
        assert kinds() == each
    finally:
        torch.set_float32_matmul_precision(before[1])
    assert seen == {(False, "highest")}


def test_the_warning_that_an_optimizer_is_captured_comes_once():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    proxy = OptimizerProxy(optimizer)
    mark = capturable_warning_mark()
    setattr(proxy.enter(), mark, True)
    proxy.leave()
    assert getattr(optimizer, mark)
    delattr(optimizer, mark) if mark in vars(optimizer) else None
    proxy.enter()
    proxy.skip()
    proxy.leave()
    assert mark not in vars(optimizer), "a step on nothing must not silence the warning"


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 1.0)])
@pytest.mark.parametrize("element", [0.5, 1.0, 1.5, -1.5, -2.5, float("nan"), float("inf"), -float("inf")])
def test_what_exceeds_is_the_same_in_one_kernel(bounds, element, monkeypatch):
    tensors = [torch.tensor([0.1, element]), torch.tensor([0.2]), torch.tensor([0.3, element]).double()]
    want = any(bool(((x < bounds[0]) | (x > bounds[1])).any()) for x in tensors)
    monkeypatch.setattr(scaling, "are_readable", lambda *_: False)
    assert bool(scaling.exceeds(tensors, *bounds)) is want


class Attends(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, 8, device=FIRST) for _ in range(3))
        self.causal = causal

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = None if self.causal else torch.ones(5, 5, dtype=torch.bool, device=FIRST)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make", ["watch", "clip"])
def test_a_clip_of_logits_waits_for_nothing_after_its_first_step(make, exact, causal, monkeypatch):
    monkeypatch.setattr(LateReader, "push", lambda self, values: None)
    with FakeTensorMode(allow_non_fake_inputs=False), skip_without_cuda_build():
        model = Attends(causal)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = gg.LogitWatch(model, exact=exact) if make == "watch" else gg.QKClip(optimizer, model, 3.0, exact=exact)
        for step in range(3):
            with Launches(waits=step == 0):
                model.zero_grad()
                model(torch.ones(3, 5, 8, device=FIRST)).sum().backward()
                optimizer.step()
        assert (made.max_logits if make == "watch" else made.last)[""].device == torch.device(FIRST)
