"""What a GPU must show; on a machine without one the same on the CPU, so that the tests are known to run.

`make gpu` runs this where there is a GPU. `test_pretended_device` runs some of it on a device that needs none.
"""

import copy
import importlib.util
import math
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from forked_python import run_python
from gradguard.per_sample import contributions
from gradguard.per_sample.layers import convolution
from gradguard.tensors import cuda_blocks
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
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


# The kernels of many tensors in one launch.


def on_device(values, dtype=torch.float32):
    """Parameters with these gradients, copies; weights of a tenth of them."""
    found = []
    for value in values:
        p = nn.Parameter((value * 0.1).to(DEVICE, dtype))
        p.grad = value.clone().to(DEVICE, dtype)
        found.append(p)
    return found


def drawn(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@only_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_do_on_this_gpu_what_torch_does(dtype):
    gg.clip_grad_norm_(parameters(dtype), 1.0)
    if torch.cuda.get_device_capability() >= cuda_blocks.OLDEST and importlib.util.find_spec("triton"):
        device = parameters(dtype)[0].grad.device
        assert cuda_blocks._serves(device, dtype)
        assert not cuda_blocks.differs_from_torch(device, dtype)


@only_gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_of_a_clip_do_not_grow_with_the_number_of_tensors(dtype):
    from torch.profiler import ProfilerActivity, profile

    clips = {
        "norm": (lambda ps: gg.clip_grad_norm_(ps, 0.1), 12 if dtype is torch.float64 else 5),
        "value": (lambda ps: gg.clip_grad_value_(ps, 0.1), 1),
        "adaptive": (lambda ps: gg.clip_grad_adaptive_(ps, 0.01), 60),
    }
    for name, (clip, most) in clips.items():
        params = on_device(drawn(*[(30, 7), (19,)] * 100), dtype)
        for _ in range(3):
            clip(params)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            clip(params)
            torch.cuda.synchronize()
        launched = sum(e.count for e in seen.key_averages() if "LaunchKernel" in e.key)
        assert launched <= most, (name, launched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [1, 3, 8])
def test_tensors_that_begin_anywhere_in_memory(dtype, start):
    """As the pieces of a flat buffer do; what lies between them is not touched."""
    sizes = [1, 5, 1023, 1024, 1025, 16_384, 40_001]
    memory = torch.randn(sum(sizes) + 8 * len(sizes) + start, generator=torch.Generator().manual_seed(0))
    memory = memory.to(DEVICE, dtype)
    before, at, params, spans = memory.cpu(), start, [], []
    for size in sizes:
        p = nn.Parameter(torch.zeros(size, dtype=dtype, device=DEVICE))
        p.grad = memory[at : at + size]
        params.append(p)
        spans.append(slice(at, at + size))
        at += size + start
    grads = [before[span].clone() for span in spans]
    assert float(gg.clip_grad_norm_(params, 1.0)) == pytest.approx(total_norm(grads), rel=2e-6)
    close(gradients(params), clip_norm(grads, 1.0))
    outside = torch.ones(len(before), dtype=torch.bool)
    for span in spans:
        outside[span] = False
    assert torch.equal(memory.cpu()[outside], before[outside])


def test_gradients_that_are_made_anew_each_step_and_change_their_size():
    params = on_device(drawn((300, 40), (41,), (7, 3, 3, 3)))
    for step in range(6):
        size = 41 + step % 2
        params[1] = nn.Parameter(torch.zeros(size, device=DEVICE))
        for p, value in zip(params, drawn((300, 40), (size,), (7, 3, 3, 3), seed=step), strict=True):
            p.grad = None
            p.grad = value.to(DEVICE)
        before = gradients(params)
        norm = gg.clip_grad_norm_(params, 1.0)
        close(gradients(params), clip_norm(before, 1.0))
        assert float(norm) == pytest.approx(total_norm(before), rel=2e-6)


@only_gpu
def test_a_stream_of_its_own():
    params = on_device(drawn((500, 400), (41,)))
    before = gradients(params)
    stream = torch.cuda.Stream()
    for _ in range(3):
        gg.clip_grad_norm_(params, 1e9)  # on the usual stream, with the same tables
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            norm = gg.clip_grad_norm_(params, 1.0)
        torch.cuda.current_stream().wait_stream(stream)
        assert float(norm) == pytest.approx(total_norm(before), rel=2e-6)
        close(gradients(params), clip_norm(before, 1.0))
        for p, g in zip(params, before, strict=True):
            p.grad.copy_(g)


def test_the_same_bits_twice():
    values = drawn((700, 300), (41,), (100_003,), (64, 3, 7, 7))
    found = []
    for _ in range(3):
        params = on_device(values)
        norms = gg.clip_grad_norm_(params, 0.5), gg.clip_grad_adaptive_(params, 0.01)
        found.append([*map(torch.Tensor.cpu, norms), *gradients(params)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_1_changes_no_bit_of_odd_numbers(dtype):
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-7, 6e4, 1.0]).to(dtype)
    params = on_device([odd.repeat(1000), torch.zeros(0), torch.ones(())], dtype)
    before = gradients(params)
    gg.clip_grad_norm_(params, 1e30)
    gg.clip_grad_adaptive_(params, 1e30, nonfinite="zero")
    for found, was in zip(gradients(params), before, strict=True):
        assert torch.equal(found, was)
        assert torch.equal(found.signbit(), was.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_any_magnitude(dtype):
    for scale in (1e-42, 1e-25, 1e25, 1e35):
        params = on_device([x * scale for x in drawn((300, 40), (1, 70_001))], dtype)
        before = gradients(params)
        assert float(gg.clip_grad_norm_(params, math.inf)) == pytest.approx(total_norm(before), rel=2e-6, abs=0)
        assert float(gg.clip_grad_norm_(params, math.inf, math.inf)) == total_norm(before, math.inf)


def test_factors_below_float32_keep_their_digits():
    params = on_device([torch.full((5000,), 3e37)])
    gg.clip_grad_norm_(params, 1e-3)
    assert gradients(params)[0].double().tolist() == pytest.approx([1e-3 / math.sqrt(5000)] * 5000, rel=1e-6)


def test_units_by_rows_and_by_columns_together():
    layers = nn.ModuleList([nn.Linear(40, 30), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.Conv2d(3, 8, 3)]).to(DEVICE)
    on_cpu = copy.deepcopy(layers).cpu()
    for p, q in zip(layers.parameters(), on_cpu.parameters(), strict=True):
        q.grad = drawn(p.shape)[0]
        p.grad = q.grad.clone().to(DEVICE)
    layers[2].weight.grad = layers[2].weight.grad.contiguous(memory_format=torch.channels_last)
    a, b = gg.clip_grad_adaptive_(layers, 0.01), gg.clip_grad_adaptive_(on_cpu, 0.01)
    torch.testing.assert_close(a.cpu(), b)
    close(gradients(layers.parameters()), gradients(on_cpu.parameters()))


def test_each_tensor_by_itself():
    values = drawn((300, 40), (41,), (7, 3, 3, 3), (0, 4))
    params, on_cpu = on_device(values), [nn.Parameter(torch.zeros_like(v)) for v in values]
    for p, v in zip(on_cpu, values, strict=True):
        p.grad = v.clone()
    gg.ClipByNorm(0.5)(params)
    gg.ClipByNorm(0.5)(on_cpu)
    close(gradients(params), gradients(on_cpu))


@only_gpu
def test_a_switch_of_the_environment_turns_the_kernels_off():
    code = (
        "import sys, torch, gradguard as gg\n"
        "p = torch.nn.Parameter(torch.zeros(5, device='cuda')); p.grad = torch.ones(5, device='cuda')\n"
        "gg.clip_grad_norm_([p], 1.0)\n"
        "assert 'gradguard.tensors.cuda_kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"GRADGUARD_TRITON": "0"}, check=True)


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
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
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


@pytest.mark.slow
@pytest.mark.parametrize("clip", [gg.clip_grad_norm_, gg.clip_grad_value_])
def test_16_bit_gradients_of_fsdp2(clip, tmp_path):
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        net, plain = fully_shard(model().bfloat16()), model().bfloat16()
        for scale in (1.0, 1e3):
            x, y = (one.bfloat16() for one in batch())
            for one in (net, plain):
                one.zero_grad()
                (scale * F.mse_loss(one(x), y)).backward()
            before = gradients(plain.parameters())
            norm = clip(net, 0.05)
            expected = clip_norm(before, 0.05) if clip is gg.clip_grad_norm_ else clip_value(before, -0.05, 0.05)
            if norm is not None:
                assert float(norm) == pytest.approx(total_norm(before), rel=1e-5)
            close([p.grad.to_local().cpu() for p in net.parameters()], expected)
    finally:
        dist.destroy_process_group()


def whole_step(device, decay=0.1, momentum=None):
    net = Images().to(device)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8, generator=g).to(device), torch.randint(0, 5, (6,), generator=g).to(device)
    if momentum is None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=decay, fused=True)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=decay, momentum=momentum)

    def step():
        F.cross_entropy(net(x), y).backward()

    def update():
        gg.clip_grad_norm_(net, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return gg.save_gradients(None, net, step, optimizer=optimizer, update=update, steps=3)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_the_whole_step_on_the_gpu_is_that_of_the_cpu(momentum):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    runs = []
    for device, decay in (("cpu", 0.1), (DEVICE, 0.1), (DEVICE, 0.3)):
        torch.set_rng_state(state)
        runs.append(whole_step(device, decay, momentum))
    gg.testing.assert_parity(runs[0], runs[1])
    with pytest.raises(AssertionError, match="FAIL"):
        gg.testing.assert_parity(runs[0], runs[2])


# Attention logits.


class Attends(nn.Module):
    """Causal attention of 4 heads of 16, its queries changed by ``between``; keeps those that attended."""

    def __init__(self, between=None):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        self.between = between or (lambda query: query)
        with torch.no_grad():
            self.q_proj.weight.mul_(6)

    def forward(self, x):
        query, key, value = (
            one(x).unflatten(-1, (4, 16)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = self.between(query)
        self.attended = query.detach(), key.detach()
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_logits_are_watched_and_clipped(half, fused, request):
    """By the published rule, in float64 by hand, and the host waits for nothing after the first step."""
    request.addfinalizer(lambda old=torch.backends.cudnn.allow_tf32: allow_tf32(False, old))
    allow_tf32(True, True)  # which is nothing to the products of logits
    torch.manual_seed(0)
    net = Attends().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
    clip, watch, clipped = gg.QKClip(optimizer, net, 3.0), gg.LogitWatch(net), 0
    for step in range(4):
        x = torch.randn(3, 9, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        before = [p.detach().double() for p in net.parameters()]
        watch.reset()
        with no_wait() if step else nullcontext():
            net.zero_grad()
            with torch.autocast(DEVICE, half or torch.bfloat16, enabled=half is not None):
                out = net(x)
            out.float().square().mean().backward()
            optimizer.step()
        query, key = (one.double() for one in net.attended)
        masked = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril().logical_not()
        largest = (query @ key.mT / 4).masked_fill(masked, -math.inf).amax((0, 2, 3))
        torch.testing.assert_close(clip.last[""], largest, rtol=1e-5, atol=0)
        torch.testing.assert_close(watch.max_logits[""].double(), largest, rtol=1e-5, atol=0)
        gamma = (3.0 / largest).clamp(max=1.0).sqrt().repeat_interleave(16)
        for (name, p), old in zip(net.named_parameters(), before, strict=True):
            new = old - 0.01 * p.grad.double()
            if not name.startswith("v"):
                new *= gamma.reshape(-1, *[1] * (p.dim() - 1))
            torch.testing.assert_close(p.detach().double(), new, rtol=1e-5, atol=1e-7)
        clipped += int((largest > 3.0).sum())
    assert clipped > 0


def test_an_attention_between_which_and_its_layers_lies_a_norm_is_refused():
    """On a GPU some steps late, and what was wrong is rescaled on none of them."""
    torch.manual_seed(0)
    net = Attends(lambda query: 30 * F.normalize(query, dim=-1)).to(DEVICE)
    twin = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (net, twin))
    gg.QKClip(ours, net, 3.0)

    def train():
        for step in range(5):
            x = torch.randn(3, 9, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            for one, optimizer in ((twin, theirs), (net, ours)):
                one.zero_grad()
                one(x).square().mean().backward()
                if one is net:
                    optimizer.step()
            if GPU:
                torch.cuda.synchronize()
            theirs.step()  # what is refused has not stepped

    with pytest.raises(gg.errors.UnsupportedGradientError, match="what its projections return") as refusal:
        train()
    assert ("no step was taken" in str(refusal.value)) == (not GPU)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


# Graphs and compiled code.


def on_side_stream(call, times=3):
    """Warm up as PyTorch's notes on CUDA graphs ask for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)


FOLDED = {
    "norm": lambda: gg.ClipByGlobalNorm(0.05),
    "median": lambda: gg.ClipByMedian(warmup=2),
    "z-score": lambda: gg.ZClip(),
}
WRITTEN = {
    "each tensor": lambda: gg.ClipByNorm(0.02),
    "value": lambda: gg.ClipByValue(1e-3),
    "adaptive": lambda: gg.ClipAdaptive(0.01),
    "AdaGC": lambda: gg.AdaGC(),
}


@only_gpu
@pytest.mark.parametrize("rule", FOLDED)
def test_a_whole_guarded_step_in_a_cuda_graph(rule):
    """Replays, with a gradient that is NaN among them, beside the same steps run plainly."""
    plain, recorded = model(), model()
    steps = []
    for net in (plain, recorded):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True, capturable=True)
        guard = gg.Guard(optimizer, FOLDED[rule](), max_consecutive_skips=None)
        x, y = batch()
        F.mse_loss(net(x), y).backward()
        steps.append((net, optimizer, guard))

    def fill(net, step):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(net.parameters()):
            p.grad.copy_(torch.randn(p.shape, generator=generator) * (1 + step % 4))
            if step in (6, 9) and i == 1:
                p.grad[0] = math.nan

    def run(k, step):
        fill(steps[k][0], step)
        steps[k][1].step()

    for step in range(3):
        run(0, step)
    it = iter(range(3))
    on_side_stream(lambda: run(1, next(it)))
    fill(recorded, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[1][1].step()
    for step in range(3, 12):
        run(0, step)
        fill(recorded, step)
        graph.replay()
        torch.cuda.synchronize()
        for p, q in zip(plain.parameters(), recorded.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert steps[0][2].skipped_steps == 2
    assert steps[1][2].skipped_steps == 2


@only_gpu
@pytest.mark.parametrize("rule", WRITTEN)
def test_a_skip_that_the_host_decides_is_refused_in_a_cuda_graph(rule):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True, capturable=True)
    gg.Guard(optimizer, WRITTEN[rule]())
    x, y = batch()
    F.mse_loss(net(x), y).backward()
    on_side_stream(optimizer.step)
    before = [p.detach().clone() for p in net.parameters()]
    with (
        pytest.raises(gg.errors.UnsupportedGradientError, match="the host decides whether"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@only_gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_clip_in_compiled_code(mode):
    params = parameters()
    before = gradients(params)
    compiled = torch.compile(lambda: gg.clip_grad_norm_(params, 1.0), mode=mode)
    for _ in range(4):
        for p, g in zip(params, before, strict=True):
            p.grad.copy_(g)
        norm = compiled()
        assert float(norm) == pytest.approx(total_norm(before), rel=2e-6)
        close(gradients(params), clip_norm(before, 1.0))


@only_gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_guard_beside_a_compiled_model():
    ours, theirs = model(), model()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    gg.Guard(a, gg.ClipByGlobalNorm(0.05))
    fast = torch.compile(ours, mode="reduce-overhead")
    for step in range(6):
        x, y = batch(step)
        for net, called in ((ours, fast), (theirs, theirs)):
            net.zero_grad()
            F.mse_loss(called(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


# Sizes that only a GPU has the memory for.


@only_gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_more_elements_than_a_32_bit_number_counts(dtype):
    count = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 8 * count * torch.finfo(dtype).bits // 8:
        pytest.skip("too little memory is free")
    p = nn.Parameter(torch.zeros(count, dtype=dtype, device="cuda"))
    p.grad = torch.full((count,), 0.25, dtype=dtype, device="cuda")
    p.grad[-1] = 4.0
    expected = math.sqrt(0.25**2 * (count - 1) + 16)
    assert float(gg.get_total_norm([p.grad])) == pytest.approx(expected, rel=1e-6)
    assert float(gg.clip_grad_norm_([p], 0.5 * expected)) == pytest.approx(expected, rel=1e-6)
    assert float(p.grad[0]) == pytest.approx(0.125, rel=1e-2)
    assert float(p.grad[-1]) == pytest.approx(2.0, rel=1e-2)
    gg.clip_grad_value_([p], 1.0)
    assert float(p.grad[-1]) == 1.0
    p.grad[-2] = math.nan
    with pytest.raises(gg.errors.NonFiniteGradientError, match="1 of"):
        gg.clip_grad_norm_([p], 1.0, nonfinite="raise")


@only_gpu
def test_a_clip_takes_little_memory_of_its_own():
    for dtype in (torch.float32, torch.bfloat16):
        params = []
        for _ in range(16):
            p = nn.Parameter(torch.zeros(1024, 4096, dtype=dtype, device="cuda"))
            p.grad = torch.randn_like(p)
            params.append(p)
        held = sum(p.grad.nbytes for p in params)
        for clip in (gg.clip_grad_norm_, gg.clip_grad_value_):
            clip(params, 1e-3)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            clip(params, 1e-4)
            assert torch.cuda.max_memory_allocated() - before < 0.15 * held


# Per-sample clipping.


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.out = nn.Conv2d(16, 24, 3, stride=2, bias=False), nn.Linear(24 * 9, 5)

    def forward(self, x):
        return self.out(F.relu(self.second(F.relu(self.norm(self.first(x))))).flatten(1))


class Words(nn.Module):
    def __init__(self, kind="attention"):
        super().__init__()
        self.kind = kind
        self.table, self.out = nn.Embedding(23, 16), nn.Linear(16, 5)
        self.mix = (
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            if kind == "attention"
            else nn.LSTM(16, 16, batch_first=True)
        )

    def forward(self, ids):
        h = self.mix(self.table(ids))
        return self.out((h if self.kind == "attention" else h[0]).mean(1))


SAMPLES = {
    "images": (Images, lambda g: torch.randn(12, 3, 8, 8, generator=g)),
    "attention": (Words, lambda g: torch.randint(0, 23, (12, 7), generator=g)),
    "lstm": (lambda: Words("lstm"), lambda g: torch.randint(0, 23, (12, 7), generator=g)),
}


def own_gradients(net, x, y):
    """Each sample's gradient in float64 on the CPU, by plain backwards."""
    twin = copy.deepcopy(net).cpu().double()
    found = []
    for i in range(len(x)):
        twin.zero_grad()
        one = x[i : i + 1].cpu()
        F.cross_entropy(twin(one.double() if one.is_floating_point() else one), y[i : i + 1].cpu()).backward()
        found.append([p.grad.clone() for p in twin.parameters()])
    return found


def allow_tf32(products, convolutions):
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_clipped(name, autocast, tf32, request):
    """The step is the mean of each sample's own gradient, bounded; rounding of the forward is allowed for, no more."""
    request.addfinalizer(lambda old=torch.backends.cudnn.allow_tf32: allow_tf32(False, old))
    allow_tf32(tf32, tf32)
    make, draw = SAMPLES[name]
    torch.manual_seed(1)
    net = make().to(DEVICE)
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(0.7))
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        x, y = draw(g).to(DEVICE), torch.randint(0, 5, (12,), generator=g).to(DEVICE)
        net.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = net(x)
        F.cross_entropy(out.float(), y).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        own = own_gradients(net, x, y)
        norms = [math.sqrt(sum(float(g.square().sum()) for g in one)) for one in own]
        bar = 4e-2 if autocast else 4e-3 if tf32 else 1e-4
        for i, p in enumerate(net.parameters()):
            expected = sum(one[i] * min(1.0, 0.7 / n) for one, n in zip(own, norms, strict=True)) / len(own)
            scale = max(float(one[i].abs().max()) for one in own) + 1e-12
            assert float((p.grad.cpu().double() - expected).abs().max()) <= bar * scale, (i, step)


def test_the_bound_of_each_sample_holds_exactly():
    """A batch of one after the clip is no longer than the bound, but for rounding."""
    net = Images().to(DEVICE)
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(0.1))
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(3, 3, 8, 8, generator=g).to(DEVICE), torch.randint(0, 5, (3,), generator=g).to(DEVICE)
        F.cross_entropy(net(x), y).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
        assert total <= 0.1 * (1 + 1e-5)
        net.zero_grad()


@pytest.fixture
def tensor_cores(monkeypatch):
    """Products of 16-bit matrices with float32 sums; on the CPU they are made of converted ones."""
    monkeypatch.setattr(contributions, "_WORTH_SPLITTING", 0)
    if not GPU:
        monkeypatch.setattr(contributions, "_has_tensor_cores", lambda device: True)
        monkeypatch.setattr(contributions, "_multiply_halves", lambda left, right: left.float() @ right.float())
        monkeypatch.setattr(convolution, "_unfolds", lambda grad: True)


LAYERS = {
    "few positions": (lambda: nn.Linear(768, 512), (6, 16, 768)),
    "many positions": (lambda: nn.Linear(48, 32), (4, 96, 48)),
    "rows": (lambda: nn.Linear(96, 64), (5, 96)),
    "more out than in": (lambda: nn.Linear(33, 517), (6, 5, 33)),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1), (5, 8, 9, 7)),
    "few pixels": (lambda: nn.Conv2d(48, 40, 3, stride=2, groups=2), (5, 48, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(6, 10, 4, stride=2), (5, 6, 9)),
}


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_products_of_16_bits_lose_nothing(name, dtype, tf32, request, tensor_cores):
    """Each element is a float32 sum of exact products of what the layer computed with; no norm is too small."""
    request.addfinalizer(lambda old=torch.backends.cudnn.allow_tf32: allow_tf32(False, old))
    allow_tf32(tf32, tf32)
    make, shape = LAYERS[name]
    torch.manual_seed(2)
    net, bound = make().to(DEVICE), 0.5
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(bound), loss_reduction="sum")
    for step in range(2):
        sizes = 10.0 ** torch.arange(-2.0, shape[0] - 2).view(-1, *[1] * (len(shape) - 1))
        x = (torch.randn(shape) * sizes).to(DEVICE)
        net.zero_grad()
        with torch.autocast(DEVICE, dtype):
            out = net(x)
        assert out.dtype is dtype
        weight = torch.randn(out.shape).to(DEVICE) / 30
        (out.float() * weight).sum().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        twin = copy.deepcopy(net).cpu().double()
        own = []
        for i in range(shape[0]):
            twin.zero_grad()
            rounded, grad = (t[i : i + 1].to(dtype).cpu().double() for t in (x, weight))
            (twin(rounded) * grad).sum().backward()
            own.append([p.grad.clone() for p in twin.parameters()])
        norms = torch.tensor([math.sqrt(sum(float(g.square().sum()) for g in one)) for one in own])
        found = clipper.statistics.norms.cpu()
        assert bool((found >= norms * (1 - 1e-6)).all()), (found, norms)
        assert bool((found <= norms * (1 + 1e-4)).all()), (found, norms)
        factors = clipper.statistics.factors[0].cpu()
        for i, p in enumerate(net.parameters()):
            terms = torch.stack([one[i] * float(c) for one, c in zip(own, factors, strict=True)])
            error = (p.grad.cpu().double() - terms.sum(0)).abs()
            size = terms.abs().sum(0) + terms.abs().mean()
            assert bool((error <= 2e-6 * size).all()), (i, step, float((error / size).max()))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.out(self.table(ids))


def test_labels_that_are_missing_later_are_refused():
    """On a GPU before the next forward, and nothing of that step is added."""
    net = Tagger().to(DEVICE)
    clipper = gg.PerSampleGradientClipper(net, gg.FlatNormClipper(0.1))
    ids = torch.arange(20).remainder(7).view(4, 5).to(DEVICE)
    labels = torch.zeros(4, 5, dtype=torch.long).to(DEVICE)

    def steps(count):
        for _ in range(count):
            net.zero_grad()
            F.cross_entropy(net(ids).mT, labels).backward()
            clipper.clip_and_accumulate()
            clipper.pre_step()

    steps(2)
    labels[1, 2:] = -100
    with pytest.raises(gg.errors.UnsupportedGradientError, match="mean over"):
        steps(2)


def test_private_training():
    torch.manual_seed(0)
    net = model()
    data = torch.utils.data.TensorDataset(torch.randn(64, 12), torch.randn(64, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    private = gg.private.make_private(
        gg.PerSampleGradientClipper(net, gg.FlatNormClipper(0.5)),
        optimizer,
        loader,
        gg.private.FixedNoise(noise_multiplier=1.0, delta=1e-3),
    )
    for _ in range(2):
        for x, y in private.loader:
            F.mse_loss(net(x.to(DEVICE)), y.to(DEVICE)).backward()
            private.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert 0 < private.epsilon() < 100


# The gradient check, on what cuDNN and cuBLAS compute.

CHECKED = {
    "convolution": lambda r: (lambda x, w: F.conv2d(x, w, padding=1), [r(2, 3, 6, 6), r(4, 3, 3, 3)]),
    "convolution across": lambda r: (lambda x, w: F.conv_transpose2d(x, w), [r(2, 3, 4, 4), r(3, 4, 3, 3)]),
    "product": lambda r: (torch.matmul, [r(5, 7), r(7, 4)]),
    "attention": lambda r: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [r(1, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8)],
    ),
    "layer norm": lambda r: (lambda x, w, b: F.layer_norm(x, (6,), w, b), [r(4, 6), r(6), r(6)]),
    "group norm": lambda r: (lambda x: F.group_norm(x, 2), [r(3, 4, 5)]),
    "softmax": lambda r: (lambda x: F.softmax(x, -1), [r(4, 6)]),
    "scatter": lambda r: (lambda x: x.index_add(0, torch.tensor([0, 1, 1, 2], device=DEVICE), x * 2), [r(4, 5)]),
    "cumulative": lambda r: (lambda x: x.cumsum(0).exp(), [r(6, 3)]),
    "dropout": lambda r: (lambda x: F.dropout(x, 0.5), [r(4, 6)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CHECKED)
def test_right_gradients_pass_the_check(name, dtype):
    generator = torch.Generator().manual_seed(2)
    fn, inputs = CHECKED[name](lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype))
    report = gg.gradcheck(fn, *inputs)
    assert report.verdict == "PASS", report


@pytest.mark.parametrize("kind", ["conv", "batch norm", "lstm", "gru"])
def test_right_modules_pass_the_check(kind):
    """In float32 too, and whatever PyTorch's switches allow: those of cuDNN allow TF32 by themselves."""
    torch.manual_seed(0)
    modules = {
        "conv": lambda: (nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
        "batch norm": lambda: (nn.BatchNorm1d(5), (6, 5)),
        "lstm": lambda: (nn.LSTM(5, 4), (3, 2, 5)),
        "gru": lambda: (nn.GRU(5, 4, bidirectional=True), (3, 2, 5)),
    }
    net, shape = modules[kind]()
    report = gg.gradcheck(net.to(DEVICE), torch.randn(shape).to(DEVICE))
    assert report.verdict == "PASS", report


class WrongOnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (2.02 if grad.is_cuda else 2)


@only_gpu
def test_a_backward_that_is_wrong_on_the_gpu_alone_is_found():
    x = torch.tensor([0.1, 0.7, -2.0])
    with pytest.raises(gg.errors.GradientCheckError, match="on the GPU"):
        gg.check_grad(WrongOnGpu.apply, {"x": x}, ["x"], "out")
    assert gg.gradcheck(WrongOnGpu.apply, x).verdict == "PASS"
    assert gg.gradcheck(WrongOnGpu.apply, x.cuda()).verdict == "FAIL"


# State, watching, and what lies between.


def noisy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 3)).to(DEVICE)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_snapshot_brings_back_every_bit_and_every_draw(where, tmp_path):
    net = noisy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    guard = gg.Guard(optimizer, gg.ClipByMedian(warmup=2))

    def steps(first, last):
        for step in range(first, last):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    steps(0, 4)
    snapshot = gg.Snapshot(net, optimizer, extra_state=[guard.clipper])
    snapshot.take()
    first = steps(4, 8)
    if where == "disk":
        snapshot.save(tmp_path / "kept")
        steps(8, 9)
        snapshot = gg.Snapshot.load(tmp_path / "kept", net, optimizer, extra_state=[guard.clipper])
    snapshot.restore()
    again = steps(4, 8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_clip_update():
    ours, theirs = model(), model().cpu()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    bounds = [gg.ClipUpdate(one, gg.ClipByGlobalNorm(0.5)) for one in (a, b)]
    for step in range(4):
        x, y = batch(step)
        for net, (u, v) in ((ours, (x, y)), (theirs, (x.cpu(), y.cpu()))):
            net.zero_grad()
            F.mse_loss(net(u), v).backward()
        a.step()
        b.step()
    assert len(bounds) == 2
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-3, atol=1e-5)


@only_gpu
def test_parity_of_cpu_and_gpu(tmp_path):
    net = Images()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8, generator=g), torch.randint(0, 5, (6,), generator=g)

    def step(device):
        net.to(device)
        net.zero_grad()
        F.cross_entropy(net(x.to(device)), y.to(device)).backward()

    on_cpu = gg.save_gradients(tmp_path / "cpu.safetensors", net, lambda: step("cpu"))
    on_gpu = gg.save_gradients(tmp_path / "gpu.safetensors", net, lambda: step("cuda"))
    gg.testing.assert_parity(on_cpu, on_gpu)
    net.first.weight.register_hook(lambda grad: grad * 1.2)
    wrong = gg.save_gradients(None, net, lambda: step("cuda"))
    with pytest.raises(AssertionError, match=r"first\.weight"):
        gg.testing.assert_parity(on_cpu, wrong)


def started(*arguments, cwd, starts_more=False):
    """Run Python; where there is a GPU in a process of its own, since a forked one may not use it."""
    if not GPU:
        return run_python(*arguments, cwd=cwd, starts_more=starts_more)
    ran = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3)).to({device!r})
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
for step in range(30):
    x = torch.randn(16, 12, device={device!r})
    with torch.autocast({device!r}, torch.bfloat16):
        loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    print("norm", float(norm))
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_is_watched(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(device=DEVICE))
    ran = started("-m", "gradguard", "run", "--out", "seen", "train.py", cwd=tmp_path)
    from gradguard.monitoring.record.file import read_record

    found = [step["norm"] for step in read_record(tmp_path / "seen" / "run.jsonl").steps]
    expected = [float(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("norm ")]
    assert len(expected) == 30
    assert found == pytest.approx(expected, rel=1e-3)


SCALED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3)).to({device!r})
optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.amp.GradScaler({device!r}, growth_interval=5)
for step in range(20):
    x = torch.randn(16, 12, device={device!r})
    with torch.autocast({device!r}, torch.float16):
        loss = net(x).float().square().mean() * (1e6 if step == 7 else 1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    print("seen", float(loss.detach()), float(norm))
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--resilient",), ("--audit-norm",)], ids=str)
def test_a_script_under_a_scaler_is_watched(options, tmp_path):
    (tmp_path / "train.py").write_text(SCALED.format(device=DEVICE))
    ran = started("-m", "gradguard", "run", *options, "--out", "seen", "--no-report", "train.py", cwd=tmp_path)
    from gradguard.monitoring.record.file import read_record

    steps = read_record(tmp_path / "seen" / "run.jsonl").steps
    printed = [list(map(float, line.split()[1:])) for line in ran.stdout.splitlines() if line.startswith("seen ")]
    assert len(steps) == len(printed) == 20
    for step, (loss, norm) in zip(steps, printed, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        if math.isfinite(norm):
            assert step["norm"] == pytest.approx(norm, rel=1e-3)
        else:
            assert step["skipped"], "the scaler skipped it"


@pytest.mark.slow
def test_the_gradients_of_a_script_on_the_gpu_are_those_of_the_cpu(tmp_path):
    for device in {"cpu", DEVICE}:
        (tmp_path / "train.py").write_text(
            SCRIPT.format(device=device)
            .replace(f"torch.randn(16, 12, device='{device}')", f"torch.randn(16, 12).to('{device}')")
            .replace(f"torch.autocast('{device}', torch.bfloat16)", f"torch.autocast('{device}', enabled=False)")
        )
        command = ("-m", "gradguard", "run", "--save-gradients", f"{device}.safetensors", "train.py")
        started(*command, cwd=tmp_path, starts_more=True)
    files = [tmp_path / "cpu.safetensors", tmp_path / f"{DEVICE}.safetensors"]
    report = gg.testing.assert_parity(*files)
    assert report is None or report.verdict == "PASS"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_chooses_the_gpu(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, index):
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    from gradguard.integrations.lightning import GradGuardCallback

    data = torch.utils.data.TensorDataset(torch.randn(64, 12), torch.randn(64, 3))
    for precision in ("32-true", "bf16-mixed", *(["16-mixed"] if GPU else [])):
        task = Task()
        trainer = lightning.Trainer(
            max_epochs=2,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[GradGuardCallback(gg.ClipByGlobalNorm(0.05))],
        )
        trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=16))
        assert all(bool(p.isfinite().all()) for p in task.parameters())
