"""Run by test_triton_kernels.py under TRITON_INTERPRET=1: the kernels on CPU tensors, against torch and the twin."""

import itertools
import math
import sys
import warnings
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradguard as gg
from gradguard.tensors import nonfinite, norms, scaling, triton_kernels, triton_plan
from gradguard.tensors.triton_plan import DeviceList
from reference import total_norm as twin_norm

SIZES = [0, 1, 3, 127, 128, 257, 600]
SPACING = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""Between the smallest numbers."""

BAD = [math.nan, math.inf, -math.inf]


def truncated(x, dtype):
    """As the interpreter converts float32 to bfloat16: it cuts bits off, where hardware rounds to nearest."""
    if dtype is torch.bfloat16:
        return (x.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return x.to(dtype)


def make(dtype, size=1.0):
    torch.manual_seed(0)
    found = [(torch.randn(n, dtype=torch.float64) * size).to(dtype) for n in SIZES]
    return [*found, torch.randn(40).to(dtype)[1:], torch.randn(9, 7).to(dtype).t(), torch.randn(()).to(dtype)]


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def check_norms():
    for dtype, size in itertools.product(triton_plan.DTYPES, [1.0, 1e-30, 1e30, 0.0]):
        if dtype is torch.float64:
            continue
        tensors = make(dtype, min(size, 6e3) if dtype is torch.float16 else size)
        got = DeviceList(tensors).norms()
        want = [float(twin_norm([t], 2.0)) for t in tensors]
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=2e-7, atol=0)
        assert torch.equal(got, DeviceList(tensors).norms()), "not the same bits"
        again = [t.clone() for t in tensors]
        assert torch.equal(got, DeviceList(again).norms()), "not the same bits at other addresses"
    mixed = [t for d in list(triton_plan.DTYPES)[:3] for t in make(d)]
    want = torch.tensor([float(twin_norm([t], 2.0)) for t in mixed], dtype=torch.float64)
    torch.testing.assert_close(DeviceList(mixed).norms(), want, rtol=2e-7, atol=0)


def check_norm_of_all():
    for dtype, size in itertools.product(list(triton_plan.DTYPES)[:3], [1.0, 1e-30, 1e30]):
        tensors = make(dtype, min(size, 6e3) if dtype is torch.float16 else size)
        for some in (tensors, tensors[::-1], tensors[:1], tensors[1:2], tensors[2:5]):
            want = float(twin_norm(some, 2.0))
            assert math.isclose(float(DeviceList(some).norm()), want, rel_tol=2e-7), (dtype, size)
    mixed = [t for d in list(triton_plan.DTYPES)[:3] for t in make(d)]
    assert math.isclose(float(DeviceList(mixed).norm()), float(twin_norm(mixed, 2.0)), rel_tol=2e-7)
    for bad in BAD:
        got = float(DeviceList([*mixed, torch.tensor([bad])]).norm())
        assert math.isnan(got) if math.isnan(bad) else got == math.inf, bad


def check_coefficients():
    """The bits that torch gives, in one dimension and in none, at the edges too."""
    torch.manual_seed(1)
    odd = torch.tensor([0.0, 1e-300, 1e-7, 1.0, 1e300, math.inf, math.nan], dtype=torch.float64)
    norms = torch.cat([odd, torch.rand(600, dtype=torch.float64) * 3])
    for limit, some in itertools.product([0.0, 1e-30, 0.3, 1.0, 2.0, 1e200], [norms, norms[:1], norms[10], norms[:0]]):
        want = torch.clamp(limit / (some + scaling.EPSILON), max=1.0)
        assert same(triton_plan._coefficients(some, limit), want), limit


def check_nonfinite():
    for bad, n in itertools.product(BAD, [3, 300]):
        for place in {0, n - 1}:
            x = [torch.ones(5), torch.ones(n)]
            x[1][place] = bad
            got = DeviceList(x).norms()
            assert float(got[0]) == 5**0.5
            assert math.isnan(got[1]) if math.isnan(bad) else float(got[1]) == math.inf, (bad, n, place)


def check_scale():
    for dtype, c in itertools.product(triton_plan.DTYPES, [0.3, 1.0, math.nan, 1e-39, 3e-46]):
        tensors, wide = make(dtype), torch.float64 if dtype is torch.float64 or c < 1e-38 else torch.float32
        if c < 1e-38 and dtype in (torch.float32, torch.bfloat16):
            for t in tensors:
                t.mul_(1e35)
        factor, before = torch.tensor(c, dtype=wide), [t.clone() for t in tensors]
        versions = [t._version for t in tensors]
        DeviceList(tensors).scale_(factor)
        for came, was in zip(tensors, before, strict=True):
            if c < 1e-38 and dtype is not torch.float64:  # in two steps: a subnormal number may be rounded twice
                want, spacing = was.double() * c, SPACING[dtype]
                error, digits = (came.double() - want).abs(), 2.0**-7 if dtype is torch.bfloat16 else 2.0**-22
                assert bool((error <= digits * want.abs() + 1.01 * spacing).all()), (dtype, c)
            else:
                assert same(came, truncated(was.to(wide) * factor, dtype)), (dtype, c)
        assert all(t._version > v for t, v in zip(tensors, versions, strict=True))


def check_clamp():
    for dtype, (low, high) in itertools.product(triton_plan.DTYPES, [(-0.5, 0.5), (-0.25, 1.5), (-9.0, math.inf)]):
        tensors = make(dtype)
        for k, t in enumerate(tensors):
            if t.dim() == 1 and len(t) > 3:
                t[len(t) // 2] = BAD[k % 3]
        want = [t.clamp(low, high) for t in tensors]
        DeviceList(tensors).clamp_(low, high)
        assert all(map(same, tensors, want)), (dtype, low)


def check_zero():
    for flag in (True, False):
        tensors = make(torch.bfloat16)
        tensors[4][3] = math.nan
        want = [torch.zeros_like(t) if flag else t.clone() for t in tensors]
        DeviceList(tensors).zero_(torch.tensor(flag))
        assert all(map(same, tensors, want)), flag


def check_nothing_is_written_where_nothing_binds():
    """Memory that may only be read says so: a store would end the process."""
    import mmap

    room = mmap.mmap(-1, 4 * 2048, prot=mmap.PROT_READ)
    with warnings.catch_warnings(action="ignore"):
        x = torch.frombuffer(memoryview(room), dtype=torch.float32)
    DeviceList([x]).scale_(torch.ones(()))
    DeviceList([x]).clamp_(-1.0, 1.0)
    DeviceList([x]).zero_(torch.tensor(False))


def check_dispatch():
    """What the public functions do with lists that the kernels take; each launch is counted."""
    started = []
    original = triton_plan._start
    triton_plan._start = lambda k, *a, **o: (started.append(k.__name__), original(k, *a, **o))
    triton_plan.DeviceList.of = staticmethod(lambda tensors, writes=False: DeviceList(tensors) if tensors else None)
    for module in (norms, scaling, nonfinite):
        module.are_readable = lambda *_: False
    for count in (3, 12):
        tensors = [torch.full((20,), 2.0) for _ in range(count)]
        assert abs(float(norms.total_norm(tensors)) / (80 * count) ** 0.5 - 1) < 1e-12
        scaling.scale_(tensors, torch.tensor(0.5, dtype=torch.float64))
        scaling.clamp_(tensors, -0.75, 0.75)
        assert all(t.eq(0.75).all() for t in tensors)
        nonfinite.zero_if_nonfinite_(torch.tensor(math.nan), tensors)
        assert not any(t.any() for t in tensors)
        assert started == ["partial_squares", "finish", "scale", "clamp", "zero"], started
        started.clear()


def check_counts():
    for dtype in triton_plan.DTYPES:
        tensors = make(dtype)
        for k, x in enumerate(tensors):
            flat = x.view(-1) if x.is_contiguous() else x.t().view(-1)
            flat[: k % 4 * 40 : 2] = math.nan
            flat[1 : k % 3 * 60 : 3] = (-1) ** k * math.inf
        want = [[int(x.isnan().sum()), int(x.isinf().sum())] for x in tensors]
        assert DeviceList(tensors).nonfinite().tolist() == want, dtype
    mixed = [t for d in triton_plan.DTYPES for t in make(d)][::-1]
    mixed[3].fill_(math.nan), mixed[-5].fill_(math.inf)
    assert DeviceList(mixed).nonfinite().tolist() == [[int(x.isnan().sum()), int(x.isinf().sum())] for x in mixed]


class Operations(TorchDispatchMode):
    """What torch itself starts beside the kernels, whose interpreter uses torch too."""

    names: ClassVar[list[str]] = []
    in_a_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not self.in_a_kernel and name not in ("lift_fresh", "empty", "empty_like", "view", "slice"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def check_launches_of_a_clip():
    """Five launches of one norm clip whatever the list: four kernels, and the norm rounded to the gradients' dtype.

    After `check_dispatch`. The addresses are copied twice, which is no kernel; here they need no copy.
    """
    for module in [
        m for name, m in sys.modules.items() if name.startswith("gradguard.") and hasattr(m, "are_readable")
    ]:
        module.are_readable = lambda *_: False
    scaling.coefficients_on_device = triton_plan._coefficients
    started, original = [], triton_plan._start

    def start(kernel, *arguments, **settings):
        started.append(kernel.__name__)
        Operations.in_a_kernel = True
        original(kernel, *arguments, **settings)
        Operations.in_a_kernel = False

    triton_plan._start = start
    for count, max_norm in itertools.product((3, 40), (1.0, 1e9)):
        parameters = [torch.nn.Parameter(torch.zeros(24)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.full((24,), 2.0)
        gg.clip_grad_norm_(parameters, 2 * max_norm)  # tables of their sizes are made and sent
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))
        started.clear(), Operations.names.clear()
        with Operations():
            came = gg.clip_grad_norm_(parameters, max_norm)
        after = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))
        assert math.isclose(float(came), norm, rel_tol=1e-6)
        assert math.isclose(after, min(norm, max_norm), rel_tol=1e-5), (after, norm, max_norm)
        assert started == ["partial_squares", "finish", "coefficient", "scale"], started
        assert Operations.names == ["_to_copy"], Operations.names


if __name__ == "__main__":
    triton_kernels.CHUNK, triton_kernels.BLOCK = 256, 128  # many chunks from few elements
    check_norms()
    check_norm_of_all()
    check_coefficients()
    check_nonfinite()
    check_counts()
    check_scale()
    check_clamp()
    check_zero()
    check_nothing_is_written_where_nothing_binds()
    check_dispatch()
    check_launches_of_a_clip()
    print("as torch")
