"""What a GPU must show; on a machine without one the same on the CPU, so that the tests are known to run.

`make gpu` runs this where there is a GPU. **That has not happened yet.**
"""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from reference import clip_adaptive, clip_norm, clip_value, total_norm

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(300, 40), (41,), (), (7, 3, 3, 3), (0, 4), (1, 70_001)]
only_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def parameters(dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.05).to(DEVICE, dtype))
        p.grad = (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)
        made.append(p)
    return made


def gradients(params):
    return [p.grad.cpu().clone() for p in params]


@contextmanager
def no_wait():
    """Whatever makes the host wait for the GPU raises in this block."""
    if not GPU:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))


# Clips.


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_clip(dtype, p):
    params = parameters(dtype)
    before = gradients(params)
    gg.clip_grad_norm_(params, 1.0, p)  # the first use compares kernels, and compiles
    for p_, g in zip(params, before, strict=True):
        p_.grad.copy_(g)
    with no_wait():
        norm = gg.clip_grad_norm_(params, 1.0, p)
    assert norm.device.type == DEVICE
    assert float(norm) == pytest.approx(total_norm(before, p), rel=2e-6, abs=0)
    close(gradients(params), clip_norm(before, 1.0, p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_adaptive_clip(dtype):
    params = parameters(dtype)
    before, weights = gradients(params), [p.detach().cpu().clone() for p in params]
    gg.clip_grad_value_(params, 1e9)  # the first use compares kernels, and compiles
    gg.clip_grad_adaptive_(params, 1e9)
    with no_wait():
        gg.clip_grad_value_(params, 0.5)
    close(gradients(params), clip_value(before, -0.5, 0.5))
    for p, g in zip(params, before, strict=True):
        p.grad.copy_(g)
    with no_wait():
        gg.clip_grad_adaptive_(params, 0.01)
    for found, weight, gradient in zip(gradients(params), weights, before, strict=True):
        units = [torch.ones_like(weight, dtype=torch.bool)] if weight.dim() < 2 else []
        for row in range(len(weight) if weight.dim() > 1 else 0):
            units.append(torch.zeros_like(weight, dtype=torch.bool))
            units[-1][row] = True
        expected = clip_adaptive(weight, gradient, units, 0.01)
        torch.testing.assert_close(found, expected.to(found.dtype))


def test_half_precision_beyond_its_range_and_nonfinite_gradients():
    params = parameters(torch.float16, scale=1e4)
    before = gradients(params)
    assert float(gg.clip_grad_norm_(params, 1.0)) == pytest.approx(total_norm(before), rel=1e-5)
    close(gradients(params), clip_norm(before, 1.0))
    for bad in (math.nan, math.inf):
        params = parameters()
        params[0].grad[3, 3] = bad
        with no_wait():
            gg.clip_grad_norm_(params, 1.0, nonfinite="zero")
        assert all(int(g.count_nonzero()) == 0 for g in gradients(params))
        params[0].grad[3, 3] = bad
        with pytest.raises(gg.errors.NonFiniteGradientError, match="1 of 12,000"):
            gg.clip_grad_norm_(params, 1.0, nonfinite="raise")


def test_a_clip_that_does_not_bind_changes_no_bit():
    for dtype in DTYPES:
        params = parameters(dtype)
        before = gradients(params)
        gg.clip_grad_norm_(params, 1e9)
        gg.clip_grad_value_(params, 1e3)
        assert all(torch.equal(a, b) for a, b in zip(gradients(params), before, strict=True))


@pytest.mark.parametrize("rule", ["ClipByGlobalNorm", "ClipByNorm", "ClipByValue", "ClipAdaptive", "ClipByMedian"])
def test_clippers_do_not_wait_after_their_first_step(rule):
    clipper = gg.ClipByMedian() if rule == "ClipByMedian" else getattr(gg, rule)(0.5)
    params = parameters()
    clipper(params)
    with no_wait():
        for _ in range(3):
            clipper(params)


# Guards.


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3)).to(DEVICE)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 12, generator=generator).to(DEVICE), torch.randn(16, 3, generator=generator).to(DEVICE)


@pytest.mark.parametrize("fused", [False, True])
def test_a_guard_is_the_clip_and_the_step(fused):
    ours, theirs = model(), model()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused) for net in (ours, theirs))
    guard = gg.Guard(a, gg.ClipByGlobalNorm(0.05))
    for step in range(5):
        x, y = batch(step)
        for net in (ours, theirs):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        a.step()
        b.step()
    assert bool(guard.last.clipped)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_every_bit(fused):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    guard = gg.Guard(optimizer, gg.ClipByGlobalNorm(1.0))
    x, y = batch()
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    before = copy.deepcopy([p.detach() for p in net.parameters()]), copy.deepcopy(optimizer.state_dict())
    next(net.parameters()).grad[0, 0] = math.nan
    with no_wait() if fused else torch.no_grad():
        optimizer.step()
    assert guard.skipped_steps == 1
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before[0], strict=True))
    state = optimizer.state_dict()["state"]
    assert all(
        torch.equal(state[k][name], value) for k, one in before[1]["state"].items() for name, value in one.items()
    )


@only_gpu
def test_grad_scaler_and_guard():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    guard, scaler = gg.Guard(optimizer, gg.ClipByGlobalNorm(0.05)), torch.amp.GradScaler("cuda")
    for step in range(5):
        x, y = batch(step)
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert math.isfinite(float(guard.last.norm))


@only_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clip_in_a_cuda_graph(dtype):
    params = parameters(dtype)
    static = [p.grad for p in params]
    clip = gg.ClipByGlobalNorm(1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gg.clip_grad_norm_(params, 1.0)
            clip(params)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = gg.clip_grad_norm_(params, 1.0)
    for seed in (1, 2):
        fresh = gradients(parameters(dtype, scale=3.0, seed=seed))
        for g, value in zip(static, fresh, strict=True):
            g.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert float(norm) == pytest.approx(total_norm(fresh), rel=2e-6)
        close([g.cpu() for g in static], clip_norm(fresh, 1.0))


# The other systems.


def test_error_clip():
    on_cpu, net = model().cpu(), model()
    x, y = batch()
    for one, (a, b) in ((net, (x, y)), (on_cpu, (x.cpu(), y.cpu()))):
        loss = F.mse_loss(one(a), b)
        with gg.error_clip(loss, gg.ErrorClipByValue(max=1e-3)):
            loss.backward()
    for p, q in zip(net.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what Inductor imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # in torch 2.11
def test_error_clip_in_compiled_code():
    net, other = model(), model()
    x, y = batch()

    rule = gg.ErrorClipByValue(max=1e-3)  # which torch 2.11 cannot make inside of compiled code

    def step(x, y):
        return gg.attach_error_clip(F.mse_loss(net(x), y), rule)

    torch.compile(step)(x, y).backward()
    loss = F.mse_loss(other(x), y)
    with gg.error_clip(loss, rule):
        loss.backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_gradient_check():
    report = gg.gradcheck(
        lambda x, w: F.gelu(x @ w), torch.randn(4, 5, device=DEVICE), torch.randn(5, 3, device=DEVICE)
    )
    assert report.verdict == "PASS"
    wrong = gg.gradcheck(lambda x: Doubled.apply(x), torch.randn(4, device=DEVICE))
    assert wrong.verdict == "FAIL"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_the_seed_s_check_looks_at_the_gpu_too():
    assert gg.check_grad(torch.sin, {"x": torch.tensor([0.1, 0.7])}, ["x"], "out", only_cpu=not GPU) is None


def test_per_sample_clipping():
    on_cpu, net = model().cpu(), model()
    x, y = batch()
    for one, (a, b) in ((net, (x, y)), (on_cpu, (x.cpu(), y.cpu()))):
        clipper = gg.PerSampleGradientClipper(one, gg.FlatNormClipper(0.1))
        F.mse_loss(one(a), b).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    for p, q in zip(net.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6)


def test_watching(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    with gg.Monitor(optimizer, tmp_path / "run.jsonl", model=net):
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            expected.append(total_norm([p.grad.cpu() for p in net.parameters()]))
            optimizer.step()
    from gradguard.monitoring.record.file import read_record

    record = read_record(tmp_path / "run.jsonl")
    assert [step["norm"] for step in record.steps] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_one_process_of_a_group(tmp_path):
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        net, plain = fully_shard(model()), model()
        x, y = batch()
        for one in (net, plain):
            F.mse_loss(one(x), y).backward()
        norm = gg.clip_grad_norm_(net, 0.05)
        assert float(norm) == pytest.approx(total_norm([p.grad.cpu() for p in plain.parameters()]), rel=1e-5)
    finally:
        dist.destroy_process_group()


def test_parity_and_norm_audit():
    net = model()
    x, y = batch()

    def step():
        F.mse_loss(net(x), y).backward()

    gg.testing.assert_parity(gg.save_gradients(None, net, step), gg.save_gradients(None, net, step))
    step()
    audit = gg.audit_norm(net, lambda: gg.clip_grad_norm_(net, 0.05), max_norm=0.05)
    assert audit.verdict == "PASS", audit
