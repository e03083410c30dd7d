"""Run by test_triton_kernels.py under TRITON_INTERPRET=1: the kernels on CPU tensors, against torch and the twin."""

import itertools
import math
import warnings

import torch

from gradguard.tensors import nonfinite, norms, scaling, triton_kernels, triton_plan
from gradguard.tensors.triton_plan import DeviceList
from reference import total_norm as twin_norm

SIZES = [0, 1, 3, 127, 128, 257, 600]
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


def check_nonfinite():
    for bad, n in itertools.product(BAD, [3, 300]):
        for place in {0, n - 1}:
            x = [torch.ones(5), torch.ones(n)]
            x[1][place] = bad
            got = DeviceList(x).norms()
            assert float(got[0]) == 5**0.5
            assert math.isnan(got[1]) if math.isnan(bad) else float(got[1]) == math.inf, (bad, n, place)


def check_scale():
    for dtype, c in itertools.product(triton_plan.DTYPES, [0.3, 1.0, math.nan]):
        tensors, wide = make(dtype), torch.float64 if dtype is torch.float64 else torch.float32
        factor, before = torch.tensor(c, dtype=wide), [t.clone() for t in tensors]
        versions = [t._version for t in tensors]
        DeviceList(tensors).scale_(factor)
        assert all(same(a, truncated(b.to(wide) * factor, dtype)) for a, b in zip(tensors, before, strict=True)), dtype
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
    original = triton_plan.DeviceList._launch
    triton_plan.DeviceList._launch = lambda self, k, *a, **o: (started.append(k.__name__), original(self, k, *a, **o))
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
        assert set(started) == {"partial_squares", "scale", "clamp", "zero"}, started
        assert len(started) <= 5, started
        started.clear()


if __name__ == "__main__":
    triton_kernels.CHUNK, triton_kernels.BLOCK = 256, 128  # many chunks from few elements
    check_norms()
    check_nonfinite()
    check_scale()
    check_clamp()
    check_zero()
    check_nothing_is_written_where_nothing_binds()
    check_dispatch()
    print("as torch")
