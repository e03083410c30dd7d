"""Run by test_triton_kernels.py under TRITON_INTERPRET=1: the kernels for units on CPU tensors, against the twin."""

import itertools
import math
import sys

import torch
from triton_on_cpu import BAD, Operations, same, truncated

import gradguard as gg
from gradguard.tensors import triton_kernels, triton_plan, units
from gradguard.tensors.triton_plan import UnitList
from gradguard.tensors.units import ROWS, WHOLE, UnitLayout
from reference import clip_unit
from reference import total_norm as twin_norm

UNITS = [
    ((), WHOLE), ((1,), WHOLE), ((7,), WHOLE), ((1300,), WHOLE), ((0,), WHOLE),
    ((5, 3), ROWS), ((1, 1), ROWS), ((40, 1), ROWS), ((3, 700), ROWS), ((2, 1029), ROWS), ((300, 8), ROWS),
    ((0, 3), ROWS), ((3, 0), ROWS), ((4, 3, 2, 2), ROWS), ((130, 20), ROWS),
    ((5, 3), UnitLayout(1)), ((1, 6), UnitLayout(1)), ((70, 8), UnitLayout(1)), ((3, 300), UnitLayout(1)),
    ((600, 2), UnitLayout(1)), ((6, 4, 3, 3), UnitLayout(1)), ((9, 16, 5), UnitLayout(1)),
    ((6, 4, 3), UnitLayout(1, groups=2)), ((6, 4, 8), UnitLayout(1, groups=3)), ((4, 4, 3), UnitLayout(1, groups=4)),
]  # fmt: skip
"""Shapes, and which dimension their units are along."""


def lying(tensor, how):
    """The same values elsewhere in memory."""
    if how == "turned":
        turned = tuple(reversed(range(tensor.dim())))
        return tensor.permute(turned).contiguous().permute(turned)
    if how == "channels last" and tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    if how == "shifted":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return tensor.clone()


def with_units(dtype, how, size=1.0, seed=0, every=1, first=0):
    """Of ``UNITS`` every so many, from the first: the interpreter is slow."""
    generator, some = torch.Generator().manual_seed(seed), UNITS[first % every :: every]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) * size for shape, _ in some]
    return [lying(x.to(dtype), how) for x in values], [layout for _, layout in some]


def units_of(tensor, layout):
    """The elements of each unit, one row for each: by hand, without any of our code."""
    if layout.dim is None:
        return tensor.reshape(1, -1)
    if layout.dim == 0:
        return torch.stack([x.reshape(-1) for x in tensor]) if len(tensor) else tensor.reshape(0, 0)
    per = tensor.shape[0] // layout.groups
    found = [
        tensor[g * per : (g + 1) * per, u].reshape(-1) for g in range(layout.groups) for u in range(tensor.shape[1])
    ]
    return torch.stack(found)


def listed(tensors, layouts):
    """As the dispatch does; what it leaves to torch is left out."""
    shapes = [layout.in_memory(x) for x, layout in zip(tensors, layouts, strict=True)]
    kept = [i for i, shape in enumerate(shapes) if shape is not None]
    return UnitList([tensors[i] for i in kept], [shapes[i] for i in kept]), kept


DTYPES = list(triton_plan.DTYPES)[:3]
LYING = ["as usual", "turned", "channels last", "shifted"]


def check_norms():
    for k, (size, how, dtype) in enumerate(itertools.product([1.0, 1e-25, 1e25, 0.0], LYING, DTYPES)):
        tensors, layouts = with_units(dtype, how, min(size, 6e3) if dtype is torch.float16 else size, 0, 12, k)
        taken, kept = listed(tensors, layouts)
        assert len(kept) >= len(tensors) - 3 * (how == "turned"), how
        got = taken.norms()
        torch.testing.assert_close(
            got, twins([tensors[i] for i in kept], [layouts[i] for i in kept]), rtol=3e-7, atol=0
        )
        again, _ = listed([tensors[i].clone() for i in kept], [layouts[i] for i in kept])
        assert torch.equal(got, again.norms()), "not the same bits"
    half, layouts = with_units(torch.float16, "shifted", every=3)
    both, layouts = [*half, *with_units(torch.float32, "as usual", every=3)[0]], layouts * 2
    torch.testing.assert_close(listed(both, layouts)[0].norms(), twins(both, layouts), rtol=3e-7, atol=0)


def twins(tensors, layouts):
    rows = [row for x, layout in zip(tensors, layouts, strict=True) for row in units_of(x, layout)]
    return torch.tensor([float(twin_norm([row], 2.0)) for row in rows], dtype=torch.float64)


def check_nonfinite():
    """What is bad, or leaves the range of float32 squares, changes the norm of its own unit and of no other."""
    for layout, unit, shape, place in (
        (ROWS, 5, (70, 40), (5,)),
        (UnitLayout(1), 3, (70, 40), (slice(None), 3)),
        (UnitLayout(1, 2), 7, (6, 4, 9), (slice(3, 6), 3)),
    ):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        base = listed([x], [layout])[0].norms()
        others = torch.arange(len(base)) != unit
        for bad in (*BAD, 1e30, 0.0):
            y = x.clone()
            y[5, 3] = bad
            got = listed([y], [layout])[0].norms()
            torch.testing.assert_close(got[others], base[others], rtol=3e-7, atol=0)
            want = float(twin_norm([units_of(y, layout)[unit]], 2.0))
            assert math.isnan(got[unit]) if math.isnan(want) else math.isclose(got[unit], want, rel_tol=3e-7), bad
        x[place] *= 1e-25  # beside units that are large
        got = listed([x], [layout])[0].norms()
        torch.testing.assert_close(got[others], base[others], rtol=3e-7, atol=0)
        assert math.isclose(got[unit], float(twin_norm([units_of(x, layout)[unit]], 2.0)), rel_tol=3e-7)


def check_scale():
    for k, (how, dtype) in enumerate(itertools.product(LYING, DTYPES)):
        tensors, layouts = with_units(dtype, how, every=4, first=k)
        taken, kept = listed(tensors, layouts)
        counts = [layouts[i].units(tensors[i]) for i in kept]
        factors = torch.rand(sum(counts), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        factors[::7], factors[3::11] = 1.0, math.nan
        before, versions = [tensors[i].clone() for i in kept], [tensors[i]._version for i in kept]
        taken.scale_(factors)
        for i, was, factor, version in zip(kept, before, factors.split(counts), versions, strict=True):
            want = units_of(was, layouts[i]).float() * factor.float()[:, None]
            assert same(units_of(tensors[i], layouts[i]), truncated(want, dtype)), (dtype, how, tensors[i].shape)
            assert tensors[i]._version > version


CLIPS = [
    (0.01, 1e-3, 1.0), (0.0, 1e-3, 1.0), (0.3, 0.0, 1.0), (0.5, 1e-3, 1e-25), (1e9, 1e-3, 1.0), (0.1, 1e-3, 1e25),
]  # fmt: skip
"""Threshold, eps, size of the gradients."""


def check_clip():
    """Against the slow twin; with zero weights and gradients, and a threshold of 0."""
    for k, (dtype, (threshold, eps, size)) in enumerate(itertools.product((torch.float32, torch.bfloat16), CLIPS)):
        grads, layouts = with_units(dtype, "as usual", size, every=8, first=k)
        weights, _ = with_units(dtype, "shifted", seed=1, every=8, first=k)
        for weight, grad in list(zip(weights, grads, strict=True))[::2]:
            if weight.dim() > 1 and len(weight):
                weight[0], grad[-1] = 0, 0
        before = [g.clone() for g in grads]
        norm, norms, _ = listed(grads, layouts)[0].clip_(listed(weights, layouts)[0], threshold, eps)
        assert math.isclose(norm, float(twin_norm(before, 2.0)), rel_tol=3e-7)
        torch.testing.assert_close(norms, twins(before, layouts), rtol=3e-7, atol=0)
        for grad, was, weight, layout in zip(grads, before, weights, layouts, strict=True):
            pairs = zip(units_of(weight, layout).double(), units_of(was, layout).double(), strict=True)
            want = [clip_unit(w.tolist(), g.tolist(), threshold, eps) for w, g in pairs]
            came = units_of(grad, layout).double()
            want = torch.tensor(want, dtype=torch.float64).view(came.shape)
            torch.testing.assert_close(came, want, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=0)
            if threshold == 1e9:
                assert torch.equal(grad, was)


def check_random_lists():
    """Against plain torch, with the factors bit by bit."""
    generator = torch.Generator().manual_seed(7)

    def some(n):
        return int(torch.randint(n, (), generator=generator))

    for _ in range(6):
        grads, weights, layouts = [], [], []
        for _ in range(1 + some(4)):
            groups = 1 + some(3)
            layout = [WHOLE, ROWS, UnitLayout(1), UnitLayout(1, groups)][some(4)]
            shape = [groups * (1 + some(20)), 1 + some(60), *[1 + some(5) for _ in range(some(3))]]
            values = [torch.randn(shape, generator=generator) * 10.0 ** (some(9) - 4) for _ in range(2)]
            dtype, how = DTYPES[some(3)], LYING[some(4)] if layout.groups == 1 else "shifted"
            grads, weights = [*grads, lying(values[0].to(dtype), how)], [*weights, values[1].to(dtype)]
            layouts.append(layout)
        before = [g.clone() for g in grads]
        _, norms, factors = listed(grads, layouts)[0].clip_(listed(weights, layouts)[0], 0.1, 1e-3)
        bound = listed(weights, layouts)[0].norms().clamp(min=1e-3) * 0.1
        assert torch.equal(factors, torch.where(norms > bound, bound / norms, 1.0))
        counts = [layout.units(g) for g, layout in zip(grads, layouts, strict=True)]
        each = zip(grads, before, layouts, norms.split(counts), factors.split(counts), strict=True)
        for grad, was, layout, norm, factor in each:
            rows = units_of(was, layout)
            torch.testing.assert_close(norm, rows.double().norm(dim=1), rtol=3e-7, atol=0)
            assert same(units_of(grad, layout), truncated(rows.float() * factor.float()[:, None], grad.dtype))


def check_launches():
    """Four of one clip whatever the list, three of a rule that decides first, one of factors for whole tensors."""
    started = counted()
    for repeats in (1, 3):
        grads, layouts = with_units(torch.float32, "as usual", every=6)
        weights, _ = with_units(torch.float32, "as usual", seed=1, every=6)
        grads, weights = ([x.clone() for x in some * repeats] for some in (grads, weights))
        layouts = layouts * repeats
        assert units.clip_units_(grads, weights, layouts, 0.01, 1e-3) is not None
        assert started == ["unit_squares", "unit_norms", "finish", "unit_scale"], started
        started.clear()
        norms = units.unit_norms(grads, layouts)
        units.scale_units_(grads, layouts, [torch.full_like(n, 0.5) for n in norms])
        assert started == ["unit_squares", "unit_norms", "unit_scale"], started
        started.clear()
        before = [g.clone() for g in grads]
        units.scale_each_(grads, torch.arange(len(grads), dtype=torch.float64))
        assert started == ["unit_scale"], started
        assert all(torch.equal(g, was * i) for i, (g, was) in enumerate(zip(grads, before, strict=True)))
        started.clear()


def counted():
    """The names of the kernels from now on, with those of torch's own operations inside of ``Operations``."""
    started, original = [], triton_plan._start

    def start(kernel, *arguments, **settings):
        started.append(kernel.__name__)
        Operations.in_a_kernel = True
        original(kernel, *arguments, **settings)
        Operations.in_a_kernel = False

    def are_taken(tensors, _, wide):
        return bool(tensors) and (wide or all(x.dtype is not torch.float64 for x in tensors))

    triton_plan._start, triton_plan.are_taken = start, are_taken
    return started


VIEWS = {"split_with_sizes", "permute", "detach", "unbind", "select", "unsqueeze", "expand"}


def check_launches_of_public_calls():
    """After `check_launches`. One adaptive clip is its four kernels and a rounding; no rule's launches grow."""
    for module in [m for name, m in sys.modules.items() if name.startswith("gradguard.")]:
        if hasattr(module, "are_readable"):
            module.are_readable = lambda *_: False
    started, launches = counted(), {}
    calls = {
        "clip_grad_adaptive_": lambda ps: gg.clip_grad_adaptive_([p for _, p in ps], 0.01),
        "ClipAdaptive": gg.ClipAdaptive(0.01),
        "ClipByNorm": gg.ClipByNorm(1.0),
        "AdaGC": gg.AdaGC(),
    }
    for name, count in itertools.product(calls, (3, 9)):
        named = [(str(i), torch.nn.Parameter(torch.ones(6, 4))) for i in range(count)]
        for _, parameter in named:
            parameter.grad = torch.ones(6, 4)
        calls[name](named)  # tables of their sizes are made and sent
        started.clear(), Operations.names.clear()
        with Operations():
            calls[name](named)
        launches[name, count] = len(started) + len([x for x in Operations.names if x not in VIEWS])
    assert all(launches[name, 3] == launches[name, 9] for name in calls), launches
    assert launches["clip_grad_adaptive_", 3] == 5, launches


if __name__ == "__main__":
    triton_kernels.UNIT_BLOCK, triton_kernels.UNIT_STEPS, triton_kernels.UNITS_AT_ONCE = 128, 4, 16
    check_norms()
    check_nonfinite()
    check_scale()
    check_clip()
    check_random_lists()
    check_launches()
    check_launches_of_public_calls()
    print("as torch")
