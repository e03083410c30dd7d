"""Run by test_cuda_blocks.py under TRITON_INTERPRET=1: the kernels on memory of the CPU, against torch and the twin.

As ``cuda_on_cpu.py all`` with every combination of dtypes, sizes, factors and rules; else with each of them once.
"""

import itertools
import math
import sys

import torch
from torch import nn

import gradguard as gg
import pretend_device
import reference
from gradguard.tensors import cuda_blocks, cuda_kernels, norms, scaling, units
from gradguard.tensors.cuda_blocks import CudaBlocks
from gradguard.tensors.kernels import DTYPES

SPACING = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""Between the smallest numbers."""

BAD = [math.nan, math.inf, -math.inf]


def combined(*tables):
    if sys.argv[1:] == ["all"]:
        return [*itertools.product(*tables)]
    return [tuple(table[i % len(table)] for table in tables) for i in range(max(map(len, tables)))]


def truncated(x, dtype):
    """As the interpreter converts float32 to bfloat16: it cuts bits off, where hardware rounds to nearest."""
    if dtype is torch.bfloat16 and x.dtype is torch.float32:
        return (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return x.to(dtype)


def made(dtype, size=1.0):
    """Nothing, less than a block, more than one, more than a chunk; odd starts; another order of dimensions."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(list(shape), generator=generator, dtype=torch.float64) * size).to(dtype)  # noqa: E731
    return [draw(0), draw(1), draw(261), draw(1100)[3:], draw(40)[1:], draw(9, 7).t(), draw(), draw(17, 61)]


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def check_norms():
    for dtype, size in combined(DTYPES, [1.0, 1e-30, 1e-42, 1e30, 0.0]):
        tensors = made(dtype, min(size, 6e3) if dtype is torch.float16 else size)
        rows = [1] * (len(tensors) - 1) + [17]
        parts = [*tensors[:-1], *tensors[-1]]
        for p in (2.0, math.inf):
            found = CudaBlocks(tensors, rows).norms(p)
            want = [reference.total_norm([part], p) for part in parts]
            torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)
            assert torch.equal(found, CudaBlocks(tensors[:], rows).norms(p)), "not the same bits"
            total = float(CudaBlocks(tensors, rows).norm(p))
            assert math.isclose(total, reference.total_norm(parts, p), rel_tol=1e-14)
    for bad, place, p in combined(BAD, (0, 260), (2.0, math.inf)):
        tensors = [torch.ones(5), torch.ones(261)]
        tensors[1][place] = bad
        found = CudaBlocks(tensors, [1, 1]).norms(p).tolist()
        assert found[0] == (5**0.5 if p == 2 else 1.0)
        assert math.isnan(found[1]) if math.isnan(bad) else found[1] == math.inf


def check_coefficients():
    norms = torch.tensor([0.0, 1e-300, 1e-7, 1.0, 1.7, 1e300, math.inf, math.nan], dtype=torch.float64)
    for norm, limit in itertools.product([*norms, norms, norms[::2], norms[:0]], [0.0, 0.3, 1e200]):
        assert same(cuda_blocks._coefficient(norm, limit), torch.clamp(limit / (norm + scaling.EPSILON), max=1.0))


def check_scale():
    for dtype, factor in combined(DTYPES, [0.3, 1.0, 0.0, math.nan, 1e-39, 3e-46]):
        tensors = made(dtype, 1e35 if factor and factor < 1e-30 and dtype in (torch.float32, torch.bfloat16) else 1.0)
        tensors[2][5] = math.nan
        before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
        CudaBlocks(tensors, [1] * len(tensors)).scale_(torch.tensor(factor, dtype=torch.float64))
        assert all(t._version > v for t, v in zip(tensors, versions, strict=True))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for found, was in zip(tensors, before, strict=True):
            if 0 < factor < 1e-30 and wide is torch.float32:  # in two steps: a subnormal number may be rounded twice
                want, digits = was.double() * factor, 2.0**-7 if dtype is torch.bfloat16 else 2.0**-22
                error = (found.double() - want).abs().nan_to_num(0.0)
                assert bool((error <= digits * want.abs().nan_to_num(0.0) + 1.01 * SPACING[dtype]).all())
                assert torch.equal(found.isnan(), was.isnan())
            elif factor == 1.0:  # the bits of NaN too
                assert torch.equal(found.flatten().view(torch.uint8), was.flatten().view(torch.uint8))
            else:
                assert same(found, truncated(was.to(wide) * torch.tensor(factor, dtype=wide), dtype)), (dtype, factor)


def check_clamp():
    for dtype, (low, high) in combined(DTYPES, [(-0.5, 0.5), (-0.25, 1.5), (-math.inf, 0.0)]):
        tensors = made(dtype)
        for k, t in enumerate(tensors[2:5]):
            t[len(t) // 2] = BAD[k]
        want = [t.clamp(low, high) for t in tensors]
        CudaBlocks(tensors, [1] * len(tensors)).clamp_(low, high)
        assert all(map(same, tensors, want)), (dtype, low)


def launch(device, kernel, programs, *arguments, **settings):
    """As `cuda_blocks._launch`, which hands the constants on by their order."""
    assert kernel.arg_names == [*kernel.arg_names[: len(arguments)], *settings]
    LAUNCH(device, kernel, programs, *arguments, **settings)


LAUNCH, cuda_blocks._launch = cuda_blocks._launch, launch


def check_first_use():
    assert not cuda_blocks.differs_from_torch(torch.device("cpu"), torch.float32)


class Unwrapped:
    """The kernels on a pretended device, in place of `CudaBlocks`."""

    started = 0

    def __init__(self, tensors, rows):
        self.blocks = CudaBlocks([t.held for t in tensors], rows)

    @staticmethod
    def of(tensors, rows=None, *, p=2.0, writes=False):
        if (
            p not in (2.0, math.inf)
            or len({t.dtype for t in tensors}) != 1
            or not isinstance(tensors[0], pretend_device.OnDevice)
        ):
            return None
        Unwrapped.started += 1
        blocks = Unwrapped(tensors, [1] * len(tensors) if rows is None else rows)
        return None if writes and blocks.blocks.overlaps else blocks

    def norms(self, p):
        return pretend_device.wrapped(self.blocks.norms(p))

    def norm(self, p):
        return pretend_device.wrapped(self.blocks.norm(p))

    def scale_(self, factors):
        self.blocks.scale_(factors.held)

    def clamp_(self, low, high):
        self.blocks.clamp_(low, high)


def coefficients_on_device(norm, limit):
    """In place of `cuda_blocks.coefficients_on_device`."""
    is_there = isinstance(norm, pretend_device.OnDevice) and norm.dtype is torch.float64
    return pretend_device.wrapped(cuda_blocks._coefficient(norm.held, limit)) if is_there else None


SHAPES = [(30, 40), (41,), (), (7, 3, 3, 3), (0, 4), (1, 1101), (5, 6)]


def parameters(dtype, device):
    generator, found = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.05).to(device, dtype))
        p.grad = torch.randn(shape, generator=generator).to(device, dtype)
        found.append(p)
    turned = found[3].grad.contiguous(memory_format=torch.channels_last)
    found[3].grad = turned
    return found


CLIPS = {
    "norm": (lambda ps: gg.clip_grad_norm_(ps, 1.0), 2),
    "largest": (lambda ps: gg.clip_grad_norm_(ps, 1.0, math.inf), 2),
    "value": (lambda ps: gg.clip_grad_value_(ps, 0.5), 1),
    "adaptive": (lambda ps: gg.clip_grad_adaptive_(ps, 0.01), 4),
    "adaptive, one by columns": (lambda ps: gg.ClipAdaptive(0.01)(by_columns(ps)), 4),
    "each by itself": (lambda ps: gg.ClipByNorm(1.0)(ps), 2),
    "each by itself, by the layer's average": (lambda ps: gg.AdaGC(0.9)(ps), 2),
    "all": (lambda ps: gg.ClipByGlobalNorm(1.0)(ps), 2),
    "mixed": (lambda ps: gg.clip_grad_norm_([*ps, other(ps[0])], 1.0), 4),
}


def by_columns(ps):
    layer = nn.ConvTranspose2d(7, 3, 3, bias=False)
    layer.weight, layer.rest = ps[3], nn.ParameterList(ps[:3] + ps[4:])
    return layer


def other(p):
    """A parameter of another dtype."""
    q = nn.Parameter(p.detach().double())
    q.grad = p.grad.double()
    return q


def check_clips():
    """What the kernels make of gradients on a pretended device is what gradguard makes of them on the CPU."""
    for module in (norms, scaling, units):
        module.CudaBlocks = Unwrapped
    scaling.coefficients_on_device = coefficients_on_device
    with pretend_device.Makes():
        for dtype, (name, (clip, least)) in combined((torch.float32, torch.float16), [*CLIPS.items()]):
            here, there = parameters(dtype, "cpu"), parameters(dtype, pretend_device.DEVICE)
            Unwrapped.started = 0
            wanted, found = clip(here), clip(there)
            assert Unwrapped.started >= least, (name, Unwrapped.started)
            for p, q in zip(here, there, strict=True):
                torch.testing.assert_close(q.grad.cpu(), p.grad, msg=lambda text, name=name: f"{name}: {text}")
            if isinstance(wanted, torch.Tensor):
                torch.testing.assert_close(found.cpu(), wanted)


if __name__ == "__main__":
    check_first_use()
    cuda_kernels.CHUNK, cuda_kernels.BLOCK, cuda_kernels.TERMS = 512, 128, 32  # so that short tensors have several
    cuda_blocks._cut.cache_clear()
    for check in (check_norms, check_coefficients, check_scale, check_clamp, check_clips):
        check()
    print("as torch")
